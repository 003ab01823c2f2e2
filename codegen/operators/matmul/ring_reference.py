"""Matmul over a ring in the ring's own integers, which wrap around as it does. Shares nothing with the kernel.

NumPy and CuPy multiply and add int64 and int32 modulo 2^64 and 2^32; a sum of wrapped products is the wrapped sum. The
shift is of its two's-complement value. Nothing is rounded beside that, so the result is exact, and the bound is what
the problem's policy allows: 0, or so many units of the last bit.
"""

from collections.abc import Mapping

from codegen.arrays import Array, as_float64, namespace_of
from codegen.epilogue import Bias, Identity, Mask, MaskedActivation, Node, Relu, Residual, Square, operand_names
from codegen.epilogue_reference import unpacked_masks
from codegen.operators.matmul.fixed_point import allowed_ulp
from codegen.operators.matmul.problem import MatmulProblem


def reference(problem: MatmulProblem, inputs: Mapping[str, Array]) -> tuple[Array, Array]:
    """(result, bound), both of out's logical shape: int64 where float64 does not hold the ring, else float64."""
    a, b = inputs["a"], inputs["b"]
    xp = namespace_of(a)
    a = a.swapaxes(-1, -2) if problem.a_transposed else a
    b = b.swapaxes(-1, -2) if problem.b_transposed else b
    value = truncated(xp.matmul(a, b), problem.fraction_bits, problem.rounding == "nearest")
    tensors = unpacked_masks(problem.epilogue, inputs, tuple(value.shape))
    for node, name in zip(problem.epilogue, operand_names(problem.epilogue), strict=True):
        value = _apply(problem, node, value, None if name is None else tensors[name])
    bound = xp.zeros_like(value) + allowed_ulp(problem)
    if problem.dtype == "int64":
        return value, bound
    return as_float64(value, problem.dtype), as_float64(bound, problem.dtype)


def truncated(sums: Array, bits: int, nearest: bool) -> Array:
    """Sums shifted by so many bits, rounded down or to the nearest, ties up: the bit below says whether it is above."""
    if bits == 0:
        return sums
    floor = sums >> bits
    return floor + ((sums >> (bits - 1)) & 1) if nearest else floor


def _apply(problem: MatmulProblem, node: Node, value: Array, tensor: Array | None) -> Array:
    if isinstance(node, Relu):
        return namespace_of(value).maximum(value, 0)
    if isinstance(node, Identity):
        return value
    if isinstance(node, Square):
        return truncated(value * value, problem.fraction_bits, problem.rounding == "nearest")
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
