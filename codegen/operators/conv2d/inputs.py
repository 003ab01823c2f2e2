"""Inputs of a convolution's tests: those of the product that it is, with tensors of other shapes.

Elements of the image that no window meets are NaN: a kernel that multiplies one with the zero of a tap beyond the last
would be right on every number, and wrong on an image with an infinity there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from codegen.operator import Array, InputKind, Operand
from codegen.operators.conv2d.problem import Conv2dProblem, Convolution
from codegen.operators.conv2d.product import product
from codegen.operators.matmul.inputs import draw_inputs, kept_products
from codegen.operators.matmul.problem import MatmulProblem


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
    made, terms = draw_operands(product(problem), {"x": "a", "w": "b"}, operands, kind, rng)
    if kind == "integer" and problem.taps > terms:
        factors = kept_products(problem.taps, terms, made["w"].dtype, rng)
        made["w"] = made["w"] * factors.reshape(made["w"].shape[1:])
    return {**made, "x": nan_outside(elements_seen(problem), made["x"])}


def draw_operands(
    product: MatmulProblem,
    names: Mapping[str, str],
    operands: Sequence[Operand],
    kind: InputKind,
    rng: np.random.Generator,
) -> tuple[dict[str, Array], int]:
    """As `draw_inputs`, for operands whose names in the product are `names`."""
    made, terms = draw_inputs(
        product, [replace(operand, name=names.get(operand.name, operand.name)) for operand in operands], kind, rng
    )
    return {
        operand.name: made[names.get(operand.name, operand.name)] for operand in operands if operand.role == "in"
    }, terms


def nan_outside(used: Array, values: Array) -> Array:
    """The values, NaN where they are not `used`."""
    return values if used.all() else np.where(used, values, np.array(np.nan, dtype=values.dtype))
