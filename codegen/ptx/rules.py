"""The table of rules: which opcodes, with all their modifiers, have a translation.

A rule is a pattern that the whole opcode must match: what stands in none has no translation, and is refused.
"""

import re
from collections.abc import Callable

from codegen.ptx.module import Instruction
from codegen.ptx.operands import Operands

Match = re.Match[str]
Rule = Callable[[Operands, Match], str]
RULES: list[tuple[re.Pattern[str], Rule]] = []


def rule(pattern: str) -> Callable[[Rule], Rule]:
    """The C++ statement of instructions whose opcode is matched as a whole."""

    def add(made: Rule) -> Rule:
        RULES.append((re.compile(pattern), made))
        return made

    return add


def translation(operands: Operands) -> str:
    """The C++ statement of an instruction; raises UnknownPtx."""
    instruction: Instruction = operands.instruction
    for pattern, made in RULES:
        if match := pattern.fullmatch(instruction.opcode):
            return made(operands, match)
    raise instruction.refused(f"no rule for {instruction.opcode}")
