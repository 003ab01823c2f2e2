"""Reductions in float64, and how far a kernel may be from them. Shares nothing with the kernel.

With u = 2^-24, gamma(x) = x / (1 - x), n values v of an output:

- sums: gamma(n u) Σ|v|, in any order (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., (4.4));
  nothing where all are whole numbers of one power of two and 24 bits hold their sizes' sum. Of squares and products
  each term has a rounding more. A mean is divided once more, correctly rounded (not in exact runs: an epilogue could
  not go on exactly);
- over Z/2^64 (int64): nothing;
- max, min, argmax: nothing. The first of equal values counts, and a NaN is greater than all else;
- variance: 8 n u sqrt(S Σv²) + 8 (n u)² Σv², where S is the sum of squared distances from the mean: Chan, Golub and
  LeVeque (The American Statistician 37:3, 1983, table 1) have n u κ S with κ = sqrt(Σv² / S) for updating and pairwise
  algorithms, and no constant; 8 covers the roundings of a merge, and the second term is that of constant values. n is
  as of sums of random numbers (`summed_roundings`);
- logsumexp: a term e^d, d ≤ 0, comes with 2 ulp of expf and |d| u of its argument, and is rescaled where a greater
  value comes: at most n times, by distances that add up to the values' range. The logarithm makes an absolute error of
  the sum's relative one, and adds 1 ulp of its own: u (8 n + 2 range + 16) + 2 u |log| + u |result|.

What the map adds to each value's error goes through the function: as a sum of errors for sums, as the largest one for
max, min and logsumexp, as 2 sqrt(S Σe²) + Σe² for the variance.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from codegen.arrays import Array, Float64, as_float64, erf, joined, namespace_of, powers_of_two
from codegen.epilogue import operand_names
from codegen.epilogue_reference import (
    TINY,
    UNDERFLOW,
    Bounded,
    U,
    apply_chain,
    logistic,
    stored,
    summed_roundings,
)
from codegen.fixed_point_reference import bounded
from codegen.operators.matmul.reference import accumulated
from codegen.operators.reduce.problem import APPROXIMATE, ReduceProblem
from codegen.special_values import Special, finite, settled, through_chain

# e^x is 0 in fp32 below it.
NO_WEIGHT = -104.0


def reference(problem: ReduceProblem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
    """(result, bound) of out's shape; with `write_map` of dx's elements behind those of out, both as vectors."""
    p = problem
    order, flat = (*p.kept, *p.axes), (p.outputs, p.count)
    if p.dtype == "int64":
        rows = inputs["x"].transpose(*order).reshape(flat)
        return bounded("int64", _of_ring(p.fn, rows).reshape(p.out_shape))
    given = [as_float64(inputs[name], p.dtype) for name in (("dy", "x") if p.two_inputs else ("x",))]
    if p.fn != "argmax" and not all(bool(namespace_of(each).all(namespace_of(each).isfinite(each))) for each in given):
        return _of_special(p, given, inputs, exact)
    values = _mapped(p.map, given, exact)
    rows = Bounded(values.value.transpose(*order).reshape(flat), values.error.transpose(*order).reshape(flat))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        out = _reduced(p, rows, exact)
    if p.out_dtype in ("int32", "int64"):
        final = out if p.out_dtype == "int64" else Bounded((out.value + 2.0**31) % 2.0**32 - 2.0**31, out.error)
    else:
        start = _as_float32(out) if p.dtype == "int32" and p.fn in ("sum", "sum_of_squares", "max", "min") else out
        tensors = {name: inputs[name].reshape(1, -1) for name in operand_names(p.epilogue) if name is not None}
        line = Bounded(start.value.reshape(1, -1), start.error.reshape(1, -1))
        final = stored(p.out_dtype, apply_chain(p.epilogue, line, tensors, exact, p.out_dtype))
    return _with_mapped(p, final, stored(p.dtype, values) if p.write_map else None)


def _of_special(
    p: ReduceProblem, given: list[Float64], inputs: Mapping[str, Array], exact: bool
) -> tuple[Float64, Float64]:
    """The same of floats with NaN and infinities among them, where the map rounds once at most."""
    xp = namespace_of(given[0])
    with np.errstate(invalid="ignore", over="ignore"):
        mapped = _mapped(p.map, given, exact)
        values = Special(
            Bounded(finite(mapped.value), xp.where(xp.isfinite(mapped.value), mapped.error, 0.0)),
            mapped.value,
            mapped.value == mapped.value,
        )
        out = _reduced_special(p, values, exact)
    tensors = {name: inputs[name].reshape(1, -1) for name in operand_names(p.epilogue) if name is not None}
    line = Special(
        Bounded(out.state.value.reshape(1, -1), out.state.error.reshape(1, -1)),
        out.whole.reshape(1, -1),
        out.certain.reshape(1, -1),
    )
    final = through_chain(p.epilogue, line, tensors, p.out_dtype, exact)
    return _with_mapped(p, final, settled(values, stored(p.dtype, values.state)) if p.write_map else None)


def _with_mapped(p: ReduceProblem, final: Bounded, written: Bounded | None) -> tuple[Float64, Float64]:
    if written is None:
        return final.value.reshape(p.out_shape), final.error.reshape(p.out_shape)
    return joined([final.value.reshape(-1), written.value]), joined([final.error.reshape(-1), written.error])


def _of_ring(fn: str, rows: Array) -> Array:
    """Sums wrap around as NumPy's and CuPy's int64 does."""
    return {"sum": rows.sum, "max": rows.max, "min": rows.min}[fn](axis=1)


# ---- the map


def _mapped(name: str, given: list[Float64], exact: bool) -> Bounded:
    """Every value, with what fp32 makes of it."""
    first, xp = given[0], namespace_of(given[0])
    if name == "identity":
        return Bounded(first, xp.zeros_like(first))
    if name == "relu_grad":
        return Bounded(xp.where(given[1] <= 0.0, 0.0, first), xp.zeros_like(first))
    if name in ("square", "multiply") or (exact and name in APPROXIMATE):
        product = first * (first if name == "square" else given[1])
        return Bounded(product, _rounding(product))
    slope = _SLOPES[name](given[1])
    product = first * slope.value
    error = xp.abs(first) * slope.error
    return Bounded(product, error + U * (xp.abs(product) + error) + TINY)


def _rounding(value: Float64) -> Float64:
    """What one rounding to fp32 may cost; nothing where fp32 has the value."""
    xp = namespace_of(value)
    with np.errstate(over="ignore"):
        return xp.where(value.astype(np.float32) == value, 0.0, U * xp.abs(value) + TINY)


def _gelu_slope(x: Float64) -> Bounded:
    # 3.5u as of gelu's own factor (codegen.epilogue_reference). Of x φ(x): (2 u x² / 2) |x| φ <= 0.47u by the two
    # roundings of the argument, 7u |x| φ <= 1.8u by 2 ulp of expf and three products. The sum: u 1.13.
    xp = namespace_of(x)
    density = 0.3989422804014327 * xp.exp(-0.5 * x * x)
    return Bounded(0.5 * (1.0 + erf(x * math.sqrt(0.5))) + x * density, xp.zeros_like(x) + 8.0 * U)


def _silu_slope(x: Float64) -> Bounded:
    # y = 1 / (1 + e^-x) within 6u y. Of y (1 + x (1 - y)): 6u y |1 + x (1 - y)| by y, y |x| (6u y + u) by 1 - y, and
    # four roundings of terms up to 1 + |x|.
    size, y = namespace_of(x).abs(x), logistic(x)
    return Bounded(y * (1.0 + x * logistic(0.0 - x)), 16.0 * U * (1.0 + size) * y + UNDERFLOW * (1.0 + size))


def _tanh_slope(x: Float64) -> Bounded:
    # tanhf within 4u of at most 1, squared and subtracted.
    xp = namespace_of(x)
    y = xp.tanh(x)
    return Bounded(1.0 - y * y, xp.zeros_like(x) + 12.0 * U)


def _sigmoid_slope(x: Float64) -> Bounded:
    # y within 6u y, 1 - y within 6u y + u, and their product.
    y = logistic(x)
    return Bounded(y * logistic(0.0 - x), 16.0 * U * y + UNDERFLOW)


_SLOPES: dict[str, Callable[[Float64], Bounded]] = {
    "gelu_grad": _gelu_slope,
    "silu_grad": _silu_slope,
    "tanh_grad": _tanh_slope,
    "sigmoid_grad": _sigmoid_slope,
}

# ---- the function


def _reduced_special(p: ReduceProblem, values: Special, exact: bool) -> Special:
    """Of all values: an infinity in a variance may become one or NaN, as its order has it."""

    def in_rows(each: Array) -> Array:
        return each.transpose(*p.kept, *p.axes).reshape(p.outputs, p.count)

    xp, whole = namespace_of(values.whole), in_rows(values.whole)
    numbers = Bounded(in_rows(values.state.value), in_rows(values.state.error))
    infinite = (xp.abs(whole) == math.inf).any(axis=1)
    if p.fn in ("max", "min"):
        extreme = whole.max(axis=1) if p.fn == "max" else whole.min(axis=1)
        zero, negative = whole == 0.0, xp.signbit(whole)
        # Of zeros of both signs either is right.
        certain = ~xp.isfinite(extreme) | ~((zero & negative).any(axis=1) & (zero & ~negative).any(axis=1))
        return Special(Bounded(finite(extreme), numbers.error.max(axis=1)), extreme, certain)
    if p.fn == "logsumexp":
        greatest = whole.max(axis=1)
        # What is infinitely far below has no weight.
        least = xp.where(xp.isfinite(greatest), greatest, 0.0)[:, None] + 2.0 * NO_WEIGHT
        numbers = Bounded(xp.where(whole == -math.inf, least, numbers.value), numbers.error)
        total = greatest
    elif p.fn == "variance":
        total = (whole * 0.0).sum(axis=1)
    else:
        total = (whole * whole if p.fn == "sum_of_squares" else whole).sum(axis=1)
    state = _reduced(p, numbers, exact)
    if p.fn == "variance":
        state = Bounded(state.value, xp.where(infinite, math.inf, state.error))
    return Special(state, xp.where(xp.isfinite(total), state.value, total), ~xp.isfinite(total))


def _reduced(p: ReduceProblem, rows: Bounded, exact: bool) -> Bounded:
    """Of rows of shape (outputs, count)."""
    value, error, xp = rows.value, rows.error, namespace_of(rows.value)
    if p.fn == "argmax":
        return _first_greatest(value)
    if p.fn == "max" or p.fn == "min":
        extreme = value.max(axis=1) if p.fn == "max" else value.min(axis=1)
        return Bounded(extreme, error.max(axis=1))
    if p.fn == "variance":
        return _variance(p, rows, exact)
    if p.fn == "logsumexp":
        return _logsumexp(p, rows, exact)
    if p.fn == "sum_of_squares":
        squares = value * value
        rows = Bounded(squares, 2.0 * xp.abs(value) * error + error * error + _rounding(squares))
    total = rows.value.sum(axis=1)
    whole = Bounded(total, xp.zeros_like(total) if p.dtype == "int32" else _bound_of_sums(rows))
    if p.fn != "mean":
        return whole
    whole = _as_float32(whole) if p.dtype == "int32" else whole
    return whole if exact else _divided(p, whole)


def _as_float32(whole: Bounded) -> Bounded:
    """Whole numbers, exact so far, as fp32 holds them: the kernel rounds these very ones, to nearest even."""
    return Bounded(whole.value.astype(np.float32).astype(np.float64), whole.error)


def _bound_of_sums(rows: Bounded) -> Float64:
    """Of fp32 sums in any order, of values that come with errors of their own."""
    xp, count = namespace_of(rows.value), rows.value.shape[1]
    own = rows.error.sum(axis=1)
    if count == 0:
        return own
    sizes = xp.abs(rows.value) + rows.error

    def add(left: Any, right: Any) -> Any:
        return (left * right).sum(axis=1)

    bound = accumulated(add, sizes, xp.zeros_like(sizes[:1, :1]) + 1.0, max(1, count), on_cuda_cores=True, tf32=False)
    return bound + own


def _divided(p: ReduceProblem, total: Bounded) -> Bounded:
    """By the count, which fp32 has rounded once; the quotient is rounded once more."""
    xp, count = namespace_of(total.value), float(np.float32(p.count))
    quotient = total.value / p.count
    inexact = U * xp.abs(quotient) * 3.0 + TINY + total.error / p.count * (1.0 + 4.0 * U)
    if count != p.count:
        return Bounded(quotient, inexact)
    # Of two numbers that fp32 has float64's quotient rounds to fp32 as the true one does (Figueroa, SIGNUM 30:3, 1995).
    once = quotient.astype(np.float32).astype(np.float64)
    certain = total.error == 0.0
    return Bounded(xp.where(certain, once, quotient), xp.where(certain, 0.0, inexact))


def _first_greatest(value: Float64) -> Bounded:
    xp = namespace_of(value)
    nan = value != value
    greatest = xp.where(nan, -math.inf, value).max(axis=1)
    wanted = xp.where(nan.any(axis=1)[:, None], nan, value == greatest[:, None])
    index = wanted.argmax(axis=1).astype(np.float64)
    return Bounded(index, xp.zeros_like(index))


def _variance(p: ReduceProblem, rows: Bounded, exact: bool) -> Bounded:
    value, n, xp = rows.value, float(p.count), namespace_of(rows.value)
    squares = (value * value).sum(axis=1)
    if exact:  # distances from 0, added up
        terms = value * value
        return Bounded(squares, _bound_of_sums(Bounded(terms, _rounding(terms))))
    apart = value - value.sum(axis=1)[:, None] / n
    spread = (apart * apart).sum(axis=1)
    lost = (rows.error * rows.error).sum(axis=1)
    lost_sums = summed_roundings(n) * U
    bound = 8.0 * lost_sums * xp.sqrt(spread * squares) + 8.0 * lost_sums**2 * squares
    bound = bound + 2.0 * xp.sqrt(spread * lost) + lost
    return Bounded(spread / n, bound / n * (1.0 + 4.0 * U) + 2.0 * U * spread / n + TINY)


def _logsumexp(p: ReduceProblem, rows: Bounded, exact: bool) -> Bounded:
    xp, value = namespace_of(rows.value), rows.value
    if p.count == 0:
        nothing = xp.zeros_like(value.sum(axis=1))
        return Bounded(nothing - math.inf, nothing)
    greatest = value.max(axis=1)
    distances = value - greatest[:, None]
    if exact:  # 2 to each distance, and no logarithm
        total = powers_of_two(distances).sum(axis=1)
        result = greatest + total
        least = powers_of_two(distances.min(axis=1))
        # Whole numbers of the smallest power; 24 bits hold all sums where they hold the result.
        certain = xp.abs(greatest) + total <= least * 2.0**24
        return Bounded(result, xp.where(certain, 0.0, p.count * U * total + U * xp.abs(result)))
    total = xp.exp(distances).sum(axis=1)
    logarithm = xp.log(total)
    result, spread = greatest + logarithm, 0.0 - distances.min(axis=1)
    error = U * (8.0 * p.count + 2.0 * spread + 16.0) + 2.0 * U * xp.abs(logarithm) + U * xp.abs(result)
    return Bounded(result, error * (1.0 + 2.0**-10) + rows.error.max(axis=1) + TINY)
