"""One HTTP conversation: retries, and answers turned into typed errors."""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from pydantic import ValidationError

from cukiln.errors import (
    BadRequest,
    NotAuthorised,
    NotFound,
    ProblemError,
    ServiceBusy,
    ServiceFailed,
    ServiceUnreachable,
    UnexpectedAnswer,
    UsageError,
)
from cukiln.types import ProblemDetail

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_BUSY = {429, 503, 507}
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0  # seconds

# The request never left this machine, so it is safe to send again.
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class Transport:
    """An `httpx.Client` that repeats what may be repeated and raises cukiln's errors.

    `attempts` counts the first try. `patience` is the longest time in seconds that one wait for the service may take:
    a longer Retry-After is left to the caller. `sleep` is replaced in tests.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        timeout: float,
        *,
        attempts: int = 5,
        patience: float = 30.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        parsed = _parse_url(url)
        headers = {"Accept": "application/json"}
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable():
                raise UsageError("the API key (CUKILN_API_KEY) holds characters that no HTTP header can carry")
            headers["Authorization"] = f"Bearer {api_key}"
        self.url = str(parsed).rstrip("/")
        self.attempts = attempts
        self.patience = patience
        self.sleep = sleep
        # A proxy from the environment cannot reach this machine's own loopback.
        self._client = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout, trust_env=parsed.host not in _LOOPBACK
        )

    def close(self) -> None:
        self._client.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        repeatable: bool,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Send, repeat where that is safe, and return an answer below 400.

        `repeatable`: the request is idempotent. Otherwise it is sent again only where it was certainly not
        processed: a refused connection, and 429, 503, 507 with a Retry-After.
        """
        sent = dict(headers or {})
        if content is not None:
            sent["Content-Type"] = "application/json"
        for attempt in range(1, self.attempts + 1):
            last = attempt == self.attempts
            try:
                response = self._client.request(method, path, content=content, headers=sent)
            except httpx.TransportError as error:
                if last or not may_repeat(error, repeatable):
                    raise self.unreachable(method, path, error) from error
                self.sleep(delay(attempt))
                continue
            if response.status_code < 400:
                return response
            wait = self._wait_before_repeat(response, repeatable, attempt)
            if last or wait is None:
                raise problem_error(response)
            self.sleep(wait)
        raise AssertionError("attempts must be at least 1")

    def _wait_before_repeat(self, response: httpx.Response, repeatable: bool, attempt: int) -> float | None:
        """Seconds to wait before the next attempt; None: do not repeat."""
        if response.status_code not in _BUSY:
            return None
        wait = retry_after(response)
        if wait is None:
            return delay(attempt) if repeatable else None
        return wait if wait <= self.patience else None

    @contextmanager
    def stream(self, path: str, *, headers: Mapping[str, str], idle: float) -> Iterator[httpx.Response]:
        """Open a GET whose body is read as it comes; `idle` seconds without a byte end it. No repeats.

        Raises `httpx.TransportError` unchanged: the reader of a stream reconnects.
        """
        timeout = httpx.Timeout(self._client.timeout.connect, read=idle)
        with self._client.stream("GET", path, headers=dict(headers), timeout=timeout) as response:
            if response.status_code >= 400:
                response.read()
                raise problem_error(response)
            yield response

    def unreachable(self, method: str, path: str, error: Exception) -> ServiceUnreachable:
        reason = str(error) or type(error).__name__
        return ServiceUnreachable(
            f"no answer from the cukiln service at {self.url} ({reason}); "
            "check that it runs there (`cukiln serve`) and that CUKILN_URL or --url is right",
            method=method,
            url=self.url + path,
        )


def _parse_url(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UsageError(
            f"the service address {url!r} (--url, CUKILN_URL) is not a URL ({error}); expected http://host:port"
        ) from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(
            f"the service address {url!r} (--url, CUKILN_URL) is not an http or https URL; expected http://host:port"
        )
    return parsed


def may_repeat(error: httpx.TransportError, repeatable: bool) -> bool:
    """Whether sending again after `error` is safe, and can help."""
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError | httpx.ProxyError):
        return False
    return repeatable or isinstance(error, _NOT_SENT)


def delay(attempt: int) -> float:
    """Seconds before the attempt after `attempt`: doubling; jittered, so that many clients do not come back at once."""
    longest = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** (attempt - 1))
    return longest * random.uniform(0.5, 1.0)


def retry_after(response: httpx.Response) -> float | None:
    """The Retry-After of an answer in seconds (RFC 9110, 10.2.3: a number or a date), None without a valid one."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())


def problem_error(response: httpx.Response) -> ProblemError | UnexpectedAnswer:
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


def _problem_detail(response: httpx.Response) -> ProblemDetail | None:
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
