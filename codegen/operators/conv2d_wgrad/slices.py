"""How many slices of the output pixels searches try. Sums are long and dw is small, so its tiles alone leave most of a
device idle: of 256 images of 112 x 112 pixels sums have 3.2 million products, where dw may be a single tile."""

from __future__ import annotations

from collections.abc import Iterable

from codegen.operators.matmul.split import MOST_SLICES

# Of every level, beside 1 (Apache TVM pull request 10185 settled on these).
ALWAYS = (4, 8, 16, 32, 64)


def fill(blocks: int, wanted: int, most: int) -> tuple[int, ...]:
    """Powers of two beyond ALWAYS with which so many `blocks` become `wanted`, up to the first that does or `most`."""
    counts, count = [], ALWAYS[-1]
    while count * blocks < wanted and 2 * count <= min(MOST_SLICES, most):
        count *= 2
        counts.append(count)
    return tuple(counts)


def level_slices(more: Iterable[int]) -> tuple[int, ...]:
    """Those of every level and `more`, in ascending order."""
    return tuple(sorted({*ALWAYS, *more}))
