"""cuBLASLt through its C interface: constants, structures, and the descriptors of a matrix product.

Constants have the names and values of `cublasLt.h`, `cublas_api.h` and `library_types.h` (CUDA 13); matrices are
column-major there. What a descriptor is made of can be tried without a GPU; a handle needs one.
"""

import ctypes
import importlib.util
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.compile.find_compilers import toolkits

CUBLAS_STATUS_SUCCESS = 0
CUBLAS_STATUS_NOT_SUPPORTED = 15
CUBLAS_OP_N = 0
CUBLAS_OP_T = 1
CUBLAS_COMPUTE_32F = 68
CUBLAS_COMPUTE_32F_FAST_TF32 = 77
CUBLAS_COMPUTE_32I = 72
CUDA_R_32F = 0
CUDA_R_16F = 2
CUDA_R_16BF = 14
CUDA_R_8I = 3
CUDA_R_32I = 10
CUBLASLT_MATMUL_DESC_TRANSA = 3
CUBLASLT_MATMUL_DESC_TRANSB = 4
CUBLASLT_MATMUL_DESC_EPILOGUE = 7
CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8
CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT = 5
CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET = 6
CUBLASLT_EPILOGUE_DEFAULT = 1
CUBLASLT_EPILOGUE_RELU = 2
CUBLASLT_EPILOGUE_BIAS = 4
CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1
CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3
CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5
CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES = 6
CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES = 7
CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8
CUBLASLT_REDUCTION_SCHEME_INPLACE = 1
CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE = 2
CUBLASLT_ALGO_CONFIG_ID = 0
CUBLASLT_ALGO_CONFIG_TILE_ID = 1
CUBLASLT_ALGO_CONFIG_SPLITK_NUM = 2
CUBLASLT_ALGO_CONFIG_STAGES_ID = 6

CUDA_TYPES = {
    "float32": CUDA_R_32F,
    "float16": CUDA_R_16F,
    "bfloat16": CUDA_R_16BF,
    "int8": CUDA_R_8I,
    "int32": CUDA_R_32I,
}
# Newest first. A library of an older CUDA runs on a newer driver.
SONAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
HOW_TO_INSTALL = (
    "pip install --constraint constraints.txt nvidia-cublas (about 420 MB; of CUDA 12 nvidia-cublas-cu12), or install "
    "the CUDA toolkit's cuBLAS"
)

_i32, _u32, _i64, _u64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_uint64


class LibraryMissing(Exception):
    """A vendor's library, or the package for it, is not there; the message says what was tried and what to install."""


class CublasError(Exception):
    """A call failed. `status` is a cublasStatus_t."""

    def __init__(self, call: str, status: int, name: str) -> None:
        super().__init__(call, status, name)
        self.call, self.status, self.name = call, status, name

    def __str__(self) -> str:
        return f"{self.call}: {self.name} ({self.status})"


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", _u64 * 8),)


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", Algorithm),
        ("workspaceSize", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("wavesCount", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Layout:
    """Column-major matrices; `pitch` and `stride` in elements. A stride of 0 repeats one matrix."""

    dtype: str
    rows: int
    columns: int
    pitch: int
    batch: int = 1
    stride: int = 0


@dataclass(frozen=True)
class Found:
    """An algorithm that the library offers for a product, and what it says of it."""

    algorithm: Algorithm
    workspace_bytes: int
    description: str


class Descriptor:
    """A handle of one of the library's descriptor types, destroyed with this object."""

    def __init__(self, library: "CublasLt", kind: str, *arguments: Any) -> None:
        self._library, self._kind = library, kind
        self.handle = ctypes.c_void_p()
        library.call(f"cublasLt{kind}Create", ctypes.byref(self.handle), *arguments)
        # Not __del__, which would keep no order at the interpreter's end.
        weakref.finalize(self, library.discard, f"cublasLt{kind}Destroy", self.handle.value)

    def set(self, attribute: int, value: Any) -> None:
        """`value` is a ctypes value of the attribute's own type: the library checks the size."""
        self._library.call(
            f"cublasLt{self._kind}SetAttribute", self.handle, attribute, ctypes.byref(value),
            ctypes.c_size_t(ctypes.sizeof(value)),
        )  # fmt: skip

    def get(self, attribute: int, value: Any) -> Any:
        """The attribute, read into `value`."""
        written = ctypes.c_size_t()
        self._library.call(
            f"cublasLt{self._kind}GetAttribute", self.handle, attribute, ctypes.byref(value),
            ctypes.c_size_t(ctypes.sizeof(value)), ctypes.byref(written),
        )  # fmt: skip
        return value.value


class CublasLt:
    """The loaded library. Raises LibraryMissing; its calls raise CublasError."""

    def __init__(self) -> None:
        self.path, self._library = load_library("cublasLt", SONAMES)
        self._library.cublasLtGetVersion.restype = ctypes.c_size_t
        self._library.cublasLtGetStatusName.restype = ctypes.c_char_p
        self._handle: ctypes.c_void_p | None = None

    @property
    def version(self) -> str:
        """As the wheel is numbered: 13.4.1."""
        return version_name(int(self._library.cublasLtGetVersion()))

    @property
    def handle(self) -> ctypes.c_void_p:
        """Made on first use, on the current device."""
        if self._handle is None:
            handle = ctypes.c_void_p()
            self.call("cublasLtCreate", ctypes.byref(handle))
            self._handle = handle
        return self._handle

    def call(self, name: str, *arguments: Any) -> None:
        status = int(getattr(self._library, name)(*arguments))
        if status != CUBLAS_STATUS_SUCCESS:
            raise CublasError(name, status, self._library.cublasLtGetStatusName(status).decode())

    def discard(self, name: str, handle: int | None) -> None:
        getattr(self._library, name)(ctypes.c_void_p(handle))

    def matrix(self, layout: Layout) -> Descriptor:
        made = Descriptor(
            self, "MatrixLayout", CUDA_TYPES[layout.dtype], _u64(layout.rows), _u64(layout.columns), _i64(layout.pitch)
        )
        made.set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, _i32(layout.batch))
        made.set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, _i64(layout.stride))
        return made

    def product(
        self, compute: int, scale: int, *, transpose: tuple[bool, bool], epilogue: int, bias: int | None = None
    ) -> Descriptor:
        """Of D = epilogue(alpha op(A) op(B) + beta C + bias), factors of type `scale` in host memory; `bias`: an
        address."""
        made = Descriptor(self, "MatmulDesc", compute, scale)
        attributes = (CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB)
        for attribute, transposed in zip(attributes, transpose, strict=True):
            made.set(attribute, _i32(CUBLAS_OP_T if transposed else CUBLAS_OP_N))
        made.set(CUBLASLT_MATMUL_DESC_EPILOGUE, _u32(epilogue))
        if bias is not None:
            made.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, ctypes.c_void_p(bias))
        return made

    def preference(self, workspace_bytes: int, reductions: int, alignments: Sequence[int]) -> Descriptor:
        """`reductions`: sums of split products that are allowed; `alignments` of A, B, C and D in bytes."""
        made = Descriptor(self, "MatmulPreference")
        made.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, _u64(workspace_bytes))
        made.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, _u32(reductions))
        attributes = (
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        )
        for attribute, bytes_ in zip(attributes, alignments, strict=True):
            made.set(attribute, _u32(bytes_))
        return made

    def heuristics(
        self, product: Descriptor, matrices: Sequence[Descriptor], preference: Descriptor, count: int
    ) -> list[Found]:
        """At most `count` algorithms for A, B, C and D, those that the library deems fastest first."""
        results, written = (HeuristicResult * count)(), ctypes.c_int()
        try:
            self.call(
                "cublasLtMatmulAlgoGetHeuristic", self.handle, product.handle, *(matrix.handle for matrix in matrices),
                preference.handle, count, results, ctypes.byref(written),
            )  # fmt: skip
        except CublasError as error:
            if error.status != CUBLAS_STATUS_NOT_SUPPORTED:
                raise
            return []
        usable = [result for result in results[: written.value] if result.state == CUBLAS_STATUS_SUCCESS]
        return [Found(result.algo, int(result.workspaceSize), self._describe(result.algo)) for result in usable]

    def multiply(
        self,
        product: Descriptor,
        pointers: Sequence[int],
        matrices: Sequence[Descriptor],
        factors: tuple[Any, Any],
        algorithm: Algorithm,
        workspace: tuple[int, int],
        stream: int,
    ) -> None:
        """Queues a product. `factors`: alpha and beta as ctypes values; `workspace`: address and bytes."""
        a, b, c, d = zip(map(ctypes.c_void_p, pointers), (matrix.handle for matrix in matrices), strict=True)
        alpha, beta = map(ctypes.byref, factors)
        self.call(
            "cublasLtMatmul", self.handle, product.handle, alpha, *a, *b, beta, *c, *d, ctypes.byref(algorithm),
            ctypes.c_void_p(workspace[0]), ctypes.c_size_t(workspace[1]), ctypes.c_void_p(stream),
        )  # fmt: skip

    def _describe(self, algorithm: Algorithm) -> str:
        """The numbers by which the library names an algorithm; of those that it says nothing about, nothing."""
        settings = []
        for name, attribute in _DESCRIBED:
            value, written = _i32(), ctypes.c_size_t()
            status = self._library.cublasLtMatmulAlgoConfigGetAttribute(
                ctypes.byref(algorithm), attribute, ctypes.byref(value), ctypes.c_size_t(4), ctypes.byref(written)
            )
            if status == CUBLAS_STATUS_SUCCESS:
                settings.append(f"{name} {value.value}")
        return ", ".join(settings)


_DESCRIBED = (
    ("algorithm", CUBLASLT_ALGO_CONFIG_ID),
    ("tile id", CUBLASLT_ALGO_CONFIG_TILE_ID),
    ("stages id", CUBLASLT_ALGO_CONFIG_STAGES_ID),
    ("split-k", CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
)


def version_name(number: int) -> str:
    """131000 is 13.10.0 and 130401 is 13.4.1: major * 10000 + minor * 100 + patch (CUBLAS_VERSION)."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def load_library(name: str, sonames: Sequence[str]) -> tuple[str, ctypes.CDLL]:
    """The copy that CuPy would load too (NVIDIA's wheels, conda, CUDA_HOME), else one of another's wheels or of a
    toolkit, else what the loader finds."""
    tried = []
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib(name).abs_path
        if path:
            return path, ctypes.CDLL(path)
    except ImportError as error:
        tried.append(str(error))
    except (RuntimeError, OSError) as error:  # its DynamicLibNotFoundError is a RuntimeError
        tried.append(str(error).strip().splitlines()[0])
    for place in (*(str(path) for soname in sonames for path in copies_of(soname)), *sonames):
        try:
            return place, ctypes.CDLL(place)
        except OSError as error:
            tried.append(str(error))
    raise LibraryMissing(f"no lib{name}: {'; '.join(tried)}. {HOW_TO_INSTALL}")


def copies_of(soname: str) -> list[Path]:
    """In the wheels that PyTorch brings, in PyTorch's own folder, and in a toolkit."""
    folders = []
    for package, inside in (("nvidia", f"*/lib/{soname}"), ("torch", f"lib/{soname}")):
        spec = importlib.util.find_spec(package)
        folders += [(Path(root), inside) for root in (spec.submodule_search_locations or ())] if spec else []
    folders += [(Path(toolkit), f"lib64/{soname}") for toolkit in toolkits()]
    return [path for folder, pattern in folders for path in sorted(folder.glob(pattern))]
