"""Plan: problems become candidates, candidates share kernels, kernels that are not built become builds to compile."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from codegen.errors import InvalidSearch, SpaceTooLarge
from codegen.identity import RELEASES, build_id, problem_digest, winner_key
from codegen.kernel import Candidate, Kernel
from codegen.lower import Lowered, Progress, lower
from codegen.operators import operator
from codegen.predict.compile_cost import kernel_bytes, kernel_seconds
from codegen.search.search import Search
from codegen.search.space_bound import require_bounded
from codegen.targets import target as find_target
from codegen.text.render_group import slice_digest
from storage.entities.groups import NewBuild
from storage.entities.jobs import JobProblem, JobStatus, candidates_of_job, job_state, problems_to_plan
from storage.queue import losses
from storage.transitions.apply_verdicts import NextStep
from storage.transitions.charge_turns import spend
from storage.transitions.pending_builds import (
    CANDIDATES_AT_ONCE,
    NewCandidate,
    PlannedProblem,
    end_plan,
    record_candidates,
)
from storage.transitions.take_work import yields
from workers import wake_ups
from workers.processes.stopwatch import Stopwatch
from workers.steps.context import GiveUp, HandBack, StepContext

RECORD_SECONDS = 0.25
"""So long at most what is lowered is held back, to be recorded with more: compilers wait for it."""
PUBLISH_SECONDS = 1.0
"""Between two `progress` events while one problem is recorded: counting takes longer the more it has."""
TURN_SECONDS = 0.5
"""Before a plan task gives way to that of another job, between two problems."""
_FEWER = "give a limit, keep, or shorter lists"


def plan(context: StepContext) -> None:
    """Lower the task's problems one after the other, and record them a part at a time. Raises HandBack before all of
    them are planned where it is another job's turn, and after losses: then each has an attempt of its own."""
    with context.database.read() as session:
        problems = problems_to_plan(session, context.lease)
        status = job_state(session, context.lease.job_id)
        candidates = candidates_of_job(session, context.lease.job_id)
    _require_cuda(problems, context.settings.cuda)
    recorder = _Recorder(context, context.lease.waited_seconds / max(1, len(problems)))
    started = time.monotonic()
    problems, rest = (problems[:1], problems[1:]) if context.lease.is_alone else (problems, [])
    for place, problem in enumerate(problems):
        context.check()
        stopwatch = Stopwatch()
        if context.lease.is_lost:
            lowered = Lowered((), stopped=losses.why_skipped("while it was lowered"))
        else:
            lowered = lower_problem(context, problem, status, candidates)
        candidates += len(lowered.candidates)
        for candidate in lowered.candidates:
            recorder.add(problem, candidate)
        recorder.end(
            PlannedProblem(
                id=problem.id,
                candidate_count=len(lowered.candidates),
                space_size=lowered.space_size,
                rejections={rule: rejection.to_json() for rule, rejection in lowered.rejections.items()},
                lower=stopwatch.read(),
                error=lowered.why_empty,
            )
        )
        if place + 1 < len(problems) and time.monotonic() - started > TURN_SECONDS:
            recorder.record()
            with context.database.read() as session:
                give_way = yields(session, context.lease, wake_ups.TASKS_OF[wake_ups.PLAN])
            if give_way:
                raise HandBack
    recorder.record()
    if rest:
        raise HandBack


def _require_cuda(problems: Sequence[JobProblem], cuda: int) -> None:
    """A record says which CUDA its kernels are compiled by: raises GiveUp where that was another one at submit."""
    for problem in problems:
        own = problem_digest(problem.problem)
        for other in RELEASES - {cuda}:
            if problem.key == winner_key(own, problem.target, problem.device_class, other):
                raise GiveUp(
                    f"{problem.name}: it was accepted for CUDA {other}, and this worker compiles by CUDA {cuda}: set "
                    "CUKILN_CUDA alike for the service and all workers, and submit it again"
                )


class _Recorder:
    """Writes candidates, and the ends of their problems, in transactions of about the same size."""

    def __init__(self, context: StepContext, in_queue: float) -> None:
        self._context = context
        self._in_queue = in_queue  # seconds that each problem waited
        self._candidates: list[tuple[int, NewCandidate]] = []
        self._builds: dict[str, NewBuild] = {}
        self._ended: list[PlannedProblem] = []
        self._recorded_at = self._published_at = time.monotonic()

    def add(self, problem: JobProblem, candidate: Candidate) -> None:
        architecture = find_target(problem.target).architecture
        build = _new_build(candidate.kernel, architecture, self._context.toolchain.digest)
        new = NewCandidate(candidate.id, candidate.schedule.as_dict(), candidate.kernel.id, build.id)
        self._candidates.append((problem.id, new))
        self._builds[build.id] = build
        if len(self._candidates) >= CANDIDATES_AT_ONCE:
            self.record()

    def end(self, planned: PlannedProblem) -> None:
        """All candidates of the problem were added."""
        self._ended.append(planned)
        if time.monotonic() - self._recorded_at > RECORD_SECONDS:
            self.record()

    def record(self) -> None:
        """Everything that was added since the last time, in one transaction; then wake whatever continues with it."""
        if not (self._candidates or self._ended):
            return
        context = self._context
        context.check()
        next_steps: list[NextStep] = []
        spent = time.monotonic() - self._recorded_at
        with context.database.write() as session:
            followed = record_candidates(
                session, context.lease, self._candidates, self._builds, context.versions(session)
            )
            spend(session, context.lease.job_id, spent)
            for planned in self._ended:
                next_steps += end_plan(session, context.lease, planned, self._in_queue)
        context.wake(followed.waiting, [*followed.next_steps, *next_steps])
        context.publish_problems([planned.id for planned in self._ended])
        if time.monotonic() - self._published_at > PUBLISH_SECONDS or self._ended:
            context.publish_progress()
            self._published_at = time.monotonic()
        self._candidates, self._builds, self._ended = [], {}, []
        context.database.pause()
        self._recorded_at = time.monotonic()


@lru_cache(maxsize=16384)  # many candidates share a kernel
def _new_build(kernel: Kernel, target: str, toolchain: str) -> NewBuild:
    text = slice_digest(kernel)
    return NewBuild(
        id=build_id(kernel.id, text, toolchain, target),
        kernel=kernel.id,
        slice=text,
        kernel_json=kernel.to_json(),
        target=target,
        toolchain=toolchain,
        predicted_seconds=kernel_seconds(kernel),
        predicted_bytes=kernel_bytes(kernel),
    )


def lower_problem(
    context: StepContext, problem: JobProblem, job: JobStatus | None, candidates_before: int = 0
) -> Lowered:
    """Its candidates, or the reason where a bound ended it. `candidates_before`: of the job's other problems."""
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
