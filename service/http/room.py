"""A bound on the bytes of bodies in memory: further bodies queue."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.http.errors import refuse

RETRY_SECONDS = 5
WAIT_SECONDS = 30.0
BODIES = 4
"""Times the usual limit of a body: bytes of large ones that are in memory at once."""


class Room:
    """First come, first served, in one event loop. A size above the whole room takes all of it."""

    def __init__(self, size: int, wait_seconds: float) -> None:
        self._size = self._free = size
        self._wait_seconds = wait_seconds
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[None]:
        """Hold `size` of it. Raises Refused (503) where it is not free in time."""
        size = min(size, self._size)
        await self._acquire(size)
        try:
            yield
        finally:
            self._free += size
            self._serve()

    async def _acquire(self, size: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._serve()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await turn
        except BaseException as error:
            self._give_up(size, turn)
            if not isinstance(error, TimeoutError):
                raise
            detail = "Other large bodies are read first. Nothing of this request was kept; send it again."
            raise refuse("busy", detail, headers={"Retry-After": str(RETRY_SECONDS), "Connection": "close"}) from None

    def _give_up(self, size: int, turn: asyncio.Future[None]) -> None:
        if not turn.cancelled():  # it was served in the same moment
            self._free += size
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.cancelled() and size > self._free:
                return
            self._waiting.popleft()
            if not turn.cancelled():
                self._free -= size
                turn.set_result(None)


class BodyRooms:
    """Where large bodies queue: for memory to be read into, and for the parser."""

    def __init__(self, max_body_bytes: int) -> None:
        self.read = Room(BODIES * max_body_bytes, WAIT_SECONDS)
        self.parse = Room(1, WAIT_SECONDS)
