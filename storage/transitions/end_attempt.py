"""How an attempt ends that did not complete its task: released, failed, or lost (`storage.queue.losses`)."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from storage.database.session import Session, clock_of
from storage.database.sql import change, core
from storage.database.tables import GroupRow, TaskRow
from storage.entities.task_kinds import COMPARE, COMPILE, FINISH
from storage.queue import losses
from storage.queue.new_tasks import jobs_of, waits_again
from storage.queue.tasks import Lease, end_task, require_lease
from storage.transitions.end_jobs import give_up
from storage.transitions.pending_builds import MAX_ATTEMPTS, abandon_group, lose_group


@dataclass(frozen=True)
class Expired:
    """A task whose lease ran out, for `jobs`. `state`: waiting, failed (it was lost too often) or lost (a group)."""

    task_id: int
    kind: str
    ref: str
    target: str | None
    jobs: tuple[str, ...]
    state: str


def release(session: Session, lease: Lease) -> None:
    """Return the task unchanged, as an orderly shutdown does; the attempt does not count."""
    if lease.kind == COMPILE:
        _end_group(session, lease, "released")
        abandon_group(session, lease.ref)
    else:
        again = waits_again(session, lease.task_id, "released")
        end_task(session, lease, {**again, "attempt": lease.attempt - 1, "losses": min(lease.losses, losses.TOGETHER)})


def lose(session: Session, lease: Lease, error: str, *, stalled: bool = False) -> str:
    """The machine failed the attempt: "paused", or "failed" where it was lost too often. Raises `LostLease`."""
    require_lease(session, lease)
    row = session.execute(select(core(TaskRow)).where(TaskRow.id == lease.task_id)).one()
    return "failed" if _lose(session, row, error, stalled=stalled) == "failed" else "paused"


def _lose(session: Session, row: Any, error: str, *, stalled: bool = False) -> str:
    """End the attempt at a leased task as lost; returns its state. Of a group the builds are pending again, and of work
    with parts its step skips what is lost again and again: only what has none, or is never begun, fails as a whole."""
    now = clock_of(session).now()
    state = "lost" if row.kind == COMPILE else "waiting"
    values: dict[str, Any] = {"finished_at": now, "lease_expires_at": None}
    if row.kind != COMPILE:
        many = row.losses + losses.weight(session, row.losses, row.id, stalled=stalled)
        most = losses.MOST if row.kind in (FINISH, COMPARE) else 2 * losses.MOST
        if many >= most:
            state, error = "failed", losses.why_skipped(error)
        else:
            pause = {"not_before": now + losses.pause_after(many), "attempt": row.attempt - 1}
            values = {**waits_again(session, row.id, "lost"), **pause}
        values["losses"] = many
    # Where it does not wait, the worker of the attempt stays: it shows where the task was.
    ended = {**values, "state": state, "token": None, "error": error}
    change(session, TaskRow, TaskRow.id == row.id, **ended)
    if state == "lost":
        _set_group(session, row.ref, "lost", now)
        lose_group(session, row.ref, error, stalled=stalled)
    elif state == "failed":
        give_up(session, row.kind, row.ref, error)
    return state


def fail(session: Session, lease: Lease, error: str, *, retry: bool, max_attempts: int = MAX_ATTEMPTS) -> str:
    """End it: "waiting" where another attempt may follow, else "failed". A group's builds are pending as suspects."""
    if lease.kind == COMPILE:
        _end_group(session, lease, "failed", error)
        abandon_group(session, lease.ref, error, max_attempts if retry else 1)
        return "waiting"
    now = clock_of(session).now()
    if retry and lease.attempt < max_attempts:
        end_task(session, lease, {**waits_again(session, lease.task_id, "failed"), "error": error})
        return "waiting"
    end_task(session, lease, {"state": "failed", "finished_at": now, "lease_expires_at": None, "error": error})
    give_up(session, lease.kind, lease.ref, error)
    return "failed"


def expire_leases(session: Session, silent: Collection[int] | None = None) -> list[Expired]:
    """`lose` tasks that are `silent` (`storage.queue.tasks.silent_leases`), else those that are over by this clock."""
    over = TaskRow.lease_expires_at < clock_of(session).now() if silent is None else TaskRow.id.in_(silent)
    late = session.execute(select(core(TaskRow)).where(TaskRow.state == "leased", over).order_by(TaskRow.id)).all()
    expired = []
    for row in late:
        state = _lose(session, row, f"worker {row.worker} stopped answering")
        expired.append(Expired(row.id, row.kind, row.ref, row.target, jobs_of(session, row.id), state))
    return expired


def _end_group(session: Session, lease: Lease, state: str, error: str | None = None) -> None:
    now = clock_of(session).now()
    end_task(session, lease, {"state": state, "finished_at": now, "lease_expires_at": None, "error": error})
    _set_group(session, lease.ref, state, now)


def _set_group(session: Session, group_id: str, state: str, now: float) -> None:
    change(session, GroupRow, GroupRow.id == group_id, state=state, finished_at=now)
