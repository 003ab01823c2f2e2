"""Rings by Python's integers, which never wrap around: sums in two's complement, shifted, and what follows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[Any]
"""An array of Python's integers."""


def each(function: Callable[[int], int], values: Integers) -> Integers:
    return np.vectorize(function, otypes=[object])(values)  # type: ignore[no-any-return]


def wrapped(bits: int) -> Callable[[int], int]:
    """To the number of Z/2^bits in [-2^(bits - 1), 2^(bits - 1))."""
    return lambda x: (x + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


def shift_of(problem: Any) -> Callable[[int], int]:
    """Wrapped, then shifted by the fraction bits."""
    wrap, f = wrapped(int(problem.dtype[3:])), problem.fraction_bits
    half = (1 << f - 1) if f and problem.rounding == "nearest" else 0
    return lambda x: (wrap(x) + half) // (1 << f)


def finished(problem: Any, sums: Integers, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Exact sums as a problem has them in the end. `tensors`: of each node that has one, in a shape that broadcasts."""
    return epilogue_of(problem, each(shift_of(problem), sums), tensors)


def epilogue_of(problem: Any, out: Integers, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    wrap, shifted = wrapped(int(problem.dtype[3:])), shift_of(problem)

    def of_node(node: Any) -> Callable[[int], int]:
        if node.op == "polynomial":
            whole = [int(Fraction(value) * 2**problem.fraction_bits) for value in node.coefficients]

            def polynomial(x: int) -> int:
                total = whole[-1]
                for coefficient in reversed(whole[:-1]):
                    total = wrap(shifted(total * x) + coefficient)
                return total

            return polynomial
        functions: dict[str, Callable[[int], int]] = {
            "relu": lambda x: max(x, 0), "identity": lambda x: x, "square": lambda x: shifted(x * x),
        }  # fmt: skip
        return functions[node.op]

    for node in problem.epilogue:
        if node.op in ("bias", "residual"):
            out = out + tensors[node.op].astype(object)
        elif node.op == "mask":
            out = np.where(tensors["mask"] != 0, out, 0)
        elif node.op == "masked_activation":
            out = each(wrap, out)
            chosen = (each(of_node(function), out) for function in (node.where_set, node.where_clear))
            out = np.where(tensors["mask"] != 0, *chosen)
        else:
            out = each(of_node(node), each(wrap, out))
    return each(wrap, out).astype(problem.dtype)
