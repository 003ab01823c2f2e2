"""How work ends before its time: a cancelled job, a spent budget, an item that failed for good.

Builds are shared between jobs. So a group that another live job waits for is handed to that job instead of being
cancelled, and the pending builds of a group that nobody will compile are forgotten, so that a later job owns them anew.
Nothing of this is remembered as a verdict of the kernel: its candidates are `skipped`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import delete, func, or_, select, update

from storage.database import Session, clock_of
from storage.judge import LIVE, finish_judged
from storage.new_items import COMPILE, FINISH, PLAN, VERIFY, parse_plan_ref
from storage.rows import chunks
from storage.tables import BuildRow, CandidateRow, GroupRow, ItemRow, JobProblemRow, JobRow

UNENDED = ("waiting", "claimed")


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
    return state if ended is not None else None


def cancel_work(session: Session, job_id: str) -> None:
    """Everything a cancelled job still waits for: its problems, candidates and items."""
    now = clock_of(session).now()
    session.execute(
        update(JobProblemRow)
        .where(JobProblemRow.job_id == job_id, JobProblemRow.state.in_(LIVE))
        .values(state="cancelled", finished_at=now)
    )
    _skip_unjudged(session, job_id, "the job was cancelled")
    _end_items(session, job_id, (PLAN, COMPILE, VERIFY, FINISH))


def expire_budgets(session: Session) -> list[str]:
    """End the search of every job past its deadline: what is unjudged is skipped, what is judged is finished.

    Returns the ids of the jobs it ended now; call it every second or so.
    """
    now = clock_of(session).now()
    unjudged = select(CandidateRow.candidate).where(
        CandidateRow.job_problem_id == JobProblemRow.id, CandidateRow.verdict.is_(None)
    )
    searching = select(JobProblemRow.id).where(
        JobProblemRow.job_id == JobRow.id,
        JobProblemRow.state.in_(LIVE),
        or_(~JobProblemRow.planned, unjudged.exists()),
    )
    jobs = session.execute(
        select(JobRow.id, JobRow.budget_seconds)
        .where(JobRow.state == "running", JobRow.deadline <= now, searching.exists())
        .order_by(JobRow.id)
    ).all()
    for job_id, budget in jobs:
        _end_budget(session, job_id, f"the budget of {budget:g} seconds ended before")
    return [job_id for job_id, _ in jobs]


def give_up(session: Session, kind: str, ref: str, error: str) -> None:
    """Settle what waited for an item that failed for good."""
    if kind == PLAN:
        job_id, first, last = parse_plan_ref(ref)
        in_chunk = (JobProblemRow.job_id == job_id) & JobProblemRow.position.between(first, last)
        _fail_problems(session, job_id, in_chunk & ~JobProblemRow.planned, error)
    elif kind == FINISH:
        job = session.scalar(select(JobProblemRow.job_id).where(JobProblemRow.id == int(ref)))
        if job is not None:
            _fail_problems(session, job, JobProblemRow.id == int(ref), error)
    elif kind == COMPILE:
        builds = select(BuildRow.id).where(BuildRow.group_id == ref, BuildRow.state == "pending")
        _skip_builds(session, list(session.scalars(builds)), error)
        forget_pending_builds(session, [ref])
        session.execute(
            update(GroupRow).where(GroupRow.id == ref).values(state="failed", finished_at=clock_of(session).now())
        )
    elif kind == VERIFY:
        builds = select(BuildRow.id).where(BuildRow.verify_group_id == ref)
        _skip_builds(session, list(session.scalars(builds)), error)


def forget_pending_builds(session: Session, group_ids: Iterable[str]) -> None:
    """Drop what these groups were to compile and never will: the next job that needs a build owns it."""
    for ids in chunks(group_ids):
        session.execute(delete(BuildRow).where(BuildRow.group_id.in_(ids), BuildRow.state == "pending"))


def _end_budget(session: Session, job_id: str, words: str) -> None:
    _skip_unjudged(session, job_id, f"{words} it was judged")
    live = (JobProblemRow.job_id == job_id) & JobProblemRow.state.in_(LIVE)
    session.execute(
        update(JobProblemRow)
        .where(live, ~JobProblemRow.planned)
        .values(planned=True, error=f"{words} its search space was lowered")
    )
    _end_items(session, job_id, (PLAN, COMPILE, VERIFY))
    finish_judged(session, session.scalars(select(JobProblemRow.id).where(live)))


def _end_items(session: Session, job_id: str, kinds: Sequence[str]) -> None:
    """Cancel the job's items of these kinds, but hand over those that another live job waits for."""
    now = clock_of(session).now()
    unended = (ItemRow.job_id == job_id) & ItemRow.state.in_(UNENDED) & ItemRow.kind.in_(kinds)
    items = session.execute(select(ItemRow.id, ItemRow.kind, ItemRow.ref).where(unended)).all()
    heirs = _heirs(session, job_id, [ref for _, kind, ref in items if kind in (COMPILE, VERIFY)])
    for group_id, (heir, priority) in heirs.items():
        mine = (ItemRow.ref == group_id) & ItemRow.kind.in_((COMPILE, VERIFY)) & ItemRow.state.in_(UNENDED)
        session.execute(update(ItemRow).where(mine).values(job_id=heir, priority=priority))
        session.execute(update(GroupRow).where(GroupRow.id == group_id).values(job_id=heir))
    # The token stays: the worker that holds the item learns from `renew` that it was cancelled, not lost.
    session.execute(update(ItemRow).where(unended).values(state="cancelled", finished_at=now, lease_expires_at=None))
    orphans = [ref for _, kind, ref in items if kind == COMPILE and ref not in heirs]
    forget_pending_builds(session, orphans)
    for ids in chunks(orphans):
        session.execute(update(GroupRow).where(GroupRow.id.in_(ids)).values(state="cancelled", finished_at=now))


def _heirs(session: Session, job_id: str, group_ids: Sequence[str]) -> dict[str, tuple[str, int]]:
    """For each group with an unjudged candidate of another live job: that job and its priority, the most urgent one."""
    heirs: dict[str, tuple[str, int]] = {}
    for column in (BuildRow.group_id, BuildRow.verify_group_id):
        for ids in chunks(group_ids):
            rows = session.execute(
                select(column, JobRow.id, JobRow.priority)
                .join(CandidateRow, CandidateRow.build == BuildRow.id)
                .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
                .join(JobRow, JobRow.id == JobProblemRow.job_id)
                .where(column.in_(ids), CandidateRow.verdict.is_(None), JobRow.id != job_id)
                .where(JobRow.state.in_(LIVE), JobProblemRow.state.in_(LIVE))
                .distinct()
            )
            for group_id, heir, priority in rows:
                if group_id is not None and (group_id not in heirs or priority > heirs[group_id][1]):
                    heirs[group_id] = (heir, priority)
    return heirs


def _skip_unjudged(session: Session, job_id: str, message: str) -> None:
    mine = select(JobProblemRow.id).where(JobProblemRow.job_id == job_id)
    session.execute(
        update(CandidateRow)
        .where(CandidateRow.job_problem_id.in_(mine), CandidateRow.verdict.is_(None))
        .values(verdict="skipped", message=message)
        .execution_options(synchronize_session=False)
    )


def _skip_builds(session: Session, build_ids: Sequence[str], message: str) -> None:
    """Skip the unjudged candidates of these builds in all jobs, and finish the problems that have none left."""
    touched: set[int] = set()
    for ids in chunks(build_ids):
        unjudged = CandidateRow.build.in_(ids) & CandidateRow.verdict.is_(None)
        touched.update(session.scalars(select(CandidateRow.job_problem_id).where(unjudged).distinct()))
        session.execute(
            update(CandidateRow)
            .where(unjudged)
            .values(verdict="skipped", message=message)
            .execution_options(synchronize_session=False)
        )
    finish_judged(session, touched)


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
