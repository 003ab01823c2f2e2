"""Server processes of a test, forked as `cukiln serve` forks them: imports are a second of each start.

`python -m tests.support.processes.server_processes ROLE …` is what is forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import service.__main__
import workers.steps
import workers.worker.main
from tests.support.processes import counting_worker, journal_worker
from tests.support.run.places import ROOT
from workers.processes.fork_server import Forked, ForkServer, Request

__all__ = ["ServerProcess", "main", "start_process"]

MODULE = "tests.support.processes.server_processes"
ROLES: dict[str, Callable[[], Any]] = {
    "api": service.__main__.main,
    "worker": workers.worker.main.main,
    "counting worker": counting_worker.main,
    "journal worker": journal_worker.main,
}
# Of the run, not of the test that starts the first of them: whatever names a test's folder is taken for left over.
ENVIRONMENT = dict(os.environ)
START_SECONDS = 60.0
LONG_SECONDS = 600.0


class ServerProcess:
    """As `subprocess.Popen`."""

    def __init__(self, forked: Forked) -> None:
        self._forked = forked
        assert forked.receive(START_SECONDS) and forked.pid is not None, "the fork server does not answer"
        self.pid: int = forked.pid

    def poll(self) -> int | None:
        ending = self._forked.wait()
        return None if ending is None else ending.returncode

    def wait(self, timeout: float = LONG_SECONDS) -> int:
        ending = self._forked.wait(timeout)
        if ending is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return ending.returncode

    def send_signal(self, number: signal.Signals) -> None:
        self._forked.send_signal(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._forked.kill()


@cache
def _server() -> ForkServer:
    return ForkServer("test processes", [MODULE], env=ENVIRONMENT, cwd=ROOT)


def start_process(role: str, *words: str, env: Mapping[str, str], log: Path) -> ServerProcess:
    """It runs in the folder of its log, by which it is found: its environment in /proc is that of the fork server."""
    _server().ensure_running()
    argv = (sys.executable, "-m", MODULE, role, *words)
    return ServerProcess(_server().fork(Request(role, argv, dict(env), log=str(log), cwd=str(log.parent))))


def main() -> Any:
    role = sys.argv.pop(1)
    return ROLES[role]()
