"""The canonical form of a reduction: two lists of merged axes, kept and reduced, as `list_of` in kernel.cuh makes them.

An element lies at the sum of an offset along the kept axes and one along the reduced axes, so that the two lists need
not know of each other: any axes of any array have this form.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from codegen.operand import packed_strides

MAX_AXES = 8  # as max_axes in kernel.cuh
WIDEST_BYTES = 16


@dataclass(frozen=True)
class Merged:
    """Extents and strides from the outermost to the innermost; never none. `placed`: strides in the output."""

    extents: tuple[int, ...]
    strides: tuple[int, ...]
    placed: tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """`inner` is the list whose last axis has neighbouring elements, `align` the elements that all its rows begin at a
    multiple of, as far as 16 bytes reach; 1 where neither list has such an axis."""

    kept: Merged
    reduced: Merged
    inner: Literal["kept", "reduced", "none"]
    align: int

    @property
    def scattered(self) -> bool:
        """Whether the kept axes have another order in the output than in the input."""
        return any(outer < inner for outer, inner in pairwise(self.kept.placed))


def merged(axes: Sequence[tuple[int, int, int]], *, ordered: bool) -> Merged:
    """Axes as (extent, stride, stride in the output), outermost first. Where the order of elements does not matter
    (`ordered` is false) the largest stride comes first."""
    left = [axis for axis in axes if axis[0] != 1]
    if not ordered:
        left.sort(key=lambda axis: -axis[1])
    groups: list[tuple[int, int, int]] = []
    for extent, stride, placed in left:
        if groups and groups[-1][1:] == (extent * stride, extent * placed):
            groups[-1] = (groups[-1][0] * extent, stride, placed)
        else:
            groups.append((extent, stride, placed))
    extents, strides, places = zip(*(groups or [(1, 0, 0)]), strict=True)
    return Merged(extents, strides, places)


def form_of(shape: Sequence[int], strides: Sequence[int], axes: Sequence[int], fn: str, size: int) -> Form:
    """`size`: bytes of an element. Only argmax depends on the order of what is reduced."""
    left = [axis for axis in range(len(shape)) if axis not in axes]
    placed = packed_strides([shape[axis] for axis in left]) if left else ()
    kept = merged([(shape[a], strides[a], place) for a, place in zip(left, placed, strict=True)], ordered=False)
    reduced = merged([(shape[a], strides[a], 0) for a in axes], ordered=fn == "argmax")
    inner: Literal["kept", "reduced", "none"] = "none"
    if kept.strides[-1] == 1:
        inner = "kept"
    elif reduced.strides[-1] == 1:
        inner = "reduced"
    if inner == "none":
        return Form(kept, reduced, inner, 1)
    along = kept if inner == "kept" else reduced
    others = [
        *(s for form in (kept, reduced) for s in form.strides if not (form is along and s == 1)),
        along.extents[-1],
    ]
    return Form(kept, reduced, inner, math.gcd(WIDEST_BYTES // size, *others))
