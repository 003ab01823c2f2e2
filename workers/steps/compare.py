"""Compare: the few best candidates of a problem take turns on the GPU, with the vendor's library between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from codegen.operators import operator
from codegen.schedule import Schedule
from cukiln.types import Comparison, StageSeconds
from storage.candidates import StoredCandidate, candidates_of_problem
from storage.front import Point
from storage.measurements import WrongContender, condemn_contenders, record_compared
from storage.problems import JobProblem, load_problem
from workers.gpu.measure_on_gpu import Outcome
from workers.gpu.task import TaskCandidate
from workers.group_libraries import fetch_libraries
from workers.rank_measured import contenders, without
from workers.steps.context import GiveUp, StepContext
from workers.steps.measure import forget_libraries, gpu_task, run_task
from workers.steps.progress import tell


def compare(context: StepContext) -> None:
    """Time the contenders of the item's problem against each other; whoever is found wrong on the way, or cannot
    be run, is out."""
    with context.database.read() as session:
        problem = load_problem(session, int(context.claim.ref))
        stored = candidates_of_problem(session, problem.id) if problem else []
    if problem is None:
        raise GiveUp(f"problem {context.claim.ref} does not exist")
    chosen = _contenders(problem, stored)
    found = _Found()
    with context.processes.private_folder("compare") as folder:
        # Who has lost its library is not compared: the finish step builds whoever it publishes anew.
        libraries = fetch_libraries(context.blobs, (one.library for one in chosen if one.library is not None), folder)
        candidates = [
            TaskCandidate(one.candidate, 0, one.schedule, str(path), proven=True)
            for one in chosen
            if (path := libraries.paths.get(one.library or "")) is not None
        ]
        if candidates:
            task = gpu_task(context, "compare", [(problem.operator, problem.problem)], candidates, _best(chosen))
            found = _found(run_task(context, task, []))
    context.check()
    judged = forget_libraries(context, libraries)
    judged += context.in_parts(lambda session: condemn_contenders(session, context.claim, found.wrong))
    with context.database.write() as session:
        following = record_compared(session, context.claim, found.comparison, measure=found.spent)
    context.wake((), following)
    tell(context, [*judged, *following])


@dataclass(frozen=True)
class _Found:
    """What a comparison came to."""

    comparison: dict[str, Any] | None = None
    wrong: Sequence[WrongContender] = ()
    spent: StageSeconds = field(default_factory=StageSeconds)


def _found(outcome: Outcome) -> _Found:
    wrong = [
        WrongContender(one.candidate, one.verdict, one.message, one.details)
        for one in outcome.results
        if one.verdict != "ok"
    ]
    spent = StageSeconds(wall=outcome.wall_seconds, cpu=outcome.cpu_seconds)
    return _Found(_kept(outcome.comparison, [one.candidate for one in wrong]), wrong, spent)


def points_of(problem: JobProblem, measured: Sequence[StoredCandidate]) -> list[Point]:
    """What measured candidates are chosen by, with the times that they were measured to take alone."""
    kind = operator(problem.operator)
    parsed = kind.parse(problem.problem)
    found = []
    for one in measured:
        if one.measured_us is None:
            continue
        candidate = kind.candidate(parsed, Schedule.of(one.schedule))
        workspace = kind.cost(parsed, candidate.schedule).workspace_bytes
        found.append(Point(one.candidate, one.measured_us, workspace, kind.deterministic(candidate.kernel)))
    return found


def _contenders(problem: JobProblem, stored: Sequence[StoredCandidate]) -> list[StoredCandidate]:
    by_id = {one.candidate: one for one in stored if one.verdict == "ok"}
    return [by_id[point.candidate] for point in contenders(points_of(problem, list(by_id.values())))]


def _best(chosen: Sequence[StoredCandidate]) -> Mapping[int, float]:
    times = [one.measured_us for one in chosen if one.measured_us is not None]
    return {0: min(times)} if times else {}


def _kept(comparison: dict[str, Any] | None, wrong: Sequence[str]) -> dict[str, Any] | None:
    """The comparison without those that are wrong; None where nobody is left in it."""
    if comparison is None:
        return None
    kept = without(Comparison.model_validate(comparison), wrong)
    return kept.model_dump(mode="json") if kept.contenders else None
