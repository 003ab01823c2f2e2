"""Work: waiting, claimed under a lease by one attempt at a time, ended.

A claim gives the item a new token; every write of the worker is fenced by it (`complete` and `fail` raise `LostClaim`
inside the caller's transaction). So a worker that was thought dead and comes back writes nothing, and a step that ran
twice counts once. Whose lease is over is told without the clocks of the machines: see `storage.lease_watch`.

A compile item is made when it is claimed, of builds that are pending (`storage.lease_builds`), and is tried once: where
the attempt comes to nothing, its builds are pending again, and the next worker takes them as it finds them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sqlalchemy import and_, case, exists, func, or_, select, update

from storage import losses
from storage.attempts import waits_again
from storage.database import Session, clock_of
from storage.endings import give_up
from storage.errors import LostClaim
from storage.lease_builds import FileLimits, lease_builds, next_to_compile
from storage.new_items import COMPARE, COMPILE, FINISH, MEASURE, VERIFY, jobs_of
from storage.pending_builds import MAX_ATTEMPTS, abandon_group, lose_group, pending_counts
from storage.rows import core
from storage.tables import GroupRow, ItemJobRow, ItemRow, JobRow
from storage.turns import in_turn, oldest_first, take_turn, turn, turn_of

SHARED_GRACE_SECONDS = 2.5
"""Past its jobs' deadlines, for work on a group: what it has found by then may still be recorded."""
MOST_COUNTED = 1000
"""Pending builds of a target: no more tickets are written at once."""


@dataclass(frozen=True)
class Claim:
    """The right of one attempt to work on an item until `lease_expires_at`. `jobs`: those that wanted it then."""

    item_id: int
    kind: str
    ref: str
    target: str | None
    jobs: tuple[str, ...]
    attempt: int
    token: str
    worker: str
    lease_expires_at: float
    claimed_at: float
    waited_seconds: float  # since it was added, or last came back to wait; machines' clocks differ, but never below 0
    losses: float = 0.0  # storage.losses

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
    """What became of a claim. Only under HELD may the worker go on."""

    HELD = "held"
    LOST = "lost"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@dataclass(frozen=True)
class Expired:
    """An item whose lease ran out; `state`: waiting (to be claimed again), failed (it was lost too often) or lost (a
    group, whose builds are pending again). `jobs`: that wanted it."""

    item_id: int
    kind: str
    ref: str
    target: str | None
    jobs: tuple[str, ...]
    state: str


def claim(
    session: Session,
    kinds: Sequence[str],
    targets: Sequence[str] | None,
    worker: str,
    lease_seconds: float,
    files: FileLimits | None = None,
) -> Claim | None:
    """Take the best waiting work: highest priority, then of jobs whose turn it is (`storage.turns`), then the order of
    `kinds`, then the oldest job's, then longest predicted, then oldest.

    `targets` are those the worker can serve (None: any): architectures, for `measure` and `compare` device classes;
    items without a target fit everyone. Where `kinds` has compile, pending builds count as work of that kind, of which
    it takes as much as `files` allow. Work of jobs past their deadline is passed over, except `finish`, which settles
    them. The first claim starts a job and its budget.
    """
    now = clock_of(session).now()
    place = {kind: number for number, kind in enumerate(kinds)}
    files = files or FileLimits()
    item = _best_waiting(session, kinds, targets, now)
    to_compile = next_to_compile(session, targets, files, now) if COMPILE in place else None
    if to_compile is not None and (item is None or (to_compile[0], place[COMPILE]) < (turn_of(item), place[item.kind])):
        lease = lease_builds(session, to_compile[1], targets, files, now)
        item_id, charges = lease.item_id, lease.charges
    elif item is not None:
        item_id = item.id
        jobs = jobs_of(session, item_id)
        charges = dict.fromkeys(jobs, item.predicted_seconds / len(jobs))
    else:
        return None
    take_turn(session, charges)
    token = clock_of(session).new_id()
    taken = session.execute(
        update(ItemRow)
        .where(ItemRow.id == item_id, ItemRow.state == "waiting")
        .values(
            state="claimed",
            attempt=ItemRow.attempt + 1,
            token=token,
            worker=worker,
            lease_expires_at=now + lease_seconds,
            started_at=now,
        )
        .returning(*core(ItemRow).c)
    ).one()
    _start_jobs(session, charges, now)
    return Claim(
        item_id=taken.id,
        kind=taken.kind,
        ref=taken.ref,
        target=taken.target,
        jobs=tuple(sorted(charges)),
        attempt=taken.attempt,
        token=token,
        worker=worker,
        lease_expires_at=now + lease_seconds,
        claimed_at=now,
        waited_seconds=max(0.0, now - (taken.available_at or taken.created_at)),
        losses=taken.losses,
    )


def renew(session: Session, claim: Claim, lease_seconds: float) -> Renewal:
    """Prolong the lease from now; anything but HELD means: stop, and end what you started. On a group DEADLINE comes
    `SHARED_GRACE_SECONDS` late, and for all work only where every job that wants it has spent its budget."""
    now = clock_of(session).now()
    found = session.execute(
        select(ItemRow.state, ItemRow.token, ItemRow.kind).where(ItemRow.id == claim.item_id)
    ).one_or_none()
    if found is None or found.token != claim.token:
        return Renewal.LOST
    if found.state != "claimed":
        return Renewal.CANCELLED if found.state == "cancelled" else Renewal.LOST
    grace = SHARED_GRACE_SECONDS if found.kind in (COMPILE, VERIFY, MEASURE) else 0.0
    wanting = exists().where(
        ItemJobRow.item_id == claim.item_id,
        ItemJobRow.wanted,
        JobRow.id == ItemJobRow.job_id,
        or_(JobRow.deadline.is_(None), JobRow.deadline + grace > now),
    )
    if found.kind != FINISH and not session.scalar(select(wanting)):
        return Renewal.DEADLINE
    session.execute(update(ItemRow).where(ItemRow.id == claim.item_id).values(lease_expires_at=now + lease_seconds))
    return Renewal.HELD


def yields(session: Session, claim: Claim, kinds: Sequence[str]) -> bool:
    """Whether work of `kinds` waits for a job whose turn it is before that of the claim's."""
    best = _best_waiting(session, kinds, None, clock_of(session).now())
    query = select(*turn(session)).where(JobRow.id.in_(claim.jobs)).order_by(*in_turn(session))
    mine = session.execute(query.limit(1)).one()
    return best is not None and turn_of(best) < turn_of(mine)


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
    if claim.kind == COMPILE:
        _end_group(session, claim, "released")
        abandon_group(session, claim.ref)
    else:
        again = waits_again(session, claim.item_id, "released")
        _fenced(session, claim, {**again, "attempt": claim.attempt - 1, "losses": min(claim.losses, losses.TOGETHER)})


def lose(session: Session, claim: Claim, error: str) -> str:
    """The machine failed the attempt, which does not count (`storage.losses`). Returns "paused", or "failed" where it
    was lost too often. Raises `LostClaim`."""
    hold(session, claim)
    row = session.execute(select(core(ItemRow)).where(ItemRow.id == claim.item_id)).one()
    return "failed" if _lose(session, row, error) == "failed" else "paused"


def _lose(session: Session, row: Any, error: str) -> str:
    """End the attempt of a claimed item as lost; returns its state. Of a group the builds come back, and of work with
    parts its step skips what is lost again and again: only what has none, or is never begun, fails as a whole."""
    now = clock_of(session).now()
    state = "lost" if row.kind == COMPILE else "waiting"
    values: dict[str, Any] = {"finished_at": now, "lease_expires_at": None}
    if row.kind != COMPILE:
        many = row.losses + losses.weight(session, row.losses, row.id)
        most = losses.MOST if row.kind in (FINISH, COMPARE) else 2 * losses.MOST
        if many >= most:
            state, error = "failed", losses.why_skipped(error)
        else:
            pause = {"not_before": now + losses.pause_after(many), "attempt": row.attempt - 1}
            values = {**waits_again(session, row.id, "lost"), **pause}
        values["losses"] = many
    # Where it does not wait, the worker of the attempt stays: it shows where the item was.
    ended = {**values, "state": state, "token": None, "error": error}
    session.execute(update(core(ItemRow)).where(core(ItemRow).c.id == row.id).values(**ended))
    if state == "lost":
        _set_group(session, row.ref, "lost", now)
        lose_group(session, row.ref, error)
    elif state == "failed":
        give_up(session, row.kind, row.ref, error)
    return state


def go_on_alone(session: Session, claim: Claim) -> None:
    """Of a lost item that has done a part alone, or skipped it: the rest is done alone, too."""
    session.execute(update(ItemRow).where(ItemRow.id == claim.item_id).values(losses=losses.TOGETHER))


def fail(session: Session, claim: Claim, error: str, *, retry: bool, max_attempts: int = MAX_ATTEMPTS) -> str:
    """End the attempt. Returns "waiting" where another one may follow, else "failed": what waited for it is settled.
    The builds of a compile item are pending again, as suspects."""
    if claim.kind == COMPILE:
        _end_group(session, claim, "failed", error)
        abandon_group(session, claim.ref, error, max_attempts if retry else 1)
        return "waiting"
    now = clock_of(session).now()
    if retry and claim.attempt < max_attempts:
        _fenced(session, claim, {**waits_again(session, claim.item_id, "failed"), "error": error})
        return "waiting"
    _fenced(session, claim, {"state": "failed", "finished_at": now, "lease_expires_at": None, "error": error})
    give_up(session, claim.kind, claim.ref, error)
    return "failed"


def expire_leases(session: Session, silent: Collection[int] | None = None) -> list[Expired]:
    """Take the items of dead workers back, as `lose` does: those in `silent` (`storage.lease_watch`), else those whose
    leases are over by this machine's clock."""
    over = ItemRow.lease_expires_at < clock_of(session).now() if silent is None else ItemRow.id.in_(silent)
    late = session.execute(select(core(ItemRow)).where(ItemRow.state == "claimed", over).order_by(ItemRow.id)).all()
    expired = []
    for row in late:
        state = _lose(session, row, f"worker {row.worker} stopped answering")
        expired.append(Expired(row.id, row.kind, row.ref, row.target, jobs_of(session, row.id), state))
    return expired


def waiting_counts(session: Session) -> Mapping[tuple[str, str | None], int]:
    """Items by (kind, target) that may be taken now, pending builds among them: how many tickets there should be at
    most."""
    rows = session.execute(
        select(ItemRow.kind, ItemRow.target, func.count())
        .where(ItemRow.state == "waiting", losses.is_over(ItemRow.not_before, clock_of(session).now()))
        .group_by(ItemRow.kind, ItemRow.target)
    )
    counts: dict[tuple[str, str | None], int] = {(kind, target): count for kind, target, count in rows}
    counts.update(((COMPILE, target), count) for target, count in pending_counts(session, MOST_COUNTED).items())
    return counts


def _best_waiting(session: Session, kinds: Sequence[str], targets: Sequence[str] | None, now: float) -> Any:
    """The best waiting item, with the turn of the job that it is for; None where none waits."""
    in_time = or_(JobRow.deadline.is_(None), JobRow.deadline > now, ItemRow.kind == FINISH)
    query = (
        select(*turn(session), ItemRow.id, ItemRow.kind, ItemRow.predicted_seconds)
        .join(ItemJobRow, ItemJobRow.item_id == ItemRow.id)
        .join(JobRow, JobRow.id == ItemJobRow.job_id)
        .where(ItemRow.state == "waiting", ItemRow.kind.in_(kinds), ItemJobRow.wanted, in_time)
        .where(losses.is_over(ItemRow.not_before, now))
        .order_by(
            *in_turn(session),
            case({kind: place for place, kind in enumerate(kinds)}, value=ItemRow.kind),
            *oldest_first(),
            ItemRow.predicted_seconds.desc(),
            ItemRow.id,
        )
        .limit(1)
    )
    if targets is not None:
        query = query.where(ItemRow.target.is_(None) | ItemRow.target.in_(targets))
    return session.execute(query).one_or_none()


def _end_group(session: Session, claim: Claim, state: str, error: str | None = None) -> None:
    now = clock_of(session).now()
    _fenced(session, claim, {"state": state, "finished_at": now, "lease_expires_at": None, "error": error})
    _set_group(session, claim.ref, state, now)


def _set_group(session: Session, group_id: str, state: str, now: float) -> None:
    group = core(GroupRow)
    session.execute(update(group).where(group.c.id == group_id).values(state=state, finished_at=now))


def _start_jobs(session: Session, jobs: Mapping[str, Any], now: float) -> None:
    session.execute(
        update(JobRow)
        .where(and_(JobRow.id.in_(list(jobs)), JobRow.state == "queued"))
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
