"""`cukiln doctor` finds what is here, misses what is not, and says what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cukiln.cli.doctor import (
    FIRST_DRIVERS,
    Finding,
    Report,
    client_gpu,
    disk,
    doctor_report,
    driver,
    fence,
    gpu,
    gpu_findings,
    host_compiler,
    package,
)
from cukiln.cli.main import main
from storage.config.settings import load_settings
from tests.support.fixtures.client import ScriptedService, problem_json
from tests.support.processes.fences import machine
from tests.support.run.places import FAULTY
from workers.compile.toolchain import find_toolchain
from workers.gpu.lease import take_lease
from workers.processes.fence.means import Means
from workers.processes.processes import Processes

CLOSED = "127.0.0.1:9"


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours = [name for name in os.environ if name.startswith("CUKILN_")]
    for name in [*ours, "REDIS_URL", "DATABASE_URL", "OPERATOR_PATH"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


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
    assert [line.split("  ")[0] for line in out.splitlines() if not line.startswith(" ")] == [
        "service",
        "g++",
        "nvcc",
        "pid namespace",
        "network namespace",
        "sockets",
        "Landlock",
        "own user",
        "pids limit",
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


def test_a_python_that_may_not_be_run_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch(mode=0o644)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr("sys.argv", ["cukiln", "doctor"])
    by_name = findings()
    for name in ("nvcc", "fence"):
        assert by_name[name].state == "missing" and "Permission denied" in by_name[name].detail
        assert "a user that may run this Python" in str(by_name[name].todo)
    assert by_name["database"].state == "found"


def test_a_folder_that_may_not_be_looked_into_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", denied)
    state = disk("data folder", tmp_path / "data")
    assert (state.state, state.detail) == ("missing", f"{tmp_path / 'data'} cannot be written: Permission denied")


@pytest.mark.parametrize(
    ("variable", "value", "name", "message"),
    [
        ("REDIS_URL", f"redis://:secret@{CLOSED}/0", "redis", "does not answer"),
        ("DATABASE_URL", f"postgresql://me:secret@{CLOSED}/db", "database", "does not answer"),
        ("CUKILN_URL", f"http://{CLOSED}", "service", "(CUKILN_URL)"),
        ("CUKILN_HOST", "0.0.0.0", "settings", "CUKILN_API_KEY"),
        ("CUKILN_NVCC", "/nowhere/nvcc", "nvcc", "CUKILN_NVCC names /nowhere/nvcc, which is not an executable file"),
        ("CUKILN_CXX", "no-such-g++", "g++", "CUKILN_CXX names no-such-g++, which is not an executable file"),
        ("CUKILN_TOOL_FOLDERS", "/nowhere", "nvcc", "CUKILN_TOOL_FOLDERS names /nowhere, which is not a folder"),
        ("OPERATOR_PATH", "/nowhere", "operators", "OPERATOR_PATH: /nowhere: an operator folder needs a file"),
    ],
)
def test_what_the_environment_names_must_be_there(
    variable: str, value: str, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    by_name = findings()[name]
    assert by_name.state == "missing"
    assert message in by_name.detail
    assert by_name.todo
    assert "secret" not in by_name.detail


def test_the_compilers_that_are_named_are_the_ones_that_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "my-g++"
    compiler.symlink_to(str(shutil.which("g++")))
    nvcc = find_toolchain().device_compiler.path
    monkeypatch.setenv("CUKILN_CXX", str(compiler))
    monkeypatch.setenv("CUKILN_NVCC", str(nvcc))
    monkeypatch.setenv("OPERATOR_PATH", str(FAULTY))
    by_name = findings()
    assert (by_name["g++"].state, by_name["g++"].detail) == ("found", str(compiler))
    assert (
        by_name["nvcc"].state == "found"
        and f"({nvcc}), for a driver of release 580 or later (CUDA 13)" in by_name["nvcc"].detail
    )
    assert by_name["operators"].state == "found"


def test_a_service_that_answers_is_found(scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKILN_URL", scripted.url)
    scripted.on("GET", "/v1/targets", {"targets": [], "toolchains": []})
    assert findings()["service"].state == "found"
    scripted.on("GET", "/v1/targets", problem_json(401, "unauthorized", "The API key is missing"))
    by_name = findings()["service"]
    assert by_name.state == "missing"
    assert by_name.todo is not None
    assert "set CUKILN_API_KEY" in by_name.todo


def test_each_means_of_the_fence_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["pid namespace", "network namespace", "sockets", "Landlock", "own user", "pids limit"]
    found = {each.name: each for each in fence()}
    assert list(found) == names
    assert [each.name for each in found.values() if each.state == "found"] == [
        name for name, is_there, _ in machine().in_force() if is_there
    ]
    monkeypatch.setattr(Processes, "means", Means(landlock=4))
    found = {each.name: each for each in fence()}
    assert {name for name, each in found.items() if each.state == "found"} - {"pids limit"} == {"Landlock"}
    assert found["Landlock"].detail == "ABI 4"
    assert all(found[name].todo for name in names[:3])


def test_no_host_compiler_says_how_to_install_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    state = host_compiler()
    assert (state.state, state.todo) == ("missing", "install it: apt-get install g++ (Debian, Ubuntu)")
    assert findings()["nvcc"].state == "missing"  # nvcc cannot do without


def test_a_machine_without_a_driver_says_what_happens_then() -> None:
    state = gpu("libcukiln-no-such-driver.so")
    assert state.state == "optional"
    assert "verified on the CPU and ranked by prediction" in state.detail


def driver_library(folder: Path, *, code: int = 0, count: int = 2, version: int | None = 13000) -> str:
    """A stand-in for libcuda.so.1 that answers so."""
    ask = f"int cuDriverGetVersion(int* version) {{ *version = {version}; return 0; }}" if version is not None else ""
    (folder / "driver.c").write_text(
        f"""#include <string.h>
        int cuInit(unsigned flags) {{ return {code}; }}
        int cuDeviceGetCount(int* count) {{ *count = {count}; return 0; }}
        int cuDeviceGetName(char* name, int size, int device) {{ strcpy(name, device ? "Second" : "First"); return 0; }}
        {ask}
        """
    )
    library = folder / f"driver{version}.so"
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, folder / "driver.c"], check=True)
    return str(library)


@pytest.mark.parametrize(("code", "count", "state"), [(0, 2, "found"), (100, 1, "optional"), (0, 0, "optional")])
def test_the_driver_is_asked_for_its_devices(code: int, count: int, state: str, tmp_path: Path) -> None:
    library = driver_library(tmp_path, code=code, count=count)
    found = gpu(library)
    assert found.state == state
    assert found.detail == "First, Second" if state == "found" else f"(code {code})" in found.detail
    more = list(gpu_findings(load_settings(), library))[1:]
    assert [each.name for each in more] == (
        ["driver", "cupy", "nvidia-ml-py", "gpu leases"] if state == "found" else []
    )


def test_gpus_that_are_not_to_be_used_need_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKILN_GPUS", "none")
    states = list(gpu_findings(load_settings(), driver_library(tmp_path)))
    assert [(each.name, each.state) for each in states] == [("gpu", "found"), ("measuring", "optional")]


@pytest.mark.parametrize(
    ("version", "needed", "state"),
    [(13000, 13, "found"), (13020, 13, "found"), (14000, 13, "found"), (12090, 13, "missing"), (12000, 12, "found")],
)
def test_a_driver_must_load_what_nvcc_makes(version: int, needed: int, state: str, tmp_path: Path) -> None:
    found = driver(needed, driver_library(tmp_path, version=version))
    assert found.state == state
    assert f"for CUDA {version // 1000}.{version % 1000 // 10}" in found.detail
    assert (found.todo is None) == (state == "found")
    if found.todo:
        assert f"release {FIRST_DRIVERS[13]} or later" in found.todo and "CUKILN_CUDA=12" in found.todo


def test_a_driver_without_a_version_is_taken_as_it_is(tmp_path: Path) -> None:
    assert driver(13, driver_library(tmp_path, version=None)).state == "found"


def test_a_package_is_found_by_its_distribution() -> None:
    assert package("numpy", "num(py)?", "").detail.startswith("numpy ")
    state = package("cupy", "no-such-package", "without it nothing is measured on the GPU")
    assert (state.state, state.detail) == ("optional", "not installed; without it nothing is measured on the GPU")
    assert state.todo == "install it: pip install --constraint constraints.txt --group gpu (for CUDA 12: gpu-cuda12)"


def test_who_has_a_gpu_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "leases"
    monkeypatch.setenv("CUKILN_GPU_LOCKS", str(folder))
    library = driver_library(tmp_path)

    def said() -> str:
        return list(gpu_findings(load_settings(), library))[-1].detail

    assert said() == f"{folder}: no GPU is in use"
    lease = take_lease(folder / "GPU-7.lock", "measures group 12", lambda _: None)
    assert said() == f"GPU-7 has process {os.getpid()}: measures group 12"
    lease.release()
    assert said() == f"{folder}: no GPU is in use"  # though the file is left
    assert (folder / "GPU-7.lock").exists()


def test_a_full_or_unwritable_disk_is_missing(tmp_path: Path) -> None:
    assert disk("data", tmp_path / "not/yet/made").state == "found"
    full = disk("data", tmp_path, enough=10**18)
    assert (full.state, full.todo) == ("missing", "free some: 1000000000 GB are wanted")
    (tmp_path / "file").touch()
    blocked = disk("data", tmp_path / "file" / "folder")
    assert blocked.state == "missing"
    assert "cannot be written" in blocked.detail


def test_a_client_alone_is_healthy_and_says_what_it_lacks(
    scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "storage.config.settings", None)
    monkeypatch.setattr("cukiln.settings.DEFAULT_URL", f"http://{CLOSED}")  # where a service may run beside the tests
    alone = doctor_report()
    assert alone.healthy
    assert {finding.name: finding.state for finding in alone.findings} == {
        "service": "optional",
        "server": "optional",
        "gpu": "optional",
        "cache folder": "found",
    }
    by_name = findings()
    assert "cukiln serve" in str(by_name["service"].todo)
    assert "to run one, install a driver for CUDA 13 (release 580 or later)" in by_name["gpu"].detail
    monkeypatch.setenv("CUKILN_URL", f"http://{CLOSED}")  # one that is named has to be there
    assert not doctor_report().healthy
    scripted.on("GET", "/v1/targets", {"targets": [], "toolchains": [], "devices": []})
    monkeypatch.setenv("CUKILN_URL", scripted.url)
    assert doctor_report().healthy
    monkeypatch.setenv("CUKILN_OFFLINE", "1")
    monkeypatch.setenv("CUKILN_URL", f"http://{CLOSED}")
    assert doctor_report().healthy


@pytest.mark.parametrize(
    ("version", "made_for", "todo"),
    [
        (12090, set(), "for CUDA 13 (release 580 or later), or use a service that compiles for CUDA 12 (release 525"),
        (12090, {13}, "for CUDA 13 (release 580 or later); or compile for CUDA 12 where the service runs"),
        (12090, {12}, None),
        (12090, {12, 13}, None),
        (11080, {12}, "install a driver for CUDA 12 (release 525 or later)"),
        (13000, set(), None),
    ],
)
def test_a_clients_gpu_needs_a_driver_for_the_services_kernels(
    version: int, made_for: set[int], todo: str | None, tmp_path: Path
) -> None:
    found = list(client_gpu(made_for, driver_library(tmp_path, version=version)))
    states = [("gpu", "found"), ("driver", "found" if todo is None else "missing")]
    assert [(each.name, each.state) for each in found] == states
    assert found[1].todo is None if todo is None else todo in str(found[1].todo)
    assert Report(tuple(found)).healthy == (todo is None)


@pytest.mark.parametrize(
    ("versions", "needed"),
    [
        ({"nvrtc": "12.9.86"}, "for CUDA 12 (release 525 or later)"),
        ({"nvcc": "13.2.86"}, "for CUDA 13 (release 580 or later)"),
        ({}, "for CUDA 13 (release 580 or later), or use a service that compiles for CUDA 12 (release 525 or later)"),
    ],
)
def test_the_service_is_asked_which_cuda_its_kernels_are_of(
    versions: dict[str, str], needed: str, scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolchain = {"digest": "1" * 64, "description": {"versions": versions}, "targets": ["sm_120a"]}
    scripted.on("GET", "/v1/targets", {"targets": [], "toolchains": [toolchain], "devices": []})
    monkeypatch.setitem(sys.modules, "storage.config.settings", None)
    monkeypatch.setenv("CUKILN_URL", scripted.url)
    report = findings()["gpu"]
    assert report.detail.partition("to run one, install a driver ")[2].startswith(needed)
    assert ("CUDA 12" in report.detail) == ("CUDA 12" in needed)


def test_one_missing_thing_makes_the_report_unhealthy() -> None:
    good, optional = Finding("a", "found", ""), Finding("b", "optional", "")
    assert Report((good, optional)).healthy
    assert not Report((good, Finding("c", "missing", ""))).healthy
