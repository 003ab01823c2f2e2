"""What the benchmarks of the service share: folders, services, other servers, rows of the database, checks of a job."""

import http.client
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import text

from cukiln.client import Client
from cukiln.types import Job
from storage.config.settings import Settings
from storage.database.session import Database
from workers.supervisor.serve import Running, embedded

TARGET = "sm_90a"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cukiln-bench-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def started(settings: Settings) -> Iterator[tuple[Client, Running]]:
    """A service on these settings, stopped at the end of the block."""
    with embedded(settings) as running, Client(running.url) as client:
        yield client, running


def port_of(running: Running) -> int:
    return int(running.url.rpartition(":")[2])


@contextmanager
def spawned(command: Sequence[str], port: int, **of_popen: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A server process that listens on `port`; killed at the end of the block."""
    process = subprocess.Popen(command, **of_popen)
    try:
        _await_port(port)
        yield process
    finally:
        process.kill()
        process.wait()


def _await_port(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                connection.connect()
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def peak_memory(pid: int) -> int:
    """VmHWM of a process, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM")


def query(settings: Settings, sql: str) -> Sequence[Any]:
    """All rows of a query to the service's database."""
    database = Database(settings.database_url)
    try:
        with database.read() as session:
            return session.execute(text(sql)).all()
    finally:
        database.dispose()


def count(settings: Settings, rows: str) -> int:
    """`rows`: a table, or a table with a condition."""
    return int(query(settings, f"SELECT count(*) FROM {rows}")[0][0])


def timed_job(client: Client, request: dict[str, Any]) -> tuple[Job, float]:
    """The finished job of the request and its wall seconds."""
    start = time.perf_counter()
    job = client.wait(client.submit(request))
    return job, time.perf_counter() - start


def require_verified(job: Job) -> None:
    """Ends the benchmark where a problem has no verified winner, or a candidate was wrong."""
    for problem in job.problems:
        if problem.winner is None:
            raise SystemExit(f"{problem.name} has no winner: {problem.error}")
        if set(problem.verdicts) != {"ok"}:
            raise SystemExit(f"{problem.name} has incorrect candidates: {problem.verdicts}")
