"""All workers in one process, over a real database, real nvcc and a GPU whose times and faults a test writes down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import pytest

from codegen.identity import winner_key
from codegen.problem import Problem
from cukiln.types import CandidatePage, CandidateReport, Job, WinnerRecord
from storage.blobs.blob_store import BlobStore
from storage.entities.heartbeats import register_device
from storage.entities.winners import get_winners
from storage.queue import tasks
from storage.reports.candidates import candidate_page
from storage.reports.job import job_report
from storage.transitions import accept, take_work
from tests.support.compile_cache import CachingProcesses
from tests.support.fixtures_compile import PROBE
from tests.support.fixtures_queue import QueueWorld
from tests.support.fixtures_storage import clear_all
from workers.gpu.interface import Device
from workers.gpu.measure_on_gpu import Outcome
from workers.gpu.task import CandidateResult, GpuTask, TaskCandidate
from workers.processes.processes import Processes
from workers.steps import STEPS
from workers.steps.context import Cancel, StepContext, Workplace
from workers.worker.run_task import run_step

DEVICE = Device("Simulated GPU", "GPU-0", (8, 0), "570.1", 8, 2**20, 2**30)
VENDOR = {
    "library": "cuBLASLt", "version": "13.0", "algorithm": "the first one", "fused": True, "workspace_bytes": 0,
    "median_us": 50.0, "low_us": 49.0, "high_us": 51.0,
}  # fmt: skip

Times = Callable[[Mapping[str, Any]], float]


@dataclass
class ScriptedGpu:
    """Stands for `run_gpu_task`. `alone` and `together`: microseconds of a schedule, measured alone and in a
    comparison; `near`: of the best time, what is called a tie; `wrong`: schedules that are found wrong, in which kind
    of task; `finding`: which verdict they get; `driver`: of the GPU; `before`: called before each candidate, and may
    raise."""

    alone: Times
    together: Times | None = None
    near: float = 0.01
    wrong: Callable[[str, Mapping[str, Any]], bool] = lambda kind, schedule: False
    finding: str = "incorrect"
    driver: str = DEVICE.driver
    before: Callable[[TaskCandidate, Cancel], None] = lambda candidate, cancel: None
    tasks: list[GpuTask] = field(default_factory=list)

    def run(self, task: GpuTask, *_: Any, cancel: Any, on_result: Any, **__: Any) -> Outcome:
        self.tasks.append(task)
        results = []
        for candidate in task.candidates:
            self.before(candidate, cancel)
            if cancel.is_set():
                break
            if task.kind == "measure" or self.wrong("compare", candidate.schedule):
                results.append(self._result(task.kind, candidate))
                on_result(results[-1])
        comparison = self._comparison(task) if task.kind == "compare" else None
        return Outcome(DEVICE, results, comparison, 1.0, 0.5)

    def measured(self) -> list[str]:
        """Every candidate that was measured alone, as often as it was."""
        return [candidate.candidate for task in self.tasks if task.kind == "measure" for candidate in task.candidates]

    def compared(self) -> list[Mapping[str, Any]]:
        """Schedules of the last comparison."""
        return [
            candidate.schedule for candidate in next(t for t in reversed(self.tasks) if t.kind == "compare").candidates
        ]

    def _result(self, kind: str, task_candidate: TaskCandidate) -> CandidateResult:
        us = self.alone(task_candidate.schedule)
        wrong = self.wrong(kind, task_candidate.schedule)
        return CandidateResult(
            candidate=task_candidate.candidate,
            verdict=self.finding if wrong else "ok",
            message="3 of 9 elements are wrong" if wrong else "",
            details={"cases": [{"exact": False, "max_error": 0.25, "error_bound": 0.5}]},
            measurement=None if wrong else {**measurement(us), "driver": self.driver},
            verify_wall=0.25,
            verify_cpu=0.25,
            measure_wall=0.5,
            measure_cpu=0.5,
        )

    def _comparison(self, task: GpuTask) -> dict[str, Any] | None:
        times = {
            candidate.candidate: (self.together or self.alone)(candidate.schedule)
            for candidate in task.candidates
            if not self.wrong("compare", candidate.schedule)
        }
        if not times:
            return None
        best = min(times.values())
        return {
            **conditions(),
            "driver": self.driver,
            "contenders": [
                {
                    "candidate": name, "median_us": us, "low_us": us, "high_us": us, "ratio": us / best,
                    "ratio_low": us / best, "ratio_high": us / best, "tie": us <= (1 + self.near) * best,
                }
                for name, us in sorted(times.items(), key=lambda named: named[1])
            ],
            "vendor": VENDOR,
            "rounds": 9,
        }  # fmt: skip


def conditions() -> dict[str, Any]:
    return {
        "cold": True, "device": DEVICE.name, "uuid": DEVICE.uuid, "driver": DEVICE.driver, "before": {}, "after": {},
        "measured_at": 1.0,
    }  # fmt: skip


def measurement(us: float) -> dict[str, Any]:
    return {
        **conditions(), "median_us": us, "low_us": us, "high_us": us, "spread": 0.01, "samples": 30,
        "launches_per_sample": 10, "stopped": "tight",
    }  # fmt: skip


@dataclass
class GpuLine:
    """Claims whatever waits, for any kind of worker, and does it as a worker would."""

    world: QueueWorld
    gpu: ScriptedGpu
    processes: Processes

    def __post_init__(self) -> None:
        self.blobs = BlobStore(self.world.database, self.world.settings.blobs_url)
        self.workplace = Workplace(
            self.world.settings,
            self.world.database,
            self.blobs,
            self.world.redis,
            self.processes,
            "all",
            ("sm_80", DEVICE.name),
            DEVICE,
        )
        self.done: list[tasks.Lease] = []
        self.register()

    def register(self) -> None:
        with self.world.database.write() as session:
            register_device(
                session,
                uuid=DEVICE.uuid,
                device_class=DEVICE.name,
                capability="8.0",
                driver=self.gpu.driver,
                description={},
                worker="all",
                fresh=True,
            )

    def new_driver(self, driver: str) -> None:
        """The worker is started again, on a machine with another driver."""
        self.gpu.driver = driver
        self.workplace.device = replace(DEVICE, driver=driver)
        self.register()

    def submit(
        self,
        *problems: tuple[Problem, Mapping[str, Any]],
        device_class: str = DEVICE.name,
        budget: float | None = None,
    ) -> str:
        asked = [
            accept.NewProblem(
                name=f"p{number}",
                operator=problem.operator,  # type: ignore[attr-defined]
                problem=problem.canonical(),
                target="sm_80",
                device_class=device_class,
                key=self.key(problem, device_class),
                search=dict(search),
            )
            for number, (problem, search) in enumerate(problems)
        ]
        with self.world.database.write() as session:
            return accept.create_job(session, accept.NewJob(asked, budget_seconds=budget)).id

    def job(self, *problems: tuple[Problem, Mapping[str, Any]]) -> Job:
        """A job, done from its plan to its end."""
        job = self.submit(*problems)
        self.run()
        while self.clear():
            self.run()
        return self.report(job)

    def run(self, kinds: Sequence[str] = tuple(STEPS), most: int = 1000) -> None:
        """Until nothing of these kinds waits."""
        for _ in range(most):
            lease = self.take(kinds)
            if lease is None:
                return
            self.do(lease)

    def clear(self) -> int:
        with self.world.database.write() as session:
            return clear_all(session)

    def take(self, kinds: Sequence[str] = tuple(STEPS)) -> tasks.Lease | None:
        with self.world.database.write() as session:
            return take_work.take(session, list(kinds), self.workplace.targets, "all", 600.0)

    def do(self, lease: tasks.Lease, cancel: Cancel | None = None) -> None:
        self.done.append(lease)
        run_step(StepContext(self.workplace, lease, cancel or Cancel()), STEPS)

    def report(self, job: str) -> Job:
        with self.world.database.read() as session:
            found = job_report(session, job)
        assert found is not None
        return found

    def candidates(self, job: str) -> list[CandidateReport]:
        with self.world.database.read() as session:
            page: CandidatePage | None = candidate_page(session, job, limit=1000)
        assert page is not None
        return page.candidates

    def record(self, problem: Problem) -> WinnerRecord:
        key = self.key(problem)
        with self.world.database.read() as session:
            return get_winners(session, [key])[key]

    def key(self, problem: Problem, device_class: str = DEVICE.name) -> str:
        return winner_key(problem.digest, "sm_80", device_class)


@pytest.fixture
def gpu_line(queue_world: QueueWorld, caching_processes: CachingProcesses, monkeypatch: pytest.MonkeyPatch) -> GpuLine:
    gpu = ScriptedGpu(alone=lambda schedule: 100.0 + float(schedule["factor"]))
    monkeypatch.setattr(import_module("workers.steps.measure"), "run_gpu_task", gpu.run)
    return GpuLine(queue_world, gpu, caching_processes)


def probe(n: int = 1000) -> Problem:
    return PROBE.parse({"operator": "probe", "n": n, "scale": 2.5})


def search(**tunables: Any) -> dict[str, Any]:
    """Of the probe's tunables, value lists; those not named have their default."""
    return {"tunables": {"factor": [1], "way": ["copy"], **tunables}}
