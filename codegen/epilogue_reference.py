"""The epilogue and the rounding to the output's dtype in float64, with a bound on what fp32 arithmetic may differ by.

Each node maps (value, error) to (value, error): the incoming error grows by the node's Lipschitz constant, and the node
adds its own. One rounding to fp32 is at most u |x| with u = 2^-24 (Higham, "Accuracy and Stability of Numerical
Algorithms", 2nd ed., theorem 2.2), below the normal range half a subnormal. CUDA's expf, erff and tanhf are within 2
ulp (CUDA C++ Programming Guide, "Mathematical Functions", table of maximum ulp errors: 1 to 2 for all three), and 1 ulp
is at most 2u |x|. Division is correctly rounded without --use_fast_math (the same table).

Arrays are of one namespace, whichever (`codegen.arrays`); the result is of the same.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from codegen.arrays import Array, Float64, as_float64, erf, namespace_of, powers_of_two
from codegen.epilogue import (
    LARGEST_FLOAT32,
    Bias,
    Cast,
    Clip,
    Identity,
    LeakyRelu,
    MaskedActivation,
    Node,
    Polynomial,
    Relu,
    Residual,
    Scale,
    Square,
    operand_names,
    tensor_nodes,
)

U = 2.0**-24
TINY = 2.0**-149
# exp(-x) overflows to infinity below x = -88.7; the quotient is then 0 where the true value is under 2^-126.
UNDERFLOW = 2.0**-126

# max |f'|: of gelu at x = sqrt(2), of silu at x = 2.3994, both rounded up.
_LIPSCHITZ = {"gelu": 1.13, "silu": 1.1, "tanh": 1.0, "sigmoid": 0.25}


def gamma_of(roundings: float) -> float:
    """gamma(n) = n u / (1 - n u), infinite from 1 / u on."""
    return roundings * U / (1.0 - roundings * U) if roundings * U < 1.0 else math.inf


@dataclass(frozen=True)
class Bounded:
    """A float64 value and a bound on |fp32 result - value|, of one shape. inf: no claim (beyond the type's range)."""

    value: Float64
    error: Float64


def apply_chain(
    chain: Sequence[Node], start: Bounded, tensors: Mapping[str, Array], exact: bool, out_dtype: str
) -> Bounded:
    """Applies the nodes to `start`, shape (..., m, n). `exact` makes approximated activations the identity. `out_dtype`
    is the output's, which biases and residuals have in memory. Packed masks come unpacked (`unpacked_masks`)."""
    state = checkable(start, LARGEST_FLOAT32)
    for node, name in zip(chain, operand_names(chain), strict=True):
        tensor = tensors[name] if name is not None else None
        state = _apply(node, state, as_float64(tensor, out_dtype) if node.operand == "out" else tensor, exact)
    return state


def unpacked_masks(chain: Sequence[Node], inputs: Mapping[str, Array], shape: tuple[int, ...]) -> dict[str, Array]:
    """The inputs, with a number of `shape`, the output's, for each bit of packed masks: 1 where it is set."""
    packed = {
        name: unpacked(inputs[name], shape) for node, name, _ in tensor_nodes(chain, "float32") if node.packed_mask
    }
    return {**inputs, **packed}


def unpacked(words: Array, shape: tuple[int, ...]) -> Float64:
    """The bits of int32 words, the lowest of each first, as numbers of that shape."""
    columns, xp = words.view(np.uint32).reshape(-1, 1), namespace_of(words)
    bits = xp.zeros((words.size, 32))
    for bit in range(32):
        bits[:, bit : bit + 1] = ((columns & (1 << bit)) != 0).astype(np.float64)
    return bits.reshape(-1)[: math.prod(shape)].reshape(*shape)


def summed_roundings(count: float) -> float:
    """How many roundings a sum of so many random numbers may be off by, in any order, where each is to the nearest:
    they have either sign, so that they add up to the root of their number (Higham and Mary, SIAM J. Sci. Comput. 41:5,
    2019, theorem 2.4, with λ = 8: more in one of 10^13 sums for each number). Of few numbers all of them."""
    return min(count, 8.0 * math.sqrt(count))


def stored(dtype: str, at: Bounded) -> Bounded:
    """What an output of `dtype` holds of fp32 values: they are rounded to nearest even, once."""
    return at if dtype == "float32" else _cast(dtype, at)


def stored_or_none(dtype: str, at: Bounded) -> Bounded:
    """The same, where what is no number is a result, and not what an overflow left."""
    final, number = stored(dtype, at), namespace_of(at.value).isfinite(at.value)
    xp = namespace_of(at.value)
    return Bounded(xp.where(number, final.value, at.value), xp.where(number, final.error, 0.0))


def rounded_to_float32(values: Float64) -> Bounded:
    """Exact values, such as int32 sums, as fp32 holds them after one rounding."""
    return checkable(rounded(values, namespace_of(values).zeros_like(values)), LARGEST_FLOAT32)


def _apply(node: Node, at: Bounded, tensor: Array | None, exact: bool) -> Bounded:
    if isinstance(node, Cast):
        return _cast(node.dtype, at)
    if isinstance(node, MaskedActivation):
        assert tensor is not None
        where_set, where_clear = (_apply(function, at, None, exact) for function in (node.where_set, node.where_clear))
        xp, is_set = namespace_of(at.value), tensor != 0
        return Bounded(
            xp.where(is_set, where_set.value, where_clear.value), xp.where(is_set, where_set.error, where_clear.error)
        )
    if not node.exact:
        return at if exact else _activation(node.op, at)
    with np.errstate(invalid="ignore", over="ignore"):
        return checkable(_exact_node(node, at, tensor), LARGEST_FLOAT32)


def _exact_node(node: Node, at: Bounded, tensor: Array | None) -> Bounded:
    value, error, xp = at.value, at.error, namespace_of(at.value)
    if isinstance(node, Bias):
        assert tensor is not None
        return added(value, tensor[:, None] if node.axis == "m" else tensor, error)
    if isinstance(node, Residual):
        assert tensor is not None
        return added(value, tensor, error)
    if isinstance(node, Scale):
        factor = float(np.float32(node.value))
        return rounded(value * factor, error * abs(factor))
    if isinstance(node, Relu):
        return Bounded(xp.maximum(value, 0.0), error)
    if isinstance(node, LeakyRelu):
        slope = float(np.float32(node.slope))
        scaled = rounded(value * slope, error * max(1.0, abs(slope)))
        # Near 0 the kernel may take the other branch: the function is continuous, so its Lipschitz constant holds.
        negative = value - error < 0.0
        return Bounded(xp.where(value < 0.0, scaled.value, value), xp.where(negative, scaled.error, error))
    if isinstance(node, Identity):
        return at
    if isinstance(node, Square):
        return added(value * value, 0.0, (2.0 * xp.abs(value) + error) * error)
    if isinstance(node, Polynomial):
        return _polynomial([float(np.float32(coefficient)) for coefficient in node.coefficients], at)
    if isinstance(node, Clip):
        return Bounded(xp.clip(value, float(np.float32(node.lo)), float(np.float32(node.hi))), error)
    assert tensor is not None and node.op == "mask"
    return Bounded(xp.where(tensor != 0, value, 0.0), xp.where(tensor != 0, error, 0.0))


def _polynomial(coefficients: Sequence[float], at: Bounded) -> Bounded:
    """By Horner's rule, with one rounding for each fused multiply-add."""
    xp = namespace_of(at.value)
    sum_ = Bounded(xp.zeros_like(at.value) + coefficients[-1], xp.zeros_like(at.value))
    for coefficient in reversed(coefficients[:-1]):
        error = xp.abs(sum_.value) * at.error + sum_.error * xp.abs(at.value) + sum_.error * at.error
        sum_ = checkable(added(sum_.value * at.value, coefficient, error), LARGEST_FLOAT32)
    return sum_


def added(value: Float64, addend: Float64 | float, error: Float64) -> Bounded:
    """`value` + `addend` after one rounding to fp32. Where nothing was lost so far the kernel's own rounding is made:
    it adds fp32 numbers, or one to a product of two, and float64 has such a sum exactly, but where they are far apart.
    (No compiler fuses this addition with a product before it that fp32 does not hold: such a product has an error.)"""
    total = value + addend
    xp = namespace_of(total)
    with np.errstate(over="ignore", invalid="ignore"):
        # What the addition in float64 lost (Knuth, "The Art of Computer Programming" 2, 4.2.2, theorem B).
        part = total - value
        lost = (value - (total - part)) + (addend - part)
        exact, error = error == 0.0, xp.where(error == error, error, np.inf)
        once = total.astype(np.float32).astype(np.float64)
    certain = exact & (lost == 0.0)
    return Bounded(xp.where(exact, once, total), xp.where(certain, 0.0, error + U * (xp.abs(total) + error) + TINY))


def rounded(value: Float64, error: Float64) -> Bounded:
    """`value` as fp32 arithmetic leaves it: nothing is lost where nothing was lost so far and fp32 can represent it."""
    xp = namespace_of(value)
    with np.errstate(over="ignore"):
        unchanged = (error == 0.0) & (value.astype(np.float32) == value)
    return Bounded(value, xp.where(unchanged, 0.0, error + U * (xp.abs(value) + error) + TINY))


def checkable(state: Bounded, limit: float) -> Bounded:
    """No claim is made about what may overflow; its value stays finite so that later nodes make no NaN of it."""
    xp = namespace_of(state.value)
    fits = xp.abs(state.value) + state.error <= limit
    value = xp.clip(xp.nan_to_num(state.value), -limit, limit)
    return Bounded(value, xp.where(fits, state.error, np.inf))


_CASTS: dict[str, tuple[float, float, float]] = {
    # unit roundoff, half of the smallest subnormal, largest finite value
    "float16": (2.0**-11, 2.0**-25, 65504.0),
    "bfloat16": (2.0**-8, 2.0**-134, float.fromhex("0x1.fep+127")),
}


def _cast(dtype: str, at: Bounded) -> Bounded:
    roundoff, subnormal, limit = _CASTS[dtype]
    xp = namespace_of(at.value)
    at = checkable(at, limit)
    certain = at.error == 0.0  # the kernel rounds this very value, to nearest even, as is done here
    own = roundoff * (xp.abs(at.value) + at.error) + subnormal
    value = xp.where(certain, _round_to(dtype, at.value), at.value)
    return Bounded(value, xp.where(certain, 0.0, at.error + own))


def _round_to(dtype: str, value: Float64) -> Float64:
    if dtype == "float16":
        # What is rounded here fp32 holds, so that CuPy's way through fp32 rounds no second time.
        return value.astype(np.float16).astype(np.float64)
    xp = namespace_of(value)
    # Scaled so that a whole number is what the 8 significant bits hold; rint rounds to nearest even.
    _, exponent = xp.frexp(value)
    quantum = powers_of_two(xp.maximum(exponent, -125) - 8)
    return xp.rint(value / quantum) * quantum


def _activation(op: str, at: Bounded) -> Bounded:
    xp = namespace_of(at.value)
    x, size = at.value, xp.abs(at.value)
    value, own = _ACTIVATIONS[op](x, xp.where(xp.isfinite(at.error), size + at.error, size))
    return Bounded(value, at.error * _LIPSCHITZ[op] + own)


def _gelu(x: Float64, size: Float64) -> tuple[Float64, Float64]:
    value = 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))
    # 1 + erf(t): 4u by erff (2 ulp of at most 1), 1u by t's rounding (t erf'(t) < 0.49), 2u by the addition.
    return value, 0.5 * size * 7.0 * U + 2.0 * U * size + TINY


def _sigmoid(x: Float64, size: Float64) -> tuple[Float64, Float64]:
    # 1 / (1 + e): 4u by expf (2 ulp), damped by e / (1 + e); then one addition and one division.
    return logistic(x), 6.0 * U * logistic(size) + UNDERFLOW


def _silu(x: Float64, size: Float64) -> tuple[Float64, Float64]:
    return x * logistic(x), 6.0 * U * size * logistic(size) + UNDERFLOW * namespace_of(size).maximum(size, 1.0)


def _tanh(x: Float64, size: Float64) -> tuple[Float64, Float64]:
    xp = namespace_of(x)
    return xp.tanh(x), 4.0 * U * xp.tanh(size) + TINY


def logistic(x: Float64) -> Float64:
    return 0.5 * (1.0 + namespace_of(x).tanh(0.5 * x))


_ACTIVATIONS: dict[str, Callable[[Float64, Float64], tuple[Float64, Float64]]] = {
    "gelu": _gelu,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "tanh": _tanh,
}
