"""Plan: problems become candidates, candidates share kernels, kernels that are not built become builds to compile."""

from __future__ import annotations

import time
from functools import lru_cache

from codegen.identity import build_id
from codegen.kernel import Candidate, Kernel
from codegen.lower import Lowered
from codegen.predict.compile_cost import kernel_bytes, kernel_seconds
from codegen.text.render_group import slice_digest
from storage.entities.groups import NewBuild
from storage.entities.jobs import JobProblem, candidates_of_job, job_state, problems_to_plan
from storage.queue import losses
from storage.queue.tasks import yields
from storage.queue.turns import spend
from storage.transitions.apply_verdicts import NextStep
from storage.transitions.plan import CANDIDATES_AT_ONCE, NewCandidate, PlannedProblem, end_plan, record_candidates
from workers import wake_ups
from workers.processes.stopwatch import Stopwatch
from workers.steps.context import HandBack, StepContext
from workers.steps.lowering import lower_problem
from workers.steps.progress import publish_problems, publish_progress

RECORD_SECONDS = 0.25
"""So long at most what is lowered is held back, to be recorded with more: compilers wait for it."""
TELL_SECONDS = 1.0
"""Between two `progress` events while one problem is recorded: counting takes longer the more it has."""
TURN_SECONDS = 0.5
"""Before a plan task gives way to that of another job, between two problems."""


def plan(context: StepContext) -> None:
    """Lower the task's problems one after the other, and record them a part at a time. Raises HandBack before all of
    them are planned where it is another job's turn, and after losses: then each has an attempt of its own."""
    with context.database.read() as session:
        problems = problems_to_plan(session, context.lease)
        status = job_state(session, context.lease.job_id)
        candidates = candidates_of_job(session, context.lease.job_id)
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
        recorder.end(_planned(problem, lowered, stopwatch))
        if place + 1 < len(problems) and time.monotonic() - started > TURN_SECONDS:
            recorder.record()
            with context.database.read() as session:
                give_way = yields(session, context.lease, wake_ups.TASKS_OF[wake_ups.PLAN])
            if give_way:
                raise HandBack
    recorder.record()
    if rest:
        raise HandBack


class _Recorder:
    """Writes candidates, and the ends of their problems, in transactions of about the same size."""

    def __init__(self, context: StepContext, in_queue: float) -> None:
        self._context = context
        self._in_queue = in_queue  # seconds that each problem waited
        self._candidates: list[tuple[int, NewCandidate]] = []
        self._builds: dict[str, NewBuild] = {}
        self._ended: list[PlannedProblem] = []
        self._recorded_at = self._told_at = time.monotonic()

    def add(self, problem: JobProblem, candidate: Candidate) -> None:
        build = _new_build(candidate.kernel, problem.target, self._context.toolchain.digest)
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
        publish_problems(context, [planned.id for planned in self._ended])
        if time.monotonic() - self._told_at > TELL_SECONDS or self._ended:
            publish_progress(context)
            self._told_at = time.monotonic()
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


def _planned(problem: JobProblem, lowered: Lowered, stopwatch: Stopwatch) -> PlannedProblem:
    return PlannedProblem(
        id=problem.id,
        candidate_count=len(lowered.candidates),
        space_size=lowered.space_size,
        rejections={rule: rejection.to_json() for rule, rejection in lowered.rejections.items()},
        lower=stopwatch.read(),
        error=lowered.why_empty,
    )
