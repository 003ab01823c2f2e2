"""How a strided tensor lies in memory, as far as kernels ask: packed, as matrices, how aligned."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

ALIGNED = 16  # bytes: the widest access of a kernel, and what every allocation begins at a multiple of


@dataclass(frozen=True, slots=True)
class Matrices:
    """Equal matrices as they are stored: `rows` of `columns` neighbours, `pitch` elements from one row to the next and
    `stride` from one matrix to the next, 0 where all are one. `transposed`: stored the other way round."""

    transposed: bool
    rows: int
    columns: int
    pitch: int
    batch: int
    stride: int

    @property
    def view(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes and strides of the tensor that a kernel is given."""
        if self.batch == 1 or self.stride == 0:
            return (self.rows, self.columns), (self.pitch, 1)
        return (self.batch, self.rows, self.columns), (self.stride, self.pitch, 1)

    @property
    def elements(self) -> tuple[int, ...]:
        """What the alignment class comes from."""
        return (self.columns, self.pitch, self.stride if self.batch > 1 else 0)


def packed(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor without gaps, the last axis first."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def is_packed(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = packed(shape)
    return all(size == 1 or stride == dense for size, stride, dense in zip(shape, strides, expected, strict=True))


def is_aligned(address: int, elements: Sequence[int], element_bytes: int) -> bool:
    """Whether a tensor at `address` may be read by the widest access of which all of `elements` are multiples."""
    access = ALIGNED
    while any(count * element_bytes % access for count in elements):
        access //= 2
    return address % access == 0


def merged(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """Axes as one: its extent, and its stride where it has one (0 where there is one index, or all are the same)."""
    axes = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    for (_, outer), (size, inner) in pairwise(axes):
        if outer != size * inner:
            return None
    return prod(shape), axes[-1][1] if axes else 0


def stored_matrix(shape: tuple[int, int], strides: tuple[int, int]) -> tuple[bool, int, int, int] | None:
    """(transposed, rows, columns, pitch) of a matrix as it is stored; None where no axis of it is contiguous."""
    (rows, columns), (along_rows, along_columns) = shape, strides
    by_rows = _pitch(rows, columns, along_rows, along_columns)
    by_columns = _pitch(columns, rows, along_columns, along_rows)
    if by_rows is None and by_columns is None:
        return None
    # A vector is both: packed in the one way, a column of a matrix in the other.
    if by_rows is not None and (by_columns is None or columns > 1 or rows == 1):
        return False, rows, columns, by_rows
    assert by_columns is not None
    return True, columns, rows, by_columns


def _pitch(rows: int, columns: int, between_rows: int, between_columns: int) -> int | None:
    """The stride of an axis of extent 1 means nothing."""
    if columns > 1 and between_columns != 1:
        return None
    if rows == 1:
        return columns
    return between_rows if between_rows >= columns else None
