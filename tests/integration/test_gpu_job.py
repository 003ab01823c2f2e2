"""Jobs on a GPU the whole way, over HTTP, with real valkey, nvcc, processes and children; only the GPU is simulated."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from sqlalchemy import RowMapping, func, select

from cukiln.client import Client
from cukiln.types import CandidatePage, Contender, Job, ProblemReport, WinnerRecord
from storage.config.settings import Settings, load_settings
from storage.database.session import Database
from storage.database.sql import core
from storage.database.tables import MeasurementRow, TaskRow
from storage.entities.heartbeats import LiveDevice, live_devices
from tests.support.fixtures.queue import wait_for
from tests.support.fixtures.service import Started
from tests.support.gpu.fake_gpu import NAME, UUID, configure
from tests.support.processes.running import name_of, processes_of
from tests.support.run.places import PROBE
from workers.compile.toolchain import Nvcc, find_toolchain
from workers.supervisor.serve import Running


def probe(name: str = "first", *factors: int, target: str = "sm_90a") -> dict[str, Any]:
    """A problem with a kernel for each factor, as cheap as kernels are; its extents are those of its first factor."""
    search = {"tunables": {"factor": factors or (1, 2), "way": ["copy"]}}
    n = 1000 + min(factors, default=1)
    return {"operator": "probe", "n": n, "scale": 2.5, "name": name, "target": target, "search": search}


# Of another group, as its target differs; with code of its own, so that no time of the first's stands for it.
SECOND = probe("second", 11, 12, target="sm_90")
SECONDS = 240.0  # only keeps a broken test from hanging


@dataclass(frozen=True)
class HeldCompiler:
    """The real nvcc, which compiles for no architecture that is held. `folder`: what it starts there may be seen."""

    folder: Path

    def __post_init__(self) -> None:
        compiler = find_toolchain().device_compiler
        assert isinstance(compiler, Nvcc)
        self.nvcc.write_text(HELD_NVCC.format(folder=self.folder, nvcc=compiler.path))
        self.nvcc.chmod(0o755)

    @property
    def nvcc(self) -> Path:
        return self.folder / "nvcc"

    def hold(self, target: str) -> None:
        (self.folder / target).touch()

    def let_go(self, target: str) -> None:
        (self.folder / target).unlink()


HELD_NVCC = """#!/bin/sh
for target in sm_90 sm_90a; do
  case "$*" in *"code=$target "*) while [ -e "{folder}/$target" ]; do sleep 0.05; done ;; esac
done
exec "{nvcc}" "$@"
"""


@dataclass
class World:
    """A service over one simulated GPU, and a look into its database."""

    settings: Settings
    running: Running
    client: Client
    database: Database
    gpu: Path
    messages: list[str]
    compiler: HeldCompiler

    def submit(self, *problems: dict[str, Any]) -> Job:
        return self.client.submit({"target": "sm_90a", "problems": list(problems)})

    def candidates(self, job: Job) -> CandidatePage:
        response = httpx.get(f"{self.client.url}/v1/jobs/{job.job}/candidates", timeout=60)
        return CandidatePage.model_validate(response.json())

    def record(self, job: Job, number: int = 0) -> WinnerRecord:
        return self.client.kernel(job.problems[number].key)

    def tasks(self, *kinds: str, after: int = 0) -> Sequence[RowMapping]:
        with self.database.read() as session:
            query = select(core(TaskRow)).where(TaskRow.kind.in_(kinds), TaskRow.id > after).order_by(TaskRow.id)
            return session.execute(query).mappings().all()

    def last_task(self) -> int:
        with self.database.read() as session:
            return session.scalar(select(func.max(TaskRow.id))) or 0

    def measurements(self) -> int:
        with self.database.read() as session:
            return session.scalar(select(func.count()).select_from(MeasurementRow)) or 0

    def opens(self) -> int:
        """How often the GPU was opened."""
        return int(self.gpu.with_suffix(".opens").read_text() or 0)  # empty while it is written

    def devices(self) -> list[LiveDevice]:
        with self.database.read() as session:
            return live_devices(session, 60.0, with_drained=True)

    def gpu_worker(self) -> psutil.Process:
        """Of the service that runs now, however often it was started again; its worker child has its name."""
        found = [process for process in processes_of(self.settings.data_dir) if name_of(process).startswith("gpu ")]
        return next(process for process in found if name_of(process.parent() or process) == "fork server")

    def logs(self) -> str:
        logs = sorted((self.settings.data_dir / "logs").glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


@contextlib.contextmanager
def serving(folder: Path, compiler: HeldCompiler, soon_embedded: Started) -> Iterator[World]:
    (folder / "gpu").mkdir()  # a child makes no file right beside the data folder
    gpu = folder / "gpu" / "gpu.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVIDIA_SIMULATED_GPU", configure(gpu, noise=0.001))
        settings = load_settings(
            data_dir=folder / "data",
            port=0,
            workers=1,
            gpus="0",
            operator_path=str(PROBE),
            gpu_module="tests.support.gpu.fake_gpu",
            gpu_lock_dir=folder / "locks",
            lease_seconds=2,
            measure_seconds=0.05,
            nvcc=str(compiler.nvcc),
        )
        messages: list[str] = []
        with (
            soon_embedded(settings, say=messages.append) as running,
            Client(running.url, cache_dir=folder / "client") as client,
        ):
            database = Database(settings.database_url)
            yield World(settings, running, client, database, gpu, messages, compiler)
            database.dispose()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, soon_embedded: Started) -> Iterator[World]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # a compiler's own user goes there
        with serving(tmp_path_factory.mktemp("gpu-job"), HeldCompiler(Path(folder)), soon_embedded) as made:
            yield made


@pytest.fixture(scope="module")
def job(world: World) -> Job:
    """Two problems on the GPU, for two architectures that it runs, so there are two groups; one on the CPU. The second
    group is compiled once the first is measured."""
    targets = {"sm_90", "sm_90a"}
    for target in targets:
        world.compiler.hold(target)
    submitted = world.submit(probe(), SECOND, probe("elsewhere", target="sm_80"))

    def compiling() -> set[str]:
        return {row["target"] for row in world.tasks("compile") if row["state"] == "leased"} & targets

    wait_for(compiling, SECONDS, "a group of the GPU's to be compiled")
    (first,) = compiling()
    world.compiler.let_go(first)
    wait_for(lambda: any(row["started_at"] for row in world.tasks("measure")), SECONDS, "the first group's measuring")
    (second,) = targets - {first}
    world.compiler.let_go(second)
    return world.client.wait(submitted)


def on(job: Job, name: str) -> ProblemReport:
    return next(problem for problem in job.problems if problem.name == name)


def test_a_job_ends_with_winners_that_were_verified_and_measured_on_the_gpu(world: World, job: Job) -> None:
    assert job.state == "done", world.logs()
    for name in ("first", "second"):
        problem = on(job, name)
        assert problem.device_class == NAME
        assert problem.verdicts == {"ok": 2}
        winner = problem.winner
        assert winner is not None
        assert (winner.verified, winner.ranked_by) == ("gpu", "measured")
        assert winner.measured_us is not None and winner.measured_us > 0
        assert problem.seconds.verify.wall > 0
        assert problem.seconds.measure.wall > 0


def test_the_record_has_the_runner_up_and_the_vendors_time(world: World, job: Job) -> None:
    record = world.client.kernel(on(job, "first").key)
    best = record.front[0]
    assert (record.ranked_by, record.device_class, best.verified) == ("measured", NAME, "gpu")
    assert best.verdict["venue"] == "gpu"
    assert isinstance(best.measurement, Contender)
    where = best.measured_on
    assert where is not None and where.rounds is not None
    assert (where.device, where.uuid) == (NAME, UUID)
    assert [search["measured"]["driver"] for search in record.searches] == [where.driver]
    assert where.rounds > 0 and where.measured_at > 0
    assert record.vendor is not None
    assert record.vendor.library == "NumPy"
    assert record.vendor.median_us == pytest.approx(9.0, rel=0.05)
    assert record.runner_up is not None
    assert record.runner_up.candidate != best.candidate
    assert record.runner_up.tie or record.runner_up.margin > 0


def test_every_candidate_has_its_time_and_its_spread(world: World, job: Job) -> None:
    page = world.candidates(job)
    measured = [candidate for candidate in page.candidates if candidate.device_class == NAME]
    assert len(measured) == 4
    for each in measured:
        assert each.measured_us is not None and each.measured_us > 0
        assert each.spread is not None and 0 <= each.spread < 0.1
    assert {candidate.measured_us for candidate in page.candidates if candidate.device_class != NAME} == {None}


def test_a_problem_on_the_cpu_beside_it_is_predicted_and_never_measured(world: World, job: Job) -> None:
    beside = on(job, "elsewhere")
    assert beside.device_class == "predicted:sm_80"
    assert beside.winner is not None
    assert (beside.winner.ranked_by, beside.winner.measured_us) == ("predicted", None)
    assert beside.seconds.measure.wall == 0


def test_the_first_group_is_measured_while_a_later_one_still_compiles(world: World, job: Job) -> None:
    compiling, measuring = world.tasks("compile"), world.tasks("measure")
    assert len(measuring) >= 2
    overlaps = [
        (measured["ref"], compiled["ref"])
        for measured in measuring
        for compiled in compiling
        if compiled["ref"] not in measured["ref"]
        and measured["started_at"] < compiled["finished_at"]
        and compiled["started_at"] < measured["finished_at"]
    ]
    assert overlaps, [[row["kind"], row["started_at"], row["finished_at"]] for row in (*compiling, *measuring)]


def test_the_same_problems_again_are_answered_from_the_cache(world: World, job: Job) -> None:
    again = world.submit(probe(), SECOND)
    assert (again.state, again.cached) == ("done", True)
    assert [problem.winner for problem in again.problems] == [on(job, "first").winner, on(job, "second").winner]


def test_a_larger_search_measures_only_what_is_new(world: World, job: Job) -> None:
    before = world.measurements()
    larger = world.client.wait(world.submit(probe("first", 1, 2, 3)))
    assert larger.state == "done", world.logs()
    assert larger.problems[0].verdicts == {"ok": 3}
    assert world.measurements() == before + 1
    known = {
        candidate.candidate: candidate.measured_us
        for candidate in world.candidates(job).candidates
        if candidate.problem == "first"
    }
    now = {candidate.candidate: candidate.measured_us for candidate in world.candidates(larger).candidates}
    assert known.items() <= now.items()
    assert world.record(larger).revision == 2


# ---- deaths, each of a job with kernels of its own


def test_a_killed_gpu_worker_is_followed_by_another_and_nothing_counts_twice(world: World, job: Job) -> None:
    measurements, opens = world.measurements(), world.opens()
    last = world.last_task()
    configure(world.gpu, open="silent")  # until it is killed
    submitted = world.submit(probe("first", 21, 22))
    wait_for(lambda: world.opens() > opens, SECONDS, "the measuring to begin")
    configure(world.gpu, noise=0.001)
    os.kill(world.gpu_worker().pid, signal.SIGKILL)
    ended = world.client.wait(submitted)
    assert ended.state == "done", world.logs()
    assert ended.problems[0].verdicts == {"ok": 2}
    assert world.measurements() == measurements + 2
    assert [(row["attempt"], row["losses"]) for row in world.tasks("measure", after=last)] == [(1, 1)]
    record = world.record(ended)
    assert (record.revision, record.ranked_by) == (1, "measured")
    assert any("gpu worker 1 was killed by SIGKILL" in words for words in world.messages)


def test_a_gpu_that_is_gone_is_drained_and_its_job_waits_until_it_is_back(world: World, job: Job) -> None:
    last = world.last_task()
    configure(world.gpu, open="missing")
    waiting = world.submit(probe("first", 31))
    wait_for(lambda: world.devices()[0].drained is not None, SECONDS, "the GPU to be drained")
    wait_for(
        lambda: any("gpu worker 1 ended with 69" in words for words in world.messages), SECONDS, str(world.messages)
    )
    assert "fallen off the bus" in str(world.devices()[0].drained)
    waiting_for = str(world.client.job(waiting.job).progress.waiting_for)
    assert waiting_for.startswith(f"no live worker measures on {NAME}: {UUID} was drained: ")
    assert [(row["state"], row["attempt"]) for row in world.tasks("measure", after=last)] == [("waiting", 0)]
    configure(world.gpu, noise=0.001)
    ended = world.client.wait(waiting)
    assert ended.state == "done", world.logs()
    assert ended.problems[0].winner is not None and ended.problems[0].winner.ranked_by == "measured"
    assert world.devices()[0].drained is None
