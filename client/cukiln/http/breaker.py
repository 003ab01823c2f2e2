"""Whether a service that has failed is asked again."""

import threading
import time
from collections.abc import Callable

from cukiln.forks import renew_after_fork

FAILURES = 3
PAUSE_SECONDS = 30.0


class Breaker:
    """After `failures` calls in a row that failed, calls are refused for `pause_seconds`; then one is let through, and
    its outcome decides for the others. Threads may share it. `now` is replaced in tests."""

    def __init__(
        self, failures: int = FAILURES, pause_seconds: float = PAUSE_SECONDS, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.failures, self.pause_seconds, self._now = failures, pause_seconds, now
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._closed_at = 0.0  # from when on one call is let through
        renew_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """Whether a call would be refused now."""
        return self._in_a_row >= self.failures and self._now() < self._closed_at

    def admits(self) -> bool:
        """Whether this call may be made. One that is admitted is followed by `succeeded` or `failed`."""
        if self._in_a_row < self.failures:
            return True
        with self._lock:
            now = self._now()
            if self._in_a_row >= self.failures and now < self._closed_at:
                return False
            self._closed_at = now + self.pause_seconds  # for all calls but this one
            return True

    def succeeded(self) -> None:
        self._in_a_row = 0

    def failed(self) -> None:
        with self._lock:
            self._in_a_row += 1
            if self._in_a_row >= self.failures:
                self._closed_at = self._now() + self.pause_seconds
