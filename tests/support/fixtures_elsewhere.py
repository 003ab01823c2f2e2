"""Stand-alone runs of a test: `python -m workers.offline.measure_bundle` as a process that can import nothing of the
server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.places import ROOT
from tests.support.server_processes import ServerProcess
from workers.processes.fork_server import ForkServer, Request

FAKE_GPU = "tests.support.fake_gpu"
MODULE = "tests.support.measuring_elsewhere"
LONG_SECONDS = 600.0
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
        """For a Python of its own."""
        options = ["--gpu-module", FAKE_GPU, "--seconds", "0.01", "--workers", "2"]
        return [sys.executable, "-m", MODULE, *map(str, words), *options]

    def environment(self) -> dict[str, str]:
        return {**_kept_environment(), "CUKILN_GPU_LOCKS": str(self.folder / "locks")}

    def run(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """In a fork of a process that has imported it."""
        out, err = self.folder / "stdout", self.folder / "stderr"
        for file in (out, err):
            file.write_bytes(b"")
        command = self.command(*words)
        status = self._fork(command, out, err).wait(LONG_SECONDS)
        return subprocess.CompletedProcess(command, status, out.read_text(), err.read_text())

    def start(self, *words: str | Path) -> ServerProcess:
        """The same; its output goes into the file `log`."""
        return self._fork(self.command(*words), self.folder / "log", self.folder / "log")

    def _fork(self, command: Sequence[str], out: Path, err: Path) -> ServerProcess:
        _server().ensure_running()
        request = Request("elsewhere", command, self.environment(), cwd=str(self.folder))
        with Path(os.devnull).open("rb") as stdin, out.open("ab") as stdout, err.open("ab") as stderr:
            return ServerProcess(_server().fork(request, [stdin.fileno(), stdout.fileno(), stderr.fileno()]))

    def request(self, request: dict[str, Any] = REQUEST) -> Path:
        path = self.folder / "request.json"
        path.write_text(json.dumps(request))
        return path


def _kept_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUKILN_", "OPERATOR_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "client")])}


@cache
def _server() -> ForkServer:
    return ForkServer("test runs elsewhere", [MODULE], env=_kept_environment(), cwd=ROOT)


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
