"""A process that has imported what children under a fence run, and forks each of them into the fence that a new program
gets (`workers.processes`).

```
worker ─┬ horse ── asks, with the pipes ─┐
        └ fence server ◄─────────────────┘
             └ leader ─ process 1 of the namespace ─ the child ─ what it starts
```
An interpreter that imports NumPy and the operators takes 0.4 s of CPU, a fork 0.01 s. The server is started with the
minimal environment of such a child and has imported modules, nothing else: no setting, no secret, no connection is in
its memory. It runs as long as the worker. Each request comes with a channel of its own, over which the horse reaps the
leader, and whose end (the horse was killed) ends the tree; the end of the server ends all trees.

The child cannot reach the server: the sockets to it have no name, and are closed before the child runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import IO, NoReturn

from workers.running import Ending
from workers.tether import PR_SET_PDEATHSIG, die_with_parent, name_process

CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000  # linux/sched.h
ANSWER_SECONDS = 30.0  # for a server that is still importing, on a busy machine
_MESSAGE_BYTES = 1 << 16


class ServerGone(Exception):
    """The fence server has ended, or does not answer."""


@dataclass(frozen=True)
class Fence:
    """What a child is fenced in with. `user`: namespaces need one of users around them."""

    user: bool
    network: bool  # one of its own, with nothing in it
    cpu_seconds: int
    file_bytes: int


@dataclass(frozen=True)
class Request:
    """A child: `arguments` of the module's `main`, its whole environment, its folder."""

    arguments: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    fence: Fence


# ---- the worker's and the horse's end


class FenceServer:
    """Started by a worker before it forks, used by its horses."""

    def __init__(self, module: str, env: Mapping[str, str]) -> None:
        self.module = module
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def keep(self) -> None:
        """Start it, or start it again where it has ended. For the worker; the thread must outlive the server."""
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(os.getpid()), str(theirs.fileno()), self.module],
                env=self._env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def stop(self) -> None:
        """End it, and all that it has forked and still runs."""
        if self._process is not None and self._socket is not None:
            self._process.kill()
            self._process.wait()
            self._socket.close()
            self._process = self._socket = None

    def fork(self, request: Request, *, stdin: bytes) -> ForkedLeader:
        """Raises ServerGone, OSError."""
        if self._socket is None:
            raise ServerGone("it was not started")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(ANSWER_SECONDS)
        with theirs, _Pipes(stdin) as pipes:
            try:
                socket.send_fds(
                    self._socket, [json.dumps(asdict(request)).encode()], [theirs.fileno(), *pipes.for_child]
                )
                theirs.close()
                pid = json.loads(ours.recv(_MESSAGE_BYTES) or b"null")
            except OSError as error:
                ours.close()
                raise ServerGone(str(error)) from error
            if pid is None:
                ours.close()
                raise ServerGone("it ended before it had forked")
            return ForkedLeader(pid, ours, *pipes.take())


class ForkedLeader:
    """The first process of a tree, a child of the fence server: `workers.running.Leader`."""

    def __init__(self, pid: int, channel: socket.socket, stdout: IO[bytes], stderr: IO[bytes]) -> None:
        self.pid = pid
        self.stdout: IO[bytes] | None = stdout
        self.stderr: IO[bytes] | None = stderr
        self._channel = channel

    def reap(self) -> Ending | None:
        """How it ended; None while it runs. Its pid is its own until then."""
        try:
            self._channel.send(b"reap")
            answer = self._channel.recv(_MESSAGE_BYTES)
        except OSError:
            answer = b""
        if not answer:
            return Ending(int(signal.SIGKILL), 0.0, 0)  # with the server
        ending = json.loads(answer)
        return None if ending is None else Ending(*ending)

    def close(self) -> None:
        self._channel.close()


class _Pipes:
    """The child's stdin, stdout and stderr. On leaving the block what was not taken is closed."""

    def __init__(self, stdin: bytes) -> None:
        self._open: list[int] = []
        source, sink = self._pipe()
        os.write(sink, stdin)  # less than a pipe holds
        self._close(sink)
        self._out, out = self._pipe()
        self._err, err = self._pipe()
        self.for_child = [source, out, err]

    def take(self) -> tuple[IO[bytes], IO[bytes]]:
        """The ends of stdout and stderr to read from."""
        for descriptor in (self._out, self._err):
            self._open.remove(descriptor)
        return os.fdopen(self._out, "rb", 0), os.fdopen(self._err, "rb", 0)

    def __enter__(self) -> _Pipes:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in list(self._open):
            self._close(descriptor)

    def _pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        self._open += ends
        return ends

    def _close(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        os.close(descriptor)


# ---- the server's end


@dataclass
class _Server:
    control: socket.socket
    leaders: dict[int, tuple[socket.socket, int]] = field(default_factory=dict)  # by descriptor: channel, pid

    def run(self) -> list[str] | None:
        """The arguments of the child, in each that is forked; None here, at the end."""
        while True:
            waiting = select.poll()
            for descriptor in (self.control.fileno(), *self.leaders):
                waiting.register(descriptor, select.POLLIN)
            for ready, _ in waiting.poll():
                if ready != self.control.fileno():
                    self._answer(ready)
                    continue
                message, descriptors, _, _ = socket.recv_fds(self.control, _MESSAGE_BYTES, 4)
                if not message:
                    return None
                if (arguments := self._fork(json.loads(message), descriptors)) is not None:
                    return arguments

    def _fork(self, message: dict[str, object], descriptors: Sequence[int]) -> list[str] | None:
        fence = Fence(**message.pop("fence"))  # type: ignore[arg-type]
        request = Request(**message, fence=fence)  # type: ignore[arg-type]
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            for channel, _ in self.leaders.values():
                channel.close()
            self.control.close()
            os.close(descriptors[0])
            return _enter(request, descriptors[1:], server)
        channel = socket.socket(fileno=descriptors[0])
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        self.leaders[channel.fileno()] = (channel, pid)
        with contextlib.suppress(ConnectionError):  # the horse has ended: its channel says so again
            channel.send(json.dumps(pid).encode())
        return None

    def _answer(self, descriptor: int) -> None:
        channel, pid = self.leaders[descriptor]
        try:
            asked = channel.recv(_MESSAGE_BYTES)
        except ConnectionError:
            asked = b""
        if not asked:
            os.kill(pid, signal.SIGKILL)  # the kernel ends the namespace with it
        found, status, use = os.wait4(pid, os.WNOHANG if asked else 0)
        if not found:
            channel.send(b"null")
            return
        with contextlib.suppress(ConnectionError):
            channel.send(json.dumps([status, use.ru_utime + use.ru_stime, use.ru_maxrss]).encode())
        del self.leaders[descriptor]
        channel.close()


def _enter(request: Request, descriptors: Sequence[int], server: int) -> list[str]:
    """Go inside the fence as a program that `workers.processes` starts. Returns in the child alone."""
    try:
        os.setsid()
        die_with_parent(server)
        for standard, descriptor in enumerate(descriptors):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        os.chdir(request.cwd)
        fence = request.fence
        for limit, most in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, fence.cpu_seconds),
            (resource.RLIMIT_FSIZE, fence.file_bytes),
        ):
            resource.setrlimit(limit, (most, most))
        _leave_namespaces(fence)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        alive, held = os.pipe()
        first = os.fork()
    except OSError as error:
        os.write(2, f"cannot be fenced in: {error}\n".encode())
        os._exit(1)
    if first != 0:
        _end_like(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
    os.close(held)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([alive], [], [], 0)[0]:  # the leader ended before the line above
        os._exit(125)
    os.close(alive)
    # Process 1 of a namespace ignores signals that it has no handler for, abort() included: the child is another.
    child = os.fork()
    if child != 0:
        while True:
            pid, status = os.wait()
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                os._exit(code if code >= 0 else 128 - code)
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(request.env)
    tempfile.tempdir = None
    return list(request.arguments)


def _leave_namespaces(fence: Fence) -> None:
    """As `unshare [--user --map-root-user] [--net] --pid`. Raises OSError."""
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    flags = CLONE_NEWPID | (CLONE_NEWNET if fence.network else 0) | (CLONE_NEWUSER if fence.user else 0)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare failed")
    if fence.user:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/self/{name}").write_text(text)


def _end_like(code: int) -> NoReturn:
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def _load(name: str) -> ModuleType:
    gc.disable()
    module = importlib.import_module(name)
    if prepare := getattr(module, "prepare", None):
        prepare()
    gc.collect()
    gc.freeze()  # the collector would write into pages that all forks share
    gc.enable()
    return module


def main() -> None:
    """`python -m workers.fork_in_fence WORKER_PID SOCKET MODULE`."""
    die_with_parent(int(sys.argv[1]))
    name_process("fence server")
    control = socket.socket(fileno=int(sys.argv[2]))
    control.set_inheritable(False)
    module = _load(sys.argv[3])
    arguments = _Server(control).run()
    if arguments is not None:
        name_process("python")
        sys.argv = [str(module.__file__), *arguments]
        module.main()


if __name__ == "__main__":
    main()
