"""Conditional and partial requests: If-None-Match, If-Range and Range as RFC 9110 (sections 13 and 14) reads them."""

import re
from dataclasses import dataclass

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
