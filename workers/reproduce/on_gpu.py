"""A recorded candidate on a GPU, through its library's plain C entry: is it right, and how long does it take?

Used by run.py of a folder that `cukiln reproduce` wrote; needs CuPy. Every launch runs twice into poisoned memory. The
time is that of launches recorded as a CUDA graph, on the candidate's own extents; where its record says so ("cold"),
each launch takes the next of several sets of operands, which together are twice as large as the L2.
"""

from __future__ import annotations

import ctypes
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.arrays import as_float64, joined
from codegen.dtypes import dtype
from codegen.operand import Operand
from codegen.plan.verification_plan import check_output, differing
from workers.cpu.library import POISON
from workers.gpu.sampling import sample_until_tight
from workers.reproduce.recorded_case import RecordedCase, RecordedOperator

REPEATS = 2
SECONDS = 1.0  # of samples
FEWEST_LAUNCHES = 20  # of a sample: the graph's own start then costs little of it
# A sample lasts as long at least: the host's time to start it, some microseconds, is in it.
SAMPLE_US = 1000.0
MOST_LAUNCHES = 4096
MOST_BYTES = 8 << 30  # of all sets of operands


class GpuAbsent(Exception):
    """There is no GPU to run on; the message says what is missing."""


def run_on_gpu(folder: Path, number: int) -> dict[str, Any]:
    """Verdict, message, cases, the device's name and, of a kernel that is right, its time. Raises GpuAbsent."""
    cupy = _cupy(number)
    with cupy.cuda.Device(number):
        name = cupy.cuda.runtime.getDeviceProperties(number)["name"]
        recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
        kernel = _Kernel(cupy, folder / "build" / "library.so", number)
        outcome: dict[str, Any] = {"device": name.decode() if isinstance(name, bytes) else name, "cases": []}
        recorded = RecordedOperator(folder / "cases")
        for case in recorded.cases("gpu"):
            wrong = _wrong(cupy, kernel, recorded, case, outcome["cases"])
            if wrong is not None:
                return {**outcome, "verdict": wrong[0], "message": wrong[1]}
        return {**outcome, "verdict": "ok", "message": "", **_time(cupy, kernel, recipe)}


def _cupy(number: int) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise GpuAbsent(f"CuPy cannot be imported ({error}): `pip install cupy-cuda13x`") from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise GpuAbsent(f"CUDA finds no GPU: {error}") from error
    if number >= count:
        raise GpuAbsent(f"there is no GPU {number}: CUDA shows {count}")
    return cupy


class _Kernel:
    """The library's plain C entries, on CuPy's current stream."""

    def __init__(self, cupy: Any, path: Path, device: int) -> None:
        self._cupy = cupy
        self._library = ctypes.CDLL(str(path))
        self._library.cukiln_last_error.restype = ctypes.c_char_p
        self._library.cukiln_workspace_bytes.restype = ctypes.c_int64
        self.refused = self._library.cukiln_prepare(device) != 0

    def last_error(self) -> str:
        return str(self._library.cukiln_last_error().decode("utf-8", "replace"))

    def workspace(self, integers: Sequence[int], launch: Sequence[int]) -> Any:
        size = self._library.cukiln_workspace_bytes(_array(ctypes.c_int64, integers), _array(ctypes.c_int32, launch))
        return self._cupy.full(max(size, 1), POISON, dtype=np.uint8)

    def call(
        self,
        memories: Sequence[Any],
        integers: Sequence[int],
        launch: Sequence[int],
        scalars: Sequence[float],
        workspace: Any,
    ) -> Callable[[], bool]:
        """A launch to be made again and again; false where it was refused."""
        arguments = (
            _array(ctypes.c_void_p, [memory.data.ptr for memory in memories]),
            _array(ctypes.c_int64, integers),
            _array(ctypes.c_int32, launch),
            _array(ctypes.c_double, scalars),
            ctypes.c_void_p(workspace.data.ptr),
        )

        def launch_it() -> bool:
            stream = ctypes.c_void_p(self._cupy.cuda.get_current_stream().ptr)
            return bool(self._library.cukiln_launch(*arguments, stream) == 0)

        return launch_it


def _array(kind: Any, values: Sequence[Any]) -> Any:
    return (kind * max(1, len(values)))(*values)


def _wrong(
    cupy: Any, kernel: _Kernel, recorded: RecordedOperator, case: RecordedCase, said: list[str]
) -> tuple[str, str] | None:
    """Verdict and message of what is wrong in a case; a line to be read is added to `said`."""
    if kernel.refused:
        return "runtime_error", kernel.last_error()
    inputs = recorded.make_inputs(case, case.kind, np.random.default_rng())
    expected, bound = recorded.reference(case, inputs)
    host = [_Memory(operand, inputs.get(operand.name)) for operand in case.operands]
    memories = [cupy.asarray(image.bytes) for image in host]
    outs = [pair for pair in zip(host, memories, strict=True) if pair[0].operand.role == "out"]
    largest = 0.0
    for launch in case.launches:
        first: list[NDArray[Any]] = []
        workspace = kernel.workspace(case.integers, launch)
        call = kernel.call(memories, case.integers, launch, case.scalars, workspace)
        for _ in range(REPEATS):
            for _, memory in outs:
                memory.fill(POISON)
            workspace.fill(POISON)
            if not call():
                return "runtime_error", kernel.last_error()
            try:
                bits = [out.values(cupy.asnumpy(memory)) for out, memory in outs]
            except Exception as error:  # noqa: BLE001 - CuPy has a type of its own for each part of CUDA that fails
                return "runtime_error", str(error)
            got = joined([as_float64(values, out.operand.dtype) for values, (out, _) in zip(bits, outs, strict=True)])
            output_check = check_output(got, expected, bound, exact=case.exact)
            where = f"[{case.kind} inputs, extents {list(case.extents)}, launch {list(launch)}]"
            if not output_check.ok:
                return "incorrect", f"{output_check.sentence()} {where}"
            largest = max(largest, output_check.max_error)
            first = first or bits
            if case.same_bits and (changed := sum(map(differing, first, bits))):
                return "incorrect", f"{changed} of {got.size} elements differ between two runs {where}"
    said.append(f"{case.kind} inputs, extents {', '.join(map(str, case.extents))}: largest error {largest:.3g}")
    return None


class _Memory:
    """An operand as bytes, poisoned between its rows."""

    def __init__(self, operand: Operand, values: NDArray[Any] | None) -> None:
        self.operand = operand
        self.bytes = np.full(operand.elements * dtype(operand.dtype).bytes, POISON, np.uint8)
        if values is not None:
            self._view(self.bytes)[...] = values

    def values(self, memory: NDArray[np.uint8]) -> NDArray[Any]:
        return self._view(memory).copy()

    def _view(self, memory: NDArray[np.uint8]) -> NDArray[Any]:
        flat = memory.view(dtype(self.operand.dtype).numpy)
        strides = tuple(stride * flat.itemsize for stride in self.operand.strides)
        return np.lib.stride_tricks.as_strided(flat, self.operand.shape, strides)


def _time(cupy: Any, kernel: _Kernel, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Microseconds of a run on the candidate's own extents, as an interval; why there is none."""
    operands = [Operand(**operand) for operand in recipe["operands"]]
    sizes = [operand.elements * dtype(operand.dtype).bytes for operand in operands]
    recorded = recipe["timing"]
    l2 = cupy.cuda.Device().attributes["L2CacheSize"]
    sets = max(2, 1 + 2 * l2 // max(1, sum(sizes))) if recorded["cold"] else 1
    if sets * sum(sizes) > MOST_BYTES:
        return {"time_missing": f"{sum(sizes)} bytes of operands are more than is timed here"}
    rng = np.random.default_rng(recipe["seed"])
    # Small integers: in every element type they are ordinary numbers, which take the time of ordinary numbers.
    patterns = [
        rng.integers(0, 3, max(1, size // dtype(operand.dtype).bytes))
        for operand, size in zip(operands, sizes, strict=True)
    ]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        workspace = kernel.workspace(recipe["integers"], recipe["launch"])
        calls = []
        keep = []
        for _ in range(sets):
            memories = [
                cupy.asarray(_bytes_of(pattern, operand.dtype))
                for pattern, operand in zip(patterns, operands, strict=True)
            ]
            keep.append(memories)
            calls.append(kernel.call(memories, recipe["integers"], recipe["launch"], recipe["scalars"], workspace))
        if not all(call() for call in calls):
            return {"time_missing": kernel.last_error()}
        stream.synchronize()
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()

        def sampler(launches: int) -> Callable[[], float]:
            stream.begin_capture()
            for index in range(launches):
                calls[index % sets]()
            graph = stream.end_capture()

            def sample() -> float:
                begin.record(stream)
                graph.launch(stream)
                end.record(stream)
                end.synchronize()
                return float(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / launches)

            return sample

        launches = max(recorded["launches"], sets, FEWEST_LAUNCHES)
        first = sampler(launches)
        first()  # the first run of a graph also brings it to the device
        launches = max(launches, min(MOST_LAUNCHES, math.ceil(SAMPLE_US / max(first(), 0.01))))
        sampling = sample_until_tight(sampler(launches), time.monotonic, seconds=SECONDS)
    interval = sampling.interval
    return {"time": {"median": interval.median, "low": interval.low, "high": interval.high}}


def _bytes_of(values: NDArray[Any], name: str) -> NDArray[np.uint8]:
    if name == "bfloat16":  # the upper half of a float32
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(dtype(name).numpy).view(np.uint8)
