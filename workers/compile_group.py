"""Compile a group of kernels; where it fails, split it so that every innocent kernel still gets its library.

A front-end error names a line and ptxas names the kernel or a line of its PTX: such kernels are set aside with their
own words of the log and the others compiled again. Only where nobody is named (a crash, a timeout) the group is
halved.
"""

from __future__ import annotations

import gzip
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from codegen.cubin import code_digest_of
from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.ptxas_report import Resources
from codegen.render_group import render_device, symbols
from codegen.render_library import group_exports, render_library
from codegen.scan_functions import assert_unique
from codegen.targets import Target
from workers.compile_file import CompileFailed, CompileFault, CompileTimedOut, FileCompiler, Phase
from workers.find_culprits import find_culprits
from workers.processes import Limits, Processes
from workers.stopwatch import Stopwatch
from workers.toolchain import Toolchain

Status = Literal["ok", "compile_error", "compile_timeout"]


@dataclass(frozen=True)
class KernelOutcome:
    """What became of one kernel. `log` is what the tools said about it where it failed; `artifact` indexes the
    outcome's artifacts where it did not."""

    status: Status
    log: str
    code_digest: str | None = None
    resources: Resources | None = None
    artifact: int | None = None


@dataclass(frozen=True)
class Artifact:
    """One file that compiled. `kernels` are ids in render order. `ptx` is compressed (gzip): 40 KB of text for each
    kernel would double what a group adds to the store, as 7 KB they add a seventh."""

    source: str
    cubin: bytes
    ptx: bytes
    library: bytes
    log: str
    phases: tuple[Phase, ...]
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class GroupOutcome:
    """`outcomes` has every kernel id of the group. Seconds are of all tools, failed attempts included, and so are the
    phases: in their order, none within another."""

    outcomes: dict[str, KernelOutcome]
    artifacts: tuple[Artifact, ...]
    wall_seconds: float
    cpu_seconds: float
    phases: tuple[Phase, ...] = ()


def compile_group(
    kernels: Sequence[Kernel],
    target: Target,
    toolchain: Toolchain,
    processes: Processes,
    limits: Limits,
    cancel: threading.Event | None = None,
    stopwatch: Stopwatch | None = None,
) -> GroupOutcome:
    """Compile `kernels` under `limits` per tool; phases start by the `stopwatch`, one of its own unless given.

    Raises InfrastructureError (the machine failed: nothing was learnt about any kernel), CompileCancelled, and
    NotUnique, Unclassified or UnexpectedSymbols (bugs of the rendering)."""
    work = _Work(target, toolchain, processes, limits, cancel, stopwatch or Stopwatch())
    waiting = deque([tuple(kernels)])
    while waiting:
        waiting.extend(work.attempt(waiting.popleft()))
    return GroupOutcome(work.outcomes, tuple(work.artifacts), work.wall_seconds, work.cpu_seconds, tuple(work.phases))


class _Work:
    """The state of one `compile_group` call."""

    def __init__(
        self,
        target: Target,
        toolchain: Toolchain,
        processes: Processes,
        limits: Limits,
        cancel: threading.Event | None,
        stopwatch: Stopwatch,
    ) -> None:
        self._target = target
        self._toolchain = toolchain
        self._processes = processes
        self._limits = limits
        self._cancel = cancel
        self._stopwatch = stopwatch
        self.phases: list[Phase] = []
        self.outcomes: dict[str, KernelOutcome] = {}
        self.artifacts: list[Artifact] = []
        self.wall_seconds = 0.0
        self.cpu_seconds = 0.0

    def attempt(self, kernels: tuple[Kernel, ...]) -> list[tuple[Kernel, ...]]:
        """Compile; record outcomes; return the groups that are still to be tried, each smaller than `kernels`."""
        if not kernels:
            return []
        with self._processes.private_folder() as folder:
            tools = (self._toolchain, self._processes, self._limits, self._cancel, self._stopwatch)
            compiler = FileCompiler(folder, *tools)
            try:
                self._compile(kernels, compiler)
            except CompileFault as fault:
                return self._split(kernels, fault)
            finally:
                self.wall_seconds += compiler.wall_seconds
                self.cpu_seconds += compiler.cpu_seconds
                ids = tuple(kernel.id for kernel in kernels)
                self.phases += [replace(phase, kernels=ids) for phase in compiler.phases]
        return []

    def _compile(self, kernels: tuple[Kernel, ...], compiler: FileCompiler) -> None:
        with compiler.phase("render"):
            group = render_device(kernels)
            assert_unique(group.text, group.functions)
        code = compiler.compile_device(group.text, self._target.name, group.symbols)
        with compiler.phase("render"):
            text = render_library(kernels, target=self._target.name)
        library = compiler.link_library(text, group_exports(kernels))
        ids = tuple(kernel.id for kernel in kernels)
        # A megabyte for each two dozen kernels: level 6 would take four times as long for three quarters of the bytes.
        ptx = gzip.compress(code.ptx, 1, mtime=0)
        artifact = Artifact(group.text, code.cubin, ptx, library, compiler.log, tuple(compiler.phases), ids)
        for kernel in kernels:
            names = symbols(kernel)
            self.outcomes[kernel.id] = KernelOutcome(
                status="ok",
                log="",
                code_digest=code_digest_of([code.contents.kernels[name] for name in names]),
                resources=worst_resources([code.resources[name] for name in names]),
                artifact=len(self.artifacts),
            )
        self.artifacts.append(artifact)

    def _split(self, kernels: tuple[Kernel, ...], fault: CompileFault) -> list[tuple[Kernel, ...]]:
        status: Status = "compile_timeout" if isinstance(fault, CompileTimedOut) else "compile_error"
        if len(kernels) == 1:
            self.outcomes[kernels[0].id] = KernelOutcome(status, fault.log)
            return []
        if isinstance(fault, CompileFailed):
            culprits = find_culprits(kernels, fault.log, fault.source, fault.ptx)
            for kernel_id, log in culprits.items():
                self.outcomes[kernel_id] = KernelOutcome(status, log)
            if culprits:
                return [tuple(kernel for kernel in kernels if kernel.id not in culprits)]
        middle = len(kernels) // 2
        return [kernels[:middle], kernels[middle:]]


def stored_resources(kernel: Kernel, reported: Resources) -> dict[str, int]:
    """ptxas' report with what only the launch knows, as builds keep it."""
    own = operator(kernel.operator)
    return {
        **reported.as_dict(),
        "dynamic_shared_bytes": own.shared_bytes(kernel),
        "threads": max(own.launch_bounds(kernel, name).threads for name in own.functions(kernel)),
    }


def worst_resources(resources: Sequence[Resources]) -> Resources:
    """Field by field the largest of a kernel's functions: what limits its occupancy."""
    fields = [each.as_dict() for each in resources]
    return Resources.from_dict({name: max(each[name] for each in fields) for name in fields[0]})
