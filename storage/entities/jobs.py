"""Jobs and their problems: their rows, states and pages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Row, exists, func, or_, select

from cukiln.types import JobPage, JobState, JobSummary, ProblemState
from storage.database.pages import read_page
from storage.database.session import Session
from storage.database.sql import core, rows_among
from storage.database.tables import HIDDEN, LIVE, CandidateRow, JobLabelRow, JobProblemRow, JobRow
from storage.entities.task_kinds import parse_plan_ref
from storage.queue.tasks import Lease

Priority = Literal["low", "normal", "high"]
PRIORITIES: dict[Priority, int] = {"low": -10, "normal": 0, "high": 10}
MAX_PAGE = 1000


JobStatus = Row[Any]
"""Of `storage.database.tables.JobRow`."""


def job_state(session: Session, job_id: str) -> JobStatus | None:
    """The job's own row, without its problems; None if there is no such job."""
    visible = (JobRow.id == job_id) & JobRow.state.not_in(HIDDEN)
    return session.execute(select(core(JobRow)).where(visible)).one_or_none()


def job_states(session: Session, job_ids: Sequence[str]) -> dict[str, JobState]:
    """The state of each of these jobs."""
    return dict(rows_among(session, select(JobRow.id, JobRow.state), JobRow.id, job_ids))


def last_deadline(session: Session, job_ids: Sequence[str]) -> float | None:
    """When the last of these jobs is out of time; None where one has time without end."""
    deadlines = session.scalars(select(JobRow.deadline).where(JobRow.id.in_(job_ids))).all()
    return None if None in deadlines else max((at for at in deadlines if at is not None), default=None)


def list_jobs(
    session: Session,
    *,
    limit: int = 50,
    cursor: str | None = None,
    state: JobState | None = None,
    name: str | None = None,
    labels: Sequence[tuple[str, str]] = (),
) -> JobPage:
    """Jobs, newest first; `labels`: those that have them all. Raises `BadCursor`."""
    limit = max(1, min(limit, MAX_PAGE))
    count = (
        select(func.count())
        .select_from(JobProblemRow)
        .where(JobProblemRow.job_id == JobRow.id)
        .correlate(JobRow)
        .scalar_subquery()
    )
    job = core(JobRow).c
    columns = (job.id, job.state, job.cached, job.finished_at, job.name, job.labels, count.label("problem_count"))
    query: Any
    if labels:  # from the index of the first: jobs of a label may be few among all
        labelled = core(JobLabelRow).c
        key = (labelled.created_at, labelled.job_id)
        query = select(*columns, *key).join(core(JobLabelRow), labelled.job_id == job.id)
        query = query.where(labelled.label == labels[0][0], labelled.value == labels[0][1])
    else:
        key = (job.created_at, job.id)
        query = select(*columns, job.created_at)
    query = query.where(job.state.not_in(HIDDEN))
    if state is not None:
        query = query.where(job.state == state)
    if name is not None:
        query = query.where(job.name == name)
    for label, value in labels[1:]:
        query = query.where(job.labels[label].as_string() == value)
    rows, next_cursor = read_page(session, query, key, (float, str), limit, cursor, descending=True)
    return JobPage(jobs=[JobSummary(job=row["id"], **row) for row in rows], next_cursor=next_cursor)


def unfinished_jobs(session: Session) -> int:
    """Jobs that are queued or running."""
    return session.scalar(select(func.count()).select_from(JobRow).where(JobRow.state.in_(LIVE))) or 0


def priority_name(priority: int) -> Priority:
    """The word for a stored priority."""
    return next((name for name, value in PRIORITIES.items() if value == priority), "normal")


JobProblem = Row[Any]
"""Of `storage.database.tables.JobProblemRow`."""


def load_problem(session: Session, problem_id: int) -> JobProblem | None:
    return session.execute(select(core(JobProblemRow)).where(JobProblemRow.id == problem_id)).one_or_none()


def problems_to_retry(session: Session, job_id: str) -> list[JobProblem]:
    """The problems of an ended job that failed, were cancelled, or were not tried as a whole, in order."""
    problem, candidate = core(JobProblemRow).c, core(CandidateRow).c
    skipped = exists().where(candidate.job_problem_id == problem.id, candidate.verdict == "skipped")
    unfinished = or_(problem.state != "done", problem.error.is_not(None), skipped)
    query = select(core(JobProblemRow)).where(problem.job_id == job_id, unfinished)
    return list(session.execute(query.order_by(problem.position)))


def problems_to_plan(session: Session, lease: Lease) -> list[JobProblem]:
    """The problems of a plan task that are not planned yet, in order."""
    job_id, first, last = parse_plan_ref(lease.ref)
    rows = session.execute(
        select(core(JobProblemRow))
        .where(JobProblemRow.job_id == job_id, JobProblemRow.position.between(first, last))
        .where(~JobProblemRow.planned, JobProblemRow.state.in_(LIVE))
        .order_by(JobProblemRow.position)
    )
    return list(rows)


@dataclass(frozen=True)
class Trying:
    """A job that makes a record, or has failed to."""

    job: str
    state: ProblemState


def tried_keys(session: Session, searches: Mapping[str, dict[str, Any]], since: float) -> dict[str, Trying]:
    """Of these keys of records, each with a search: those that a job is trying, whatever its search, and those that one
    which was sent since then has failed to make by that search."""
    problem = JobProblemRow
    columns = (problem.key, problem.job_id, problem.state, problem.search)
    tried = select(*columns).join(JobRow, JobRow.id == problem.job_id).order_by(JobRow.created_at)
    live = JobRow.state.in_(LIVE) & problem.state.in_(LIVE)
    failed = (problem.state == "failed") & (JobRow.created_at >= since) & JobRow.state.not_in(HIDDEN)
    rows = rows_among(session, tried.where(or_(live, failed)), problem.key, searches)
    return {key: Trying(job, state) for key, job, state, own in rows if state in LIVE or own == searches[key]}


def candidates_of_job(session: Session, job_id: str) -> int:
    """How many candidates the job's planned problems have."""
    counted = session.scalar(select(func.sum(JobProblemRow.candidate_count)).where(JobProblemRow.job_id == job_id))
    return int(counted or 0)
