"""Verify kernels by their own PTX on the CPU, beside the emulation of the primitives: translate, build, run the
verification plan in a child process (`workers.cpu.run`).

A kernel whose PTX has anything without a translation, or whose translation g++ refuses, is `untranslated`: that says
nothing about the kernel, only that this witness has not seen it. `compile_error` is what nvcc refuses. A library holds
one kernel, because its file has nothing of another one.
"""

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any

from codegen.canonical import digest
from codegen.errors import TextError
from codegen.identity import PlanVersions
from codegen.kernel import Kernel
from codegen.plan import ptx_plan
from codegen.plan.ptx_plan import Ways
from codegen.plan.verification_plan import Part
from codegen.primitives import TURING_SUMS
from codegen.ptx.module import SOURCE, Module, UnknownPtx
from codegen.ptx.read import read_ptx
from codegen.text import render_ptx
from codegen.text.render_ptx import PtxText
from storage.config.own_modules import texts_of
from workers.compile.toolchain import Toolchain
from workers.cpu.build import CPU_FLAGS, MAX_LOG, RUNTIME, Runtime, place_runtime
from workers.cpu.verify import CpuChildren, CpuVerdict, Verdict, cpu_plans
from workers.processes.job_files import read_bytes, write_text
from workers.processes.process_stream import once_more
from workers.processes.processes import Finished, InfrastructureError, Limits, Processes

CUDA_FILE, PTX_FILE = "kernels.cu", "kernels.ptx"
# A translated kernel is one function of thousands of statements that runs for a fraction of the time that it compiles:
# -Og takes two thirds of -O1's seconds, without these passes a fifth less (7,328 instructions). The runtime has -O1.
_NOT_FOR_ONE_RUN = (
    "-fno-combine-stack-adjustments",
    "-fno-inline-functions-called-once",
    "-fno-ipa-reference",
    "-fno-ipa-pure-const",
    "-fno-forward-propagate",
    "-fno-cprop-registers",
)
_OF_LOOPS = ("-O1", "-ftree-vectorize")
KERNEL_FLAGS = (*(flag for flag in CPU_FLAGS if flag not in _OF_LOOPS), "-Og", *_NOT_FOR_ONE_RUN, "-w")

# A whole plan takes a few tenths of a second: a kernel that needs a hundred times as much does not end.
KERNEL_CPU_SECONDS, KERNEL_WALL_SECONDS = 30.0, 120.0
_LINE = re.compile(rf"{re.escape(SOURCE)}:(\d+)")


class PtxCancelled(Exception):
    """The caller's cancel event ended a tool."""


class NotBuilt(Exception):
    """A tool refused a file; the message is what it said. `details`: as of `CpuVerdict`, of a limit of ours."""

    def __init__(self, message: str, details: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.details = details or {}


class PtxBuilder:
    """Tools in one private folder; adds up the seconds of all of them."""

    def __init__(
        self,
        folder: Path,
        toolchain: Toolchain,
        processes: Processes,
        limits: Limits,
        cancel: threading.Event | None = None,
    ) -> None:
        self.folder, self._toolchain = folder, toolchain
        self._processes, self._limits, self._cancel = processes, limits, cancel
        self.wall_seconds = self.cpu_seconds = 0.0

    def ptx_of(self, kernels: Sequence[Kernel], target: str) -> str:
        """What the device compiler makes of the kernels, with the lines of the files that they come from. Raises
        NotBuilt, PtxCancelled, InfrastructureError."""
        write_text(self.folder / CUDA_FILE, render_ptx.render_lines(kernels))
        self._run(self._toolchain.ptx_command(target, CUDA_FILE, PTX_FILE), "the device compiler")
        text = read_bytes(self.folder / PTX_FILE, self._limits.output_bytes).decode("utf-8")
        return text.replace(f'"{self.folder}/', '"')

    def library(self, kernel: Kernel, text: PtxText, sums: int = TURING_SUMS) -> Path:
        """Raises as `ptx_of`."""
        runtime = Runtime(render_ptx.render_ptx_runtime(sums), self._toolchain, CPU_FLAGS)
        if (refused := place_runtime(runtime, self.folder, self._limits, self._once)) is not None:
            self._require(refused, "g++")
        library = self.folder / f"ptx_{kernel.namespace}.so"
        source = library.with_suffix(".cpp")
        write_text(source, text.text)
        compiler = str(self._toolchain.host_compiler)
        self._run([compiler, *KERNEL_FLAGS, "-o", library.name, source.name, RUNTIME, "-lm"], "g++")
        return library

    def _run(self, command: Sequence[str], name: str) -> None:
        self._require(once_more(partial(self._once, command)), name)

    def _once(self, command: Sequence[str]) -> Finished:
        finished = self._processes.run(command, cwd=self.folder, limits=self._limits, cancel=self._cancel)
        self.wall_seconds += finished.wall_seconds
        self.cpu_seconds += finished.cpu_seconds
        return finished

    def _require(self, finished: Finished, name: str) -> None:
        if finished.ok:
            return
        if finished.cause == "cancelled":
            raise PtxCancelled
        if reason := finished.infrastructure_failure():
            raise InfrastructureError(reason, stalled=finished.stalled)
        if finished.ended_by is not None:
            message = f"was stopped: its limit on {finished.ended_by} was reached after {finished.wall_seconds:.1f} s"
            raise NotBuilt(f"{name} {message}", self._limits.as_details(finished.ended_by))
        raise NotBuilt(f"{name}: {finished.text()[:MAX_LOG] or f'status {finished.returncode}, without a word'}")


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
) -> list[CpuVerdict]:
    """The verdicts in the order of the kernels; of those done so far where `cancel` was set. `ptx`: what nvcc made of
    them; default: it is asked. Among the details is how many of a kernel's instructions, of the sums that ptxas may
    fuse and of the approximate instructions there are. Seconds are g++'s and the run's; of PTX that was made for this
    alone those of nvcc too. Raises InfrastructureError."""
    kernels = tuple(dict.fromkeys(kernels))
    verdicts: list[CpuVerdict] = []
    with processes.private_folder("ptx") as folder:
        builder = PtxBuilder(folder, toolchain, processes, limits, cancel)
        try:
            text = builder.ptx_of(kernels, request.target) if ptx is None else ptx
            module = read_ptx(text)
        except (NotBuilt, UnknownPtx) as error:
            outcome: Verdict = "compile_error" if isinstance(error, NotBuilt) else "untranslated"
            details = error.details if isinstance(error, NotBuilt) else {}
            return [CpuVerdict(kernel.id, outcome, str(error), details) for kernel in kernels]
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
) -> CpuVerdict | None:
    """Null where the caller cancelled it."""
    processes, limits, cancel = running
    try:
        text = render_ptx.render_ptx(kernel, module)
        library = builder.library(kernel, text, request.sums)
    except TextError as error:
        return CpuVerdict(kernel.id, "untranslated", str(error), cpu_seconds=builder.cpu_seconds)
    except NotBuilt as error:
        message = f"the translation of the PTX was not compiled: {error}"
        return CpuVerdict(kernel.id, "untranslated", message, error.details, cpu_seconds=builder.cpu_seconds)
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
    build = {"wall": builder.wall_seconds, "cpu": builder.cpu_seconds}
    for verdict in children.verify(library, [kernel]):
        details = {**verdict.details, **counts, "build_seconds": build}
        return replace(verdict, details=details, cpu_seconds=verdict.cpu_seconds + builder.cpu_seconds)
    return None


def _with_instructions(verdict: CpuVerdict, lines: Sequence[str]) -> CpuVerdict:
    """With the text of the lines of PTX that the message names."""
    named = dict.fromkeys(int(match) for match in _LINE.findall(verdict.message))
    if verdict.verdict == "untranslated" or not named:
        return verdict
    shown = [f"line {line}: {' '.join(lines[line - 1].split())}" for line in named if 0 < line <= len(lines)]
    return replace(verdict, message=f"{verdict.message} [{'; '.join(shown)}]" if shown else verdict.message)


_OURS = ("translate", "read")  # of `codegen.ptx`; they import the rules


def ptx_plans(sums: int = TURING_SUMS) -> PlanVersions:
    """The digest of the translator, of what its instructions do, and of how the text is built and run, with the
    version of the CPU's plan for the operator. `sums`: whose tensor cores add (`Target.tensor_sums`)."""
    modules = _modules()
    return {
        name: digest("ptx_plan", ptx_plan.PLAN_SCHEMA, cpu_plan=version, modules=modules)
        for name, version in cpu_plans(sums=sums).items()
    }


@cache
def _modules() -> str:
    device = resources.files("codegen") / "device" / "ptx"
    texts = {path.name: path.read_text(encoding="utf-8") for path in device.iterdir() if path.name.endswith(".h")}
    modules = (*(f"codegen.ptx.{name}" for name in _OURS), ptx_plan.__name__, render_ptx.__name__)
    texts |= texts_of(*modules, packages=("codegen",))
    texts["ptx.py"] = Path(__file__).read_text(encoding="utf-8")
    return digest("ptx_judge", ptx_plan.PLAN_SCHEMA, texts=texts)
