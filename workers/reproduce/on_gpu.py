"""A recorded candidate on a GPU, through its library's plain C entry: is it right?

Used by run.py of a folder that `cukiln reproduce` wrote; needs CuPy. Every launch runs twice into poisoned memory.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.arrays import compared
from codegen.dtypes import dtype
from codegen.plan.verification_plan import check_output, differing
from workers.cpu.library import POISON, Tensor
from workers.cuda.library_entries import LibraryEntries
from workers.gpu.interface import LaunchRefused, LoadFailed
from workers.reproduce.recorded_case import RecordedCase, RecordedOperator

REPEATS = 2


class GpuAbsent(Exception):
    """There is no GPU to run on, or none that loads the kernels; the message says what is missing."""


def run_on_gpu(folder: Path, number: int) -> dict[str, Any]:
    """Verdict, message and cases. Raises GpuAbsent."""
    cupy = _cupy(number)
    with cupy.cuda.Device(number):
        outcome: dict[str, Any] = {"verdict": "ok", "message": "", "cases": []}
        recorded, library = RecordedOperator(folder / "cases"), folder / "build" / "library.so"
        stream = cupy.cuda.get_current_stream().ptr
        try:
            entries = LibraryEntries(library, [None], stream=stream, synchronize=lambda: None)
            entries.prepare(number)
            for case in recorded.cases("gpu"):
                wrong = _wrong(cupy, entries, recorded, case, outcome["cases"])
                if wrong is not None:
                    return {**outcome, "verdict": "incorrect", "message": wrong}
        except LoadFailed as error:
            raise GpuAbsent(str(error)) from error
        except LaunchRefused as error:
            return {**outcome, "verdict": "runtime_error", "message": str(error)}
        return outcome


def _cupy(number: int) -> Any:
    try:
        import cupy
    except ImportError as error:
        to_do = "`pip install cupy-cuda13x`, for kernels of CUDA 12 cupy-cuda12x"
        raise GpuAbsent(f"CuPy cannot be imported ({error}): {to_do}") from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise GpuAbsent(f"CUDA finds no GPU: {error}") from error
    if number >= count:
        raise GpuAbsent(f"there is no GPU {number}: CUDA shows {count}")
    return cupy


def _wrong(
    cupy: Any, entries: LibraryEntries, recorded: RecordedOperator, case: RecordedCase, lines: list[str]
) -> str | None:
    """What is wrong in a case; a line to be read is added to `lines`. Raises LaunchRefused."""
    inputs = recorded.make_inputs(case, case.kind, np.random.default_rng())
    expected, bound = recorded.reference(case, inputs)
    memories = []
    for operand in case.operands:
        host = np.full(operand.elements * dtype(operand.dtype).bytes, POISON, np.uint8)
        if operand.name in inputs:
            Tensor(operand, host).fill(inputs[operand.name])
        memories.append(cupy.asarray(host))
    pointers = [memory.data.ptr for memory in memories]
    outs = [pair for pair in zip(case.operands, memories, strict=True) if pair[0].role == "out"]
    largest = 0.0
    for launch in case.launches:
        first: list[NDArray[Any]] = []
        size = entries.workspace_bytes("", case.integers, launch)
        workspace = cupy.full(max(size, 1), POISON, dtype=np.uint8)
        for _ in range(REPEATS):
            for _, memory in outs:
                memory.fill(POISON)
            workspace.fill(POISON)
            entries.launch("", pointers, case.integers, launch, case.scalars, workspace.data.ptr)
            try:
                bits = [Tensor(out, cupy.asnumpy(memory)).view.copy() for out, memory in outs]
            except Exception as error:
                raise LaunchRefused(str(error)) from error
            got = compared([(values, out.dtype) for values, (out, _) in zip(bits, outs, strict=True)])
            signed = case.kind == "special"
            output_check = check_output(got, expected, bound, exact=case.exact, signed=signed)
            where = f"[{case.kind} inputs, extents {list(case.extents)}, launch {list(launch)}]"
            if not output_check.ok:
                return f"{output_check.sentence()} {where}"
            largest = max(largest, output_check.max_error)
            first = first or bits
            if case.same_bits and (changed := sum(map(differing, first, bits))):
                return f"{changed} of {got.size} elements differ between two runs {where}"
    lines.append(f"{case.kind} inputs, extents {', '.join(map(str, case.extents))}: largest error {largest:.3g}")
    return None
