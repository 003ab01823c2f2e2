"""Operands of an instruction as C++: every form is asked for by a rule and checked here, its width with it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from codegen.ptx.module import Entry, Instruction

UNSIGNED = {8: "uint8_t", 16: "uint16_t", 32: "uint32_t", 64: "uint64_t"}
SIGNED = {bits: name[1:] for bits, name in UNSIGNED.items()}
# Vectors that a launch fixes, and where a lane stands. %laneid is that of blocks whose warps are cut from x first.
SPECIAL = {
    **{f"%{name}.{axis}": f"{value}.{axis}" for axis in "xyz" for name, value in (
        ("tid", "threadIdx"), ("ctaid", "blockIdx"), ("ntid", "blockDim"), ("nctaid", "gridDim"))},
    "%laneid": "uint32_t(current % warp_size)",
}  # fmt: skip
# A 0 in front would make it octal, which nvcc does not write.
_INTEGER = re.compile(r"-?(?:0|[1-9]\d*|0x[0-9a-fA-F]+)")
_FLOAT = {32: re.compile(r"0[fF]([0-9a-fA-F]{8})"), 64: re.compile(r"0[dD]([0-9a-fA-F]{16})")}
_ADDRESS = re.compile(r"\[\s*(%?[\w$]+)\s*(?:\+\s*(-?(?:0|[1-9]\d*)))?\s*\]")


@dataclass(frozen=True)
class Scope:
    """What operands may name: the entry's own, and the module's symbols of dynamic shared memory."""

    entry: Entry
    shared: Mapping[str, int]


@dataclass(frozen=True)
class Operands:
    """Those of one instruction."""

    instruction: Instruction
    scope: Scope

    def __len__(self) -> int:
        return len(self.instruction.operands)

    def count(self, *allowed: int) -> None:
        if len(self) not in allowed:
            raise self.instruction.refused(f"{len(self)} operands, not {' or '.join(map(str, allowed))}")

    def register(self, text: str, bits: int, *, wider: bool = False) -> str:
        """The variable of a register; raises where its width is another, or smaller with `wider`."""
        width = self.scope.entry.registers.get(text[1:]) if text.startswith("%") else None
        if width is None:
            raise self.instruction.refused(f"{text} is no register that has been declared")
        if width != bits and not (wider and width > bits > 1):
            raise self.instruction.refused(f"{text} has {width} bits, not {bits}")
        return text[1:]

    def width(self, number: int) -> int:
        """The bits of an operand that is a register."""
        text = self.instruction.operands[number]
        width = self.scope.entry.registers.get(text[1:]) if text.startswith("%") else None
        if width is None:
            raise self.instruction.refused(f"{text} is no register that has been declared")
        return width

    def out(self, number: int, bits: int, *, wider: bool = False) -> str:
        return self.register(self.instruction.operands[number], bits, wider=wider)

    def value(self, number: int, bits: int, *, wider: bool = False) -> str:
        """An unsigned expression of as many bits."""
        return self.value_of(self.instruction.operands[number], bits, wider=wider)

    def value_of(self, text: str, bits: int, *, wider: bool = False) -> str:
        if text in SPECIAL and bits == 32:
            return SPECIAL[text]
        if text.startswith("%"):
            name = self.register(text, bits, wider=wider)
            return f"{UNSIGNED[bits]}({name})" if self.scope.entry.registers[name] != bits else name
        if _INTEGER.fullmatch(text):
            number = int(text, 0)
            if not -(1 << (bits - 1)) <= number < 1 << bits:
                raise self.instruction.refused(f"{text} has more than {bits} bits")
            return f"{UNSIGNED[bits]}(0x{number % (1 << bits):x}{'ull' if bits == 64 else 'u'})"
        if bits in _FLOAT and (match := _FLOAT[bits].fullmatch(text)):
            return f"0x{match[1]}{'ull' if bits == 64 else 'u'}"
        raise self.instruction.refused(f"an operand that has no translation, {text}")

    def float(self, number: int) -> str:
        return self.of_kind(number, "f", 32)

    def of_kind(self, number: int, kind: str, bits: int) -> str:
        """An unsigned expression; of kind `f` the bits of a register, or of a number that is written as a float."""
        text = self.instruction.operands[number]
        if kind == "f" and _INTEGER.fullmatch(text):
            raise self.instruction.refused(f"{text} is no float")
        return self.value_of(text, bits)

    def signed(self, number: int, bits: int, *, wider: bool = False) -> str:
        return f"{SIGNED[bits]}({self.value(number, bits, wider=wider)})"

    def predicate(self, number: int) -> str:
        return self.predicate_of(self.instruction.operands[number])

    def predicate_of(self, text: str) -> str:
        if text.startswith("!"):
            return f"!{self.register(text[1:], 1)}"
        if text in ("0", "1", "-1"):
            return "false" if text == "0" else "true"
        return self.register(text, 1)

    def constant(self, number: int) -> int:
        """Of an operand that only a number may be."""
        text = self.instruction.operands[number]
        if not _INTEGER.fullmatch(text):
            raise self.instruction.refused(f"{text} is no number")
        return int(text, 0)

    def vector(self, number: int, count: int) -> tuple[str, ...]:
        """The texts of as many operands in braces; of one without."""
        text = self.instruction.operands[number]
        if not text.startswith("{"):
            parts: tuple[str, ...] = (text,)
        else:
            parts = tuple(part.strip() for part in text.strip("{}").split(","))
        if len(parts) != count:
            raise self.instruction.refused(f"{len(parts)} elements in {text}, not {count}")
        return parts

    def registers(self, number: int, count: int, bits: int, *, wider: bool = False) -> list[str]:
        return [self.register(part, bits, wider=wider) for part in self.vector(number, count)]

    def values(self, number: int, count: int, bits: int, *, wider: bool = False) -> list[str]:
        return [self.value_of(part, bits, wider=wider) for part in self.vector(number, count)]

    def address(self, number: int) -> tuple[str, int]:
        """The text of a base and the bytes behind it."""
        text = self.instruction.operands[number]
        match = _ADDRESS.fullmatch(text)
        if not match:
            raise self.instruction.refused(f"an address that has no translation, {text}")
        return match[1], int(match[2] or 0)

    def memory(self, number: int) -> str:
        """An address in a register of 64 bits, with what is added to it."""
        base, offset = self.address(number)
        return f"{self.register(base, 64)} + {_bytes(offset)}"

    def shared_memory(self, number: int) -> str:
        """An address of the shared state space, in 32 bits or in 64, or a symbol's."""
        base, offset = self.address(number)
        if base in self.scope.shared:
            return f"shared_base + {_bytes(offset)}"
        if base.startswith("%") and self.scope.entry.registers.get(base[1:]) == 32:
            return f"uint32_t({base[1:]} + {offset % 2**32}u)"
        return f"{self.register(base, 64)} + {_bytes(offset)}"

    @property
    def here(self) -> str:
        """The place for messages: line and file, as the runtime takes them."""
        place = f"{self.instruction.place}, " if self.instruction.place else ""
        return f'{self.instruction.line}, "{place}kernel.ptx"'


def _bytes(offset: int) -> str:
    return f"{offset % 2**64}ull"
