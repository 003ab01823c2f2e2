"""The events of a job, read so that a broken connection loses none."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
from httpx_sse import EventSource, ServerSentEvent, SSEError

from cukiln.errors import ServiceBusy, UnexpectedAnswer
from cukiln.transport import Transport, delay

# The service sends a comment every 15 s at the latest; three missed ones mean that the connection is dead.
_IDLE_SECONDS = 45.0
# With a deadline the stream is opened again after this silence, so that the deadline is noticed in time.
_IDLE_SECONDS_WITH_DEADLINE = 2.0


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


def read_events(
    transport: Transport, path: str, last_event_id: str | None = None, deadline: float | None = None
) -> Iterator[Event]:
    """Yield the events at `path` from after `last_event_id` until the job ends, or `time.monotonic()` is `deadline`.

    A connection that breaks or stays silent is opened again with Last-Event-ID, up to the transport's attempts in a
    row without an event. Raises the errors of the transport.
    """
    last, failures, pause = last_event_id or "", 0, None
    while deadline is None or time.monotonic() < deadline:
        try:
            for event, retry in _one_connection(transport, path, last, _idle_seconds(deadline)):
                pause = retry if retry is not None else pause
                if event is None:
                    continue
                last, failures = event.id or last, 0
                yield event
                if event.final or (deadline is not None and time.monotonic() >= deadline):
                    return
            problem: Exception = EOFError("the event stream ended before the job did")
        except httpx.ReadTimeout as error:
            if deadline is not None:
                continue
            problem = error
        except (ServiceBusy, httpx.TransportError) as error:
            problem = error
        failures += 1
        if failures >= transport.attempts:
            if isinstance(problem, ServiceBusy):
                raise problem
            raise transport.unreachable("GET", path, problem) from problem
        wait = problem.retry_after if isinstance(problem, ServiceBusy) else pause
        transport.sleep(min(transport.patience, wait) if wait is not None else delay(failures))


def _idle_seconds(deadline: float | None) -> float:
    if deadline is None:
        return _IDLE_SECONDS
    return max(0.05, min(_IDLE_SECONDS_WITH_DEADLINE, deadline - time.monotonic()))


def _one_connection(
    transport: Transport, path: str, last: str, idle: float
) -> Iterator[tuple[Event | None, float | None]]:
    """Yield (event or None, the reconnection pause in seconds that the service asked for) until the stream ends."""
    headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
    if last:
        headers["Last-Event-ID"] = last
    with transport.stream(path, headers=headers, idle=idle) as response:
        try:
            for message in EventSource(response).iter_sse():
                yield _event(message, path), message.retry / 1000 if message.retry is not None else None
        except SSEError as error:
            raise UnexpectedAnswer(
                f"{response.url} did not answer with an event stream ({error})", method="GET", url=str(response.url)
            ) from error


def _event(message: ServerSentEvent, path: str) -> Event | None:
    if not message.data:  # a comment, or a lone id or retry field
        return None
    try:
        data = json.loads(message.data)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise UnexpectedAnswer(
            f"an event of {path} is not a JSON object: {message.data[:80]!r}", method="GET", url=path
        )
    return Event(message.id, message.event, data)
