"""Inputs of a reduction's tests."""

import math
from collections.abc import Sequence

import numpy as np

from codegen.arrays import SMALLEST_NORMAL
from codegen.dtypes import dtype
from codegen.operator import Array, InputKind, Operand
from codegen.operators.reduce.problem import ReduceProblem
from codegen.special_inputs import NO_NUMBERS, SMALLEST, ZEROS, with_special

# Sums of fp32 are exact up to 2^24; kept a little below, for squares and products of values up to LARGEST.
EXACT_TOTAL, LARGEST = 2**22, 4
# Where a variance of about 1 is lost in E[x²] - μ², but not in the dtype; beyond where no search for an extreme begins.
FAR = {"float32": 4096.0, "float16": 2000.0, "bfloat16": 64.0}
BEYOND = 2000.0
# Of whole numbers that float64, in which the reference adds, holds all of; of those that an epilogue scales exactly.
EXACT_BITS, EPILOGUE_BITS = 52, 20
# Of an output's values how many are no number in `special` inputs.
OF_OUTPUTS = 0.6


def make_inputs(
    problem: ReduceProblem, operands: Sequence[Operand], kind: InputKind, rng: np.random.Generator
) -> dict[str, Array]:
    """`integer`: small whole numbers, so few of them other than 0 that sums of their squares are exact; of int32 large
    ones, whose sums leave 32 bits, of int64 any. `normal`: standard normals, of a variance in half of the outputs far
    from 0, of max and min beyond all others. Some rows of an argmax have NaN, and equal values, some of max and min
    NaN, and some x of relu's gradient. `special`: normals with NaN, infinities and zeros."""
    arrays: dict[str, Array] = {}
    for operand in operands:
        if operand.role != "in":
            continue
        element = dtype(operand.dtype).numpy
        if operand.name == "mask":
            arrays["mask"] = rng.integers(0, 2, operand.shape).astype(element) * np.uint8(rng.integers(1, 256))
        elif operand.name.startswith("mask"):
            arrays[operand.name] = rng.integers(0, 2, operand.shape).astype(element)
        elif operand.dtype == "int64":
            arrays[operand.name] = rng.integers(-(2**63), 2**63 - 1, operand.shape, endpoint=True)
        elif operand.dtype == "int32":
            arrays[operand.name] = _whole_numbers(problem, operand.shape, rng)
        elif kind == "integer":
            arrays[operand.name] = _small(problem, operand, rng).astype(element)
        else:
            arrays[operand.name] = rng.standard_normal(operand.shape, dtype=np.float32).astype(element)
        if operand.name == "x" and operand.dtype not in ("int32", "int64"):
            if problem.fn == "argmax":
                _put_nans(arrays["x"], rng)
            elif kind == "normal":
                arrays["x"] = _unusual(problem, arrays["x"], rng)
        if kind == "special":
            arrays[operand.name] = _special(problem, operand, arrays[operand.name], rng)
    return arrays


def _special(problem: ReduceProblem, operand: Operand, values: Array, rng: np.random.Generator) -> Array:
    """With what is no number, in about half of the outputs, and zeros; of the function of one array some outputs have
    one kind of value alone."""
    if values.dtype.kind in "iub":
        return values
    if operand.name not in ("dy", "x"):
        return with_special(values, 0.1, (*NO_NUMBERS, *ZEROS), rng)
    few = min(0.2, OF_OUTPUTS / max(1, problem.count))
    if operand.name == "x" and problem.two_inputs:
        return with_special(values, 0.2, (*NO_NUMBERS, *ZEROS) if problem.map == "relu_grad" else ZEROS, rng)
    values = with_special(values, 0.1, (*ZEROS, *_smallest(problem)), rng)
    values = with_special(values, few, NO_NUMBERS, rng)
    if problem.two_inputs or problem.fn == "variance" or problem.outputs < 3:
        return values
    # What an extreme is sought from, and zeros that are all negative, are in one output each; of several outputs
    # either infinity is.
    kinds = np.array([np.inf if problem.fn == "min" else -np.inf, -0.0, -np.inf, np.inf, 0.0], values.dtype)
    order, alone = rng.permutation(problem.outputs), rng.choice(kinds, problem.outputs)
    chosen = rng.random(problem.outputs) < 0.1
    certain = 2 if problem.outputs < 8 else 4
    alone[order[:certain]], chosen[order[:certain]] = kinds[:certain], True
    shape = tuple(1 if axis in problem.axes else extent for axis, extent in enumerate(values.shape))
    return np.where(chosen.reshape(shape), alone.reshape(shape), values)


def _smallest(problem: ReduceProblem) -> tuple[float, ...]:
    """None where its place, or the sign of its product, would be another's if it counted as 0 (`codegen.arrays`)."""
    smallest = SMALLEST[problem.dtype]
    decides = problem.fn == "argmax" or problem.two_inputs
    return () if decides and smallest < SMALLEST_NORMAL else (smallest,)


def _small(problem: ReduceProblem, operand: Operand, rng: np.random.Generator) -> Array:
    shape = operand.shape
    if problem.fn == "logsumexp" and operand.name in ("dy", "x"):
        # Mapped values from -LARGEST to LARGEST: 24 bits hold sums of 2 to the power of their distances.
        if operand.name == "x" and problem.two_inputs:
            return rng.integers(0, 2, shape, dtype=np.int32)
        return rng.integers(-2, 3, shape, dtype=np.int32) if problem.map == "square" else rng.integers(-4, 4, shape)
    values = rng.integers(-LARGEST, LARGEST, shape, dtype=np.int32)
    terms = EXACT_TOTAL // LARGEST**4  # a product or a square may be squared once more
    if problem.fn not in ("max", "min", "argmax") and problem.count > terms:
        values *= rng.random(shape, dtype=np.float32) < terms / problem.count
    return values


def _whole_numbers(problem: ReduceProblem, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    bits = 30
    if problem.fn in ("sum", "mean", "sum_of_squares"):
        left = EXACT_BITS - problem.count.bit_length()
        bits = min(bits, left // 2 if problem.fn == "sum_of_squares" else left)
    if problem.epilogue:  # goes on in fp32
        left = max(2, EPILOGUE_BITS - problem.count.bit_length())
        bits = min(bits, left // 2 if problem.fn == "sum_of_squares" else left)
    if problem.fn in ("variance", "logsumexp"):
        bits = 2
    return rng.integers(-(2**bits), 2**bits, shape, dtype=np.int32)


def _unusual(problem: ReduceProblem, x: Array, rng: np.random.Generator) -> Array:
    """Normals, among them what tells a stable algorithm from another, and what the operator's page promises something
    about."""
    flat = x.reshape(-1)
    if problem.map == "relu_grad":
        flat[rng.integers(0, flat.size, max(1, flat.size // 50))] = np.nan
    if problem.map != "identity" or flat.size == 0:
        return x
    shape = tuple(1 if axis in problem.axes else extent for axis, extent in enumerate(x.shape))
    chosen = np.arange(math.prod(shape)).reshape(shape) % 2 == 0
    if problem.fn == "variance":
        return np.where(chosen, x.astype(np.float32) + FAR[problem.dtype], x).astype(x.dtype)
    if problem.fn in ("max", "min"):
        beyond = -BEYOND if problem.fn == "max" else BEYOND
        x = np.where(chosen, x.astype(np.float32) + beyond, x).astype(x.dtype)
        if not problem.epilogue:
            x.reshape(-1)[rng.integers(0, x.size, max(1, math.prod(shape) // 4))] = np.nan
    return x


def _put_nans(values: Array, rng: np.random.Generator) -> None:
    """One element in some of them, wherever it lies."""
    flat = values.reshape(-1)
    if rng.random() < 0.5:
        flat[rng.integers(0, flat.size, max(1, flat.size // 200))] = np.nan
