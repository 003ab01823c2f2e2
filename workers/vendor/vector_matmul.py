"""Products of one row or column by `cublasGemmEx`, through cuBLAS' older C interface: another peer beside those of
cuBLASLt, of which it has kernels (matrix times vector) that cuBLASLt's heuristics do not offer. Its constants are those
of `cublas_api.h`."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from codegen.operators.matmul.problem import MatmulProblem
from codegen.problem import Problem
from workers.gpu.interface import LaunchRefused, VendorCall
from workers.vendor import matmul
from workers.vendor.bench import Beat, Bench, HostArray, gpu_errors, kernel_after, or_its_error, runs
from workers.vendor.cublaslt import (
    CUBLAS_OP_N,
    CUBLAS_OP_T,
    CUDA_TYPES,
    CublasError,
    Layout,
    LibraryMissing,
    load_library,
)
from workers.vendor.matmul import MatmulCall, Prepared, plans

CUBLAS_GEMM_DEFAULT = -1
CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
WORKSPACE_BYTES = 32 * 2**20  # what cublasSetWorkspace advises for sm_90
SONAMES = ("libcublas.so.13", "libcublas.so.12")

_i64 = ctypes.c_longlong


class Cublas:
    """The loaded library with a handle, made on the current device at first use. Raises LibraryMissing; its calls raise
    CublasError."""

    def __init__(self) -> None:
        self.path, self._library = load_library("cublas", SONAMES)
        self._library.cublasGetStatusName.restype = ctypes.c_char_p
        self._handle: ctypes.c_void_p | None = None

    @property
    def version(self) -> str:
        """As the wheel is numbered: 13.4.1."""
        parts = []
        for number in range(3):  # libraryPropertyType: MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
            value = ctypes.c_int()
            self.call("cublasGetProperty", number, ctypes.byref(value))
            parts.append(value.value)
        return ".".join(map(str, parts))

    def use(self, stream: int, workspace: int) -> None:
        """The stream of what follows, with memory for it (WORKSPACE_BYTES): without any of its own nothing is allocated
        while a graph is captured. Parts of a split sum are not rounded to the output's type before they are added."""
        if self._handle is None:
            handle = ctypes.c_void_p()
            self.call("cublasCreate_v2", ctypes.byref(handle))
            self._handle = handle
            self.call("cublasSetMathMode", handle, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)
        self.call("cublasSetStream_v2", self._handle, ctypes.c_void_p(stream))  # takes the workspace away
        self.call("cublasSetWorkspace_v2", self._handle, ctypes.c_void_p(workspace), ctypes.c_size_t(WORKSPACE_BYTES))

    def multiply(
        self,
        compute: int,
        transpose: tuple[bool, bool],
        layouts: Sequence[Layout],
        pointers: Sequence[int],
        alpha: float,
    ) -> None:
        """Queue D = alpha op(A) op(B), of A, B and D."""
        a, _, d = layouts
        depth = a.rows if transpose[0] else a.columns
        operations = (CUBLAS_OP_T if transposed else CUBLAS_OP_N for transposed in transpose)
        factors = (ctypes.byref(ctypes.c_float(value)) for value in (alpha, 0.0))
        matrices = [
            (ctypes.c_void_p(address), CUDA_TYPES[layout.dtype], ctypes.c_int(layout.pitch), _i64(layout.stride))
            for address, layout in zip(pointers, layouts, strict=True)
        ]
        arguments: list[Any] = [self._handle, *operations, d.rows, d.columns, depth]
        name, steps = ("cublasGemmEx", 3) if d.batch == 1 else ("cublasGemmStridedBatchedEx", 4)
        of_a, of_b, of_d = (matrix[:steps] for matrix in matrices)
        first, second = factors
        arguments += [first, *of_a, *of_b, second, *of_d, *([d.batch] if d.batch > 1 else [])]
        self.call(name, *arguments, compute, CUBLAS_GEMM_DEFAULT)

    def call(self, name: str, *arguments: Any) -> None:
        status = int(getattr(self._library, name)(*arguments))
        if status != 0:
            raise CublasError(name, status, self._library.cublasGetStatusName(status).decode())


def is_of_vectors(problem: Problem) -> bool:
    """Whether the product is a matrix times a vector, of floats."""
    if not isinstance(problem, MatmulProblem) or 1 not in (problem.m, problem.n):
        return False
    return bool(some := plans(problem)) and not some[-1].packed


class VectorMatmulCall(MatmulCall):
    """The one algorithm that it has: the library chooses when it is called."""

    def __init__(self, bench: Bench, library: Cublas, problem: MatmulProblem, prepared: Prepared) -> None:
        self._bench, self._cublas, self._problem, self.prepared = bench, library, problem, prepared

    def describe(self) -> dict[str, Any]:
        return self._described("cuBLAS", self._cublas.version, "cublasGemmEx, its own choice", WORKSPACE_BYTES)

    def run(self, number: int) -> None:
        prepared, address = self.prepared, self._bench.address
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
    bench: Bench, problem: Problem, inputs: Mapping[str, HostArray], sets: int, beat: Beat
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
    with gpu_errors(sets):
        first = matmul.upload(bench, problem, plan, inputs)
        with bench.faults():
            made, workspace = first.copies(sets), bench.arrays.empty(WORKSPACE_BYTES, np.uint8)
    queue = kernel_after(bench, matmul.after(problem, plan), plan.rest_operands) if plan.needs_kernel else None
    call = VectorMatmulCall(bench, library, problem, Prepared(plan, (), (), made, workspace, queue))
    return [call] if runs(bench, call) else []
