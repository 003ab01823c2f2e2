"""The cost of many small jobs that arrive at once: 24 jobs of one problem with two or three candidates, no kernel in
two of them, sent at once; then as many, each sent when the one before has ended, where no two jobs can share a file.

`nvcc` and `g++` count the starts, of which one each is a winner's own library; `files` are the groups that were
compiled. `cpu_seconds` are of all that the service started, from the first request to the last answer.
"""

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks.bench_overhead import PROBLEM, ToolLog, fresh_schedules, service
from benchmarks.harness import TARGET, count, scratch_folder
from benchmarks.keep_result import keep_result, load, options
from cukiln.client import Client
from storage.config.settings import Settings

JOBS, WORKERS = 24, 2
SIZES = (2, 3)  # candidates of a job, alternately
ROWS = {"files": "groups WHERE source IS NOT NULL", "verify_tasks": "tasks WHERE kind = 'verify'"}


def requests(schedules: Sequence[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    """Of JOBS jobs, each for another shape and with kernels of its own."""
    left, jobs = list(schedules), []
    for number in range(JOBS):
        search = {"schedules": [left.pop() for _ in range(SIZES[number % len(SIZES)])]}
        jobs.append({"target": TARGET, "search": search, "problems": [{**PROBLEM, "m": 64 * (first + number + 1)}]})
    return jobs


def at_once(client: Client, jobs: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds from the first request to the end of each."""
    began = time.perf_counter()

    def run(job: dict[str, Any]) -> float:
        state = client.wait(client.submit(job)).state
        if state != "done":
            raise SystemExit(f"a job ended {state}")
        return time.perf_counter() - began

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


def one_by_one(client: Client, jobs: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds from its own request to the end of each."""
    return [seconds for job in jobs for seconds in at_once(client, [job])]


def counted(settings: Settings) -> dict[str, int]:
    return {name: count(settings, rows) for name, rows in ROWS.items()}


def cpu_seconds() -> float:
    """Of all descendants of this process, ended ones included."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            spent = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


def measure(folder: Path) -> dict[str, Any]:
    log, figures = ToolLog(folder), {}
    schedules = fresh_schedules(2 * JOBS * max(SIZES))
    half = len(schedules) // 2
    with service(folder / "data", log, workers=WORKERS) as (client, settings):
        at_once(client, [{"target": TARGET, "search": {"level": 0}, "problems": [{**PROBLEM, "k": 32}]}])  # warm
        ways = {"at_once": (at_once, 0, schedules[:half]), "one_by_one": (one_by_one, JOBS, schedules[half:])}
        for name, (run, first, schedules_of_way) in ways.items():
            jobs, before, spent = requests(schedules_of_way, first), counted(settings), cpu_seconds()
            since, began = time.time(), time.perf_counter()
            ends = run(client, jobs)
            figures[name] = {
                "wall_seconds": round(time.perf_counter() - began, 2),
                "cpu_seconds": round(cpu_seconds() - spent, 2),
                "job_seconds_median": round(statistics.median(ends), 2),
                "job_seconds_first": round(min(ends), 2),
                "nvcc": len(log.spans(since, "nvcc")),
                "g++": len(log.spans(since, "g++")),
                **{name: rows - before[name] for name, rows in counted(settings).items()},
            }
            print(name, figures[name], flush=True)
    return {
        "benchmark": "small-jobs",
        "target": TARGET,
        "jobs": JOBS,
        "workers": WORKERS,
        "candidates": sum(SIZES[number % len(SIZES)] for number in range(JOBS)),
        "load_before": load(),
        **figures,
    }


def main() -> None:
    parser = options(__doc__)
    arguments = parser.parse_args()
    with scratch_folder() as folder:
        result = measure(folder)
    keep_result(result, keep=not arguments.no_file)


if __name__ == "__main__":
    main()
