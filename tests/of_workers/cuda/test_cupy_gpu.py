"""The driver of a real GPU where there is none: choosing, timing, errors, and that CuPy has what is used of it."""

from __future__ import annotations

import ast
import builtins
import importlib.metadata
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement

from codegen.operators import operator
from tests.gpu import check_measuring
from tests.gpu.run_check import NotChecked, NotRight
from tests.support.fixtures.codegen import default_candidate, matmul
from tests.support.gpu.cupy_streams import CudaError, StackedStreams, fake_cuda
from workers.cuda import cupy_gpu, cupy_timer
from workers.cuda.cupy_gpu import CupyGpu, format_uuid, large_inputs
from workers.cuda.cupy_timer import LONGEST_HEAD_START_US, WARM_UPS, GraphTimer
from workers.cuda.library_entries import LibraryEntries, load_failure
from workers.gpu.interface import Device, DriverTooOld, GpuFault, GpuMissing, LaunchRefused, LoadFailed, choose_device

NO_CUPY = "CuPy, which needs no GPU here, is not installed: pip install --constraint constraints.txt --group gpu"
UUIDS = ("GPU-11111111-2222-3333-4444-555555555555", "GPU-aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee")
DEVICES = [Device("NVIDIA H200", uuid, (9, 0), "580.1", 132, 60 * 2**20, 2**37) for uuid in UUIDS]


# --- which GPU


@pytest.mark.parametrize(("asked", "number"), [("0", 0), ("1", 1), (UUIDS[1], 1), (UUIDS[1].upper(), 1)])
def test_a_gpu_is_chosen_by_number_or_uuid(asked: str, number: int) -> None:
    assert choose_device(DEVICES, asked) is DEVICES[number]


@pytest.mark.parametrize("asked", ["2", "GPU-1", "", "-1", "H200"])
def test_a_gpu_that_is_not_there_is_answered_with_those_that_are(asked: str) -> None:
    there = f"0 = NVIDIA H200 {UUIDS[0]}, 1 = NVIDIA H200 {UUIDS[1]}"
    with pytest.raises(GpuMissing, match=f"there is no GPU {asked} on this machine: it has {there}"):
        choose_device(DEVICES, asked)


def test_a_uuid_is_spelled_as_nvidia_smi_does() -> None:
    assert format_uuid(bytes(range(16))) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


@pytest.mark.parametrize(
    ("name", "uuid"),
    [
        (b"NVIDIA H100 80GB HBM3", "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"),
        (b"NVIDIA H100 80GB HBM3 MIG 1g.10gb", "MIG-00010203-0405-0607-0809-0a0b0c0d0e0f"),
    ],
)
def test_a_part_of_a_gpu_has_its_own_kind_of_uuid(monkeypatch: pytest.MonkeyPatch, name: bytes, uuid: str) -> None:
    cupy = StackedStreams().module()
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    cupy.cuda.runtime.getDeviceProperties = lambda ordinal: {**properties, "name": name}
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cupy_gpu, "uuid_of", lambda ordinal: bytes(range(16)))
    (device,) = cupy_gpu.list_devices()
    assert device.uuid == uuid and choose_device([device], uuid) is device


def test_without_cupy_the_message_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    for ask in (cupy_gpu.list_devices, lambda: cupy_gpu.open_gpu("0")):
        with pytest.raises(GpuMissing, match=r"CuPy.*pip install .*--group gpu"):
            ask()


def test_the_modules_are_imported_without_cupy() -> None:
    program = "import sys; sys.modules['cupy'] = sys.modules['pynvml'] = None; import workers.cuda.cupy_gpu"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)


def test_cuda_headers_that_are_missing_are_no_fault_of_any_kernel() -> None:
    """CuPy 14, `core.pyx`, where `find_nvidia_header_directory("cudart")` finds none."""
    words = "Failed to find CUDA headers. Please install CUDA toolkit headers (e.g., pip install cupy-cuda13x[ctk])"
    cuda = StackedStreams()
    gpu = CupyGpu(cuda.module(), 0, DEVICES)

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(words)

    gpu.arrays.RawKernel = gpu.arrays.asarray = refuse
    for work in (gpu.poison_shared, lambda: gpu.warm_up(lambda what: None)):
        with pytest.raises(GpuMissing, match=r"Failed to find CUDA headers.*pip install .*--group gpu"):
            work()
    with pytest.raises(RuntimeError, match="another"), cupy_gpu.with_headers():
        raise RuntimeError("another")


def test_the_gpu_group_alone_brings_the_headers_that_cupy_compiles_with() -> None:
    waiting = list(tomllib.loads(Path("pyproject.toml").read_text())["dependency-groups"]["gpu"])
    files: dict[str, str] = {}
    seen = set()
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name in seen or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        seen.add(requirement.name)
        try:
            installed = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the vendor's libraries
        files |= {Path(str(file)).name: requirement.name for file in installed.files or ()}
        waiting += installed.requires or ()
    assert "cupy-cuda13x" in seen and {"cuda_runtime.h", "cuda_fp16.h"} <= files.keys()


# --- errors


@pytest.mark.parametrize(
    ("status", "message"),
    [(35, "driver is missing"), (100, "has no NVIDIA GPU"), (46, "exclusive use"), (999, "cannot be used")],
)
def test_a_machine_without_a_usable_gpu_says_why(monkeypatch: pytest.MonkeyPatch, status: int, message: str) -> None:
    def refuse() -> int:
        raise CudaError(status, "cudaErrorOfSomeKind: words")

    cupy = fake_cuda()
    cupy.cuda.runtime.getDeviceCount = refuse
    cupy.cuda.runtime.driverGetVersion = cupy.cuda.runtime.runtimeGetVersion = lambda: 0
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(GpuMissing, match=f"{message}.*cudaErrorOfSomeKind: words"):
        cupy_gpu.list_devices()


def test_a_driver_older_than_cupys_cuda_is_distinguished_from_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise CudaError(35, "cudaErrorInsufficientDriver: words")

    cupy = fake_cuda()
    cupy.cuda.runtime.getDeviceCount = refuse
    cupy.cuda.runtime.driverGetVersion, cupy.cuda.runtime.runtimeGetVersion = (lambda: 12040), (lambda: 13020)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(DriverTooOld, match=r"for CUDA 12\.4, and CuPy is for CUDA 13: .* 580 or later, .*CUDA=12"):
        cupy_gpu.list_devices()


def test_an_error_of_cuda_is_a_fault_with_cudas_words_and_others_are_not() -> None:
    gpu = object.__new__(CupyGpu)
    gpu.arrays = fake_cuda()
    for error in (CudaError(700, "cudaErrorIllegalAddress: x"), gpu.arrays.cuda.driver.CUDADriverError("y")):
        with pytest.raises(GpuFault, match=str(error)), gpu.faults():
            raise error
    with pytest.raises(ValueError, match="z"), gpu.faults():
        raise ValueError("z")


# --- CuPy's current stream


def test_our_stream_stays_cupys_current_one() -> None:
    cuda = StackedStreams()
    gpu = CupyGpu(cuda.module(), 0, DEVICES)
    ours = gpu.stream
    for work in (gpu.poison_shared, lambda: gpu.to_host(np.ones((2, 3)).T), gpu.poison_shared):
        work()
        assert cuda.current.ptr == ours != 0
    assert [stream.ptr for stream in cuda.launched_on] == [ours, ours]


def test_the_scripts_checks_leave_the_stream_current_that_the_others_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = StackedStreams()
    monkeypatch.setitem(sys.modules, "cupy", cuda.module())
    monkeypatch.setattr(cupy_gpu, "uuid_of", lambda ordinal: bytes.fromhex(UUIDS[ordinal][4:].replace("-", "")))
    monkeypatch.setattr(cupy_gpu.gpu_state, "driver_version", lambda: "580.1")
    gpu = cupy_gpu.open_gpu("0")
    assert check_measuring.CHECKS["device"](gpu).startswith(f"NVIDIA H200, {UUIDS[0]}, driver 580.1")
    assert cuda.current.ptr == gpu.stream
    assert cupy_gpu.open_gpu("0").stream != gpu.stream  # as CUDA has it: else none of these tests would see it


def test_a_warm_up_does_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = object.__new__(CupyGpu)
    done: list[str] = []
    gpu.arrays = np

    def timer(calls: Any) -> Any:
        for call in calls:
            call()
        return SimpleNamespace(sample=lambda: done.append("sample"))

    monkeypatch.setattr(gpu, "to_host", np.asarray, raising=False)
    monkeypatch.setattr(gpu, "address", lambda array: array.ctypes.data, raising=False)
    for name in ("poison_shared", "synchronize", "state"):
        monkeypatch.setattr(gpu, name, partial(done.append, name), raising=False)
    monkeypatch.setattr(gpu, "timer", timer, raising=False)
    gpu.warm_up(lambda what: done.append("beat"))
    assert {"poison_shared", "synchronize", "state", "sample", "beat"} == set(done)
    assert done.index("beat") == 0 and done[-1] == "synchronize"


# --- the timer, on a stream that keeps books


class Event:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.at = 0.0

    @property
    def done(self) -> bool:
        return self._stream.host_us >= self.at

    def record(self, stream: Stream) -> None:
        self.at = stream.queue(0.0)

    def synchronize(self) -> None: ...


class Stream:
    """A GPU that does what is queued in order; `host_us` is how far the host is, `gpu_us` when the GPU will be done."""

    def __init__(self, launch_us: float = 1.0, refuses: str = "") -> None:
        self.host_us = self.gpu_us = 0.0
        self.launch_us, self.refuses = launch_us, refuses
        self.capturing: list[float] | None = None
        self.graphs = self.plain = self.uploads = 0

    def queue(self, us: float) -> float:
        self.host_us += self.launch_us
        self.gpu_us = max(self.gpu_us, self.host_us) + us
        return self.gpu_us

    def call(self, us: float) -> None:
        if self.capturing is not None:
            if self.refuses:
                raise LaunchRefused(self.refuses)
            self.capturing.append(us)
        else:
            self.plain += 1
            self.queue(us)

    def begin_capture(self, mode: int) -> None:
        self.capturing = []

    def end_capture(self) -> Any:
        calls, self.capturing = self.capturing or [], None
        if self.refuses:
            raise CudaError(901, "cudaErrorStreamCaptureInvalidated")

        def launch(stream: Stream) -> None:
            self.graphs += 1
            self.queue(sum(calls))

        return SimpleNamespace(launch=launch, upload=lambda stream: setattr(self, "uploads", self.uploads + 1))

    def synchronize(self) -> None:
        self.host_us = max(self.host_us, self.gpu_us)


@contextmanager
def no_faults() -> Iterator[None]:
    yield


def timer_of(stream: Stream, calls: list[Callable[[], None]]) -> GraphTimer:
    cupy = fake_cuda(Event=lambda: Event(stream), get_elapsed_time=lambda start, end: (end.at - start.at) / 1000)
    return GraphTimer(cupy, stream, calls, wait=stream.queue, faults=no_faults)


def test_all_calls_are_recorded_once_and_replayed_for_each_sample() -> None:
    stream = Stream()
    timer = timer_of(stream, [lambda: stream.call(30.0), lambda: stream.call(12.0)])
    assert timer.recorded and timer.why == "" and stream.uploads == 1
    assert [timer.sample() for _ in range(3)] == pytest.approx([42.0] * 3)
    assert stream.graphs == WARM_UPS + 3 and stream.plain == 0


def test_the_hosts_own_time_is_no_part_of_a_sample() -> None:
    stream = Stream(launch_us=400.0)
    timer = timer_of(stream, [lambda: stream.call(30.0)])
    assert timer.sample() == pytest.approx(30.0)
    before = stream.graphs
    assert timer.sample() == pytest.approx(30.0) and stream.graphs == before + 1  # the head start is kept


def test_a_host_that_is_never_in_time_ends_the_search_for_a_head_start() -> None:
    stream = Stream(launch_us=2 * LONGEST_HEAD_START_US)
    timer = timer_of(stream, [lambda: stream.call(30.0)])
    assert timer.sample() >= 30.0


def test_calls_that_cannot_be_recorded_are_launched_one_by_one_and_the_timer_says_why() -> None:
    stream = Stream(refuses="a module cannot be loaded under capture")
    timer = timer_of(stream, [lambda: stream.call(30.0), lambda: stream.call(12.0)])
    assert not timer.recorded and timer.why == "a module cannot be loaded under capture"
    assert timer.sample() == pytest.approx(42.0)
    assert stream.graphs == 0 and stream.plain == 2 * (WARM_UPS + 1)


def test_a_lost_device_is_not_taken_for_a_call_that_cannot_be_recorded() -> None:
    class Lost(Stream):
        def synchronize(self) -> None:
            if self.refuses and self.host_us:
                raise GpuFault("cudaErrorIllegalAddress")

        def begin_capture(self, mode: int) -> None:
            super().begin_capture(mode)
            self.host_us = 1.0

    stream = Lost(refuses="the launch failed")
    with pytest.raises(GpuFault, match="IllegalAddress"):
        timer_of(stream, [lambda: stream.call(1.0)])


# --- a group's library

LIBRARY = """
#include <stdint.h>
#include <stdio.h>
static char words[200];
extern "C" {
const char* cukiln_last_error() { return words; }
int cukiln_prepare(int device) { snprintf(words, 200, "RuntimeError: no device %d", device); return device > 3; }
int64_t cukiln_workspace_bytes_ID(const int64_t* extents, const int32_t* launch) { return extents[0] * launch[1]; }
int cukiln_launch_ID(void* const* pointers, const int64_t* extents, const int32_t* launch, const double* scalars,
                     void* workspace, void* stream) {
  snprintf(words, 200, "%zx %lld %d %g %zx %zx", (size_t)pointers[1], (long long)extents[9], launch[0], scalars[0],
           (size_t)workspace, (size_t)stream);
  return 1;
}
}
"""


def group_library(folder: Path, synchronize: Callable[[], None]) -> tuple[LibraryEntries, str]:
    kernel = default_candidate(matmul()).kernel
    (folder / "library.cpp").write_text(LIBRARY.replace("ID", kernel.id[:16]))
    subprocess.run(["g++", "-shared", "-fPIC", "library.cpp", "-o", "library.so"], cwd=folder, check=True, timeout=240)
    return LibraryEntries(folder / "library.so", [kernel], stream=0x77, synchronize=synchronize), kernel.id


def test_a_call_reaches_the_library_with_everything_in_its_place(tmp_path: Path) -> None:
    library, kernel = group_library(tmp_path, lambda: None)
    assert library.workspace_bytes(kernel, [3] * 10, [0, 2**31 - 1]) == 3 * (2**31 - 1)
    with pytest.raises(LaunchRefused, match=r"^7f0011223344 81985529216486895 -5 0.5 feed 77$"):
        library.launch(kernel, [1, 0x7F0011223344], [*range(9), 0x123456789ABCDEF], [-5], [0.5], 0xFEED)


def test_a_library_that_cannot_be_prepared_is_refused_with_its_words(tmp_path: Path) -> None:
    library, _ = group_library(tmp_path, lambda: None)
    library.prepare(0)
    with pytest.raises(LoadFailed, match="no device 4"):
        library.prepare(4)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("out of memory (CUDA error 2)", LoadFailed),
        ("no kernel image is available (CUDA error 209)", LoadFailed),
        ("unsupported toolchain (CUDA error 222)", LoadFailed),
        ("driver mismatch (CUDA error 803)", LoadFailed),
        ("no NVIDIA driver: libcuda.so.1 cannot be loaded", LoadFailed),
        ("device kernel image is invalid (CUDA error 200)", LoadFailed),
        ("device kernel source is invalid (CUDA error 300)", LoadFailed),
        ("cuFuncSetAttribute: invalid argument (CUDA error 1)", LaunchRefused),
        ("named symbol not found (CUDA error 500)", LaunchRefused),
    ],
)
def test_a_load_that_fails_is_the_machines_fault_unless_the_file_is_no_good(
    message: str, kind: type[Exception]
) -> None:
    assert type(load_failure(message)) is kind


def test_a_call_that_fails_on_a_lost_device_is_a_fault(tmp_path: Path) -> None:
    def lost() -> None:
        raise GpuFault("cudaErrorIllegalAddress")

    library, kernel = group_library(tmp_path, lost)
    with pytest.raises(GpuFault):
        library.launch(kernel, [1, 2], [0] * 10, [0], [], 0)


def test_a_file_that_is_no_library_of_these_kernels_is_refused(tmp_path: Path) -> None:
    group_library(tmp_path, lambda: None)
    other = default_candidate(matmul(dtype="float16")).kernel
    with pytest.raises(LaunchRefused, match=r"cannot be loaded.*undefined symbol"):
        LibraryEntries(tmp_path / "library.so", [other], stream=0, synchronize=lambda: None)
    with pytest.raises(LaunchRefused, match="cannot be loaded"):
        LibraryEntries(tmp_path / "none.so", [other], stream=0, synchronize=lambda: None)


# --- what is used of CuPy


def test_operands_for_the_ceilings_are_random_and_not_the_same() -> None:
    for name in ("float16", "bfloat16", "float32", "int8"):
        made = large_inputs(512, name)
        a, b = (made[key].astype(np.float64) for key in ("a", "b"))
        assert a.shape == b.shape == (512, 512) and str(made["a"].dtype) == name
        assert (a != b).mean() > 0.9 and a.std() > 0.9 and len(np.unique(a, axis=0)) == 128


def chains(path: str) -> set[str]:
    """The dotted names that a module takes from CuPy: behind `cupy`, `arrays`, `self._cupy`; `cuda`, `runtime`."""
    roots = {"cupy": "", "arrays": "", "_cupy": "", "cuda": "cuda.", "runtime": "cuda.runtime."}
    found = set()
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
            if names and isinstance(node, ast.Attribute) and node.attr in roots:
                found.add(roots[node.attr] + ".".join(names))
                break
        if names and isinstance(node, ast.Name) and node.id in roots:
            found.add(roots[node.id] + ".".join(names))
    return found


@pytest.mark.parametrize(
    "module",
    ["cuda/cupy_gpu", "cuda/cupy_timer", "vendor/bench", "vendor/convolution", "vendor/matmul", "vendor/reduction"],
)
def test_every_name_that_is_used_of_cupy_is_there(module: str) -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip(NO_CUPY)
    import cupy

    own = {"kernel", "nbytes", "data.ptr", "items"}  # `items`: of a dictionary of arrays
    missing = set()
    used = chains(str(Path(cupy_timer.__file__).parents[1] / f"{module}.py"))
    for chain in used:
        at: Any = cupy
        for name in chain.split("."):
            at = getattr(at, name, builtins.NotImplemented)
        if at is NotImplemented and chain not in own:
            missing.add(chain)
    assert used and not missing


def test_streams_events_and_graphs_of_cupy_have_the_methods_that_are_called() -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip(NO_CUPY)
    import cupy

    uses = {
        cupy.cuda.Stream: ("begin_capture", "end_capture", "synchronize", "__enter__"),
        cupy.cuda.Event: ("record", "synchronize", "done"),
        cupy.cuda.Graph: ("launch", "upload"),
        cupy.RawKernel: ("compile", "max_dynamic_shared_size_bytes", "__call__"),
        cupy.cuda.MemoryPointer: ("copy_from_device_async", "ptr"),
        cupy.cuda.Device: ("use", "mem_info"),
        cupy.cuda.MemoryPool: ("free_all_blocks",),
        cupy.ndarray: ("data", "nbytes", "copy", "view", "itemsize", "astype"),
    }
    assert not {(kind, name) for kind, names in uses.items() for name in names if not hasattr(kind, name)}


def test_the_small_kernels_compile(tmp_path: Path) -> None:
    from tests.gpu.run_primitives import find_nvcc

    (tmp_path / "small.cu").write_text(cupy_gpu.KERNELS)
    command = [find_nvcc(), "-cubin", "-arch=sm_90", "-o", "small.cubin", "small.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    cubin = (tmp_path / "small.cubin").read_bytes()
    assert b"cukiln_poison_shared" in cubin and b"cukiln_wait" in cubin


# --- the script for a machine with a GPU


def test_the_script_says_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert check_measuring.main([]) == check_measuring.NO_GPU
    assert "CuPy" in capsys.readouterr().err


def test_the_script_honours_the_gpu_module_and_leaves_out_what_looks_into_cupy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word for name in ("device", "timer", "state") for word in ("--only", name)]
    assert check_measuring.main(["--gpu-module", "tests.support.gpu.fake_gpu", *words]) == check_measuring.RIGHT
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "timer: not run: tests.support.gpu.fake_gpu does not drive CuPy"
    assert lines[1].startswith("device: Simulated GPU, ") and lines[2].startswith("state: simulated True, ")
    assert check_measuring.OF_CUPY < check_measuring.CHECKS.keys() > check_measuring.OF_MODULE


def test_the_script_fails_where_a_check_does_and_stops_where_the_context_is_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wrong(gpu: object) -> str:
        raise NotRight("too slow")

    def lost(gpu: object) -> str:
        raise GpuFault("cudaErrorIllegalAddress")

    checks = {"one": lambda gpu: "fine", "two": wrong, "three": lost, "four": lambda gpu: "never"}
    assert check_measuring.run_checks(None, {"one": checks["one"]}) == check_measuring.RIGHT
    assert check_measuring.run_checks(None, checks) == check_measuring.WRONG
    printed = capsys.readouterr().out
    assert "one: fine" in printed and "two: WRONG: too slow" in printed and "IllegalAddress" in printed
    assert "never" not in printed


def test_an_error_that_nothing_foresaw_ends_its_own_check_alone(capsys: pytest.CaptureFixture[str]) -> None:
    errors = (
        RuntimeError("Failed to find CUDA headers"),
        MemoryError(),
        AttributeError("no cuda"),
        AssertionError("off"),
    )

    def raising(error: Exception) -> Callable[[object], str]:
        def check(gpu: object) -> str:
            raise error

        return check

    def not_here(gpu: object) -> str:
        raise NotChecked("PyTorch is not for CUDA")

    checks = {type(error).__name__: raising(error) for error in errors} | {"not here": not_here}
    assert check_measuring.run_checks(None, checks | {"last": lambda gpu: "fine"}) == check_measuring.WRONG
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "RuntimeError: WRONG: RuntimeError: Failed to find CUDA headers",
        "MemoryError: WRONG: MemoryError: ",
        "AttributeError: WRONG: AttributeError: no cuda",
        "AssertionError: WRONG: AssertionError: off",
        "not here: not checked: PyTorch is not for CUDA",
        "last: fine",
    ]
    assert check_measuring.run_checks(None, {"not here": not_here}) == check_measuring.RIGHT


def test_a_gpu_that_cannot_be_opened_for_any_reason_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(module: str, device: str) -> None:
        raise RuntimeError("Failed to find CUDA headers")

    monkeypatch.setattr(check_measuring, "open_gpu", broken)
    assert check_measuring.main(["--gpu-module", "tests.support.gpu.fake_gpu"]) == check_measuring.WRONG
    assert "opening the GPU: WRONG: RuntimeError: Failed to find CUDA headers" in capsys.readouterr().err


class Vendor:
    """Gives the reference of whatever it is asked, times `factor`."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def vendor(self, problem: Any, inputs: Any, sets: int) -> list[Any]:
        value, _ = operator("matmul").reference(problem, inputs)
        return [SimpleNamespace(run=lambda number: None, result=lambda number: value * self._factor, describe=dict)]

    def to_host(self, array: Any) -> Any:
        return array


def test_the_scripts_problems_are_problems_and_a_wrong_vendor_is_found() -> None:
    for number, fields in enumerate(check_measuring.vendor_problems()):
        problem = operator("matmul").parse({"operator": "matmul", **fields})
        assert check_measuring.vendor_error(Vendor(1.0), problem) == 0.0  # type: ignore[arg-type]
        with pytest.raises(NotRight, match="off by"):
            check_measuring.vendor_error(Vendor(1.1 if number % 2 else float("nan")), problem)  # type: ignore[arg-type]
