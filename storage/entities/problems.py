"""A job's problems, loaded for a step."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, exists, func, or_, select

from storage.database.session import Session
from storage.database.sql import core
from storage.database.tables import LIVE, CandidateRow, JobProblemRow
from storage.queue.new_tasks import parse_plan_ref
from storage.queue.tasks import Lease

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


def candidates_of_job(session: Session, job_id: str) -> int:
    """How many candidates the job's planned problems have."""
    counted = session.scalar(select(func.sum(JobProblemRow.candidate_count)).where(JobProblemRow.job_id == job_id))
    return int(counted or 0)
