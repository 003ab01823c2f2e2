"""How well groups are sized, and what a bad kernel costs its group.

Run with `make bench-groups` or `python -m benchmarks.bench_groups`.

*Sizing*: groups of kernels of four kinds are compiled, one after the other; the error of their predicted CPU seconds
and memory. And the wall seconds of a set of kernels in 1 to 4 groups on two workers, beside the number that
a stand-alone run makes.

*Isolation*: one group whole, then the same group with one bad kernel in its middle: one that the front end refuses, one
that ptxas refuses, one that ends the compiler without a word, as late as it can: when all of its file is compiled; and
one at which the compiler hangs until its time limit. The first two are named; for the others the files become smaller
until the kernel is alone (`compile_to_the_end`), here one after the other, where a service's workers take them side by
side. `files`: how many were compiled for it; `limit_s` and `hung`: the time limit of a hanging compiler, which is twice
the seconds of the whole group, and how often it was spent; `wall_s` has these seconds in it.

The last line is one JSON object, which is also kept under `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.keep_result import keep_result
from codegen.compile_cost import FIXED_BYTES, FIXED_SECONDS, kernel_bytes, kernel_seconds
from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.rules import Rejected
from codegen.search import Search
from codegen.targets import target
from workers.compile_group import compile_group, compile_to_the_end
from workers.elsewhere.compile_ahead import in_files
from workers.processes import Finished, Limits, Processes
from workers.toolchain import Toolchain, find_toolchain

TARGET = target("sm_90a")
SHAPE = {"operator": "matmul", "m": 1024, "n": 1024, "k": 1024}
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "float16_gelu": {"dtype": "float16", "epilogue": [{"op": "bias", "axis": "n"}, {"op": "gelu"}]},
    "int8": {"dtype": "int8", "acc_dtype": "int32", "out_dtype": "int32"},
}
SIZES = (4, 12, 12, 12)
LIMITS = Limits(wall_seconds=600, cpu_seconds=600, memory_bytes=8 << 30, output_bytes=1 << 30)
BAD = {
    "front_end": 'static_assert(false, "bad");',
    "ptxas": '__global__ void bad() { asm("no_such_instruction;"); }',
    "crash": "",
    "hang": "",
}
HANGING = ["sleep", "infinity"]


class OneBad(Processes):
    """The process seam, where one kernel's text is spoilt before nvcc sees it, or nvcc dies of it at its end, or hangs.
    `files`: how often nvcc was started; `hung`: how often it hung."""

    def __init__(self, kernel: Kernel, kind: str) -> None:
        super().__init__()
        self.files = self.hung = 0
        self._opening, self._kind = f"namespace {kernel.namespace} {{", kind

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        limits: Limits,
        env: Mapping[str, str] | None = None,
        cancel: threading.Event | None = None,
    ) -> Finished:
        source = cwd / "group.cu"
        compiles = Path(argv[0]).name == "nvcc"
        guilty = compiles and self._opening in source.read_text()
        self.files += compiles
        if guilty and self._kind == "hang":
            self.hung += 1
            return super().run(HANGING, cwd=cwd, limits=limits, env=env, cancel=cancel)
        if guilty:
            source.write_text(source.read_text().replace(self._opening, f"{self._opening} {BAD[self._kind]}", 1))
        finished = super().run(argv, cwd=cwd, limits=limits, env=env, cancel=cancel)
        if guilty and self._kind == "crash":
            return replace(finished, returncode=-signal.SIGSEGV, stdout=b"", stderr=b"")
        return finished


def kernels_of(kind: str, count: int, seed: int = 1) -> list[Kernel]:
    """Kernels of level 2, drawn."""
    op = operator("matmul")
    problem = op.parse({**SHAPE, **KINDS[kind]})
    found: dict[Kernel, None] = {}
    for schedule in op.space(problem, TARGET, Search(level=2, limit=40 * count, seed=seed)):
        if not isinstance(op.rules(problem, schedule, TARGET), Rejected):
            found[op.candidate(problem, schedule).kernel] = None
        if len(found) == count:
            break
    return list(found)


def predictions(toolchain: Toolchain, processes: Processes) -> dict[str, Any]:
    """Errors of the predictions for every group."""
    errors: dict[str, list[float]] = {"seconds": [], "bytes": []}
    rows = []
    for seed, size in enumerate(SIZES):
        for kind in KINDS:
            kernels = kernels_of(kind, size, seed)
            outcome = compile_group(kernels, TARGET, toolchain, processes, LIMITS)
            if outcome.artifact is None:
                raise SystemExit(f"{size} {kind}: the group did not compile: {outcome.why}")
            peak = outcome.artifact.peak_memory_bytes
            seconds = FIXED_SECONDS + sum(map(kernel_seconds, kernels))
            memory = FIXED_BYTES + sum(map(kernel_bytes, kernels))
            errors["seconds"].append(abs(seconds / outcome.cpu_seconds - 1))
            errors["bytes"].append(abs(memory / peak - 1))
            rows.append(
                {
                    "kernels": f"{size} {kind}",
                    "cpu_s": round(outcome.cpu_seconds, 2),
                    "predicted_s": round(seconds, 2),
                    "peak_mib": peak >> 20,
                    "predicted_mib": int(memory) >> 20,
                }
            )
            print(rows[-1], flush=True)
    return {"median_error": {name: round(statistics.median(found), 3) for name, found in errors.items()}, "files": rows}


def group_counts(toolchain: Toolchain, processes: Processes, workers: int) -> list[dict[str, Any]]:
    """Wall seconds of the same kernels in more and more groups, and how many the rule makes."""
    found = []
    for count in (2, 6, 16):
        kernels, wall = kernels_of("float32", count), {}
        for groups in range(1, min(2 * workers, count) + 1):
            parts = [tuple(kernels[first::groups]) for first in range(groups)]
            started = time.perf_counter()
            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(lambda part: compile_group(part, TARGET, toolchain, processes, LIMITS), parts))
            wall[groups] = round(time.perf_counter() - started, 2)
        chosen = len(in_files(kernels, workers))
        found.append({"kernels": count, "workers": workers, "wall_s_by_groups": wall, "chosen": chosen})
        print(found[-1], flush=True)
    return found


def isolation(toolchain: Toolchain, processes: Processes, size: int) -> dict[str, Any]:
    """Wall and CPU seconds of a group with one bad kernel until all its kernels are judged, over the group's own."""
    kernels = kernels_of("float16", size)
    whole = compile_group(kernels, TARGET, toolchain, processes, LIMITS)
    if whole.artifact is None:
        raise SystemExit(f"the group did not compile: {whole.why}")
    result: dict[str, Any] = {"kernels": size, "wall_s": round(whole.wall_seconds, 2)}
    hanging = replace(LIMITS, wall_seconds=math.ceil(2 * whole.wall_seconds))
    bad = kernels[2 * size // 3]
    for kind in BAD:
        spoilt, limits = OneBad(bad, kind), hanging if kind == "hang" else LIMITS
        outcomes = list(compile_to_the_end(kernels, TARGET, toolchain, spoilt, limits))
        spoilt.close()
        states = {name: found.status for outcome in outcomes for name, found in outcome.outcomes.items()}
        refused = "compile_timeout" if kind == "hang" else "compile_error"
        if states != {kernel.id: refused if kernel == bad else "ok" for kernel in kernels}:
            raise SystemExit(f"{kind}: the wrong kernels were refused: {states}")
        wall, cpu = (sum(getattr(one, name) for one in outcomes) for name in ("wall_seconds", "cpu_seconds"))
        result[kind] = {
            "files": spoilt.files,
            "wall_s": round(wall, 2),
            "wall_ratio": round(wall / whole.wall_seconds, 2),
            "cpu_ratio": round(cpu / whole.cpu_seconds, 2),
        }
        if spoilt.hung:
            result[kind] |= {"limit_s": limits.wall_seconds, "hung": spoilt.hung}
        print(kind, result[kind], flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="The sizing of groups, and what a bad kernel costs its group.")
    parser.add_argument("--kernels", type=int, default=32, help="of the group with a bad kernel")
    parser.add_argument("--no-file", action="store_true", help="print the result without keeping it")
    arguments = parser.parse_args()
    cores, processes = len(os.sched_getaffinity(0)), Processes()
    try:
        toolchain = find_toolchain(processes)
        result = {
            "benchmark": "groups",
            "isolation": isolation(toolchain, processes, arguments.kernels),
            "predictions": predictions(toolchain, processes),
            "group_counts": group_counts(toolchain, processes, cores),
            "target": TARGET.name,
            "cores": cores,
            "toolchain": dict(toolchain.versions),
        }
    finally:
        processes.close()
    keep_result(result, keep=not arguments.no_file)


if __name__ == "__main__":
    main()
