"""Convolutions: what is refused, where the fault is said to be, and what is filled in."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from codegen.operators import operator
from codegen.problem import LARGEST_ELEMENTS, LARGEST_EXTENT
from service.faults import faults_of
from tests.conv2d_kernels import conv2d

OP = operator("conv2d")


def faults(**fields: Any) -> dict[str, str]:
    """Where the problem is refused, and the sentence."""
    with pytest.raises(ValidationError) as refused:
        conv2d(**fields)
    return {".".join(map(str, error["loc"])): error["msg"] for error in refused.value.errors()}


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"h": 0}, "h", "greater than or equal to 1"),
        ({"k": 1.5}, "k", "valid integer"),
        ({"c": "16"}, "c", "valid integer"),
        ({"n": LARGEST_EXTENT + 1}, "n", str(LARGEST_EXTENT)),
        ({"groups": 0}, "groups", "greater than or equal to 1"),
        ({"groups": 5}, "groups", "is 5, which does not divide the 16 channels (c)"),
        ({"groups": 16}, "groups", "is 16, which does not divide the 24 filters (k)"),
        ({"stride": [0, 1]}, "stride.0", "greater than or equal to 1"),
        ({"stride": [1]}, "stride.1", "Field required"),
        ({"dilation": [0, 2]}, "dilation.0", "greater than or equal to 1"),
        ({"padding": [1, -1]}, "padding.1", "greater than or equal to 0"),
        ({"padding": "same"}, "padding", "a number, or an array of two"),
        ({"padding": -1}, "padding", "greater than or equal to 0"),
        ({"padding": [[0, -1], 1]}, "padding.0.1", "greater than or equal to 0"),
        ({"padding": [[0, 1, 0], 1]}, "padding.0", "at most 2 items"),
        ({"h": 1, "padding": [[1, 0], 1]}, "padding", "is 1 and 0: h = 1 is 2 with it, less than the 3"),
        ({"h": 2}, "padding", "h = 2 is 2 with it, less than the 3 that 3 elements of the filter span with dilation 1"),
        ({"w": 4, "dilation": [1, 3], "padding": [0, 1]}, "padding", "w = 4 is 6 with it, less than the 7"),
        ({"padding": [0, 2**30]}, "padding", f"is 1073741824: w is 2147483658 with it; at most {LARGEST_EXTENT}"),
        ({"n": 2**20, "h": 50, "w": 50}, "padding", f"output pixels (n p q); at most {LARGEST_EXTENT} can be indexed"),
        ({"c": 2**29, "k": 1}, "padding", "4831838208 products in a sum (r s c / groups)"),
        ({"n": 2**20, "c": 2**12, "k": 2**12, "groups": 2**12, "h": 3, "w": 3}, "padding", "groups of all images"),
        ({"n": 2**21, "c": 2**20}, "padding", f"x would span 263882790666240 elements; at most {LARGEST_ELEMENTS}"),
        ({"layout": "hwcn"}, "layout", "'nhwc' or 'nchw'"),
        ({"dtype": "int8"}, "dtype", "'float32', 'float16' or 'bfloat16'"),
        ({"acc_dtype": "float16"}, "acc_dtype", "'float32'"),
        ({"out_dtype": "int32"}, "out_dtype", "'float32', 'float16' or 'bfloat16'"),
        ({"epilogue": [{"op": "bias", "axis": "n"}]}, "epilogue.0.bias.axis", "'k'"),
        ({"epilogue": [{"op": "pool"}]}, "epilogue.0", "does not match any of the expected tags"),
        ({"depth": 3}, "depth", "not permitted"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused_by_name(fields: dict[str, Any], field: str, said: str) -> None:
    found = faults(**fields)
    assert list(found) == [field]
    assert said in found[field]


def test_a_refusal_over_http_has_the_field_and_the_numbers() -> None:
    fields = {"n": 1, "h": 2, "w": 2, "c": 4, "k": 4, "r": 3, "s": 3, "epilogue": [{"op": "bias", "axis": "n"}]}
    with pytest.raises(ValidationError) as refused:
        OP.parse(fields)
    faults = {fault.field: fault for fault in faults_of(refused.value, OP.problem_type, fields)}
    assert set(faults) == {"padding", "epilogue[0].axis"}
    assert "h = 2 is 2 with it" in faults["padding"].detail


@pytest.mark.parametrize(
    ("fields", "out"),
    [
        ({}, (10, 8)),
        ({"padding": 1}, (12, 10)),
        ({"padding": [2, 0], "stride": [2, 3]}, (7, 3)),
        ({"padding": [[0, 1], [2, 0]]}, (11, 10)),
        ({"padding": [[0, 1], [0, 1]], "stride": 2}, (6, 5)),
        ({"dilation": [2, 4]}, (8, 2)),
        ({"h": 7, "w": 8, "stride": 3}, (2, 2)),  # an element of w is left over, none of h
        ({"r": 12, "s": 10}, (1, 1)),
        ({"r": 1, "s": 1, "padding": 3}, (18, 16)),
    ],
)
def test_the_output_has_as_many_pixels_as_windows_fit(fields: dict[str, Any], out: tuple[int, int]) -> None:
    problem = conv2d(**fields)
    assert (problem.p, problem.q) == out
    assert OP.operands(problem)[2].shape == (2, *out, 24)


def test_every_default_is_explicit_and_one_number_stands_for_both_axes() -> None:
    found = conv2d(padding=1).canonical()
    assert found == {
        "operator": "conv2d", "n": 2, "h": 12, "w": 10, "c": 16, "k": 24, "r": 3, "s": 3, "groups": 1,
        "layout": "nhwc", "stride": [1, 1], "dilation": [1, 1], "padding": [[1, 1], [1, 1]], "dtype": "float32",
        "acc_dtype": "float32", "out_dtype": "float32", "allow_tf32": False, "epilogue": [],
    }  # fmt: skip
    assert conv2d(padding=[1.0, 1], stride=1.0).digest == conv2d(padding=1, groups=1).digest
    assert conv2d(padding=[1, [1, 1]]).digest == conv2d(padding=[[1, 1], [1, 1]]).digest
    assert len({conv2d(padding=[[0, 1], one]).digest for one in (0, [0, 1], [1, 0], 1)}) == 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"r": 1, "dilation": [5, 1]}, {"r": 1}),
        ({"r": 1, "s": 1, "dilation": 7}, {"r": 1, "s": 1}),
        ({"dtype": "float16", "allow_tf32": True}, {"dtype": "float16"}),
        ({"epilogue": [{"op": "bias"}]}, {"epilogue": [{"op": "bias", "axis": "k"}]}),
    ],
)
def test_what_means_the_same_has_one_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert conv2d(**one).digest == conv2d(**other).digest


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_operands_are_packed_and_in_order(layout: str) -> None:
    problem = conv2d(layout=layout, groups=4, epilogue=[{"op": "residual"}, {"op": "bias"}, {"op": "mask"}])
    found = {one.name: one for one in OP.operands(problem)}
    assert list(found) == ["x", "w", "out", "residual", "bias", "mask"]
    shapes = {"nhwc": ((2, 12, 10, 16), (24, 3, 3, 4)), "nchw": ((2, 16, 12, 10), (24, 4, 3, 3))}
    assert (found["x"].shape, found["w"].shape) == shapes[layout]
    assert all(one.contiguous for one in found.values())
    assert found["bias"].shape == (24,) and found["residual"].shape == found["mask"].shape == found["out"].shape


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (4, 4, 4)),
        ({"dtype": "float16"}, (8, 8, 8)),
        ({"c": 3, "dtype": "float16"}, (1, 1, 8)),
        ({"c": 4, "k": 6, "dtype": "float16"}, (4, 4, 2)),
        ({"c": 4, "s": 2, "dtype": "float16"}, (4, 8, 8)),
        ({"groups": 8, "dtype": "float16"}, (2, 2, 1)),
        ({"c": 24, "groups": 24, "dtype": "float16"}, (8, 1, 8)),  # neighbouring channels, each with its own filter
        ({"layout": "nchw", "dtype": "float16"}, (1, 8, 8)),
        ({"layout": "nchw", "r": 1, "s": 1, "dtype": "float16"}, (8, 8, 8)),
        ({"layout": "nchw", "r": 1, "s": 1, "h": 5, "w": 5, "dtype": "float16"}, (1, 8, 1)),
    ],
)
def test_alignment_classes(fields: dict[str, Any], expected: tuple[int, int, int]) -> None:
    found = OP.signature(conv2d(**fields))
    assert (found["align_x"], found["align_w"], found["align_out"]) == expected


def test_extents_and_geometry_are_no_part_of_a_signature() -> None:
    one = conv2d(epilogue=[{"op": "bias"}, {"op": "clip", "lo": 0.0, "hi": 6.0}])
    other = conv2d(
        n=5,
        h=40,
        c=32,
        k=8,
        stride=2,
        padding=1,
        dilation=2,
        epilogue=[{"op": "bias"}, {"op": "clip", "lo": -1.0, "hi": 1.0}],
    )
    assert OP.signature(one) == OP.signature(other)
    assert OP.scalars(other) == [2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, -1.0, 1.0]
    assert OP.signature(one)["epilogue"] == ("bias.n", "clip")
    assert OP.signature(conv2d(layout="nchw", epilogue=[{"op": "bias"}]))["epilogue"] == ("bias.m",)


def test_the_schema_accepts_what_the_model_does() -> None:
    schema = OP.schema()
    for change in ({"stride": [2, 2]}, {"stride": 2}, {"padding": 1}, {"padding": [1, 2]}, {"padding": [[0, 1], 1]}):
        jsonschema.validate({"n": 1, "h": 8, "w": 8, "c": 3, "k": 4, "r": 3, "s": 3, **change}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"n": 0, "h": 8, "w": 8, "c": 3, "k": 4, "r": 3, "s": 3}, schema)
