"""The one seam for time and for random names: everything that needs either asks a `Clock`."""

from __future__ import annotations

import time
import uuid
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since the epoch, UTC."""
        ...

    def new_id(self) -> str:
        """32 hexadecimal digits that nobody else has: job ids, group ids, attempt tokens."""
        ...


class SystemClock:
    """The machine's clock and randomness."""

    def now(self) -> float:
        return time.time()

    def new_id(self) -> str:
        return uuid.uuid4().hex


class FakeClock:
    """A clock for tests: stands still until `advance`, ids count upwards."""

    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._ids = 0

    def now(self) -> float:
        return self._now

    def new_id(self) -> str:
        self._ids += 1
        return f"{self._ids:032x}"

    def advance(self, seconds: float) -> None:
        self._now += seconds
