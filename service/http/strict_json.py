"""Bytes of a request → JSON values, with strict limits.

Refused: what is not UTF-8 or not JSON, NaN and Infinity, a key twice in one object, deeper nesting or more values than
allowed, wider lists and objects than any field takes, half of a surrogate pair. Nesting and values are counted in the
bytes, before any object is made: 8 MB of `[]` became 190 MB of lists. A number beyond every field's range becomes
BEYOND_EVERY_FIELD, so that the model that reads the field refuses it by name.
"""

import json
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from service.http.errors import Refused, json_path, refuse

# pydantic reports every wrong item: four million in one list of 8 MB took a minute and 7 GB.
MAX_ITEMS = 10_000
MAX_KEYS = 1_000
BEYOND_EVERY_FIELD = 10**400  # neither a 64-bit integer nor a double can hold it

MAX_VALUES = 1_000_000
MAX_CONTAINERS = 250_000
"""Of one body, 25 for each of 10,000 problems: they are made in 0.15 s, in which no other thread runs."""

PIECE_BYTES = 1 << 16
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NOT_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(body: bytes, max_depth: int = 32) -> Any:
    """The value that `body` spells. Raises Refused (400) with what is wrong and where."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        detail = f"Byte {error.start} of the body is not UTF-8: {error.reason}. Send UTF-8."
        raise refuse("not-utf-8", detail, allowed="UTF-8") from None
    _check_shape(shape(body, max_depth), max_depth)
    try:
        value = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_real,
        )
    except json.JSONDecodeError as error:
        detail = f"Line {error.lineno}, column {error.colno}: {error.msg}."
        raise refuse("malformed-json", detail, allowed="JSON (RFC 8259)") from None
    _check_surrogates(body, value)
    _check_objects(value, ())
    return value


@dataclass(frozen=True)
class Shape:
    """What a body holds: levels of nesting, objects and lists, and values (separators and opening brackets)."""

    depth: int
    containers: int
    values: int


def shape(body: bytes, max_depth: int = sys.maxsize) -> Shape:
    """Counted without recursion, piece by piece, so that other threads run; in part where a limit is passed."""
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote that is left begins or ends a string
    level = deepest = containers = commas = in_string = 0
    for start in range(0, len(text), PIECE_BYTES):
        parts = text[start : start + PIECE_BYTES].split(b'"')
        outside = b"".join(parts[in_string::2])
        in_string = (in_string + len(parts) - 1) % 2
        commas += outside.count(b",")
        steps = outside.translate(_STEPS, _NOT_BRACKETS)
        containers += steps.count(b"\x01")
        levels = list(accumulate(memoryview(steps).cast("b"), initial=level))
        level, deepest = levels[-1], max(deepest, max(levels))
        if deepest > max_depth or containers > MAX_CONTAINERS or commas + containers > MAX_VALUES:
            break
    return Shape(deepest, containers, commas + containers)


def _check_shape(shape: Shape, max_depth: int) -> None:
    if shape.depth > max_depth:
        raise refuse("nested-too-deep", f"Send at most {max_depth} levels of nesting.", allowed={"levels": max_depth})
    if shape.containers > MAX_CONTAINERS or shape.values > MAX_VALUES:
        detail = f"Send at most {MAX_CONTAINERS:,} objects and lists and {MAX_VALUES:,} values; split the request."
        raise refuse("too-many-values", detail, allowed={"containers": MAX_CONTAINERS, "values": MAX_VALUES})


class _Ambiguous(dict[str, Any]):
    """An object with a key twice: its path is known only after parsing."""

    twice: str


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    ambiguous = _Ambiguous(result)
    ambiguous.twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    return ambiguous


def _no_constant(name: str) -> Any:
    raise refuse("malformed-json", f"{name} is not JSON. Send a finite number.", allowed="finite numbers")


def _integer(digits: str) -> int:
    if len(digits) > 300:  # int() itself refuses 4,300 digits, and takes quadratic time before that
        return -BEYOND_EVERY_FIELD if digits.startswith("-") else BEYOND_EVERY_FIELD
    return int(digits)


def _real(digits: str) -> float | int:
    value = float(digits)
    if math.isinf(value):
        return BEYOND_EVERY_FIELD if value > 0 else -BEYOND_EVERY_FIELD
    return value


def _check_surrogates(body: bytes, value: Any) -> None:
    if not _SURROGATE.search(body):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        detail = "A string holds half of a surrogate pair, which no text can hold. Send whole characters."
        raise refuse("malformed-json", detail, allowed="whole Unicode characters") from None


def _check_objects(value: Any, at: tuple[str | int, ...]) -> None:
    """No key twice, nothing too wide. Depth is known to be small here, so recursion is too."""
    if isinstance(value, _Ambiguous):
        detail = f"The key {value.twice[:100]!r} stands twice in {json_path(at) or 'the body'}. Keep one of them."
        raise refuse("duplicate-key", detail, field=json_path((*at, value.twice)))
    if isinstance(value, dict):
        if len(value) > MAX_KEYS:
            raise _too_wide(at, "keys", len(value), {"maxProperties": MAX_KEYS})
        for key, item in value.items():
            if isinstance(item, dict | list):
                _check_objects(item, (*at, key))
    elif isinstance(value, list):
        if len(value) > MAX_ITEMS:
            raise _too_wide(at, "items", len(value), {"maxItems": MAX_ITEMS})
        for index, item in enumerate(value):
            if isinstance(item, dict | list):
                _check_objects(item, (*at, index))


def _too_wide(at: tuple[str | int, ...], what: str, count: int, allowed: dict[str, int]) -> Refused:
    field = json_path(at)
    most = next(iter(allowed.values()))
    return refuse(
        "invalid-value", f"{field or 'The body'} has {count} {what}, at most {most} fit.", field=field, allowed=allowed
    )
