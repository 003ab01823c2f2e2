"""Matmul in float64, and how far a kernel may be from it. Shares nothing with the kernel.

Inputs are what their dtype holds, so the reference starts from the kernel's own numbers. Products of float16 and of
bfloat16 are exact in fp32 (22 and 16 significant bits). With u = 2^-24, gamma(x) = x / (1 - x) and S = Σ|a||b| the
sum of k products may be off by

- CUDA cores: gamma(r u) S, for k fused multiply-adds in any order (Higham, "Accuracy and Stability of Numerical
  Algorithms", 2nd ed., section 3.1 and (3.7)), with r = min(k, 8 sqrt(k)), because each rounds to the nearest
  (`summed_roundings`);
- tensor cores: gamma(4 k u) S. An addition takes the accumulator and n products exactly, aligns them to the largest,
  cuts each off 24 bits behind its point, adds them, and cuts the sum off to 24 bits (Hopper keeps a bit more;
  `codegen/device/cpu/tensor_sums.h`). So each of the n + 1 addends loses less than u S, and the sum less than 2 u S:
  (n + 3) u S, at most 4 u S for each product. Cutting off is a bias: of positive numbers it grows with k, not with its
  root. Zeros of padding lose nothing. What one addition lost goes through the next ones, hence gamma;
- tf32: also what rounding a and b to ã and b̃ costs, to the nearest with 11 significant bits: Σ(|a - ã||b| + |a||b - b̃|
  + |a - ã||b - b̃|) at most, and, because they go either way, 8 times the root of the sum of these squares (Hoeffding:
  more in one of 10^13 sums);
- int8: nothing. Sums in int32 are exact, and wrap around as int32 does;
- over a ring: nothing (`codegen/fixed_point_reference.py`).

A sum that is split into slices has one more rounding of at most u per slice after the first. Every slice has a
product at least, which the other slices do without: the bounds hold for any number of slices, added in order or
atomically.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from codegen.alignment import needs_cuda_cores
from codegen.arrays import EXACT_SUM, Array, Float64, as_float64, namespace_of, powers_of_two, whole_after
from codegen.epilogue_reference import (
    TINY,
    Bounded,
    U,
    apply_chain,
    rounded_to_float32,
    stored,
    summed_roundings,
    unpacked_masks,
)
from codegen.fixed_point import over_ring
from codegen.fixed_point_reference import finished
from codegen.operators.matmul.problem import MatmulProblem
from codegen.special_values import finite, of_sums, through_chain

TF32_SIGNIFICANT_BITS = 11
SMALLEST_EXPONENT = -125  # of a normal fp32 number whose significand is in [0.5, 1), as frexp gives it


def reference(problem: MatmulProblem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
    """(result, bound), both of out's logical shape, in the inputs' namespace."""
    ring = over_ring(problem)
    a, b = (inputs[name] if ring else as_float64(inputs[name], problem.dtype) for name in ("a", "b"))
    xp = namespace_of(a)
    a = a.swapaxes(-1, -2) if problem.a_transposed else a
    b = b.swapaxes(-1, -2) if problem.b_transposed else b
    if ring:
        product = xp.matmul(a, b)
        return finished(problem, problem.epilogue, product, unpacked_masks(problem.epilogue, inputs, product.shape))
    whole = None
    if problem.dtype == "int8":
        sums = _wrapped(xp.matmul(a, b))
        if problem.out_dtype == "int32":
            return sums, xp.zeros_like(sums)
        start = rounded_to_float32(sums)
    else:
        if not bool(xp.all(xp.isfinite(a))):
            with np.errstate(invalid="ignore"):  # of infinities NaN
                a, whole = finite(a), xp.matmul(a, b)
        on_cuda_cores = needs_cuda_cores(problem.dtype, problem.allow_tf32)
        bound = accumulated(xp.matmul, a, b, problem.k, on_cuda_cores=on_cuda_cores, tf32=problem.allow_tf32)
        start = Bounded(xp.matmul(a, b), bound)
    tensors = unpacked_masks(problem.epilogue, inputs, tuple(start.value.shape))
    if whole is not None:
        final = through_chain(problem.epilogue, of_sums(start, whole), tensors, problem.out_dtype, exact)
    else:
        final = stored(problem.out_dtype, apply_chain(problem.epilogue, start, tensors, exact, problem.out_dtype))
    return final.value, final.error


def _wrapped(sums: Float64) -> Float64:
    """Whole numbers as int32 holds them; float64 had them exactly, because 2^14 k is below 2^53 for every k."""
    return (sums + 2.0**31) % 2.0**32 - 2.0**31


def accumulated(
    multiply: Callable[[Float64, Float64], Float64], a: Float64, b: Float64, k: int, *, on_cuda_cores: bool, tf32: bool
) -> Float64:
    """How far the sums of k products of elements of `a` and of `b`, which `multiply` makes, may be off; 0 where each is
    exact in any order.

    Sums of whole numbers (of one power of two) are exact where none of their parts needs more than 24 bits. The factor
    beside gamma covers the float64 reference's own rounding, 2^-29 of the bound.
    """
    xp = namespace_of(a)
    size_a, size_b = xp.abs(a), xp.abs(b)
    lost: Float64 | None = None
    if tf32:
        lost_a, lost_b = _beyond_tf32(a), _beyond_tf32(b)
        if bool(lost_a.any()) or bool(lost_b.any()):
            all_lost = multiply(lost_a, size_b + lost_b) + multiply(size_a, lost_b)
            most_b = size_b + lost_b
            squares = multiply(lost_a * lost_a, most_b * most_b) + multiply(size_a * size_a, lost_b * lost_b)
            lost = xp.minimum(all_lost, 8.0 * xp.sqrt(squares))
            size_a, size_b = size_a + lost_a, size_b + lost_b
    sizes = multiply(size_a, size_b)
    roundings = U * (summed_roundings(k) if on_cuda_cores else 4.0 * k)
    gamma = roundings / (1.0 - roundings) if roundings < 1.0 else math.inf
    bound = gamma * sizes * (1.0 + 2.0**-20) + k * TINY
    if lost is not None:
        return bound + lost
    shift_a, shift_b = whole_after(a), whole_after(b)
    if shift_a is None or shift_b is None:
        return bound
    return xp.where(sizes * 2.0 ** (shift_a + shift_b) <= EXACT_SUM, 0.0, bound)


def _beyond_tf32(values: Float64) -> Float64:
    """What rounding a value to tf32 may cost: half the distance of its neighbours; nothing where tf32 holds it."""
    xp = namespace_of(values)
    _, exponent = xp.frexp(values)
    quantum = powers_of_two(xp.maximum(exponent, SMALLEST_EXPONENT) - TF32_SIGNIFICANT_BITS)
    return xp.where(values % quantum == 0.0, 0.0, 0.5 * quantum)
