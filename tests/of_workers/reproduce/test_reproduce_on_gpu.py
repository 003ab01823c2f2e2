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
from tests.of_service.test_api_candidate import MEASUREMENT, facts
from tests.support.cpu_helpers import toolchain
from tests.support.fixtures_codegen import default_candidate, matmul
from workers.cpu.build import CPU_FLAGS
from workers.cpu.library import CpuLibrary
from workers.reproduce import driver as reproduce_driver
from workers.reproduce.on_gpu import GpuAbsent, run_on_gpu
from workers.reproduce.write_folder import write_folder

# The plain C entries of a winner's library over the CPU twin of its kernel.
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
    """What `reproduce_gpu` uses of CuPy, its memory being that which the library guards. A launch takes `launch_us` of
    the events' time."""

    def __init__(self, library: Path, launch_us: float = 5.0, gpus: int = 1) -> None:
        super().__init__("cupy")
        self._library = CpuLibrary(library)
        self.launch_us, self.gpus, self.elapsed_us = launch_us, gpus, 0.0
        self.captured = self.recorded = 0
        self.cuda = types.SimpleNamespace(
            Device=self._device,
            Stream=lambda non_blocking: self._stream(),
            Event=self._event,
            get_current_stream=self._current_stream,
            get_elapsed_time=lambda begin, end: (end.at - begin.at) / 1e3,
            runtime=types.SimpleNamespace(
                getDeviceCount=lambda: self.gpus, getDeviceProperties=lambda number: {"name": b"NVIDIA H200"}
            ),
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

    def _device(self, number: int = 0) -> Any:
        return _Scope(attributes={"L2CacheSize": 30_000})  # of which two sets of operands are the double

    def _stream(self) -> Any:
        def launch(stream: Any) -> None:
            self.elapsed_us += self.recorded * self.launch_us

        def begin_capture() -> None:
            self.captured += 1
            self.recorded = 0

        graph = types.SimpleNamespace(launch=launch)
        return _Scope(begin_capture=begin_capture, end_capture=lambda: graph, synchronize=lambda: None)

    def _current_stream(self) -> Any:
        self.recorded += 1  # each launch asks for it
        return types.SimpleNamespace(ptr=0)

    def _event(self) -> Any:
        event = types.SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda stream: setattr(event, "at", self.elapsed_us)
        return event


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


def test_a_right_kernel_is_ok_and_timed(folder: Path, cupy: SimulatedCupy) -> None:
    outcome = run_on_gpu(folder, 0)

    assert [outcome["verdict"], outcome["message"], outcome["device"]] == ["ok", "", "NVIDIA H200"]
    assert outcome["time"] == {"median": 5.0, "low": 5.0, "high": 5.0}
    assert [line.split()[0] for line in outcome["cases"]] == ["integer", "normal", "normal"]
    assert "extents 96, 64, 64" in outcome["cases"][2].replace("1, 96", "96"), "the whole problem is run too"
    assert cupy.captured == 2, "once to see how many launches a sample needs"


def test_a_wrong_result_is_incorrect_and_not_timed(folder: Path, cupy: SimulatedCupy) -> None:
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
    assert "time" not in outcome


def test_what_is_never_written_is_found_by_its_poison(
    folder: Path, cupy: SimulatedCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.reproduce.on_gpu._Kernel.call", lambda *_: lambda: True)
    outcome = run_on_gpu(folder, 0)

    assert outcome["verdict"] == "incorrect" and "never written" in outcome["message"]


def test_a_refused_launch_is_a_runtime_error_in_the_library_s_words(
    folder: Path, cupy: SimulatedCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.reproduce.on_gpu._Kernel.call", lambda *_: lambda: False)
    monkeypatch.setattr("workers.reproduce.on_gpu._Kernel.last_error", lambda _: "no such device")

    assert [run_on_gpu(folder, 0)[name] for name in ("verdict", "message")] == ["runtime_error", "no such device"]


@pytest.mark.parametrize(("gpus", "words"), [(0, "CUDA shows 0"), (1, "there is no GPU 1")])
def test_a_gpu_that_is_not_there_is_said(folder: Path, cupy: SimulatedCupy, gpus: int, words: str) -> None:
    cupy.gpus = gpus
    with pytest.raises(GpuAbsent, match=words):
        run_on_gpu(folder, 1)


@pytest.mark.parametrize(
    ("here", "device", "line"),
    [
        ((4.9, 5.0, 5.1), "NVIDIA H200", "AGREES  time"),
        ((5.12, 5.15, 5.2), "NVIDIA H200", "AGREES  time"),
        ((6.0, 6.1, 6.2), "NVIDIA H200", "DIFFERS time"),
        ((3.0, 3.1, 3.2), "NVIDIA H200", "DIFFERS time"),
        ((3.0, 3.1, 3.2), "NVIDIA L4", "        time"),
    ],
)
def test_times_agree_where_their_intervals_meet_on_the_same_gpu(
    recorded: CandidateFacts,
    capsys: pytest.CaptureFixture[str],
    here: tuple[float, float, float],
    device: str,
    line: str,
) -> None:
    report = reproduce_driver.Report()
    time = dict(zip(("low", "median", "high"), here, strict=True))
    outcome = {"time": time, "device": device}
    reproduce_driver._check_time(recorded.model_dump(mode="json"), outcome, reproduce_driver.Code(True), report)

    assert capsys.readouterr().out.startswith(line)
    assert report.status == (1 if line.startswith("DIFFERS") else 0)


def test_a_time_of_another_compiler_s_code_is_shown_and_not_compared(
    recorded: CandidateFacts, capsys: pytest.CaptureFixture[str]
) -> None:
    report = reproduce_driver.Report()
    outcome = {"time": {"low": 3.0, "median": 3.1, "high": 3.2}, "device": "NVIDIA H200"}
    code = reproduce_driver.Code(True, "compiler differs")
    reproduce_driver._check_time(recorded.model_dump(mode="json"), outcome, code, report)

    assert "of the code of another compiler" in capsys.readouterr().out
    assert (report.seen, report.status) == ([], 0)
