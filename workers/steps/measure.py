"""Measure: the candidates of a group are verified on the GPU, then timed, while other groups still compile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from codegen.operators import operator
from cukiln.types import StageSeconds
from storage.blobs.blob_store import BlobStore
from storage.database.session import Clock
from storage.entities.jobs import last_deadline
from storage.errors import BlobCorrupt, BlobMissing, LostLease
from storage.queue import losses
from storage.transitions.apply_verdicts import NextStep
from storage.transitions.measure import (
    Measured,
    ToMeasure,
    apply_measured_verdicts,
    best_measured,
    candidates_to_measure,
    complete_measured,
    forget_group_library,
    record_measured,
)
from workers.gpu.lease import lease_file
from workers.gpu.measure_on_gpu import Outcome, run_gpu_task
from workers.gpu.task import CandidateResult, GpuTask, TaskCandidate, TaskKind
from workers.processes.processes import InfrastructureError
from workers.steps.context import Cancel, StepContext
from workers.steps.progress import tell

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
        waiting = candidates_to_measure(session, context.lease.ref, context.device.name, context.gpu_plans)
        waiting = waiting[: 1 if context.lease.is_alone else MOST_CANDIDATES]
        best = best_measured(session, {candidate.problem_id for candidate in waiting})
        deadline = last_deadline(session, context.lease.jobs)
    done: list[CandidateResult] = []
    ending = Ending(context.cancel, context.database.clock, deadline, done)
    with context.processes.private_folder("measure") as folder:
        libraries = fetch_libraries(context.blobs, (candidate.library for candidate in waiting), folder)
        present = [candidate for candidate in waiting if candidate.library in libraries.paths]
        if context.lease.is_lost:
            done += [_lost(candidate) for candidate in present]
        try:
            if len(present) > len(done):
                run_task(context, _task(context, present, libraries, best), done, ending)
        except InfrastructureError:
            # What came before the machine failed is no worse for it.
            if done and context.cancel.reason != "lost":
                _record(context, present, done, libraries)
            raise
    # A step that is stopped keeps what there is, unless another has the task by now.
    if context.cancel.reason == "lost" or not done:
        context.check()
    _record(context, present, done, libraries)


def gpu_task(
    context: StepContext,
    kind: TaskKind,
    problems: Sequence[tuple[str, Mapping[str, Any]]],
    candidates: Sequence[TaskCandidate],
    best_us: Mapping[int, float],
) -> GpuTask:
    """A task for this worker's device. `problems`: operator and canonical problem."""
    settings, device = context.settings, context.device
    return GpuTask(
        kind=kind,
        gpu=settings.gpu_module,
        device=device.uuid,
        lease=str(lease_file(settings.gpu_lock_dir, device.uuid)),
        operators={name: str(operator(name).folder) for name, _ in problems},
        seed=context.fresh_seed(),
        problems=tuple(problem for _, problem in problems),
        candidates=tuple(candidates),
        best_us=best_us,
        seconds=settings.measure_seconds,
    )


def run_task(
    context: StepContext, task: GpuTask, done: list[CandidateResult], cancel: threading.Event | None = None
) -> Outcome:
    """Run it in a child under the limits of measuring; `done` gets each result as it comes. `cancel`: that of the step
    unless given. Raises GpuGone, InfrastructureError."""
    outcome = run_gpu_task(
        task,
        context.processes,
        context.settings.limits("measure"),
        cache=context.settings.data_dir / "gpu-cache",
        cancel=cancel or context.cancel,
        on_result=done.append,
    )
    log.info(
        "%s: %d of %d candidates in %.1f s on %s",
        task.kind,
        len(done) if task.kind == "measure" else len(task.candidates),
        len(task.candidates),
        outcome.wall_seconds,
        context.device.name,
    )
    return outcome


def _task(
    context: StepContext, present: Sequence[ToMeasure], libraries: Libraries, best: Mapping[int, float]
) -> GpuTask:
    """One task, problem by problem: the child keeps the inputs and the reference of one at a time."""
    problems = {candidate.problem_id: (candidate.operator, candidate.problem) for candidate in present}
    index_of = {problem_id: index for index, problem_id in enumerate(problems)}
    candidates = [
        TaskCandidate(
            candidate=candidate.candidate,
            problem=index_of[candidate.problem_id],
            schedule=candidate.schedule,
            library=str(libraries.paths[candidate.library]),
            proven=candidate.proven,
        )
        for candidate in present
    ]
    best_us = {index: best[problem_id] for problem_id, index in index_of.items() if problem_id in best}
    return gpu_task(context, "measure", list(problems.values()), candidates, best_us)


def _record(
    context: StepContext, present: Sequence[ToMeasure], done: Sequence[CandidateResult], libraries: Libraries
) -> None:
    """What is found stands from the first transaction on. What waits for a library that is lost is skipped, and
    compiled by the next job. Of a task that was cancelled meanwhile, what was found is kept all the same. Raises
    LostLease."""
    by_candidate = {result.candidate: result for result in done}
    results = [
        _measured(candidate, by_candidate[candidate.candidate])
        for candidate in present
        if candidate.candidate in by_candidate
    ]
    plans, device_class = context.gpu_plans, context.device.name
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
    tell(context, next_steps)


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


def _lost(candidate: ToMeasure) -> CandidateResult:
    why = losses.why_skipped("while it was measured")
    return CandidateResult(candidate.candidate, "skipped", why)


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
