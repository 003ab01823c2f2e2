"""Whether the API still answers: its process may be there and do nothing."""

from __future__ import annotations

import http.client
import threading
import time

ASK_SECONDS = 1.0
ANSWER_SECONDS = 2.0
SILENT_SECONDS = 10.0
"""Without an answer, until it is given up: a probe is answered within a second whatever else it does."""


def answers(host: str, port: int) -> bool:
    """Whether /healthz says that all is well."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_SECONDS)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class ApiWatch:
    """Asks every second, in a thread of its own: the supervisor's looks after processes meanwhile."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._answered_at = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="api watch", daemon=True)
        self._thread.start()

    def is_silent(self, for_seconds: float) -> bool:
        """Whether an API that has run for so long should have answered."""
        return min(for_seconds, time.monotonic() - self._answered_at) > SILENT_SECONDS

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(ANSWER_SECONDS + ASK_SECONDS)

    def _ask(self) -> None:
        while not self._stop.wait(ASK_SECONDS):
            if answers(*self._address):
                self._answered_at = time.monotonic()
