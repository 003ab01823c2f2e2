"""What PTX instructions make of numbers, from the texts of the PTX ISA and in exact arithmetic; and the numbers to ask.

Numbers are words; floats are their bits. A result that is any NaN is `ANY_NAN`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

INF, NEGATIVE_ZERO, NAN, CANONICAL_NAN, ONE = 0x7F800000, 0x80000000, 0x7FC00000, 0x7FFFFFFF, 0x3F800000
ANY_NAN = -1
WORDS = (0, 1, 2, 31, 32, 33, 255, 256, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF)
# With ends of 16 and of 32 bits beside those of 64.
LONG_WORDS = (0, 1, 63, 64, 65, 0x7FFF, 0x8000, 0xFFFF, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
# ±0, subnormal, smallest normal, 1, its neighbours, halves, large, infinite, NaN.
FLOATS = (
    0, NEGATIVE_ZERO, 1, 0x80000001, 0x007FFFFF, 0x00800000, ONE, 0xBF800000, 0x3F800001, 0x3F7FFFFF, 0x3F000000,
    0x40490FDB, 0xC0490FDB, 0x7F7FFFFF, INF, 0xFF800000, NAN,
)  # fmt: skip
SHIFTS = (0, 1, 15, 16, 31, 32, 33, 63, 64, 0xFFFFFFFF)


class Case(NamedTuple):
    """A body and the register in which it leaves its result; of as many words as it is asked, what that must be."""

    body: str
    result: str
    inputs: tuple[tuple[int, ...], ...]
    model: Callable[..., int]


def signed(value: int, bits: int = 32) -> int:
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


def number(value: int, kind: str, bits: int) -> int:
    """As a type of integers reads the lowest bits of a word."""
    return signed(value, bits) if kind == "s" else value % (1 << bits)


def real(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits % 2**32))[0])


def bits_of(value: float) -> int:
    with np.errstate(over="ignore", invalid="ignore"):
        return ANY_NAN if math.isnan(value) else int(np.float32(value).view(np.uint32))


def is_nan(bits: int) -> bool:
    return bits == ANY_NAN or bits & 0x7FFFFFFF > INF


def clamp(value: int, least: int, most: int) -> int:
    return max(least, min(most, value))


def cut(a: int, b: int) -> int:
    """A quotient, toward zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def flushed(bits: int) -> int:
    return bits if bits == ANY_NAN or bits & INF else bits & NEGATIVE_ZERO


def saturated(bits: int) -> int:
    return 0 if is_nan(bits) or real(bits) <= 0 else min(bits, ONE)


def float_of(exact: Fraction, mode: str) -> int:
    """The bits of a number other than 0, rounded once: rn, rz, rm or rp."""
    size, negative = abs(exact), exact < 0
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    exponent = max(exponent, -126)
    steps, rest = divmod(size, Fraction(2) ** (exponent - 23))
    up = {
        "rn": rest > Fraction(1, 2) * Fraction(2) ** (exponent - 23)
        or (rest == Fraction(1, 2) * Fraction(2) ** (exponent - 23) and bool(steps & 1)),
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[mode]
    bits = int(steps) + up + (exponent + 126 << 23)
    if bits >= INF:
        toward_zero = mode == "rz" or mode == ("rp" if negative else "rm")
        bits = INF - 1 if toward_zero else INF
    return bits | (NEGATIVE_ZERO if negative else 0)


def fused(a: int, b: int, c: int, mode: str = "rn") -> int:
    """a * b + c."""
    x, y, z = real(a), real(b), real(c)
    product = x * y  # of finite factors a float64 has it
    if not all(map(math.isfinite, (x, y, z))):
        return bits_of(product + z)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact:
        return float_of(exact, mode)
    first, second = math.copysign(1, x) * math.copysign(1, y) < 0, math.copysign(1, z) < 0
    negative = first if first == second else mode == "rm"
    return NEGATIVE_ZERO if negative else 0


def sum_of(a: int, b: int) -> int:
    return fused(a, ONE, b)


def difference(a: int, b: int) -> int:
    return sum_of(a, b ^ NEGATIVE_ZERO)


def product(a: int, b: int) -> int:
    # Adding a zero of the product's sign leaves it as it is.
    return fused(a, b, (a ^ b) & NEGATIVE_ZERO)


def quotient(a: int, b: int) -> int:
    with np.errstate(all="ignore"):
        return bits_of(float(np.float32(real(a)) / np.float32(real(b))))


def root(a: int) -> int:
    with np.errstate(all="ignore"):
        return bits_of(float(np.sqrt(np.float32(real(a)))))


def greatest(a: int, b: int, *, nan: bool, least: bool = False) -> int:
    """Of min and max: -0 is below +0, and a number beats a NaN without `.NaN`."""
    if is_nan(a) or is_nan(b):
        return CANONICAL_NAN if nan or (is_nan(a) and is_nan(b)) else b if is_nan(a) else a
    ordered = sorted((a, b), key=lambda bits: (real(bits), not bits & NEGATIVE_ZERO))
    return ordered[0 if least else 1]


def rounded_to_whole(a: int, mode: str) -> int:
    """As a float, of the same sign."""
    x = real(a)
    if not math.isfinite(x):
        return bits_of(x)
    roundings: dict[str, Callable[[float], int]] = {
        "rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil,
    }  # fmt: skip
    whole = roundings[mode](x)
    return bits_of(float(whole)) if whole else a & NEGATIVE_ZERO


def to_integer(a: int, mode: str, kind: str, bits: int) -> int:
    """Clamped; of a NaN 0, and the highest bit alone of 64 ("cvt", integer notes)."""
    if is_nan(a):
        return 1 << 63 if bits == 64 else 0
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if kind == "s" else (0, (1 << bits) - 1)
    x = real(rounded_to_whole(a, mode))
    return clamp(int(max(-(2.0**70), min(2.0**70, x))), least, most)


def half(bits: int) -> int:
    with np.errstate(over="ignore"):
        return 0x7FFF if is_nan(bits) else int(np.float16(real(bits)).view(np.uint16))


def bfloat16(bits: int) -> int:
    return 0x7FFF if is_nan(bits) else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def half_toward_zero(bits: int) -> int:
    nearest = half(bits)
    beyond = not is_nan(bits) and bits & 0x7FFFFFFF != INF and abs(float(_half_of(nearest))) > abs(float(real(bits)))
    return nearest - beyond


def _half_of(bits: int) -> np.float16:
    return np.uint16(bits).view(np.float16)


def bfloat16_toward_zero(bits: int) -> int:
    return 0x7FFF if is_nan(bits) else bits >> 16


def tf32(bits: int) -> int:
    if is_nan(bits):
        return CANONICAL_NAN
    return bits if bits & 0x7FFFFFFF == INF else (bits + 0x1000) & 0xFFFFE000


def permuted(a: int, b: int, selector: int) -> int:
    source, result = (b % 2**32) << 32 | a % 2**32, 0
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = source >> 8 * (nibble & 7) & 255
        result |= (0xFF if byte & 0x80 else 0) << 8 * place if nibble & 8 else byte << 8 * place
    return result


# By mode of prmt and the two lowest bits of the selector: the table of the manual, d.b0 last.
PERMUTED = {
    "f4e": ("3210", "4321", "5432", "6543"), "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"), "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"), "rc16": ("1010", "3232", "1010", "3232"),
}  # fmt: skip


def inserted(field: int, into: int, position: int, length: int, width: int = 32) -> int:
    for place in range(length & 255):
        at = (position & 255) + place
        if at < width:
            into = into & ~(1 << at) | (field >> place & 1) << at
    return into


def extracted(value: int, position: int, length: int, is_signed: bool, width: int = 32) -> int:
    position, length = position & 255, length & 255
    sign = value >> min(position + length - 1, width - 1) & 1 if is_signed and length else 0
    return sum(
        (value >> at & 1 if place < length and at < width else sign) << place
        for place in range(width)
        for at in (position + place,)
    )
