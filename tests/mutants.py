"""Mutants of a kernel.cuh: every barrier and every bounds check deleted in turn, found in the text alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BARRIER = re.compile(r"^\s*__syncthreads\(\);")
_CALL = "in_bounds("
_LABEL = re.compile(r"// bounds: (.+)$")


@dataclass(frozen=True)
class Mutant:
    """`site` says what was changed and does not depend on line numbers, `text` is the whole changed file."""

    site: str
    line: int
    text: str


def mutants(text: str) -> Iterator[Mutant]:
    """All mutants of a kernel.cuh. Raises where a bounds check has no `// bounds: name`, or a name has no check."""
    lines = text.splitlines()
    barriers = 0
    for index, line in enumerate(lines):
        changed: dict[str, str] = {}
        if _BARRIER.match(line):
            changed[f"barrier {barriers} deleted"] = _BARRIER.sub(";", line)
            barriers += 1
        elif (label := _label(line)) is not None:
            start = line.index(_CALL)
            end = _closing(line, start + len(_CALL) - 1)
            check, allowed = line[start : end + 1], line[start + len(_CALL) : end].split(",", 1)[1]
            changed[f"bounds {label} deleted"] = line.replace(check, "true")
            changed[f"bounds {label} off by one"] = line.replace(check, check.replace(allowed, f"{allowed} + 1"))
        for site, instead in changed.items():
            yield Mutant(site, index + 1, "\n".join([*lines[:index], instead, *lines[index + 1 :]]) + "\n")


def _label(line: str) -> str | None:
    found = _LABEL.search(line)
    checks = _CALL in line and "__forceinline__" not in line
    if bool(found) != checks:
        raise ValueError(f"a bounds check and a '// bounds: name' belong on one line: {line.strip()}")
    return found[1].strip() if found else None


def _closing(line: str, opening: int) -> int:
    depth = 0
    for index in range(opening, len(line)):
        depth += {"(": 1, ")": -1}.get(line[index], 0)
        if depth == 0:
            return index
    raise ValueError(f"a bounds check must end on its line: {line.strip()}")


def write_operator(folder: Path, base: str, class_name: str, name: str, text: str) -> Path:
    """An operator folder like the packaged `base`, under another name and with another kernel.cuh."""
    folder.mkdir(parents=True)
    (folder / "kernel.cuh").write_text(text.replace(f"namespace {base}", f"namespace {name}"))
    (folder / "__init__.py").write_text(
        f"from pathlib import Path\n\nfrom codegen.operators.{base} import {class_name}\n\n\n"
        f"class Mutant({class_name}):\n    name = {name!r}\n    folder = Path(__file__).parent\n\n\n"
        "OPERATOR = Mutant()\n"
    )
    return folder
