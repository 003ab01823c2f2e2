"""Plan: problems become candidates, candidates share kernels, kernels that nobody has built become groups."""

from __future__ import annotations

from collections.abc import Mapping

from codegen.kernel import Candidate, Kernel
from codegen.lower import Lowered
from codegen.search import Search
from storage.device_classes import is_predicted
from storage.jobs import job_state
from storage.plans import NewCandidate, PlannedProblem, problems_to_plan, record_plan
from storage.problems import JobProblem, candidates_of_job
from workers.steps.context import StepContext
from workers.steps.lowering import builds_of, lower_problem
from workers.steps.progress import publish_problems, publish_progress
from workers.steps.wanted_builds import WantedBuild, record_wanted
from workers.stopwatch import Stopwatch


def plan(context: StepContext) -> None:
    """Lower the item's problems, record candidates and groups in one transaction, write the groups' tickets."""
    with context.database.read() as session:
        problems = problems_to_plan(session, context.claim)
        status = job_state(session, problems[0].job_id) if problems else None
        candidates = candidates_of_job(session, problems[0].job_id) if problems else 0
    planned: list[PlannedProblem] = []
    wanted: dict[str, WantedBuild] = {}
    for problem in problems:
        context.check()
        stopwatch = Stopwatch()
        lowered = lower_problem(context, problem, status, candidates)
        candidates += len(lowered.candidates)
        kernels = dict.fromkeys(candidate.kernel for candidate in lowered.candidates)
        screening = _is_screened(problem, len(kernels))
        toolchain = context.toolchain.for_screening() if screening else context.toolchain
        digest = toolchain.digest
        by_kernel = builds_of(context, kernels, problem.target, digest)
        wanted |= {one.new.id: one for one in by_kernel.values()}
        planned.append(_planned(problem, lowered, by_kernel, screening, stopwatch))

    to_measure = {
        candidate.build
        for problem, known in zip(problems, planned, strict=True)
        if not is_predicted(problem.device_class)
        for candidate in known.candidates
    }
    record_wanted(
        context,
        wanted,
        to_measure,
        status,
        lambda session, builds, groups: record_plan(
            session,
            context.claim,
            planned,
            builds,
            groups,
            plan_version=context.plan_version,
            gpu_plan_version=context.gpu_plan_version,
            drivers=context.drivers(session),
        ),
    )
    publish_problems(context, [problem.id for problem in problems])
    publish_progress(context)


def _is_screened(problem: JobProblem, kernels: int) -> bool:
    """Whether the problem's kernels are compiled fast before the best are compiled in full. Where there are no more of
    them than that, nothing would be saved."""
    best = Search.model_validate(problem.search).screening
    return best is not None and kernels > best


def _planned(
    problem: JobProblem,
    lowered: Lowered,
    builds: Mapping[Kernel, WantedBuild],
    screening: bool,
    stopwatch: Stopwatch,
) -> PlannedProblem:
    spent = stopwatch.read()
    return PlannedProblem(
        id=problem.id,
        candidates=[_new_candidate(candidate, builds) for candidate in lowered.candidates],
        space_size=lowered.space_size,
        rejections={
            rule: {"count": rejection.count, "example": rejection.example, "message": rejection.message}
            for rule, rejection in lowered.rejections.items()
        },
        lower_wall=spent.wall,
        lower_cpu=spent.cpu,
        error=lowered.why_empty,
        screening=screening,
    )


def _new_candidate(candidate: Candidate, builds: Mapping[Kernel, WantedBuild]) -> NewCandidate:
    build = builds[candidate.kernel].new.id
    return NewCandidate(candidate.id, candidate.schedule.as_dict(), candidate.kernel.id, build)
