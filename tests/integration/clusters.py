"""Several workers of each kind, as processes of their own over one queue, whose compilers are counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import select

from cukiln.types import Job
from storage.database.tables import JobRow
from tests.support.fixtures.queue import QueueWorld, wait_for
from tests.support.processes import counting_worker
from tests.support.processes.server_processes import start_process
from workers.supervisor.serve import child_environment
from workers.supervisor.start_checks import free_port

WORKERS = ("plan", "plan", "compile", "compile", "reconcile")


def probe(*factors: int, n: int = 1000, **tunables: int) -> dict[str, Any]:
    """A problem with a kernel for each factor, as cheap as kernels are."""
    search = {"tunables": {"factor": factors, "way": ["copy"], **{name: [value] for name, value in tunables.items()}}}
    return {"operator": "probe", "n": n, "scale": 2.5, "search": search}


@dataclass
class Cluster:
    """Services and their workers, over one database and one queue."""

    world: QueueWorld
    urls: list[str]
    log: Path
    client: httpx.Client

    def submit(self, number: int, problems: list[dict[str, Any]]) -> str:
        named = [{**problem, "name": f"p{index}"} for index, problem in enumerate(problems)]
        answer = self.client.post(
            f"{self.urls[number % len(self.urls)]}/v1/jobs", json={"target": "sm_80", "problems": named}
        )
        assert answer.status_code in (200, 202), answer.text
        return str(answer.json()["job"])

    def job(self, job: str) -> Job:
        return Job.model_validate(self.client.get(f"{self.urls[0]}/v1/jobs/{job}").json())

    def has_ended(self, job: str) -> bool:
        """Looked up in the database: a service takes fifteen times as long to report a job."""
        with self.world.database.read() as session:
            return session.scalar(select(JobRow.finished_at).where(JobRow.id == job)) is not None

    def run(self, jobs: list[list[dict[str, Any]]]) -> list[Job]:
        """All submitted at the same moment, on each service; their ends."""
        start, ids = threading.Barrier(len(jobs)), [""] * len(jobs)

        def send(number: int) -> None:
            start.wait()
            ids[number] = self.submit(number, jobs[number])

        threads = [threading.Thread(target=send, args=(number,)) for number in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_for(lambda: all(map(self.has_ended, ids)), 240, "jobs end")
        return [self.job(id) for id in ids]

    def compiled(self) -> list[tuple[str, ...]]:
        """The kernels of every file that nvcc was given."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [tuple(line.split()) for line in lines]


@contextmanager
def started(
    world: QueueWorld, log: Path, compiled: Path, kinds: Sequence[str] = WORKERS, services: int = 1
) -> Iterator[Cluster]:
    """`compiled`: the folder of what runs kernels, which each worker would compile."""
    urls = []
    for number in range(services):
        port = free_port("127.0.0.1")
        settings = world.settings.model_copy(update={"port": port})
        _start(world, f"api-{number}", "api", env=child_environment(settings))
        urls.append(f"http://127.0.0.1:{port}")
    for number, kind in enumerate(kinds):
        start_worker(world, log, compiled, kind, number)
    with httpx.Client(
        timeout=30, trust_env=False
    ) as client:  # each makes a TLS context, which takes longer than a call
        wait_for(lambda: all(_answers(client, url) for url in urls), 60, "services answer")
        yield Cluster(world, urls, log, client)


def start_worker(world: QueueWorld, log: Path, compiled: Path, kind: str, number: int) -> None:
    environment = {**world.environment(), counting_worker.LOG: str(log), counting_worker.COMPILED: str(compiled)}
    _start(world, f"{kind}-{number}", "counting worker", kind, env=environment)


def _start(world: QueueWorld, name: str, *role: str, env: dict[str, str]) -> None:
    world.workers.append(start_process(*role, env=env, log=world.folder / f"{name}.log"))


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(f"{url}/healthz").status_code == 200
    except httpx.HTTPError:
        return False
