"""A way through measuring on a real database: jobs on device classes, planned as the planner does, then compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select

from cukiln.types import StageSeconds
from storage.database.session import Database, Session
from storage.database.tables import TaskRow
from storage.entities import jobs
from storage.entities.candidates import StoredCandidate, candidates_of_problem
from storage.queue.tasks import Lease
from storage.transitions import accept, take_work
from storage.transitions.accept import CreatedJob
from storage.transitions.apply_verdicts import CandidateVerdict, NextStep
from storage.transitions.end_jobs import finish_problem
from storage.transitions.measure import invalidate_contenders, record_compared
from tests.support.fixtures_storage import (
    TARGET,
    measure_leased,
    measured,
    new_problem,
    problem_ids,
    take_one,
    to_measure,
)

CPU_CLASS = f"predicted:{TARGET}"
COMPARISON: dict[str, Any] = {"contenders": [], "rounds": 7}


def add(database: Database, *classes: str, **changes: Any) -> CreatedJob:
    """A job with one problem per device class."""
    with database.write() as session:
        problems = [new_problem("p", device_class=device_class) for device_class in classes]
        return accept.create_job(session, accept.NewJob(problems, **changes))


def compare_next(
    database: Database, wrong: Sequence[tuple[str, str]] = (), verdict: str = "incorrect"
) -> list[NextStep]:
    """`wrong`: candidate and message of those that get the verdict."""
    lease = take_one(database, "compare")
    details, problem = {"cases": list[Any]()}, int(lease.ref)
    dropped = [CandidateVerdict(problem, candidate, verdict, message, details=details) for candidate, message in wrong]
    with database.write() as session:
        next_steps, _ = invalidate_contenders(session, lease, dropped)
        return [*next_steps, *record_compared(session, lease, COMPARISON, measure=StageSeconds(wall=3, cpu=1))]


def finish_next(database: Database, winner: str | None = "c-a") -> None:
    lease = take_one(database, "finish")
    with database.write() as session:
        finish_problem(session, lease, winner=winner, error=None if winner else "none was right")


def candidates(database: Database, job: CreatedJob) -> list[dict[str, StoredCandidate]]:
    """By candidate id, for each problem of the job."""
    with database.read() as session:
        return [
            {candidate.candidate: candidate for candidate in candidates_of_problem(session, problem_id)}
            for problem_id in problem_ids(session, job.id)
        ]


def verdicts(database: Database, job: CreatedJob) -> list[dict[str, str | None]]:
    return [{name: row.verdict for name, row in by_name.items()} for by_name in candidates(database, job)]


def unended(database: Database) -> list[tuple[str, str | None]]:
    with database.read() as session:
        query = select(TaskRow.kind, TaskRow.target).where(TaskRow.state.in_(("waiting", "leased")))
        return [(row.kind, row.target) for row in session.execute(query.order_by(TaskRow.kind, TaskRow.id))]


def state_of(database: Database, job: CreatedJob) -> str:
    with database.read() as session:
        job_row = jobs.job_state(session, job.id)
    assert job_row is not None
    return job_row.state


def ids_of(database: Database, job: CreatedJob) -> list[int]:
    with database.read() as session:
        return problem_ids(session, job.id)


def take_target(database: Database, device_class: str, kind: str = "measure") -> Lease:
    with database.write() as session:
        lease = take_work.take(session, [kind], [device_class], "gpu", 5.0)
    assert lease is not None and lease.target == device_class
    return lease


def take_one_in(session: Session, kind: str) -> Lease:
    lease = take_work.take(session, [kind], None, "w", 5.0)
    assert lease is not None
    return lease


def measure_leased_on(database: Database, device_class: str) -> None:
    lease = take_target(database, device_class)
    measure_leased(database, lease, [measured(candidate) for candidate in to_measure(database, lease)])
