"""New tasks, found by kind and ref, so that adding one twice adds one; tasks that wait again, and past attempts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import RowMapping, select, true

from storage.database.session import Session, clock_of
from storage.database.sql import change, chunks, core, insert_new, rows_among
from storage.database.tables import JobRow, TaskJobRow, TaskRow

MAX_PAST = 200
"""Of one task; the oldest are dropped: a worker that is restarted over and over must not make a row grow for ever."""


def waits_again(session: Session, task_id: int, how: str) -> dict[str, Any]:
    """The values of a task that waits again. `how` the attempt ended: released, failed, lost, or the task's state."""
    tasks = core(TaskRow).c
    row = session.execute(select(core(TaskRow)).where(tasks.id == task_id)).mappings().one_or_none()
    now = clock_of(session).now()
    return {
        "state": "waiting",
        **dict.fromkeys(("token", "worker", "lease_expires_at", "started_at", "finished_at", "not_before")),
        "available_at": now,
        "past": [*row["past"], *_attempt(row, how, now)][-MAX_PAST:] if row else [],
    }


def _attempt(row: RowMapping, how: str, now: float) -> list[dict[str, Any]]:
    """Nothing where the task ended before any attempt at it."""
    if row["started_at"] is None:
        return []
    return [
        {
            "worker": row["worker"],
            "attempt": row["attempt"],
            "available_at": waiting_since(row),
            "started_at": row["started_at"],
            "ended_at": row["finished_at"] or now,
            "how": how,
        }
    ]


def waiting_since(row: RowMapping) -> float:
    """When the present attempt, or the last, could have begun."""
    since: float = row["created_at"] if row["available_at"] is None else row["available_at"]
    return since


UNENDED = ("waiting", "leased")

Place = tuple[str, str]
"""Kind and ref."""


@dataclass(frozen=True)
class NewTask:
    """`ref` says what to work on, `jobs` for which; of a job's tasks of one kind the longest predicted goes first."""

    kind: str
    ref: str
    target: str | None = None
    jobs: tuple[str, ...] = ()
    predicted_seconds: float = 0.0


def add_tasks(session: Session, tasks: Iterable[NewTask]) -> int:
    """Add what is not there yet (found by kind and ref, whatever its state); returns how many were new."""
    by_place = {(task.kind, task.ref): task for task in tasks}
    present = _present(session, by_place)
    new = {place: task for place, task in by_place.items() if place not in present}
    rows = [{"kind": task.kind, "ref": task.ref, "state": "waiting", **_anew(session, task)} for task in new.values()]
    insert_new(session, TaskRow, rows)
    added = _present(session, new)
    _insert_jobs(session, [(added[place][0], job) for place, task in new.items() for job in task.jobs])
    return len(rows)


def add_again(session: Session, tasks: Iterable[NewTask]) -> list[NewTask]:
    """Add what is not there yet, let what has ended wait anew, and add their jobs to what has not ended.

    Returns the tasks that wait now and did not before. Their kinds are those that may have more to do later.
    """
    by_place = {(task.kind, task.ref): task for task in tasks}
    present = _present(session, by_place)
    for place, (task_id, state) in present.items():
        if state not in UNENDED:
            task, row = by_place[place], core(TaskRow)
            anew = {**waits_again(session, task_id, state), **_anew(session, task)}
            change(session, row, row.c.id == task_id, **anew)
            needed_by, job = core(TaskJobRow).c, core(JobRow).c
            ended = select(job.id).where(job.id == needed_by.job_id, job.finished_at.is_not(None)).exists()
            # Jobs that needed it until it ended so. Of a failed one, jobs that have not ended need it still.
            had = (needed_by.task_id == task_id) & (ended if state == "failed" else true())
            change(session, TaskJobRow, had, wanted=False)
    add_jobs(session, [(id, job) for place, (id, _) in present.items() for job in by_place[place].jobs])
    add_tasks(session, (task for place, task in by_place.items() if place not in present))
    return [task for place, task in by_place.items() if place not in present or present[place][1] not in UNENDED]


def add_jobs(session: Session, pairs: Iterable[tuple[int, str]]) -> None:
    """Add jobs that need tasks, as pairs of task id and job id."""
    row, pairs = core(TaskJobRow), list(pairs)
    _insert_jobs(session, pairs)
    by_job: dict[str, list[int]] = {}
    for task_id, job in pairs:
        by_job.setdefault(job, []).append(task_id)
    for job, task_ids in by_job.items():
        for ids in chunks(task_ids):
            again = row.c.task_id.in_(ids) & (row.c.job_id == job) & ~row.c.wanted
            change(session, row, again, wanted=True)


def _insert_jobs(session: Session, pairs: Iterable[tuple[int, str]]) -> None:
    for some in chunks(pairs, 500):
        insert_new(session, TaskJobRow, [{"task_id": task, "job_id": job, "wanted": True} for task, job in some])


def jobs_of(session: Session, task_id: int) -> tuple[str, ...]:
    """The jobs that need the task."""
    row = core(TaskJobRow).c
    needed_by = select(row.job_id).where(row.task_id == task_id, row.wanted).order_by(row.job_id)
    return tuple(session.scalars(needed_by))


def _present(session: Session, by_place: Mapping[Place, NewTask]) -> dict[Place, tuple[int, str]]:
    """Id and state of those that are there."""
    task = core(TaskRow).c
    kinds = {kind for kind, _ in by_place}
    of_kinds = select(task.kind, task.ref, task.id, task.state).where(task.kind.in_(kinds))
    rows = rows_among(session, of_kinds, task.ref, [ref for _, ref in by_place])
    return {(kind, ref): (id, state) for kind, ref, id, state in rows if (kind, ref) in by_place}


def _anew(session: Session, task: NewTask) -> dict[str, Any]:
    """The values of a task that nothing was tried of: without its token, an attempt at it has lost its lease."""
    return {
        "error": None,
        "attempt": 0,
        "target": task.target,
        "predicted_seconds": task.predicted_seconds,
        "created_at": clock_of(session).now(),
    }
