"""Access: loopback names without a key, the key on every /v1 call with one."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.auth import host_name
from storage.config.settings import is_loopback, load_settings
from storage.errors import SettingsError
from tests.support.fixtures.api import Api, serving
from tests.support.fixtures.queue import wait_for
from workers.supervisor.serve import child_environment

KEY = "correct horse battery staple"
PATHS = ["/v1/jobs", "/v1/nothing", "/v1", "/v1/operators", f"/v1/blobs/sha256/{'0' * 64}"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with serving(tmp_path_factory.mktemp("guarded"), api_key=KEY) as served:
        yield served


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "header", [None, "", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, "Bearer \xff"]
)
def test_every_v1_call_needs_the_key(guarded: Api, path: str, header: str | None) -> None:
    headers = {} if header is None else {b"Authorization": header.encode("latin-1")}
    # From an address of its own for each path: one that sends wrong keys has to wait after a few.
    transport = httpx.HTTPTransport(local_address=f"127.0.1.{1 + PATHS.index(path)}")
    with httpx.Client(base_url=guarded.url, transport=transport) as client:
        answer = client.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"] == "urn:cukiln:problem:unauthorized"
    assert answer.json()["field"] == "Authorization"


def test_without_the_key_nothing_is_read_or_written(guarded: Api) -> None:
    before = guarded.rows()
    assert guarded.submit().status_code == 401
    assert guarded.rows() == before


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_the_key_opens(guarded: Api, scheme: str) -> None:
    assert guarded.client.get("/v1/jobs", headers={"Authorization": f"{scheme} {KEY}"}).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/docs", "/openapi.json"])
def test_probes_and_docs_need_no_key(guarded: Api, path: str) -> None:
    assert guarded.client.get(path).status_code == 200


def test_with_a_key_any_host_name_may_be_used(guarded: Api) -> None:
    answer = guarded.client.get("/v1/jobs", headers={"Host": "cukiln.example", "Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "localhost.evil.example", "10.0.0.1", "", "[::2]"]
)
def test_without_a_key_a_rebound_name_is_refused(shared_api: Api, host: str) -> None:
    answer = shared_api.client.get("/healthz", headers={"Host": host})
    assert answer.status_code == 421
    assert answer.json()["type"] == "urn:cukiln:problem:wrong-host"
    assert "localhost" in answer.json()["allowed"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "127.8.8.8", "[::1]:9", "app.localhost"])
def test_loopback_names_are_answered(shared_api: Api, host: str) -> None:
    assert is_loopback(host_name(host))
    assert shared_api.client.get("/healthz", headers={"Host": host}).status_code == 200


def test_an_exposed_service_without_a_key_does_not_start(tmp_path: Path) -> None:
    environment = {**child_environment(load_settings(data_dir=tmp_path)), "CUKILN_HOST": "0.0.0.0"}
    ended = subprocess.run(
        [sys.executable, "-m", "service"], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 2
    assert "CUKILN_API_KEY" in ended.stderr and "Traceback" not in ended.stderr


def test_the_api_alone_says_in_one_sentence_that_its_database_is_none(tmp_path: Path) -> None:
    (tmp_path / "cukiln.db").write_bytes(b"not a database" * 1000)
    ended = subprocess.run(
        [sys.executable, "-m", "service"],
        env=child_environment(load_settings(data_dir=tmp_path)),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 2
    [said] = [line for line in ended.stderr.splitlines() if line.startswith("cukiln: ")]
    assert str(tmp_path / "cukiln.db") in said and "Traceback" not in ended.stderr


def test_the_api_alone_migrates_its_database_and_ends_on_a_signal(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = load_settings(data_dir=tmp_path, port=port)
    environment = {**child_environment(settings), "CUKILN_PORT": str(port)}
    with subprocess.Popen([sys.executable, "-m", "service"], env=environment, stderr=subprocess.PIPE) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for(lambda: answers(url) or process.poll() is not None, seconds=60, what="the API")
            assert httpx.get(f"{url}/v1/jobs", trust_env=False).json() == {"jobs": [], "next_cursor": None}
        finally:
            process.terminate()
        assert process.wait(240) in (0, -signal.SIGTERM)


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "cukiln.example"])
def test_only_loopback_counts_as_not_exposed(tmp_path: Path, host: str) -> None:
    with pytest.raises(SettingsError, match="CUKILN_API_KEY"):
        load_settings(data_dir=tmp_path, host=host)
    assert load_settings(data_dir=tmp_path, host=host, api_key=KEY).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_every_loopback_address_needs_no_key(tmp_path: Path, host: str) -> None:
    assert load_settings(data_dir=tmp_path, host=host).host == host


def test_a_page_of_another_origin_may_not_post(shared_api: Api) -> None:
    # What a browser sends across origins without asking first: a "simple" content type.
    answer = shared_api.client.post("/v1/jobs", content="{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415
    asked = shared_api.client.request("OPTIONS", "/v1/jobs", headers={"Origin": "http://evil.example"})
    assert "access-control-allow-origin" not in asked.headers
    assert isinstance(asked, httpx.Response) and asked.status_code == 405
