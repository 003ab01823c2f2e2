"""Jobs are charged for the workers' time, in turns of which the one that has had the fewest is next.

A turn begins no earlier than those under way (start-time fair queueing: Goyal, Vin and Cheng, SIGCOMM 1996); where none
is, not much earlier than the latest of those that wait: a job that no worker can serve says nothing about the others.
So a job that is new, or that was blocked for a while, is served at once, but not until it has caught up with all that
the others had before.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import bindparam, case, exists, func, or_, select, update

from codegen.predict.compile_cost import MAX_SECONDS
from storage.database.session import Session
from storage.database.sql import change, chunks, core
from storage.database.tables import LIVE, JobRow, PendingBuildRow, TaskJobRow, TaskRow

LEAST_SECONDS = 0.5
"""What a task counts for at least: a short prediction occupies a worker all the same."""


def take_turn(session: Session, seconds: Mapping[str, float]) -> None:
    """Charge jobs for what a worker takes now: predicted seconds, by job."""
    for ids in chunks(seconds):
        for priority in session.scalars(select(JobRow.priority).where(JobRow.id.in_(ids)).distinct()).all():
            _charge(session, priority, {job: seconds[job] for job in ids})


def spend(session: Session, job_id: str, seconds: float) -> None:
    """Charge the job for seconds that were not predicted."""
    job = core(JobRow).c
    change(session, JobRow, job.id == job_id, used_seconds=job.used_seconds + seconds)


def _charge(session: Session, priority: int, seconds: Mapping[str, float]) -> None:
    job, task, needed, pending_build = (core(table).c for table in (JobRow, TaskRow, TaskJobRow, PendingBuildRow))
    others = (job.priority == priority) & job.state.in_(LIVE) & job.id.not_in(seconds)
    with_tasks = (
        select(needed.job_id)
        .join(core(TaskRow), task.id == needed.task_id)
        .where(task.state == bindparam("in_state"), needed.wanted)
    )

    def of_others(seconds: Any, which: Any, state: str) -> float | None:
        return session.scalar(select(seconds).where(others, which), {"in_state": state})

    under_way = of_others(func.min(job.turn_seconds), job.id.in_(with_tasks), "leased")
    if under_way is None:
        has_pending = exists().where(pending_build.job_id == job.id)
        waiting = of_others(func.max(job.used_seconds), or_(job.id.in_(with_tasks), has_pending), "waiting")
        under_way = None if waiting is None else waiting - MAX_SECONDS
    begins = (
        job.used_seconds
        if under_way is None
        else case((job.used_seconds > under_way, job.used_seconds), else_=under_way)
    )
    least = LEAST_SECONDS / len(seconds)
    session.execute(
        update(core(JobRow))
        .where(job.id == bindparam("of_job"), job.priority == priority)
        .values(turn_seconds=begins, used_seconds=begins + bindparam("more")),
        [{"of_job": job_id, "more": max(spent, least)} for job_id, spent in seconds.items()],
    )
