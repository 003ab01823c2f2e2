"""Connections and bodies that never end, or are too much at once, leave room for other requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cukiln.types import JobPage
from service.http import strict_json
from service.http.connections import ConnectionLimits
from service.http.errors import Refused
from service.http.room import Room
from service.http.strict_json import read_json, shape
from service.pages import pages
from service.routes import body, jobs
from tests.support.fixtures.api import MATMUL, Api, serving
from tests.support.fixtures.queue import wait_for

PREFIX = "urn:cukiln:problem:"
HALF_A_HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: "
HALF_A_BODY = (
    b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
)


@pytest.fixture
def few(tmp_path: Path) -> Iterator[Api]:
    """A service with room for twelve connections, which are given up soon."""
    with serving(tmp_path, limits=ConnectionLimits(12, head_seconds=1.0, stalled_seconds=1.0)) as served:
        yield served


@contextlib.contextmanager
def half_open(api: Api, sent: bytes, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", api.port), timeout=10))
            with contextlib.suppress(ConnectionError):  # closed before it has sent anything
                connection.sendall(sent)
            opened.append(connection)
        yield opened


def is_closed(connection: socket.socket) -> bool:
    """After what is left to read; a connection that stays open is a TimeoutError."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(100_000):
            pass
    return True


@pytest.mark.parametrize("sent", [b"", HALF_A_HEAD, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" + HALF_A_HEAD])
def test_a_request_whose_head_does_not_end_is_given_up(few: Api, sent: bytes) -> None:
    with half_open(few, sent, 1) as [connection]:
        if sent.count(b"GET") == 2:
            assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
        assert is_closed(connection)


@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ", 431, "head-too-large"),
        (b"GET /v1/kernels/", 431, "head-too-large"),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "bad-request"),
    ],
)
def test_what_is_no_request_or_too_large_a_one_is_refused_as_any_other(
    api: Api, sent: bytes, status: int, kind: str
) -> None:
    with half_open(api, sent, 1) as [connection]:
        answer = b""
        for _ in range(200 if status == 431 else 0):
            try:
                connection.sendall(b"x" * 1000)
            except ConnectionError:
                break
            threading.Event().wait(0.001)
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(100_000):
                answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"application/problem+json" in head
    assert json.loads(body)["type"] == PREFIX + kind
    assert api.client.get("/healthz").status_code == 200


@contextlib.contextmanager
def watching(api: Api) -> Iterator[socket.socket]:
    """A connection that gets a job's events, of which the first have come. The job ends with the block."""
    job = api.submit().json()["job"]
    with half_open(api, f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), 1) as [found]:
        begun = b""
        while b"event: " not in begun:
            begun += found.recv(10_000)
        yield found
        api.client.delete(f"/v1/jobs/{job}")
        rest = everything(found)
        assert b"event: end" in rest and b"HTTP/1.1" not in rest


def test_a_head_that_never_ends_behind_another_request_is_not_kept(api: Api) -> None:
    with watching(api) as connection:
        protocols: Any = api.server.server_state.connections
        [protocol] = [each for each in protocols if each.cycle and not each.cycle.response_complete]
        connection.sendall(b"GET /" + b"a" * (8 << 20))
        assert len(protocol.url) < 1 << 20


def test_what_is_no_request_behind_another_spoils_no_answer(api: Api) -> None:
    with watching(api) as connection:
        connection.sendall(b"\x01\r\n\r\n")


def test_trailers_that_never_end_are_refused(api: Api) -> None:
    head = HALF_A_BODY.partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: "
    with half_open(api, head, 1) as [connection]:
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"a" * (8 << 20))
        assert everything(connection).startswith(b"HTTP/1.1 431 ")


def test_the_rest_of_a_refused_body_is_no_other_request(api: Api) -> None:
    refused = b"POST /v1/nope HTTP/1.1\r\nHost: localhost\r\nContent-Length: 250000\r\n\r\n" + b"x" * 250_000
    last = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with half_open(api, refused[:100_000], 1) as [connection]:
        assert connection.recv(10_000).startswith(b"HTTP/1.1 404")
        connection.sendall(refused[100_000:] + last)
        assert b"HTTP/1.1 200" in everything(connection)


def test_a_client_that_sends_no_more_is_answered(api: Api) -> None:
    with half_open(api, b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n", 1) as [connection]:
        connection.shutdown(socket.SHUT_WR)
        assert everything(connection).startswith(b"HTTP/1.1 200")


def everything(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def test_a_body_that_continues_after_the_answer_is_given_up(few: Api) -> None:
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
    with half_open(few, head, 1) as [connection]:
        assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConnectionError):
            while True:
                connection.sendall(b"x")
                threading.Event().wait(0.1)


@pytest.mark.parametrize("sent", [HALF_A_HEAD, HALF_A_BODY], ids=["heads", "bodies"])
def test_beyond_the_limit_the_longest_unfinished_gives_way(tmp_path: Path, sent: bytes) -> None:
    with (
        serving(tmp_path, limits=ConnectionLimits(12, head_seconds=600)) as few,
        half_open(few, sent, 60) as connections,
    ):
        assert httpx.get(f"{few.url}/healthz", timeout=10, trust_env=False).status_code == 200
        assert all(map(is_closed, connections[:48]))
        assert len(few.server.server_state.connections) <= 12


def test_a_client_that_takes_nothing_of_its_answer_is_given_up(few: Api) -> None:
    digest = few.blobs.put(bytes(64 << 20), "application/octet-stream").digest
    asked = f"GET /v1/blobs/sha256/{digest} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with half_open(few, asked.encode(), 1):
        wait_for(lambda: len(few.server.server_state.connections) == 1)
        wait_for(lambda: not few.server.server_state.connections, what="the connection is still open")


def test_a_client_that_takes_its_answer_slowly_gets_all_of_it(few: Api) -> None:
    size = 16 << 20
    digest = few.blobs.put(bytes(size), "application/octet-stream").digest
    asked = f"GET /v1/blobs/sha256/{digest} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        connection.connect(("127.0.0.1", few.port))
        connection.sendall(asked)
        taken = 0
        while piece := connection.recv(64 << 10):
            taken += len(piece)
            time.sleep(0.02)
    assert taken > size


def test_of_too_much_that_is_not_taken_the_oldest_is_given_up(tmp_path: Path) -> None:
    with serving(tmp_path, limits=ConnectionLimits(12, 600, 600, unsent_bytes=96 << 20)) as api:
        digest = api.blobs.put(bytes(40 << 20), "application/octet-stream").digest
        asked = f"GET /v1/blobs/sha256/{digest} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with half_open(api, asked.encode(), 1) as [oldest]:
            wait_for(lambda: len(api.server.server_state.connections) == 1)
            time.sleep(0.5)  # its answer is under way
            with half_open(api, asked.encode(), 2):
                wait_for(lambda: len(api.server.server_state.connections) == 3)
                wait_for(lambda: len(api.server.server_state.connections) == 2, what="three answers are held")
                assert is_closed(oldest)


@pytest.mark.parametrize(
    ("method", "path", "module", "report"),
    [
        ("GET", "/v1/jobs/{}", jobs, "job_report"),
        ("DELETE", "/v1/jobs/{}", jobs, "job_report"),
        ("GET", "/v1/jobs/{}/profile", jobs, "profile_page"),
        ("GET", "/jobs/{}", pages, "job_report"),
        ("GET", "/jobs/{}/profile", pages, "profile_page"),
    ],
)
def test_reports_of_jobs_leave_threads_to_other_requests(
    method: str, path: str, module: ModuleType, report: str, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = api.submit().json()["job"]
    free, reported = threading.Event(), []

    def slow_report(*of: Any, **options: Any) -> None:
        reported.append(of)
        free.wait(30)

    monkeypatch.setattr(module, report, slow_report)
    asked = f"{method} {path.format(job)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    try:
        with half_open(api, asked, 60):
            wait_for(lambda: len(reported) == jobs.REPORTS_AT_ONCE)
            assert api.client.post("/v1/lookups", json={"problems": [MATMUL]}, timeout=10).status_code == 200
            time.sleep(0.5)
            assert len(reported) == jobs.REPORTS_AT_ONCE
    finally:
        free.set()


def test_a_probe_is_answered_while_every_thread_is_busy(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    free, entered = threading.Event(), threading.Semaphore(0)

    def slow_list(*args: Any, **options: Any) -> JobPage:
        entered.release()
        free.wait(30)
        return JobPage(jobs=[], next_cursor=None)

    monkeypatch.setattr(jobs, "list_jobs", slow_list)
    with ThreadPoolExecutor(60) as pool:
        calls = [pool.submit(httpx.get, f"{api.url}/v1/jobs", timeout=240, trust_env=False) for _ in range(60)]
        for _ in range(40):  # anyio's threads
            assert entered.acquire(timeout=30)
        try:
            assert api.client.get("/healthz").status_code == 200
        finally:
            free.set()
        assert {call.result().status_code for call in calls} == {200}


def test_a_body_that_comes_too_slowly_is_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "FIRST_SECONDS", 0.2)
    with half_open(api, HALF_A_BODY, 1) as [connection]:
        answer = connection.recv(100_000)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"body-too-slow" in answer
        assert is_closed(connection)


def test_large_bodies_beyond_the_room_wait_and_are_then_refused(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Room(1, wait_seconds=0.2)
    asyncio.run(full._acquire(1))  # another body is being parsed, and never ends
    monkeypatch.setattr(api.service.bodies, "parse", full)
    large = json.dumps({"problems": [{**MATMUL, "name": "x" * 200_000}]}).encode()
    headers = {"Content-Type": "application/json"}
    answer = api.client.post("/v1/jobs", content=large, headers=headers)
    assert (answer.status_code, answer.json()["type"]) == (503, PREFIX + "busy")
    assert int(answer.headers["retry-after"]) > 0
    assert api.submit().status_code == 202, "small ones are not held up"


def test_a_room_is_given_in_turn_and_comes_back_whatever_happens() -> None:
    async def run() -> list[str]:
        room, order = Room(10, wait_seconds=0.2), []

        async def use(name: str, size: int, seconds: float) -> None:
            async with room.take(size):
                order.append(name)
                await asyncio.sleep(seconds)

        async with asyncio.TaskGroup() as group:
            group.create_task(use("all of it", 99, 0.05))
            left = group.create_task(use("left", 5, 9))
            group.create_task(use("next", 8, 0.05))
            group.create_task(use("small, but later", 1, 0.05))
            await asyncio.sleep(0.01)
            left.cancel()
        async with room.take(10):
            with pytest.raises(Refused):
                await use("too late", 1, 0)
        async with room.take(10):
            order.append("again")
        return order

    assert asyncio.run(run()) == ["all of it", "next", "small, but later", "again"]


VALUES = st.recursive(
    st.none() | st.integers() | st.text() | st.just('\\"[{,') | st.just("\\\\"),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=30,
)


@given(VALUES, st.booleans(), st.integers(1, 20))
def test_what_a_body_holds_is_counted_in_its_bytes(value: Any, ascii: bool, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strict_json, "PIECE_BYTES", piece)
        found = shape(json.dumps(value, ensure_ascii=ascii).encode())
    assert (found.depth, found.containers) == counted(value)


def counted(value: Any) -> tuple[int, int]:
    """Levels, and objects and lists, of a value."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
    return 1 + max((depth for depth, _ in inner), default=0), 1 + sum(count for _, count in inner)


@pytest.mark.parametrize(
    "large", [b"[" + b"[]," * 2_000_000 + b"[]]", b"[" + b"{}," * 300_000 + b"0]", b"[" + b"0," * 3_000_000 + b"0]"]
)
def test_a_body_of_too_many_values_is_refused_before_any_is_made(large: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        raise AssertionError("objects were made")

    monkeypatch.setattr(strict_json.json, "loads", parse)
    with pytest.raises(Refused) as refused:
        read_json(large)
    assert (refused.value.faults[0].kind, refused.value.status) == ("too-many-values", 413)
