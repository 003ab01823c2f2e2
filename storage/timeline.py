"""A job's work on a time axis: who waited how long for what, and how long it took."""

from __future__ import annotations

from sqlalchemy import RowMapping, select

from cukiln.types import Timeline, TimelineLane, TimelineStep
from storage.database import Session, clock_of
from storage.jobs import job_state
from storage.judging_work import group_of_ref, measure_ref
from storage.new_items import PLAN, parse_plan_ref
from storage.report_trace import ON_GROUPS, Attempt, TracedItem, item_rows, traced_items
from storage.tables import GroupRow, ItemRow, JobProblemRow

MAX_LANES = 200
"""More is no picture; the first to begin are kept."""
SHOWN_DIGITS = 8  # of a group's id
Subject = tuple[str, str]


def timeline(session: Session, job_id: str, max_lanes: int = MAX_LANES) -> Timeline | None:
    """The attempts at the job's items, by what they work on; None if there is no such job."""
    job = job_state(session, job_id)
    if job is None:
        return None
    joined, refs = _joined(session, job_id)
    with_others = ItemRow.kind.in_(ON_GROUPS) & ItemRow.ref.in_(refs)
    rows: dict[Subject, list[RowMapping]] = {}
    for row in item_rows(session, (ItemRow.job_id == job_id) | with_others):
        kind, ref = row["kind"], row["ref"]
        rows.setdefault(_subject(kind, joined.get(ref, ref)), []).append(row)
    kept = [row for some in list(rows.values())[:max_lanes] for row in some]
    lanes: dict[Subject, list[TracedItem]] = {}
    jobs = {job_id, *(row["job_id"] for row in kept)}  # another's only where a file is shared with it
    for item in traced_items(session, kept, lambda attempt: attempt.job in jobs):
        lanes.setdefault(_subject(item.kind, joined.get(item.ref, item.ref)), []).append(item)
    return Timeline(
        job=job.id,
        at=clock_of(session).now(),
        created_at=job.created_at,
        finished_at=job.finished_at,
        lanes=[_lane(subject, items) for subject, items in lanes.items()],
        lanes_left_out=max(0, len(rows) - max_lanes),
    )


def _joined(session: Session, job_id: str) -> tuple[dict[str, str], set[str]]:
    """The job's groups that joined another, with that one; and the `ref` of all work on those others."""
    pairs = session.execute(
        select(GroupRow.id, GroupRow.joined_to, JobProblemRow.device_class)
        .join(JobProblemRow, JobProblemRow.job_id == GroupRow.job_id)
        .where(GroupRow.job_id == job_id, GroupRow.joined_to.is_not(None))
        .distinct()
    ).all()
    files = {group: str(file) for group, file, _ in pairs}
    return files, {*files.values(), *(measure_ref(str(file), device_class) for _, file, device_class in pairs)}


def _subject(kind: str, ref: str) -> Subject:
    if kind == PLAN:
        return "plan", ref
    return ("group", group_of_ref(ref)) if kind in ON_GROUPS else ("problem", ref)


def _lane(subject: Subject, items: list[TracedItem]) -> TimelineLane:
    what, ref = subject
    steps = [_step(item, attempt) for item in items for attempt in item.attempts]
    if what == "plan":
        _, first, last = parse_plan_ref(ref)
        return TimelineLane(name=f"plan {first + 1} to {last + 1}", steps=steps)
    if what == "problem":
        problem = items[0].problem
        return TimelineLane(name=f"problem {problem.name if problem else ref}", steps=steps)
    group = items[0].group
    kernels = group.kernels if group else None
    return TimelineLane(name=f"group {ref[:SHOWN_DIGITS]}", group=ref, kernels=kernels, steps=steps)


def _step(item: TracedItem, attempt: Attempt) -> TimelineStep:
    return TimelineStep.model_validate(
        {
            "kind": item.kind,
            "target": item.target,
            "state": attempt.how,
            "attempt": attempt.number,
            "worker": attempt.worker,
            "queued_at": attempt.available_at,
            "started_at": attempt.started_at,
            "finished_at": attempt.ended_at,
        }
    )
