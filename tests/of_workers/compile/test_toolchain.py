"""CandidateVerdict the compilers, and what their digest depends on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.of_workers.compile.compiled import FAKE_NVCC, script
from workers.compile import toolchain as module
from workers.compile.toolchain import Nvcc, Toolchain, ToolchainMissing, find_toolchain, supported_targets
from workers.processes.process_stream import Finished
from workers.processes.processes import InfrastructureError, Processes


def test_the_wheels_nvcc_is_found_with_its_version(toolchain: Toolchain) -> None:
    assert "cu13/bin/nvcc" in str(toolchain.device_compiler.path)
    assert dict(toolchain.versions)["nvcc"].startswith("13.")
    assert (toolchain.tvm_ffi_include / "tvm/ffi/c_api.h").is_file()


def test_a_named_nvcc_comes_first(tmp_path: Path, processes: Processes) -> None:
    nvcc = script(tmp_path, "my-nvcc", FAKE_NVCC)
    toolchain = find_toolchain(processes, nvcc=str(nvcc))
    assert toolchain.device_compiler.path == nvcc
    assert dict(toolchain.versions)["nvcc"] == "12.9.41"


def test_without_wheels_the_path_is_searched(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "wheel_folders", list)
    nvcc = script(tmp_path, "nvcc", FAKE_NVCC)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert find_toolchain(processes).device_compiler == Nvcc(nvcc)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nvcc": "/nowhere/nvcc"}, "CUKILN_NVCC names /nowhere/nvcc"),
        ({"host_compiler": "no-such-g++"}, "apt-get install g\\+\\+"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(
    processes: Processes, arguments: dict[str, str], message: str
) -> None:
    with pytest.raises(ToolchainMissing, match=message):
        find_toolchain(processes, **arguments)


def test_no_nvcc_at_all_says_how_to_get_one(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "wheel_folders", list)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ToolchainMissing, match="`make run` installs it"):
        find_toolchain(processes, host_compiler="/usr/bin/g++")


@pytest.mark.parametrize(
    ("body", "message"), [("exit 3", "failed with 3"), ("echo no version here", "says no version")]
)
def test_an_nvcc_that_does_not_work_is_a_missing_one(
    tmp_path: Path, processes: Processes, body: str, message: str
) -> None:
    nvcc = script(tmp_path, "nvcc", body)
    with pytest.raises(ToolchainMissing, match=message):
        find_toolchain(processes, nvcc=str(nvcc))


def test_a_machine_that_kills_the_compiler_has_not_lost_it(tmp_path: Path, processes: Processes) -> None:
    nvcc = script(tmp_path, "nvcc", "kill -9 $$")
    with pytest.raises(InfrastructureError, match="SIGKILL"):
        find_toolchain(processes, nvcc=str(nvcc))


def test_supported_targets_have_a_data_sheet_and_code(toolchain: Toolchain) -> None:
    names = {sheet.name for sheet in supported_targets(toolchain)}
    assert {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_120a"} <= names
    old = dataclasses.replace(toolchain, gpu_codes=("sm_80", "sm_90"))
    assert {sheet.name for sheet in supported_targets(old)} == {"sm_80", "sm_90", "sm_90a", "cpu"}
    older = dataclasses.replace(toolchain, gpu_codes=("sm_75",))
    assert {sheet.name for sheet in supported_targets(older)} == {"sm_75"}


@pytest.mark.parametrize(
    "change",
    [
        {"versions": (("nvcc", "13.3.1"), ("host_compiler", "g++ 12"), ("tvm_ffi", "1"))},
        {"versions": (("nvcc", "13.2.86"), ("host_compiler", "g++ 13"), ("tvm_ffi", "1"))},
        {"versions": (("nvcc", "13.2.86"), ("host_compiler", "g++ 12"), ("tvm_ffi", "2"))},
    ],
)
def test_the_digest_differs_on_a_version(toolchain: Toolchain, change: dict[str, Any]) -> None:
    versions = (("nvcc", "13.2.86"), ("host_compiler", "g++ 12"), ("tvm_ffi", "1"))
    base = dataclasses.replace(toolchain, versions=versions)
    assert dataclasses.replace(base, **change).digest != base.digest


@pytest.mark.parametrize("flags", ["DEVICE_FLAGS", "HOST_FLAGS", "LINK_FLAGS"])
def test_the_digest_differs_on_flags(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch, flags: str) -> None:
    before = toolchain.digest
    monkeypatch.setattr(module, flags, (*getattr(module, flags), "-g"))
    assert toolchain.digest != before


def test_the_digest_has_no_path_and_no_list_of_targets(toolchain: Toolchain) -> None:
    moved = dataclasses.replace(
        toolchain,
        device_compiler=Nvcc(Path("/a/nvcc")),
        host_compiler=Path("/b/g++"),
        tvm_ffi_include=Path("/c"),
        gpu_codes=(),
    )
    assert moved.digest == toolchain.digest


def test_versions_are_asked_through_the_process_interface() -> None:
    class Deaf(Processes):
        def run(self, argv: object, **more: object) -> Finished:
            return Finished(("nvcc",), 1, b"", b"No space left on device", 0.0, 0.0, 0, None)

    with pytest.raises(InfrastructureError, match="No space left"):
        find_toolchain(Deaf())
