"""The real API of one test: uvicorn on a real socket, over a real SQLite file."""

from __future__ import annotations

import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from codegen.identity import winner_key
from codegen.operators import operator
from codegen.plan.generator import generator
from codegen.search.search import Search
from cukiln.types import FrontEntry, Launch, RankedBy, WinnerRecord
from service.__main__ import configuration
from service.app import create_app
from service.context import Service
from service.http.connections import ConnectionLimits
from service.http.large_bodies import ApiServer
from storage.blobs.blob_store import BlobStore
from storage.config.settings import Settings, load_settings
from storage.database.session import Database
from storage.entities.heartbeats import register_device
from storage.entities.searches import MeasuredUnder, search_entry
from storage.entities.winners import get_winners, publish_winner
from tests.support.fixtures_storage import write_migrated

_description: dict[str, Any] | None = None

MATMUL: dict[str, Any] = {"operator": "matmul", "m": 64, "n": 48, "k": 32}


@dataclass
class Api:
    """A service that is up, and the stores behind it."""

    url: str
    client: httpx.Client
    settings: Settings
    database: Database
    blobs: BlobStore
    server: uvicorn.Server

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def service(self) -> Service:
        state = self.server.config.app.state.service  # type: ignore[union-attr]
        assert isinstance(state, Service)
        return state

    def rows(self) -> dict[str, int]:
        """How many rows each table has."""
        with sqlite3.connect(str(self.database.url.database)) as connection:
            tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            return {name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}

    def submit(self, *problems: dict[str, Any], **fields: Any) -> httpx.Response:
        return self.client.post("/v1/jobs", json={"problems": list(problems or (MATMUL,)), **fields})


@contextmanager
def serving(folder: Path, *, limits: ConnectionLimits | None = None, **overrides: Any) -> Iterator[Api]:
    """A service over `folder` on a free port."""
    settings = load_settings(data_dir=folder, port=0, host="127.0.0.1", **overrides)
    database = Database(settings.database_url)
    if database.is_sqlite and not Path(str(database.url.database)).exists():
        write_migrated(Path(str(database.url.database)))
    database.migrate()
    server = ApiServer(configuration(_app(settings), settings, limits))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline, "the API did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
            yield Api(url, client, settings, database, BlobStore(database, settings.blobs_url), server)
    finally:
        server.should_exit = True
        thread.join(30)
        database.dispose()


def _app(settings: Settings) -> FastAPI:
    """Making the API's description takes longer than all else of a start, and it is the same for all settings."""
    global _description
    app = create_app(settings)
    if _description is None:
        _description = app.openapi()
    app.openapi_schema = _description
    return app


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    with serving(tmp_path) as found:
        yield found


@pytest.fixture(scope="module")
def shared_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """For tests that write nothing."""
    with serving(tmp_path_factory.mktemp("api")) as api:
        yield api


def publish(
    database: Database,
    problem: dict[str, Any] = MATMUL,
    *,
    target: str = "sm_80",
    search: dict[str, Any] | None = None,
    made_by: str | None = None,
    workspace: tuple[int, ...] = (0,),
    predicted_us: float = 5.0,
    blob: str | None = None,
    workspace_limit_bytes: int | None = None,
    deterministic: bool = False,
    whole: bool = True,
    device_class: str | None = None,
    driver: str = "580.95.05",
    plan_version: str = "g1",
    code_digest: str | None = None,
) -> WinnerRecord:
    """A winner record as the finish step would leave it; `workspace` has one value for each point of the front, and
    only the first of them is deterministic. A `device_class` makes it one of measured kernels, `driver` and
    `plan_version` what it was measured under. `blob`: the digest that stands for its files; default: a stored one."""
    if blob is None:
        blob = blobs_beside(database).put(b"a library", "application/x-sharedlib").digest
    kind = operator(problem["operator"])
    parsed = kind.parse(problem)
    ranked_by: RankedBy = "predicted" if device_class is None else "measured"
    device_class = device_class or f"predicted:{target}"
    key = winner_key(parsed.digest, target, device_class)
    with database.write() as session:
        record = WinnerRecord(
            key=key,
            revision=0,  # publishing sets it
            operator=kind.name,
            problem=parsed.canonical(),
            target=target,
            device_class=device_class,
            ranked_by=ranked_by,
            front=[
                _entry(index, size, predicted_us + index, blob, code_digest or f"{index}{key[1:]}")
                for index, size in enumerate(workspace)
            ],
            searches=[
                search_entry(
                    search or Search().canonical(),
                    made_by or generator(kind.name),
                    workspace_limit_bytes,
                    deterministic=deterministic,
                    whole=whole,
                    measured=MeasuredUnder(driver, plan_version) if ranked_by == "measured" else None,
                )
            ],
            updated_at=time.time(),
        )
        publish_winner(session, record, attempt=uuid.uuid4().hex)
        return get_winners(session, [key])[key]


def register_gpu(
    database: Database,
    device_class: str = "NVIDIA H200",
    capability: str = "9.0",
    *,
    number: int = 0,
    driver: str = "580.95.05",
    plan_version: str = "g1",
) -> str:
    """A heartbeat of a GPU's worker; returns its UUID."""
    uuid_of = f"GPU-{device_class}-{number}"
    with database.write() as session:
        register_device(
            session,
            uuid=uuid_of,
            device_class=device_class,
            capability=capability,
            driver=driver,
            description={
                "multiprocessors": 132,
                "memory_bytes": 150_000_000_000,
                "plan_versions": {"matmul": plan_version},
            },
            worker="host:1",
        )
    return uuid_of


def blobs_beside(database: Database) -> BlobStore:
    """The blobs of a service on its defaults: in the folder of its SQLite file."""
    return BlobStore(database, (Path(str(database.url.database)).parent / "blobs").as_uri())


def _entry(index: int, workspace: int, predicted_us: float, blob: str, code_digest: str) -> FrontEntry:
    launch = Launch(
        operands=[], extents={}, attributes={}, launch={}, scalars=[], functions=[], workspace_bytes=workspace
    )
    return FrontEntry(
        candidate=f"{index:064x}",
        schedule={"tile_m": 64},
        kernel="1" * 64,
        so_sha256=blob,
        cubin_sha256=blob,
        source_sha256=blob,
        code_digest=code_digest,
        toolchain="3" * 64,
        launch=launch,
        workspace_bytes=workspace,
        deterministic=index == 0,
        verified="cpu",
        verdict={},
        resources={},
        predicted_us=predicted_us,
        prediction=None,
        measured_us=None,
    )
