"""Requests that come at the same time: answered together, each with its own outcome."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
from sqlalchemy import func, select

from service import context
from service.routes import accept_job
from service.threads import Together
from storage.database.tables import JobRow, TaskRow
from tests.support.fixtures.api import MATMUL, Api, publish, serving
from tests.support.fixtures.storage import counted_statements


class Work:
    """Doubles numbers once it may; what each batch held."""

    def __init__(self) -> None:
        self.may, self.batches = threading.Event(), list[list[int]]()

    def __call__(self, numbers: Sequence[int]) -> list[int | Exception]:
        self.batches.append(list(numbers))
        assert self.may.wait(30)
        if 99 in numbers:
            raise ArithmeticError("all of them")
        return [ValueError(str(number)) if number < 0 else 2 * number for number in numbers]


def run(scenario: Callable[[Together[int, int], Work], Coroutine[Any, Any, None]], most: int = 10) -> None:
    async def whole() -> None:
        work = Work()
        together = Together[int, int]("test", work, most)
        try:
            await scenario(together, work)
        finally:
            together.close()

    asyncio.run(whole())


def test_what_comes_while_a_batch_is_worked_on_is_the_next_batch() -> None:
    async def scenario(together: Together[int, int], work: Work) -> None:
        asked = [asyncio.ensure_future(together.do(number)) for number in range(6)]
        await asyncio.sleep(0)
        work.may.set()
        assert await asyncio.gather(*asked) == [0, 2, 4, 6, 8, 10]
        assert work.batches == [[0], [1, 2, 3], [4, 5]]
        assert await together.do(7) == 14

    run(scenario, most=3)


def test_one_that_is_refused_leaves_the_others_alone() -> None:
    async def scenario(together: Together[int, int], work: Work) -> None:
        work.may.set()
        outcomes = await asyncio.gather(*(together.do(number) for number in (1, -2, 3)), return_exceptions=True)
        assert [outcomes[0], str(outcomes[1]), outcomes[2]] == [2, "-2", 6]

    run(scenario)


def test_what_fails_as_a_whole_fails_for_each_and_the_next_batch_is_worked_on() -> None:
    async def scenario(together: Together[int, int], work: Work) -> None:
        asked = [asyncio.ensure_future(together.do(number)) for number in (1, 99, 3)]
        await asyncio.sleep(0)
        work.may.set()
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [int, ArithmeticError, ArithmeticError]
        assert await together.do(4) == 8

    run(scenario)


def test_a_caller_that_leaves_does_not_hold_up_the_others() -> None:
    async def scenario(together: Together[int, int], work: Work) -> None:
        gone, stays = (asyncio.ensure_future(together.do(number)) for number in (1, 2))
        await asyncio.sleep(0)
        gone.cancel()
        work.may.set()
        assert await stays == 4
        with pytest.raises(asyncio.CancelledError):
            await gone

    run(scenario)


def test_a_close_ends_what_is_not_begun_and_what_is_begun_has_its_result() -> None:
    async def scenario(together: Together[int, int], work: Work) -> None:
        begun, waits = (asyncio.ensure_future(together.do(number)) for number in (1, 2))
        await asyncio.sleep(0)
        together.close()
        with pytest.raises(asyncio.CancelledError):
            await waits
        work.may.set()
        assert await begun == 2

    run(scenario)


# ---- jobs that are sent at once


def hold(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The first batch of jobs is worked on once this is set."""
    begin, real = threading.Event(), accept_job.read_request

    def later(*arguments: Any) -> Any:
        assert begin.wait(30)
        return real(*arguments)

    monkeypatch.setattr(accept_job, "read_request", later)
    return begin


def at_once(api: Api, begin: threading.Event, bodies: Sequence[dict[str, Any]]) -> list[httpx.Response]:
    """The answers to bodies, all but the first of which are one batch."""
    submissions = api.server.config.app.state.submissions  # type: ignore[union-attr]
    do = patch.object(submissions, "do", wraps=submissions.do)
    with ThreadPoolExecutor(len(bodies)) as callers, do as asked_for:
        asked = [callers.submit(httpx.post, f"{api.url}/v1/jobs", json=body, timeout=240) for body in bodies]
        while asked_for.call_count < len(bodies):
            time.sleep(0.01)
        begin.set()
        return [each.result() for each in asked]


def test_equal_jobs_that_are_sent_at_once_are_jobs_of_their_own(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = hold(monkeypatch)
    with counted_statements(api.service.database) as statements:
        answers = at_once(api, begin, [{"problems": [MATMUL]}] * 20)
    jobs = [answer.json() for answer in answers]
    assert {answer.status_code for answer in answers} == {202}
    assert len({job["job"] for job in jobs}) == 20
    assert all(
        answer.headers["location"] == f"/v1/jobs/{job['job']}" for answer, job in zip(answers, jobs, strict=True)
    )
    for job in jobs:
        assert api.client.get(f"/v1/jobs/{job['job']}").json() == job
    with api.database.read() as session:
        assert session.scalar(select(func.count()).select_from(JobRow)) == 20
        assert session.scalar(select(func.count()).select_from(TaskRow)) == 20
    assert sum("BEGIN IMMEDIATE" in statement for statement in statements) == 2


def test_a_wrong_job_and_one_too_many_are_refused_beside_those_that_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = hold(monkeypatch)
    with serving(tmp_path, max_queued_jobs=3) as api:
        publish(api.database, {**MATMUL, "m": 1})
        wrong, cached = {"problems": [{**MATMUL, "m": 0}]}, {"problems": [{**MATMUL, "m": 1}]}
        bodies = [{"problems": [{**MATMUL, "m": m}]} for m in range(10, 15)]
        answers = at_once(api, begin, [*bodies, wrong, cached])
    states = [answer.status_code for answer in answers]
    assert (sorted(states[:5]), states[5], states[6]) == ([202, 202, 202, 429, 429], 422, 200)
    assert answers[5].json()["field"] == "problems[0].m"


def test_a_batch_that_cannot_be_written_is_answered_so_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "BUSY_SECONDS", 0.1)
    begin = hold(monkeypatch)
    with serving(tmp_path) as api:
        lock = sqlite3.connect(str(api.database.url.database), isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        answers = at_once(api, begin, [{"problems": [MATMUL]}] * 5)
        lock.execute("ROLLBACK")
        lock.close()
        assert {answer.status_code for answer in answers} == {503}
        assert api.rows()["jobs"] == 0
        assert api.submit().status_code == 202
