"""A problem is finished: with a winner, or with the reason why there is none."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import update

from cukiln.types import StageSeconds
from storage.database.session import Session, clock_of
from storage.database.sql import change
from storage.database.tables import LIVE, JobProblemRow, TaskRow
from storage.entities.stage_times import add_seconds, by_phase
from storage.errors import LostLease
from storage.queue.tasks import Lease, complete
from storage.transitions.cancel_and_expire import settle_job


def finish_problem(
    session: Session,
    lease: Lease,
    *,
    winner: str | None,
    error: str | None,
    extra_seconds: Mapping[str, StageSeconds] | None = None,
    phases: Sequence[Mapping[str, Any]] = (),
) -> str | None:
    """End a finish task and its problem, with a winner (a candidate id) or an error; the job's new state if this was
    its last. `extra_seconds`: of finishing, by stage, `phases`: within it. Raises `LostLease`."""
    if (winner is None) == (error is None):
        raise ValueError("a finished problem has either a winner or an error")
    complete(session, lease)
    problem_id = int(lease.ref)
    state = "failed" if winner is None else "done"
    why = error or JobProblemRow.error  # the note on what was lost or skipped stays
    job_id = session.scalar(
        update(JobProblemRow)
        .where(JobProblemRow.id == problem_id, JobProblemRow.state.in_(LIVE))
        .values(state=state, winner=winner, error=why, finished_at=clock_of(session).now())
        .returning(JobProblemRow.job_id)
    )
    if job_id is None:
        raise LostLease(lease.kind, lease.ref, lease.token)
    change(session, TaskRow, TaskRow.id == lease.task_id, phases=[dict(phase) for phase in phases])
    waiting = {"queue": StageSeconds(wall=lease.waited_seconds)}
    add_seconds(session, {problem_id: {**(extra_seconds or {}), **by_phase(phases), **waiting}})
    return settle_job(session, job_id)
