"""The reference of conv2d beside other ways of computing it: a loop over every product, and PyTorch where it is."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from codegen.operators import operator
from codegen.operators.conv2d.problem import Conv2dProblem
from codegen.test_plan import judge
from tests.conv2d_kernels import conv2d
from tests.strict_arrays import on_device, on_host, strict_namespace

OP = operator("conv2d")
PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {"n": 1, "h": 5, "w": 6, "c": 3, "k": 4},
    "padding of one side": {"n": 2, "h": 5, "w": 4, "c": 2, "k": 3, "padding": [[0, 1], [2, 0]], "stride": 2},
    "padding": {"n": 2, "h": 4, "w": 3, "c": 2, "k": 3, "padding": [2, 1]},
    "a stride that leaves elements": {"n": 2, "h": 8, "w": 9, "c": 2, "k": 3, "stride": [3, 2]},
    "dilation, groups": {"n": 2, "h": 9, "w": 8, "c": 4, "k": 6, "groups": 2, "dilation": [2, 3], "padding": [1, 2]},
    "depthwise": {"n": 2, "h": 6, "w": 5, "c": 4, "k": 4, "groups": 4, "padding": 1},
    "depthwise, multiplied": {"n": 1, "h": 6, "w": 5, "c": 3, "k": 6, "groups": 3, "stride": 2},
    "windows of padding alone": {"n": 1, "h": 2, "w": 2, "c": 2, "k": 2, "r": 2, "s": 2, "padding": 4, "stride": 2},
    "1 x 1": {"n": 2, "h": 3, "w": 4, "c": 5, "k": 3, "r": 1, "s": 1},
}  # fmt: skip


def by_loops(p: Conv2dProblem, x: Any, w: Any) -> np.ndarray[Any, Any]:
    """One product after the other, by the definition."""
    last = p.layout == "nhwc"
    out = np.zeros((p.n, p.k, p.p, p.q))
    for (n, k, row, column), _ in np.ndenumerate(out):
        group = k // (p.k // p.groups)
        for c in range(p.c // p.groups):
            for r in range(p.r):
                for s in range(p.s):
                    h = row * p.stride[0] - p.corner[0] + r * p.dilation[0]
                    v = column * p.stride[1] - p.corner[1] + s * p.dilation[1]
                    if 0 <= h < p.h and 0 <= v < p.w:
                        channel = group * (p.c // p.groups) + c
                        value = x[n, h, v, channel] if last else x[n, channel, h, v]
                        out[n, k, row, column] += float(value) * float(w[k, r, s, c] if last else w[k, c, r, s])
    return out.transpose(0, 2, 3, 1) if last else out


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_reference_is_the_definition(name: str, layout: str) -> None:
    problem = conv2d(layout=layout, **PROBLEMS[name])
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(1))
    found, bound = OP.reference(problem, inputs, exact=True)
    np.testing.assert_array_equal(found, by_loops(problem, inputs["x"], inputs["w"]))
    assert (bound == 0.0).all(), "sums of integers are exact"


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_the_epilogue_has_a_number_for_each_filter(layout: str) -> None:
    problem = conv2d(
        layout=layout, n=1, h=4, w=5, c=2, k=3, epilogue=[{"op": "bias"}, {"op": "relu"}, {"op": "residual"}]
    )
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(2))
    found, _ = OP.reference(problem, inputs, exact=True)
    sums = by_loops(problem, inputs["x"], inputs["w"])
    bias = inputs["bias"] if layout == "nhwc" else inputs["bias"][:, None, None]
    np.testing.assert_array_equal(found, np.maximum(sums + bias, 0.0) + inputs["residual"])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sums_in_fp32_are_within_the_bound_and_a_lost_product_is_not(dtype: str) -> None:
    problem = conv2d(c=12, k=6, padding=1, dtype=dtype, out_dtype="float32")
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(3))
    expected, bound = OP.reference(problem, inputs)
    x, w = (inputs[name].astype(np.float32) for name in ("x", "w"))
    padded = np.zeros((problem.n, problem.h + 2, problem.w + 2, problem.c), np.float32)
    padded[:, 1:-1, 1:-1] = x
    sums, lost = np.zeros(expected.shape, np.float32), np.zeros(expected.shape, np.float32)
    for r in range(3):
        for s in range(3):
            for c in range(problem.c):
                one = padded[:, r : r + problem.p, s : s + problem.q, c, None] * w[:, r, s, c]
                sums += one
                lost += one if (r, s, c) != (2, 1, 11) else 0
    assert judge(sums, expected, bound, exact=False).ok
    assert not judge(lost, expected, bound, exact=False).ok


def test_a_sum_with_more_products_than_are_exact_has_fewer_of_them() -> None:
    problem = conv2d(n=1, h=1, w=1, c=2**21, k=1, r=1, s=1)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(4))
    assert 0 < np.count_nonzero(inputs["w"]) < 2**21
    assert (OP.reference(problem, inputs, exact=True)[1] == 0.0).all()


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("tf32", [False, True])
def test_the_reference_on_a_device_has_the_values_of_numpy(layout: str, tf32: bool) -> None:
    chain = [{"op": "bias"}, {"op": "gelu"}, {"op": "residual"}, {"op": "mask"}]
    problem = conv2d(layout=layout, groups=2, stride=2, padding=1, allow_tf32=tf32, epilogue=chain)
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
def test_pytorch_computes_the_same(name: str, layout: str) -> None:
    import torch

    p = conv2d(layout=layout, **PROBLEMS[name])
    inputs = OP.make_inputs(p, "normal", np.random.default_rng(5))
    x, w = (torch.from_numpy(inputs[one].astype(np.float64)) for one in ("x", "w"))
    if layout == "nhwc":
        x, w = x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2)
    x = torch.nn.functional.pad(x, (*p.padding[1], *p.padding[0]))
    found = torch.nn.functional.conv2d(x, w, stride=p.stride, dilation=p.dilation, groups=p.groups).numpy()
    expected, _ = OP.reference(p, inputs)
    np.testing.assert_allclose(
        found.transpose(0, 2, 3, 1) if layout == "nhwc" else found, expected, rtol=1e-9, atol=1e-9
    )
