"""Events for the watchers of a job after a step: counts, and problems that have just ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

from storage.database.tables import LIVE
from storage.entities.jobs import load_problem
from storage.reports.progress import job_progress
from storage.transitions.apply_verdicts import NextStep
from workers.steps.context import StepContext

MOST_TOLD = 16
"""Jobs that get events of one step: where more share a group, the others get those of their own steps."""
PROGRESS_SECONDS = 0.2
"""Between two such events of a job from one process; the API compares with the database."""


def tell(context: StepContext, next_steps: Sequence[NextStep]) -> None:
    """What a step came to, for the watchers."""
    publish_problems(context, [entry.problem for entry in next_steps])
    publish_progress(context)


def publish_progress(context: StepContext) -> None:
    """One `progress` event to each job of the task, with its counts as they are now."""
    for job in context.lease.jobs[:MOST_TOLD]:
        if not _is_due(context.workplace.progress_told_at, job):
            continue
        with context.database.read() as session:
            report = job_progress(session, job, context.settings.toolchain_live_seconds)
        if report is not None:
            context.publish(
                "progress",
                {
                    "state": report.state,
                    "progress": report.progress.model_dump(mode="json"),
                    "seconds": report.seconds.model_dump(mode="json"),
                },
                job_id=job,
            )


def _is_due(told_at: dict[str, float], job: str) -> bool:
    now = time.monotonic()
    if now - told_at.get(job, 0.0) < PROGRESS_SECONDS:
        return False
    for ended in [other for other, at in told_at.items() if now - at >= PROGRESS_SECONDS]:
        del told_at[ended]
    told_at[job] = now
    return True


def publish_problems(context: StepContext, problem_ids: Sequence[int]) -> None:
    """One `problem` event for each problem that has ended."""
    with context.database.read() as session:
        ended = [problem for id in problem_ids if (problem := load_problem(session, id)) and problem.state not in LIVE]
    for problem in ended:
        told = {name: getattr(problem, name) for name in ("name", "key", "state", "winner", "error")}
        context.publish("problem", told, job_id=problem.job_id)
