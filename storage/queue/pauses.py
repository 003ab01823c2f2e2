"""Workers that take no work for now, because their machine cannot do any: its disk is full, or a store is away."""

from sqlalchemy import or_, select

from storage.database.session import Session, clock_of
from storage.database.sql import core, insert_new, remove
from storage.database.tables import PauseRow

LIVE_SECONDS = 15.0
"""A paused worker renews its pause every second or so; after so long without it is gone."""


def set_pause(session: Session, worker: str, reason: str | None) -> None:
    """Why the worker takes no work; None: it does. Pauses of workers that are gone are deleted."""
    gone = PauseRow.told_at < clock_of(session).now() - LIVE_SECONDS
    remove(session, PauseRow, or_(PauseRow.worker == worker, gone))
    if reason is not None:
        insert_new(session, PauseRow, [{"worker": worker, "reason": reason, "told_at": clock_of(session).now()}])


def is_paused(session: Session, worker: str) -> bool:
    return session.get(PauseRow, worker) is not None


def pauses(session: Session) -> dict[str, list[str]]:
    """The workers that are paused now, by reason."""
    now = clock_of(session).now()
    live = PauseRow.told_at.between(now - LIVE_SECONDS, now + LIVE_SECONDS)
    rows = session.execute(select(core(PauseRow)).where(live).order_by(PauseRow.reason, PauseRow.worker))
    workers: dict[str, list[str]] = {}
    for row in rows:
        workers.setdefault(row.reason, []).append(row.worker)
    return workers


def in_words(paused: dict[str, list[str]]) -> str | None:
    """A sentence without a time: each change of it is sent as an event."""
    return "; ".join(f"{', '.join(workers)} paused: {reason}" for reason, workers in paused.items()) or None
