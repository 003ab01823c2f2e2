"""What an answer of the API may be, whatever happens to the service: a success, or a problem that it names itself."""

from __future__ import annotations

import json
from collections.abc import Mapping

from service.http.answers import PROBLEM_JSON
from service.http.errors import KINDS, TYPE_PREFIX

TRY_AGAIN = (429, 503, 507)


def wrong_in(status: int, headers: Mapping[str, str], body: bytes) -> str | None:
    """Why the answer to a request may not be, None where it may. `headers`: by lower-case names."""
    if status < 400:
        return None
    if status >= 500 and status not in TRY_AGAIN:
        return f"{status}: {body[:500]!r}"
    if status in TRY_AGAIN and not headers.get("retry-after", "").isdigit():
        return f"{status} without Retry-After: {body[:500]!r}"
    if not body:
        return None  # of HEAD
    if headers.get("content-type") != PROBLEM_JSON:
        return f"{status} is of type {headers.get('content-type')}: {body[:500]!r}"
    return None if _is_named(status, body) else f"{status} is no problem of that status: {body[:500]!r}"


def _is_named(status: int, body: bytes) -> bool:
    try:
        problem = json.loads(body)
        return bool(status == problem["status"] == KINDS[problem["type"].removeprefix(TYPE_PREFIX)].status)
    except (ValueError, LookupError, TypeError, AttributeError):  # cut short, or of another shape
        return False
