"""Work that ended with its worker, or because the machine failed, which says nothing about the work: it is tried again
after growing pauses, after some losses alone, and then skipped. While other work is lost too, it counts for little."""

import math
from collections.abc import Hashable, Mapping
from typing import Any

from sqlalchemy import ColumnElement, func, or_, select

from storage.database.session import Session, clock_of
from storage.database.tables import TaskRow

TOGETHER = 2
"""Losses after which it is tried alone: a build in a file of its own, of a task its first part."""
ALONE = 3
MOST = TOGETHER + ALONE
"""Losses after which it is skipped."""
STALL = ALONE
"""What the loss of a whole wall limit counts, in which a tool slept: once beside other work and once alone."""
RECENT_SECONDS = 600.0
OTHERS = 3
"""Losses of other work in that time that make the machine the likelier cause."""
GENERAL_SHARE = 0.2
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
LOST = "lost "
"""How the message of what was lost too often begins."""


def why_skipped(reason: str) -> str:
    return f"{LOST}again and again, in the end alone, so nothing is known of it ({reason}): submit it again"


def pause_after(losses: float) -> float:
    """Seconds before it is tried again."""
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * math.pow(2.0, max(0.0, losses - 1)))


def is_over(not_before: Any, now: float) -> ColumnElement[bool]:
    """Whether the pause is, by the column of its end. One that is longer than any began before the clock was set."""
    return or_(not_before.is_(None), not_before <= now, not_before > now + 2 * LONGEST_PAUSE_SECONDS)


def weight(session: Session, own: float, task_id: int | None = None, *, stalled: bool = False) -> float:
    """What one more loss counts, of a build, or of the task `task_id`, that had `own` losses. `stalled`: it took a
    whole wall limit."""
    since = clock_of(session).now() - RECENT_SECONDS
    files = select(func.count()).where(TaskRow.state == "lost", TaskRow.finished_at > since)
    tasks = select(func.count()).where(TaskRow.not_before > since, TaskRow.id != (task_id or 0))
    others = (session.scalar(files) or 0) + (session.scalar(tasks) or 0)
    if task_id is None:
        others -= 1 + math.ceil(own)  # its own files, the last among them
    if others < OTHERS:
        return STALL if stalled else 1.0
    return 1.0 if stalled else GENERAL_SHARE


class SilenceWatch:
    """Finds what does not change for so many `seconds`, by this process's monotonic time: no clocks of two machines are
    compared, nor a clock that may be set with itself. What is seen first gets its whole time. Time without a look
    counts for `most_between_looks` at most. To be called again and again, by one process."""

    def __init__(self, seconds: float, most_between_looks: float = math.inf) -> None:
        self._seconds, self._most_between_looks = seconds, most_between_looks
        self._watched, self._looked_at = 0.0, 0.0
        self._seen: dict[Hashable, tuple[Any, float]] = {}

    def silent(self, session: Session, states: Mapping[Hashable, Any]) -> set[Any]:
        """Those whose state has been the same for so long."""
        now = clock_of(session).monotonic()
        self._watched += min(now - self._looked_at, self._most_between_looks)
        self._looked_at = now
        before = {key: self._seen.get(key, (None, 0.0)) for key in states}
        self._seen = {
            key: before[key] if before[key][0] == state else (state, self._watched) for key, state in states.items()
        }
        return {key for key, (_, since) in self._seen.items() if self._watched - since > self._seconds}
