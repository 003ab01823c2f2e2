"""Workspaces of loaded kernels: sharing, allocation, release. Over a fake driver."""

from __future__ import annotations

import ctypes
import hashlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tvm_ffi

from cukiln.kernels import load_kernel
from cukiln.kernels.workspace_pool import GpuMemory, WorkspacePool, of_cpu
from tests.gpu import check_workspaces
from tests.support.fixtures.library import Built, Child, launches
from tests.support.gpu import fake_gpu
from tests.support.gpu.cupy_streams import CudaError, StackedStreams
from tests.support.gpu.fake_cuda.tensors import FakeTensor
from workers.compile.toolchain import ToolchainMissing
from workers.gpu.interface import Device


def script(built: Built, body: str) -> str:
    """`kernel(n)` calls a kernel of two launches that needs 4 * n bytes between them."""
    data = built.path.read_bytes()
    other = built.path.with_name("other.so")  # still loads: the loader ignores what follows the last section
    other.write_bytes(data + b"\0")
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (built.path, other)]
    return f"""
import os, threading
import cukiln
from tensors import FakeTensor as T, StreamTensor
kernel, other = (
    cukiln.load(path, sha256=digest, cache_dir="cache")
    for path, digest in (({str(built.path)!r}, {digests[0]!r}), ({str(other)!r}, {digests[1]!r}))
)
def call(n=1000, which=kernel, kind=T, device=0, **options):
    which(kind((n,), device=device), kind((n,), device=device), scalars=(2.5,), **options)
def attempt(*arguments, **options):
    try:
        return call(*arguments, **options)
    except Exception as error:
        return [type(error).__name__, str(error)]
def at_once(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
answer = None
""" + "\n".join(line[4:] if line.startswith("    ") else line for line in body.splitlines())


def memory(log: list[str]) -> list[tuple[str, int, int]]:
    """What was allocated and freed: (alloc, address, bytes) and (free, address, 0)."""
    lines = (line.split() for line in log if line.startswith(("alloc ", "free ")))
    return [(word, int(first), int(second)) for word, first, second in lines]


@pytest.fixture
def run(two_launches: Built, child: Child, fake_driver: Path) -> Any:
    def of(body: str, **environment: str) -> tuple[Any, list[str]]:
        options = {"FAKE_CUDA_PEEK": "16", **environment}  # the low half of the workspace's address
        return child(script(two_launches, body), driver=fake_driver, **options)

    return of


def test_calls_of_every_kernel_and_thread_on_a_stream_share_one_buffer_of_the_bytes_they_need(run: Any) -> None:
    body = """
    for _ in range(5):
        call(stream=7)
        call(which=other, stream=7)
    at_once(lambda: call(stream=7), lambda: call(500, stream=7))
    """
    _, log = run(body)
    ((word, address, size),) = memory(log)
    assert (word, size) == ("alloc", 4000)
    assert [launch["peek"] for launch in launches(log)] == [address] * 24


def test_a_larger_need_replaces_the_buffer_and_a_smaller_one_does_not(run: Any) -> None:
    _, log = run("for n in (1000, 500, 2000, 1500): call(n, stream=7)")
    (_, first, _), freed, (_, second, size) = memory(log)
    assert freed == ("free", first, 0)
    assert size == 8000
    assert [launch["peek"] for launch in launches(log)] == [first] * 4 + [second] * 4


def test_two_threads_on_two_streams_never_share_a_buffer_nor_come_between_a_calls_launches(run: Any) -> None:
    body = """
    def work(first):
        for i in range(200): call(stream=7 + (first + i) % 2)
    at_once(lambda: work(0), lambda: work(1), lambda: work(0))
    """
    _, log = run(body)
    seen = launches(log)
    buffers = {stream: {each["peek"] for each in seen if each["stream"] == stream} for stream in (7, 8)}
    assert all(len(each) == 1 for each in buffers.values())
    assert buffers[7] != buffers[8]
    assert len(memory(log)) == 2
    for stream in (7, 8):
        functions = [each["function"] for each in seen if each["stream"] == stream]
        assert functions == [1000, 1001] * 300


def test_devices_have_buffers_of_their_own(run: Any) -> None:
    _, log = run("for device in (0, 1, 0, 1): call(device=device, stream=7)")
    assert [word for word, *_ in memory(log)] == ["alloc", "alloc"]
    seen = launches(log)
    assert {(each["context"], each["peek"]) for each in seen} == {
        (100, seen[0]["peek"]), (101, seen[2]["peek"])
    }  # fmt: skip
    assert seen[0]["peek"] != seen[2]["peek"]


def test_the_stream_of_a_thread_is_another_one_in_every_thread(run: Any) -> None:
    _, log = run("for _ in range(2): at_once(lambda: (call(stream=2), call(stream=2)))")
    assert [word for word, *_ in memory(log)] == ["alloc", "alloc"]


def test_the_callers_own_workspace_needs_no_other(run: Any) -> None:
    _, log = run('call(workspace=T((4000,), "uint8", address=0x72000000), stream=7)')
    assert memory(log) == []
    assert [launch["peek"] for launch in launches(log)] == [0x72000000] * 2


def test_a_call_runs_on_its_frameworks_current_stream_or_on_the_one_that_is_given(run: Any) -> None:
    body = """
    call(kind=StreamTensor)
    call(kind=StreamTensor, stream=5)
    call(kind=StreamTensor, workspace=T((4000,), "uint8", address=0x72000000), stream=5)
    call()
    """
    _, log = run(body)
    seen = [(launch["stream"], launch["peek"]) for launch in launches(log)]
    assert [stream for stream, _ in seen] == [77, 77, 5, 5, 5, 5, 0, 0]
    assert len({place for _, place in seen}) == 4


def test_a_call_runs_on_cupys_current_stream_and_asks_for_no_order_with_another(run: Any) -> None:
    body = """
    import sys, types
    class ndarray(T):
        data = types.SimpleNamespace(device_id=0)
        def __dlpack__(self, stream=None):
            if stream != -1:  # CuPy has the other stream wait for its own, which no captured graph may do
                raise RuntimeError("cudaErrorStreamCaptureIsolation")
            return super().__dlpack__()
    streams = {0: 66}
    current = lambda device: types.SimpleNamespace(ptr=streams[device])
    sys.modules["cupy"] = types.SimpleNamespace(ndarray=ndarray, cuda=types.SimpleNamespace(get_current_stream=current))
    workspace = T((4000,), "uint8", address=0x72000000)
    call(kind=ndarray, workspace=workspace)
    call(kind=ndarray, workspace=workspace, stream=5)
    call(workspace=workspace)
    """
    _, log = run(body)
    assert [launch["stream"] for launch in launches(log)] == [66, 66, 5, 5, 0, 0]


def test_tensors_of_cupy_are_handed_over_while_their_stream_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = StackedStreams()

    class Array(FakeTensor):
        data = SimpleNamespace(device_id=0)

        def __dlpack__(self, stream: int | None = None, **_: Any) -> Any:
            cuda.hand_over(stream)
            return super().__dlpack__()

    cupy = cuda.module()
    cupy.ndarray = Array
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with cuda.stream(non_blocking=True) as stream:
        stream.begin_capture()
        load_kernel._own_tensor(Array((4,)))
        stream.end_capture()
        # As tvm-ffi asks by itself: the capture is broken, and everything after it.
        stream.begin_capture()
        with pytest.raises(CudaError, match="legacy stream"):
            tvm_ffi.from_dlpack(Array((4,)))
        with pytest.raises(CudaError, match="Invalidated"):
            stream.end_capture()


def test_a_captured_graph_keeps_its_buffers_for_itself(run: Any) -> None:
    body = """
    call(stream=7)
    for number in "1", "2":
        os.environ["FAKE_CUDA_CAPTURE"] = number
        call(stream=7)
        call(2000, stream=7)
        call(stream=7)
    del os.environ["FAKE_CUDA_CAPTURE"]
    call(stream=7)
    answer = [cukiln.release_workspaces(), cukiln.release_workspaces()]
    call(stream=7)
    answer += [cukiln.release_workspaces(captured=True)]
    """
    answer, log = run(body)
    assert answer == [4000, 0, 4000 + 2 * (4000 + 8000)]
    seen = [launch["peek"] for launch in launches(log)][::2]
    eager, small, large, _, small_2, large_2, *_ = seen
    assert seen[:8] == [eager, small, large, large, small_2, large_2, large_2, eager]
    assert len({*seen[:7]}) == 5
    freed = [address for word, address, _ in memory(log) if word == "free"]
    assert freed[0] == eager
    assert {*freed[1:]} == {seen[8], small, large, small_2, large_2}


def test_memory_is_taken_in_the_mode_that_a_capture_allows_and_the_mode_is_given_back(run: Any) -> None:
    _, log = run("call(stream=7)")
    words = [line for line in log if line.split()[0] in ("mode", "alloc")]
    assert [word.split()[0] for word in words] == ["mode", "alloc", "mode", "mode", "mode"]  # the last two of the load
    assert [words[0], *words[2:]] == ["mode 2 0", "mode 0 0"] * 2


def test_a_kernel_is_loaded_while_another_thread_captures_without_breaking_that(run: Any) -> None:
    body = """
    kernel.prepare(0)
    call(stream=7)
    call(which=other, stream=7)  # its first call loads it
    call(which=other, device=1, stream=7)
    call(which=other, device=1, stream=7)
    """
    _, log = run(body, FAKE_CUDA_CAPTURED_ELSEWHERE="1")
    assert [line for line in log if line.startswith("load ")] == ["load 100 0", "load 100 0", "load 101 0"]
    assert len(launches(log)) == 8 and "a capture is broken 0 0" not in log
    modes = [line for line in log if line.startswith("mode ")]
    assert modes == ["mode 2 0", "mode 0 0"] * 5  # one module prepared, two loaded by calls, two workspaces


def test_cupys_memory_is_taken_while_another_thread_captures_without_breaking_that(run: Any) -> None:
    body = """
    import contextlib, ctypes, sys, types
    class ndarray(T):
        data = types.SimpleNamespace(device_id=0)
        def __dlpack__(self, stream=None):
            return super().__dlpack__()
    def alloc(size):
        address = ctypes.c_uint64()
        assert ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) == 0
        return types.SimpleNamespace(ptr=address.value)
    entered = lambda *_: contextlib.nullcontext()
    current = lambda device: types.SimpleNamespace(ptr=66)
    cuda = types.SimpleNamespace(get_current_stream=current, Device=entered, ExternalStream=entered, alloc=alloc)
    sys.modules["cupy"] = types.SimpleNamespace(ndarray=ndarray, cuda=cuda)
    call(kind=ndarray)
    """
    _, log = run(body, FAKE_CUDA_CAPTURED_ELSEWHERE="1")
    assert [word for word, *_ in memory(log)] == ["alloc"] and len(launches(log)) == 2
    assert "a capture is broken 0 0" not in log


def test_without_the_drivers_leave_a_load_would_break_the_capture(run: Any) -> None:
    body = """
    import contextlib, cukiln.kernels.load_kernel
    cukiln.kernels.load_kernel.outside_captures = contextlib.nullcontext
    try:
        kernel.prepare(0)
    except Exception as error:
        answer = str(error)
    """
    answer, log = run(body, FAKE_CUDA_CAPTURED_ELSEWHERE="1")
    assert "cannot be loaded on cuda:0" in answer and "a capture is broken 0 0" in log


@pytest.mark.parametrize("failing", ["cuMemAlloc_v2", "cuStreamGetCaptureInfo_v2"])
def test_a_driver_that_has_no_memory_is_an_error_and_no_launch(failing: str, run: Any) -> None:
    answer, log = run("answer = attempt(stream=7)", FAKE_CUDA_FAIL=failing)
    words = f"no workspace for the call: {failing}: no kernel image is available (CUDA error 209)"
    assert answer == ["DeviceError", words]
    assert launches(log) == []


def test_after_a_failed_allocation_the_next_call_works(run: Any) -> None:
    body = """
    call(stream=7)
    os.environ["FAKE_CUDA_FAIL"] = "cuMemAlloc_v2"
    answer = attempt(2000, stream=7)
    del os.environ["FAKE_CUDA_FAIL"]
    call(2000, stream=7)
    """
    answer, log = run(body)
    assert answer[0] == "DeviceError"
    assert len(launches(log)) == 4


def test_without_a_driver_a_call_says_so(two_launches: Built, child: Child) -> None:
    answer, _ = child(script(two_launches, "answer = attempt(stream=7)"))
    assert answer[0] == "DeviceError"
    assert "no NVIDIA driver" in answer[1]


class Frameworks:
    """PyTorch and CuPy as far as the pool calls them; `seen`: what was taken and given back, and on which stream."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.current: tuple[int, int] | None = None
        streams = SimpleNamespace(
            stream=self._entered,
            # torch/csrc/cuda/Stream.cpp: without a handle a stream of PyTorch's own pool.
            ExternalStream=lambda stream, device: (device, stream or 0xABCD),
            default_stream=lambda device: (device, 0),
        )
        self.torch = SimpleNamespace(Tensor=type("Tensor", (), {}), cuda=streams, uint8="uint8", empty=self._empty)
        cuda = SimpleNamespace(
            Device=lambda device: self._entered((device, -1)),
            ExternalStream=lambda stream, device: self._entered((device, stream)),
            alloc=lambda size: Held(self, size, "cupy"),
        )
        self.cupy = SimpleNamespace(ndarray=type("ndarray", (), {}), cuda=cuda)

    @contextmanager
    def _entered(self, stream: tuple[int, int]) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _empty(self, size: int, dtype: str, device: str) -> Held:
        assert (dtype, device) == ("uint8", f"cuda:{self.current[0] if self.current else None}")
        return Held(self, size, "torch")


class Held:
    def __init__(self, frameworks: Frameworks, size: int, name: str) -> None:
        self.frameworks, self.what = frameworks, (name, size, frameworks.current)
        self.ptr = 0x1000 * (1 + len(frameworks.seen))
        frameworks.seen.append(("taken", *self.what))

    def data_ptr(self) -> int:
        return self.ptr

    def __del__(self) -> None:
        self.frameworks.seen.append(("given back", *self.what))


class NoCapture(GpuMemory):
    def capture_of(self, device: int, stream: int) -> int:
        return 0


@pytest.mark.parametrize(
    ("name", "stream", "named"),
    [("torch", 7, 7), ("torch", 2, 2), ("torch", 1, 0), ("torch", 0, 0), ("cupy", 7, 7), ("cupy", 0, 0)],
)
def test_memory_comes_from_the_tensors_framework_on_the_calls_stream(
    name: str, stream: int, named: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    frameworks = Frameworks()
    monkeypatch.setitem(sys.modules, "torch", frameworks.torch)
    monkeypatch.setitem(sys.modules, "cupy", frameworks.cupy)
    tensor = frameworks.torch.Tensor() if name == "torch" else frameworks.cupy.ndarray()
    pool = WorkspacePool(NoCapture())
    addresses = []
    for size in (100, 60, 200):
        with pool.lend(1, stream, size, tensor) as address:
            addresses.append(address)
    assert addresses[0] == addresses[1] != addresses[2]
    # The framework keeps what it is given back for the stream that it was taken on: kernels there may still use it.
    on = (1, named)
    assert frameworks.seen == [
        ("taken", name, 100, on), ("given back", name, 100, on), ("taken", name, 200, on)
    ]  # fmt: skip
    assert pool.release(captured=False) == 200
    assert frameworks.seen[3:] == [("given back", name, 200, on)]


def test_the_script_for_a_gpu_says_that_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert check_workspaces.main([]) == check_workspaces.NO_GPU
    assert "CuPy" in capsys.readouterr().err


def test_the_script_for_a_gpu_runs_nothing_by_another_gpu_module_and_nothing_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_workspaces.main(["--gpu-module", "tests.support.gpu.fake_gpu"]) == check_workspaces.NOT_RUN
    assert capsys.readouterr().err.startswith("not run: tests.support.gpu.fake_gpu does not drive CuPy")

    def missing(device: object) -> bytes:
        raise ToolchainMissing("no nvcc")

    monkeypatch.setattr(check_workspaces, "list_devices", lambda module: fake_gpu.list_devices())
    monkeypatch.setattr(check_workspaces, "split_library", missing)
    assert check_workspaces.main([]) == check_workspaces.NOT_RUN
    assert capsys.readouterr().err == "not run: no compiler, and no --library: no nvcc\n"


def test_the_scripts_threads_use_the_device_that_was_chosen() -> None:
    used: list[int] = []
    device = SimpleNamespace(use=lambda: used.append(threading.get_ident()))
    worked: list[int] = []
    check_workspaces.at_once([lambda: worked.append(threading.get_ident())] * 3, device)
    assert sorted(used) == sorted(worked) and len(worked) == 3


def test_what_a_thread_of_the_script_raises_is_raised() -> None:
    def broken() -> None:
        raise ValueError("in a thread")

    with pytest.raises(ValueError, match="in a thread"):
        check_workspaces.at_once([list, broken], SimpleNamespace(use=list))


def test_each_check_of_the_script_is_run_whatever_the_one_before_raised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> str:
        raise MemoryError("no memory on the device")

    kernel: Any = SimpleNamespace(prepare=lambda ordinal: None)
    monkeypatch.setitem(
        sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=lambda ordinal: kernel_device))
    )
    kernel_device = SimpleNamespace(use=lambda: None)
    monkeypatch.setattr(check_workspaces, "check_threads", broken)
    monkeypatch.setattr(check_workspaces, "check_graph", lambda *_: "replayed")
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(cuda=None), __version__="2.13+cpu")
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert check_workspaces.run_checks(kernel, 0) == check_workspaces.WRONG
    assert capsys.readouterr().out.splitlines() == [
        "its kernel: on the device",
        "workspaces of threads: WRONG: MemoryError: no memory on the device",
        "workspace of a graph: replayed",
        "workspace from PyTorch: not checked: PyTorch 2.13+cpu is not for CUDA",
    ]
    kernel.prepare = broken
    assert check_workspaces.run_checks(kernel, 0) == check_workspaces.WRONG
    assert capsys.readouterr().out == "its kernel: WRONG: MemoryError: no memory on the device\n"


def test_a_library_that_was_carried_is_loaded_without_a_gpu_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "workspaces.so"
    library.write_bytes(b"\x7fELF, and no more")
    words = ["--gpu-module", "tests.support.gpu.fake_gpu", "--library", str(library)]
    assert check_workspaces.main(words) == check_workspaces.WRONG
    assert capsys.readouterr().out.startswith("the library: WRONG: ")
    monkeypatch.setattr(check_workspaces, "split_kernel", lambda data: None)
    assert check_workspaces.main(words) == check_workspaces.NOT_RUN
    assert "the library: 17 bytes, loaded" in capsys.readouterr().out


def test_the_script_for_a_gpu_calls_a_kernel_that_needs_a_workspace() -> None:
    device = Device("Simulated GPU", "GPU-0", (9, 0), "580.65", multiprocessors=132, l2_bytes=1, memory_bytes=1)
    library = check_workspaces.split_library(device)
    assert check_workspaces.split_kernel(library).workspace_bytes(1, 384, 256, 4096, 4096, 4096, 256, 0, 0, 0) == (
        8 * 384 * 256 * 4
    )
    (operands, *_), (expected, *_) = check_workspaces.operands(lambda array: array)
    assert (operands[0] @ operands[1].T == expected).all() and len(set(expected.ravel())) > 100


def test_each_call_on_cpu_tensors_has_memory_of_its_own() -> None:
    with of_cpu(1) as one, of_cpu(1000) as address, of_cpu(1000) as other:
        assert {place % 16 for place in (one, address, other)} == {0}
        assert abs(address - other) >= 1000
        ctypes.memset(address, 1, 1000)
        assert ctypes.string_at(other, 1000) == bytes(1000)
