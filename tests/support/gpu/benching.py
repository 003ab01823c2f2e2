"""`benchmarks.bench_kernels`, to be forked: imports are most of a short run."""

from __future__ import annotations

import benchmarks.bench_kernels
import workers.gpu.run_on_gpu
import workers.offline.ceilings
from tests.support.processes.forks_of_this import fork_this

prepare = workers.gpu.run_on_gpu.prepare


def main() -> int:
    benchmarks.bench_kernels.LEAST_BUDGET = 0.01  # what a fork measures in a second is all of a test's bundle
    fork_this([workers.gpu.run_on_gpu.__name__, workers.offline.ceilings.__name__])
    return benchmarks.bench_kernels.main()
