"""Retention: what ended long ago, and nothing needs any more, is removed.

```
jobs with problems and candidates ─► tasks ─► builds ─► groups ─► verdicts, measurements ─► libraries ─► rows of blobs
```
Each is removed only when nothing of what is before it needs it. Winner records stay, with their files and the times of
their code; so does what a GPU found wrong. Bytes go last, when no row names them (`BlobStore.sweep`). Conditions
are evaluated again in each transaction, which is short; workers continue meanwhile.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import (
    ColumnElement,
    FromClause,
    Table,
    and_,
    delete,
    exists,
    func,
    or_,
    select,
    union_all,
    update,
)

from storage.blobs.blob_store import SWEEP_AGE
from storage.database.pages import pages
from storage.database.session import Database, Session, clock_of
from storage.database.sql import chunks, core, one_of, remove
from storage.database.tables import (
    ABANDONED,
    ACCEPTING,
    BUILT,
    LIVE,
    BlobRow,
    BuildRow,
    CandidateRow,
    GroupRow,
    JobProblemRow,
    JobRow,
    LibraryRow,
    MeasurementRow,
    PendingBuildRow,
    TaskJobRow,
    TaskRow,
    VerdictRow,
    WinnerUseRow,
)
from storage.entities.groups import FILES_OF_GROUPS
from storage.entities.libraries import FILES_OF_LIBRARIES
from storage.entities.task_kinds import COMPARE, FINISH
from storage.entities.verdicts import GPU
from storage.queue.new_tasks import UNENDED

LEAST_SECONDS = 3600.0
"""What ended within this time stays, however much room is asked for."""
ROWS_AT_ONCE = 500
PROBLEMS_AT_ONCE = 100
"""Of one transaction; with their candidates gone."""
ACCEPT_SECONDS = 600.0
"""After these the acceptance of a large job was interrupted."""


@dataclass(frozen=True)
class Keep:
    """`seconds`: what ended before is removed; with more `bytes` of blobs, later ones too, as far as LEAST_SECONDS."""

    seconds: float
    bytes: int | None = None


@dataclass(frozen=True)
class Removed:
    """Counts of rows; `bytes` of the blobs."""

    jobs: int = 0
    candidates: int = 0
    tasks: int = 0
    builds: int = 0
    groups: int = 0
    verdicts: int = 0
    measurements: int = 0
    libraries: int = 0
    blobs: int = 0
    bytes: int = 0

    def __add__(self, other: "Removed") -> "Removed":
        return Removed(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def collect(database: Database, keep: Keep) -> Iterator[Removed]:
    """Remove it, a short transaction between two results; may stop at any of them, and begin again."""
    for before in _cutoffs(database, keep):
        yield from _collect_older(database, before)
        if keep.bytes is None or _bytes_of_blobs(database) <= keep.bytes:
            return


def survey(database: Database, keep: Keep) -> Removed:
    """What `collect` would remove now."""
    removable = Removed()
    for before in _cutoffs(database, keep):
        with database.read() as session:
            removable = _count_older(session, before, database.clock.now() - SWEEP_AGE)
        if keep.bytes is None or _bytes_of_blobs(database) - removable.bytes <= keep.bytes:
            break
    return removable


def _cutoffs(database: Database, keep: Keep) -> Iterator[float]:
    """Ever later ones."""
    now, seconds = database.clock.now(), max(keep.seconds, LEAST_SECONDS)
    yield now - seconds
    while seconds > LEAST_SECONDS:
        seconds = max(seconds / 2, LEAST_SECONDS)
        yield now - seconds


def _bytes_of_blobs(database: Database) -> int:
    with database.read() as session:
        return int(session.scalar(select(func.sum(BlobRow.size))) or 0)


def _count_older(session: Session, before: float, put_before: float) -> Removed:
    def count(table: Table, which: ColumnElement[bool]) -> int:
        return session.scalar(select(func.count()).select_from(table).where(which)) or 0

    job, problem, candidate, blob = (core(table) for table in (JobRow, JobProblemRow, CandidateRow, BlobRow))
    of_jobs = candidate.join(problem, problem.c.id == candidate.c.job_problem_id).join(
        job, job.c.id == problem.c.job_id
    )
    sizes = select(func.count(), func.coalesce(func.sum(blob.c.size), 0)).where(_is_free_blob(before, put_before))
    blobs, size = session.execute(sizes).one()
    return Removed(
        jobs=count(job, _is_old_job(job, before)),
        candidates=session.scalar(select(func.count()).select_from(of_jobs).where(_is_old_job(job, before))) or 0,
        **{name: count(table, which) for name, table, which in _steps(before)},
        blobs=blobs,
        bytes=size,
    )


def _collect_older(database: Database, before: float) -> Iterator[Removed]:
    job = core(JobRow)
    for page in pages(database, select(job.c.id).where(_is_old_job(job, before)), [job.c.id], ROWS_AT_ONCE):
        for (job_id,) in page:
            yield from _remove_job(database, job_id, before)
    for name, table, which in _steps(before):
        key = list(table.primary_key.columns)
        for page in pages(database, select(*key).where(which), key, ROWS_AT_ONCE):
            yield Removed(**{name: _delete(database, table, page, which)})
    yield from remove_blobs(database, before)


def _steps(before: float) -> list[tuple[str, Table, ColumnElement[bool]]]:
    """In order: name, table, and what of it is not needed once the older jobs are gone."""
    tables = (TaskRow, BuildRow, GroupRow, VerdictRow, MeasurementRow, LibraryRow)
    task, build, group, verdict, measurement, library = (core(table) for table in tables)
    return [
        ("tasks", task, _is_free_task(task, before)),
        ("builds", build, _is_free_build(build, before)),
        ("groups", group, _is_free_group(group, before)),
        ("verdicts", verdict, _is_free_verdict(verdict, before)),
        ("measurements", measurement, _is_free_measurement(measurement, before)),
        ("libraries", library, _is_free_library(library, before)),
    ]


# ---- what is not needed


def _is_old_job(job: FromClause, before: float) -> ColumnElement[bool]:
    """One without pending builds: else builds that no job needs any more would stay pending for ever."""
    pending_build = core(PendingBuildRow).alias()
    return and_(
        job.c.state.not_in(LIVE), job.c.finished_at < before, ~exists().where(pending_build.c.job_id == job.c.id)
    )


def _is_free_task(task: Table, before: float) -> ColumnElement[bool]:
    needed_by, job = core(TaskJobRow), core(JobRow).alias()
    needed = exists().where(needed_by.c.task_id == task.c.id, job.c.id == needed_by.c.job_id, ~_is_old_job(job, before))
    return and_(task.c.state.not_in(UNENDED), func.coalesce(task.c.finished_at, task.c.created_at) < before, ~needed)


def _is_free_build(build: FromClause, before: float) -> ColumnElement[bool]:
    """No candidate names it but those of older jobs."""
    candidate, problem, job = (core(table).alias() for table in (CandidateRow, JobProblemRow, JobRow))
    named = exists().where(
        candidate.c.build == build.c.id,
        problem.c.id == candidate.c.job_problem_id,
        job.c.id == problem.c.job_id,
        ~_is_old_job(job, before),
    )
    pending_build = core(PendingBuildRow).alias()
    return and_(
        build.c.state.in_(BUILT),
        build.c.created_at < before,
        ~exists().where(pending_build.c.build == build.c.id),
        ~named,
    )


def _is_free_group(group: FromClause, before: float) -> ColumnElement[bool]:
    """None of the builds that stay was made by it."""
    build = core(BuildRow).alias()
    made = exists().where(build.c.group_id == group.c.id, ~_is_free_build(build, before))
    ended = func.coalesce(group.c.finished_at, group.c.created_at)
    return and_(group.c.state != "compiling", ended < before, ~made)


def _is_free_verdict(verdict: Table, before: float) -> ColumnElement[bool]:
    """What a GPU found wrong stays: the same code may come again, from another build or from elsewhere."""
    failed_on_gpu = and_(verdict.c.venue == GPU, verdict.c.verdict != "ok")
    subject = verdict.c.subject
    return and_(
        verdict.c.created_at < before,
        ~failed_on_gpu,
        ~_is_built("slice", subject, before),
        ~_is_built("code_digest", subject, before),
        ~_is_used(subject),
    )


def _is_free_measurement(measurement: Table, before: float) -> ColumnElement[bool]:
    code = measurement.c.code_digest
    return and_(measurement.c.created_at < before, ~_is_built("code_digest", code, before), ~_is_used(code))


def _is_free_library(library: FromClause, before: float) -> ColumnElement[bool]:
    return and_(library.c.created_at < before, ~_is_used(library.c.library))


def _is_free_blob(before: float, put_before: float) -> ColumnElement[bool]:
    """Nothing that stays names it, and it was not put again lately, for what may name it in a moment."""
    group, build, library = (core(table).alias() for table in (GroupRow, BuildRow, LibraryRow))
    named = [
        *(select(group.c[name]).where(~_is_free_group(group, before)) for name in FILES_OF_GROUPS),
        select(build.c.library).where(~_is_free_build(build, before)),
        *(select(library.c[name]).where(~_is_free_library(library, before)) for name in FILES_OF_LIBRARIES),
        select(WinnerUseRow.digest),
    ]
    names = union_all(*named).subquery()
    column = names.c[0]
    blob = core(BlobRow)
    # Not NOT EXISTS: that would read all names for each blob.
    return and_(blob.c.created_at < put_before, blob.c.digest.not_in(select(column).where(column.is_not(None))))


def _is_built(column: str, subject: ColumnElement[str], before: float) -> ColumnElement[bool]:
    build = core(BuildRow).alias()
    return exists().where(build.c[column] == subject, ~_is_free_build(build, before))


def _is_used(digest: ColumnElement[str]) -> ColumnElement[bool]:
    """By a winner record."""
    use = core(WinnerUseRow).alias()
    return exists().where(use.c.digest == digest)


# ---- removing it


def _delete(database: Database, table: Table, page: Sequence[Any], which: ColumnElement[bool]) -> int:
    rows = one_of(list(table.primary_key.columns), page)
    with database.write() as session:
        return remove(session, table, rows, which)


def _remove_job(database: Database, job_id: str, before: float) -> Iterator[Removed]:
    this = and_(core(JobRow).c.id == job_id, _is_old_job(core(JobRow), before))
    removed: Removed | None = Removed()
    while removed and not removed.jobs:
        with database.write() as session:
            removed = remove_part(session, this)
        yield removed or Removed()


def remove_part(session: Session, this: ColumnElement[bool], *, with_builds: bool = False) -> Removed | None:
    """Of the job that `this` says of its row: candidates, then problems, then itself; in between it is there with less.
    None: there is none any more. `with_builds`: also builds that no candidate names any more."""
    tables = (JobRow, JobProblemRow, CandidateRow, TaskRow, BuildRow)
    job, problem, candidate, task, build = (core(table) for table in tables)
    problems = select(problem.c.id).where(problem.c.job_id == select(job.c.id).where(this).scalar_subquery())
    key = (candidate.c.job_problem_id, candidate.c.candidate)
    some = select(*key, candidate.c.build).where(candidate.c.job_problem_id.in_(problems)).limit(ROWS_AT_ONCE)
    if rows := session.execute(some).all():
        remove(session, candidate, one_of(key, [row[:2] for row in rows]))
        unused = ~exists().where(candidate.c.build == build.c.id)
        if with_builds:
            remove(session, build, build.c.id.in_({row.build for row in rows}), unused)
        return Removed(candidates=len(rows))
    if ids := session.scalars(problems.limit(PROBLEMS_AT_ONCE)).all():
        # With them: SQLite gives the number of the last problem to the next one that comes.
        refs = and_(task.c.kind.in_((FINISH, COMPARE)), task.c.ref.in_([str(id) for id in ids]))
        tasks = len(session.scalars(delete(task).where(refs).returning(task.c.id)).all())
        remove(session, problem, problem.c.id.in_(ids))
        return Removed(tasks=tasks)
    deleted = session.scalars(delete(job).where(this).returning(job.c.id)).all()
    return Removed(jobs=len(deleted)) if deleted else None


def find_half_accepted(session: Session) -> Callable[[Session], object] | None:
    """The next part of removing a large job whose acceptance was interrupted (`storage.transitions.accept`)."""
    job = core(JobRow)
    since = clock_of(session).now() - ACCEPT_SECONDS
    late = and_(job.c.state == ACCEPTING, job.c.created_at < since)
    half = or_(late, job.c.state == ABANDONED)
    row = session.execute(select(job.c.id, job.c.state).where(half).limit(1)).one_or_none()
    if row is None:
        return None
    this = job.c.id == row.id
    if row.state == ACCEPTING:  # first of all, so that its acceptance ends
        return lambda session: session.execute(update(job).where(this, late).values(state=ABANDONED))
    return lambda session: remove_part(session, and_(this, job.c.state == ABANDONED))


def remove_blobs(database: Database, before: float) -> Iterator[Removed]:
    """The rows. What needs one since the look has put it again, which made its row young, or is a winner record."""
    blob = core(BlobRow)
    put_before = database.clock.now() - SWEEP_AGE
    with database.read() as session:
        digests = session.scalars(select(blob.c.digest).where(_is_free_blob(before, put_before))).all()
    for some in chunks(digests, ROWS_AT_ONCE):
        still = and_(blob.c.digest.in_(some), blob.c.created_at < put_before, ~_is_used(blob.c.digest))
        with database.write() as session:
            sizes = session.scalars(delete(blob).where(still).returning(blob.c.size)).all()
        yield Removed(blobs=len(sizes), bytes=sum(sizes))
