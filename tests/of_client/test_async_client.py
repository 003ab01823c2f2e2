"""The client for asyncio does what the blocking one does: both take the same steps."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse

from cukiln import AsyncClient, AsyncTransport, BadRequest, Client, Progress, ServiceUnreachable, WaitTimeout
from tests.support.fixtures.client import (
    DONE,
    EVENTS,
    MATMUL,
    ScriptedService,
    closed_port,
    hits,
    job_json,
    message,
    problem_json,
    progress_json,
    silent_server,
    stream,
)


def run(steps: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(steps)


def test_both_clients_have_the_same_methods() -> None:
    def public(kind: type) -> dict[str, str]:
        return {name: str(inspect.signature(m)) for name, m in inspect.getmembers(kind, callable) if name[0] != "_"}

    ours, theirs = public(Client), public(AsyncClient)
    assert ours.keys() == theirs.keys()
    assert {name for name in ours if ours[name] != theirs[name]} == {"events"}  # Iterator, AsyncIterator
    for name in ours:
        assert getattr(Client, name).__doc__, name


def test_one_client_may_be_used_in_several_event_loops(scripted: ScriptedService, tmp_path: Path) -> None:
    scripted.on("POST", "/v1/lookups", hits())
    client = AsyncClient(scripted.url, cache_dir=tmp_path, lookup_budget=10)

    async def looked_up() -> Any:
        return await client.lookup([MATMUL], refresh=True)

    for _ in range(3):
        assert run(looked_up())[0].record is not None
    run(client.close())


def test_a_job_is_tuned_and_followed(scripted: ScriptedService, tmp_path: Path) -> None:
    scripted.on("POST", "/v1/jobs", job_json("queued"))
    scripted.on("GET", EVENTS, stream(message("1-0", "progress", progress_json(2))), stream(DONE))
    scripted.on("GET", "/v1/jobs/job1", job_json("done"))
    seen: list[Progress] = []
    waited: list[float] = []

    async def steps() -> Any:
        transport = AsyncTransport(scripted.url)

        async def sleep(seconds: float) -> None:
            waited.append(seconds)

        transport.sleep = sleep
        async with AsyncClient(transport=transport, cache_dir=tmp_path) as client:
            return await client.tune([MATMUL], progress=seen.append)

    assert run(steps()).state == "done"
    assert [progress.verify.done for progress in seen] == [0, 2, 4]
    assert len(waited) == 1
    assert scripted.calls("GET", EVENTS)[1].headers["last-event-id"] == "1-0"


def test_waiting_ends_at_its_timeout(scripted: ScriptedService, tmp_path: Path) -> None:
    scripted.on("GET", "/v1/jobs/job1", job_json("running"))
    scripted.on("GET", EVENTS, stream(": nothing\n\n"))

    async def steps() -> None:
        async with AsyncClient(scripted.url, cache_dir=tmp_path, attempts=100) as client:
            await client.wait("job1", timeout=0.1)

    with pytest.raises(WaitTimeout):
        run(steps())


def test_pages_are_iterated(scripted: ScriptedService, tmp_path: Path) -> None:
    job = {"job": "job1", "state": "done", "cached": False, "created_at": 1.0, "problem_count": 1}
    first = JSONResponse({"jobs": [job], "next_cursor": "c"})
    scripted.on("GET", "/v1/jobs", first, JSONResponse({"jobs": [{**job, "job": "job2"}]}))

    async def steps() -> list[str]:
        async with AsyncClient(scripted.url, cache_dir=tmp_path) as client:
            return [job.job async for job in client.jobs(state="done")]

    assert run(steps()) == ["job1", "job2"]


def test_lookups_are_cached_and_revalidated(scripted: ScriptedService, tmp_path: Path) -> None:
    scripted.on("POST", "/v1/lookups", hits(1), hits(2))

    async def steps() -> list[int]:
        async with AsyncClient(scripted.url, cache_dir=tmp_path, fresh_seconds=0) as client:
            revisions = []
            for _ in range(2):
                (answer,) = await client.lookup([MATMUL])
                revisions.append(answer.record.revision)
            while len(scripted.seen) < 2 or (await client.lookup([MATMUL]))[0].record.revision == 1:
                await asyncio.sleep(0.01)
            return revisions

    assert run(asyncio.wait_for(steps(), 20)) == [1, 1]


def test_a_service_that_is_away_is_a_miss(tmp_path: Path) -> None:
    async def steps(url: str) -> str | None:
        async with AsyncClient(url, cache_dir=tmp_path, lookup_budget=0.1, attempts=1) as client:
            (miss,) = await client.lookup([MATMUL])
            with pytest.raises(ServiceUnreachable):
                await client.job("job1") if url != silent else await client.kernel("a" * 64)
            return miss.unanswered

    with silent_server() as (silent, _):
        assert "no answer" in run(steps(silent))
        assert "no answer" in run(steps(closed_port()))


def test_a_refusal_is_the_same_error(scripted: ScriptedService, tmp_path: Path) -> None:
    scripted.on("POST", "/v1/jobs", problem_json(422, "invalid-value", "no"))

    async def steps() -> None:
        async with AsyncClient(scripted.url, cache_dir=tmp_path) as client:
            await client.submit({"problems": [MATMUL]})

    with pytest.raises(BadRequest):
        run(steps())
