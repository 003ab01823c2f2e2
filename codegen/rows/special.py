"""Rows with NaN and infinities: inputs of the norms' `special` runs, and what becomes of such rows and of such elements
of gamma and beta, as IEEE 754 arithmetic has them.

Of layer_norm a row with one of them is NaN. Of rms_norm one with a NaN is NaN; of one with infinities these are NaN,
and all else is 0 of its sign, before gamma and beta: it is divided by an infinite root.
"""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from codegen.arrays import Array, Float64, namespace_of
from codegen.epilogue_reference import Bounded, added, stored
from codegen.rows.problem import NormProblem
from codegen.special_inputs import NO_NUMBERS, ZEROS, with_special
from codegen.special_values import Special, finite, settled

# The largest numbers.
MOST = {"float32": 2.0**127 * (2.0 - 2.0**-23), "float16": 65504.0, "bfloat16": 2.0**127 * (2.0 - 2.0**-7)}
# Of float16 numbers of about 1 are subnormal when they are so many times smaller.
SUBNORMAL = 2.0**-18
# Of gamma and beta.
OF_VECTORS = 0.1

Numbers = npt.NDArray[np.float64]
Product = Callable[[Bounded, Bounded], Bounded]


def drawn_places(columns: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Half of a row's, one at least, in any order."""
    return rng.permutation(columns)[: (columns + 1) // 2]


def special_rows(p: NormProblem, rng: np.random.Generator) -> Numbers:
    """Normals, of which other rows have a NaN, an infinity, or both of them, or the same infinity at both ends and in
    the middle, or zeros of either sign alone; of float16 some are subnormal."""
    x = rng.normal(0.0, 2.0, (p.rows, 1)) + rng.standard_normal((p.rows, p.columns))
    looked_at = [0, p.columns // 2, p.columns - 1]
    order = rng.permutation(8)
    for row in range(p.rows):
        kind, some = order[row % order.size], drawn_places(p.columns, rng)
        if kind == 1:
            x[row, some[:1]] = np.nan
        elif kind in (2, 3):
            x[row, some[:1]] = np.inf if kind == 2 else -np.inf
        elif kind == 4:
            x[row, some[:2]] = np.inf
            x[row, some[:1]] = -np.inf
        elif kind == 5:
            x[row, looked_at] = rng.choice((-np.inf, np.inf))
        elif kind == 6:
            x[row] = rng.choice(np.array(ZEROS), p.columns)
        elif kind == 7 and p.dtype == "float16":
            x[row] *= SUBNORMAL
    return x


def special_vector(columns: int, rng: np.random.Generator) -> Array:
    """gamma or beta."""
    return with_special(rng.standard_normal(columns), OF_VECTORS, (*NO_NUMBERS, *ZEROS), rng)


def all_finite(x: Float64) -> Array:
    """Of each row."""
    return namespace_of(x).isfinite(x).astype(np.float64).min(1).reshape(-1, 1) == 1.0


def special_norm(
    p: NormProblem, x: Float64, normalised: Bounded, vectors: Mapping[str, Float64], centred: bool, product: Product
) -> Bounded:
    """What is stored. `normalised`: of the rows that are numbers, before gamma and beta, whatever it is of the others;
    `product`: of two numbers with their errors."""
    xp, rows = namespace_of(x), all_finite(x)
    zero = xp.zeros_like(x)
    with np.errstate(invalid="ignore"):
        # An infinite root's inverse is 0.
        spoiled = zero + np.nan if centred else xp.where((x != x).max(1).reshape(-1, 1), np.nan, x * 0.0)
        whole = xp.where(rows, normalised.value, spoiled)
        state = Bounded(finite(whole), xp.where(rows, normalised.error, 0.0))
        certain = ~xp.isfinite(whole) | ~rows
        if "gamma" in vectors:
            gamma = vectors["gamma"][None, :]
            # An infinity times a number that may have either sign.
            unsure = xp.isfinite(whole) & ~xp.isfinite(gamma) & (gamma == gamma) & (state.error > 0.0)
            unsure = unsure & (xp.abs(state.value) <= state.error)
            state, whole = product(state, Bounded(finite(gamma) + zero, zero)), whole * gamma
            state = Bounded(state.value, xp.where(unsure, np.inf, state.error))
        if "beta" in vectors:
            beta = vectors["beta"][None, :]
            state, whole = added(state.value, finite(beta) + zero, state.error), whole + beta
    return settled(Special(state, whole, certain), stored(p.out_dtype, state))
