"""Inputs of a convolution's tests: those of the product that it is, with tensors of other shapes.

Elements of the image that no window meets, and of a gradient's output whose windows lie in the padding altogether, are
NaN: a kernel that multiplies one with a zero would be right on every number, and wrong on an infinity there.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from codegen.fixed_point import over_ring
from codegen.operator import Array, InputKind, Operand
from codegen.operators.convolution.problem import Convolution
from codegen.operators.matmul.inputs import draw_inputs, kept_products
from codegen.operators.matmul.problem import MatmulProblem


def elements_used(problem: Convolution) -> Array:
    """Which rows and columns of what is gathered have a part in the result, in a shape that its own broadcasts to."""
    p = problem
    axes: list[Array] = []
    for axis, (extent, outputs, taps) in enumerate(((p.h, p.p, p.r), (p.w, p.q, p.s))):
        corners = np.arange(outputs) * p.stride[axis] - p.corner[axis]
        met = corners[:, None] + np.arange(taps) * p.dilation[axis]
        inside = (met >= 0) & (met < extent)
        used: Array = np.isin(np.arange(extent), met[inside]) if p.gathered == "x" else np.any(inside, axis=1)
        axes.append(used)
    both: Array = axes[0][:, None] & axes[1]
    return both[:, :, None] if p.channels_last else both


def make_inputs(
    problem: Convolution,
    product: MatmulProblem,
    spread: Callable[[Array], Array],
    operands: Sequence[Operand],
    kind: InputKind,
    rng: np.random.Generator,
) -> dict[str, Array]:
    """Arrays of the operands' dtypes and logical shapes; see `codegen/operators/matmul/inputs.py` for their values.
    `spread`: a factor for each product of a sum, as factors of what is read but not gathered."""
    p = problem
    of_product = dict(zip(p.reads, "ab", strict=True))
    renamed = [replace(operand, name=of_product.get(operand.name, operand.name)) for operand in operands]
    # NaN in what is gathered: in dy beside an image it would also meet the zeros of the padding.
    drawn, terms = draw_inputs(product, renamed, kind, rng, "a" if p.reads[0] == p.gathered else "b")
    made = {o.name: drawn[of_product.get(o.name, o.name)] for o in operands if o.role == "in"}
    if product.k > terms:
        (thinned,) = set(p.reads) - {p.gathered}
        made[thinned] = made[thinned] * spread(kept_products(p.gathered_products, terms, made[thinned].dtype, rng))
    values, used = made[p.gathered], elements_used(p)
    if not used.all() and not over_ring(p):
        made[p.gathered] = np.where(used, values, np.array(np.nan, dtype=values.dtype))
    return made
