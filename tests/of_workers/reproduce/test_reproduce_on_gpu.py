"""The half of run.py that drives a GPU, on a simulated CuPy whose library runs the same kernel on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cukiln.types import CandidateFacts
from tests.support.fixtures.candidate import MEASUREMENT, facts
from tests.support.fixtures.codegen import default_candidate, matmul
from tests.support.kernels.cpu_helpers import toolchain
from workers.cpu.build import CPU_FLAGS
from workers.cpu.library import CpuLibrary
from workers.cuda.library_entries import LibraryEntries
from workers.gpu.interface import LaunchRefused
from workers.reproduce.on_gpu import GpuAbsent, run_on_gpu
from workers.reproduce.write_folder import write_folder

# The plain C entries of a winner's library over the CPU emulation of its kernel.
SHIM = """
extern "C" __attribute__((visibility("default"))) int cukiln_prepare(int) { return 0; }
extern "C" __attribute__((visibility("default"))) const char* cukiln_last_error() { return cukiln_message(); }
extern "C" __attribute__((visibility("default"))) int64_t cukiln_workspace_bytes(const int64_t* e, const int32_t* l) {
  return NAMESPACE_workspace_bytes(e, l);
}
extern "C" __attribute__((visibility("default"))) int cukiln_launch(void* const* pointers, const int64_t* extents,
    const int32_t* launch, const double* scalars, void* workspace, void* stream) {
  cukiln::cpu::Call call = {};
  call.pointers = pointers; call.integers = extents; call.launch = launch; call.scalars = scalars;
  call.workspace = workspace; call.seed = 1; call.cpu_seconds = 20;
  return NAMESPACE_run(&call);
}
"""


class SimulatedCupy(types.ModuleType):
    """What `reproduce_gpu` uses of CuPy, its memory being that which the library guards."""

    def __init__(self, library: Path) -> None:
        super().__init__("cupy")
        self._library = CpuLibrary(library)
        self.gpus = 1
        self.cuda = types.SimpleNamespace(
            Device=self._device,
            get_current_stream=lambda: types.SimpleNamespace(ptr=0),
            runtime=types.SimpleNamespace(getDeviceCount=lambda: self.gpus),
        )

    def asarray(self, values: np.ndarray[Any, Any]) -> Any:
        memory = self._library._memory("memory", values.nbytes, 16, writable=True)
        memory[...] = values
        return _Array(memory)

    def full(self, size: int, value: int, dtype: Any) -> Any:
        return self.asarray(np.full(size, value, dtype))

    def asnumpy(self, array: Any) -> np.ndarray[Any, Any]:
        host: np.ndarray[Any, Any] = array.values.copy()
        return host

    def _device(self, number: int) -> Any:
        return _Scope()


class _Array:
    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values
        self.data = types.SimpleNamespace(ptr=values.ctypes.data)

    def fill(self, value: int) -> None:
        self.values.fill(value)


class _Scope(types.SimpleNamespace):
    def __enter__(self) -> _Scope:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture(scope="module")
def recorded() -> CandidateFacts:
    candidate = default_candidate(matmul(m=96, n=64, k=64), "sm_80", split="workspace", split_k=2)
    fields = {
        "candidate": candidate.id,
        "problem": candidate.problem.canonical(),
        "schedule": candidate.schedule.as_dict(),
        "kernel": candidate.kernel.id,
        "slice": None,
        "toolchain": None,
        "device_class": "NVIDIA H200",
        "measured_us": 5.0,
        "measurement": MEASUREMENT,
    }
    return facts(**fields)


@pytest.fixture(scope="module")
def folder(recorded: CandidateFacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written and built, its GPU library replaced."""
    folder = tmp_path_factory.mktemp("gpu") / "folder"
    write_folder(recorded, folder)
    namespace = json.loads((folder / "recipe.json").read_text())["namespace"]
    (folder / "build").mkdir()
    source = folder / "build" / "library.cpp"
    source.write_text((folder / "kernel_cpu.cpp").read_text() + SHIM.replace("NAMESPACE", namespace))
    command = [str(toolchain().host_compiler), *CPU_FLAGS, "-o", "library.so", source.name, "-lm"]
    subprocess.run(command, cwd=source.parent, check=True)
    return folder


@pytest.fixture
def cupy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCupy]:
    simulated = SimulatedCupy(folder / "build" / "library.so")
    monkeypatch.setitem(sys.modules, "cupy", simulated)
    yield simulated
    simulated._library.free()


def test_a_right_kernel_is_ok(folder: Path, cupy: SimulatedCupy) -> None:
    outcome = run_on_gpu(folder, 0)

    assert [outcome["verdict"], outcome["message"]] == ["ok", ""]
    assert [line.split()[0] for line in outcome["cases"]] == ["integer", "normal", "normal"]
    assert "extents 96, 64, 64" in outcome["cases"][2].replace("1, 96", "96"), "the whole problem is run too"


def test_a_wrong_result_is_incorrect(folder: Path, cupy: SimulatedCupy) -> None:
    path = folder / "cases" / "gpu-normal" / "expected.npy"
    content = path.read_bytes()
    expected = np.load(path)
    expected.flat[0] += 100.0
    np.save(path, expected)
    try:
        outcome = run_on_gpu(folder, 0)
    finally:
        path.write_bytes(content)

    assert outcome["verdict"] == "incorrect"
    assert "1 of" in outcome["message"] and "normal inputs" in outcome["message"]


def test_what_is_never_written_is_found_by_its_poison(
    folder: Path, cupy: SimulatedCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LibraryEntries, "launch", lambda *_: None)
    outcome = run_on_gpu(folder, 0)

    assert outcome["verdict"] == "incorrect" and "never written" in outcome["message"]


def test_a_refused_launch_is_a_runtime_error_in_the_library_s_words(
    folder: Path, cupy: SimulatedCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise LaunchRefused("no such device")

    monkeypatch.setattr(LibraryEntries, "launch", refuse)

    assert [run_on_gpu(folder, 0)[name] for name in ("verdict", "message")] == ["runtime_error", "no such device"]


@pytest.mark.parametrize(("gpus", "message"), [(0, "CUDA shows 0"), (1, "there is no GPU 1")])
def test_a_gpu_that_is_not_there_is_said(folder: Path, cupy: SimulatedCupy, gpus: int, message: str) -> None:
    cupy.gpus = gpus
    with pytest.raises(GpuAbsent, match=message):
        run_on_gpu(folder, 1)
