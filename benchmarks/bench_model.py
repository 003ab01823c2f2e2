"""A whole model tuned by the service: kernels in groups against a file for each, from an empty data folder and again.

All problems of BERT-base and of Llama-3-8B at its six values of m are one request: level 2, `--limit` candidates each.
Two services answer it: one as it is by default, one with `CUKILN_GROUP_KERNELS=1`; all else is the same.

- `cold_s`, `warm_s`: wall seconds of the request on an empty data folder, and of the same request again.
- `ratio_cold`, `ratio_compile_cpu`: a file per kernel over groups, in wall seconds and in CPU seconds of the compilers.
- `stages`: CPU seconds that the job's problems report, summed.
"""

from collections.abc import Iterable
from typing import Any

from benchmarks.harness import TARGET, count, require_verified, scratch_folder, started, timed_job
from benchmarks.keep_result import keep_result, options
from benchmarks.shapes import shape_sets
from codegen.operators import operators
from cukiln.types import Job
from storage.config.settings import load_settings

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
    with scratch_folder() as folder:
        settings = load_settings(data_dir=folder, port=0, **WAYS[way])
        with started(settings) as (client, _):
            job, cold = timed_job(client, request)
            again, warm = timed_job(client, request)
        require_verified(job)
        if not again.cached:
            raise SystemExit("the same request again was not answered from the cache")
        counts = {"kernels": count(settings, "builds"), "files": count(settings, "groups WHERE source IS NOT NULL")}
    stages = {stage: round(getattr(job.seconds, stage).cpu, 1) for stage in STAGES}
    return {"cold_s": round(cold, 1), "warm_s": round(warm, 3), **counts, "stages": stages}, job


def require_equal_winners(first: Job, second: Job) -> None:
    """Ends the benchmark where the two ways came to different winners."""
    for problems in zip(first.problems, second.problems, strict=True):
        schedules = [problem.winner and problem.winner.schedule for problem in problems]
        if None in schedules or schedules[0] != schedules[1]:
            raise SystemExit(f"{problems[0].name}: the winners differ: {schedules}")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS, help="sets of shapes.json")
    parser.add_argument("--limit", type=int, default=LIMIT, help="candidates of each problem at most")
    arguments = parser.parse_args()
    problems = problems_of(arguments.models, operators())
    figures, jobs = {}, {}
    for way in WAYS:
        print(f"{way}: {len(problems)} problems, at most {arguments.limit} candidates each", flush=True)
        figures[way], jobs[way] = measure(problems, arguments.limit, way)
        print(f"{way}: {figures[way]}", flush=True)
    grouped, alone = figures["grouped"], figures["file_per_kernel"]
    require_equal_winners(jobs["grouped"], jobs["file_per_kernel"])
    result = {
        "benchmark": "model",
        "target": TARGET,
        "models": list(arguments.models),
        "level": LEVEL,
        "limit": arguments.limit,
        "problems": len(problems),
        "candidates": sum(problem.candidates for problem in jobs["grouped"].problems),
        **figures,
        "ratio_cold": round(alone["cold_s"] / grouped["cold_s"], 2),
        "ratio_compile_cpu": round(alone["stages"]["compile"] / grouped["stages"]["compile"], 2),
        "workers": load_settings().workers,
    }
    keep_result(result, keep=not arguments.no_file and list(arguments.models) == list(MODELS))


if __name__ == "__main__":
    main()
