"""Finish: rank what was proved right, as measured or as predicted, build each point of the Pareto front alone, publish
the record."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from codegen.generator import generator
from codegen.targets import target as find_target
from codegen.verified import verified_label
from cukiln.types import FrontEntry, Imported, Launch, RunnerUp, StageSeconds, VendorResult, WinnerRecord
from storage.blobs import require_blobs
from storage.candidates import StoredCandidate, candidates_of_problem
from storage.database import Session
from storage.errors import BlobMissing
from storage.front import merge_front, pareto, ranked_by, thinned
from storage.imports import imported_by, refuse_candidate
from storage.jobs import JobStatus, job_state
from storage.libraries import Library
from storage.problems import FinishedProblem, JobProblem, finish_problem, load_problem
from storage.record_parts import imported_part, own_part, publish_imported, publish_own
from storage.searches import merge_searches, search_entry
from workers.build_winner import WinnerNotBuilt, plan_launch
from workers.limits import process_limits
from workers.rank_measured import Timed, is_whole, runner_up
from workers.steps.context import GiveUp, HandBack, StepContext
from workers.steps.known_front import measured_under, still_in_front
from workers.steps.phases import placed
from workers.steps.progress import publish_problems, publish_progress
from workers.steps.rank import Measured, Ranked, rank, verdict_of, write_predictions
from workers.stopwatch import Stopwatch
from workers.winner_library import winner_library

log = logging.getLogger("cukiln.finish")

MOST_POINTS = 8  # of a front that are built: each costs about one CPU second. Fronts seen have 1 to 7 points
MOST_BUILDS = 16  # that a finish tries, failures included, once there is a winner


@dataclass(frozen=True)
class Built:
    """A candidate with its own library and how it is called. `cpu_seconds`: what building it cost now."""

    ranked: Ranked
    library: Library
    launch: Launch
    cpu_seconds: float


class FoundWrong(Exception):
    """What was to be published is not right any more."""


def finish(context: StepContext) -> None:
    """Choose and publish the winners of the item's problem, or say why it has none."""
    with context.database.read() as session:
        problem = load_problem(session, int(context.claim.ref))
        stored = candidates_of_problem(session, problem.id) if problem else []
        job = job_state(session, problem.job_id) if problem else None
        imported = imported_by(session, problem.job_id) if problem else None
    if problem is None or job is None:
        raise GiveUp(f"problem {context.claim.ref} does not exist")
    ranked, measured = rank(problem, stored)
    write_predictions(context.database, ranked)
    if not ranked:
        _fail(context, problem, problem.error or _why_none(problem, stored))
        return
    stopwatch = Stopwatch()
    built, whole = _build_front(context, problem, ranked)
    if not built:
        _fail(context, problem, _why_not_built(context, problem, len(ranked)))
        return
    spent = StageSeconds(wall=stopwatch.read().wall, cpu=sum(one.cpu_seconds for one in built))
    phases = placed(context.phases, context.since_claim)
    entries = [_entry(one, imported) for one in built]
    covered = [
        search_entry(
            problem.search,
            generator(problem.operator),
            job.workspace_limit_bytes,
            deterministic=job.deterministic,
            whole=whole and _compared_whole(ranked, measured),
            measured=measured_under(entries[0]),
        )
    ]
    if _cut_short(problem, stored, measured):
        covered = []
    lost = _lost_blobs(context, problem.key, imported)
    context.check()
    # Writers take turns, so nothing comes between reading the record and replacing it.
    with context.database.write() as session:
        _refuse_found_wrong(session, problem, entries)
        _require_files(session, entries)
        winner = _publish(context, session, problem, job, entries, covered, lost, imported, measured)
        finished = finish_problem(
            session, context.claim, winner=winner, error=None, extra_seconds={"compile": spent}, phases=phases
        )
    _tell(context, problem, finished)


def _refuse_found_wrong(session: Session, problem: JobProblem, entries: Sequence[FrontEntry]) -> None:
    """Raises FoundWrong where an entry was found wrong while it was built: another attempt chooses among the rest."""
    again = candidates_of_problem(session, problem.id, [entry.candidate for entry in entries])
    right = {one.candidate for one in again if verdict_of(one) == "ok"}
    for entry in entries:
        if entry.candidate not in right:
            raise FoundWrong(f"candidate {entry.candidate} was found wrong while its library was built")


def _require_files(session: Session, entries: Sequence[FrontEntry]) -> None:
    """A library that was found, and not built now, may have been removed since. Raises HandBack: it is built then."""
    try:
        require_blobs(session, [digest for entry in entries for digest in entry.blobs])
    except BlobMissing as error:
        log.warning("%s: it is built again", error)
        raise HandBack from error


def _cut_short(problem: JobProblem, stored: Sequence[StoredCandidate], measured: Measured | None) -> bool:
    """Whether a spent budget ended the search, also where it ended the lowering: the next job looks at the rest. Nor is
    a search done whose best were not compared: the next job has all it needs but that."""
    not_compared = measured is not None and measured.comparison is None
    return problem.error is not None or any(one.verdict == "skipped" for one in stored) or not_compared


def _compared_whole(ranked: Sequence[Ranked], measured: Measured | None) -> bool:
    if measured is None:
        return True
    alone = [replace(one.point, us=one.stored.measured_us or one.point.us) for one in ranked]
    return is_whole(alone, measured.times)


def _build_front(context: StepContext, problem: JobProblem, ranked: Sequence[Ranked]) -> tuple[list[Built], bool]:
    """The candidates to publish, each built alone, fastest first; and whether they are the whole front.

    A candidate that cannot be published as it was judged gives way to those that it beat. At most MOST_POINTS are
    built; and once one is, at most MOST_BUILDS are tried. Where the best were compared on a GPU, the others, whose
    times come from other runs, are looked at only when one of the compared cannot be published.
    """
    everyone = {one.candidate.id: one for one in ranked}
    left = {name: one for name, one in everyone.items() if one.timed is not None and one.timed.compared} or everyone
    refused: set[str] = set()
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
            refused.add(missing[0])
            left = {name: other for name, other in everyone.items() if name not in refused}
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
        # Its verdict and its times are of other code. One nvcc gives equal code alone and in a group; what was measured
        # elsewhere and imported may have been compiled by another.
        words = (
            f"built here its code is {library.code_digest[:16]}, but {(one.stored.code_digest or '?')[:16]} was "
            "judged: another nvcc made that, and its verdict and times say nothing about this code"
        )
        log.warning("candidate %s %s", one.candidate.id, words)
        with context.database.write() as session:
            refuse_candidate(session, problem.id, one.candidate.id, words)
        return None
    return Built(one, library, launch, cpu_seconds)


def _entry(built: Built, imported: Imported | None) -> FrontEntry:
    best, library = built.ranked, built.library
    proof = best.stored.proof
    assert proof is not None, "only what was proved right is ranked"
    return FrontEntry(
        candidate=best.candidate.id,
        schedule=best.candidate.schedule.as_dict(),
        kernel=best.candidate.kernel.id,
        so_sha256=library.library,
        cubin_sha256=library.cubin,
        source_sha256=library.source,
        ptx_sha256=library.ptx,
        sass_sha256=library.sass,
        code_digest=library.code_digest,
        toolchain=library.toolchain,
        launch=built.launch,
        workspace_bytes=built.launch.workspace_bytes,
        deterministic=best.point.deterministic,
        # CPU verdicts belong to the slice, and the library was built from the very slice that was judged; those of a
        # GPU belong to the code, which is the judged one (see `_build`).
        verified="gpu" if proof.venue == "gpu" else verified_label(best.candidate.kernel.operator),
        # How it was proved right: seeds, extents, errors against their bounds.
        verdict={"venue": proof.venue, "plan_version": proof.plan_version, **proof.details},
        resources=library.resources,
        predicted_us=best.prediction.us,
        prediction=best.prediction.as_dict(),
        measured_us=best.timed.us if best.timed is not None else None,
        measurement=best.timed.measurement if best.timed is not None else None,
        measured_on=best.timed.measured_on if best.timed is not None else None,
        imported=imported,
    )


def _publish(
    context: StepContext,
    session: Session,
    problem: JobProblem,
    job: JobStatus,
    entries: Sequence[FrontEntry],
    covered: list[dict[str, Any]],
    lost: set[str],
    imported: Imported | None,
    measured: Measured | None = None,
) -> str:
    """Merge the entries into the problem's record, or into an import's part of it; returns the best candidate that the
    job allows.

    `lost`: blobs that are gone, with which the record's entries that name them go too (see `still_in_front`).
    `measured`: on a GPU.
    """
    known = _known_part(session, problem.key, imported)
    kept = still_in_front(session, known, entries, lost) if known else []
    front = merge_front(kept, entries, measured.counts_as() if measured is not None else None)
    second, vendor = _beside(front[0], known, measured)
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
        runner_up=second,
        vendor=vendor,
        searches=merge_searches(searches, covered),
        updated_at=context.database.clock.now(),
    )
    if imported is None:
        publish_own(session, record, context.claim.token)
    else:
        publish_imported(session, imported.id, record, context.claim.token)
    # What is new is within the job's policy, and so is whatever beats it; but measurements beat every prediction.
    return next(iter(record.usable(job.workspace_limit_bytes, job.deterministic)), front[0]).candidate


def _beside(
    best: FrontEntry, known: WinnerRecord | None, measured: Measured | None
) -> tuple[RunnerUp | None, VendorResult | None]:
    """Who came second, and the vendor's time: of the run that measured the best one, which may be an older one."""
    if measured is None or best.measured_us is None:
        return None, None
    now = measured.times.get(best.candidate)
    if now is not None and now.measurement == best.measurement:
        return runner_up(best.candidate, now, measured.times, measured.comparison), measured.vendor
    before = Timed(best.measured_us, best.measured_us, compared=False, measurement=best.measurement)
    found = [runner_up(best.candidate, before, measured.times, None)]
    if known is not None and known.front[0].candidate == best.candidate:
        found.append(known.runner_up)
    second = min((one for one in found if one is not None), key=lambda one: one.us, default=None)
    return second, known.vendor if known is not None else None


def _known_part(session: Session, key: str, imported: Imported | None) -> WinnerRecord | None:
    return own_part(session, key) if imported is None else imported_part(session, imported.id, key)


def _lost_blobs(context: StepContext, key: str, imported: Imported | None) -> set[str]:
    """What its front names and nobody can fetch any more. Looked for before the write transaction: it takes a
    look at files."""
    with context.database.read() as session:
        known = _known_part(session, key, imported)
    return context.blobs.missing(digest for old in known.front for digest in old.blobs) if known else set()


def _why_not_built(context: StepContext, problem: JobProblem, count: int) -> str:
    """With the words of a candidate that was refused, where one was."""
    with context.database.read() as session:
        stored = candidates_of_problem(session, problem.id)
    words = next((one.message for one in stored if one.verdict == "skipped" and one.message), None)
    return f"none of the {count} right candidates can be built alone as it was judged" + (f": {words}" if words else "")


def _why_none(problem: JobProblem, stored: Sequence[StoredCandidate]) -> str:
    """How the candidates fell, and the words of one of each kind."""
    return f"none of {len(stored)} candidates was proved right: {_counts(stored)}"


def _counts(stored: Sequence[StoredCandidate]) -> str:
    """By verdict, each with an example."""
    counts = Counter(verdict_of(one) for one in stored)
    words = [(verdict_of(one), one.message or (one.proof.message if one.proof else None)) for one in stored]
    examples = {verdict: message for verdict, message in words if message}
    return ", ".join(
        f"{count} {verdict}" + (f" (for example: {examples[verdict]})" if verdict in examples else "")
        for verdict, count in counts.most_common()
    )


def _fail(context: StepContext, problem: JobProblem, error: str) -> None:
    with context.database.write() as session:
        finished = finish_problem(session, context.claim, winner=None, error=error)
    _tell(context, problem, finished)


def _tell(context: StepContext, problem: JobProblem, finished: FinishedProblem) -> None:
    publish_problems(context, [problem.id])
    publish_progress(context)
    if finished.job_state is not None:
        context.publish("state", {"state": finished.job_state}, job_id=finished.job_id)
