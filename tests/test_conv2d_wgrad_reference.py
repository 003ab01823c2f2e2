"""The reference of conv2d_wgrad beside other ways of computing it: a loop over all products, and PyTorch's autograd."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from codegen.operators import operator
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem
from codegen.test_plan import judge
from tests.conv2d_wgrad_kernels import wgrad
from tests.strict_arrays import on_device, on_host, strict_namespace
from tests.test_conv2d_reference import PROBLEMS

OP = operator("conv2d_wgrad")


def by_loops(p: Conv2dWgradProblem, dy: Any, x: Any) -> np.ndarray[Any, Any]:
    """One product after the other, by the definition."""
    last = p.layout == "nhwc"
    dw = np.zeros((p.k, p.c // p.groups, p.r, p.s))
    for (k, c, r, s), _ in np.ndenumerate(dw):
        channel = k // (p.k // p.groups) * (p.c // p.groups) + c
        for n in range(p.n):
            for row in range(p.p):
                for column in range(p.q):
                    h = row * p.stride[0] - p.corner[0] + r * p.dilation[0]
                    w = column * p.stride[1] - p.corner[1] + s * p.dilation[1]
                    if 0 <= h < p.h and 0 <= w < p.w:
                        value = x[n, h, w, channel] if last else x[n, channel, h, w]
                        dw[k, c, r, s] += float(dy[n, row, column, k] if last else dy[n, k, row, column]) * float(value)
    return dw.transpose(0, 2, 3, 1) if last else dw


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_reference_is_the_definition(name: str, layout: str) -> None:
    problem = wgrad(layout=layout, **PROBLEMS[name])
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(1))
    found, bound = OP.reference(problem, inputs, exact=True)
    np.testing.assert_array_equal(found, by_loops(problem, inputs["dy"], inputs["x"]))
    assert (bound == 0.0).all(), "sums of integers are exact"


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_the_epilogue_has_a_number_for_each_filter(layout: str) -> None:
    chain = [{"op": "bias"}, {"op": "relu"}, {"op": "residual"}]
    problem = wgrad(layout=layout, n=1, h=4, w=5, c=2, k=3, epilogue=chain)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(2))
    found, _ = OP.reference(problem, inputs, exact=True)
    sums = by_loops(problem, inputs["dy"], inputs["x"])
    bias = inputs["bias"][:, None, None, None]
    np.testing.assert_array_equal(found, np.maximum(sums + bias, 0.0) + inputs["residual"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sums_in_fp32_are_within_the_bound_and_a_lost_pixel_is_not(dtype: str) -> None:
    problem = wgrad(c=12, k=6, padding=1, dtype=dtype, out_dtype="float32")
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(3))
    expected, bound = OP.reference(problem, inputs)
    dy, x = (inputs[name].astype(np.float32) for name in ("dy", "x"))
    padded = np.zeros((problem.n, problem.h + 2, problem.w + 2, problem.c), np.float32)
    padded[:, 1:-1, 1:-1] = x
    sums, lost = np.zeros(expected.shape, np.float32), np.zeros(expected.shape, np.float32)
    for n in range(problem.n):
        for p in range(problem.p):
            for q in range(problem.q):
                one = dy[n, p, q, :, None, None, None] * padded[n, p : p + 3, q : q + 3]
                sums += one
                lost += one if (n, p, q) != (1, 11, 9) else 0
    assert judge(sums, expected, bound, exact=False).ok
    assert not judge(lost, expected, bound, exact=False).ok


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_a_sum_with_more_products_than_are_exact_has_fewer_of_them(layout: str) -> None:
    problem = wgrad(layout=layout, n=2, h=1024, w=1024, c=1, k=2, r=1, s=1)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(4))
    assert 0 < np.count_nonzero(inputs["dy"]) < 2 * 2**21
    assert (OP.reference(problem, inputs, exact=True)[1] == 0.0).all()


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("tf32", [False, True])
def test_the_reference_on_a_device_has_the_values_of_numpy(layout: str, tf32: bool) -> None:
    chain = [{"op": "bias"}, {"op": "gelu"}, {"op": "residual"}, {"op": "mask"}]
    problem = wgrad(layout=layout, groups=2, stride=2, padding=1, allow_tf32=tf32, epilogue=chain)
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

    p = wgrad(layout=layout, **PROBLEMS[name])
    inputs = OP.make_inputs(p, "normal", np.random.default_rng(5))
    # Elements that no window meets are NaN, which autograd may multiply with zeros.
    dy, x = (torch.from_numpy(np.nan_to_num(inputs[one].astype(np.float64))) for one in ("dy", "x"))
    if layout == "nhwc":
        dy, x = dy.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2)
    w = torch.zeros((p.k, p.c // p.groups, p.r, p.s), dtype=torch.float64, requires_grad=True)
    x = torch.nn.functional.pad(x, (*p.padding[1], *p.padding[0]))
    out = torch.nn.functional.conv2d(x, w, stride=p.stride, dilation=p.dilation, groups=p.groups)
    out.backward(dy)
    assert w.grad is not None
    found = w.grad.permute(0, 2, 3, 1) if layout == "nhwc" else w.grad
    expected, _ = OP.reference(p, inputs)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-9)
