"""Compile a group of kernels in one file; those that a compiler names as its culprits are set aside, and the others
compiled again without them. Where no kernel is named (a crash, a timeout) the group is left: its kernels are tried in
smaller files (`storage.transitions.pending_builds`)."""

import gzip
import re
import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.targets import Target
from codegen.text.cubin import code_digest_of
from codegen.text.ptxas_report import Resources
from codegen.text.render_group import render_device, symbols
from codegen.text.render_library import group_exports, render_library
from codegen.text.scan_functions import assert_unique
from workers.compile.compile_file import CompileFailed, CompileFault, CompileTimedOut, FileCompiler, Phase
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Limits, Processes
from workers.processes.stopwatch import Stopwatch

Status = Literal["ok", "compile_error", "compile_timeout"]
_NAMESPACE = re.compile(r"kernel_[0-9a-f]{16}")
# nvcc: group.cu(12): error: …   and, in instantiation notes, "at line 34"; g++: library.cpp:12:3: error: …
_FRONT_END = re.compile(r"^\w+\.(?:cu|cpp)(?:\((\d+)\)|:(\d+)(?::\d+)?): .*error", re.MULTILINE)
_HOST_CONTEXT = re.compile(r"^\w+\.cpp: In ")
_DETECTED_AT = re.compile(r"at line (\d+)|^\w+\.cpp:(\d+):\d+:\s+required from", re.MULTILINE)
_PTXAS = re.compile(r"^ptxas (?:\S+, line (\d+); )?(?:error|fatal).*", re.MULTILINE)
_ENTRY = re.compile(r"\.entry (\w+)")


@dataclass(frozen=True)
class KernelOutcome:
    """What became of one kernel: the tools' message where it failed, and the limit by name that ended them."""

    status: Status
    log: str
    code_digest: str | None = None
    resources: Resources | None = None
    limit: dict[str, float] | None = None


@dataclass(frozen=True)
class Artifact:
    """One file that compiled. `kernels` are ids in render order. `ptx` is compressed (gzip): 40 KB of text for each
    kernel would double what a group adds to the store, as 7 KB they add a seventh. `peak_memory_bytes`: of the
    tool that held the most."""

    source: str
    cubin: bytes
    ptx: bytes
    library: bytes
    log: str
    phases: tuple[Phase, ...]
    kernels: tuple[str, ...]
    peak_memory_bytes: int


@dataclass(frozen=True)
class GroupOutcome:
    """`outcomes` by kernel id, `artifact` of those that compiled. `left`: what failed together with the messages of
    `why`, which name no kernel; `hung`: by a limit of time. Seconds are of all tools, failed files included, and so are
    the phases, by their start."""

    outcomes: dict[str, KernelOutcome]
    artifact: Artifact | None
    left: tuple[Kernel, ...]
    why: str
    wall_seconds: float
    cpu_seconds: float
    phases: tuple[Phase, ...] = ()
    hung: bool = False


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
    outcomes: dict[str, KernelOutcome] = {}
    artifact: Artifact | None = None
    left, why, hung = tuple(kernels), "", False
    phases: list[Phase] = []
    cpu_seconds = 0.0
    tools = (toolchain, processes, limits, cancel, stopwatch or Stopwatch())
    while left and artifact is None:
        with processes.private_folder() as folder:
            compiler = FileCompiler(folder, *tools, alone=len(left) == 1)
            try:
                artifact, decided = _compile(left, target, compiler)
            except CompileFault as fault:
                decided, why = _culprits(left, fault), fault.log
                hung = isinstance(fault, CompileTimedOut)
            ids = tuple(kernel.id for kernel in left)
            phases += [replace(phase, kernels=ids) for phase in compiler.phases]
            cpu_seconds += compiler.cpu_seconds
        if not decided:
            break
        outcomes |= decided
        left = tuple(kernel for kernel in left if kernel.id not in outcomes)
    wall_seconds = sum(phase.seconds for phase in phases if phase.name != "render")
    if not left:
        why, hung = "", False
    return GroupOutcome(outcomes, artifact, left, why, wall_seconds, cpu_seconds, tuple(phases), hung)


def _culprits(kernels: tuple[Kernel, ...], fault: CompileFault) -> dict[str, KernelOutcome]:
    """The outcomes of those that are to blame; empty where it may be any of them."""
    status: Status = "compile_timeout" if isinstance(fault, CompileTimedOut) else "compile_error"
    if len(kernels) == 1:
        return {kernels[0].id: KernelOutcome(status, fault.log, limit=fault.limit)}
    if not isinstance(fault, CompileFailed):
        return {}
    named = find_culprits(kernels, fault.log, fault.source, fault.ptx)
    return {kernel_id: KernelOutcome(status, log) for kernel_id, log in named.items()}


def _compile(
    kernels: tuple[Kernel, ...], target: Target, compiler: FileCompiler
) -> tuple[Artifact, dict[str, KernelOutcome]]:
    with compiler.phase("render"):
        group = render_device(kernels)
        assert_unique(group.text, group.functions)
    code = compiler.compile_device(group.text, target.name, group.symbols)
    with compiler.phase("render"):
        text = render_library(kernels, target=target.name)
    library = compiler.link_library(text, group_exports(kernels))
    # A megabyte for each two dozen kernels: level 6 would take four times as long for three quarters of the bytes.
    ptx = gzip.compress(code.ptx, 1, mtime=0)
    artifact = Artifact(
        source=group.text,
        cubin=code.cubin,
        ptx=ptx,
        library=library,
        log=compiler.log,
        phases=tuple(compiler.phases),
        kernels=tuple(kernel.id for kernel in kernels),
        peak_memory_bytes=compiler.peak_memory_bytes,
    )
    outcomes = {}
    for kernel in kernels:
        names = symbols(kernel)
        outcomes[kernel.id] = KernelOutcome(
            status="ok",
            log="",
            code_digest=code_digest_of([code.contents.kernels[name] for name in names]),
            resources=worst_resources([code.resources[name] for name in names]),
        )
    return artifact, outcomes


def stored_resources(kernel: Kernel, reported: Resources) -> dict[str, int]:
    """ptxas' report with what only the launch defines, as builds keep it."""
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


def find_culprits(kernels: Sequence[Kernel], log: str, source: str, ptx: str | None) -> dict[str, str]:
    """Kernel id -> the errors that name it: by namespace or symbol, or by a line of its block in `source` or `ptx`."""
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
    """Each with its context: nvcc's after an error, up to a blank line; g++'s before it; of ptxas one line."""
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
