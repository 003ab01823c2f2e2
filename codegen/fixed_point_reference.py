"""What follows sums over a ring, in the ring's own integers, which wrap around as it does. Shares nothing with kernels.

NumPy and CuPy multiply and add int64 and int32 modulo 2^64 and 2^32; a sum of wrapped products is the wrapped sum. The
shift is of its two's-complement value. Nothing is rounded beside that, so the result is exact, and the bound is what
the problem's policy allows: 0, or so many units of the last bit.
"""

from collections.abc import Mapping, Sequence

from codegen.arrays import Array, as_float64, namespace_of
from codegen.epilogue import (
    Bias,
    Identity,
    Mask,
    MaskedActivation,
    Node,
    Polynomial,
    Relu,
    Residual,
    Square,
    operand_names,
)
from codegen.fixed_point import InFixedPoint, Shifted, allowed_ulp


def finished(
    problem: InFixedPoint, chain: Sequence[Node], sums: Array, tensors: Mapping[str, Array]
) -> tuple[Array, Array]:
    """(result, bound) of wrapped sums and the chain behind them, whose masks are unpacked."""
    value = applied(problem, chain, truncated(sums, problem.fraction_bits, problem.rounding == "nearest"), tensors)
    return bounded(problem.dtype, value, allowed_ulp(problem))


def applied(problem: Shifted, chain: Sequence[Node], value: Array, tensors: Mapping[str, Array]) -> Array:
    """What the nodes make of numbers of the ring."""
    for node, name in zip(chain, operand_names(chain), strict=True):
        value = _apply(problem, node, value, None if name is None else tensors[name])
    return value


def bounded(element: str, value: Array, ulp: int = 0) -> tuple[Array, Array]:
    """Numbers of the ring and how far a kernel may be from them: int64 where float64 does not hold it, else float64."""
    bound = namespace_of(value).zeros_like(value) + ulp
    return (value, bound) if element == "int64" else (as_float64(value, element), as_float64(bound, element))


def truncated(sums: Array, bits: int, nearest: bool) -> Array:
    """Sums shifted by so many bits, rounded down or to the nearest, ties up: the bit below says whether it is above."""
    if bits == 0:
        return sums
    floor = sums >> bits
    return floor + ((sums >> (bits - 1)) & 1) if nearest else floor


def _apply(problem: Shifted, node: Node, value: Array, tensor: Array | None) -> Array:
    if isinstance(node, Relu):
        return namespace_of(value).maximum(value, 0)
    if isinstance(node, Identity):
        return value
    bits, nearest = problem.fraction_bits, problem.rounding == "nearest"
    if isinstance(node, Square):
        return truncated(value * value, bits, nearest)
    if isinstance(node, Polynomial):
        *rest, last = (int(coefficient * 2.0**bits) for coefficient in node.coefficients)
        total = namespace_of(value).zeros_like(value) + last
        for coefficient in reversed(rest):
            total = truncated(total * value, bits, nearest) + coefficient
        return total
    assert tensor is not None
    if isinstance(node, Bias):
        return value + (tensor[:, None] if node.axis == "m" else tensor)
    if isinstance(node, Residual):
        return value + tensor
    xp = namespace_of(value)
    if isinstance(node, MaskedActivation):
        chosen = (_apply(problem, function, value, None) for function in (node.where_set, node.where_clear))
        return xp.where(tensor != 0, *chosen)
    assert isinstance(node, Mask)
    return xp.where(tensor != 0, value, 0)
