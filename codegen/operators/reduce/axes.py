"""The canonical form of a reduction: two lists of merged axes, kept and reduced, as `list_of` in kernel.cuh makes them.

An element lies at the sum of an offset along the kept axes and one along the reduced axes, so that the two lists need
not know of each other: any axes of any array have this form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MAX_AXES = 8  # as max_axes in kernel.cuh
WIDEST_BYTES = 16


@dataclass(frozen=True)
class Merged:
    """Extents and strides from the outermost to the innermost; never none."""

    extents: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.extents)


@dataclass(frozen=True)
class Form:
    """`inner` is the list whose last axis has neighbouring elements, `align` the elements that all its rows begin at a
    multiple of, as far as 16 bytes reach; 1 where neither list has such an axis."""

    kept: Merged
    reduced: Merged
    inner: Literal["kept", "reduced", "none"]
    align: int


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, extent))
    return tuple(reversed(strides))


def merged(axes: Sequence[tuple[int, int]], *, ordered: bool) -> Merged:
    """Axes as (extent, stride), outermost first. Where the order of elements does not matter (`ordered` is false) the
    largest stride comes first."""
    left = [one for one in axes if one[0] != 1]
    if not ordered:
        left.sort(key=lambda one: -one[1])
    found: list[tuple[int, int]] = []
    for extent, stride in left:
        if found and found[-1][1] == extent * stride:
            found[-1] = (found[-1][0] * extent, stride)
        else:
            found.append((extent, stride))
    found = found or [(1, 0)]
    return Merged(tuple(extent for extent, _ in found), tuple(stride for _, stride in found))


def form_of(shape: Sequence[int], strides: Sequence[int], axes: Sequence[int], fn: str, size: int) -> Form:
    """`size`: bytes of an element. Only argmax depends on the order of what is reduced."""
    pairs = list(zip(shape, strides, strict=True))
    kept = merged([one for axis, one in enumerate(pairs) if axis not in axes], ordered=True)
    reduced = merged([pairs[axis] for axis in axes], ordered=fn == "argmax")
    inner: Literal["kept", "reduced", "none"] = "none"
    if kept.strides[-1] == 1:
        inner = "kept"
    elif reduced.strides[-1] == 1:
        inner = "reduced"
    if inner == "none":
        return Form(kept, reduced, inner, 1)
    along = kept if inner == "kept" else reduced
    others = [*(s for one in (kept, reduced) for s in one.strides if not (one is along and s == 1)), along.extents[-1]]
    return Form(kept, reduced, inner, math.gcd(WIDEST_BYTES // size, *others))
