"""Whether large jobs hold up small ones. Each part has a service of its own on an empty data folder.

- `behind`: a job of 200 problems, and a second after it a job of one. `alone_s`: the same small job before, with other
  kernels, when nothing else runs.
- `plan`: eight small jobs run again and again, and lookups are asked for all the time, while a job of 100,000
  candidates is planned; then it is cancelled. `long_transactions`: those that held the write lock for more than 250 ms,
  from the logs; `leases_lost` likewise. Lookups in milliseconds, as a client sees them.
"""

import re
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import TARGET, scratch_folder, started, timed_job
from benchmarks.keep_result import keep_result, load, options
from cukiln.client import Client
from storage.config.settings import load_settings

MATMUL = {"operator": "matmul", "layout": "nn", "dtype": "float32"}
PROBLEMS, CANDIDATES = 200, 4
PLANNED = 100_000
RUNNING_JOBS = 8
LONG = re.compile(r"a write transaction held the lock for (\d+) ms")
LOST = re.compile(r"is abandoned|lease of .* ended|no longer held")


def problem(number: int, seed: int, limit: int = CANDIDATES) -> dict[str, Any]:
    """With kernels of its own, by its seed."""
    search = {"level": 2, "limit": limit, "seed": seed + number}
    return {**MATMUL, "name": f"p{number}", "m": 64 + number, "n": 256, "k": 256, "search": search}


def behind(client: Client) -> dict[str, Any]:
    def run(seed: int) -> float:
        return timed_job(client, {"target": TARGET, "problems": [problem(0, seed)]})[1]

    run(1)  # the first request of a service imports modules
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


class Repeated(threading.Thread):
    """Calls `act` with a client again and again until `stop` is set; `results` has what it returned."""

    def __init__(self, url: str, act: Callable[[Client, int], Any]) -> None:
        super().__init__()
        self._url, self._act, self.stop, self.results = url, act, threading.Event(), list[Any]()

    def run(self) -> None:
        with Client(self._url) as client:
            while not self.stop.is_set():
                self.results.append(self._act(client, len(self.results)))


def lookup_ms(client: Client, number: int) -> float:
    time.sleep(0.02)
    began = time.perf_counter()
    client.lookup([problem(0, 1)], target=TARGET, refresh=True)
    return 1e3 * (time.perf_counter() - began)


def small_jobs(loop: int) -> Callable[[Client, int], str]:
    def run(client: Client, number: int) -> str:
        job = client.submit({"target": TARGET, "problems": [problem(0, 10_000 * loop + number)]})
        return client.wait(job).state

    return run


def planned_beside_others(client: Client, url: str, logs: Path) -> dict[str, Any]:
    lookups, *job_threads = threads = [
        Repeated(url, act) for act in (lookup_ms, *map(small_jobs, range(1, RUNNING_JOBS + 1)))
    ]
    for thread in threads:
        thread.start()
    time.sleep(5.0)
    each = 4_000
    shape = {**MATMUL, "dtype": "float16", "m": 4096, "n": 4096}
    problems = [
        {**shape, "name": f"q{n}", "k": 4096 + 64 * n, "search": {"level": 2, "limit": each, "seed": n}}
        for n in range(PLANNED // each)
    ]
    began = time.perf_counter()
    large = client.submit({"target": TARGET, "problems": problems}).job
    while (now := client.job(large)).progress.lower.done < len(problems) and now.state in ("queued", "running"):
        time.sleep(0.5)
    planning = time.perf_counter() - began
    candidates = sum(problem.candidates for problem in now.problems)
    began = time.perf_counter()
    client.cancel(large)
    cancel = time.perf_counter() - began
    time.sleep(5.0)
    for thread in threads:
        thread.stop.set()
    for thread in threads:
        thread.join()
    text = "".join(path.read_text(errors="replace") for path in sorted(logs.glob("*.log")))
    states = [state for thread in job_threads for state in thread.results]
    return {
        "candidates": candidates,
        "planning_s": round(planning, 1),
        "cancel_s": round(cancel, 2),
        "small_jobs": len(states),
        "small_jobs_done": states.count("done"),
        "long_transactions": sorted((int(ms) for ms in LONG.findall(text)), reverse=True),
        "leases_lost": len(LOST.findall(text)),
        "lookups": len(lookups.results),
        "lookup_median_ms": round(statistics.median(lookups.results), 1),
        "lookup_max_ms": round(max(lookups.results), 1),
    }


def measure(folder: Path, parts: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = {"benchmark": "fairness", "target": TARGET, "load_before": load()}
    for part in parts:
        with started(load_settings(data_dir=folder / part, port=0, workers=2)) as (client, _):
            logs = folder / part / "logs"
            result[part] = behind(client) if part == "behind" else planned_beside_others(client, client.url, logs)
        print(part, result[part], flush=True)
    return result


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--only", choices=["behind", "plan"], help="one part")
    arguments = parser.parse_args()
    with scratch_folder() as folder:
        result = measure(folder, [arguments.only] if arguments.only else ["behind", "plan"])
    keep_result(result, keep=not arguments.no_file)


if __name__ == "__main__":
    main()
