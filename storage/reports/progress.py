"""How far a job is, and how long it will still take."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, String, and_, case, cast, distinct, func, or_, select, union_all
from sqlalchemy.orm import aliased

from cukiln.types import JobState, Progress, Seconds, StageProgress
from storage.database.session import Session, clock_of
from storage.database.sql import asks_predicted, core
from storage.database.tables import (
    LIVE,
    UNBUILT,
    BuildRow,
    CandidateRow,
    DeviceRow,
    GroupRow,
    JobProblemRow,
    JobRow,
    PendingBuildRow,
    TaskJobRow,
    TaskRow,
)
from storage.entities.heartbeats import describe_pauses, live_devices, pauses
from storage.entities.jobs import JobStatus, job_state
from storage.entities.stage_times import seconds_of, stage_sums
from storage.entities.task_kinds import COMPARE, COMPILE, FINISH, MEASURE, VERIFY
from storage.queue.new_tasks import UNENDED
from storage.transitions.apply_verdicts import COMPARE_SECONDS, FINISH_SECONDS, MEASURE_SECONDS

RECENT_GROUPS = 50
"""Groups whose observed times correct the predictions: enough to be steady, few enough to follow a new machine."""
RECENT_TASKS = 20
FINISHED = ("done", "failed")
FIRST_SECONDS = {COMPARE: COMPARE_SECONDS, FINISH: FINISH_SECONDS}
ON_GPU = frozenset({MEASURE, COMPARE})


@dataclass(frozen=True)
class JobProgress:
    """The content of a running job's event."""

    state: JobState
    progress: Progress
    seconds: Seconds


def job_progress(session: Session, job_id: str, live_seconds: float | None = None) -> JobProgress | None:
    """Counts and times of a job without its problems, cheap at every step; with `live_seconds`, why it waits."""
    job = job_state(session, job_id)
    if job is None:
        return None
    row = session.execute(select(*stage_sums()).where(JobProblemRow.job_id == job_id)).mappings().one()
    return JobProgress(job.state, progress_of(session, job, live_seconds), seconds_of(row))


def progress_of(session: Session, job: JobStatus, live_seconds: float | None = None) -> Progress:
    """Stage counts: problems lowered, kernels compiled, candidates verified, those right on a GPU or still open
    measured, problems finished.

    Done is what really happened: what a cancel, a spent budget or a failed task left out counts in the totals alone.
    """
    problems = session.execute(
        select(
            func.count(),
            # A spent budget marks problems planned that were never started.
            _count_if(and_(JobProblemRow.planned, JobProblemRow.started_at.is_not(None))),
            _count_if(JobProblemRow.state.in_(FINISHED)),
        ).where(JobProblemRow.job_id == job.id)
    ).one()
    with_verdict = and_(CandidateRow.verdict.is_not(None), CandidateRow.verdict != "skipped")
    to_measure = and_(~asks_predicted(), or_(CandidateRow.verdict.is_(None), CandidateRow.verdict == "ok"))
    is_built: ColumnElement[bool] = BuildRow.state.not_in(UNBUILT)
    if job.finished_at is not None:  # a later job may compile what this one has left: that is not its work
        in_time = select(GroupRow.id).where(GroupRow.id == BuildRow.group_id, GroupRow.finished_at <= job.finished_at)
        is_built = and_(is_built, in_time.exists())
    built = case((or_(with_verdict, is_built), CandidateRow.build))
    candidates = session.execute(
        select(
            func.count(),
            _count_if(with_verdict),
            _count_if(and_(with_verdict, CandidateRow.verdict != "ok")),
            func.count(distinct(CandidateRow.build)),
            func.count(distinct(built)),
            _count_if(and_(to_measure, CandidateRow.measured_us.is_not(None))),
            _count_if(to_measure),
            _count_if(and_(to_measure, BuildRow.state.in_(UNBUILT))),
        )
        .select_from(CandidateRow)
        .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
        .join(BuildRow, BuildRow.id == CandidateRow.build, isouter=True)
        .where(JobProblemRow.job_id == job.id)
    ).one()
    waits = waiting_for(session, job.id, live_seconds) if job.state in LIVE and live_seconds is not None else None
    return Progress(
        lower=StageProgress(done=problems[1], total=problems[0]),
        compile=StageProgress(done=candidates[4], total=candidates[3]),
        verify=StageProgress(done=candidates[1], total=candidates[0]),
        measure=StageProgress(done=candidates[5], total=candidates[6]),
        finish=StageProgress(done=problems[2], total=problems[0]),
        candidates_done=candidates[1],
        candidates_failed=candidates[2],
        eta_seconds=_eta(session, job, candidates[7]) if job.state in LIVE else None,
        waiting_for=waits,
    )


def _eta(session: Session, job: JobStatus, to_compile: int) -> float | None:
    """Seconds to the end: the work that is left for the job, and what is served beside it: all that is left for jobs of
    a higher priority, and of one of the same priority, with which it takes turns, as much as of its own. The work of
    compilers and of GPUs is added up, as the last group has them one after the other, each over its workers.

    Predicted seconds are scaled by what recent groups and measurements took, and verification on the CPU takes the
    proportion of a compile that it took there; on a new machine all are taken as predicted. Each problem that has not
    ended takes what comparing and finishing one took lately. `to_compile`: candidates on a GPU for which there will be
    a measure task only when they are compiled. None until the whole job is planned.
    """
    unplanned = (JobProblemRow.job_id == job.id) & JobProblemRow.state.in_(LIVE) & ~JobProblemRow.planned
    if session.scalar(select(JobProblemRow.id).where(unplanned).limit(1)) is not None:
        return None
    scale, with_verify = _observed(session)
    each, measuring = _observed_tasks(session)
    left = _Left(_priorities(session, job), job.id)
    on_cpu = JobProblemRow.state.in_(LIVE) & asks_predicted()
    verifying = set(session.scalars(select(JobProblemRow.job_id).where(on_cpu).distinct()))
    # Predicted seconds of builds that are pending or compiling, without what their files cost anyway.
    to_compile_seconds = select(PendingBuildRow.job_id, func.sum(PendingBuildRow.predicted_seconds))
    for job_id, seconds in session.execute(to_compile_seconds.group_by(PendingBuildRow.job_id)):
        left.add(False, job_id, seconds * scale * (with_verify if job_id in verifying else 1.0))
    for job_id, to_compare, to_finish in _unended_problems(session):
        left.add(False, job_id, each[FINISH] * to_finish)
        left.add(True, job_id, each[COMPARE] * to_compare)
    left.add(True, job.id, measuring * MEASURE_SECONDS * to_compile)
    workers: dict[bool, set[str | None]] = {False: set(), True: set()}
    now = clock_of(session).now()
    for task in _unended_tasks(session):
        on_gpu, seconds = task.kind in ON_GPU, 0.0
        if task.kind in (VERIFY, MEASURE):
            seconds = task.predicted_seconds * (measuring if on_gpu else 1.0)
        if task.state == "leased":
            workers[on_gpu].add(task.worker)
            spent = now - task.started_at
            done_at_most = each.get(task.kind, task.predicted_seconds * scale if task.kind == COMPILE else seconds)
            seconds -= min(spent, done_at_most)
        left.add(on_gpu, task.job_id, seconds / task.jobs)
    return sum(left.before_the_end(on_gpu) / max(1, len(workers[on_gpu])) for on_gpu in (False, True))


class _Left:
    """Predicted seconds that are left, by job, of compilers (False) and of GPUs (True)."""

    def __init__(self, priorities: Mapping[str, int], job_id: str) -> None:
        self._priorities, self._job_id = priorities, job_id
        self._seconds: dict[bool, dict[str, float]] = {False: {}, True: {}}

    def add(self, on_gpu: bool, job_id: str, seconds: float) -> None:
        if job_id in self._priorities:
            self._seconds[on_gpu][job_id] = self._seconds[on_gpu].get(job_id, 0.0) + seconds

    def before_the_end(self, on_gpu: bool) -> float:
        own, priority = max(0.0, self._seconds[on_gpu].get(self._job_id, 0.0)), self._priorities[self._job_id]
        return own + sum(
            max(0.0, seconds) if self._priorities[job_id] > priority else max(0.0, min(seconds, own))
            for job_id, seconds in self._seconds[on_gpu].items()
            if job_id != self._job_id
        )


def _priorities(session: Session, job: JobStatus) -> dict[str, int]:
    """Of the job, and of those that are served beside it or before."""
    rows = session.execute(
        select(JobRow.id, JobRow.priority).where(JobRow.state.in_(LIVE), JobRow.priority >= job.priority)
    )
    return {**dict(rows.all()), job.id: job.priority}


def _unended_tasks(session: Session) -> Any:
    """Tasks that wait or are leased, once for each job that needs them; `jobs`: how many do."""
    others = aliased(TaskJobRow)
    jobs = select(func.count()).where(others.task_id == TaskRow.id, others.wanted).scalar_subquery()
    columns = (TaskRow.kind, TaskRow.state, TaskRow.worker, TaskRow.started_at, TaskRow.predicted_seconds)
    return session.execute(
        select(*columns, TaskJobRow.job_id, jobs.label("jobs"))
        .join(TaskJobRow, TaskJobRow.task_id == TaskRow.id)
        .where(TaskRow.state.in_(UNENDED), TaskJobRow.wanted)
        .where(or_(TaskRow.state == "leased", TaskRow.kind.in_((VERIFY, MEASURE))))
    )


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
    verified = [(compile_wall, verify_wall) for compile_wall, verify_wall in pairs if verify_wall is not None]
    scale = compiled / predicted if compiled else 1.0
    compile_wall = sum(pair[0] for pair in verified)
    return scale, 1.0 + (sum(pair[1] for pair in verified) / compile_wall if compile_wall else 1.0)


def _observed_tasks(session: Session) -> tuple[dict[str, float], float]:
    """Seconds of comparing and finishing one problem lately; actual over predicted seconds of measuring."""
    recent = [
        select(TaskRow.kind, TaskRow.started_at, TaskRow.finished_at, TaskRow.predicted_seconds)
        .where(TaskRow.kind == kind, TaskRow.state == "done", TaskRow.started_at.is_not(None))
        .order_by(TaskRow.id.desc())
        .limit(RECENT_TASKS)
        .subquery()
        for kind in (COMPARE, FINISH, MEASURE)
    ]
    spent: dict[str, list[float]] = {COMPARE: [], FINISH: [], MEASURE: []}
    predicted = 0.0
    for row in session.execute(union_all(*(select(ended) for ended in recent))):
        spent[row.kind].append(row.finished_at - row.started_at)
        predicted += row.predicted_seconds if row.kind == MEASURE else 0.0
    each = {
        kind: sum(spent[kind]) / len(spent[kind]) if spent[kind] else first for kind, first in FIRST_SECONDS.items()
    }
    return each, sum(spent[MEASURE]) / predicted if predicted else 1.0


def _unended_problems(session: Session) -> list[tuple[str, int, int]]:
    """Of each live job the problems that are still to be compared, and those still to be finished."""
    compared = select(TaskRow.id).where(
        TaskRow.kind == COMPARE, TaskRow.ref == cast(JobProblemRow.id, String), TaskRow.state.not_in(UNENDED)
    )
    rows = session.execute(
        select(JobProblemRow.job_id, _count_if(and_(~asks_predicted(), ~compared.exists())), func.count())
        .join(JobRow, JobRow.id == JobProblemRow.job_id)
        .where(JobProblemRow.state.in_(LIVE), JobRow.state.in_(LIVE))
        .group_by(JobProblemRow.job_id)
    )
    return [(job_id, to_compare, to_finish) for job_id, to_compare, to_finish in rows]


def _count_if(condition: Any) -> Any:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)


def waiting_for(session: Session, job_id: str, live_seconds: float) -> str | None:
    """Why a running job does not advance: no live worker has its GPU, or workers are paused; None where neither holds.

    A worker without a heartbeat for `live_seconds` counts as gone.
    """
    finishing = select(TaskRow.id).where(TaskRow.kind == FINISH, TaskRow.ref == cast(JobProblemRow.id, String))
    classes = session.scalars(
        select(JobProblemRow.device_class)
        .where(JobProblemRow.job_id == job_id, JobProblemRow.state.in_(LIVE), ~asks_predicted(), ~finishing.exists())
        .distinct()
    ).all()
    paused = describe_pauses(pauses(session))
    if not classes:
        return paused
    live = {device.device_class for device in live_devices(session, live_seconds)}
    absent = sorted(set(classes) - live)
    return "; ".join([*(_sentence(session, device_class) for device_class in absent), *filter(None, [paused])]) or None


def _sentence(session: Session, device_class: str) -> str:
    """Without the time of day or a duration: each change of it is sent as an event."""
    device = core(DeviceRow)
    rows = session.execute(select(device).where(device.c.device_class == device_class).order_by(device.c.uuid))
    states = [
        f"{row.uuid} was drained: {row.drained}" if row.drained else f"the worker of {row.uuid}, {row.worker}, is gone"
        for row in rows
    ]
    return f"no live worker measures on {device_class}: {', '.join(states) or 'none was ever seen here'}"
