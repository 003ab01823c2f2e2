"""Compile a group of kernels; where it fails, split it so that every innocent kernel still gets its library.

A front-end error names a line and ptxas names the kernel or a line of its PTX: such kernels are set aside with their
own words of the log and the others compiled again. Only where nobody is named (a crash, a timeout) the group is cut
into parts, which are compiled side by side.
"""

from __future__ import annotations

import gzip
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import pairwise
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
from workers.processes import InfrastructureError, Limits, Processes
from workers.stopwatch import Stopwatch
from workers.toolchain import Toolchain

SIDE_BY_SIDE = 2
"""Parts at once. A worker is one process for each core, so there is a core for the second part only where another
worker is idle; where none is, both take as long as one after the other would, and only groups that crash the compiler
or hang in it come here."""
SMALL_PART = 7  # kernels: √MAX_KERNELS of `codegen.group`

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
    kernel would double what a group adds to the store, as 7 KB they add a seventh. `cpu_seconds` are of all its tools,
    `peak_memory_bytes` of the one that held the most."""

    source: str
    cubin: bytes
    ptx: bytes
    library: bytes
    log: str
    phases: tuple[Phase, ...]
    kernels: tuple[str, ...]
    cpu_seconds: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class GroupOutcome:
    """`outcomes` has every kernel id of the group. Seconds are of all tools, failed attempts included, and so are the
    phases, by their start: of one file none overlap, those of files that are compiled side by side do. Wall seconds
    that two tools spend at the same time count once."""

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

    Raises InfrastructureError (the machine failed a file of one kernel twice: nothing was learnt about any kernel),
    CompileCancelled, and NotUnique, Unclassified or UnexpectedSymbols (bugs of the rendering)."""
    work = _Work(target, toolchain, processes, limits, _Stop(cancel), stopwatch or Stopwatch())
    attempts = [work.attempt_again(tuple(kernels))]
    attempts += _side_by_side(work, attempts[0].left)
    return _together(attempts, {kernel.id: number for number, kernel in enumerate(kernels)}, work.phases)


class _Stop(threading.Event):
    """Set by its owner, or by whoever may cancel the whole."""

    def __init__(self, cancel: threading.Event | None) -> None:
        super().__init__()
        self._cancel = cancel

    def is_set(self) -> bool:
        return super().is_set() or (self._cancel is not None and self._cancel.is_set())


@dataclass(frozen=True)
class _Attempt:
    """What one file came to: `outcomes` that are final, the artifact where it compiled, and else the groups that are
    still to be tried, each smaller."""

    outcomes: dict[str, KernelOutcome]
    artifact: Artifact | None
    left: tuple[tuple[Kernel, ...], ...]
    cpu_seconds: float


def _side_by_side(work: _Work, groups: Sequence[tuple[Kernel, ...]]) -> list[_Attempt]:
    """Attempts of these groups and of what becomes of them, at most SIDE_BY_SIDE at once; the first error ends the
    others. A group that the machine failed is tried once more, when nothing of ours runs beside it."""
    waiting, failed = deque(groups), list[tuple[Kernel, ...]]()
    ended: list[_Attempt] = []
    running: dict[Future[_Attempt], tuple[Kernel, ...]] = {}
    with ThreadPoolExecutor(SIDE_BY_SIDE, thread_name_prefix="compile") as pool:
        try:
            while waiting or running:
                while waiting and len(running) < SIDE_BY_SIDE:
                    group = waiting.popleft()
                    running[pool.submit(work.attempt, group)] = group
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    group = running.pop(future)
                    try:
                        attempt = future.result()
                    except InfrastructureError:
                        failed.append(group)
                        continue
                    ended.append(attempt)
                    waiting.extend(attempt.left)
        except BaseException:
            work.stop.set()
            raise
    alone = [(group, work.attempt_in_parts) for group in failed]
    while alone:
        group, attempt_alone = alone.pop()
        ended.append(attempt_alone(group))
        alone += [(part, work.attempt_again) for part in ended[-1].left]
    return ended


def _together(attempts: Sequence[_Attempt], position: Mapping[str, int], phases: Sequence[Phase]) -> GroupOutcome:
    """Artifacts in the order of their first kernels, whichever ended first."""
    made = [(one.artifact, one.outcomes) for one in attempts if one.artifact is not None]
    made.sort(key=lambda each: position[each[0].kernels[0]])
    outcomes = {name: found for one in attempts if one.artifact is None for name, found in one.outcomes.items()}
    for number, (_, found) in enumerate(made):
        outcomes.update({name: replace(outcome, artifact=number) for name, outcome in found.items()})
    in_order = tuple(sorted(phases, key=lambda phase: phase.start))
    artifacts, cpu_seconds = tuple(artifact for artifact, _ in made), sum(one.cpu_seconds for one in attempts)
    return GroupOutcome(
        outcomes, artifacts, _at_work([one for one in in_order if one.name != "render"]), cpu_seconds, in_order
    )


def _at_work(phases: Sequence[Phase]) -> float:
    """Seconds in which at least one of the phases, given by their start, was under way."""
    seconds, covered = 0.0, 0.0
    for phase in phases:
        end = phase.start + phase.seconds
        seconds += max(0.0, end - max(phase.start, covered))
        covered = max(covered, end)
    return seconds


class _Work:
    """What all attempts of one `compile_group` call share. Its methods may run in several threads."""

    def __init__(
        self,
        target: Target,
        toolchain: Toolchain,
        processes: Processes,
        limits: Limits,
        stop: threading.Event,
        stopwatch: Stopwatch,
    ) -> None:
        self._target = target
        self._toolchain = toolchain
        self._processes = processes
        self._limits = limits
        self.stop = stop
        self._stopwatch = stopwatch
        self.phases: list[Phase] = []  # of all attempts, also of those that the machine failed

    def attempt_again(self, kernels: tuple[Kernel, ...]) -> _Attempt:
        """`attempt`, and once more where the machine failed: what ended one compiler often is gone with it."""
        try:
            return self.attempt(kernels)
        except InfrastructureError:
            return self.attempt_in_parts(kernels)

    def attempt_in_parts(self, kernels: tuple[Kernel, ...]) -> _Attempt:
        """`attempt`; where the machine fails that too, the parts are left to be tried: each needs less memory."""
        try:
            return self.attempt(kernels)
        except InfrastructureError:
            if len(kernels) == 1:
                raise
            return _Attempt({}, None, _parts(kernels), 0.0)

    def attempt(self, kernels: tuple[Kernel, ...]) -> _Attempt:
        """Compile one file."""
        with self._processes.private_folder() as folder:
            tools = (self._toolchain, self._processes, self._limits, self.stop, self._stopwatch)
            compiler = FileCompiler(folder, *tools)
            outcomes: dict[str, KernelOutcome] = {}
            artifact: Artifact | None = None
            left: tuple[tuple[Kernel, ...], ...] = ()
            try:
                artifact, outcomes = self._compile(kernels, compiler)
            except CompileFault as fault:
                outcomes, left = _split(kernels, fault)
            finally:
                ids = tuple(kernel.id for kernel in kernels)
                self.phases.extend([replace(phase, kernels=ids) for phase in compiler.phases])
        return _Attempt(outcomes, artifact, left, compiler.cpu_seconds)

    def _compile(
        self, kernels: tuple[Kernel, ...], compiler: FileCompiler
    ) -> tuple[Artifact, dict[str, KernelOutcome]]:
        with compiler.phase("render"):
            group = render_device(kernels)
            assert_unique(group.text, group.functions)
        code = compiler.compile_device(group.text, self._target.name, group.symbols)
        with compiler.phase("render"):
            text = render_library(kernels, target=self._target.name)
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
            cpu_seconds=compiler.cpu_seconds,
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


def _split(
    kernels: tuple[Kernel, ...], fault: CompileFault
) -> tuple[dict[str, KernelOutcome], tuple[tuple[Kernel, ...], ...]]:
    """The outcomes of those that are to blame, and the groups of the others that are still to be tried."""
    status: Status = "compile_timeout" if isinstance(fault, CompileTimedOut) else "compile_error"
    if len(kernels) == 1:
        return {kernels[0].id: KernelOutcome(status, fault.log)}, ()
    if isinstance(fault, CompileFailed):
        culprits = find_culprits(kernels, fault.log, fault.source, fault.ptx)
        if culprits:
            outcomes = {kernel_id: KernelOutcome(status, log) for kernel_id, log in culprits.items()}
            innocent = tuple(kernel for kernel in kernels if kernel.id not in culprits)
            return outcomes, (innocent,) if innocent else ()
    return {}, _parts(kernels)


def _parts(kernels: tuple[Kernel, ...]) -> tuple[tuple[Kernel, ...], ...]:
    """About √n parts of about √n kernels, and a part kernel by kernel: the whole, its part and the kernel alone are
    three files that crash or hang in a row, where halving would make six of 32 kernels; and each costs the time of a
    crash or a whole time limit."""
    count = len(kernels) if len(kernels) <= SMALL_PART else math.isqrt(len(kernels) - 1) + 1
    edges = [number * len(kernels) // count for number in range(count + 1)]
    return tuple(kernels[first:last] for first, last in pairwise(edges))


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
