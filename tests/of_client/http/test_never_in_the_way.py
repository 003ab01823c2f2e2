"""A service that is slow, broken or away costs a caller a bounded time, and what was known stays known."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import cukiln
from cukiln.client import AsyncClient, Client
from cukiln.errors import BadRequest, ServiceUnreachable, UnexpectedAnswer, UsageError
from cukiln.http import transport as transports
from cukiln.http.breaker import Breaker
from cukiln.http.limit import Limit
from cukiln.http.seconds import MOST_WAITED
from cukiln.http.transport import CALL_SECONDS, AsyncTransport, Call, Transport
from cukiln.operations.files import LEAST_BYTES_A_SECOND
from cukiln.types import LookedUp, WinnerRecord
from tests.support.fixtures.client import (
    MATMUL,
    ScriptedService,
    closed_port,
    hits,
    job_json,
    problem_json,
    record_json,
    silent_server,
)

Clients = Callable[..., Client]


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1000], ids=["silent", "byte by byte"])
def test_a_lookup_of_a_hung_service_ends_as_a_miss_within_its_budget(answer: bytes) -> None:
    with silent_server(answer) as (url, _), Client(url, lookup_budget=0.2) as client:
        begun = time.monotonic()
        (result,) = client.lookup([MATMUL])
        taken = time.monotonic() - begun
    assert result.record is None
    assert result.unanswered is not None and "no answer" in result.unanswered
    assert taken >= 0.19  # what it is not: at once. How late a busy machine is says nothing of the client.


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_a_budget_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match=r"lookup_budget is .*; (expected seconds from 0 to|more than that is needed)"):
        Client(lookup_budget=seconds)


@pytest.mark.parametrize("seconds", [-1, float("nan"), "1", 2_147_484, 1e12])
@pytest.mark.parametrize("name", ["timeout", "connect_seconds", "lookup_budget", "fresh_seconds"])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_seconds_that_cannot_be_waited_are_refused_when_the_client_is_made(
    kind: Any, name: str, seconds: float
) -> None:
    if (name, seconds) in (("fresh_seconds", 2_147_484), ("fresh_seconds", 1e12)):  # no wait: a winner is fresh so long
        kind(**{name: seconds})
        return
    with pytest.raises(UsageError, match=f"{name} is .*; expected seconds from 0"):
        kind(**{name: seconds})


def test_the_longest_time_is_one_that_a_socket_waits(scripted: ScriptedService) -> None:
    scripted.on("GET", "/v1/jobs/job1", job_json())
    scripted.on("POST", "/v1/lookups", hits())
    times = dict.fromkeys(("timeout", "connect_seconds", "lookup_budget"), MOST_WAITED)
    with Client(scripted.url, **times) as client:
        client.job("job1")
        assert client.lookup([MATMUL])[0].record is not None


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_time_to_wait_for_a_job_that_is_none_is_refused_before_it_is_sent(
    timeout: float, scripted: ScriptedService, client_of: Clients
) -> None:
    client = client_of(scripted.url)
    for call in (lambda: client.tune([MATMUL], timeout=timeout), lambda: client.wait("job1", timeout=timeout)):
        with pytest.raises(UsageError, match=r"timeout is .*; expected seconds from 0 on"):
            call()
    assert not scripted.seen


def test_after_three_failures_nothing_is_sent_until_the_pause_is_over() -> None:
    now = [100.0]
    with silent_server() as (url, accepted):
        transport = Transport(url, breaker=Breaker(now=lambda: now[0]))
        with Client(transport=transport, lookup_budget=0.05) as client:
            for _ in range(5):
                (result,) = client.lookup([MATMUL])
                assert result.record is None
            assert len(accepted) == 3
            assert "failed 3 times in a row" in str(result.unanswered)
            with pytest.raises(ServiceUnreachable, match="was not asked"):
                client.blob("d" * 64)
            now[0] += 30
            client.lookup([MATMUL])  # the one try; it fails
            client.lookup([MATMUL])
            assert len(accepted) == 4


def test_one_answer_closes_the_breaker(scripted: ScriptedService) -> None:
    now = [0.0]
    transport = Transport(scripted.url, breaker=Breaker(now=lambda: now[0]))
    broken = problem_json(500, "failed", "no")
    scripted.on("POST", "/v1/lookups", broken, broken, broken, hits(), broken, broken, hits())
    with Client(transport=transport) as client:
        for _ in range(4):
            assert client.lookup([MATMUL])[0].record is None
        now[0] = 31.0
        assert client.lookup([MATMUL])[0].record is not None
        for m in (5, 6):
            assert client.lookup([{**MATMUL, "m": m}])[0].record is None
        assert client.lookup([{**MATMUL, "m": 7}])[0].record is not None  # two in a row are not three
    assert len(scripted.seen) == 7


def test_a_refused_request_does_not_open_the_breaker(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("POST", "/v1/lookups", problem_json(422, "invalid-value", "m is wrong"))
    client = client_of(scripted.url)
    for _ in range(4):
        with pytest.raises(BadRequest):
            client.lookup([MATMUL])
    assert len(scripted.seen) == 4


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n"


@pytest.mark.parametrize("answer", [b"", HEAD], ids=["silent", "nothing but a head"])
def test_a_library_of_a_hung_service_costs_no_more_than_a_lookup(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[Limit] = []

    def limit(seconds: float) -> Limit:
        limits.append(Limit(seconds))
        return limits[-1]

    monkeypatch.setattr(transports, "Limit", limit)
    record = WinnerRecord.model_validate(record_json())
    with silent_server(answer) as (url, accepted), Client(url, lookup_budget=0.1) as client:
        for _ in range(3):
            with pytest.raises(ServiceUnreachable, match="no answer from the cukiln service"):
                cukiln.load(record, client=client)
        with pytest.raises(ServiceUnreachable, match="failed 3 times in a row"):
            cukiln.load(record, client=client)
        assert client.lookup([MATMUL])[0].unanswered is not None
        assert len(accepted) == 3
    assert all(limit.seconds <= 0.1 + 10 / LEAST_BYTES_A_SECOND for limit in limits) and len(limits) == 3


def test_loads_without_a_client_share_what_they_find_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    record = WinnerRecord.model_validate(record_json())
    with silent_server() as (url, accepted):
        monkeypatch.setenv("CUKILN_URL", url)
        for _ in range(3):
            with pytest.raises(ServiceUnreachable, match="no answer from the cukiln service"):
                cukiln.load(record)
        with pytest.raises(ServiceUnreachable, match="failed 3 times in a row"):
            cukiln.load(record)
        assert len(accepted) == 3
        monkeypatch.setenv("CUKILN_URL", closed_port())
        with pytest.raises(ServiceUnreachable, match="no answer from the cukiln service"):
            cukiln.load(record)  # another service


def test_an_awaited_library_has_the_same_budget() -> None:
    async def asked(url: str) -> None:
        async with AsyncClient(url, lookup_budget=0.1) as client:
            for _ in range(4):
                with pytest.raises(ServiceUnreachable) as caught:
                    await client.blob("d" * 64, patient=False)
            assert "failed 3 times in a row" in str(caught.value)

    with silent_server() as (url, accepted):
        asyncio.run(asked(url))
        assert len(accepted) == 3


@pytest.mark.parametrize(("length", "seconds"), [(b"5", 5 / 2.0), (b"5000000000000000000", CALL_SECONDS), (b"", 0.0)])
def test_a_library_has_time_in_proportion_to_its_size(length: bytes, seconds: float) -> None:
    head = [(b"Content-Length", length)] if length else []
    answer = httpx2.Response(200, headers=head)
    assert Call("GET", "/", seconds=1.0, bytes_a_second=2.0).more_seconds(answer) == seconds
    assert Call("GET", "/", seconds=1.0).more_seconds(answer) == 0.0


def test_a_library_that_comes_slowly_is_waited_for(client_of: Clients) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % 200_000
    go, listener = threading.Event(), socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(head)
        for _ in range(8):  # 0.4 s: more than the budget, less than what 200,000 bytes have
            time.sleep(0.05)
            connection.sendall(bytes(25_000))
        go.wait(10)
        connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    digest = hashlib.sha256(bytes(200_000)).hexdigest()
    client = client_of(f"http://127.0.0.1:{listener.getsockname()[1]}", lookup_budget=0.3)
    assert client.blob(digest, patient=False) == bytes(200_000)
    go.set()
    thread.join(10)
    listener.close()


def test_a_lookup_of_many_problems_is_waited_for_in_proportion(scripted: ScriptedService, client_of: Clients) -> None:
    def late(request: Request) -> Response:
        time.sleep(0.6)
        return hits()(request)

    scripted.on("POST", "/v1/lookups", late)
    client = client_of(scripted.url, lookup_budget=0.3)
    (miss,) = client.lookup([MATMUL])
    assert miss.record is None and miss.unanswered is not None
    client = client_of(scripted.url, lookup_budget=0.3)
    problems = [{**MATMUL, "m": 64 * number} for number in range(1, 1001)]  # ten times as many as have one budget
    assert all(answer.record is not None for answer in client.lookup(problems))


NOT_CUKILNS = [
    Response("<html>Sign in to the network</html>", 200, media_type="text/html"),
    Response('{"results": [{"record": {"key": 1}}]}', 200, media_type="application/json"),
    Response(b"\xff\xfe", 200, media_type="application/json"),
    Response(status_code=302, headers={"Location": "http://127.0.0.1/sign-in"}),
]


@pytest.mark.parametrize("answer", NOT_CUKILNS, ids=["page", "another release's", "no text", "elsewhere"])
def test_an_answer_that_is_not_cukilns_is_a_miss_and_a_failure(
    answer: Response, scripted: ScriptedService, client_of: Clients
) -> None:
    scripted.on("POST", "/v1/lookups", answer)
    client = client_of(scripted.url)
    for _ in range(3):
        (miss,) = client.lookup([MATMUL])
        assert miss.record is None and "did not answer as cukiln does" in str(miss.unanswered)
    assert "failed 3 times in a row" in str(client.lookup([MATMUL])[0].unanswered)
    assert len(scripted.seen) == 3
    with pytest.raises(UnexpectedAnswer):
        client.lookup([MATMUL], refresh=True)


def test_an_awaited_lookup_takes_it_for_a_miss_and_a_failure_too(scripted: ScriptedService) -> None:
    scripted.on("POST", "/v1/lookups", NOT_CUKILNS[0])

    async def looked_up() -> list[LookedUp]:
        async with AsyncClient(scripted.url) as client:
            return [(await client.lookup([MATMUL]))[0] for _ in range(4)]

    assert "failed 3 times in a row" in str(asyncio.run(looked_up())[-1].unanswered)
    assert len(scripted.seen) == 3


def test_of_many_threads_one_makes_the_try() -> None:
    now = [0.0]
    breaker = Breaker(now=lambda: now[0])
    for _ in range(3):
        assert breaker.admits()
        breaker.failed()
    now[0] = 31.0
    assert [breaker.admits() for _ in range(5)] == [True, False, False, False, False]
    breaker.succeeded()
    assert all(breaker.admits() for _ in range(5))


def test_lookups_are_not_repeated_jobs_are(client_of: Clients, waits: list[float]) -> None:
    client = client_of(closed_port(), attempts=3)
    client.lookup([MATMUL])
    assert waits == []
    with pytest.raises(ServiceUnreachable):
        client.job("job1")
    assert len(waits) == 2


def test_a_refresh_raises_what_a_lookup_takes_for_a_miss(client_of: Clients) -> None:
    client = client_of(closed_port(), attempts=1)
    assert client.lookup([MATMUL])[0].unanswered
    with pytest.raises(ServiceUnreachable):
        client.lookup([MATMUL], refresh=True)


def test_a_connection_that_was_closed_meanwhile_is_made_again(scripted: ScriptedService, client_of: Clients) -> None:
    answers = [b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"]
    listener = socket.create_server(("127.0.0.1", 0))
    body = json.dumps({"results": [{"name": None, "key": "a" * 64, "record": None}], "hits": 0, "misses": 1}).encode()
    answers = [b"", b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)]

    def serve() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(answer)
            connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    (result,) = client_of(f"http://127.0.0.1:{listener.getsockname()[1]}").lookup([MATMUL])
    thread.join(5)
    listener.close()
    assert (result.key, result.unanswered) == ("a" * 64, None)


def test_a_child_of_a_fork_has_connections_and_locks_of_its_own(scripted: ScriptedService, client_of: Clients) -> None:
    client, peers = client_of(scripted.url), list[Any]()

    def answer(request: Request) -> Response:
        peers.append(request.client)
        return JSONResponse({"results": [{"name": None, "key": "a" * 64, "record": None}], "hits": 0, "misses": 1})

    scripted.on("POST", "/v1/lookups", answer)  # type: ignore[arg-type]
    client.lookup([MATMUL])
    with client._memory._lock, client._transport.breaker._lock:  # as another thread of the parent may
        if (child := os.fork()) == 0:
            try:
                os._exit(client.lookup([MATMUL])[0].unanswered is not None)
            finally:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.lookup([MATMUL])
    assert len(peers) == 3 and len(set(peers)) == 2 and peers[0] == peers[2]


def test_a_child_of_a_fork_makes_connections_when_it_calls_and_a_closed_client_stays_closed(
    scripted: ScriptedService,
) -> None:
    scripted.on("GET", "/v1/jobs/job1", job_json())
    with Client(scripted.url) as client, Client(scripted.url) as closed:
        client.job("job1")
        closed.close()
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                before = client._transport._client
                job = client.job("job1").job
                with pytest.raises(RuntimeError, match="is closed"):
                    closed.job("job1")
                os.write(writer, f"{before} {job}".encode())
            finally:
                os._exit(0)
        os.close(writer)  # nothing comes where the child fails
        os.waitpid(child, 0)
        assert os.read(reader, 100) == b"None job1"
        os.close(reader)


def test_each_event_loop_has_connections_of_its_own_and_closing_closes_all(scripted: ScriptedService) -> None:
    peers = list[Any]()

    def answer(request: Request) -> Response:
        peers.append(request.client)
        return JSONResponse(job_json())

    scripted.on("GET", "/v1/jobs/job1", answer)  # type: ignore[arg-type]
    client = AsyncClient(scripted.url)
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    for loop in (first, second, first, second):
        assert loop.run_until_complete(client.job("job1")).job == "job1"
    assert peers[:2] == peers[2:] and peers[0] != peers[1]
    third = asyncio.new_event_loop()
    third.run_until_complete(client.job("job1"))
    third.close()
    second.run_until_complete(client.job("job1"))
    of_loops = [client._transport._clients[loop] for loop in (first, second)]
    second.run_until_complete(client.close())
    first.run_until_complete(asyncio.sleep(0))
    assert all(of_loop.is_closed for of_loop in of_loops)
    with pytest.raises(RuntimeError, match="is closed"):
        first.run_until_complete(client.job("job1"))
    first.close()
    second.close()
    reused, loops = AsyncTransport(scripted.url), list[Any]()

    async def send() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await reused.send(Call("GET", "/v1/jobs/job1"))

    for _ in range(3):
        asyncio.run(send())
    gc.collect()
    assert [loop() is None for loop in loops] == [True, True, False]  # of a loop that is closed none is left
    asyncio.run(reused.close())


def test_offline_nothing_is_sent_and_the_cache_answers(scripted: ScriptedService, tmp_path: Any) -> None:
    scripted.on("POST", "/v1/lookups", hits())
    with Client(scripted.url, cache_dir=tmp_path) as client:
        client.lookup([MATMUL])
    with Client(scripted.url, cache_dir=tmp_path, offline=True, fresh_seconds=0) as client:
        assert client.lookup([MATMUL])[0].record is not None
        (miss,) = client.lookup([{**MATMUL, "m": 1}])
        assert "offline" in str(miss.unanswered)
        with pytest.raises(ServiceUnreachable, match="offline"):
            client.job("job1")
        with pytest.raises(ServiceUnreachable, match="offline"):
            next(client.events("job1"))
    assert len(scripted.seen) == 1


def test_a_new_process_finds_what_an_earlier_one_had_without_the_service(
    scripted: ScriptedService, tmp_path: Any
) -> None:
    scripted.on("POST", "/v1/lookups", hits(revision=7))
    with Client(scripted.url, cache_dir=tmp_path) as client:
        client.lookup([MATMUL])
    url = scripted.url
    scripted.on("POST", "/v1/lookups", problem_json(500, "failed", "away"))
    code = (
        "import cukiln, json, sys\n"
        f"with cukiln.Client({url!r}, cache_dir={str(tmp_path)!r}, fresh_seconds=0, connect_seconds=0.01) as client:\n"
        f"    (found,) = client.lookup([json.loads({json.dumps(MATMUL)!r})])\n"
        "print(found.record.revision, found.key, found.age >= 0)"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == f"7 {'a' * 64} True\n"


def test_a_stale_winner_is_answered_at_once_and_asked_for_again(scripted: ScriptedService, client_of: Clients) -> None:
    release = threading.Event()

    def newer(request: Request) -> Response:
        release.wait(10)
        return hits(revision=2)(request)

    scripted.on("POST", "/v1/lookups", hits(), newer)
    client = client_of(scripted.url, fresh_seconds=0, lookup_budget=10.0)
    assert client.lookup([MATMUL])[0].record.revision == 1  # type: ignore[union-attr]
    for _ in range(3):
        assert client.lookup([MATMUL])[0].record.revision == 1  # type: ignore[union-attr]
    release.set()
    deadline = time.monotonic() + 10
    while client.lookup([MATMUL])[0].record.revision == 1 and time.monotonic() < deadline:  # type: ignore[union-attr]
        time.sleep(0.01)
    assert client.lookup([MATMUL])[0].record.revision == 2  # type: ignore[union-attr]


def test_a_winner_that_was_forgotten_is_a_miss_again(scripted: ScriptedService, client_of: Clients) -> None:
    gone = {"results": [{"name": None, "key": "a" * 64, "record": None}], "hits": 0, "misses": 1}
    scripted.on("POST", "/v1/lookups", hits(), gone)
    client = client_of(scripted.url)
    assert client.lookup([MATMUL])[0].record is not None
    assert client.lookup([MATMUL], refresh=True)[0].record is None
    assert client.lookup([MATMUL])[0].record is None


def test_a_prepared_problem_is_looked_up_as_the_problem_itself(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("POST", "/v1/lookups", hits())
    client = client_of(scripted.url)
    bare = {name: value for name, value in MATMUL.items() if name != "target"}
    prepared = client.prepare({**bare, "name": "ffn1"}, target="sm_90a", deterministic=True)
    (answer,) = client.lookup([prepared])
    assert answer.name == "ffn1"
    assert scripted.seen[0].json == {"problems": [{**bare, "name": "ffn1"}], "target": "sm_90a", "deterministic": True}
    assert client.lookup([bare], target="sm_90a", deterministic=True)[0].record == answer.record
    assert len(scripted.seen) == 1


def test_a_record_by_its_key_comes_from_the_cache_where_the_service_is_away(
    scripted: ScriptedService, client_of: Clients
) -> None:
    key = "a" * 64
    first = JSONResponse(record_json(), headers={"ETag": '"r1"'})
    away = problem_json(503, "unavailable", "later")
    scripted.on("GET", f"/v1/kernels/{key}", first, away, Response("<html>", media_type="text/html"))
    client = client_of(scripted.url)
    assert [client.kernel(key).revision for _ in range(3)] == [1, 1, 1]
    assert len(scripted.seen) == 3


def test_the_address_and_the_rest_come_from_a_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cukiln.settings import ClientSettings

    file = tmp_path / "config.toml"
    file.write_text('url = "http://host:1"\noffline = true\ncache_bytes = 5\ncache = "/somewhere"\n')
    settings = ClientSettings.from_environment({"CUKILN_CONFIG": str(file)})
    assert (settings.url, settings.url_from, settings.offline) == ("http://host:1", str(file), True)
    assert (settings.cache_bytes, str(settings.cache_dir)) == (5, "/somewhere")
    over = ClientSettings.from_environment(
        {"CUKILN_CONFIG": str(file), "CUKILN_URL": "http://b:2", "CUKILN_OFFLINE": "0"}
    )
    assert (over.url, over.url_from, over.offline) == ("http://b:2", "CUKILN_URL", False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ulr = 'http://host'", "no setting 'ulr'; allowed: url"),
        ("url = 5", "url is 5; expected"),
        ("url", "cannot be read"),
        ("offline = 'perhaps'", "offline is 'perhaps'"),
    ],
)
def test_a_configuration_that_cannot_be_used_says_why(text: str, message: str, tmp_path: Any) -> None:
    from cukiln.settings import ClientSettings

    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(cukiln.UsageError, match=message):
        ClientSettings.from_environment({"CUKILN_CONFIG": str(tmp_path / "config.toml")})


def test_a_variable_that_cannot_be_used_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKILN_OFFLINE", "perhaps")
    with pytest.raises(cukiln.UsageError, match="CUKILN_OFFLINE is 'perhaps'; allowed: 1 or 0"):
        Client()
