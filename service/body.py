"""Reading a request's body: its type, its length, its time, its JSON.

A small body is read and parsed at once. Large ones are read into a room of limited size, at a rate that they may not
fall below, and parsed one after the other: the objects of one take ten times its bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from service.context import service_of
from service.errors import Refused, refuse
from service.room import BodyRooms
from service.strict_json import read_json

LARGER = {"/v1/results": 2}
"""Times the usual limit: results hold a few kilobytes for each candidate."""
SMALL_BYTES = 64 << 10
FIRST_SECONDS, LEAST_BYTES_PER_SECOND = 10.0, 512 << 10
"""A body may take so long, and longer by what has come of it at this rate."""


async def body_bytes(request: Request) -> AsyncIterator[bytes]:
    """The whole body, refused as soon as it is known to be too large, whether its length was announced or not."""
    limit = LARGER.get(request.url.path, 1) * service_of(request).settings.max_body_bytes
    async with AsyncExitStack() as held:
        yield await _read(request, limit, held)


# Held until the handler has returned, not until a slow client has taken the answer.
Body = Annotated[bytes, Depends(body_bytes, scope="function")]


def announced_bytes(request: Request) -> int | None:
    """Of the Content-Length; None where there is none that is a number."""
    return content_length(request.headers.get("content-length", ""))


def content_length(announced: str) -> int | None:
    """None for what is no number."""
    # int() takes quadratic time, and refuses 4,300 digits.
    return int(announced[:19]) if announced.isdecimal() else None


def _rooms(request: Request) -> BodyRooms:
    return service_of(request).bodies


async def _read(request: Request, limit: int, held: AsyncExitStack) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        detail = f"The Content-Type is {media_type[:100]!r}. Send application/json."
        raise refuse("unsupported-media-type", detail, field="Content-Type", allowed=["application/json"])
    body = await _in_time(request, limit, held)
    if len(body) > SMALL_BYTES:
        await held.enter_async_context(_rooms(request).parse.take(1))
    return body


async def _in_time(request: Request, limit: int, held: AsyncExitStack) -> bytes:
    """The bytes. Room is taken once a body shows itself to be large: one that never comes holds none."""
    if (announced_bytes(request) or 0) > limit:
        raise _too_large(limit)
    body = bytearray()
    has_room = False
    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        async with asyncio.timeout(FIRST_SECONDS) as allowed:
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise _too_large(limit)
                if len(body) > SMALL_BYTES and not has_room:
                    allowed.reschedule(None)
                    since = loop.time()
                    await held.enter_async_context(_rooms(request).read.take(announced_bytes(request) or limit))
                    started += loop.time() - since
                    has_room = True
                allowed.reschedule(started + FIRST_SECONDS + len(body) / LEAST_BYTES_PER_SECOND)
    except ClientDisconnect:
        raise refuse("bad-request", "The connection ended before the body did.") from None
    except TimeoutError:
        detail = f"{len(body)} bytes of the body came in {loop.time() - started:.0f} s. Send it faster, or in parts."
        rate = {"seconds": FIRST_SECONDS, "bytes_per_second": LEAST_BYTES_PER_SECOND}
        raise refuse("body-too-slow", detail, allowed=rate, headers={"Connection": "close"}) from None
    return bytes(body)


def json_body(body: bytes, max_depth: int) -> Any:
    """The body's JSON value; called in a thread, since megabytes take a moment to parse."""
    return read_json(body, max_depth)


def _too_large(limit: int) -> Refused:
    detail = f"Send at most {limit} bytes; split the problems over several requests."
    return refuse("body-too-large", detail, allowed={"bytes": limit}, headers={"Connection": "close"})
