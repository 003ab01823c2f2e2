"""Loads, stores, copies and atomic additions, each checked as the CPU emulation of primitives checks its own."""

from codegen.ptx.operands import SIGNED, UNSIGNED, Operands
from codegen.ptx.rules import Match, rule

_TYPE = r"([bsuf])(8|16|32|64)"


def _count(match: Match, group: int) -> int:
    return int(match[group] or 1)


def _pointer(operands: Operands, space: str, number: int, bytes: int, access: str) -> str:
    """The checked address of an access."""
    if space == "shared":
        return f"shared_word<{bytes}>({access}, {operands.shared_memory(number)}, {operands.here})"
    if space == "local":
        if not operands.scope.entry.arrays:
            raise operands.instruction.refused("local memory of an entry that has none")
        where = f"local_memory, sizeof(local_memory), {operands.memory(number)}"
        return f"local_word<{bytes}>({where}, {operands.here})"
    return f"global_word<{bytes}>({access}, {operands.memory(number)}, {operands.here})"


@rule(rf"ld\.(?:(shared|global|local)|global\.(nc))(?:\.v([24]))?\.{_TYPE}")
def _load(operands: Operands, match: Match) -> str:
    operands.count(2)
    space = match[1] or "global"
    count, bits = _count(match, 3), int(match[5])
    access = {"shared": "Access::read", "local": "Access::read"}.get(space, "Global::read")
    access = "Global::constant" if match[2] else access
    pointer = _pointer(operands, space, 1, count * bits // 8, access)
    element = (SIGNED if match[4] == "s" else UNSIGNED)[bits]
    return _into(operands, pointer, element, count, bits)


def _into(operands: Operands, pointer: str, element: str, count: int, bits: int) -> str:
    """Numbers with a sign fill wider registers with it, all others with zeros."""
    targets = operands.registers(0, count, bits, wider=True)
    lines = [f"{name} = from[{number}];" for number, name in enumerate(targets)]
    return f"{{ const {element}* const from = static_cast<const {element}*>({pointer}); {' '.join(lines)} }}"


@rule(rf"ld\.param(?:\.v([24]))?\.{_TYPE}")
def _load_parameter(operands: Operands, match: Match) -> str:
    operands.count(2)
    count, bits = _count(match, 1), int(match[3])
    base, offset = operands.address(1)
    entry = operands.scope.entry
    size = entry.parameter_bytes
    bytes = count * bits // 8
    if base in entry.parameters:
        at = entry.parameters[base] + offset
        if not 0 <= at <= size - bytes or at % bytes:
            raise operands.instruction.refused(f"{bytes} bytes at {at} of parameters of {size} bytes")
        pointer = f"static_cast<const char*>(arguments) + {at}"
    else:
        pointer = f"parameter_word<{bytes}>(arguments, {size}, {operands.memory(1)}, {operands.here})"
    element = (SIGNED if match[2] == "s" else UNSIGNED)[bits]
    return _into(operands, f"static_cast<const void*>({pointer})", element, count, bits)


@rule(rf"st\.(shared|global|local)(?:\.v([24]))?\.{_TYPE}")
def _store(operands: Operands, match: Match) -> str:
    operands.count(2)
    space, count, bits = match[1], _count(match, 2), int(match[4])
    access = "Global::write" if space == "global" else "Access::write"
    pointer = _pointer(operands, space, 0, count * bits // 8, access)
    values = operands.values(1, count, bits, wider=True)
    lines = [f"to[{number}] = {value};" for number, value in enumerate(values)]
    return f"{{ {UNSIGNED[bits]}* const to = static_cast<{UNSIGNED[bits]}*>({pointer}); {' '.join(lines)} }}"


@rule(r"cvta(\.to)?\.(shared|global|local|param)\.u64")
def _generic(operands: Operands, match: Match) -> str:
    """Of all state spaces but the shared one generic addresses are those that a process has anyway."""
    operands.count(2)
    value = operands.value(1, 64)
    if match[2] == "shared":
        value = f"shared_{'of' if match[1] else 'to'}_generic({value})"
    return f"{operands.out(0, 64)} = {value};"


@rule(r"cp\.async\.(ca|cg)\.shared\.global")
def _copy(operands: Operands, match: Match) -> str:
    operands.count(3, 4)
    bytes = operands.constant(2)
    if bytes not in ((16,) if match[1] == "cg" else (4, 8, 16)):
        raise operands.instruction.refused(f"a copy of {bytes} bytes")
    read = operands.value(3, 32) if len(operands) == 4 else f"{bytes}u"
    return f"copy_async<{bytes}>({operands.shared_memory(0)}, {operands.memory(1)}, {read}, {operands.here});"


@rule(r"cp\.async\.commit_group")
def _commit(operands: Operands, match: Match) -> str:
    operands.count(0)
    return "cp_async_commit();"


@rule(r"cp\.async\.wait_group")
def _wait(operands: Operands, match: Match) -> str:
    operands.count(1)
    left = operands.constant(0)
    if left < 0:
        raise operands.instruction.refused("a number of groups below 0")
    return f"land_copies({left});"


@rule(r"cp\.async\.wait_all")
def _wait_all(operands: Operands, match: Match) -> str:
    operands.count(0)
    return "{ cp_async_commit(); land_copies(0); }"


@rule(r"red\.global\.add\.(f32|s32|u32)")
def _reduce(operands: Operands, match: Match) -> str:
    operands.count(2)
    value = operands.float(1) if match[1] == "f32" else operands.value(1, 32)
    kind = "float" if match[1] == "f32" else "uint32_t"
    return f"add_to_global<{kind}>({operands.memory(0)}, {value}, {operands.here});"
