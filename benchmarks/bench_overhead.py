"""What the service costs beside the compilers: its start, latency to the first nvcc, time that no tool runs, codegen
speed, cache. nvcc and g++ are the real ones behind scripts that mark when they start and end.

`other_s` is wall time of a 64-candidate job in which nothing of nvcc, g++ and kernels (with their references) runs on
any worker: with a worker per core, the work of one overlaps with the tools of another. `other_one_worker_s` is the same
with a single worker, without overlap; the limit does not apply to it.
"""

import ctypes
import json
import os
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import TARGET, median_seconds, query, scratch_folder, started
from benchmarks.keep_result import keep_result, options
from codegen.lower import lower
from codegen.operators import operator
from codegen.search.search import Search
from codegen.targets import target
from cukiln.client import Client
from storage.config.settings import Settings, load_settings
from workers.compile.toolchain import find_toolchain

PROBLEM = {"operator": "matmul", "m": 1024, "n": 1024, "k": 1024, "layout": "nn", "dtype": "float32"}
QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart.json"
NUMBERS = 256
_IN_OPEN, _EVENT_BYTES = 0x20, 16
CODEGEN_KERNELS = 2000
STARTS = 5

# A tool may write nothing that outlives it (`workers.processes.fence.fence`), so it marks its start and end by opening
# a file; the number pairs them.
TOOL_SCRIPT = """#!/bin/bash
number=$((RANDOM % {numbers}))
: < "{marks}/{name}-begin-$number"
"{tool}" "$@"
code=$?
: < "{marks}/{name}-end-$number"
exit $code
"""
CODEGEN_SCRIPT = """
import json, time
from codegen.lower import lower
from codegen.operators import operator
from codegen.text.render_group import render_device, slice_digest
from codegen.search.search import Search
from codegen.targets import target
own = operator("matmul")
problems = [own.parse({{**{problem}, "layout": layout}}) for layout in ("nn", "nt", "tn", "tt")]
render_device([lower(problems[0], target({target!r}), Search(level=0)).candidates[0].kernel])
begin, kernels = time.perf_counter(), 0
for problem in problems:
    candidates = lower(problem, target({target!r}), Search(level=2, limit={count} // 4)).candidates
    distinct = list(dict.fromkeys(candidate.kernel for candidate in candidates))
    for first in range(0, len(distinct), 32):
        render_device(distinct[first : first + 32])
    for kernel in distinct:
        slice_digest(kernel)
    kernels += len(distinct)
print(json.dumps(kernels / (time.perf_counter() - begin)))
"""


class ToolLog:
    """When nvcc and g++ ran, in seconds since the epoch: their scripts open files, which inotify(7) reports."""

    def __init__(self, folder: Path) -> None:
        self.folder, marks = folder / "bin", folder / "marks"
        self.folder.mkdir()
        marks.mkdir()
        toolchain = find_toolchain()
        for name, tool in (("nvcc", toolchain.device_compiler.path), ("g++", toolchain.host_compiler)):
            script = self.folder / name
            script.write_text(TOOL_SCRIPT.format(tool=tool, name=name, marks=marks, numbers=NUMBERS))
            script.chmod(0o755)
            for number in range(NUMBERS):
                for moment in ("begin", "end"):
                    (marks / f"{name}-{moment}-{number}").touch()
        folder.chmod(0o755)  # else no tool has a user of its own
        self._opened: list[tuple[float, str]] = []
        libc = ctypes.CDLL(None, use_errno=True)
        events = libc.inotify_init1(os.O_CLOEXEC)
        if events < 0 or libc.inotify_add_watch(events, os.fsencode(marks), _IN_OPEN) < 0:
            raise OSError(ctypes.get_errno(), "inotify")
        threading.Thread(target=self._watch, args=[events], daemon=True).start()

    def _watch(self, events: int) -> None:
        while data := os.read(events, 1 << 16):
            now, at = time.time(), 0
            while at < len(data):
                _, _, _, length = struct.unpack_from("iIII", data, at)
                at += _EVENT_BYTES + length
                self._opened.append((now, data[at - length : at].rstrip(b"\0").decode()))

    def spans(self, since: float, name: str | None = None) -> list[tuple[float, float]]:
        begun: dict[str, float] = {}
        spans = []
        for at, mark in self._opened:
            tool, moment, number = mark.rsplit("-", 2)
            if moment == "begin":
                begun[tool + number] = at
            elif at >= since and name in (None, tool):
                spans.append((begun[tool + number], at))
        return sorted(span for span in spans if span[0] >= since)


@contextmanager
def service(folder: Path, log: ToolLog, workers: int) -> Iterator[tuple[Client, Settings]]:
    settings = load_settings(
        data_dir=folder,
        port=0,
        workers=workers,
        nvcc=str(log.folder / "nvcc"),
        host_compiler=str(log.folder / "g++"),
    )
    with started(settings) as (client, _):
        yield client, settings


def fresh_schedules(count: int) -> list[dict[str, Any]]:
    """Accepted level-2 schedules of PROBLEM, each another kernel."""
    lowered = lower(operator("matmul").parse(PROBLEM), target(TARGET), Search(level=2, limit=count * 2, seed=1))
    by_kernel = {candidate.kernel.id: candidate.schedule.as_dict() for candidate in lowered.candidates}
    return list(by_kernel.values())[:count]


def first_nvcc_ms(client: Client, log: ToolLog, schedules: Sequence[dict[str, Any]]) -> list[float]:
    """From the 202 to the start of the job's first nvcc, for one fresh job per schedule."""
    latencies = []
    for schedule in schedules:
        sent = time.time()  # jobs before it have ended, and so have their compilers
        job = client.submit({"target": TARGET, "search": {"schedules": [schedule]}, "problems": [PROBLEM]})
        accepted = time.time()
        client.wait(job)
        # The service may start nvcc before the client has read the answer.
        latencies.append(max(0.0, log.spans(sent, "nvcc")[0][0] - accepted) * 1e3)
    return latencies


def time_without_tools(client: Client, settings: Settings, log: ToolLog, schedules: Sequence[dict[str, Any]]) -> float:
    """Wall seconds of a job during which neither nvcc nor g++ nor a kernel ran."""
    begin = time.time()
    job = client.submit({"target": TARGET, "search": {"schedules": list(schedules)}, "problems": [PROBLEM]})
    done = client.wait(job)
    wall = time.time() - begin
    if done.state != "done" or done.problems[0].verdicts != {"ok": len(schedules)}:
        raise SystemExit(f"the job ended {done.state}: {done.problems[0]}")
    kernels = [span for span in kernel_spans(settings) if span[0] >= begin]
    if len(kernels) != len(schedules):
        raise SystemExit(f"{len(kernels)} kernels ran for {len(schedules)} candidates: they were not fresh")
    return wall - _covered(sorted(log.spans(begin) + kernels))


def _covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union: nvcc starts g++ as its preprocessor, and workers work side by side."""
    total, end = 0.0, 0.0
    for first, last in spans:
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def kernel_spans(settings: Settings) -> list[tuple[float, float]]:
    """When each kernel ran on the CPU with its references, from its verdict, without g++."""
    spans = []
    for wall, text in query(settings, "SELECT wall_seconds, details FROM verdicts"):
        details = json.loads(text)
        spans.append((details["began_at"], details["began_at"] + wall - details["build_seconds"]["wall"]))
    return spans


def seconds_until_ready(folder: Path) -> float:
    """From the start of `cukiln serve`, over an empty data folder, to its line `ready`."""
    environment = {**os.environ, "CUKILN_DATA": str(folder), "CUKILN_PORT": "0"}
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "cukiln", "serve"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as serving:
        assert serving.stdout is not None
        lines = []
        for line in serving.stdout:
            lines.append(line)
            if line.startswith("ready: "):
                break
        else:
            raise SystemExit(f"the service did not start: {''.join(lines)}")
        taken = time.perf_counter() - begin
        serving.terminate()
        serving.communicate()
    return taken


def codegen_kernels_per_second() -> float:
    """Lower, render and key distinct kernels in a fresh process on one core."""
    script = CODEGEN_SCRIPT.format(problem=PROBLEM, target=TARGET, count=CODEGEN_KERNELS)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return float(done.stdout)


def cached_tune_ms(client: Client) -> float:
    """Median time of the quickstart's request once everything in it is cached, seen by the client."""
    request = json.loads(QUICKSTART.read_text(encoding="utf-8"))
    client.wait(client.submit(request))

    def submit() -> None:
        if not client.submit(request).cached:
            raise SystemExit("the quickstart was not answered from the cache")

    return 1e3 * median_seconds(submit, 20)


def measure(folder: Path, jobs: int, candidates: int) -> dict[str, Any]:
    log = ToolLog(folder)
    schedules = fresh_schedules(jobs + candidates)
    cores = len(os.sched_getaffinity(0))
    ready = [seconds_until_ready(folder / f"start-{number}") for number in range(STARTS)]
    with service(folder / "many", log, workers=cores) as (client, settings):
        without = time_without_tools(client, settings, log, schedules[jobs:])
        waits = first_nvcc_ms(client, log, schedules[:jobs])
        cached = cached_tune_ms(client)
    with service(folder / "one", log, workers=1) as (client, settings):
        alone = time_without_tools(client, settings, log, schedules[jobs:])
    return {
        "benchmark": "overhead",
        "ready_s": round(statistics.median(ready), 2),
        "starts": STARTS,
        "first_nvcc_ms_median": round(statistics.median(waits), 1),
        "first_nvcc_ms_max": round(max(waits), 1),
        "jobs": jobs,
        "other_s": round(without, 3),
        "other_one_worker_s": round(alone, 3),
        "other_limit_s": round(0.3 + 0.005 * candidates, 3),
        "candidates": candidates,
        "codegen_kernels_per_s": round(codegen_kernels_per_second()),
        "cached_tune_ms": round(cached, 1),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--jobs", type=int, default=20, help="fresh jobs for the latency to the first nvcc")
    parser.add_argument("--candidates", type=int, default=64, help="candidates of the job of `other_s`")
    arguments = parser.parse_args()
    with scratch_folder() as folder:
        keep_result(measure(folder, arguments.jobs, arguments.candidates), keep=not arguments.no_file)


if __name__ == "__main__":
    main()
