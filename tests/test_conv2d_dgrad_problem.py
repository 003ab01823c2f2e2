"""Gradients of a convolution's image: what is refused, where the fault is said to be, and what the phases are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from codegen.operators import operator
from codegen.operators.conv2d_dgrad.phases import count, largest, phases
from codegen.operators.conv2d_dgrad.problem import MOST_RESIDUES
from codegen.problem import LARGEST_EXTENT as MOST
from tests.conv2d_dgrad_kernels import dgrad

OP = operator("conv2d_dgrad")


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"h": 0}, "h", "greater than or equal to 1"),
        ({"groups": 5}, "groups", "is 5, which does not divide the 16 channels (c)"),
        ({"groups": 16}, "groups", "is 16, which does not divide the 24 filters (k)"),
        ({"stride": [0, 1]}, "stride.0", "greater than or equal to 1"),
        ({"h": 2}, "padding", "h = 2 is 2 with it, less than the 3 that 3 elements of the filter span with dilation 1"),
        ({"n": 2**20, "h": 50, "w": 50, "stride": 9}, "padding", f"2621440000 pixels of dx (n h w); at most {MOST}"),
        ({"h": 2**17, "stride": 2**17}, "padding", f"131072 residues of the stride along h; at most {MOST_RESIDUES}"),
        ({"h": 1, "r": 2**17, "padding": 2**17, "stride": 2**18}, "padding", "131072 residues of the stride along h"),
        ({"epilogue": [{"op": "bias"}]}, "epilogue.0", "does not match any of the expected tags"),
        ({"epilogue": [{"op": "relu"}]}, "epilogue.0", "does not match any of the expected tags"),
        ({"dtype": "int8"}, "dtype", "'float32', 'float16' or 'bfloat16'"),
        ({"depth": 3}, "depth", "not permitted"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused_by_name(fields: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        dgrad(**fields)
    found = {".".join(map(str, error["loc"])): error["msg"] for error in refused.value.errors()}
    assert list(found) == [field]
    assert said in found[field]


def test_every_default_is_explicit() -> None:
    assert dgrad(padding=1).canonical() == {
        "operator": "conv2d_dgrad", "n": 2, "h": 12, "w": 10, "c": 16, "k": 24, "r": 3, "s": 3, "groups": 1,
        "layout": "nhwc", "stride": [1, 1], "dilation": [1, 1], "padding": [[1, 1], [1, 1]], "dtype": "float32",
        "acc_dtype": "float32", "out_dtype": "float32", "allow_tf32": False, "epilogue": [],
    }  # fmt: skip


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_operands_are_packed_and_in_order(layout: str) -> None:
    problem = dgrad(layout=layout, groups=4, stride=[2, 1], epilogue=[{"op": "residual"}, {"op": "mask"}])
    found = {one.name: one for one in OP.operands(problem)}
    assert list(found) == ["dy", "w", "dx", "residual", "mask"]
    shapes = {
        "nhwc": ((2, 5, 8, 24), (24, 3, 3, 4), (2, 12, 10, 16)),
        "nchw": ((2, 24, 5, 8), (24, 4, 3, 3), (2, 16, 12, 10)),
    }
    assert tuple(found[name].shape for name in ("dy", "w", "dx")) == shapes[layout]
    assert all(one.contiguous for one in found.values())
    assert found["residual"].shape == found["mask"].shape == found["dx"].shape
    assert [one.role for one in found.values()] == ["in", "in", "out", "in", "in"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (4, 4, 4)),
        ({"dtype": "float16"}, (8, 8, 8)),
        ({"c": 3, "dtype": "float16"}, (8, 1, 1)),
        ({"c": 4, "k": 6, "dtype": "float16"}, (2, 4, 4)),
        ({"c": 4, "dtype": "float16", "out_dtype": "float32"}, (8, 4, 4)),
        ({"groups": 8, "dtype": "float16"}, (1, 2, 2)),
        ({"c": 24, "groups": 24, "dtype": "float16"}, (8, 1, 8)),  # neighbouring channels, each with its own filter
        ({"layout": "nchw", "dtype": "float16"}, (1, 1, 8)),
        ({"layout": "nchw", "dtype": "float16", "stride": [2, 1]}, (1, 1, 1)),
        ({"layout": "nchw", "r": 1, "s": 1, "dtype": "float16"}, (8, 8, 8)),
        ({"layout": "nchw", "r": 1, "s": 1, "h": 5, "w": 5, "c": 2, "dtype": "float16"}, (1, 2, 1)),
    ],
)
def test_alignment_classes(fields: dict[str, Any], expected: tuple[int, int, int]) -> None:
    found = OP.signature(dgrad(**fields))
    assert (found["align_x"], found["align_w"], found["align_out"]) == expected


def test_of_the_geometry_only_whether_it_is_strided_is_part_of_a_signature() -> None:
    one, other = dgrad(stride=2), dgrad(n=5, h=40, c=32, k=8, stride=[1, 3], padding=1, dilation=2)
    assert OP.signature(one) == OP.signature(other) != OP.signature(dgrad())
    assert OP.scalars(other) == [1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"stride": 2}, {"stride": [3, 2], "padding": [2, 1]}, {"stride": 2, "dilation": 2, "padding": 1},
        {"stride": [4, 6], "dilation": [2, 4]}, {"stride": 5, "r": 2, "s": 4}, {"h": 3, "w": 3, "stride": [7, 2]},
        {"h": 1, "w": 2, "r": 1, "s": 1, "padding": 1, "stride": 2}, {"r": 1, "s": 1, "stride": 2},
    ],
)  # fmt: skip
def test_phases_have_every_pixel_and_every_product_once(fields: dict[str, Any]) -> None:
    """Beside a count of who meets whom."""
    p = dgrad(**fields)
    axes = []
    for axis, (extent, outputs, taps) in enumerate(((p.h, p.p, p.r), (p.w, p.q, p.s))):
        fits = np.zeros(extent, dtype=int)
        for row in range(extent):
            quotients = [divmod(row + p.corner[axis] - tap * p.dilation[axis], p.stride[axis]) for tap in range(taps)]
            fits[row] = sum(rest == 0 for _, rest in quotients)
            assert sum(rest == 0 and 0 <= one < outputs for one, rest in quotients) <= fits[row]
        axes.append(fits)
    found = phases(p)
    assert sum(number for number, _ in found) == count(p)
    assert sum(number * one.rows * one.columns for number, one in found) == p.h * p.w
    products = sum(number * one.rows * one.columns * one.r * one.s for number, one in found)
    assert products == axes[0].sum() * axes[1].sum()
    most = largest(p)
    assert all(one.rows <= most.rows and one.columns <= most.columns for _, one in found)
    assert max(one.taps for _, one in found) <= most.taps


def test_the_phases_of_a_usual_stride() -> None:
    found = sorted((one.r, one.s, one.rows, one.columns, number) for number, one in phases(dgrad(stride=2, padding=1)))
    assert found == [(1, 1, 6, 5, 1), (1, 2, 6, 5, 1), (2, 1, 6, 5, 1), (2, 2, 6, 5, 1)]
    of_point = sorted((one.taps, number) for number, one in phases(dgrad(stride=2, r=1, s=1, k=1)))
    assert of_point == [(0, 1), (0, 1), (0, 1), (1, 1)] or of_point == [(0, 3), (1, 1)]
