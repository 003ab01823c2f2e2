"""The reference of conv2d_dgrad beside other ways of computing it: loops over all products, and PyTorch where it is."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from codegen.operators import operator
from codegen.operators.conv2d_dgrad.inputs import elements_used
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from codegen.operators.conv2d_dgrad.reference import longest_sum
from codegen.test_plan import judge
from tests.conv2d_dgrad_kernels import dgrad
from tests.strict_arrays import on_device, on_host, strict_namespace

OP = operator("conv2d_dgrad")
PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {"n": 1, "h": 5, "w": 6, "c": 3, "k": 4},
    "padding of one side": {"n": 2, "h": 5, "w": 4, "c": 2, "k": 3, "padding": [[0, 1], [2, 0]], "stride": 2},
    "padding": {"n": 2, "h": 4, "w": 3, "c": 2, "k": 3, "padding": [2, 1]},
    "a stride that leaves elements": {"n": 2, "h": 8, "w": 9, "c": 2, "k": 3, "stride": [3, 2]},
    "dilation, groups": {"n": 2, "h": 9, "w": 8, "c": 4, "k": 6, "groups": 2, "dilation": [2, 3], "padding": [1, 2]},
    "groups, dilation, stride": {"n": 1, "h": 9, "w": 8, "c": 4, "k": 6, "groups": 2, "dilation": 2, "stride": [2, 3]},
    "depthwise": {"n": 2, "h": 6, "w": 5, "c": 4, "k": 4, "groups": 4, "padding": 1, "stride": 2},
    "depthwise, multiplied": {"n": 1, "h": 6, "w": 5, "c": 3, "k": 6, "groups": 3, "stride": 2},
    "windows of padding alone": {"n": 1, "h": 2, "w": 2, "c": 2, "k": 2, "r": 2, "s": 2, "padding": 4, "stride": 2},
    "1 x 1": {"n": 2, "h": 3, "w": 4, "c": 5, "k": 3, "r": 1, "s": 1},
    "1 x 1 with a stride": {"n": 2, "h": 3, "w": 4, "c": 5, "k": 3, "r": 1, "s": 1, "stride": 2},
}  # fmt: skip


def by_loops(p: Conv2dDgradProblem, dy: Any, w: Any) -> np.ndarray[Any, Any]:
    """Every product of the convolution gives one of the gradient, to the element of x that it had."""
    last = p.layout == "nhwc"
    dx = np.zeros((p.n, p.c, p.h, p.w))
    for n, k, row, column in np.ndindex(p.n, p.k, p.p, p.q):
        group = k // (p.k // p.groups)
        for c in range(p.c // p.groups):
            for r in range(p.r):
                for s in range(p.s):
                    h = row * p.stride[0] - p.corner[0] + r * p.dilation[0]
                    v = column * p.stride[1] - p.corner[1] + s * p.dilation[1]
                    if 0 <= h < p.h and 0 <= v < p.w:
                        value = dy[n, row, column, k] if last else dy[n, k, row, column]
                        weight = w[k, r, s, c] if last else w[k, c, r, s]
                        dx[n, group * (p.c // p.groups) + c, h, v] += float(value) * float(weight)
    return dx.transpose(0, 2, 3, 1) if last else dx


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_reference_is_the_definition(name: str, layout: str) -> None:
    problem = dgrad(layout=layout, **PROBLEMS[name])
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(1))
    found, bound = OP.reference(problem, inputs, exact=True)
    np.testing.assert_array_equal(found, by_loops(problem, inputs["dy"], inputs["w"]))
    assert (bound == 0.0).all(), "sums of integers are exact"


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_what_no_pixel_depends_on_is_nan(layout: str) -> None:
    problem = dgrad(layout=layout, **PROBLEMS["windows of padding alone"])
    dy = OP.make_inputs(problem, "normal", np.random.default_rng(1))["dy"]
    rows = [any(0 <= 2 * p - 4 + r < 2 for r in (0, 1)) for p in range(problem.p)]
    used = np.logical_and.outer(rows, rows)
    assert 0 < used.sum() < used.size
    np.testing.assert_array_equal(np.isnan(dy[0, :, :, 0] if layout == "nhwc" else dy[0, 0]), ~used)
    assert elements_used(dgrad(layout=layout)).all()


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_another_gradient_is_added_and_masked(layout: str) -> None:
    chain = [{"op": "scale", "value": 0.5}, {"op": "residual"}, {"op": "mask"}]
    problem = dgrad(layout=layout, n=1, h=4, w=5, c=2, k=3, stride=2, padding=1, epilogue=chain)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(2))
    found, _ = OP.reference(problem, inputs, exact=True)
    sums = by_loops(problem, inputs["dy"], inputs["w"])
    np.testing.assert_array_equal(found, np.where(inputs["mask"] != 0, 0.5 * sums + inputs["residual"], 0.0))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sums_in_fp32_are_within_the_bound_and_a_lost_product_is_not(dtype: str, stride: int) -> None:
    problem = dgrad(c=6, k=12, padding=1, stride=stride, dtype=dtype, out_dtype="float32")
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(3))
    expected, bound = OP.reference(problem, inputs)
    dy, w = (inputs[name].astype(np.float32) for name in ("dy", "w"))
    sums, lost = (np.zeros((2, 14, 12, 6), np.float32) for _ in range(2))
    for r in range(3):
        for s in range(3):
            for k in range(12):
                at = np.s_[
                    :, r : r + stride * (problem.p - 1) + 1 : stride, s : s + stride * (problem.q - 1) + 1 : stride
                ]
                one = dy[:, :, :, k, None] * w[k, r, s]
                sums[at] += one
                lost[at] += one if (r, s, k) != (2, 1, 11) else 0
    assert judge(sums[:, 1:-1, 1:-1], expected, bound, exact=False).ok
    assert not judge(lost[:, 1:-1, 1:-1], expected, bound, exact=False).ok


@pytest.mark.parametrize(
    ("fields", "longest"),
    [({}, 9 * 24), ({"stride": 2}, 4 * 24), ({"stride": [3, 2]}, 2 * 24), ({"stride": 2, "dilation": 2}, 9 * 24),
     ({"r": 5, "stride": [2, 1], "groups": 2}, 3 * 3 * 12)],
)  # fmt: skip
def test_the_bound_is_that_of_the_longest_sum(fields: dict[str, Any], longest: int) -> None:
    assert longest_sum(dgrad(**fields)) == longest


def test_a_sum_with_more_products_than_are_exact_has_fewer_of_them() -> None:
    problem = dgrad(n=1, h=2, w=2, c=1, k=2**20, r=2, s=1, padding=1)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(4))
    assert 0 < np.count_nonzero(inputs["w"]) < 2**21
    assert (OP.reference(problem, inputs, exact=True)[1] == 0.0).all()


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("tf32", [False, True])
def test_the_reference_on_a_device_has_the_values_of_numpy(layout: str, tf32: bool) -> None:
    chain = [{"op": "residual"}, {"op": "mask"}]
    problem = dgrad(layout=layout, groups=2, stride=2, padding=1, allow_tf32=tf32, epilogue=chain)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(6))
    here = OP.reference(problem, inputs)
    with strict_namespace():
        there: Any = OP.reference(problem, {name: on_device(values) for name, values in inputs.items()})
        found = [on_host(one) for one in there]
    for one, other in zip(here, found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_pytorchs_autograd_computes_the_same(name: str, layout: str) -> None:
    import torch

    p = dgrad(layout=layout, **PROBLEMS[name])
    inputs = OP.make_inputs(p, "normal", np.random.default_rng(5))
    dy, w = (torch.from_numpy(np.nan_to_num(inputs[one].astype(np.float64))) for one in ("dy", "w"))
    if layout == "nhwc":
        dy, w = dy.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2)
    x = torch.zeros((p.n, p.c, p.h, p.w), dtype=torch.float64, requires_grad=True)
    padded = torch.nn.functional.pad(x, (*p.padding[1], *p.padding[0]))
    torch.nn.functional.conv2d(padded, w, stride=p.stride, dilation=p.dilation, groups=p.groups).backward(dy)
    found = x.grad.numpy()
    expected, _ = OP.reference(p, inputs)
    np.testing.assert_allclose(
        found.transpose(0, 2, 3, 1) if layout == "nhwc" else found, expected, rtol=1e-9, atol=1e-9
    )
