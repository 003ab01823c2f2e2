"""A recorded candidate on a GPU, through its library's plain C entry: is it right?

Used by run.py of a folder that `cukiln reproduce` wrote; needs CuPy. Every launch runs twice into poisoned memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.arrays import as_float64, joined
from codegen.dtypes import dtype
from codegen.plan.verification_plan import check_output, differing
from workers.cpu.library import POISON, Tensor
from workers.reproduce.recorded_case import RecordedCase, RecordedOperator

REPEATS = 2


class GpuAbsent(Exception):
    """There is no GPU to run on; the message says what is missing."""


def run_on_gpu(folder: Path, number: int) -> dict[str, Any]:
    """Verdict, message and cases. Raises GpuAbsent."""
    cupy = _cupy(number)
    with cupy.cuda.Device(number):
        kernel = _Kernel(cupy, folder / "build" / "library.so", number)
        outcome: dict[str, Any] = {"cases": []}
        recorded = RecordedOperator(folder / "cases")
        for case in recorded.cases("gpu"):
            wrong = _wrong(cupy, kernel, recorded, case, outcome["cases"])
            if wrong is not None:
                return {**outcome, "verdict": wrong[0], "message": wrong[1]}
        return {**outcome, "verdict": "ok", "message": ""}


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

    def launch(
        self,
        memories: Sequence[Any],
        integers: Sequence[int],
        launch: Sequence[int],
        scalars: Sequence[float],
        workspace: Any,
    ) -> bool:
        """False where it was refused."""
        status = self._library.cukiln_launch(
            _array(ctypes.c_void_p, [memory.data.ptr for memory in memories]),
            _array(ctypes.c_int64, integers),
            _array(ctypes.c_int32, launch),
            _array(ctypes.c_double, scalars),
            ctypes.c_void_p(workspace.data.ptr),
            ctypes.c_void_p(self._cupy.cuda.get_current_stream().ptr),
        )
        return bool(status == 0)


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
    memories = []
    for operand in case.operands:
        host = np.full(operand.elements * dtype(operand.dtype).bytes, POISON, np.uint8)
        if operand.name in inputs:
            Tensor(operand, host).fill(inputs[operand.name])
        memories.append(cupy.asarray(host))
    outs = [pair for pair in zip(case.operands, memories, strict=True) if pair[0].role == "out"]
    largest = 0.0
    for launch in case.launches:
        first: list[NDArray[Any]] = []
        workspace = kernel.workspace(case.integers, launch)
        for _ in range(REPEATS):
            for _, memory in outs:
                memory.fill(POISON)
            workspace.fill(POISON)
            if not kernel.launch(memories, case.integers, launch, case.scalars, workspace):
                return "runtime_error", kernel.last_error()
            try:
                bits = [Tensor(out, cupy.asnumpy(memory)).view.copy() for out, memory in outs]
            except Exception as error:  # noqa: BLE001 - CuPy has a type of its own for each part of CUDA that fails
                return "runtime_error", str(error)
            got = joined([as_float64(values, out.dtype) for values, (out, _) in zip(bits, outs, strict=True)])
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
