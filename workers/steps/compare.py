"""Compare: the few best candidates of a problem take turns on the GPU, with the vendor's library between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from codegen.operators import operator
from codegen.search.schedule import Schedule
from cukiln.types import Comparison, StageSeconds
from storage.entities.candidates import StoredCandidate, candidates_of_problem
from storage.entities.jobs import JobProblem, load_problem
from storage.entities.pareto_front import Point
from storage.transitions.measure import WrongContender, invalidate_contenders, record_compared
from workers.gpu.measure_on_gpu import Outcome
from workers.gpu.rank_measured import contenders, point_of, without
from workers.gpu.task import TaskCandidate
from workers.steps.context import GiveUp, StepContext
from workers.steps.measure import fetch_libraries, forget_libraries, gpu_task, run_task
from workers.steps.progress import tell


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
            TaskCandidate(contender.candidate, 0, contender.schedule, str(path), proven=True)
            for contender in chosen
            if (path := libraries.paths.get(contender.library or "")) is not None
        ]
        if candidates:
            task = gpu_task(context, "compare", [(problem.operator, problem.problem)], candidates, _best(chosen))
            outcome = run_task(context, task, [])
    context.check()
    results = [result for result in outcome.results if result.verdict != "ok"] if outcome else []
    wrong = [WrongContender(result.candidate, result.verdict, result.message, result.details) for result in results]
    comparison = _without_wrong(outcome.comparison if outcome else None, wrong)
    spent = StageSeconds(wall=outcome.wall_seconds, cpu=outcome.cpu_seconds) if outcome else StageSeconds()
    next_steps = forget_libraries(context, libraries)
    next_steps += context.in_parts(lambda session: invalidate_contenders(session, context.lease, wrong))
    with context.database.write() as session:
        following = record_compared(session, context.lease, comparison, measure=spent)
    context.wake((), following)
    tell(context, [*next_steps, *following])


def points_of(problem: JobProblem, measured: Sequence[StoredCandidate]) -> list[Point]:
    """What measured candidates are chosen by, with the times that they were measured to take alone."""
    kind = operator(problem.operator)
    parsed = kind.parse(problem.problem)
    return [
        point_of(kind, kind.candidate(parsed, Schedule.of(stored.schedule)), stored.measured_us)
        for stored in measured
        if stored.measured_us is not None
    ]


def _contenders(problem: JobProblem, stored: Sequence[StoredCandidate]) -> list[StoredCandidate]:
    by_id = {candidate.candidate: candidate for candidate in stored if candidate.verdict == "ok"}
    return [by_id[point.candidate] for point in contenders(points_of(problem, list(by_id.values())))]


def _best(chosen: Sequence[StoredCandidate]) -> Mapping[int, float]:
    times = [contender.measured_us for contender in chosen if contender.measured_us is not None]
    return {0: min(times)} if times else {}


def _without_wrong(comparison: dict[str, Any] | None, wrong: Sequence[WrongContender]) -> dict[str, Any] | None:
    """None where no candidate is left in it."""
    if comparison is None:
        return None
    rest = without(Comparison.model_validate(comparison), [contender.candidate for contender in wrong])
    return rest.model_dump(mode="json") if rest.contenders else None
