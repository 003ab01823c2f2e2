"""Large JSON answers as gzip, where the client takes that: records of winners have much text in common."""

import asyncio
import re
import zlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LEAST_BYTES = 4096
"""Of an answer: below, or where it is not announced, what is saved is less than what it takes."""
LEVEL = 1
"""The fastest: what is sent repeats itself, and shrinks all the same."""
AT_ONCE = 64 << 10
"""Bytes that are compressed before other requests have their turn."""
_REFUSED = re.compile(r"q\s*=\s*0(\.0*)?", re.IGNORECASE)


def accepts_gzip(header: str | None) -> bool:
    """Whether Accept-Encoding names gzip and does not refuse it (RFC 9110, 12.5.3)."""
    for part in (header or "").split(","):
        name, _, weight = part.partition(";")
        if name.strip().lower() in ("gzip", "x-gzip"):
            return not _REFUSED.fullmatch(weight.strip())
    return False


class CompressJson:
    """ASGI middleware. What has an ETag is sent as it is: its tag is of these very bytes. HTTP/1.0 has no chunks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "HEAD" or scope["http_version"] == "1.0":
            await self._app(scope, receive, send)
            return
        accepted = accepts_gzip(",".join(Headers(scope=scope).getlist("accept-encoding")))
        compress: zlib._Compress | None = None

        async def compressing_send(message: Message) -> None:
            nonlocal compress
            if message["type"] == "http.response.start" and _is_large_json(message):
                headers = MutableHeaders(scope=message)
                headers.add_vary_header("Accept-Encoding")
                if accepted:
                    compress = zlib.compressobj(LEVEL, wbits=zlib.MAX_WBITS | 16)
                    headers["Content-Encoding"] = "gzip"
                    del headers["Content-Length"]
            elif message["type"] == "http.response.body" and compress is not None:
                await _send_compressed(compress, message, send)
                return
            await send(message)

        await self._app(scope, receive, compressing_send)


def _is_large_json(start: Message) -> bool:
    headers = Headers(raw=start["headers"])
    length = int(headers.get("content-length", "0"))
    is_json = headers.get("content-type", "").partition(";")[0] == "application/json"
    return length >= LEAST_BYTES and is_json and "content-encoding" not in headers and "etag" not in headers


async def _send_compressed(compress: "zlib._Compress", message: Message, send: Send) -> None:
    body, more = memoryview(message.get("body", b"")), message.get("more_body", False)
    for first in range(0, len(body), AT_ONCE):
        if part := compress.compress(body[first : first + AT_ONCE]):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if len(body) > AT_ONCE:
            await asyncio.sleep(0)
    if not more:
        await send({"type": "http.response.body", "body": compress.flush(), "more_body": False})
