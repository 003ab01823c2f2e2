"""A verify task: which kernels of a group the CPU has to verify, and their verdicts."""

from collections.abc import Sequence

from sqlalchemy import select

from codegen.identity import PlanVersions
from cukiln.types import StageSeconds
from storage.database.session import Session
from storage.database.sql import asks_predicted, change
from storage.database.tables import LIVE, BuildRow, CandidateRow, GroupRow, JobProblemRow
from storage.entities.groups import GroupKernel, kernels_of, load_group
from storage.entities.stage_times import Spent, shares
from storage.entities.verdicts import CPU, NewVerdict, known_verdicts, write_verdicts
from storage.queue import losses
from storage.queue.tasks import Lease, complete, go_on_alone, require_lease
from storage.transitions.apply_verdicts import (
    VERDICTS_AT_ONCE,
    NextStep,
    add_next_steps,
    add_verification,
    of_problems,
    skip_lost,
    unverified,
)


def builds_to_verify(session: Session, group_id: str, plans: PlanVersions) -> list[GroupKernel]:
    """The group's compiled kernels, in render order, that a candidate waits for and the CPU has not verified."""
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
    slices: dict[str, str] = dict(rows.all())
    verdicts = known_verdicts(session, slices.values(), CPU, plans)
    unverified = {build for build, subject in slices.items() if subject not in verdicts}
    return [kernel for kernel in kernels_of(group) if kernel.build in unverified]


def record_verdicts(session: Session, lease: Lease, verdicts: Sequence[NewVerdict], plans: PlanVersions) -> None:
    """Write the verdicts of a verify task; a failure replaces an "ok", never the reverse. Raises `LostLease`."""
    require_lease(session, lease)
    write_verdicts(session, verdicts, CPU, plans)


def skip_build(session: Session, lease: Lease, build: str) -> tuple[list[NextStep], bool]:
    """Skip some candidates of a build that was lost too often; returns as `apply_known_verdicts`. Raises LostLease."""
    require_lease(session, lease)
    why = losses.why_skipped("while it was verified")
    touched = skip_lost(session, {build: why}, of_problems(asks_predicted()), VERDICTS_AT_ONCE)
    go_on_alone(session, lease)
    return add_next_steps(session, touched), len(touched) >= VERDICTS_AT_ONCE


def verify_shares(session: Session, lease: Lease, asked: Sequence[GroupKernel], verify: StageSeconds) -> Spent:
    """What each problem that needs the task has spent on it: those that use what was `asked` to be verified. Where that
    was nothing, and candidates got stored verdicts alone, those that use any of the group's kernels."""
    stages = {"verify": verify, "queue": StageSeconds(wall=lease.waited_seconds)}
    spent = shares(session, lease.jobs, [kernel.build for kernel in asked], stages, asks_predicted())
    group = load_group(session, lease.ref)
    if spent or group is None:
        return spent
    return shares(session, lease.jobs, [kernel.build for kernel in kernels_of(group)], stages)


def complete_verified(
    session: Session, lease: Lease, asked: Sequence[GroupKernel], *, plans: PlanVersions, verify: StageSeconds
) -> list[tuple[str, str | None]]:
    """Complete a verify task when what was `asked` for has verdicts; (kind, target) of the task where kernels are left.
    Raises `LostLease`, and `ValueError` if one that was asked for has no verdict: it would repeat for ever."""
    complete(session, lease)
    left = builds_to_verify(session, lease.ref, plans)
    if missing := [kernel.kernel for kernel in left if kernel in asked]:
        raise ValueError(f"group {lease.ref}: no verdict for {', '.join(missing)}")
    change(session, GroupRow, GroupRow.id == lease.ref, verify_seconds=verify.model_dump())
    again = add_verification(session, unverified(session, [kernel.build for kernel in left]))
    if again and lease.is_alone:
        go_on_alone(session, lease)
    return again
