"""Tasks for the simulated GPU: small matmuls, candidates by library, one call that runs them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.problem import Problem
from codegen.search.schedule import Schedule
from tests.support.gpu import fake_gpu
from tests.support.kernels.cpu_helpers import SMALL_TILE
from tests.support.processes.running import name_of
from workers.gpu.measure_on_gpu import Outcome, run_gpu_task
from workers.gpu.task import CandidateResult, GpuTask, TaskCandidate, TaskKind
from workers.processes.processes import Limits, Processes

LIMITS = Limits(wall_seconds=240, cpu_seconds=240, memory_bytes=4 << 30, output_bytes=16 << 20)
LAUNCH = {"raster": 0, "split_k": 1, "stream_blocks": 0}


def matmul_problem(m: int = 48, n: int = 40, k: int = 24, **fields: Any) -> Problem:
    return operator("matmul").parse({"operator": "matmul", "m": m, "n": n, "k": k, "dtype": "float32", **fields})


def matmul_candidate(problem: Problem, **tunables: Any) -> Candidate:
    return operator("matmul").candidate(problem, Schedule.of({**SMALL_TILE, **LAUNCH, **tunables}))


@dataclass
class Gpu:
    """The simulated GPU of a test: its configuration, its folders, the processes that use it."""

    folder: Path
    processes: Processes
    results: list[CandidateResult] = field(default_factory=list)

    def configure(self, **fields: Any) -> None:
        fake_gpu.configure(self.folder / "gpu.json", **fields)

    @property
    def lease(self) -> Path:
        return self.folder / "leases" / f"{fake_gpu.UUID}.lock"

    def task(
        self,
        candidates: Iterable[tuple[Candidate, Path]],
        *,
        kind: TaskKind = "measure",
        verified: bool = True,
        best_us: Mapping[str, float] | None = None,
        seconds: float = 0.2,
        vendor: bool = True,
    ) -> GpuTask:
        pairs = list(candidates)
        problems = list(dict.fromkeys(candidate.problem for candidate, _ in pairs))
        return GpuTask(
            kind=kind,
            gpu="tests.support.gpu.fake_gpu",
            device=fake_gpu.UUID,
            lease=str(self.lease),
            operators={},
            seed=7,
            problems={str(number): problem.canonical() for number, problem in enumerate(problems)},
            candidates=tuple(
                TaskCandidate(each.id, str(problems.index(each.problem)), each.schedule.as_dict(), str(path), verified)
                for each, path in pairs
            ),
            best_us=best_us or {},
            seconds=seconds,
            vendor=vendor,
        )

    def run(self, task: GpuTask, *, limits: Limits = LIMITS, silence_seconds: float = 60.0, **more: Any) -> Outcome:
        return run_gpu_task(
            task,
            self.processes,
            limits,
            cache=self.folder / "cache",
            on_result=self.results.append,
            silence_seconds=silence_seconds,
            **more,
        )

    def left_behind(self) -> list[Path | psutil.Process]:
        """What stands in the private folders of the processes, and children that still run."""
        with self.processes.private_folder() as own:
            folders = [path for path in own.parent.iterdir() if path != own]
        return [*folders, *children()]


def children() -> list[psutil.Process]:
    """Processes below this one that own a GPU."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if name_of(process) == "run_on_gpu"]
