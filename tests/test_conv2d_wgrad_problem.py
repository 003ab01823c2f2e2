"""Gradients of filters: what is refused, where the fault is said to be, and what is filled in."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from codegen.operators import operator
from codegen.problem import LARGEST_ELEMENTS, LARGEST_EXTENT
from tests.conv2d_kernels import conv2d
from tests.conv2d_wgrad_kernels import wgrad

OP = operator("conv2d_wgrad")


def faults(**fields: Any) -> dict[str, str]:
    """Where the problem is refused, and the sentence."""
    with pytest.raises(ValidationError) as refused:
        wgrad(**fields)
    return {".".join(map(str, error["loc"])): error["msg"] for error in refused.value.errors()}


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"h": 0}, "h", "greater than or equal to 1"),
        ({"c": "16"}, "c", "valid integer"),
        ({"groups": 5}, "groups", "is 5, which does not divide the 16 channels (c)"),
        ({"groups": 16}, "groups", "is 16, which does not divide the 24 filters (k)"),
        ({"stride": [0, 1]}, "stride.0", "greater than or equal to 1"),
        ({"padding": [1, -1]}, "padding.1", "greater than or equal to 0"),
        ({"h": 2}, "padding", "h = 2 is 2 with it, less than the 3 that 3 elements of the filter span with dilation 1"),
        ({"w": 4, "dilation": [1, 3], "padding": [0, 1]}, "padding", "w = 4 is 6 with it, less than the 7"),
        ({"n": 2**20, "h": 50, "w": 50}, "padding", f"output pixels (n p q); at most {LARGEST_EXTENT} can be indexed"),
        ({"n": 2**21, "c": 2**20}, "padding", f"x would span 263882790666240 elements; at most {LARGEST_ELEMENTS}"),
        ({"layout": "hwcn"}, "layout", "'nhwc' or 'nchw'"),
        ({"dtype": "int8"}, "dtype", "'float32', 'float16' or 'bfloat16'"),
        ({"out_dtype": "int32"}, "out_dtype", "'float32', 'float16' or 'bfloat16'"),
        ({"epilogue": [{"op": "bias", "axis": "m"}]}, "epilogue.0.bias.axis", "'k'"),
        ({"p": 3}, "p", "not permitted"),
        (
            {"epilogue": [{"op": "masked_activation", "where_set": {"op": "relu"}}]},
            "epilogue",
            "masked_activation is for outputs of a layer",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused_by_name(fields: dict[str, Any], field: str, said: str) -> None:
    found = faults(**fields)
    assert list(found) == [field]
    assert said in found[field]


def test_the_fields_are_those_of_the_convolution_and_the_keys_are_not() -> None:
    fields = {"stride": 2, "padding": [1, 0], "groups": 4, "dtype": "float16", "out_dtype": "float32"}
    one, other = wgrad(**fields), conv2d(**fields)
    assert {**one.canonical(), "operator": "conv2d"} == other.canonical()
    assert one.digest != other.digest
    assert (one.sum_length, other.sum_length) == (2 * 6 * 4, 3 * 3 * 4), "sums run over pixels"
    with pytest.raises(TypeError, match="got a problem of operator 'conv2d'"):
        OP.signature(other)
    with pytest.raises(TypeError, match="got a problem of operator 'conv2d_wgrad'"):
        operator("conv2d").signature(one)


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_operands_are_packed_and_in_order(layout: str) -> None:
    problem = wgrad(layout=layout, groups=4, epilogue=[{"op": "residual"}, {"op": "bias"}], out_dtype="float16")
    found = {one.name: one for one in OP.operands(problem)}
    assert list(found) == ["dy", "x", "dw", "residual", "bias"]
    shapes = {
        "nhwc": ((2, 10, 8, 24), (2, 12, 10, 16), (24, 3, 3, 4)),
        "nchw": ((2, 24, 10, 8), (2, 16, 12, 10), (24, 4, 3, 3)),
    }
    assert tuple(found[name].shape for name in ("dy", "x", "dw")) == shapes[layout]
    assert all(one.contiguous for one in found.values())
    assert found["bias"].shape == (24,) and found["residual"].shape == found["dw"].shape
    assert {name: one.dtype for name, one in found.items()} == {
        "dy": "float32", "x": "float32", "dw": "float16", "residual": "float16", "bias": "float16"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (4, 4, 4)),
        ({"dtype": "float16"}, (8, 8, 8)),
        ({"dtype": "float16", "out_dtype": "float32"}, (8, 8, 4)),
        ({"c": 3, "dtype": "float16"}, (8, 1, 1)),
        ({"c": 4, "k": 6, "dtype": "float16"}, (2, 4, 4)),
        ({"groups": 8, "dtype": "float16"}, (1, 2, 2)),
        ({"c": 24, "groups": 24, "dtype": "float16"}, (8, 8, 1)),  # neighbouring channels, each with its own filter
        ({"c": 6, "groups": 6, "dtype": "float16"}, (4, 1, 1)),  # several filters for each channel
        ({"layout": "nchw", "dtype": "float16"}, (8, 1, 8)),
        ({"layout": "nchw", "h": 5, "w": 5, "dtype": "float16"}, (1, 1, 8)),
    ],
)
def test_alignment_classes(fields: dict[str, Any], expected: tuple[int, int, int]) -> None:
    found = OP.signature(wgrad(**fields))
    assert (found["align_dy"], found["align_x"], found["align_dw"]) == expected


def test_extents_and_geometry_are_no_part_of_a_signature() -> None:
    one, other = wgrad(), wgrad(n=5, h=40, c=32, k=8, stride=2, padding=1, dilation=2)
    assert OP.signature(one) == OP.signature(other)
    assert OP.scalars(other) == [2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(("layout", "stored"), [("nhwc", True), ("nchw", False)])
def test_a_1_x_1_filter_is_a_product_of_stored_matrices_with_channels_last(layout: str, stored: bool) -> None:
    assert wgrad(layout=layout, r=1, s=1).pointwise is stored
    assert not wgrad(layout=layout, r=1, s=1, stride=2).pointwise


def test_the_schema_accepts_what_the_model_does() -> None:
    schema = OP.schema()
    jsonschema.validate({"n": 1, "h": 8, "w": 8, "c": 3, "k": 4, "r": 3, "s": 3, "stride": [2, 2]}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"n": 0, "h": 8, "w": 8, "c": 3, "k": 4, "r": 3, "s": 3}, schema)
