"""Compile kernels for the CPU: one g++ call for many, and the guilty set apart where it fails. What runs them is
compiled once by this process and linked with each."""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from codegen.kernel import Kernel
from codegen.primitives import TURING_SUMS
from codegen.text.render_cpu import render_cpu, render_runtime
from workers.compile.toolchain import Toolchain
from workers.processes.job_files import read_bytes, write_bytes, write_text
from workers.processes.process_stream import once_more
from workers.processes.processes import Finished, InfrastructureError, Limits, Processes

# -O1 with vectorised loops compiles as fast as -O1 alone and runs three to five times faster; -O2 costs 1.4 times the
# compile time and gains nothing (16 matmul kernels). The library never leaves this machine, so it may use all of it.
# Contracting a * b + c would round differently from the GPU's own order of operations.
CPU_FLAGS = (
    "-std=c++17",
    "-O1",
    "-ftree-vectorize",
    "-march=native",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-Wno-unknown-pragmas",
    "-fmax-errors=20",
    "-shared",
    "-pipe",
)
# A kernel's own arrays, such as its fragments, are in no buffer: g++ checks the indices of those whose length it sees,
# for about a tenth more of a candidate's seconds (15 kernels of five operators).
BOUNDS_FLAGS = ("-fsanitize=bounds", "-fsanitize-undefined-trap-on-error")
RUNTIME = "runtime.o"
# Frame pointers make the sanitizer's own stack traces readable.
SANITIZE_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1")
COUNT_FLAGS = ("-DCUKILN_COUNTING",)
MAX_LOG = 20_000  # characters of g++'s messages that a verdict keeps
_NAMESPACE = re.compile(r"\bkernel_[0-9a-f]{16}\b")


@dataclass(frozen=True)
class Runtime:
    """What runs kernels: its C++ text, and how it is compiled."""

    text: str
    toolchain: Toolchain
    flags: tuple[str, ...]


# What runs kernels takes g++ 0.3 CPU seconds, a small kernel less than 0.1.
_runtimes: dict[Runtime, bytes] = {}


@dataclass
class CpuBuild:
    """`libraries`: paths with their kernels; `errors` by kernel id: g++'s messages, and a limit of ours."""

    libraries: list[tuple[Path, tuple[Kernel, ...]]] = field(default_factory=list)
    errors: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    cancelled: bool = False


def build_cpu(
    kernels: Sequence[Kernel],
    toolchain: Toolchain,
    processes: Processes,
    limits: Limits,
    *,
    folder: Path,
    sanitize: bool = False,
    counting: bool = False,
    sums: int = TURING_SUMS,
    cancel: threading.Event | None = None,
) -> CpuBuild:
    """Compile all kernels into as few libraries in `folder` as succeed. `limits` hold for each g++. With `counting` a
    library counts what its kernels do (`codegen/device/cpu/counts.h`), and is slower for it. The first build of a
    process is longer by that of the runtime, and so are its seconds. `sums`: whose tensor cores add
    (`Target.tensor_sums`).

    A group that fails is split: the kernels that g++ names go alone, else it is halved. Raises InfrastructureError
    where the machine failed and not a kernel.
    """
    build = CpuBuild()
    flags = (*CPU_FLAGS, *(SANITIZE_FLAGS if sanitize else BOUNDS_FLAGS), *(COUNT_FLAGS if counting else ()))
    waiting = [tuple(kernels)] if kernels else []

    def run(argv: Sequence[str]) -> Finished:
        finished = processes.run(argv, cwd=folder, limits=limits, cancel=cancel)
        build.wall_seconds += finished.wall_seconds
        build.cpu_seconds += finished.cpu_seconds
        return finished

    runtime = Runtime(render_runtime(), toolchain, flags)
    if waiting and (refused := place_runtime(runtime, folder, limits, run)) is not None:
        build.cancelled = refused.cause == "cancelled"
        waiting = []
        if not build.cancelled:  # a limit, which none of their files would keep either
            build.errors = {kernel.id: _refusal(refused, limits) for kernel in kernels}
    while waiting and not build.cancelled:
        group = waiting.pop()
        number = len(build.libraries) + len(build.errors) + len(waiting)
        library = folder / f"group_{number}_{group[0].namespace}.so"
        source = library.with_suffix(".cpp")
        write_text(source, render_cpu(group, runtime=False, sums=sums))
        argv = [str(toolchain.host_compiler), *flags, "-o", library.name, source.name, RUNTIME, "-lm"]
        # Of one kernel: only where it crashes again is that the kernel's.
        finished = once_more(partial(run, argv)) if len(group) == 1 else run(argv)
        if finished.ok:
            build.libraries.append((library, group))
        elif finished.cause == "cancelled":
            build.cancelled = True
        elif reason := finished.infrastructure_failure():
            raise InfrastructureError(reason, stalled=finished.stalled)
        elif len(group) == 1:
            build.errors[group[0].id] = _refusal(finished, limits)
        else:
            waiting.extend(_split(group, finished.text()))
    return build


def place_runtime(
    runtime: Runtime, folder: Path, limits: Limits, run: Callable[[Sequence[str]], Finished]
) -> Finished | None:
    """As `RUNTIME` into the folder; returns how g++ ended where a limit or the caller ended it. Raises
    InfrastructureError: there is no kernel in it that could be blamed."""
    compiled = _runtimes.get(runtime)
    if compiled is None:
        source = folder / "runtime.cpp"
        write_text(source, runtime.text)
        of_object = ["-c" if flag == "-shared" else flag for flag in runtime.flags]
        compiler = str(runtime.toolchain.host_compiler)
        finished = once_more(partial(run, [compiler, *of_object, "-o", RUNTIME, source.name]))
        if finished.ended_by is not None and not finished.stalled:
            return finished
        if not finished.ok:
            reason = finished.infrastructure_failure() or f"g++ refused what runs kernels: {finished.text()[:MAX_LOG]}"
            raise InfrastructureError(reason, stalled=finished.stalled)
        compiled = _runtimes[runtime] = read_bytes(folder / RUNTIME, limits.output_bytes)
    write_bytes(folder / RUNTIME, compiled)
    return None


def _refusal(finished: Finished, limits: Limits) -> tuple[str, dict[str, Any]]:
    """g++'s messages, and a limit of ours."""
    message = finished.text()[:MAX_LOG] or f"g++ ended with {finished.returncode} and said nothing"
    if finished.ended_by is not None:
        message = f"g++ was stopped: its limit on {finished.ended_by} was reached after {finished.wall_seconds:.1f} s"
    return message, limits.as_details(finished.ended_by)


def _split(group: tuple[Kernel, ...], log: str) -> list[tuple[Kernel, ...]]:
    """Parts to try again: g++ continues after an error, so it names every suspect and all others are likely fine."""
    named = set(_NAMESPACE.findall(log))
    suspects = [kernel for kernel in group if kernel.namespace in named]
    others = tuple(kernel for kernel in group if kernel.namespace not in named)
    if suspects and others:
        return [*((kernel,) for kernel in suspects), others]
    middle = len(group) // 2
    return [group[:middle], group[middle:]]
