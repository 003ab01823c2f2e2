"""Calls of attention's and mla's kernels on sequences that tables describe, on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codegen.kernel import Kernel
from codegen.operator import Operator
from codegen.operators import operator
from codegen.plan.verification_plan import check_output
from codegen.problem import Problem
from tests.support.kernels.cpu_helpers import LIMITS, processes, toolchain
from workers.cpu.build import build_cpu
from workers.cpu.library import CpuLibrary, Outcome

Array = NDArray[Any]


def library_of(kernels: Iterable[Kernel], folder: Path) -> CpuLibrary:
    build = build_cpu(list(kernels), toolchain(), processes(), LIMITS, folder=folder)
    ((path, _),) = build.libraries
    return CpuLibrary(path)


def run_call(
    library: CpuLibrary, own: Kernel, problem: Problem, inputs: Mapping[str, Array], launch: Sequence[int]
) -> tuple[Outcome, Array, Array]:
    """What became of the call; out and lse in float64, NaN where nothing was written."""
    return run_in_workspace(library, own, problem, inputs, launch)[:3]


def run_in_workspace(
    library: CpuLibrary, own: Kernel, problem: Problem, inputs: Mapping[str, Array], launch: Sequence[int]
) -> tuple[Outcome, Array, Array, Array]:
    """And what is in the workspace after it."""
    op: Operator = operator(own.operator)
    integers = op.integers(problem)
    tensors = library.allocate(op.operands(problem))
    workspace = library.workspace(own.namespace, integers, launch)
    try:
        for tensor in tensors:
            if tensor.operand.role == "in":
                tensor.fill(inputs[tensor.operand.name])
            else:
                tensor.poison()
        if workspace is not None:
            workspace[...] = 0xFF
        outcome = library.run(
            own.namespace, tensors, workspace, integers=integers, launch=launch, scalars=op.scalars(problem),
            order="seeded", seed=1, exact=False, cpu_seconds=5.0,
        )  # fmt: skip
        out, lse = (tensor.view.astype(np.float64) for tensor in tensors if tensor.operand.role == "out")
        return outcome, out, lse, np.zeros(0, np.uint8) if workspace is None else workspace.copy()
    finally:
        tensors = []
        tensor = workspace = None
        library.free()


def require_reference(op: Operator, problem: Problem, inputs: Mapping[str, Array], out: Array, lse: Array) -> None:
    expected, bound = op.reference(problem, inputs)
    assert check_output(np.concatenate([out.reshape(-1), lse.reshape(-1)]), expected, bound, exact=False).ok
