"""Matmul in float64, and how far fp32 may be from it. Shares nothing with the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from codegen.epilogue_reference import TINY, Bounded, Float64, U, apply_chain
from codegen.operators.matmul.problem import MatmulProblem

# The largest integer up to which fp32 holds every integer: sums of integers below it are exact in any order.
EXACT_SUM = 2.0**24


def reference(
    problem: MatmulProblem, inputs: Mapping[str, npt.NDArray[Any]], exact: bool = False
) -> tuple[Float64, Float64]:
    """(result, bound), both of out's logical shape."""
    a, b = (inputs[name].astype(np.float64) for name in ("a", "b"))
    a = a.swapaxes(-1, -2) if problem.a_transposed else a
    b = b.swapaxes(-1, -2) if problem.b_transposed else b
    sizes = np.matmul(np.abs(a), np.abs(b))
    start = Bounded(np.matmul(a, b), _accumulated(problem.k, a, b, sizes))
    final = apply_chain(problem.epilogue, start, inputs, exact)
    return final.value, final.error


def _accumulated(k: int, a: Float64, b: Float64, sizes: Float64) -> Float64:
    """gamma_k |A||B| for k fused multiply-adds in any order (Higham, 2nd ed., section 3.1 and (3.7)); 0 for exact sums.

    Sums of whole numbers (of one power of two) are exact where none of their parts needs more than 24 bits.

    The last factor covers the float64 reference's own rounding, 2^-29 of the bound.
    """
    gamma = k * U / (1.0 - k * U) if k * U < 1.0 else np.inf
    bound = gamma * sizes * (1.0 + 2.0**-20) + k * TINY
    shift_a, shift_b = _whole_after(a), _whole_after(b)
    if shift_a is None or shift_b is None:
        return np.asarray(bound, dtype=np.float64)
    return np.where(np.ldexp(sizes, shift_a + shift_b) <= EXACT_SUM, 0.0, bound)


def _whole_after(values: Float64) -> int | None:
    """By which power of two to multiply, so that all values are whole numbers; None where 2^16 does not do."""
    for shift in range(17):
        scaled = np.ldexp(values, shift)
        if np.array_equal(scaled, np.rint(scaled)):
            return shift
    return None
