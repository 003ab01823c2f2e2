"""Wall time to tune and verify every public shape of an operator, from an empty data folder.

Run with `make bench-tune` or `python -m benchmarks.bench_tune --operator conv2d`. Starts a service of its own with two
workers and submits the operator's shapes of `shapes.json` (matmul: BERT-base in fp16, Llama-3-8B at every m in bf16,
square matrices in fp16, bf16 and fp32) as one job at level 1 for sm_90a. Every problem must end with a verified winner,
no candidate may be wrong. The last line is one JSON object, which is also kept under `benchmarks/results/`.

- `wall_seconds`: from the request to the end of the job; `limit_seconds`, matmul's alone, is meant for it.
- `stages`: seconds that the job's problems report, summed over the workers; `items`: wall seconds of the workers' items
  by kind, with the longest of each. `idle_seconds`: of the compile workers, with no item.
- `kernels`: compiled and judged, each for all candidates that share it; `libraries`: built alone, to be published.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import text

from benchmarks.keep_result import keep_result
from benchmarks.shapes import shapes_of
from codegen.operators import operators
from cukiln.client import Client
from cukiln.types import Job, Progress
from storage.database import Database
from storage.settings import Settings, load_settings
from workers.serve import embedded

TARGET = "sm_90a"
LIMIT_SECONDS = {"matmul": 600}
WORKERS = 2  # as many as the cores that the limit is meant for
STAGES = ("lower", "codegen", "compile", "verify")
SECONDS_BETWEEN_LINES = 15.0
_ITEMS = "SELECT kind, count(*), sum(finished_at - started_at), max(finished_at - started_at) FROM items GROUP BY kind"


def tune(settings: Settings, problems: Sequence[dict[str, Any]], level: int) -> tuple[Job, float]:
    """The finished job and its wall seconds."""
    with embedded(settings) as running, Client(running.url) as client:
        request = {"target": TARGET, "search": {"level": level}, "problems": list(problems)}
        start = time.perf_counter()
        job = client.wait(client.submit(request), progress=progress_lines(start))
        return job, time.perf_counter() - start


def progress_lines(start: float) -> Callable[[Progress], None]:
    """Says how far the job is, now and then."""
    said = start - SECONDS_BETWEEN_LINES

    def say(progress: Progress) -> None:
        nonlocal said
        now = time.perf_counter()
        if now - said < SECONDS_BETWEEN_LINES:
            return
        said = now
        stages = (f"{name} {stage.done}/{stage.total}" for name, stage in progress if hasattr(stage, "total"))
        print(f"{now - start:5.0f} s: {', '.join(stages)}", flush=True)

    return say


def refuse_unverified(job: Job) -> None:
    """Ends the benchmark where a problem has no verified winner, or a candidate was wrong."""
    for problem in job.problems:
        if problem.winner is None:
            raise SystemExit(f"{problem.name} has no winner: {problem.error}")
        if set(problem.verdicts) != {"ok"}:
            raise SystemExit(f"{problem.name} has candidates that are not right: {problem.verdicts}")


def counted(settings: Settings) -> dict[str, Any]:
    """What the database knows of the work."""
    database = Database(settings.database_url)
    with database.read() as session:
        kernels, groups, libraries = (
            int(session.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())
            for table in ("builds", "groups", "libraries")
        )
        items = session.execute(text(_ITEMS)).all()
        verdicts = session.execute(text("SELECT count(*), sum(cpu_seconds), max(cpu_seconds) FROM verdicts")).one()
    database.dispose()
    return {
        "kernels": kernels,
        "groups": groups,
        "libraries": libraries,
        "verify_cpu_seconds_per_kernel": {
            "mean": round(verdicts[1] / verdicts[0], 3),
            "worst": round(verdicts[2], 3),
        },
        "items": {
            kind: {"count": count, "wall_seconds": round(total, 1), "longest_seconds": round(longest, 1)}
            for kind, count, total, longest in items
        },
    }


def measure(folder: Path, operator: str, problems: Sequence[dict[str, Any]], level: int) -> dict[str, Any]:
    settings = load_settings(data_dir=folder, port=0, workers=WORKERS)
    job, wall = tune(settings, problems, level)
    refuse_unverified(job)
    found = counted(settings)
    # Of the compile workers; planning has a worker of its own.
    busy = sum(item["wall_seconds"] for kind, item in found["items"].items() if kind != "plan")
    return {
        "benchmark": "tune" if operator == "matmul" else f"tune-{operator.replace('_', '-')}",
        "operator": operator,
        "target": TARGET,
        "level": level,
        "problems": len(job.problems),
        "candidates": sum(problem.candidates for problem in job.problems),
        **found,
        "wall_seconds": round(wall, 1),
        "limit_seconds": LIMIT_SECONDS.get(operator),
        "workers": WORKERS,
        "idle_seconds": round(WORKERS * wall - busy, 1),
        "stages": {
            stage: {part: round(getattr(getattr(job.seconds, stage), part), 1) for part in ("wall", "cpu")}
            for stage in STAGES
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--operator", default="matmul", choices=sorted(operators()), help="whose shapes; default: matmul"
    )
    parser.add_argument("--only", default="", help="shapes whose name begins so; default: all")
    parser.add_argument("--level", type=int, default=1, choices=(0, 1, 2), help="of the search")
    parser.add_argument("--no-file", action="store_true", help="print the result without keeping it")
    arguments = parser.parse_args()
    problems = [one for one in shapes_of(arguments.operator) if one["name"].startswith(arguments.only)]
    if not problems:
        parser.error(f"no public shape of {arguments.operator} has a name that begins with {arguments.only!r}")
    folder = Path(tempfile.mkdtemp(prefix="cukiln-bench-"))
    try:
        result = measure(folder, arguments.operator, problems, arguments.level)
    finally:
        shutil.rmtree(folder)
    keep_result(result, keep=not arguments.no_file and not arguments.only and arguments.level == 1)


if __name__ == "__main__":
    main()
