"""How far a job is, and how long it will still take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from sqlalchemy import and_, case, distinct, func, or_, select, true

from cukiln.types import JobState, Progress, Seconds, StageName, StageProgress, StageSeconds
from storage.database import Session, clock_of
from storage.jobs import JobStatus, job_state
from storage.judge import LIVE
from storage.new_items import COMPILE, FINISH, PLAN, VERIFY
from storage.tables import BuildRow, CandidateRow, GroupRow, ItemRow, JobProblemRow, JobRow

RECENT_GROUPS = 50
"""Groups whose observed times correct the predictions: enough to be steady, few enough to follow a new machine."""
RECENT_FINISHES = 20
FINISH_SECONDS = 0.75
"""Of one winner, before any was finished here: nvcc, g++ and the linker on one kernel. Measured as 0.72 to 0.74 s for
three fp32 matmuls on two cores of an AMD EPYC."""
FINISHED = ("done", "failed")


@dataclass(frozen=True)
class JobProgress:
    """What an event of a running job says."""

    state: JobState
    progress: Progress
    seconds: Seconds


def job_progress(session: Session, job_id: str) -> JobProgress | None:
    """Counts and times of a job, without its problems: cheap enough to ask for at every step. None: no such job."""
    job = job_state(session, job_id)
    if job is None:
        return None
    stages = {}
    for stage in get_args(StageName):
        wall, cpu = (JobProblemRow.seconds[stage][part].as_float() for part in ("wall", "cpu"))
        stages[stage] = (func.sum(func.coalesce(wall, 0.0)), func.sum(func.coalesce(cpu, 0.0)))
    columns = [column for pair in stages.values() for column in pair]
    row = session.execute(select(*columns).where(JobProblemRow.job_id == job_id)).one()
    seconds = {
        stage: StageSeconds(wall=row[2 * place] or 0.0, cpu=row[2 * place + 1] or 0.0)
        for place, stage in enumerate(stages)
    }
    return JobProgress(job.state, progress_of(session, job), Seconds(**seconds))


def progress_of(session: Session, job: JobStatus) -> Progress:
    """Stage counts: problems lowered, kernels compiled, candidates judged, problems finished.

    Done is what really happened: what a cancel, a spent budget or a failed item left out counts in the totals alone.
    """
    problems = session.execute(
        select(
            func.count(),
            # A spent budget marks problems planned that were never started.
            _count_if(and_(JobProblemRow.planned, JobProblemRow.started_at.is_not(None))),
            _count_if(JobProblemRow.state.in_(FINISHED)),
        ).where(JobProblemRow.job_id == job.id)
    ).one()
    judged = and_(CandidateRow.verdict.is_not(None), CandidateRow.verdict != "skipped")
    # A later job may compile what this one has left: that is not its work.
    in_time = true() if job.finished_at is None else GroupRow.finished_at <= job.finished_at
    built = case((or_(judged, and_(BuildRow.state != "pending", in_time)), CandidateRow.build))
    candidates = session.execute(
        select(
            func.count(),
            _count_if(judged),
            _count_if(and_(judged, CandidateRow.verdict != "ok")),
            func.count(distinct(CandidateRow.build)),
            func.count(distinct(built)),
        )
        .select_from(CandidateRow)
        .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
        .join(BuildRow, BuildRow.id == CandidateRow.build, isouter=True)
        .join(GroupRow, GroupRow.id == BuildRow.group_id, isouter=True)
        .where(JobProblemRow.job_id == job.id)
    ).one()
    return Progress(
        lower=StageProgress(done=problems[1], total=problems[0]),
        compile=StageProgress(done=candidates[4], total=candidates[3]),
        verify=StageProgress(done=candidates[1], total=candidates[0]),
        finish=StageProgress(done=problems[2], total=problems[0]),
        candidates_done=candidates[1],
        candidates_failed=candidates[2],
        eta_seconds=_eta(session, job) if job.state in LIVE else None,
    )


def _eta(session: Session, job: JobStatus) -> float | None:
    """Seconds to the end: the work that is waiting before the job's last item, over the workers seen at work.

    Predicted compile seconds are scaled by what recent groups took, and verification takes the proportion of a compile
    that it took there; on a new machine both are taken as predicted. Each problem that has not ended takes what
    finishing one took lately. None until the whole job is planned.
    """
    scale, with_verify = _observed(session)
    finish = _observed_finish(session)
    now = clock_of(session).now()
    # Counted by problem: most of the finish items will be added only when the last candidate is judged.
    left, workers, unplanned = finish * _unended_problems(session, job), set(), False
    for item in _items_before_the_end(session, job):
        unplanned = unplanned or (item.kind == PLAN and item.job_id == job.id)
        seconds = item.predicted_seconds
        if item.kind == COMPILE:
            seconds *= scale * with_verify
        elif item.kind not in (PLAN, VERIFY):
            seconds = 0.0
        if item.state == "claimed":
            workers.add(item.worker)
            spent = now - item.started_at
            seconds = -min(spent, finish) if item.kind == FINISH else max(0.0, seconds - spent)
        left += seconds
    return None if unplanned else left / max(1, len(workers))


def _observed(session: Session) -> tuple[float, float]:
    """Actual over predicted compile seconds, and compile with verification over compile alone, of recent groups."""
    ended = session.execute(
        select(GroupRow.predicted_seconds, GroupRow.compile_seconds, GroupRow.verify_seconds)
        .where(GroupRow.state == "compiled", GroupRow.predicted_seconds > 0)
        .order_by(GroupRow.created_at.desc())
        .limit(RECENT_GROUPS)
    ).all()
    pairs = [(row.compile_seconds.get("wall", 0.0), row.verify_seconds.get("wall")) for row in ended]
    predicted, compiled = sum(row.predicted_seconds for row in ended), sum(pair[0] for pair in pairs)
    judged = [(compile_wall, verify_wall) for compile_wall, verify_wall in pairs if verify_wall is not None]
    scale = compiled / predicted if compiled else 1.0
    compile_wall = sum(pair[0] for pair in judged)
    return scale, 1.0 + (sum(pair[1] for pair in judged) / compile_wall if compile_wall else 1.0)


def _observed_finish(session: Session) -> float:
    """Seconds that finishing one problem took lately; as predicted where none was finished."""
    ended = session.execute(
        select(ItemRow.started_at, ItemRow.finished_at)
        .where(ItemRow.kind == FINISH, ItemRow.state == "done", ItemRow.started_at.is_not(None))
        .order_by(ItemRow.id.desc())
        .limit(RECENT_FINISHES)
    ).all()
    return sum(row.finished_at - row.started_at for row in ended) / len(ended) if ended else FINISH_SECONDS


def _served_before(job: JobStatus) -> Any:
    """The job itself, and those whose items are claimed before its own."""
    earlier = and_(JobRow.priority == job.priority, JobRow.created_at <= job.created_at)
    return or_(JobRow.id == job.id, JobRow.priority > job.priority, earlier)


def _unended_problems(session: Session, job: JobStatus) -> int:
    """Problems of the job, and of those that are served before it, that are still to be finished."""
    return session.scalars(
        select(func.count())
        .select_from(JobProblemRow)
        .join(JobRow, JobRow.id == JobProblemRow.job_id)
        .where(JobProblemRow.state.in_(LIVE), JobRow.state.in_(LIVE), _served_before(job))
    ).one()


def _items_before_the_end(session: Session, job: JobStatus) -> Any:
    """Unended items of the job and of those that are served before it."""
    return session.execute(
        select(
            ItemRow.kind,
            ItemRow.job_id,
            ItemRow.state,
            ItemRow.worker,
            ItemRow.started_at,
            ItemRow.predicted_seconds,
        )
        .join(JobRow, JobRow.id == ItemRow.job_id)
        .where(ItemRow.state.in_(("waiting", "claimed")), _served_before(job))
    )


def _count_if(condition: Any) -> Any:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)
