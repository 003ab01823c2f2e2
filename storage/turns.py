"""Jobs of one priority take turns: the one that has used the fewest predicted seconds of the workers' time is next.

A turn begins no earlier than those under way, so a job that comes new, or that could not go on for a while, is served
at once but not until it has caught up with all that the others used before (start-time fair queueing: Goyal, Vin and
Cheng, SIGCOMM 1996).
"""

from __future__ import annotations

from sqlalchemy import func, select, update

from storage.database import Session
from storage.rows import core
from storage.tables import ItemRow, JobRow

LEAST_SECONDS = 0.5
"""What a turn counts for at least: an item of which little is predicted occupies a worker all the same."""


def take_turn(session: Session, job_id: str, seconds: float) -> None:
    """Charge the job for an item of so many predicted seconds, which a worker takes now."""
    job, item = core(JobRow).c, core(ItemRow).c
    priority, used = session.execute(select(job.priority, job.used_seconds).where(job.id == job_id)).one()
    under_way = session.scalar(
        select(func.min(job.turn_seconds))
        .join(core(ItemRow), item.job_id == job.id)
        .where(item.state == "claimed", job.priority == priority, job.id != job_id)
    )
    begins = used if under_way is None else max(used, under_way)
    turn = {"turn_seconds": begins, "used_seconds": begins + max(seconds, LEAST_SECONDS)}
    session.execute(update(core(JobRow)).where(job.id == job_id).values(**turn))
