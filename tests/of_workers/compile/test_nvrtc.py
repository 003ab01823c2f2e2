"""CUDA 12 without an nvcc: NVRTC and ptxas, run as one compiler, under the same limits and with the same verdicts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from codegen.kernel import Kernel
from codegen.text.cubin import read_cubin
from codegen.text.render_group import symbols
from tests.of_workers.compile.compiled import FAKE_NVCC, compile_kernels, script, statuses
from tests.support.fixtures.compile import LIMITS, SM_90A, matmul_candidates, probe, probe_candidate
from workers.compile import toolchain as module
from workers.compile.nvrtc import driver
from workers.compile.toolchain import Nvcc, Nvrtc, Toolchain, ToolchainMissing, find_toolchain, supported_targets
from workers.processes.processes import InfrastructureError, Processes
from workers.steps.winner_library import build_winner

# The library's functions that the driver calls, one of which fails in a way of its own.
FAILING = """
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>
extern "C" {
int nvrtcCreateProgram(void**, const char*, const char*, int, void*, void*) { return 0; }
int nvrtcGetProgramLogSize(void*, size_t* size) { *size = 1; return 0; }
int nvrtcGetProgramLog(void*, char* log) { *log = 0; return 0; }
const char* nvrtcGetErrorString(int) { return "NVRTC_ERROR_OF_THE_TEST"; }
int nvrtcCompileProgram(void*, int, const char* const*) { %s }
}
"""


@pytest.fixture(scope="module")
def nvrtc(processes: Processes) -> Toolchain:
    compilers = find_toolchain(processes, cuda=12)
    if not isinstance(compilers.device_compiler, Nvrtc):
        compilers = with_nvrtc(processes)
    return compilers


def with_nvrtc(processes: Processes) -> Toolchain:
    """On a machine that has an nvcc of CUDA 12 too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "/usr/bin:/bin")
        patch.setattr(module, "TOOLKITS", Path("/nowhere"))
        return find_toolchain(processes, cuda=12)


def test_without_an_nvcc_of_cuda_12_it_is_nvrtc_of_the_wheels(nvrtc: Toolchain, toolchain: Toolchain) -> None:
    versions = dict(nvrtc.versions)
    assert (versions["nvrtc"], versions["ptxas"]) == ("12.9.86", "12.9.86")
    assert (nvrtc.cuda, toolchain.cuda) == (12, 13)
    names = {sheet.name for sheet in supported_targets(nvrtc)}
    assert {"sm_80", "sm_90", "sm_90a", "sm_100a", "sm_120", "sm_120a"} <= names
    assert nvrtc.digest != toolchain.digest


@pytest.mark.parametrize("part", ["nvrtc", "ptxas"])
def test_the_digest_differs_on_both_versions(nvrtc: Toolchain, part: str) -> None:
    other = replace(nvrtc, versions=tuple({**dict(nvrtc.versions), part: "12.8.93"}.items()))
    assert other.digest != nvrtc.digest


def test_the_digest_differs_on_what_stands_before_every_file_and_on_no_path(
    nvrtc: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = replace(nvrtc, device_compiler=Nvrtc(Path("/a/libnvrtc.so.12"), Path("/b/ptxas")))
    assert moved.digest == nvrtc.digest
    before = nvrtc.digest
    other = tmp_path / "prelude.h"
    other.write_text(driver.PRELUDE.read_text() + "#define MORE 1\n")
    monkeypatch.setattr(driver, "PRELUDE", other)
    assert nvrtc.digest != before


@pytest.mark.parametrize("place", ["in PATH", "a toolkit", "named"])
def test_an_nvcc_of_cuda_12_comes_before_nvrtc(
    place: str, tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("cuda-12.4/bin" if place == "a toolkit" else "bin")
    folder.mkdir(parents=True)
    nvcc = script(folder, "nvcc", FAKE_NVCC)
    monkeypatch.setattr(module, "TOOLKITS", tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin" if place != "in PATH" else f"{folder}:/usr/bin:/bin")
    compilers = find_toolchain(processes, nvcc=str(nvcc) if place == "named" else None, cuda=12)
    assert (compilers.device_compiler, compilers.cuda) == (Nvcc(nvcc), 12)


@pytest.mark.parametrize(("version", "cuda", "other"), [("12.9.41", 13, 12), ("13.0.48", 12, 13)])
def test_an_nvcc_of_another_cuda_is_refused_where_it_is_named(
    version: str, cuda: int, other: int, tmp_path: Path, processes: Processes
) -> None:
    nvcc = script(tmp_path, "nvcc", FAKE_NVCC.replace("12.9.41", version))
    with pytest.raises(ToolchainMissing, match=rf"is of CUDA {version}; .* set CUKILN_CUDA to {other}"):
        find_toolchain(processes, nvcc=str(nvcc), cuda=cuda)


def test_what_an_nvcc_of_cuda_12_makes_is_of_a_toolchain_of_its_own(
    nvrtc: Toolchain, toolchain: Toolchain, tmp_path: Path
) -> None:
    calls = f'[ "$1" = --version ] && exec echo "release 12.9, V12.9.41"; exec "{toolchain.device_compiler.path}" "$@"'
    nvcc = script(tmp_path, "nvcc", f"#!/bin/sh\n{calls}\n")  # it says that it is of CUDA 12
    processes = Processes(reads=[tmp_path])
    compilers = find_toolchain(processes, nvcc=str(nvcc), cuda=12)
    assert compilers.cuda == 12 and len({compilers.digest, nvrtc.digest, toolchain.digest}) == 3
    kernels: list[Kernel] = [probe()]
    outcome = compile_kernels(kernels, compilers, processes)
    processes.close()
    assert statuses(outcome, kernels) == ["ok"], outcome.why
    assert outcome.artifact is not None and "$ nvcc " in outcome.artifact.log


def test_an_nvcc_of_another_cuda_is_passed_over_where_it_is_not(
    tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, "nvcc", FAKE_NVCC)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(module, "wheel_folders", list)
    with pytest.raises(ToolchainMissing, match=r"no nvcc: .* is of CUDA 12.9.41: CUKILN_CUDA=12 compiles with it"):
        find_toolchain(processes, cuda=13)


def test_where_there_is_no_compiler_of_cuda_12_it_says_how_to_get_one(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "wheel_folders", list)
    monkeypatch.setattr(module, "TOOLKITS", Path("/nowhere"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(ToolchainMissing, match=r"no compiler of CUDA 12: .*`CUDA=12 make run` installs these"):
        find_toolchain(processes, cuda=12)


# ---- compiling


def test_a_kernel_has_the_same_code_in_any_file_and_in_its_own_library(nvrtc: Toolchain, processes: Processes) -> None:
    ours, other = probe_candidate(1), matmul_candidates(1)[0]
    together = compile_kernels([other.kernel, ours.kernel], nvrtc, processes)
    assert statuses(together, [other.kernel, ours.kernel]) == ["ok", "ok"], together
    artifact = together.artifact
    assert artifact is not None and artifact.cubin in artifact.library
    outcome = together.outcomes[ours.kernel.id]
    assert outcome.resources is not None and outcome.resources.registers > 0
    built = build_winner(ours, SM_90A, nvrtc, processes, LIMITS)
    assert built.code_digest == outcome.code_digest and built.cubin in built.library
    assert read_cubin(built.cubin).symbols == set(symbols(ours.kernel))
    names = [phase.name for phase in together.phases]
    assert names == ["render", "cicc", "ptxas", "nvcc", "render", "host", "link"]
    assert "$ nvrtc --target sm_90a" in artifact.log and str(Path.home()) not in artifact.log


@pytest.mark.parametrize(
    ("fault", "message"), [("front_end", "fault 1: the front end refuses"), ("ptxas_line", "no_such_instruction")]
)
def test_a_kernel_that_either_half_refuses_is_named(
    fault: str, message: str, nvrtc: Toolchain, processes: Processes
) -> None:
    good, bad = probe(1), probe(2, fault)
    outcome = compile_kernels([good, bad], nvrtc, processes)
    assert statuses(outcome, [good, bad]) == ["ok", "compile_error"], outcome.why
    assert message in outcome.outcomes[bad.id].log


def test_variables_that_are_named_stay_in_the_ptx() -> None:
    unused = ".global .align 4 .u32 _ZN1aE = 7;"
    used = [
        ".global .align 4 .b8 table[24] = {1, 2};",
        ".visible .global .align 4 .u32 counter;",
        "mov.u64 %rd1, table;",
    ]
    text = "\n".join([".version 8.8", unused, *used, "ld.global.u32 %r1, [counter];", ""])
    assert driver.without_unused_variables(text) == text.replace(unused + "\n", "")


# ---- failures


@pytest.fixture
def failing(tmp_path: Path, nvrtc: Toolchain) -> Iterator[tuple[Toolchain, Processes, Path]]:
    """A folder that children may read, with a place for a library."""
    processes = Processes(reads=[tmp_path])
    library = tmp_path / "libnvrtc.so.12"
    assert isinstance(nvrtc.device_compiler, Nvrtc)
    yield replace(nvrtc, device_compiler=replace(nvrtc.device_compiler, path=library)), processes, library
    processes.close()


def build(library: Path, body: str) -> None:
    source = library.with_suffix(".cpp")
    source.write_text(FAILING % body)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", library, source], check=True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 11;", "NVRTC failed of itself: NVRTC_ERROR_OF_THE_TEST"),
        ("raise(SIGSEGV); return 0;", "nvrtc died of signal 11"),
    ],
)
def test_a_crash_is_the_kernels_where_it_is_alone(
    body: str, message: str, failing: tuple[Toolchain, Processes, Path]
) -> None:
    tools, processes, library = failing
    build(library, body)
    kernels: list[Kernel] = [probe()]
    outcome = compile_kernels(kernels, tools, processes)
    assert statuses(outcome, kernels) == ["compile_error"]
    assert message in outcome.outcomes[kernels[0].id].log


@pytest.mark.parametrize("body", ["return 1;", "return 7;", "raise(SIGKILL); return 0;", None])
def test_the_machines_failure_is_no_kernels_verdict(
    body: str | None, failing: tuple[Toolchain, Processes, Path]
) -> None:
    tools, processes, library = failing
    if body is not None:  # else there is no such library
        build(library, body)
    with pytest.raises(InfrastructureError):
        compile_kernels([probe()], tools, processes)


def test_a_compiler_that_hangs_is_ended(failing: tuple[Toolchain, Processes, Path]) -> None:
    tools, processes, library = failing
    build(library, "for (;;) {}")
    kernel = probe()
    outcome = compile_kernels([kernel], tools, processes, replace(LIMITS, cpu_seconds=0.5))
    result = outcome.outcomes[kernel.id]
    assert (result.status, result.limit) == ("compile_timeout", {"cpu": 0.5})
    assert "nvrtc was ended: it used more than 0.5 CPU seconds" in result.log


def test_the_program_needs_no_package_and_writes_its_errors_in_one_line(tmp_path: Path, nvrtc: Toolchain) -> None:
    assert isinstance(nvrtc.device_compiler, Nvrtc)
    missing = [*nvrtc.device_compiler.program, "--target", "sm_80", "--time", "t", "-o", "o.cubin", "none.cu"]
    done = subprocess.run(missing, cwd=tmp_path, env={"PATH": os.defpath}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "nvrtc: No such file or directory: none.cu\n")
