"""Answers on the wire: JSON of a model, problem+json of an error; conditional and partial ones, as If-None-Match,
If-Range and Range ask for them (RFC 9110, sections 13 and 14)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.http.errors import Refused, problem_detail
from service.http.request_ids import request_id

PROBLEM_JSON = "application/problem+json"
SENT_AT_ONCE = 64 << 10
"""Pieces are joined up to this many bytes: a large answer is never in memory twice."""


def json_response(answer: BaseModel, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """The model as JSON. Not serialised by FastAPI, which would validate it again."""
    body = answer.model_dump_json(by_alias=True).encode()
    return Response(body, status_code=status, headers=dict(headers or {}), media_type="application/json")


def problem_response(refused: Refused, instance: str | None = None) -> Response:
    """The problem as application/problem+json."""
    shown = instance.encode("utf-8", "replace").decode()[:200] if instance is not None else None
    body = problem_detail(refused, shown, request_id()).model_dump_json(exclude_none=True).encode()
    headers = {"Cache-Control": "no-store", **refused.headers}
    return Response(body, status_code=refused.status, headers=headers, media_type=PROBLEM_JSON)


class PiecesResponse(Response):
    """The concatenation of pieces, which are shared with the cache."""

    def __init__(self, pieces: Sequence[bytes], *, media_type: str) -> None:
        super().__init__(media_type=media_type, headers={"Content-Length": str(sum(map(len, pieces)))})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for some in _parts(self._pieces):
            await send({"type": "http.response.body", "body": some, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _parts(pieces: Sequence[bytes]) -> Iterator[bytes]:
    first = size = 0
    for place, piece in enumerate(pieces):
        size += len(piece)
        if size >= SENT_AT_ONCE:
            yield b"".join(pieces[first : place + 1])
            first, size = place + 1, 0
    yield b"".join(pieces[first:])


_RANGE = re.compile(r"bytes=\s*(\d{0,19})-(\d{0,19})\s*", re.ASCII)
_ETAG = re.compile(r'(?:W/)?("[^"]*")')


@dataclass(frozen=True)
class ByteRange:
    """Bytes `first` to `last`, both included."""

    first: int
    last: int


class Unsatisfiable(Exception):
    """The range begins behind the last byte."""


def none_match(header: str | None, etag: str) -> bool:
    """Whether If-None-Match names `etag`, so that 304 is the answer. The comparison is weak (RFC 9110, 13.1.2)."""
    if header is None:
        return False
    return header.strip() == "*" or etag in _ETAG.findall(header)


def byte_range(header: str | None, if_range: str | None, etag: str, size: int) -> ByteRange | None:
    """The one range to send; None for the whole: no range, several, one that cannot be read, or another version's.

    Raises Unsatisfiable.
    """
    if header is None or (if_range is not None and if_range.strip() != etag):
        return None
    match = _RANGE.fullmatch(header.strip())
    if match is None or match.group(1) == match.group(2) == "":
        return None
    first, last = match.groups()
    if first == "":
        length = min(int(last), size)
        if length == 0:
            raise Unsatisfiable
        return ByteRange(size - length, size - 1)
    if last and int(last) < int(first):
        return None  # not a valid range at all: RFC 9110, 14.1.2 has it ignored
    if int(first) >= size:
        raise Unsatisfiable
    return ByteRange(int(first), min(int(last), size - 1) if last else size - 1)
