"""One HTTP conversation: budgets, retries, the breaker, and answers turned into typed errors.

`Transport` and `AsyncTransport` differ in how they wait alone: what is sent, repeated and raised is said once, in
`_Rules`.
"""

import asyncio
import random
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, TypeVar

import httpx2
from pydantic import ValidationError
from tenacity import AsyncRetrying, RetryCallState, Retrying

from cukiln.breaker import Breaker
from cukiln.errors import (
    BadRequest,
    NotAuthorised,
    NotFound,
    ProblemError,
    ServiceBusy,
    ServiceError,
    ServiceFailed,
    ServiceUnreachable,
    UnexpectedAnswer,
    UsageError,
)
from cukiln.forks import renew_after_fork
from cukiln.types import ProblemDetail

CONNECT_SECONDS, LOOKUP_SECONDS, CALL_SECONDS = 0.2, 1.0, 30.0
ATTEMPTS, _QUICK_ATTEMPTS = 5, 2

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_BUSY = {429, 503, 507}
_FIRST_DELAY, _LONGEST_DELAY = 0.1, 5.0  # seconds

# The request never left this machine, so it is safe to send again.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)
# The service closed a connection that was kept open, as it does with idle ones: a new one is made at once.
_BROKEN = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError, httpx2.CloseError)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Call:
    """A request. `repeatable`: it is idempotent; any other is sent again only where it was certainly not processed: a
    refused connection, and 429, 503, 507 with a Retry-After. `seconds`: it stands in a caller's way, so it takes no
    longer than that, is not repeated but for a connection that broke, and is refused while the breaker is open.
    `read`: what makes an answer below 400 the call's result; its `UnexpectedAnswer` is a failure of the service."""

    method: str
    path: str
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True
    seconds: float | None = None
    read: Callable[[httpx2.Response], Any] = lambda response: response


class _Rules:
    """What both transports share. `timeout`: seconds without a byte, of a call that has no budget of its own;
    `connect_seconds`: to connect, of a call that has one; `attempts` counts the first try; `patience` is the longest
    time in seconds that one wait for the service may take: a longer Retry-After is left to the caller. `offline`:
    nothing is sent, every call raises `ServiceUnreachable`."""

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout: float = CALL_SECONDS,
        *,
        connect_seconds: float = CONNECT_SECONDS,
        attempts: int = ATTEMPTS,
        patience: float = 30.0,
        offline: bool = False,
        breaker: Breaker | None = None,
    ) -> None:
        if attempts < 1:
            raise UsageError(f"attempts is {attempts}; at least 1 is needed, which counts the first try")
        parsed = _parse_url(url)
        headers = {"Accept": "application/json"}
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable():
                raise UsageError("the API key (CUKILN_API_KEY) holds characters that no HTTP header can carry")
            headers["Authorization"] = f"Bearer {api_key}"
        self.url = str(parsed).rstrip("/")
        self.timeout, self.connect_seconds = timeout, connect_seconds
        self.attempts, self.patience = attempts, patience
        self.offline = offline
        self.breaker = breaker or Breaker()
        # A proxy from the environment cannot reach this machine's own loopback.
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "headers": headers,
            "timeout": timeout,
            "trust_env": parsed.host not in _LOOPBACK,
        }
        if parsed.scheme == "http":
            # Certificate authorities, which take 20 ms to read, are for https; this context trusts none.
            self._options["verify"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._connect()
        renew_after_fork(self)

    def after_fork(self) -> None:
        self._connect()  # the connections that are there are the parent's

    def _connect(self) -> None:
        """Make the client of httpx2, which connects with its first request."""
        raise NotImplementedError

    def _begin(self, call: Call) -> None:
        """Raises `ServiceUnreachable` for a call that is not to be made."""
        if self.offline:
            raise self._not_asked(call, "the client is offline (CUKILN_OFFLINE, offline=True): nothing is sent")
        if call.seconds is not None and not self.breaker.admits():
            pause = self.breaker.pause_seconds
            raise self._not_asked(
                call, f"it failed {self.breaker.failures} times in a row, and is asked again after {pause:g} s"
            )

    def _not_asked(self, call: Call, why: str) -> ServiceUnreachable:
        return ServiceUnreachable(
            f"the cukiln service at {self.url} was not asked: {why}", method=call.method, url=self.url + call.path
        )

    def _end(self, call: Call, error: Exception | None) -> None:
        """Report the outcome to the breaker. Refused requests are answers: the service is there."""
        if error is None or (isinstance(error, ProblemError) and not isinstance(error, ServiceBusy | ServiceFailed)):
            self.breaker.succeeded()
        elif call.seconds is not None:
            self.breaker.failed()

    def _of_request(self, call: Call) -> dict[str, Any]:
        """The arguments of httpx2's `request`."""
        sent = dict(call.headers)
        if call.content is not None:
            sent["Content-Type"] = "application/json"
        options: dict[str, Any] = {"method": call.method, "url": call.path, "content": call.content, "headers": sent}
        if call.seconds is not None:
            options["timeout"] = httpx2.Timeout(call.seconds, connect=min(self.connect_seconds, call.seconds))
        return options

    def _policy(self, call: Call) -> dict[str, Any]:
        """The arguments of tenacity's `Retrying`."""
        most = self.attempts if call.seconds is None else min(self.attempts, _QUICK_ATTEMPTS)

        def repeats(state: RetryCallState) -> bool:
            error = state.outcome.exception() if state.outcome else None
            if call.seconds is not None:
                return call.repeatable and isinstance(error, _BROKEN)
            if isinstance(error, ServiceBusy):
                wait = error.retry_after
                return wait <= self.patience if wait is not None else call.repeatable
            return isinstance(error, httpx2.TransportError) and may_repeat(error, call.repeatable)

        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            if call.seconds is not None:
                return 0.0
            if isinstance(error, ServiceBusy) and error.retry_after is not None:
                return error.retry_after
            return delay(state.attempt_number)

        return {"retry": repeats, "wait": wait, "stop": lambda state: state.attempt_number >= most, "reraise": True}

    def unreachable(self, method: str, path: str, error: Exception) -> ServiceUnreachable:
        reason = str(error) or type(error).__name__
        return ServiceUnreachable(
            f"no answer from the cukiln service at {self.url} ({reason}); "
            "check that it runs there (`cukiln serve`) and that CUKILN_URL or --url is right; `--url private` runs one "
            "for a command",
            method=method,
            url=self.url + path,
        )

    def _stream_timeout(self, idle: float) -> httpx2.Timeout:
        return httpx2.Timeout(self.timeout, read=idle)


class Transport(_Rules):
    """An `httpx2.Client` that repeats what may be repeated and raises cukiln's errors. `sleep` is replaced in tests."""

    sleep: Callable[[float], None] = staticmethod(time.sleep)

    def _connect(self) -> None:
        self._client = httpx2.Client(**self._options)

    def close(self) -> None:
        self._client.close()

    def send(self, call: Call) -> Any:
        """The answer, below 400, as the call reads it. Raises `ServiceError` and its subclasses."""
        self._begin(call)
        try:
            if call.seconds is None:
                response = self._repeated(call)
            else:
                response = within(call.seconds, partial(self._repeated, call))
            result = call.read(response)
        except httpx2.RequestError as error:
            self._end(call, error)
            raise self.unreachable(call.method, call.path, error) from error
        except ServiceError as error:
            self._end(call, error)
            raise
        self._end(call, None)
        return result

    def _repeated(self, call: Call) -> httpx2.Response:
        response: httpx2.Response = Retrying(sleep=self.sleep, **self._policy(call))(self._once, call)
        return response

    def _once(self, call: Call) -> httpx2.Response:
        return checked(self._client.request(**self._of_request(call)))

    @contextmanager
    def stream(self, path: str, *, headers: Mapping[str, str], idle: float) -> Iterator[httpx2.Response]:
        """Open a GET whose body is read as it comes; `idle` seconds without a byte end it. No repeats.

        Raises `httpx2.TransportError` unchanged: the reader of a stream reconnects.
        """
        self._begin(Call("GET", path))
        timeout = self._stream_timeout(idle)
        with self._client.stream("GET", path, headers=dict(headers), timeout=timeout) as response:
            if response.status_code >= 400:
                response.read()
            yield checked(response)


class AsyncTransport(_Rules):
    """`Transport` over an `httpx2.AsyncClient`. Connections are of one event loop: a call in another makes new ones."""

    sleep: Callable[[float], Awaitable[None]] = staticmethod(asyncio.sleep)
    _loop: asyncio.AbstractEventLoop | None = None

    def _connect(self) -> None:
        self._client = httpx2.AsyncClient(**self._options)

    def _begin(self, call: Call) -> None:
        super()._begin(call)
        self._of_this_loop()

    def _of_this_loop(self) -> None:
        before, self._loop = self._loop, asyncio.get_running_loop()
        if before not in (None, self._loop):
            self._connect()

    async def close(self) -> None:
        self._of_this_loop()
        await self._client.aclose()

    async def send(self, call: Call) -> Any:
        """The answer, below 400, as the call reads it. Raises `ServiceError` and its subclasses."""
        self._begin(call)
        try:
            async with asyncio.timeout(call.seconds):
                response: httpx2.Response = await AsyncRetrying(sleep=self.sleep, **self._policy(call))(
                    self._once, call
                )
            result = call.read(response)
        except (httpx2.RequestError, TimeoutError) as error:
            self._end(call, error)
            raise self.unreachable(call.method, call.path, error) from error
        except ServiceError as error:
            self._end(call, error)
            raise
        self._end(call, None)
        return result

    async def _once(self, call: Call) -> httpx2.Response:
        return checked(await self._client.request(**self._of_request(call)))

    @asynccontextmanager
    async def stream(self, path: str, *, headers: Mapping[str, str], idle: float) -> AsyncIterator[httpx2.Response]:
        """As that of `Transport`."""
        self._begin(Call("GET", path))
        timeout = self._stream_timeout(idle)
        async with self._client.stream("GET", path, headers=dict(headers), timeout=timeout) as response:
            if response.status_code >= 400:
                await response.aread()
            yield checked(response)


def within(seconds: float, function: Callable[[], _T]) -> _T:
    """Of a function that may be late, such as a name that is resolved or an answer that comes byte by byte: its result,
    within this time. Raises `httpx2.ReadTimeout`; the thread then ends by itself, with what it waits for."""
    outcome: list[_T | BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            outcome.append(error)
        done.set()

    threading.Thread(target=run, name="cukiln-call", daemon=True).start()
    if not done.wait(seconds):
        raise httpx2.ReadTimeout(f"no answer within {seconds:g} s")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def checked(response: httpx2.Response) -> httpx2.Response:
    """An answer below 400. Raises its typed error."""
    if response.status_code >= 400:
        raise problem_error(response)
    return response


def _parse_url(url: str) -> httpx2.URL:
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise UsageError(
            f"the service address {url!r} (--url, CUKILN_URL) is not a URL ({error}); expected http://host:port"
        ) from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(
            f"the service address {url!r} (--url, CUKILN_URL) is not an http or https URL; expected http://host:port"
        )
    return parsed


def may_repeat(error: httpx2.TransportError, repeatable: bool) -> bool:
    """Whether sending again after `error` is safe, and can help."""
    if isinstance(error, httpx2.UnsupportedProtocol | httpx2.LocalProtocolError | httpx2.ProxyError):
        return False
    return repeatable or isinstance(error, _NOT_SENT)


def delay(attempt: int) -> float:
    """Seconds before the attempt after `attempt`: doubling; jittered, so that many clients do not come back at once."""
    longest = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** (attempt - 1))
    return longest * random.uniform(0.5, 1.0)


def retry_after(response: httpx2.Response) -> float | None:
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
