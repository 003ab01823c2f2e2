"""Tasks: waiting, leased by one attempt at a time, ended.

A lease has a new token, and every write of the worker is fenced by it (`LostLease`, inside the caller's transaction): a
worker that comes back after its lease writes nothing. A compile task is made when it is leased, of pending builds
(`storage.transitions.take_work`), and is tried once.

Jobs of one priority take turns of the workers' time: the one that has had the fewest is next
(`storage.transitions.charge_turns`). Of jobs that have had as many, what is begun goes before what is not, and the
oldest first: so of many small jobs each ends soon, where a share for each at any time would end them all at the end.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sqlalchemy import ColumnElement, case, exists, or_, select, update

from storage.database.session import Session, clock_of
from storage.database.sql import change, core, whole
from storage.database.tables import JobRow, TaskJobRow, TaskRow
from storage.errors import LostLease
from storage.queue import losses

TURN_SECONDS = 4.0
"""Predicted. A third of the longest file: after one, a large job lets a newcomer go first."""

Turn = tuple[int, int]
"""Of two the smaller is next: priority (negated), turns that the job has had."""


def turn(session: Session) -> tuple[Any, ...]:
    """Columns that say when a job is next."""
    return (JobRow.priority, _turns_had(session).label("turns"))


def in_turn(session: Session) -> tuple[Any, ...]:
    """The order in which jobs are served."""
    return (JobRow.priority.desc(), _turns_had(session))


def _turns_had(session: Session) -> Any:
    return whole(session, JobRow.used_seconds / TURN_SECONDS)


def oldest_first() -> tuple[Any, ...]:
    """The order of jobs whose turn it is alike."""
    return (JobRow.created_at, JobRow.id)


def turn_of(row: Any) -> Turn:
    """Of a row with the columns of `turn`."""
    return (-row.priority, row.turns)


@dataclass(frozen=True)
class Lease:
    """The lease of one attempt at a task until `lease_expires_at`. `jobs`: those that needed it then."""

    task_id: int
    kind: str
    ref: str
    target: str | None
    jobs: tuple[str, ...]
    attempt: int
    token: str
    worker: str
    lease_expires_at: float
    leased_at: float
    waited_seconds: float  # since it was added, or last came back to wait; machines' clocks differ, but never below 0
    losses: float = 0.0  # storage.queue.losses

    @property
    def is_alone(self) -> bool:
        """After losses one part of the work is done, and the rest waits again."""
        return self.losses >= losses.TOGETHER

    @property
    def is_lost(self) -> bool:
        """That part was lost too often: it is skipped."""
        return self.losses >= losses.MOST

    @property
    def job_id(self) -> str:
        """Of work that is one job's alone: all but compiling, verifying and measuring."""
        (job,) = self.jobs
        return job


class Renewal(Enum):
    """The state of a lease. Only under HELD may the worker continue."""

    HELD = "held"
    LOST = "lost"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


def renew(session: Session, lease: Lease, lease_seconds: float, grace_seconds: float) -> Renewal:
    """Prolong the lease from now; anything but HELD: the worker stops, and ends what it started. DEADLINE comes where
    every job that needs the task spent its budget so long ago; with an infinite grace never."""
    now = clock_of(session).now()
    row = session.execute(select(TaskRow.state, TaskRow.token).where(TaskRow.id == lease.task_id)).one_or_none()
    if row is None or row.token != lease.token:
        return Renewal.LOST
    if row.state != "leased":
        return Renewal.CANCELLED if row.state == "cancelled" else Renewal.LOST
    needed_by = exists().where(
        TaskJobRow.task_id == lease.task_id,
        TaskJobRow.wanted,
        JobRow.id == TaskJobRow.job_id,
        or_(JobRow.deadline.is_(None), JobRow.deadline + grace_seconds > now),
    )
    if grace_seconds < math.inf and not session.scalar(select(needed_by)):
        return Renewal.DEADLINE
    change(session, TaskRow, TaskRow.id == lease.task_id, lease_expires_at=now + lease_seconds)
    return Renewal.HELD


def turn_of_lease(session: Session, lease: Lease) -> Turn:
    """Of its jobs the one that is next."""
    query = select(*turn(session)).where(JobRow.id.in_(lease.jobs)).order_by(*in_turn(session))
    return turn_of(session.execute(query.limit(1)).one())


def require_lease(session: Session, lease: Lease) -> None:
    """Raise `LostLease` unless the lease holds, which fences what this transaction writes."""
    if session.scalar(select(TaskRow.id).where(_is_held(lease))) is None:
        raise LostLease(lease.kind, lease.ref, lease.token)


def complete(session: Session, lease: Lease) -> None:
    """End the task as done. Raises `LostLease`, which rolls the caller's transaction back."""
    now = clock_of(session).now()
    end_task(session, lease, {"state": "done", "finished_at": now, "lease_expires_at": None})


def continue_alone(session: Session, lease: Lease) -> None:
    """Of a lost task that has done a part alone, or skipped it: the rest is done alone, too."""
    change(session, TaskRow, TaskRow.id == lease.task_id, losses=losses.TOGETHER)


def best_waiting(
    session: Session, kinds: Sequence[str], targets: Sequence[str] | None, now: float, *, untimed: Sequence[str]
) -> Any:
    """The best waiting task, with the turn of the job that it is for; None where none waits. `untimed`: kinds that are
    done after the deadline of their job, too."""
    in_time = or_(JobRow.deadline.is_(None), JobRow.deadline > now, TaskRow.kind.in_(untimed))
    query = (
        select(*turn(session), TaskRow.id, TaskRow.kind, TaskRow.predicted_seconds)
        .join(TaskJobRow, TaskJobRow.task_id == TaskRow.id)
        .join(JobRow, JobRow.id == TaskJobRow.job_id)
        .where(TaskRow.state == "waiting", TaskRow.kind.in_(kinds), TaskJobRow.wanted, in_time)
        .where(losses.is_over(TaskRow.not_before, now))
        .order_by(
            *in_turn(session),
            case({kind: place for place, kind in enumerate(kinds)}, value=TaskRow.kind),
            *oldest_first(),
            TaskRow.predicted_seconds.desc(),
            TaskRow.id,
        )
        .limit(1)
    )
    if targets is not None:
        query = query.where(TaskRow.target.is_(None) | TaskRow.target.in_(targets))
    return session.execute(query).one_or_none()


def end_task(session: Session, lease: Lease, values: Mapping[str, object]) -> None:
    held = session.execute(update(TaskRow).where(_is_held(lease)).values(**values).returning(TaskRow.id)).one_or_none()
    if held is None:
        raise LostLease(lease.kind, lease.ref, lease.token)


def _is_held(lease: Lease) -> ColumnElement[bool]:
    return (TaskRow.id == lease.task_id) & (TaskRow.token == lease.token) & (TaskRow.state == "leased")


def silent_leases(session: Session, watch: losses.SilenceWatch) -> list[int]:
    """The tasks whose leases are no longer renewed: each renewal changes a lease's row."""
    task = core(TaskRow).c
    leased = session.execute(select(task.id, task.token, task.lease_expires_at).where(task.state == "leased"))
    return sorted(watch.silent(session, {row.id: (row.token, row.lease_expires_at) for row in leased}))
