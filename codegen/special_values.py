"""NaN, infinities and signs of zeros through an epilogue, as IEEE 754 arithmetic has them, beside the finite numbers
that `codegen.epilogue_reference` bounds.

A node makes of a number that is none what its formula says: the gelu and silu of minus infinity are NaN, as 0 times an
infinity is. What was infinite may become finite (by relu, clip, tanh, sigmoid, a mask's zero), and is bounded from
there on. The sign of a zero is promised where no rounding and no order of a sum decides it; an output is 0 with a bound
of 0 there alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from codegen.arrays import Array, Float64, as_float64, erf, namespace_of
from codegen.epilogue import (
    Bias,
    Cast,
    Clip,
    LeakyRelu,
    MaskedActivation,
    Node,
    Polynomial,
    Residual,
    Scale,
    operand_names,
)
from codegen.epilogue_reference import TINY, Bounded, U, apply_chain, logistic, stored

# Negative numbers further from 0 than this are negative in every type, whatever they were rounded to.
CERTAINLY = 2.0**-14


@dataclass(frozen=True)
class Special:
    """`state`: what finite numbers are, with their bound; 0 in place of what is none. `whole`: all numbers, of which
    those that are none, and zeros that are `certain`, are what a kernel has."""

    state: Bounded
    whole: Float64
    certain: Array


def finite(values: Float64) -> Float64:
    """0 in place of what is no number."""
    xp = namespace_of(values)
    return xp.where(xp.isfinite(values), values, 0.0)


def of_sums(state: Bounded, whole: Float64) -> Special:
    """`state` of sums without what is no number, `whole` with it. Whether a sum is 0 its order may decide."""
    return Special(state, whole, ~namespace_of(whole).isfinite(whole))


def of_values(values: Float64) -> Special:
    """Numbers as they are read."""
    xp, number = namespace_of(values), finite(values)
    return Special(Bounded(number, xp.zeros_like(number)), values, values == values)


def through_chain(
    chain: Sequence[Node], start: Special, tensors: Mapping[str, Array], out_dtype: str, exact: bool = False
) -> Bounded:
    """`apply_chain` and `stored` of all numbers, where biases and residuals may be none, too."""
    at = start
    for node, name in zip(chain, operand_names(chain), strict=True):
        tensor = tensors[name] if name is not None else None
        if tensor is not None and node.operand == "out":
            tensor = as_float64(tensor, out_dtype)
        at = _after(node, at, tensor, out_dtype, exact)
    return settled(at, stored(out_dtype, at.state))


def settled(at: Special, final: Bounded) -> Bounded:
    """`final`: what `at.state` is as it is stored."""
    xp = namespace_of(at.whole)
    zero, number = at.certain & (at.whole == 0.0), xp.isfinite(at.whole)
    value = xp.where(~number | zero, at.whole, final.value)
    # Another zero may have either sign: its bound is not 0.
    error = xp.where(final.value == 0.0, xp.maximum(final.error, TINY), final.error)
    return Bounded(value, xp.where((~number | zero) & xp.isfinite(error), 0.0, error))


def _after(node: Node, at: Special, tensor: Array | None, out_dtype: str, exact: bool) -> Special:
    if isinstance(node, MaskedActivation):
        assert tensor is not None
        set_, clear = (_after(each, at, None, out_dtype, exact) for each in (node.where_set, node.where_clear))
        return _chosen(tensor != 0, set_, clear)
    xp, name = namespace_of(at.whole), operand_names([node])[0]
    number = finite(tensor) if tensor is not None and node.operand == "out" else tensor
    state = apply_chain([node], at.state, {} if name is None else {name: number}, exact, "float32")
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        whole = _made(node, at.whole, tensor, exact)
    became = ~xp.isfinite(at.whole) & xp.isfinite(whole)
    lost = xp.where(became, 0.0 if node.exact else U * xp.abs(whole) + TINY, state.error)
    return Special(Bounded(xp.where(became, whole, state.value), lost), whole, _certain(node, at, whole, tensor))


def _chosen(is_set: Array, where_set: Special, where_clear: Special) -> Special:
    xp, pair = namespace_of(is_set), (where_set, where_clear)

    def choice(of: Callable[[Special], Array]) -> Array:
        return xp.where(is_set, *map(of, pair))

    state = Bounded(choice(lambda each: each.state.value), choice(lambda each: each.state.error))
    return Special(state, choice(lambda each: each.whole), choice(lambda each: each.certain))


def _certain(node: Node, at: Special, whole: Float64, tensor: Array | None) -> Array:
    """Where a kernel has this very number: what is none; what is left as it was; zeros of certain numbers, of which a
    polynomial may round on its way; and zeros that a node writes."""
    xp = namespace_of(whole)
    # What rounds may be 0, or what it was, in float64 alone.
    rounds = not node.exact or isinstance(node, Cast | Polynomial)
    settled_before = (at.whole == 0.0) | ~xp.isfinite(at.whole)
    kept = settled_before & (whole == 0.0) if rounds else (whole == 0.0) | (whole == at.whole)
    certain = ~xp.isfinite(whole) | (at.certain & kept)
    if node.op == "mask":
        return certain | (tensor == 0)
    if node.op == "relu":
        return certain | (at.state.value + at.state.error < -CERTAINLY)
    return certain


def _made(node: Node, x: Float64, tensor: Array | None, exact: bool) -> Float64:
    """In float64, by the formula that the kernel has."""
    xp = namespace_of(x)
    if isinstance(node, Bias):
        assert tensor is not None
        return x + (tensor[:, None] if node.axis == "m" else tensor)
    if isinstance(node, Residual):
        return x + tensor
    if isinstance(node, Scale):
        return x * float(np.float32(node.value))
    if isinstance(node, LeakyRelu):
        return xp.where(x < 0.0, x * float(np.float32(node.slope)), x)
    if isinstance(node, Clip):
        low, high = float(np.float32(node.lo)), float(np.float32(node.hi))
        return xp.where(x < low, low, xp.where(x > high, high, x))
    if isinstance(node, Polynomial):
        total = xp.zeros_like(x) + float(np.float32(node.coefficients[-1]))
        for coefficient in reversed(node.coefficients[:-1]):
            total = total * x + float(np.float32(coefficient))
        return total
    if node.op == "mask":
        return xp.where(tensor != 0, x, 0.0)
    if isinstance(node, Cast) or node.op == "identity" or (exact and not node.exact):
        return x
    return _OF_ONE[node.op](x)


_OF_ONE: dict[str, Callable[[Float64], Float64]] = {
    "relu": lambda x: namespace_of(x).where(x < 0.0, 0.0, x),
    "square": lambda x: x * x + 0.0,
    "gelu": lambda x: 0.5 * x * (1.0 + erf(x * 0.5**0.5)),
    "silu": lambda x: x * logistic(x),
    "sigmoid": lambda x: logistic(x),
    "tanh": lambda x: namespace_of(x).tanh(x),
}
