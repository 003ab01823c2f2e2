"""How work ends before its time: a cancelled job, a spent budget, an item that failed for good.

Builds are shared between jobs. So a group that another live job waits for is handed to that job instead of being
cancelled, and the pending builds of a group that nobody will compile are forgotten, so that a later job owns them anew.
Nothing of this is remembered as a verdict of the kernel: its candidates are `skipped`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, delete, func, or_, select, true, update
from sqlalchemy.orm import InstrumentedAttribute

from storage.database import Session, clock_of
from storage.device_classes import asks_predicted
from storage.judge import LIVE, Judged, finish_judged
from storage.judging_work import group_of_ref
from storage.new_items import COMPARE, COMPILE, FINISH, MEASURE, PLAN, REFINE, UNENDED, VERIFY, parse_plan_ref
from storage.rows import chunks, core
from storage.tables import BuildRow, CandidateRow, GroupRow, ItemRow, JobProblemRow, JobRow

SEARCH = (PLAN, COMPILE, VERIFY, MEASURE, REFINE, COMPARE)
"""The kinds that a spent budget ends; what was judged by then is finished."""


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
    """Everything a cancelled job still waits for: its problems, candidates and items."""
    now = clock_of(session).now()
    session.execute(
        update(JobProblemRow)
        .where(JobProblemRow.job_id == job_id, JobProblemRow.state.in_(LIVE))
        .values(state="cancelled", finished_at=now)
    )
    _skip_unjudged(session, job_id, "the job was cancelled")
    end_items(session, job_id, (*SEARCH, FINISH))


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
    # Nobody claims these any more: what is still to be compared, and what was judged otherwise meanwhile.
    working = select(ItemRow.id).where(
        ItemRow.job_id == JobRow.id, ItemRow.kind.in_(SEARCH), ItemRow.state.in_(UNENDED)
    )
    jobs = session.execute(
        select(JobRow.id, JobRow.budget_seconds)
        .where(JobRow.state == "running", JobRow.deadline <= now, or_(searching.exists(), working.exists()))
        .order_by(JobRow.id)
    ).all()
    for job_id, budget in jobs:
        _end_budget(session, job_id, f"the budget of {budget:g} seconds ended before")
    return [job_id for job_id, _ in jobs]


def give_up(session: Session, kind: str, ref: str, target: str | None, error: str) -> None:
    """Settle what waited for an item that failed for good."""
    if kind == PLAN:
        job_id, first, last = parse_plan_ref(ref)
        in_chunk = (JobProblemRow.job_id == job_id) & JobProblemRow.position.between(first, last)
        _fail_problems(session, job_id, in_chunk & ~JobProblemRow.planned, error)
    elif kind in (REFINE, FINISH):
        job = session.scalar(select(JobProblemRow.job_id).where(JobProblemRow.id == int(ref)))
        if job is not None:
            _fail_problems(session, job, JobProblemRow.id == int(ref), error)
    elif kind == COMPARE:
        finish_judged(session, [int(ref)])
    elif kind == COMPILE:
        builds = select(BuildRow.id).where(BuildRow.group_id == ref, BuildRow.state == "pending")
        skip_builds(session, list(session.scalars(builds)), error)
        forget_pending_builds(session, [ref])
        session.execute(
            update(GroupRow).where(GroupRow.id == ref).values(state="failed", finished_at=clock_of(session).now())
        )
    elif kind == VERIFY:
        builds = select(BuildRow.id).where(BuildRow.verify_group_id == ref)
        skip_builds(session, list(session.scalars(builds)), error, asks_predicted())
    elif kind == MEASURE:
        builds = select(BuildRow.id).where(BuildRow.group_id == group_of_ref(ref), BuildRow.state == "ok")
        skip_builds(session, list(session.scalars(builds)), error, JobProblemRow.device_class == target)


def forget_pending_builds(session: Session, group_ids: Iterable[str]) -> None:
    """Drop what these groups were to compile and never will: the next job that needs a build owns it.

    What had been compiled before, and only lost its library, stands as it did.
    """
    for ids in chunks(group_ids):
        pending = BuildRow.group_id.in_(ids) & (BuildRow.state == "pending")
        session.execute(delete(BuildRow).where(pending, BuildRow.code_digest.is_(None)))
        session.execute(update(core(BuildRow)).where(pending).values(state="ok"))


def skip_builds(
    session: Session, build_ids: Sequence[str], message: str, problems: ColumnElement[bool] | None = None
) -> list[Judged]:
    """Skip the unjudged candidates of these builds in all jobs (only of such `problems`, if given: a condition on their
    rows), and let the problems that have none left go on."""
    touched: set[int] = set()
    for ids in chunks(build_ids):
        unjudged = CandidateRow.build.in_(ids) & CandidateRow.verdict.is_(None)
        if problems is not None:
            of_such = select(JobProblemRow.id).where(JobProblemRow.id == CandidateRow.job_problem_id, problems)
            unjudged &= of_such.exists()
        touched.update(session.scalars(select(CandidateRow.job_problem_id).where(unjudged).distinct()))
        session.execute(
            update(CandidateRow)
            .where(unjudged)
            .values(verdict="skipped", message=message)
            .execution_options(synchronize_session=False)
        )
    return finish_judged(session, touched)


def _end_budget(session: Session, job_id: str, words: str) -> None:
    _skip_unjudged(session, job_id, f"{words} it was judged")
    live = (JobProblemRow.job_id == job_id) & JobProblemRow.state.in_(LIVE)
    session.execute(
        update(JobProblemRow)
        .where(live, ~JobProblemRow.planned)
        .values(planned=True, error=f"{words} its search space was lowered")
    )
    end_items(session, job_id, SEARCH)
    finish_judged(session, session.scalars(select(JobProblemRow.id).where(live)))


def end_items(session: Session, job_id: str, kinds: Sequence[str]) -> None:
    """Cancel the job's items of these kinds, but hand over those that another live job waits for."""
    now = clock_of(session).now()
    unended = (ItemRow.job_id == job_id) & ItemRow.state.in_(UNENDED) & ItemRow.kind.in_(kinds)
    items = session.execute(select(ItemRow.id, ItemRow.kind, ItemRow.ref, ItemRow.target).where(unended)).all()
    heirs = _heirs(session, job_id, items)
    for item_id, (heir, priority) in heirs.items():
        session.execute(update(ItemRow).where(ItemRow.id == item_id).values(job_id=heir, priority=priority))
    for item in items:
        if item.id in heirs and item.kind != MEASURE:  # a group that is measured has done its own work
            session.execute(update(GroupRow).where(GroupRow.id == item.ref).values(job_id=heirs[item.id][0]))
    # The token stays: the worker that holds the item learns from `renew` that it was cancelled, not lost.
    session.execute(update(ItemRow).where(unended).values(state="cancelled", finished_at=now, lease_expires_at=None))
    orphans = [item.ref for item in items if item.kind == COMPILE and item.id not in heirs]
    forget_pending_builds(session, orphans)
    for ids in chunks(orphans):
        session.execute(update(GroupRow).where(GroupRow.id.in_(ids)).values(state="cancelled", finished_at=now))


def _heirs(session: Session, job_id: str, items: Sequence[Any]) -> dict[int, tuple[str, int]]:
    """For each item that another live job has an unjudged candidate for: that job and its priority, the most urgent
    one. By item id."""
    places: dict[str, tuple[InstrumentedAttribute[str | None], ColumnElement[bool]]] = {
        # What it is to make, whoever waits for it; what it is to prove; what it is to measure.
        COMPILE: (BuildRow.group_id, true()),
        VERIFY: (BuildRow.verify_group_id, asks_predicted()),
        MEASURE: (BuildRow.group_id, ~asks_predicted()),
    }
    heirs: dict[int, tuple[str, int]] = {}
    for kind, (column, such) in places.items():
        mine: dict[tuple[str | None, str | None], int] = {
            (group_of_ref(item.ref), item.target if kind == MEASURE else None): item.id
            for item in items
            if item.kind == kind
        }
        for ids in chunks({group for group, _ in mine}):
            rows = session.execute(
                select(column, JobProblemRow.device_class, JobRow.id, JobRow.priority)
                .join(CandidateRow, CandidateRow.build == BuildRow.id)
                .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
                .join(JobRow, JobRow.id == JobProblemRow.job_id)
                .where(column.in_(ids), such, CandidateRow.verdict.is_(None), JobRow.id != job_id)
                .where(JobRow.state.in_(LIVE), JobProblemRow.state.in_(LIVE))
                .distinct()
            )
            for group, device_class, heir, priority in rows:
                item_id = mine.get((group, device_class if kind == MEASURE else None))
                if item_id is not None and (item_id not in heirs or priority > heirs[item_id][1]):
                    heirs[item_id] = (heir, priority)
    return heirs


def _skip_unjudged(session: Session, job_id: str, message: str) -> None:
    mine = select(JobProblemRow.id).where(JobProblemRow.job_id == job_id)
    session.execute(
        update(CandidateRow)
        .where(CandidateRow.job_problem_id.in_(mine), CandidateRow.verdict.is_(None))
        .values(verdict="skipped", message=message)
        .execution_options(synchronize_session=False)
    )


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
