"""Imports that are withdrawn: their parts of winner records, their failures, and their jobs, a part at a time. Once
marked, an import counts in no record that is made anew; the reconciler takes up what was interrupted."""

from collections.abc import Callable
from functools import partial
from typing import Any

from sqlalchemy import Select, and_, exists, func, select

from cukiln.types import ImportPage, ImportReport
from storage.database.pages import read_page
from storage.database.session import Database, Session, clock_of
from storage.database.sql import change, core, remove
from storage.database.tables import ImportedFindingRow, ImportedWinnerRow, ImportRow, JobRow, TaskJobRow
from storage.entities.record_parts import keys_with, rejoin
from storage.maintenance.retention import remove_part

IMPORT_SECONDS = 600.0
"""After these an import that is not whole was interrupted."""
RECORDS_AT_ONCE = 50
"""Of one transaction: each is read, joined and written, about a millisecond."""

Part = Callable[[Session], None]


def withdraw_import(session: Session, import_id: str) -> None:
    """Mark it; `clear_withdrawn` removes it from the records."""
    standing = (ImportRow.id == import_id) & ImportRow.withdrawn_at.is_(None)
    change(session, ImportRow, standing, withdrawn_at=clock_of(session).now())


def clear_withdrawn(database: Database) -> None:
    """Remove all that withdrawn imports have left, in short transactions."""
    database.in_parts(find_withdrawn)


def find_broken_off(session: Session) -> Part | None:
    """What is to be done next about imports that were interrupted, or whose withdrawal was; None where nothing is."""
    return _half_imported(session, clock_of(session).now()) or find_withdrawn(session)


def find_withdrawn(session: Session) -> Part | None:
    """What is to be removed next; None where all is."""
    left = ((ImportedWinnerRow.import_id, _records), (ImportedFindingRow.import_id, _findings), (JobRow.id, _job))
    for of, part in left:
        withdrawn = select(ImportRow.id).where(ImportRow.withdrawn_at.is_not(None), exists().where(of == ImportRow.id))
        if (import_id := session.scalar(withdrawn.limit(1))) is not None:
            return partial(_if_withdrawn, part=part, import_id=import_id)
    return None


def _if_withdrawn(session: Session, part: Callable[[Session, str], None], import_id: str) -> None:
    """It may have been sent again since it was found."""
    if session.scalar(select(ImportRow.withdrawn_at).where(ImportRow.id == import_id)) is not None:
        part(session, import_id)


def list_imports(session: Session, *, limit: int = 50, cursor: str | None = None) -> ImportPage:
    """Every import, the newest first. Raises `BadCursor`."""
    row = core(ImportRow).c
    key = (row.created_at.label("imported_at"), row.id)
    rows, next_cursor = read_page(session, _reports(), key, (float, str), limit, cursor, descending=True)
    return ImportPage(imports=[ImportReport(**row) for row in rows], next_cursor=next_cursor)


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
    row = ImportedWinnerRow
    keys = session.scalars(select(row.key).where(row.import_id == import_id).limit(RECORDS_AT_ONCE)).all()
    remove(session, row, row.import_id == import_id, row.key.in_(keys))
    rejoin(session, keys)


def _findings(session: Session, import_id: str) -> None:
    row = ImportedFindingRow
    codes = session.scalars(select(row.code_digest).where(row.import_id == import_id).limit(RECORDS_AT_ONCE)).all()
    remove(session, row, row.import_id == import_id, row.code_digest.in_(codes))
    rejoin(session, keys_with(session, codes))


def _job(session: Session, import_id: str) -> None:
    remove_part(session, core(JobRow).c.id == import_id, with_builds=True)


def _half_imported(session: Session, now: float) -> Part | None:
    """A job that was not imported as a whole: it is withdrawn, unless the import continues after all."""
    nothing_to_do = ~exists().where(TaskJobRow.job_id == JobRow.id)
    half = and_(JobRow.state == "queued", JobRow.created_at < now - IMPORT_SECONDS, nothing_to_do)
    standing = exists().where(ImportRow.id == JobRow.id, ImportRow.withdrawn_at.is_(None))
    job_id = session.scalar(select(JobRow.id).where(half, standing).limit(1))
    if job_id is None:
        return None

    def part(session: Session) -> None:
        if session.scalar(select(JobRow.id).where(JobRow.id == job_id, half)) is not None:
            withdraw_import(session, job_id)

    return part
