"""How work ends before its time: a cancelled job, a spent budget, an item that failed for good.

Builds are shared between jobs. So a job that ends takes back what it wants: work that no other job wants is cancelled,
and builds that none demands are forgotten. Nothing of this is remembered as a verdict of a kernel: its candidates are
`skipped`, a part at a time (`find_ended`, `clear_ended`), since a job may have a hundred thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import and_, exists, func, or_, select, update

from storage.database import Session, clock_of
from storage.device_classes import asks_predicted
from storage.judge import LIVE, finish_judged, judge_failures, skip_builds
from storage.new_items import COMPARE, COMPILE, FINISH, MEASURE, PLAN, UNENDED, VERIFY, group_of_ref, parse_plan_ref
from storage.pending_builds import abandon_group, drop_demands, drop_unneeded
from storage.rows import chunks, core
from storage.tables import BuildRow, CandidateRow, DemandRow, GroupRow, ItemJobRow, ItemRow, JobProblemRow, JobRow

SEARCH = (PLAN, COMPILE, VERIFY, MEASURE, COMPARE)
"""The kinds that a spent budget ends; what was judged by then is finished."""
CLEARED_AT_ONCE = 500
"""Candidates, and demands, of one transaction."""
RECENT_SECONDS = 3600.0


def settle_job(session: Session, job_id: str) -> str | None:
    """Close the job when all its problems have ended; returns its state if that happened now."""
    live = select(JobProblemRow.id).where(JobProblemRow.job_id == job_id, JobProblemRow.state.in_(LIVE)).limit(1)
    if session.scalar(live) is not None:
        return None
    rows = session.execute(
        select(JobProblemRow.state, func.count()).where(JobProblemRow.job_id == job_id).group_by(JobProblemRow.state)
    )
    counts: dict[str, int] = dict(rows.all())
    state = "failed" if not counts.get("done") else "partial" if len(counts) > 1 else "done"
    ended = session.execute(
        update(JobRow)
        .where(JobRow.id == job_id, JobRow.state.in_(LIVE))
        .values(state=state, finished_at=clock_of(session).now(), error=_job_error(session, job_id, counts))
        .returning(JobRow.id)
    ).one_or_none()
    if ended is None:
        return None
    # What was found out elsewhere, or was lost, may have judged its candidates before its own work came to them.
    end_items(session, job_id, SEARCH)
    return state


def cancel_work(session: Session, job_id: str) -> None:
    """End all that a cancelled job waits for. Its candidates are skipped by `clear_ended`."""
    session.execute(
        update(JobProblemRow)
        .where(JobProblemRow.job_id == job_id, JobProblemRow.state.in_(LIVE))
        .values(state="cancelled", finished_at=clock_of(session).now())
    )
    end_items(session, job_id, (*SEARCH, FINISH))


def expire_budgets(session: Session) -> list[str]:
    """End the search of every job past its deadline: what is judged is finished, the rest is skipped by `clear_ended`.

    Returns the ids of the jobs it ended now; call it every second or so.
    """
    now = clock_of(session).now()
    wanting = exists().where(
        ItemJobRow.job_id == JobRow.id,
        ItemJobRow.wanted,
        ItemRow.id == ItemJobRow.item_id,
        ItemRow.kind.in_(SEARCH),
        ItemRow.state.in_(UNENDED),
    )
    demanding = exists().where(DemandRow.job_id == JobRow.id)
    jobs = session.execute(
        select(JobRow.id, JobRow.budget_seconds)
        .where(JobRow.state == "running", JobRow.deadline <= now, or_(wanting, demanding))
        .order_by(JobRow.id)
    ).all()
    for job_id, budget in jobs:
        live = (JobProblemRow.job_id == job_id) & JobProblemRow.state.in_(LIVE)
        error = f"{_budget(budget)} its search space was lowered"
        session.execute(update(JobProblemRow).where(live, ~JobProblemRow.planned).values(planned=True, error=error))
        end_items(session, job_id, SEARCH)
        finish_judged(session, session.scalars(select(JobProblemRow.id).where(live)))
    return [job_id for job_id, _ in jobs]


@dataclass(frozen=True)
class Ended:
    """What is left of work that has ended: a job that demands builds all the same, a problem with unjudged
    candidates and the reason why they will not be judged."""

    job_id: str | None
    problem_id: int | None
    reason: str


def find_ended(session: Session, *, all_jobs: bool = False) -> Ended | None:
    """Demands of jobs that have ended or are out of time, unjudged candidates of what was cancelled, failed or is out
    of time. `all_jobs`: also of jobs that ended long ago, when nothing may have been running."""
    now = clock_of(session).now()
    late = and_(JobRow.state.in_(LIVE), JobRow.deadline <= now)
    ended = and_(JobRow.state.not_in(LIVE), JobRow.finished_at > (0.0 if all_jobs else now - RECENT_SECONDS))
    demanding = exists().where(DemandRow.job_id == JobRow.id)
    job_id = session.scalar(select(JobRow.id).where(or_(late, ended), demanding).limit(1))
    unjudged = exists().where(CandidateRow.job_problem_id == JobProblemRow.id, CandidateRow.verdict.is_(None))
    over = JobProblemRow.state.in_(("cancelled", "failed"))
    problem = session.execute(
        select(JobProblemRow.id, JobProblemRow.state, JobProblemRow.error, JobRow.budget_seconds)
        .join(JobRow, JobRow.id == JobProblemRow.job_id)
        .where(or_(late, and_(over, or_(JobRow.state.in_(LIVE), ended))), unjudged)
        .limit(1)
    ).one_or_none()
    if problem is None:
        return None if job_id is None else Ended(job_id, None, "")
    if problem.state == "cancelled":
        return Ended(job_id, problem.id, "the job was cancelled")
    if problem.state == "failed":
        return Ended(job_id, problem.id, f"its problem failed: {problem.error}")
    return Ended(job_id, problem.id, f"{_budget(problem.budget_seconds)} it was judged")


def clear_ended(session: Session, ended: Ended) -> None:
    """Take back a part of the job's demands, skip a part of the problem's candidates."""
    if ended.job_id is not None:
        drop_demands(session, ended.job_id, CLEARED_AT_ONCE)
    if ended.problem_id is None:
        return
    candidate = core(CandidateRow).c
    left = (candidate.job_problem_id == ended.problem_id) & candidate.verdict.is_(None)
    some = session.execute(select(candidate.candidate, candidate.build).where(left).limit(CLEARED_AT_ONCE)).all()
    session.execute(
        update(core(CandidateRow))
        .where(left, candidate.candidate.in_([row.candidate for row in some]))
        .values(verdict="skipped", message=ended.reason)
    )
    job_id = session.scalars(select(JobProblemRow.job_id).where(JobProblemRow.id == ended.problem_id)).one()
    drop_unneeded(session, job_id, sorted({row.build for row in some}))
    finish_judged(session, [ended.problem_id])


def _budget(seconds: float | None) -> str:
    assert seconds is not None, "a deadline comes from a budget"
    return f"the budget of {seconds:g} seconds ended before"


def give_up(session: Session, kind: str, ref: str, target: str | None, error: str) -> None:
    """Settle what waited for an item that failed for good."""
    if kind == PLAN:
        job_id, first, last = parse_plan_ref(ref)
        in_chunk = (JobProblemRow.job_id == job_id) & JobProblemRow.position.between(first, last)
        _fail_problems(session, job_id, in_chunk & ~JobProblemRow.planned, error)
    elif kind == FINISH:
        job = session.scalar(select(JobProblemRow.job_id).where(JobProblemRow.id == int(ref)))
        if job is not None:
            _fail_problems(session, job, JobProblemRow.id == int(ref), error)
    elif kind == COMPARE:
        finish_judged(session, [int(ref)])
    elif kind in (VERIFY, MEASURE):
        builds = select(BuildRow.id).where(BuildRow.group_id == group_of_ref(ref))
        judge_failures(session, session.scalars(builds))
        problems = asks_predicted() if kind == VERIFY else JobProblemRow.device_class == target
        skip_builds(session, list(session.scalars(builds.where(BuildRow.state == "ok"))), error, problems)


def end_items(session: Session, job_id: str, kinds: Sequence[str]) -> None:
    """The job wants no work of these kinds any more; what no other job wants is cancelled."""
    now = clock_of(session).now()
    item, wanting = core(ItemRow).c, core(ItemJobRow).c
    mine = select(wanting.item_id).where(wanting.job_id == job_id, wanting.wanted)
    unended = item.id.in_(mine) & item.state.in_(UNENDED) & item.kind.in_(kinds)
    ids = list(session.scalars(select(item.id).where(unended)))
    for some in chunks(ids):
        session.execute(
            update(core(ItemJobRow)).where(wanting.job_id == job_id, wanting.item_id.in_(some)).values(wanted=False)
        )
        unwanted = item.id.in_(some) & ~exists().where(wanting.item_id == item.id, wanting.wanted)
        # The token stays: the worker that holds the item learns from `renew` that it was cancelled, not lost.
        cancelled = session.execute(
            update(core(ItemRow))
            .where(unwanted)
            .values(state="cancelled", finished_at=now, lease_expires_at=None)
            .returning(item.kind, item.ref)
        ).all()
        groups = [row.ref for row in cancelled if row.kind == COMPILE]
        session.execute(
            update(core(GroupRow)).where(core(GroupRow).c.id.in_(groups)).values(state="cancelled", finished_at=now)
        )
        for group in groups:
            abandon_group(session, group)


def _fail_problems(session: Session, job_id: str, which: object, error: str) -> None:
    session.execute(
        update(JobProblemRow)
        .where(which, JobProblemRow.state.in_(LIVE))  # type: ignore[arg-type]
        .values(state="failed", error=error, finished_at=clock_of(session).now())
    )
    settle_job(session, job_id)


def _job_error(session: Session, job_id: str, counts: dict[str, int]) -> str | None:
    failed = counts.get("failed", 0)
    if not failed:
        return None
    first = session.execute(
        select(JobProblemRow.name, JobProblemRow.error)
        .where(JobProblemRow.job_id == job_id, JobProblemRow.state == "failed")
        .order_by(JobProblemRow.position)
        .limit(1)
    ).one()
    return f"{failed} of {sum(counts.values())} problems failed; the first, {first.name}: {first.error}"
