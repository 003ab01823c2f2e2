"""Finish: rank what was proved right, build each point of the Pareto front alone, publish the record."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from codegen.generator import generator
from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.predict import Prediction, predict
from codegen.ptxas_report import Resources
from codegen.schedule import Schedule
from codegen.targets import target as find_target
from codegen.verified import verified_label
from cukiln.types import FrontEntry, Launch, StageSeconds, WinnerRecord
from storage.candidates import Predicted, StoredCandidate, candidates_of_problem, set_predictions
from storage.database import Session
from storage.jobs import JobStatus, job_state
from storage.libraries import Library
from storage.problems import FinishedProblem, JobProblem, finish_problem, load_problem
from storage.searches import merge_searches, search_entry
from storage.verdicts import best_proofs
from storage.winners import get_winners, publish_winner
from workers.build_winner import WinnerNotBuilt, plan_launch
from workers.choose_winner import Point, merge_front, pareto, ranked_by, thinned
from workers.limits import process_limits
from workers.steps.context import GiveUp, StepContext
from workers.steps.progress import publish_problems, publish_progress
from workers.stopwatch import Stopwatch
from workers.winner_library import winner_library

log = logging.getLogger("cukiln.finish")

MOST_POINTS = 8  # of a front that are built: each costs about one CPU second. Fronts seen have 1 to 7 points
MOST_BUILDS = 16  # that a finish tries, failures included, once there is a winner


@dataclass(frozen=True)
class Ranked:
    """A candidate that was proved right, with its estimate and what it is chosen by."""

    stored: StoredCandidate
    candidate: Candidate
    prediction: Prediction
    point: Point


@dataclass(frozen=True)
class Built:
    """A candidate with its own library and how it is called. `cpu_seconds`: what building it cost now."""

    ranked: Ranked
    library: Library
    launch: Launch
    cpu_seconds: float


def finish(context: StepContext) -> None:
    """Choose and publish the winners of the item's problem, or say why it has none."""
    with context.database.read() as session:
        problem = load_problem(session, int(context.claim.ref))
        stored = candidates_of_problem(session, problem.id) if problem else []
        job = job_state(session, problem.job_id) if problem else None
    if problem is None or job is None:
        raise GiveUp(f"problem {context.claim.ref} does not exist")
    ranked = _rank(context, problem, [one for one in stored if one.verdict == "ok"])
    if not ranked:
        _fail(context, problem, problem.error or _why_none(stored))
        return
    stopwatch = Stopwatch()
    built, whole = _build_front(context, problem, ranked)
    if not built:
        _fail(context, problem, f"none of the {len(ranked)} right candidates compiles alone")
        return
    spent = StageSeconds(wall=stopwatch.read().wall, cpu=sum(one.cpu_seconds for one in built))
    covered = [
        search_entry(
            problem.search,
            generator(problem.operator),
            job.workspace_limit_bytes,
            deterministic=job.deterministic,
            whole=whole,
        )
    ]
    if any(one.verdict == "skipped" for one in stored):
        covered = []  # a spent budget cut the search short: the next job looks at the rest
    entries = [_entry(context, one) for one in built]
    lost = _lost_blobs(context, problem.key)
    context.check()
    # Writers take turns, so nothing comes between reading the record and replacing it.
    with context.database.write() as session:
        winner = _publish(context, session, problem, job, entries, covered, lost)
        finished = finish_problem(session, context.claim, winner=winner, error=None, extra_seconds={"compile": spent})
    _tell(context, problem, finished)


def _rank(context: StepContext, problem: JobProblem, right: Sequence[StoredCandidate]) -> list[Ranked]:
    """Fastest prediction first; predictions are written to the candidates' rows."""
    kind = operator(problem.operator)
    parsed, target = kind.parse(problem.problem), find_target(problem.target)
    found = []
    for stored in right:
        candidate = kind.candidate(parsed, Schedule.of(stored.schedule))
        prediction = predict(candidate, Resources.from_dict(stored.resources or {}), target)
        point = Point(
            candidate.id,
            prediction.us,
            kind.cost(parsed, candidate.schedule).workspace_bytes,
            kind.deterministic(candidate.kernel),
        )
        found.append(Ranked(stored, candidate, prediction, point))
    with context.database.write() as session:
        set_predictions(
            session,
            [Predicted(problem.id, one.candidate.id, one.prediction.us, one.prediction.as_dict()) for one in found],
        )
    return sorted(found, key=lambda one: (one.prediction.us, one.candidate.id))


def _build_front(context: StepContext, problem: JobProblem, ranked: Sequence[Ranked]) -> tuple[list[Built], bool]:
    """The candidates to publish, each built alone, fastest first; and whether they are the whole front.

    A candidate that cannot be published as it was judged gives way to those that it beat. At most MOST_POINTS are
    built; and once one is, at most MOST_BUILDS are tried.
    """
    left = {one.candidate.id: one for one in ranked}
    built: dict[str, Built] = {}
    tried = 0
    while True:
        front = pareto(one.point for one in left.values())
        wanted = thinned(front, MOST_POINTS)
        missing = [point.candidate for point in wanted if point.candidate not in built]
        if not missing or (built and tried >= MOST_BUILDS):
            published = [built[point.candidate] for point in front if point.candidate in built]
            return published, len(published) == len(front)
        tried += 1
        one = _build(context, problem, left[missing[0]])
        if one is None:
            del left[missing[0]]
        else:
            built[missing[0]] = one


def _build(context: StepContext, problem: JobProblem, one: Ranked) -> Built | None:
    """A candidate's library with the code that was judged, and its launch; None where that cannot be had."""
    target = find_target(problem.target)
    limits = process_limits(context.settings.compile_limits)
    try:
        library, cpu_seconds = winner_library(context, one.candidate, target)
        launch = plan_launch(one.candidate, context.toolchain, context.processes, limits, context.cancel)
    except WinnerNotBuilt as error:
        log.warning("%s", error)
        return None
    if library.code_digest != one.stored.code_digest:
        # Its verdict and its prediction are of other code. Never seen: nvcc gives equal code alone and in a group.
        log.warning("candidate %s built alone has other code than the one that was judged", one.candidate.id)
        return None
    return Built(one, library, launch, cpu_seconds)


def _entry(context: StepContext, built: Built) -> FrontEntry:
    best, library = built.ranked, built.library
    return FrontEntry(
        candidate=best.candidate.id,
        schedule=best.candidate.schedule.as_dict(),
        kernel=best.candidate.kernel.id,
        so_sha256=library.library,
        cubin_sha256=library.cubin,
        source_sha256=library.source,
        code_digest=library.code_digest,
        toolchain=library.toolchain,
        launch=built.launch,
        workspace_bytes=built.launch.workspace_bytes,
        deterministic=best.point.deterministic,
        # CPU verdicts belong to the slice, and the library was built from the very slice that was judged.
        verified=verified_label(best.candidate.kernel.operator),
        verdict=_proof(context, best),
        resources=library.resources,
        predicted_us=best.prediction.us,
        prediction=best.prediction.as_dict(),
        measured_us=None,
    )


def _proof(context: StepContext, best: Ranked) -> dict[str, Any]:
    """How the winner was proved right: venue, seeds, extents, errors against their bounds."""
    with context.database.read() as session:
        subject = (best.stored.slice, best.stored.code_digest)
        proof = best_proofs(session, [subject]).get(subject)
    if proof is None:
        raise GiveUp(f"candidate {best.candidate.id} is called right, but its verdict is gone")
    return {"venue": proof.venue, "plan_version": proof.plan_version, **proof.details}


def _publish(
    context: StepContext,
    session: Session,
    problem: JobProblem,
    job: JobStatus,
    entries: Sequence[FrontEntry],
    covered: list[dict[str, Any]],
    lost: set[str],
) -> str:
    """Merge the entries into the problem's record by compare-and-set; returns the best candidate that the job allows.

    `lost`: blobs that are gone, with which the record's entries that name them go too.
    """
    known = get_winners(session, [problem.key]).get(problem.key)
    kept = [old for old in known.front if lost.isdisjoint(old.blobs)] if known else []
    front = merge_front(kept, entries)
    # Without a point of the front its search's result is not known any more, whatever else it left.
    searches = known.searches if known and len(kept) == len(known.front) else []
    record = WinnerRecord(
        key=problem.key,
        revision=known.revision if known else 0,
        operator=problem.operator,
        problem=problem.problem,
        target=problem.target,
        device_class=problem.device_class,
        ranked_by=ranked_by(front),
        front=front,
        searches=merge_searches(searches, covered),
        updated_at=context.database.clock.now(),
    )
    publish_winner(session, record, expected_revision=record.revision, attempt=context.claim.token)
    # What is new is within the job's policy, and so is whatever beats it; but measurements beat every prediction.
    return next(iter(record.usable(job.workspace_limit_bytes, job.deterministic)), front[0]).candidate


def _lost_blobs(context: StepContext, key: str) -> set[str]:
    """What a record's front names and nobody can fetch any more. Looked for before the write transaction: it takes a
    look at files."""
    with context.database.read() as session:
        known = get_winners(session, [key]).get(key)
    return context.blobs.missing(digest for old in known.front for digest in old.blobs) if known else set()


def _why_none(stored: Sequence[StoredCandidate]) -> str:
    """How the candidates fell, and the words of one of each kind."""
    counts = Counter(one.verdict for one in stored)
    examples = {one.verdict: one.message for one in stored if one.message}
    parts = [
        f"{count} {verdict}" + (f" (for example: {examples[verdict]})" if verdict in examples else "")
        for verdict, count in counts.most_common()
    ]
    return f"none of {len(stored)} candidates was proved right: {', '.join(parts)}"


def _fail(context: StepContext, problem: JobProblem, error: str) -> None:
    with context.database.write() as session:
        finished = finish_problem(session, context.claim, winner=None, error=error)
    _tell(context, problem, finished)


def _tell(context: StepContext, problem: JobProblem, finished: FinishedProblem) -> None:
    publish_problems(context, [problem.id])
    publish_progress(context)
    if finished.job_state is not None:
        context.publish("state", {"state": finished.job_state}, job_id=finished.job_id)
