"""Threads beside the event loop: batches of requests, and messages to Redis after an answer.

Requests that arrive while a batch is processed are the next one, so that one read and one write of the database serve
many; a single one does not wait. Each batch starts after its requests have arrived: no answer is older than it.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, TypeVar

from redis import Redis

Request = TypeVar("Request")
Result = TypeVar("Result")


async def to_its_end(work: asyncio.Future[Result]) -> Result:
    """The result of what a thread does, also where the server stops and cancels the request meanwhile: the thread
    writes all the same, and the answer has to say so."""
    while not work.done():
        with suppress(asyncio.CancelledError):
            await asyncio.shield(work)
    return work.result()


class Together(Generic[Request, Result]):
    """`work`, in one thread of its own: a result or an exception for each request, or one exception for all."""

    def __init__(self, name: str, work: Callable[[Sequence[Request]], Sequence[Result | Exception]], most: int) -> None:
        self._work, self._most = work, most
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting: list[tuple[Request, asyncio.Future[Result]]] = []
        self._busy = False

    def do(self, request: Request) -> asyncio.Future[Result]:
        """The result of a request; on the event loop. Cancelled where the service stops before it is begun."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if not self._busy:
            self._begin()
        return future

    def close(self) -> None:
        self._thread.shutdown(wait=False)
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            future.cancel()

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


log = logging.getLogger("cukiln.service")

MOST_WAITING = 1_000
CLOSE_SECONDS = 1.0

Write = Callable[[Redis], object]


class Announcer:
    """Best effort, in order. Lost wake-ups are rewritten by the reconciler, lost events are read from the database."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._waiting: queue.Queue[Write | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="announcer", daemon=True)
        self._thread.start()

    def later(self, write: Write) -> None:
        """Returns at once."""
        try:
            self._waiting.put_nowait(write)
        except queue.Full:
            log.warning("a message to Redis is dropped: %d wait already", MOST_WAITING)

    def close(self) -> None:
        """Wait CLOSE_SECONDS for queued messages."""
        try:
            self._waiting.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)

    def _write_all(self) -> None:
        while (write := self._waiting.get()) is not None:
            try:
                write(self._redis)
            except Exception:
                log.exception("a message to Redis was not written")
