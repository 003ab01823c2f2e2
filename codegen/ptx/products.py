"""Which registers hold a product that ptxas may fuse with a sum, while instructions run one after the other. It follows
products through moves and changes of sign, and fuses what their factors were, also where those are written to since."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from codegen.ptx.floats import FUSIBLE_PRODUCT, Product
from codegen.ptx.operands import Operands

_WRITES_NOTHING = re.compile(r"(?:st|red|bar|bra|ret|exit|cp)\b.*")
_CARRIES = re.compile(r"mov\.[bsuf]32|neg(\.ftz)?\.f32")
_REGISTER = re.compile(r"%(\w+)")


@dataclass
class Products:
    """Of one entry. `kept`: how many variables hold a factor that was written to, `kept_0` and so on."""

    kept: int = 0
    _by_register: dict[str, Product] = field(default_factory=dict)

    def forget(self) -> None:
        """At a label: what ran before is not known."""
        self._by_register.clear()

    def of(self, register: str, *, flushed: bool) -> Product | None:
        product = self._by_register.get(register)
        return product if product is not None and product.flushed == flushed else None

    def note(self, operands: Operands) -> str:
        """What is to run before the instruction: copies of the factors that it writes to."""
        instruction = operands.instruction
        if _WRITES_NOTHING.fullmatch(instruction.opcode):
            return ""
        new = self._product(operands) if instruction.guard is None else None
        written = _REGISTER.findall(instruction.operands[0])
        self._by_register = {
            name: product for name, product in self._by_register.items() if name.removeprefix("%") not in written
        }
        if new is not None:
            self._by_register[instruction.operands[0]] = new
        return "".join(self._copies(written))

    def _product(self, operands: Operands) -> Product | None:
        opcode = operands.instruction.opcode
        if FUSIBLE_PRODUCT.fullmatch(opcode):
            return Product(operands.float(1), operands.float(2), ".ftz" in opcode)
        if not (match := _CARRIES.fullmatch(opcode)):
            return None
        product = self._by_register.get(operands.instruction.operands[1])
        if product is None or not opcode.startswith("neg"):
            return product
        return product.negative() if product.flushed == bool(match[1]) else None

    def _copies(self, written: list[str]) -> Iterator[str]:
        for factor in written:
            using = [name for name, product in self._by_register.items() if factor in (product.first, product.second)]
            if not using:
                continue
            copy = f"kept_{self.kept}"
            self.kept += 1
            yield f"{copy} = {factor}; "
            for name in using:
                self._by_register[name] = self._by_register[name].with_factor(factor, copy)
