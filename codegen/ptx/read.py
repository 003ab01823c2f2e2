"""Reads the text of a PTX module. What has no translation is refused by name and line (`UnknownPtx`)."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from codegen.primitives import PRIMITIVE_HEADERS
from codegen.ptx.module import Array, Entry, Instruction, Label, Module, UnknownPtx

Location = tuple[str, str, str]  # file, line and column, as numbers of the text
BITS = {"pred": 1, **{f"{kind}{bits}": bits for kind in "bus" for bits in (16, 32, 64)}, "f32": 32, "f64": 64}
_VERSIONS = re.compile(r"\.version (\d+\.\d+)")
_TARGET = re.compile(r"\.target (sm_\d+\w?)(?:, debug)?")
_SHARED = re.compile(r"\.extern \.shared \.align (\d+) \.b8 (\w+)\[\]")
_ENTRY = re.compile(r"(?:\.visible )?\.entry (\w+)\(")
_PARAMETER = re.compile(r"\.param (?:\.align (\d+) )?\.(?:b8 (\w+)\[(\d+)\]|([bus](?:8|16|32|64)|f32|f64) (\w+))")
_MAX_THREADS = re.compile(r"\.maxntid (\d+)(?:, (\d+))?(?:, (\d+))?")
_REGISTERS = re.compile(r"\.reg \.(\w+)\s+(.+)")
_LOCAL = re.compile(r"\.local \.align (\d+) \.b8\s+(\w+)\[(\d+)\]")
_LOCATION = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:, function_name [$\w+]+, inlined_at (\d+) (\d+) (\d+))?")
SHARED_ALIGNMENT = 16  # bytes, that of dynamic shared memory here (`shared_base` in ptx/machine.h)
_FILE = re.compile(r'^\s*\.file\s+(\d+) "(.*?)".*$', re.MULTILINE)
_LABEL = re.compile(r"([$\w]+):")
_INSTRUCTION = re.compile(r"(?:@(!?%\w+)\s+)?([a-z][\w.:]*)(?:\s+(.*))?", re.DOTALL)
_HINTS = re.compile(r'\.pragma\s+"(?:nounroll|used_bytes_mask \d+)"')
# Of what ptxas does with registers and blocks, which a run of the PTX has no part in.
_OF_PTXAS = re.compile(r"\.(?:minnctapersm|maxnreg) \d+")


def split_operands(text: str) -> tuple[str, ...]:
    """At the commas that stand in no braces and no brackets."""
    parts: list[str] = []
    depth, current = 0, ""
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return tuple([*parts, current.strip()] if current.strip() else parts)


def read_ptx(text: str) -> Module:
    """The module; raises UnknownPtx."""
    # nvcc names the files behind the code.
    reader = _Reader(files={match[1]: match[2] for match in _FILE.finditer(text)})
    for number, line in enumerate(_without_comments(text), 1):
        reader.line(number, line)
    reader.end(text.count("\n") + 1)
    return reader.module


def _without_comments(text: str) -> Iterator[str]:
    """The lines, as many as before."""
    blank = re.sub(r"/\*.*?\*/", lambda match: "\n" * match[0].count("\n"), text, flags=re.DOTALL)
    return (re.sub(r"//.*", "", line).strip() for line in blank.split("\n"))


@dataclass
class _Reader:
    module: Module = field(default_factory=Module)
    entry: Entry | None = None
    where: str = "module"  # or parameters, head, body, section
    files: dict[str, str] = field(default_factory=dict)
    place: str | None = None
    callers: dict[Location, Location] = field(default_factory=dict)  # of inlined functions
    pending: str = ""  # a statement that goes on in the next line
    pending_line: int = 0

    def line(self, number: int, line: str) -> None:
        if not line:
            return
        {
            "module": self._of_module,
            "parameters": self._of_parameters,
            "head": self._of_head,
            "body": self._of_body,
            "section": self._of_section,
        }[self.where](number, line)

    def end(self, number: int) -> None:
        if self.where != "module":
            raise UnknownPtx(number, "the text ends inside of an entry", self.entry.name if self.entry else "")

    def _of_module(self, number: int, line: str) -> None:
        statement = line.rstrip(";")
        if match := _TARGET.fullmatch(statement):
            self.module.target = match[1]
        elif match := _SHARED.fullmatch(statement):
            if int(match[1]) > SHARED_ALIGNMENT:
                raise UnknownPtx(number, f"shared memory at a multiple of {match[1]}, {SHARED_ALIGNMENT} at most", line)
            self.module.shared[match[2]] = int(match[1])
        elif _FILE.fullmatch(statement):
            pass
        elif match := _ENTRY.match(line):
            self.entry, self.where = Entry(match[1], number), "parameters"
            if rest := line[match.end() :].strip():
                self._of_parameters(number, rest)
        elif line.startswith(".section"):
            self.where = "section"
        elif not _VERSIONS.fullmatch(statement) and statement != ".address_size 64":
            raise UnknownPtx(number, "a declaration of the module that has no translation", line)

    def _of_section(self, number: int, line: str) -> None:
        """Of debug information."""
        if line.endswith("}"):
            self.where = "module"

    def _of_parameters(self, number: int, line: str) -> None:
        entry = self._own()
        closing = line.endswith(")")
        for part in line.rstrip(")").split(","):
            if not part.strip():
                continue
            match = _PARAMETER.fullmatch(part.strip())
            if not match:
                raise UnknownPtx(number, "a parameter that has no translation", part)
            size = int(match[3]) if match[2] else int(match[4][1:]) // 8
            align = int(match[1]) if match[1] else (1 if match[2] else size)
            offset = (entry.parameter_bytes + align - 1) // align * align
            entry.parameters[match[2] or match[5]] = offset
            entry.parameter_bytes = offset + size
        if closing:
            self.where = "head"

    def _of_head(self, number: int, line: str) -> None:
        if match := _MAX_THREADS.fullmatch(line):
            self._own().max_threads = int(match[1]) * int(match[2] or 1) * int(match[3] or 1)
        elif line == "{":
            self.where, self.place = "body", None
        elif not _OF_PTXAS.fullmatch(line):
            raise UnknownPtx(number, "a directive of an entry that has no translation", line)

    def _of_body(self, number: int, line: str) -> None:
        if not self.pending:
            if match := _LOCATION.fullmatch(line):
                self._locate(match)
                return
            if match := _LABEL.fullmatch(line):
                self._own().statements.append(Label(match[1]))
                return
            if line == "}":
                self.module.entries.append(self._own())
                self.entry, self.where = None, "module"
                return
            self.pending_line = number
        *statements, self.pending = f"{self.pending} {line}".split(";")
        self.pending = self.pending.strip()
        for statement in statements:
            self._statement(self.pending_line, statement.strip())
            self.pending_line = number

    def _locate(self, match: re.Match[str]) -> None:
        """A primitive is named by the line that calls it, as its emulation is: nvcc says where code was inlined."""
        at: Location = (match[1], match[2], match[3])
        if match[4]:
            self.callers[at] = (match[4], match[5], match[6])
        seen = {at}
        while self.files.get(at[0]) in PRIMITIVE_HEADERS and at in self.callers and self.callers[at] not in seen:
            at = self.callers[at]
            seen.add(at)
        self.place = f"{self.files.get(at[0], at[0])}:{at[1]}"

    def _statement(self, number: int, text: str) -> None:
        entry = self._own()
        if not text or _HINTS.fullmatch(text):
            return
        if match := _REGISTERS.fullmatch(text):
            self._declare(number, match[1], match[2])
        elif match := _LOCAL.fullmatch(text):
            entry.arrays.append(Array(match[2], int(match[3]), int(match[1])))
        elif match := _INSTRUCTION.fullmatch(text):
            operands = split_operands(match[3] or "")
            entry.statements.append(Instruction(match[2], operands, number, match[1], self.place))
        else:
            raise UnknownPtx(number, "a statement that has no translation", text)

    def _declare(self, number: int, kind: str, names: str) -> None:
        entry = self._own()
        if kind not in BITS:
            raise UnknownPtx(number, f"registers of a type that has no translation, .{kind}", names)
        for name in names.split(","):
            match = re.fullmatch(r"%(\w+?)(?:<(\d+)>)?", name.strip())
            if not match:
                raise UnknownPtx(number, "a register that has no translation", name)
            declared = [match[1]] if not match[2] else [f"{match[1]}{i}" for i in range(int(match[2]))]
            entry.registers |= dict.fromkeys(declared, BITS[kind])

    def _own(self) -> Entry:
        assert self.entry is not None, "only what belongs to an entry comes here"
        return self.entry
