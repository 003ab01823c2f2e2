"""The one interface for time and for random names."""

from __future__ import annotations

import time
import uuid


class Clock:
    """The machine's clock and randomness."""

    def now(self) -> float:
        """Seconds since the epoch, UTC."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since some moment, of this process alone: never set back or forward."""
        return time.monotonic()

    def new_id(self) -> str:
        """32 hexadecimal digits that nothing else has: job ids, group ids, attempt tokens."""
        return uuid.uuid4().hex
