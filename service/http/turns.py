"""Turns of the event loop: of what many ask for at once a few are begun in each of its rounds, and others' requests are
answered in between. A round with 1,000 requests in it takes a second, and a probe waits for its end."""

import asyncio
from collections import deque

A_ROUND = 8


class Turns:
    """Of one event loop."""

    def __init__(self) -> None:
        self._taken = 0  # in this round
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Returns for at most A_ROUND callers in one round, in their order; at once where it has room."""
        if self._taken >= A_ROUND or self._waiting:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]
        else:
            self._count()

    def _count(self) -> None:
        if self._taken == 0:
            asyncio.get_running_loop().call_soon(self._begin_round)
        self._taken += 1

    def _begin_round(self) -> None:
        self._taken = 0
        while self._waiting and self._taken < A_ROUND:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled
                turn.set_result(None)
                self._count()
