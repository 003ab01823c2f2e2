"""What compilers print: each kernel's resources, which ptxas reports with `-v`; the line that explains a failure."""

import re
from dataclasses import dataclass, fields

# ptxas prints, per entry: "Compiling entry function 'X' for 'sm_90a'", "Function properties for X", a line of stack and
# spills, and "Used N registers, …". Properties of called functions stand between; only the entry's own line counts.
_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '[^']+'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class Resources:
    """Of one kernel, as ptxas reports them: registers per thread, bytes per thread (stack, spills) or per block (static
    shared memory), named barriers per block."""

    registers: int
    static_shared_bytes: int
    spill_load_bytes: int
    spill_store_bytes: int
    stack_bytes: int
    barriers: int

    @property
    def spill_bytes(self) -> int:
        return self.spill_load_bytes + self.spill_store_bytes

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> "Resources":
        return cls(**{field.name: values[field.name] for field in fields(cls)})


def parse_resources(text: str) -> dict[str, Resources]:
    """Mangled kernel name -> resources, for every kernel whose report is complete."""
    by_kernel: dict[str, Resources] = {}
    entry: str | None = None
    subject: str | None = None
    stack = (0, 0, 0)
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            entry, subject, stack = match[1], None, (0, 0, 0)
        elif match := _PROPERTIES.search(line):
            subject = match[1]
        elif (match := _STACK.search(line)) and subject == entry:
            stack = (int(match[1]), int(match[2]), int(match[3]))
        elif (match := _USED.search(line)) and entry is not None:
            by_kernel[entry] = Resources(
                registers=int(match[1]),
                static_shared_bytes=_number(_SHARED, match[2]),
                spill_load_bytes=stack[2],
                spill_store_bytes=stack[1],
                stack_bytes=stack[0],
                barriers=_number(_BARRIERS, match[2]),
            )
            entry = None
    return by_kernel


def _number(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.search(text)
    return int(match[1]) if match else 0


MOST_CHARACTERS = 300


def first_error_line(log: str) -> str:
    """The first line that speaks of an error, else the first that is not blank; empty where there is none."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines
    return errors[0][:MOST_CHARACTERS] if errors else ""
