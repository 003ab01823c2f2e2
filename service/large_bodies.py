"""Requests with large bodies are answered by a process of their own.

Parsing and checking megabytes takes seconds of Python, in which no other request of the same process gets on. So the
API has a second process of the same application. As soon as the head of such a request is read, the second process gets
its connection (a file descriptor, unix(7)) with the bytes that have come, answers, and closes it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import uvicorn

log = logging.getLogger("cukiln.service")

OWN_BYTES = 256 << 10
"""A body of so many bytes is answered where it came in: the lookups of a thousand problems."""
PATHS = (b"/v1/jobs", b"/v1/lookups", b"/v1/results")
LATER_SECONDS, AGAIN_SECONDS = 3.0, 1.0
"""Until the second process starts: what the service is ready with comes first; and until it starts again."""
LOOK_SECONDS = 1.0  # between looks whether it is stopped
END_SECONDS = 5.0  # for what it is answering
NICE = 10
"""The first process comes first, when both start as well."""


def is_large(method: bytes, path: bytes, length: int | None, has_body: bool) -> bool:
    """Of the request's head. `length`: its Content-Length; None for a body whose end is not known."""
    return method == b"POST" and path in PATHS and has_body and (length is None or length > OWN_BYTES)


class BodyProcess:
    """The second process: started again where it ends or is stopped, and gone with this one."""

    def __init__(self) -> None:
        # Both ends are open here all along: what is handed over while it starts waits.
        self._ours, self._its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._ending = threading.Event()
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
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
        """Return when it is gone. What dies without a call of this ends it by closing its end of the pair."""
        self._ending.set()
        with self._starting:
            if self._process:
                self._process.terminate()
        self._keeper.join(END_SECONDS)
        if self._process:
            self._process.kill()
        self._keeper.join()

    def _keep(self) -> None:
        pause = LATER_SECONDS
        while not self._ending.wait(pause):
            pause = AGAIN_SECONDS
            try:
                with self._starting:
                    if self._ending.is_set():
                        return
                    self._process = process = self._start()
            except OSError as error:
                log.warning("the process of large bodies cannot be started: %s", error)
                continue
            code = _end_of(process)
            if not self._ending.is_set():
                log.warning("the process of large bodies ended with code %s; it is started again", code)

    def _start(self) -> subprocess.Popen[bytes]:
        channel = self._its.fileno()
        process = subprocess.Popen([sys.executable, "-m", "service", "--bodies", str(channel)], pass_fds=[channel])
        os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        return process


def _end_of(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return process.wait(LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] == "T":  # stopped, proc_pid_stat(5)
                process.send_signal(signal.SIGKILL)


class ApiServer(uvicorn.Server):
    """In the first process: it ends the second."""

    def __init__(self, config: uvicorn.Config, bodies: BodyProcess) -> None:
        super().__init__(config)
        self._bodies = bodies

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await asyncio.to_thread(self._bodies.end)


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
            said, numbers, _, _ = socket.recv_fds(self._channel, 1, 2)
        except BlockingIOError:
            return
        if not said:  # the first process is gone
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
