"""Wall time to tune and verify every public shape of an operator, as one job at level 1 for sm_90a, from an empty data
folder. Every problem must end with a verified winner, no candidate may be wrong.

- `wall_seconds`: from the request to the end of the job; `limit_seconds`, of matmul only, is its target.
- `stages`: seconds that the job's problems report, summed over the workers; `tasks`: wall seconds of the workers' tasks
  by kind, with the longest of each. `idle_seconds`: of the compile workers, without work.
- `kernels`: compiled and verified, each for all candidates that share it; `libraries`: built alone, to be published.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import TARGET, count, query, require_verified, scratch_folder, started, timed_job
from benchmarks.keep_result import keep_result, options
from benchmarks.shapes import shapes_of
from codegen.operators import operators
from storage.config.settings import Settings, load_settings

LIMIT_SECONDS = {"matmul": 600}
WORKERS = 2  # of the machine that LIMIT_SECONDS was set for
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


def measure(folder: Path, operator: str, problems: Sequence[dict[str, Any]], level: int) -> dict[str, Any]:
    settings = load_settings(data_dir=folder, port=0, workers=WORKERS)
    with started(settings) as (client, _):
        job, wall = timed_job(client, {"target": TARGET, "search": {"level": level}, "problems": list(problems)})
    require_verified(job)
    work = counted(settings)
    # Of the compile workers; another process plans.
    busy = sum(tasks["wall_seconds"] for kind, tasks in work["tasks"].items() if kind != "plan")
    return {
        "benchmark": "tune" if operator == "matmul" else f"tune-{operator.replace('_', '-')}",
        "operator": operator,
        "target": TARGET,
        "level": level,
        "problems": len(job.problems),
        "candidates": sum(problem.candidates for problem in job.problems),
        **work,
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
    parser = options(__doc__)
    parser.add_argument(
        "--operator", default="matmul", choices=sorted(operators()), help="whose shapes; default: matmul"
    )
    parser.add_argument("--only", default="", help="shapes whose name begins so; default: all")
    parser.add_argument("--level", type=int, default=1, choices=(0, 1, 2), help="of the search")
    arguments = parser.parse_args()
    problems = [shape for shape in shapes_of(arguments.operator) if shape["name"].startswith(arguments.only)]
    if not problems:
        parser.error(f"no public shape of {arguments.operator} has a name that begins with {arguments.only!r}")
    with scratch_folder() as folder:
        result = measure(folder, arguments.operator, problems, arguments.level)
    keep_result(result, keep=not arguments.no_file and not arguments.only and arguments.level == 1)


if __name__ == "__main__":
    main()
