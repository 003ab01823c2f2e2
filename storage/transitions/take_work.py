"""A worker takes the best of what waits: a task, or pending builds, of which it makes a compile task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlalchemy import func, select, update

from storage.database.session import Session, clock_of
from storage.database.sql import core
from storage.database.tables import JobRow, TaskRow
from storage.queue import losses
from storage.queue.new_tasks import COMPILE, jobs_of
from storage.queue.tasks import Lease, best_waiting
from storage.queue.turns import take_turn, turn_of
from storage.transitions.lease_builds import FileLimits, lease_builds, next_to_compile
from storage.transitions.pending_builds import pending_counts

MOST_COUNTED = 1000
"""Pending builds of a target: no more wake-ups are written at once."""


def take(
    session: Session,
    kinds: Sequence[str],
    targets: Sequence[str] | None,
    worker: str,
    lease_seconds: float,
    files: FileLimits | None = None,
) -> Lease | None:
    """Take the best waiting work: highest priority, then of jobs whose turn it is (`storage.queue.turns`), then the
    order of `kinds`, then the oldest job's, then longest predicted, then oldest.

    `targets` are those the worker can serve (None: any): architectures, for `measure` and `compare` device classes;
    tasks without a target fit every worker. Where `kinds` has compile, pending builds count as work of that kind, of
    which it takes as much as `files` allow. Work of jobs past their deadline is left, except `finish`, which settles
    them. The first lease starts a job and its budget.
    """
    now = clock_of(session).now()
    place = {kind: number for number, kind in enumerate(kinds)}
    files = files or FileLimits()
    task = best_waiting(session, kinds, targets, now)
    to_compile = next_to_compile(session, targets, files, now) if COMPILE in place else None
    if to_compile is not None and (task is None or (to_compile[0], place[COMPILE]) < (turn_of(task), place[task.kind])):
        task_id, charges = lease_builds(session, to_compile[1], targets, files, now)
    elif task is not None:
        task_id = task.id
        jobs = jobs_of(session, task_id)
        charges = dict.fromkeys(jobs, task.predicted_seconds / len(jobs))
    else:
        return None
    take_turn(session, charges)
    token = clock_of(session).new_id()
    taken = session.execute(
        update(TaskRow)
        .where(TaskRow.id == task_id, TaskRow.state == "waiting")
        .values(
            state="leased",
            attempt=TaskRow.attempt + 1,
            token=token,
            worker=worker,
            lease_expires_at=now + lease_seconds,
            started_at=now,
        )
        .returning(*core(TaskRow).c)
    ).one()
    session.execute(
        update(JobRow)
        .where(JobRow.id.in_(list(charges)), JobRow.state == "queued")
        .values(state="running", started_at=now, deadline=JobRow.budget_seconds + now)
    )
    same = ("kind", "ref", "target", "attempt", "token", "worker", "lease_expires_at", "losses")
    return Lease(
        **{name: taken._mapping[name] for name in same},
        task_id=taken.id,
        jobs=tuple(sorted(charges)),
        leased_at=now,
        waited_seconds=max(0.0, now - (taken.available_at or taken.created_at)),
    )


def waiting_counts(session: Session) -> Mapping[tuple[str, str | None], int]:
    """Tasks by (kind, target) that may be taken now, pending builds included: so many wake-ups there should be."""
    rows = session.execute(
        select(TaskRow.kind, TaskRow.target, func.count())
        .where(TaskRow.state == "waiting", losses.is_over(TaskRow.not_before, clock_of(session).now()))
        .group_by(TaskRow.kind, TaskRow.target)
    )
    counts: dict[tuple[str, str | None], int] = {(kind, target): count for kind, target, count in rows}
    counts.update(((COMPILE, target), count) for target, count in pending_counts(session, MOST_COUNTED).items())
    return counts
