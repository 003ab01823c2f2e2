"""The events of a job, read so that a broken connection loses none."""

import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2

from cukiln.errors import ServiceBusy, UnexpectedAnswer
from cukiln.http.bodies import LARGEST_EVENT
from cukiln.http.retries import delay
from cukiln.http.transport import AsyncTransport, Transport

# The service sends a comment every 15 s at the latest; three missed ones mean that the connection is dead.
_IDLE_SECONDS = 45.0
# With a deadline the stream is opened again after this silence, so that the deadline is noticed in time.
_IDLE_SECONDS_WITH_DEADLINE = 2.0
_LONGEST_PAUSE_MS = 3_600_000  # that a service may ask for before the stream is opened again


@dataclass(frozen=True)
class Event:
    """One thing that happened to a job. `id` goes into Last-Event-ID to continue after it."""

    id: str
    type: str
    data: dict[str, Any]

    @property
    def final(self) -> bool:
        """Whether it is the last one: the service sends it once the job has ended in its database."""
        return self.type == "end"


class _Reader:
    """How far a stream was read, over all its connections; both ways of reading share it."""

    def __init__(
        self, transport: Transport | AsyncTransport, path: str, last_event_id: str | None, deadline: float | None
    ) -> None:
        self._transport, self._path, self._deadline = transport, path, deadline
        self._last, self._failures = last_event_id or "", 0
        self._pause: float | None = None
        self.ended = False

    @property
    def is_over(self) -> bool:
        return self.ended or (self._deadline is not None and time.monotonic() >= self._deadline)

    def connection(self) -> dict[str, Any]:
        """The arguments of the transport's `stream`."""
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if self._last:
            headers["Last-Event-ID"] = self._last
        idle = _IDLE_SECONDS
        if self._deadline is not None:
            idle = max(0.05, min(_IDLE_SECONDS_WITH_DEADLINE, self._deadline - time.monotonic()))
        return {"path": self._path, "headers": headers, "idle": idle}

    def took(self, message: httpx2.ServerSentEvent) -> Event | None:
        """The event, None for a lone id or retry field. Raises `UnexpectedAnswer`."""
        if message.retry is not None:
            self._pause = min(message.retry, _LONGEST_PAUSE_MS) / 1000
        if not message.data:
            return None
        try:
            data = json.loads(message.data)
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise UnexpectedAnswer(
                f"an event of {self._path} is not a JSON object: {message.data[:80]!r}", method="GET", url=self._path
            )
        event = Event(message.id, message.event, data)
        self._last, self._failures, self.ended = event.id or self._last, 0, event.final
        return event

    def broke(self, error: Exception) -> float | None:
        """Seconds to wait before the stream is opened again; None: at once, to look at the deadline. Raises the error
        of the transport after its attempts in a row without an event."""
        if isinstance(error, httpx2.SSEError | httpx2.DecodingError):
            url = f"{self._transport.url}{self._path}"
            raise UnexpectedAnswer(
                f"{url} did not answer with an event stream ({error})", method="GET", url=url
            ) from error
        if isinstance(error, httpx2.ReadTimeout) and self._deadline is not None:
            return None
        self._failures += 1
        if self._failures >= self._transport.attempts:
            if isinstance(error, ServiceBusy):
                raise error
            raise self._transport.unreachable("GET", self._path, error) from error
        wait = error.retry_after if isinstance(error, ServiceBusy) else self._pause
        return min(self._transport.patience, wait) if wait is not None else delay(self._failures)


class _Bounded:
    """A response whose text ends with the reader's deadline: comments, which keep it alive, are no events."""

    def __init__(self, response: httpx2.Response, reader: _Reader) -> None:
        self._response, self._reader = response, reader
        self.headers, self.request = response.headers, response.request

    def iter_text(self) -> Iterator[str]:
        for text in self._response.iter_text():
            yield text
            self._check()

    async def aiter_text(self) -> AsyncIterator[str]:
        async for text in self._response.aiter_text():
            yield text
            self._check()

    def _check(self) -> None:
        if self._reader.is_over:
            raise httpx2.ReadTimeout("the deadline is over", request=self.request)


def _messages(response: httpx2.Response, reader: _Reader) -> httpx2.EventSource:
    bounded: Any = _Bounded(response, reader)
    return httpx2.EventSource(bounded, LARGEST_EVENT)


_LOST = "the event stream ended before the job did"
_BREAKS = (ServiceBusy, httpx2.TransportError, httpx2.DecodingError)


def read_events(
    transport: Transport, path: str, last_event_id: str | None = None, deadline: float | None = None
) -> Iterator[Event]:
    """Yield the events at `path` from after `last_event_id` until the job ends, or `time.monotonic()` is `deadline`.

    A connection that breaks or stays silent is opened again with Last-Event-ID, up to the transport's attempts in a
    row without an event. Raises the errors of the transport.
    """
    reader = _Reader(transport, path, last_event_id, deadline)
    while not reader.is_over:
        problem: Exception = EOFError(_LOST)
        try:
            with transport.stream(**reader.connection()) as response:
                for message in _messages(response, reader):
                    if (event := reader.took(message)) is not None:
                        yield event
                        if reader.is_over:
                            return
        except _BREAKS as error:
            problem = error
        if (wait := reader.broke(problem)) is not None:
            transport.sleep(wait)


async def read_events_async(
    transport: AsyncTransport, path: str, last_event_id: str | None = None, deadline: float | None = None
) -> AsyncIterator[Event]:
    """`read_events`, for `AsyncTransport`."""
    reader = _Reader(transport, path, last_event_id, deadline)
    while not reader.is_over:
        problem: Exception = EOFError(_LOST)
        try:
            async with transport.stream(**reader.connection()) as response:
                async for message in _messages(response, reader):
                    if (event := reader.took(message)) is not None:
                        yield event
                        if reader.is_over:
                            return
        except _BREAKS as error:
            problem = error
        if (wait := reader.broke(problem)) is not None:
            await transport.sleep(wait)
