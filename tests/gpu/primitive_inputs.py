"""Inputs of the checks: random words with the cases that rounding, ranges and signs make special. NumPy alone.

Every function returns 32-bit words, a row for each thread block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Inputs = Callable[[np.random.Generator], Words]
BLOCKS = 64

# Signs, the ends of the ranges of float, half and bfloat16, ties of both roundings, infinities, NaN.
EDGES = np.array(
    [
        0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x807FFFFF, 0x80800000,
        0x33000000, 0x33000001, 0x33800000, 0x387FC000, 0x387FE000, 0x38800000, 0x3F800000, 0xBF800000,
        0x3F801000, 0x3F803000, 0x3F808000, 0x3F818000, 0x477FE000, 0x477FEFFF, 0x477FF000, 0x47800000,
        0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000,
        0x42B00000, 0xC2CE0000, 0xC2D00000, 0x41100000,
    ],
    np.uint32,
)  # fmt: skip


def random_words(words: int, blocks: int = BLOCKS) -> Inputs:
    return lambda random: random.integers(0, 2**32, (blocks, words), np.uint32)


def floats(words: int, blocks: int = 256) -> Inputs:
    """A third each of any bits, of numbers of all sizes that occur, and of the edges."""

    def made(random: np.random.Generator) -> Words:
        count = blocks * words
        sized = random.standard_normal(count) * np.exp2(random.uniform(-30, 18, count))
        choices = (
            random.integers(0, 2**32, count, np.uint32),
            sized.astype(np.float32).view(np.uint32),
            random.choice(EDGES, count),
        )
        return np.choose(random.integers(0, 3, count), choices).astype(np.uint32).reshape(blocks, words)

    return made


def every_half(random: np.random.Generator) -> Words:
    """The low halves of the first words of the threads are all there are; then floats."""
    some = floats(128)(random)
    every = random.integers(0, 2**32, (2**16, 4), np.uint32)
    every[:, 0] = (every[:, 0] & np.uint32(0xFFFF0000)) | np.arange(2**16, dtype=np.uint32)
    return np.concatenate([every.reshape(-1, 128), some])


def operands_of_shuffles(random: np.random.Generator) -> Words:
    """Operands of 0 to 31, and in the last blocks of any size."""
    words = random.integers(0, 2**32, (BLOCKS, 32, 2), np.uint32)
    words[:48, :, 1] %= 32
    return words.reshape(BLOCKS, 64)


def votes(random: np.random.Generator) -> Words:
    """Of all lanes, of none, of one, of any."""
    words = random.integers(0, 2, (BLOCKS, 32)).astype(np.uint32)
    words[0], words[1] = 0, 1
    words[2:34], words[34:50] = np.eye(32), 1 - np.eye(32)[:16]
    return words


def addends(random: np.random.Generator) -> Words:
    """Of a thread: a float to start from and one to add, one whose sums are exact; then integers."""
    words = random.integers(0, 2**32, (256, 32, 6), np.uint32)
    words[:, :, :2] = floats(64)(random).reshape(256, 32, 2)
    words[:, :, 2] = random.integers(-1000, 1001, (256, 32)).astype(np.float32).view(np.uint32)
    return words.reshape(256, 192)


def rows(random: np.random.Generator) -> Words:
    """16 bytes of each lane, then whose row each lane passes: its own in the first blocks, then any."""
    words = random.integers(0, 2**32, (BLOCKS, 160), np.uint32)
    words[:, 128:] %= 32
    words[:8, 128:] = np.arange(32)
    return words


# --- mma: registers of the 32 lanes, d, then a, then b of each


@dataclass(frozen=True)
class Kind:
    """One mma: `registers` of d, a and b in a lane; `operand` and `sum`: types of a, b and of d."""

    registers: tuple[int, int, int]
    operand: str
    sum: str

    def words(self, d: NDArray[np.float64], operands: NDArray[np.float64]) -> Words:
        """Of numbers of shape (blocks, 32, numbers of d) and (blocks, 32, numbers of a and b)."""
        parts = (to_words(d, self.sum), to_words(operands, self.operand))
        return np.concatenate(parts, axis=2).reshape(len(d), -1)

    def shapes(self, blocks: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        d, a, b = self.registers
        return (blocks, 32, d * PER_WORD[self.sum]), (blocks, 32, (a + b) * PER_WORD[self.operand])


PER_WORD = {"float32": 1, "tf32": 1, "int32": 1, "float16": 2, "bfloat16": 2, "int8": 4, "uint8": 4}


def to_words(numbers: NDArray[np.float64], dtype: str) -> Words:
    """The registers of numbers, rounded to the type (bfloat16: truncated). tf32 keeps all bits of the float."""
    numbers = np.ascontiguousarray(numbers)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype in ("float32", "tf32"):
            return numbers.astype(np.float32).view(np.uint32)
        if dtype == "bfloat16":
            return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)
        numpy_type = {"float16": np.float16, "int8": np.int8, "uint8": np.uint8, "int32": np.int32}[dtype]
        return numbers.astype(numpy_type).view(np.uint32)


def integers(kind: Kind, largest: int, largest_d: int) -> Inputs:
    """Sums of which every partial sum is representable, in any order; zeros of both signs. The bits of tf32 that do not
    count are random."""

    def made(random: np.random.Generator) -> Words:
        d_shape, shape = kind.shapes(BLOCKS)
        signs = np.where(random.random(shape) < 0.5, -1.0, 1.0)
        operands = random.integers(0, largest + 1, shape).astype(np.float64) * signs
        d = random.integers(-largest_d, largest_d + 1, d_shape).astype(np.float64)
        words = kind.words(d, operands)
        if kind.operand == "tf32":
            lanes = words.reshape(BLOCKS, 32, -1)[:, :, kind.registers[0] :]
            lanes |= random.integers(0, 2**13, lanes.shape, np.uint32)
        return words

    return made


# Numbers that a product of two of them and sums of those stay far below the largest of the sum's type.
SPREAD = {"float16": (-7.0, 3.0), "bfloat16": (-25.0, 25.0), "tf32": (-25.0, 25.0)}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "tf32": 2.0**-136, "float32": 2.0**-149}


def numbers(kind: Kind) -> Inputs:
    """Blocks of numbers of about one size, of many sizes, with zeros; of subnormal operands and of subnormal d alone;
    with infinities and NaN."""

    def made(random: np.random.Generator) -> Words:
        blocks = 4 * BLOCKS
        d_shape, shape = kind.shapes(blocks)
        low, high = SPREAD[kind.operand]
        d, operands = random.standard_normal(d_shape), random.standard_normal(shape)
        wide = slice(BLOCKS // 2, None)
        operands[wide] *= np.exp2(random.uniform(low, high, operands[wide].shape))
        d[wide] *= np.exp2(random.uniform(low, 2 * high if kind.sum == "float32" else high, d[wide].shape))
        subnormal = slice(BLOCKS, 2 * BLOCKS)
        a = kind.registers[1] * PER_WORD[kind.operand]
        operands[subnormal, :, :a] = random.integers(-7, 8, operands[subnormal, :, :a].shape) * SMALLEST[kind.operand]
        d[subnormal] = 0.0
        alone = slice(2 * BLOCKS, 2 * BLOCKS + 8)
        operands[alone] = np.where(random.random(operands[alone].shape) < 0.5, -0.0, 0.0)
        d[alone] = random.integers(-(2**20), 2**20, d[alone].shape) * SMALLEST[kind.sum]
        special = slice(3 * BLOCKS, None)
        for part in (d, operands):
            at = random.random(part[special].shape)
            values = random.choice([np.inf, -np.inf, np.nan, 0.0, -0.0], at.shape)
            part[special] = np.where(at < 0.02, values, part[special])
        return kind.words(d, operands)

    return made


def any_bytes(kind: Kind) -> Inputs:
    """Of bytes everything is exact: any bits, the ends of the range, sums that wrap around."""

    def made(random: np.random.Generator) -> Words:
        d, a, b = kind.registers
        words = random.integers(0, 2**32, (BLOCKS, 32, d + a + b), np.uint32)
        words[:8, :, :d] = random.choice(np.array([0x7FFFFFFF, 0x80000000, 0x7FFFFF00], np.uint32), (8, 32, d))
        ends = np.array([0x80808080, 0x7F7F7F7F] if kind.operand == "int8" else [0xFFFFFFFF, 0], np.uint32)
        words[:4, :, d:] = ends[0]  # bytes with the largest products
        words[4:8, :, d:] = random.choice(ends, (4, 32, a + b))
        return words.reshape(BLOCKS, -1)

    return made
