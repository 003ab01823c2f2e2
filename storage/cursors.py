"""Opaque page cursors: where the page before ended."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Any

from storage.errors import BadCursor


def make_cursor(*parts: str | int | float) -> str:
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def read_cursor(cursor: str, types: Sequence[type]) -> list[Any]:
    """The parts that `make_cursor` was given. Raises `BadCursor`."""
    try:
        parts = json.loads(base64.urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4)))
    except (ValueError, binascii.Error, RecursionError) as error:
        raise BadCursor(cursor) from error
    if not isinstance(parts, list) or [type(part) for part in parts] != list(types):
        raise BadCursor(cursor)
    return parts
