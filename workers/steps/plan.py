"""Plan: problems become candidates, candidates share kernels, kernels that nobody has built become groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

from redis.exceptions import RedisError

from codegen.compile_model import FIXED_SECONDS, PRIOR, CompileModel
from codegen.group import MAX_SECONDS, group
from codegen.identity import build_id
from codegen.kernel import Candidate, Kernel
from codegen.lower import Lowered, lower
from codegen.operators import operator
from codegen.render_group import slice_digest
from codegen.search import Search
from codegen.targets import target as find_target
from storage.builds import known_builds
from storage.compile_models import idle_workers, load_model
from storage.database import Session
from storage.device_classes import is_predicted
from storage.errors import PlanOutdated
from storage.jobs import JobStatus, job_state
from storage.plans import (
    NewBuild,
    NewCandidate,
    NewGroup,
    PlannedProblem,
    RecordedPlan,
    problems_to_plan,
    record_plan,
)
from storage.problems import JobProblem
from workers import tickets
from workers.steps.context import StepContext
from workers.steps.progress import publish_problems, publish_progress
from workers.stopwatch import Stopwatch

RECORD_ATTEMPTS = 10  # each is outdated only by another job that was cancelled in the milliseconds before it
BUDGET_SHARE = 12  # a group is compiled, then verified in about twice that time, beside others: some end in a budget


def plan(context: StepContext) -> None:
    """Lower the item's problems, record candidates and groups in one transaction, write the groups' tickets."""
    with context.database.read() as session:
        problems = problems_to_plan(session, context.claim)
        status = job_state(session, problems[0].job_id) if problems else None
    planned: list[PlannedProblem] = []
    builds: dict[str, NewBuild] = {}
    kernels: dict[tuple[str, str], Kernel] = {}  # (build, target) -> kernel
    for problem in problems:
        context.check()
        stopwatch = Stopwatch()
        lowered = _lower(problem, status)
        distinct = dict.fromkeys(candidate.kernel for candidate in lowered.candidates)
        by_kernel = {kernel: _new_build(kernel, problem.target, context) for kernel in distinct}
        for kernel, build in by_kernel.items():
            builds[build.id] = build
            kernels[build.id, problem.target] = kernel
        planned.append(_planned(problem, lowered, by_kernel, stopwatch))

    to_measure = {
        candidate.build
        for problem, known in zip(problems, planned, strict=True)
        if not is_predicted(problem.device_class)
        for candidate in known.candidates
    }
    groups, recorded = _record(context, planned, builds, kernels, to_measure, _longest_group(status))
    for new_group in groups:
        context.enqueue("compile", new_group.target)
    for kind, target in recorded.waiting:
        context.enqueue(kind, target)
    for judged in recorded.judged:
        context.enqueue(judged.kind, judged.target)
    publish_problems(context, [problem.id for problem in problems])
    publish_progress(context)


def _record(
    context: StepContext,
    planned: Sequence[PlannedProblem],
    builds: Mapping[str, NewBuild],
    kernels: Mapping[tuple[str, str], Kernel],
    to_measure: Set[str],
    max_seconds: float,
) -> tuple[list[NewGroup], RecordedPlan]:
    """Group what nobody has built, or whose library is lost though it is to be measured, and write it all down; again
    where a build that was being made was given up meanwhile. Raises PlanOutdated where that does not end."""
    for attempt in range(RECORD_ATTEMPTS):
        context.check()
        with context.database.read() as session:
            known = known_builds(session, list(builds), with_library=to_measure)
            unknown = {place: kernel for place, kernel in kernels.items() if place[0] not in known}
            model = load_model(session, context.toolchain.digest) if unknown else PRIOR
            groups = _groups(context, session, unknown, model, max_seconds)
        told = {
            build: replace(builds[build], predicted_seconds=model.kernel_seconds(kernel))
            for (build, _), kernel in unknown.items()
        }
        try:
            with context.database.write() as session:
                recorded = record_plan(
                    session,
                    context.claim,
                    planned,
                    {**builds, **told},
                    groups,
                    plan_version=context.plan_version,
                    gpu_plan_version=context.gpu_plan_version,
                    drivers=context.drivers(session),
                )
        except PlanOutdated:
            if attempt + 1 == RECORD_ATTEMPTS:
                raise
            continue
        return groups, recorded
    raise AssertionError("unreachable: the last attempt returns or raises")


def _lower(problem: JobProblem, job: JobStatus | None) -> Lowered:
    parsed, target = operator(problem.operator).parse(problem.problem), find_target(problem.target)
    limit, deterministic = (job.workspace_limit_bytes, job.deterministic) if job else (None, False)
    return lower(parsed, target, Search.model_validate(problem.search), limit, deterministic=deterministic)


def _new_build(kernel: Kernel, target: str, context: StepContext) -> NewBuild:
    digest = slice_digest(kernel)
    build = build_id(kernel.id, digest, context.toolchain.digest, target)
    return NewBuild(build, kernel.id, digest, kernel.to_json(), PRIOR.kernel_seconds(kernel))


def _planned(
    problem: JobProblem, lowered: Lowered, builds: Mapping[Kernel, NewBuild], stopwatch: Stopwatch
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
    )


def _new_candidate(candidate: Candidate, builds: Mapping[Kernel, NewBuild]) -> NewCandidate:
    return NewCandidate(candidate.id, candidate.schedule.as_dict(), candidate.kernel.id, builds[candidate.kernel].id)


def _longest_group(job: JobStatus | None) -> float:
    """Predicted seconds that a group may take. A job with a budget gets groups so small that the first are judged long
    before its end, though each costs the fixed seconds of a file again."""
    if job is None or job.budget_seconds is None:
        return MAX_SECONDS
    return min(MAX_SECONDS, max(2 * FIXED_SECONDS, job.budget_seconds / BUDGET_SHARE))


def _groups(
    context: StepContext,
    session: Session,
    kernels: Mapping[tuple[str, str], Kernel],
    model: CompileModel,
    max_seconds: float,
) -> list[NewGroup]:
    """Groups of one target each, those that take longest first, sized by what compiling took before."""
    found: list[NewGroup] = []
    for target in sorted({target for _, target in kernels}):
        build_of = {kernel: build for (build, of), kernel in kernels.items() if of == target}
        for members in group(
            list(build_of),
            workers=idle_workers(session, context.claim, target, _workers(context, target)),
            model=model,
            max_seconds=max_seconds,
            max_bytes=context.settings.group_memory_bytes,
        ):
            found.append(
                NewGroup(
                    builds=tuple(build_of[kernel] for kernel in members),
                    target=target,
                    toolchain=context.toolchain.digest,
                    predicted_seconds=model.seconds(members),
                )
            )
    return found


def _workers(context: StepContext, target: str) -> int:
    """Live compile workers of the target, on whichever machine; where none is known, as many as the settings say."""
    try:
        live = len(tickets.live_workers(context.redis, tickets.queue_name(tickets.COMPILE, target)))
    except RedisError:
        live = 0
    return live or context.settings.workers
