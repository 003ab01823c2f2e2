"""Where the time went: a job attempt by attempt (which worker, from when to when, what waited meanwhile), the same on a
time axis, and sums by operator, job and operator, or day."""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, Row, RowMapping, case, func, select

from cukiln.types import (
    PhaseName,
    Seconds,
    Timeline,
    TimelineLane,
    TimelineStep,
    TimingRow,
    Timings,
)
from storage.database.session import Session, clock_of
from storage.database.sql import core, rows_among, whole
from storage.database.tables import HIDDEN, GroupRow, JobProblemRow, JobRow, TaskJobRow, TaskRow
from storage.entities.jobs import JobStatus, job_state
from storage.entities.stage_times import seconds_of, stage_sums, summed
from storage.entities.task_kinds import (
    COMPARE,
    COMPILE,
    FINISH,
    ON_GROUPS,
    PLAN,
    group_of_ref,
    parse_plan_ref,
)
from storage.queue.new_tasks import waiting_since
from storage.reports.progress import job_progress

ON_PROBLEMS = (COMPARE, FINISH)


Attempted = tuple[RowMapping, tuple[TimelineStep, ...]]
"""A task's row, and those attempts at it that are shown."""


@dataclass(frozen=True)
class TracedTask:
    """`group` of a compile, verify or measure task, `problem` of a compare or finish task, else None; `phases` of the
    attempt that did it, as `groups.phases`. `jobs`: for which it is, where they are several."""

    id: int
    kind: str
    ref: str
    target: str | None
    predicted_seconds: float
    attempts: tuple[TimelineStep, ...]
    group: Any
    problem: Any
    phases: list[dict[str, Any]]
    jobs: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobTrace:
    """`now` is the end of all that has not ended."""

    job: JobStatus
    now: float
    seconds: Seconds
    tasks: tuple[TracedTask, ...]


def job_trace(session: Session, job_id: str) -> JobTrace | None:
    """A handful of queries, however many tasks. None: no such job."""
    job, progress = job_state(session, job_id), job_progress(session, job_id)
    if job is None or progress is None:
        return None
    now = clock_of(session).now()
    tasks = traced_tasks(session, attempts_for(session, job, now))
    return JobTrace(job, now, progress.seconds, tuple(tasks))


def attempts_for(session: Session, job: JobStatus, now: float) -> list[Attempted]:
    """The tasks that the job needed, with those attempts at them that were made while it did, in their order."""
    needed_by = select(TaskJobRow.task_id).where(TaskJobRow.job_id == job.id)
    rows = session.execute(select(core(TaskRow)).where(TaskRow.id.in_(needed_by)).order_by(TaskRow.id)).mappings()
    window = (job.created_at, now if job.finished_at is None else job.finished_at)
    attempted = []
    for row in rows:
        attempts = tuple(attempt for attempt in _attempts(row) if _falls_into(attempt, window))
        if attempts:
            attempted.append((row, attempts))
    return attempted


def traced_tasks(session: Session, attempted: Sequence[Attempted]) -> list[TracedTask]:
    """The tasks, with what they work on."""
    groups = _groups(session, {group_of_ref(row["ref"]) for row, _ in attempted if row["kind"] in ON_GROUPS})
    problem = core(JobProblemRow).c
    of_problems = select(problem.id, problem.name, problem.operator)
    problem_ids = [int(row["ref"]) for row, _ in attempted if row["kind"] in ON_PROBLEMS]
    problems = {row.id: row for row in rows_among(session, of_problems, problem.id, problem_ids)}
    jobs = _jobs(session, [row["id"] for row, _ in attempted if row["kind"] in ON_GROUPS])
    traced = []
    for row, attempts in attempted:
        kind, ref, for_jobs = row["kind"], row["ref"], tuple(jobs.get(row["id"], ()))
        group = groups.get(group_of_ref(ref)) if kind in ON_GROUPS else None
        traced.append(
            TracedTask(
                **{name: row[name] for name in ("id", "kind", "ref", "target", "predicted_seconds")},
                attempts=attempts,
                group=group,
                problem=problems.get(int(ref)) if kind in ON_PROBLEMS else None,
                phases=group.phases if group is not None and kind == COMPILE else row["phases"] or [],
                jobs=for_jobs if len(for_jobs) > 1 else (),
            )
        )
    return traced


def _jobs(session: Session, task_ids: Sequence[int]) -> dict[int, list[str]]:
    jobs: dict[int, list[str]] = {}
    query = select(TaskJobRow.task_id, TaskJobRow.job_id).order_by(TaskJobRow.job_id)
    for task_id, job_id in rows_among(session, query, TaskJobRow.task_id, task_ids):
        jobs.setdefault(task_id, []).append(job_id)
    return jobs


def _attempts(row: RowMapping) -> list[TimelineStep]:
    """The attempts at the task by the clocks of the machines, the present one last."""
    ends = {"how": row["state"], "available_at": waiting_since(row), "ended_at": row["finished_at"]}
    return [
        TimelineStep(
            kind=row["kind"],
            target=row["target"],
            state=attempt["how"],
            attempt=attempt["attempt"],
            worker=attempt["worker"],
            queued_at=attempt["available_at"],
            started_at=attempt["started_at"],
            finished_at=attempt["ended_at"],
        )
        for attempt in [*row["past"], {**row, **ends}]
    ]


def _falls_into(attempt: TimelineStep, window: tuple[float, float]) -> bool:
    begun = attempt.queued_at if attempt.started_at is None else attempt.started_at
    return begun <= window[1] and (attempt.finished_at is None or attempt.finished_at >= window[0])


def _groups(session: Session, group_ids: set[str]) -> dict[str, Any]:
    table = core(GroupRow).c
    seconds = (table.codegen_seconds, table.compile_seconds, table.verify_seconds)
    columns = (table.id, func.json_array_length(table.kernels).label("kernels"), table.phases, *seconds)
    return {row.id: row for row in rows_among(session, select(*columns), table.id, group_ids)}


MAX_LANES = 200
"""The first to begin are shown: more is not legible."""
SHOWN_DIGITS = 8  # of a group's id
Subject = tuple[str, str]


def timeline(session: Session, job_id: str, max_lanes: int = MAX_LANES) -> Timeline | None:
    """The attempts at the tasks that the job needed, by what they work on; None if there is no such job."""
    job = job_state(session, job_id)
    if job is None:
        return None
    now = clock_of(session).now()
    subjects: dict[Subject, list[Attempted]] = {}
    for row, attempts in attempts_for(session, job, now):
        subjects.setdefault(_subject(row["kind"], row["ref"]), []).append((row, attempts))
    lanes: dict[Subject, list[TracedTask]] = {}
    shown = [attempted for lane in list(subjects.values())[:max_lanes] for attempted in lane]
    for task in traced_tasks(session, shown):
        lanes.setdefault(_subject(task.kind, task.ref), []).append(task)
    return Timeline(
        job=job.id,
        at=now,
        created_at=job.created_at,
        finished_at=job.finished_at,
        lanes=[_lane(subject, tasks) for subject, tasks in lanes.items()],
        lanes_left_out=max(0, len(subjects) - max_lanes),
    )


def _subject(kind: str, ref: str) -> Subject:
    if kind == PLAN:
        return "plan", ref
    return ("group", group_of_ref(ref)) if kind in ON_GROUPS else ("problem", ref)


def _lane(subject: Subject, tasks: list[TracedTask]) -> TimelineLane:
    what, ref = subject
    steps = [attempt for task in tasks for attempt in task.attempts]
    if what == "plan":
        _, first, last = parse_plan_ref(ref)
        return TimelineLane(name=f"plan {first + 1} to {last + 1}", steps=steps)
    if what == "problem":
        problem = tasks[0].problem
        return TimelineLane(name=f"problem {problem.name if problem else ref}", steps=steps)
    group = tasks[0].group
    kernels = group.kernels if group else None
    return TimelineLane(name=f"group {ref[:SHOWN_DIGITS]}", group=ref, kernels=kernels, steps=steps)


By = Literal["operator", "job", "day"]
SECONDS_OF_A_DAY = 86_400.0
MAX_ROWS = 1000
"""Jobs and days, latest first: a dashboard shows no more."""


def timings(session: Session, by: By, job: str | None = None) -> Timings:
    """Sums over all problems ever asked for, or those of one job; days are those of the job's arrival, in UTC."""
    key: dict[By, list[ColumnElement[Any]]] = {
        "operator": [],
        "job": [JobProblemRow.job_id.label("job"), JobRow.created_at.label("at")],
        "day": [whole(session, JobRow.created_at.expression / SECONDS_OF_A_DAY).label("at")],
    }
    phases = [summed(phase, "wall").label(f"phase_{phase}") for phase in get_args(PhaseName)]
    order = [column.desc() for column in key[by][::-1]] + [JobProblemRow.operator]
    query = (
        select(
            JobProblemRow.operator,
            *key[by],
            func.count().label("problems"),
            func.sum(case((JobProblemRow.cached, 1), else_=0)).label("cached"),
            *stage_sums(),
            *phases,
        )
        .join(JobRow, JobRow.id == JobProblemRow.job_id)
        .where(JobRow.state.not_in(HIDDEN))
        .group_by(JobProblemRow.operator, *key[by])
        .order_by(*order)
        .limit(MAX_ROWS)
    )
    rows = session.execute(query if job is None else query.where(JobProblemRow.job_id == job))
    return Timings(by=by, timings=[_timing(row, by) for row in rows])


def _timing(row: Row[Any], by: By) -> TimingRow:
    values = row._mapping
    day = datetime.datetime.fromtimestamp(values["at"] * SECONDS_OF_A_DAY, datetime.UTC) if by == "day" else None
    return TimingRow(
        operator=values["operator"],
        job=values["job"] if by == "job" else None,
        day=day.date().isoformat() if day else None,
        problems=values["problems"],
        cached=values["cached"],
        seconds=seconds_of(values),
        phases={phase: values[f"phase_{phase}"] for phase in get_args(PhaseName)},
    )
