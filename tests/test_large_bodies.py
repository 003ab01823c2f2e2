"""Large bodies are answered by the API's second process: as in the first, and without holding it up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.large_bodies import OWN_BYTES
from storage.settings import Settings, load_settings
from tests.fixtures_queue import wait_for
from workers.api_watch import answers
from workers.serve import child_environment
from workers.start_checks import free_port

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


@pytest.fixture
def api(tmp_path: Path) -> Iterator[RunningApi]:
    settings = load_settings(data_dir=tmp_path, port=free_port("127.0.0.1"), gpus="none", max_body_bytes=2**20)
    with (tmp_path / "api.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "service"], env=child_environment(settings), stderr=log)
    url = f"http://127.0.0.1:{settings.port}"
    try:
        wait_for(lambda: answers("127.0.0.1", settings.port), what="the API")
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            yield RunningApi(settings, process, client)
    finally:
        process.kill()
        process.wait()


def large(problem: dict[str, Any]) -> bytes:
    """More than the first process reads itself."""
    problems = [{**problem, "name": "n" * 200 + str(number)} for number in range(2_000)]
    body = json.dumps({"problems": problems}).encode()
    assert len(body) > OWN_BYTES
    return body


def type_of(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json"
    return str(answer.json()["type"]).rpartition(":")[2]


def test_a_large_body_is_answered_as_a_small_one(api: RunningApi) -> None:
    accepted = api.post("/v1/jobs", large(PROBLEM))
    assert accepted.status_code == 202, accepted.text
    assert len(accepted.headers.get_list("date")) == 1
    job = accepted.json()["job"]
    assert api.client.get(accepted.headers["location"]).json()["job"] == job
    found = api.post("/v1/lookups", large(PROBLEM))
    assert (found.status_code, found.json()["misses"]) == (200, 2_000)
    wrong = api.post("/v1/jobs", large({**PROBLEM, "m": 0}))
    assert (wrong.status_code, type_of(wrong)) == (422, "invalid-value")
    assert wrong.json()["field"] == "problems[0].m"
    unknown = api.post("/v1/lookups?colour=1", large(PROBLEM))
    assert (unknown.status_code, type_of(unknown)) == (422, "unknown-field")


def test_too_large_a_body_is_refused_whether_its_length_is_told_or_not(api: RunningApi) -> None:
    body = b'["' + b"x" * 2**20 + b'"]'
    for content in (body, iter([body[: 2**19], body[2**19 :]])):
        refused = api.post("/v1/jobs", content)
        assert (refused.status_code, type_of(refused)) == (413, "body-too-large")


def test_a_body_of_unknown_length_is_read(api: RunningApi) -> None:
    answer = api.post("/v1/jobs", iter([b'{"problems": ', b"[]}"]))
    assert (answer.status_code, type_of(answer)) == (422, "invalid-value")


def test_the_second_process_is_started_again(api: RunningApi) -> None:
    assert api.post("/v1/lookups", large(PROBLEM)).status_code == 200
    before = api.second()
    before.kill()
    assert api.post("/v1/lookups", large(PROBLEM)).status_code == 200
    assert api.second() != before


def test_a_request_whose_second_process_dies_is_refused_for_now(api: RunningApi) -> None:
    assert api.post("/v1/lookups", large(PROBLEM)).status_code == 200
    body = large(PROBLEM)

    def pieces() -> Iterator[bytes]:
        yield body[:OWN_BYTES]
        second = api.second()
        wait_for(lambda: any(one.status == "ESTABLISHED" for one in second.net_connections()), what="the request")
        second.kill()
        yield body[OWN_BYTES:]

    refused = api.post("/v1/lookups", pieces())
    assert (refused.status_code, type_of(refused)) == (503, "busy")
    assert refused.headers["retry-after"]
    assert api.client.get("/healthz").status_code == 200


def test_the_second_process_ends_after_a_first_that_was_killed(api: RunningApi) -> None:
    assert api.post("/v1/lookups", large(PROBLEM)).status_code == 200
    second = api.second()
    api.process.kill()
    api.process.wait(20)
    wait_for(lambda: not second.is_running() or second.status() == psutil.STATUS_ZOMBIE, what="its end")


@pytest.mark.parametrize("begun", [False, True], ids=["while it starts", "once it answers"])
def test_the_second_process_is_gone_before_the_first(api: RunningApi, begun: bool) -> None:
    wait_for(lambda: psutil.Process(api.process.pid).children() != [], what="the second process")
    second = api.second()
    if begun:
        assert api.post("/v1/lookups", large(PROBLEM)).status_code == 200
    api.process.send_signal(signal.SIGTERM)
    api.process.wait(20)
    assert not second.is_running()
