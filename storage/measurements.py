"""Measuring on GPUs: what a group's item is to prove and time, what it found, and how the best compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, func, select, tuple_, update

from cukiln.types import StageSeconds
from storage.database import Session, clock_of
from storage.device_classes import asks_predicted
from storage.errors import LostClaim
from storage.items import Claim, complete, go_on_alone, hold
from storage.judge import JUDGED_AT_ONCE, LIVE, Judged, finish_judged, give_verdicts, note_lost, of_problems
from storage.judge_gpu import Finding, condemn, write_findings
from storage.judging_work import add_judging, unjudged
from storage.new_items import group_of_ref
from storage.pending_builds import MAX_ATTEMPTS
from storage.record_parts import withdraw_code
from storage.rows import chunks, core, insert_new, one_of
from storage.seconds import add_seconds
from storage.tables import BuildRow, CandidateRow, ItemRow, JobProblemRow, MeasurementRow, VerdictRow
from storage.verdicts import GPU, NewVerdict, known_verdicts, write_verdicts, wrong_codes

FINDINGS = frozenset({"incorrect", "runtime_error", "run_timeout"})
PROOFS = frozenset({"ok"}) | FINDINGS
"""Verdicts that are remembered of the code. Others (`skipped`) say nothing about it."""


@dataclass(frozen=True)
class ToMeasure:
    """`problem` is canonical, `library` the blob digest of a library that holds the kernel. `proven`: its code has
    passed the reduced test plan on a GPU before."""

    problem_id: int
    operator: str
    problem: dict[str, Any]
    candidate: str
    schedule: dict[str, Any]
    build: str
    library: str
    code_digest: str
    proven: bool


@dataclass(frozen=True)
class Measured:
    """What became of one of `candidates_to_measure`. `measurement`: `cukiln.types.Measurement` as JSON; given exactly
    where the verdict is ok. The seconds are of this candidate alone."""

    problem_id: int
    candidate: str
    code_digest: str
    verdict: str
    message: str | None
    details: Mapping[str, Any]
    measurement: dict[str, Any] | None
    verify: StageSeconds
    measure: StageSeconds


@dataclass(frozen=True)
class WrongContender:
    """A candidate that did not stand in a comparison, though it had been called right before. `skipped` says nothing
    about its code."""

    candidate: str
    verdict: str
    message: str
    details: Mapping[str, Any]


def candidates_to_measure(session: Session, ref: str, device_class: str, plan_version: str) -> list[ToMeasure]:
    """The unjudged candidates of live problems on the device class, in any job, whose build the item's group made.

    By problem, then by candidate. A candidate that several jobs wait for is there once: its result counts for all.
    """
    rows = session.execute(
        select(
            JobProblemRow.id.label("problem_id"),
            JobProblemRow.operator,
            JobProblemRow.problem,
            CandidateRow.candidate,
            CandidateRow.schedule,
            BuildRow.id.label("build"),
            BuildRow.library,
            BuildRow.code_digest,
        )
        .select_from(BuildRow)
        .join(CandidateRow, CandidateRow.build == BuildRow.id)
        .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
        .where(BuildRow.group_id == group_of_ref(ref), BuildRow.state == "ok", BuildRow.library.is_not(None))
        .where(BuildRow.code_digest.is_not(None), CandidateRow.verdict.is_(None))
        .where(JobProblemRow.device_class == device_class, JobProblemRow.state.in_(LIVE))
        .order_by(JobProblemRow.id, CandidateRow.candidate)
    ).all()
    proofs = known_verdicts(session, {row.code_digest for row in rows}, GPU, plan_version)
    once = {(row.candidate, row.code_digest): row for row in reversed(rows)}
    proven = {digest for digest, proof in proofs.items() if proof.verdict == "ok"}
    return [ToMeasure(**row._mapping, proven=row.code_digest in proven) for row in reversed(once.values())]


def best_measured(session: Session, problem_ids: Iterable[int]) -> dict[int, float]:
    """The best time so far, in microseconds, of each of the problems that has one."""
    found: dict[int, float] = {}
    for ids in chunks(set(problem_ids)):
        rows = session.execute(
            select(CandidateRow.job_problem_id, func.min(CandidateRow.measured_us))
            .where(CandidateRow.job_problem_id.in_(ids), CandidateRow.verdict == "ok")
            .where(CandidateRow.measured_us.is_not(None))
            .group_by(CandidateRow.job_problem_id)
        )
        found.update((problem_id, us) for problem_id, us in rows if us is not None)
    return found


def record_measured(
    session: Session, claim: Claim, results: Sequence[Measured], *, driver: str, plan_version: str
) -> None:
    """Remember verdicts and times, and add the seconds; `judge_results` comes next. What was found for an item that was
    cancelled meanwhile is kept: it is as true of the code as before. Raises `LostClaim` where another has the item, and
    `ValueError` for a result that is right and without times, or the reverse."""
    token, state = session.execute(select(ItemRow.token, ItemRow.state).where(ItemRow.id == claim.item_id)).one()
    if token != claim.token or state not in ("claimed", "cancelled"):
        raise LostClaim(claim.kind, claim.ref, claim.token)
    if torn := [one.candidate for one in results if (one.verdict == "ok") != (one.measurement is not None)]:
        raise ValueError(f"{claim.kind} {claim.ref}: right and without times, or the reverse: {', '.join(torn)}")
    _remember(session, results, str(claim.target), driver, plan_version)
    add_seconds(session, _spent(results))


def _remember(session: Session, results: Sequence[Measured], device_class: str, driver: str, plan_version: str) -> None:
    """What outlives the job: verdicts on the code, and times, which replace those that are known. No winner record
    answers any more with code that was found wrong."""
    write_verdicts(session, _proofs(results), GPU, plan_version)
    _write_measurements(session, results, device_class, driver, plan_version)
    withdraw_code(session, wrong_codes(session, {one.code_digest for one in results}))


def judge_results(
    session: Session, results: Sequence[Measured], device_class: str, plan_version: str
) -> tuple[list[Judged], bool]:
    """Write each result to candidates of live problems of the class that it speaks about, in whichever job: to a part
    of them. One that is wrong condemns its code, and with it every candidate of live problems on a GPU that has it.
    Returns the problems that go on, and whether there may be more candidates: call it again."""
    touched = _judge(session, results, device_class, JUDGED_AT_ONCE)
    codes = {one.code_digest for one in results}
    touched += condemn(session, codes, plan_version, JUDGED_AT_ONCE - len(touched))
    return finish_judged(session, touched), len(touched) >= JUDGED_AT_ONCE


def complete_measured(
    session: Session,
    claim: Claim,
    results: Sequence[Measured],
    *,
    plan_version: str,
    max_attempts: int = MAX_ATTEMPTS,
) -> list[Judged]:
    """Complete a measure item whose results are judged. It waits again where something is left, which is returned: the
    results were a part, or others came while it was held. Where there were none, that is an attempt; `ValueError` in
    the last one: it would go round for ever. Raises `LostClaim`."""
    complete(session, claim)
    problems = {one.problem_id for one in results}
    waiting = StageSeconds(wall=claim.waited_seconds / max(1, len(problems)))
    add_seconds(session, {one: {"queue": waiting} for one in problems})
    return _measure_the_rest(session, claim, bool(results), plan_version, max_attempts)


def condemn_contenders(session: Session, claim: Claim, wrong: Sequence[WrongContender]) -> tuple[list[Judged], bool]:
    """Those that were found wrong after they had been timed: they were judged right, so their code has a verdict, which
    becomes the finding, under whatever test plan, for a part of the candidates with that code. One that was skipped was
    only not compared. Returns the problems that go on, and whether there may be more candidates: call it again. Raises
    `LostClaim`."""
    hold(session, claim)
    problem_id = int(claim.ref)
    found = {one.candidate: one for one in wrong if one.verdict in FINDINGS}
    rows = session.execute(
        select(CandidateRow.candidate, BuildRow.code_digest)
        .join(BuildRow, BuildRow.id == CandidateRow.build, isouter=True)
        .where(CandidateRow.job_problem_id == problem_id, CandidateRow.candidate.in_(list(found)))
    ).all()
    for candidate, code_digest in rows:
        one = found[candidate]
        session.execute(
            update(core(VerdictRow))
            .where(VerdictRow.subject == code_digest, VerdictRow.venue == GPU, VerdictRow.verdict == "ok")
            .values(
                verdict=one.verdict,
                message=one.message,
                details=dict(one.details),
                created_at=clock_of(session).now(),
            )
        )
    codes = {code_digest for _, code_digest in rows if code_digest}
    withdraw_code(session, wrong_codes(session, codes))
    write_findings(session, [Finding(problem_id, name, found[name].verdict, found[name].message) for name, _ in rows])
    touched = condemn(session, codes, None, JUDGED_AT_ONCE)
    return finish_judged(session, touched), len(touched) >= JUDGED_AT_ONCE


def record_compared(
    session: Session, claim: Claim, comparison: dict[str, Any] | None, *, measure: StageSeconds
) -> list[Judged]:
    """Complete a compare item with a `cukiln.types.Comparison` as JSON, None where there was nothing to compare.
    Returns the problems that go on. Raises `LostClaim`."""
    complete(session, claim)
    problem_id = int(claim.ref)
    session.execute(
        update(core(JobProblemRow)).where(core(JobProblemRow).c.id == problem_id).values(comparison=comparison)
    )
    add_seconds(
        session,
        {problem_id: {"measure": measure, "queue": StageSeconds(wall=claim.waited_seconds)}},
    )
    return finish_judged(session, [problem_id])


def forget_group_library(session: Session, digest: str) -> tuple[list[Judged], bool]:
    """For a library whose bytes were lost: its kernels are compiled again by the next job that measures them.

    What waits to be measured now is skipped, a part of it; returns the problems that go on, and whether there may be
    more candidates: call it again.
    """
    build = core(BuildRow)
    held = build.c.library == digest
    standing = session.scalars(select(build.c.id).where(held, build.c.state == "ok")).all()
    message = f"the library sha256:{digest} that holds its kernel was lost: submit the problem again"
    skipped = dict.fromkeys(standing, ("skipped", message))
    touched = give_verdicts(session, skipped, of_problems(~asks_predicted()), JUDGED_AT_ONCE)
    more = len(touched) >= JUDGED_AT_ONCE
    if not more:
        session.execute(update(build).where(held).values(library=None))
    return finish_judged(session, touched), more


def _proofs(results: Sequence[Measured]) -> list[NewVerdict]:
    """One verdict per code: of those that share it, the first that is wrong, else the first."""
    by_code: dict[str, Measured] = {}
    for one in results:
        if one.verdict in PROOFS:
            known = by_code.setdefault(one.code_digest, one)
            if known.verdict == "ok" and one.verdict != "ok":
                by_code[one.code_digest] = one
    return [
        NewVerdict(digest, one.verdict, one.message, one.details, one.verify.wall, one.verify.cpu)
        for digest, one in by_code.items()
    ]


def _write_measurements(
    session: Session, results: Sequence[Measured], device_class: str, driver: str, plan_version: str
) -> None:
    table = core(MeasurementRow).c
    place = {"device_class": device_class, "driver": driver, "plan_version": plan_version}
    rows = {
        (one.code_digest, one.candidate): {
            "code_digest": one.code_digest,
            "candidate": one.candidate,
            **place,
            "median_us": one.measurement["median_us"],
            "measurement": one.measurement,
            "created_at": clock_of(session).now(),
        }
        for one in results
        if one.measurement is not None
    }
    for keys in chunks(rows, 1000):
        old = one_of((table.code_digest, table.candidate), keys)
        session.execute(
            delete(core(MeasurementRow)).where(old, table.device_class == device_class, table.driver == driver)
        )
    insert_new(session, MeasurementRow, list(rows.values()))


def _judge(session: Session, results: Sequence[Measured], device_class: str, most: int) -> list[int]:
    """Write the results to at most so many unjudged candidates; the problem of each."""
    by_code = {(one.candidate, one.code_digest): one for one in results}
    rows = session.execute(
        select(CandidateRow.job_problem_id, CandidateRow.candidate, BuildRow.code_digest)
        .join(BuildRow, BuildRow.id == CandidateRow.build)
        .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
        .where(tuple_(CandidateRow.candidate, BuildRow.code_digest).in_(list(by_code)), CandidateRow.verdict.is_(None))
        .where(JobProblemRow.device_class == device_class, JobProblemRow.state.in_(LIVE))
        .limit(most)
    )
    findings = []
    for problem_id, candidate, code_digest in rows:
        one = by_code[candidate, str(code_digest)]
        findings.append(Finding(problem_id, candidate, one.verdict, one.message, one.measurement))
        note_lost(session, [problem_id], one.message)
    return write_findings(session, findings)


def _spent(results: Sequence[Measured]) -> dict[int, dict[str, StageSeconds]]:
    """Seconds by problem and stage."""
    spent: dict[int, dict[str, StageSeconds]] = {}
    for one in results:
        mine = spent.setdefault(one.problem_id, {})
        for stage, more in (("verify", one.verify), ("measure", one.measure)):
            before = mine.get(stage, StageSeconds())
            mine[stage] = StageSeconds(wall=before.wall + more.wall, cpu=before.cpu + more.cpu)
    return spent


def _measure_the_rest(
    session: Session, claim: Claim, progress: bool, plan_version: str, max_attempts: int
) -> list[Judged]:
    device_class = str(claim.target)
    left = candidates_to_measure(session, claim.ref, device_class, plan_version)
    if left and not progress and claim.attempt >= max_attempts:
        raise ValueError(f"{claim.kind} {claim.ref}: no result for {', '.join(one.candidate for one in left[:3])}")
    again = add_judging(session, unjudged(session, {one.build for one in left}), device_class)
    if again and not progress:
        session.execute(update(ItemRow).where(ItemRow.id == claim.item_id).values(attempt=claim.attempt))
    if again and claim.is_alone:
        go_on_alone(session, claim)
    return [Judged(left[0].problem_id, "measure", device_class)] if again else []
