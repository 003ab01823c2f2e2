"""How problems and jobs end: finished; before their time by a cancel, a spent budget, a task that failed for good.

Work and builds that no other job needs end with a job. Its candidates are `skipped`, which says nothing of their
kernels, a part at a time (`find_ended`): a job may have a hundred thousand.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import ColumnElement, String, and_, cast, exists, func, or_, select, true, update

from cukiln.counted import counted
from cukiln.types import StageSeconds
from storage.database.session import Session, clock_of
from storage.database.sql import asks_predicted, change, chunks, core
from storage.database.tables import (
    COMPILE_FAILURES,
    LIVE,
    PENDING_OR_GIVEN_UP,
    BuildRow,
    CandidateRow,
    GroupRow,
    JobProblemRow,
    JobRow,
    PendingBuildRow,
    TaskJobRow,
    TaskRow,
)
from storage.entities.jobs import JobStatus, job_state
from storage.entities.stage_times import add_seconds, by_phase
from storage.entities.task_kinds import COMPARE, COMPILE, FINISH, MEASURE, PLAN, VERIFY, group_of_ref, parse_plan_ref
from storage.errors import LostLease
from storage.queue.losses import LOST
from storage.queue.new_tasks import UNENDED
from storage.queue.tasks import Lease, complete
from storage.transitions.apply_verdicts import (
    CandidateVerdict,
    add_next_steps,
    compile_failures,
    give_verdicts,
    of_problems,
    skip_lost,
    write_candidate_verdicts,
)
from storage.transitions.pending_builds import abandon_group, drop_pending_builds, drop_unneeded, forget_given_up

SEARCH = (PLAN, COMPILE, VERIFY, MEASURE, COMPARE)
"""The kinds that a spent budget ends; what has a verdict by then is finished."""
CLEARED_AT_ONCE = 500
"""Candidates, and pending builds, of one transaction."""
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
    lost = select(JobProblemRow.id).where(JobProblemRow.job_id == job_id, JobProblemRow.error.startswith(LOST)).limit(1)
    whole = len(counts) == 1 and session.scalar(lost) is None
    state = "failed" if not counts.get("done") else "done" if whole else "partial"
    ended = session.execute(
        update(JobRow)
        .where(JobRow.id == job_id, JobRow.state.in_(LIVE))
        .values(state=state, finished_at=clock_of(session).now(), error=_job_error(session, job_id, counts))
        .returning(JobRow.id)
    ).one_or_none()
    if ended is None:
        return None
    _end_plans(session, job_id)
    # Results of other jobs, or losses, may have given its candidates their verdicts before its own tasks began.
    end_tasks(session, job_id, SEARCH)
    return state


def _end_plans(session: Session, job_id: str) -> None:
    """Of a job that has ended, those that are still leased: their attempt has just ended the last problem. One whose
    problems all failed has failed with the first's error; none was cancelled."""
    task, now = core(TaskRow).c, clock_of(session).now()
    of_job = task.id.in_(select(TaskJobRow.task_id).where(TaskJobRow.job_id == job_id))
    leased = select(task.id, task.ref).where(of_job, task.kind == PLAN, task.state == "leased")
    for id, ref in session.execute(leased).all():
        _, first, last = parse_plan_ref(ref)
        problems = select(JobProblemRow.state, JobProblemRow.error).where(
            JobProblemRow.job_id == job_id, JobProblemRow.position.between(first, last)
        )
        states, errors = zip(*session.execute(problems.order_by(JobProblemRow.position)), strict=True)
        failed = {"state": "failed", "error": errors[0]} if set(states) == {"failed"} else {"state": "done"}
        change(session, TaskRow, task.id == id, **failed, finished_at=now, lease_expires_at=None)


def expire_budgets(session: Session) -> list[str]:
    """End the search of every job past its deadline; their ids. What has a verdict is finished, the rest skipped."""
    now = clock_of(session).now()
    needed_by = exists().where(
        TaskJobRow.job_id == JobRow.id,
        TaskJobRow.wanted,
        TaskRow.id == TaskJobRow.task_id,
        TaskRow.kind.in_(SEARCH),
        TaskRow.state.in_(UNENDED),
    )
    has_pending = exists().where(PendingBuildRow.job_id == JobRow.id)
    query = select(JobRow.id).where(JobRow.state == "running", JobRow.deadline <= now, or_(needed_by, has_pending))
    jobs = list(session.scalars(query.order_by(JobRow.id)))
    for job_id in jobs:
        end_tasks(session, job_id, SEARCH)
    return jobs


Part = Callable[[Session], None]
"""Clears some of what has ended, in one short transaction."""


def find_ended(session: Session, *, all_jobs: bool = False) -> Part | None:
    """What is to be cleared next; None where all is. `all_jobs`: also of jobs that ended long ago."""
    now = clock_of(session).now()
    since = 0.0 if all_jobs else now - RECENT_SECONDS
    late = and_(JobRow.state.in_(LIVE), JobRow.deadline <= now)
    over = and_(JobRow.state.not_in(LIVE), JobRow.finished_at > since)
    return (
        _pending_builds(session, or_(late, over))
        or _unsearched(session, late)
        or _unverified(session, late, over)
        or _given_up(session)
        or _failed_verification(session, since)
    )


def _pending_builds(session: Session, ended: ColumnElement[bool]) -> Part | None:
    """Of jobs that have ended or are out of time."""
    has_pending = exists().where(PendingBuildRow.job_id == JobRow.id)
    job_id = session.scalar(select(JobRow.id).where(ended, has_pending).limit(1))
    return None if job_id is None else lambda session: drop_pending_builds(session, job_id, CLEARED_AT_ONCE)


def _unsearched(session: Session, late: ColumnElement[bool]) -> Part | None:
    """Problems that are out of time, and lack no verdict, or were not lowered: they are finished."""
    problem = core(JobProblemRow).c
    ref = cast(problem.id, String)
    continuing = exists().where(
        TaskRow.ref == ref,
        or_(TaskRow.kind == FINISH, and_(TaskRow.kind == COMPARE, TaskRow.state.in_(UNENDED))),
    )
    rows = session.execute(
        select(problem.id, JobRow.budget_seconds)
        .join(JobRow, JobRow.id == problem.job_id)
        .where(late, problem.state.in_(LIVE), ~continuing, or_(~problem.planned, ~_without_verdict()))
        .limit(CLEARED_AT_ONCE)
    ).all()
    if not rows:
        return None

    def part(session: Session) -> None:
        for budget in {row.budget_seconds for row in rows}:
            ids = [row.id for row in rows if row.budget_seconds == budget]
            error = f"{_budget(budget)} its search space was lowered"
            unplanned = problem.id.in_(ids) & problem.state.in_(LIVE) & ~problem.planned
            change(session, JobProblemRow, unplanned, planned=True, error=error)
        add_next_steps(session, [row.id for row in rows])

    return part


def _unverified(session: Session, late: ColumnElement[bool], over: ColumnElement[bool]) -> Part | None:
    """Candidates of problems that were cancelled, have failed or are out of time."""
    problem = core(JobProblemRow).c
    ended = problem.state.in_(("cancelled", "failed"))
    # By their jobs: SQLite would read every problem.
    recent = problem.job_id.in_(select(JobRow.id).where(or_(JobRow.state.in_(LIVE), over)))
    row = session.execute(
        select(problem.job_id, problem.state, problem.error, JobRow.budget_seconds)
        .join(JobRow, JobRow.id == problem.job_id)
        .where(recent, or_(late, ended), _without_verdict())
        .limit(1)
    ).one_or_none()
    if row is None:
        return None
    if row.state == "cancelled":
        reason = "the job was cancelled"
    elif row.state == "failed":
        reason = f"its problem failed: {row.error}"
    else:
        reason = f"{_budget(row.budget_seconds)} it was verified"
    alike = (
        (problem.job_id == row.job_id) & (problem.state == row.state) & problem.error.is_not_distinct_from(row.error)
    )
    return lambda session: _skip_some(session, row.job_id, alike, reason)


def _skip_some(session: Session, job_id: str, problems: ColumnElement[bool], reason: str) -> None:
    candidate, problem = core(CandidateRow).c, core(JobProblemRow).c
    rows = session.execute(
        select(candidate.job_problem_id, candidate.candidate, candidate.build)
        .join(core(JobProblemRow), problem.id == candidate.job_problem_id)
        .where(problems, candidate.verdict.is_(None))
        .limit(CLEARED_AT_ONCE)
    ).all()
    write_candidate_verdicts(
        session, [CandidateVerdict(row.job_problem_id, row.candidate, "skipped", reason) for row in rows]
    )
    drop_unneeded(session, job_id, sorted({row.build for row in rows}))
    add_next_steps(session, {row.job_problem_id for row in rows})


def _given_up(session: Session) -> Part | None:
    """Builds that could not be compiled, for no known fault of their own."""
    query = (
        select(BuildRow.id, BuildRow.log)
        .where(PENDING_OR_GIVEN_UP, BuildRow.state == "given_up")
        .limit(CLEARED_AT_ONCE)
    )
    if not session.execute(query).all():
        return None

    def part(session: Session) -> None:
        reasons = {id: str(log) for id, log in session.execute(query)}
        touched = skip_lost(session, reasons, true(), CLEARED_AT_ONCE)
        add_next_steps(session, touched)
        if len(touched) < CLEARED_AT_ONCE:
            forget_given_up(session, list(reasons))

    return part


def _failed_verification(session: Session, since: float) -> Part | None:
    """Candidates of verify and measure tasks that failed for good."""
    task, build, candidate = (core(table).c for table in (TaskRow, BuildRow, CandidateRow))
    rows = session.execute(
        select(task.id, task.kind, task.ref, task.target, task.error)
        .where(task.kind.in_((VERIFY, MEASURE)), task.state == "failed", task.finished_at > since)
        .order_by(task.id)
    )
    for row in rows:
        asked = of_problems(asks_predicted() if row.kind == VERIFY else JobProblemRow.device_class == row.target)
        waiting = (
            select(candidate.build)
            .join(core(BuildRow), build.id == candidate.build)
            .where(build.group_id == group_of_ref(row.ref), candidate.verdict.is_(None))
            .where(or_(build.state.in_(COMPILE_FAILURES), and_(build.state == "ok", asked)))
            # Evaluated once more when it is cleared: a later job has the task tried again.
            .where(exists().where(task.id == row.id, task.state == "failed"))
        )
        if session.scalar(waiting.limit(1)) is not None:
            return partial(_skip_unverified, waiting=waiting, asked=asked, reason=row.error)
    return None


def _skip_unverified(session: Session, *, waiting: Any, asked: ColumnElement[bool], reason: str) -> None:
    ids: list[str] = list(session.scalars(waiting.distinct()))
    failed = compile_failures(session, ids)
    touched = give_verdicts(session, failed, true(), CLEARED_AT_ONCE)
    compiled = {id: ("skipped", reason) for id in ids if id not in failed}
    touched += give_verdicts(session, compiled, asked, CLEARED_AT_ONCE)
    add_next_steps(session, touched)


def _without_verdict() -> ColumnElement[bool]:
    """Of a problem's row: whether one of its candidates has no verdict."""
    return exists().where(CandidateRow.job_problem_id == JobProblemRow.id, CandidateRow.verdict.is_(None))


def _budget(seconds: float | None) -> str:
    assert seconds is not None, "a deadline comes from a budget"
    return f"the budget of {seconds:g} seconds ended before"


def give_up(session: Session, kind: str, ref: str, error: str) -> None:
    """Settle what depends on a task that failed for good; its candidates are left to `find_ended`."""
    if kind == PLAN:
        job_id, first, last = parse_plan_ref(ref)
        in_chunk = (JobProblemRow.job_id == job_id) & JobProblemRow.position.between(first, last)
        _fail_problems(session, job_id, in_chunk & ~JobProblemRow.planned, error)
    elif kind == FINISH:
        job = session.scalar(select(JobProblemRow.job_id).where(JobProblemRow.id == int(ref)))
        if job is not None:
            _fail_problems(session, job, JobProblemRow.id == int(ref), error)
    elif kind == COMPARE:
        add_next_steps(session, [int(ref)])


def end_tasks(session: Session, job_id: str, kinds: Sequence[str]) -> None:
    """The job needs no tasks of these kinds any more; what no other job needs is cancelled."""
    now = clock_of(session).now()
    task, needed_by = core(TaskRow).c, core(TaskJobRow).c
    of_job = select(needed_by.task_id).where(needed_by.job_id == job_id, needed_by.wanted)
    unended = task.id.in_(of_job) & task.state.in_(UNENDED) & task.kind.in_(kinds)
    ids = list(session.scalars(select(task.id).where(unended)))
    for some in chunks(ids):
        change(session, TaskJobRow, needed_by.job_id == job_id, needed_by.task_id.in_(some), wanted=False)
        unwanted = task.id.in_(some) & ~exists().where(needed_by.task_id == task.id, needed_by.wanted)
        # The token stays: `renew` reports to its worker that the task was cancelled, not lost.
        cancelled = session.execute(
            update(core(TaskRow))
            .where(unwanted)
            .values(state="cancelled", finished_at=now, lease_expires_at=None)
            .returning(task.kind, task.ref)
        ).all()
        groups = [row.ref for row in cancelled if row.kind == COMPILE]
        change(session, GroupRow, GroupRow.id.in_(groups), state="cancelled", finished_at=now)
        for group in groups:
            abandon_group(session, group)


def _fail_problems(session: Session, job_id: str, which: ColumnElement[bool], error: str) -> None:
    failed = {"state": "failed", "error": error, "finished_at": clock_of(session).now()}
    change(session, JobProblemRow, which, JobProblemRow.state.in_(LIVE), **failed)
    settle_job(session, job_id)


def _job_error(session: Session, job_id: str, counts: dict[str, int]) -> str | None:
    """Of a job with problems that failed, else of one that lost candidates."""
    errors = select(JobProblemRow.name, JobProblemRow.error).where(JobProblemRow.job_id == job_id)
    errors = errors.order_by(JobProblemRow.position).limit(1)
    if first := session.execute(errors.where(JobProblemRow.state == "failed")).one_or_none():
        what = f"{counts['failed']} of {counted(sum(counts.values()), 'problem')} failed"
    elif first := session.execute(errors.where(JobProblemRow.error.startswith(LOST))).one_or_none():
        what = "candidates were skipped"
    else:
        return None
    return f"{what}; the first, {first.name}: {first.error}"


def cancel_job(session: Session, job_id: str) -> JobStatus | None:
    """Cancel the job unless it has ended; the job as it is now, or None. `find_ended` skips its candidates."""
    ended = {"state": "cancelled", "finished_at": clock_of(session).now()}
    live = (JobRow.id == job_id) & JobRow.state.in_(LIVE)
    if session.scalar(update(JobRow).where(live).values(**ended).returning(JobRow.id)) is not None:
        problems = (JobProblemRow.job_id == job_id) & JobProblemRow.state.in_(LIVE)
        change(session, JobProblemRow, problems, **ended)
        end_tasks(session, job_id, (*SEARCH, FINISH))
    return job_state(session, job_id)


def finish_problem(
    session: Session,
    lease: Lease,
    *,
    winner: str | None,
    error: str | None,
    extra_seconds: Mapping[str, StageSeconds] | None = None,
    phases: Sequence[Mapping[str, Any]] = (),
) -> str | None:
    """End a finish task and its problem, with a winner (a candidate id) or an error; the job's new state if this was
    its last. `extra_seconds`: of finishing, by stage, `phases`: within it. Raises `LostLease`."""
    if (winner is None) == (error is None):
        raise ValueError("a finished problem has either a winner or an error")
    complete(session, lease)
    problem_id = int(lease.ref)
    state = "failed" if winner is None else "done"
    why = error or JobProblemRow.error  # the note on what was lost or skipped stays
    job_id = session.scalar(
        update(JobProblemRow)
        .where(JobProblemRow.id == problem_id, JobProblemRow.state.in_(LIVE))
        .values(state=state, winner=winner, error=why, finished_at=clock_of(session).now())
        .returning(JobProblemRow.job_id)
    )
    if job_id is None:
        raise LostLease(lease.kind, lease.ref, lease.token)
    change(session, TaskRow, TaskRow.id == lease.task_id, phases=[dict(phase) for phase in phases])
    waiting = {"queue": StageSeconds(wall=lease.waited_seconds)}
    add_seconds(session, {problem_id: {**(extra_seconds or {}), **by_phase(phases), **waiting}})
    return settle_job(session, job_id)
