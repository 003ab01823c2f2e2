"""A level-2 search tries different machine code, not the same code under different names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from codegen.lower import lower
from codegen.operators import operator
from codegen.search import Search
from codegen.targets import target
from workers.compile_group import compile_group
from workers.processes import Limits, Processes
from workers.toolchain import find_toolchain

WANTED = 300
SAMPLE = 330  # of thousands: schedules that differ only in their raster share a kernel
LIMITS = Limits(wall_seconds=300, cpu_seconds=300, memory_bytes=8 << 30, output_bytes=1 << 27)


def test_three_hundred_schedules_of_level_2_have_distinct_code() -> None:
    problem = operator("matmul").parse({"operator": "matmul", "m": 1024, "n": 1024, "k": 1024, "layout": "nn"})
    where = target("sm_80")
    candidates = lower(problem, where, Search(level=2, limit=SAMPLE, seed=5)).candidates
    kernels = list(dict.fromkeys(candidate.kernel for candidate in candidates))
    processes, toolchain = Processes(), find_toolchain()
    groups = [kernels[first::8] for first in range(8)]
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda group: compile_group(group, where, toolchain, processes, LIMITS), groups))
    found = {kernel: one for outcome in outcomes for kernel, one in outcome.outcomes.items()}
    assert [one.log for one in found.values() if one.status != "ok"] == []
    # The rules keep out what must spill; of the rest, what does is for the prediction to rank last.
    assert sum(one.resources.spill_bytes > 0 for one in found.values() if one.resources) <= len(found) // 100
    assert len({one.code_digest for one in found.values()}) >= WANTED
    varying = {name for name in problem_tunables() if len({kernel.tunables.get(name) for kernel in kernels}) > 1}
    assert len(varying) >= 6


def problem_tunables() -> frozenset[str]:
    return operator("matmul").kernel_tunables
