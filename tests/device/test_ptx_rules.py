"""Each rule for PTX, with each alternative of its opcodes, is run by some case of the other tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import pytest

from codegen.ptx import rules, translate, warps
from codegen.ptx.module import Instruction
from codegen.ptx.read import read_ptx
from tests.device import test_ptx_approximations, test_ptx_machine, test_ptx_memory, test_ptx_values
from tests.support.kernels.ptx_fragments import MMA

assert translate.FAMILIES  # whose import fills the table
PATTERNS = {pattern.pattern: pattern for pattern, _ in rules.RULES}


def opcodes_of_cases() -> set[str]:
    snippets = {
        **{name: test_ptx_values.snippet_of(cases) for name, cases in test_ptx_values.entries().items()},
        **test_ptx_approximations.SNIPPETS,
        **test_ptx_machine.SNIPPETS,
        **test_ptx_memory.SNIPPETS,
    }
    text = ".version 9.2\n.target sm_80\n.address_size 64\n" + "".join(
        snippet.text(f"entry_{number}") for number, snippet in enumerate(snippets.values())
    )
    return {
        statement.opcode
        for entry in read_ptx(text).entries
        for statement in entry.statements
        if isinstance(statement, Instruction)
    }


OPCODES = opcodes_of_cases()
_ATOM = re.compile(r"\\[dw]\+|\\.|\[\w+\]|\((?:\?:)?|[|)?]|[^\\\[(|)?]")


def language(pattern: str) -> set[str]:
    """All that a rule's pattern matches; raises ValueError of one that has no end."""
    atoms = _ATOM.findall(pattern)
    assert "".join(atoms) == pattern, f"a pattern with something else: {pattern}"
    words, rest = _alternatives(atoms)
    assert not rest
    return words


def _alternatives(atoms: list[str]) -> tuple[set[str], list[str]]:
    words: set[str] = set()
    branch = {""}
    while atoms and atoms[0] != ")":
        atom, *atoms = atoms
        if atom == "|":
            words |= branch
            branch = {""}
            continue
        if atom.endswith("+"):
            raise ValueError(atom)
        if atom.startswith("("):
            inner, atoms = _alternatives(atoms)
            atoms = atoms[1:]
        else:
            inner = set(atom[1:-1]) if atom.startswith("[") else {atom.removeprefix("\\")}
        if atoms and atoms[0] == "?":
            inner, atoms = inner | {""}, atoms[1:]
        branch = {before + after for before, after in product(branch, inner)}
    return words | branch, atoms


def parts(pattern: str, opcodes: set[str]) -> Iterator[tuple[int, str | None]]:
    """Which alternatives of which groups the opcodes take, those of groups without a number too."""
    every = re.compile(pattern.replace("(?:", "("))
    for opcode in opcodes:
        if match := every.fullmatch(opcode):
            yield from enumerate(match.groups(), 1)


def all_opcodes(pattern: str) -> set[str]:
    try:
        return language(pattern)
    except ValueError:
        assert "mma" in pattern, f"how many opcodes has {pattern}?"
        return {f"mma.sync.aligned.{types}" for types in warps.MMA}


def rule_of(opcode: str) -> str | None:
    """The rule that translates it: the first that matches."""
    return next((name for name, pattern in PATTERNS.items() if pattern.fullmatch(opcode)), None)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_each_alternative_of_a_rule_has_a_case(pattern: str) -> None:
    possible = {opcode for opcode in all_opcodes(pattern) if rule_of(opcode) == pattern}
    own = {opcode for opcode in OPCODES if rule_of(opcode) == pattern}
    assert possible and own, "no case runs this rule"
    missing = set(parts(pattern, possible)) - set(parts(pattern, own))
    assert not missing, sorted(map(str, missing))


def test_all_kinds_of_mma_have_a_case() -> None:
    assert {mma.types for mma in MMA.values()} == set(warps.MMA)


def test_the_opcodes_of_a_pattern_are_counted_out() -> None:
    assert language(r"setp\.(lo|hi)(?:\.(and|or))?\.[su]16") == {
        f"setp.{name}{how}.{kind}16" for name in ("lo", "hi") for how in ("", ".and", ".or") for kind in "su"
    }
    with pytest.raises(ValueError, match="w"):
        language(r"mma\.\w+")
