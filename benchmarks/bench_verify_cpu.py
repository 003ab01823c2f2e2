"""What a CPU verdict costs: g++ per kernel in a group, and the whole test plan per kernel beyond it, in CPU seconds.

Run with `python -m benchmarks.bench_verify_cpu [--kernels N]` on an idle core. The kernels are a level-2 sample of
BERT's first feed-forward layer. The peer, in the same run: the same kernels, one g++ call each. The last line is one
JSON object, which is also kept under `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from typing import Any

from benchmarks.keep_result import keep_result
from codegen.kernel import Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.search import Search
from codegen.targets import target
from workers.build_cpu import build_cpu
from workers.processes import Limits, Processes
from workers.toolchain import Toolchain, find_toolchain
from workers.verify_cpu import verify_on_cpu

PROBLEM = {
    "operator": "matmul", "m": 1024, "n": 3072, "k": 768, "layout": "nt", "dtype": "float32",
    "epilogue": [{"op": "bias", "axis": "n"}, {"op": "gelu"}],
}  # fmt: skip
LIMITS = Limits(wall_seconds=600, cpu_seconds=600, memory_bytes=8 << 30, output_bytes=256 << 20)


def sample(count: int) -> list[Kernel]:
    """Distinct kernels of the level-2 space, always the same ones."""
    own = operator(PROBLEM["operator"])
    lowered = lower(own.parse(PROBLEM), target("sm_90a"), Search(level=2, limit=4 * count, seed=1))
    return list(dict.fromkeys(candidate.kernel for candidate in lowered.candidates))[:count]


def one_by_one(kernels: list[Kernel], toolchain: Toolchain, processes: Processes) -> float:
    """CPU seconds of g++ per kernel where each has a file of its own."""
    spent = 0.0
    for kernel in kernels:
        with processes.private_folder() as folder:
            spent += build_cpu([kernel], toolchain, processes, LIMITS, folder=folder).cpu_seconds
    return spent / len(kernels)


def measure(count: int) -> dict[str, Any]:
    processes = Processes()
    toolchain = find_toolchain(processes)
    kernels = sample(count)
    start = time.perf_counter()
    verdicts = verify_on_cpu(kernels, toolchain, processes, LIMITS, seed=1)
    wall = time.perf_counter() - start
    builds = [verdict.details["build_seconds"]["cpu"] for verdict in verdicts]
    plans = [verdict.cpu_seconds - build for verdict, build in zip(verdicts, builds, strict=True)]
    return {
        "benchmark": "verify_cpu",
        "kernels": len(kernels),
        "verdicts": Counter(verdict.verdict for verdict in verdicts),
        "gpp_cpu_s_per_kernel": round(statistics.mean(builds), 4),
        "gpp_cpu_s_alone": round(one_by_one(kernels[:4], toolchain, processes), 4),
        "plan_cpu_s_median": round(statistics.median(plans), 4),
        "plan_cpu_s_max": round(max(plans), 4),
        "plan_cpu_s_limit": 0.25,
        "wall_s": round(wall, 3),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=int, default=16)
    parser.add_argument("--no-file", action="store_true", help="print the result without keeping it")
    options = parser.parse_args()
    keep_result(measure(options.kernels), keep=not options.no_file)
