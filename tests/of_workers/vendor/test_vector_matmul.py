"""`cublasGemmEx`, a peer of products with a vector: its calls by NumPy in the place of the library, its constants and
arguments by the library's own header where that is installed."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.operators import operator
from tests.of_workers.vendor.products import BIAS, HALF, RELU, RESIDUAL, columns, small
from tests.support.gpu.numpy_bench import NumpyBench, quiet
from workers.gpu.interface import LaunchRefused
from workers.vendor import cublaslt, vector_matmul
from workers.vendor import matmul as vendor_matmul
from workers.vendor.cublaslt import Layout, LibraryMissing
from workers.vendor.vector_matmul import Cublas

HEADERS = [
    path
    for place in (getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", None) or [])
    for path in Path(place).glob("cu*/include/cublas_api.h")
]
# cublas_api.h: the parameters of both functions, in their order.
SHAPE = ("handle", "transa", "transb", "m", "n", "k", "alpha")
ONE = (*SHAPE, "A", "Atype", "lda", "B", "Btype", "ldb", "beta", "C", "Ctype", "ldc", "computeType", "algo")
MANY = (
    *(*SHAPE, "A", "Atype", "lda", "strideA", "B", "Btype", "ldb", "strideB", "beta", "C", "Ctype", "ldc", "strideC"),
    *("batchCount", "computeType", "algo"),
)
PARAMETERS = {"cublasGemmEx": ONE, "cublasGemmStridedBatchedEx": MANY}
NUMPY = {number: name for name, number in cublaslt.CUDA_TYPES.items()}


class NumpyCublas:
    """The library's functions over host memory, as its documentation has them."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.settings: list[tuple[str, tuple[Any, ...]]] = []
        self.cublasGetStatusName: Any = lambda number: b"CUBLAS_STATUS_OF_THE_TEST"

    def __getattr__(self, name: str) -> Callable[..., int]:
        def function(*arguments: Any) -> int:
            if name in PARAMETERS:
                return self.status or self._multiply(dict(zip(PARAMETERS[name], arguments, strict=True)))
            self.settings.append((name, arguments))
            return 0

        return function

    def _multiply(self, of: dict[str, Any]) -> int:
        batch = of.get("batchCount", 1)
        a = self._matrices(of, "A", "lda", of["k"] if of["transa"] else of["m"], of["m"] if of["transa"] else of["k"])
        b = self._matrices(of, "B", "ldb", of["n"] if of["transb"] else of["k"], of["k"] if of["transb"] else of["n"])
        first = a.swapaxes(1, 2) if of["transa"] else a
        second = b.swapaxes(1, 2) if of["transb"] else b
        alpha = ctypes.cast(of["alpha"], ctypes.POINTER(ctypes.c_float))[0]
        assert ctypes.cast(of["beta"], ctypes.POINTER(ctypes.c_float))[0] == 0.0
        product = alpha * (first @ second)
        assert product.shape == (batch, of["m"], of["n"]) and of["algo"] == -1
        out = self._flat(of, "C", "ldc", of["m"], of["n"])
        for number in range(batch):
            start = number * (of["strideC"].value if batch > 1 else 0)
            for column in range(of["n"]):
                place = start + column * of["ldc"].value
                out[place : place + of["m"]] = product[number, :, column]
        return 0

    def _flat(self, of: dict[str, Any], name: str, pitch: str, rows: int, columns_: int) -> np.ndarray[Any, Any]:
        element = np.dtype({"float32": np.float32, "float16": np.float16}[NUMPY[of[f"{name}type"]]])
        step = of[f"stride{name}"].value if f"stride{name}" in of else 0
        size = (of.get("batchCount", 1) - 1) * step + (columns_ - 1) * of[pitch].value + rows
        memory = (ctypes.c_ubyte * (size * element.itemsize)).from_address(of[name].value)
        return np.frombuffer(memory, element)

    def _matrices(self, of: dict[str, Any], name: str, pitch: str, rows: int, columns_: int) -> np.ndarray[Any, Any]:
        step = of[f"stride{name}"].value if f"stride{name}" in of else 0
        layout = Layout(NUMPY[of[f"{name}type"]], rows, columns_, of[pitch].value, of.get("batchCount", 1), step)
        return columns(self._flat(of, name, pitch, rows, columns_), layout)


def offered(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], library: NumpyCublas, sets: int = 2
) -> tuple[list[Any], NumpyBench, dict[str, Any]]:
    problem = small(fields)
    inputs = operator("matmul").make_inputs(problem, "integer", np.random.default_rng(7))
    monkeypatch.setattr(vendor_matmul, "offers", lambda *arguments: ["cuBLASLt's"])
    monkeypatch.setattr(vector_matmul, "load_library", lambda name, sonames: (sonames[0], library))
    bench = NumpyBench()
    return list(vector_matmul.offers(bench, problem, inputs, sets, quiet)), bench, inputs


@pytest.mark.parametrize(
    "fields",
    [
        {"m": 1, "dtype": "float32", "layout": "nt"},
        {"m": 1, "dtype": "float32", "layout": "nn", "allow_tf32": True},
        {"n": 1, "dtype": "float16", "layout": "tt"},
        {"m": 1, "dtype": "float16", "out_dtype": "float32", "layout": "tn", "ldb": 31},
        {"m": 1, "n": 5, "k": 9, "dtype": "float32", "batch": 3, "stride_b": 0},
        {"n": 1, "m": 5, "k": 9, "dtype": "float32", "batch": 3, "ldc": 4},
    ],
    ids=lambda fields: " ".join(f"{name}={value}" for name, value in fields.items()),
)
def test_a_product_with_a_vector_is_computed_by_it_too(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    library, problem = NumpyCublas(), small(fields)
    (first, call), bench, inputs = offered(monkeypatch, fields, library)
    assert first == "cuBLASLt's" and call.describe()["library"] == "cuBLAS" and call.describe()["fused"]
    expected, bound = operator("matmul").reference(problem, inputs)
    for number in (0, 1):
        call.run(number)
        assert np.all(np.abs(call.result(number) - expected) <= bound + 2.0**-10 * np.abs(expected))
    # No sum is rounded to the output's type on the way; the stream is the bench's, and gets its memory anew.
    names = [name for name, _ in library.settings if name != "cublasGetProperty"]
    assert names[:4] == ["cublasCreate_v2", "cublasSetMathMode", "cublasSetStream_v2", "cublasSetWorkspace_v2"]
    settings = dict(library.settings)
    assert settings["cublasSetMathMode"][1] == vector_matmul.CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
    assert settings["cublasSetStream_v2"][1].value == bench.stream
    assert settings["cublasSetWorkspace_v2"][2].value == vector_matmul.WORKSPACE_BYTES


def test_an_error_that_is_no_refusal_leaves_the_algorithms_of_the_other_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vector_matmul, "Cublas", lambda: {}["handle"])
    (first, lost), _, _ = offered(monkeypatch, {"m": 1, "dtype": "float16"}, NumpyCublas())
    assert first == "cuBLASLt's"
    with pytest.raises(LaunchRefused, match="cuBLAS failed: KeyError: 'handle'"):
        lost.run(0)


def test_the_epilogue_is_in_a_kernel_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"m": 1, "dtype": "float16", "epilogue": [HALF, RESIDUAL, BIAS, RELU]}
    (_, call), bench, _ = offered(monkeypatch, fields, NumpyCublas())
    assert not call.describe()["fused"]
    assert call.describe()["algorithm"].endswith("scale, residual, bias, relu in a kernel after it")
    assert len(bench.texts) == 1 and len(bench.launches) == 1


@pytest.mark.parametrize(
    "fields", [{}, {"m": 1, "dtype": "int8"}, {"m": 1, "dtype": "int32"}], ids=["a matrix", "int8", "a ring"]
)
def test_of_other_products_there_are_cublaslts_alone(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls, _, _ = offered(monkeypatch, fields, NumpyCublas())
    assert calls == ["cuBLASLt's"]


def test_a_refusal_leaves_cublaslts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, _, _ = offered(monkeypatch, {"m": 1}, NumpyCublas(status=15))
    assert calls == ["cuBLASLt's"]
    (_, call), _, _ = offered(monkeypatch, {"m": 1}, library := NumpyCublas())
    library.status = 13
    with pytest.raises(LaunchRefused, match=r"cublasGemmEx: CUBLAS_STATUS_OF_THE_TEST \(13\)"):
        call.run(0)


def test_where_it_is_not_installed_there_are_cublaslts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, sonames: object) -> Any:
        raise LibraryMissing(f"no lib{name}")

    problem = small({"m": 1})
    inputs = operator("matmul").make_inputs(problem, "integer", np.random.default_rng(7))
    monkeypatch.setattr(vendor_matmul, "offers", lambda *arguments: ["cuBLASLt's"])
    monkeypatch.setattr(vector_matmul, "load_library", missing)
    assert vector_matmul.offers(NumpyBench(), problem, inputs, 1, quiet) == ["cuBLASLt's"]


# ---- the library itself


def test_parameters_and_constants_are_those_of_its_header() -> None:
    if not HEADERS:
        pytest.skip(f"cublas_api.h is not installed: {cublaslt.HOW_TO_INSTALL}")
    text = HEADERS[0].read_text()
    for name, parameters in PARAMETERS.items():
        prototype = re.search(rf"CUBLASWINAPI\s+{name}\s*\(([^;]*?)\);", text)
        assert prototype is not None
        assert tuple(re.findall(r"(\w+)\s*(?:,|$)", prototype[1])) == parameters
    for name in ("CUBLAS_GEMM_DEFAULT", "CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION"):
        value = re.search(rf"\b{name}\s*=\s*(-?\d+)", text)
        assert value is not None and int(value[1]) == getattr(vector_matmul, name)


def test_the_library_has_the_functions_and_says_its_version() -> None:
    try:
        library = Cublas()
    except LibraryMissing as error:
        pytest.skip(f"{error}")
    assert re.fullmatch(r"1[23]\.\d+\.\d+", library.version)
    loaded = ctypes.CDLL(library.path)
    for name in (*PARAMETERS, "cublasCreate_v2", "cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasSetMathMode"):
        assert hasattr(loaded, name), name
