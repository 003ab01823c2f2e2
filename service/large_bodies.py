"""Requests with large bodies are answered by a process of their own.

Parsing and checking megabytes takes seconds of Python, in which no other request of the same process gets on. So the
API has a second process of the same application behind a socket of the machine's loopback, and hands those requests to
it as they come; what is said of their size, their rate and their content is the second one's.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.answers import problem_response
from service.body import announced_bytes, body_limit, bounded
from service.errors import Refused, refuse
from service.room import RETRY_SECONDS

log = logging.getLogger("cukiln.service")

OWN_BYTES = 256 << 10
"""A body of so many bytes is answered where it came in: the lookups of a thousand problems."""
PATHS = ("/v1/jobs", "/v1/lookups", "/v1/results")
ANSWER_SECONDS = 300.0
LATER_SECONDS, AGAIN_SECONDS = 3.0, 1.0
"""Until the second process starts: what the service is ready with comes first; and until it starts again."""
NICE = 10
"""The first process comes first, when both start as well."""
# RFC 9110, 7.6.1. Of an answer, "connection" is kept: the second process knows whether the body was read to its end.
_NOT_ASKED = {b"connection", b"transfer-encoding", b"expect", b"keep-alive"}
_NOT_ANSWERED = {b"transfer-encoding", b"keep-alive", b"date"}  # the first process says the date itself


class BodyProcess:
    """The second process: started again where it ends, and gone with this one."""

    def __init__(self) -> None:
        # Open here all along: what is asked while it starts waits.
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = int(self._socket.getsockname()[1])
        self._ending = threading.Event()
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper = threading.Thread(target=self._keep, name="large bodies", daemon=True)
        self._keeper.start()

    def end(self) -> None:
        """Return when it is gone. What dies without a call of this ends it by its input."""
        self._ending.set()
        with self._starting:
            if self._process:
                self._process.kill()  # nothing that was accepted is only in its memory
        self._keeper.join()

    def _keep(self) -> None:
        number = self._socket.fileno()
        command = [sys.executable, "-m", "service", "--bodies", str(number)]
        pause = LATER_SECONDS
        while not self._ending.wait(pause):
            with self._starting:
                if self._ending.is_set():
                    return
                # Its input ends with this process, however that ends.
                process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[number])
                os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
                self._process = process
            code = process.wait()
            pause = AGAIN_SECONDS
            if not self._ending.is_set():
                log.warning("the process of large bodies ended with code %s; it is started again", code)


def end_with_parent() -> None:
    """In the second process: end when its input does."""

    def wait() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


class LargeBodies:
    """ASGI middleware: what has a large body goes to the process at `port`."""

    def __init__(self, app: ASGIApp, port: int, most_bytes: int) -> None:
        self._app, self._most_bytes = app, most_bytes
        timeout = httpx.Timeout(ANSWER_SECONDS, connect=10.0)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=timeout, limits=limits, trust_env=False
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_large(scope):
            await self._hand_over(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _hand_over(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = scope["query_string"]
        target = scope["raw_path"].decode("ascii") + (f"?{query.decode('ascii')}" if query else "")
        headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_ASKED]
        request = Request(scope, receive)
        begun = False
        try:
            body = bounded(request, body_limit(scope["path"], self._most_bytes))
            async with self._client.stream("POST", target, headers=headers, content=body) as answer:
                begun = True
                lines = [(name.lower(), value) for name, value in answer.headers.raw]
                lines = [line for line in lines if line[0] not in _NOT_ANSWERED]
                await send({"type": "http.response.start", "status": answer.status_code, "headers": lines})
                async for piece in answer.aiter_raw():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except ClientDisconnect:
            return
        except Refused as refused:
            await problem_response(refused, scope["path"])(scope, receive, send)
        except httpx.TransportError as error:
            if begun:
                raise
            log.warning("a large body was not taken: %s", error or type(error).__name__)
            detail = "The process that reads large bodies does not answer. Send it again."
            busy = refuse("busy", detail, headers={"Retry-After": str(RETRY_SECONDS), "Connection": "close"})
            await problem_response(busy, scope["path"])(scope, receive, send)


def _is_large(scope: Scope) -> bool:
    if scope["method"] != "POST" or scope["path"] not in PATHS:
        return False
    announced = announced_bytes(Request(scope))
    return announced is None or announced > OWN_BYTES
