"""GET /v1/jobs/{id}/events: what happens to a job, as server-sent events.

| event | data | id |
|---|---|---|
| what the workers publish (`progress`, `problem`, `state`, …) | its own | to be sent back as Last-Event-ID |
| `snapshot` | `{"job", "state", "progress", "seconds"}` from the database | none |
| `end` | `{"job", "state"}`: the last event | none |

A snapshot comes first when the stream does not reach back to where the watcher was, and again when the database has
other counts than were last sent: Redis is unavailable, or another job did the shared work and published it to its own
watchers only. The end is read from the database, so it comes with or without Redis. Between events the framework sends
a comment every 15 seconds, which keeps proxies from closing the connection. A stream whose key was revoked ends
without `end`: sent again, the request is refused.
"""

import logging
from asyncio import sleep, timeout
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel
from redis.asyncio import Redis
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisSilent

from service.auth import admitted
from service.context import Service, ServiceDep
from service.http.errors import refuse
from service.http.turns import Turns
from service.keyring import Caller
from service.openapi import problems
from service.routes.jobs import KnownJob
from storage.database.database_errors import DATABASE_ERRORS
from storage.database.tables import LIVE
from storage.reports.progress import JobProgress
from workers import wake_ups

log = logging.getLogger("cukiln.service")

POLL_SECONDS = 1.0  # between reads of the job's state in the database
LARGEST_ID_PART = 2**64 - 1
MOST_STREAMS = 256
"""Open at once: each holds a connection to Redis, and reads the database once a second where its job is silent."""
BUSY_RETRY_SECONDS = 10

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])


def last_event_id(last_event_id: Annotated[str | None, Header()] = None) -> str | None:
    """The id to continue after. Raises Refused for an invalid one."""
    if not last_event_id:
        return None
    parts = last_event_id.split("-")
    if wake_ups.valid_event_id(last_event_id) and all(int(part) <= LARGEST_ID_PART for part in parts):
        return last_event_id
    detail = f"{last_event_id[:60]!r} is not an id that an event of this service had."
    raise refuse("invalid-event-id", detail, field="Last-Event-ID", allowed="<milliseconds>-<sequence>")


async def place_for_stream(request: Request) -> AsyncIterator[None]:
    """One of MOST_STREAMS, until the answer has ended. Raises Refused (503)."""
    state = request.app.state
    if (streams := getattr(state, "event_streams", 0)) >= MOST_STREAMS:
        detail = f"{streams} event streams are open, at most {MOST_STREAMS} may be. Ask for the job itself, or later."
        raise refuse("busy", detail, headers={"Retry-After": str(BUSY_RETRY_SECONDS)})
    state.event_streams = streams + 1
    try:
        yield
    finally:
        state.event_streams -= 1


@router.get(
    "/{job}/events",
    operation_id="watch_job",
    response_class=EventSourceResponse,
    responses=problems("job-not-found", "invalid-event-id", "busy", "database-unavailable"),
    dependencies=[Depends(place_for_stream)],
)
async def get_events(
    job: KnownJob, request: Request, service: ServiceDep, after: Annotated[str | None, Depends(last_event_id)]
) -> AsyncIterator[ServerSentEvent]:
    """Events of the job until it ends; all that are kept, or those after Last-Event-ID. `snapshot` and `progress` hold
    the counts, `problem` a problem that ended, `failed` work that was given up, `state` the job's new state; `end` is
    the last one."""
    watch = _Watch(service, admitted(request), job, after, request.app.state.event_turns)
    with suppress(_KeyRevoked):
        async for event in watch.events():
            yield event


class _KeyRevoked(Exception):
    """Ends a stream."""


class _Watch:
    """One watcher of one job."""

    def __init__(self, service: Service, caller: Caller, job: str, after: str | None, turns: Turns) -> None:
        self._service, self._caller, self._job, self._after = service, caller, job, after
        self._turns = turns  # of all watchers
        self._sent: Any = None  # state and counts, as last sent

    async def events(self) -> AsyncIterator[ServerSentEvent]:
        url = self._service.settings.redis_url
        if url is not None:
            await self._turns.take()
            # A connection of its own: a watcher waits in a blocking read.
            async with wake_ups.connect_async(url, wait_seconds=POLL_SECONDS) as redis:
                async for event in self._from_redis(redis):
                    yield event
        while (now := await self._progress()) is None or now.state in LIVE:
            if now is not None and _counts(now.state, _json(now.progress)) != self._sent:
                yield self._snapshot(now)
            await sleep(POLL_SECONDS)
        yield ServerSentEvent(event="end", data={"job": self._job, "state": now.state})

    async def _from_redis(self, redis: Redis) -> AsyncIterator[ServerSentEvent]:
        """The stream until the job has ended and all its events are sent, or until Redis goes away."""
        try:
            if await self._is_behind(redis) and (now := await self._progress()) is not None:
                yield self._snapshot(now)
            async for batch in wake_ups.follow(redis, self._job, self._after or "0", wait_seconds=POLL_SECONDS):
                await self._check_key()
                for event in batch:
                    self._after = event.id
                    if event.type == "progress":
                        self._sent = _counts(event.data.get("state"), event.data.get("progress", {}))
                    await self._turns.take()
                    yield ServerSentEvent(event=event.type, data=event.data, id=event.id)
                ended = any(event.type == "state" and event.data.get("state") not in LIVE for event in batch)
                if ended or not batch:
                    now = await self._progress()
                    if now is not None and now.state not in LIVE:
                        return
                    if now is not None and _counts(now.state, _json(now.progress)) != self._sent:
                        yield self._snapshot(now)
        except RedisError as error:
            log.warning("events of job %s come from the database: %s", self._job, error)

    async def _is_behind(self, redis: Redis) -> bool:
        """Whether events are missing between the watcher's position and the oldest stored one."""
        try:
            async with timeout(wake_ups.ANSWER_SECONDS):
                oldest: Any = await redis.xrange(wake_ups.events_key(self._job), count=1)
        except TimeoutError:
            raise RedisSilent("it does not answer") from None
        if not oldest:
            return True
        if self._after is None:
            return False
        first = oldest[0][0]
        return _order(first.decode() if isinstance(first, bytes) else first) > _order(self._after)

    async def _progress(self) -> JobProgress | None:
        """None while the database does not answer: the watcher waits."""
        await self._check_key()
        return await self._service.progress_reads.do(self._job)

    async def _check_key(self) -> None:
        """Returns when the keys could be read. Raises _KeyRevoked."""
        while True:
            try:
                if await self._service.keys.stands(self._caller):
                    return
            except DATABASE_ERRORS as error:
                log.warning("keys cannot be read for a watcher of job %s: %s", self._job, error)
                await sleep(POLL_SECONDS)
            else:
                raise _KeyRevoked

    def _snapshot(self, now: JobProgress) -> ServerSentEvent:
        progress = _json(now.progress)
        self._sent = _counts(now.state, progress)
        data = {"job": self._job, "state": now.state, "progress": progress, "seconds": _json(now.seconds)}
        return ServerSentEvent(event="snapshot", data=data)


def _json(answer: BaseModel) -> dict[str, Any]:
    return answer.model_dump(mode="json")


def _counts(state: Any, progress: Mapping[str, Any]) -> Any:
    """What an event reports: not the estimate, which changes by itself."""
    return state, {name: count for name, count in progress.items() if name != "eta_seconds"}


def _order(id: str) -> tuple[int, int]:
    milliseconds, _, sequence = id.partition("-")
    return int(milliseconds), int(sequence or 0)
