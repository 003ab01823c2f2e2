"""Lookups that are awaited at the same time are few requests, and each caller has its own answer or error."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from cukiln.client import AsyncClient
from cukiln.errors import BadRequest, NotAuthorised, UnexpectedAnswer
from cukiln.http.transport import AsyncTransport
from cukiln.types import LookedUp
from tests.support.fixtures.client import MATMUL, ScriptedService, closed_port, problem_json, record_json, silent_server

_T = TypeVar("_T")


def by_m(refused: frozenset[int] = frozenset()) -> Callable[[Request], Response]:
    """A winner of each problem, whose key is m; a request with a refused m is refused as a whole."""

    def answer(request: Request) -> Response:
        extents = [problem["m"] for problem in request.state.seen.json["problems"]]
        if wrong := refused.intersection(extents):
            return problem_json(422, "invalid-value", f"m {min(wrong)} is wrong")
        results = [{"name": None, "key": f"{m:064d}", "record": record_json(key=f"{m:064d}")} for m in extents]
        return JSONResponse({"results": results, "hits": len(results), "misses": 0})

    return answer


def looked_up(url: str, ask: Callable[[AsyncClient], Awaitable[_T]], **options: Any) -> _T:
    async def run() -> _T:
        async with AsyncClient(url, **options) as client:
            return await ask(client)

    return asyncio.run(run())


def gathered(*extents: int, **options: Any) -> Callable[[AsyncClient], Awaitable[list[list[LookedUp] | BaseException]]]:
    async def ask(client: AsyncClient) -> list[list[LookedUp] | BaseException]:
        lookups = [client.lookup([{**MATMUL, "m": m}], **options) for m in extents]
        return await asyncio.gather(*lookups, return_exceptions=True)

    return ask


def keys(results: list[list[LookedUp] | BaseException]) -> list[Any]:
    return [result if isinstance(result, BaseException) else int(result[0].key or -1) for result in results]


def test_two_hundred_lookups_are_two_requests(scripted: ScriptedService) -> None:
    scripted.on("POST", "/v1/lookups", by_m())
    extents = range(1, 201)
    results = looked_up(scripted.url, gathered(*extents), lookup_budget=30.0, connect_seconds=30.0)
    assert keys(results) == list(extents)
    assert [len(seen.json["problems"]) for seen in scripted.seen] == [100, 100]


def test_a_refused_one_is_refused_for_its_caller_alone(scripted: ScriptedService) -> None:
    scripted.on("POST", "/v1/lookups", by_m(frozenset({3})))
    answers = keys(looked_up(scripted.url, gathered(*range(1, 9)), lookup_budget=30.0))
    refused = answers.pop(2)
    assert isinstance(refused, BadRequest) and "m 3 is wrong" in str(refused)
    assert answers == [1, 2, 4, 5, 6, 7, 8]


def test_which_one_is_refused_is_asked_no_longer_than_the_budget(scripted: ScriptedService) -> None:
    async def never() -> AsyncIterator[bytes]:
        await asyncio.sleep(20)
        yield b""

    scripted.on("POST", "/v1/lookups", by_m(frozenset({3})), lambda request: StreamingResponse(never()))

    async def ask(client: AsyncClient) -> Any:
        return await gathered(*range(1, 5))(client)

    transport = AsyncTransport(scripted.url)
    answers = looked_up(scripted.url, ask, lookup_budget=0.5, transport=transport)
    assert all("refused, and the time was over" in answer[0].unanswered for answer in answers)
    assert len(scripted.seen) == 3 and not transport.breaker.open


def test_a_record_that_is_none_is_a_miss_of_its_caller_alone(scripted: ScriptedService) -> None:
    def answer(request: Request) -> Response:
        body = json.loads(bytes(by_m()(request).body))
        for result in body["results"]:
            if int(result["key"]) == 3:
                result["record"] = {"front": "none"}
        return JSONResponse(body)

    scripted.on("POST", "/v1/lookups", answer)
    answers: Any = looked_up(scripted.url, gathered(*range(1, 5)), lookup_budget=30.0)
    assert keys(answers) == [1, 2, -1, 4] and len(scripted.seen) == 1
    assert "did not answer as cukiln does (record.key: Field required)" in answers[2][0].unanswered
    with pytest.raises(UnexpectedAnswer):
        looked_up(scripted.url, lambda client: client.lookup([{**MATMUL, "m": m} for m in (1, 3)], refresh=True))


def test_a_client_that_is_closed_keeps_no_caller_waiting(scripted: ScriptedService) -> None:
    async def run(url: str, accepted: list[Any]) -> Any:
        client = AsyncClient(url, lookup_budget=60.0)
        waiting = asyncio.gather(*[client.lookup([{**MATMUL, "m": m}]) for m in (1, 2)], return_exceptions=True)
        while not accepted:
            await asyncio.sleep(0.005)
        unsent = asyncio.ensure_future(client.lookup([{**MATMUL, "m": 3}]))
        await asyncio.sleep(0)
        await client.close()
        return [*await waiting, *await asyncio.gather(unsent, return_exceptions=True)], asyncio.all_tasks()

    with silent_server() as (url, accepted):
        answers, tasks = asyncio.run(asyncio.wait_for(run(url, accepted), 50))
    assert all(isinstance(answer, RuntimeError) and "closed" in str(answer) for answer in answers)
    assert not any("_answer" in repr(task) for task in tasks)


def test_a_loop_that_ends_before_it_sends_is_let_go(scripted: ScriptedService) -> None:
    scripted.on("POST", "/v1/lookups", by_m())
    client = AsyncClient(scripted.url, lookup_budget=30.0)
    loop = asyncio.new_event_loop()
    task = loop.create_task(client.lookup([MATMUL]))  # type: ignore[arg-type]
    task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's warning is what is played here
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    ended = weakref.ref(loop)
    del loop, task
    gc.collect()
    assert ended() is not None  # what waits to be sent has it
    assert keys(asyncio.run(gathered(1)(client))) == [1]
    gc.collect()
    assert ended() is None
    asyncio.run(client.close())


def test_a_key_that_is_refused_is_refused_for_all_at_once(scripted: ScriptedService) -> None:
    scripted.on("POST", "/v1/lookups", problem_json(401, "not-authorised", "a key is needed"))
    answers = keys(looked_up(scripted.url, gathered(*range(1, 9)), lookup_budget=30.0))
    assert all(isinstance(answer, NotAuthorised) for answer in answers) and len(scripted.seen) == 1


def test_other_options_are_another_request(scripted: ScriptedService) -> None:
    scripted.on("POST", "/v1/lookups", by_m())

    async def ask(client: AsyncClient) -> Any:
        one, two = {**MATMUL, "m": 1}, {**MATMUL, "m": 2}
        return await asyncio.gather(
            client.lookup([one]), client.lookup([one, two], deterministic=True), client.lookup([two], on_miss="tune")
        )

    assert [[int(result.key) for result in results] for results in looked_up(scripted.url, ask)] == [[1], [1, 2], [2]]
    assert sorted(sorted(seen.json.keys() - {"problems"}) for seen in scripted.seen) == [
        [],
        ["deterministic"],
        ["on_miss"],
    ]


def test_a_caller_that_gives_up_takes_no_others_answer(scripted: ScriptedService) -> None:
    scripted.on("POST", "/v1/lookups", by_m())

    async def ask(client: AsyncClient) -> Any:
        tasks = [asyncio.create_task(client.lookup([{**MATMUL, "m": m}])) for m in (1, 2, 3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third = looked_up(scripted.url, ask, lookup_budget=30.0)
    assert isinstance(second, asyncio.CancelledError)
    assert keys([first, third]) == [1, 3]


def test_a_service_that_is_away_is_a_miss_for_all_and_one_failure() -> None:
    results = looked_up(closed_port(), gathered(*range(1, 51)))
    assert all(not isinstance(result, BaseException) and result[0].unanswered for result in results)
    assert "no answer" in str(results[0][0].unanswered)  # type: ignore[index]


def test_an_event_loop_that_is_held_up_while_it_connects_is_no_failure(
    scripted: ScriptedService,
) -> None:
    scripted.on("POST", "/v1/lookups", by_m())

    async def ask(client: AsyncClient) -> Any:
        loop = asyncio.get_running_loop()
        connect = loop.create_connection

        async def held_up(*arguments: Any, **options: Any) -> Any:
            loop.create_connection = connect  # type: ignore[method-assign]
            connecting = asyncio.ensure_future(connect(*arguments, **options))
            await asyncio.sleep(0)
            time.sleep(0.2)
            return await connecting

        loop.create_connection = held_up  # type: ignore[method-assign, assignment]
        return await client.lookup([{**MATMUL, "m": 5}])

    (result,) = looked_up(scripted.url, ask, connect_seconds=0.05, lookup_budget=30.0)
    assert (int(result.key or -1), result.unanswered) == (5, None)


def test_lookups_of_several_loops_do_not_wait_for_each_other(scripted: ScriptedService) -> None:
    scripted.on("POST", "/v1/lookups", by_m())
    client = AsyncClient(scripted.url, lookup_budget=30.0)
    loops = [asyncio.new_event_loop() for _ in range(2)]
    for m, loop in enumerate(loops, 1):
        assert keys(loop.run_until_complete(gathered(m, m + 10)(client))) == [m, m + 10]
    loops[0].run_until_complete(client.close())
    for loop in loops:
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


@pytest.mark.parametrize("count", [100, 101])
def test_a_lookup_of_many_problems_stays_one_request(count: int, scripted: ScriptedService) -> None:
    scripted.on("POST", "/v1/lookups", by_m())
    problems = [{**MATMUL, "m": m} for m in range(1, count + 1)]
    results = looked_up(scripted.url, lambda client: client.lookup(problems), lookup_budget=30.0)
    assert [int(result.key) for result in results] == list(range(1, count + 1)) and len(scripted.seen) == 1
