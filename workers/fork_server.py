"""One process that imports once what the processes of `cukiln serve` run, and forks each of them.

```
supervisor ── asks: fork, signal ──────► fork server ─┬ api
           ◄── says: pids, exit codes ──              ├ plan worker
                                                      └ …
```
Imports are most of a start: 1.3 s of CPU for each new interpreter, a few milliseconds for a fork. The fork server has
one thread and leaves nothing open: no database, no connection to Redis, no GPU. What it forks is in a session of its
own, with the environment, the log and the command line that were asked for; `python -m MODULE …` of an imported module
calls its `main()`, any other command is executed. A module may have `prepare()`, which is called once before the first
fork of its processes, for what each of them would find out again.

The kernel ends the fork server with the supervisor, and with the fork server everything that it has forked. Messages
are JSON objects, one a line, on a pair of sockets.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from workers.tether import die_with_parent, name_process

ENDED_WITH_THE_SERVER = -int(signal.SIGKILL)
_STOP_SECONDS = 5.0
_READ_BYTES = 1 << 16


# ---- the supervisor's end


class Forked:
    """A process that the fork server was asked for. `pid` is None until it is there."""

    def __init__(self, server: ForkServer, number: int) -> None:
        self.pid: int | None = None
        self.returncode: int | None = None
        self._server = server
        self._number = number

    def poll(self) -> int | None:
        """The exit code where it has ended (negative: a signal), else None."""
        if self.returncode is None:
            self._server.hear()
        return self.returncode

    def wait(self, seconds: float) -> int | None:
        """The exit code; None where it still runs after that time."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and (left := deadline - time.monotonic()) > 0:
            self._server.hear(left)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            self._server.ask({"signal": int(number), "number": self._number})


class ForkServer:
    """The fork server and what it has forked. All methods belong to one thread, which must outlive it (see
    `workers.tether`)."""

    def __init__(self, modules: Sequence[str], *, env: Mapping[str, str], log: Path | None = None) -> None:
        """`modules` are imported; `log` takes its output, and that of what is forked without a log of its own; None:
        both go where ours goes."""
        self._modules = tuple(modules)
        # One BLAS thread: a fork copies no other thread than the one that forks.
        self._env = {**env, "OPENBLAS_NUM_THREADS": "1"}
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._unread = b""
        self._forked: dict[int, Forked] = {}
        self._number = 0
        self.returncode: int | None = None  # of the last one

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Start it; it imports while we go on."""
        ours, theirs = socket.socketpair()
        output = self._log.open("ab") if self._log is not None else None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), str(theirs.fileno()), *self._modules],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if output is not None:
                output.close()
        self._socket, self._unread, self.returncode = ours, b"", None

    def fork(self, name: str, argv: Sequence[str], *, env: Mapping[str, str], log: Path | None) -> Forked:
        """Ask for a process. A fork server that has ended is started again."""
        if not self.running:
            self.start()
        self._number += 1
        forked = self._forked[self._number] = Forked(self, self._number)
        role = {"name": name, "argv": list(argv), "env": dict(env), "log": None if log is None else str(log.absolute())}
        self.ask({"fork": role, "number": self._number})
        return forked

    def ask(self, request: dict[str, Any]) -> None:
        if self._socket is not None:
            with contextlib.suppress(ConnectionError):  # it has ended: `hear` finds out
                self._socket.sendall(json.dumps(request).encode() + b"\n")

    def hear(self, seconds: float = 0.0) -> None:
        """Take in what it has said; wait that long where it has said nothing."""
        if self._socket is None or not select.select([self._socket], [], [], seconds)[0]:
            return
        try:
            data = self._socket.recv(_READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            self._has_ended()
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def stop(self) -> None:
        """End it, and with it whatever it has forked and still runs."""
        if self._process is not None:
            self._process.terminate()
            self._has_ended()

    def _take(self, message: dict[str, Any]) -> None:
        forked = self._forked[message["number"]]
        if "pid" in message:
            forked.pid = message["pid"]
        else:
            forked.returncode = message["ended"]
            del self._forked[message["number"]]

    def _has_ended(self) -> None:
        """Its socket is closed: reap it. What it had forked was killed with it."""
        assert self._process is not None and self._socket is not None
        try:
            self.returncode = self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self.returncode = self._process.wait()
        self._socket.close()
        for forked in self._forked.values():
            forked.returncode = self.returncode if forked.pid is None else ENDED_WITH_THE_SERVER
        self._process = self._socket = None
        self._forked = {}


def modules_of(commands: Sequence[Sequence[str]]) -> list[str]:
    """What the fork server must import so that none of the commands needs a new interpreter."""
    return sorted({module for argv in commands if (module := _module_of(argv)) is not None})


def _module_of(argv: Sequence[str]) -> str | None:
    return argv[2] if tuple(argv[:2]) == (sys.executable, "-m") and len(argv) > 2 else None


# ---- the fork server's end


@dataclass(frozen=True)
class Role:
    """What a forked process shall be."""

    name: str
    argv: list[str]
    env: dict[str, str]
    log: str | None

    def run(self, server: int, modules: Mapping[str, ModuleType]) -> int:
        """Be it, in a process that `server` has just forked."""
        os.setsid()
        die_with_parent(server)
        name_process(self.name.replace(" worker", ""))
        if self.log is not None:
            output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
        os.environ.clear()
        os.environ.update(self.env)
        module = modules.get(_module_of(self.argv) or "")
        if module is None:
            # Python ignores these, and what is ignored stays ignored over exec.
            for number in (signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.execve(self.argv[0], self.argv, self.env)
        random.seed()
        sys.argv = [str(module.__file__), *self.argv[3:]]
        code: int = module.main()
        return code


@dataclass
class _Server:
    """Forks on request and says what became of it, until the supervisor closes its socket."""

    socket: socket.socket
    modules: Mapping[str, ModuleType]
    unprepared: list[str]
    unread: bytes = b""
    handles: dict[int, tuple[int, int]] = field(default_factory=dict)  # number → (pid, pidfd)

    def run(self) -> Role | None:
        """The role to be, in each process that is forked; None here, at the end."""
        while True:
            endings = {handle: number for number, (_, handle) in self.handles.items()}
            waiting = select.poll()  # `select` takes no descriptor above 1,023
            for descriptor in (self.socket.fileno(), *endings):
                waiting.register(descriptor, select.POLLIN)
            found = waiting.poll(0 if self.unprepared else None)
            if not found:
                self._prepare(self.unprepared[0])
            for ready, _ in found:
                if ready == self.socket.fileno():
                    data = self.socket.recv(_READ_BYTES)
                    if not data:
                        return None
                    for request in self._requests(data):
                        if "signal" in request:
                            self._signal(**request)
                        elif (role := self._fork(Role(**request["fork"]), request["number"])) is not None:
                            return role
                else:
                    self._reap(endings[ready])

    def _prepare(self, module: str) -> None:
        self.unprepared.remove(module)
        if prepare := getattr(self.modules[module], "prepare", None):
            with _kept_for_good():
                prepare()

    def _requests(self, data: bytes) -> Iterator[dict[str, Any]]:
        *lines, self.unread = (self.unread + data).split(b"\n")
        yield from map(json.loads, lines)

    def _fork(self, role: Role, number: int) -> Role | None:
        if (module := _module_of(role.argv)) in self.unprepared:
            self._prepare(str(module))
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            raise RuntimeError("an imported module has started a thread: a fork would lose it, with the locks it holds")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        pid = os.fork()
        if pid == 0:
            self.socket.close()
            for _, handle in self.handles.values():
                os.close(handle)
            return role
        self.handles[number] = (pid, os.pidfd_open(pid))
        self._say({"number": number, "pid": pid})
        return None

    def _signal(self, signal: int, number: int) -> None:
        if number in self.handles:  # not reaped, so the pid is still its own
            os.kill(self.handles[number][0], signal)

    def _reap(self, number: int) -> None:
        pid, handle = self.handles.pop(number)
        _, status = os.waitpid(pid, 0)
        os.close(handle)
        self._say({"number": number, "ended": os.waitstatus_to_exitcode(status)})

    def _say(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")


@contextlib.contextmanager
def _kept_for_good() -> Iterator[None]:
    """The collector looks at nothing that is made in the block: not now, as it grows, and not later in a fork, where it
    would write into pages that all share."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def _load(names: Sequence[str]) -> dict[str, ModuleType]:
    modules = {}
    with _kept_for_good():
        for name in names:
            package = importlib.import_module(name)
            modules[name] = importlib.import_module(f"{name}.__main__") if hasattr(package, "__path__") else package
    return modules


def main() -> int:
    """`python -m workers.fork_server SUPERVISOR_PID SOCKET MODULE…`."""
    die_with_parent(int(sys.argv[1]))
    name_process("fork server")
    connection = socket.socket(fileno=int(sys.argv[2]))
    connection.set_inheritable(False)
    modules = _load(sys.argv[3:])
    server = os.getpid()
    role = _Server(connection, modules, list(modules)).run()
    return 0 if role is None else role.run(server, modules)


if __name__ == "__main__":
    sys.exit(main())
