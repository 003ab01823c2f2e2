"""A process that is kept running: started again when it ends or hangs, stopped in two steps; and what sees that."""

import http.client
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workers.processes.fork_server import Forked, ForkServer, Request
from workers.processes.process_tree import is_stopped

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 2.0
END_SECONDS = 5.0  # until a killed child is gone; after that the end of the fork server ends it
STOPPED_SECONDS = 1.0
"""For which a signal may stop it."""
STEADY_SECONDS = 60.0  # a child that has lived this long starts again after the shortest pause
ASK_SECONDS = 1.0
ANSWER_SECONDS = 2.0
SILENT_SECONDS = 10.0
"""Without an answer, until it is given up: a probe is answered within a second whatever else it does."""


class StoppedWatch:
    """For how long a signal has had a process stopped; asked again and again."""

    def __init__(self) -> None:
        self._since: float | None = None

    def too_long(self, pid: int | None) -> bool:
        """Whether for more than STOPPED_SECONDS."""
        if pid is None or not is_stopped(pid):
            self._since = None
            return False
        now = time.monotonic()
        self._since = self._since or now
        return now - self._since > STOPPED_SECONDS


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


@dataclass
class Child:
    """One kept process, forked by `server`. All methods belong to the thread of the fork server."""

    name: str
    argv: Sequence[str]
    grace_seconds: float
    server: ForkServer
    env: Mapping[str, str]
    log: Path | None
    _process: Forked | None = None
    _started_at: float = 0.0
    _pause: float = 0.0
    _start_again_at: float | None = None
    _again: bool = False  # it was started again, and has no pid yet
    _failed: bool = False  # it could not be started, which was said
    _stopped: StoppedWatch = field(default_factory=StoppedWatch)
    _hung: Forked | None = None  # the last that was killed

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start it, in a session of its own: Ctrl-C in a terminal reaches the supervisor alone."""
        self.server.ensure_running()
        log = None if self.log is None else str(self.log.absolute())
        self._process = self.server.fork(Request(self.name.replace(" worker", ""), self.argv, self.env, log))
        self._started_at = time.monotonic()
        self._start_again_at = None

    def ended(self) -> int | None:
        """Its exit code where it has ended (negative: a signal), else None."""
        ending = self._process.wait() if self._process is not None else None
        return None if ending is None else ending.returncode

    def keep(self) -> str | None:
        """Start it again where it has ended, end it where it is stopped. Returns what to report."""
        if self._start_again_at is not None:
            return None if time.monotonic() < self._start_again_at else self._start_again()
        code = self.ended()
        if self._again and self.pid is not None:
            self._again = False
            return f"{self.name} started again, pid {self.pid}"
        if code is None:
            return self.end_hung("is stopped by a signal") if self._stopped.too_long(self.pid) else None
        if time.monotonic() - self._started_at > STEADY_SECONDS:
            self._pause = 0.0
        pause = self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS) or FIRST_PAUSE_SECONDS
        self._start_again_at = time.monotonic() + pause
        where = f"; its log: {self.log}" if self.log is not None else ""
        return f"{self.name} {describe_exit(code)}, starting it again in {pause:g} s{where}"

    def _start_again(self) -> str | None:
        try:
            self.start()
        except OSError as error:  # the machine has no process or descriptor left, or the fork server no log
            before, self._failed = self._failed, True
            self._start_again_at = time.monotonic() + LONGEST_PAUSE_SECONDS
            return None if before else cannot_start(self.name, error)
        self._failed, self._again = False, True
        return None

    def end_hung(self, why: str) -> str | None:
        """Kill what runs and does nothing; `keep` starts it again. Returns what there is to report: once."""
        if self._process is None or self._process is self._hung:
            return None
        self._hung = self._process
        self._process.kill()
        return f"{self.name} {why}: it is killed"

    @property
    def runs_for_seconds(self) -> float:
        """Since its last start; 0 where it has ended or waits for its start."""
        waits = self._start_again_at is not None or self.pid is None or self.ended() is not None
        return 0.0 if waits else time.monotonic() - self._started_at

    def ask_to_end(self) -> None:
        """SIGTERM."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def end(self, grace_seconds: float) -> bool:
        """Wait, then SIGKILL. Returns whether it ended by itself."""
        if self._process is None or self._process.wait(max(0.0, grace_seconds)) is not None:
            return True
        self._process.kill()
        self._process.wait(END_SECONDS)
        return False


def tail_of(log: Path | None, characters: int = 1500) -> str:
    if log is None or not log.exists():
        return ""
    return log.read_text(errors="replace")[-characters:]


def cannot_start(name: str, error: Exception) -> str:
    return f"{name} cannot be started, tried again every {LONGEST_PAUSE_SECONDS:g} s: {error}"


def describe_exit(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
