"""Softmax along the last axis, with the greatest element of the row subtracted first."""

from collections.abc import Mapping
from importlib.resources import files as packaged_files
from typing import Literal

import numpy as np

from codegen.arrays import as_float64, namespace_of
from codegen.epilogue_reference import UNDERFLOW, Bounded, U, gamma_of, stored_or_none
from codegen.operator import Array, Float64, InputKind
from codegen.problem import Problem
from codegen.rows.operator import RowOperator
from codegen.rows.problem import RowProblem
from codegen.rows.reference import random_shape, repeated
from codegen.rows.special import MOST, drawn_places
from codegen.special_inputs import SMALLEST, ZEROS

# e^x is 0 in fp32 from here on: below half of its smallest number, 2^-150.
NOTHING = -104.0
# How far below the greatest integers lie, or infinitely far: representable in every type, whatever the greatest is.
FAR = (-128.0, -256.0, -1024.0, -np.inf)
# Of the rows' centres: where nothing is subtracted, e^x is infinite or all weights are 0, which no rounding hides.
SHIFTS = (400.0, 0.0, -400.0)
# Of a row's elements so many lie up to so far below the others: their weights are small numbers, and not 0.
LOW, DEEPEST = 0.125, 100.0
# Of the last rows, but for the first two.
SPECIAL = (np.nan, np.inf, -np.inf)
# Roundings of a term for each merge of two sums: two exponentials of at most 2 ulp, two products, an addition.
ROUNDINGS = 11.0


class SoftmaxProblem(RowProblem):
    """out = e^x / (the sum of e^x over the row). A row with a NaN or +infinity, or of -infinity alone, is NaN."""

    operator: Literal["softmax"] = "softmax"


class Softmax(RowOperator):
    """See SoftmaxProblem."""

    name = "softmax"
    problem_type = SoftmaxProblem
    folder = packaged_files("codegen.operators.softmax")
    flops = 24  # an exponential, once or twice, a comparison, an addition and a product

    def multiplications(self, problem: Problem) -> int:
        """With the reciprocal of the sum."""
        p = self.own(problem)
        return int(p.rows * p.columns)

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        """`integer`: 2^k equal elements in a row, all others so far below that their weight is 0. `normal`: normals of
        another mean and another spread in each row, two of three far above or below 0, with some elements far below the
        rest; the last rows have a NaN, +infinity, or -infinity alone. `special`: see `_special_rows`."""
        p = self.own(problem)
        rows, columns = random_shape(p)
        if kind == "special":
            return {"x": repeated(p, _special_rows(p, rng))}
        if kind == "normal":
            centres, spreads = rng.normal(0.0, 4.0, (rows, 1)), rng.uniform(0.5, 6.0, (rows, 1))
            far = np.resize(SHIFTS, rows)[:, None]
            x = centres + far + spreads * rng.standard_normal((rows, columns), dtype=np.float32)
            x -= np.where(rng.random(x.shape) < LOW, rng.uniform(0.0, DEEPEST, x.shape), 0.0)
            for row, special in zip(range(rows - 1, 1, -1), SPECIAL, strict=False):
                x[row, rng.integers(0, columns)] = special
                if special == -np.inf:
                    x[row] = special
            return {"x": repeated(p, x)}
        x = rng.choice(np.array(FAR), (rows, columns))
        for row in range(rows):
            equal = 1 << int(rng.integers(0, columns.bit_length()))
            x[row, rng.choice(columns, equal, replace=False)] = 0.0
        return {"x": repeated(p, x + rng.integers(-16, 16, (rows, 1), endpoint=True))}

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        """In float64, and a bound. A difference from the greatest is rounded once, or in steps that add up to it where
        the greatest of the elements so far grows; what that changes of e^x is the difference's own rounding. Sums are
        of positive numbers (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 4.2). Rows whose
        elements are all the greatest or vanish have exact sums."""
        p = self.own(problem)
        x = as_float64(inputs["x"], p.dtype)
        xp = namespace_of(x)
        with np.errstate(invalid="ignore"):  # of infinities NaN
            below = x - _greatest(x)
        vanishes = below < NOTHING
        below = xp.where(vanishes, 0.0, below)
        power = xp.where(vanishes, 0.0, xp.exp(below))
        ones = xp.zeros((p.columns, 1)) + 1.0
        total = xp.matmul(power, ones)
        lost = xp.matmul(power * xp.abs(below), ones) * U + gamma_of(ROUNDINGS * (p.columns + 16.0)) * total
        share = power / total
        error = share * (lost / total + (8.0 + xp.abs(below)) * U) * (1.0 + 2.0**-10) + UNDERFLOW
        simple = (xp.matmul((below == 0.0).astype(np.float64), ones) == p.columns) & (total < 2.0**24)
        once = share.astype(np.float32).astype(np.float64)
        zero = xp.zeros_like(x)
        final = stored_or_none(p.out_dtype, Bounded(xp.where(simple, once, share), xp.where(simple, zero, error)))
        return final.value, final.error


def _special_rows(p: SoftmaxProblem, rng: np.random.Generator) -> Array:
    """Normals, of which other rows have a NaN, +infinity beside -infinities, these in half of their places, alone, or
    everywhere but once, the largest numbers of either sign, or zeros and, of float16, subnormals alone."""
    x = 3.0 * rng.standard_normal((p.rows, p.columns))
    order = rng.permutation(8)
    for row in range(p.rows):
        kind, some = order[row % order.size], drawn_places(p.columns, rng)
        if kind == 1:
            x[row, some[:1]] = np.nan
        elif kind == 2:
            x[row, some] = -np.inf
            x[row, some[:1]] = np.inf
        elif kind == 3:
            x[row, some[1:]] = -np.inf
        elif kind == 4:
            x[row] = -np.inf
        elif kind == 5:
            x[row] = np.where(np.arange(p.columns) == some[0], x[row], -np.inf)
        elif kind == 6:
            x[row] = rng.choice((-MOST[p.dtype], MOST[p.dtype]), p.columns)
        elif kind == 7:
            smallest = () if p.dtype != "float16" else (SMALLEST["float16"], -SMALLEST["float16"])
            x[row] = rng.choice(np.array((*ZEROS, *smallest)), p.columns)
    return x


def _greatest(x: Float64) -> Float64:
    """Of each row, in shape (rows, 1): of its two halves, and of those the halves. (What is used of namespaces has no
    maximum along an axis.)"""
    xp = namespace_of(x)
    while (columns := x.shape[1]) > 1:
        half = columns // 2
        greater = xp.maximum(x[:, :half], x[:, half : 2 * half])
        if columns % 2:
            greater[:, :1] = xp.maximum(greater[:, :1], x[:, columns - 1 :])
        x = greater
    return x


OPERATOR = Softmax()
