"""The libraries of winners: one kernel built alone, so that another problem with the same kernel need not build it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import select

from storage.database.session import Session, clock_of
from storage.database.sql import change, core, insert_new, remove, rows_among
from storage.database.tables import LibraryBuilderRow, LibraryRow, TaskRow
from storage.queue.tasks import Lease

Library = LibraryRow

FILES_OF_LIBRARIES = ("library", "cubin", "source", "ptx", "sass")
PUBLISHED_AS = ("ok", "untranslated")
"""Verdicts on PTX whose kernel may be published: nothing is wrong, or nothing is known."""


@dataclass(frozen=True)
class PtxVerdict:
    """What a library's PTX showed on the CPU. `verdict`: `workers.cpu.verify.Verdict`; `plan_version`: of what
    verified it; seconds are g++'s and the run's; `promised`: `cukiln.types.PromisedOutput` as JSON."""

    verdict: str
    message: str
    plan_version: str
    seed: int
    wall_seconds: float
    cpu_seconds: float
    promised: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_published(self) -> bool:
        return self.verdict in PUBLISHED_AS


def files_of(library: Library) -> list[str]:
    """Digests of the files that it has."""
    return [digest for name in FILES_OF_LIBRARIES if (digest := getattr(library, name)) is not None]


def find_library(session: Session, library_id: str) -> Library | None:
    return session.get(LibraryRow, library_id)


def libraries_of(session: Session, library_ids: Iterable[str]) -> dict[str, str]:
    """Digests of the libraries themselves, by their ids, of those there are."""
    return dict(rows_among(session, select(LibraryRow.id, LibraryRow.library), LibraryRow.id, library_ids))


def forget_library(session: Session, library_id: str) -> None:
    """For a library whose bytes were lost: the next one of this id is stored instead."""
    remove(session, LibraryRow, LibraryRow.id == library_id)


def add_library(session: Session, **library: Any) -> Library:
    """Store a library, by the columns of its row; the first one of an id stays."""
    values = {**library, "created_at": clock_of(session).now()}
    insert_new(session, LibraryRow, [values])
    return LibraryRow(**values)


def ptx_verdict(session: Session, ptx: str, plan_version: str) -> PtxVerdict | None:
    """On this PTX (its digest), of whichever library has it: they differ in their launch code alone."""
    library = core(LibraryRow).c
    query = select(library.ptx_verdict).where(library.ptx == ptx, library.ptx_verdict.is_not(None))
    verdicts = (PtxVerdict(**verdict) for verdict in session.scalars(query))
    return next((verdict for verdict in verdicts if verdict.plan_version == plan_version), None)


def write_ptx_verdict(session: Session, ptx: str, verdict: PtxVerdict) -> None:
    """For all libraries that have this PTX now."""
    change(session, LibraryRow, LibraryRow.ptx == ptx, ptx_verdict=asdict(verdict))


def wrong_ptx(session: Session, digests: Iterable[str]) -> set[str]:
    """Those of the PTX whose last verdict refuses them."""
    library = core(LibraryRow).c
    query = select(library.ptx, library.ptx_verdict).where(library.ptx_verdict.is_not(None))
    rows = rows_among(session, query, LibraryRow.ptx, digests)
    return {ptx for ptx, verdict in rows if not PtxVerdict(**verdict).is_published}


def library_builder(session: Session, library_id: str) -> str | None:
    """The token of the attempt that builds this library; one that died ends with its lease."""
    row, task = core(LibraryBuilderRow), core(TaskRow)
    lives = (task.c.id == row.c.task_id) & (task.c.token == row.c.token) & (task.c.state == "leased")
    return session.scalars(select(row.c.token).join(task, lives).where(row.c.library == library_id)).one_or_none()


def start_library(session: Session, library_id: str, lease: Lease) -> bool:
    """Whether the attempt may build this library now: no other live attempt does."""
    builder = library_builder(session, library_id)
    if builder is not None:
        return builder == lease.token
    remove(session, LibraryBuilderRow, LibraryBuilderRow.library == library_id)
    insert_new(session, LibraryBuilderRow, [{"library": library_id, "task_id": lease.task_id, "token": lease.token}])
    return True


def end_library(session: Session, library_id: str, lease: Lease) -> None:
    """The attempt is done with it, whether there is a library now or not."""
    its = (LibraryBuilderRow.library == library_id) & (LibraryBuilderRow.token == lease.token)
    remove(session, LibraryBuilderRow, its)
