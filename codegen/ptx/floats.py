"""Floats and conversions (PTX ISA, "Floating point instructions", "Data movement and conversion: cvt")."""

import re
from typing import NamedTuple

from codegen.ptx.integers import combined
from codegen.ptx.operands import SIGNED, UNSIGNED, Operands
from codegen.ptx.rules import Match, rule

_ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_TOWARD = {"rn": "", "rz": "_toward_zero"}
_TO_INTEGER = {"rni": "nearest", "rzi": "toward_zero", "rmi": "down", "rpi": "up"}
# ptxas may make one fma of such a product and such a sum: those without a rounding in their name. Of a sum that
# saturates it makes FFMA.SAT.
FUSIBLE_PRODUCT, FUSIBLE_SUM = re.compile(r"mul(\.ftz)?\.f32"), re.compile(r"(?:add|sub)(\.ftz)?(\.sat)?\.f32")
APPROXIMATE = re.compile(r"(?:ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh|div)\.(?:approx|full)(?:\.ftz)?\.f32")


class Product(NamedTuple):
    """The factors of a product that a sum may be fused with, whether subnormal numbers count as zeros, and whether its
    sign was changed since."""

    first: str
    second: str
    flushed: bool
    negated: bool = False

    def negative(self) -> "Product":
        return self._replace(negated=not self.negated)

    def with_factor(self, factor: str, other: str) -> "Product":
        first, second = (other if each == factor else each for each in self[:2])
        return self._replace(first=first, second=second)


def _flushed(text: str, flush: str | None) -> str:
    return f"flush({text})" if flush else text


def _result(value: str, flush: str | None, saturate: str | None) -> str:
    value = _flushed(value, flush)
    return f"saturate({value})" if saturate else value


@rule(r"(add|sub|mul)(?:\.(rn))?(\.ftz)?(\.sat)?\.f32")
def _arithmetic(operands: Operands, match: Match) -> str:
    operands.count(3)
    first, second = (_flushed(operands.float(number), match[3]) for number in (1, 2))
    return f"{operands.out(0, 32)} = {_result(f'{match[1]}_f32({first}, {second})', match[3], match[4])};"


def fused_sum(operands: Operands, products: tuple[Product | None, Product | None]) -> str:
    """A sum of which `products` are what its two terms were made of, as ptxas may compute it: unfused or fused, as the
    run says. Of two products it is the first that is fused."""
    match = FUSIBLE_SUM.fullmatch(operands.instruction.opcode)
    assert match is not None
    terms = [operands.float(1), operands.float(2)]
    subtract = operands.instruction.opcode.startswith("sub")
    which = 0 if products[0] is not None else 1
    product = products[which]
    assert product is not None
    factor, other = f"neg_f32({product.first})" if product.negated else product.first, terms[1 - which]
    if subtract:  # x * y - c, or c - x * y
        factor, other = (factor, f"neg_f32({other})") if which == 0 else (f"neg_f32({factor})", other)
    flush, saturate = match[1], match[2]
    factors = ", ".join(_flushed(each, flush) for each in (factor, product.second, other))
    fused = _result(f"fma_f32({factors})", flush, saturate)
    name = "sub" if subtract else "add"
    plain = _result(f"{name}_f32({_flushed(terms[0], flush)}, {_flushed(terms[1], flush)})", flush, saturate)
    return f"{operands.out(0, 32)} = fuse ? {fused} : {plain};"


@rule(r"fma\.(rn|rm|rp|rz)(\.ftz)?(\.sat)?\.f32")
def _fma(operands: Operands, match: Match) -> str:
    operands.count(4)
    values = ", ".join(_flushed(operands.float(number), match[2]) for number in (1, 2, 3))
    name = "fma_f32" if match[1] == "rn" else f"fma_{match[1]}_f32"
    return f"{operands.out(0, 32)} = {_result(f'{name}({values})', match[2], match[3])};"


@rule(r"(min|max)(\.ftz)?(\.NaN)?\.f32")
def _extremum(operands: Operands, match: Match) -> str:
    operands.count(3)
    values = ", ".join(_flushed(operands.float(number), match[2]) for number in (1, 2))
    return f"{operands.out(0, 32)} = {match[1]}_f32<{'true' if match[3] else 'false'}>({values});"


@rule(r"div\.rn(\.ftz)?\.f32")
def _divide(operands: Operands, match: Match) -> str:
    operands.count(3)
    first, second = (_flushed(operands.float(number), match[1]) for number in (1, 2))
    return f"{operands.out(0, 32)} = {_flushed(f'div_f32({first}, {second})', match[1])};"


@rule(r"(rcp|sqrt)\.rn(\.ftz)?\.f32")
def _rounded(operands: Operands, match: Match) -> str:
    operands.count(2)
    value = f"{match[1]}_f32({_flushed(operands.float(1), match[2])})"
    return f"{operands.out(0, 32)} = {_flushed(value, match[2])};"


@rule(r"(neg|abs)(\.ftz)?\.f32")
def _sign(operands: Operands, match: Match) -> str:
    operands.count(2)
    return f"{operands.out(0, 32)} = {match[1]}_f32({_flushed(operands.float(1), match[2])});"


@rule(r"copysign\.f32")
def _copysign(operands: Operands, match: Match) -> str:
    """The sign of the first, the rest of the second."""
    operands.count(3)
    return f"{operands.out(0, 32)} = ({operands.float(1)} & 0x80000000u) | ({operands.float(2)} & 0x7fffffffu);"


@rule(r"(ex2|lg2|rcp|rsqrt|sqrt|sin|cos)\.approx(\.ftz)?\.f32")
def _approximate(operands: Operands, match: Match) -> str:
    operands.count(2)
    value = f"{match[1]}_approx({_flushed(operands.float(1), match[2])})"
    return f"{operands.out(0, 32)} = {_flushed(value, match[2])};"


@rule(r"tanh\.approx\.f32")
def _tanh(operands: Operands, match: Match) -> str:
    operands.count(2)
    return f"{operands.out(0, 32)} = tanh_approx({operands.float(1)});"


@rule(r"div\.(approx|full)(\.ftz)?\.f32")
def _approximate_quotient(operands: Operands, match: Match) -> str:
    operands.count(3)
    first, second = (_flushed(operands.float(number), match[2]) for number in (1, 2))
    return f"{operands.out(0, 32)} = {_flushed(f'div_{match[1]}({first}, {second})', match[2])};"


@rule(r"setp\.(eq|ne|lt|le|gt|ge)(u?)(?:\.(and|or|xor))?(\.ftz)?\.f32")
def _compare(operands: Operands, match: Match) -> str:
    """Of a NaN every comparison is false, and true with `u`."""
    operands.count(4 if match[3] else 3)
    first, second = (_flushed(operands.float(number), match[4]) for number in (1, 2))
    # C++ says that a NaN is unequal to all; PTX' `ne` says that it is not.
    result = f"float_of({first}) {_ORDERED[match[1]]} float_of({second})"
    if match[2]:
        result = f"({result} || unordered({first}, {second}))"
    elif match[1] == "ne":
        result = f"({result} && !unordered({first}, {second}))"
    return f"{operands.out(0, 1)} = {combined(operands, result, match[3])};"


@rule(r"setp\.(num|nan)(?:\.(and|or|xor))?(\.ftz)?\.f32")
def _ordered(operands: Operands, match: Match) -> str:
    operands.count(4 if match[2] else 3)
    result = f"unordered({operands.float(1)}, {operands.float(2)})"
    result = f"!{result}" if match[1] == "num" else result
    return f"{operands.out(0, 1)} = {combined(operands, result, match[2])};"


@rule(r"testp\.(finite|infinite|notanumber|number)\.f32")
def _test(operands: Operands, match: Match) -> str:
    operands.count(2)
    return f"{operands.out(0, 1)} = is_{match[1]}({operands.float(1)});"


@rule(r"cvt(?:\.(rni|rzi|rmi|rpi))?(\.ftz)?(\.sat)?\.f32\.f32")
def _round_float(operands: Operands, match: Match) -> str:
    operands.count(2)
    value = _flushed(operands.float(1), match[2])
    value = f"round_{_TO_INTEGER[match[1]]}({value})" if match[1] else value
    return f"{operands.out(0, 32)} = {_result(value, match[2], match[3])};"


@rule(r"cvt\.(rni|rzi|rmi|rpi)(\.ftz)?(?:\.sat)?\.([su])(32|64)\.f32")
def _to_integer(operands: Operands, match: Match) -> str:
    operands.count(2)
    bits = int(match[4])
    whole = f"round_{_TO_INTEGER[match[1]]}({_flushed(operands.float(1), match[2])})"
    kind = (SIGNED if match[3] == "s" else UNSIGNED)[bits]
    return f"{operands.out(0, bits)} = to_integer<{kind}>({whole});"


@rule(r"cvt\.rn\.f32\.([su])(8|16|32|64)")
def _from_integer(operands: Operands, match: Match) -> str:
    operands.count(2)
    bits = int(match[2])
    value = (operands.signed if match[1] == "s" else operands.value)(1, bits, wider=True)
    return f"{operands.out(0, 32)} = bits_of(static_cast<float>({value}));"


@rule(r"cvt(?:\.ftz)?\.f32\.f16")
def _from_half(operands: Operands, match: Match) -> str:
    operands.count(2)
    return f"{operands.out(0, 32)} = bits_of(to_float(Half{{{operands.value(1, 16)}}}));"


@rule(r"cvt\.f32\.bf16")
def _from_bfloat16(operands: Operands, match: Match) -> str:
    operands.count(2)
    return f"{operands.out(0, 32)} = uint32_t({operands.value(1, 16)}) << 16;"


@rule(r"cvt\.(rn|rz)\.(f16|bf16)\.f32")
def _narrow(operands: Operands, match: Match) -> str:
    operands.count(2)
    return f"{operands.out(0, 16)} = to_{match[2]}{_TOWARD[match[1]]}({operands.float(1)});"


@rule(r"cvt\.(rn|rz)\.(f16|bf16)x2\.f32")
def _narrow_pair(operands: Operands, match: Match) -> str:
    """The first becomes the upper half."""
    operands.count(3)
    high, low = (f"to_{match[2]}{_TOWARD[match[1]]}({operands.float(number)})" for number in (1, 2))
    return f"{operands.out(0, 32)} = uint32_t({high}) << 16 | {low};"


@rule(r"cvt\.rna\.tf32\.f32")
def _to_tf32(operands: Operands, match: Match) -> str:
    operands.count(2)
    return f"{operands.out(0, 32)} = to_tf32({operands.float(1)});"
