"""Inputs of the tests of matmuls over rings.

`exact_once` decides every bit, whatever wraps around: its integers are of the ring's whole range, among them the ends
of the range, -1 (every limb 255), single bits and single limbs, so that every product of limbs and every carry counts;
its `normal` ones are fixed-point numbers of the usual size. Under `tolerance` nothing may wrap around: Σ|a||b| stays
below 2^(b-1). Its integers are multiples of 2^f in A, so that truncation loses nothing wherever it is done.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from codegen.dtypes import dtype
from codegen.fixed_point import Shifted, Tolerance, bits_of
from codegen.operator import InputKind, Operand
from codegen.operators.matmul.problem import MatmulProblem

# Of the elements, one in so many is a special one.
SPECIAL_EVERY = 4
# Of biases and residuals under `tolerance`: added, they are far from wrapping around.
SMALL = 1000
# Above so many elements a block of random ones is repeated; prime, so that rows and columns differ.
LARGEST_RANDOM, BLOCK = 2**22, 3_999_971


def draw_inputs(
    problem: MatmulProblem, operands: Sequence[Operand], kind: InputKind, rng: np.random.Generator
) -> tuple[dict[str, npt.NDArray[Any]], int]:
    """Arrays of the operands' dtypes and logical shapes, and how many products a sum may have: so many that it does not
    wrap around, where it must not."""
    made: dict[str, npt.NDArray[Any]] = {}
    limits = _limits(problem, kind)
    for operand in operands:
        if operand.role == "out":
            continue
        # What a stride of 0 repeats is generated once.
        shape = tuple(extent if stride else 1 for extent, stride in zip(operand.shape, operand.strides, strict=True))
        count = math.prod(shape)
        drawn = _draw(problem, operand, BLOCK if count > LARGEST_RANDOM else count, kind, limits, rng)
        made[operand.name] = np.broadcast_to(np.resize(drawn, shape), operand.shape)
    if not isinstance(problem.truncation, Tolerance):
        return made, problem.k
    # Even the smallest products may be too many for the ring.
    a, b = (int(np.abs(made[name].astype(np.float64)).max()) for name in "ab")
    return made, min(problem.k, (2 ** (bits_of(problem.dtype) - 1) - 1) // max(1, a * b))


def _draw(
    problem: MatmulProblem,
    operand: Operand,
    count: int,
    kind: InputKind,
    limits: dict[str, tuple[int, int]],
    rng: np.random.Generator,
) -> npt.NDArray[Any]:
    element = dtype(operand.dtype).numpy
    drawn: npt.NDArray[Any]
    if operand.dtype == "uint8":
        drawn = rng.choice(np.array([0, 0, 1, 2, 255], dtype=np.uint8), size=count)
    elif operand.name.startswith("mask"):  # words, bits behind the last output included
        drawn = rng.integers(-(2**31), 2**31 - 1, size=count, dtype=np.int32, endpoint=True)
    elif isinstance(problem.truncation, Tolerance):
        limit, unit = limits.get(operand.name, (SMALL, 1))
        drawn = rng.integers(-limit, limit, size=count, endpoint=True) * unit
    else:
        drawn = ring_numbers(problem, count, kind, rng)
    return drawn.astype(element)


def ring_numbers(problem: Shifted, count: int, kind: InputKind, rng: np.random.Generator) -> npt.NDArray[Any]:
    """`integer`: of the ring's whole range; `normal`: fixed-point numbers of the usual size."""
    if kind == "normal":
        usual: npt.NDArray[Any] = np.rint(rng.standard_normal(count) * 2.0 ** (problem.fraction_bits / 2 + 4))
        return usual
    bits = bits_of(problem.dtype)
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    values = rng.integers(least, most, size=count, dtype=np.int64, endpoint=True)
    limbs = [(byte << 8 * limb) for limb in range(bits // 8 - 1) for byte in (1, 128, 255)]
    special = np.array([least, least + 1, most, most - 1, -1, 0, 1, *limbs, *(-limb for limb in limbs)], np.int64)
    chosen = rng.integers(0, SPECIAL_EVERY, size=count) == 0
    values[chosen] = rng.choice(special, size=int(chosen.sum()))
    return values


def _limits(problem: MatmulProblem, kind: InputKind) -> dict[str, tuple[int, int]]:
    """Under `tolerance`: of A and of B the largest magnitude, and what they are multiples of."""
    bits, shift = bits_of(problem.dtype), problem.fraction_bits
    unit = 2**shift if kind == "integer" else 1
    product = max(1, (2 ** (bits - 1) - 1) // unit // problem.k)
    b = max(1, math.isqrt(product))
    return {"a": (max(1, product // b), unit), "b": (b, 1)}
