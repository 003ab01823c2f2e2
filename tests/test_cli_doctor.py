"""`cukiln doctor` finds what is here, misses what is not, and says what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cukiln.cli import main
from cukiln.cli_doctor import Finding, Report, disk, doctor_report, gpu, host_compiler
from tests.fixtures_client import *  # noqa: F403
from tests.fixtures_client import ScriptedService, problem_json
from workers.toolchain import find_toolchain

CLOSED = "127.0.0.1:9"


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours = [name for name in os.environ if name.startswith("CUKILN_")]
    for name in [*ours, "REDIS_URL", "DATABASE_URL", "OPERATOR_PATH"]:
        monkeypatch.delenv(name, raising=False)


def findings() -> dict[str, Finding]:
    return {finding.name: finding for finding in doctor_report().findings}


def test_a_machine_with_everything_is_healthy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["cukiln", "doctor"])
    with pytest.raises(SystemExit) as stopped:
        main()
    out = capsys.readouterr().out
    assert stopped.value.code == 0, out
    assert [line.split("  ")[0] for line in out.splitlines()] == [
        "g++",
        "nvcc",
        "gpu",
        "redis",
        "database",
        "data folder",
        "cache folder",
        "temporary files",
        "All that is needed is here.",
    ]
    assert not (tmp_path / ".cukiln").exists()  # looking changes nothing


def test_the_report_is_json_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("REDIS_URL", f"redis://{CLOSED}/0")
    monkeypatch.setattr("sys.argv", ["cukiln", "doctor", "--json"])
    with pytest.raises(SystemExit) as stopped:
        main()
    answer = json.loads(capsys.readouterr().out)
    assert stopped.value.code == 1
    assert answer["healthy"] is False
    assert [f["name"] for f in answer["findings"] if f["state"] == "missing"] == ["redis"]


@pytest.mark.parametrize(
    ("variable", "value", "name", "words"),
    [
        ("REDIS_URL", f"redis://:secret@{CLOSED}/0", "redis", "does not answer"),
        ("DATABASE_URL", f"postgresql://me:secret@{CLOSED}/db", "database", "does not answer"),
        ("CUKILN_URL", f"http://{CLOSED}", "service", "CUKILN_URL is"),
        ("CUKILN_HOST", "0.0.0.0", "settings", "CUKILN_API_KEY"),
        ("CUKILN_NVCC", "/nowhere/nvcc", "nvcc", "CUKILN_NVCC names /nowhere/nvcc, which is not an executable file"),
        ("CUKILN_CXX", "no-such-g++", "g++", "CUKILN_CXX names no-such-g++, which is not an executable file"),
        ("OPERATOR_PATH", "/nowhere", "operators", "OPERATOR_PATH: /nowhere: an operator folder needs a file"),
    ],
)
def test_what_the_environment_names_must_be_there(
    variable: str, value: str, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    found = findings()[name]
    assert found.state == "missing"
    assert words in found.detail
    assert found.todo
    assert "secret" not in found.detail


def test_the_compilers_that_are_named_are_the_ones_that_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "my-g++"
    compiler.symlink_to(str(shutil.which("g++")))
    nvcc = find_toolchain().nvcc
    monkeypatch.setenv("CUKILN_CXX", str(compiler))
    monkeypatch.setenv("CUKILN_NVCC", str(nvcc))
    monkeypatch.setenv("OPERATOR_PATH", str(Path(__file__).parent / "operators" / "faulty"))
    found = findings()
    assert (found["g++"].state, found["g++"].detail) == ("found", str(compiler))
    assert found["nvcc"].state == "found" and f"({nvcc})" in found["nvcc"].detail
    assert found["operators"].state == "found"


def test_a_service_that_answers_is_found(scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKILN_URL", scripted.url)
    scripted.on("GET", "/v1/targets", {"targets": [], "toolchains": []})
    assert findings()["service"].state == "found"
    scripted.on("GET", "/v1/targets", problem_json(401, "unauthorized", "The API key is missing"))
    found = findings()["service"]
    assert found.state == "missing"
    assert found.todo is not None
    assert "set CUKILN_API_KEY" in found.todo


def test_no_host_compiler_says_how_to_install_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = host_compiler()
    assert (found.state, found.todo) == ("missing", "install it: apt-get install g++ (Debian, Ubuntu)")
    assert findings()["nvcc"].state == "missing"  # nvcc cannot do without


def test_a_machine_without_a_driver_is_told_what_happens_then() -> None:
    found = gpu("libcukiln-no-such-driver.so")
    assert found.state == "optional"
    assert "verified on the CPU and ranked by prediction" in found.detail


@pytest.mark.parametrize(("code", "count", "state"), [(0, 2, "found"), (100, 1, "optional"), (0, 0, "optional")])
def test_the_driver_is_asked_for_its_devices(code: int, count: int, state: str, tmp_path: Path) -> None:
    (tmp_path / "driver.c").write_text(
        f"""#include <string.h>
        int cuInit(unsigned flags) {{ return {code}; }}
        int cuDeviceGetCount(int* count) {{ *count = {count}; return 0; }}
        int cuDeviceGetName(char* name, int size, int device) {{ strcpy(name, device ? "Second" : "First"); return 0; }}
        """
    )
    library = tmp_path / "driver.so"
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    found = gpu(str(library))
    assert found.state == state
    assert found.detail == "First, Second" if state == "found" else f"(code {code})" in found.detail


def test_a_full_or_unwritable_disk_is_missing(tmp_path: Path) -> None:
    assert disk("data", tmp_path / "not/yet/made").state == "found"
    full = disk("data", tmp_path, wanted=10**18)
    assert (full.state, full.todo) == ("missing", "free some: 1000000000 GB are wanted")
    (tmp_path / "file").touch()
    blocked = disk("data", tmp_path / "file" / "folder")
    assert blocked.state == "missing"
    assert "cannot be written" in blocked.detail


def test_with_the_client_alone_only_a_service_is_needed(
    scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "storage.settings", None)
    alone = doctor_report()
    assert not alone.healthy
    assert {finding.name: finding.state for finding in alone.findings}["server"] == "missing"
    scripted.on("GET", "/v1/targets", {"targets": []})
    monkeypatch.setenv("CUKILN_URL", scripted.url)
    assert doctor_report().healthy


def test_one_missing_thing_makes_the_report_unhealthy() -> None:
    good, optional = Finding("a", "found", ""), Finding("b", "optional", "")
    assert Report((good, optional)).healthy
    assert not Report((good, Finding("c", "missing", ""))).healthy
