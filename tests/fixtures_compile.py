"""What the compile tests share: the real toolchain, the probe operator, and small kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from codegen.kernel import Candidate, Kernel
from codegen.operators import load_operators, operator
from codegen.schedule import Schedule
from codegen.search import Search
from codegen.targets import Target, target
from workers.processes import Limits, Processes
from workers.toolchain import Toolchain, find_toolchain

(PROBE,) = load_operators([Path(__file__).parent / "operators" / "probe"])
LIMITS = Limits(wall_seconds=120, cpu_seconds=120, memory_bytes=4 << 30, output_bytes=64 << 20)
SM_90A = target("sm_90a")


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    made = Processes()
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
    found: dict[Kernel, Candidate] = {}
    for schedule in op.space(problem, sheet, Search(level=2, limit=400, seed=7)):
        candidate = op.candidate(problem, schedule)
        if candidate.kernel not in found and not hasattr(op.rules(problem, schedule, sheet), "rule"):
            found[candidate.kernel] = candidate
        if len(found) == 4 * count:
            break
    return sorted(found.values(), key=lambda one: op.predicted_compile_seconds(one.kernel))[:count]
