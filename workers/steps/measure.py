"""Measure: the candidates of a group are verified on the GPU, then timed, while other groups still compile.
Compare: the few best of a problem take turns on the GPU, with the vendor's library between them."""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from codegen.operators import operator
from codegen.search.schedule import Schedule
from cukiln.types import Comparison, StageSeconds
from storage.blobs.blob_store import BlobStore
from storage.config.own_modules import gpu_plans
from storage.database.session import Clock
from storage.entities.candidates import StoredCandidate, candidates_of_problem
from storage.entities.jobs import JobProblem, last_deadline, load_problem
from storage.entities.pareto_front import finalists
from storage.errors import BlobCorrupt, BlobMissing, LostLease
from storage.queue import losses
from storage.transitions.apply_verdicts import CandidateVerdict, NextStep
from storage.transitions.measure import (
    Measured,
    ToMeasure,
    apply_measured_verdicts,
    best_measured,
    candidates_to_measure,
    complete_measured,
    forget_group_library,
    invalidate_contenders,
    record_compared,
    record_measured,
)
from workers.gpu.engine import Engine
from workers.gpu.measure_on_gpu import Outcome
from workers.gpu.task import CandidateResult, TaskCandidate, TaskKind
from workers.processes.processes import InfrastructureError
from workers.steps.context import Cancel, GiveUp, StepContext
from workers.steps.rank import without

log = logging.getLogger("cukiln.measure")

MOST_CANDIDATES = 40
"""Of one attempt, about 20 seconds: then they are recorded, and the task waits again for the rest. So a budget that
ends cuts off little that was done, and a more urgent job has its turn soon; a child that starts takes two seconds."""
BEFORE_DEADLINE_SECONDS = 1.0
"""Before the budgets of the task's jobs end the child is stopped, where there is something to record: once the
reconciler, which looks every second, has ended the budget, what is not recorded is skipped."""


class Ending(threading.Event):
    """Set where the step is to stop, and shortly before the budget ends where something would be lost by then."""

    def __init__(self, cancel: Cancel, clock: Clock, deadline: float | None, done: Sequence[CandidateResult]) -> None:
        super().__init__()
        self._cancel, self._clock, self._deadline, self._done = cancel, clock, deadline, done

    def is_set(self) -> bool:
        return self._cancel.is_set() or (
            self._deadline is not None
            and bool(self._done)
            and self._clock.now() >= self._deadline - BEFORE_DEADLINE_SECONDS
        )


def measure(context: StepContext) -> None:
    """Verify and time what the group compiled and this device class has no verdict on; after losses one candidate."""
    with context.database.read() as session:
        waiting = candidates_to_measure(session, context.lease.ref, context.device.name, gpu_plans())
        waiting = waiting[: 1 if context.lease.is_alone else MOST_CANDIDATES]
        best = best_measured(session, {candidate.problem_id for candidate in waiting})
        deadline = last_deadline(session, context.lease.jobs)
    done: list[CandidateResult] = []
    ending = Ending(context.cancel, context.database.clock, deadline, done)
    with context.processes.private_folder("measure") as folder:
        libraries = fetch_libraries(context.blobs, (candidate.library for candidate in waiting), folder)
        present = [candidate for candidate in waiting if candidate.library in libraries.paths]
        if context.lease.is_lost:
            why = losses.why_skipped("while it was measured")
            done += [CandidateResult(candidate.candidate, "skipped", why) for candidate in present]
        try:
            if len(present) > len(done):
                problems = {str(candidate.problem_id): candidate.problem for candidate in present}
                candidates = [
                    TaskCandidate(
                        candidate.candidate,
                        str(candidate.problem_id),
                        candidate.schedule,
                        str(libraries.paths[candidate.library]),
                        candidate.verified,
                    )
                    for candidate in present
                ]
                run_task(context, "measure", problems, candidates, best, done, ending)
        except InfrastructureError:
            # What came before the machine failed is no worse for it.
            if done and context.cancel.reason != "lost":
                _record(context, present, done, libraries)
            raise
    # A step that is stopped keeps what there is, unless another has the task by now.
    if context.cancel.reason == "lost" or not done:
        context.check()
    _record(context, present, done, libraries)


def run_task(
    context: StepContext,
    kind: TaskKind,
    problems: Mapping[str, Mapping[str, Any]],
    candidates: Sequence[TaskCandidate],
    best: Mapping[int, float],
    done: list[CandidateResult],
    cancel: threading.Event,
) -> Outcome:
    """In a child under the limits of measuring; `done` gets each result. Raises GpuGone, InfrastructureError."""
    settings, device = context.settings, context.device
    engine = Engine(
        settings.gpu_module,
        device,
        locks=settings.gpu_lock_dir,
        cache=settings.data_dir / "gpu-cache",
        processes=context.processes,
        limits=settings.limits("measure"),
        seconds=settings.measure_seconds,
        seed=context.fresh_seed,
    )
    best_us = {str(problem): us for problem, us in best.items()}
    outcome = engine.run(kind, problems, candidates, best_us, done.append, cancel=cancel)
    count = len(done) if kind == "measure" else len(candidates)
    log.info("%s: %d of %d candidates in %.1f s on %s", kind, count, len(candidates), outcome.wall_seconds, device.name)
    return outcome


def _record(
    context: StepContext, present: Sequence[ToMeasure], done: Sequence[CandidateResult], libraries: "Libraries"
) -> None:
    """What is found stands from the first transaction on, also where the task was cancelled meanwhile. Raises
    LostLease."""
    by_candidate = {result.candidate: result for result in done}
    results = [
        _measured(candidate, by_candidate[candidate.candidate])
        for candidate in present
        if candidate.candidate in by_candidate
    ]
    plans, device_class = gpu_plans(), context.device.name
    with context.database.write() as session:
        record_measured(session, context.lease, results, driver=context.device.driver, plans=plans)
    next_steps = forget_libraries(context, libraries)
    next_steps += context.in_parts(lambda session: apply_measured_verdicts(session, results, device_class, plans))
    try:
        with context.database.write() as session:
            most = context.settings.max_attempts
            again = complete_measured(session, context.lease, results, plans=plans, max_attempts=most)
        context.wake((), again)
    except LostLease as lost:  # no job needs the rest any more
        log.debug("%s", lost)
    context.publish_steps(next_steps)


@dataclass
class Libraries:
    """Files by blob digest; `lost`: why a digest has none."""

    paths: dict[str, Path] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)


def fetch_libraries(blobs: BlobStore, digests: Iterable[str], folder: Path) -> Libraries:
    """Write each library into the folder, checked against its digest. Raises what the store raises where it is away."""
    libraries = Libraries()
    for digest in dict.fromkeys(digests):
        try:
            data = blobs.get(digest)
        except (BlobMissing, BlobCorrupt) as error:
            libraries.lost[digest] = str(error)
            continue
        path = folder / f"{digest}.so"
        path.write_bytes(data)
        path.chmod(0o500)
        libraries.paths[digest] = path
    return libraries


def forget_libraries(context: StepContext, libraries: Libraries) -> list[NextStep]:
    """Those whose bytes are lost; returns the problems that continue."""
    next_steps: list[NextStep] = []
    for digest, why in libraries.lost.items():
        next_steps += context.in_parts(partial(forget_group_library, digest=digest))
        log.warning("a group's library sha256:%s cannot be loaded: %s", digest, why)
    return next_steps


def _measured(candidate: ToMeasure, result: CandidateResult) -> Measured:
    return Measured(
        problem_id=candidate.problem_id,
        operator=candidate.operator,
        candidate=candidate.candidate,
        code_digest=candidate.code_digest,
        verdict=result.verdict,
        message=result.message or None,
        details=result.details,
        measurement=result.measurement,
        verify=StageSeconds(wall=result.verify_wall, cpu=result.verify_cpu),
        measure=StageSeconds(wall=result.measure_wall, cpu=result.measure_cpu),
    )


def compare(context: StepContext) -> None:
    """Time the finalists of the task's problem against each other; one that is wrong or does not run is out."""
    with context.database.read() as session:
        problem = load_problem(session, int(context.lease.ref))
        stored = candidates_of_problem(session, problem.id) if problem else []
    if problem is None:
        raise GiveUp(f"problem {context.lease.ref} does not exist")
    chosen = _contenders(problem, stored)
    outcome: Outcome | None = None
    with context.processes.private_folder("compare") as folder:
        # A candidate without its library is not compared: the finish step builds what it publishes anew.
        libraries = fetch_libraries(
            context.blobs, (contender.library for contender in chosen if contender.library is not None), folder
        )
        candidates = [
            TaskCandidate(contender.candidate, context.lease.ref, contender.schedule, str(path), verified=True)
            for contender in chosen
            if (path := libraries.paths.get(contender.library or "")) is not None
        ]
        if candidates:
            times = [contender.measured_us for contender in chosen if contender.measured_us is not None]
            best = {problem.id: min(times)} if times else {}
            outcome = run_task(
                context, "compare", {context.lease.ref: problem.problem}, candidates, best, [], context.cancel
            )
    context.check()
    results = [result for result in outcome.results if result.verdict != "ok"] if outcome else []
    wrong = [
        CandidateVerdict(problem.id, result.candidate, result.verdict, result.message, details=result.details)
        for result in results
    ]
    comparison: dict[str, Any] | None = None
    if outcome is not None and (comparison := outcome.comparisons.get(context.lease.ref)) is not None:
        rest = without(Comparison.model_validate(comparison), [contender.candidate for contender in wrong])
        comparison = rest.model_dump(mode="json") if rest.contenders else None
    spent = StageSeconds(wall=outcome.wall_seconds, cpu=outcome.cpu_seconds) if outcome else StageSeconds()
    next_steps = forget_libraries(context, libraries)
    next_steps += context.in_parts(lambda session: invalidate_contenders(session, context.lease, wrong))
    with context.database.write() as session:
        following = record_compared(session, context.lease, comparison, measure=spent)
    context.wake((), following)
    context.publish_steps([*next_steps, *following])


def _contenders(problem: JobProblem, stored: Sequence[StoredCandidate]) -> list[StoredCandidate]:
    """The finalists, by the times that candidates were measured to take alone."""
    kind = operator(problem.operator)
    parsed = kind.parse(problem.problem)
    by_id = {candidate.candidate: candidate for candidate in stored if candidate.verdict == "ok"}
    right = [
        (kind.candidate(parsed, Schedule.of(candidate.schedule)), candidate.measured_us)
        for candidate in by_id.values()
        if candidate.measured_us is not None
    ]
    return [by_id[name] for name in finalists(kind, right)]
