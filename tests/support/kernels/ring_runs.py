"""Kernels over rings on the CPU, with inputs of a test's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from codegen.kernel import Candidate, Kernel
from codegen.operators import operator
from codegen.operators.matmul.problem import MatmulProblem
from tests.support.kernels.cpu_helpers import LIMITS, processes, toolchain
from workers.cpu.build import build_cpu
from workers.cpu.library import CpuLibrary, Outcome

# The largest k whose sums of products of limbs the accumulators of Z/2^64 hold without a carry.
UNCHAINED_K = 16_512


def built(kernels: Mapping[str, Kernel], folder: Path) -> Built:
    build = build_cpu(list(kernels.values()), toolchain(), processes(), LIMITS, folder=folder)
    assert not build.errors, build.errors
    ((path, _),) = build.libraries
    return Built(path, CpuLibrary(path), kernels)


@dataclass(frozen=True)
class Built:
    path: Path
    library: CpuLibrary
    kernels: Mapping[str, Kernel]

    def call(self, candidate: Candidate, inputs: Mapping[str, Any]) -> Any:
        """What its kernel, which is among those that were built, makes of a problem's operands, by their names."""
        op, problem, space = operator(candidate.problem.operator), candidate.problem, candidate.kernel.namespace
        integers, launch = op.integers(problem), op.launch_values(candidate.schedule)
        tensors = self.library.allocate(op.operands(problem))
        try:
            for tensor in tensors:
                if tensor.operand.role == "in":
                    tensor.fill(inputs[tensor.operand.name])
            outcome = self.library.run(
                space, tensors, self.library.workspace(space, integers, launch), integers=integers, launch=launch,
                scalars=op.scalars(problem), order="descending", seed=1, exact=True, cpu_seconds=60.0,
            )  # fmt: skip
            assert outcome.status == "ok", outcome.message
            return tensors[-1].view.copy()
        finally:
            tensors.clear()
            self.library.free()

    def run(self, name: str, a: Any, b: Any, *, slices: int = 1) -> Any:
        """What the kernel makes of a (m x k) and b (k x n); None where its launch code takes no such call."""
        (m, k), n, layout = a.shape, b.shape[1], str(self.kernels[name].signature_dict["layout"])
        problem = operator("matmul").parse(
            {"operator": "matmul", "m": m, "n": n, "k": k, "dtype": a.dtype.name, "layout": layout}
        )
        assert isinstance(problem, MatmulProblem)
        stored = (a.T if problem.a_transposed else a, b.T if problem.b_transposed else b, np.zeros((m, n), a.dtype))
        tensors = self.library.allocate(operator("matmul").operands(problem))
        try:
            for tensor, values in zip(tensors, stored, strict=True):
                tensor.fill(values)
            outcome = self._call(name, problem, tensors, (0, slices, 0))
            if outcome.status != "ok":
                assert "invalid launch: the number of launches is 0" in outcome.message
                return None
            return tensors[-1].view.copy()
        finally:
            tensors.clear()
            self.library.free()

    def _call(self, name: str, problem: MatmulProblem, tensors: Any, launch: Sequence[int]) -> Outcome:
        space, integers = self.kernels[name].namespace, operator("matmul").integers(problem)
        workspace = self.library.workspace(space, integers, launch)
        return self.library.run(
            space, tensors, workspace, integers=integers, launch=launch, scalars=(), order="ascending", seed=1,
            exact=True, cpu_seconds=60.0,
        )  # fmt: skip


def in_parts(a: Any, b: Any, first: Sequence[int], bits: int, rounding: str) -> Any:
    """Products of a and b in Python's integers, in parts of k that begin there, each truncated, and added; all of it as
    two's complement has it in the end."""
    size, half = 8 * a.dtype.itemsize, (1 << bits - 1) if bits and rounding == "nearest" else 0
    total: Any = 0
    for begin, end in zip(first, [*first[1:], a.shape[1]], strict=True):
        part = np.matmul(a[:, begin:end].astype(object), b[begin:end].astype(object))
        total = total + (wrapped(part, size) + half) // (1 << bits)
    return wrapped(total, size).astype(a.dtype)


def wrapped(values: Any, size: int) -> Any:
    return (values + 2 ** (size - 1)) % 2**size - 2 ** (size - 1)
