"""Stored results of a build or a winner are deleted on request, so that the next job tries again: how it compiled, the
verdicts on its slice and its code, and the times of its code. What a live job needs stays."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, or_, select

from cukiln.types import Forgotten
from storage.database.session import Database, Session
from storage.database.sql import chunks, core, one_of, remove
from storage.database.tables import (
    BUILT,
    COMPILE_FAILURES,
    LIVE,
    BuildRow,
    CandidateRow,
    JobProblemRow,
    LibraryRow,
    MeasurementRow,
    PendingBuildRow,
    VerdictRow,
)
from storage.entities.record_parts import withdraw_record
from storage.entities.verdicts import LIMITED
from storage.entities.winners import get_winners

BUILDS_AT_ONCE = 200
"""Of one transaction."""


@dataclass(frozen=True)
class _Sorted:
    """Builds that may be forgotten, as rows, and ids of those that a live job needs."""

    free: Sequence[Any]
    in_use: list[str]

    @property
    def codes(self) -> list[str]:
        return sorted({row.code_digest for row in self.free if row.code_digest is not None})

    @property
    def subjects(self) -> list[str]:
        """Of verdicts."""
        return sorted({*self.codes, *(row.slice for row in self.free)})


def forget_builds(session: Session, ids: Collection[str]) -> Forgotten:
    """Forget these builds, with the verdicts and times of their slices and code."""
    builds = _sort(session, ids)
    verdict, measurement, build = core(VerdictRow).c, core(MeasurementRow).c, core(BuildRow).c
    forgotten = sorted(row.id for row in builds.free)
    remove(session, BuildRow, build.id.in_(forgotten))
    return Forgotten(
        builds=forgotten,
        verdicts=remove(session, VerdictRow, verdict.subject.in_(builds.subjects)),
        measurements=remove(session, MeasurementRow, measurement.code_digest.in_(builds.codes)),
        in_use=builds.in_use,
    )


def forget_winner(session: Session, key: str) -> Forgotten | None:
    """Forget a record with its kernels' libraries, builds, verdicts, times. None: no record answers under the key."""
    record = get_winners(session, [key]).get(key)
    if record is None:
        return None
    withdraw_record(session, key)
    build, library = core(BuildRow).c, core(LibraryRow).c
    of_front = or_(
        *(and_(build.kernel == entry.kernel, build.code_digest == entry.code_digest) for entry in record.front)
    )
    forgotten = forget_builds(session, session.scalars(select(build.id).where(of_front)).all())
    libraries = remove(session, LibraryRow, library.library.in_([entry.so_sha256 for entry in record.front]))
    return forgotten.model_copy(update={"key": key, "libraries": libraries})


def forget_limited(database: Database, job_id: str) -> None:
    """Forget what a limit ended of the job's candidates: compiles, and verdicts of their builds."""
    candidate, problem = core(CandidateRow).c, core(JobProblemRow).c
    ended = candidate.verdict.in_((*COMPILE_FAILURES, *LIMITED))
    query = select(candidate.build).join(core(JobProblemRow), problem.id == candidate.job_problem_id)
    with database.read() as session:
        ids = session.scalars(query.where(problem.job_id == job_id, ended).distinct()).all()
    for some in chunks(ids, BUILDS_AT_ONCE):
        with database.write() as session:
            _forget_limited(session, some)
        database.pause()


def _forget_limited(session: Session, ids: Collection[str]) -> None:
    build, verdict = core(BuildRow).c, core(VerdictRow).c
    stopped = or_(build.state == "compile_timeout", build.reached.is_not(None))
    forget_builds(session, session.scalars(select(build.id).where(build.id.in_(ids), stopped)).all())
    key = (verdict.subject, verdict.venue, verdict.plan_version)
    subjects = _sort(session, ids).subjects
    rows = session.execute(
        select(*key, verdict.verdict, verdict.details).where(
            verdict.subject.in_(subjects), verdict.verdict.in_(LIMITED)
        )
    )
    limited = [tuple(row[:3]) for row in rows if row.verdict == "run_timeout" or row.details.get("limit")]
    remove(session, VerdictRow, one_of(key, limited))


def _sort(session: Session, ids: Collection[str]) -> _Sorted:
    """A live job needs a build that one of its candidates names, and any other with that slice or code."""
    build, pending_build = core(BuildRow).c, core(PendingBuildRow).c
    unended = build.state.not_in(BUILT) | exists().where(pending_build.build == build.id)
    needed = or_(unended, _is_needed("slice"), _is_needed("code_digest"))
    rows = session.execute(
        select(build.id, build.slice, build.code_digest, needed.label("needed")).where(build.id.in_(ids))
    ).all()
    return _Sorted([row for row in rows if not row.needed], sorted(row.id for row in rows if row.needed))


def _is_needed(column: str) -> ColumnElement[bool]:
    """Whether a candidate of a live problem names a build with the same slice, or code."""
    alike, candidate, problem = (core(table).alias() for table in (BuildRow, CandidateRow, JobProblemRow))
    return exists().where(
        alike.c[column] == core(BuildRow).c[column],
        candidate.c.build == alike.c.id,
        problem.c.id == candidate.c.job_problem_id,
        problem.c.state.in_(LIVE),
    )
