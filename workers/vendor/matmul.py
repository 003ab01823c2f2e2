"""A matmul by cuBLASLt, and by one kernel after it where its own epilogue does not reach: the peer in a comparison."""

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from codegen.alignment import round_up
from codegen.arrays import as_float64
from codegen.epilogue import AnyNode, operand_names
from codegen.fixed_point import over_ring
from codegen.operators import operator
from codegen.operators.matmul.problem import MatmulProblem
from codegen.problem import Problem
from workers.gpu.interface import DeviceArray, LaunchRefused
from workers.gpu.tensors import stored_as
from workers.vendor import cublaslt
from workers.vendor.bench import (
    Beat,
    Bench,
    HostArray,
    OperandSet,
    described,
    gpu_errors,
    kernel_after,
    laid_out,
    poisoned,
    runs,
)
from workers.vendor.cublaslt import CublasError, CublasLt, Descriptor, Found, Layout
from workers.vendor.epilogue import CONVERSION, After, Matrices, output_of

# cuBLAS, "cublasLtMatmul()": int8 products in regular order need A transposed, B not, m, k and leading dimensions that
# are multiples of 4, and pointers aligned to 4; 16 is advised.
INT8_ROWS, INT8_DEPTH = 4, 16
COMPUTE_DTYPES = {
    cublaslt.CUBLAS_COMPUTE_32F: "float32",
    cublaslt.CUBLAS_COMPUTE_32F_FAST_TF32: "float32",
    cublaslt.CUBLAS_COMPUTE_32I: "int32",
}


@dataclass(frozen=True)
class Fused:
    """What of an epilogue the library's kernel does: max(alpha product + residual + bias, 0). `nodes`: how many of the
    chain that covers; `residual`, `bias`: names of the operands, as the problem names them."""

    nodes: int = 0
    alpha: float = 1.0
    residual: str | None = None
    bias: str | None = None
    relu: bool = False


@dataclass(frozen=True)
class ProductPlan:
    """One call of cublasLtMatmul: D = epilogue(alpha op(A) op(B) + beta C + bias), and the nodes left for a kernel
    after it. `packed`: A and B are copies that were transposed and padded beforehand. `in_place`: D is the output,
    which the kernel after it, if any, rewrites; else D is a buffer of its own."""

    compute: int
    scale: int
    a: Layout
    b: Layout
    d: Layout
    transpose: tuple[bool, bool]
    packed: bool
    fused: Fused
    rest: tuple[AnyNode, ...]
    rest_operands: tuple[str, ...]
    in_place: bool

    @property
    def epilogue(self) -> int:
        flags = (cublaslt.CUBLASLT_EPILOGUE_BIAS if self.fused.bias else 0) | (
            cublaslt.CUBLASLT_EPILOGUE_RELU if self.fused.relu else 0
        )
        return flags or cublaslt.CUBLASLT_EPILOGUE_DEFAULT

    @property
    def needs_kernel(self) -> bool:
        """Whether a second kernel follows: for nodes, or to convert the product to the output's type."""
        return bool(self.rest) or not self.in_place

    @property
    def reductions(self) -> int:
        """How the library may add the parts of a split product: in the compute type, as the problem's sums are; a sum
        of rounded parts would be another, less exact function. In place it adds in the output's type, which is allowed
        where that is the compute type."""
        if self.d.dtype == COMPUTE_DTYPES[self.compute]:
            return cublaslt.CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | cublaslt.CUBLASLT_REDUCTION_SCHEME_INPLACE
        return cublaslt.CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE

    def text(self) -> str:
        """What is done where, for a person."""
        fused = [
            word
            for word, used in (
                ("scale", self.fused.alpha != 1.0),
                ("residual", self.fused.residual is not None),
                ("bias", self.fused.bias is not None),
                ("relu", self.fused.relu),
            )
            if used
        ]
        parts = [f"{', '.join(fused)} in its kernel"] if fused else []
        if self.packed:
            parts.append("operands transposed and padded beforehand")
        if self.needs_kernel:
            nodes: list[str] = [node.op for node in self.rest]
            parts.append(f"{', '.join(nodes or [CONVERSION])} in a kernel after it")
        return "; ".join(parts)


def plans(problem: MatmulProblem) -> tuple[ProductPlan, ...]:
    """The ways to try, those with most in one kernel first: a library may have no kernel with that epilogue. None over
    rings: it multiplies no integers but int8."""
    if over_ring(problem):
        return ()
    if _product_dtype(problem) != problem.out_dtype:
        return (_plan(problem, Fused()),)
    most = fused(problem)
    return (_plan(problem, most), _plan(problem, Fused())) if most.nodes else (_plan(problem, most),)


def fused(problem: MatmulProblem) -> Fused:
    """The longest beginning of the chain that one kernel computes: a scale, residual and bias along n, then relu."""
    names = operand_names(problem.epilogue)
    covered = Fused()
    for node, name in zip(problem.epilogue, names, strict=True):
        following = _with(covered, node, name)
        if following is None:
            break
        covered = following
    return covered


def _with(covered: Fused, node: AnyNode, name: str | None) -> Fused | None:
    """`found` and one more node; None where the library's kernel cannot do it there."""
    count = covered.nodes + 1
    if covered.relu:
        return None
    if node.op == "scale" and covered.nodes == 0 and node.value != 0.0:  # BLAS: alpha 0 does not read A and B at all
        return Fused(count, node.value)
    if node.op == "residual" and covered.residual is None:
        return Fused(count, covered.alpha, name, covered.bias)
    if node.op == "bias" and node.axis == "n" and covered.bias is None:
        return Fused(count, covered.alpha, covered.residual, name)
    if node.op == "relu":
        return Fused(count, covered.alpha, covered.residual, covered.bias, True)
    return None


def _product_dtype(problem: MatmulProblem) -> str:
    """What the library writes (cuBLAS, "cublasLtMatmul()"): int32 of int8; else float32 or the inputs' type."""
    if problem.dtype == "int8":
        return "int32"
    return problem.out_dtype if problem.out_dtype in ("float32", problem.dtype) else "float32"


def _plan(problem: MatmulProblem, fused: Fused) -> ProductPlan:
    dtype = _product_dtype(problem)
    in_place = dtype == problem.out_dtype and problem.dtype != "int8"
    if problem.dtype == "int8":
        compute, scale = cublaslt.CUBLAS_COMPUTE_32I, cublaslt.CUDA_R_32I
        a, b, d = _packed(problem)
    else:
        compute, scale = cublaslt.CUBLAS_COMPUTE_32F, cublaslt.CUDA_R_32F
        a = _column_major(problem.dtype, *problem.stored("b"), problem.ldb, problem.batch, problem.stride_b)
        b = _column_major(problem.dtype, *problem.stored("a"), problem.lda, problem.batch, problem.stride_a)
        d = _column_major(dtype, problem.m, problem.n, problem.ldc, problem.batch, problem.stride_c)
        if not in_place:
            d = _column_major(dtype, problem.m, problem.n, problem.n, problem.batch, problem.m * problem.n)
    if problem.allow_tf32:
        compute = cublaslt.CUBLAS_COMPUTE_32F_FAST_TF32
    if dtype == problem.out_dtype == "int32":
        in_place = True  # nothing is left to do: its padded buffer is the output
    rest = problem.epilogue[fused.nodes :]
    return ProductPlan(
        compute=compute,
        scale=scale,
        a=a,
        b=b,
        d=d,
        transpose=(True, False) if problem.dtype == "int8" else (problem.b_transposed, problem.a_transposed),
        packed=problem.dtype == "int8",
        fused=fused,
        rest=rest,
        rest_operands=tuple(name for name in operand_names(problem.epilogue)[fused.nodes :] if name is not None),
        in_place=in_place,
    )


def _column_major(dtype: str, rows: int, columns: int, pitch: int, batch: int, stride: int) -> Layout:
    """A row-major matrix with `rows` and `columns` as the column-major transpose that it is."""
    return Layout(dtype, columns, rows, pitch, batch, stride if batch > 1 else 0)


def _packed(problem: MatmulProblem) -> tuple[Layout, Layout, Layout]:
    """int8 operands as the library needs them: both with k along the columns' elements, k and n padded with zeros."""
    k, n = round_up(problem.k, INT8_DEPTH), round_up(problem.n, INT8_ROWS)
    first = Layout("int8", k, n, k, problem.batch, k * n if problem.batch > 1 and problem.stride_b else 0)
    second = Layout(
        "int8", k, problem.m, k, problem.batch, k * problem.m if problem.batch > 1 and problem.stride_a else 0
    )
    d = Layout("int32", n, problem.m, n, problem.batch, n * problem.m if problem.batch > 1 else 0)
    return first, second, d


ALGORITHMS = 8
WORKSPACE_BYTES = 64 * 2**20
LARGEST_ALIGNMENT = 256  # that cuBLASLt's heuristics distinguish


class MatmulCall:
    """One algorithm of the library for one plan; a `workers.gpu.interface.VendorCall`."""

    def __init__(
        self, bench: Bench, library: CublasLt, problem: MatmulProblem, prepared: "Prepared", algorithm: Found
    ) -> None:
        self._bench, self._library, self._problem = bench, library, problem
        self.prepared, self._found = prepared, algorithm

    def describe(self) -> dict[str, Any]:
        found = self._found
        return self._described("cuBLASLt", self._library.version, found.description, found.workspace_bytes)

    def _described(self, library: str, version: str, algorithm: str, workspace_bytes: int) -> dict[str, Any]:
        plan = self.prepared.plan
        fused = not plan.needs_kernel
        return described(library, version, algorithm, plan.text(), fused=fused, workspace_bytes=workspace_bytes)

    def run(self, number: int) -> None:
        prepared, address = self.prepared, self._bench.address
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
        operands, p = self.prepared.sets[number], self._problem
        out = output_of(operator("matmul").operands(p))
        flat, strides = operands.out, out.strides
        if self.prepared.plan.packed and self.prepared.plan.in_place:
            d = self.prepared.plan.d
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


def offers(bench: Bench, problem: Problem, inputs: Mapping[str, HostArray], sets: int, beat: Beat) -> list[MatmulCall]:
    """The algorithms that run, of the plan with most in one kernel that has any. Raises GpuError, GpuFault."""
    if not isinstance(problem, MatmulProblem):
        raise TypeError(f"a matmul is expected, not {problem.operator}")
    with gpu_errors(sets, "cuBLASLt does not take this problem", CublasError):
        library = CublasLt()
        for plan in plans(problem):
            beat("what cuBLASLt offers")
            if calls := _calls(bench, library, problem, plan, inputs, sets):
                return calls
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
