"""The clients of a cukiln service: `Client` blocks, `AsyncClient` is awaited. Both do what `cukiln.operations` says."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from cukiln.errors import CukilnError
from cukiln.events import Event, read_events, read_events_async
from cukiln.http.transport import ATTEMPTS, CALL_SECONDS, CONNECT_SECONDS, LOOKUP_SECONDS, AsyncTransport, Transport
from cukiln.operations.files import FileOperations
from cukiln.operations.gathered import GatheredLookups
from cukiln.operations.jobs import JobOperations, ProgressCallback
from cukiln.operations.lookups import LookupOperations
from cukiln.operations.service import ServiceOperations
from cukiln.operations.state import FRESH_SECONDS
from cukiln.operations.steps import Ask, Follow, Listing, OnMissTerms, Operation, Pause, Prepared, Step, job_path
from cukiln.settings import ClientSettings
from cukiln.tasks import cancel_all

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Item = TypeVar("_Item")
_Own = TypeVar("_Own", Transport, AsyncTransport)


def _blocking(operation: Callable[Concatenate[Any, _P], Operation[_T]]) -> Callable[Concatenate[Any, _P], _T]:
    @wraps(operation)
    def method(self: "Client", /, *arguments: _P.args, **options: _P.kwargs) -> _T:
        return self._run(operation(self, *arguments, **options))

    return method


def _blocking_list(
    listed: Callable[Concatenate[Any, _P], Listing[Any, _Item]],
) -> Callable[Concatenate[Any, _P], Iterator[_Item]]:
    @wraps(listed)
    def method(self: "Client", /, *arguments: _P.args, **options: _P.kwargs) -> Iterator[_Item]:
        listing = listed(self, *arguments, **options)
        cursor = None
        while True:
            page = self._run(listing.read(cursor))
            yield from listing.items(page)
            if (cursor := page.next_cursor) is None:
                return

    return method


def _awaited(
    operation: Callable[Concatenate[Any, _P], Operation[_T]],
) -> Callable[Concatenate[Any, _P], Awaitable[_T]]:
    @wraps(operation)
    async def method(self: "AsyncClient", /, *arguments: _P.args, **options: _P.kwargs) -> _T:
        return await self._run(operation(self, *arguments, **options))

    return method


def _awaited_list(
    listed: Callable[Concatenate[Any, _P], Listing[Any, _Item]],
) -> Callable[Concatenate[Any, _P], AsyncIterator[_Item]]:
    @wraps(listed)
    async def method(self: "AsyncClient", /, *arguments: _P.args, **options: _P.kwargs) -> AsyncIterator[_Item]:
        listing = listed(self, *arguments, **options)
        cursor = None
        while True:
            page = await self._run(listing.read(cursor))
            for item in listing.items(page):
                yield item
            if (cursor := page.next_cursor) is None:
                return

    return method


class _Operations(JobOperations, ServiceOperations, FileOperations, LookupOperations, Generic[_Own]):
    _kind: type[_Own]
    _transport: _Own

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        timeout: float = CALL_SECONDS,
        *,
        attempts: int = ATTEMPTS,
        connect_seconds: float = CONNECT_SECONDS,
        lookup_budget: float = LOOKUP_SECONDS,
        fresh_seconds: float = FRESH_SECONDS,
        cache_dir: Path | str | None = None,
        offline: bool | None = None,
        transport: _Own | None = None,
    ) -> None:
        settings = ClientSettings.from_environment()
        super().__init__(settings, cache_dir, lookup_budget, fresh_seconds)
        self._transport = transport or self._kind(
            url or settings.url,
            api_key or settings.api_key,
            timeout,
            attempts=attempts,
            connect_seconds=connect_seconds,
            offline=settings.offline if offline is None else offline,
        )
        self._opened()

    def _opened(self) -> None:
        """What a kind of client has beside."""


class Client(_Operations[Transport]):
    """A connection to the service at `url` (default: `CUKILN_URL`, the configuration file, else the local service).

    It does not stand in a caller's way: a lookup takes `lookup_budget` seconds at most, of them `connect_seconds` to
    connect, then it is a miss; after 3 that failed in a row the service is not asked for 30 s. Winners and libraries
    that the service ever answered come from the cache in `cache_dir`, shared by all processes of a user, and are asked
    for again after `fresh_seconds`, in the background. `offline`: nothing is sent.

    `timeout`: seconds that any other request, not a job, may take until its answer begins, and as many for the answer,
    with one more for each 10,000 bytes of it; `attempts`: how often one that may be repeated is tried. `transport`: one
    that was made by the caller, in place of `url` and these. A client may be shared between threads. Every method
    raises `ServiceError` and its subclasses; `lookup` of them what the service refuses alone (`BadRequest`,
    `NotAuthorised`, `NotFound`).
    """

    _kind = Transport
    _closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections. What is known stays in the cache."""
        self._closed = True
        self._transport.close()

    tune = _blocking(JobOperations._tune)
    submit = _blocking(JobOperations._submit)
    retry = _blocking(JobOperations._retry)
    wait = _blocking(JobOperations._wait)
    cancel = _blocking(JobOperations._cancel)
    job = _blocking(JobOperations._job)
    jobs = _blocking_list(JobOperations._jobs)
    candidates = _blocking_list(JobOperations._candidates)
    rejections = _blocking(JobOperations._rejections)
    profile = _blocking_list(JobOperations._profile)
    profile_pages = _blocking_list(JobOperations._profile_pages)
    trace = _blocking(JobOperations._trace)
    candidate = _blocking(ServiceOperations._candidate)
    forget = _blocking(ServiceOperations._forget)
    bundle = _blocking(ServiceOperations._bundle)
    send_results = _blocking(ServiceOperations._send_results)
    imports = _blocking_list(ServiceOperations._imports)
    withdraw_import = _blocking(ServiceOperations._withdraw_import)
    operators = _blocking(ServiceOperations._operators)
    targets = _blocking(ServiceOperations._targets)
    lookup = _blocking(LookupOperations._lookup)
    lookup_fields = _blocking(LookupOperations._lookup_fields)
    kernel = _blocking(FileOperations._kernel)
    blob = _blocking(FileOperations._blob)

    def events(self, job_id: str, last_event_id: str | None = None) -> Iterator[Event]:
        """Yield what happens to the job until it ends, across broken connections."""
        return read_events(self._transport, f"{job_path(job_id)}/events", last_event_id)

    def _run(self, operation: Operation[_T]) -> _T:
        try:
            step = next(operation)
            while True:
                try:
                    answer = self._take(step)
                except CukilnError as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(answer)
        except StopIteration as end:
            result: _T = end.value
            return result

    def _take(self, step: Step) -> Any:
        if isinstance(step, Ask):
            return self._run(self._ask(step.prepared, step.missed, patient=False))
        if isinstance(step, Follow):
            for event in read_events(self._transport, step.path, deadline=step.deadline):
                step.report(event)
            return None
        return self._transport.sleep(step.seconds) if isinstance(step, Pause) else self._transport.send(step)

    def _revalidate(self, stale: Sequence[Prepared], missed: OnMissTerms) -> None:
        if new := self._claim(stale):
            ask = self._asked_again(new, missed)
            thread = threading.Thread(target=self._run_behind, args=[ask], name="cukiln-revalidate", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # of a machine that has no more of them: the next lookup asks
                self._memory.release(prepared.digest for prepared in new)

    def _run_behind(self, operation: Operation[None]) -> None:
        try:
            self._run(operation)
        except RuntimeError:  # httpx2's, of a client that is closed
            if not self._closed:
                raise


class AsyncClient(_Operations[AsyncTransport]):
    """`Client`, for asyncio: the same options and methods, which are awaited (`jobs`, `candidates`, `imports`,
    `profile` and `events` are iterated with `async for`). Lookups that are made at the same time share requests."""

    _kind = AsyncTransport

    def _opened(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._gathered = GatheredLookups(
            lambda prepared, missed: self._run(self._ask(prepared, missed, patient=False)), self._lookup_budget
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; lookups that are not answered yet raise `RuntimeError`. What is known stays in the
        cache."""
        await cancel_all(self._tasks)
        await self._gathered.close()
        await self._transport.close()

    tune = _awaited(JobOperations._tune)
    submit = _awaited(JobOperations._submit)
    retry = _awaited(JobOperations._retry)
    wait = _awaited(JobOperations._wait)
    cancel = _awaited(JobOperations._cancel)
    job = _awaited(JobOperations._job)
    jobs = _awaited_list(JobOperations._jobs)
    candidates = _awaited_list(JobOperations._candidates)
    rejections = _awaited(JobOperations._rejections)
    profile = _awaited_list(JobOperations._profile)
    profile_pages = _awaited_list(JobOperations._profile_pages)
    trace = _awaited(JobOperations._trace)
    candidate = _awaited(ServiceOperations._candidate)
    forget = _awaited(ServiceOperations._forget)
    bundle = _awaited(ServiceOperations._bundle)
    send_results = _awaited(ServiceOperations._send_results)
    imports = _awaited_list(ServiceOperations._imports)
    withdraw_import = _awaited(ServiceOperations._withdraw_import)
    operators = _awaited(ServiceOperations._operators)
    targets = _awaited(ServiceOperations._targets)
    lookup = _awaited(LookupOperations._lookup)
    lookup_fields = _awaited(LookupOperations._lookup_fields)
    kernel = _awaited(FileOperations._kernel)
    blob = _awaited(FileOperations._blob)

    def events(self, job_id: str, last_event_id: str | None = None) -> AsyncIterator[Event]:
        """Yield what happens to the job until it ends, across broken connections."""
        return read_events_async(self._transport, f"{job_path(job_id)}/events", last_event_id)

    async def _run(self, operation: Operation[_T]) -> _T:
        try:
            step = next(operation)
            while True:
                try:
                    answer = await self._take(step)
                except CukilnError as error:
                    step = operation.throw(error)
                else:
                    step = operation.send(answer)
        except StopIteration as end:
            result: _T = end.value
            return result

    async def _take(self, step: Step) -> Any:
        if isinstance(step, Ask):
            return await self._gathered.answers(step)
        if isinstance(step, Follow):
            async for event in read_events_async(self._transport, step.path, deadline=step.deadline):
                step.report(event)
            return None
        return await (self._transport.sleep(step.seconds) if isinstance(step, Pause) else self._transport.send(step))

    def _revalidate(self, stale: Sequence[Prepared], missed: OnMissTerms) -> None:
        if new := self._claim(stale):
            task = asyncio.get_running_loop().create_task(self._run(self._asked_again(new, missed)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


__all__ = ["AsyncClient", "Client", "ProgressCallback"]
