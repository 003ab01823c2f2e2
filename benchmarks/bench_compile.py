"""Seconds to compile many kernels: one `.cu` per kernel and nvcc straight to a `.so`, against cukiln's way.

Run with `make bench-compile` or `python -m benchmarks.bench_compile`. Both sides compile the same rendered device text
with the same optimisation flags for the same architecture, as many processes at once as there are cores, on the first
kernels by index of level 2 of the public fp32 shape square/float32_1024. cukiln's way is what a worker does: groups of
`codegen.group`, rendering and both uniqueness assertions included, to cubin and `.so` with launch code and stub, which
the baseline does not have. Rounds alternate between the two, so that a busy machine hits both. The last line is one
JSON object, which is also kept under `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.keep_result import keep_result
from codegen.group import group
from codegen.kernel import Candidate, Kernel
from codegen.operators import operator
from codegen.render_group import render_device
from codegen.rules import Rejected
from codegen.search import Search
from codegen.targets import Target, target
from workers.compile_group import compile_group
from workers.processes import Limits, Processes
from workers.toolchain import DEVICE_FLAGS, Toolchain, find_toolchain

TARGET = "sm_90a"
PROBLEMS = {"matmul": {"operator": "matmul", "m": 1024, "n": 1024, "k": 1024, "layout": "nn", "dtype": "float32"}}
KERNELS = 96
LIMITS = Limits(wall_seconds=600, cpu_seconds=600, memory_bytes=8 << 30, output_bytes=1 << 30)


@dataclass(frozen=True)
class Spent:
    """Wall seconds of the whole set; CPU seconds summed over the tools' process trees."""

    wall: float
    cpu: float


class Bench:
    """Both ways to compile one set of kernels."""

    def __init__(self, toolchain: Toolchain, sheet: Target, processes: Processes, cores: int) -> None:
        self._toolchain = toolchain
        self._target = sheet
        self._processes = processes
        self.cores = cores

    def baseline(self, kernels: Sequence[Kernel]) -> Spent:
        """One file per kernel, nvcc all the way."""
        return self._timed(self._nvcc_to_library, kernels)

    def ours(self, kernels: Sequence[Kernel]) -> Spent:
        """Groups, device pass only, launch code by g++."""
        started = time.perf_counter()
        groups = group(kernels, workers=self.cores)
        grouping = time.perf_counter() - started
        spent = self._timed(self._compile_group, groups)
        return Spent(spent.wall + grouping, spent.cpu)

    def _timed(self, compile_one: Callable[[Any], float], work: Sequence[Any]) -> Spent:
        started = time.perf_counter()
        with ThreadPoolExecutor(self.cores) as pool:
            cpu = sum(pool.map(compile_one, work))
        return Spent(time.perf_counter() - started, cpu)

    def _nvcc_to_library(self, kernel: Kernel) -> float:
        name = self._target.name
        flags = [flag for flag in DEVICE_FLAGS if flag != "-cubin"]
        architecture = ["-gencode", f"arch={name.replace('sm_', 'compute_')},code={name}"]
        command = [str(self._toolchain.nvcc), "-ccbin", str(self._toolchain.host_compiler), *architecture, *flags]
        command += ["-shared", "-Xcompiler", "-fPIC", "-o", "kernel.so", "kernel.cu"]
        with self._processes.private_folder() as folder:
            (folder / "kernel.cu").write_text(render_device([kernel]).text, encoding="utf-8")
            finished = self._processes.run(command, cwd=folder, limits=LIMITS)
            if not finished.ok or not (folder / "kernel.so").is_file():
                raise SystemExit(f"the baseline failed: {finished.text()[-2000:]}")
        return finished.cpu_seconds

    def _compile_group(self, kernels: tuple[Kernel, ...]) -> float:
        outcome = compile_group(kernels, self._target, self._toolchain, self._processes, LIMITS)
        failed = [found.log for found in outcome.outcomes.values() if found.status != "ok"]
        if failed:
            raise SystemExit(f"{len(failed)} kernels failed: {failed[0][-2000:]}")
        return outcome.cpu_seconds


def first_kernels(name: str, sheet: Target, count: int) -> tuple[list[Kernel], int]:
    """The first `count` kernels by index of level 2, and how many candidates stand before the next one."""
    op = operator(name)
    problem = op.parse(PROBLEMS[name])
    found: dict[Kernel, None] = {}
    candidates: list[Candidate] = []
    for schedule in op.space(problem, sheet, Search(level=2)):
        if isinstance(op.rules(problem, schedule, sheet), Rejected):
            continue
        candidate = op.candidate(problem, schedule)
        if candidate.kernel not in found and len(found) == count:
            break
        found[candidate.kernel] = None
        candidates.append(candidate)
    return list(found), len(candidates)


def compare(bench: Bench, name: str, sheet: Target, count: int, rounds: int) -> dict[str, Any]:
    """The figures of one operator: medians over the rounds, and every round's own."""
    kernels, candidates = first_kernels(name, sheet, count)
    baseline, ours = [], []
    for number in range(rounds):
        baseline.append(bench.baseline(kernels))
        ours.append(bench.ours(kernels))
        print(f"{name}, round {number + 1}: {baseline[-1].wall:.1f} s against {ours[-1].wall:.1f} s", flush=True)
    wall = [statistics.median(spent.wall for spent in side) for side in (baseline, ours)]
    cpu = [statistics.median(spent.cpu for spent in side) for side in (baseline, ours)]
    return {
        "kernels": len(kernels),
        "candidates": candidates,
        "groups": len(group(kernels, workers=bench.cores)),
        "baseline_s": round(wall[0], 2),
        "ours_s": round(wall[1], 2),
        "ratio_wall": round(wall[0] / wall[1], 2),
        "baseline_cpu_s": round(cpu[0], 2),
        "ours_cpu_s": round(cpu[1], 2),
        "ratio_cpu": round(cpu[0] / cpu[1], 2),
        "rounds": [
            {"baseline_s": round(one.wall, 2), "ours_s": round(two.wall, 2)}
            for one, two in zip(baseline, ours, strict=True)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Grouped device-only compilation against one nvcc per kernel.")
    parser.add_argument("--rounds", type=int, default=1, help="how often each side compiles the set")
    parser.add_argument("--kernels", type=int, default=KERNELS, help="kernels per operator")
    parser.add_argument("--no-file", action="store_true", help="print the result without keeping it")
    arguments = parser.parse_args()
    sheet, cores = target(TARGET), len(os.sched_getaffinity(0))
    processes = Processes()
    try:
        toolchain = find_toolchain(processes)
        bench = Bench(toolchain, sheet, processes, cores)
        operators = {name: compare(bench, name, sheet, arguments.kernels, arguments.rounds) for name in PROBLEMS}
    finally:
        processes.close()
    result = {
        "benchmark": "compile",
        "operators": operators,
        "target": sheet.name,
        "processes": cores,
        "toolchain": dict(toolchain.versions),
    }
    keep_result(result, keep=not arguments.no_file)


if __name__ == "__main__":
    main()
