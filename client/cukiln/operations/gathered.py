"""Lookups that are awaited at the same time, in as few requests: a request takes an event loop milliseconds, so that
hundreds of them at once would all be over their budget."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from cukiln.errors import BadRequest
from cukiln.job_request import encode
from cukiln.operations.lookups import BUDGETED_PROBLEMS, OnMissTerms, Prepared
from cukiln.operations.steps import Ask
from cukiln.types import LookedUp

Answers = dict[str, LookedUp]  # by digest


@dataclass(frozen=True)
class _Waiting:
    ask: Ask
    answers: "asyncio.Future[Answers]"


class GatheredLookups:
    """What is asked for in one turn of an event loop, with the same options, is asked together by `request`."""

    def __init__(self, request: Callable[[Sequence[Prepared], OnMissTerms], Awaitable[Answers]]) -> None:
        self._request = request
        self._waiting: dict[tuple[asyncio.AbstractEventLoop, bytes, bytes], list[_Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def answers(self, ask: Ask) -> Answers:
        """Raises what `request` does."""
        shared = ask.prepared[0].shared
        if len(ask.prepared) >= BUDGETED_PROBLEMS or any(prepared.shared != shared for prepared in ask.prepared):
            return await self._request(ask.prepared, ask.missed)
        loop = asyncio.get_running_loop()
        key = loop, encode(shared), encode(ask.missed.fields)
        waiting = _Waiting(ask, loop.create_future())
        together = self._waiting.setdefault(key, [])
        together.append(waiting)
        if len(together) == 1:
            loop.call_soon(self._send, key)  # behind all that is about to ask in this turn
        return await waiting.answers

    def _send(self, key: tuple[asyncio.AbstractEventLoop, bytes, bytes]) -> None:
        part: list[_Waiting] = []
        problems = 0
        for waiting in self._waiting.pop(key):
            count = len(waiting.ask.prepared)
            if problems + count > BUDGETED_PROBLEMS:  # more would have a longer budget
                self._start(part)
                part, problems = [], 0
            part.append(waiting)
            problems += count
        self._start(part)

    def _start(self, part: Sequence[_Waiting]) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(part))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, part: Sequence[_Waiting]) -> None:
        prepared = {each.digest: each for waiting in part for each in waiting.ask.prepared}
        try:
            answers = await self._request(list(prepared.values()), part[0].ask.missed)
        except BadRequest as error:
            if len(part) > 1:  # one of them is refused, and the others are not to suffer by it
                middle = len(part) // 2
                await asyncio.gather(self._answer(part[:middle]), self._answer(part[middle:]))
            else:
                _fail(part, error)
        except BaseException as error:
            _fail(part, error)
            if not isinstance(error, Exception):
                raise
        else:
            for waiting in part:
                if not waiting.answers.done():  # its caller may have given up
                    waiting.answers.set_result({each.digest: answers[each.digest] for each in waiting.ask.prepared})


def _fail(part: Sequence[_Waiting], error: BaseException) -> None:
    for waiting in part:
        if waiting.answers.done():
            continue
        if isinstance(error, Exception):
            waiting.answers.set_exception(error)
        else:
            waiting.answers.cancel()
