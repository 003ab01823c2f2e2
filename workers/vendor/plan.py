"""How cuBLASLt computes a matmul problem: which descriptors, what of the epilogue in its kernel, what after it. Pure.

The library's matrices are column-major; a row-major matrix read so is its transpose. So it is asked for out^T = B^T
A^T: its D has n rows, and only there does its bias, one value per row of D, fall on our axis n. Its kernels add up in
`acc_dtype` and round once. Its gelu is the tanh approximation, another function than ours: gelu is never fused.
"""

from dataclasses import dataclass

from codegen.epilogue import AnyNode, operand_names
from codegen.operators.matmul.fixed_point import over_ring
from codegen.operators.matmul.problem import MatmulProblem
from workers.vendor import cublaslt
from workers.vendor.cublaslt import Layout
from workers.vendor.epilogue import CONVERSION

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

    def words(self) -> str:
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
    k, n = _up(problem.k, INT8_DEPTH), _up(problem.n, INT8_ROWS)
    first = Layout("int8", k, n, k, problem.batch, k * n if problem.batch > 1 and problem.stride_b else 0)
    second = Layout(
        "int8", k, problem.m, k, problem.batch, k * problem.m if problem.batch > 1 and problem.stride_a else 0
    )
    d = Layout("int32", n, problem.m, n, problem.batch, n * problem.m if problem.batch > 1 else 0)
    return first, second, d


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
