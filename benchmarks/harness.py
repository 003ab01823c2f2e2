"""What the benchmarks of the service share: folders, services, other servers, rows of the database, checks of a job;
winner records, one real record stored under the keys of any number of problems."""

import http.client
import json
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import text

from codegen.identity import winner_key
from codegen.operators import operator
from cukiln.client import Client
from cukiln.types import Job, WinnerRecord
from storage.config.settings import Settings
from storage.database.session import Database
from storage.database.sql import chunks
from storage.entities.winners import get_winners, publish_winner
from workers.supervisor.serve import Running, embedded

TARGET = "sm_90a"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cukiln-bench-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def started(settings: Settings) -> Iterator[tuple[Client, Running]]:
    """A service on these settings, stopped at the end of the block."""
    with embedded(settings) as running, Client(running.url, cache_dir=settings.data_dir / "client") as client:
        yield client, running


def median_seconds(call: Callable[[], object], repeats: int, batch: int = 1) -> float:
    """Of one call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - began) / batch)
    return statistics.median(times)


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


PREDICTED = f"predicted:{TARGET}"
MEASURED = "NVIDIA H200"
AT_ONCE = 100
"""Records of one transaction."""


def problem(number: int) -> dict[str, Any]:
    """The problem of a record, as a request spells it."""
    m, n = 1 + number % 1000, 64 * (1 + number // 1000)
    return {"name": f"p{number}", "operator": "matmul", "layout": "nt", "dtype": "float16", "m": m, "n": n, "k": 256}


def places(count: int) -> list[tuple[int, str]]:
    """Problems with the device class of their record: every second one was measured, the others predicted."""
    return [(number, MEASURED if number % 2 else PREDICTED) for number in range(count)]


def publish(database: Database, template: WinnerRecord, places: Sequence[tuple[int, str]]) -> list[str]:
    """Write a record for each; returns the keys in order."""
    keys = []
    for some in chunks(places, AT_ONCE):
        with database.write() as session:
            for number, device_class in some:
                fields = {name: value for name, value in problem(number).items() if name != "name"}
                parsed = operator("matmul").parse(fields)
                keys.append(winner_key(parsed.digest, TARGET, device_class))
                changed = {"key": keys[-1], "revision": 0, "problem": parsed.canonical(), "device_class": device_class}
                publish_winner(session, template.model_copy(update=changed), attempt=uuid.uuid4().hex)
    return keys


def write_files(database: Database, keys: Sequence[str], folder: Path) -> None:
    """Each record as a file, for the static file server."""
    folder.mkdir()
    for some in chunks(keys, 1000):
        with database.read() as session:
            for key, record in get_winners(session, some).items():
                (folder / f"{key}.json").write_bytes(record.model_dump_json().encode())


def body(numbers: Sequence[int]) -> bytes:
    """A lookup of these problems."""
    return json.dumps({"target": TARGET, "problems": [problem(number) for number in numbers]}).encode()
