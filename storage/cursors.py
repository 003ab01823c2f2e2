"""Opaque page cursors: where the page before ended."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from storage.errors import BadCursor

LARGEST_POSITION = 2**31 - 1
_ID = re.compile(r"[0-9a-f]{1,64}")


def make_cursor(*parts: str | int | float) -> str:
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def read_cursor(cursor: str, types: Sequence[type]) -> list[Any]:
    """The parts that `make_cursor` was given: numbers that a database's column can hold, texts that are ids. Raises
    `BadCursor`."""
    try:
        parts = json.loads(base64.urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4)))
    except (ValueError, binascii.Error, RecursionError) as error:
        raise BadCursor(cursor) from error
    if not isinstance(parts, list) or [type(part) for part in parts] != list(types) or not all(map(_fits, parts)):
        raise BadCursor(cursor)
    return parts


def _fits(part: str | int | float) -> bool:
    if isinstance(part, str):
        return _ID.fullmatch(part) is not None
    return math.isfinite(part) if isinstance(part, float) else 0 <= part <= LARGEST_POSITION
