"""API keys: what each scope opens, how long a revoked one does, and what a wrong one costs."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute
from typer.testing import CliRunner

from cukiln.cli.main import app as command_line
from service import auth
from service.app import ROUTERS
from service.keyring import FRESH_SECONDS, WRONG_KEYS, WRONG_SECONDS, KeyRing, WrongKeys
from storage.entities.keys import SCOPES, Scope, create_key, parts_of, revoke_key
from tests.support.fixtures.api import MATMUL, Api, serving
from tests.support.fixtures.storage import counted_statements

OPERATOR = "correct horse battery staple"
CALLS: dict[tuple[str, str], Scope] = {
    ("GET", "/v1/jobs"): "read",
    ("GET", f"/v1/kernels/{'0' * 64}"): "read",
    ("GET", f"/v1/blobs/sha256/{'0' * 64}"): "read",
    ("HEAD", f"/v1/blobs/sha256/{'0' * 64}"): "read",
    ("POST", "/v1/lookups"): "read",
    ("POST", "/v1/jobs"): "submit",
    ("DELETE", f"/v1/jobs/{'0' * 32}"): "submit",
    ("POST", f"/v1/jobs/{'0' * 32}/retry"): "submit",
    ("POST", "/v1/results"): "import",
    ("GET", "/v1/imports"): "read",
    ("DELETE", f"/v1/imports/{'0' * 32}"): "import",
    ("DELETE", f"/v1/kernels/{'0' * 64}"): "admin",
    ("DELETE", f"/v1/builds/{'0' * 64}"): "admin",
}
OPENED: dict[Scope, set[Scope]] = {
    "read": {"read"},
    "submit": {"read", "submit"},
    "import": {"read", "import"},
    "admin": set(SCOPES),
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with serving(tmp_path_factory.mktemp("guarded"), api_key=OPERATOR) as served:
        yield served


def made(api: Api, *scopes: Scope) -> str:
    with api.database.write() as session:
        return create_key(session, "ci", scopes)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def until_read_again() -> None:
    time.sleep(FRESH_SECONDS + 0.1)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_key_opens_what_its_scope_says_and_nothing_else(guarded: Api, scope: Scope) -> None:
    key = made(guarded, scope)
    until_read_again()
    for (method, path), needed in CALLS.items():
        answer = guarded.client.request(method, path, headers=bearer(key))
        if needed in OPENED[scope]:
            assert answer.status_code not in (401, 403), (method, path)
        else:
            assert (answer.status_code, answer.json()["type"]) == (403, "urn:cukiln:problem:forbidden")
            assert answer.json()["allowed"] == [needed]


def test_a_call_that_changes_something_needs_more_than_to_read() -> None:
    """Also one that was added without a scope: then only an admin may."""
    routes = [route for module in ROUTERS for route in module.router.routes if isinstance(route, APIRoute)]
    changing = [route for route in routes if route.methods - set(auth.SAFE_METHODS)]
    assert len(changing) >= 4
    only_reads = {route.path for route in changing if getattr(route.endpoint, "needs", "admin") == "read"}
    assert only_reads == {"/v1/lookups"}


def test_a_forbidden_body_is_not_read(guarded: Api) -> None:
    key = made(guarded, "read")
    until_read_again()
    answer = guarded.client.post("/v1/jobs", content=b"{" * 1000, headers=bearer(key))
    assert answer.status_code == 403


def test_the_operators_key_is_admin(guarded: Api) -> None:
    answer = guarded.client.post("/v1/jobs", json={"problems": [MATMUL]}, headers=bearer(OPERATOR))
    assert answer.status_code == 202


def test_the_first_key_closes_the_service_and_a_revoked_one_does_not_open_it(api: Api) -> None:
    key = made(api, "submit")
    until_read_again()
    assert api.submit().status_code == 401
    assert api.client.get("/v1/jobs", headers=bearer(key)).status_code == 200
    parts = parts_of(key)
    assert parts is not None
    with api.database.write() as session:
        assert revoke_key(session, parts[0])
        assert not revoke_key(session, parts[0])
    until_read_again()
    assert api.client.get("/v1/jobs", headers=bearer(key)).status_code == 401
    assert api.client.get("/v1/jobs").status_code == 401
    assert api.client.get("/").status_code == 401
    again = made(api, "admin")
    until_read_again()
    assert api.client.get("/v1/jobs", headers=bearer(again)).status_code == 200


@pytest.mark.parametrize("size", [1000, 400_000], ids=["small", "large"])
def test_a_body_whose_key_is_revoked_while_it_comes_is_refused(guarded: Api, size: int) -> None:
    key = made(guarded, "submit")
    before = guarded.rows()["jobs"]
    body = json.dumps({"problems": [MATMUL]}).encode().ljust(size)
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", guarded.port), timeout=10) as connection:
        connection.sendall(head.encode() + body[: size // 2])
        until_read_again()
        with guarded.database.write() as session:
            assert revoke_key(session, key.split("_")[1])
        until_read_again()
        connection.sendall(body[size // 2 :])
        assert connection.recv(100_000).startswith(b"HTTP/1.1 401 ")
    assert guarded.rows()["jobs"] == before


def test_a_service_whose_keys_are_all_revoked_is_closed_after_a_restart_too(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        parts = parts_of(made(api, "admin"))
        assert parts is not None
        with api.database.write() as session:
            revoke_key(session, parts[0])
    with serving(tmp_path) as api:
        assert api.client.get("/v1/jobs").status_code == 401
        until_read_again()
        assert api.client.get("/v1/jobs").status_code == 401


def test_a_page_needs_a_key_that_reads(guarded: Api) -> None:
    key = made(guarded, "read")
    until_read_again()
    assert "Bearer" in guarded.client.get("/").headers["www-authenticate"]
    shown = guarded.client.get("/", headers=bearer(key))
    assert (shown.status_code, "key.html" in shown.text) == (200, False)


def test_a_key_is_not_kept_in_the_database(guarded: Api) -> None:
    key = made(guarded, "admin")
    number, secret = key.split("_", 2)[1:]
    with sqlite3.connect(str(guarded.database.url.database)) as connection:
        kept = "\n".join(connection.iterdump())
    assert number in kept and secret not in kept


@pytest.mark.parametrize(
    "spoil", [lambda key: key[:-1], lambda key: key + "x", lambda key: key[:-1] + "!", lambda key: key.upper()]
)
def test_a_key_that_is_off_by_a_character_is_wrong(guarded: Api, spoil: Callable[[str], str]) -> None:
    key = made(guarded, "admin")
    ring = KeyRing(guarded.settings, guarded.database)
    assert asyncio.run(ring.caller(key)) is not None
    assert asyncio.run(ring.caller(spoil(key))) is None


def test_an_address_that_sends_wrong_keys_waits_and_the_log_says_which(
    guarded: Api, caplog: pytest.LogCaptureFixture
) -> None:
    right, other = made(guarded, "read"), made(guarded, "read")
    until_read_again()
    with httpx.Client(base_url=guarded.url, transport=httpx.HTTPTransport(local_address="127.0.0.9")) as client:
        assert client.get("/v1/jobs", headers=bearer(right)).status_code == 200
        wrong = right[:-4] + "AAAA"
        with caplog.at_level(logging.WARNING, logger="cukiln.service"):
            seen = [client.get("/v1/jobs", headers=bearer(wrong)).status_code for _ in range(WRONG_KEYS + 1)]
        assert seen == [401] * WRONG_KEYS + [429]
        assert f"127.0.0.9, with the id {right.split('_')[1]}" in caplog.text and wrong not in caplog.text
        refused = client.get("/v1/jobs", headers=bearer(other))
        assert refused.status_code == 429 and 0 < int(refused.headers["retry-after"]) <= WRONG_SECONDS
        # A key that was right from here stays so, and other addresses wait for nothing.
        assert client.get("/v1/jobs", headers=bearer(right)).status_code == 200
    assert guarded.client.get("/v1/jobs", headers=bearer(other)).status_code == 200


def test_after_its_wait_an_address_may_try_again() -> None:
    now = [0.0]
    wrong = WrongKeys(lambda: now[0])
    for _ in range(WRONG_KEYS):
        assert wrong.wait_seconds("10.0.0.1", "x") == 0.0
        wrong.note_wrong("10.0.0.1")
    assert wrong.wait_seconds("10.0.0.1", "x") == WRONG_SECONDS
    now[0] = WRONG_SECONDS + 1
    assert wrong.wait_seconds("10.0.0.1", "x") == 0.0


def test_a_database_that_is_away_opens_nothing_but_to_the_operator(tmp_path: Path) -> None:
    with serving(tmp_path, api_key=OPERATOR) as api:
        key = made(api, "admin")
        with sqlite3.connect(str(api.database.url.database)) as connection:
            connection.execute("ALTER TABLE keys RENAME TO away")
        assert api.client.get("/v1/jobs", headers=bearer(key)).status_code == 503
        assert api.client.get("/healthz").status_code == 200
        assert api.client.get("/v1/jobs", headers=bearer(OPERATOR)).status_code == 200


def test_keys_are_read_once_for_many_requests(shared_api: Api) -> None:
    ring = KeyRing(shared_api.settings, shared_api.database)
    rounds, answered = 0, set[int]()

    def count() -> None:
        nonlocal rounds
        rounds += 1
        asyncio.get_running_loop().call_soon(count)

    async def ask() -> None:
        await ring.needs_key()
        answered.add(rounds)

    async def many() -> None:
        count()
        await asyncio.gather(*(ask() for _ in range(50)))

    with counted_statements(shared_api.database) as statements:
        asyncio.run(many())
    assert sum("FROM keys" in statement for statement in statements) == 1
    assert len(answered) == 1  # in one round of the event loop


def test_the_command_makes_lists_and_revokes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKILN_DATA", str(tmp_path))
    run = CliRunner().invoke
    made = run(command_line, ["keys", "create", "ci", "--scope", "submit", "--json"])
    assert made.exit_code == 0, made.output
    id = json.loads(made.stdout)["id"]
    [listed] = json.loads(run(command_line, ["keys", "list", "--json"]).stdout)["keys"]
    assert (listed["id"], listed["name"], listed["scopes"]) == (id, "ci", ["submit"])
    parts = parts_of(json.loads(made.stdout)["key"])
    assert parts is not None and parts[1] not in run(command_line, ["keys", "list"]).output
    other = json.loads(run(command_line, ["keys", "create", "other", "--json"]).stdout)["id"]
    revoked = run(command_line, ["keys", "revoke", id])
    assert (revoked.exit_code, revoked.stdout, revoked.stderr) == (0, f"{id} opens nothing any more\n", "")
    assert "revoked" in run(command_line, ["keys", "list"]).output
    for closed in (run(command_line, ["keys", "revoke", other]), run(command_line, ["keys", "list"])):
        assert "No key is good, and the service needs one all the same" in closed.stderr
        assert "`cukiln keys create NAME --scope admin`" in closed.stderr
    assert json.loads(run(command_line, ["keys", "list", "--json"]).stdout)["needs_key"] is True
    assert "no good key" in str(run(command_line, ["keys", "revoke", id]).exception)
    assert "read, submit, import, admin" in str(
        run(command_line, ["keys", "create", "x", "--scope", "write"]).exception
    )
