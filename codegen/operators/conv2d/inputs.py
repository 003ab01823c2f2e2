"""Inputs of a convolution's tests: those of the product that it is, with tensors of other shapes.

Elements of the image that no window meets are NaN: a kernel that multiplies one with the zero of a tap beyond the last
would be right on every number, and wrong on an image with an infinity there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from codegen.operator import Array, InputKind, Operand
from codegen.operators.conv2d.problem import Conv2dProblem, Convolution
from codegen.operators.conv2d.product import product
from codegen.operators.matmul.inputs import draw_inputs, kept_products

_NAMES = {"x": "a", "w": "b"}


def elements_seen(problem: Convolution) -> Array:
    """Which rows and columns of the image some window meets, in a shape that x's own broadcasts to."""
    p = problem
    axes = []
    for axis, (extent, outputs, taps) in enumerate(((p.h, p.p, p.r), (p.w, p.q, p.s))):
        corners = np.arange(outputs) * p.stride[axis] - p.corner[axis]
        met = (corners[:, None] + np.arange(taps) * p.dilation[axis]).ravel()
        seen = np.zeros(extent, dtype=bool)
        seen[met[(met >= 0) & (met < extent)]] = True
        axes.append(seen)
    both = axes[0][:, None] & axes[1]
    return both[:, :, None] if p.channels_last else both


def make_inputs(
    problem: Conv2dProblem, operands: Sequence[Operand], kind: InputKind, rng: np.random.Generator
) -> dict[str, Array]:
    """Arrays of the operands' dtypes and logical shapes; see `codegen/operators/matmul/inputs.py` for their values."""
    renamed = [replace(one, name=_NAMES.get(one.name, one.name)) for one in operands]
    made, terms = draw_inputs(product(problem), renamed, kind, rng)
    if kind == "integer" and problem.taps > terms:
        kept = kept_products(problem.taps, terms, made["b"].dtype, rng)
        made["b"] = made["b"] * kept.reshape(made["b"].shape[1:])
    seen = elements_seen(problem)
    if not seen.all():
        made["a"] = np.where(seen, made["a"], np.array(np.nan, dtype=made["a"].dtype))
    return {one.name: made[as_drawn.name] for one, as_drawn in zip(operands, renamed, strict=True) if one.role == "in"}
