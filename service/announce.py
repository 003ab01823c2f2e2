"""Messages to Redis after an answer, from a thread of its own: no request waits for Redis."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from redis import Redis

log = logging.getLogger("cukiln.service")

MOST_WAITING = 1_000
CLOSE_SECONDS = 1.0

Write = Callable[[Redis], object]


class Announcer:
    """Best effort, in order. Lost wake-ups are rewritten by the reconciler, lost events are read from the database."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._waiting: queue.Queue[Write | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="announcer", daemon=True)
        self._thread.start()

    def later(self, write: Write) -> None:
        """Returns at once."""
        try:
            self._waiting.put_nowait(write)
        except queue.Full:
            log.warning("a message to Redis is dropped: %d wait already", MOST_WAITING)

    def close(self) -> None:
        """Wait CLOSE_SECONDS for queued messages."""
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _write_all(self) -> None:
        while (write := self._waiting.get()) is not None:
            try:
                write(self._redis)
            except Exception:
                log.exception("a message to Redis was not written")
