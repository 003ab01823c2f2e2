"""Requests with large bodies are answered by a process of their own.

Parsing and checking megabytes takes seconds of Python, which delays all other requests of the process. So the
API has a second process of the same application. As soon as the head of such a request is read, and its key is right,
the second process gets its connection (a file descriptor, unix(7)) with the bytes that have come, answers, and closes
it.
"""

import asyncio
import ctypes
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import httptools
import uvicorn

log = logging.getLogger("cukiln.service")

OWN_BYTES = 256 << 10
"""Bodies up to this size are handled by the first process: lookups of a thousand problems."""
PATHS = ("/v1/jobs", "/v1/lookups", "/v1/results")
ACCEPTED_AT_ONCE = 16
"""New connections in one round of the event loop."""
CONNECTIONS = 256
"""Of the second process: before a body has room, it may hold two reads of a socket, 500 KB."""
AGAIN_SECONDS = 1.0  # until it starts again
LOOK_SECONDS = 1.0  # between looks whether it is stopped
END_SECONDS = 5.0  # for what it is answering
NICE = 10
"""Below the first process."""
_PR_SET_NAME = 15  # linux/prctl.h


def is_large(method: bytes, url: bytes, length: int | None) -> bool:
    """Of the request's head. `length`: of its body; None where it is not announced."""
    if method != b"POST" or (length is not None and length <= OWN_BYTES):
        return False
    return unquote(httptools.parse_url(url).path.decode("ascii")) in PATHS


class BodyProcess:
    """The second process: restarted where it ends or is stopped, ended with this one."""

    def __init__(self, serve: Callable[[socket.socket], int]) -> None:
        """Forks, so no other thread may run yet: `serve` returns the exit status in the child."""
        # Both ends stay open here: connections queue while it restarts.
        self._ours, self._its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._pid: int | None = self._fork(serve)
        self._keeper = threading.Thread(target=self._keep, name="large bodies", daemon=True)
        self._keeper.start()

    def hand_over(self, connection: int, begun: bytes) -> bool:
        """A connection's descriptor, which may be closed afterwards, and the bytes of its request that have come.
        Whether there was room for it."""
        with open(os.memfd_create("request"), "w+b", buffering=0) as file:  # noqa: PTH123 - it has no path
            file.write(begun)
            try:
                socket.send_fds(self._ours, [b"."], [connection, file.fileno()])
            except OSError as error:
                log.warning("a large body was not handed over: %s", error)
                return False
        return True

    def end(self) -> None:
        """Return when it is gone. Where this process dies without a call of this, it ends with the channel."""
        self._ending.set()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with self._lock:
                if self._pid is not None:
                    os.kill(self._pid, number)
            self._keeper.join(END_SECONDS)

    def _keep(self) -> None:
        while self._pid is not None:
            code = self._end_of(self._pid)
            while not self._ending.is_set() and self._pid is None:
                log.warning("the process of large bodies ended with code %s; it is started again", code)
                self._start_again()

    def _end_of(self, pid: int) -> int:
        """Its exit status, once it has ended. One that is stopped by a signal is killed."""
        handle, ended = os.pidfd_open(pid), select.poll()  # `select` takes no descriptor above 1,023
        ended.register(handle, select.POLLIN)
        while not ended.poll(LOOK_SECONDS * 1000):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":  # proc_pid_stat(5)
                os.kill(pid, signal.SIGKILL)
        os.close(handle)
        with self._lock:
            self._pid = None
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _fork(self, serve: Callable[[socket.socket], int]) -> int:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self._ours.close()  # the channel ends with the first process
                code = serve(self._its)
            except Exception:
                log.exception("the process of large bodies cannot continue")
            finally:
                os._exit(code)
        return pid

    def _start_again(self) -> None:
        """Not by a fork: by now there are threads."""
        channel = self._its.fileno()
        command = [sys.executable, "-m", "service", "--bodies", str(channel)]
        inherited = [(os.POSIX_SPAWN_DUP2, channel, channel)]
        if self._ending.wait(AGAIN_SECONDS):
            return
        try:
            with self._lock:
                self._pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=inherited)
        except OSError as error:
            log.warning("the process of large bodies cannot be started: %s", error)


def serve_bodies(config: uvicorn.Config, channel: socket.socket) -> int:
    """In the second process; returns the exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"api bodies", 0, 0, 0)
    os.nice(NICE)
    server = BodyServer(config, channel)
    server.run()
    return 0 if server.started else 1


class ApiServer(uvicorn.Server):
    """In the first process: it ends the second."""

    def __init__(self, config: uvicorn.Config, bodies: BodyProcess | None = None) -> None:
        super().__init__(config)
        self._bodies = bodies

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvloop accepts one connection of a listening socket in a round of its loop: behind 1,000 new ones a probe is
        answered 1,000 rounds later. Of a copy of the socket it accepts another one."""
        await super().startup(sockets)
        make = partial(self.config.http_protocol_class, app_state=self.lifespan.state)  # type: ignore[call-arg]
        protocol, loop = partial(make, config=self.config, server_state=self.server_state), asyncio.get_running_loop()
        for listening in [listening for server in self.servers for listening in server.sockets]:
            for _ in range(ACCEPTED_AT_ONCE - 1):
                copy = socket.socket(fileno=os.dup(listening.fileno()))
                self.servers.append(await loop.create_server(protocol, sock=copy, backlog=self.config.backlog))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(asyncio.to_thread(self._bodies.end)) if self._bodies is not None else None
        await super().shutdown(sockets)
        if ending is not None:
            await ending


class BodyServer(uvicorn.Server):
    """In the second process: the connections that come over `channel` are its only ones. It ends with the first."""

    def __init__(self, config: uvicorn.Config, channel: socket.socket) -> None:
        super().__init__(config)
        channel.setblocking(False)
        self._channel = channel
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        asyncio.get_running_loop().add_reader(self._channel, self._take)

    def _take(self) -> None:
        try:
            message, numbers, _, _ = socket.recv_fds(self._channel, 1, 2)
        except BlockingIOError:
            return
        if not message:  # the first process is gone
            asyncio.get_running_loop().remove_reader(self._channel)
            self.should_exit = True
        elif len(numbers) == 2:
            with open(numbers[1], "rb") as file:  # noqa: PTH123 - it has no path
                file.seek(0)
                begun = file.read()
            task = asyncio.get_running_loop().create_task(self._adopt(socket.socket(fileno=numbers[0]), begun))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:  # no descriptor was free
            log.warning("a large body was not taken: too many open files")
            for number in numbers:
                os.close(number)

    async def _adopt(self, connection: socket.socket, begun: bytes) -> None:
        state, app_state = self.server_state, self.lifespan.state
        make = partial(self.config.http_protocol_class, begun=begun, config=self.config)  # type: ignore[call-arg]
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(partial(make, server_state=state, app_state=app_state), connection)
        except OSError:  # the client has gone
            connection.close()
