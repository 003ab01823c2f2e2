"""A matmul by cuBLASLt, and by one kernel after it where its own epilogue does not reach: the peer in a comparison."""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from codegen.arrays import as_float64
from codegen.operators import operator
from codegen.operators.matmul.problem import MatmulProblem
from codegen.problem import Problem
from workers.gpu.interface import DeviceArray, GpuError, LaunchRefused
from workers.gpu.tensors import stored_as
from workers.vendor import cublaslt
from workers.vendor.bench import Bench, HostArray, OperandSet, kernel_after, laid_out, poisoned, runs
from workers.vendor.cublaslt import CublasError, CublasLt, Descriptor, Found, Layout
from workers.vendor.epilogue import After, Matrices, output_of
from workers.vendor.plan import ProductPlan, plans

ALGORITHMS = 8
WORKSPACE_BYTES = 64 * 2**20
LARGEST_ALIGNMENT = 256  # that cuBLASLt's heuristics distinguish


class MatmulCall:
    """One algorithm of the library for one plan; a `workers.gpu.interface.VendorCall`."""

    def __init__(
        self, bench: Bench, library: CublasLt, problem: MatmulProblem, prepared: "Prepared", algorithm: Found
    ) -> None:
        self._bench, self._library, self._problem = bench, library, problem
        self._prepared, self._found = prepared, algorithm

    def describe(self) -> dict[str, Any]:
        words = [word for word in (self._found.description, self._prepared.plan.words()) if word]
        return {
            "library": "cuBLASLt",
            "version": self._library.version,
            "algorithm": "; ".join(words),
            "fused": not self._prepared.plan.needs_kernel,
            "workspace_bytes": self._found.workspace_bytes,
        }

    def run(self, number: int) -> None:
        prepared, address = self._prepared, self._bench.address
        plan, operands = prepared.plan, prepared.sets[number]

        def scalar(value: float) -> Any:
            return ctypes.c_int32(int(value)) if plan.scale == cublaslt.CUDA_R_32I else ctypes.c_float(value)

        d = address(operands.product)
        c = address(operands.arrays[plan.fused.residual]) if plan.fused.residual else d
        try:
            self._library.multiply(
                prepared.products[number],
                (address(operands.arrays["b"]), address(operands.arrays["a"]), c, d),  # it computes the transpose
                prepared.matrices,
                (scalar(plan.fused.alpha), scalar(1.0 if plan.fused.residual else 0.0)),
                self._found.algorithm,
                (address(prepared.workspace), self._found.workspace_bytes),
                self._bench.stream,
            )
        except CublasError as error:
            raise LaunchRefused(str(error)) from error
        if prepared.after is not None:
            prepared.after(operands)

    def result(self, number: int) -> DeviceArray:
        operands, p = self._prepared.sets[number], self._problem
        out = output_of(operator("matmul").operands(p))
        flat, strides = operands.out, out.strides
        if self._prepared.plan.packed and self._prepared.plan.in_place:
            d = self._prepared.plan.d
            strides = (d.pitch, 1) if p.batch == 1 else (d.stride, d.pitch, 1)
        in_bytes = [stride * flat.itemsize for stride in strides]
        with self._bench.faults():
            view = self._bench.arrays.lib.stride_tricks.as_strided(flat, out.shape, in_bytes)
            return as_float64(view, p.out_dtype)


@dataclass(frozen=True)
class Prepared:
    """A plan with its descriptors and operands: what its algorithms share. `after` queues the kernel behind it."""

    plan: ProductPlan
    matrices: tuple[Descriptor, ...]
    products: tuple[Descriptor, ...]
    sets: tuple[OperandSet, ...]
    workspace: DeviceArray
    after: Callable[[OperandSet], None] | None


def offers(bench: Bench, problem: Problem, inputs: Mapping[str, HostArray], sets: int) -> list[MatmulCall]:
    """The algorithms that run, of the plan with most in one kernel that has any. Raises GpuError, GpuFault."""
    if not isinstance(problem, MatmulProblem):
        raise TypeError(f"a matmul is expected, not {problem.operator}")
    try:
        library = CublasLt()
        for plan in plans(problem):
            if calls := _calls(bench, library, problem, plan, inputs, sets):
                return calls
    except cublaslt.LibraryMissing as error:
        raise GpuError(str(error)) from error
    except CublasError as error:
        raise GpuError(f"cuBLASLt does not take this problem: {error}") from error
    except MemoryError as error:
        raise GpuError(f"no memory on the GPU for {sets} sets of the vendor's operands: {error}") from error
    return []


def _calls(
    bench: Bench,
    library: CublasLt,
    problem: MatmulProblem,
    plan: ProductPlan,
    inputs: Mapping[str, HostArray],
    sets: int,
) -> list[MatmulCall]:
    first = upload(bench, problem, plan, inputs)
    with bench.faults():
        made = first.copies(sets)
    a, b, d = (library.matrix(layout) for layout in (plan.a, plan.b, plan.d))

    def product(bias: int | None) -> Descriptor:
        return library.product(plan.compute, plan.scale, transpose=plan.transpose, epilogue=plan.epilogue, bias=bias)

    if (bias := plan.fused.bias) is None:
        products = (product(None),) * sets
    else:
        products = tuple(product(bench.address(operand_set.arrays[bias])) for operand_set in made)
    residual = plan.fused.residual
    alignments = [
        min(alignment(bench.address(array)) for array in arrays)
        for arrays in (
            [operand_set.arrays["b"] for operand_set in made],
            [operand_set.arrays["a"] for operand_set in made],
            [operand_set.arrays[residual] if residual else operand_set.product for operand_set in made],
            [operand_set.product for operand_set in made],
        )
    ]
    preference = library.preference(WORKSPACE_BYTES, plan.reductions, alignments)
    algorithms = library.heuristics(products[0], (a, b, d, d), preference, ALGORITHMS)
    if not algorithms:
        return []
    with bench.faults():
        workspace = bench.arrays.empty(max(1, *(algorithm.workspace_bytes for algorithm in algorithms)), np.uint8)
    queue = kernel_after(bench, after(problem, plan), plan.rest_operands) if plan.needs_kernel else None
    prepared = Prepared(plan, (a, b, d, d), products, made, workspace, queue)
    calls = [MatmulCall(bench, library, problem, prepared, algorithm) for algorithm in algorithms]
    return [call for call in calls if runs(bench, call)]


def alignment(address: int) -> int:
    """The largest power of two that divides an address, as far as the library distinguishes them."""
    return min(LARGEST_ALIGNMENT, address & -address) if address else LARGEST_ALIGNMENT


def after(problem: MatmulProblem, plan: ProductPlan) -> After:
    """The kernel that follows the library's."""
    stride = problem.stride_c if problem.batch > 1 else 0
    return After(
        plan.rest,
        problem.m,
        problem.n,
        problem.batch,
        Matrices(plan.d.dtype, plan.d.pitch, plan.d.stride),
        Matrices(problem.out_dtype, problem.ldc, stride),
    )


def upload(bench: Bench, problem: MatmulProblem, plan: ProductPlan, inputs: Mapping[str, HostArray]) -> OperandSet:
    """A set of the operands as the plan needs them. Outputs are NaN."""
    operands = {operand.name: operand for operand in operator("matmul").operands(problem)}
    flat = {name: laid_out(operand, inputs[name]) for name, operand in operands.items() if operand.role == "in"}
    if plan.packed:
        flat["a"], flat["b"] = packed(problem, plan, inputs)
    with bench.faults():
        moved = {name: bench.arrays.asarray(array) for name, array in flat.items()}
        size = (plan.d.batch - 1) * plan.d.stride + (plan.d.columns - 1) * plan.d.pitch + plan.d.rows
        product = poisoned(bench, size, stored_as(plan.d.dtype))
        out = product if plan.in_place else poisoned(bench, operands["out"].elements, stored_as(problem.out_dtype))
    return OperandSet(moved, product, out)


def packed(problem: MatmulProblem, plan: ProductPlan, inputs: Mapping[str, HostArray]) -> tuple[HostArray, HostArray]:
    """A and B with k along the rows, padded with zeros to what the plan's layouts have."""
    a = _matrices(inputs["a"], problem.a_transposed, repeated=plan.b.stride == 0)
    b = _matrices(inputs["b"], not problem.b_transposed, repeated=plan.a.stride == 0)
    return _padded(a, plan.b), _padded(b, plan.a)


def _matrices(values: HostArray, transpose: bool, *, repeated: bool) -> HostArray:
    batch = values if values.ndim == 3 else values[None]
    batch = batch[:1] if repeated else batch
    return batch.swapaxes(-1, -2) if transpose else batch


def _padded(values: HostArray, layout: Layout) -> HostArray:
    made = np.zeros((len(values), layout.columns, layout.pitch), values.dtype)
    made[:, : values.shape[1], : values.shape[2]] = values
    return made.reshape(-1)
