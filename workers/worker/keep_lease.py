"""Keep the lease of a task, and end this process before anyone else may take the task.

The database gives a task to another worker once its lease is over, so a task runs twice at once only where its first
holder continues beyond that. Two things stop it, both counted from *before* the last renewal that succeeded:
- a thread renews every second; where it cannot until shortly before the end, it ends this process, and with it all that
  this has started;
- the kernel's alarm clock, set anew by each renewal, kills this process a little later, also where the interpreter
  hangs in native code and no thread runs.
A machine that sleeps beyond the lease wakes into both; what it then still manages to write is refused by its old token.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import NoReturn

from storage.database.database_errors import DATABASE_AWAY
from storage.database.session import Database
from storage.queue import tasks
from workers.steps.context import Cancel, StopReason

log = logging.getLogger("cukiln.lease")

RENEW_SECONDS = 1.0
UNWIND_SECONDS = 10.0  # for a step whose job was cancelled or has spent its budget, until it is killed
AFTER_LOSS_SECONDS = 2.0
_RETRY_SECONDS = 0.1
_REASONS: dict[tasks.Renewal, StopReason] = {
    tasks.Renewal.LOST: "lost",
    tasks.Renewal.CANCELLED: "cancelled",
    tasks.Renewal.DEADLINE: "deadline",
}


class LeaseKeeper:
    """Around the work on a leased task, in a process of its own (the worker child): it may be killed.

    `held_since` is `time.monotonic()` from before the lease. SIGTERM, while inside, sets `cancel` with "stopping".
    """

    def __init__(
        self, database: Database, lease: tasks.Lease, cancel: Cancel, *, lease_seconds: float, held_since: float
    ) -> None:
        self._database = database
        self._lease = lease
        self._cancel = cancel
        self._seconds = lease_seconds
        self._every = min(RENEW_SECONDS, lease_seconds / 5)
        self._margin = min(1.0, lease_seconds / 5)
        self._held_since = held_since
        self._wake = os.eventfd(0)
        self._stopping = self._ended = False
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> LeaseKeeper:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, self._asked_to_stop)
        self._set_alarm()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(self._wake)

    def _asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        # A handler runs in the middle of whatever the main thread does, perhaps inside a lock of `cancel`: the thread
        # sets it.
        self._stopping = True
        os.eventfd_write(self._wake, 1)

    def _keep(self) -> None:
        renew_at = self._held_since + self._every
        while not self._ended:
            if select.select([self._wake], [], [], max(0.0, renew_at - time.monotonic()))[0]:
                os.eventfd_read(self._wake)
                if self._stopping and not self._ended:
                    self._cancel.because("stopping")
                continue
            before = time.monotonic()
            try:
                with self._database.write() as session:
                    renewal = tasks.renew(session, self._lease, self._seconds)
            except DATABASE_AWAY as error:
                log.warning("lease of %s %s not renewed: %s", self._lease.kind, self._lease.ref, error)
                if time.monotonic() > self._held_since + self._seconds - 2 * self._margin:
                    self._die("its lease could not be renewed in time")
                renew_at = time.monotonic() + _RETRY_SECONDS
                continue
            if renewal is not tasks.Renewal.HELD:
                self._lose(_REASONS[renewal])
                return
            self._held_since, renew_at = before, before + self._every
            self._set_alarm()

    def _lose(self, reason: StopReason) -> None:
        """Nothing is to be renewed any more: the step has a moment to unwind, then the alarm ends this process.

        "lost" is also what a lease looks like whose task the step has just ended in its own transaction; it then has
        the moment to write its wake-ups. Where the lease is really lost, the alarm has struck before.
        """
        self._cancel.because(reason)
        signal.setitimer(signal.ITIMER_REAL, AFTER_LOSS_SECONDS if reason == "lost" else UNWIND_SECONDS)

    def _set_alarm(self) -> None:
        left = self._held_since + self._seconds - self._margin - time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, max(0.001, left))

    def _die(self, why: str) -> NoReturn:
        log.error("%s %s is abandoned: %s", self._lease.kind, self._lease.ref, why)
        os._exit(1)  # what it started ends with it, and its undertaker after that
