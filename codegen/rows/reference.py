"""The norms in float64, how far a kernel may be from them, and inputs whose results are exact.

With u = 2^-24 and gamma(n) = n u / (1 - n u), a sum of n numbers in any order is off by gamma(n - 1) of the sum of
their sizes at most (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 4.2), of random numbers
by a multiple of the root of n (`summed_roundings`). Two algorithms are allowed for: the mean and then the squares of
distances from it, and sums of distances from an origin and of their squares, which loses as much as the origin is far
from the mean: an element of the row, or where that is an outlier the mean that was found from it. The bound is the
larger one. Where fp32 holds every sum of a row, whatever its order, nothing is lost.
"""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from codegen.arrays import EXACT_SUM, Array, Float64, as_float64, namespace_of, whole_after
from codegen.dtypes import dtype
from codegen.epilogue_reference import TINY, Bounded, U, added, gamma_of, stored, summed_roundings
from codegen.operator import InputKind
from codegen.rows.problem import NormProblem, RowProblem
from codegen.rows.special import all_finite, special_norm, special_rows, special_vector

# Of beta so many are so large that every other whole number lies halfway between two outputs.
OF_TIES, TIES = 0.25, {"float32": 1.0, "float16": 2.0**11, "bfloat16": 2.0**8}
# Above so many elements rows are repeated.
LARGEST_RANDOM = 2**22
# Integers of a row of exact statistics are units times a power of two, the first of these with which fp32 rounds the
# variance of 4 units² and epsilon to a power of four.
UNITS = tuple(2.0**power for power in range(-8, 14))
# Of `online`: squares of the origin's distance from the mean, in variances, from which on rows are surely read again
# (twice `furthest` of layer_norm/kernel.cuh).
SURELY_AGAIN = 16.0
OUTLIERS = 3000.0
# Whole units that the mean of a row may be away from 0: what each dtype has of them.
LARGEST_MEAN = {"float32": 8192, "float16": 2040, "bfloat16": 250}


def make_inputs(
    problem: NormProblem, kind: InputKind, rng: np.random.Generator, *, centred: bool
) -> dict[str, npt.NDArray[np.generic]]:
    """`integer`: rows with exact mean squares, `centred`: about their mean, which is then a whole number of units.
    `normal`: normals of another mean and another spread in each row; in every third the spread is about the root of
    epsilon, and the mean 0, so that epsilon counts; centred, in every third the first and the last are OUTLIERS spreads
    away: then no element of the three that are looked at is near the mean. `special`: with NaN and infinities
    (`codegen/rows/special.py`), in gamma and beta, too. Integers lie halfway between two outputs of 16 bits, too."""
    rows, columns = random_shape(problem)
    if kind == "special":
        x = special_rows(problem, rng)
    elif kind == "integer":
        unit = unit_of(problem.epsilon)
        x = _exact_rows(rows, columns, unit, largest_mean(problem, unit) if centred else 0, rng, centred=centred)
    else:
        centres, spreads = rng.normal(0.0, 2.0, (rows, 1)), rng.uniform(0.25, 4.0, (rows, 1))
        if problem.epsilon > 0.0:
            centres[::3], spreads[::3] = 0.0, spreads[::3] * math.sqrt(problem.epsilon)
        x = centres + spreads * rng.standard_normal((rows, columns), dtype=np.float32)
        if centred:
            x[1::3, [0, -1]] = (centres + OUTLIERS * spreads)[1::3]
    made = {"x": repeated(problem, x)}
    for name in problem.vectors:
        if kind == "special":
            values = special_vector(columns, rng)
        else:
            values = rng.integers(-4, 4, columns, endpoint=True) if kind == "integer" else rng.standard_normal(columns)
            if kind == "integer" and name == "beta":
                values = np.where(rng.random(columns) < OF_TIES, TIES[problem.out_dtype] * np.sign(values), values)
        made[name] = values.astype(made["x"].dtype)
    return made


def repeated(problem: RowProblem, rows: Array) -> Array:
    """x with the random rows repeated."""
    return np.resize(rows.astype(dtype(problem.dtype).numpy), (problem.rows, problem.columns))


def random_shape(problem: RowProblem) -> tuple[int, int]:
    """How many rows are random, one at least, and how long they are."""
    return min(problem.rows, max(1, LARGEST_RANDOM // problem.columns)), problem.columns


def unit_of(epsilon: float) -> float:
    """The unit of exact rows; 0 where there is none: then all elements of a row are equal."""
    for unit in UNITS:
        total = float(np.float32(np.float32(4.0 * unit * unit) + np.float32(epsilon)))
        if math.frexp(total)[0] == 0.5 and math.frexp(total)[1] % 2 == 1:
            return unit
    return 0.0


def largest_mean(problem: NormProblem, unit: float) -> int:
    """Whole units: as many as the dtype has beside the row's own, and fp32 adds without rounding."""
    # In units what float16 has, and what `whole_after` still takes for a whole number.
    most = (65504.0 if problem.dtype == "float16" else 2.0**21) / (unit or 1.0) - 8.0
    return max(0, min(LARGEST_MEAN[problem.dtype], int(most), 2**24 // problem.columns - 8))


def _exact_rows(
    rows: int, columns: int, unit: float, furthest: int, rng: np.random.Generator, *, centred: bool
) -> npt.NDArray[np.float64]:
    """The mean of the squares is 4 units² in each row: of pairs 2, -2, of fives 4, -1, -1, -1, -1 and, where the mean
    need not be 0, of fours 4, 0, 0, 0. Centred rows of one or three elements are constant: they have no such values."""
    x = np.zeros((rows, columns))
    for row in range(rows):
        if centred:
            fives = columns % 2 + 2 * int(rng.integers(0, 3))
            if 5 * fives > columns:
                fives = columns % 2
            values = [4.0, -1.0, -1.0, -1.0, -1.0] * fives
            values += [2.0, -2.0] * ((columns - len(values)) // 2)
            if len(values) != columns:
                values = [0.0] * columns
            # Every second row is as far away as can be: E[x²] - μ² then has nothing left of the variance.
            away = furthest if row % 2 == 0 else int(rng.integers(0, min(furthest, 4), endpoint=True))
            shift = float(rng.choice((-away, away))) * (unit or 1.0)
        else:
            values = [4.0, 0.0, 0.0, 0.0] * int(rng.integers(0, 3))
            values = (values if len(values) <= columns else []) + [2.0] * columns
            values = list(rng.choice((-1.0, 1.0), columns) * values[:columns])
            shift = 0.0
        x[row] = rng.permutation(values) * unit + shift
    return x


def reference(problem: NormProblem, inputs: Mapping[str, Array], *, centred: bool) -> tuple[Float64, Float64]:
    """(result, bound), both of out's logical shape, in the inputs' namespace."""
    p = problem
    x, vectors = as_float64(inputs["x"], p.dtype), {name: as_float64(inputs[name], p.dtype) for name in p.vectors}
    xp = namespace_of(x)
    if not all(bool(xp.all(xp.isfinite(each))) for each in (x, *vectors.values())):
        state = _normalised(p, xp.where(all_finite(x), x, 0.0), centred=centred)
        final = special_norm(p, x, state, vectors, centred, _product)
        return final.value, final.error
    state, zero = _normalised(p, x, centred=centred), xp.zeros_like(x)
    if p.scale:
        state = _product(state, Bounded(vectors["gamma"][None, :] + zero, zero))
    if p.shift:
        state = added(state.value, vectors["beta"][None, :] + zero, state.error)
    final = stored(p.out_dtype, state)
    return final.value, final.error


def _normalised(p: NormProblem, x: Float64, *, centred: bool) -> Bounded:
    """Before gamma and beta."""
    xp = namespace_of(x)
    mean, square = statistics(x) if centred else (Bounded(xp.zeros_like(x[:, :1]), xp.zeros_like(x[:, :1])), squares(x))
    factor = _inverse_root(added(square.value, float(np.float32(p.epsilon)), square.error))
    return _product(added(x, 0.0 - mean.value, mean.error + xp.zeros_like(x)), factor)


def squares(x: Float64) -> Bounded:
    """The mean of the squares of each row."""
    columns = x.shape[1]
    sums = _row_sums(x * x)
    mean = sums / columns
    shift, xp = whole_after(x), namespace_of(x)
    error = gamma_of(summed_roundings(columns) + 3.0) * mean + TINY
    if shift is None:
        return Bounded(mean, error)
    exact = (sums * 4.0**shift <= EXACT_SUM) & _held(mean, sums, columns)
    return Bounded(mean, xp.where(exact, 0.0, error))


def statistics(x: Float64) -> tuple[Bounded, Bounded]:
    """Mean and variance of each row."""
    columns, xp = x.shape[1], namespace_of(x)
    sums = _row_sums(x)
    mean = sums / columns
    distances = x - mean
    all_squares = _row_sums(distances * distances)
    variance = all_squares / columns
    # From the mean: its error shifts every distance.
    size = _row_sums(xp.abs(x)) / columns
    of_mean = gamma_of(summed_roundings(columns) + 1.0) * size
    of_variance = gamma_of(summed_roundings(columns) + 4.0) * (variance + of_mean * of_mean) + of_mean * of_mean
    # From the middle one of three elements, and from the mean that is found so.
    origin = _middle(x[:, :1], x[:, columns // 2 : columns // 2 + 1], x[:, columns - 1 : columns])
    shifted = x - origin
    squared = _row_sums(shifted * shifted)
    apart, around = mean - origin, squared / columns
    first = _about(xp.abs(apart), _row_sums(xp.abs(shifted)) / columns, around, columns)
    first_mean = first[0] + U * (xp.abs(mean) + first[0])
    second_around = variance + first_mean * first_mean
    second = _about(first_mean, xp.sqrt(second_around), second_around, columns)
    near = apart * apart <= SURELY_AGAIN * variance
    of_apart, of_variance_apart = (
        xp.where(near, xp.maximum(once, twice), twice) for once, twice in zip(first, second, strict=True)
    )
    of_mean = xp.maximum(of_mean, of_apart + U * (xp.abs(mean) + of_apart)) + TINY
    of_variance = xp.maximum(of_variance, of_variance_apart) + TINY
    shifts = whole_after(x), whole_after(mean)
    if shifts[0] is None or shifts[1] is None:
        return Bounded(mean, of_mean), Bounded(variance, of_variance)
    shift = max(shifts[0], shifts[1])
    largest = xp.maximum(xp.maximum(size, around * 2.0**shift), variance * 2.0**shift) * (columns * 2.0**shift)
    exact = (
        (largest <= EXACT_SUM)
        & _held(mean, sums, columns)
        & _held(variance, all_squares, columns)
        & _held(around, squared, columns)
    )
    return Bounded(mean, xp.where(exact, 0.0, of_mean)), Bounded(variance, xp.where(exact, 0.0, of_variance))


def _about(apart: Float64, size: Float64, around: Float64, columns: int) -> tuple[Float64, Float64]:
    """How far the mean's distance from an origin and the variance may be off, with that distance, the mean size of the
    elements' distances and that of their squares."""
    of_apart = gamma_of(summed_roundings(columns) + 3.0) * size
    of_around = gamma_of(summed_roundings(columns) + 6.0) * around
    return of_apart, of_around + (2.0 * apart + of_apart) * of_apart + 3.0 * U * around


def _row_sums(x: Float64) -> Float64:
    """Of shape (rows, 1)."""
    xp = namespace_of(x)
    ones = xp.zeros((x.shape[1], 1)) + 1.0
    return xp.matmul(x, ones)


def _middle(a: Float64, b: Float64, c: Float64) -> Float64:
    xp = namespace_of(a)
    low, high = xp.where(a < b, a, b), xp.where(a < b, b, a)
    return xp.where(c < low, low, xp.where(c < high, c, high))


def _held(mean: Float64, sums: Float64, columns: int) -> Array:
    """Whether fp32 has the quotient of a sum and the number of columns."""
    return (mean * columns == sums) & (mean.astype(np.float32).astype(np.float64) == mean) & (columns < EXACT_SUM)


def _inverse_root(at: Bounded) -> Bounded:
    """1 / sqrt of it, by a root and a division that round once each."""
    xp = namespace_of(at.value)
    with np.errstate(divide="ignore", invalid="ignore"):
        value, lowest = 1.0 / xp.sqrt(at.value), at.value - at.error
        far = xp.where(lowest > 0.0, 1.0 / xp.sqrt(xp.where(lowest > 0.0, lowest, 1.0)), np.inf)
        error = (far - value) + 2.0 * U * far * (1.0 + U)
        held = value.astype(np.float32).astype(np.float64) == value
    exact = (at.error == 0.0) & held & (value * value * at.value == 1.0)
    return Bounded(xp.where(lowest > 0.0, value, 0.0), xp.where(exact, 0.0, error))


def _product(left: Bounded, other: Bounded) -> Bounded:
    xp = namespace_of(left.value)
    with np.errstate(invalid="ignore"):
        error = xp.abs(left.value) * other.error + xp.abs(other.value) * left.error + left.error * other.error
        error = xp.where(error == error, error, np.inf)
    product = left.value * other.value
    return added(product, xp.zeros_like(product), error)
