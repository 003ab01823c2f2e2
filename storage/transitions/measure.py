"""Measuring on GPUs: what a task is to verify and time, its results, and the comparison of the best."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Row, func, select, tuple_

from codegen.identity import PlanVersions
from cukiln.types import StageSeconds
from storage.database.session import Session, clock_of
from storage.database.sql import asks_predicted, change, chunks, core, insert_new, one_of, remove, rows_among
from storage.database.tables import LIVE, BuildRow, CandidateRow, JobProblemRow, MeasurementRow, TaskRow, VerdictRow
from storage.entities.record_parts import withdraw_code
from storage.entities.stage_times import add_seconds
from storage.entities.task_kinds import group_of_ref
from storage.entities.verdicts import GPU, NewVerdict, write_verdicts, wrong_codes
from storage.errors import LostLease
from storage.queue.tasks import Lease, complete, continue_alone, require_lease
from storage.transitions.apply_verdicts import (
    VERDICTS_AT_ONCE,
    CandidateVerdict,
    NextStep,
    add_next_steps,
    add_verification,
    give_verdicts,
    invalidate,
    note_lost,
    of_problems,
    unverified,
    write_candidate_verdicts,
)
from storage.transitions.pending_builds import MAX_ATTEMPTS

FAILURES = frozenset({"incorrect", "runtime_error", "run_timeout"})
CONCLUSIVE = frozenset({"ok"}) | FAILURES
"""Verdicts that are stored of the code. Others (`skipped`) say nothing about it."""


ToMeasure = Row[Any]
"""Of `candidates_to_measure`. `problem` is canonical; `library`: a blob; `verified`: a GPU has verified its code by the
reduced plan before."""


@dataclass(frozen=True, kw_only=True)
class Measured(CandidateVerdict):
    """What became of one of `candidates_to_measure`; with a `measurement` exactly where the verdict is ok. The seconds
    are of this candidate alone."""

    operator: str
    code_digest: str
    verify: StageSeconds
    measure: StageSeconds


def candidates_to_measure(session: Session, ref: str, device_class: str, plans: PlanVersions) -> list[ToMeasure]:
    """The candidates without a verdict of live problems on the device class, in any job, whose build the group made.

    By problem, then by candidate. A candidate that several jobs wait for is there once: its result counts for all.
    """
    verdict = select(VerdictRow.subject).where(VerdictRow.subject == BuildRow.code_digest, VerdictRow.venue == GPU)
    verdict = verdict.where(VerdictRow.plan_version.in_(set(plans.values())))
    was_right, was_wrong = (
        verdict.where(its).exists() for its in (VerdictRow.verdict == "ok", VerdictRow.verdict != "ok")
    )
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
            (was_right & ~was_wrong).label("verified"),
        )
        .select_from(BuildRow)
        .join(CandidateRow, CandidateRow.build == BuildRow.id)
        .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
        .where(BuildRow.group_id == group_of_ref(ref), BuildRow.state == "ok", BuildRow.library.is_not(None))
        .where(BuildRow.code_digest.is_not(None), CandidateRow.verdict.is_(None))
        .where(JobProblemRow.device_class == device_class, JobProblemRow.state.in_(LIVE))
        .order_by(JobProblemRow.id, CandidateRow.candidate)
    ).all()
    once = {(row.candidate, row.code_digest): row for row in reversed(rows)}
    return list(reversed(once.values()))


def best_measured(session: Session, problem_ids: Iterable[int]) -> dict[int, float]:
    """The best time so far, in microseconds, of each of the problems that has one."""
    query = (
        select(CandidateRow.job_problem_id, func.min(CandidateRow.measured_us))
        .where(CandidateRow.verdict == "ok", CandidateRow.measured_us.is_not(None))
        .group_by(CandidateRow.job_problem_id)
    )
    return dict(rows_among(session, query, CandidateRow.job_problem_id, problem_ids))


def record_measured(
    session: Session, lease: Lease, results: Sequence[Measured], *, driver: str, plans: PlanVersions
) -> None:
    """Write verdicts and times (also for a task that was cancelled meanwhile), and add the seconds. Raises `LostLease`,
    and `ValueError` for a result that is right and without times, or the reverse."""
    token, state = session.execute(select(TaskRow.token, TaskRow.state).where(TaskRow.id == lease.task_id)).one()
    if token != lease.token or state not in ("leased", "cancelled"):
        raise LostLease(lease.kind, lease.ref, lease.token)
    if torn := [result.candidate for result in results if (result.verdict == "ok") != (result.measurement is not None)]:
        raise ValueError(f"{lease.kind} {lease.ref}: right and without times, or the reverse: {', '.join(torn)}")
    # What outlives the job: verdicts on the code, and times, which replace the stored ones.
    write_verdicts(session, _verdicts_on_code(results), GPU, plans)
    _write_measurements(session, results, str(lease.target), driver, plans)
    withdraw_code(session, wrong_codes(session, {result.code_digest for result in results}))
    add_seconds(session, _spent(results))


def apply_measured_verdicts(
    session: Session, results: Sequence[Measured], device_class: str, plans: PlanVersions
) -> tuple[list[NextStep], bool]:
    """Write each result to some candidates of live problems of its class; a wrong one invalidates its code on every
    GPU. Returns the problems with a new task, and whether there may be more candidates: call it again."""
    touched = _apply_results(session, results, device_class, VERDICTS_AT_ONCE)
    codes = {result.code_digest for result in results}
    touched += invalidate(session, codes, plans, VERDICTS_AT_ONCE - len(touched))
    return add_next_steps(session, touched), len(touched) >= VERDICTS_AT_ONCE


def complete_measured(
    session: Session,
    lease: Lease,
    results: Sequence[Measured],
    *,
    plans: PlanVersions,
    max_attempts: int = MAX_ATTEMPTS,
) -> list[NextStep]:
    """Complete a measure task. It waits again, and is returned, where something is left: results were a part, or others
    came. Where there were no results, that is an attempt; `ValueError` in the last one. Raises `LostLease`."""
    complete(session, lease)
    problems = {result.problem_id for result in results}
    waiting = StageSeconds(wall=lease.waited_seconds / max(1, len(problems)))
    add_seconds(session, {id: {"queue": waiting} for id in problems})
    device_class = str(lease.target)
    left = candidates_to_measure(session, lease.ref, device_class, plans)
    if left and not results and lease.attempt >= max_attempts:
        names = ", ".join(candidate.candidate for candidate in left[:3])
        raise ValueError(f"{lease.kind} {lease.ref}: no result for {names}")
    again = add_verification(session, unverified(session, {candidate.build for candidate in left}), device_class)
    if again and not results:
        change(session, TaskRow, TaskRow.id == lease.task_id, attempt=lease.attempt)
    if again and lease.is_alone:
        continue_alone(session, lease)
    return [NextStep(left[0].problem_id, "measure", device_class)] if again else []


def invalidate_contenders(
    session: Session, lease: Lease, wrong: Sequence[CandidateVerdict]
) -> tuple[list[NextStep], bool]:
    """The code of candidates that failed in a comparison, though they were right before, gets the new verdict, under
    whatever plan; one that was skipped was only not compared. Returns what `apply_measured_verdicts` does. Raises
    `LostLease`."""
    require_lease(session, lease)
    problem_id = int(lease.ref)
    failed = {contender.candidate: contender for contender in wrong if contender.verdict in FAILURES}
    rows = session.execute(
        select(CandidateRow.candidate, BuildRow.code_digest)
        .join(BuildRow, BuildRow.id == CandidateRow.build, isouter=True)
        .where(CandidateRow.job_problem_id == problem_id, CandidateRow.candidate.in_(list(failed)))
    ).all()
    for candidate, code_digest in rows:
        contender = failed[candidate]
        was_right = (VerdictRow.subject == code_digest) & (VerdictRow.venue == GPU) & (VerdictRow.verdict == "ok")
        values = {"verdict": contender.verdict, "message": contender.message, "details": dict(contender.details)}
        change(session, VerdictRow, was_right, **values, created_at=clock_of(session).now())
    codes = {code_digest for _, code_digest in rows if code_digest}
    withdraw_code(session, wrong_codes(session, codes))
    write_candidate_verdicts(session, [failed[name] for name, _ in rows])
    touched = invalidate(session, codes, None, VERDICTS_AT_ONCE)
    return add_next_steps(session, touched), len(touched) >= VERDICTS_AT_ONCE


def record_compared(
    session: Session, lease: Lease, comparison: dict[str, Any] | None, *, measure: StageSeconds
) -> list[NextStep]:
    """Complete a compare task with a `Comparison` as JSON, if any; the problems with a new task. Raises `LostLease`."""
    complete(session, lease)
    problem_id = int(lease.ref)
    change(session, JobProblemRow, JobProblemRow.id == problem_id, comparison=comparison)
    add_seconds(session, {problem_id: {"measure": measure, "queue": StageSeconds(wall=lease.waited_seconds)}})
    return add_next_steps(session, [problem_id])


def forget_group_library(session: Session, digest: str) -> tuple[list[NextStep], bool]:
    """Of a lost library: the next job compiles its kernels anew, what waits is skipped. As
    `apply_measured_verdicts`."""
    held = BuildRow.library == digest
    standing = session.scalars(select(BuildRow.id).where(held, BuildRow.state == "ok")).all()
    message = f"the library sha256:{digest} that holds its kernel was lost: submit the problem again"
    skipped = dict.fromkeys(standing, ("skipped", message))
    touched = give_verdicts(session, skipped, of_problems(~asks_predicted()), VERDICTS_AT_ONCE)
    more = len(touched) >= VERDICTS_AT_ONCE
    if not more:
        change(session, BuildRow, held, library=None)
    return add_next_steps(session, touched), more


def _verdicts_on_code(results: Sequence[Measured]) -> list[NewVerdict]:
    """One verdict per code and operator: of those that share it, the first that is wrong, else the first."""
    by_code: dict[tuple[str, str], Measured] = {}
    for result in sorted(results, key=lambda result: result.verdict == "ok"):
        if result.verdict in CONCLUSIVE:
            by_code.setdefault((result.code_digest, result.operator), result)
    return [
        NewVerdict(
            digest,
            result.operator,
            result.verdict,
            result.message,
            result.details,
            result.verify.wall,
            result.verify.cpu,
        )
        for (digest, _), result in by_code.items()
    ]


def _write_measurements(
    session: Session, results: Sequence[Measured], device_class: str, driver: str, plans: PlanVersions
) -> None:
    table = core(MeasurementRow).c
    place = {"device_class": device_class, "driver": driver}
    rows = {
        (result.code_digest, result.candidate): {
            "code_digest": result.code_digest,
            "candidate": result.candidate,
            **place,
            "plan_version": plans[result.operator],
            "median_us": result.measurement["median_us"],
            "measurement": result.measurement,
            "created_at": clock_of(session).now(),
        }
        for result in results
        if result.measurement is not None
    }
    for keys in chunks(rows, 1000):
        old = one_of((table.code_digest, table.candidate), keys)
        remove(session, MeasurementRow, old, table.device_class == device_class, table.driver == driver)
    insert_new(session, MeasurementRow, list(rows.values()))


def _apply_results(session: Session, results: Sequence[Measured], device_class: str, most: int) -> list[int]:
    """Write the results to at most so many candidates without a verdict; the problem of each."""
    by_code = {(result.candidate, result.code_digest): result for result in results}
    rows = session.execute(
        select(CandidateRow.job_problem_id, CandidateRow.candidate, BuildRow.code_digest)
        .join(BuildRow, BuildRow.id == CandidateRow.build)
        .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
        .where(tuple_(CandidateRow.candidate, BuildRow.code_digest).in_(list(by_code)), CandidateRow.verdict.is_(None))
        .where(JobProblemRow.device_class == device_class, JobProblemRow.state.in_(LIVE))
        .limit(most)
    )
    verdicts = []
    for problem_id, candidate, code_digest in rows:
        result = by_code[candidate, str(code_digest)]
        verdicts.append(replace(result, problem_id=problem_id))
        note_lost(session, [problem_id], result.message)
    return write_candidate_verdicts(session, verdicts)


def _spent(results: Sequence[Measured]) -> dict[int, dict[str, StageSeconds]]:
    """Seconds by problem and stage."""
    spent: dict[int, dict[str, StageSeconds]] = {}
    for result in results:
        stages = spent.setdefault(result.problem_id, {})
        for stage, more in (("verify", result.verify), ("measure", result.measure)):
            stages[stage] = stages.get(stage, StageSeconds()) + more
    return spent
