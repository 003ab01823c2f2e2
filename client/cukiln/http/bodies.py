"""Bodies of answers, read no further than their limit: a broken or hostile service fills no memory.

| what | at most |
|---|---|
| an answer to a lookup | 1 MiB, and 256 KiB for each problem; 512 MiB in all |
| a winner record by its key | 1 MiB |
| an answer of 400 or above | 1 MiB |
| an event of a job | 1 MiB |
| a file by its digest, and every other answer | 256 MiB |

Counted as it is in memory: behind gzip. An answer whose Content-Length says more is not read at all.
"""

from collections.abc import Callable

import httpx2

from cukiln.errors import UnexpectedAnswer
from cukiln.local_cache import LARGEST_BLOB

MIB = 2**20
LARGEST_ANSWER = LARGEST_BLOB
LARGEST_RECORD = LARGEST_ERROR = LARGEST_EVENT = MIB
_OF_PROBLEM, _LARGEST_LOOKUP = MIB // 4, 512 * MIB
# They are of the body as it was sent, not of what is read here.
_OF_TRANSFER = {"content-encoding", "content-length", "transfer-encoding"}


def largest_lookup(problems: int) -> int:
    """Bytes of an answer to a lookup of so many problems."""
    return min(MIB + problems * _OF_PROBLEM, _LARGEST_LOOKUP)


def read_body(response: httpx2.Response, most: int, took: Callable[[int], None] = lambda size: None) -> httpx2.Response:
    """The answer with its body. `took` is called with the bytes that came for each piece, which gzip makes fewer than
    it has. Raises `UnexpectedAnswer` where the body is larger than `most` bytes."""
    body = _Body(response, most)
    for piece in response.iter_bytes():
        took(body.take(piece))
    return body.response()


async def read_body_async(
    response: httpx2.Response, most: int, took: Callable[[int], None] = lambda size: None
) -> httpx2.Response:
    """`read_body`, awaited."""
    body = _Body(response, most)
    async for piece in response.aiter_bytes():
        took(body.take(piece))
    return body.response()


class _Body:
    """The body of an answer, piece by piece. Raises `UnexpectedAnswer` where it is larger than `most` bytes."""

    def __init__(self, response: httpx2.Response, most: int) -> None:
        self._response = response
        self._most = min(most, LARGEST_ERROR) if response.status_code >= 400 else most
        self._pieces: list[bytes] = []
        self._size = self._came = 0
        length = response.headers.get("Content-Length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._most):
            raise self._too_large(f"{length[:18]} bytes")

    def take(self, piece: bytes) -> int:
        """The bytes that came since the last piece."""
        self._size += len(piece)
        if self._size > self._most:
            raise self._too_large("more")
        self._pieces.append(piece)
        before, self._came = self._came, self._response.num_bytes_downloaded
        return self._came - before

    def response(self) -> httpx2.Response:
        """The answer with what was taken."""
        sent, made = self._response, b"".join(self._pieces)
        headers = [(name, value) for name, value in sent.headers.multi_items() if name.lower() not in _OF_TRANSFER]
        reason = {name: value for name, value in sent.extensions.items() if name == "reason_phrase"}
        return httpx2.Response(sent.status_code, headers=headers, content=made, request=sent.request, extensions=reason)

    def _too_large(self, size: str) -> UnexpectedAnswer:
        request = self._response.request
        return UnexpectedAnswer(
            f"{request.url} answers {self._response.status_code} with {size}, where {self._most} bytes are the most "
            "that a client reads; nothing of it is used: check that the address is a cukiln service",
            method=request.method,
            url=str(request.url),
        )
