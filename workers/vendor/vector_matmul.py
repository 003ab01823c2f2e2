"""Products of one row or column, which `cublasGemmEx` computes too: another peer beside those of cuBLASLt."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from codegen.operators.matmul.problem import MatmulProblem
from codegen.problem import Problem
from workers.gpu.interface import GpuError, LaunchRefused, VendorCall
from workers.vendor import matmul
from workers.vendor.bench import Beat, Bench, HostArray, kernel_after, or_its_error, runs, silent
from workers.vendor.cublas import WORKSPACE_BYTES, Cublas
from workers.vendor.cublaslt import CublasError, LibraryMissing
from workers.vendor.matmul import MatmulCall, Prepared, plans


def is_of_vectors(problem: Problem) -> bool:
    """Whether the product is a matrix times a vector, of floats."""
    if not isinstance(problem, MatmulProblem) or 1 not in (problem.m, problem.n):
        return False
    return bool(some := plans(problem)) and not some[-1].packed


class VectorMatmulCall(MatmulCall):
    """The one algorithm that it has: the library chooses when it is called."""

    def __init__(self, bench: Bench, library: Cublas, problem: MatmulProblem, prepared: Prepared) -> None:
        self._bench, self._cublas, self._problem, self._prepared = bench, library, problem, prepared

    def describe(self) -> dict[str, Any]:
        return self._described("cuBLAS", self._cublas.version, "cublasGemmEx, its own choice", WORKSPACE_BYTES)

    def run(self, number: int) -> None:
        prepared, address = self._prepared, self._bench.address
        plan, operands = prepared.plan, prepared.sets[number]
        pointers = (address(operands.arrays["b"]), address(operands.arrays["a"]), address(operands.product))
        try:
            self._cublas.use(self._bench.stream, address(prepared.workspace))
            # The transposed product, as cuBLASLt's: matrices are column-major there.
            self._cublas.multiply(plan.compute, plan.transpose, (plan.a, plan.b, plan.d), pointers, plan.fused.alpha)
        except CublasError as error:
            raise LaunchRefused(str(error)) from error
        if prepared.after is not None:
            prepared.after(operands)


def offers(
    bench: Bench, problem: Problem, inputs: Mapping[str, HostArray], sets: int, beat: Beat = silent
) -> Sequence[VendorCall]:
    """Those of cuBLASLt, and of a product with a vector `cublasGemmEx`. Raises GpuError, GpuFault."""
    if not is_of_vectors(problem):
        return matmul.offers(bench, problem, inputs, sets, beat)
    calls = or_its_error(bench, "cuBLASLt", lambda: matmul.offers(bench, problem, inputs, sets, beat))
    beat("what the vendor offers for vectors")
    return [*calls, *or_its_error(bench, "cuBLAS", lambda: _of_vectors(bench, problem, inputs, sets))]


def _of_vectors(bench: Bench, problem: Problem, inputs: Mapping[str, HostArray], sets: int) -> list[MatmulCall]:
    """None where cuBLAS is not there: of cuBLASLt's wheel it is a part."""
    assert isinstance(problem, MatmulProblem)
    plan = plans(problem)[-1]  # the whole epilogue in a kernel after it
    try:
        library = Cublas()
    except LibraryMissing:
        return []
    try:
        first = matmul.upload(bench, problem, plan, inputs)
        with bench.faults():
            made, workspace = first.copies(sets), bench.arrays.empty(WORKSPACE_BYTES, np.uint8)
    except MemoryError as error:
        raise GpuError(f"no memory on the GPU for {sets} sets of the vendor's operands: {error}") from error
    queue = kernel_after(bench, matmul.after(problem, plan), plan.rest_operands) if plan.needs_kernel else None
    call = VectorMatmulCall(bench, library, problem, Prepared(plan, (), (), made, workspace, queue))
    return [call] if runs(bench, call) else []
