"""A level-2 search tries different machine code, not the same code under different names."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.lower import lower
from codegen.search.search import Search
from codegen.targets import Target, target
from tests.support.fixtures.codegen import matmul
from tests.support.kernels.random_cases import seed_of_this_run
from tests.support.run.each_run import some_each_run
from workers.compile.compile_group import KernelOutcome, compile_group
from workers.compile.toolchain import find_toolchain
from workers.processes.processes import Limits, Processes

LIMITS = Limits(wall_seconds=300, cpu_seconds=300, memory_bytes=8 << 30, output_bytes=1 << 27)
CUBE = {"m": 1024, "n": 1024, "k": 1024}
HALVES = {**CUBE, "dtype": "float16", "layout": "nt"}


def kernels_of(fields: dict[str, Any], where: Target, *, limit: int, seed: int) -> list[Kernel]:
    """The distinct kernels of accepted schedules of level 2: those that differ only at launch share one."""
    candidates = lower(matmul(**fields), where, Search(level=2, limit=limit, seed=seed)).candidates
    return list(dict.fromkeys(candidate.kernel for candidate in candidates))


def compiled(kernels: Sequence[Kernel], where: Target, group: int) -> list[KernelOutcome]:
    """Of each kernel, from groups of that many; all must compile."""
    processes, toolchain = Processes(), find_toolchain()
    groups = [kernels[first : first + group] for first in range(0, len(kernels), group)]
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda part: compile_group(part, where, toolchain, processes, LIMITS), groups))
    assert [outcome.why for outcome in outcomes if outcome.left] == []
    by_name = {kernel: compiled for outcome in outcomes for kernel, compiled in outcome.outcomes.items()}
    assert len(by_name) == len(kernels)
    assert [compiled.log for compiled in by_name.values() if compiled.status != "ok"] == []
    return list(by_name.values())


def spilling(outcomes: Sequence[KernelOutcome]) -> int:
    """The rules keep out what must spill; of the rest, what does is for the prediction to rank last."""
    return sum(outcome.resources.spill_bytes > 0 for outcome in outcomes if outcome.resources)


def digests(outcomes: Sequence[KernelOutcome]) -> int:
    return len({outcome.code_digest for outcome in outcomes})


def varying(kernels: Sequence[Kernel]) -> set[str]:
    return {
        name for name, _ in kernels[0].tunables.values if len({kernel.tunables.get(name) for kernel in kernels}) > 1
    }


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_three_hundred_schedules_of_level_2_have_distinct_code_on_cuda_cores() -> None:
    where = target("sm_80")
    kernels = kernels_of({**CUBE, "layout": "nn"}, where, limit=330, seed=5)
    outcomes = compiled(kernels, where, 42)
    assert digests(outcomes) >= 300
    assert spilling(outcomes) <= len(outcomes) // 100
    assert len(varying(kernels)) >= 6


def test_level_2_of_a_cube_of_halves_has_five_hundred_kernels() -> None:
    kernels = kernels_of(HALVES, target("sm_90a"), limit=1500, seed=1)
    assert len(kernels) >= 500
    assert varying(kernels) >= {
        "tile_m", "tile_n", "tile_k", "warps_m", "warps_n", "stages", "fragments", "epilogue_path", "maxnreg", "split",
    }  # fmt: skip


@pytest.mark.parametrize(("arch", "fields"), some_each_run([("sm_80", {**CUBE, "layout": "nn"}), ("sm_90a", HALVES)]))
def test_a_sample_of_level_2_has_distinct_code(arch: str, fields: dict[str, Any]) -> None:
    where = target(arch)
    kernels = kernels_of(fields, where, limit=60, seed=seed_of_this_run())[:6]
    assert len(varying(kernels)) >= 6
    assert digests(compiled(kernels, where, 6)) == 6


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_five_hundred_schedules_of_level_2_have_distinct_code_on_tensor_cores() -> None:
    where = target("sm_90a")
    outcomes = compiled(kernels_of(HALVES, where, limit=1500, seed=1)[:560], where, 20)
    assert digests(outcomes) >= 500
    assert spilling(outcomes) <= len(outcomes) // 20
