"""What a PTX module holds: entries with their registers and statements."""

from dataclasses import dataclass, field

from codegen.errors import TextError

SOURCE = "kernel.ptx"  # the name of the file in messages; its lines are those of the text that was read


class UnknownPtx(TextError):
    """Something in a PTX text that has no translation: it is named, with its line."""

    def __init__(self, line: int, what: str, text: str) -> None:
        super().__init__(
            f"{SOURCE}:{line}: {what}: {text.strip()!r}; docs/ptx.md lists what has a translation: a kernel "
            "with anything else is not run from its PTX"
        )
        self.line = line

    def __reduce__(self) -> tuple[type[TextError], tuple[str]]:
        return TextError, (self.message,)


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Instruction:
    """`guard`: the predicate behind `@`, with its `!`. `place`: `file:line` of the source, of `-lineinfo`."""

    opcode: str
    operands: tuple[str, ...]
    line: int
    guard: str | None = None
    place: str | None = None

    @property
    def text(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}".strip()

    def refused(self, what: str) -> UnknownPtx:
        return UnknownPtx(self.line, what, self.text)


@dataclass(frozen=True)
class Array:
    """Bytes of a thread's own memory."""

    name: str
    bytes: int
    align: int


@dataclass
class Entry:
    """A kernel function. `parameters`: names with their offset in the plain struct that a launch gives. `registers`:
    names without `%`, with their bits; 1 is a predicate."""

    name: str
    line: int
    parameters: dict[str, int] = field(default_factory=dict)
    parameter_bytes: int = 0
    max_threads: int = 1024
    registers: dict[str, int] = field(default_factory=dict)
    arrays: list[Array] = field(default_factory=list)
    statements: list[Label | Instruction] = field(default_factory=list)


@dataclass
class Module:
    """`shared`: symbols of the block's dynamic shared memory, with their alignment."""

    target: str = ""
    shared: dict[str, int] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
