"""The body of a request: its type, its length, its time.

A small body is read and parsed at once. Large ones are read into a room of limited size, at a rate that they may not
fall below, and parsed one after the other: the objects of one take ten times its bytes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated

from fastapi import Depends, Request
from starlette.requests import ClientDisconnect

from service.auth import CHALLENGE, admitted
from service.context import service_of
from service.http.connections import content_length
from service.http.errors import Refused, refuse

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


async def _read(request: Request, limit: int, held: AsyncExitStack) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        detail = f"The Content-Type is {media_type[:100]!r}. Send application/json."
        raise refuse("unsupported-media-type", detail, field="Content-Type", allowed=["application/json"])
    body = await _in_time(request, limit, held)
    if len(body) > SMALL_BYTES:
        await held.enter_async_context(service_of(request).bodies.parse.take(1))
    if not await service_of(request).keys.stands(admitted(request)):
        detail = "The key was revoked while the body came. Nothing of it was kept."
        raise refuse("unauthorized", detail, field="Authorization", headers=CHALLENGE)
    return body


async def _in_time(request: Request, limit: int, held: AsyncExitStack) -> bytes:
    """The bytes. Room is taken once a body is seen to be large: one that never arrives holds none."""
    announced = content_length(request.headers.get("content-length", ""))
    if (announced or 0) > limit:
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
                    await held.enter_async_context(service_of(request).bodies.read.take(announced or limit))
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


def _too_large(limit: int) -> Refused:
    detail = f"Send at most {limit} bytes; split the problems over several requests."
    return refuse("body-too-large", detail, allowed={"bytes": limit}, headers={"Connection": "close"})
