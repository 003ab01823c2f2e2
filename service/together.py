"""Batches of requests: those that arrive while a batch is processed are the next one.

One read and one write of the database serve many concurrent requests; a single one is a batch of its own and does not
wait. Each batch starts after its requests have arrived, so no answer is older than its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


class Together(Generic[Request, Result]):
    """`work`, in one thread of its own: a result or an exception for each request, or one exception for all."""

    def __init__(self, name: str, work: Callable[[Sequence[Request]], Sequence[Result | Exception]], most: int) -> None:
        self._work, self._most = work, most
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: list[tuple[Request, asyncio.Future[Result]]] = []
        self._busy = False

    async def do(self, request: Request) -> Result:
        """The result of a request; on the event loop."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if not self._busy:
            self._begin()
        return await future

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin(self) -> None:
        batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
        self._busy = True
        running = asyncio.get_running_loop().run_in_executor(
            self._thread, self._work, [request for request, _ in batch]
        )
        running.add_done_callback(lambda done: self._end([future for _, future in batch], done))

    def _end(
        self, futures: Sequence[asyncio.Future[Result]], done: asyncio.Future[Sequence[Result | Exception]]
    ) -> None:
        self._busy = False
        if self._waiting:
            self._begin()
        failed = done.exception()
        results = [failed] * len(futures) if failed is not None else done.result()
        for future, result in zip(futures, results, strict=True):
            if future.done():  # its request was cancelled
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)
