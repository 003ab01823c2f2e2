"""Lookups that are awaited at the same time, in as few requests: a request takes an event loop milliseconds, so that
hundreds of them at once would all be over their budget."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeAlias

from cukiln.errors import BadRequest
from cukiln.job_request import encode
from cukiln.operations.lookups import BUDGETED_PROBLEMS
from cukiln.operations.steps import Ask, OnMissTerms, Prepared
from cukiln.tasks import cancel_all
from cukiln.types import LookedUp

Answers = dict[str, LookedUp]  # by digest
_Key: TypeAlias = tuple[asyncio.AbstractEventLoop, bytes, bytes]
_CLOSED = "the client was closed before it had an answer to this lookup"
_LATE = (
    "a problem that was asked for together with this one was refused, and the time was over before it was known which"
)


@dataclass(frozen=True)
class _Waiting:
    ask: Ask
    answers: "asyncio.Future[Answers]"


class GatheredLookups:
    """What is asked for in one turn of an event loop, with the same options, is asked together by `request`, within
    `seconds` for all of it."""

    def __init__(
        self, request: Callable[[Sequence[Prepared], OnMissTerms], Awaitable[Answers]], seconds: float
    ) -> None:
        self._request, self._seconds = request, seconds
        self._waiting: dict[_Key, list[_Waiting]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

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
            self._forget_closed_loops()
            loop.call_soon(self._send, key)  # behind all that is about to ask in this turn
        return await waiting.answers

    async def close(self) -> None:
        """What is not answered is a `RuntimeError` of its caller, also what is asked from now on."""
        self._closed = True
        self._forget_closed_loops()
        await cancel_all(self._tasks)

    def _forget_closed_loops(self) -> None:
        """Nothing of a loop that was closed is answered any more, and a task that it left undone is in no other."""
        for key in list(self._waiting):
            if key[0].is_closed():
                self._waiting.pop(key, None)
        for task in list(self._tasks):
            if task.get_loop().is_closed():
                self._tasks.discard(task)

    def _send(self, key: _Key) -> None:
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
        if self._closed:
            _fail(part, RuntimeError(_CLOSED))
            return
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._answer(part, loop.time() + self._seconds, first=True))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, part: Sequence[_Waiting], end: float, *, first: bool = False) -> None:
        """Until `end`, by the loop's time; the first request has a budget of its own, whose end the breaker counts."""
        prepared = {each.digest: each for waiting in part for each in waiting.ask.prepared}
        try:
            async with nullcontext() if first else asyncio.timeout_at(end):
                answers = await self._request(list(prepared.values()), part[0].ask.missed)
        except TimeoutError:
            answers = dict.fromkeys(prepared, LookedUp(name=None, key="", record=None, unanswered=_LATE))
        except BadRequest as error:
            if len(part) > 1:  # one of them is refused, and the others are not to suffer by it
                middle = len(part) // 2
                await asyncio.gather(self._answer(part[:middle], end), self._answer(part[middle:], end))
            else:
                _fail(part, error)
            return
        except BaseException as error:
            _fail(part, error)
            if not isinstance(error, Exception):
                raise
            return
        for waiting in part:
            if not waiting.answers.done():  # its caller may have given up
                waiting.answers.set_result({each.digest: answers[each.digest] for each in waiting.ask.prepared})


def _fail(part: Sequence[_Waiting], error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):  # of a caller, it would say that this one was cancelled
        error = RuntimeError(_CLOSED)
    for waiting in part:
        if waiting.answers.done():
            continue
        if isinstance(error, Exception):
            waiting.answers.set_exception(error)
        else:
            waiting.answers.cancel()
