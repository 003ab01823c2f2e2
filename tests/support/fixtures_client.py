"""A real HTTP server that answers from a script, for what a client does when a service misbehaves."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cukiln.client import Client
from cukiln.transport import Transport

__all__ = [
    "ScriptedService",
    "client_of",
    "job_json",
    "problem_json",
    "progress_json",
    "record_json",
    "scripted",
    "waits",
]

Answer = Response | Callable[[Request], Response]


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class ScriptedService:
    """`on` says what a call is answered with, in turn; the last answer repeats. `seen` are the requests."""

    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    _script: dict[tuple[str, str], list[Answer]] = field(default_factory=dict)

    def on(self, method: str, path: str, *answers: Answer | dict[str, Any]) -> None:
        self._script[method, path] = [JSONResponse(a) if isinstance(a, dict) else a for a in answers]

    def calls(self, method: str, path: str) -> list[Seen]:
        return [seen for seen in self.seen if (seen.method, seen.path) == (method, path)]

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        self.seen.append(Seen(request.method, request.scope["path"], dict(request.headers), body))
        answers = self._script.get((request.method, request.scope["path"]))
        if answers is None:
            return problem_json(404, "not-found", "There is nothing at this path")
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return answer(request) if callable(answer) and not isinstance(answer, Response) else answer


class _Server:
    """One for all tests of a process: uvicorn takes a fifth of a second to stop. Each test has its own script."""

    def __init__(self) -> None:
        self.service = ScriptedService()
        methods = ["GET", "POST", "DELETE", "HEAD"]
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=methods)])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)
        self._thread.start()

    def script(self) -> ScriptedService:
        while not self._server.started:
            time.sleep(0.005)
        self.service = ScriptedService(f"http://127.0.0.1:{self._listener.getsockname()[1]}")
        return self.service

    async def _answer(self, request: Request) -> Response:
        return await self.service.answer(request)


_server = cache(_Server)


@pytest.fixture
def scripted() -> ScriptedService:
    return _server().script()


@pytest.fixture
def waits() -> list[float]:
    """The waits, in seconds, that a client of `client_of` would have made."""
    return []


@pytest.fixture
def client_of(waits: list[float], tmp_path: Path) -> Iterator[Callable[[str], Client]]:
    """Makes clients whose waits take no time."""
    clients: list[Client] = []

    def make(url: str, **options: Any) -> Client:
        transport = Transport(url, options.pop("api_key", None), 5.0, sleep=waits.append, **options)
        clients.append(Client(url, transport=transport, cache_dir=tmp_path / "cache"))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def problem_json(
    status: int, kind: str, detail: str, *, headers: dict[str, str] | None = None, **more: Any
) -> Response:
    body = {"type": f"urn:cukiln:problem:{kind}", "title": kind, "status": status, "detail": detail, **more}
    return Response(json.dumps(body), status, headers, "application/problem+json")


def progress_json(done: int = 0, total: int = 4, failed: int = 0) -> dict[str, Any]:
    stage = {"done": done, "total": total}
    counts = {"candidates_done": done, "candidates_failed": failed, "eta_seconds": float(total - done)}
    return {"lower": stage, "compile": stage, "verify": stage, "finish": stage, **counts}


def job_json(state: str = "done", *, job: str = "job1", cached: bool = False, **more: Any) -> dict[str, Any]:
    """A job of one problem, as the service answers it."""
    winner = {
        "candidate": "c" * 64,
        "schedule": {"tile_m": 128, "tile_n": 64, "tile_k": 16, "stages": 2},
        "verified": "cpu",
        "ranked_by": "predicted",
        "predicted_us": 812.4,
        "measured_us": None,
        "so_sha256": "d" * 64,
    }
    problem = {
        "name": "ffn1",
        "key": "a" * 64,
        "operator": "matmul",
        "problem": {"operator": "matmul", "m": 1024, "n": 3072, "k": 768},
        "target": "sm_90a",
        "device_class": "predicted:sm_90a",
        "state": "done" if state in ("done", "partial") else "running",
        "cached": cached,
        "candidates": 64,
        "winner": winner if state in ("done", "partial") else None,
        "verdicts": {"ok": 64},
        "rejected": {"shared_memory": 3},
        "seconds": {"compile": {"wall": 4.2, "cpu": 8.0}},
    }
    whole = {
        "job": job,
        "state": state,
        "cached": cached,
        "priority": "normal",
        "created_at": 1.0,
        "progress": progress_json(4 if state == "done" else 0),
        "seconds": {},
        "problems": [problem],
    }
    return whole | more


def record_json(so: str = "d" * 64, cubin: str = "e" * 64, source: str = "f" * 64, **more: Any) -> dict[str, Any]:
    """A winner record with one kernel."""
    entry = {
        "candidate": "c" * 64,
        "schedule": {"tile_m": 128, "stages": 2},
        "kernel": "b" * 64,
        "so_sha256": so,
        "cubin_sha256": cubin,
        "source_sha256": source,
        "code_digest": "1" * 64,
        "toolchain": "2" * 64,
        "launch": {
            "operands": [{"name": "a", "dtype": "float32", "role": "in", "shape": [4, 4], "strides": [4, 1]}],
            "extents": {"m": 4, "n": 5},
            "attributes": {},
            "launch": {"raster": 1},
            "scalars": [0.5],
            "functions": [],
            "workspace_bytes": 0,
        },
        "workspace_bytes": 0,
        "deterministic": True,
        "verified": "cpu",
        "verdict": {},
        "resources": {},
        "predicted_us": 12.5,
        "prediction": {},
        "measured_us": None,
    }
    whole = {
        "key": "a" * 64,
        "revision": 1,
        "operator": "matmul",
        "problem": {"operator": "matmul"},
        "target": "sm_90a",
        "device_class": "predicted:sm_90a",
        "ranked_by": "predicted",
        "front": [entry],
        "searches": [{"level": 1}],
        "updated_at": 1.0,
    }
    return whole | more
