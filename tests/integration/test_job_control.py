"""Jobs under control and under fire, over the real service: cancelled, out of budget, overtaken, workers killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cukiln.client import Client
from cukiln.types import CandidatePage, Job
from storage.config.settings import load_settings
from storage.database.session import Database
from storage.database.tables import JobRow
from tests.support.fixtures.queue import wait_for
from tests.support.fixtures.service import Started
from tests.support.processes.running import name_of, processes_of
from tests.support.run.places import FAULTY, PROBE
from workers import wake_ups
from workers.supervisor.serve import Running, child_environment, embedded
from workers.wake_ups import url_file

HANGS_NVCC = {"operator": "faulty", "rows": 8, "columns": 256, "pitch": 256}
HANGING = {"schedules": [{"fault": 31}]}
COMPILERS = frozenset({"nvcc", "cicc", "ptxas", "cudafe++", "g++", "cc1plus", "as", "ld"})


@dataclass(frozen=True)
class World:
    """A running service and what it leaves on the machine."""

    running: Running
    client: Client
    temporary: Path
    database: Database

    def compilers(self) -> list[psutil.Process]:
        return [process for process in processes_of(self.temporary) if name_of(process) in COMPILERS]

    def work_folders(self) -> list[Path]:
        """What is in the private folders of the workers."""
        return list(self.temporary.glob("cukiln-*/*"))

    def submit(self, *problems: dict[str, Any], **fields: Any) -> Job:
        return self.client.submit({"target": "sm_80", **fields, "problems": list(problems)})

    def end_budget(self, job: Job, in_seconds: float) -> None:
        """Move the deadline that the job got as it started."""
        with self.database.write() as session:
            session.get_one(JobRow, job.job).deadline = time.time() + in_seconds

    def in_compiler(self) -> psutil.Process:
        """A compiler process, waited for: each lives a moment."""
        processes: list[psutil.Process] = []
        wait_for(lambda: processes.extend(self.compilers()) or processes, what="a compiler to start")
        return processes[0]

    def worker_and_child(self, compiler: psutil.Process) -> tuple[psutil.Process, psutil.Process]:
        """The compile worker that `compiler` works for, and its worker child, which is a fork of it and has its
        name."""
        worker = next(process for process in compiler.parents() if name_of(process).startswith("compile "))
        worker_child = next(process for process in worker.children() if name_of(process) == name_of(worker))
        return worker, worker_child

    def working(self) -> tuple[psutil.Process, psutil.Process]:
        """The compile worker of a compiler that lived until it was looked at, and its worker child."""
        while True:
            with suppress(psutil.NoSuchProcess):
                return self.worker_and_child(self.in_compiler())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, soon_embedded: Started) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("control")
    temporary = folder / "tmp"
    temporary.mkdir()
    settings = load_settings(
        data_dir=folder / "data",
        port=0,
        workers=1,
        operator_path=f"{FAULTY}:{PROBE}",
        lease_seconds=2.0,
        max_attempts=5,
        group_kernels=2,
        verify_ptx="none",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        with (
            soon_embedded(settings) as running,
            Client(running.url, cache_dir=folder / "client") as client,
        ):
            yield World(running, client, temporary, Database(settings.database_url))
    wait_for(lambda: not processes_of(folder), what="processes left over")
    assert not list(temporary.glob("cukiln-*")), "temporary folders left over"


def probe(first: int, count: int, threads: int = 64) -> dict[str, Any]:
    """A problem with so many kernels of its own, as cheap as kernels are."""
    factors = list(range(first, first + count))
    tunables = {"factor": factors, "way": ["copy"], "threads": [threads]}
    return {"operator": "probe", "n": 1000, "scale": 2.5, "search": {"tunables": tunables}}


# ---- cancel


def test_a_cancelled_job_ends_its_compilers_and_their_folders(world: World) -> None:
    job = world.submit(HANGS_NVCC, search=HANGING)
    world.in_compiler()
    assert world.work_folders()
    cancelled = world.client.cancel(job.job)
    assert (cancelled.state, cancelled.problems[0].state) == ("cancelled", "cancelled")
    wait_for(lambda: not world.compilers(), what="the compilers to end")
    wait_for(lambda: not world.work_folders(), what="their folders to go")
    assert world.client.cancel(job.job).state == "cancelled"


# ---- budget


def test_a_spent_budget_ends_the_job_with_the_best_of_what_was_verified(world: World) -> None:
    job = world.submit(probe(1, 24), budget={"seconds": 8})
    wait_for(lambda: world.client.job(job.job).state == "running")
    world.end_budget(job, in_seconds=600)  # however fast this machine is, one candidate is verified by then
    wait_for(lambda: world.client.job(job.job).problems[0].verdicts.get("ok"))
    world.end_budget(job, in_seconds=0)
    ended = world.client.wait(job.job, timeout=240)
    problem = ended.problems[0]
    assert ended.state == problem.state == "done"
    assert set(problem.verdicts) == {"ok", "skipped"}
    assert sum(problem.verdicts.values()) == 24
    assert problem.winner is not None
    response = httpx.get(f"{world.client.url}/v1/jobs/{ended.job}/candidates?verdict=skipped&limit=1", timeout=60)
    skipped = CandidatePage.model_validate(response.json()).candidates[0]
    assert skipped.message == "the budget of 8 seconds ended before it was verified"
    again = world.submit(probe(1, 24))
    assert not again.cached, "the search was cut short: it is not covered"
    world.client.cancel(again.job)


# ---- priority


def test_an_urgent_job_overtakes_one_that_runs(world: World) -> None:
    slow = world.submit(probe(1, 16, threads=32), priority="low")
    world.in_compiler()
    urgent = world.client.wait(world.submit(probe(17, 1, threads=32), priority="high").job, timeout=240)
    assert urgent.state == "done"
    assert world.client.job(slow.job).state == "running"
    world.client.cancel(slow.job)


# ---- deaths


def test_the_job_of_a_killed_compile_worker_ends_right(world: World) -> None:
    job = world.submit(probe(1, 2, threads=128))
    worker, worker_child = world.working()
    worker.kill()
    worker_child.kill()
    ended = world.client.wait(job.job, timeout=240)
    assert (ended.state, ended.problems[0].verdicts) == ("done", {"ok": 2})


def test_a_compiler_that_was_killed_from_outside_says_nothing_about_its_kernels(world: World) -> None:
    job = world.submit(probe(3, 2, threads=128))
    world.in_compiler().kill()
    ended = world.client.wait(job.job, timeout=240)
    assert (ended.state, ended.problems[0].verdicts) == ("done", {"ok": 2})


def test_a_job_survives_a_flushed_queue(world: World) -> None:
    redis = wake_ups.connect(world.running.redis_url)
    job = world.submit(probe(5, 2, threads=128))
    redis.flushall()
    world.in_compiler()
    redis.flushall()
    redis.close()
    assert world.client.wait(job.job, timeout=240).problems[0].verdicts == {"ok": 2}


# ---- a power cut


# Of `make test` a killed supervisor is part, which ends all of it: `test_faults`, `test_serve`.
@pytest.mark.long
def test_an_accepted_job_survives_the_death_of_everything(tmp_path: Path) -> None:
    operators = str(PROBE)
    settings = load_settings(data_dir=tmp_path / "data", port=0, workers=1, lease_seconds=2.0, operator_path=operators)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**child_environment(settings), "TMPDIR": str(temporary)}
    argv = [sys.executable, "-m", "workers.supervisor.serve"]
    with (tmp_path / "serve.txt").open("wb") as output:
        cut = subprocess.Popen(argv, env=environment, stdout=output, stderr=output, start_new_session=True)
    said = tmp_path / "serve.txt"
    wait_for(lambda: "ready: " in said.read_text() or cut.poll() is not None, what=said.read_text())
    url = said.read_text().partition("ready: ")[2].split()[0]
    with Client(url, cache_dir=tmp_path / "client") as client:
        job = client.submit({"target": "sm_80", "problems": [probe(1, 3)]})
    wait_for(lambda: any(name_of(process) == "cicc" for process in processes_of(temporary)), what="a compiler")
    for process in [psutil.Process(cut.pid), *processes_of(tmp_path)]:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    cut.wait()
    wait_for(lambda: not processes_of(tmp_path), what="all to die")
    assert url_file(settings.data_dir / "valkey").exists(), "nothing had the time to tidy up"

    with embedded(settings) as running, Client(running.url, cache_dir=tmp_path / "client") as client:
        ended = client.wait(job.job, timeout=240)
    assert (ended.state, ended.problems[0].verdicts) == ("done", {"ok": 3})
