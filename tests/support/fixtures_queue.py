"""A valkey, a database and workers of one test: all real, all gone at its end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis import Redis

from storage.config.settings import Settings, load_settings
from storage.database.session import Database, Session
from storage.database.tables import JobRow
from storage.queue.new_tasks import NewTask, add_tasks
from storage.transitions import take_work
from tests.support.fixtures_storage import write_migrated
from tests.support.running import name_of, processes_of
from tests.support.server_processes import ServerProcess, start_process
from workers import wake_ups
from workers.supervisor.serve import child_environment
from workers.supervisor.valkey import EmbeddedValkey

JOURNAL_WORKER = (sys.executable, "-m", "tests.support.journal_worker")


@dataclass(frozen=True)
class Entry:
    """A line of the journal. `word`: start, end, TWICE."""

    word: str
    ref: str
    attempt: int
    pid: int
    at: float


def events_of(client: Redis, job_id: str, after: str = "0") -> list[wake_ups.Event]:
    """What is in the job's stream after the id `after`, oldest first."""
    answer: Any = client.xread({wake_ups.events_key(job_id): after})
    return wake_ups._events(answer)


def running_job(session: Session, priority: int = 0) -> str:
    """A job that is whatever its tasks are."""
    job = uuid.uuid4().hex
    session.add(JobRow(id=job, state="running", created_at=time.time(), priority=priority))
    session.flush()
    return job


@dataclass
class QueueWorld:
    """Tasks to add, workers to start and kill, the journal they write."""

    folder: Path
    settings: Settings
    database: Database
    redis: Redis
    workers: list[subprocess.Popen[bytes] | ServerProcess] = field(default_factory=list)

    def add(self, *behaviours: str, kind: str = "plan", target: str | None = None, wake_up: bool = True) -> list[str]:
        """Waiting tasks, with their wake-ups unless given otherwise; returns their refs."""
        refs = [f"{behaviour}:0-0" for behaviour in behaviours]
        with self.database.write() as session:
            jobs = (running_job(session),)
            add_tasks(session, [NewTask(kind=kind, ref=ref, target=target, jobs=jobs) for ref in refs])
        for _ in refs if wake_up else ():
            wake_ups.add_wake_ups(self.redis, kind, target)
        return refs

    def start(self, kind: str) -> ServerProcess:
        """A worker, or the reconciler."""
        log = self.folder / f"{kind}-{len(self.workers)}.log"
        worker = start_process("journal worker", kind, env=self.environment(), log=log)
        self.workers.append(worker)
        return worker

    def execute(self, kind: str) -> None:
        """A worker in a Python of its own, which finds modules where our PYTHONPATH says."""
        with (self.folder / f"{kind}-{len(self.workers)}.log").open("wb") as log:
            command = [*JOURNAL_WORKER, kind]
            worker = subprocess.Popen(command, env=self.environment(), stdout=log, stderr=log, start_new_session=True)
        self.workers.append(worker)

    def environment(self) -> dict[str, str]:
        return {**child_environment(self.settings), "TEST_JOURNAL": str(self.folder / "journal")}

    def journal(self, word: str = "", ref: str = "") -> list[Entry]:
        path = self.folder / "journal"
        lines = path.read_text().splitlines() if path.exists() else []
        entries = [Entry(w, r, int(a), int(p), float(t)) for w, r, a, p, t in map(str.split, lines)]
        return [entry for entry in entries if word in ("", entry.word) and ref in ("", entry.ref)]

    def waiting(self) -> int:
        with self.database.read() as session:
            return sum(take_work.waiting_counts(session).values())

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    def left_over(self) -> list[psutil.Process]:
        """Processes that were started with this test's folder in their environment or below one that was."""
        return processes_of(self.folder)


def wait_for(condition: Callable[[], object], seconds: float = 15.0, what: str | Callable[[], object] = "") -> float:
    """Until it is true; returns the seconds it took. The limit only keeps a broken test from hanging. `what`: what is
    missing by then. Seldom after a while: a service that is asked a hundred times a second takes a core for that."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        if waited >= seconds:
            raise AssertionError(f"not within {seconds} s: {(what() if callable(what) else what) or condition}")
        time.sleep(min(0.2, max(0.01, waited / 20)))
    return time.monotonic() - started


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path / "valkey")
    server.start()
    yield server
    server.stop()


@contextlib.contextmanager
def make_world(folder: Path, url: str, **overrides: object) -> Iterator[QueueWorld]:
    """A migrated database beside the queue at `url`. At the end everything that was started is killed and is gone."""
    settings = load_settings(
        **{"data_dir": folder / "data", "redis_url": url, "max_attempts": 50, "workers": 1} | overrides
    )
    database = Database(settings.database_url)
    write_migrated(Path(str(database.url.database)))
    world = QueueWorld(folder, settings, database, wake_ups.connect(url))
    try:
        yield world
        stay = {process.pid for process in processes_of(folder) if "valkey-server" in name_of(process)}

        def left() -> list[psutil.Process]:
            return [process for process in world.left_over() if process.pid not in stay]

        for worker in world.workers:
            worker.kill()
            worker.wait()
        wait_for(lambda: not left(), what=left)
    finally:
        for worker in world.workers:
            worker.kill()
        for process in world.left_over():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() != "valkey-server":
                    process.kill()
        world.redis.close()
        database.dispose()


@pytest.fixture
def queue_world(tmp_path: Path, valkey: EmbeddedValkey) -> Iterator[QueueWorld]:
    with make_world(tmp_path, valkey.url) as world:
        yield world


@pytest.fixture
def brief_leases(tmp_path: Path, valkey: EmbeddedValkey) -> Iterator[QueueWorld]:
    """With leases of one second, so that a test need not wait for five."""
    with make_world(tmp_path, valkey.url, lease_seconds=1) as world:
        yield world
