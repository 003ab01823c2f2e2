"""Attempts at a task after which it waited again, kept in its row for traces."""

from __future__ import annotations

from typing import Any

from sqlalchemy import RowMapping, select

from storage.database.session import Session, clock_of
from storage.database.sql import core
from storage.database.tables import TaskRow

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
