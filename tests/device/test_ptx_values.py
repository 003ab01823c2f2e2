"""PTX instructions on the CPU give what the PTX ISA says, at the edges of what they take."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest

from tests.support.kernels.ptx_snippets import THREADS, Snippet, Snippets

INF, NEGATIVE_ZERO, NAN = 0x7F800000, 0x80000000, 0x7FC00000
WORDS = (0, 1, 2, 31, 32, 33, 255, 256, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF)
LONG_WORDS = (0, 1, 63, 64, 65, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
# ±0, subnormal, smallest normal, 1, its neighbours, halves, large, infinite, NaN.
FLOATS = (
    0, NEGATIVE_ZERO, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x3F800001, 0x3F7FFFFF, 0x3F000000,
    0x40490FDB, 0xC0490FDB, 0x7F7FFFFF, INF, 0xFF800000, NAN,
)  # fmt: skip
SHIFTS = (0, 1, 31, 32, 33, 64, 0xFFFFFFFF)
# Of floats between halves: at the ends of the range, and ties.
HALFWAY = (0x33000000, 0x33000001, 0x477FEFFF, 0x477FF000, 0x3F801000, 0x3F803000, 0x38800000)
PLACES, LENGTHS = (0, 5, 31, 32, 260), (0, 1, 7, 32, 255)  # of fields of bits


def signed(value: int, bits: int = 32) -> int:
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


def real(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits % 2**32))[0])


def bits_of(value: float) -> int:
    with np.errstate(over="ignore"):
        return int(np.float32(value).view(np.uint32))


def clamp(value: int, least: int, most: int) -> int:
    return max(least, min(most, value))


def cut(a: int, b: int) -> int:
    """A quotient, toward zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def permuted(a: int, b: int, selector: int) -> int:
    source, result = (b % 2**32) << 32 | a % 2**32, 0
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = source >> 8 * (nibble & 7) & 255
        result |= (0xFF if byte & 0x80 else 0) << 8 * place if nibble & 8 else byte << 8 * place
    return result


def inserted(field: int, into: int, position: int, length: int, width: int = 32) -> int:
    for place in range(length & 255):
        at = (position & 255) + place
        if at < width:
            into = into & ~(1 << at) | (field >> place & 1) << at
    return into


def extracted(value: int, position: int, length: int, is_signed: bool) -> int:
    position, length = position & 255, length & 255
    sign = value >> min(position + length - 1, 31) & 1 if is_signed and length else 0
    return sum(
        (value >> at & 1 if place < length and at < 32 else sign) << place
        for place in range(32)
        for at in (position + place,)
    )


def rounded(exact: Fraction, nearest: int, up: bool) -> int:
    """A float below or above an exact value, from the one that is nearest."""
    at = np.uint32(nearest).view(np.float32)
    if (Fraction(float(at)) > exact) != up and Fraction(float(at)) != exact:
        at = np.nextafter(at, np.float32(np.inf if up else -np.inf))
    return int(at.view(np.uint32))


def toward_zero(exact: Fraction, nearest: int) -> int:
    return rounded(exact, nearest, up=exact < 0)


def fused(a: int, b: int, c: int) -> int:
    """Of finite numbers whose result is normal: rounded once. The float64 sum decides, corrected to odd."""
    exact = Fraction(real(a)) * Fraction(real(b)) + Fraction(real(c))
    low = float(exact)
    if Fraction(low) != exact and not struct.unpack("<Q", struct.pack("<d", low))[0] & 1:
        low = math.nextafter(low, math.inf if exact > Fraction(low) else -math.inf)
    return bits_of(low)


class Case(NamedTuple):
    body: str
    result: str
    inputs: list[tuple[int, ...]]
    model: Callable[..., int]


PAIRS = list(product(WORDS, WORDS))
BY_ZERO_NOT = [(a, b) for a, b in PAIRS if b]
FLOAT_PAIRS = [(a, b) for a, b in product(FLOATS[:-1], FLOATS[:-1])]
WITH_NAN = [pair for pair in product(FLOATS, FLOATS) if NAN in pair or pair[0] == 0 or pair[1] == 0x3F800000]
TRIPLES = [
    (a, b, c)
    for a, b, c in product((0x3F800001, 0xBF7FFFFF, 0x40490FDB, 0x4D9F2CA1), repeat=3)
]  # fmt: skip
# Of fma.rz, near 0 and at the ends: the factors, the addend, the result.
OF_ZERO = {
    (0x3F800000, 0x3F800000, 0xBF800000): 0,  # 1 - 1 is -0 only when rounded down
    (0x3F800000, 0xBF800000, 0x3F800000): 0,
    (NEGATIVE_ZERO, 0x3F800000, NEGATIVE_ZERO): NEGATIVE_ZERO,
    (NEGATIVE_ZERO, 0x3F800000, 0): 0,
    (1, 0x3F000000, 0): 0,  # half of the smallest subnormal
    (0x80000001, 0x3F000000, 0): NEGATIVE_ZERO,
    (1, 0x3F400000, 0): 0,  # three quarters of it
    (0x7F7FFFFF, 0x7F7FFFFF, 0): 0x7F7FFFFF,
    (0x7F7FFFFF, 0xFF7FFFFF, 0): 0xFF7FFFFF,
    (INF, 0xBF800000, 0): 0xFF800000,
}

CASES = {
    "shl": Case("shl.b32 %r20, %r10, %r11;", "r", list(product(WORDS, SHIFTS)), lambda a, n: a << n if n < 32 else 0),
    "shr_s": Case("shr.s32 %r20, %r10, %r11;", "r", list(product(WORDS, SHIFTS)), lambda a, n: signed(a) >> min(n, 31)),
    "shr_u": Case("shr.u32 %r20, %r10, %r11;", "r", list(product(WORDS, SHIFTS)), lambda a, n: a >> n if n < 32 else 0),
    "shr_s16": Case(
        "shr.s16 %rs20, %rs10, %r11;", "rs", list(product((0x8000, 0x7FFF), (0, 15, 16, 40))),
        lambda a, n: signed(a, 16) >> min(n, 15) & 0xFFFF,
    ),
    "shr_64": Case(
        "shr.s64 %rd20, %rd10, %r11;", "rd", list(product(LONG_WORDS, SHIFTS)),
        lambda a, n: signed(a, 64) >> min(n, 63),
    ),
    "shl_by_31": Case("shl.b32 %r20, %r10, 31;", "r", [(a,) for a in WORDS], lambda a: a << 31),
    "shl_by_32": Case("shl.b32 %r20, %r10, 32;", "r", [(a,) for a in WORDS], lambda a: 0),
    "shr_by_40": Case("shr.s32 %r20, %r10, 40;", "r", [(a,) for a in WORDS], lambda a: signed(a) >> 31),
    "shr_by_63": Case("shr.s64 %rd20, %rd10, 63;", "rd", [(a,) for a in LONG_WORDS], lambda a: signed(a, 64) >> 63),
    "shr_by_3": Case("shr.u16 %rs20, %rs10, 3;", "rs", [(a,) for a in WORDS], lambda a: (a & 0xFFFF) >> 3),
    "shf_wrap": Case(
        "shf.l.wrap.b32 %r20, %r10, %r11, %r12;", "r", list(product(WORDS[:4], WORDS[-3:], SHIFTS)),
        lambda a, b, n: (b << 32 | a) << (n & 31) >> 32,
    ),
    "shf_clamp": Case(
        "shf.r.clamp.b32 %r20, %r10, %r11, %r12;", "r", list(product(WORDS[:4], WORDS[-3:], SHIFTS)),
        lambda a, b, n: (b << 32 | a) >> min(n, 32),
    ),
    "mul_hi": Case("mul.hi.s32 %r20, %r10, %r11;", "r", PAIRS, lambda a, b: signed(a) * signed(b) >> 32),
    "mul_hi_u": Case("mul.hi.u32 %r20, %r10, %r11;", "r", PAIRS, lambda a, b: a * b >> 32),
    "mul_wide": Case("mul.wide.s32 %rd20, %r10, %r11;", "rd", PAIRS, lambda a, b: signed(a) * signed(b)),
    "mad_wide": Case(
        "mad.wide.u32 %rd20, %r10, %r11, %rd12;", "rd", [(a, b, 2**64 - 1) for a, b in PAIRS], lambda a, b, c: a * b + c
    ),
    "mad_hi": Case("mad.hi.s32 %r20, %r10, %r11, %r10;", "r", PAIRS, lambda a, b: (signed(a) * signed(b) >> 32) + a),
    "div": Case("div.s32 %r20, %r10, %r11;", "r", BY_ZERO_NOT, lambda a, b: cut(signed(a), signed(b))),
    "rem": Case(
        "rem.s32 %r20, %r10, %r11;", "r", BY_ZERO_NOT,
        lambda a, b: signed(a) - cut(signed(a), signed(b)) * signed(b),
    ),
    "min": Case("min.s32 %r20, %r10, %r11;", "r", PAIRS, lambda a, b: min(signed(a), signed(b))),
    "carry": Case(
        "add.cc.u32 %r14, %r10, %r11; addc.u32 %r20, %r12, %r13;", "r",
        [(a, b, 7, 0xFFFFFFFE) for a, b in PAIRS], lambda a, b, c, d: (a + b >> 32) + c + d,
    ),
    "borrow": Case(
        "sub.cc.u32 %r14, %r10, %r11; subc.u32 %r20, %r12, %r13;", "r",
        [(a, b, 7, 3) for a, b in PAIRS], lambda a, b, c, d: c - d - (a < b),
    ),
    "mad_carry": Case(
        "mad.lo.cc.u32 %r14, %r10, %r11, %r12; madc.hi.u32 %r20, %r10, %r11, %r13;", "r",
        [(a, b, 0xFFFFFFFF, 5) for a, b in PAIRS], lambda a, b, c, d: (a * b >> 32) + d + ((a * b) % 2**32 + c >> 32),
    ),
    "bfi": Case(
        "bfi.b32 %r20, %r10, %r11, %r12, %r13;", "r",
        [(0xA5A5A5A5, *rest) for rest in product((0, 0xFFFFFFFF), PLACES, (*LENGTHS, 256))],
        inserted,
    ),
    "bfe_s": Case(
        "bfe.s32 %r20, %r10, %r11, %r12;", "r", list(product((0xA5A5A5A5, 0x5A5A5A5A), PLACES, LENGTHS)),
        lambda a, at, n: extracted(a, at, n, True),
    ),
    "bfe_u": Case(
        "bfe.u32 %r20, %r10, %r11, %r12;", "r", list(product((0xA5A5A5A5, 0x5A5A5A5A), PLACES, LENGTHS)),
        lambda a, at, n: extracted(a, at, n, False),
    ),
    "prmt": Case(
        "prmt.b32 %r20, %r10, %r11, %r12;", "r",
        [(0x80F10273, 0x9A4B5C8D, s) for s in (0x3210, 0x7654, 0x5140, 0x7362, 0xBA98, 0xFEDC, 0x8421, 0xFFFF3210)],
        lambda a, b, s: permuted(a, b, s),
    ),
    "prmt_f4e": Case(
        "prmt.b32.f4e %r20, %r10, %r11, %r12;", "r", [(0x33221100, 0x77665544, s) for s in range(5)],
        lambda a, b, s: permuted(a, b, sum((s % 4 + i) << 4 * i for i in range(4))),
    ),
    "prmt_b4e": Case(
        "prmt.b32.b4e %r20, %r10, %r11, %r12;", "r", [(0x33221100, 0x77665544, s) for s in range(5)],
        lambda a, b, s: permuted(a, b, sum((s % 4 - i) % 8 << 4 * i for i in range(4))),
    ),
    "prmt_rc8": Case(
        "prmt.b32.rc8 %r20, %r10, %r11, %r12;", "r", [(0x33221100, 0x77665544, s) for s in range(5)],
        lambda a, b, s: permuted(a, b, s % 4 * 0x1111),
    ),
    "prmt_ecl": Case(
        "prmt.b32.ecl %r20, %r10, %r11, %r12;", "r", [(0x33221100, 0x77665544, s) for s in range(5)],
        lambda a, b, s: permuted(a, b, sum(max(i, s % 4) << 4 * i for i in range(4))),
    ),
    "prmt_ecr": Case(
        "prmt.b32.ecr %r20, %r10, %r11, %r12;", "r", [(0x33221100, 0x77665544, s) for s in range(5)],
        lambda a, b, s: permuted(a, b, sum(min(i, s % 4) << 4 * i for i in range(4))),
    ),
    "prmt_rc16": Case(
        "prmt.b32.rc16 %r20, %r10, %r11, %r12;", "r", [(0x33221100, 0x77665544, s) for s in range(5)],
        lambda a, b, s: permuted(a, b, 0x3232 if s % 2 else 0x1010),
    ),
    "lop3": Case(
        "lop3.b32 %r20, %r10, %r11, %r12, 0xe8;", "r", [(0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA)],
        lambda a, b, c: a & b | a & c | b & c,
    ),
    "cvt_s8": Case("cvt.s32.s8 %r20, %r10;", "r", [(a,) for a in (0x7F, 0x80, 0x180, 0xFFFF)], lambda a: signed(a, 8)),
    "cvt_wide": Case("cvt.s64.s32 %rd20, %rd10;", "rd", [(a,) for a in LONG_WORDS], lambda a: signed(a, 32)),
    "setp_u": Case("setp.lt.u32 %p20, %r10, %r11;", "p", PAIRS, lambda a, b: a < b),
    "setp_and": Case(
        "setp.lt.and.s32 %p20, %r10, %r11, %p10;", "p", PAIRS, lambda a, b: signed(a) < signed(b) and a != 0
    ),
    "fma": Case("fma.rn.f32 %f20, %f10, %f11, %f12;", "f", TRIPLES, fused),
    "fma_rm": Case(
        "fma.rm.f32 %f20, %f10, %f11, %f12;", "f", TRIPLES,
        lambda a, b, c: rounded(Fraction(real(a)) * Fraction(real(b)) + Fraction(real(c)), fused(a, b, c), up=False),
    ),
    "fma_rp": Case(
        "fma.rp.f32 %f20, %f10, %f11, %f12;", "f", TRIPLES,
        lambda a, b, c: rounded(Fraction(real(a)) * Fraction(real(b)) + Fraction(real(c)), fused(a, b, c), up=True),
    ),
    "fma_rm_zero": Case(
        "fma.rm.f32 %f20, %f10, %f11, %f12;", "f",
        [(0x3F800000, 0x3F800000, 0xBF800000), (0, 0x3F800000, 0), (0x7F7FFFFF, 0x7F7FFFFF, 0)],
        lambda a, b, c: NEGATIVE_ZERO if c == 0xBF800000 else 0 if a == 0 else 0x7F7FFFFF,
    ),
    "fma_rz": Case(
        "fma.rz.f32 %f20, %f10, %f11, %f12;", "f",
        [(a ^ sign, b, c) for a, b, c in TRIPLES for sign in (0, NEGATIVE_ZERO)],
        lambda a, b, c: toward_zero(Fraction(real(a)) * Fraction(real(b)) + Fraction(real(c)), fused(a, b, c)),
    ),
    "fma_rz_zero": Case(
        "fma.rz.f32 %f20, %f10, %f11, %f12;", "f", list(OF_ZERO), lambda a, b, c: OF_ZERO[a, b, c]
    ),
    "max": Case(
        "max.f32 %f20, %f10, %f11;", "f", WITH_NAN,
        lambda a, b: 0x7FFFFFFF if a == b == NAN else b if a == NAN else a if b == NAN else
        (a if real(a) > real(b) else b if real(b) > real(a) else a & b),
    ),
    "min_f": Case(
        "min.f32 %f20, %f10, %f11;", "f", WITH_NAN,
        lambda a, b: 0x7FFFFFFF if a == b == NAN else b if a == NAN else a if b == NAN else
        (a if real(a) < real(b) else b if real(b) < real(a) else a | b),
    ),
    "setp_lt": Case("setp.lt.f32 %p20, %f10, %f11;", "p", WITH_NAN, lambda a, b: real(a) < real(b)),
    "setp_ltu": Case("setp.ltu.f32 %p20, %f10, %f11;", "p", WITH_NAN, lambda a, b: not real(a) >= real(b)),
    "setp_ne": Case(
        "setp.ne.f32 %p20, %f10, %f11;", "p", WITH_NAN, lambda a, b: NAN not in (a, b) and real(a) != real(b)
    ),
    "setp_neu": Case("setp.neu.f32 %p20, %f10, %f11;", "p", WITH_NAN, lambda a, b: real(a) != real(b)),
    "setp_equ": Case("setp.equ.f32 %p20, %f10, %f11;", "p", WITH_NAN, lambda a, b: NAN in (a, b) or real(a) == real(b)),
    "setp_num": Case("setp.num.f32 %p20, %f10, %f11;", "p", WITH_NAN, lambda a, b: NAN not in (a, b)),
    "setp_nan": Case("setp.nan.f32 %p20, %f10, %f11;", "p", WITH_NAN, lambda a, b: NAN in (a, b)),
    "ftz": Case(
        "mul.ftz.f32 %f20, %f10, %f11;", "f", [(a, 0x3F800000) for a in FLOATS[:6]] + [(0x00800000, 0x3F000000)],
        lambda a, b: a if a & 0x7F800000 and b == 0x3F800000 else a & NEGATIVE_ZERO,
    ),
    "sat": Case(
        "cvt.sat.f32.f32 %f20, %f10;", "f", [(a,) for a in FLOATS],
        lambda a: 0 if a == NAN or real(a) <= 0 else bits_of(min(real(a), 1.0)),
    ),
    "copysign": Case(
        "copysign.f32 %f20, %f10, %f11;", "f", FLOAT_PAIRS, lambda a, b: a & 0x80000000 | b & 0x7FFFFFFF
    ),
    "to_s32": Case(
        "cvt.rzi.s32.f32 %r20, %f10;", "r", [(a,) for a in (*FLOATS, 0x4F000000, 0xCF000000, 0xCF000001, 0x4EFFFFFF)],
        lambda a: 0 if a == NAN else clamp(int(clamp_float(real(a))), -(2**31), 2**31 - 1),
    ),
    "to_u32": Case(
        "cvt.rzi.u32.f32 %r20, %f10;", "r", [(a,) for a in (*FLOATS, 0x4F800000, 0x4F7FFFFF)],
        lambda a: 0 if a == NAN else clamp(int(clamp_float(real(a))), 0, 2**32 - 1),
    ),
    "to_s64": Case(
        "cvt.rzi.s64.f32 %rd20, %f10;", "rd", [(a,) for a in (*FLOATS, 0x5F000000)],
        lambda a: 2**63 if a == NAN else clamp(int(clamp_float(real(a))), -(2**63), 2**63 - 1),
    ),
    "to_nearest": Case(
        "cvt.rni.s32.f32 %r20, %f10;", "r", [(bits_of(x),) for x in (0.5, 1.5, 2.5, -0.5, -1.5, 0.50000006)],
        lambda a: round(real(a)),
    ),
    "from_s32": Case(
        "cvt.rn.f32.s32 %f20, %r10;", "f", [(a,) for a in (*WORDS, 2**24 + 1, 2**24 + 3)],
        lambda a: bits_of(signed(a)),
    ),
    "half": Case(
        "cvt.rn.f16.f32 %rs20, %f10;", "rs",
        [(a,) for a in (*FLOATS[:-1], *HALFWAY)],
        lambda a: int(half(real(a))),
    ),
    "half_nan": Case("cvt.rn.f16.f32 %rs20, %f10;", "rs", [(NAN,)], lambda a: 0x7FFF),
    "bf16": Case(
        "cvt.rn.bf16x2.f32 %r20, %f10, %f11;", "r",
        [(0x3F808000, 0x3F818000), (0x3F808001, 0x3F807FFF), (0x7F7FFFFF, INF), (NAN, 0x00008000)],
        lambda a, b: bfloat16(a) << 16 | bfloat16(b),
    ),
    "tf32": Case(
        "cvt.rna.tf32.f32 %r20, %f10;", "r", [(0x3F801000,), (0xBF801000,), (0x3F800FFF,), (0x7F7FFFFF,), (INF,)],
        lambda a: a if a == INF else (a + 0x1000) & 0xFFFFE000,
    ),
}  # fmt: skip


def clamp_float(value: float) -> float:
    return max(-(2.0**70), min(2.0**70, value))


def half(value: float) -> np.uint16:
    with np.errstate(over="ignore"):
        return np.float16(value).view(np.uint16)


def bfloat16(bits: int) -> int:
    return 0x7FFF if (bits & 0x7FFFFFFF) > INF else (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


PRODUCTS = {
    "fused": Snippet("mul.f32 %f14, %f10, %f11; add.f32 %f20, %f14, %f12;", "f"),
    "fused_difference": Snippet("mul.f32 %f14, %f10, %f11; sub.f32 %f20, %f12, %f14;", "f"),
    "named": Snippet("mul.rn.f32 %f14, %f10, %f11; add.f32 %f20, %f14, %f12;", "f"),
    "changed": Snippet("mul.f32 %f14, %f10, %f11; mov.f32 %f10, %f12; add.f32 %f20, %f14, %f12;", "f"),
}


@pytest.fixture(scope="module")
def snippets(tmp_path_factory: pytest.TempPathFactory) -> Snippets:
    bodies = {f"case_{name}": Snippet(case.body, case.result) for name, case in CASES.items()}
    return Snippets(bodies | PRODUCTS, tmp_path_factory.mktemp("snippets"))


@pytest.mark.parametrize("name", CASES)
def test_an_instruction_gives_what_the_manual_says(snippets: Snippets, name: str) -> None:
    case = CASES[name]
    bits = {"rd": 64, "rs": 16}.get(case.result, 32)
    for first in range(0, len(case.inputs), THREADS):
        inputs = case.inputs[first : first + THREADS]
        ran = snippets.run(f"case_{name}", inputs)
        assert ran.outcome.status == "ok", ran.message
        expected = [case.model(*values) % 2**bits for values in inputs]
        assert [hex(got) for got in ran.out] == [hex(value) for value in expected], name


def test_a_product_and_a_sum_that_ptxas_may_fuse_are_fused_in_the_runs_that_ask_for_it(snippets: Snippets) -> None:
    a, b, c = 0x3F800001, 0x3F800001, 0xBF800002  # (1 + u)² - (1 + 2u) is u² fused, 0 unfused
    unfused, square = 0, bits_of(2.0**-46)
    for name in ("fused", "fused_difference"):
        sign = 0x80000000 if name == "fused_difference" else 0
        last = c if name == "fused" else c ^ 0x80000000
        assert snippets.run(name, [(a, b, last)]).out == [unfused]
        assert snippets.run(name, [(a, b, last)], fuse=True).out == [square ^ sign]


def test_a_product_with_a_rounding_in_its_name_or_changed_factors_is_never_fused(snippets: Snippets) -> None:
    assert snippets.run("named", [(0x3F800001, 0x3F800001, 0xBF800002)], fuse=True).out == [0]
    assert snippets.run("changed", [(0x3F800001, 0x3F800001, 0xBF800002)], fuse=True).out == [0]
