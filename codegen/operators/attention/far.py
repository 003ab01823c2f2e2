"""Strides with which the rows of a small tensor lie 2^31 elements apart, as far as address space goes."""

from collections.abc import Sequence

from codegen.run_once import FAR

# Of the longest axis, so that the whole span stays below `LARGEST_ELEMENTS`.
MOST_APART = 400
# Of other axes, in parts of that distance: so no two rows meet, of up to 64 indices.
PARTS = (64, 4096)
WHOLE = 16  # elements: multiples of it leave alignment classes as they are


def far_strides(shape: Sequence[int], near: Sequence[int]) -> tuple[int, ...]:
    """Of an input: the longest axis reaches beyond 32 bits, and so do others where it has up to MOST_APART indices.
    `near`: strides of the wanted alignment class."""
    longest, *others = sorted(range(len(near)), key=lambda axis: -shape[axis])
    apart = _apart(shape[longest])
    strides = [near[longest] % WHOLE + apart] * len(near)
    for axis, parts in zip(others, PARTS, strict=False):
        strides[axis] = near[axis] % WHOLE + apart + apart // parts
    return tuple(strides)


def far_rows(shape: Sequence[int], near: Sequence[int]) -> tuple[int, ...]:
    """Of an output, whose axes have to lie within each other: the longest reaches there."""
    longest, *others = sorted(range(len(near)), key=lambda axis: -shape[axis])
    step = min(stride for stride, extent in zip(near, shape, strict=False) if extent > 1 or stride)
    strides = [step % WHOLE + _apart(shape[longest])] * len(near)
    for axis in others:
        strides[axis], step = step, step * shape[axis]
    return tuple(strides)


def _apart(extent: int) -> int:
    return min(FAR, FAR * MOST_APART // extent) // (WHOLE * PARTS[-1]) * WHOLE * PARTS[-1]
