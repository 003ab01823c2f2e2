"""Whether large jobs hold up small ones: one problem behind 200, and 100,000 candidates planned beside running jobs.

Run with `make bench-fairness` or `python -m benchmarks.bench_fairness`. Each part has a service of its own on an empty
data folder, with two compile workers.

- `behind`: a job of 200 problems, and a second after it a job of one. `alone_s`: the same small job before, with other
  kernels, when nothing else runs. The last file that was begun before it came, and its own way, are what it waits for.
- `plan`: eight small jobs run again and again, and lookups are asked for all the time, while a job of problems with
  100,000 candidates in all is planned; then it is cancelled. `long_transactions`: those that held the write lock for
  more than 250 ms, from the logs; `leases_lost` likewise. Lookups in milliseconds, as a client sees them.

The last line is one JSON object, which is also kept under `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.keep_result import keep_result
from cukiln.client import Client
from storage.settings import load_settings
from workers.serve import embedded

TARGET = "sm_90a"
MATMUL = {"operator": "matmul", "layout": "nn", "dtype": "float32"}
PROBLEMS, CANDIDATES = 200, 4
PLANNED = 100_000
RUNNING_JOBS = 8
LONG = re.compile(r"a write transaction held the lock for (\d+) ms")
LOST = re.compile(r"is abandoned|lease of .* ended|no longer held")


@contextmanager
def service(folder: Path) -> Iterator[tuple[Client, Path]]:
    settings = load_settings(data_dir=folder, port=0, workers=2)
    with embedded(settings) as running, Client(running.url) as client:
        yield client, folder / "logs"


def problem(number: int, seed: int, limit: int = CANDIDATES) -> dict[str, Any]:
    """With kernels of its own, by its seed."""
    search = {"level": 2, "limit": limit, "seed": seed + number}
    return {**MATMUL, "name": f"p{number}", "m": 64 + number, "n": 256, "k": 256, "search": search}


def behind(client: Client) -> dict[str, Any]:
    def run(seed: int) -> float:
        began = time.perf_counter()
        client.wait(client.submit({"target": TARGET, "problems": [problem(0, seed)]}))
        return time.perf_counter() - began

    run(1)  # the first request of a service loads what others find
    alone = run(2)
    began = time.perf_counter()
    large = client.submit({"target": TARGET, "problems": [problem(n, 1000) for n in range(PROBLEMS)]})
    time.sleep(1.0)
    small = run(3)
    client.wait(large)
    return {
        "problems": PROBLEMS,
        "alone_s": round(alone, 2),
        "small_s": round(small, 2),
        "large_s": round(time.perf_counter() - began, 2),
    }


class Asking(threading.Thread):
    """Looks up one problem all the time; how long each answer took."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url, self.stop, self.milliseconds = url, threading.Event(), list[float]()

    def run(self) -> None:
        asked = [problem(0, 1)]
        with Client(self._url) as client:
            while not self.stop.is_set():
                began = time.perf_counter()
                client.lookup(asked, target=TARGET)
                self.milliseconds.append(1e3 * (time.perf_counter() - began))
                time.sleep(0.02)


class Working(threading.Thread):
    """Small jobs, one after the other, as long as it is asked for."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__()
        self._url, self._seed, self.stop, self.states = url, 10_000 * (number + 1), threading.Event(), list[str]()

    def run(self) -> None:
        with Client(self._url) as client:
            while not self.stop.is_set():
                self._seed += 1
                job = client.submit({"target": TARGET, "problems": [problem(0, self._seed)]})
                self.states.append(client.wait(job).state)


def planned_beside_others(client: Client, url: str, logs: Path) -> dict[str, Any]:
    working = [Working(url, number) for number in range(RUNNING_JOBS)]
    asking = Asking(url)
    for thread in (*working, asking):
        thread.start()
    time.sleep(5.0)
    each = 4_000
    problems = [
        {**MATMUL, "dtype": "float16", "m": 4096, "n": 4096, "k": 4096 + 64 * n} for n in range(PLANNED // each)
    ]
    searched = [
        {**one, "name": f"q{n}", "search": {"level": 2, "limit": each, "seed": n}} for n, one in enumerate(problems)
    ]
    began = time.perf_counter()
    large = client.submit({"target": TARGET, "problems": searched}).job
    while (now := client.job(large)).progress.lower.done < len(searched) and now.state in ("queued", "running"):
        time.sleep(0.5)
    planning = time.perf_counter() - began
    candidates = sum(one.candidates for one in now.problems)
    began = time.perf_counter()
    client.cancel(large)
    cancel = time.perf_counter() - began
    time.sleep(5.0)
    asking.stop.set()
    for one in working:
        one.stop.set()
    for thread in (*working, asking):
        thread.join()
    text = "".join(path.read_text(errors="replace") for path in sorted(logs.glob("*.log")))
    states = [state for one in working for state in one.states]
    return {
        "candidates": candidates,
        "planning_s": round(planning, 1),
        "cancel_s": round(cancel, 2),
        "small_jobs": len(states),
        "small_jobs_done": states.count("done"),
        "long_transactions": sorted((int(ms) for ms in LONG.findall(text)), reverse=True),
        "leases_lost": len(LOST.findall(text)),
        "lookups": len(asking.milliseconds),
        "lookup_median_ms": round(statistics.median(asking.milliseconds), 1),
        "lookup_max_ms": round(max(asking.milliseconds), 1),
    }


def measure(folder: Path, parts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"benchmark": "fairness", "target": TARGET, "load_before": round(os.getloadavg()[0], 1)}
    if "behind" in parts:
        with service(folder / "behind") as (client, _):
            found["behind"] = behind(client)
        print("behind", found["behind"], flush=True)
    if "plan" in parts:
        with service(folder / "plan") as (client, logs):
            found["plan"] = planned_beside_others(client, client.url, logs)
        print("plan", found["plan"], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["behind", "plan"], help="one part")
    parser.add_argument("--no-file", action="store_true", help="print the result without keeping it")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="cukiln-bench-"))
    try:
        result = measure(folder, [arguments.only] if arguments.only else ["behind", "plan"])
    finally:
        shutil.rmtree(folder)
    keep_result(result, keep=not arguments.no_file)


if __name__ == "__main__":
    main()
