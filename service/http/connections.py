"""Limits of connections: their number, the time of a request's head, the time of a stalled answer.

uvicorn has no time limit for a request's head, and beyond its `limit_concurrency` refuses all requests alike. Here a
connection beyond the limit replaces the unfinished one that has been idle for longest: a probe is answered while
thousands of half-sent requests hang. Bodies have their own limits of time (`service.routes.body`); a
connection with a large one is handed over (`service.http.large_bodies`).
"""

import asyncio
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from service.http.answers import problem_response
from service.http.errors import refuse
from service.http.large_bodies import BodyProcess, is_large
from service.http.room import RETRY_SECONDS

SWEEP_SECONDS = 1.0
LINGER_SECONDS, LINGER_BYTES = 2.0, 64 << 20
"""For a client that is still sending when it is refused: closing at once would reset the connection."""
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_BEGUN_LINE = re.compile(rb"\r(\n(\r|u(p(g(r(a(d(e)?)?)?)?)?)?)?)?\Z", re.IGNORECASE)
MOST_HEAD_BYTES = 64 << 10
"""Of a request: its line and headers, which the parser keeps whatever their size."""
LEAST_TAKEN_PER_SECOND = 16 << 10
"""Bytes: a client that takes an answer at this rate may take all of it, however long it is."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Connections at once; seconds until a head is whole, and until a client that does not read is dropped; bytes of
    answers that clients have still to take."""

    most: int
    head_seconds: float = 10.0
    stalled_seconds: float = 30.0
    unsent_bytes: int = 128 << 20


class Connections:
    """The open connections of one server; all calls come from its event loop. `bodies`: where large bodies go."""

    def __init__(self, limits: ConnectionLimits, bodies: BodyProcess | None = None) -> None:
        self._limits = limits
        self.bodies = bodies
        self._open: set[BoundedProtocol] = set()
        self._unfinished: dict[BoundedProtocol, None] = {}  # those that sent something last are last
        self._sweeping: asyncio.TimerHandle | None = None

    def protocol(self, begun: bytes = b"", **of_uvicorn: Any) -> "BoundedProtocol":
        """What uvicorn makes for each connection. `begun`: bytes of a request that another process has read of it."""
        return BoundedProtocol(self, begun, **of_uvicorn)

    def add(self, connection: "BoundedProtocol") -> None:
        """Where there are too many, an unfinished one is closed, else the new one."""
        if len(self._open) >= self._limits.most:
            self._close(next(iter(self._unfinished), connection))
        if not connection.transport.is_closing():
            self._open.add(connection)
            self.note(connection)
        if self._sweeping is None:
            self._sweeping = connection.loop.call_later(SWEEP_SECONDS, self._sweep, connection.loop)

    def note(self, connection: "BoundedProtocol") -> None:
        """It has sent or taken something."""
        self._unfinished.pop(connection, None)
        if connection.is_unfinished and connection in self._open:
            self._unfinished[connection] = None

    def discard(self, connection: "BoundedProtocol") -> None:
        self._open.discard(connection)
        self._unfinished.pop(connection, None)

    def _close(self, connection: "BoundedProtocol") -> None:
        self.discard(connection)
        connection.transport.abort()  # `close` would first send what the client does not read

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sweeping = None
        now = loop.time()
        for connection in [connection for connection in self._open if self._is_late(connection, now)]:
            self._close(connection)
        self._bound_unsent()
        if self._open:
            self._sweeping = loop.call_later(SWEEP_SECONDS, self._sweep, loop)

    def _bound_unsent(self) -> None:
        """Close the connections that have been stalled for longest, until the others have little enough unsent."""
        stalled = [connection for connection in self._open if connection.stalled_since is not None]
        unsent = sum(connection.unsent_bytes for connection in stalled)
        for connection in sorted(stalled, key=lambda connection: connection.stalled_since or 0.0):
            if unsent <= self._limits.unsent_bytes:
                return
            unsent -= connection.unsent_bytes
            self._close(connection)

    def _is_late(self, connection: "BoundedProtocol", now: float) -> bool:
        stalled = connection.stalled_since
        if stalled is not None:
            taken = connection.stalled_bytes - connection.unsent_bytes
            return now - stalled > self._limits.stalled_seconds + taken / LEAST_TAKEN_PER_SECOND
        return not connection.is_running and now - connection.waiting_since > self._limits.head_seconds


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 with a place among `Connections`."""

    def __init__(self, connections: Connections, begun: bytes, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._all = connections
        self._begun, self._was_handed_over = begun, bool(begun)
        self.waiting_since = self.loop.time()  # for the next request
        self.stalled_since: float | None = None  # since when there is more of an answer than the client takes at once
        self.stalled_bytes = 0  # that were unsent then
        self._dropped_bytes = 0
        self._body_left = 0  # of a body whose length was announced
        self._begun_line = b""  # of a head: the last bytes that came, where they may begin the field Upgrade
        self._head_bytes = 0  # since a body's last bytes: of a head, or of what follows a body
        # All bytes of the request that is being read; None where they began with the end of another.
        self._request: bytearray | None = bytearray()
        self._between = self._is_first = True  # no request is being read; of what has come, the next is the first
        self._is_large = self._is_behind = False  # its body belongs to the other process; behind another request
        self._lingers = self._is_deaf = False  # what a deaf one is sent is not looked at any more

    @property
    def is_running(self) -> bool:
        """A request whose head is whole is being read, or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def unsent_bytes(self) -> int:
        """Of what was written, those that the client has still to take."""
        return self.transport.get_write_buffer_size()

    @property
    def is_unfinished(self) -> bool:
        """The client has still to send something, or to take something."""
        return not self.is_running or self.cycle.more_body or self.stalled_since is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._all.add(self)
        begun, self._begun = self._begun, b""
        if begun and not transport.is_closing():
            self.data_received(begun)

    def connection_lost(self, error: Exception | None) -> None:
        self._all.discard(self)
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > LINGER_BYTES:
                self.transport.abort()
            return
        if 0 < self._body_left < len(data):  # what follows the body is looked at as if it had come by itself
            end = self._body_left
            self.data_received(data[:end])
            self.data_received(data[end:])
            return
        if not (self.is_running and self.cycle.more_body):
            data, self._begun_line = without_upgrade(self._begun_line + data)
            if not data:
                self._all.note(self)
                return
        self._head_bytes += len(data)
        if self._between:
            self._request, self._is_first = bytearray(), True
        if self._request is not None:
            self._request += data
        super().data_received(data)
        if self._is_deaf or self.transport.is_closing():
            return
        if self._is_behind:
            self._refuse("busy", "A large body is not read behind another request. Send it again.", RETRY_SECONDS)
        elif self._is_large:
            self.flow.pause_reading()  # until the gate has admitted it
        elif self._head_bytes > MOST_HEAD_BYTES:
            self._refuse("head-too-large", f"The request's line and headers take more than {MOST_HEAD_BYTES} bytes.")
        self._all.note(self)

    def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio.Protocol has it
        """Whether the connection stays open: for the answer to a whole request."""
        if self.is_running and not (self.cycle.more_body or self.cycle.response_started):
            self.cycle.keep_alive = False
            return True
        return False

    def on_message_begin(self) -> None:
        if self._is_large:  # what comes behind it is not looked at
            return
        if not self._is_first:
            self._request = None
        self._is_first = self._between = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._is_large:
            return
        self._is_large = self._has_large_body()
        self._is_behind = self._is_large and (self._request is None or self.is_running or bool(self.unsent_bytes))
        if self._is_behind:
            return
        if self._is_large:
            self.scope["cukiln.hand_over"] = self._hand_over  # type: ignore[typeddict-unknown-key]
        else:
            self._request = None
        if self._was_handed_over:
            self.scope["cukiln.admitted"] = True  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, _Lingering(self))
        if self._is_large or self._was_handed_over:
            self.cycle.keep_alive = False  # what the client asks next comes by another connection

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        self._body_left -= len(body)
        if not self._is_large:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._between, self._head_bytes, self._body_left = True, 0, 0
        if not self._is_large:
            super().on_message_complete()

    def _has_large_body(self) -> bool:
        headers = dict(self.headers)
        announced = headers.get(b"content-length", b"0").decode("latin-1")
        length = None if b"transfer-encoding" in headers else content_length(announced)
        self._body_left = length or 0
        return self._all.bodies is not None and is_large(self.parser.get_method(), self.url, length)

    def _hand_over(self) -> None:
        """Called by the gate, unless it refuses the request."""
        if self.transport.is_closing() or self._is_deaf:
            return
        assert self._all.bodies is not None and self._request is not None
        self.cycle.disconnected = True  # it gets no answer here
        if self._all.bodies.hand_over(self.transport.get_extra_info("socket").fileno(), bytes(self._request)):
            self.transport.abort()  # closes this descriptor alone
        else:
            self._refuse("busy", "The process that reads large bodies has no room. Send it again.", RETRY_SECONDS)

    def send_400_response(self, msg: str) -> None:
        """Of what is no HTTP request."""
        self._refuse("bad-request", msg)

    def _refuse(self, kind: str, detail: str, retry_seconds: int | None = None) -> None:
        """Answer with a problem, below the application: there is no request to hand to it. Nothing is read after it."""
        if self._is_deaf:
            return
        self._is_deaf = True
        if self.is_running and not self.cycle.more_body:
            self.cycle.keep_alive = False  # the request before is answered, and nothing behind it
            return
        if self.is_running:  # it is the body of this one
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not (self.is_running and self.cycle.response_started):
            self._write_refusal(kind, detail, retry_seconds)
        self._linger()

    def _write_refusal(self, kind: str, detail: str, retry_seconds: int | None) -> None:
        headers = {"Connection": "close", **({"Retry-After": str(retry_seconds)} if retry_seconds else {})}
        answer = problem_response(refuse(kind, detail, headers=headers))
        status = HTTPStatus(answer.status_code)
        lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
        lines += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(answer.body)]))

    def close_after_answer(self) -> None:
        if self.cycle.more_body:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Close, but read on for a moment: the client may still be sending."""
        if self.transport.is_closing() or self._lingers:
            return
        self._is_deaf = self._lingers = True
        self.transport.write_eof()
        self.flow.resume_reading()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def on_response_complete(self) -> None:
        self.waiting_since = self.loop.time()
        if not self._lingers:
            super().on_response_complete()
        self._all.note(self)

    def pause_writing(self) -> None:
        self.stalled_since, self.stalled_bytes = self.loop.time(), self.unsent_bytes
        super().pause_writing()
        self._all.note(self)

    def resume_writing(self) -> None:
        self.stalled_since, self.waiting_since = None, self.loop.time()
        super().resume_writing()
        self._all.note(self)


def without_upgrade(data: bytes) -> tuple[bytes, bytes]:
    """The head, or some of it, with its field `Upgrade` renamed: it may be ignored (RFC 9110, 7.8), and the parser
    would take such a request for one without a body. Clients that can HTTP/2 send it with every request (`curl
    --http2`, Java's). Then the last bytes, where they may begin the field, or the head's end, once more have come."""
    head, end, rest = data.partition(b"\r\n\r\n")
    begun = None if end else _BEGUN_LINE.search(head)
    whole = len(head) if begun is None else begun.start()
    return _UPGRADE.sub(b"\r\nx-grade:", head[:whole]) + end + rest, head[whole:]


class _Lingering:
    """The transport that a request's answer is written to."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol
        self.write, self.is_closing = protocol.transport.write, protocol.transport.is_closing

    def close(self) -> None:
        self._protocol.close_after_answer()


def content_length(announced: str) -> int | None:
    """None for what is no number."""
    # int() takes quadratic time, and refuses 4,300 digits.
    return int(announced[:19]) if announced.isdecimal() else None
