"""Reading a request's body: its type, its length, its JSON."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from service.context import service_of
from service.errors import Refused, refuse
from service.strict_json import read_json

LARGE = 8  # times the usual limit: results hold a few kilobytes for each candidate


async def body_bytes(request: Request) -> bytes:
    """The whole body, refused as soon as it is known to be too large, whether its length was announced or not."""
    return await _read(request, service_of(request).settings.max_body_bytes)


async def large_body_bytes(request: Request) -> bytes:
    """The same for results, which are larger than requests."""
    return await _read(request, LARGE * service_of(request).settings.max_body_bytes)


async def _read(request: Request, limit: int) -> bytes:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        detail = f"The Content-Type is {media_type[:100]!r}. Send application/json."
        raise refuse("unsupported-media-type", detail, field="Content-Type", allowed=["application/json"])
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > limit):
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
    except ClientDisconnect:
        raise refuse("bad-request", "The connection ended before the body did.") from None
    return b"".join(chunks)


def json_body(body: bytes, max_depth: int) -> Any:
    """The body's JSON value; called in a thread, since megabytes take a moment to parse."""
    return read_json(body, max_depth)


def _too_large(limit: int) -> Refused:
    detail = f"Send at most {limit} bytes; split the problems over several requests."
    return refuse("body-too-large", detail, allowed={"bytes": limit}, headers={"Connection": "close"})
