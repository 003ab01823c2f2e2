"""Groups that shared a file wait for themselves again: an attempt at it has failed, or its worker died.

Nobody knows which of them it was. So none is taken along a second time: each is tried alone, by its own attempts, of
which this one was the first.
"""

from __future__ import annotations

from sqlalchemy import or_, select, update

from codegen.compile_model import added_seconds
from storage.attempts import waits_again
from storage.database import Session, clock_of
from storage.endings import end_items
from storage.judge import LIVE
from storage.new_items import COMPILE
from storage.rows import chunks, core
from storage.tables import BuildRow, GroupRow, ItemRow, JobRow


def part_groups(session: Session, group_id: str, how: str) -> None:
    """Give the groups that joined this one their builds back. `how` the attempt at it ended: failed, lost. What belongs
    to a job that has ended meanwhile, or spent its budget, goes to another that waits for it, or ends."""
    group, item = core(GroupRow), core(ItemRow)
    joined = session.execute(
        select(group.c.id, group.c.kernels, group.c.predicted_seconds, item.c.id.label("item_id"), item.c.job_id)
        .join(item, (item.c.ref == group.c.id) & (item.c.kind == COMPILE))
        .where(group.c.joined_to == group_id)
    ).all()
    if not joined:
        return
    for one in joined:
        builds = {kernel["build"] for kernel in one.kernels}
        _hand_builds(session, group_id, one.id, builds)
        session.execute(update(group).where(group.c.id == one.id).values(state="waiting", joined_to=None))
        session.execute(update(item).where(item.c.id == one.item_id).values(**waits_again(session, one.item_id, how)))
    _leave(session, group_id, {kernel["build"] for one in joined for kernel in one.kernels})
    less = sum(added_seconds(one.predicted_seconds) for one in joined)
    for table, mine in ((group, group.c.id == group_id), (item, (item.c.ref == group_id) & (item.c.kind == COMPILE))):
        session.execute(update(table).where(mine).values(predicted_seconds=table.c.predicted_seconds - less))
    # A job may have become more urgent for one of their kernels, and raised the item that had all.
    urgency = select(item.c.priority).where(item.c.ref == group_id, item.c.kind == COMPILE).scalar_subquery()
    theirs = item.c.id.in_([one.item_id for one in joined])
    session.execute(update(item).where(theirs, item.c.priority < urgency).values(priority=urgency))
    in_time = or_(JobRow.deadline.is_(None), JobRow.deadline > clock_of(session).now())
    jobs = {one.job_id for one in joined}
    going_on = select(JobRow.id).where(JobRow.id.in_(jobs), JobRow.state.in_(LIVE), in_time)
    for job_id in sorted(jobs - set(session.scalars(going_on))):
        end_items(session, job_id, (COMPILE,))


def _hand_builds(session: Session, giver: str, taker: str, builds: set[str]) -> None:
    build = core(BuildRow)
    for ids in chunks(builds):
        pending = build.c.id.in_(ids) & (build.c.state == "pending") & (build.c.group_id == giver)
        session.execute(update(build).where(pending).values(group_id=taker, verify_group_id=taker))


def _leave(session: Session, group_id: str, gone: set[str]) -> None:
    """Take these builds from the group's kernels."""
    group = core(GroupRow)
    kernels = session.execute(select(group.c.kernels).where(group.c.id == group_id)).scalar_one()
    kept = [kernel for kernel in kernels if kernel["build"] not in gone]
    session.execute(update(group).where(group.c.id == group_id).values(kernels=kept))
