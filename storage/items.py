"""Work: waiting, claimed under a lease by one attempt at a time, ended.

A claim gives the item a new token; every write of the worker is fenced by it (`complete` and `fail` raise `LostClaim`
inside the caller's transaction). So a worker that was thought dead and comes back writes nothing, and a step that ran
twice counts once. Leases compare the clocks of the machines: keep them in step to well under `lease_seconds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from sqlalchemy import and_, case, func, or_, select, update

from storage.attempts import waits_again
from storage.database import Session, clock_of
from storage.endings import give_up
from storage.errors import LostClaim
from storage.new_items import COMPILE, FINISH, MEASURE, VERIFY, NewItem, add_items
from storage.part_groups import part_groups
from storage.rows import core
from storage.tables import ItemRow, JobRow
from storage.turns import take_turn

__all__ = [
    "Claim",
    "Expired",
    "NewItem",
    "Renewal",
    "add_items",
    "claim",
    "complete",
    "expire_leases",
    "fail",
    "hold",
    "release",
    "renew",
    "waiting_counts",
]

MAX_ATTEMPTS = 3
SHARED_GRACE_SECONDS = 2.5
"""Past its job's deadline, for work on a group: `expire_budgets` is called every second, and hands what another job
waits for to that one. A worker that stopped before would throw its work away."""
_CLAIMED = (
    ItemRow.id,
    ItemRow.kind,
    ItemRow.ref,
    ItemRow.target,
    ItemRow.job_id,
    ItemRow.attempt,
    ItemRow.predicted_seconds,
    ItemRow.created_at,
    ItemRow.available_at,
)


@dataclass(frozen=True)
class Claim:
    """The right of one attempt to work on an item until `lease_expires_at`."""

    item_id: int
    kind: str
    ref: str
    target: str | None
    job_id: str | None
    attempt: int
    token: str
    worker: str
    lease_expires_at: float
    claimed_at: float
    waited_seconds: float  # since it was added, or last came back to wait; machines' clocks differ, but never below 0


class Renewal(Enum):
    """What became of a claim. Only under HELD may the worker go on."""

    HELD = "held"
    LOST = "lost"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class Expired:
    """An item whose lease ran out; `state`: waiting (to be claimed again) or failed (no attempts left)."""

    item_id: int
    kind: str
    ref: str
    target: str | None
    job_id: str | None
    state: str


def claim(
    session: Session, kinds: Sequence[str], targets: Sequence[str] | None, worker: str, lease_seconds: float
) -> Claim | None:
    """Take the best waiting item: highest priority, then of the job whose turn it is (`storage.turns`), then the order
    of `kinds`, then longest predicted, then oldest.

    `targets` are those the worker can serve (None: any): architectures, for `measure` and `compare` device classes;
    items without a target fit everyone. Items of a job past its
    deadline are passed over, except `finish`, which settles it. The first claim starts the job and its budget.
    """
    now = clock_of(session).now()
    best = _best_waiting(session, kinds, targets, now)
    if best is None:
        return None
    token = clock_of(session).new_id()
    taken = session.execute(
        update(ItemRow)
        .where(ItemRow.id == best, ItemRow.state == "waiting")
        .values(
            state="claimed",
            attempt=ItemRow.attempt + 1,
            token=token,
            worker=worker,
            lease_expires_at=now + lease_seconds,
            started_at=now,
        )
        .returning(*_CLAIMED)
    ).one()
    if taken.job_id is not None:
        take_turn(session, taken.job_id, taken.predicted_seconds)
    _start_job(session, taken.job_id, now)
    return Claim(
        item_id=taken.id,
        kind=taken.kind,
        ref=taken.ref,
        target=taken.target,
        job_id=taken.job_id,
        attempt=taken.attempt,
        token=token,
        worker=worker,
        lease_expires_at=now + lease_seconds,
        claimed_at=now,
        waited_seconds=max(0.0, now - (taken.available_at or taken.created_at)),
    )


def renew(session: Session, claim: Claim, lease_seconds: float) -> Renewal:
    """Prolong the lease from now; anything but HELD means: stop, and end what you started. On a group that another job
    may wait for, DEADLINE comes `SHARED_GRACE_SECONDS` late, and only where nobody has ended the budget by then."""
    now = clock_of(session).now()
    found = session.execute(
        select(ItemRow.state, ItemRow.token, ItemRow.kind, JobRow.deadline)
        .join(JobRow, JobRow.id == ItemRow.job_id, isouter=True)
        .where(ItemRow.id == claim.item_id)
    ).one_or_none()
    if found is None or found.token != claim.token:
        return Renewal.LOST
    if found.state != "claimed":
        return Renewal.CANCELLED if found.state == "cancelled" else Renewal.LOST
    grace = SHARED_GRACE_SECONDS if found.kind in (COMPILE, VERIFY, MEASURE) else 0.0
    if found.kind != FINISH and found.deadline is not None and found.deadline + grace <= now:
        return Renewal.DEADLINE
    session.execute(update(ItemRow).where(ItemRow.id == claim.item_id).values(lease_expires_at=now + lease_seconds))
    return Renewal.HELD


def hold(session: Session, claim: Claim) -> None:
    """Raise `LostClaim` unless the claim holds: what this transaction writes is then its own."""
    mine = (ItemRow.id == claim.item_id) & (ItemRow.token == claim.token) & (ItemRow.state == "claimed")
    if session.scalar(select(ItemRow.id).where(mine)) is None:
        raise LostClaim(claim.kind, claim.ref, claim.token)


def complete(session: Session, claim: Claim) -> None:
    """End the item as done. Raises `LostClaim`, which rolls the caller's transaction back."""
    now = clock_of(session).now()
    _fenced(session, claim, {"state": "done", "finished_at": now, "lease_expires_at": None})


def release(session: Session, claim: Claim) -> None:
    """Give the item back untouched, as an orderly shutdown does; the attempt does not count."""
    _fenced(session, claim, {**waits_again(session, claim.item_id, "released"), "attempt": claim.attempt - 1})


def fail(session: Session, claim: Claim, error: str, *, retry: bool, max_attempts: int = MAX_ATTEMPTS) -> str:
    """End the attempt. Returns "waiting" where another one may follow, else "failed": what waited for it is settled.
    Groups that had joined that of a compile item wait for themselves again."""
    now = clock_of(session).now()
    if retry and claim.attempt < max_attempts:
        _fenced(session, claim, {**waits_again(session, claim.item_id, "failed"), "error": error})
        _part(session, claim.kind, claim.ref, "failed")
        return "waiting"
    _fenced(session, claim, {"state": "failed", "finished_at": now, "lease_expires_at": None, "error": error})
    _part(session, claim.kind, claim.ref, "failed")
    give_up(session, claim.kind, claim.ref, claim.target, error)
    return "failed"


def expire_leases(session: Session, max_attempts: int = MAX_ATTEMPTS) -> list[Expired]:
    """Take the items of dead workers back; those that have used up their attempts are settled as failed. Groups that
    had joined that of a compile item wait for themselves again."""
    now = clock_of(session).now()
    late = session.execute(
        select(ItemRow.id, ItemRow.kind, ItemRow.ref, ItemRow.target, ItemRow.job_id, ItemRow.attempt, ItemRow.worker)
        .where(ItemRow.state == "claimed", ItemRow.lease_expires_at < now)
        .order_by(ItemRow.id)
    ).all()
    expired = []
    for row in late:
        again = row.attempt < max_attempts
        error = f"worker {row.worker} stopped answering during attempt {row.attempt} of {max_attempts}"
        state = "waiting" if again else "failed"
        # The worker of the last attempt stays: it shows where the item was.
        failed = {"state": state, "token": None, "lease_expires_at": None, "finished_at": now}
        ended = waits_again(session, row.id, "lost") if again else failed
        session.execute(update(core(ItemRow)).where(core(ItemRow).c.id == row.id).values(**ended, error=error))
        _part(session, row.kind, row.ref, "lost")
        if not again:
            give_up(session, row.kind, row.ref, row.target, error)
        expired.append(Expired(row.id, row.kind, row.ref, row.target, row.job_id, state))
    return expired


def waiting_counts(session: Session) -> Mapping[tuple[str, str | None], int]:
    """Waiting items by (kind, target): how many tickets there should be."""
    rows = session.execute(
        select(ItemRow.kind, ItemRow.target, func.count())
        .where(ItemRow.state == "waiting")
        .group_by(ItemRow.kind, ItemRow.target)
    )
    return {(kind, target): count for kind, target, count in rows}


def _best_waiting(session: Session, kinds: Sequence[str], targets: Sequence[str] | None, now: float) -> int | None:
    """Id of the best waiting item."""
    in_time = or_(JobRow.deadline.is_(None), JobRow.deadline > now, ItemRow.kind == FINISH)
    query = (
        select(ItemRow.id)
        .join(JobRow, JobRow.id == ItemRow.job_id, isouter=True)
        .where(ItemRow.state == "waiting", ItemRow.kind.in_(kinds), in_time)
        .order_by(
            ItemRow.priority.desc(),
            func.coalesce(JobRow.used_seconds, 0.0),
            JobRow.created_at,
            JobRow.id,
            case({kind: place for place, kind in enumerate(kinds)}, value=ItemRow.kind),
            ItemRow.predicted_seconds.desc(),
            ItemRow.id,
        )
        .limit(1)
    )
    if targets is not None:
        query = query.where(ItemRow.target.is_(None) | ItemRow.target.in_(targets))
    return session.scalar(query)


def _part(session: Session, kind: str, ref: str, how: str) -> None:
    if kind == COMPILE:
        part_groups(session, ref, how)


def _start_job(session: Session, job_id: str | None, now: float) -> None:
    if job_id is not None:
        session.execute(
            update(JobRow)
            .where(and_(JobRow.id == job_id, JobRow.state == "queued"))
            .values(state="running", started_at=now, deadline=JobRow.budget_seconds + now)
        )


def _fenced(session: Session, claim: Claim, values: Mapping[str, object]) -> None:
    held = session.execute(
        update(ItemRow)
        .where(ItemRow.id == claim.item_id, ItemRow.token == claim.token, ItemRow.state == "claimed")
        .values(**values)
        .returning(ItemRow.id)
    ).one_or_none()
    if held is None:
        raise LostClaim(claim.kind, claim.ref, claim.token)
