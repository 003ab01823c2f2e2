"""Read from a compiler's messages which kernels of a file it refuses."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence

from codegen.kernel import Kernel

_NAMESPACE = re.compile(r"kernel_[0-9a-f]{16}")
# nvcc: group.cu(12): error: …   and, in instantiation notes, "at line 34"; g++: library.cpp:12:3: error: …
_FRONT_END = re.compile(r"^\w+\.(?:cu|cpp)(?:\((\d+)\)|:(\d+)(?::\d+)?): .*error", re.MULTILINE)
_HOST_CONTEXT = re.compile(r"^\w+\.cpp: In ")
_DETECTED_AT = re.compile(r"at line (\d+)|^\w+\.cpp:(\d+):\d+:\s+required from", re.MULTILINE)
_PTXAS = re.compile(r"^ptxas (?:\S+, line (\d+); )?(?:error|fatal).*", re.MULTILINE)
_ENTRY = re.compile(r"\.entry (\w+)")


def find_culprits(kernels: Sequence[Kernel], log: str, source: str, ptx: str | None) -> dict[str, str]:
    """Kernel id -> the errors that name it: by namespace or symbol, by a line of its block in `source`, or by a line
    of its entry in `ptx`. Empty where the messages name none."""
    by_namespace = {kernel.namespace: kernel.id for kernel in kernels}
    source_blocks = _Blocks(source, re.compile(r"^namespace (kernel_[0-9a-f]{16}) \{", re.MULTILINE))
    ptx_blocks = _Blocks(ptx or "", _ENTRY)
    by_kernel: dict[str, list[str]] = {}
    for error in _errors(log):
        names = set(_NAMESPACE.findall(error))
        ptxas = _PTXAS.match(error)
        if ptxas and ptxas[1]:
            names |= set(_NAMESPACE.findall(ptx_blocks.of(int(ptxas[1]))))
        elif not ptxas:
            lines = [int(a or b) for a, b in _FRONT_END.findall(error)]
            lines += [int(a or b) for a, b in _DETECTED_AT.findall(error)]
            names |= {source_blocks.of(line) for line in lines}
        for name in names & by_namespace.keys():
            by_kernel.setdefault(by_namespace[name], []).append(error)
    return {kernel: "".join(errors) for kernel, errors in by_kernel.items()}


def _errors(log: str) -> list[str]:
    """The errors of a log, each with its context and nothing of its neighbours'.

    nvcc writes context after an error, up to a blank line; g++ writes where it was ("In instantiation of …") before it;
    an error of ptxas is one line, and reports on innocent kernels may follow at once.
    """
    errors: list[list[str]] = []
    block: list[str] | None = None  # the one that lines go to
    has_error = False  # whether it has its error yet
    for line in log.splitlines(keepends=True):
        if _PTXAS.match(line):
            errors.append([line])
            block = None
        elif _FRONT_END.match(line):
            if block is None or has_error:
                block = []
            block.append(line)
            errors.append(block)
            has_error = True
        elif _HOST_CONTEXT.match(line):
            block, has_error = [line], False
        elif not line.strip():
            block = None
        elif block is not None:
            block.append(line)
    return ["".join(lines) for lines in errors]


class _Blocks:
    """Which named block of a text a line lies in: from the block's first line to the next block."""

    def __init__(self, text: str, pattern: re.Pattern[str]) -> None:
        self._starts: list[int] = []
        self._names: list[str] = []
        for match in pattern.finditer(text):
            self._starts.append(text.count("\n", 0, match.start()) + 1)
            self._names.append(match[1])

    def of(self, line: int) -> str:
        index = bisect_right(self._starts, line) - 1
        return self._names[index] if index >= 0 else ""
