"""Large bodies are answered by the API's second process: as in the first, and without holding it up."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.http import large_bodies
from service.http.connections import without_upgrade
from service.http.large_bodies import CONNECTIONS, OWN_BYTES, BodyProcess
from service.keyring import WRONG_KEYS
from storage.config.settings import Settings, load_settings
from tests.support.fixtures.queue import wait_for
from tests.support.processes.running import still_runs
from tests.support.run.each_run import some_each_run
from workers.processes.supervised_process import answers
from workers.supervisor.serve import child_environment
from workers.supervisor.start_checks import free_port

JSON = {"Content-Type": "application/json"}
PROBLEM = {"operator": "matmul", "m": 64, "n": 48, "k": 32}


@dataclass
class RunningApi:
    settings: Settings
    process: subprocess.Popen[bytes]
    client: httpx.Client

    def second(self) -> psutil.Process:
        [found] = psutil.Process(self.process.pid).children()
        return found

    def post(self, path: str, content: Any) -> httpx.Response:
        return self.client.post(path, content=content, headers=JSON)


@contextmanager
def running_api(folder: Path, **more: Any) -> Iterator[RunningApi]:
    settings = load_settings(data_dir=folder, port=free_port("127.0.0.1"), gpus="none", max_body_bytes=2**20, **more)
    with (folder / "api.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "service"], env=child_environment(settings), stderr=log)
    url = f"http://127.0.0.1:{settings.port}"
    try:
        wait_for(lambda: answers("127.0.0.1", settings.port), what="the API")
        with httpx.Client(base_url=url, timeout=240, trust_env=False) as client:
            yield RunningApi(settings, process, client)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApi]:
    with running_api(tmp_path_factory.mktemp("api")) as found:
        yield found


@pytest.fixture
def api(tmp_path: Path) -> Iterator[RunningApi]:
    """One that may be killed."""
    with running_api(tmp_path) as found:
        yield found


def large(problem: dict[str, Any]) -> bytes:
    """More than the first process reads itself."""
    problems = [{**problem, "name": "n" * 200 + str(number)} for number in range(2_000)]
    body = json.dumps({"problems": problems}).encode()
    assert len(body) > OWN_BYTES
    return body


def type_of(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json"
    return str(answer.json()["type"]).rpartition(":")[2]


def test_a_large_body_is_answered_as_a_small_one(shared: RunningApi) -> None:
    accepted = shared.post("/v1/jobs", large(PROBLEM))
    assert accepted.status_code == 202, accepted.text
    assert len(accepted.headers.get_list("date")) == 1
    job = accepted.json()["job"]
    assert shared.client.get(accepted.headers["location"]).json()["job"] == job
    found = shared.post("/v1/lookups", large(PROBLEM))
    assert (found.status_code, found.json()["misses"]) == (200, 2_000)
    wrong = shared.post("/v1/jobs", large({**PROBLEM, "m": 0}))
    assert (wrong.status_code, type_of(wrong)) == (422, "invalid-value")
    assert wrong.json()["field"] == "problems[0].m"
    unknown = shared.post("/v1/lookups?colour=1", large(PROBLEM))
    assert (unknown.status_code, type_of(unknown)) == (422, "unknown-field")


def test_too_large_a_body_is_refused_whether_its_length_is_sent_or_not(shared: RunningApi) -> None:
    body = b'["' + b"x" * 2**20 + b'"]'
    for content in (body, iter([body[: 2**19], body[2**19 :]])):
        refused = shared.post("/v1/jobs", content)
        assert (refused.status_code, type_of(refused)) == (413, "body-too-large")


def test_a_body_of_unknown_length_is_read(shared: RunningApi) -> None:
    answer = shared.post("/v1/jobs", iter([b'{"problems": ', b"[]}"]))
    assert (answer.status_code, type_of(answer)) == (422, "invalid-value")


def raw(api: RunningApi) -> socket.socket:
    return socket.create_connection(("127.0.0.1", api.settings.port), timeout=240)


def head(length: str, path: str = "/v1/lookups") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{length}\r\n\r\n".encode()


def all_of(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_a_connection_may_have_had_other_requests(shared: RunningApi) -> None:
    body = large(PROBLEM)
    whole = head(f"Content-Length: {len(body)}") + body
    with raw(shared) as connection:
        connection.sendall(GET)
        first = b""
        while not first.endswith(b"}}"):
            first += connection.recv(1 << 16)
        connection.sendall(whole[:100])
        time.sleep(0.05)
        connection.sendall(whole[100:])
        answer = all_of(connection)  # it is closed after it: the second process answers nothing else
    assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer
    assert b'"misses":2000' in answer


@pytest.mark.parametrize("before", [GET, GET * 3, head("Content-Length: 2") + b"{}"])
def test_a_large_body_right_behind_another_request_is_not_read(shared: RunningApi, before: bytes) -> None:
    """The first process would have to keep it; a client that meets a closed connection sends it again."""
    body = large(PROBLEM)
    whole = before + head(f"Content-Length: {len(body)}") + body
    with raw(shared) as connection:
        connection.sendall(whole[: len(before) + 50])
        time.sleep(0.05)
        with suppress(ConnectionError):
            connection.sendall(whole[len(before) + 50 :])
        answer = all_of(connection)
    assert answer.count(b"HTTP/1.1 ") in (before.count(b"HTTP/1.1"), before.count(b"HTTP/1.1") + 1)
    assert b'"misses"' not in answer
    if answer.count(b"HTTP/1.1 ") > before.count(b"HTTP/1.1"):
        assert answer.rpartition(b"HTTP/1.1 ")[2].startswith(b"503")
    with raw(shared) as connection:
        connection.sendall(before + head(f"Content-Length: {len(body)}") + body[:1000])
        answer = all_of(connection)
    assert answer.count(b"HTTP/1.1 ") == before.count(b"HTTP/1.1") and b"connection: close" in answer


def test_a_large_body_behind_one_that_was_refused_unread_is_answered(shared: RunningApi) -> None:
    """The client has the answer before it has sent all of the first request."""
    body = large(PROBLEM)
    refused = head("Content-Length: 2").replace(b"application/json", b"text/plain")
    with raw(shared) as connection:
        connection.sendall(refused)
        first = connection.recv(1 << 16)
        assert first.startswith(b"HTTP/1.1 415")
        connection.sendall(b"{}" + head(f"Content-Length: {len(body)}") + body)
        answer = all_of(connection)
    assert b'"misses":2000' in answer


def test_what_comes_behind_a_large_body_is_not_taken_for_it(shared: RunningApi) -> None:
    body = b'c\r\n{"problems":\r\n3\r\n[]}\r\n0\r\n\r\n'
    with raw(shared) as connection:
        connection.sendall(head("Transfer-Encoding: chunked") + body + GET)
        answer = all_of(connection)
    assert answer.count(b"HTTP/1.1 ") == 1 and b"problems" in answer and answer.startswith(b"HTTP/1.1 422")


def test_wrong_keys_are_counted_together_whatever_the_size_of_the_body(tmp_path: Path) -> None:
    operator, wrong = "correct horse battery staple", {**JSON, "Authorization": "Bearer a wrong one"}
    with running_api(tmp_path, api_key=operator) as api:
        bodies = [large(PROBLEM), b'{"problems": []}'] * WRONG_KEYS
        answers = [api.client.post("/v1/jobs", content=body, headers=wrong) for body in bodies[: WRONG_KEYS + 2]]
        assert [answer.status_code for answer in answers] == [401] * WRONG_KEYS + [429] * 2
        assert {type_of(answer) for answer in answers} == {"unauthorized", "too-many-wrong-keys"}
        right = {**JSON, "Authorization": f"Bearer {operator}"}
        assert api.client.post("/v1/lookups", content=large(PROBLEM), headers=right).status_code == 429
        with httpx.Client(
            base_url=api.client.base_url, transport=httpx.HTTPTransport(local_address="127.0.0.9"), timeout=240
        ) as other:
            assert other.post("/v1/lookups", content=large(PROBLEM), headers=right).status_code == 200
            none = other.post("/v1/lookups", content=large(PROBLEM), headers=JSON)
            assert (none.status_code, type_of(none)) == (401, "unauthorized")


@pytest.mark.parametrize("url", ["http://localhost/v1/lookups", "/v1/%6cookups", "/v1/lookups?x"])
def test_a_path_may_be_spelt_in_other_ways(shared: RunningApi, url: str) -> None:
    body = large(PROBLEM)
    with raw(shared) as connection:
        connection.sendall(head(f"Content-Length: {len(body)}", url) + body)
        assert b"connection: close" in all_of(connection).partition(b"\r\n\r\n")[0]


UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUPGRADE: h2c\r\nHTTP2-Settings: AAMAAABk"


@pytest.mark.parametrize("cut", [*range(-2, len("\r\nUPGRADE: ")), -4, -3])
def test_an_offer_of_http_2_may_come_in_pieces(shared: RunningApi, cut: int) -> None:
    body = json.dumps({"problems": [PROBLEM]}).encode()
    sent = head(f"Content-Length: {len(body)}\r\nConnection: Upgrade\r\nUPGRADE: h2c")
    cut = len(sent) + cut if cut < 0 else sent.index(b"\r\nUPGRADE") + cut
    with raw(shared) as connection:
        for piece in (sent[:cut], sent[cut:], body):
            connection.sendall(piece)
            time.sleep(0.02)
        answer = more = connection.recv(1 << 16)
        while more and b'"misses":1' not in answer:
            answer += (more := connection.recv(1 << 16))
        assert answer.startswith(b"HTTP/1.1 200") and b'"misses":1' in answer


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("lines", ["Upgrade: h2c\r\nX: y", "X: upgrade\r\nUp: grade\r\nX-Upgrade: z", "X:\r\nUPGRADE:"])
def test_pieces_of_a_head_are_what_the_whole_is(size: int, lines: str) -> None:
    sent = head(lines)
    passed = begun = b""
    for first in range(0, len(sent), size):
        piece, begun = without_upgrade(begun + sent[first : first + size])
        passed += piece
    assert (passed, begun) == without_upgrade(sent)
    assert b"\r\nupgrade:" not in passed.lower() and len(passed) == len(sent)


@pytest.mark.parametrize("spaces", [0, 2 * OWN_BYTES])
def test_a_request_that_offers_http_2_is_read_with_its_body(shared: RunningApi, spaces: int) -> None:
    body = b" " * spaces + json.dumps({"problems": [PROBLEM]}).encode()
    with raw(shared) as connection:
        connection.sendall(head(f"{UPGRADE}\r\nContent-Length: {len(body)}"))
        time.sleep(0.05)
        connection.sendall(body)
        answer = more = connection.recv(1 << 16)
        while more and b'"misses":1' not in answer:
            answer += (more := connection.recv(1 << 16))
        assert answer.startswith(b"HTTP/1.1 200") and b'"misses":1' in answer
    with raw(shared) as connection:  # and so is what comes after one without
        connection.sendall(GET[:-2] + UPGRADE.encode() + b"\r\n\r\n")
        first = b""
        while not first.endswith(b"}}"):
            first += connection.recv(1 << 16)
        assert first.startswith(b"HTTP/1.1 200")
        connection.sendall(GET[:-2] + b"Connection: close\r\n\r\n")
        assert all_of(connection).startswith(b"HTTP/1.1 200")


def test_few_large_bodies_are_under_way_at_once(shared: RunningApi) -> None:
    with ExitStack() as stack:
        for _ in range(CONNECTIONS + 40):
            stack.enter_context(raw(shared)).sendall(head("Content-Length: 300000"))
        wait_for(lambda: connections_of(shared.second()) >= CONNECTIONS, what="the connections")
        assert shared.client.get("/healthz").status_code == 200
        wait_for(lambda: connections_of(shared.second()) <= CONNECTIONS, 3.0, "an end of those beyond them")


def test_what_is_no_request_is_not_logged_each_time(shared: RunningApi) -> None:
    for _ in range(30):
        with raw(shared) as connection:
            connection.sendall(b"\x01\r\n\r\n")
            assert all_of(connection).startswith(b"HTTP/1.1 400")
    assert 1 <= (shared.settings.data_dir / "api.log").read_text().count("Invalid HTTP request") <= 10


def test_requests_under_way_are_refused_for_now_where_the_service_stops(api: RunningApi) -> None:
    with raw(api) as small, raw(api) as large_one:
        small.sendall(head("Content-Length: 1000") + b"{")
        large_one.sendall(head("Content-Length: 300000") + b"{")
        wait_for(lambda: connections_of(api.second()) == 1, what="the request")
        api.process.send_signal(signal.SIGTERM)
        for connection in (small, large_one):
            answer = all_of(connection)
            assert answer.startswith(b"HTTP/1.1 503") and b"retry-after" in answer.lower()


def test_a_large_body_that_does_not_come_is_given_up(shared: RunningApi) -> None:
    heads = [head("Content-Length: 300000"), head("Content-Length: 300000") + b"{", head("Transfer-Encoding: chunked")]
    with ExitStack() as stack:
        connections = [stack.enter_context(raw(shared)) for _ in heads]
        for connection, begun in zip(connections, heads, strict=True):
            connection.sendall(begun)
        for connection in connections:
            answer = all_of(connection)
            assert answer.startswith(b"HTTP/1.1 408") and b"body-too-slow" in answer


def test_who_sends_too_much_reads_why(shared: RunningApi) -> None:
    """It reads nothing before it has sent all."""
    with raw(shared) as connection:
        connection.sendall(head("Content-Length: 30000000") + b"x" * 30_000_000)
        answer = all_of(connection)
    assert answer.startswith(b"HTTP/1.1 413") and b"body-too-large" in answer


@pytest.mark.parametrize("number", some_each_run([signal.SIGKILL, signal.SIGSTOP]))
def test_requests_of_a_second_process_that_dies_end_and_later_ones_are_answered(api: RunningApi, number: int) -> None:
    body = large(PROBLEM)
    assert api.post("/v1/lookups", body).status_code == 200
    with raw(api) as connection:
        connection.sendall(head(f"Content-Length: {len(body)}") + body[:OWN_BYTES])
        wait_for(lambda: connections_of(api.second()) == 1, what="the request")
        api.second().send_signal(number)
        with suppress(ConnectionError):
            assert all_of(connection) == b""
    assert api.post("/v1/lookups", body).status_code == 200


def connections_of(process: psutil.Process) -> int:
    return [connection.status for connection in process.net_connections("inet")].count("ESTABLISHED")


def test_a_second_process_that_cannot_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Semaphore(0)

    def fail(*_: Any, **__: Any) -> None:
        tried.release()
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(large_bodies, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(os, "posix_spawn", fail)
    bodies = BodyProcess(lambda channel: 7)
    assert all(tried.acquire(timeout=10) for _ in range(2))
    bodies.end()


def test_what_waits_for_a_second_process_is_bounded() -> None:
    bodies = BodyProcess(lambda channel: int(threading.Event().wait(60)))
    with socket.socket() as connection:
        taken = [bodies.hand_over(connection.fileno(), b"") for _ in range(2_000)]
    assert taken[0] and not taken[-1]
    bodies.end()


def test_the_second_process_ends_after_a_first_that_was_killed(api: RunningApi) -> None:
    assert api.post("/v1/lookups", large(PROBLEM)).status_code == 200
    second = api.second()
    api.process.kill()
    api.process.wait(20)
    wait_for(lambda: not still_runs(second), what="its end")


def test_the_second_process_is_gone_before_the_first(api: RunningApi) -> None:
    second = api.second()
    api.process.send_signal(signal.SIGTERM)
    api.process.wait(20)
    assert not second.is_running()
