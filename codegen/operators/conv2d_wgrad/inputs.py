"""Inputs of the tests: those of the product that the gradient is, with tensors of other shapes.

Elements of the image that no window meets are NaN: a kernel that multiplies one with the zero of a pixel behind the
last would be right on every number, and wrong on an image with an infinity there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from codegen.operator import Array, InputKind, Operand
from codegen.operators.conv2d.inputs import draw_operands, elements_seen, nan_outside
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem
from codegen.operators.conv2d_wgrad.product import product
from codegen.operators.matmul.inputs import kept_products


def make_inputs(
    problem: Conv2dWgradProblem, operands: Sequence[Operand], kind: InputKind, rng: np.random.Generator
) -> dict[str, Array]:
    """Arrays of the operands' dtypes and logical shapes; see `codegen/operators/matmul/inputs.py` for their values."""
    made, terms = draw_operands(product(problem), {"dy": "a", "x": "b"}, operands, kind, rng)
    if kind == "integer" and problem.pixels > terms:
        factors = kept_products(problem.pixels, terms, made["dy"].dtype, rng)
        by_pixel = factors.reshape(problem.n, problem.p, problem.q)
        made["dy"] = made["dy"] * (by_pixel[..., None] if problem.channels_last else by_pixel[:, None])
    return {**made, "x": nan_outside(elements_seen(problem), made["x"])}
