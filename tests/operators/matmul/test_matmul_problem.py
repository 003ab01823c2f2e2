"""Matmul problems: what is refused, where the fault is said to be, and what is filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from codegen.dtypes import dtype
from codegen.errors import InvalidOperator, UnknownOperator
from codegen.operators import load_operators, operator, operators
from codegen.operators.matmul.problem import FLOATS, MatmulProblem
from codegen.problem import LARGEST_ELEMENTS, LARGEST_EXTENT
from service.http.faults import faults_of
from tests.support.fixtures.codegen import matmul


def faults(**fields: Any) -> dict[str, str]:
    """Where the problem is refused, and the sentence."""
    with pytest.raises(ValidationError) as refused:
        matmul(**fields)
    return {".".join(map(str, error["loc"])): error["msg"] for error in refused.value.errors()}


def test_every_field_at_fault_is_named_and_no_other() -> None:
    far_apart = faults(batch=2**30, stride_c=2**40)
    assert far_apart.keys() == {"stride_a", "stride_b", "stride_c"}
    assert all(str(LARGEST_ELEMENTS) in said for said in far_apart.values())
    assert faults(m=0).keys() == {"m"}
    assert faults(layout="xx", lda=3).keys() == {"layout"}
    assert faults(dtype="float64", acc_dtype="int32", out_dtype="int32").keys() == {"dtype"}


@pytest.mark.parametrize(
    ("fields", "field", "allowed"),
    [
        ({"dtype": "int8", "acc_dtype": "float32"}, "acc_dtype", ["int32"]),
        ({"dtype": "float16", "out_dtype": "int32"}, "out_dtype", ["float32", "float16", "bfloat16"]),
        ({"dtype": "int8", "epilogue": [{"op": "gelu"}]}, "epilogue", {"maxItems": 0}),
        ({"dtype": "half"}, "dtype", ["float32", "float16", "bfloat16", "int8", "int32", "int64"]),
        ({"allow_tf32": "yes"}, "allow_tf32", {"type": "boolean"}),
    ],
)
def test_a_request_learns_which_dtypes_go_together(fields: dict[str, Any], field: str, allowed: Any) -> None:
    body = {"operator": "matmul", "m": 64, "n": 64, "k": 64, **fields}
    with pytest.raises(ValidationError) as refused:
        MatmulProblem.model_validate(body)
    (fault,) = faults_of(refused.value, MatmulProblem, body)
    assert (fault.field, fault.allowed) == (field, allowed)
    assert field in fault.detail


@pytest.mark.parametrize(
    ("inputs", "acc_dtype", "out_dtypes", "default"),
    [
        ("float32", "float32", FLOATS, "float32"),
        ("float16", "float32", FLOATS, "float16"),
        ("bfloat16", "float32", FLOATS, "bfloat16"),
        ("int8", "int32", (*FLOATS, "int32"), "int32"),
    ],
)
def test_dtypes_of_sums_and_out_follow_the_inputs(
    inputs: str, acc_dtype: str, out_dtypes: tuple[str, ...], default: str
) -> None:
    assert (matmul(dtype=inputs).acc_dtype, matmul(dtype=inputs).out_dtype) == (acc_dtype, default)
    for out in out_dtypes:
        epilogue = [] if out == "int32" else [{"op": "bias"}, {"op": "mask"}, {"op": "residual"}]
        problem = matmul(dtype=inputs, out_dtype=out, epilogue=epilogue)
        dtypes = {operand.name: operand.dtype for operand in operator("matmul").operands(problem)}
        added = {} if out == "int32" else {"bias": out, "mask": "uint8", "residual": out}
        assert dtypes == {"a": inputs, "b": inputs, "out": out, **added}
        assert operator("matmul").signature(problem)["acc_dtype"] == acc_dtype


def test_tf32_means_something_for_float32_alone() -> None:
    assert matmul(allow_tf32=True).digest != matmul().digest
    for inputs in ("float16", "bfloat16", "int8"):
        assert matmul(dtype=inputs, allow_tf32=True).digest == matmul(dtype=inputs).digest


def test_the_largest_extent_is_allowed_where_operands_stay_small() -> None:
    assert matmul(m=LARGEST_EXTENT, n=1, k=1).m == LARGEST_EXTENT


def test_defaults_are_packed() -> None:
    problem = matmul(m=3, n=5, k=7, batch=2, layout="tn")
    assert (problem.lda, problem.ldb, problem.ldc) == (3, 5, 5)
    assert (problem.stride_a, problem.stride_b, problem.stride_c) == (21, 35, 15)
    assert matmul(m=3, n=5, k=7, stride_c=16.0) == matmul(m=3, n=5, k=7)


def test_operands_follow_the_launch_abi() -> None:
    epilogue = [{"op": "bias", "axis": "m"}, {"op": "relu"}, {"op": "mask"}, {"op": "bias"},
                {"op": "scale", "value": 3.0}, {"op": "clip", "lo": -1.0, "hi": 2.0},
                {"op": "leaky_relu", "slope": 0.5}]  # fmt: skip
    problem = matmul(m=3, n=5, k=7, batch=2, layout="nt", stride_b=0, ldc=8, epilogue=epilogue)
    op = operator("matmul")
    shown = [
        (operand.name, operand.dtype, operand.role, operand.shape, operand.strides) for operand in op.operands(problem)
    ]
    assert shown == [
        ("a", "float32", "in", (2, 3, 7), (21, 7, 1)),
        ("b", "float32", "in", (2, 5, 7), (0, 7, 1)),
        ("bias_0", "float32", "in", (3,), (1,)),
        ("mask", "uint8", "in", (2, 3, 5), (24, 8, 1)),
        ("bias_3", "float32", "in", (5,), (1,)),
        ("out", "float32", "out", (2, 3, 5), (24, 8, 1)),
    ]
    assert op.extents(problem) == [2, 3, 5, 7, 7, 7, 8, 21, 0, 24]
    assert op.extent_names == ("batch", "m", "n", "k", "lda", "ldb", "ldc", "stride_a", "stride_b", "stride_c")
    assert op.scalars(problem) == [3.0, -1.0, 2.0, 0.5]
    (out,) = (operand for operand in op.operands(problem) if operand.role == "out")
    assert out.elements == 24 + 16 + 5
    assert not out.contiguous
    assert all(operand.contiguous and operand.shape == (64, 64) for operand in op.operands(matmul()))


@given(
    st.integers(1, 80), st.integers(1, 80), st.integers(1, 80), st.integers(1, 3),
    st.sampled_from(["nn", "nt", "tn", "tt"]), st.sampled_from(["float32", "tf32", "float16", "bfloat16", "int8"]),
    st.integers(0, 2),
)  # fmt: skip
def test_vectors_are_only_used_where_every_row_starts_on_one(
    m: int, n: int, k: int, batch: int, layout: str, given: str, apart: int
) -> None:
    fields = {"dtype": "float32", "allow_tf32": True} if given == "tf32" else {"dtype": given}
    packed = matmul(m=m, n=n, k=k, batch=batch, layout=layout, **fields)
    problem = matmul(**{**packed.canonical(), "lda": packed.lda + apart, "stride_a": packed.stride_a + apart * 80})
    signature = operator("matmul").signature(problem)
    operands = {operand.name: operand for operand in operator("matmul").operands(problem)}
    for operand, name in ((operands["a"], "align_a"), (operands["b"], "align_b"), (operands["out"], "align_c")):
        size = dtype(operand.dtype).bytes
        distances = [operand.shape[-1], *operand.strides[:-1]]
        whole = [width for width in (4, 8, 16) if all(distance * size % width == 0 for distance in distances)]
        if given == "float32":  # on the CUDA cores, in quads
            assert signature[name] == (4 if whole == [4, 8, 16] else 1)
        else:
            assert signature[name] == (whole[-1] // size if whole else 1)


def test_the_schema_does_not_show_derived_defaults() -> None:
    schema = operator("matmul").schema()
    assert "default" not in schema["properties"]["lda"]
    assert schema["properties"]["m"]["maximum"] == LARGEST_EXTENT
    assert schema["additionalProperties"] is False
    assert schema["properties"]["dtype"]["enum"] == ["float32", "float16", "bfloat16", "int8", "int32", "int64"]
    nothing = {"type": "null"}  # as good as leaving it out
    sums = {"enum": ["float32", "int32", "int64"], "type": "string"}
    assert schema["properties"]["acc_dtype"]["anyOf"] == [sums, nothing]
    out = {"enum": ["float32", "float16", "bfloat16", "int32", "int64"], "type": "string"}
    assert schema["properties"]["out_dtype"]["anyOf"] == [out, nothing]
    assert "default" not in schema["properties"]["out_dtype"]
    assert schema["properties"]["allow_tf32"]["type"] == "boolean"


def test_an_unknown_operator_lists_the_known_ones() -> None:
    with pytest.raises(UnknownOperator, match=r"allowed: .*matmul") as refused:
        operator("x" * 10_000)
    assert refused.value.field == "operator"
    assert refused.value.allowed == sorted(operators())
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "needs a file __init__.py"),
        ({"__init__.py": "OPERATOR = 1"}, "needs a file kernel.cuh"),
        ({"__init__.py": "OPERATOR = 1", "kernel.cuh": ""}, "must define OPERATOR"),
        ({"__init__.py": "from codegen.operators.matmul import Matmul\n"
          "class Other(Matmul):\n    folder = __import__('pathlib').Path(__file__).parent\n"
          "    files = ('kernel.cuh',)\nOPERATOR = Other()", "kernel.cuh": ""}, "called 'matmul' exists already"),
        ({"__init__.py": "from codegen.operators.matmul import Matmul\n"
          "class Other(Matmul):\n    name = 'other'\n    folder = __import__('pathlib').Path(__file__).parent\n"
          "    files = ('parts.cuh', 'kernel.cuh')\nOPERATOR = Other()", "kernel.cuh": ""}, "needs a file parts.cuh"),
    ],
)  # fmt: skip
def test_an_operator_folder_that_is_none_is_refused(tmp_path: Path, files: dict[str, str], said: str) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    before = operators()
    with pytest.raises(InvalidOperator, match=said):
        load_operators([folder])
    assert operators() == before


def test_an_operator_folder_from_outside_is_an_operator_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("codegen.operators._LOADED", {})
    folder = tmp_path / "times"
    folder.mkdir()
    (folder / "kernel.cuh").write_text("// the kernel of times")
    (folder / "__init__.py").write_text(
        "from pathlib import Path\n"
        "from codegen.operators.matmul import Matmul\n"
        "class Times(Matmul):\n    name = 'times'\n    shared, files = (), ('kernel.cuh',)\n"
        "    folder = Path(__file__).parent\n"
        "OPERATOR = Times()\n"
    )
    (loaded,) = load_operators([folder])
    assert operator("times") is loaded
    assert "times" in operators()
    assert loaded.kernel_texts == {"kernel.cuh": "// the kernel of times"}
    assert load_operators([folder]) == [loaded]
