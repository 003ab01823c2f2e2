"""What nvcc's fast-compile levels save, and what they make of the kernels.

Run with `make bench-screening` or `python -m benchmarks.bench_screening`.

The same candidates are compiled in one file at each level of `--Ofast-compile` and in full. Of each level: the CPU
seconds of nvcc (user and system), the least of `--repeats` runs that take turns; registers; and how many kernels keep
arrays, such as their accumulators, in a stack frame, which is local memory. Then, for the level that screening uses:
where the candidate that is predicted fastest as compiled in full stands in the order of the predictions of screening.
None of this says how fast the code runs: no GPU is asked.

The last line is one JSON object, which is also kept under `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.keep_result import keep_result
from codegen.kernel import Candidate, Kernel
from codegen.operators import operator
from codegen.predict import predict
from codegen.ptxas_report import Resources
from codegen.rules import Rejected
from codegen.search import Search
from codegen.targets import target
from workers.compile_group import GroupOutcome, compile_group
from workers.processes import Limits, Processes
from workers.toolchain import DEVICE_FLAGS, SCREENING_FLAGS, Toolchain, find_toolchain

TARGET = target("sm_90a")
SHAPE = {"operator": "matmul", "m": 1024, "n": 1024, "k": 1024}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "float16": (24, {"dtype": "float16"}),
    "float32": (16, {"dtype": "float32"}),
}
LEVELS = ("full", "min", "mid", "max")
LIMITS = Limits(wall_seconds=600, cpu_seconds=600, memory_bytes=8 << 30, output_bytes=1 << 30)


@dataclass(frozen=True)
class AtLevel(Toolchain):
    """A toolchain that compiles at any of the levels."""

    level: str = "full"

    @property
    def device_flags(self) -> tuple[str, ...]:
        return DEVICE_FLAGS if self.level == "full" else (*DEVICE_FLAGS, f"--Ofast-compile={self.level}")


def candidates_of(fields: dict[str, Any], count: int) -> list[Candidate]:
    """Candidates of level 2 with distinct kernels, drawn."""
    op = operator("matmul")
    problem = op.parse({**SHAPE, **fields})
    found: dict[Kernel, Candidate] = {}
    for schedule in op.space(problem, TARGET, Search(level=2, limit=40 * count, seed=1)):
        if not isinstance(op.rules(problem, schedule, TARGET), Rejected):
            candidate = op.candidate(problem, schedule)
            found.setdefault(candidate.kernel, candidate)
        if len(found) == count:
            break
    return list(found.values())


def measure(candidates: list[Candidate], toolchain: Toolchain, processes: Processes, repeats: int) -> dict[str, Any]:
    """CPU seconds by level, and the order of the candidates by prediction in full and screened."""
    kernels = [one.kernel for one in candidates]
    seconds: dict[str, list[float]] = {level: [] for level in LEVELS}
    outcomes: dict[str, GroupOutcome] = {}
    for _ in range(repeats):
        for level in LEVELS:
            own = AtLevel(**{**vars(toolchain), "level": level})
            outcome = compile_group(kernels, TARGET, own, processes, LIMITS)
            if outcome.artifact is None:
                raise SystemExit(f"{level}: the file did not compile: {outcome.why}")
            outcomes[level] = outcome
            seconds[level].append(outcome.cpu_seconds)
    screening = SCREENING_FLAGS[0].partition("=")[2]
    full, fast = (in_order(candidates, outcomes[level]) for level in ("full", screening))
    return {
        "kernels": len(kernels),
        "cpu_s": {level: round(min(found), 2) for level, found in seconds.items()},
        "cpu_s_of_each_run": {level: [round(one, 2) for one in found] for level, found in seconds.items()},
        "code": {level: code(outcomes[level], kernels) for level in LEVELS},
        "best_in_full_stands_at": fast.index(full[0]) + 1,
        "of_the_best_8_in_full_among_the_best_8_screened": len(set(full[:8]) & set(fast[:8])),
    }


def in_order(candidates: list[Candidate], outcome: GroupOutcome) -> list[str]:
    """Candidate ids, the best predicted first."""
    us = {one.id: predict(one, resources_of(outcome, one.kernel), TARGET).us for one in candidates}
    return sorted(us, key=lambda name: (us[name], name))


def code(outcome: GroupOutcome, kernels: list[Kernel]) -> dict[str, Any]:
    """Registers of a thread, and the bytes that it has in local memory."""
    found = [resources_of(outcome, kernel) for kernel in kernels]
    stacks = [one.stack_bytes for one in found]
    return {
        "median_registers": statistics.median(one.registers for one in found),
        "kernels_with_a_stack_frame": sum(size > 0 for size in stacks),
        "largest_stack_frame_bytes": max(stacks),
    }


def resources_of(outcome: GroupOutcome, kernel: Kernel) -> Resources:
    found = outcome.outcomes[kernel.id]
    if found.resources is None:
        raise SystemExit(f"{kernel.id} did not compile: {found.log}")
    return found.resources


def main() -> None:
    parser = argparse.ArgumentParser(description="What nvcc's fast-compile levels save.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-file", action="store_true", help="print the result without keeping it")
    arguments = parser.parse_args()
    processes = Processes()
    try:
        toolchain = find_toolchain(processes)
        kinds = {}
        for kind, (count, fields) in KINDS.items():
            kinds[kind] = measure(candidates_of(fields, count), toolchain, processes, arguments.repeats)
            print(kind, kinds[kind], flush=True)
        result = {
            "benchmark": "screening",
            "kinds": kinds,
            "screening_flags": list(SCREENING_FLAGS),
            "target": TARGET.name,
            "cores": len(os.sched_getaffinity(0)),
            "toolchain": dict(toolchain.versions),
        }
    finally:
        processes.close()
    keep_result(result, keep=not arguments.no_file)


if __name__ == "__main__":
    main()
