"""Checks on a real GPU the workspaces that `cukiln.load`'s kernels share: `make test-gpu`.

A matmul whose k is split, its sums in a workspace between two launches: from several threads on two streams, as CuPy
arrays and, where PyTorch is installed, as its tensors; and in a captured graph that is replayed beside other calls.
Exit status: 0 all is as it should be, 1 something is not, 2 there is no GPU, 3 nothing was run: the GPU module is not
the one of CuPy, whose arrays and streams these are, or there is neither a library nor a compiler.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cukiln
from codegen.errors import UnknownTarget
from codegen.lower import lower
from codegen.operators import operator
from codegen.search.search import Search
from cukiln.kernels.workspace_pool import POOL
from tests.gpu.data_sheet import sheet_of
from tests.gpu.run_check import NotChecked, NotRight, described, failure_of
from workers.gpu.interface import Device, GpuMissing, choose_device, list_devices, require_driver
from workers.offline.children import own_processes
from workers.processes.processes import Limits, ProcessError

MODULE = "workers.cuda.cupy_gpu"
RIGHT, WRONG, NO_GPU, NOT_RUN = 0, 1, 2, 3
REQUEST = json.loads(Path(__file__).with_name("workspaces.json").read_bytes())
SHAPE = {field: value for field, value in REQUEST["problems"][0].items() if field != "name"}
CALLS, THREADS, STREAMS = 200, 4, 2
LIMITS = Limits(wall_seconds=120, cpu_seconds=120, memory_bytes=4 << 30, output_bytes=64 << 20)


def split_library(device: Device) -> bytes:
    """Compiled here. Raises DriverTooOld, UnknownTarget."""
    # Where a library is given there is neither a compiler nor what the server needs.
    from storage.config.settings import load_settings
    from workers.compile.toolchain import toolchain_of
    from workers.steps.winner_library import build_winner

    problem = operator("matmul").parse(SHAPE)
    sheet = sheet_of(device)
    (candidate, *_) = lower(problem, sheet, Search.model_validate(REQUEST["search"])).candidates
    with closing(own_processes()) as processes:
        toolchain = toolchain_of(load_settings(), processes)
        require_driver([device], toolchain.cuda)
        return build_winner(candidate, sheet, toolchain, processes, LIMITS).library


def split_kernel(library: bytes) -> cukiln.Kernel:
    with tempfile.TemporaryDirectory() as folder:
        return cukiln.load(library, sha256=hashlib.sha256(library).hexdigest(), cache_dir=folder)


def operands(arrays: Any) -> tuple[list[tuple[Any, Any, Any]], list[Any]]:
    """Per thread its own small integers, whose sums are exact in any order, and what they must give."""
    rng = np.random.default_rng(1)
    sets, expected = [], []
    for _ in range(THREADS):
        a, b = (rng.integers(-1, 2, (rows, SHAPE["k"])) for rows in (SHAPE["m"], SHAPE["n"]))
        out = np.zeros((SHAPE["m"], SHAPE["n"]), np.float16)
        sets.append((arrays(a.astype(np.float16)), arrays(b.astype(np.float16)), arrays(out)))
        expected.append((a @ b.T).astype(np.float16))
    return sets, expected


def at_once(work: list[Any], device: Any) -> None:
    """Each in a thread of its own, which has the device as its current one: that is by thread. Raises what the first
    that failed did."""
    errors: list[Exception] = []

    def on_device(each: Any) -> None:
        try:
            device.use()
            each()
        except Exception as error:  # noqa: BLE001 - raised again, in the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=on_device, args=[each]) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def check_threads(kernel: cukiln.Kernel, cupy: Any) -> str:
    """Every thread calls on every stream in turn."""
    sets, expected = operands(cupy.asarray)
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(STREAMS)]
    cukiln.release_workspaces()
    wrong: list[str] = []

    def work(number: int) -> None:
        for i in range(CALLS):
            stream = streams[(number + i) % STREAMS]
            kernel(*sets[number], stream=stream.ptr)
            stream.synchronize()
            if not np.array_equal(sets[number][2].get(), expected[number]):
                wrong.append(f"thread {number}, call {i}")
                return

    at_once([lambda number=number: work(number) for number in range(THREADS)], cupy.cuda.Device())
    held, each = cukiln.release_workspaces(), kernel.workspace_bytes(*sets[0])
    if wrong or held != STREAMS * each:
        raise NotRight(f"wrong results: {wrong}; {held} bytes were held, {STREAMS} × {each} expected")
    return f"{THREADS * CALLS} calls of {THREADS} threads on {STREAMS} streams, {held} bytes"


def check_graph(kernel: cukiln.Kernel, cupy: Any) -> str:
    """A graph is replayed on one stream while calls run on the stream that it was captured on."""
    sets, expected = operands(cupy.asarray)
    kernel.prepare(cupy.cuda.Device().id)
    cupy.cuda.Device().synchronize()
    captured_on, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with captured_on:
        captured_on.begin_capture()
        try:
            kernel(*sets[0], stream=captured_on.ptr)
        finally:  # one that stays open would be in the way of the next check
            graph = captured_on.end_capture()
    for _ in range(CALLS):
        graph.launch(other)
        kernel(*sets[1], stream=captured_on.ptr)
    cukiln.release_workspaces()  # the graph's stays
    graph.launch(other)
    cupy.cuda.Device().synchronize()
    for number in (0, 1):
        if not np.array_equal(sets[number][2].get(), expected[number]):
            raise NotRight(f"the {'calls' if number else 'graph'} gave something else")
    return f"{CALLS} replays beside as many calls, {POOL.release(captured=True)} bytes of the graph"


def usable_torch() -> Any:
    """Raises NotChecked where PyTorch is not there, or for no GPU."""
    if importlib.util.find_spec("torch") is None:
        raise NotChecked("PyTorch is not installed")
    try:
        import torch
    except Exception as error:
        raise NotChecked(f"PyTorch cannot be imported: {described(error)}") from error
    if torch.version.cuda is None or not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}, and finds no GPU" if torch.version.cuda else "not for CUDA"
        raise NotChecked(f"PyTorch {torch.__version__} is {built}")
    return torch


def check_torch(kernel: cukiln.Kernel, ordinal: int) -> str:
    """PyTorch's current stream, the default one and another, and its allocator."""
    torch = usable_torch()
    torch.cuda.set_device(ordinal)
    sets, expected = operands(lambda array: torch.from_numpy(array).cuda())

    def kept_for(stream: Any) -> int:
        """Bytes in use of what the allocator took for the stream."""
        segments = torch.cuda.memory_snapshot()
        return sum(int(segment["allocated_size"]) for segment in segments if segment["stream"] == stream.cuda_stream)

    torch.cuda.synchronize()
    needed = kernel.workspace_bytes(*sets[0])
    for number, stream in enumerate((torch.cuda.Stream(), torch.cuda.default_stream())):
        before = kept_for(stream)
        with torch.cuda.stream(stream):
            for _ in range(CALLS):
                kernel(*sets[number])
        torch.cuda.synchronize()
        taken = kept_for(stream) - before
        if not np.array_equal(sets[number][2].cpu().numpy(), expected[number]) or not needed <= taken < needed + 512:
            raise NotRight(f"{stream}: {taken} bytes were taken for {needed}, or the result is wrong")
        cukiln.release_workspaces()
    return f"2 × {CALLS} calls, {needed} bytes of PyTorch's on each stream"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--device", default="0", help="UUID or number of the GPU; default: the first")
    parser.add_argument("--gpu-module", default=MODULE, help="what drives the GPU")
    parser.add_argument("--library", type=Path, help="of workspaces.json's problem; default: it is compiled here")
    chosen = parser.parse_args(arguments)
    try:
        devices = list_devices(chosen.gpu_module)
        device = choose_device(devices, chosen.device)
        loaded: list[cukiln.Kernel] = []
        # What was carried is loaded in any case: that takes no GPU.
        if chosen.library and failed("the library", lambda: words_of(chosen.library.read_bytes(), loaded)):
            return WRONG
        if chosen.gpu_module != MODULE:
            print(f"not run: {chosen.gpu_module} does not drive CuPy, whose arrays these are", file=sys.stderr)
            return NOT_RUN
        if not loaded and failed("the library", partial(words_of, split_library(device), loaded)):
            return WRONG
    except GpuMissing as error:
        print(f"{error}; nothing was checked", file=sys.stderr)
        return NO_GPU
    except ProcessError as error:
        print(f"not run: no compiler, and no --library: {error}", file=sys.stderr)
        return NOT_RUN
    except UnknownTarget as error:
        print(f"not run: {error.message}", file=sys.stderr)
        return NOT_RUN
    return run_checks(loaded[0], devices.index(device))


def failed(name: str, check: Callable[[], str]) -> bool:
    return failure_of(name, check, sentences=(cukiln.CukilnError,)) is not None


def words_of(library: bytes, loaded: list[cukiln.Kernel]) -> str:
    """Of a kernel that is `loaded` then."""
    loaded.append(split_kernel(library))
    return f"{len(library)} bytes, loaded"


def run_checks(kernel: cukiln.Kernel, ordinal: int) -> int:
    import cupy

    def prepare() -> str:
        cupy.cuda.Device(ordinal).use()
        kernel.prepare(ordinal)
        return "on the device"

    if failed("its kernel", prepare):
        return WRONG
    checks: dict[str, Callable[[], str]] = {
        "workspaces of threads": lambda: check_threads(kernel, cupy),
        "workspace of a graph": lambda: check_graph(kernel, cupy),
        "workspace from PyTorch": lambda: check_torch(kernel, ordinal),
    }
    return WRONG if sum(failed(name, check) for name, check in checks.items()) else RIGHT


if __name__ == "__main__":
    sys.exit(main())
