"""What the watchers of a job are told after a step: counts, and problems that have just ended."""

from __future__ import annotations

from collections.abc import Sequence

from storage.judge import LIVE, Judged
from storage.problems import load_problem
from storage.report_job import job_progress
from workers.steps.context import StepContext


def tell(context: StepContext, judged: Sequence[Judged]) -> None:
    """Tickets for what follows a step, and words for the watchers."""
    for one in judged:
        context.enqueue(one.kind, one.target)
    publish_problems(context, [one.problem for one in judged])
    publish_progress(context)


def publish_progress(context: StepContext, job: str | None = None) -> None:
    """One `progress` event with the counts of the item's job, or of `job`, as they are now."""
    job = job or context.claim.job_id
    if job is None:
        return
    with context.database.read() as session:
        found = job_progress(session, job, context.settings.toolchain_live_seconds)
    if found is not None:
        context.publish(
            "progress",
            {
                "state": found.state,
                "progress": found.progress.model_dump(mode="json"),
                "seconds": found.seconds.model_dump(mode="json"),
            },
            job_id=job,
        )


def publish_problems(context: StepContext, problem_ids: Sequence[int]) -> None:
    """One `problem` event for each problem that has ended."""
    with context.database.read() as session:
        ended = [problem for id in problem_ids if (problem := load_problem(session, id)) and problem.state not in LIVE]
    for problem in ended:
        context.publish(
            "problem",
            {
                "name": problem.name,
                "key": problem.key,
                "state": problem.state,
                "winner": problem.winner,
                "error": problem.error,
            },
            job_id=problem.job_id,
        )
