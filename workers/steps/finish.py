"""Finish: rank what was verified, build each point of the Pareto front alone, publish the record."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from codegen.plan.generator import generator
from codegen.targets import target as find_target
from codegen.text.render_group import verified_label
from cukiln.types import (
    FrontEntry,
    Imported,
    Launch,
    PtxMark,
    RunnerUp,
    StageSeconds,
    VendorResult,
    WinnerRecord,
)
from storage.blobs.blob_store import require_blobs
from storage.database.session import Session
from storage.entities.candidates import StoredCandidate, candidates_of_problem
from storage.entities.jobs import JobProblem, JobStatus, job_state, load_problem
from storage.entities.libraries import Library, wrong_ptx
from storage.entities.pareto_front import merge_front, pareto, ranked_by, thinned
from storage.entities.record_parts import imported_part, own_part, publish_imported, publish_own
from storage.entities.searches import MeasuredUnder, merge_searches, search_entry
from storage.entities.verdicts import wrong_codes
from storage.errors import BlobMissing
from storage.transfer.imports import imported_by
from storage.transitions.end_jobs import finish_problem
from workers.processes.stopwatch import Stopwatch
from workers.steps.context import GiveUp, HandBack, StepContext
from workers.steps.rank import (
    Measured,
    Ranked,
    Timed,
    is_whole,
    rank,
    runner_up,
    verdict_of,
    write_predictions,
)
from workers.steps.run_ptx import WRONG, PtxRuns, broken_promise, mark_of, refuse, verify_candidates, verify_winner
from workers.steps.winner_library import WinnerNotBuilt, plan_launch, winner_library

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
    sums: int  # `Target.tensor_sums`
    ptx: PtxMark | None


class FoundWrong(Exception):
    """What was to be published is not right any more."""


def finish(context: StepContext) -> None:
    """Choose and publish the winners of the task's problem, or say why it has none."""
    with context.database.read() as session:
        problem = load_problem(session, int(context.lease.ref))
        stored = candidates_of_problem(session, problem.id) if problem else []
        job = job_state(session, problem.job_id) if problem else None
        imported = imported_by(session, problem.job_id) if problem else None
    if problem is None or job is None:
        raise GiveUp(f"problem {context.lease.ref} does not exist")
    runs = PtxRuns(context, find_target(problem.target))
    stored, every_ptx = _without_refused(problem, job, stored, runs)
    ranked, measured = rank(problem, stored)
    write_predictions(context.database, ranked)
    if not ranked:
        _fail(context, problem, problem.error or _why_none(stored), runs)
        return
    stopwatch, before = Stopwatch(), runs.spent.wall
    built, whole = build_front(context, problem, ranked, runs)
    if not built:
        _fail(context, problem, _why_not_built(context, problem, ranked), runs)
        return
    wall = stopwatch.read().wall - (runs.spent.wall - before)
    compiled = StageSeconds(wall=wall, cpu=sum(build.cpu_seconds for build in built))
    phases = context.placed(context.phases)
    entries = [_entry(build, imported) for build in built]
    best_on = entries[0].measured_on  # None where its time was predicted
    covered = [
        search_entry(
            problem.search,
            generator(problem.operator),
            job.workspace_limit_bytes,
            deterministic=job.deterministic,
            whole=whole and (measured is None or _compared_whole(ranked, measured)),
            every_ptx=every_ptx,
            measured=MeasuredUnder(best_on.driver, entries[0].verdict.get("plan_version")) if best_on else None,
        )
    ]
    if is_cut_short(problem, stored, measured):
        covered = []
    lost = lost_blobs(context, problem.key, imported)
    context.check()
    # Writers take turns, so nothing comes between reading the record and replacing it.
    with context.database.write() as session:
        _refuse_found_wrong(session, problem, entries)
        _require_files(session, entries)
        winner = publish_front(context, session, problem, job, entries, covered, lost, imported, measured)
        spent = {"compile": compiled, **runs.take_spent()}
        ended = finish_problem(session, context.lease, winner=winner, error=None, extra_seconds=spent, phases=phases)
    _publish_end(context, problem, ended)


def _without_refused(
    problem: JobProblem, job: JobStatus, stored: list[StoredCandidate], runs: PtxRuns
) -> tuple[list[StoredCandidate], bool]:
    """The candidates after each of them was run from its PTX, and whether all were; as they are where the job does not
    ask for that."""
    if job.ptx != "all":
        return stored, False
    ranked, _ = rank(problem, stored)
    whole = verify_candidates(runs, problem, stored, ranked, job.deadline)
    with runs.context.database.read() as session:
        return candidates_of_problem(session, problem.id), whole


def _refuse_found_wrong(session: Session, problem: JobProblem, entries: Sequence[FrontEntry]) -> None:
    """Raises FoundWrong where an entry was found wrong while it was built: another attempt chooses among the rest."""
    again = candidates_of_problem(session, problem.id, [entry.candidate for entry in entries])
    right = {candidate.candidate for candidate in again if verdict_of(candidate) == "ok"}
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


def is_cut_short(problem: JobProblem, stored: Sequence[StoredCandidate], measured: Measured | None) -> bool:
    """Whether a budget ended the search or its lowering, or its best were not compared: the next job does the rest."""
    not_compared = measured is not None and measured.comparison is None
    return problem.error is not None or any(candidate.verdict == "skipped" for candidate in stored) or not_compared


def _compared_whole(ranked: Sequence[Ranked], measured: Measured) -> bool:
    alone = [replace(entry.point, us=entry.stored.measured_us or entry.point.us) for entry in ranked]
    return is_whole(alone, measured.times)


def build_front(
    context: StepContext, problem: JobProblem, ranked: Sequence[Ranked], runs: PtxRuns
) -> tuple[list[Built], bool]:
    """The candidates to publish, each built alone, fastest first; and whether they are the whole front.

    A candidate that cannot be published as it was verified gives way to those that it beat. At most MOST_POINTS are
    built; and once one is, at most MOST_BUILDS are tried. Where the best were compared on a GPU, the others, whose
    times come from other runs, are looked at only when one of the compared cannot be published.
    """
    by_id = {entry.candidate.id: entry for entry in ranked}
    left = {name: entry for name, entry in by_id.items() if entry.timed is not None and entry.timed.compared} or by_id
    refused: set[str] = set()
    built: dict[str, Built] = {}
    tried = 0
    while True:
        front = pareto(entry.point for entry in left.values())
        points = thinned(front, MOST_POINTS)
        missing = [point.candidate for point in points if point.candidate not in built]
        if not missing or (built and tried >= MOST_BUILDS):
            published = [built[point.candidate] for point in front if point.candidate in built]
            return published, len(published) == len(front)
        tried += 1
        build = _build(context, problem, left[missing[0]], runs)
        if build is None:
            refused.add(missing[0])
            left = {name: other for name, other in by_id.items() if name not in refused}
        else:
            built[missing[0]] = build


def _build(context: StepContext, problem: JobProblem, ranked: Ranked, runs: PtxRuns) -> Built | None:
    """A candidate's library with the code that was verified, and its launch; None where that cannot be had, or its PTX
    shows that it is wrong."""
    target = find_target(problem.target)
    limits = context.settings.limits("compile")
    try:
        library, cpu_seconds = winner_library(context, ranked.candidate, target)
        launch = plan_launch(ranked.candidate, context.toolchain, context.processes, limits, context.cancel)
    except WinnerNotBuilt as error:
        log.warning("%s", error)
        return None
    if library.code_digest != ranked.stored.code_digest:
        # Its verdict and its times are of other code. One nvcc gives equal code alone and in a group; what was measured
        # elsewhere and imported may have been compiled by another.
        message = (
            f"built here its code is {library.code_digest[:16]}, but {(ranked.stored.code_digest or '?')[:16]} was "
            "verified: another nvcc made that, and its verdict and times say nothing about this code"
        )
        refuse(context, problem, (ranked, message, "skipped"))
        return None
    verdict = verify_winner(runs, ranked.candidate, library)
    if verdict is not None and not verdict.is_published:
        refuse(context, problem, (ranked, WRONG.format(message=verdict.message), verdict.verdict))
        return None
    if (broken := broken_promise(verdict, ranked.stored.verification)) is not None:
        if context.settings.promises == "refuse":
            refuse(context, problem, (ranked, broken, "incorrect"))
            return None
        log.warning("candidate %s: %s", ranked.candidate.id, broken)
    return Built(ranked, library, launch, cpu_seconds, target.tensor_sums, mark_of(verdict, broken))


def _entry(built: Built, imported: Imported | None) -> FrontEntry:
    best, library = built.ranked, built.library
    verification = best.stored.verification
    assert verification is not None, "only what was verified as correct is ranked"
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
        # CPU verdicts belong to the kernel source, and the library was built from the very source that was verified;
        # those of a GPU belong to the code, which is the verified one (see `_build`).
        verified="gpu" if verification.venue == "gpu" else verified_label(best.candidate.kernel.operator, built.sums),
        # How it was verified: seeds, extents, errors against their bounds.
        verdict={**verification.details, "venue": verification.venue, "plan_version": verification.plan_version},
        ptx=built.ptx,
        resources=library.resources,
        predicted_us=best.prediction.us,
        prediction=best.prediction.as_dict(),
        measured_us=best.timed.us if best.timed is not None else None,
        measurement=best.timed.measurement if best.timed is not None else None,
        measured_on=best.timed.measured_on if best.timed is not None else None,
        imported=imported,
    )


def publish_front(
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

    `lost`: blobs that are gone, with which the record's entries that name them go too (see `_still_in_front`).
    `measured`: on a GPU.
    """
    previous = own_part(session, problem.key) if imported is None else imported_part(session, imported.id, problem.key)
    reusable = _still_in_front(session, previous, entries, lost) if previous else []
    front = merge_front(reusable, entries, measured.tie_adjusted_us() if measured is not None else None)
    second, vendor = _beside(front[0], previous, measured)
    # Without a point of the front its search's result is not known any more, whatever else it left.
    searches = previous.searches if previous and len(reusable) == len(previous.front) else []
    record = WinnerRecord(
        key=problem.key,
        revision=previous.revision if previous else 0,
        operator=problem.operator,
        problem=problem.problem,
        target=problem.target,
        emulates=find_target(problem.target).emulates,
        device_class=problem.device_class,
        cuda=context.settings.cuda,
        ranked_by=ranked_by(front),
        front=front,
        runner_up=second,
        vendor=vendor,
        searches=merge_searches(searches, covered),
        updated_at=context.database.clock.now(),
    )
    if imported is None:
        publish_own(session, record, context.lease.token)
    else:
        publish_imported(session, imported.id, record, context.lease.token)
    # What is new is within the job's policy, and so is whatever beats it; but measurements beat every prediction.
    return next(iter(record.usable(job.workspace_limit_bytes, job.deterministic)), front[0]).candidate


def _still_in_front(
    session: Session, previous: WinnerRecord, entries: Sequence[FrontEntry], lost: set[str]
) -> list[FrontEntry]:
    """The record's entries whose files are there, whose code no GPU and whose PTX no run found wrong, and of the same
    driver."""
    wrong = wrong_codes(session, [old.code_digest for old in previous.front])
    wrong |= wrong_ptx(session, [old.ptx_sha256 for old in previous.front if old.ptx_sha256])
    now = entries[0].measured_on
    return [
        old
        for old in previous.front
        if lost.isdisjoint(old.blobs)
        and wrong.isdisjoint((old.code_digest, old.ptx_sha256))
        and (now is None or (old.measured_on is not None and old.measured_on.driver == now.driver))
    ]


def _beside(
    best: FrontEntry, previous: WinnerRecord | None, measured: Measured | None
) -> tuple[RunnerUp | None, VendorResult | None]:
    """The runner-up, and the vendor's time: of the run that measured the best one, which may be an older one."""
    if measured is None or best.measured_us is None:
        return None, None
    now = measured.times.get(best.candidate)
    if now is not None and now.measurement == best.measurement:
        return runner_up(best.candidate, now, measured.times, measured.comparison), measured.vendor
    before = Timed(best.measured_us, best.measured_us, compared=False, measurement=best.measurement)
    runners_up = [runner_up(best.candidate, before, measured.times, None)]
    if previous is not None and previous.front[0].candidate == best.candidate:
        runners_up.append(previous.runner_up)
    second = min((runner for runner in runners_up if runner is not None), key=lambda runner: runner.us, default=None)
    return second, previous.vendor if previous is not None else None


def lost_blobs(context: StepContext, key: str, imported: Imported | None) -> set[str]:
    """What its front names and the store lacks; looked for before the write transaction, as it looks at files."""
    with context.database.read() as session:
        previous = own_part(session, key) if imported is None else imported_part(session, imported.id, key)
    return context.blobs.missing(digest for old in previous.front for digest in old.blobs) if previous else set()


def _why_none(stored: Sequence[StoredCandidate]) -> str:
    """The candidates counted by verdict, each with the message of an example."""
    counts = Counter(verdict_of(candidate) for candidate in stored)
    messages = [
        (
            verdict_of(candidate),
            candidate.message or (candidate.verification.message if candidate.verification else None),
        )
        for candidate in stored
    ]
    examples = {verdict: message for verdict, message in messages if message}
    counted = ", ".join(
        f"{count} {verdict}" + (f" (for example: {examples[verdict]})" if verdict in examples else "")
        for verdict, count in counts.most_common()
    )
    return f"none of {len(stored)} candidates was verified as correct: {counted}"


def _why_not_built(context: StepContext, problem: JobProblem, ranked: Sequence[Ranked]) -> str:
    """With the message of a candidate that was refused, if one was."""
    names = {entry.candidate.id for entry in ranked}
    with context.database.read() as session:
        stored = [candidate for candidate in candidates_of_problem(session, problem.id) if candidate.candidate in names]
    refused = (candidate.message for candidate in stored if candidate.verdict != "ok" and candidate.message)
    why = "".join(f": {message}" for message in islice(refused, 1))
    return f"none of the {len(ranked)} correct candidates can be built alone with the code that was verified{why}"


def _fail(context: StepContext, problem: JobProblem, error: str, runs: PtxRuns) -> None:
    with context.database.write() as session:
        ended = finish_problem(session, context.lease, winner=None, error=error, extra_seconds=runs.take_spent())
    _publish_end(context, problem, ended)


def _publish_end(context: StepContext, problem: JobProblem, ended: str | None) -> None:
    context.publish_problems([problem.id])
    context.publish_progress()
    if ended is not None:
        context.publish("state", {"state": ended}, job_id=problem.job_id)
