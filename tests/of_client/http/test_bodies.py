"""Answers of a broken or hostile service take no more memory than their limit."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from cukiln.cli.elsewhere import export_bundle
from cukiln.client import AsyncClient, Client
from cukiln.errors import UnexpectedAnswer, WaitTimeout
from cukiln.http.bodies import LARGEST_ANSWER, LARGEST_RECORD, largest_lookup
from cukiln.http.refused import retry_after
from tests.support.fixtures.client import MATMUL, ScriptedService, job_json, problem_json, record_json

Clients = Callable[..., Client]
MIB = 2**20


def pieces(count: int) -> Callable[[Request], Response]:
    """So many megabytes of a JSON text, of which nothing says how long it is."""

    def body() -> Iterator[bytes]:
        yield b'{"results": ["'
        for _ in range(count):
            yield b"x" * MIB
        yield b'"]}'

    return lambda request: StreamingResponse(body(), media_type="application/json")


def of_zeros(megabytes: int) -> Response:
    """A few kilobytes that become so many megabytes."""
    body = gzip.compress(bytes(megabytes * MIB), 9)
    return Response(body, media_type="application/json", headers={"Content-Encoding": "gzip"})


@contextmanager
def heads_alone(head: bytes) -> Iterator[str]:
    """The address of a service that answers each request with `head` and nothing else, on a connection for each."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def serve() -> None:
        with suppress(OSError):  # the listener's end
            while True:
                connections.append(listener.accept()[0])
                connections[-1].recv(65536)
                connections[-1].sendall(head)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)
    for each in (listener, *connections):
        each.close()


LIMIT = largest_lookup(1)


@pytest.mark.parametrize("answer", [lambda: pieces(8), lambda: of_zeros(64)], ids=["in pieces", "compressed"])
def test_an_answer_beyond_its_limit_is_a_miss_that_names_it_and_is_never_whole_in_memory(
    answer: Any, scripted: ScriptedService, client_of: Clients
) -> None:
    scripted.on("POST", "/v1/lookups", answer())
    client = client_of(scripted.url, lookup_budget=30.0)
    client.operators  # noqa: B018 - what is imported late is imported before it is counted
    tracemalloc.start()
    (miss,) = client.lookup([MATMUL])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert miss.record is None
    assert f"answers 200 with more, where {LIMIT} bytes are the most that a client reads" in str(miss.unanswered)
    assert peak < 6 * MIB


def test_an_answer_that_says_it_is_too_large_is_not_read() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9999999999999999999\r\n\r\n"
    with heads_alone(head) as url, Client(url, lookup_budget=10.0) as client:
        (miss,) = client.lookup([MATMUL])
        assert f"where {LIMIT} bytes are the most" in str(miss.unanswered)
        for read in (lambda: client.blob("d" * 64), lambda: client.job("job1")):
            with pytest.raises(UnexpectedAnswer, match=f"where {LARGEST_ANSWER} bytes are the most"):
                read()
        with pytest.raises(UnexpectedAnswer, match=f"where {LARGEST_RECORD} bytes are the most"):
            client.kernel("a" * 64)


def test_an_awaited_answer_has_the_same_limit_and_counts_as_a_failure(scripted: ScriptedService) -> None:
    scripted.on("POST", "/v1/lookups", pieces(8))

    async def looked_up() -> list[str]:
        async with AsyncClient(scripted.url, lookup_budget=30.0) as client:
            return [str((await client.lookup([MATMUL]))[0].unanswered) for _ in range(4)]

    *misses, last = asyncio.run(looked_up())
    assert all(f"where {LIMIT} bytes are the most" in miss for miss in misses)
    assert "failed 3 times in a row" in last


def test_errors_have_a_limit_of_their_own(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("GET", "/v1/jobs/job1", problem_json(422, "invalid-value", "x" * 2 * MIB))
    scripted.on("GET", "/v1/jobs/job1/events", problem_json(404, "not-found", "x" * 2 * MIB))
    client = client_of(scripted.url)
    with pytest.raises(UnexpectedAnswer, match=f"answers 422 with .*where {MIB} bytes are the most"):
        client.job("job1")
    with pytest.raises(UnexpectedAnswer, match=f"answers 404 with .*where {MIB} bytes are the most"):
        next(client.events("job1"))


def test_an_event_beyond_its_limit_is_an_error_that_names_it(scripted: ScriptedService, client_of: Clients) -> None:
    endless = Response(b"data: " + b"x" * 2 * MIB, media_type="text/event-stream")
    nested = Response(b"data: " + b"[" * 100_000 + b"\n\n", media_type="text/event-stream")
    scripted.on("GET", "/v1/jobs/job1/events", endless, nested)
    client = client_of(scripted.url)
    with pytest.raises(UnexpectedAnswer, match=f"exceeded the {MIB} byte limit"):
        next(client.events("job1"))
    with pytest.raises(UnexpectedAnswer, match="is not a JSON object"):
        next(client.events("job1"))


def test_events_in_a_broken_encoding_are_an_error_that_says_so(scripted: ScriptedService) -> None:
    broken = Response(b"no gzip", headers={"Content-Encoding": "gzip"}, media_type="text/event-stream")
    scripted.on("GET", "/v1/jobs/job1/events", broken)
    with Client(scripted.url) as client, pytest.raises(UnexpectedAnswer, match="did not answer with an event stream"):
        next(client.events("job1"))

    async def read() -> None:
        async with AsyncClient(scripted.url) as client:
            await anext(client.events("job1"))

    with pytest.raises(UnexpectedAnswer, match="did not answer with an event stream"):
        asyncio.run(read())


def test_comments_without_an_end_do_not_put_off_a_deadline(scripted: ScriptedService, client_of: Clients) -> None:
    async def comments() -> AsyncIterator[bytes]:
        while True:
            yield b": still here\n\n"
            await asyncio.sleep(0.01)

    scripted.on("GET", "/v1/jobs/job1", job_json("running"))
    scripted.on(
        "GET", "/v1/jobs/job1/events", lambda request: StreamingResponse(comments(), media_type="text/event-stream")
    )
    with pytest.raises(WaitTimeout):
        client_of(scripted.url).wait("job1", timeout=0.2)

    async def waited() -> None:
        async with AsyncClient(scripted.url) as client:
            await client.wait("job1", timeout=0.2)

    with pytest.raises(WaitTimeout):
        asyncio.run(waited())


def test_a_list_whose_page_is_followed_by_itself_has_an_end(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("GET", "/v1/jobs", {"jobs": [], "next_cursor": "again"})
    with pytest.raises(UnexpectedAnswer, match="a page is followed by itself"):
        list(client_of(scripted.url).jobs())
    assert len(scripted.seen) == 2


def test_a_list_whose_pages_go_round_has_an_end(scripted: ScriptedService, client_of: Clients) -> None:
    def answer(request: Request) -> Response:
        following = {None: "a", "a": "b", "b": "c", "c": "a"}
        return JSONResponse({"jobs": [], "next_cursor": following[request.query_params.get("cursor")]})

    scripted.on("GET", "/v1/jobs", answer)
    with pytest.raises(UnexpectedAnswer, match="a page is followed by itself, or by one before it"):
        list(client_of(scripted.url).jobs())
    assert len(scripted.seen) == 4


def test_a_bundle_that_is_none_is_no_answer_of_cukilns(
    scripted: ScriptedService, client_of: Clients, tmp_path: Path
) -> None:
    scripted.on("GET", "/v1/jobs/job1/bundle", {"problems": [5]})
    with pytest.raises(UnexpectedAnswer, match="did not answer with a bundle of job job1"):
        export_bundle(client_of(scripted.url), "job1", tmp_path)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"<html>", b"\xff", b'"text"'])
def test_an_answer_without_a_type_that_is_no_json_object_is_none_of_cukilns(
    text: bytes, scripted: ScriptedService, client_of: Clients
) -> None:
    scripted.on("GET", "/v1/jobs/job1/trace", Response(text, media_type="application/json"))
    with pytest.raises(UnexpectedAnswer, match="did not answer as cukiln does"):
        client_of(scripted.url).trace("job1")


def test_many_problems_may_have_a_long_answer(scripted: ScriptedService, client_of: Clients) -> None:
    record = record_json()
    record["front"][0]["schedule"] = {"note": "x" * 200_000}

    def answer(request: Request) -> Response:
        results = [{"name": None, "key": "a" * 64, "record": record}] * len(request.state.seen.json["problems"])
        return JSONResponse({"results": results, "hits": len(results), "misses": 0})

    scripted.on("POST", "/v1/lookups", answer)
    results = client_of(scripted.url, lookup_budget=30.0).lookup([{**MATMUL, "m": m} for m in range(1, 9)])
    assert all(result.record is not None for result in results)
    assert [largest_lookup(count) for count in (1, 100, 10_000)] == [1_310_720, 27_262_976, 512 * MIB]


@pytest.mark.parametrize("date", ["Mon, 01 Jan 99999999999 00:00:00 GMT", "Mon, 01 Jan 2020 00:00:00 +99999999"])
def test_a_date_that_is_none_is_no_retry_after(date: str) -> None:
    assert retry_after(httpx2.Response(503, headers={"Retry-After": date})) is None
