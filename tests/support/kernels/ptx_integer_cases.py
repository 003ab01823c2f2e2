"""Cases of the rules for integers, bits, predicates and moves: each opcode on the words at the edges of its type."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import product

from tests.support.kernels.ptx_models import (
    LONG_WORDS,
    PERMUTED,
    SHIFTS,
    WORDS,
    Case,
    cut,
    extracted,
    inserted,
    number,
    permuted,
    signed,
)

Inputs = tuple[tuple[int, ...], ...]
REGISTER = {16: "rs", 32: "r", 64: "rd"}
PAIRS: Inputs = tuple(product(WORDS, WORDS))
LONG_PAIRS: Inputs = tuple(product(LONG_WORDS, LONG_WORDS))
TRIPLES: Inputs = tuple((a, b, c) for a, b in LONG_PAIRS[::2] for c in (1, 2**64 - 1))
BY_ZERO_NOT: Inputs = tuple((a, b) for a, b in LONG_PAIRS if b % 2**16)
SHIFTED: Inputs = tuple((a, n) for a in LONG_WORDS for n in SHIFTS)
FUNNELS: Inputs = tuple(product(WORDS[:4], WORDS[-3:], SHIFTS))
_FIELDS = tuple(product((0, 5, 31, 32, 60, 260), (0, 1, 7, 32, 64, 255, 256, 263)))
INSERTED: Inputs = tuple((0x96A5A5A5A5A5A5A5, into, at, n) for into in (0, 2**64 - 1) for at, n in _FIELDS)
EXTRACTED: Inputs = tuple((a, at, n) for a in (0xA5A5A5A5A5A5A5A5, 0x5A5A5A5A5A5A5A5A) for at, n in _FIELDS)
BYTES: Inputs = tuple(
    (0x80F10273, 0x9A4B5C8D, s) for s in (0x3210, 0x7654, 0x5140, 0x7362, 0xBA98, 0xFEDC, 0x8421, 0xFFFF3210, 1, 2, 3)
)
FOURS: Inputs = tuple((a, b, c, d) for a, b in LONG_PAIRS for c, d in ((7, 2**64 - 1), (5, 5), (2**64 - 1, 0)))


def in_(place: int, bits: int) -> str:
    return f"%{REGISTER[bits]}{10 + place}"


def out(bits: int) -> str:
    return f"%{REGISTER[bits]}20"


def _numbers(opcode: str, inputs: Inputs, model: Callable[..., int], widths: tuple[int, ...]) -> Iterator[Case]:
    """Of as many operands as the inputs have, of one type."""
    for kind, bits in product("su", widths):
        read = [in_(place, bits) for place in range(len(inputs[0]))]

        def modelled(*values: int, kind: str = kind, bits: int = bits) -> int:
            return model(*(number(value, kind, bits) for value in values))

        yield Case(f"{opcode}.{kind}{bits} {out(bits)}, {', '.join(read)};", REGISTER[bits], inputs, modelled)


def _arithmetic() -> Iterator[Case]:
    every = (16, 32, 64)
    for name, model in (("add", lambda a, b: a + b), ("sub", lambda a, b: a - b), ("mul.lo", lambda a, b: a * b)):
        yield from _numbers(name, LONG_PAIRS, model, every)
    for name, best in (("min", min), ("max", max)):
        yield from _numbers(name, LONG_PAIRS, best, every)
    yield from _numbers("div", BY_ZERO_NOT, cut, every)
    yield from _numbers("rem", BY_ZERO_NOT, lambda a, b: a - cut(a, b) * b, every)
    yield from _numbers("mad.lo", TRIPLES, lambda a, b, c: a * b + c, every)
    for kind, bits in product("su", every):
        yield Case(
            f"mul.hi.{kind}{bits} {out(bits)}, {in_(0, bits)}, {in_(1, bits)};", REGISTER[bits], LONG_PAIRS,
            lambda a, b, k=kind, n=bits: number(a, k, n) * number(b, k, n) >> n,
        )  # fmt: skip
        yield Case(
            f"mad.hi.{kind}{bits} {out(bits)}, {in_(0, bits)}, {in_(1, bits)}, {in_(2, bits)};", REGISTER[bits],
            TRIPLES, lambda a, b, c, k=kind, n=bits: (number(a, k, n) * number(b, k, n) >> n) + c,
        )  # fmt: skip
    for kind, bits in product("su", (16, 32)):
        yield Case(
            f"mul.wide.{kind}{bits} {out(2 * bits)}, {in_(0, bits)}, {in_(1, bits)};", REGISTER[2 * bits], LONG_PAIRS,
            lambda a, b, k=kind, n=bits: number(a, k, n) * number(b, k, n),
        )  # fmt: skip
        yield Case(
            f"mad.wide.{kind}{bits} {out(2 * bits)}, {in_(0, bits)}, {in_(1, bits)}, {in_(2, 2 * bits)};",
            REGISTER[2 * bits], TRIPLES, lambda a, b, c, k=kind, n=bits: number(a, k, n) * number(b, k, n) + c,
        )  # fmt: skip
    for bits in every:
        one = f"{out(bits)}, {in_(0, bits)};"
        yield Case(f"neg.s{bits} {one}", REGISTER[bits], LONG_PAIRS, lambda a, b: -a)
        yield Case(f"abs.s{bits} {one}", REGISTER[bits], LONG_PAIRS, lambda a, b, n=bits: abs(signed(a, n)))


def _carries() -> Iterator[Case]:
    def chain(instructions: str, model: Callable[..., int], bits: int) -> Case:
        """Instructions in which a, b, c, d are the inputs, s is a spare register and o the last one's."""
        words = {**dict(zip("abcd", (in_(place, bits) for place in range(4)), strict=True)), "o": out(bits)}
        words["s"] = f"%{REGISTER[bits]}14"
        body = re.sub(r"(?<= )[abcdos](?=[,;])", lambda match: words[match[0]], instructions)
        return Case(body, REGISTER[bits], FOURS, lambda *values: model(*(value % 2**bits for value in values), bits))

    for kind, bits in product("su", (32, 64)):
        t = f"{kind}{bits}"
        yield chain(
            f"add.cc.{t} s, a, b; addc.cc.{t} s, c, d; addc.{t} o, c, d;",
            lambda a, b, c, d, n: c + d + ((a + b >> n) + c + d >> n), bits,
        )  # fmt: skip
        yield chain(
            f"sub.cc.{t} s, a, b; subc.cc.{t} s, c, d; subc.{t} o, c, d;",
            lambda a, b, c, d, n: c - d - (c < d + (a < b)), bits,
        )  # fmt: skip
    for bits in (32, 64):
        t = f"u{bits}"
        yield chain(
            f"mad.lo.cc.{t} s, a, b, d; madc.hi.{t} o, a, b, c;",
            lambda a, b, c, d, n: (a * b >> n) + c + ((a * b) % 2**n + d >> n), bits,
        )  # fmt: skip
        yield chain(
            f"mad.hi.cc.{t} s, a, b, d; madc.lo.cc.{t} s, a, b, d; addc.{t} o, c, c;",
            lambda a, b, c, d, n: 2 * c + ((a * b) % 2**n + d + ((a * b >> n) + d >> n) >> n), bits,
        )  # fmt: skip


def _bits() -> Iterator[Case]:
    logic: dict[str, Callable[[int, int], int]] = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}
    for name, model in logic.items():
        for bits in REGISTER:
            yield Case(
                f"{name}.b{bits} {out(bits)}, {in_(0, bits)}, {in_(1, bits)};", REGISTER[bits], LONG_PAIRS, model
            )
        yield Case(
            f"setp.ne.s64 %p11, %rd11, 0; {name}.pred %p20, %p10, %p11;", "p", LONG_PAIRS,
            lambda a, b, model=model: model(a != 0, b != 0),
        )  # fmt: skip
    for bits in REGISTER:
        yield Case(f"not.b{bits} {out(bits)}, {in_(0, bits)};", REGISTER[bits], LONG_PAIRS, lambda a, b: ~a)
    yield Case("not.pred %p20, %p10;", "p", LONG_PAIRS, lambda a, b: a == 0)
    tables: dict[int, Callable[[int, int, int], int]] = {
        0xE8: lambda a, b, c: a & b | a & c | b & c, 0x96: lambda a, b, c: a ^ b ^ c, 0x02: lambda a, b, c: ~a & ~b & c,
    }  # fmt: skip
    for table, of_three in tables.items():
        yield Case(f"lop3.b32 %r20, %r10, %r11, %r12, {table:#x};", "r", FUNNELS, of_three)
    for bits in (32, 64):
        yield Case(f"popc.b{bits} %r20, {in_(0, bits)};", "r", LONG_PAIRS, lambda a, b, n=bits: (a % 2**n).bit_count())
        yield Case(
            f"clz.b{bits} %r20, {in_(0, bits)};", "r", LONG_PAIRS, lambda a, b, n=bits: n - (a % 2**n).bit_length()
        )
    yield Case("brev.b32 %r20, %r10;", "r", LONG_PAIRS, lambda a, b: int(f"{a % 2**32:032b}"[::-1], 2))


def _shifts() -> Iterator[Case]:
    for bits in REGISTER:
        a = in_(0, bits)
        yield Case(
            f"shl.b{bits} {out(bits)}, {a}, %r11;", REGISTER[bits], SHIFTED, lambda a, n, w=bits: a << n if n < w else 0
        )
        for kind in "sub":
            yield Case(
                f"shr.{kind}{bits} {out(bits)}, {a}, %r11;", REGISTER[bits], SHIFTED,
                lambda a, n, k=kind, w=bits: number(a, k, w) >> min(n, w),
            )  # fmt: skip
        for by in (3, bits - 1, bits, bits + 8):
            yield Case(f"shl.b{bits} {out(bits)}, {a}, {by};", REGISTER[bits], SHIFTED, lambda a, n, by=by: a << by)
            yield Case(
                f"shr.s{bits} {out(bits)}, {a}, {by};", REGISTER[bits], SHIFTED,
                lambda a, n, by=by, w=bits: signed(a, w) >> by,
            )  # fmt: skip
    for mode, limit in (("wrap", lambda n: n & 31), ("clamp", lambda n: min(n, 32))):
        read = f"{mode}.b32 %r20, %r10, %r11, %r12;"
        yield Case(f"shf.l.{read}", "r", FUNNELS, lambda a, b, n, limit=limit: (b << 32 | a) << limit(n) >> 32)
        yield Case(f"shf.r.{read}", "r", FUNNELS, lambda a, b, n, limit=limit: (b << 32 | a) >> limit(n))


def _fields() -> Iterator[Case]:
    for bits in (32, 64):
        yield Case(
            f"bfi.b{bits} {out(bits)}, {in_(0, bits)}, {in_(1, bits)}, %r12, %r13;", REGISTER[bits], INSERTED,
            lambda a, b, at, n, w=bits: inserted(a, b, at, n, w),
        )  # fmt: skip
        for kind in "su":
            yield Case(
                f"bfe.{kind}{bits} {out(bits)}, {in_(0, bits)}, %r11, %r12;", REGISTER[bits], EXTRACTED,
                lambda a, at, n, k=kind, w=bits: extracted(a, at, n, k == "s", w),
            )  # fmt: skip
    yield Case("prmt.b32 %r20, %r10, %r11, %r12;", "r", BYTES, permuted)
    for mode, selectors in PERMUTED.items():
        yield Case(
            f"prmt.b32.{mode} %r20, %r10, %r11, %r12;", "r", BYTES,
            lambda a, b, s, selectors=selectors: permuted(a, b, int(selectors[s & 3], 16)),
        )  # fmt: skip


COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
UNSIGNED_COMPARISONS = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
JOINED: dict[str, Callable[[bool, bool], bool]] = {
    "and": lambda a, b: a and b, "or": lambda a, b: a or b, "xor": lambda a, b: a != b,
}  # fmt: skip


def _predicates() -> Iterator[Case]:
    def compared(name: str, meaning: str, kind: str, bits: int) -> Case:
        return Case(
            f"setp.{name}.{kind}{bits} %p20, {in_(0, bits)}, {in_(1, bits)};", "p", LONG_PAIRS,
            lambda a, b: COMPARISONS[meaning](number(a, kind, bits), number(b, kind, bits)),
        )  # fmt: skip

    for name, kind, bits in product(COMPARISONS, "sub", REGISTER):
        if kind != "b" or name in ("eq", "ne"):
            yield compared(name, name, kind, bits)
    for name, bits in product(UNSIGNED_COMPARISONS, REGISTER):
        yield compared(name, UNSIGNED_COMPARISONS[name], "u", bits)
    for how, join in JOINED.items():
        for negated in ("", "!"):
            yield Case(
                f"setp.lt.{how}.s32 %p20, %r10, %r11, {negated}%p10;", "p", PAIRS,
                lambda a, b, join=join, negated=negated: join(signed(a) < signed(b), (a != 0) != (negated == "!")),
            )  # fmt: skip
    for kind, bits in (("b", 16), ("s", 32), ("u", 64), ("f", 32)):
        name = "f" if kind == "f" else REGISTER[bits]
        yield Case(
            f"setp.lt.u32 %p11, %r10, %r11; selp.{kind}{bits} %{name}20, %{name}12, %{name}13, %p11;", name, FOURS,
            lambda a, b, c, d: c if a % 2**32 < b % 2**32 else d,
        )  # fmt: skip
    yield Case("mov.pred %p20, %p10;", "p", PAIRS, lambda a, b: a != 0)
    yield Case("mov.pred %p20, !%p10;", "p", PAIRS, lambda a, b: a == 0)


def _moves() -> Iterator[Case]:
    for kind, bits in (("b", 16), ("u", 16), ("s", 32), ("u", 64)):
        yield Case(f"mov.{kind}{bits} {out(bits)}, {in_(0, bits)};", REGISTER[bits], LONG_PAIRS, lambda a, b: a)
    yield Case("mov.f32 %f20, %f10;", "f", PAIRS, lambda a, b: a)
    yield Case("mov.b32 %r20, {%rs10, %rs11};", "r", LONG_PAIRS, lambda a, b: a % 2**16 | b % 2**16 << 16)
    yield Case("mov.b32 {%rs14, %rs20}, %r10;", "rs", LONG_PAIRS, lambda a, b: a >> 16)
    yield Case("mov.b64 {%r20, %r14}, %rd10;", "r", LONG_PAIRS, lambda a, b: a)
    yield Case(
        "mov.b64 %rd20, {%rs10, %rs11, %rs11, %rs10};", "rd", LONG_PAIRS,
        lambda a, b: sum(word % 2**16 << 16 * place for place, word in enumerate((a, b, b, a))),
    )  # fmt: skip
    for to, source in product(product("su", (8, 16, 32, 64)), repeat=2):
        target, register = max(to[1], 16), max(source[1], 16)
        yield Case(
            f"cvt.{to[0]}{to[1]}.{source[0]}{source[1]} {out(target)}, {in_(0, register)};", REGISTER[target],
            LONG_PAIRS, lambda a, b, to=to, source=source: number(number(a, *source), *to),
        )  # fmt: skip
    # Types narrower than their registers: cut on the way in, filled with the sign on the way out.
    yield Case("cvt.s64.s32 %rd20, %rd10;", "rd", LONG_PAIRS, lambda a, b: signed(a))
    yield Case("cvt.s8.s32 %r20, %r10;", "r", LONG_PAIRS, lambda a, b: signed(a, 8))


INTEGER_CASES = {
    case.body: case
    for cases in (_arithmetic, _carries, _bits, _shifts, _fields, _predicates, _moves)
    for case in cases()
}
