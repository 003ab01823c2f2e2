"""One HTTP conversation: budgets, retries, the breaker, and answers turned into typed errors.

`Transport` and `AsyncTransport` differ in how they wait alone: what is sent, repeated and raised is said once, in
`_Rules`.
"""

import asyncio
import ssl
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx2
from tenacity import AsyncRetrying, RetryCallState, Retrying

from cukiln.errors import ProblemError, ServiceBusy, ServiceError, ServiceFailed, ServiceUnreachable, UsageError
from cukiln.forks import renew_after_fork
from cukiln.http.addresses import build_request, connecting, parse_url
from cukiln.http.bodies import LARGEST_ANSWER, read_body, read_body_async
from cukiln.http.bounded_network import bound_network, bounding
from cukiln.http.breaker import Breaker
from cukiln.http.limit import Limit, within
from cukiln.http.refused import checked
from cukiln.http.retries import delay, may_repeat
from cukiln.http.seconds import check_seconds

CONNECT_SECONDS, LOOKUP_SECONDS, CALL_SECONDS = 0.2, 1.0, 30.0
ATTEMPTS, _QUICK_ATTEMPTS = 5, 2

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
LEAST_BYTES_A_SECOND = 10_000.0  # as they are sent, of the body of an answer that has no budget


class _HeldUp(httpx2.ConnectTimeout):
    """The event loop did other things meanwhile, so that the time says nothing of the service."""


# The service closed a connection that was kept open, as it does with idle ones: a new one is made at once.
_BROKEN = (httpx2.RemoteProtocolError, httpx2.ReadError, httpx2.WriteError, httpx2.CloseError, _HeldUp)
_HELD_UP = 2.0  # times the seconds to connect


@dataclass(frozen=True, slots=True)
class Call:
    """A request. `repeatable`: it is idempotent; any other is sent again only where it was certainly not processed: a
    refused connection, and 429, 503, 507 with a Retry-After. `seconds`: it stands in a caller's way, so it takes no
    longer than that, is not repeated but for a connection that broke, and is refused while the breaker is open.
    `bytes_a_second`: `seconds` are to the first byte of an answer, whose body then takes no longer than its size says.
    `read`: what makes an answer below 400 the call's result; its `UnexpectedAnswer` is a failure of the service.
    `most_bytes`: of the answer's body; a larger one is an `UnexpectedAnswer`, too."""

    method: str
    path: str
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = True
    seconds: float | None = None
    read: Callable[[httpx2.Response], Any] = lambda response: response
    bytes_a_second: float | None = None
    most_bytes: int = LARGEST_ANSWER

    def more_seconds(self, response: httpx2.Response) -> float:
        """For the body of an answer that has begun."""
        size = response.headers.get("Content-Length", "")
        if self.bytes_a_second is None or not size.isdecimal():
            return 0.0
        return min(int(size[:18]) / self.bytes_a_second, CALL_SECONDS)


class _Rules:
    """What both transports share. `timeout`: seconds until the answer begins, of each attempt of a call that has no
    budget, and as many for its body, with one more for each 10,000 bytes sent; `connect_seconds`: to connect, of a call
    that has one; `attempts` counts the first try; `patience` is the longest time in seconds that one wait for the
    service may take: a longer Retry-After is left to the caller. `offline`: nothing is sent, every call raises
    `ServiceUnreachable`."""

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
        check_seconds("timeout", timeout)
        check_seconds("connect_seconds", connect_seconds)
        check_seconds("patience", patience, waited=False)
        parsed = parse_url(url)
        headers = {"Accept": "application/json"}
        if api_key is not None:
            if not api_key.isascii() or not api_key.isprintable():
                raise UsageError("the API key (CUKILN_API_KEY) holds characters that no HTTP header can carry")
            if parsed.userinfo:
                raise UsageError(
                    "the service address has a user, and there is an API key (CUKILN_API_KEY): a request has one "
                    "Authorization header; leave out one of them"
                )
            headers["Authorization"] = f"Bearer {api_key}"
        self.url = str(parsed.copy_with(userinfo=b"")).rstrip("/")  # it is shown, and kept with what was answered
        self.timeout, self.connect_seconds = timeout, connect_seconds
        self.attempts, self.patience = attempts, patience
        self.offline = offline
        self.breaker = breaker or Breaker()
        # A proxy from the environment cannot reach this machine's own loopback.
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "auth": (parsed.username, parsed.password) if parsed.userinfo else None,
            "headers": headers,
            "timeout": timeout,
            "trust_env": parsed.host not in _LOOPBACK,
        }
        if parsed.scheme == "http":
            # Certificate authorities, which take 20 ms to read, are for https; this context trusts none.
            self._options["verify"] = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._closed = False
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Without connections: those that are there are the parent's. The next call makes its own."""
        self._lock = threading.Lock()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the client of {self.url} is closed")

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
        """The arguments of httpx2's requests, beside the call's method and path."""
        sent = dict(call.headers)
        if call.content is not None:
            sent["Content-Type"] = "application/json"
        options: dict[str, Any] = {"content": call.content, "headers": sent}
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


class Transport(_Rules):
    """An `httpx2.Client` that repeats what may be repeated and raises cukiln's errors. `sleep` is replaced in tests."""

    sleep: Callable[[float], None] = staticmethod(time.sleep)

    _client: httpx2.Client | None

    def after_fork(self) -> None:
        super().after_fork()
        self._client = None

    def _connected(self) -> httpx2.Client:
        self._require_open()
        with self._lock:
            if self._client is None:
                self._client = httpx2.Client(**self._options)
                bound_network(self._client)
            return self._client

    def close(self) -> None:
        self._closed = True
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def __del__(self) -> None:
        # No client has it any more. Not where the interpreter ends, which closes the connections itself.
        client = getattr(self, "_client", None)
        if client is not None and not sys.is_finalizing():
            client.close()

    def send(self, call: Call) -> Any:
        """The answer, below 400, as the call reads it. Raises `ServiceError` and its subclasses."""
        self._begin(call)
        try:
            if call.seconds is None:
                response = self._repeated(call, None)
            else:
                limit = Limit(call.seconds)
                response = within(limit, partial(self._repeated, call, limit))
            result = call.read(response)
        except httpx2.RequestError as error:
            self._end(call, error)
            raise self.unreachable(call.method, call.path, error) from error
        except ServiceError as error:
            self._end(call, error)
            raise
        self._end(call, None)
        return result

    def _repeated(self, call: Call, limit: Limit | None) -> httpx2.Response:
        response: httpx2.Response = Retrying(sleep=self.sleep, **self._policy(call))(self._once, call, limit)
        return response

    @contextmanager
    def _answer(self, call: Call, **options: Any) -> Iterator[httpx2.Response]:
        """An answer that has begun. Raises `ServiceUnreachable` where no connection can be made, now or later, and
        `UsageError` where there can be no such request."""
        with ExitStack() as stack:
            with connecting(self.url, call.method, call.path):
                client = self._connected()
            request = build_request(client, call.method, call.path, options)
            with connecting(self.url, call.method, call.path):
                response = client.send(request, stream=True)
            stack.callback(response.close)
            yield response

    def _once(self, call: Call, of_call: Limit | None) -> httpx2.Response:
        limit = of_call or Limit(self.timeout)  # without a budget: of this attempt, to the first byte of the body

        def took(size: int) -> None:
            limit.extend(size / LEAST_BYTES_A_SECOND if of_call is None else 0.0)

        with bounding(limit), self._answer(call, **self._of_request(call)) as response:
            limit.extend(self.timeout if of_call is None else call.more_seconds(response))
            return checked(read_body(response, call.most_bytes, took))

    @contextmanager
    def stream(self, path: str, *, headers: Mapping[str, str], idle: float) -> Iterator[httpx2.Response]:
        """Open a GET whose body is read as it comes; `idle` seconds without a byte end it. No repeats.

        Raises `httpx2.TransportError` unchanged: the reader of a stream reconnects.
        """
        call = Call("GET", path)
        self._begin(call)
        timeout = httpx2.Timeout(self.timeout, read=idle)
        with ExitStack() as stack:
            with bounding(Limit(self.timeout)):
                response = stack.enter_context(self._answer(call, headers=dict(headers), timeout=timeout))
                if response.status_code >= 400:
                    response = read_body(response, call.most_bytes)
            yield checked(response)


class AsyncTransport(_Rules):
    """`Transport` over `httpx2.AsyncClient`s: connections are of one event loop, so that each loop has its own."""

    sleep: Callable[[float], Awaitable[None]] = staticmethod(asyncio.sleep)
    _clients: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient]

    def after_fork(self) -> None:
        super().after_fork()
        self._clients = {}

    def _connected(self) -> httpx2.AsyncClient:
        self._require_open()
        loop = asyncio.get_running_loop()
        with self._lock:
            if loop not in self._clients:
                # The sockets of a loop that is closed close with what holds them: nothing can be awaited there.
                open_ones = {other: client for other, client in self._clients.items() if not other.is_closed()}
                self._clients = {**open_ones, loop: httpx2.AsyncClient(**self._options)}
            return self._clients[loop]

    async def close(self) -> None:
        """Those of other event loops close there, when these run."""
        self._closed = True
        with self._lock:
            clients, self._clients = self._clients, {}
        own = clients.pop(asyncio.get_running_loop(), None)
        for loop, client in clients.items():
            if not loop.is_closed():
                asyncio.run_coroutine_threadsafe(client.aclose(), loop)
        if own is not None:
            await own.aclose()

    async def send(self, call: Call) -> Any:
        """The answer, below 400, as the call reads it. Raises `ServiceError` and its subclasses."""
        self._begin(call)
        try:
            async with asyncio.timeout(call.seconds) as limit:
                repeated = AsyncRetrying(sleep=self.sleep, **self._policy(call))
                response: httpx2.Response = await repeated(self._once, call, limit)
            result = call.read(response)
        except (httpx2.RequestError, TimeoutError) as error:
            self._end(call, error)
            raise self.unreachable(call.method, call.path, error) from error
        except ServiceError as error:
            self._end(call, error)
            raise
        self._end(call, None)
        return result

    @asynccontextmanager
    async def _answer(self, call: Call, **options: Any) -> AsyncIterator[httpx2.Response]:
        """As that of `Transport`."""
        async with AsyncExitStack() as stack:
            with connecting(self.url, call.method, call.path):
                client = self._connected()
            request = build_request(client, call.method, call.path, options)
            with connecting(self.url, call.method, call.path):
                response = await client.send(request, stream=True)
            stack.push_async_callback(response.aclose)
            yield response

    async def _once(self, call: Call, of_call: asyncio.Timeout) -> httpx2.Response:
        if call.seconds is not None:
            return await self._within(call, of_call)
        try:
            async with asyncio.timeout(self.timeout) as of_attempt:
                return await self._within(call, of_attempt)
        except TimeoutError as error:
            raise httpx2.ReadTimeout("no whole answer within its time") from error

    async def _within(self, call: Call, limit: asyncio.Timeout) -> httpx2.Response:
        def extend(seconds: float) -> None:
            if seconds and (end := limit.when()) is not None and not limit.expired():
                limit.reschedule(end + seconds)

        def took(size: int) -> None:
            extend(size / LEAST_BYTES_A_SECOND if call.seconds is None else 0.0)

        began = time.monotonic()
        try:
            async with self._answer(call, **self._of_request(call)) as response:
                extend(self.timeout if call.seconds is None else call.more_seconds(response))
                return checked(await read_body_async(response, call.most_bytes, took))
        except httpx2.ConnectTimeout as error:
            if time.monotonic() - began > _HELD_UP * self.connect_seconds:
                raise _HeldUp(str(error), request=error.request) from error
            raise

    @asynccontextmanager
    async def stream(self, path: str, *, headers: Mapping[str, str], idle: float) -> AsyncIterator[httpx2.Response]:
        """As that of `Transport`."""
        call = Call("GET", path)
        self._begin(call)
        timeout = httpx2.Timeout(self.timeout, read=idle)
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self.timeout):
                    answer = self._answer(call, headers=dict(headers), timeout=timeout)
                    response = await stack.enter_async_context(answer)
                    if response.status_code >= 400:
                        response = await read_body_async(response, call.most_bytes)
            except TimeoutError as error:
                raise httpx2.ReadTimeout("no answer within its time") from error
            yield checked(response)
