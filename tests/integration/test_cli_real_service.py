"""The command line and the loader over a whole, real service: compile, verify, look up, fetch, load."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import cukiln
from cukiln.cli import server
from storage.config.settings import load_settings
from tests.support.fixtures.client import exit_code
from tests.support.fixtures.compile import compiled_in_this_run
from tests.support.fixtures.queue import wait_for
from tests.support.fixtures.service import Started
from tests.support.processes.running import processes_of
from tests.support.processes.server_processes import ServerProcess, WarmForkServer, start_process, warm_up
from tests.support.run.places import PROBE, ROOT
from workers.supervisor import serve
from workers.supervisor.start_checks import lock_folder

PROBLEM = {"operator": "matmul", "m": 40, "n": 48, "k": 36, "layout": "nt"}
REQUEST = {
    "target": "sm_80",
    "search": {"level": 1, "limit": 2},
    "problems": [
        {"name": "plain", **PROBLEM},
        {"name": "fused", **PROBLEM, "epilogue": [{"op": "bias", "axis": "n"}, {"op": "scale", "value": 0.5}]},
    ],
}
# One thread would compute the whole tile, and no warp has one thread: rules reject it before any compile.
SCHEDULE = {"tile_m": 16, "tile_n": 16, "tile_k": 8, "thread_m": 16, "thread_n": 16, "warp_m": 8, "stages": 1}
REST = {"fragments": 1, "padding": 0, "unroll_k": 8, "min_blocks": 1, "raster": 0, "split": "none", "split_k": 1}
BIN = Path(sys.executable).parent
HOPELESS = {"schedules": [{**SCHEDULE, **REST}]}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, at_work: Started) -> Iterator[str]:
    data = tmp_path_factory.mktemp("service")
    with at_work(load_settings(data_dir=data, workers=1, port=0)) as running:
        yield running.url


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("client")


@pytest.fixture
def cli(
    service: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs the command with CUKILN_URL set; returns its exit code and standard output."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUKILN_URL", service)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    Path("request.json").write_text(json.dumps(REQUEST))

    def run(*arguments: str) -> tuple[int, str]:
        code = exit_code(monkeypatch, *arguments)
        return code, capsys.readouterr().out

    return run


@pytest.fixture(scope="module")
def tuned(service: str) -> cukiln.Job:
    """The job of REQUEST, finished."""
    seen: list[cukiln.Progress] = []
    with cukiln.Client(service) as client:
        job = client.wait(client.submit(REQUEST), progress=seen.append, timeout=240)
    assert seen[-1].finish.done == 2
    return job


def test_every_problem_gets_a_verified_winner(tuned: cukiln.Job) -> None:
    assert (tuned.state, tuned.cached) == ("done", False)
    for problem in tuned.problems:
        assert problem.winner is not None
        assert problem.verdicts == {"ok": 2}
        assert problem.winner.verified in ("cpu", "cpu-unconfirmed", "gpu")
        assert problem.seconds.compile.wall > 0


def test_the_lines_of_the_readme_run_as_they_stand(service: str, tmp_path: Path) -> None:
    """Once each, at this service's address."""
    readme = (ROOT / "README.md").read_text().replace("http://127.0.0.1:8765", service)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    (python,) = (block for language, block in blocks if language == "python")
    (by_curl,) = (block for _, block in blocks if "curl -s" in block)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": f"{BIN}:{os.environ['PATH']}"}

    def run(*argv: str) -> str:
        done = subprocess.run(
            argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    out = run(sys.executable, "-c", python)
    assert out.startswith("done {") and out.rstrip().endswith("workspace: 0 bytes"), out
    if shutil.which("curl") is None:
        pytest.skip("its other lines need curl")
    assert '"state":"done"' in run("bash", "-euo", "pipefail", "-c", by_curl).replace(" ", "")
    (library,) = (path for path in tmp_path.iterdir() if re.fullmatch("[0-9a-f]{64}", path.name))
    assert hashlib.sha256(library.read_bytes()).hexdigest() == library.name


def test_the_second_run_is_answered_from_the_cache(tuned: cukiln.Job, cli: Callable[..., tuple[int, str]]) -> None:
    code, out = cli("tune", "request.json")
    assert code == 0
    assert "2 problems answered from the cache in " in out
    code, out = cli("tune", "request.json", "--json", "--again")
    answer = json.loads(out)
    assert (code, answer["state"], answer["cached"], answer["again"]["cached"]) == (0, "done", True, True)
    assert [p["winner"]["so_sha256"] for p in answer["problems"]] == [
        p.winner.so_sha256 for p in tuned.problems if p.winner
    ]
    assert [p["winner"]["measured_us"] for p in answer["problems"]] == [None, None]


def test_lookup_and_fetch_lead_to_a_kernel_that_only_lacks_a_gpu(
    tuned: cukiln.Job, cli: Callable[..., tuple[int, str]], folder: Path
) -> None:
    code, out = cli("lookup", "request.json")
    assert code == 0
    assert "plain" in out
    code, out = cli("fetch", "request.json", "--out", "out")
    assert (code, out.split()) == (0, ["out/plain/record.json", "out/fused/record.json"])
    kernel = cukiln.load(folder / "out/fused")
    assert kernel.entry is not None
    assert kernel.entry.launch.scalars == [0.5]
    assert kernel.workspace_bytes() == kernel.entry.workspace_bytes == 0
    if not Path("/dev/nvidiactl").exists():
        with pytest.raises(cukiln.DeviceError, match="cannot prepare the kernel on CUDA device 0"):
            kernel.prepare()


def test_wrong_operands_are_refused_by_the_library_itself(tuned: cukiln.Job, service: str, folder: Path) -> None:
    import numpy as np

    with cukiln.Client(service, cache_dir=folder / "cache") as client:
        kernel = cukiln.load(client.kernel(tuned.problems[0].key), client=client)
    a, b, out = np.zeros((40, 36), np.float32), np.zeros((48, 36), np.float32), np.zeros((40, 48), np.float32)
    with pytest.raises((TypeError, ValueError)):
        kernel(a.astype(np.float64), b, out)
    with pytest.raises((TypeError, ValueError)):
        kernel(a, b)


def test_a_refused_request_names_the_field(service: str) -> None:
    with cukiln.Client(service) as client, pytest.raises(cukiln.BadRequest) as caught:
        client.tune([{**PROBLEM, "m": 0}], target="sm_80")
    assert caught.value.detail is not None
    assert caught.value.detail.field == "problems[0].m"
    assert caught.value.status == 422


def test_an_unknown_job_key_and_blob_are_not_found(service: str) -> None:
    with cukiln.Client(service) as client:
        for call in (client.job, client.cancel, client.kernel, client.blob):
            with pytest.raises(cukiln.NotFound):
                call("0" * 64)


def test_a_job_with_a_hopeless_problem_is_partial_and_says_which_rule(service: str) -> None:
    hopeless = {"name": "hopeless", **PROBLEM, "search": HOPELESS}
    with cukiln.Client(service) as client:
        job = client.tune([{"name": "plain", **PROBLEM}, hopeless], **_options(), timeout=120)
    assert job.state == "partial"
    failed = next(problem for problem in job.problems if problem.name == "hopeless")
    assert failed.winner is None
    assert failed.error
    assert set(failed.rejected) and all(rule in failed.error for rule in failed.rejected)


def _options() -> dict[str, Any]:
    return {"target": REQUEST["target"], "search": REQUEST["search"]}


# The service that the command starts for itself


@dataclass
class Command:
    """`cukiln …` in a process of its own, whose service is of forks, too."""

    process: ServerProcess
    out: Path
    err: Path

    def wait_for_job(self) -> None:
        """Until it has sent its job."""
        wait_for(lambda: re.search("^Job ", self.err.read_text(), re.MULTILINE) or self.process.poll() is not None)
        assert self.process.poll() is None, self.err.read_text()


def started(folder: Path, compiled: Path, name: str, *arguments: str) -> Command:
    data = {"CUKILN_DATA": str(folder / "data"), "CUKILN_WORKERS": "1", "OPERATOR_PATH": str(PROBE)}
    environment = {name: value for name, value in {**os.environ, **data}.items() if name != "CUKILN_URL"}
    out, err = (folder / f"{name}.{stream}" for stream in ("out", "err"))
    words = [str(compiled), *arguments, "--url", "private"]
    return Command(start_process("command", *words, env=environment, log=out, errors=err), out, err)


def request_of(folder: Path, name: str, *factors: int) -> str:
    search = {"tunables": {"factor": factors, "way": ["copy"]}}
    problem = {"operator": "probe", "n": 1000, "search": search}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"target": "sm_80", "problems": [problem]}))
    return str(path)


def test_ctrl_c_cancels_a_job_and_a_command_outlives_the_service_that_another_had_started(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    compiled = compiled_in_this_run(tmp_path_factory)
    first = started(tmp_path, compiled, "first", "tune", request_of(tmp_path, "first", *range(1, 49)))
    first.wait_for_job()
    second = started(tmp_path, compiled, "second", "tune", request_of(tmp_path, "second", 50), "--json")
    second.wait_for_job()  # in the service of the first
    first.process.send_signal(signal.SIGINT)
    assert first.process.wait(240) == 130, first.err.read_text()
    rest = first.err.read_text()
    assert "is cancelled; what was finished is kept" in rest
    assert "Traceback" not in rest
    assert second.process.wait(240) == 0, second.err.read_text()
    err = second.err.read_text()
    assert "which another command had started, has ended: job" in err
    assert "Starting a service for this command" in err
    assert json.loads(second.out.read_text().splitlines()[-1])["state"] == "done"
    assert processes_of(tmp_path) == []


def test_a_service_that_is_stopping_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUKILN_URL", raising=False)
    monkeypatch.setenv("CUKILN_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("CUKILN_WORKERS", "1")
    warm_up()
    monkeypatch.setattr(serve, "ForkServer", WarmForkServer)
    lock = lock_folder(tmp_path / "data")
    said = io.StringIO()
    console = Console(file=said, width=200)
    with monkeypatch.context() as patch, pytest.raises(cukiln.ServerFailed, match="another cukiln serve"):
        patch.setattr(server, "BUSY_FOLDER_SECONDS", 0.0)
        server.find_service("private", console).__enter__()
    said.truncate(0)
    threading.Timer(1.0, os.close, [lock]).start()
    with server.find_service("private", console) as service:
        assert service.embedded
    assert said.getvalue().count("waiting for it") == 1
