"""Inputs of a gradient's tests: those of the product that it is, with tensors of other shapes.

Elements of dy whose windows lie in the padding altogether are NaN: a kernel that multiplies one with a zero would be
right on every number, and wrong on an infinity there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from codegen.operator import Array, InputKind, Operand
from codegen.operators.conv2d.inputs import draw_operands, nan_outside
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from codegen.operators.conv2d_dgrad.product import product
from codegen.operators.matmul.inputs import kept_products


def elements_used(problem: Conv2dDgradProblem) -> Array:
    """Which rows and columns of dy have a window that meets the image, in a shape that dy's own broadcasts to."""
    p = problem
    axes: list[Array] = []
    for axis, (extent, outputs, taps) in enumerate(((p.h, p.p, p.r), (p.w, p.q, p.s))):
        corners = np.arange(outputs) * p.stride[axis] - p.corner[axis]
        met = corners[:, None] + np.arange(taps) * p.dilation[axis]
        axes.append(np.any((met >= 0) & (met < extent), axis=1))
    both: Array = axes[0][:, None] & axes[1]
    return both[:, :, None] if p.channels_last else both


def make_inputs(
    problem: Conv2dDgradProblem, operands: Sequence[Operand], kind: InputKind, rng: np.random.Generator
) -> dict[str, Array]:
    """Arrays of the operands' dtypes and logical shapes; see `codegen/operators/matmul/inputs.py` for their values."""
    p = problem
    made, terms = draw_operands(product(p), {"dy": "a", "w": "b"}, operands, kind, rng)
    if kind == "integer" and product(p).k > terms:
        factors = kept_products(p.group_filters * p.r * p.s, terms, made["w"].dtype, rng)
        filters = np.tile(factors.reshape(p.group_filters, p.r, p.s), (p.groups, 1, 1))
        made["w"] = made["w"] * np.expand_dims(filters, 3 if p.channels_last else 1)
    return {**made, "dy": nan_outside(elements_used(p), made["dy"])}
