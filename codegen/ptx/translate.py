"""An entry of a PTX module as a C++ function that every thread of a block runs, on a fiber of `device/cpu`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from codegen.ptx import floats, integers, memory, warps
from codegen.ptx.floats import APPROXIMATE, FUSIBLE_PRODUCT, FUSIBLE_SUM
from codegen.ptx.module import Entry, Instruction, Label, Module, UnknownPtx
from codegen.ptx.operands import UNSIGNED, Operands, Scope
from codegen.ptx.products import Products
from codegen.ptx.rules import translation

FAMILIES = (floats, integers, memory, warps)  # whose import fills the table of rules
_NAME = re.compile(r"[\w$]+\Z")
_FLOAT_MATRICES = re.compile(r"mma\..*\.(?:f16|bf16|tf32)\..*")


@dataclass(frozen=True)
class Translation:
    """`text`: of the function `name`, which takes `const void* arguments`. `fusible`: pairs of product and sum that
    ptxas may fuse; `approximate`: instructions whose results the manual gives with an error; `loose`: products, and
    sums, without a rounding in their names; `tensor`: products of matrices of floats."""

    name: str
    text: str
    fusible: int
    approximate: int
    instructions: int
    loose: tuple[int, int]
    tensor: int


def translate(module: Module, entry: Entry, name: str) -> Translation:
    """Raises UnknownPtx, which names an instruction without a rule and its line."""
    return _Translating(module, entry).function(name)


@dataclass
class _Translating:
    module: Module
    entry: Entry
    fusible: int = 0
    approximate: int = 0
    instructions: int = 0
    products: Products = field(default_factory=Products)

    def function(self, name: str) -> Translation:
        # Labels that nothing jumps to are legal; g++ would warn.
        statements = [*self._statements()]
        body = [*self._declarations(), *statements]
        lines = "\n".join(f"  {line}" for line in body)
        head = f"check_threads({self.entry.max_threads});"
        text = f"static void {name}(const void* const arguments) {{\n  {head}\n{lines}\n}}\n"
        loose = self._count(FUSIBLE_PRODUCT), self._count(FUSIBLE_SUM)
        tensor = self._count(_FLOAT_MATRICES)
        return Translation(name, text, self.fusible, self.approximate, self.instructions, loose, tensor)

    def _count(self, opcodes: re.Pattern[str]) -> int:
        return sum(bool(opcodes.fullmatch(each.opcode)) for each in self._instructions())

    def _declarations(self) -> Iterator[str]:
        """Registers begin with all bits set, as memory does: what is never written shows."""
        by_bits: dict[int, list[str]] = {}
        used = {word for each in self.entry.statements if isinstance(each, Instruction) for word in _words(each)}
        for name, bits in self.entry.registers.items():
            if name in used:
                by_bits.setdefault(bits, []).append(name)
        for bits, names in by_bits.items():
            poison = "true" if bits == 1 else f"{UNSIGNED[bits]}(-1)"
            kind = "bool" if bits == 1 else UNSIGNED[bits]
            yield f"{kind} {', '.join(f'{name} = {poison}' for name in names)};"
        if any(bits in (32, 64) and ".cc" in each.opcode for bits in by_bits for each in self._instructions()):
            yield "bool carry = false;"
        if self.products.kept:
            yield f"uint32_t {', '.join(f'kept_{number} = 0' for number in range(self.products.kept))};"
        yield from self._arrays()

    def _arrays(self) -> Iterator[str]:
        """One behind the other in the thread's frame, so that an access outside of them all is seen."""
        offsets, size = [], 0
        for array in self.entry.arrays:
            offsets.append((size + array.align - 1) // array.align * array.align)
            size = offsets[-1] + array.bytes
        if size:
            align = max(array.align for array in self.entry.arrays)
            yield f"alignas({align}) unsigned char local_memory[{size}];"
            yield "memset(local_memory, 0xff, sizeof(local_memory));"
        for array, offset in zip(self.entry.arrays, offsets, strict=True):
            yield f"unsigned char* const {array.name} = local_memory + {offset};"

    def _instructions(self) -> Iterator[Instruction]:
        return (each for each in self.entry.statements if isinstance(each, Instruction))

    def _statements(self) -> Iterator[str]:
        labels = {each.name for each in self.entry.statements if isinstance(each, Label)}
        for each in self.entry.statements:
            if isinstance(each, Label):
                self.products.forget()
                yield f"{_label(each.name)}:;"
            else:
                self.instructions += 1
                yield self._statement(each, labels)

    def _statement(self, instruction: Instruction, labels: set[str]) -> str:
        operands = Operands(instruction, Scope(self.entry, self.module.shared))
        before = ""
        if instruction.opcode in ("bra", "bra.uni"):
            operands.count(1)
            if instruction.operands[0] not in labels:
                raise instruction.refused("a jump to a label that is not there")
            if instruction.guard is not None and instruction.opcode == "bra.uni":
                raise instruction.refused("a jump of all lanes under a guard that each lane has for itself")
            text = f"goto {_label(instruction.operands[0])};"
        elif instruction.opcode in ("ret", "exit"):
            operands.count(0)
            text = "return;"
        else:
            self.approximate += bool(APPROXIMATE.fullmatch(instruction.opcode))
            text = self._sum(operands) or translation(operands)
            before = self.products.note(operands)
        if instruction.guard is None:
            return before + text
        guard = operands.predicate_of(instruction.guard)
        return f"{before}if ({guard}) {text}"

    def _sum(self, operands: Operands) -> str | None:
        """A sum of a product with which it may be fused; null of all else."""
        opcode = operands.instruction.opcode
        if not FUSIBLE_SUM.fullmatch(opcode) or len(operands) != 3:
            return None
        registers = operands.instruction.operands[1:]
        first, second = (self.products.of(register, flushed=".ftz" in opcode) for register in registers)
        if first is None and second is None:
            return None
        self.fusible += 1
        return floats.fused_sum(operands, (first, second))


def _words(instruction: Instruction) -> list[str]:
    text = " ".join((*instruction.operands, instruction.guard or ""))
    return re.findall(r"%(\w+)", text)


def _label(name: str) -> str:
    if not _NAME.match(name):
        raise UnknownPtx(0, "a label that has no translation", name)
    return name.replace("$", "_")
