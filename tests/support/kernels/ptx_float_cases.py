"""Cases of the rules for floats and conversions that the manual calls exact: each opcode on floats at the edges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from tests.support.kernels.ptx_integer_cases import COMPARISONS, JOINED, REGISTER, Inputs
from tests.support.kernels.ptx_models import (
    ANY_NAN,
    FLOATS,
    INF,
    LONG_WORDS,
    NEGATIVE_ZERO,
    ONE,
    Case,
    bfloat16,
    bfloat16_toward_zero,
    bits_of,
    difference,
    flushed,
    fused,
    greatest,
    half,
    half_toward_zero,
    is_nan,
    number,
    quotient,
    real,
    root,
    rounded_to_whole,
    saturated,
    sum_of,
    tf32,
    to_integer,
)
from tests.support.kernels.ptx_models import product as product_of

ALL: Inputs = tuple((a, b) for a, b in product(FLOATS, FLOATS))
# Ties, whole numbers and what lies beside them, ends of integers, of halves and of bfloat16.
SINGLE: Inputs = tuple(
    (a,)
    for a in (
        *FLOATS, 0x3FC00000, 0x40200000, 0xBFC00000, 0xC0200000, 0x3F000001, 0x4F000000, 0xCF000000, 0xCF000001,
        0x4EFFFFFF, 0x4F800000, 0x4F7FFFFF, 0x5F000000, 0x5EFFFFFF, 0xDF000000, 0x5F800000, 0x4B7FFFFF, 0x33000000,
        0x33000001, 0x477FEFFF, 0x477FF000, 0x3F801000, 0x3F803000, 0x3F800FFF, 0x38800000, 0x38801000, 0x3F808000,
        0x3F818000, 0x3F807FFF, 0x7F7F8000, 0x00008000, 0x40800000, 0x3E800000,
    )
)  # fmt: skip
_EDGES = (0, NEGATIVE_ZERO, 1, 0x80000001, 0x00800000, ONE, 0xBF800001, 0x3F7FFFFF, 0x40490FDB, 0x7F7FFFFF, INF)
TRIPLES: Inputs = tuple(
    (a, b, c) for a, b in product(_EDGES[2:], (ONE, 0x3F000000, 0xBF800001, 0x7F7FFFFF)) for c in _EDGES[:9:2]
) + tuple(product((0x3F800001, 0xBF7FFFFF, 0x4D9F2CA1), repeat=3)) + (
    (ONE, ONE, 0xBF800000), (ONE, 0xBF800000, ONE), (0, ONE, 0), (NEGATIVE_ZERO, ONE, 0),
    (NEGATIVE_ZERO, ONE, NEGATIVE_ZERO), (0, INF, ONE), (INF, ONE, 0xFF800000), (1, 0x3F400000, 0),
    (0x7F7FFFFF, 0xFF7FFFFF, 0), (0x00800000, 0x3F7FFFFF, 0),
)  # fmt: skip
HALVES: Inputs = tuple(
    (a,) for a in (0, 0x8000, 1, 0x83FF, 0x0400, 0x3C00, 0xBC01, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x7FC0)
)
INTEGERS: Inputs = tuple(
    (a,) for a in (*LONG_WORDS, 2**24 + 1, 2**24 + 3, 2**25 - 1, 2**40 + 2**16, 2**40 + 2**16 + 1, 2**40 + 3 * 2**16)
)


def _with(model: Callable[..., int], ftz: str, sat: str = "") -> Callable[..., int]:
    """With flushed inputs and result, and saturated."""

    def changed(*values: int) -> int:
        result = flushed(model(*map(flushed, values))) if ftz else model(*values)
        return saturated(result) if sat else result

    return changed


def _arithmetic() -> Iterator[Case]:
    models = {"add": sum_of, "sub": difference, "mul": product_of}
    for name, rounding, ftz, sat in product(models, ("", ".rn"), ("", ".ftz"), ("", ".sat")):
        yield Case(f"{name}{rounding}{ftz}{sat}.f32 %f20, %f10, %f11;", "f", ALL, _with(models[name], ftz, sat))
    for mode, ftz, sat in product(("rn", "rm", "rp", "rz"), ("", ".ftz"), ("", ".sat")):
        yield Case(
            f"fma.{mode}{ftz}{sat}.f32 %f20, %f10, %f11, %f12;", "f", TRIPLES,
            _with(lambda a, b, c, mode=mode: fused(a, b, c, mode), ftz, sat),
        )  # fmt: skip
    for name, ftz, nan in product(("min", "max"), ("", ".ftz"), ("", ".NaN")):
        yield Case(
            f"{name}{ftz}{nan}.f32 %f20, %f10, %f11;", "f", ALL,
            _with(lambda a, b, nan=nan, name=name: greatest(a, b, nan=bool(nan), least=name == "min"), ftz),
        )  # fmt: skip
    for ftz in ("", ".ftz"):
        yield Case(f"div.rn{ftz}.f32 %f20, %f10, %f11;", "f", ALL, _with(quotient, ftz))
        yield Case(f"rcp.rn{ftz}.f32 %f20, %f10;", "f", SINGLE, _with(lambda a: quotient(ONE, a), ftz))
        yield Case(f"sqrt.rn{ftz}.f32 %f20, %f10;", "f", SINGLE, _with(root, ftz))
        yield Case(
            f"neg{ftz}.f32 %f20, %f10;", "f", SINGLE,
            _with(lambda a: ANY_NAN if is_nan(a) else a ^ NEGATIVE_ZERO, ftz),
        )  # fmt: skip
        yield Case(
            f"abs{ftz}.f32 %f20, %f10;", "f", SINGLE,
            _with(lambda a: ANY_NAN if is_nan(a) else a & ~NEGATIVE_ZERO, ftz),
        )  # fmt: skip
    yield Case("copysign.f32 %f20, %f10, %f11;", "f", ALL, lambda a, b: a & NEGATIVE_ZERO | b & ~NEGATIVE_ZERO)


def _comparisons() -> Iterator[Case]:
    for name, unordered, ftz in product(COMPARISONS, ("", "u"), ("", ".ftz")):

        def compared(a: int, b: int, name: str = name, unordered: str = unordered) -> int:
            return bool(unordered) if is_nan(a) or is_nan(b) else COMPARISONS[name](real(a), real(b))  # type: ignore[arg-type]

        yield Case(f"setp.{name}{unordered}{ftz}.f32 %p20, %f10, %f11;", "p", ALL, _flushing(compared, ftz))
    for how, join in JOINED.items():
        for ftz in ("", ".ftz"):
            yield Case(
                f"setp.gtu.{how}{ftz}.f32 %p20, %f10, %f11, %p10;", "p", ALL,
                lambda a, b, join=join, ftz=ftz: join(_flushing(_above_or_nan, ftz)(a, b), a != 0),
            )  # fmt: skip
            yield Case(
                f"setp.nan.{how}{ftz}.f32 %p20, %f10, %f11, !%p10;", "p", ALL,
                lambda a, b, join=join: join(is_nan(a) or is_nan(b), a == 0),
            )  # fmt: skip
    yield Case("setp.num.f32 %p20, %f10, %f11;", "p", ALL, lambda a, b: not is_nan(a) and not is_nan(b))
    tests: dict[str, Callable[[int], bool]] = {
        "finite": lambda a: a & INF != INF, "infinite": lambda a: a & ~NEGATIVE_ZERO == INF,
        "notanumber": is_nan, "number": lambda a: not is_nan(a),
    }  # fmt: skip
    for name, test in tests.items():
        yield Case(f"testp.{name}.f32 %p20, %f10;", "p", SINGLE, test)


def _above_or_nan(a: int, b: int) -> bool:
    return not real(a) <= real(b)


def _flushing(model: Callable[[int, int], int], ftz: str) -> Callable[[int, int], int]:
    """Of inputs: a comparison has no result to flush."""
    return (lambda a, b: model(flushed(a), flushed(b))) if ftz else model


def _conversions() -> Iterator[Case]:
    wholes = ("rni", "rzi", "rmi", "rpi")
    for mode, ftz, sat in product(("", *(f".{mode}" for mode in wholes)), ("", ".ftz"), ("", ".sat")):
        yield Case(
            f"cvt{mode}{ftz}{sat}.f32.f32 %f20, %f10;", "f", SINGLE,
            _with(lambda a, mode=mode: _whole(a, mode[1:]) if mode else a, ftz, sat),
        )  # fmt: skip
    for mode, ftz, kind, bits in product(wholes, ("", ".ftz"), "su", (32, 64)):
        sat = ".sat" if mode == "rmi" else ""
        yield Case(
            f"cvt.{mode}{ftz}{sat}.{kind}{bits}.f32 %{REGISTER[bits]}20, %f10;", REGISTER[bits], SINGLE,
            lambda a, mode=mode, kind=kind, bits=bits, ftz=ftz: to_integer(flushed(a) if ftz else a, mode, kind, bits),
        )  # fmt: skip
    for kind, bits in product("su", (8, 16, 32, 64)):
        yield Case(
            f"cvt.rn.f32.{kind}{bits} %f20, %{REGISTER[max(bits, 16)]}10;", "f", INTEGERS,
            lambda a, kind=kind, bits=bits: _nearest(number(a, kind, bits)),
        )  # fmt: skip
    for ftz in ("", ".ftz"):
        yield Case(f"cvt{ftz}.f32.f16 %f20, %rs10;", "f", HALVES, _of_half)
    yield Case("cvt.f32.bf16 %f20, %rs10;", "f", HALVES, lambda a: ANY_NAN if is_nan(a << 16) else a << 16)
    for kind, narrow in (
        ("rn.f16", half), ("rn.bf16", bfloat16), ("rz.f16", half_toward_zero), ("rz.bf16", bfloat16_toward_zero)
    ):  # fmt: skip
        yield Case(f"cvt.{kind}.f32 %rs20, %f10;", "rs", SINGLE, narrow)
        yield Case(
            f"cvt.{kind}x2.f32 %r20, %f10, %f11;", "r", ALL, lambda a, b, narrow=narrow: narrow(a) << 16 | narrow(b)
        )
    yield Case("cvt.rna.tf32.f32 %r20, %f10;", "r", SINGLE, tf32)


def _whole(a: int, mode: str) -> int:
    return ANY_NAN if is_nan(a) else rounded_to_whole(a, mode)


def _nearest(value: int) -> int:
    """Of a whole number, rounded once."""
    size = abs(value)
    shift = max(size.bit_length() - 24, 0)
    steps, rest = size >> shift, size % (1 << shift)
    steps += rest * 2 > 1 << shift or (rest * 2 == 1 << shift and steps & 1)
    return bits_of(float(steps << shift) * (-1 if value < 0 else 1))


def _of_half(a: int) -> int:
    sign, exponent, fraction = a & 0x8000, a >> 10 & 31, a & 0x3FF
    if exponent == 31 and fraction:
        return ANY_NAN
    size = float("inf") if exponent == 31 else (fraction + (1024 if exponent else 0)) * 2.0 ** (max(exponent, 1) - 25)
    return bits_of(size) | sign << 16


FLOAT_CASES = {case.body: case for cases in (_arithmetic, _comparisons, _conversions) for case in cases()}
