"""A machine that fails: locked database, full disk, a defect. The answer says what happened and when to come again."""

from __future__ import annotations

import asyncio
import errno
import socket
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.requests import Request

from service import context
from service.http.errors import Refused
from service.routes import accept_job
from service.routes.body import body_bytes
from storage.database.database_errors import Failure, failure_of
from tests.support.fixtures.api import Api, serving

PREFIX = "urn:cukiln:problem:"


def test_a_locked_database_is_a_503_and_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "BUSY_SECONDS", 0.1)
    with serving(tmp_path) as api:
        lock = sqlite3.connect(str(api.database.url.database), isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        answer = api.submit()
        lock.execute("ROLLBACK")
        lock.close()
        assert (answer.status_code, answer.json()["type"]) == (503, PREFIX + "database-unavailable")
        assert int(answer.headers["retry-after"]) > 0
        assert api.rows()["jobs"] == api.rows()["tasks"] == 0
        assert api.submit().status_code == 202


def test_a_full_disk_is_a_507_and_nothing_is_kept(api: Api) -> None:
    # max_page_count makes SQLite answer SQLITE_FULL, as it does when the file cannot grow.
    problems = [{"operator": "matmul", "m": m, "n": 1, "k": 1, "name": f"{m:x<200}"} for m in range(1, 400)]
    before = api.rows()
    with api.service.database.write() as session:
        pages = session.connection().exec_driver_sql("PRAGMA page_count").scalar_one()
    _limit_pages(api, pages)
    answer = api.submit(*problems)
    assert (answer.status_code, answer.json()["type"]) == (507, PREFIX + "storage-full")
    assert int(answer.headers["retry-after"]) > 0
    assert api.rows() == before
    _limit_pages(api, 1_000_000)
    assert api.submit(*problems).status_code == 202


def _limit_pages(api: Api, pages: int) -> None:
    """For every connection that the service opens from now on."""
    from sqlalchemy import event

    api.service.database.dispose()

    @event.listens_for(api.service.database.engine, "connect")
    def limit(connection: sqlite3.Connection, _record: Any) -> None:
        connection.execute(f"PRAGMA max_page_count={pages}")


def test_a_defect_is_a_500_that_tells_nothing_of_the_inside(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the secret of line 7")

    monkeypatch.setattr(accept_job, "resolve_jobs", broken)
    answer = api.submit()
    assert (answer.status_code, answer.json()["type"]) == (500, PREFIX + "internal")
    assert answer.headers["content-type"] == "application/problem+json"
    assert "secret" not in answer.text
    monkeypatch.undo()
    assert api.submit().status_code == 202


def test_a_database_without_its_tables_is_not_ready(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        with sqlite3.connect(str(api.database.url.database)) as connection:
            connection.execute("DELETE FROM alembic_version")
        body = api.client.get("/readyz").json()
        assert "database" in [error["field"] for error in body["errors"]]


def test_a_database_that_is_none_is_a_503(api: Api) -> None:
    api.service.database.dispose()
    api.database.dispose()
    path = Path(str(api.database.url.database))
    for part in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        part.unlink(missing_ok=True)
    path.write_bytes(b"not a database" * 1000)
    body = api.client.get("/readyz").json()
    assert {error["field"] for error in body["errors"]} >= {"database", "workers"}
    assert api.submit().json()["type"] == PREFIX + "database-unavailable"
    assert api.client.get("/v1/jobs").status_code == 503
    assert api.client.get("/healthz").status_code == 200


def test_a_caller_that_leaves_in_its_body_leaves_nothing(api: Api) -> None:
    before = api.rows()
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b'Content-Length: 1000\r\n\r\n{"problems": ['
        )
    assert api.client.get("/healthz").status_code == 200
    assert api.rows() == before


def test_a_body_whose_caller_leaves_is_a_bad_request(api: Api) -> None:
    async def left() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "path": "/v1/jobs",
        "headers": [(b"content-type", b"application/json")],
        "app": SimpleNamespace(state=SimpleNamespace(service=api.service)),
    }
    with pytest.raises(Refused, match="ended before the body") as refused:
        asyncio.run(anext(body_bytes(Request(scope, left))))
    assert (refused.value.status, refused.value.faults[0].kind) == (400, "bad-request")


class _Postgres(Exception):
    """Shaped like psycopg's error."""

    def __init__(self, sqlstate: str | None) -> None:
        self.sqlstate = sqlstate


class OperationalErrorOfPsycopg(_Postgres):
    pass


OperationalErrorOfPsycopg.__name__ = "OperationalError"


def sqlite(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("x")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (OperationalError("", {}, sqlite(sqlite3.SQLITE_BUSY)), Failure.UNAVAILABLE),
        (OperationalError("", {}, sqlite(sqlite3.SQLITE_BUSY_SNAPSHOT)), Failure.UNAVAILABLE),
        (OperationalError("", {}, sqlite(sqlite3.SQLITE_IOERR_FSYNC)), Failure.UNAVAILABLE),
        (OperationalError("", {}, sqlite(sqlite3.SQLITE_FULL)), Failure.FULL),
        (OperationalError("", {}, sqlite(sqlite3.SQLITE_ERROR)), None),
        (OperationalError("", {}, sqlite3.OperationalError("made by Python")), None),
        (OperationalError("", {}, _Postgres("53100")), Failure.FULL),
        (OperationalError("", {}, _Postgres("53300")), Failure.UNAVAILABLE),
        (OperationalError("", {}, _Postgres("57P01")), Failure.UNAVAILABLE),
        (OperationalError("", {}, _Postgres("42601")), None),
        (OperationalError("", {}, OperationalErrorOfPsycopg(None)), Failure.UNAVAILABLE),
        (PoolTimeout(), Failure.UNAVAILABLE),
        (OSError(errno.ENOSPC, "full"), Failure.FULL),
        (OSError(errno.EDQUOT, "quota"), Failure.FULL),
        (OSError(errno.ENOENT, "missing"), None),
        (ValueError("anything"), None),
    ],
)
def test_what_a_failure_means(error: Exception, failure: Failure | None) -> None:
    assert failure_of(error) is failure
