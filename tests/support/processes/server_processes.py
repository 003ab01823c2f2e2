"""Server processes of a test, forked as `cukiln serve` forks them: imports are seconds of each start.

`python -m tests.support.processes.server_processes ROLE …` is what is forked."""

from __future__ import annotations

import ast
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import service.__main__
import workers.steps
import workers.supervisor.foundation
import workers.worker.main
from cukiln.cli.main import main as command_line
from storage.config.settings import load_settings
from tests.faults import checks
from tests.support.kernels.compile_cache import RUNTIME
from tests.support.processes import caching_worker, counting_worker, journal_worker
from tests.support.run.places import ROOT
from workers.processes import fork_server
from workers.processes.fork_server import Forked, ForkServer, Request
from workers.supervisor import serve

__all__ = ["ServerProcess", "WarmForkServer", "main", "prepare", "start_process", "warm_up"]

prepare = workers.worker.main.prepare

MODULE = "tests.support.processes.server_processes"


def _be_fork_server() -> Any:
    sys.argv[2] = str(_given())
    _enter_mounts()
    return fork_server.main()


def _be_supervisor() -> int:
    """`cukiln serve` with workers and an API of the test's: Python's text of their commands."""
    _fork_servers_are_forks()
    worker, api = map(ast.literal_eval, sys.argv[1:])
    return serve.serve(load_settings(), commands=serve.Commands(worker=worker, api=api))


def _be_command() -> None:
    """`cukiln …`; the workers of a service that it starts keep in a folder what runs kernels on the CPU."""
    _fork_servers_are_forks()
    serve.Commands = partial(serve.Commands, worker=caching_worker_of(sys.argv.pop(1)))  # type: ignore[misc, assignment]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell in the background ignores
    _enter_mounts()
    command_line()


def _be_checks() -> None:
    _enter_mounts()
    checks.main()


MOUNTS = "TEST_MOUNTS"
"""In an environment: a process whose mounts are to be seen."""
_CLONE_NEWNS = 0x00020000  # linux/sched.h


def _enter_mounts() -> None:
    if holder := os.environ.get(MOUNTS):
        here = Path.cwd()
        with Path(f"/proc/{holder}/ns/mnt").open("rb") as namespace:
            assert ctypes.CDLL(None).setns(namespace.fileno(), _CLONE_NEWNS) == 0
        os.chdir(here)


def _fork_servers_are_forks() -> None:
    """Of the server that has forked this process, too."""
    lent = ForkServer("test processes", [], env=ENVIRONMENT)
    lent._control = socket.socket(fileno=_given())
    globals()["_server"] = lambda: lent
    serve.ForkServer = WarmForkServer  # type: ignore[misc]


def _given() -> int:
    """The socket that came as standard input."""
    given = os.dup(0)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return given


ROLES: dict[str, Callable[[], Any]] = {
    "api": service.__main__.main,
    "fork server": _be_fork_server,
    "worker": workers.worker.main.main,
    "counting worker": counting_worker.main,
    "journal worker": journal_worker.main,
    "supervisor": _be_supervisor,
    "command": _be_command,
    "checks": _be_checks,
}
"""Standard input of the supervisor and the command is the socket to what forked them: it forks their fork servers."""
# Of the run, not of the test that starts the first of them: whatever names a test's folder is taken for left over.
ENVIRONMENT = dict(os.environ)
START_SECONDS = 240.0  # only keeps a broken test from hanging
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


class WarmForkServer(ForkServer):
    """The fork server of a service, itself a fork of what `warm_up` started: what it imports is there. It is tied to
    its channel, and not to the thread that starts it. It runs in the data folder, by which what it forks is found."""

    def _start(self, theirs: socket.socket) -> Any:
        argv = (sys.executable, "-m", MODULE, "fork server", "0", "", self._name, *self.modules)
        request = Request(self._name, argv, self._env, cwd=str(self._cwd or self._env.get("CUKILN_DATA", ROOT)))
        with open(os.dup(1) if self.log is None else self.log, "ab") as output:  # noqa: PTH123
            return ServerProcess(_server().fork(request, [theirs.fileno(), output.fileno(), output.fileno()]))


@cache
def _server() -> ForkServer:
    return ForkServer("test processes", [MODULE], env=ENVIRONMENT, cwd=ROOT)


def warm_up() -> None:
    """For the test's own thread: what it starts ends with the thread."""
    _server().ensure_running()


def start_process(
    role: str, *words: str, env: Mapping[str, str], log: Path, errors: Path | None = None
) -> ServerProcess:
    """It runs in the folder of its log, by which it is found: its environment in /proc is that of the fork server.
    `errors`: for what it says on standard error, else in the log too."""
    warm_up()
    argv = (sys.executable, "-m", MODULE, role, *words)
    request = Request(role, argv, dict(env), log=str(log), cwd=str(log.parent))
    with ExitStack() as files:
        standard = []
        if role in ("supervisor", "command"):
            assert _server()._control is not None
            standard = [_server()._control.fileno()]
        if errors is not None:
            standard += [files.enter_context(path.open("ab")).fileno() for path in (log, errors)]
        return ServerProcess(_server().fork(request, standard))


def caching_worker_of(folder: str) -> tuple[str, ...]:
    """The command of workers that keep there what runs kernels on the CPU."""
    return (sys.executable, "-m", caching_worker.MODULE, folder, " ".join(RUNTIME))


def main() -> Any:
    role = sys.argv.pop(1)
    return ROLES[role]()
