"""A job's problems: loaded for a step, finished with a winner or with the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, exists, func, or_, select, update

from cukiln.types import StageSeconds
from storage.database import Session, clock_of
from storage.endings import settle_job
from storage.errors import LostClaim
from storage.items import Claim, complete
from storage.judge import LIVE
from storage.new_items import parse_plan_ref
from storage.rows import core
from storage.seconds import add_seconds, by_phase
from storage.tables import CandidateRow, ItemRow, JobProblemRow

JobProblem = Row[Any]
"""Of `storage.tables.JobProblemRow`."""


@dataclass(frozen=True)
class FinishedProblem:
    """`job_state` is the job's new state if this was its last problem."""

    job_id: str
    job_state: str | None


def load_problem(session: Session, problem_id: int) -> JobProblem | None:
    return session.execute(select(core(JobProblemRow)).where(JobProblemRow.id == problem_id)).one_or_none()


def problems_to_retry(session: Session, job_id: str) -> list[JobProblem]:
    """The problems of an ended job that failed, were cancelled, or were not tried as a whole, in order."""
    problem, candidate = core(JobProblemRow).c, core(CandidateRow).c
    skipped = exists().where(candidate.job_problem_id == problem.id, candidate.verdict == "skipped")
    unfinished = or_(problem.state != "done", problem.error.is_not(None), skipped)
    query = select(core(JobProblemRow)).where(problem.job_id == job_id, unfinished)
    return list(session.execute(query.order_by(problem.position)))


def problems_to_plan(session: Session, claim: Claim) -> list[JobProblem]:
    """The problems of a plan item that nobody has planned yet, in order."""
    job_id, first, last = parse_plan_ref(claim.ref)
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


def finish_problem(
    session: Session,
    claim: Claim,
    *,
    winner: str | None,
    error: str | None,
    extra_seconds: Mapping[str, StageSeconds] | None = None,
    phases: Sequence[Mapping[str, Any]] = (),
) -> FinishedProblem:
    """End the problem of a finish item: done with a winner (a candidate id), or failed with the reason.

    Completes the item and closes the job with its last problem. `extra_seconds`: what finishing itself spent, by
    stage, `phases`: within it, as in `storage.tables.GroupRow`. Raises `LostClaim`.
    """
    if (winner is None) == (error is None):
        raise ValueError("a finished problem has either a winner or an error")
    complete(session, claim)
    problem_id = int(claim.ref)
    state = "failed" if winner is None else "done"
    why = error or JobProblemRow.error  # what it lost, or had no time for, stays to be read
    job_id = session.scalar(
        update(JobProblemRow)
        .where(JobProblemRow.id == problem_id, JobProblemRow.state.in_(LIVE))
        .values(state=state, winner=winner, error=why, finished_at=clock_of(session).now())
        .returning(JobProblemRow.job_id)
    )
    if job_id is None:
        raise LostClaim(claim.kind, claim.ref, claim.token)
    session.execute(update(ItemRow).where(ItemRow.id == claim.item_id).values(phases=[dict(one) for one in phases]))
    waiting = {"queue": StageSeconds(wall=claim.waited_seconds)}
    add_seconds(session, {problem_id: {**(extra_seconds or {}), **by_phase(phases), **waiting}})
    return FinishedProblem(job_id, settle_job(session, job_id))
