"""Lookups that queue what is missing, and answers of neighbours: never taken for a problem's own winner."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cukiln import AsyncClient, Client, UsageError
from cukiln.lock import make_lock
from cukiln.operations import lookups
from tests.support.fixtures.client import MATMUL, ScriptedService, closed_port, hits, record_json

Clients = Callable[..., Client]
TUNED_FOR = {"key": "b" * 64, "revision": 3, "device_class": "predicted:sm_80", "problem": {"m": 96}, "distance": 1.5}
TUNING = {"job": "f" * 32, "state": "queued"}


def neighbours(revision: int = 0, tuned_for: dict[str, Any] | None = TUNED_FOR) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        problems = request.state.seen.json["problems"]
        record = record_json(revision=revision, tuned_for=tuned_for)
        results = [{"name": None, "key": "a" * 64, "record": record, "tuning": TUNING} for _ in problems]
        return JSONResponse({"results": results, "hits": 0, "misses": len(results)})

    return answer


MISS = {"results": [{"name": None, "key": "a" * 64, "record": None, "tuning": TUNING}], "hits": 0, "misses": 1}


def sent(scripted: ScriptedService) -> list[dict[str, Any]]:
    return [seen.json for seen in scripted.calls("POST", "/v1/lookups")]


def test_what_to_do_about_a_miss_is_sent_and_the_job_is_named(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("POST", "/v1/lookups", MISS)
    client = client_of(scripted.url)
    (plain,) = client.lookup([MATMUL])
    (tuned,) = client.lookup([client.prepare(MATMUL)], on_miss="tune", search={"level": 0}, priority="low")
    assert plain.record is None and tuned.tuning is not None and tuned.tuning.job == "f" * 32
    assert not plain.is_winner and not tuned.is_of_neighbour
    first, second = sent(scripted)
    assert second == {**first, "on_miss": "tune", "search": {"level": 0}, "priority": "low"}
    assert client.lookup([MATMUL], search={"level": 0}) and sent(scripted)[-1] == first


def test_a_neighbours_kernels_are_answered_from_memory_for_a_while(
    scripted: ScriptedService, client_of: Clients
) -> None:
    scripted.on("POST", "/v1/lookups", neighbours())
    client = client_of(scripted.url)
    for _ in range(3):
        (answer,) = client.lookup([MATMUL], on_miss="nearest")
        assert answer.is_of_neighbour and answer.record is not None and answer.record.tuned_for is not None
        assert answer.record.tuned_for.problem == {"m": 96}
    assert len(sent(scripted)) == 1


def test_they_are_no_winner_of_the_problem(scripted: ScriptedService, client_of: Clients, tmp_path: Path) -> None:
    scripted.on("POST", "/v1/lookups", neighbours(), {**MISS}, {**MISS})
    client = client_of(scripted.url)
    client.lookup([MATMUL], on_miss="nearest")
    assert client.lookup([MATMUL])[0].record is None  # which asks for a winner
    assert client.lookup([MATMUL], on_miss="tune")[0].record is None
    assert client.cache.usage().records == 0 and client.cache.answers() == []


def test_they_are_asked_for_again_soon_and_give_way_to_the_winner(
    scripted: ScriptedService, client_of: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def own(request: Request) -> Response:
        asked.set()
        return hits(1)(request)

    scripted.on("POST", "/v1/lookups", neighbours(), own)
    client = client_of(scripted.url)
    client.lookup([MATMUL], on_miss="nearest")
    monkeypatch.setattr(lookups, "NEAREST_SECONDS", 0.0)
    (stale,) = client.lookup([MATMUL], on_miss="nearest")
    assert stale.is_of_neighbour and asked.wait(30)
    assert sent(scripted)[1]["on_miss"] == "nearest"
    while not (answers := client.lookup([MATMUL], on_miss="nearest")[0]).is_winner:
        time.sleep(0.01)
    assert answers.record is not None and answers.record.revision == 1
    assert client.lookup([MATMUL])[0].is_winner
    while client.cache.usage().records == 0:  # it is written after it is remembered
        time.sleep(0.01)


def test_a_winner_that_is_gone_gives_way_to_them(scripted: ScriptedService, tmp_path: Path) -> None:
    scripted.on("POST", "/v1/lookups", hits(1), neighbours(), MISS)
    with Client(scripted.url, cache_dir=tmp_path) as client:
        assert client.lookup([MATMUL])[0].is_winner
        assert client.lookup([MATMUL], on_miss="nearest", refresh=True)[0].is_of_neighbour
        assert client.lookup([MATMUL], on_miss="nearest")[0].is_of_neighbour
        assert client.cache.answers() == []
        assert client.lookup([MATMUL], on_miss="nearest", refresh=True)[0].record is None
    with Client(closed_port(), cache_dir=tmp_path) as client:
        assert client.lookup([MATMUL], on_miss="nearest")[0].unanswered is not None


def test_they_stay_while_the_service_is_away(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("POST", "/v1/lookups", neighbours(), Response(status_code=503))
    client = client_of(scripted.url)
    client.lookup([MATMUL], on_miss="nearest")
    assert client.lookup([MATMUL], on_miss="nearest", refresh=False)[0].is_of_neighbour
    for other in range(3):
        client.lookup([{**MATMUL, "m": other + 1}])
    assert client.lookup([MATMUL], on_miss="nearest")[0].is_of_neighbour


def test_fields_of_records_come_as_the_service_sends_them(scripted: ScriptedService, client_of: Clients) -> None:
    def answer(request: Request) -> Response:
        body = request.state.seen.json
        record = {"revision": 3, "front": [{"so_sha256": "d" * 64}]}
        keys = [str(problem["m"]) for problem in body["problems"]]
        results = [{"name": f"problem{n}", "key": key, "record": record} for n, key in enumerate(keys)]
        return JSONResponse({"results": results, "hits": len(results), "misses": 0})

    scripted.on("POST", "/v1/lookups", answer)
    client = client_of(scripted.url)
    other = client.prepare({**MATMUL, "m": 65, "name": "named"})
    found = client.lookup_fields([other, MATMUL, other], ["revision", "front.so_sha256"], on_miss="nearest")
    assert [(result.name, result.key) for result in found] == [("named", "65"), (None, "64"), ("named", "65")]
    assert found[0].record == {"revision": 3, "front": [{"so_sha256": "d" * 64}]}
    (body,) = sent(scripted)
    assert (body["fields"], body["on_miss"]) == (["revision", "front.so_sha256"], "nearest")
    assert client.cache.answers() == []


def test_the_async_client_does_the_same(scripted: ScriptedService, tmp_path: Path) -> None:
    part = {"results": [{"name": None, "key": "a" * 64, "record": {"key": "k"}}], "hits": 1, "misses": 0}
    scripted.on("POST", "/v1/lookups", neighbours(), part)

    async def ask() -> None:
        async with AsyncClient(scripted.url, cache_dir=tmp_path) as client:
            for _ in range(2):
                (answer,) = await client.lookup([MATMUL], on_miss="nearest")
                assert answer.is_of_neighbour and answer.tuning is not None
            (part,) = await client.lookup_fields([MATMUL], ["key"])
            assert part.record == {"key": "k"}

    asyncio.run(ask())
    assert [body.get("on_miss") for body in sent(scripted)] == ["nearest", None]


def test_no_lock_pins_what_was_tuned_for_another_problem() -> None:
    from cukiln.types import WinnerRecord

    own, lent = (WinnerRecord.model_validate(record_json(tuned_for=of)) for of in (None, TUNED_FOR))
    with pytest.raises(UsageError, match="the kernels of ffn2 were tuned for another problem"):
        make_lock(Path("cukiln.lock"), [{"name": "ffn1"}, {"name": "ffn2"}], [own, lent])
