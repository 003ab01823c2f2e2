"""Where the rules apply: the changes of a kernel's text, each with its rule, and the text with one made."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.text.render_cpu import render_cpu
from codegen.text.render_group import header_text, operator_texts
from tests.mutants.rules import RULES, Line

OF_ALL = "epilogue.cuh"
# What counts and complains is no part of a kernel; a check of the compiler's cannot be wrong and still compile.
_NO_CODE = re.compile(r"^\s*(#|//|\*|static_assert|CUKILN_COUNT|CUKILN_REFUSE)|\bCUKILN_(COUNT|REFUSE)\(")


@dataclass(frozen=True, order=True)
class Change:
    """`line` of `file`, which reads `text`: `old` at `column` becomes `new`."""

    rule: str
    file: str
    line: int
    text: str
    column: int
    old: str
    new: str
    on_host: bool = False  # what binds a call and plans its launches, not what they run

    @property
    def changed(self) -> str:
        after = self.column + len(self.old)
        assert self.text[self.column : after] == self.old, self
        return self.text[: self.column] + self.new + self.text[after:]

    def rank(self, seed: str) -> str:
        """An order that a seed decides, and no other line of the text."""
        words = (seed, self.rule, self.file, self.text.strip(), self.old, self.new)
        return hashlib.sha256("\0".join(words).encode()).hexdigest()

    def words(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.text.strip()!r}, {self.old!r} -> {self.new!r}"


def sections(kernel: Kernel) -> dict[str, str]:
    """The texts that a kernel is made of, by the names that its C++ has them under; not the primitives, whose C++ is
    another text than their CUDA."""
    own = operator(kernel.operator)
    files = {
        name if name in own.shared else f"{own.name}/{name}": text for name, text in operator_texts(kernel.operator)
    }
    return {OF_ALL: header_text(OF_ALL), **files}


def changes(kernel: Kernel) -> Iterator[Change]:
    for file, text in sections(kernel).items():
        yield from changes_of(file, text)


@lru_cache(maxsize=64)
def changes_of(file: str, text: str) -> tuple[Change, ...]:
    """`text` as it is inlined: its first line is the file's second."""
    lines = text.splitlines()
    names = frozenset(re.findall(r"[A-Za-z_]\w*", text))
    ends, result, guards = True, [], list[str]()
    for number, whole in enumerate(lines, 2):
        code = whole.partition("//")[0]
        if match := re.match(r"#\s*(if|endif)(.*)", code):
            guards = [*guards, match[2]] if match[1] == "if" else guards[:-1]
        if code.strip() and not code.lstrip().startswith("#"):
            if not _NO_CODE.search(code):
                line = Line(code, ends, names)
                for rule, of in RULES.items():
                    edits = dict.fromkeys(edit for edit in of(line) if edit.old != edit.new)
                    host = any("CUKILN_HOST" in guard for guard in guards)
                    result += [Change(rule, file, number, whole, e.column, e.old, e.new, host) for e in edits]
            ends = code.rstrip().endswith((";", "{", "}", ":")) or bool(re.match(r"\s*(else|(if|for) .*\))\s*$", code))
    return tuple(result)


def cpu_text(kernel: Kernel, change: Change | None = None) -> str:
    """The kernel's C++, to be linked with the runtime."""
    text = render_cpu([kernel], runtime=False)
    if change is None:
        return text
    head = f'#line 2 "{change.file}"\n'
    before, found, after = text.partition(head)
    assert found, change.file
    lines = after.split("\n")
    assert lines[change.line - 2] == change.text, (change, lines[change.line - 2])
    lines[change.line - 2] = change.changed
    return before + head + "\n".join(lines)
