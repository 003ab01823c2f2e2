"""What the watchers of a job are told after a step: counts, and problems that have just ended."""

from __future__ import annotations

from collections.abc import Sequence

from storage.judge import LIVE
from storage.problems import load_problem
from storage.report_job import job_progress
from workers.steps.context import StepContext


def publish_progress(context: StepContext) -> None:
    """One `progress` event with the counts of the item's job as they are now."""
    job = context.claim.job_id
    if job is None:
        return
    with context.database.read() as session:
        found = job_progress(session, job)
    if found is not None:
        context.publish(
            "progress",
            {
                "state": found.state,
                "progress": found.progress.model_dump(mode="json"),
                "seconds": found.seconds.model_dump(mode="json"),
            },
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
