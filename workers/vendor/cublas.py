"""`cublasGemmEx`, through cuBLAS' older C interface: for products of one row or column, of which it has kernels
(matrix times vector) that cuBLASLt's heuristics do not offer. Its constants are those of `cublas_api.h`."""

import ctypes
from collections.abc import Sequence
from typing import Any

from workers.vendor.cublaslt import CUBLAS_OP_N, CUBLAS_OP_T, CUDA_TYPES, CublasError, Layout, load_library

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
