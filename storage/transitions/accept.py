"""A job is created with its problems and plan tasks: in one transaction, or, if it is large, in several, of which the
last makes it visible."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert, select, update

from cukiln.types import JobState, PtxAsked
from storage.database.session import Database, Session, clock_of
from storage.database.sql import chunks, core, rows_among
from storage.database.tables import ACCEPTING, JobLabelRow, JobProblemRow, JobRow
from storage.entities.jobs import PRIORITIES, Priority
from storage.entities.task_kinds import PLAN, plan_ref
from storage.queue.new_tasks import NewTask, add_tasks

PLAN_CHUNK = 32
"""Problems of one plan task: few enough to spread a large job over the planners and to show progress."""
PROBLEMS_AT_ONCE = 500
"""Problems that one transaction writes."""


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
class SentUnder:
    """Digests of a caller's Idempotency-Key, and of what was sent with it: one job is made of it, however often it is
    sent."""

    key: str
    request: str


@dataclass(frozen=True)
class NewJob:
    problems: Sequence[NewProblem]
    priority: Priority = "normal"
    budget_seconds: float | None = None
    workspace_limit_bytes: int | None = None
    deterministic: bool = False
    name: str | None = None
    labels: dict[str, str] | None = None
    sent_under: SentUnder | None = None
    ptx: PtxAsked = "winners"

    @property
    def cached(self) -> bool:
        return all(problem.cached for problem in self.problems)


@dataclass(frozen=True)
class CreatedJob:
    """`tasks`: plan tasks that now wait; none when everything was cached, and the job is done."""

    id: str
    state: JobState
    cached: bool
    tasks: int


def create_jobs(session: Session, jobs: Sequence[NewJob]) -> list[CreatedJob]:
    """Write the jobs, their problems and their plan tasks, with as many statements as for one: durable when the
    transaction has committed. Raises WrittenMeanwhile where there is one under an Idempotency-Key of these."""
    if not all(new.problems for new in jobs):
        raise ValueError("a job has at least one problem")
    now = clock_of(session).now()
    ids = [clock_of(session).new_id() for _ in jobs]
    session.execute(insert(core(JobRow)), [_job_row(job_id, new, now) for job_id, new in zip(ids, jobs, strict=True)])
    _insert_labels(session, dict(zip(ids, jobs, strict=True)), now)
    problems, tasks, created = [], [], []
    for job_id, new in zip(ids, jobs, strict=True):
        problems += [_problem_row(job_id, position, problem, now) for position, problem in enumerate(new.problems)]
        places = _chunks_to_plan(new.problems)
        tasks += [NewTask(PLAN, plan_ref(job_id, first, last), jobs=(job_id,)) for first, last in places]
        created.append(CreatedJob(job_id, "done" if new.cached else "queued", new.cached, len(places)))
    session.execute(insert(core(JobProblemRow)), problems)
    add_tasks(session, tasks)
    return created


def sent_before(session: Session, keys: Collection[str]) -> dict[str, tuple[str, str]]:
    """By digest of an Idempotency-Key: the job that was made under it, and the digest of what was sent."""
    query = select(JobRow.idempotency, JobRow.id, JobRow.request)
    return {key: (job, request) for key, job, request in rows_among(session, query, JobRow.idempotency, keys)}


def create_large_job(database: Database, new: NewJob, admit: Callable[[Session], None]) -> CreatedJob | None:
    """The same of one as `create_jobs`, some problems in each transaction. What is interrupted is removed later
    (`storage.maintenance.retention.find_half_accepted`); None where that came first, after ten minutes. `admit` may
    raise, in the first transaction and in the last, which makes the job visible."""
    job_id, now = database.clock.new_id(), database.clock.now()
    row = _job_row(job_id, new, now)
    with database.write() as session:
        admit(session)
        session.execute(insert(core(JobRow)), [{**row, **_HIDDEN}])
        _insert_labels(session, {job_id: new}, now)
    for some in chunks(enumerate(new.problems), PROBLEMS_AT_ONCE):
        problems = [_problem_row(job_id, position, problem, now) for position, problem in some]
        database.pause()
        with database.write() as session:
            if not _is_accepting(session, job_id):
                return None
            session.execute(insert(core(JobProblemRow)), problems)
    places = _chunks_to_plan(new.problems)
    tasks = [NewTask(PLAN, plan_ref(job_id, first, last), jobs=(job_id,)) for first, last in places]
    database.pause()
    with database.write() as session:
        admit(session)
        if not _is_accepting(session, job_id):
            return None
        session.execute(update(core(JobRow)).where(JobRow.id == job_id).values(row))
        add_tasks(session, tasks)
    return CreatedJob(job_id, row["state"], new.cached, len(tasks))


_HIDDEN = {"state": ACCEPTING, "started_at": None, "finished_at": None, "idempotency": None}
"""Of a row that nothing shows yet."""


def _is_accepting(session: Session, job_id: str) -> bool:
    return session.scalar(select(JobRow.state).where(JobRow.id == job_id)) == ACCEPTING


def _job_row(job_id: str, new: NewJob, now: float) -> dict[str, Any]:
    return {
        "id": job_id,
        "state": "done" if new.cached else "queued",
        "cached": new.cached,
        "priority": PRIORITIES[new.priority],
        "budget_seconds": new.budget_seconds,
        "workspace_limit_bytes": new.workspace_limit_bytes,
        "deterministic": new.deterministic,
        "ptx": new.ptx,
        "name": new.name,
        "labels": new.labels,
        "idempotency": new.sent_under and new.sent_under.key,
        "request": new.sent_under and new.sent_under.request,
        "created_at": now,
        "started_at": now if new.cached else None,
        "finished_at": now if new.cached else None,
    }


def _insert_labels(session: Session, jobs: Mapping[str, NewJob], now: float) -> None:
    """By id of the job."""
    rows = [
        {"job_id": job_id, "label": label, "value": value, "created_at": now}
        for job_id, new in jobs.items()
        for label, value in (new.labels or {}).items()
    ]
    if rows:
        session.execute(insert(core(JobLabelRow)), rows)


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
