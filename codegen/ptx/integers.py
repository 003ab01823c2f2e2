"""Integers, bits, predicates and moves (PTX ISA, "Integer arithmetic", "Logic and shift", "Comparison")."""

import re

from codegen.ptx.operands import SIGNED, UNSIGNED, Operands
from codegen.ptx.rules import Match, rule

_LOGIC = {"and": "&", "or": "|", "xor": "^"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED_COMPARE = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_HALF = re.compile(r"\{.*\}")


def _of(operands: Operands, number: int, kind: str, bits: int, *, wider: bool = False) -> str:
    """An operand of an integer type."""
    return (operands.signed if kind == "s" else operands.value)(number, bits, wider=wider)


@rule(r"(add|sub|mul\.lo)\.([su])(16|32|64)")
def _arithmetic(operands: Operands, match: Match) -> str:
    operands.count(3)
    bits, sign = int(match[3]), {"add": "+", "sub": "-", "mul.lo": "*"}[match[1]]
    first = operands.value(1, bits)
    # Two uint16_t are multiplied as ints, which may overflow.
    first = f"uint32_t({first})" if bits == 16 else first
    return f"{operands.out(0, bits)} = {first} {sign} {operands.value(2, bits)};"


@rule(r"mul\.wide\.([su])(16|32)")
def _mul_wide(operands: Operands, match: Match) -> str:
    operands.count(3)
    kind, bits = match[1], int(match[2])
    wide = (SIGNED if kind == "s" else UNSIGNED)[2 * bits]
    first, second = _of(operands, 1, kind, bits), _of(operands, 2, kind, bits)
    return f"{operands.out(0, 2 * bits)} = {wide}({first}) * {wide}({second});"


@rule(r"mul\.hi\.([su])(16|32|64)")
def _mul_hi(operands: Operands, match: Match) -> str:
    operands.count(3)
    kind, bits = match[1], int(match[2])
    return f"{operands.out(0, bits)} = mul_hi({_of(operands, 1, kind, bits)}, {_of(operands, 2, kind, bits)});"


@rule(r"mad\.(lo|hi)\.([su])(16|32|64)")
def _mad(operands: Operands, match: Match) -> str:
    operands.count(4)
    kind, bits = match[2], int(match[3])
    first, second = _of(operands, 1, kind, bits), _of(operands, 2, kind, bits)
    wide = "uint32_t" if bits == 16 else UNSIGNED[bits]
    product = f"{wide}({first}) * {wide}({second})" if match[1] == "lo" else f"{wide}(mul_hi({first}, {second}))"
    return f"{operands.out(0, bits)} = {product} + {operands.value(3, bits)};"


@rule(r"mad\.wide\.([su])(16|32)")
def _mad_wide(operands: Operands, match: Match) -> str:
    operands.count(4)
    kind, bits = match[1], int(match[2])
    wide = (SIGNED if kind == "s" else UNSIGNED)[2 * bits]
    product = f"{wide}({_of(operands, 1, kind, bits)}) * {wide}({_of(operands, 2, kind, bits)})"
    return f"{operands.out(0, 2 * bits)} = {UNSIGNED[2 * bits]}({product}) + {operands.value(3, 2 * bits)};"


@rule(r"(add|sub)(c?)(\.cc)?\.([su])(32|64)")
def _carried(operands: Operands, match: Match) -> str:
    """With the condition code; without any of it the plain rule has been taken."""
    operands.count(3)
    bits = int(match[5])
    reads, writes = ("carry" if match[2] else "false"), ("true" if match[3] else "false")
    return (
        f"{operands.out(0, bits)} = {match[1]}_carried<{UNSIGNED[bits]}>"
        f"({operands.value(1, bits)}, {operands.value(2, bits)}, {reads}, {writes}, carry);"
    )


@rule(r"(mad)(c?)\.(lo|hi)(\.cc)?\.u(32|64)")
def _mad_carried(operands: Operands, match: Match) -> str:
    operands.count(4)
    bits = int(match[5])
    first, second = operands.value(1, bits), operands.value(2, bits)
    product = f"{UNSIGNED[bits]}({first} * {second})" if match[3] == "lo" else f"mul_hi({first}, {second})"
    reads, writes = ("carry" if match[2] else "false"), ("true" if match[4] else "false")
    return (
        f"{operands.out(0, bits)} = add_carried<{UNSIGNED[bits]}>"
        f"({product}, {operands.value(3, bits)}, {reads}, {writes}, carry);"
    )


@rule(r"(div|rem|min|max)\.([su])(16|32|64)")
def _quotient_or_extremum(operands: Operands, match: Match) -> str:
    operands.count(3)
    kind, bits = match[2], int(match[3])
    name = f"{match[1]}_{'signed' if kind == 's' else 'unsigned'}"
    return f"{operands.out(0, bits)} = {name}({_of(operands, 1, kind, bits)}, {_of(operands, 2, kind, bits)});"


@rule(r"(neg|abs)\.s(16|32|64)")
def _negated_or_absolute(operands: Operands, match: Match) -> str:
    operands.count(2)
    bits = int(match[2])
    value = operands.value(1, bits)
    negated = f"{UNSIGNED[bits]}(0u - {value})"
    result = negated if match[1] == "neg" else f"{SIGNED[bits]}({value}) < 0 ? {negated} : {value}"
    return f"{operands.out(0, bits)} = {result};"


@rule(r"(and|or|xor)\.(?:b(16|32|64)|pred)")
def _logic(operands: Operands, match: Match) -> str:
    operands.count(3)
    if not match[2]:
        first, second = operands.predicate(1), operands.predicate(2)
        return f"{operands.out(0, 1)} = bool({first}) {_LOGIC[match[1]]} bool({second});"
    bits = int(match[2])
    return f"{operands.out(0, bits)} = {operands.value(1, bits)} {_LOGIC[match[1]]} {operands.value(2, bits)};"


@rule(r"not\.(?:b(16|32|64)|pred)")
def _not(operands: Operands, match: Match) -> str:
    operands.count(2)
    if not match[1]:
        return f"{operands.out(0, 1)} = !{operands.predicate(1)};"
    return f"{operands.out(0, int(match[1]))} = ~{operands.value(1, int(match[1]))};"


@rule(r"lop3\.b32")
def _lop3(operands: Operands, match: Match) -> str:
    operands.count(5)
    values = ", ".join(operands.value(number, 32) for number in (1, 2, 3))
    return f"{operands.out(0, 32)} = lop3({values}, {operands.constant(4) & 255}u);"


@rule(r"(shl|shr)\.([bsu])(16|32|64)")
def _shift(operands: Operands, match: Match) -> str:
    """By any number of bits: from as many as the type has on nothing is left, or the sign."""
    operands.count(3)
    kind, bits = match[2], int(match[3])
    if match[1] == "shl" and kind != "b":
        raise operands.instruction.refused("shl has no type of numbers")
    value, amount = _of(operands, 1, kind, bits), operands.value(2, 32)
    number = operands.instruction.operands[2]
    if number.isdecimal() and int(number) < bits:  # as most are: g++ has less to do
        return f"{operands.out(0, bits)} = {value} {'<<' if match[1] == 'shl' else '>>'} {number};"
    name = "shift_left" if match[1] == "shl" else "shift_right"
    return f"{operands.out(0, bits)} = {name}({value}, {amount});"


@rule(r"shf\.([lr])\.(wrap|clamp)\.b32")
def _funnel(operands: Operands, match: Match) -> str:
    operands.count(4)
    amount = operands.value(3, 32)
    bounded = f"({amount} & 31u)" if match[2] == "wrap" else f"min_unsigned({amount}, uint32_t(32))"
    name = "funnel_left" if match[1] == "l" else "funnel_right"
    return f"{operands.out(0, 32)} = {name}({operands.value(1, 32)}, {operands.value(2, 32)}, {bounded});"


@rule(r"bfi\.b(32|64)")
def _insert(operands: Operands, match: Match) -> str:
    operands.count(5)
    bits = int(match[1])
    values = f"{operands.value(1, bits)}, {operands.value(2, bits)}"
    return f"{operands.out(0, bits)} = insert_bits({values}, {operands.value(3, 32)}, {operands.value(4, 32)});"


@rule(r"bfe\.([su])(32|64)")
def _extract(operands: Operands, match: Match) -> str:
    operands.count(4)
    bits = int(match[2])
    value = _of(operands, 1, match[1], bits)
    return f"{operands.out(0, bits)} = extract_bits({value}, {operands.value(2, 32)}, {operands.value(3, 32)});"


@rule(r"(popc|clz)\.b(32|64)")
def _count_bits(operands: Operands, match: Match) -> str:
    operands.count(2)
    return f"{operands.out(0, 32)} = {match[1]}({operands.value(1, int(match[2]))});"


@rule(r"brev\.b32")
def _reverse(operands: Operands, match: Match) -> str:
    operands.count(2)
    return f"{operands.out(0, 32)} = brev({operands.value(1, 32)});"


@rule(r"prmt\.b32(?:\.(f4e|b4e|rc8|ecl|ecr|rc16))?")
def _permute(operands: Operands, match: Match) -> str:
    operands.count(4)
    values = ", ".join(operands.value(number, 32) for number in (1, 2, 3))
    return f"{operands.out(0, 32)} = permute_{match[1] or 'bytes'}({values});"


@rule(r"setp\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)(?:\.(and|or|xor))?\.([bsu])(16|32|64)")
def _compare(operands: Operands, match: Match) -> str:
    operands.count(4 if match[2] else 3)
    kind, bits = match[3], int(match[4])
    if (kind != "u" and match[1] in _UNSIGNED_COMPARE) or (kind == "b" and match[1] not in ("eq", "ne")):
        raise operands.instruction.refused(f"{match[1]} is no comparison of .{kind}{bits}")
    sign = {**_COMPARE, **_UNSIGNED_COMPARE}[match[1]]
    result = f"{_of(operands, 1, kind, bits)} {sign} {_of(operands, 2, kind, bits)}"
    return f"{operands.out(0, 1)} = {combined(operands, result, match[2])};"


def combined(operands: Operands, result: str, how: str | None) -> str:
    """A comparison with the predicate that an instruction joins to it."""
    return f"({result}) {_LOGIC[how]} bool({operands.predicate(3)})" if how else result


@rule(r"selp\.([bsuf])(16|32|64)")
def _select(operands: Operands, match: Match) -> str:
    operands.count(4)
    bits = int(match[2])
    first, second = (operands.of_kind(number, match[1], bits) for number in (1, 2))
    return f"{operands.out(0, bits)} = {operands.predicate(3)} ? {first} : {second};"


@rule(r"mov\.pred")
def _move_predicate(operands: Operands, match: Match) -> str:
    operands.count(2)
    return f"{operands.out(0, 1)} = {operands.predicate(1)};"


@rule(r"mov\.([bsuf])(16|32|64)")
def _move(operands: Operands, match: Match) -> str:
    operands.count(2)
    bits = int(match[2])
    target, source = operands.instruction.operands
    if _HALF.fullmatch(target):
        return _unpack(operands, bits)
    if _HALF.fullmatch(source):
        return _pack(operands, bits)
    entry = operands.scope.entry
    if source in operands.scope.shared:
        return f"{operands.out(0, bits)} = shared_base;"
    if bits == 64 and source in entry.parameters:
        return f"{operands.out(0, 64)} = reinterpret_cast<uint64_t>(arguments) + {entry.parameters[source]};"
    if bits == 64 and source in {array.name for array in entry.arrays}:
        return f"{operands.out(0, 64)} = reinterpret_cast<uint64_t>({source});"
    return f"{operands.out(0, bits)} = {operands.of_kind(1, match[1], bits)};"


def _parts(operands: Operands, number: int, bits: int) -> int:
    count = operands.instruction.operands[number].count(",") + 1
    if count not in (2, 4) or bits // count < 16:
        raise operands.instruction.refused(f"{count} parts of {bits} bits")
    return count


def _pack(operands: Operands, bits: int) -> str:
    count = _parts(operands, 1, bits)
    values = operands.values(1, count, bits // count)
    shifted = [f"{UNSIGNED[bits]}({value}) << {place * (bits // count)}" for place, value in enumerate(values)]
    return f"{operands.out(0, bits)} = {' | '.join(shifted)};"


def _unpack(operands: Operands, bits: int) -> str:
    count = _parts(operands, 0, bits)
    whole = operands.value(1, bits)
    targets = operands.registers(0, count, bits // count)
    lines = [f"{name} = whole >> {place * (bits // count)};" for place, name in enumerate(targets)]
    return f"{{ const {UNSIGNED[bits]} whole = {whole}; {' '.join(lines)} }}"


@rule(r"cvt\.([su])(8|16|32|64)\.([su])(8|16|32|64)")
def _convert(operands: Operands, match: Match) -> str:
    """Cut, or filled with zeros or the sign; also into a register that is wider than the type."""
    operands.count(2)
    to, source = int(match[2]), int(match[4])
    value = _of(operands, 1, match[3], source, wider=True)
    cut = f"{(SIGNED if match[1] == 's' else UNSIGNED)[to]}({value})"
    return f"{operands.out(0, to, wider=True)} = {cut};"
