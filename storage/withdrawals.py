"""Imports that are taken back: their parts of winner records, what they found wrong, and their jobs, a part at a time.

From the moment that it is marked, an import counts in no record that is made anew; one that was interrupted is gone on
with by the reconciler (`storage.endings`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy import Select, and_, delete, exists, func, or_, select, update

from cukiln.types import ImportPage, ImportReport
from storage.cursors import make_cursor, read_cursor
from storage.database import Database, Session, clock_of
from storage.record_parts import keys_with, rejoin
from storage.retention import remove_part
from storage.rows import core
from storage.tables import ImportedFindingRow, ImportedWinnerRow, ImportRow, JobRow

RECORDS_AT_ONCE = 50
"""Of one transaction: each is read, joined and written, about a millisecond."""

Part = Callable[[Session], None]


def withdraw_import(session: Session, import_id: str) -> None:
    """Let it count no more; `clear_withdrawn` takes it out of the records."""
    standing = (ImportRow.id == import_id) & ImportRow.withdrawn_at.is_(None)
    session.execute(update(core(ImportRow)).where(standing).values(withdrawn_at=clock_of(session).now()))


def clear_withdrawn(database: Database) -> None:
    """Take out all that withdrawn imports have left, in short transactions."""
    while True:
        with database.read() as session:
            part = find_withdrawn(session)
        if part is None:
            return
        with database.write() as session:
            part(session)
        database.pause()


def find_withdrawn(session: Session) -> Part | None:
    """What is to be taken out next; None where all is."""
    left = ((ImportedWinnerRow.import_id, _records), (ImportedFindingRow.import_id, _findings), (JobRow.id, _job))
    for of, part in left:
        withdrawn = select(ImportRow.id).where(ImportRow.withdrawn_at.is_not(None), exists().where(of == ImportRow.id))
        if (import_id := session.scalar(withdrawn.limit(1))) is not None:
            return partial(part, import_id=import_id)
    return None


def list_imports(session: Session, *, limit: int = 50, cursor: str | None = None) -> ImportPage:
    """Every import, the newest first. Raises `BadCursor`."""
    query = _reports().order_by(ImportRow.created_at.desc(), ImportRow.id.desc()).limit(limit + 1)
    if cursor is not None:
        at, after = read_cursor(cursor, (float, str))
        same = and_(ImportRow.created_at == at, ImportRow.id < after)
        query = query.where(or_(ImportRow.created_at < at, same))
    rows = session.execute(query).mappings().all()
    shown = [ImportReport(**row) for row in rows[:limit]]
    more = len(rows) > limit
    return ImportPage(imports=shown, next_cursor=make_cursor(shown[-1].imported_at, shown[-1].id) if more else None)


def import_report(session: Session, import_id: str) -> ImportReport | None:
    """One of them."""
    row = session.execute(_reports().where(ImportRow.id == import_id)).mappings().one_or_none()
    return None if row is None else ImportReport(**row)


def find_import(session: Session, import_id: str) -> ImportRow | None:
    return session.get(ImportRow, import_id)


def _reports() -> Select[Any]:
    records = select(func.count()).where(ImportedWinnerRow.import_id == ImportRow.id).correlate(ImportRow)
    row = core(ImportRow).c
    return select(
        *(column for column in row if column.name not in ("key", "created_at")),
        row.created_at.label("imported_at"),
        records.scalar_subquery().label("records"),
    )


def _records(session: Session, import_id: str) -> None:
    table = core(ImportedWinnerRow)
    mine = table.c.import_id == import_id
    keys = session.scalars(select(table.c.key).where(mine).limit(RECORDS_AT_ONCE)).all()
    session.execute(delete(table).where(mine, table.c.key.in_(keys)))
    rejoin(session, keys)


def _findings(session: Session, import_id: str) -> None:
    table = core(ImportedFindingRow)
    mine = table.c.import_id == import_id
    codes = session.scalars(select(table.c.code_digest).where(mine).limit(RECORDS_AT_ONCE)).all()
    session.execute(delete(table).where(mine, table.c.code_digest.in_(codes)))
    rejoin(session, keys_with(session, codes))


def _job(session: Session, import_id: str) -> None:
    remove_part(session, core(JobRow).c.id == import_id, with_builds=True)
