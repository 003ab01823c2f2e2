"""A proxy, a file of TLS or an address that no connection can be made by is a miss, or a refused address."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from cukiln import NotFound, ServiceUnreachable, UsageError
from cukiln.client import AsyncClient, Client
from cukiln.types import LookedUp
from tests.support.fixtures.client import ScriptedService, problem_json

AWAY = "http://service.invalid:8765"  # a proxy is for others than this machine
MATMUL: Any = {"operator": "matmul", "m": 64, "n": 4, "k": 4, "target": "sm_80"}
WRONG = {
    "no package for it": ("ALL_PROXY", "socks5://127.0.0.1:9", "http"),
    "of an unknown kind": ("all_proxy", "socks4://127.0.0.1:9", "http"),
    "of no proxy": ("HTTP_PROXY", "ftp://127.0.0.1:9", "http"),
    "no address": ("HTTP_PROXY", "::garbage", "http"),
    "no certificates": ("SSL_CERT_FILE", "/no/such/file", "https"),
    "not writable": ("SSLKEYLOGFILE", "/no/such/folder/keys", "https"),
}


@pytest.fixture(params=WRONG.values(), ids=WRONG)
def wrong(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, str]:
    """The variable, and the address of a service that it keeps from being asked."""
    variable, value, scheme = request.param
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    if variable == "SSLKEYLOGFILE":  # which is of Python's own context, with its own certificates
        monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    monkeypatch.setenv(variable, value)
    return variable, AWAY.replace("http", scheme, 1)


def check(misses: list[LookedUp], variable: str) -> None:
    for miss in misses[:3]:
        assert miss.record is None
        assert "no connection to the cukiln service" in str(miss.unanswered) and variable in str(miss.unanswered)
    assert "failed 3 times in a row" in str(misses[3].unanswered)


def test_a_lookup_is_a_miss_that_names_the_variable_and_the_breaker_counts_it(wrong: tuple[str, str]) -> None:
    variable, url = wrong
    with Client(url) as client:
        check([client.lookup([MATMUL])[0] for _ in range(4)], variable)
        for call in (lambda: client.job("job1"), lambda: next(client.events("job1"))):
            with pytest.raises(ServiceUnreachable, match=variable):
                call()


def test_an_awaited_one_is_too(wrong: tuple[str, str]) -> None:
    variable, url = wrong

    async def asked() -> list[LookedUp]:
        async with AsyncClient(url) as client:
            misses = [(await client.lookup([MATMUL]))[0] for _ in range(4)]
            with pytest.raises(ServiceUnreachable, match=variable):
                await anext(client.events("job1"))
            return misses

    check(asyncio.run(asked()), variable)


def test_so_is_a_proxy_whose_name_is_no_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://a..b:3")
    with Client(AWAY) as client:
        check([client.lookup([MATMUL])[0] for _ in range(4)], "HTTP_PROXY")


def test_a_proxy_whose_port_is_none_is_named_where_its_addresses_are_tried_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("http_proxy", raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:-1")

    async def asked() -> list[LookedUp]:
        async with AsyncClient(AWAY) as client:
            return [(await client.lookup([MATMUL]))[0] for _ in range(4)]

    misses = asyncio.run(asked())
    check(misses, "HTTP_PROXY")
    assert "port must be 0-65535" in str(misses[0].unanswered)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://a..b:8765", "a part that is empty or longer than 63 characters"),
        (f"http://{'x' * 64}.com", "a part that is empty or longer than 63 characters"),
        ("http://127.0.0.1:99999", "has the port 99999, and the last one is 65535"),
    ],
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_address_that_no_connection_can_be_made_to_is_refused(kind: Any, url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kind(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ftp://me:hidden@host", "ftp://...@host"),
        ("http://me:hidden@host:no", "http://...@host:no"),
        ("http://me:hid/den@host:1", "http://...@host:1"),
        ("http:/me:hidden@host", "http:/...@host"),
        ("http:me:hid\nden@host", "...@host"),
        ("me:hidden@host", "...@host"),
        ("hidden@host", "...@host"),
    ],
)
def test_a_refused_address_is_shown_without_its_password(url: str, shown: str) -> None:
    with pytest.raises(UsageError, match="expected http://host:port") as refused:
        Client(url)
    assert f"'{shown}'" in str(refused.value)
    assert "hid" not in str(refused.value)


def test_a_password_in_the_address_is_sent_and_nowhere_shown(scripted: ScriptedService, tmp_path: Path) -> None:
    scripted.on("GET", "/v1/jobs/job1", problem_json(404, "not-found", "no such job"))
    url = scripted.url.replace("//", "//me:hid%20den@")
    with Client(url, cache_dir=tmp_path) as client:
        assert client.url == scripted.url
        with pytest.raises(NotFound) as missing:
            client.job("job1")
        assert "hid" not in f"{missing.value} {missing.value.url}"
    (sent,) = scripted.seen
    assert sent.headers["authorization"] == f"Basic {b64encode(b'me:hid den').decode()}"
    with pytest.raises(UsageError, match="leave out one of them"):
        Client(url, "a key")


def test_a_host_may_end_with_a_dot(tmp_path: Path) -> None:
    Client("http://service.invalid.:8765", cache_dir=tmp_path).close()


def test_an_id_that_no_address_can_hold_is_refused_by_its_length_and_nothing_is_sent() -> None:
    words = r"nothing was sent: GET /v1/jobs/a+… \(\d+ characters\) can be no request \(URL too long\)"

    async def awaited() -> None:
        async with AsyncClient("http://127.0.0.1:9") as client:
            await client.job("a" * 70_000)

    with pytest.raises(UsageError, match=words), Client("http://127.0.0.1:9") as client:
        client.job("a" * 70_000)
    with pytest.raises(UsageError, match=words):
        asyncio.run(awaited())
