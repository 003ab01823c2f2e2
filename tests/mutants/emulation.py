"""A kernel's text compiled for the CPU as the product compiles it: whole, and to see which lines are part of it."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

from codegen.kernel import Kernel
from codegen.text.render_cpu import render_runtime
from tests.mutants.changes import Change, cpu_text
from tests.support.kernels.cpu_helpers import toolchain
from workers.cpu.build import BOUNDS_FLAGS, CPU_FLAGS, RUNTIME

SECONDS = 120
_FLAGS = (*CPU_FLAGS, *BOUNDS_FLAGS, "-w")
_OBJECT = tuple("-c" if flag == "-shared" else flag for flag in _FLAGS)
_FILE = re.compile(r"(?:CU: )?(\S+):(?:\[.*\])?$")
_PLACE = re.compile(r"\S+\s+(\d+)\s+(?:0x[0-9a-f]+|0)\s")


@cache
def runtime(folder: Path) -> Path:
    (folder / "runtime.cpp").write_text(render_runtime())
    run([*_compiler(), *_OBJECT, "-o", RUNTIME, "runtime.cpp"], folder)
    return folder / RUNTIME


def compiled(kernel: Kernel, change: Change | None, folder: Path, of: Path) -> Path | None:
    """The library in `folder`, or null where g++ refuses the text. Names in it do not depend on the change."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mutant.cpp").write_text(cpu_text(kernel, change))
    argv = [*_compiler(), *_FLAGS, "-o", "mutant.so", "mutant.cpp", str(of), "-lm"]
    ended = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    return folder / "mutant.so" if ended.returncode == 0 else None


def lines_of(kernel: Kernel, folder: Path) -> dict[str, set[int]]:
    """By file the lines that are code of the kernel, as g++ writes them down where it leaves out none."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lines.cpp").write_text(cpu_text(kernel))
    flags = [flag for flag in _OBJECT if not flag.startswith(("-O", "-ftree"))]
    run([*_compiler(), *flags, "-O0", "-g1", "-o", "lines.o", "lines.cpp"], folder)
    lines: dict[str, set[int]] = {}
    current: set[int] = set()
    for line in run(["objdump", "--dwarf=decodedline", "--wide", "lines.o"], folder).splitlines():
        if heading := _FILE.match(line):
            current = lines.setdefault(heading[1].removeprefix(f"{folder}/"), set())
        elif place := _PLACE.match(line):
            current.add(int(place[1]))
    return lines


def run(argv: list[str], folder: Path) -> str:
    ended = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == 0, f"{argv[0]} ended with {ended.returncode}: {ended.stderr[-2000:]}"
    return ended.stdout


@cache
def _compiler() -> tuple[str, ...]:
    return (str(toolchain().host_compiler),)
