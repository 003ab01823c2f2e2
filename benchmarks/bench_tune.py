"""Wall time to tune and verify public shapes as one job for sm_90a, from an empty data folder: every shape of an
operator at level 1, or all problems of whole models. Every problem must end with a verified winner, no candidate may be
wrong.

- `wall_seconds`: from the request to the end of the job; `limit_seconds`, of matmul only, is its target;
  `again_seconds`: of the same request again, which the cache must answer.
- `stages`: seconds that the job's problems report, summed over the workers; `tasks`: wall seconds of the workers' tasks
  by kind, with the longest of each. `idle_seconds`: of the compile workers, without work.
- `kernels`: compiled and verified, each for all candidates that share it; `libraries`: built alone, to be published.
- `file_per_kernel`, with `--models`: the same by a service with `CUKILN_GROUP_KERNELS=1`, whose winners must be equal;
  `ratio`, `ratio_compile_cpu`: its wall seconds, and the CPU seconds of its compilers, over ours.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import TARGET, count, query, require_verified, scratch_folder, started, timed_job
from benchmarks.keep_result import keep_result, options
from benchmarks.shapes import begins, shape_sets, shapes_of
from codegen.operators import operators
from cukiln.types import Job
from storage.config.settings import Settings, load_settings

LIMIT_SECONDS = {"matmul": 600}
WORKERS = 2  # of the machine that LIMIT_SECONDS was set for
MODELS = ("bert_base_b8_s128", "llama3_8b")
STAGES = ("lower", "codegen", "compile", "verify")
_TASKS = "SELECT kind, count(*), sum(finished_at - started_at), max(finished_at - started_at) FROM tasks GROUP BY kind"


def counted(settings: Settings) -> dict[str, Any]:
    """The work, from the database."""
    ((mean, worst),) = query(settings, "SELECT avg(cpu_seconds), max(cpu_seconds) FROM verdicts")
    return {
        "kernels": count(settings, "builds"),
        "groups": count(settings, "groups"),
        "libraries": count(settings, "libraries"),
        "verify_cpu_seconds_per_kernel": {"mean": round(mean, 3), "worst": round(worst, 3)},
        "tasks": {
            kind: {"count": tasks, "wall_seconds": round(total, 1), "longest_seconds": round(longest, 1)}
            for kind, tasks, total, longest in query(settings, _TASKS)
        },
    }


def problems_of(models: Iterable[str], operator_names: Iterable[str], only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All problems of the models whose operator is known, or those whose name begins as `only` says. Raises KeyError
    for a model that `shapes.json` lacks."""
    names = set(operator_names)
    of_models = [problem for model in models for problem in shape_sets()[model] if problem["operator"] in names]
    return [problem for problem in of_models if begins(problem["name"], only)]


def measure(
    folder: Path, problems: Sequence[dict[str, Any]], search: dict[str, Any], **settings: Any
) -> tuple[dict[str, Any], Job]:
    """The figures of one service, and the job."""
    configured = load_settings(data_dir=folder, port=0, workers=WORKERS, **settings)
    request = {"target": TARGET, "search": search, "problems": list(problems)}
    with started(configured) as (client, _):
        job, wall = timed_job(client, request)
        again, cached = timed_job(client, request)
    require_verified(job)
    if not again.cached:
        raise SystemExit("the same request again was not answered from the cache")
    work = counted(configured)
    # Of the compile workers; another process plans.
    busy = sum(tasks["wall_seconds"] for kind, tasks in work["tasks"].items() if kind != "plan")
    figures = {
        **work,
        "wall_seconds": round(wall, 1),
        "again_seconds": round(cached, 3),
        "idle_seconds": round(WORKERS * wall - busy, 1),
        "stages": {
            stage: {part: round(getattr(getattr(job.seconds, stage), part), 1) for part in ("wall", "cpu")}
            for stage in STAGES
        },
    }
    return figures, job


def require_equal_winners(first: Job, second: Job) -> None:
    """Ends the benchmark where the two ways came to different winners."""
    for problems in zip(first.problems, second.problems, strict=True):
        schedules = [problem.winner and problem.winner.schedule for problem in problems]
        if None in schedules or schedules[0] != schedules[1]:
            raise SystemExit(f"{problems[0].name}: the winners differ: {schedules}")


def of_operator(folder: Path, operator: str, problems: Sequence[dict[str, Any]], level: int) -> dict[str, Any]:
    figures, job = measure(folder, problems, {"level": level})
    return {
        "benchmark": "tune" if operator == "matmul" else f"tune-{operator.replace('_', '-')}",
        "operator": operator,
        "limit_seconds": LIMIT_SECONDS.get(operator),
        **described(job, level),
        **figures,
    }


def of_models(
    folder: Path, models: Sequence[str], problems: Sequence[dict[str, Any]], level: int, limit: int
) -> dict[str, Any]:
    """With kernels in groups, then with a file for each; all else is the same."""
    search = {"level": level, "limit": limit}
    ours, job = measure(folder / "groups", problems, search)
    print(f"groups: {ours}", flush=True)
    alone, job_alone = measure(folder / "alone", problems, search, group_kernels=1)
    require_equal_winners(job, job_alone)
    return {
        "benchmark": "model",
        "models": list(models),
        "limit": limit,
        **described(job, level),
        **ours,
        "file_per_kernel": alone,
        "ratio": round(alone["wall_seconds"] / ours["wall_seconds"], 2),
        "ratio_compile_cpu": round(alone["stages"]["compile"]["cpu"] / ours["stages"]["compile"]["cpu"], 2),
    }


def described(job: Job, level: int) -> dict[str, Any]:
    candidates = sum(problem.candidates for problem in job.problems)
    problems = len(job.problems)
    return {"target": TARGET, "level": level, "problems": problems, "candidates": candidates, "workers": WORKERS}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--operator", default="matmul", choices=sorted(operators()), help="whose shapes; default: matmul"
    )
    parser.add_argument("--only", nargs="*", default=[], help="shapes whose name begins so; default: all")
    parser.add_argument("--models", nargs="*", help=f"sets of shapes.json instead; default: {' '.join(MODELS)}")
    parser.add_argument("--level", type=int, default=1, choices=(0, 1, 2), help="of the search")
    parser.add_argument("--limit", type=int, default=64, help="candidates of each problem of the models at most")
    arguments = parser.parse_args()
    if arguments.models is not None:
        models = arguments.models or MODELS
        problems = problems_of(models, operators(), arguments.only)
    else:
        problems = [shape for shape in shapes_of(arguments.operator) if begins(shape["name"], arguments.only)]
    if not problems:
        parser.error(f"none of these public shapes has a name that begins with {' or '.join(arguments.only)}")
    with scratch_folder() as folder:
        if arguments.models is None:
            result = of_operator(folder, arguments.operator, problems, arguments.level)
        else:
            result = of_models(folder, models, problems, arguments.level, arguments.limit)
    whole = not arguments.models if arguments.models is not None else arguments.level == 1
    keep_result(result, keep=whole and not arguments.only and not arguments.no_file)


if __name__ == "__main__":
    main()
