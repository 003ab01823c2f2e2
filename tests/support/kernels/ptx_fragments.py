"""Which element of a matrix a lane holds where, by the formulas of the PTX ISA ("Matrix Fragments", "ldmatrix").

Of a lane `groupID = laneid >> 2` and `threadID_in_group = laneid % 4`. Elements of a lane are counted from the lowest
bits of its first register.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LANES = 32
Place = Callable[[int, int, int], tuple[int, int]]  # groupID, threadID_in_group, element: row, column


class Mma(NamedTuple):
    """`types`: as in the opcode. `bits` of an element of a and b; `words` of a and of b; the places of theirs."""

    types: str
    k: int
    bits: int
    words: tuple[int, int]
    a: Place
    b: Place
    half_sums: bool = False

    @property
    def sums(self) -> int:
        """Registers of c and of d."""
        return 2 if self.half_sums else 4


def sum_place(group: int, thread: int, i: int) -> tuple[int, int]:
    """Of c and d, in all shapes m16n8."""
    return (group if i < 2 else group + 8), thread * 2 + (i & 1)


def _halves_a(g: int, t: int, i: int) -> tuple[int, int]:
    return (g if i < 2 or 4 <= i < 6 else g + 8), t * 2 + (i & 1) + (8 if i >= 4 else 0)


def _halves_b(g: int, t: int, i: int) -> tuple[int, int]:
    return t * 2 + (i & 1) + (8 if i >= 2 else 0), g


def _bytes_a(g: int, t: int, i: int) -> tuple[int, int]:
    return (g if i < 4 or 8 <= i < 12 else g + 8), t * 4 + (i & 3) + (16 if i >= 8 else 0)


def _bytes_b(g: int, t: int, i: int) -> tuple[int, int]:
    return t * 4 + (i & 3) + (16 if i >= 4 else 0), g


MMA = {
    "f16": Mma("m16n8k16.row.col.f32.f16.f16.f32", 16, 16, (4, 2), _halves_a, _halves_b),
    "bf16": Mma("m16n8k16.row.col.f32.bf16.bf16.f32", 16, 16, (4, 2), _halves_a, _halves_b),
    "f16_f16": Mma("m16n8k16.row.col.f16.f16.f16.f16", 16, 16, (4, 2), _halves_a, _halves_b, half_sums=True),
    "f16_k8": Mma(
        "m16n8k8.row.col.f32.f16.f16.f32", 8, 16, (2, 1),
        lambda g, t, i: (g if i < 2 else g + 8, t * 2 + (i & 1)), lambda g, t, i: (t * 2 + (i & 1), g),
    ),
    "tf32": Mma(
        "m16n8k8.row.col.f32.tf32.tf32.f32", 8, 32, (4, 2),
        lambda g, t, i: (g if i in (0, 2) else g + 8, t if i < 2 else t + 4),
        lambda g, t, i: (t if i == 0 else t + 4, g),
    ),
    "s8": Mma("m16n8k32.row.col.s32.s8.s8.s32", 32, 8, (4, 2), _bytes_a, _bytes_b),
    "u8": Mma("m16n8k32.row.col.s32.u8.u8.s32", 32, 8, (4, 2), _bytes_a, _bytes_b),
}  # fmt: skip


def words_of(matrix: NDArray[np.int64], count: int, bits: int, place: Place) -> NDArray[np.int64]:
    """The registers of each lane, of a matrix of the bits of elements."""
    own = np.zeros((LANES, count), np.int64)
    per_word = 32 // bits
    for lane in range(LANES):
        for i in range(count * per_word):
            own[lane, i // per_word] |= int(matrix[place(lane >> 2, lane % 4, i)]) << i % per_word * bits
    return own


def bits_of_elements(matrix: NDArray[np.int64], types: str) -> NDArray[np.int64]:
    """Of small whole numbers."""
    kind = types.split(".")[4]
    if kind in ("s8", "u8"):
        return matrix % 256
    if kind == "f16":
        return matrix.astype(np.float16).view(np.uint16).astype(np.int64)
    return matrix.astype(np.float32).view(np.uint32).astype(np.int64) >> (16 if kind == "bf16" else 0)


def bits_of_sums(matrix: NDArray[np.int64], mma: Mma) -> NDArray[np.int64]:
    if mma.half_sums:
        return matrix.astype(np.float16).view(np.uint16).astype(np.int64)
    return matrix % 2**32 if ".s32." in mma.types else matrix.astype(np.float32).view(np.uint32).astype(np.int64)


def loaded(rows: NDArray[np.uint16], lane: int, matrix: int, transposed: bool) -> int:
    """The register that ldmatrix gives a lane: of `rows` those 8 that the lanes from 8 times `matrix` on point at."""
    own = rows[8 * matrix : 8 * matrix + 8].T if transposed else rows[8 * matrix : 8 * matrix + 8]
    row, column = lane >> 2, lane % 4 * 2
    return int(own[row, column]) | int(own[row, column + 1]) << 16
