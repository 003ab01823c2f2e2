"""A job's work on a time axis: what waited how long, and how long each attempt took."""

from __future__ import annotations

from cukiln.types import Timeline, TimelineLane, TimelineStep
from storage.database.session import Session, clock_of
from storage.entities.jobs import job_state
from storage.queue.new_tasks import PLAN, group_of_ref, parse_plan_ref
from storage.reports.trace import ON_GROUPS, Attempt, Attempted, TracedTask, attempts_for, traced_tasks

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
    steps = [_step(task, attempt) for task in tasks for attempt in task.attempts]
    if what == "plan":
        _, first, last = parse_plan_ref(ref)
        return TimelineLane(name=f"plan {first + 1} to {last + 1}", steps=steps)
    if what == "problem":
        problem = tasks[0].problem
        return TimelineLane(name=f"problem {problem.name if problem else ref}", steps=steps)
    group = tasks[0].group
    kernels = group.kernels if group else None
    return TimelineLane(name=f"group {ref[:SHOWN_DIGITS]}", group=ref, kernels=kernels, steps=steps)


def _step(task: TracedTask, attempt: Attempt) -> TimelineStep:
    return TimelineStep.model_validate(
        {
            "kind": task.kind,
            "target": task.target,
            "state": attempt.how,
            "attempt": attempt.number,
            "worker": attempt.worker,
            "queued_at": attempt.available_at,
            "started_at": attempt.started_at,
            "finished_at": attempt.ended_at,
        }
    )
