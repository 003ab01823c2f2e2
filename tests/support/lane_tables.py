"""Which lane holds which element of a matrix in which register, as the PTX ISA manual (version 9.1) says it.

Plain data, written from the manual and from nothing of this repository: the CPU emulation are tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass

LANES = 32


@dataclass(frozen=True)
class Fragment:
    """One operand of an instruction. `places[i]` is the (row, column) of element i, counted from the low bits of the
    first register on, of the lane with groupID 0 and threadID_in_group 0; `group` and `thread` are what a step of
    groupID (lane // 4) and of threadID_in_group (lane % 4) adds to it."""

    section: str
    rows: int
    columns: int
    registers: int
    places: tuple[tuple[int, int], ...]
    group: tuple[int, int]
    thread: tuple[int, int]

    def place(self, lane: int, element: int) -> tuple[int, int]:
        row, column = self.places[element]
        group, thread = lane // 4, lane % 4
        return (
            row + group * self.group[0] + thread * self.thread[0],
            column + group * self.group[1] + thread * self.thread[1],
        )

    @property
    def per_register(self) -> int:
        return len(self.places) // self.registers


@dataclass(frozen=True)
class Mma:
    """The fragments of one mma instruction."""

    a: Fragment
    b: Fragment
    d: Fragment


_K8, _K16, _K32 = (
    "9.7.14.5.7, Matrix Fragments for mma.m16n8k8",
    "9.7.14.5.8, Matrix Fragments for mma.m16n8k16 with floating point type",
    "9.7.14.5.10, Matrix Fragments for mma.m16n8k32",
)


def _accumulators(section: str, registers: int = 4) -> Fragment:
    # row = groupID for c0, c1, groupID + 8 for c2, c3; col = threadID_in_group * 2 + (i & 1): the same in all sections.
    return Fragment(section, 16, 8, registers, ((0, 0), (0, 1), (8, 0), (8, 1)), (1, 0), (0, 2))


_A_16 = Fragment(
    _K16, 16, 16, 4,
    ((0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9), (8, 8), (8, 9)),
    (1, 0), (0, 2),
)  # fmt: skip
_B_16 = Fragment(_K16, 16, 8, 2, ((0, 0), (1, 0), (8, 0), (9, 0)), (0, 1), (2, 0))

_BYTES = Mma(
    Fragment(
        _K32, 16, 32, 4,
        (
            (0, 0), (0, 1), (0, 2), (0, 3), (8, 0), (8, 1), (8, 2), (8, 3),
            (0, 16), (0, 17), (0, 18), (0, 19), (8, 16), (8, 17), (8, 18), (8, 19),
        ),
        (1, 0), (0, 4),
    ),
    Fragment(
        _K32, 32, 8, 2,
        ((0, 0), (1, 0), (2, 0), (3, 0), (16, 0), (17, 0), (18, 0), (19, 0)),
        (0, 1), (4, 0),
    ),
    _accumulators(_K32),
)  # fmt: skip

MMA = {
    "mma_m16n8k16_f16": Mma(_A_16, _B_16, _accumulators(_K16)),
    "mma_m16n8k16_bf16": Mma(_A_16, _B_16, _accumulators(_K16)),
    "mma_m16n8k16_f16_f16": Mma(_A_16, _B_16, _accumulators(_K16, registers=2)),
    "mma_m16n8k8_f16": Mma(
        Fragment(_K8, 16, 8, 2, ((0, 0), (0, 1), (8, 0), (8, 1)), (1, 0), (0, 2)),
        Fragment(_K8, 8, 8, 1, ((0, 0), (1, 0)), (0, 1), (2, 0)),
        _accumulators(_K8),
    ),
    "mma_m16n8k8_tf32": Mma(
        Fragment(_K8, 16, 8, 4, ((0, 0), (8, 0), (0, 4), (8, 4)), (1, 0), (0, 1)),
        Fragment(_K8, 8, 8, 2, ((0, 0), (4, 0)), (0, 1), (1, 0)),
        _accumulators(_K8),
    ),
    "mma_m16n8k32_s8": _BYTES,
    "mma_m16n8k32_u8": _BYTES,
}  # fmt: skip

# 9.7.14.5.15, ldmatrix: lane i passes the address of the i-th row of the N matrices (table "Threads 0-7 ..."); which
# (matrix, row) that is. The addresses of the other lanes are not used.
LDMATRIX_ROWS = {
    1: tuple((0, row) for row in range(8)),
    2: tuple((matrix, row) for matrix in (0, 1) for row in range(8)),
    4: tuple((matrix, row) for matrix in (0, 1, 2, 3) for row in range(8)),
}
# Figure 104: a lane's register for a matrix holds two elements of 16 bits, the low one first; the same as (row, column)
# of the 8 x 8 matrix, as it is stored and as .trans loads it, in column-major order.
LDMATRIX = Fragment("9.7.14.5.15, ldmatrix", 8, 8, 1, ((0, 0), (0, 1)), (1, 0), (0, 2))
LDMATRIX_TRANS = Fragment("9.7.14.5.15, ldmatrix", 8, 8, 1, ((0, 0), (1, 0)), (0, 1), (2, 0))

# 9.7.9.6, shfl.sync, with the whole warp as one segment (c = 0x1f, for .up 0): the lane whose value a lane gets, for
# operands of 0 to 31.
SHUFFLES = {
    "shuffle_idx": lambda lane, operand: operand,
    "shuffle_up": lambda lane, operand: lane - operand if lane - operand >= 0 else lane,
    "shuffle_down": lambda lane, operand: lane + operand if lane + operand <= 31 else lane,
    "shuffle_xor": lambda lane, operand: lane ^ operand,
}
