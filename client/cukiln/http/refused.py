"""Answers of 400 and above as typed errors."""

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
from pydantic import ValidationError

from cukiln.errors import (
    BadRequest,
    NotAuthorised,
    NotFound,
    ProblemError,
    ServiceBusy,
    ServiceFailed,
    UnexpectedAnswer,
)
from cukiln.types import ProblemDetail

_BUSY = {429, 503, 507}


def checked(response: httpx2.Response) -> httpx2.Response:
    """An answer below 400. Raises its typed error."""
    if response.status_code >= 400:
        raise problem_error(response)
    return response


def retry_after(response: httpx2.Response) -> float | None:
    """The Retry-After of an answer in seconds (RFC 9110, 10.2.3: a number or a date), None without a valid one."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        when = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def problem_error(response: httpx2.Response) -> ProblemError | UnexpectedAnswer:
    """The typed error of an answer of 400 or above."""
    request, status = response.request, response.status_code
    where: dict[str, Any] = {"method": request.method, "url": str(request.url)}
    detail = _problem_detail(response)
    if detail is None and status not in _BUSY | {401, 403}:
        return UnexpectedAnswer(
            f"{request.url} answered {status} {response.reason_phrase} without cukiln's problem details; "
            "check that the address is a cukiln service and not a proxy or another server",
            **where,
        )
    where.update(status=status, detail=detail)
    message = _sentence(detail) if detail else f"{request.url} answered {status} {response.reason_phrase}"
    if status in _BUSY:
        return ServiceBusy(message, retry_after=retry_after(response), **where)
    if status in (401, 403):
        return NotAuthorised(f"{message}; set CUKILN_API_KEY to the service's key", **where)
    if status in (404, 410):
        return NotFound(message, **where)
    return BadRequest(message, **where) if status < 500 else ServiceFailed(message, **where)


def _problem_detail(response: httpx2.Response) -> ProblemDetail | None:
    if "json" not in response.headers.get("Content-Type", ""):
        return None
    try:
        return ProblemDetail.model_validate_json(response.content)
    except ValidationError:
        return None


def _sentence(detail: ProblemDetail) -> str:
    """The service's message, with the field and what is allowed where it lacks them."""
    text = detail.detail.rstrip(".") or detail.title
    if detail.field and detail.field not in text:
        text = f"{detail.field}: {text}"
    if detail.allowed is not None and "allowed" not in text:
        allowed = ", ".join(map(str, detail.allowed)) if isinstance(detail.allowed, list) else str(detail.allowed)
        text = f"{text} (allowed: {allowed})"
    return text
