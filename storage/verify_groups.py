"""Verifying a group on the CPU: which of its kernels, what was found, and what it took."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select, update

from cukiln.types import StageSeconds
from storage import losses
from storage.database import Session
from storage.device_classes import asks_predicted
from storage.group_rows import GroupKernel, kernels_of, load_group
from storage.items import Claim, complete, go_on_alone, hold
from storage.judge import JUDGED_AT_ONCE, LIVE, Judged, finish_judged, of_problems, skip_lost
from storage.judging_work import add_judging, unjudged
from storage.rows import core
from storage.seconds import Spent, shares
from storage.tables import BuildRow, CandidateRow, GroupRow, JobProblemRow
from storage.verdicts import CPU, NewVerdict, known_verdicts, write_verdicts


def builds_to_verify(session: Session, group_id: str, plan_version: str) -> list[GroupKernel]:
    """The group's kernels that compiled, that a candidate without a GPU waits for, and that have no verdict of the CPU;
    in render order."""
    group = load_group(session, group_id)
    if group is None:
        return []
    rows = session.execute(
        select(BuildRow.id, BuildRow.slice)
        .join(CandidateRow, CandidateRow.build == BuildRow.id)
        .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
        .where(BuildRow.group_id == group_id, BuildRow.state == "ok", CandidateRow.verdict.is_(None))
        .where(JobProblemRow.state.in_(LIVE), asks_predicted())
        .distinct()
    )
    mine: dict[str, str] = dict(rows.all())
    known = known_verdicts(session, mine.values(), CPU, plan_version)
    return [kernel for kernel in kernels_of(group) if kernel.build in mine and mine[kernel.build] not in known]


def record_verdicts(session: Session, claim: Claim, verdicts: Sequence[NewVerdict], plan_version: str) -> None:
    """Remember what a verify item found. A kernel that was found wrong once is wrong: a finding replaces an earlier
    "ok", never the other way round. Raises `LostClaim`."""
    hold(session, claim)
    write_verdicts(session, verdicts, CPU, plan_version)


def skip_build(session: Session, claim: Claim, build: str) -> tuple[list[Judged], bool]:
    """Skip a part of the candidates that wait for the verdict of this build, which was lost again and again. Returns
    the problems that go on, and whether there may be more candidates: call it again. Raises `LostClaim`."""
    hold(session, claim)
    why = losses.why_skipped("while it was verified")
    touched = skip_lost(session, {build: why}, of_problems(asks_predicted()), JUDGED_AT_ONCE)
    go_on_alone(session, claim)
    return finish_judged(session, touched), len(touched) >= JUDGED_AT_ONCE


def verify_shares(session: Session, claim: Claim, asked: Sequence[GroupKernel], verify: StageSeconds) -> Spent:
    """What each problem that wants the item has spent on it: those that use what was `asked` to be proved. Where that
    was nothing, and only what was known was given to candidates, those that use any of the group's kernels."""
    stages = {"verify": verify, "queue": StageSeconds(wall=claim.waited_seconds)}
    spent = shares(session, claim.jobs, [kernel.build for kernel in asked], stages, asks_predicted())
    group = load_group(session, claim.ref)
    if spent or group is None:
        return spent
    return shares(session, claim.jobs, [kernel.build for kernel in kernels_of(group)], stages)


def complete_verified(
    session: Session, claim: Claim, asked: Sequence[GroupKernel], *, plan_version: str, verify: StageSeconds
) -> list[tuple[str, str | None]]:
    """Complete a verify item, which took `verify` seconds, when what was `asked` for is judged. Kernels that are left,
    or came to be wanted meanwhile, wait again: returns (kind, target) of the item where there are any.

    Raises `LostClaim`, and `ValueError` if one that was asked for is left without a verdict: it would go round for
    ever."""
    complete(session, claim)
    left = builds_to_verify(session, claim.ref, plan_version)
    if forgotten := [kernel.kernel for kernel in left if kernel in asked]:
        raise ValueError(f"group {claim.ref}: no verdict for {', '.join(forgotten)}")
    group = core(GroupRow)
    session.execute(update(group).where(group.c.id == claim.ref).values(verify_seconds=verify.model_dump()))
    again = add_judging(session, unjudged(session, [kernel.build for kernel in left]))
    if again and claim.is_alone:
        go_on_alone(session, claim)
    return again
