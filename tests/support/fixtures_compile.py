"""What the compile tests share: the real toolchain, the probe operator, and small kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from codegen.kernel import Candidate, Kernel
from codegen.operators import load_operators, operator
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import Target, target
from tests.support.compile_cache import CachingProcesses
from tests.support.places import PROBE
from workers.compile.toolchain import Toolchain, find_toolchain
from workers.processes.processes import Limits, Processes

(PROBE,) = load_operators([PROBE])
LIMITS = Limits(wall_seconds=120, cpu_seconds=120, memory_bytes=4 << 30, output_bytes=64 << 20)
SM_90A = target("sm_90a")


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    made = Processes()
    yield made
    made.close()


@pytest.fixture(scope="session")
def caching_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CachingProcesses]:
    """Compiles what no process of this run has compiled before."""
    base = tmp_path_factory.getbasetemp()
    made = CachingProcesses((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled")
    yield made
    made.close()


@pytest.fixture(scope="session")
def toolchain(processes: Processes) -> Toolchain:
    return find_toolchain(processes)


def probe_candidate(n: int = 1000, **tunables: int | str) -> Candidate:
    """The probe's default schedule (two launches and a workspace of one slice) with some tunables changed."""
    schedule = {"factor": 1, "fault": "none", "threads": 64, "maxnreg": 0, "live": 0, "way": "workspace", "slices": 1}
    problem = PROBE.parse({"operator": "probe", "n": n, "scale": 2.5})
    return PROBE.candidate(problem, Schedule.of({**schedule, **tunables}))


def probe(factor: int = 1, fault: str = "none", **tunables: int | str) -> Kernel:
    return probe_candidate(factor=factor, fault=fault, **tunables).kernel


def matmul_candidates(count: int, sheet: Target = SM_90A, **fields: object) -> list[Candidate]:
    """Level-2 candidates of distinct kernels, of those that compile fastest."""
    op = operator("matmul")
    problem = op.parse({"operator": "matmul", "m": 256, "n": 192, "k": 64, "dtype": "float32", **fields})
    candidates: dict[Kernel, Candidate] = {}
    for schedule in op.space(problem, sheet, Search(level=2, limit=400, seed=7)):
        candidate = op.candidate(problem, schedule)
        if candidate.kernel not in candidates and not hasattr(op.rules(problem, schedule, sheet), "rule"):
            candidates[candidate.kernel] = candidate
        if len(candidates) == 4 * count:
            break
    return sorted(candidates.values(), key=lambda one: op.predicted_compile_seconds(one.kernel))[:count]
