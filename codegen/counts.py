"""What a run of a schedule does, by launch and primitive: the counts of a profile, as integers.

Bytes are those that lanes ask for: what a cache answers counts each time. Multiplications are of two numbers: those by
constants are none, nor are those inside of an approximation, nor what rescales running sums where none is a primitive.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Primitive:
    """`times`: of lanes, or of warps where a warp executes it together (mma). `multiplications`: executed, those of
    tiles that reach beyond the matrices too; over a ring on tensor cores of `limb_products` bytes. `of_epilogue`: those
    of them that are squares and polynomials of an epilogue, which are all the problem's."""

    name: str
    times: int
    multiplications: int = 0
    limb_products: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    of_epilogue: int = 0


TRUNCATE = "truncate"
Filters = Literal["secret", "public"]
Operands = Literal["multiplied", "inputs"]


@dataclass(frozen=True)
class Openings:
    """What a two-party evaluation opens of a product. `filters`: secret, or public, which makes the product local; of
    matmul that is B. `operands`: the matrices that are multiplied (of a convolution the im2col matrix, of Winograd the
    transformed tiles and filters), or the raw inputs, with the zeros of the padding."""

    filters: Filters = "secret"
    operands: Operands = "multiplied"


@dataclass(frozen=True)
class RingForm:
    """What one party sends where a problem over a ring is computed in one form. `multiplications`: without those of
    transforms. `ours`: whether a schedule computes it so."""

    name: str
    filters: Filters
    ours: bool
    ring_bytes: int
    truncations: int
    multiplications: int


@dataclass(frozen=True)
class LaunchCounts:
    """Of `times` launches of one function. `multiplications`: of what it computes, with zeros of the padding, without
    what tiles add and the epilogue's. `once_for`: the operand that it alone reads, where the library exports it
    (`Operator.transformed`): many calls with that operand need it once."""

    function: str
    primitives: tuple[Primitive, ...]
    multiplications: int = 0
    times: int = 1
    once_for: str | None = None

    @property
    def total(self) -> Primitive:
        """Of all its primitives."""
        return _sum(self.function, self.primitives)

    @property
    def truncations(self) -> int:
        return sum(part.times for part in self.primitives if part.name == TRUNCATE)


def load(bytes_: int, access: int, name: str = "load_global") -> Primitive:
    """`access`: bytes of one lane's."""
    return Primitive(name, bytes_ // access, bytes_read=bytes_)


def store(bytes_: int, access: int) -> Primitive:
    return Primitive("store_global", bytes_ // access, bytes_written=bytes_)


def multiply(times: int) -> Primitive:
    """Products one by one, which are no part of a multiply-add."""
    return Primitive("multiply", times, times)


def merged(parts: Sequence[Primitive]) -> tuple[Primitive, ...]:
    """One of each name, in their order; without those that are never executed."""
    names = dict.fromkeys(part.name for part in parts if part.times)
    return tuple(_sum(name, [part for part in parts if part.name == name]) for name in names)


def added(kinds: Sequence[tuple[int, Sequence[LaunchCounts]]]) -> tuple[LaunchCounts, ...]:
    """What launches do that compute several kinds of products, by how many there are of each; all have the same
    functions."""
    whole = []
    for same in zip(*([(number, launch) for launch in of_kind] for number, of_kind in kinds), strict=True):
        parts = [_times(number, part) for number, launch in same for part in launch.primitives]
        multiplications = sum(number * launch.multiplications for number, launch in same)
        whole.append(replace(same[0][1], primitives=merged(parts), multiplications=multiplications))
    return tuple(whole)


_COUNTS = ("times", "multiplications", "limb_products", "bytes_read", "bytes_written", "of_epilogue")


def _times(number: int, part: Primitive) -> Primitive:
    return Primitive(part.name, *(number * getattr(part, count) for count in _COUNTS))


def _sum(name: str, parts: Sequence[Primitive]) -> Primitive:
    return Primitive(name, *(sum(getattr(part, count) for part in parts) for count in _COUNTS))
