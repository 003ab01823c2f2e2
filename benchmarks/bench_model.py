"""A whole model tuned by the service: kernels in groups against a file for each, from an empty data folder and again.

Run with `make bench-model` or `python -m benchmarks.bench_model`. All problems of BERT-base and of Llama-3-8B at its
six values of m whose operator exists are one request: level 2, `--limit` candidates each at most. Two services of our
own answer it over HTTP, to published winners: one as it is by default, one with `CUKILN_GROUP_KERNELS=1`, which gives
every kernel a file of its own. All else is the same, also the CPU proofs and the winners' libraries; `stages` tells
compiling from proving. The last line is one JSON object; the result that is kept says at which limit it was measured.

- `cold_s`, `warm_s`: wall seconds of the request on an empty data folder, and of the same request again.
- `ratio_cold`, `ratio_compile_cpu`: a file per kernel over groups, in wall seconds of the whole and in the CPU seconds
  of the compilers.
- `stages`: CPU seconds that the job's problems report, summed.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sqlalchemy import text

from benchmarks.bench_tune import progress_lines, refuse_unverified
from benchmarks.keep_result import keep_result
from benchmarks.shapes import shape_sets
from codegen.operators import operators
from cukiln.client import Client
from cukiln.types import Job
from storage.database import Database
from storage.settings import Settings, load_settings
from workers.serve import embedded

TARGET = "sm_90a"
LEVEL, LIMIT = 2, 64
MODELS = ("bert_base_b8_s128", "llama3_8b")
WAYS = {"grouped": {}, "file_per_kernel": {"group_kernels": 1}}
STAGES = ("lower", "codegen", "compile", "verify")


def problems_of(models: Iterable[str], known: Iterable[str]) -> list[dict[str, Any]]:
    """All problems of the models whose operator is known. Raises KeyError for a model that `shapes.json` lacks."""
    names = set(known)
    return [problem for model in models for problem in shape_sets()[model] if problem["operator"] in names]


def measure(problems: list[dict[str, Any]], limit: int, way: str) -> tuple[dict[str, Any], Job]:
    """The figures of one way, and the cold job."""
    request = {"target": TARGET, "search": {"level": LEVEL, "limit": limit}, "problems": problems}
    folder = Path(tempfile.mkdtemp(prefix="cukiln-bench-"))
    try:
        settings = load_settings(data_dir=folder, port=0, **WAYS[way])
        with embedded(settings) as running, Client(running.url) as client:
            seconds = []
            jobs = []
            for _ in ("cold", "warm"):
                start = time.perf_counter()
                jobs.append(client.wait(client.submit(request), progress=progress_lines(start)))
                seconds.append(time.perf_counter() - start)
        refuse_unverified(jobs[0])
        if not jobs[1].cached:
            raise SystemExit("the same request again was not answered from the cache")
        cold, warm = seconds
        counts = counted(settings)
    finally:
        shutil.rmtree(folder)
    stages = {stage: round(getattr(jobs[0].seconds, stage).cpu, 1) for stage in STAGES}
    return {"cold_s": round(cold, 1), "warm_s": round(warm, 3), **counts, "stages": stages}, jobs[0]


def counted(settings: Settings) -> dict[str, int]:
    """Kernels, and the files that they were compiled in."""
    database = Database(settings.database_url)
    with database.read() as session:
        kernels, files = (
            int(session.execute(text(f"SELECT count(*) FROM {rows}")).scalar_one())
            for rows in ("builds", "groups WHERE source IS NOT NULL")
        )
    database.dispose()
    return {"kernels": kernels, "files": files}


def require_equal_winners(first: Job, second: Job) -> None:
    """Ends the benchmark where the two ways came to different winners."""
    for one, other in zip(first.problems, second.problems, strict=True):
        winners = [problem.winner for problem in (one, other)]
        schedules = [winner.schedule for winner in winners if winner is not None]
        if len(schedules) != len(winners) or schedules[0] != schedules[1]:
            raise SystemExit(f"{one.name}: the winners differ: {schedules}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="sets of shapes.json")
    parser.add_argument("--limit", type=int, default=LIMIT, help="candidates of each problem at most")
    parser.add_argument("--no-file", action="store_true", help="print the result without keeping it")
    arguments = parser.parse_args()
    problems = problems_of(arguments.models, operators())
    found, jobs = {}, {}
    for way in WAYS:
        print(f"{way}: {len(problems)} problems, at most {arguments.limit} candidates each", flush=True)
        found[way], jobs[way] = measure(problems, arguments.limit, way)
        print(f"{way}: {found[way]}", flush=True)
    grouped, alone = found["grouped"], found["file_per_kernel"]
    require_equal_winners(jobs["grouped"], jobs["file_per_kernel"])
    result = {
        "benchmark": "model",
        "target": TARGET,
        "models": list(arguments.models),
        "level": LEVEL,
        "limit": arguments.limit,
        "problems": len(problems),
        "candidates": sum(problem.candidates for problem in jobs["grouped"].problems),
        **found,
        "ratio_cold": round(alone["cold_s"] / grouped["cold_s"], 2),
        "ratio_compile_cpu": round(alone["stages"]["compile"] / grouped["stages"]["compile"], 2),
        "workers": load_settings().workers,
    }
    keep_result(result, keep=not arguments.no_file and list(arguments.models) == list(MODELS))


if __name__ == "__main__":
    main()
