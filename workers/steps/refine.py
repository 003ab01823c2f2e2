"""Refine: of a problem's candidates, which were all screened, the best are compiled in full and judged anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from codegen.search import Search
from cukiln.types import StageSeconds
from storage.builds import NewBuild
from storage.candidates import candidates_of_problem
from storage.database import Session
from storage.device_classes import is_predicted
from storage.jobs import job_state
from storage.problems import load_problem
from storage.screening import record_refined
from storage.wanted_builds import NewGroup, RecordedPlan
from workers.choose_winner import pareto, thinned
from workers.steps.context import GiveUp, StepContext
from workers.steps.progress import publish_progress
from workers.steps.rank import Ranked, rank, write_predictions
from workers.steps.wanted_builds import WantedBuild, record_wanted
from workers.stopwatch import Stopwatch


def refine(context: StepContext) -> None:
    """Choose among the item's problem's screened candidates, and give the best their builds, in one transaction."""
    stopwatch = Stopwatch()
    with context.database.read() as session:
        problem = load_problem(session, int(context.claim.ref))
        stored = candidates_of_problem(session, problem.id) if problem else []
        job = job_state(session, problem.job_id) if problem else None
    if problem is None:
        raise GiveUp(f"problem {context.claim.ref} does not exist")
    at_most = Search.model_validate(problem.search).screening
    if at_most is None:
        raise GiveUp(f"problem {problem.name} asks for no screening")
    ranked, _ = rank(problem, stored, screened=True)
    toolchain = context.toolchain.digest
    builds = {
        one.candidate.id: WantedBuild.of(one.candidate.kernel, problem.target, toolchain)
        for one in best_screened(ranked, at_most)
    }
    chosen = {candidate: one.new.id for candidate, one in builds.items()}
    spent = stopwatch.read()

    def record(session: Session, new: Mapping[str, NewBuild], groups: Sequence[NewGroup]) -> RecordedPlan:
        write_predictions(session, ranked)
        return record_refined(
            session,
            context.claim,
            chosen,
            new,
            groups,
            spent=StageSeconds(wall=spent.wall, cpu=spent.cpu),
            plan_version=context.plan_version,
            gpu_plan_version=context.gpu_plan_version,
            drivers=context.drivers(session),
        )

    to_measure = frozenset() if is_predicted(problem.device_class) else frozenset(chosen.values())
    record_wanted(context, {one.new.id: one for one in builds.values()}, to_measure, job, record)
    publish_progress(context)


def best_screened(ranked: Sequence[Ranked], at_most: int) -> list[Ranked]:
    """At most that many, fastest first: the front over time, workspace and determinism, those of its points that
    requests would miss most; then the fastest of the others."""
    front = {point.candidate for point in thinned(pareto(one.point for one in ranked), at_most)}
    in_order = sorted(ranked, key=lambda one: one.candidate.id not in front)  # stable: the fastest stay first
    chosen = {one.candidate.id for one in in_order[:at_most]}
    return [one for one in ranked if one.candidate.id in chosen]
