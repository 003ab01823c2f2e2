"""A process that imports modules once and forks on request: the roles of `cukiln serve`, and the children that run
kernels inside their fence. Imports are most of a start: 1.3 s of CPU in a role's interpreter, 0.4 s in a kernel's
child; a fork takes 0.01 s.

```
client ── request, with a channel ──────────► fork server ─┬ forked
       ◄── channel: pid and pidfd; exit code ──            └ …
```

What it forks is in a session of its own; `python -m MODULE …` of an imported module calls its `main()`, any other
command is executed. A module may have `prepare()`, called once before the first fork of it, for what each fork would
repeat. The kernel ends the server with the thread that started it, and with the server everything that it has forked. A
process is killed and reaped when its client closes or shuts down the channel: until then its pid is not given to
another process.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from workers.processes.die_with_parent import die_with_parent, name_process
from workers.processes.fence.fence import FAILED, LEADER, Fence
from workers.processes.process_stream import Ending, reap
from workers.processes.process_tree import end_sweeper

_MESSAGE_BYTES = 1 << 20
_LOST = Ending(-signal.SIGKILL, 0.0, 0)  # with the server


@dataclass(frozen=True)
class Request:
    """A process to fork: its name, command, whole environment, and the file, folder and fence where it has its own."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: str | None = None
    cwd: str | None = None
    fence: Fence | None = None

    @classmethod
    def read(cls, message: bytes) -> "Request":
        data = json.loads(message)
        return cls(**{**data, "fence": data["fence"] and Fence.read(data["fence"])})

    @property
    def module(self) -> str | None:
        return module_of(self.argv)


def module_of(argv: Sequence[str]) -> str | None:
    """What `python -m` runs here; None for another command."""
    return argv[2] if tuple(argv[:2]) == (sys.executable, "-m") and len(argv) > 2 else None


# ---- the client's end


class Forked:
    """A process that a fork server was asked for. `pid` is None until it is there."""

    def __init__(self, channel: socket.socket) -> None:
        self.pid: int | None = None
        self._ending: Ending | None = None
        self._channel = channel
        self._handle: int | None = None  # while it runs: a pidfd, readable at its end

    def receive(self, seconds: float = 0.0) -> bool:
        """Its start or its end; False where neither came within that time."""
        if self._ending is not None:
            return False
        if not _readable(self._channel.fileno() if self._handle is None else self._handle, seconds):
            return False
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
            self.kill()
            return True
        try:
            message, handles, _, _ = socket.recv_fds(self._channel, _MESSAGE_BYTES, 1)
        except ConnectionError:
            message, handles = b"", []
        if handles:
            self.pid, self._handle = json.loads(message), handles[0]
            os.set_inheritable(self._handle, False)
        else:
            self._ending = Ending(*json.loads(message)) if message else _LOST
            self._channel.close()
        return True

    def wait(self, seconds: float = 0.0) -> Ending | None:
        """How it ended; None where it still runs after that time."""
        deadline = time.monotonic() + seconds
        while self.receive(max(0.0, deadline - time.monotonic())):
            pass
        return self._ending

    def send_signal(self, number: signal.Signals) -> None:
        """Does nothing where it has ended or is not there yet."""
        if self.wait() is None and self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """Kill it, now or as soon as it is there, and have it reaped."""
        with contextlib.suppress(OSError):  # the process or the server has ended
            self._channel.shutdown(socket.SHUT_WR)


class ForkServer:
    """For one thread, which must outlive the server (`workers.processes.die_with_parent`); forks may use `fork`."""

    def __init__(
        self,
        name: str,
        modules: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        log: Path | None = None,
        tied: bool = True,
    ) -> None:
        """`log`: for its output; None: where ours goes. `tied`: to the thread that starts it, else to its channel."""
        self.modules = tuple(modules)
        self._tied = tied
        self._name = name
        self._env = {**env, "OPENBLAS_NUM_THREADS": "1"}  # a fork copies no thread but its own
        self._cwd = cwd
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        """None where it does not run, or is no child of this process."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def ended(self, seconds: float = 0.0) -> int | None:
        """The exit code of the last one; None where it still runs after that time, or never did."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds) if self._process is not None else None
        return None

    def ensure_running(self) -> bool:
        """Start it unless it runs; returns whether it did. It imports while we continue."""
        if self.pid is not None:
            return True
        self.stop()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES // 2)  # the kernel doubles it
        with theirs:
            self._process = self._start(theirs)
        return False

    def _start(self, theirs: socket.socket) -> "subprocess.Popen[bytes]":
        """`theirs`: its end of the channel."""
        with contextlib.ExitStack() as files:
            output = files.enter_context(self.log.open("ab")) if self.log is not None else None
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    __name__,
                    str(os.getpid() if self._tied else 0),
                    str(theirs.fileno()),
                    self._name,
                    *self.modules,
                ],
                env=self._env,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                # Not a session: when our end orphans its group, the kernel continues it where a signal had stopped it
                # (setpgid(2)). Only so does one that is not tied find its channel closed.
                process_group=0,
            )

    def fork(self, request: Request, standard: Sequence[int] = ()) -> Forked:
        """The server was started before. `standard`: stdin, stdout and stderr, where they are not the server's."""
        assert self._control is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(ConnectionError):  # it has ended: so has the channel
            socket.send_fds(self._control, [json.dumps(asdict(request)).encode()], [theirs.fileno(), *standard])
        return Forked(ours)

    def stop(self) -> None:
        """End it, and with it whatever it has forked and still runs."""
        if self._process is not None and self.pid is not None:
            self._process.kill()
            self._process.wait()
        if self._control is not None:
            self._control.close()


def _readable(descriptor: int, seconds: float) -> bool:
    waiting = select.poll()  # `select` takes no descriptor above 1,023
    waiting.register(descriptor, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))


# ---- the server's end


def _serve(control: socket.socket, modules: Mapping[str, ModuleType]) -> tuple[Request, list[int]] | None:
    """Returns in each forked process, with its request and its standard streams; here at the end, with None."""
    unprepared = {name: module.prepare for name, module in modules.items() if hasattr(module, "prepare")}
    channels: dict[int, tuple[socket.socket, int, bool]] = {}  # by descriptor, with the pid, and whether it sweeps
    waiting = select.poll()
    waiting.register(control, select.POLLIN)
    while True:
        ready = waiting.poll(0 if unprepared else None)
        if not ready:
            _prepare(unprepared.popitem()[1])
        for number, _ in ready:
            if number in channels:
                waiting.unregister(number)
                _end(*channels.pop(number))
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 4)
            if not message:
                return None
            request = Request.read(message)
            if prepare := unprepared.pop(request.module or "", None):
                _prepare(prepare)
            channel = socket.socket(fileno=descriptors.pop(0))
            pid = _fork()
            if pid == 0:
                for held in (control, channel, *(other for other, *_ in channels.values())):
                    held.close()
                return request, descriptors
            handle = os.pidfd_open(pid)
            with contextlib.suppress(ConnectionError):  # the client has ended: the channel is readable
                socket.send_fds(channel, [json.dumps(pid).encode()], [handle])
            for descriptor in (handle, *descriptors):
                os.close(descriptor)
            channels[channel.fileno()] = (
                channel,
                pid,
                request.fence is not None and not request.fence.means.namespaces,
            )
            waiting.register(channel, select.POLLIN)


def _fork() -> int:
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        sys.stderr.write("an imported module has started a thread: a fork would lose it, with the locks it holds\n")
        os._exit(1)  # `exit` would wait for the thread
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return os.fork()


def _end(channel: socket.socket, pid: int, swept: bool) -> None:
    """The client has ended, or asks for the end, or has seen it."""
    ending = reap(pid, os.WNOHANG)
    if ending is None:
        if swept:
            end_sweeper(pid)
        os.kill(pid, signal.SIGKILL)
        ending = reap(pid)
    assert ending is not None
    with channel, contextlib.suppress(ConnectionError):
        channel.send(json.dumps(astuple(ending)).encode())


def _run(request: Request, standard: Sequence[int], server: int, modules: Mapping[str, ModuleType]) -> Any:
    """In a process that `server` has just forked; returns the exit status."""
    os.setsid()
    die_with_parent(server)
    name_process(request.name)
    if request.log is not None:
        output = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request.cwd is not None:
        os.chdir(request.cwd)
    environment = dict(request.env)
    if request.fence is not None:
        leader = request.fence.enter()
        if request.fence.device:
            environment[LEADER] = str(leader)
    os.environ.clear()
    os.environ.update(environment)
    module = modules.get(request.module or "")
    if module is None:
        for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and by what it executes unless it is undone
            signal.signal(ignored, signal.SIG_DFL)
        try:
            os.execve(request.argv[0], list(request.argv), environment)
        except OSError as error:
            sys.stderr.write(f"{request.argv[0]} cannot be started: {error}\n")
            return FAILED
    tempfile.tempdir = None
    sys.argv = [str(module.__file__), *request.argv[3:]]
    return module.main()


@contextlib.contextmanager
def _kept_for_good() -> Iterator[None]:
    """What is made in the block the collector never looks at: in a fork it would write into pages that all share."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # without a collection: it takes 0.15 s, and imports leave almost nothing to collect
        gc.enable()


@_kept_for_good()
def _prepare(prepare: Callable[[], object]) -> None:
    prepare()


@_kept_for_good()
def _load(names: Sequence[str]) -> dict[str, ModuleType]:
    modules = {name: importlib.import_module(name) for name in names}
    for name, module in modules.items():
        if hasattr(module, "__path__"):  # a package
            modules[name] = importlib.import_module(f"{name}.__main__")
    return modules


def main() -> Any:
    """`python -m workers.processes.fork_server PARENT_PID SOCKET NAME MODULE…`; PARENT_PID 0: it is not tied."""
    parent, descriptor, name, *names = sys.argv[1:]
    if int(parent):
        die_with_parent(int(parent))
    name_process(name)
    control = socket.socket(fileno=int(descriptor))
    control.set_inheritable(False)
    modules = _load(names)
    server = os.getpid()
    forked = _serve(control, modules)
    return 0 if forked is None else _run(*forked, server, modules)


if __name__ == "__main__":
    sys.exit(main())
