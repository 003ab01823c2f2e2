"""Refine: of a problem's candidates, which were all screened, the best are compiled in full and judged anew."""

from __future__ import annotations

from collections.abc import Sequence

from codegen.search import Search
from cukiln.types import StageSeconds
from storage.candidates import candidates_of_problem
from storage.problems import load_problem
from storage.screening import record_refined
from workers.choose_winner import pareto, thinned
from workers.steps.context import GiveUp, StepContext
from workers.steps.new_builds import new_build
from workers.steps.progress import publish_progress
from workers.steps.rank import Ranked, rank, write_predictions
from workers.stopwatch import Stopwatch


def refine(context: StepContext) -> None:
    """Choose among the item's problem's screened candidates, and give the best their builds, in one transaction."""
    stopwatch = Stopwatch()
    with context.database.read() as session:
        problem = load_problem(session, int(context.claim.ref))
        stored = candidates_of_problem(session, problem.id) if problem else []
    if problem is None:
        raise GiveUp(f"problem {context.claim.ref} does not exist")
    at_most = Search.model_validate(problem.search).screening
    if at_most is None:
        raise GiveUp(f"problem {problem.name} asks for no screening")
    ranked, _ = rank(problem, stored, screened=True)
    toolchain = context.toolchain.digest
    best = best_screened(ranked, at_most)
    builds = {one.candidate.id: new_build(one.candidate.kernel, problem.target, toolchain) for one in best}
    spent = stopwatch.read()
    with context.database.write() as session:
        write_predictions(session, ranked)
        followed = record_refined(
            session,
            context.claim,
            {candidate: build.id for candidate, build in builds.items()},
            {build.id: build for build in builds.values()},
            context.versions(session),
            spent=StageSeconds(wall=spent.wall, cpu=spent.cpu),
        )
    context.wake(followed.waiting, followed.judged)
    publish_progress(context)


def best_screened(ranked: Sequence[Ranked], at_most: int) -> list[Ranked]:
    """At most that many, fastest first: the front over time, workspace and determinism, those of its points that
    requests would miss most; then the fastest of the others."""
    front = {point.candidate for point in thinned(pareto(one.point for one in ranked), at_most)}
    in_order = sorted(ranked, key=lambda one: one.candidate.id not in front)  # stable: the fastest stay first
    chosen = {one.candidate.id for one in in_order[:at_most]}
    return [one for one in ranked if one.candidate.id in chosen]
