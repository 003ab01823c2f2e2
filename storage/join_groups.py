"""Groups that share a file: the one that a compile worker has claimed, and small ones that wait, of whichever job.

The claimed group gets the builds of those that it takes along. So whoever waits for a build waits for the claimed
group's item from then on, inherits it, hurries it, is measured by it, as with any build that jobs share. The rows of
the others stay, `joined`, and say whose kernels they were. An attempt that comes to nothing undoes it
(`storage.part_groups`); one that is handed back in order does not.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import ColumnElement, RowMapping, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, aliased

from codegen.compile_model import added_seconds
from codegen.group import MAX_KERNELS
from codegen.share_file import SMALL_SECONDS
from storage.attempts import waiting_since
from storage.database import Session, clock_of
from storage.group_rows import Group, GroupKernel, load_group, read_kernels
from storage.items import Claim, hold
from storage.new_items import COMPILE
from storage.rows import chunks, core
from storage.tables import BuildRow, GroupRow, ItemRow, JobRow


@dataclass(frozen=True)
class WaitingGroup:
    """A small group that nobody has tried yet. `budget_seconds` of its job."""

    id: str
    kernels: tuple[GroupKernel, ...]
    budget_seconds: float | None


@dataclass(frozen=True)
class Owner:
    """A job's part of a shared file: these builds, which waited for so long."""

    job_id: str | None
    builds: tuple[str, ...]
    waited_seconds: float


def groups_to_join(session: Session, claim: Claim) -> list[WaitingGroup]:
    """Those that may share the claimed group's file, in the order in which they would be claimed: small, never tried,
    of its target and toolchain, and at least as urgent. None where it is not small itself, or was tried before."""
    mine = session.execute(
        select(GroupRow.toolchain, GroupRow.predicted_seconds, ItemRow.priority)
        .join(ItemRow, ItemRow.id == claim.item_id)
        .where(GroupRow.id == claim.ref)
    ).one()
    if claim.attempt > 1 or mine.predicted_seconds > SMALL_SECONDS:
        return []
    rows = session.execute(
        select(GroupRow.id, GroupRow.kernels, JobRow.budget_seconds)
        .join(ItemRow, ItemRow.ref == GroupRow.id)
        .join(JobRow, JobRow.id == ItemRow.job_id, isouter=True)
        .where(ItemRow.state == "waiting", ItemRow.kind == COMPILE, ItemRow.attempt == 0)
        .where(ItemRow.priority >= mine.priority, ItemRow.predicted_seconds <= SMALL_SECONDS)
        .where(ItemRow.target == claim.target, GroupRow.toolchain == mine.toolchain)
        .where(or_(JobRow.deadline.is_(None), JobRow.deadline > clock_of(session).now()))
        .where(_carries_none(ItemRow.ref))
        .order_by(ItemRow.priority.desc(), ItemRow.predicted_seconds.desc(), ItemRow.id)
        .limit(MAX_KERNELS)
    ).all()
    return [WaitingGroup(row.id, read_kernels(row.kernels), row.budget_seconds) for row in rows]


def join_groups(session: Session, claim: Claim, group_ids: Collection[str]) -> Group:
    """Give the claimed group what those of `group_ids` that still wait are to compile; returns it as it is then.
    Raises `LostClaim`."""
    hold(session, claim)
    group, item, build = core(GroupRow), core(ItemRow), core(BuildRow)
    of_mine = group.c.id == claim.ref
    kernels, predicted = session.execute(select(group.c.kernels, group.c.predicted_seconds).where(of_mine)).one()
    waiting = session.execute(
        select(item)
        .where(item.c.kind == COMPILE, item.c.ref.in_(group_ids))
        .where(item.c.state == "waiting", item.c.attempt == 0)
        .where(_carries_none(item.c.ref))
        .order_by(item.c.id)
    ).mappings()
    for row in waiting.all():
        theirs = session.execute(select(group.c.kernels).where(group.c.id == row["ref"])).scalar_one()
        kernels = [*kernels, *theirs]
        predicted += added_seconds(row["predicted_seconds"])
        for ids in chunks(kernel["build"] for kernel in theirs):
            pending = build.c.id.in_(ids) & (build.c.state == "pending") & (build.c.group_id == row["ref"])
            session.execute(update(build).where(pending).values(group_id=claim.ref, verify_group_id=claim.ref))
        joined = {"state": "joined", "joined_to": claim.ref}
        session.execute(update(group).where(group.c.id == row["ref"]).values(**joined))
        session.execute(update(item).where(item.c.id == row["id"]).values(**_begun_with(claim, row)))
    session.execute(update(group).where(of_mine).values(kernels=kernels, predicted_seconds=predicted))
    session.execute(update(item).where(item.c.id == claim.item_id).values(predicted_seconds=predicted))
    found = load_group(session, claim.ref)
    assert found is not None, "read above"
    return found


def owners(session: Session, claim: Claim, group: Group) -> list[Owner]:
    """Whose kernels the claimed group compiles, and how long they waited for a worker: its own, then those that joined
    it."""
    table, item = core(GroupRow), core(ItemRow)
    rows = session.execute(
        select(item, table.c.kernels)
        .join(table, (table.c.id == item.c.ref) & (item.c.kind == COMPILE))
        .where(table.c.joined_to == group.id)
        .order_by(item.c.id)
    ).mappings()
    joined = [
        Owner(
            row["job_id"],
            tuple(kernel["build"] for kernel in row["kernels"]),
            max(0.0, row["started_at"] - waiting_since(row)),
        )
        for row in rows
    ]
    others = {build for one in joined for build in one.builds}
    own = tuple(kernel.build for kernel in group.kernels if kernel.build not in others)
    return [Owner(group.job_id, own, claim.waited_seconds), *joined]


def _carries_none(group_id: ColumnElement[str] | InstrumentedAttribute[str]) -> ColumnElement[bool]:
    """A group that was handed back with what it had taken along is claimed with that, and joins no other."""
    joined = aliased(GroupRow)
    return ~select(joined.id).where(joined.joined_to == group_id).exists()


def _begun_with(claim: Claim, row: RowMapping) -> dict[str, object]:
    """The values of an item whose group joins the claimed one: its wait is over, and an attempt at it has begun that is
    another item's."""
    began = max(claim.claimed_at, waiting_since(row))
    ended = {"started_at": began, "finished_at": began, "worker": claim.worker, "attempt": 1}
    return {"state": "joined", **ended}
