"""Jobs: created with their problems and plan items in one transaction, listed, cancelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from sqlalchemy import Row, and_, func, insert, or_, select, update

from cukiln.types import JobPage, JobState, JobSummary
from storage.cursors import make_cursor, read_cursor
from storage.database import Session, clock_of
from storage.endings import cancel_work
from storage.judge import LIVE
from storage.new_items import PLAN, NewItem, add_items, plan_ref
from storage.rows import chunks, core
from storage.tables import JobProblemRow, JobRow

Priority = Literal["low", "normal", "high"]
PRIORITIES: dict[Priority, int] = {"low": -10, "normal": 0, "high": 10}
PLAN_CHUNK = 32
"""Problems of one plan item: small enough to spread a large job over the planners and to show progress."""
MAX_PAGE = 1000


@dataclass(frozen=True)
class NewProblem:
    """`problem` is canonical; `cached`: the winner record `key` answers it as it stands, with candidate `winner`."""

    name: str
    operator: str
    problem: dict[str, Any]
    target: str
    device_class: str
    key: str
    search: dict[str, Any]
    cached: bool = False
    winner: str | None = None


@dataclass(frozen=True)
class NewJob:
    problems: Sequence[NewProblem]
    priority: Priority = "normal"
    budget_seconds: float | None = None
    workspace_limit_bytes: int | None = None
    deterministic: bool = False

    @property
    def cached(self) -> bool:
        return all(problem.cached for problem in self.problems)


@dataclass(frozen=True)
class CreatedJob:
    """`items`: plan items that now wait; none when everything was cached, and the job is done."""

    id: str
    state: JobState
    cached: bool
    items: int


JobStatus = Row[Any]
"""Of `storage.tables.JobRow`."""


def create_job(session: Session, new: NewJob) -> CreatedJob:
    """Write the job, its problems and its plan items: durable when the transaction has committed."""
    (created,) = create_jobs(session, [new])
    return created


def create_jobs(session: Session, jobs: Sequence[NewJob]) -> list[CreatedJob]:
    """The same of several, with as many statements as for one."""
    if not all(new.problems for new in jobs):
        raise ValueError("a job has at least one problem")
    now = clock_of(session).now()
    ids = [clock_of(session).new_id() for _ in jobs]
    session.execute(insert(core(JobRow)), [_job_row(job_id, new, now) for job_id, new in zip(ids, jobs, strict=True)])
    problems, items, created = [], [], []
    for job_id, new in zip(ids, jobs, strict=True):
        problems += [_problem_row(job_id, position, problem, now) for position, problem in enumerate(new.problems)]
        places = _chunks_to_plan(new.problems)
        items += [NewItem(PLAN, plan_ref(job_id, first, last), jobs=(job_id,)) for first, last in places]
        created.append(CreatedJob(job_id, "done" if new.cached else "queued", new.cached, len(places)))
    session.execute(insert(core(JobProblemRow)), problems)
    add_items(session, items)
    return created


def _job_row(job_id: str, new: NewJob, now: float) -> dict[str, Any]:
    return {
        "id": job_id,
        "state": "done" if new.cached else "queued",
        "cached": new.cached,
        "priority": PRIORITIES[new.priority],
        "budget_seconds": new.budget_seconds,
        "workspace_limit_bytes": new.workspace_limit_bytes,
        "deterministic": new.deterministic,
        "created_at": now,
        "started_at": now if new.cached else None,
        "finished_at": now if new.cached else None,
    }


def job_state(session: Session, job_id: str) -> JobStatus | None:
    """The job's own row, without its problems; None if there is no such job."""
    return session.execute(select(core(JobRow)).where(JobRow.id == job_id)).one_or_none()


def job_states(session: Session, job_ids: Sequence[str]) -> dict[str, JobState]:
    """The state of each of these jobs."""
    found: dict[str, JobState] = {}
    for ids in chunks(job_ids):
        rows = session.execute(select(JobRow.id, JobRow.state).where(JobRow.id.in_(ids))).all()
        found.update((id, cast(JobState, state)) for id, state in rows)
    return found


def last_deadline(session: Session, job_ids: Sequence[str]) -> float | None:
    """When the last of these jobs is out of time; None where one has time without end."""
    deadlines = session.scalars(select(JobRow.deadline).where(JobRow.id.in_(job_ids))).all()
    return None if None in deadlines else max((one for one in deadlines if one is not None), default=None)


def cancel_job(session: Session, job_id: str) -> JobStatus | None:
    """Cancel the job unless it has ended; returns it as it is now, None if there is no such job."""
    cancelled = session.execute(
        update(JobRow)
        .where(JobRow.id == job_id, JobRow.state.in_(LIVE))
        .values(state="cancelled", finished_at=clock_of(session).now())
        .returning(JobRow.id)
    ).one_or_none()
    if cancelled is not None:
        cancel_work(session, job_id)
    return job_state(session, job_id)


def list_jobs(
    session: Session, *, limit: int = 50, cursor: str | None = None, state: JobState | None = None
) -> JobPage:
    """Jobs, newest first. Raises `BadCursor`."""
    limit = max(1, min(limit, MAX_PAGE))
    count = (
        select(func.count())
        .select_from(JobProblemRow)
        .where(JobProblemRow.job_id == JobRow.id)
        .correlate(JobRow)
        .scalar_subquery()
    )
    query = (
        select(JobRow.id, JobRow.state, JobRow.cached, JobRow.created_at, JobRow.finished_at, count.label("problems"))
        .order_by(JobRow.created_at.desc(), JobRow.id.desc())
        .limit(limit + 1)
    )
    if state is not None:
        query = query.where(JobRow.state == state)
    if cursor is not None:
        at, job_id = read_cursor(cursor, (float, str))
        query = query.where(or_(JobRow.created_at < at, and_(JobRow.created_at == at, JobRow.id < job_id)))
    rows = session.execute(query).all()
    jobs = [
        JobSummary(
            job=row.id,
            state=cast(JobState, row.state),
            cached=row.cached,
            created_at=row.created_at,
            finished_at=row.finished_at,
            problem_count=row.problems,
        )
        for row in rows[:limit]
    ]
    more = len(rows) > limit
    return JobPage(jobs=jobs, next_cursor=make_cursor(jobs[-1].created_at, jobs[-1].job) if more else None)


def unfinished_jobs(session: Session) -> int:
    """Jobs that are queued or running."""
    return session.scalar(select(func.count()).select_from(JobRow).where(JobRow.state.in_(LIVE))) or 0


def priority_name(priority: int) -> Priority:
    """The word for a stored priority."""
    return next((name for name, value in PRIORITIES.items() if value == priority), "normal")


def _problem_row(job_id: str, position: int, problem: NewProblem, now: float) -> dict[str, Any]:
    return {
        **vars(problem),
        "job_id": job_id,
        "position": position,
        "state": "done" if problem.cached else "queued",
        "planned": problem.cached,
        "started_at": now if problem.cached else None,
        "finished_at": now if problem.cached else None,
    }


def _chunks_to_plan(problems: Sequence[NewProblem]) -> list[tuple[int, int]]:
    """First and last position of each run of `PLAN_CHUNK` problems that holds one to plan."""
    chunks = []
    for first in range(0, len(problems), PLAN_CHUNK):
        last = min(first + PLAN_CHUNK, len(problems)) - 1
        if not all(problem.cached for problem in problems[first : last + 1]):
            chunks.append((first, last))
    return chunks
