"""The phases of a problem: pixels of dx whose rows and columns are equal modulo the stride have their taps in common,
and each phase is a convolution of dy with stride 1 (`phases.cuh` says how). Here is what rules and costs need."""

from collections import Counter
from functools import lru_cache
from math import gcd

from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from codegen.operators.convolution.problem import Convolution


class Phase(Convolution):
    """A phase as the convolution of dy that it is: its image is dy, its filters are the channels of dx, its output the
    pixels of the phase. Padding differs on the two sides, so the output's extents are said; there may be no taps."""

    rows: int
    columns: int

    @property
    def p(self) -> int:
        return self.rows

    @property
    def q(self) -> int:
        return self.columns


def count(problem: Conv2dDgradProblem) -> int:
    """How many phases there are."""
    p = problem
    return min(p.stride[0], p.h) * min(p.stride[1], p.w)


@lru_cache(maxsize=1024)  # called for every schedule
def largest(problem: Conv2dDgradProblem) -> Phase:
    """With the most rows, columns and taps that any has: what a launch is made for."""
    p = problem
    (rows, taps_h), (columns, taps_w) = (
        (-(-extent // p.stride[axis]), -(-taps // p.tap_step(axis)))
        for axis, (extent, taps) in enumerate(((p.h, p.r), (p.w, p.s)))
    )
    return _phase(p, rows, columns, taps_h, taps_w)


@lru_cache(maxsize=1024)
def phases(problem: Conv2dDgradProblem) -> tuple[tuple[int, Phase], ...]:
    """How many phases there are of every kind, and one of them."""
    p = problem
    by_rows, by_columns = (
        _residues(extent, p.corner[axis], taps, p.stride[axis], p.dilation[axis])
        for axis, (extent, taps) in enumerate(((p.h, p.r), (p.w, p.s)))
    )
    return tuple(
        (number * times, _phase(p, rows, columns, taps_h, taps_w))
        for (rows, taps_h), number in by_rows.items()
        for (columns, taps_w), times in by_columns.items()
    )


def _residues(extent: int, padding: int, taps: int, stride: int, dilation: int) -> Counter[tuple[int, int]]:
    """How many residues of the stride have so many (rows of dx, taps)."""
    whole, rest = divmod(extent, stride)
    residues = Counter({(whole + 1, 0): rest, (whole, 0): stride - rest if whole else 0})
    step = stride // gcd(stride, dilation)
    for first in range(min(taps, step)):
        residue = (first * dilation - padding) % stride
        if residue < extent:
            rows = (extent - 1 - residue) // stride + 1
            residues[rows, 0] -= 1
            residues[rows, (taps - 1 - first) // step + 1] += 1
    return +residues


def _phase(problem: Conv2dDgradProblem, rows: int, columns: int, taps_h: int, taps_w: int) -> Phase:
    p = problem
    return Phase.model_construct(
        operator=p.operator, n=p.n, h=p.p, w=p.q, c=p.k, k=p.c, r=taps_h, s=taps_w, groups=p.groups, layout=p.layout,
        stride=(1, 1), dilation=(1, 1), padding=((0, 0), (0, 0)), dtype=p.dtype, acc_dtype=p.acc_dtype,
        out_dtype=p.out_dtype, allow_tf32=p.allow_tf32, fraction_bits=p.fraction_bits, rounding=p.rounding,
        truncation=p.truncation, epilogue=p.epilogue, rows=rows, columns=columns,
    )  # fmt: skip
