"""The epilogue and the rounding to the output's dtype in float64, with a bound on what fp32 arithmetic may differ by.

Each node maps (value, error) to (value, error): the incoming error grows by the node's Lipschitz constant, and the node
adds its own. One rounding to fp32 is at most u |x| with u = 2^-24 (Higham, "Accuracy and Stability of Numerical
Algorithms", 2nd ed., theorem 2.2), below the normal range half a subnormal. CUDA's expf, erff and tanhf are within 2
ulp (CUDA C++ Programming Guide, "Mathematical Functions", table of maximum ulp errors: 1 to 2 for all three), and 1 ulp
is at most 2u |x|. Division is correctly rounded without --use_fast_math (the same table).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from codegen.epilogue import LARGEST_FLOAT32, Bias, Cast, Clip, LeakyRelu, Node, Relu, Residual, Scale, operand_names

Float64 = npt.NDArray[np.float64]
U = 2.0**-24
TINY = 2.0**-149
# exp(-x) overflows to infinity below x = -88.7; the quotient is then 0 where the true value is under 2^-126.
UNDERFLOW = 2.0**-126

# max |f'|: of gelu at x = sqrt(2), of silu at x = 2.3994, both rounded up.
_LIPSCHITZ = {"gelu": 1.13, "silu": 1.1, "tanh": 1.0, "sigmoid": 0.25}
_erf = np.frompyfunc(math.erf, 1, 1)


@dataclass(frozen=True)
class Bounded:
    """A float64 value and a bound on |fp32 result - value|, of one shape. inf: no claim (beyond the type's range)."""

    value: Float64
    error: Float64


def apply_chain(chain: Sequence[Node], start: Bounded, tensors: Mapping[str, npt.NDArray[Any]], exact: bool) -> Bounded:
    """Applies the nodes to `start`, shape (..., m, n). `exact` makes approximated activations the identity."""
    state = _judgeable(start, LARGEST_FLOAT32)
    for node, name in zip(chain, operand_names(chain), strict=True):
        state = _apply(node, state, None if name is None else tensors[name], exact)
    return state


def stored(dtype: str, at: Bounded) -> Bounded:
    """What an output of `dtype` holds of fp32 values: they are rounded to nearest even, once."""
    return at if dtype == "float32" else _cast(dtype, at)


def rounded_to_float32(values: Float64) -> Bounded:
    """Exact values, such as int32 sums, as fp32 holds them after one rounding."""
    return _judgeable(_rounded(values, np.zeros_like(values)), LARGEST_FLOAT32)


def _apply(node: Node, at: Bounded, tensor: npt.NDArray[Any] | None, exact: bool) -> Bounded:
    if isinstance(node, Cast):
        return _cast(node.dtype, at)
    if not node.exact:
        return at if exact else _activation(node.op, at)
    with np.errstate(invalid="ignore", over="ignore"):
        return _judgeable(_exact_node(node, at, tensor), LARGEST_FLOAT32)


def _exact_node(node: Node, at: Bounded, tensor: npt.NDArray[Any] | None) -> Bounded:
    value, error = at.value, at.error
    if isinstance(node, Bias):
        assert tensor is not None
        return _rounded(value + (tensor[:, None] if node.axis == "m" else tensor).astype(np.float64), error)
    if isinstance(node, Residual):
        assert tensor is not None
        return _rounded(value + tensor.astype(np.float64), error)
    if isinstance(node, Scale):
        factor = float(np.float32(node.value))
        return _rounded(value * factor, error * abs(factor))
    if isinstance(node, Relu):
        return Bounded(np.maximum(value, 0.0), error)
    if isinstance(node, LeakyRelu):
        slope = float(np.float32(node.slope))
        scaled = _rounded(value * slope, error * max(1.0, abs(slope)))
        # Near 0 the kernel may take the other branch: the function is continuous, so its Lipschitz constant holds.
        negative = value - error < 0.0
        return Bounded(np.where(value < 0.0, scaled.value, value), np.where(negative, scaled.error, error))
    if isinstance(node, Clip):
        return Bounded(np.clip(value, float(np.float32(node.lo)), float(np.float32(node.hi))), error)
    assert tensor is not None and node.op == "mask"
    return Bounded(np.where(tensor != 0, value, 0.0), np.where(tensor != 0, error, 0.0))


def _rounded(value: Float64, error: Float64) -> Bounded:
    """`value` as fp32 arithmetic leaves it: nothing is lost where nothing was lost so far and fp32 can represent it."""
    with np.errstate(over="ignore"):
        kept = (error == 0.0) & (value.astype(np.float32) == value)
    return Bounded(value, np.where(kept, 0.0, error + U * (np.abs(value) + error) + TINY))


def _judgeable(state: Bounded, limit: float) -> Bounded:
    """No claim is made about what may overflow; its value stays finite so that later nodes make no NaN of it."""
    fits = np.abs(state.value) + state.error <= limit
    value = np.clip(np.nan_to_num(state.value), -limit, limit)
    return Bounded(value, np.where(fits, state.error, np.inf))


_CASTS: dict[str, tuple[float, float, float]] = {
    # unit roundoff, half of the smallest subnormal, largest finite value
    "float16": (2.0**-11, 2.0**-25, 65504.0),
    "bfloat16": (2.0**-8, 2.0**-134, float.fromhex("0x1.fep+127")),
}


def _cast(dtype: str, at: Bounded) -> Bounded:
    roundoff, subnormal, limit = _CASTS[dtype]
    at = _judgeable(at, limit)
    certain = at.error == 0.0  # the kernel rounds this very value, to nearest even, as is done here
    own = roundoff * (np.abs(at.value) + at.error) + subnormal
    value = np.where(certain, _round_to(dtype, at.value), at.value)
    return Bounded(value, np.where(certain, 0.0, at.error + own))


def _round_to(dtype: str, value: Float64) -> Float64:
    if dtype == "float16":
        return value.astype(np.float16).astype(np.float64)
    # Scaled so that a whole number is what the 8 significant bits hold; numpy rounds to nearest even.
    _, exponent = np.frexp(value)
    quantum = np.ldexp(1.0, np.maximum(exponent, -125) - 8)
    return np.asarray(np.rint(value / quantum) * quantum, dtype=np.float64)


def _activation(op: str, at: Bounded) -> Bounded:
    x, size = at.value, np.abs(at.value)
    value, own = _ACTIVATIONS[op](x, np.where(np.isfinite(at.error), size + at.error, size))
    return Bounded(value, at.error * _LIPSCHITZ[op] + own)


def _gelu(x: Float64, size: Float64) -> tuple[Float64, Float64]:
    value = 0.5 * x * (1.0 + np.asarray(_erf(x * math.sqrt(0.5)), dtype=np.float64))
    # 1 + erf(t): 4u by erff (2 ulp of at most 1), 1u by t's rounding (t erf'(t) < 0.49), 2u by the addition.
    return value, 0.5 * size * 7.0 * U + 2.0 * U * size + TINY


def _sigmoid(x: Float64, size: Float64) -> tuple[Float64, Float64]:
    # 1 / (1 + e): 4u by expf (2 ulp), damped by e / (1 + e); then one addition and one division.
    return _logistic(x), 6.0 * U * _logistic(size) + UNDERFLOW


def _silu(x: Float64, size: Float64) -> tuple[Float64, Float64]:
    return x * _logistic(x), 6.0 * U * size * _logistic(size) + UNDERFLOW * np.maximum(size, 1.0)


def _tanh(x: Float64, size: Float64) -> tuple[Float64, Float64]:
    return np.tanh(x), 4.0 * U * np.tanh(size) + TINY


def _logistic(x: Float64) -> Float64:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)), dtype=np.float64)


_ACTIVATIONS: dict[str, Callable[[Float64, Float64], tuple[Float64, Float64]]] = {
    "gelu": _gelu,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "tanh": _tanh,
}
