"""`cukiln jobs`, `cancel`, `trace`, `operators`, `targets`, `cache`, `--version` and completion."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse

import cukiln as package
from cukiln.local_cache import CachedAnswer, LocalCache
from tests.support.fixtures.client import ScriptedService, exit_code, job_json, problem_json

Run = Callable[..., tuple[int, str, str]]
OPERATOR = {
    "operator": "matmul",
    "schema": {
        "description": "out = a · b",
        "properties": {"operator": {}, "m": {}, "n": {}, "layout": {}},
        "required": ["m", "n"],
    },
    "tunables": {"tile_m": {"allowed": [16, 32], "default": 32, "launch_time": False, "meaning": "rows of a tile"}},
    "search": {},
}


@pytest.fixture
def cukiln(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, scripted: ScriptedService
) -> Run:
    """Runs the command in an empty folder; returns its exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUKILN_URL", scripted.url)
    monkeypatch.setenv("CUKILN_CACHE", str(tmp_path / "cache"))

    def run(*arguments: str) -> tuple[int, str, str]:
        code = exit_code(monkeypatch, *arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def summary(**more: Any) -> dict[str, Any]:
    job = {"job": "0123456789abcdef" * 2, "state": "done", "cached": False, "created_at": 0.0, "finished_at": 65.0}
    return {**job, "problem_count": 1204, **more}


def test_jobs_are_listed_with_as_many_digits_as_other_commands_take(cukiln: Run, scripted: ScriptedService) -> None:
    scripted.on("GET", "/v1/jobs", {"jobs": [summary(), summary(cached=True)], "next_cursor": "more"})
    code, out, _ = cukiln("jobs", "--limit", "2", "--state", "done")
    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["job", "state", "problems", "made", "took"],
        ["01234567", "done", "1,204", "1970-01-01", "00:00", "1", "min", "5", "s"],
        ["01234567", "done", "1,204", "1970-01-01", "00:00", "cached"],
    ]
    assert len(scripted.seen) == 1  # no page more than is shown
    _, out, _ = cukiln("jobs", "--limit", "1", "--json")
    assert json.loads(out)["jobs"][0]["problem_count"] == 1204


def test_jobs_are_listed_by_name_and_labels_and_show_their_names(cukiln: Run, scripted: ScriptedService) -> None:
    asked: list[list[tuple[str, str]]] = []

    def answer(request: Request) -> JSONResponse:
        asked.append(request.query_params.multi_items())
        return JSONResponse({"jobs": [summary(name="nightly run"), summary()], "next_cursor": None})

    scripted.on("GET", "/v1/jobs", answer)
    code, out, _ = cukiln("jobs", "--name", "nightly run", "--label", "team=nlp", "--label", "rev=1=2")
    assert code == 0
    assert [line.split()[-2:] for line in out.splitlines()] == [["took", "name"], ["nightly", "run"], ["s", "-"]]
    assert asked == [[("limit", "1000"), ("name", "nightly run"), ("label", "team=nlp"), ("label", "rev=1=2")]]
    for labels in (["team"], ["=nlp"], ["team="], ["team=nlp", "team=vision"]):
        code, _, err = cukiln("jobs", *(word for label in labels for word in ("--label", label)))
        assert (code, err.count("\n")) == (2, 1) and f"--label '{labels[-1]}'" in err
    assert len(asked) == 1


def test_a_job_is_cancelled_and_one_that_is_over_is_said_to_be(cukiln: Run, scripted: ScriptedService) -> None:
    path = "/v1/jobs/01234567"
    scripted.on("GET", path, job_json("running"), job_json("cancelled"))
    scripted.on("DELETE", path, job_json("cancelled"))
    assert cukiln("cancel", "01234567") == (0, "Job job1 is cancelled; what was finished is kept.\n", "")
    scripted.on("GET", path, job_json("done"))
    scripted.on("DELETE", path, problem_json(409, "job-finished", "over"))
    assert cukiln("cancel", "01234567") == (0, "Job job1 was done already.\n", "")


def test_a_trace_becomes_a_file(cukiln: Run, scripted: ScriptedService) -> None:
    scripted.on("GET", "/v1/jobs/01234567/trace", {"traceEvents": [{}, {}]})
    code, out, _ = cukiln("trace", "01234567")
    assert (code, out.partition(":")[0]) == (0, "01234567-trace.json")
    assert json.loads(Path("01234567-trace.json").read_text()) == {"traceEvents": [{}, {}]}
    Path("file").touch()
    code, _, err = cukiln("trace", "01234567", "--out", "file/x.json")
    assert (code, err.partition(":")[0]) == (2, "cukiln")


def test_operators_show_their_fields_and_one_shows_its_tunables(cukiln: Run, scripted: ScriptedService) -> None:
    scripted.on("GET", "/v1/operators", {"operators": [OPERATOR]})
    assert cukiln("operators") == (0, "matmul\n  needs m, n; takes layout\n", "")
    code, out, _ = cukiln("operators", "matmul")
    assert (code, out.splitlines()[-1].split()) == (0, ["tile_m", "32", "16,", "32", "rows", "of", "a", "tile"])
    code, _, err = cukiln("operators", "mm")
    assert (code, err) == (2, "cukiln: there is no operator 'mm'; allowed: matmul\n")
    assert json.loads(cukiln("operators", "--json")[1])["operators"][0]["operator"] == "matmul"


def test_targets_say_what_compiles_now(cukiln: Run, scripted: ScriptedService) -> None:
    row = {"target": "sm_80", "name": "A100", "data_sheet": {}, "toolchains": ["t"], "device_classes": ["A", "B"]}
    idle = {**row, "target": "sm_75", "name": "T4", "toolchains": []}
    scripted.on("GET", "/v1/targets", {"targets": [row, idle], "toolchains": [], "paused": {"disk": ["w"]}})
    code, out, _ = cukiln("targets")
    assert (code, [line.split() for line in out.splitlines()]) == (
        0,
        [
            ["target", "GPU", "compiled", "device", "classes"],
            ["sm_80", "A100", "now", "A,", "B"],
            ["sm_75", "T4", "no", "worker", "A,", "B"],
            ["1", "worker", "paused:", "disk"],
        ],
    )


def test_the_cache_is_listed_verified_and_pruned(cukiln: Run, tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "cache")
    record = b"{}"
    answer = CachedAnswer("http://host", "a" * 64, 3, hashlib.sha256(record).hexdigest(), 5.0)
    cache.keep_answer("0" * 64, answer, record)
    library = cache.put(hashlib.sha256(b"x").hexdigest(), b"x")
    code, out, _ = cukiln("cache", "ls")
    assert code == 0
    assert out.splitlines()[1].split()[:2] == ["a" * 12, "3"]
    assert "1 record, 1 library, 1 other file" in out
    assert json.loads(cukiln("cache", "ls", "--json")[1])["kept"][0]["revision"] == 3
    assert cukiln("cache", "verify")[0] == 0
    library.write_bytes(b"y")
    code, out, _ = cukiln("cache", "verify")
    assert (code, out.splitlines()[0]) == (1, f"damaged, and removed: {library}")
    assert "Removed: 0 records" in cukiln("cache", "prune", "--bytes", "0")[1]  # all of it is in use
    assert "Removed: 1 record, 0 libraries, 1 other file" in cukiln("cache", "prune", "--all")[1]


def test_the_version_is_printed(cukiln: Run) -> None:
    assert cukiln("--version") == (0, f"cukiln {package.__version__}\n", "")


def test_commands_are_completed(cukiln: Run) -> None:
    assert "--install-completion" in cukiln("--help")[1]
    code = "import sys; from cukiln.cli.main import main; sys.argv = ['cukiln']; main()"
    asked = {"_CUKILN_COMPLETE": "complete_bash", "COMP_WORDS": "cukiln can", "COMP_CWORD": "1"}
    path = os.pathsep.join([str(Path(package.__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **asked, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert set(done.stdout.split()) == {"candidates", "cancel"}, done.stderr
