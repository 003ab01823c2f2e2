"""A job's work on a time axis: who waited how long for what, and how long it took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Row, select

from cukiln.types import Phase, Timeline, TimelineLane, TimelineStep
from storage.database import Session, clock_of
from storage.jobs import job_state
from storage.judging_work import group_of_ref
from storage.new_items import COMPILE, MEASURE, PLAN, VERIFY, parse_plan_ref
from storage.rows import chunks, core
from storage.tables import GroupRow, ItemRow, JobProblemRow

MAX_LANES = 200
"""More is no picture; the first to begin are kept."""
OF_GROUPS = frozenset({COMPILE, VERIFY, MEASURE})


def timeline(session: Session, job_id: str, max_lanes: int = MAX_LANES) -> Timeline | None:
    """The job's items, by what they work on; None if there is no such job."""
    job = job_state(session, job_id)
    if job is None:
        return None
    items = session.execute(
        select(core(ItemRow)).where(ItemRow.job_id == job_id).order_by(ItemRow.created_at, ItemRow.id)
    ).all()
    lanes: dict[tuple[str, str], list[Row[Any]]] = {}
    for item in items:
        lanes.setdefault(_subject(item.kind, item.ref), []).append(item)
    kept = list(lanes.items())[:max_lanes]
    groups = _groups(session, (ref for (what, ref), _ in kept if what == "group"))
    names = _names(session, (int(ref) for (what, ref), _ in kept if what == "problem"))
    return Timeline(
        job=job.id,
        at=clock_of(session).now(),
        created_at=job.created_at,
        finished_at=job.finished_at,
        lanes=[_lane(what, ref, steps, groups, names) for (what, ref), steps in kept],
        lanes_left_out=len(lanes) - len(kept),
    )


def _subject(kind: str, ref: str) -> tuple[str, str]:
    if kind == PLAN:
        return "plan", ref
    return ("group", group_of_ref(ref)) if kind in OF_GROUPS else ("problem", ref)


def _lane(
    what: str, ref: str, items: Sequence[Row[Any]], groups: dict[str, Row[Any]], names: dict[int, str]
) -> TimelineLane:
    steps = [_step(item) for item in items]
    if what == "plan":
        _, first, last = parse_plan_ref(ref)
        return TimelineLane(name=f"plan {first + 1} to {last + 1}", steps=steps)
    if what == "problem":
        return TimelineLane(name=f"problem {names.get(int(ref), ref)}", steps=steps)
    group = groups.get(ref)
    return TimelineLane(
        name=f"group {ref[:8]}",
        group=ref,
        kernels=len(group.kernels) if group else None,
        phases=[Phase(**phase) for phase in group.phases] if group else [],
        steps=steps,
    )


def _step(item: Row[Any]) -> TimelineStep:
    # One that waits for its next attempt keeps the start of the last one.
    started = None if item.state == "waiting" else item.started_at
    return TimelineStep(
        kind=item.kind,
        target=item.target,
        state=item.state,
        attempt=item.attempt,
        worker=item.worker,
        created_at=item.created_at,
        started_at=started,
        finished_at=item.finished_at,
    )


def _groups(session: Session, ids: Iterable[str]) -> dict[str, Row[Any]]:
    found: dict[str, Row[Any]] = {}
    for some in chunks(ids):
        rows = session.execute(select(GroupRow.id, GroupRow.kernels, GroupRow.phases).where(GroupRow.id.in_(some)))
        found.update({row.id: row for row in rows})
    return found


def _names(session: Session, ids: Iterable[int]) -> dict[int, str]:
    found: dict[int, str] = {}
    for some in chunks(ids):
        rows = session.execute(select(JobProblemRow.id, JobProblemRow.name).where(JobProblemRow.id.in_(some)))
        found.update({row.id: row.name for row in rows})
    return found
