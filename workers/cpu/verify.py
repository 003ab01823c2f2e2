"""Verify kernels by running them on the CPU: build, run the test plan in a child process, collect verdicts. A child
runs many kernels; one that crashes, hangs or may have damaged its process ends with a verdict of its own, and another
child takes up the rest."""

import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from codegen.canonical import digest
from codegen.identity import PlanVersions
from codegen.kernel import Kernel
from codegen.operators import operator, operators
from codegen.plan import verification_plan
from codegen.plan.verification_plan import Part
from codegen.primitives import TURING_SUMS
from codegen.text import render_cpu
from storage.config.own_modules import module_of, operator_texts
from workers.compile.toolchain import Toolchain
from workers.cpu.build import BOUNDS_FLAGS, CPU_FLAGS, SANITIZE_FLAGS, build_cpu
from workers.processes.child_protocol import Hearing, new_key
from workers.processes.fence.access import ROOT
from workers.processes.job_files import write_text
from workers.processes.processes import Finished, InfrastructureError, Limits, ProcessError, Processes

Verdict = Literal["ok", "incorrect", "runtime_error", "run_timeout", "compile_error", "untranslated"]
"""The last of PTX alone (`workers.cpu.ptx`)."""

# A whole plan takes about 0.1 CPU seconds: a kernel that needs a hundred times as much does not end.
KERNEL_CPU_SECONDS = 10.0
# Wall time only backs the CPU limit up (a sanitised kernel, a damaged child), so it may be generous on a busy machine.
KERNEL_WALL_SECONDS = 60.0
SANITIZER_EXIT = 86  # distinguishes the sanitizer's end of a child from Python's
MAX_MESSAGE_CHARACTERS = 2000  # characters of a dead child's stderr that a verdict keeps
CHILD = "workers.cpu.run"
# One BLAS thread: the references are small, and the CPU limit counts the time of every thread.
CHILD_ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "client"))),
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class CpuVerdict:
    """What a kernel was verified to be on the CPU. `details`: seed, and per case extents, kind, runs, errors against
    bounds. Seconds are the kernel's own run plus its share of g++."""

    kernel_id: str
    verdict: Verdict
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0


def cpu_plans(*, sanitize: bool = False, sums: int = TURING_SUMS) -> PlanVersions:
    """By operator the digest of everything but the kernel that gives a CPU verdict its meaning: the CPU emulation and
    the harness, the plan, how it is run and built (also whether under the sanitizers: what was verified without them is
    then verified again), and the Python of the operator with all that it imports (reduced problems, inputs,
    references, bounds). `sums`: whose tensor cores added (`Target.tensor_sums`)."""
    own = operators()
    return _cpu_plans(tuple((name, module_of(own[name])) for name in sorted(own)), sanitize, sums)


@cache
def _cpu_plans(modules: tuple[tuple[str, str], ...], sanitize: bool, sums: int) -> PlanVersions:
    emulation = resources.files("codegen") / "device" / "cpu"
    shared = {p.name: p.read_text(encoding="utf-8") for p in emulation.iterdir() if p.name.endswith(".h")}
    shared |= {module.__name__: inspect.getsource(module) for module in (verification_plan, render_cpu)}
    for name in ("run.py", "cpu_check.py", "launch_code.py", "library.py"):
        shared[name] = Path(__file__).with_name(name).read_text(encoding="utf-8")
    flags = [*CPU_FLAGS, *(SANITIZE_FLAGS if sanitize else BOUNDS_FLAGS), f"tensor sums {sums}"]
    schema = verification_plan.PLAN_SCHEMA
    return {
        name: digest("cpu_plan", schema, operator=name, texts={**shared, **operator_texts(module)}, flags=flags)
        for name, module in modules
    }


def verify_on_cpu(
    kernels: Sequence[Kernel],
    toolchain: Toolchain,
    processes: Processes,
    limits: Limits,
    *,
    seed: int,
    sanitize: bool = False,
    sums: int = TURING_SUMS,
    cancel: threading.Event | None = None,
    on_result: Callable[[CpuVerdict], None] | None = None,
    on_print: Callable[[str], object] | None = None,
    part: Part | None = None,
    kernel_cpu_seconds: float = KERNEL_CPU_SECONDS,
    kernel_wall_seconds: float = KERNEL_WALL_SECONDS,
) -> list[CpuVerdict]:
    """The verdicts of `kernels`, one each in their order; of those done so far where `cancel` was set.

    `limits` hold for each process that is started (g++ or a child), the two kernel limits for the whole plan of one
    kernel. `sums`: whose tensor cores add (`Target.tensor_sums`). `on_result` is called as soon as a verdict is there,
    `on_print` with what kernels printed once their child has ended. `part`: of the test plan, after which a kernel
    does not count as verified. Raises InfrastructureError.
    """
    kernels = tuple(dict.fromkeys(kernels))
    verdicts: dict[str, CpuVerdict] = {}

    def keep(verdict: CpuVerdict) -> None:
        """With an even share of the seconds of g++."""
        wall, cpu = build.wall_seconds / len(kernels), build.cpu_seconds / len(kernels)
        verdict = verdicts[verdict.kernel_id] = replace(
            verdict,
            details={**verdict.details, "build_seconds": {"wall": wall, "cpu": cpu}},
            wall_seconds=verdict.wall_seconds + wall,
            cpu_seconds=verdict.cpu_seconds + cpu,
        )
        if on_result is not None:
            on_result(verdict)

    with processes.private_folder("cpu") as folder:
        build = build_cpu(
            kernels, toolchain, processes, limits, folder=folder, sanitize=sanitize, sums=sums, cancel=cancel
        )
        for kernel_id, (message, details) in build.errors.items():
            keep(CpuVerdict(kernel_id, "compile_error", message, details))
        # The sanitizers touch a byte for eight of all memory that is mapped.
        part = replace(part or Part(), near=sanitize)
        children = CpuChildren(
            processes, limits, folder, seed, kernel_cpu_seconds, kernel_wall_seconds, cancel, part, on_print
        )
        if sanitize:
            children.python = _sanitized_python(toolchain, processes, limits, folder)
        for library, held in build.libraries:
            for verdict in children.verify(library, held):
                keep(verdict)
    return [verdicts[kernel.id] for kernel in kernels if kernel.id in verdicts]


@dataclass
class CpuChildren:
    """Runs one child after the other until every kernel of a library has its verdict."""

    processes: Processes
    limits: Limits
    folder: Path
    seed: int
    cpu_seconds: float
    wall_seconds: float
    cancel: threading.Event | None
    part: Part
    on_print: Callable[[str], object] | None
    python: tuple[str, ...] = (sys.executable,)
    more: Mapping[str, Any] = field(default_factory=dict)  # of the request

    def verify(self, library: Path, kernels: Sequence[Kernel]) -> Iterable[CpuVerdict]:
        waiting = {kernel.id: kernel for kernel in kernels}
        while waiting and not (self.cancel and self.cancel.is_set()):
            running: str | None = None
            verified = 0
            garbage = ""
            heard = time.monotonic()
            key = new_key()
            hear = Hearing(key)
            argv = [*self.python, "-m", CHILD, self._request(library, list(waiting.values()))]
            with self.processes.stream(
                argv,
                cwd=self.folder,
                limits=self.limits,
                env=CHILD_ENVIRONMENT,
                cancel=self.cancel,
                reads=[Path(str(operator(kernel.operator).folder)) for kernel in kernels],
                stdin=key,
            ) as stream:
                for line in stream.lines(self.wall_seconds):
                    heard = time.monotonic()
                    if garbage:  # what follows it may be forged as well
                        continue
                    try:
                        message = hear(line)
                    except ValueError:
                        garbage = line[:200].decode("utf-8", "replace")
                        stream.kill()
                        continue
                    if "start" in message:
                        running = message["start"]
                        continue
                    running = None
                    verified += 1
                    del waiting[message["kernel"]]
                    yield CpuVerdict(message.pop("kernel"), **message)
                finished = stream.finished
            assert finished is not None, "lines() ends only when the child has"
            if self.on_print and finished.stderr:
                self.on_print(finished.stderr.decode("utf-8", "replace"))
            if self.cancel and self.cancel.is_set():
                return
            if garbage and running is not None:
                yield CpuVerdict(running, "runtime_error", f"wrote into the pipe to its parent: {garbage!r}")
                del waiting[running]
                continue
            if finished.ok and verified and not garbage:
                continue
            # A child that used up its limits over many kernels says nothing about the last one: it is tried again,
            # unless the child fell silent over it.
            silent = time.monotonic() - heard >= self.wall_seconds
            if verified and finished.ended_by is not None and not silent:
                continue
            yield _death(running, finished, self.limits)
            del waiting[str(running)]

    def _request(self, library: Path, kernels: Sequence[Kernel]) -> str:
        folders = {kernel.operator: str(operator(kernel.operator).folder) for kernel in kernels}
        request = {
            "library": str(library),
            "kernels": [kernel.to_json() for kernel in kernels],
            "operators": folders,
            "seed": self.seed,
            "cpu_seconds": self.cpu_seconds,
            "part": asdict(self.part),
            **self.more,
        }
        path = library.with_suffix(".json")
        write_text(path, json.dumps(request))
        return str(path)


def _death(running: str | None, finished: Finished, limits: Limits) -> CpuVerdict:
    """The verdict of the kernel that a child died of. Raises InfrastructureError where it died of something else."""
    stderr = finished.stderr.decode("utf-8", "replace").strip()
    if reason := finished.infrastructure_failure():
        raise InfrastructureError(reason, stalled=finished.stalled)
    # Python ends with 1 after an exception: the plan or the machine failed, and that says nothing about the kernel.
    if running is None or finished.returncode == 1:
        raise InfrastructureError(f"the child that runs kernels failed: {stderr[-MAX_MESSAGE_CHARACTERS:]}")
    verdict: Verdict = "runtime_error"
    if finished.ended_by in ("wall", "cpu"):
        verdict, message = "run_timeout", f"still running after {finished.wall_seconds:.1f} s"
    elif finished.ended_by is not None:
        message = f"reached the limit on {finished.ended_by}"
    elif finished.returncode == SANITIZER_EXIT:
        # The report from its first line with an error on.
        starts = [at for mark in ("ERROR: AddressSanitizer", "runtime error:") if (at := stderr.find(mark)) >= 0]
        start = stderr.rfind("\n", 0, min(starts)) + 1 if starts else 0
        message = f"sanitizer: {stderr[start : start + MAX_MESSAGE_CHARACTERS]}"
    elif finished.returncode < 0:
        message = f"the process ended with signal {-finished.returncode}: {stderr[-MAX_MESSAGE_CHARACTERS:]}"
    else:
        message = f"the process ended with exit status {finished.returncode}: {stderr[-MAX_MESSAGE_CHARACTERS:]}"
    details = limits.as_details(finished.ended_by)
    return CpuVerdict(running, verdict, message, details, finished.wall_seconds, finished.cpu_seconds)


def _sanitized_python(toolchain: Toolchain, processes: Processes, limits: Limits, folder: Path) -> tuple[str, ...]:
    """Python under the sanitizers: their library must be loaded before everything else, but only into Python."""
    printed = processes.run([str(toolchain.host_compiler), "-print-file-name=libasan.so"], cwd=folder, limits=limits)
    library = printed.stdout.decode().strip()
    if not printed.ok or not Path(library).is_absolute():
        raise ProcessError(f"{toolchain.host_compiler} has no address sanitizer (libasan.so): install it or go without")
    return (
        "env",
        f"LD_PRELOAD={library}",
        f"ASAN_OPTIONS=exitcode={SANITIZER_EXIT}:detect_leaks=0:detect_stack_use_after_return=0",
        f"UBSAN_OPTIONS=exitcode={SANITIZER_EXIT}:print_stacktrace=1",
        "PYTHONMALLOC=malloc",
        sys.executable,
    )
