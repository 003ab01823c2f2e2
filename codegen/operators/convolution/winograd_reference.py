"""How far Winograd may be from the convolution, computed beside the float64 reference.

With V = B^T d B of a tile, U = G g G^T of a filter and S the sums of |V| |U| over the channels, place by place, the
kernel's steps and what each may lose (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition: (3.2) for
chains of roundings, gamma(n) = n u / (1 - n u); section 3.5 for products of matrices), u = 2^-24:

- V and U by chains of fp32 operations: at most gamma(PASSES) times the same transform of |d| and |g| with |B| and |G|;
- V and U as operands: half of the distance between neighbours of the type; what each has then is off by dV, dU;
- sums of (|V| + dV)(|U| + dU): beyond |V| |U| what that product is larger, and the accumulation's gamma(k), four times
  on tensor cores, as for matmul (`codegen/operators/matmul/reference.py`);
- the inverse: |A^T| E |A| of the errors E of the sums, and gamma(PASSES) |A^T| S |A| of its own chains.

Transforms of whole numbers (of one power of two) that fp32 and the type hold are exact, and so is what follows where no
part needs more than 24 bits: there the bound is 0. That of F(4 x 4) is for filters of multiples of 9: its transform
divides by 576, which 24 bits give back where the quotient has few (the nearest fp32 to 1 / 576 is off by 2^-27).
"""

from dataclasses import dataclass

import numpy as np

from codegen.alignment import needs_cuda_cores
from codegen.arrays import EXACT_SUM, Array, Float64, namespace_of, powers_of_two, whole_after
from codegen.epilogue_reference import TINY, gamma_of
from codegen.operators.convolution.problem import WINOGRAD, AllowsWinograd

# B^T, 2 G or 24 G, and A^T: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016, sections
# 4.1 and 4.3.
IMAGE = {
    2: ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1)),
    4: (
        (4, 0, -5, 0, 1, 0), (0, -4, -4, 1, 1, 0), (0, 4, -4, -1, 1, 0), (0, -2, -1, 2, 1, 0), (0, 2, -1, -2, 1, 0),
        (0, 4, 0, -5, 0, 1),
    ),
}  # fmt: skip
FILTERS = {
    2: ((2, 0, 0), (1, 1, 1), (1, -1, 1), (0, 0, 2)),
    4: ((6, 0, 0), (-4, -4, -4), (-4, 4, -4), (1, 2, 4), (1, -2, 4), (0, 0, 24)),
}
FILTER_SCALE = {2: 2, 4: 24}
INVERSE = {
    2: ((1, 1, 1, 0), (0, 1, -1, -1)),
    4: ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
}
# Roundings of one value in both passes of a transform, no more than: of the image 2 x 1 and 2 x 3, of the filters 2 x 2
# and 2 x 2 with the scale and its own rounding, of the inverse 2 x 2 and 2 x 4.
PASSES = 8
# Of fp16 the image's values are divided by this, so that none overflows; a power of two.
GROWTH = {2: 4.0, 4: 128.0}
# Significant bits, and the exponent (as frexp has it) of the smallest normal number.
OPERANDS = {"float16": (11, -13), "bfloat16": (8, -125), "tf32": (11, -125), "float32": (24, -125)}


def bound(problem: AllowsWinograd, x: Float64, w: Float64) -> Float64:
    """Of every output, n, p, q, k, the larger of what the forms that the problem allows may be off. x is n, h, w, c; w
    is k, r, s, c. At least one form is allowed."""
    bounds = [_bound_of(problem, outputs, x, w) for outputs in WINOGRAD[problem.winograd]]
    largest = bounds[0]
    for other in bounds[1:]:
        largest = namespace_of(x).maximum(largest, other)
    return largest


def reached(problem: AllowsWinograd, marked: Array) -> Array:
    """The outputs, n, p, q, k, of tiles that one of the marked elements is in, in a form that the problem allows.
    `marked`: n, h, w, c."""
    p, xp = problem, namespace_of(marked)
    result = xp.zeros((p.n, p.p, p.q, p.k)) != 0.0
    for outputs in WINOGRAD[p.winograd]:
        down, across = -(-p.p // outputs), -(-p.q // outputs)
        some = xp.zeros((p.n * down * across, 1)) != 0.0
        for row in _in_tiles(p, outputs, marked.astype(np.float64)):
            for values in row:
                some = some | (values.max(1).reshape(-1, 1) > 0.0)
        tiles = some.reshape(p.n, down, 1, across, 1, 1)
        whole = xp.broadcast_to(tiles, (p.n, down, outputs, across, outputs, p.k))
        result = result | whole.reshape(p.n, down * outputs, across * outputs, p.k)[:, : p.p, : p.q]
    return result


def _bound_of(problem: AllowsWinograd, outputs: int, x: Float64, w: Float64) -> Float64:
    p, xp, edge = problem, namespace_of(x), outputs + 2
    down, across = -(-p.p // outputs), -(-p.q // outputs)
    on_cuda_cores = needs_cuda_cores(p.dtype, p.allow_tf32)
    of_sums, of_passes = gamma_of(p.c * (1.0 if on_cuda_cores else 4.0)), gamma_of(PASSES)
    growth = GROWTH[outputs] if p.dtype == "float16" else 1.0
    element = "tf32" if p.allow_tf32 else p.dtype
    image = _Operand(element, _in_tiles(p, outputs, x), IMAGE[outputs], whole_after(x), growth)
    filters = _Operand(element, _by_taps(w), FILTERS[outputs], whole_after(w), divided=FILTER_SCALE[outputs] ** 2)
    lost, sizes = (_Outputs(xp.zeros((p.n * down * across, p.k)), INVERSE[outputs]) for _ in range(2))
    whole: int | None = 0
    for row in range(edge):
        for column in range(edge):
            v, off_v = image.place(row, column, of_passes)
            u, off_u = filters.place(row, column, of_passes)
            most = xp.matmul(v + off_v, (u + off_u).swapaxes(-1, -2))
            off = (1.0 + of_sums) * most - xp.matmul(v, u.swapaxes(-1, -2)) + growth * p.c * TINY
            lost.add(row, column, off)
            sizes.add(row, column, most)
            whole = None if whole is None else _whole_sums(whole, (v, off_v), (u, off_u))
    bounds = xp.zeros((p.n, down, outputs, across, outputs, p.k))
    for a in range(outputs):
        for b in range(outputs):
            size = sizes.sums[a][b]
            bound = (lost.sums[a][b] + of_passes * (size + lost.sums[a][b])) * (1.0 + 2.0**-20)
            if whole is not None:
                bound = xp.where(size * 2.0**whole <= EXACT_SUM, 0.0, bound)
            bounds[:, :, a : a + 1, :, b : b + 1, :] = bound.reshape(p.n, down, 1, across, 1, p.k)
    whole_tiles = bounds.reshape(p.n, down * outputs, across * outputs, p.k)
    result: Float64 = whole_tiles[:, : p.p, : p.q]
    return result


def _whole_sums(so_far: int, *operands: tuple[Float64, Float64]) -> int | None:
    """By which power of two all sums become whole, those of this place too; None where they are not exact."""
    shifts = [None if bool(off.any()) else whole_after(values) for values, off in operands]
    return None if None in shifts else max(so_far, sum(shift for shift in shifts if shift is not None))


class _Outputs:
    """|A^T| M |A| of each tile, place by place."""

    def __init__(self, zeros: Float64, inverse: tuple[tuple[int, ...], ...]) -> None:
        self.inverse = inverse
        self.sums = [[zeros for _ in inverse] for _ in inverse]

    def add(self, row: int, column: int, values: Float64) -> None:
        for a, first in enumerate(self.inverse):
            for b, second in enumerate(self.inverse):
                if factor := abs(first[row] * second[column]):
                    self.sums[a][b] = self.sums[a][b] + float(factor) * values


def _in_tiles(problem: AllowsWinograd, outputs: int, x: Float64) -> list[list[Float64]]:
    """By row and column of a tile: tiles, channels."""
    p, xp, edge = problem, namespace_of(x), outputs + 2
    down, across = -(-p.p // outputs), -(-p.q // outputs)
    rows, columns = down * outputs + 2, across * outputs + 2
    (top, left), padded = p.corner, xp.zeros((p.n, max(rows, p.padded[0]), max(columns, p.padded[1]), p.c))
    padded[:, top : top + p.h, left : left + p.w, :] = x
    return [
        [
            padded[:, i : i + down * outputs : outputs, j : j + across * outputs : outputs].reshape(-1, p.c)
            for j in range(edge)
        ]
        for i in range(edge)
    ]


def _by_taps(w: Float64) -> list[list[Float64]]:
    """By row and column: filters, channels."""
    return [[w[:, r, s] for s in range(3)] for r in range(3)]


@dataclass(frozen=True)
class _Operand:
    """What is transformed, by row and column; `whole`: the power of two that makes it whole numbers, where there is
    one. Its transform is divided by `divided`, taken as exact, and stored divided by `growth`."""

    element: str
    values: list[list[Float64]]
    matrix: tuple[tuple[int, ...], ...]
    whole: int | None
    growth: float = 1.0
    divided: int = 1

    def place(self, row: int, column: int, of_passes: float) -> tuple[Float64, Float64]:
        """|matrix values matrix^T| of one place, and how far the operand may be off."""
        xp = namespace_of(self.values[0][0])
        result = size = xp.zeros_like(self.values[0][0])
        for i, first in enumerate(self.matrix[row]):
            for j, second in enumerate(self.matrix[column]):
                if factor := first * second:
                    result = result + float(factor) * self.values[i][j]
                    size = size + abs(float(factor)) * xp.abs(self.values[i][j])
        exact = self.whole is not None and bool(xp.all(size * 2.0**self.whole <= EXACT_SUM))
        result, size = xp.abs(result) / float(self.divided), size / float(self.divided)
        computed = xp.zeros_like(size) if exact else of_passes * size
        bits, smallest = OPERANDS[self.element]
        _, exponent = xp.frexp((result + computed) / self.growth)
        quantum = self.growth * powers_of_two(xp.maximum(exponent, smallest) - bits)
        held = (result % quantum == 0.0) & (computed == 0.0)
        return result, xp.where(held, 0.0, computed + 0.5 * quantum)
