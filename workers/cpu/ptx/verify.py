"""Verify kernels by their own PTX on the CPU: translate, build, run the test plan in a child process.

A kernel whose PTX has anything without a translation, or whose translation g++ refuses, is `untranslated`: that says
nothing about the kernel, only that this witness has not seen it. `compile_error` is what nvcc refuses.
"""

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from codegen.errors import TextError
from codegen.kernel import Kernel
from codegen.plan.ptx_plan import Ways
from codegen.plan.verification_plan import Part
from codegen.primitives import TURING_SUMS
from codegen.ptx.module import SOURCE, Module, UnknownPtx
from codegen.ptx.read import read_ptx
from codegen.text.render_ptx import render_ptx
from workers.compile.toolchain import Toolchain
from workers.cpu.ptx.build import NotBuilt, PtxBuilder, PtxCancelled
from workers.cpu.verify import CpuChildren, CpuVerdict, Verdict
from workers.processes.processes import Limits, Processes

# A whole plan takes a few tenths of a second: a kernel that needs a hundred times as much does not end.
KERNEL_CPU_SECONDS, KERNEL_WALL_SECONDS = 30.0, 120.0
PtxOutcome = Literal["ok", "incorrect", "runtime_error", "run_timeout", "compile_error", "untranslated"]
_LINE = re.compile(rf"{re.escape(SOURCE)}:(\d+)")


@dataclass(frozen=True)
class PtxVerdict:
    """What a kernel's PTX showed. `details`: as of `CpuVerdict`; and how many of its instructions, of the sums that
    ptxas may fuse and of the approximate instructions there are. Seconds are g++'s and the run's; of PTX that was made
    for this alone those of nvcc too."""

    kernel_id: str
    verdict: PtxOutcome
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0


@dataclass(frozen=True)
class PtxRequest:
    """How kernels are run. `sums`: whose tensor cores add (`Target.tensor_sums`). `part`: of the plan. `cpu_seconds`:
    of a kernel's whole plan."""

    target: str
    seed: int
    sums: int = TURING_SUMS
    part: Part = field(default_factory=Part)
    cpu_seconds: float = KERNEL_CPU_SECONDS


def verify_ptx(
    kernels: Sequence[Kernel],
    request: PtxRequest,
    toolchain: Toolchain,
    processes: Processes,
    limits: Limits,
    *,
    ptx: str | None = None,
    cancel: threading.Event | None = None,
) -> list[PtxVerdict]:
    """The verdicts in the order of the kernels; of those done so far where `cancel` was set. `ptx`: what nvcc made of
    them; default: it is asked. Raises InfrastructureError."""
    kernels = tuple(dict.fromkeys(kernels))
    verdicts: list[PtxVerdict] = []
    with processes.private_folder("ptx") as folder:
        builder = PtxBuilder(folder, toolchain, processes, limits, cancel)
        try:
            text = builder.ptx_of(kernels, request.target) if ptx is None else ptx
            module = read_ptx(text)
        except (NotBuilt, UnknownPtx) as error:
            outcome: PtxOutcome = "compile_error" if isinstance(error, NotBuilt) else "untranslated"
            details = error.details if isinstance(error, NotBuilt) else {}
            return [PtxVerdict(kernel.id, outcome, str(error), details) for kernel in kernels]
        except PtxCancelled:
            return []
        shares = builder.wall_seconds / len(kernels), builder.cpu_seconds / len(kernels)
        lines = text.split("\n")
        for kernel in kernels:
            builder.wall_seconds, builder.cpu_seconds = shares
            began = time.monotonic()
            try:
                verdict = _verdict_of(kernel, module, request, builder, (processes, limits, cancel))
            except PtxCancelled:
                break
            if verdict is None:
                break
            verdicts.append(
                replace(_with_instructions(verdict, lines), wall_seconds=shares[0] + time.monotonic() - began)
            )
    return verdicts


def _verdict_of(
    kernel: Kernel,
    module: Module,
    request: PtxRequest,
    builder: PtxBuilder,
    running: tuple[Processes, Limits, threading.Event | None],
) -> PtxVerdict | None:
    """Null where the caller cancelled it."""
    processes, limits, cancel = running
    try:
        text = render_ptx(kernel, module)
        library = builder.library(kernel, text, request.sums)
    except TextError as error:
        return PtxVerdict(kernel.id, "untranslated", str(error), cpu_seconds=builder.cpu_seconds)
    except NotBuilt as error:
        words = f"the translation of the PTX was not compiled: {error}"
        return PtxVerdict(kernel.id, "untranslated", words, error.details, cpu_seconds=builder.cpu_seconds)
    counts = {
        "instructions": sum(function.instructions for function in text.functions),
        "fusible": text.fusible,
        "approximate": text.approximate,
    }
    children = CpuChildren(
        processes,
        limits,
        builder.folder,
        request.seed,
        request.cpu_seconds,
        KERNEL_WALL_SECONDS,
        cancel,
        request.part,
        None,
    )
    ways = Ways(text.fusible > 0, text.approximate > 0, text.is_loose, text.tensor > 0)
    children.more = {"ptx": asdict(ways)}
    for verdict in children.verify(library, [kernel]):
        return _of_run(verdict, counts, builder)
    return None


def _of_run(verdict: CpuVerdict, counts: Mapping[str, int], builder: PtxBuilder) -> PtxVerdict:
    outcome: Verdict = verdict.verdict
    build = {"wall": builder.wall_seconds, "cpu": builder.cpu_seconds}
    details = {**verdict.details, **counts, "build_seconds": build}
    cpu_seconds = verdict.cpu_seconds + builder.cpu_seconds
    return PtxVerdict(verdict.kernel_id, outcome, verdict.message, details, cpu_seconds=cpu_seconds)


def _with_instructions(verdict: PtxVerdict, lines: Sequence[str]) -> PtxVerdict:
    """With the text of the lines of PTX that the message names."""
    named = dict.fromkeys(int(match) for match in _LINE.findall(verdict.message))
    if verdict.verdict == "untranslated" or not named:
        return verdict
    shown = [f"line {line}: {' '.join(lines[line - 1].split())}" for line in named if 0 < line <= len(lines)]
    return replace(verdict, message=f"{verdict.message} [{'; '.join(shown)}]" if shown else verdict.message)
