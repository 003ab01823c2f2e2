"""Inputs of the tests: those of the product that the gradient is, with tensors of other shapes.

Elements of the image that no window meets are NaN: a kernel that multiplies one with the zero of a pixel behind the
last would be right on every number, and wrong on an image with an infinity there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from codegen.operator import Array, InputKind, Operand
from codegen.operators.conv2d.inputs import elements_seen
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem
from codegen.operators.conv2d_wgrad.product import product
from codegen.operators.matmul.inputs import draw_inputs, kept_products

_NAMES = {"dy": "a", "x": "b"}


def make_inputs(
    problem: Conv2dWgradProblem, operands: Sequence[Operand], kind: InputKind, rng: np.random.Generator
) -> dict[str, Array]:
    """Arrays of the operands' dtypes and logical shapes; see `codegen/operators/matmul/inputs.py` for their values."""
    renamed = [replace(one, name=_NAMES.get(one.name, one.name)) for one in operands]
    made, terms = draw_inputs(product(problem), renamed, kind, rng)
    if kind == "integer" and problem.pixels > terms:
        kept = kept_products(problem.pixels, terms, made["a"].dtype, rng)
        by_pixel = kept.reshape(problem.n, problem.p, problem.q)
        made["a"] = made["a"] * (by_pixel[..., None] if problem.channels_last else by_pixel[:, None])
    seen = elements_seen(problem)
    if not seen.all():
        made["b"] = np.where(seen, made["b"], np.array(np.nan, dtype=made["b"].dtype))
    return {one.name: made[as_drawn.name] for one, as_drawn in zip(operands, renamed, strict=True) if one.role == "in"}
