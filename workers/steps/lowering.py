"""Lower one problem of a job within the settings' bounds.

On the way a check ends it: by `Cancelled` where the step should stop, else by the sentence with which the problem
fails. So a hostile or unlucky problem costs a bounded time, and the others of its job continue.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.errors import InvalidSearch, SpaceTooLarge
from codegen.lower import Lowered, Progress, lower
from codegen.operators import operator
from codegen.search.search import Search
from codegen.search.space_bound import require_bounded
from codegen.targets import target as find_target
from storage.entities.jobs import JobProblem, JobStatus
from workers.processes.stopwatch import Stopwatch
from workers.steps.context import StepContext

_FEWER = "give a limit, keep, or shorter lists"


def lower_problem(
    context: StepContext, problem: JobProblem, job: JobStatus | None, candidates_before: int = 0
) -> Lowered:
    """The problem's candidates; none, and the reason, where a bound ended it. `candidates_before`: of the job's other
    problems until now. Raises Cancelled within `CHECK_EVERY` schedules."""
    search = Search.model_validate(problem.search)
    bounds = _Bounds(context, search, candidates_before)
    if (full := bounds.job_is_full(0)) is not None:  # before any work: thousands of problems may follow
        return Lowered((), stopped=full)
    limit, deterministic = (job.workspace_limit_bytes, job.deterministic) if job else (None, False)
    parsed, target = operator(problem.operator).parse(problem.problem), find_target(problem.target)
    try:
        lowered = lower(parsed, target, search, limit, deterministic=deterministic, check=bounds.check)
    except InvalidSearch as error:  # of this problem, though others of its signature have what the search names
        return Lowered((), stopped=error.message)
    too_many = None if bounds.progress is None else bounds.too_many(bounds.progress)
    if lowered.stopped is None and too_many is not None:
        return replace(lowered, candidates=(), stopped=too_many)
    return lowered


class _Bounds:
    """What ends the lowering of one problem. Its CPU time counts from here."""

    def __init__(self, context: StepContext, search: Search, candidates_before: int) -> None:
        self._context, self._search, self._before = context, search, candidates_before
        self._settings = context.settings
        self._stopwatch = Stopwatch()
        self.progress: Progress | None = None  # as it is now: lowering changes it

    def check(self, progress: Progress) -> str | None:
        self._context.check()
        self.progress = progress
        if progress.looked_at == 0:
            return self._too_large(progress)
        return self.too_many(progress) or self._too_long(progress)

    def _too_large(self, progress: Progress) -> str | None:
        try:
            require_bounded(progress.space, self._search, self._settings.max_space)
        except SpaceTooLarge as error:
            return error.message
        return None

    def too_many(self, progress: Progress) -> str | None:
        most = self._settings.max_candidates_per_problem
        if progress.candidates > most:
            return (
                f"more than {most:,} candidates (CUKILN_MAX_CANDIDATES_PER_PROBLEM) among the first "
                f"{progress.looked_at:,} of {progress.space.size:,} schedules: {_FEWER}"
            )
        return self.job_is_full(progress.candidates)

    def job_is_full(self, candidates: int) -> str | None:
        """Whether the job has no room for so many of this problem, or for any at all."""
        most = self._settings.max_candidates_per_job
        if self._before + max(1, candidates) <= most:
            return None
        return (
            f"the job would have more than {most:,} candidates (CUKILN_MAX_CANDIDATES_PER_JOB), {self._before:,} of "
            f"them of the problems before this one: {_FEWER}, or send fewer problems in a job"
        )

    def _too_long(self, progress: Progress) -> str | None:
        budget = self._settings.lower_cpu_seconds
        if self._stopwatch.read().cpu <= budget:
            return None
        to_do = "a limit or shorter lists" if self._search.limit is None else "a smaller limit or shorter lists"
        return (
            f"the search did not end in {budget:g} s of CPU time (CUKILN_LOWER_CPU_SECONDS): {progress.looked_at:,} of "
            f"{progress.space.size:,} schedules were looked at, and {progress.accepted:,} accepted; give {to_do}"
        )
