"""Imports that are taken back: their parts of winner records, what they found wrong, and their jobs, a part at a time.

From the moment that it is marked, an import counts in no record that is made anew; one that was interrupted is gone on
with by the reconciler (`storage.endings`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Select, String, and_, cast, delete, exists, func, or_, select, update

from cukiln.types import ImportPage, ImportReport
from storage.cursors import make_cursor, read_cursor
from storage.database import Database, Session, clock_of
from storage.new_items import FINISH
from storage.record_parts import keys_with, rejoin
from storage.rows import core, one_of
from storage.tables import (
    BuildRow,
    CandidateRow,
    ImportedFindingRow,
    ImportedWinnerRow,
    ImportRow,
    ItemRow,
    JobProblemRow,
    JobRow,
)

RECORDS_AT_ONCE = 50
"""Of one transaction: each is read, joined and written, about a millisecond."""
ROWS_AT_ONCE = 500

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
            return _bound(part, import_id)
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


def sender_of(session: Session, import_id: str) -> str | None:
    """The id of the key that sent it; None: CUKILN_API_KEY, or loopback without keys."""
    return session.scalar(select(ImportRow.key).where(ImportRow.id == import_id))


def _reports() -> Select[Any]:
    records = select(func.count()).where(ImportedWinnerRow.import_id == ImportRow.id).correlate(ImportRow)
    row = core(ImportRow).c
    return select(
        *(column for column in row if column.name not in ("key", "created_at")),
        row.created_at.label("imported_at"),
        records.scalar_subquery().label("records"),
    )


def _bound(part: Callable[[Session, str], None], import_id: str) -> Part:
    return lambda session: part(session, import_id)


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
    """Its candidates with their builds, then its items, problems and job."""
    candidate, problem = core(CandidateRow), core(JobProblemRow).c
    problems = select(problem.id).where(problem.job_id == import_id)
    rows = session.execute(
        select(candidate.c.job_problem_id, candidate.c.candidate, candidate.c.build)
        .where(candidate.c.job_problem_id.in_(problems))
        .limit(ROWS_AT_ONCE)
    ).all()
    these = one_of((candidate.c.job_problem_id, candidate.c.candidate), [row[:2] for row in rows])
    session.execute(delete(candidate).where(these))
    build = core(BuildRow).c
    unused = ~exists().where(candidate.c.build == build.id)
    session.execute(delete(core(BuildRow)).where(build.id.in_({row.build for row in rows}), unused))
    if len(rows) < ROWS_AT_ONCE:
        # SQLite gives the id of a problem that is gone to the next one, whose work is found by it.
        refs = select(cast(problem.id, String)).where(problem.job_id == import_id)
        session.execute(delete(core(ItemRow)).where(core(ItemRow).c.kind == FINISH, core(ItemRow).c.ref.in_(refs)))
        session.execute(delete(core(JobRow)).where(core(JobRow).c.id == import_id))
