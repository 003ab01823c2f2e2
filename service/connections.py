"""Connections that never end a request, or never read an answer, are closed; of all there are only so many.

uvicorn lets a request's head take for ever, and beyond its `limit_concurrency` refuses all callers alike. Here a
connection beyond the limit takes the place of an unfinished one, of which nothing has come for longest: a probe gets
through while thousands of half-sent requests hang. Bodies have their own limits of time (`service.body`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.answers import problem_response
from service.errors import refuse

SWEEP_SECONDS = 1.0
MOST_HEAD_BYTES = 64 << 10
"""Of a request: its line and headers, which the parser keeps whatever their size."""


@dataclass(frozen=True)
class ConnectionLimits:
    """`most` connections at once; seconds until a request's head is whole, and until a client that takes nothing of its
    answer is given up."""

    most: int
    head_seconds: float = 10.0
    stalled_seconds: float = 30.0


class Connections:
    """The open connections of one server; all calls come from its event loop."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._open: set[BoundedProtocol] = set()
        self._unfinished: dict[BoundedProtocol, None] = {}  # those that sent something last are last
        self._sweeping: asyncio.TimerHandle | None = None

    def protocol(self, **of_uvicorn: Any) -> BoundedProtocol:
        """What uvicorn makes for each connection."""
        return BoundedProtocol(self, **of_uvicorn)

    def add(self, connection: BoundedProtocol) -> None:
        """Where there are too many, an unfinished one is closed, else the new one."""
        if len(self._open) >= self._limits.most:
            self._close(next(iter(self._unfinished), connection))
        if not connection.transport.is_closing():
            self._open.add(connection)
            self.note(connection)
        if self._sweeping is None:
            self._sweeping = connection.loop.call_later(SWEEP_SECONDS, self._sweep, connection.loop)

    def note(self, connection: BoundedProtocol) -> None:
        """It has sent or taken something."""
        self._unfinished.pop(connection, None)
        if connection.is_unfinished and connection in self._open:
            self._unfinished[connection] = None

    def discard(self, connection: BoundedProtocol) -> None:
        self._open.discard(connection)
        self._unfinished.pop(connection, None)

    def _close(self, connection: BoundedProtocol) -> None:
        self.discard(connection)
        connection.transport.abort()  # `close` would first send what the client does not read

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sweeping = None
        now = loop.time()
        for connection in [one for one in self._open if self._is_late(one, now)]:
            self._close(connection)
        if self._open:
            self._sweeping = loop.call_later(SWEEP_SECONDS, self._sweep, loop)

    def _is_late(self, connection: BoundedProtocol, now: float) -> bool:
        stalled = connection.stalled_since
        if stalled is not None and now - stalled > self._limits.stalled_seconds:
            return True
        return connection.awaits_head and now - connection.waiting_since > self._limits.head_seconds


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with a place among `Connections`."""

    def __init__(self, connections: Connections, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._all = connections
        self.waiting_since = self.loop.time()  # for the next request
        self.stalled_since: float | None = None  # since when the client takes nothing
        self._head_bytes = 0

    @property
    def awaits_head(self) -> bool:
        """No request is begun, or its head is not whole."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_unfinished(self) -> bool:
        """The client has still to send something, or to take something."""
        return self.awaits_head or self.cycle.more_body or self.stalled_since is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._all.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._all.discard(self)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self.awaits_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self.awaits_head:
            self._head_bytes = 0
        elif self._head_bytes > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refuse("head-too-large", f"The request's line and headers take more than {MOST_HEAD_BYTES} bytes.")
        self._all.note(self)

    def send_400_response(self, msg: str) -> None:
        """Of what is no HTTP request."""
        self._refuse("bad-request", msg)

    def _refuse(self, kind: str, detail: str) -> None:
        """Answer with a problem, below the application: there is no request to hand to it."""
        answer = problem_response(refuse(kind, detail, headers={"Connection": "close"}))
        status = HTTPStatus(answer.status_code)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
        lines += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))
        self.transport.close()

    def on_response_complete(self) -> None:
        self.waiting_since = self.loop.time()
        super().on_response_complete()
        self._all.note(self)

    def pause_writing(self) -> None:
        self.stalled_since = self.loop.time()
        super().pause_writing()
        self._all.note(self)

    def resume_writing(self) -> None:
        self.stalled_since = None
        super().resume_writing()
        self._all.note(self)
