"""How a problem becomes descriptors of cuBLASLt: by NumPy, and by the library itself where it is installed."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from codegen.epilogue_reference import apply_chain, rounded_to_float32
from codegen.operators import operator
from codegen.operators.matmul.problem import MatmulProblem
from tests.of_workers.vendor.products import BIAS, BIAS_M, GELU, HALF, RELU, RESIDUAL, columns, small
from tests.support.fixtures.codegen import matmul
from workers.vendor import cublaslt
from workers.vendor import matmul as vendor_matmul
from workers.vendor.bench import laid_out
from workers.vendor.cublaslt import SONAMES, CublasError, CublasLt, Layout, LibraryMissing, load_library
from workers.vendor.matmul import Fused, ProductPlan, fused, plans

INCLUDES = [
    Path(each) for each in (getattr(importlib.util.find_spec("nvidia"), "submodule_search_locations", None) or [])
]
DTYPES = ("float32", "float16", "bfloat16", "int8")
# Everything that a problem can ask of the descriptors.
PROBLEMS = [
    *({"dtype": dtype, "layout": layout} for dtype in DTYPES for layout in ("nn", "nt", "tn", "tt")),
    {"dtype": "float32", "allow_tf32": True, "layout": "nt"},
    {"dtype": "float16", "out_dtype": "float32"},
    {"dtype": "float16", "out_dtype": "bfloat16"},
    {"dtype": "float32", "out_dtype": "float16", "epilogue": [BIAS]},
    {"dtype": "int8", "out_dtype": "float16", "layout": "tn", "k": 37, "n": 29, "epilogue": [HALF, BIAS]},
    {"dtype": "int8", "k": 5, "n": 3, "batch": 3, "stride_b": 0},
    {"m": 5, "n": 7, "k": 11, "batch": 4, "layout": "tn"},
    {"m": 5, "n": 7, "k": 11, "batch": 4, "stride_a": 0, "lda": 13, "ldb": 9, "ldc": 10, "epilogue": [RESIDUAL, BIAS]},
    {"dtype": "float16", "epilogue": [HALF, RESIDUAL, BIAS, RELU]},
    {"dtype": "float16", "epilogue": [BIAS, GELU]},
    {"dtype": "bfloat16", "epilogue": [BIAS_M, RELU]},
    {"dtype": "float16", "epilogue": [RELU, BIAS]},
]  # fmt: skip
IDS = [
    " ".join(f"{key}={value}" for key, value in problem.items() if key != "epilogue")[:60] + f" {len(problem)}"
    for problem in PROBLEMS
]


@pytest.fixture(scope="module")
def library() -> CublasLt:
    try:
        return CublasLt()
    except LibraryMissing as error:
        pytest.skip(f"{error}")


# --- what goes into the library's kernel


@pytest.mark.parametrize(
    ("epilogue", "expected"),
    [
        ([], Fused()),
        ([BIAS], Fused(1, bias="bias")),
        ([HALF], Fused(1, alpha=0.5)),
        ([HALF, RESIDUAL, BIAS, RELU], Fused(4, 0.5, "residual", "bias", True)),
        ([BIAS, RESIDUAL], Fused(2, residual="residual", bias="bias")),
        ([RELU], Fused(1, relu=True)),
        ([BIAS, GELU], Fused(1, bias="bias")),
        ([GELU], Fused()),
        ([BIAS_M, RELU], Fused()),
        ([BIAS, HALF], Fused(1, bias="bias")),
        ([RELU, BIAS], Fused(1, relu=True)),
        ([RELU, RELU], Fused(1, relu=True)),
        ([BIAS, BIAS], Fused(1, bias="bias_0")),
        ([{"op": "scale", "value": 0.0}, BIAS], Fused()),
        ([{"op": "clip", "lo": 0.0, "hi": 6.0}], Fused()),
    ],
)
def test_only_what_the_librarys_kernel_really_computes_is_fused(
    epilogue: list[dict[str, Any]], expected: Fused
) -> None:
    assert fused(matmul(dtype="float16", epilogue=epilogue)) == expected


def test_what_is_not_fused_is_left_to_the_kernel_after_it() -> None:
    most, nothing = plans(matmul(dtype="float16", epilogue=[BIAS, GELU, RESIDUAL]))
    assert [node.op for node in most.rest] == ["gelu", "residual"] and most.rest_operands == ("residual",)
    assert [node.op for node in nothing.rest] == ["bias", "gelu", "residual"]
    assert nothing.rest_operands == ("bias", "residual")
    assert most.epilogue == cublaslt.CUBLASLT_EPILOGUE_BIAS and nothing.epilogue == cublaslt.CUBLASLT_EPILOGUE_DEFAULT
    assert most.text() == "bias in its kernel; gelu, residual in a kernel after it"


@pytest.mark.parametrize(
    ("fields", "compute", "d", "in_place"),
    [
        ({"dtype": "float32"}, cublaslt.CUBLAS_COMPUTE_32F, "float32", True),
        ({"dtype": "float32", "allow_tf32": True}, cublaslt.CUBLAS_COMPUTE_32F_FAST_TF32, "float32", True),
        ({"dtype": "float16"}, cublaslt.CUBLAS_COMPUTE_32F, "float16", True),
        ({"dtype": "float16", "out_dtype": "float32"}, cublaslt.CUBLAS_COMPUTE_32F, "float32", True),
        ({"dtype": "float16", "out_dtype": "bfloat16"}, cublaslt.CUBLAS_COMPUTE_32F, "float32", False),
        ({"dtype": "float32", "out_dtype": "float16"}, cublaslt.CUBLAS_COMPUTE_32F, "float32", False),
        ({"dtype": "bfloat16"}, cublaslt.CUBLAS_COMPUTE_32F, "bfloat16", True),
        ({"dtype": "int8"}, cublaslt.CUBLAS_COMPUTE_32I, "int32", True),
        ({"dtype": "int8", "out_dtype": "float32"}, cublaslt.CUBLAS_COMPUTE_32I, "int32", False),
    ],
)
def test_sums_are_of_the_problems_own_type(fields: dict[str, Any], compute: int, d: str, in_place: bool) -> None:
    (plan,) = plans(matmul(**fields))
    assert (plan.compute, plan.d.dtype, plan.in_place) == (compute, d, in_place)
    assert plan.needs_kernel == (not in_place)
    # Parts of a split product may only be added before they are rounded: in the output where that rounds nothing.
    same = cublaslt.CUBLASLT_REDUCTION_SCHEME_INPLACE if d in ("float32", "int32") else 0
    assert plan.reductions == cublaslt.CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | same


def test_nothing_is_fused_where_the_product_is_not_of_the_outputs_type() -> None:
    (plan,) = plans(matmul(dtype="int8", out_dtype="float16", epilogue=[HALF, BIAS, RELU]))
    assert plan.fused == Fused() and [node.op for node in plan.rest] == ["scale", "bias", "relu"]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_over_a_ring_the_library_has_nothing(dtype: str) -> None:
    assert plans(matmul(dtype=dtype, epilogue=[BIAS, RELU])) == ()


def test_int8_is_given_as_the_library_takes_it() -> None:
    (plan,) = plans(matmul(dtype="int8", m=5, n=6, k=7, layout="tn"))
    assert plan.transpose == (True, False) and plan.packed
    assert plan.a == Layout("int8", 16, 8, 16) and plan.b == Layout("int8", 16, 5, 16)
    assert plan.d == Layout("int32", 8, 5, 8)


# --- the whole way, with NumPy in the place of the library and of the device


class NumpyBench:
    """Enough of a GPU for operands; nothing is launched."""

    arrays = np
    stream = 0

    def address(self, array: np.ndarray[Any, Any]) -> int:
        return int(array.ctypes.data)

    def synchronize(self) -> None: ...

    def faults(self) -> Any:
        return np.errstate()

    def kernel(self, text: str, name: str) -> Any:
        raise AssertionError("not here")


def computed(problem: MatmulProblem, plan: ProductPlan, inputs: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What cublasLtMatmul and the kernel after it give by their documentation, from the plan's own buffers."""
    operands = vendor_matmul.upload(NumpyBench(), problem, plan, inputs)
    d = (
        plan.fused.alpha
        * columns(operands.arrays["b"], plan.a, plan.transpose[0])
        @ columns(operands.arrays["a"], plan.b, plan.transpose[1])
    )
    if plan.fused.residual:
        d = d + columns(operands.arrays[plan.fused.residual], plan.d)
    if plan.fused.bias:
        bias = operands.arrays[plan.fused.bias]
        assert bias.shape == (plan.d.rows,)
        d = d + bias.astype(np.float64)[:, None]
    d = np.maximum(d, 0.0) if plan.fused.relu else d
    rows = d.swapaxes(1, 2)[:, : problem.m, : problem.n]  # row-major again, without padding
    rows = rows[0] if problem.batch == 1 else rows
    tensors = {name: inputs[name] for name in plan.rest_operands}
    if plan.rest_operands and any("_" in name for name in plan.rest_operands):
        pytest.fail("a test problem has two nodes of one kind")
    start = rounded_to_float32(rows)
    return np.asarray(apply_chain(plan.rest, start, tensors, exact=False, out_dtype=problem.out_dtype).value)


@pytest.mark.parametrize("fields", PROBLEMS, ids=IDS)
def test_a_plan_computes_the_problem(fields: dict[str, Any]) -> None:
    problem = small(fields)
    op = operator("matmul")
    inputs = op.make_inputs(problem, "integer", np.random.default_rng(5))
    expected, bound = op.reference(problem, inputs)
    for plan in plans(problem):
        result = computed(problem, plan, inputs)
        # The test rounds less often than the reference; integers need no rounding but in a narrow output.
        narrow = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(problem.out_dtype, 0.0)
        assert result.shape == expected.shape
        assert np.all(np.abs(result - expected) <= bound + narrow * np.abs(expected))


def test_rows_and_batches_are_laid_out_with_gaps_that_are_not_numbers() -> None:
    problem = matmul(m=3, n=2, k=2, batch=2, lda=5, stride_a=20)
    (a, *_) = operator("matmul").operands(problem)
    values = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    flat = laid_out(a, values)
    assert flat.shape == (20 + 2 * 5 + 2,)
    assert flat[0:2].tolist() == [0.0, 1.0] and flat[20 + 5 : 20 + 7].tolist() == [8.0, 9.0]
    assert np.isnan(flat[2:5]).all() and np.isnan(flat[12:20]).all()


def test_a_result_is_read_where_the_plan_wrote_it() -> None:
    problem = matmul(dtype="int8", m=2, n=3, k=4, batch=2)
    (plan,) = plans(problem)
    inputs = operator("matmul").make_inputs(problem, "integer", np.random.default_rng(1))
    operands = vendor_matmul.upload(NumpyBench(), problem, plan, inputs)
    operands.out[...] = np.arange(16, dtype=np.int32)
    prepared = vendor_matmul.Prepared(plan, (), (), (operands,), None, None)
    call = vendor_matmul.MatmulCall(NumpyBench(), None, problem, prepared, None)  # type: ignore[arg-type]
    assert call.result(0).tolist() == [[[0, 1, 2], [4, 5, 6]], [[8, 9, 10], [12, 13, 14]]]


def test_alignment_is_what_an_address_has_and_no_more_than_counts() -> None:
    assert [vendor_matmul.alignment(each) for each in (512, 256, 16, 6, 0)] == [256, 256, 16, 2, 256]


# --- the library itself


def header_values(text: str) -> dict[str, int]:
    """The enumerators of a C header, those that are sums of others too."""
    enumerators: dict[str, int] = {}
    for name, value in re.findall(r"\b((?:CUBLAS|CUDA_R)\w+)\s*=\s*([^,}/\n]+)", text):
        words = re.sub(r"\b[A-Z]\w+\b", lambda each: str(enumerators.get(each.group(), "x")), value.strip())
        if re.fullmatch(r"[-\d\sxa-fA-F|()]+", words):
            try:
                enumerators[name] = eval(words, {"__builtins__": {}})  # digits, bars and brackets only
            except (NameError, SyntaxError):
                continue
    return enumerators


def own_values() -> dict[str, int]:
    return {name: value for name, value in vars(cublaslt).items() if name.startswith(("CUBLAS", "CUDA_R"))}


def headers(*names: str) -> str | None:
    found = [next((path for root in INCLUDES for path in root.glob(f"cu*/include/{name}")), None) for name in names]
    return None if None in found else "\n".join(path.read_text(encoding="utf-8") for path in found if path)


def test_types_have_the_numbers_of_cudas_header() -> None:
    text = headers("library_types.h")
    assert text is not None, "nvidia-cuda-runtime, which the toolchain group installs, has no library_types.h"
    values = header_values(text)
    own = {name: value for name, value in own_values().items() if name.startswith("CUDA_R")}
    assert own and own == {name: values[name] for name in own}


def test_constants_have_the_numbers_of_cublass_headers() -> None:
    text = headers("cublas_api.h", "cublasLt.h")
    if text is None:
        pytest.skip(f"cublasLt.h is not installed: {cublaslt.HOW_TO_INSTALL}")
    values = header_values(text)
    own = {name: value for name, value in own_values().items() if name.startswith("CUBLAS")}
    assert len(own) > 25 and own == {name: values[name] for name in own}
    words = re.search(r"typedef struct \{\s*uint64_t data\[(\d+)\];\s*\} cublasLtMatmulAlgo_t;", text)
    assert words is not None and ctypes.sizeof(cublaslt.Algorithm) == 8 * int(words.group(1))
    # algo, size_t, status, float, int reserved[4]
    assert "int reserved[4];" in text and ctypes.sizeof(cublaslt.HeuristicResult) == 64 + 8 + 4 + 4 + 16


def test_the_version_is_spelled_as_the_wheel_is() -> None:
    for number, words in ((131000, "13.10.0"), (130401, "13.4.1"), (120804, "12.8.4")):
        assert cublaslt.version_name(number) == words


def test_a_machine_without_the_library_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setitem(__import__("sys").modules, "cuda.pathfinder", None)
    monkeypatch.setattr(ctypes, "CDLL", none)
    with pytest.raises(LibraryMissing, match=r"libcublasLt\.so\.13.*pip install .*nvidia-cublas"):
        CublasLt()


@pytest.mark.parametrize(
    "place",
    [
        "nvidia/cu13/lib/libcublasLt.so.13",
        "nvidia/cublas/lib/libcublasLt.so.12",
        "torch/lib/libcublasLt.so.12",
        "toolkit/lib64/libcublasLt.so.13",
    ],
)
def test_the_library_is_found_beside_pytorch_and_in_a_toolkit(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def only_files(name: str) -> Any:
        if not Path(name).is_file():
            raise OSError(f"{name}: cannot open shared object file")
        return ctypes.PyDLL(None)

    def spec_of(package: str) -> Any:
        return SimpleNamespace(submodule_search_locations=[str(tmp_path / package)])

    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).touch()
    monkeypatch.setitem(__import__("sys").modules, "cuda.pathfinder", None)
    monkeypatch.setattr("importlib.util.find_spec", spec_of)
    monkeypatch.setattr(ctypes, "CDLL", only_files)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    assert load_library("cublasLt", SONAMES)[0] == str(tmp_path / place)


@pytest.mark.parametrize("fields", PROBLEMS, ids=IDS)
def test_the_library_takes_every_attribute_and_gives_it_back(library: CublasLt, fields: dict[str, Any]) -> None:
    for plan in plans(small(fields)):
        for layout in (plan.a, plan.b, plan.d):
            made = library.matrix(layout)
            assert made.get(0, ctypes.c_uint32()) == cublaslt.CUDA_TYPES[layout.dtype]
            assert made.get(2, ctypes.c_uint64()) == layout.rows and made.get(3, ctypes.c_uint64()) == layout.columns
            assert made.get(4, ctypes.c_int64()) == layout.pitch
            assert made.get(cublaslt.CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, ctypes.c_int32()) == layout.batch
            assert made.get(cublaslt.CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, ctypes.c_int64()) == layout.stride
        bias = 0x1000 if plan.fused.bias else None
        product = library.product(plan.compute, plan.scale, transpose=plan.transpose, epilogue=plan.epilogue, bias=bias)
        assert product.get(0, ctypes.c_int32()) == plan.compute and product.get(1, ctypes.c_int32()) == plan.scale
        assert product.get(cublaslt.CUBLASLT_MATMUL_DESC_TRANSA, ctypes.c_int32()) == plan.transpose[0]
        assert product.get(cublaslt.CUBLASLT_MATMUL_DESC_TRANSB, ctypes.c_int32()) == plan.transpose[1]
        assert product.get(cublaslt.CUBLASLT_MATMUL_DESC_EPILOGUE, ctypes.c_uint32()) == plan.epilogue
        assert product.get(cublaslt.CUBLASLT_MATMUL_DESC_BIAS_POINTER, ctypes.c_void_p()) == bias


def test_the_library_takes_the_preferences_and_gives_them_back(library: CublasLt) -> None:
    made = library.preference(2**26, cublaslt.CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, (16, 32, 64, 128))
    assert made.get(cublaslt.CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, ctypes.c_uint64()) == 2**26
    assert made.get(cublaslt.CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, ctypes.c_uint32()) == 2
    attributes = (
        cublaslt.CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        cublaslt.CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        cublaslt.CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
        cublaslt.CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
    )
    assert [made.get(attribute, ctypes.c_uint32()) for attribute in attributes] == [16, 32, 64, 128]


def test_a_refused_call_is_named_with_its_status(library: CublasLt) -> None:
    matrix = library.matrix(Layout("float32", 4, 4, 4))
    with pytest.raises(CublasError, match="cublasLtMatrixLayoutSetAttribute: CUBLAS_STATUS_INVALID_VALUE"):
        matrix.set(cublaslt.CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, ctypes.c_int64(1))
