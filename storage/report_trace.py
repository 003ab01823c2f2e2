"""What happened for a job, attempt by attempt: who worked on it, from when to when, and what waited meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import RowMapping, func, select

from cukiln.types import Seconds
from storage.attempts import waiting_since
from storage.database import Session, clock_of
from storage.jobs import JobStatus, job_state
from storage.new_items import COMPARE, COMPILE, FINISH, MEASURE, VERIFY, group_of_ref
from storage.progress import job_progress
from storage.rows import chunks, core
from storage.tables import GroupRow, ItemJobRow, ItemRow, JobProblemRow

ON_GROUPS = (COMPILE, VERIFY, MEASURE)
ON_PROBLEMS = (COMPARE, FINISH)


@dataclass(frozen=True)
class Attempt:
    """One try at an item, by the clocks of the machines. It waited from `available_at` on; `started_at` is None before
    an attempt has begun, `ended_at` where it is not over. `how` it ended, or the state of the item."""

    worker: str | None
    number: int
    available_at: float
    started_at: float | None
    ended_at: float | None
    how: str


Attempted = tuple[RowMapping, tuple[Attempt, ...]]
"""An item's row, and those attempts at it that matter."""


@dataclass(frozen=True)
class TracedItem:
    """`group` (`kernels`: how many, phases, seconds by stage) of a compile, verify or measure item, `problem` (name,
    operator) of a compare or finish item; else None. `phases` of the attempt that did it, as `groups.phases` keeps
    them. `jobs`: for which it is, where they are several."""

    id: int
    kind: str
    ref: str
    target: str | None
    predicted_seconds: float
    attempts: tuple[Attempt, ...]
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
    items: tuple[TracedItem, ...]


def job_trace(session: Session, job_id: str) -> JobTrace | None:
    """A handful of queries, however many items. None: no such job."""
    job, progress = job_state(session, job_id), job_progress(session, job_id)
    if job is None or progress is None:
        return None
    now = clock_of(session).now()
    found = attempts_for(session, job, now)
    return JobTrace(job, now, progress.seconds, tuple(traced_items(session, found)))


def attempts_for(session: Session, job: JobStatus, now: float) -> list[Attempted]:
    """The items that the job wanted, with those attempts at them that were made while it did. In the order in which
    they were made."""
    wanting = select(ItemJobRow.item_id).where(ItemJobRow.job_id == job.id)
    rows = session.execute(select(core(ItemRow)).where(ItemRow.id.in_(wanting)).order_by(ItemRow.id)).mappings()
    window = (job.created_at, now if job.finished_at is None else job.finished_at)
    found = []
    for row in rows:
        attempts = tuple(one for one in _attempts(row) if _falls_into(one, window))
        if attempts:
            found.append((row, attempts))
    return found


def traced_items(session: Session, found: Sequence[Attempted]) -> list[TracedItem]:
    """The items, with what they work on."""
    groups = _groups(session, {group_of_ref(row["ref"]) for row, _ in found if row["kind"] in ON_GROUPS})
    problems = _problems(session, {int(row["ref"]) for row, _ in found if row["kind"] in ON_PROBLEMS})
    jobs = _jobs(session, [row["id"] for row, _ in found if row["kind"] in ON_GROUPS])
    return [_traced(row, attempts, groups, problems, jobs.get(row["id"], ())) for row, attempts in found]


def _traced(
    row: RowMapping,
    attempts: tuple[Attempt, ...],
    groups: Mapping[str, Any],
    problems: Mapping[int, Any],
    jobs: Sequence[str],
) -> TracedItem:
    kind, ref = row["kind"], row["ref"]
    group = groups.get(group_of_ref(ref)) if kind in ON_GROUPS else None
    return TracedItem(
        id=row["id"],
        kind=kind,
        ref=ref,
        target=row["target"],
        predicted_seconds=row["predicted_seconds"],
        attempts=attempts,
        group=group,
        problem=problems.get(int(ref)) if kind in ON_PROBLEMS else None,
        phases=group.phases if group is not None and kind == COMPILE else row["phases"] or [],
        jobs=tuple(jobs) if len(jobs) > 1 else (),
    )


def _jobs(session: Session, item_ids: Sequence[int]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for ids in chunks(item_ids):
        query = select(ItemJobRow.item_id, ItemJobRow.job_id).where(ItemJobRow.item_id.in_(ids))
        for item_id, job_id in session.execute(query.order_by(ItemJobRow.job_id)):
            found.setdefault(item_id, []).append(job_id)
    return found


def _attempts(row: RowMapping) -> list[Attempt]:
    """The attempts at the item, the present one last."""
    past = [
        Attempt(*(one[name] for name in ("worker", "attempt", "available_at", "started_at", "ended_at", "how")))
        for one in row["past"]
    ]
    last = Attempt(
        worker=row["worker"],
        number=row["attempt"],
        available_at=waiting_since(row),
        started_at=row["started_at"],
        ended_at=row["finished_at"],
        how=row["state"],
    )
    return [*past, last]


def _falls_into(attempt: Attempt, window: tuple[float, float]) -> bool:
    begun = attempt.available_at if attempt.started_at is None else attempt.started_at
    return begun <= window[1] and (attempt.ended_at is None or attempt.ended_at >= window[0])


def _groups(session: Session, group_ids: set[str]) -> dict[str, Any]:
    table = core(GroupRow).c
    seconds = (table.codegen_seconds, table.compile_seconds, table.verify_seconds)
    columns = (table.id, func.json_array_length(table.kernels).label("kernels"), table.phases, *seconds)
    found: dict[str, Any] = {}
    for ids in chunks(group_ids):
        found.update((row.id, row) for row in session.execute(select(*columns).where(table.id.in_(ids))))
    return found


def _problems(session: Session, problem_ids: set[int]) -> dict[int, Any]:
    table = core(JobProblemRow).c
    found: dict[int, Any] = {}
    for ids in chunks(problem_ids):
        rows = session.execute(select(table.id, table.name, table.operator).where(table.id.in_(ids)))
        found.update((row.id, row) for row in rows)
    return found
