"""What follows a compile: tasks to verify on the CPU (`predicted:` problems) or measure (others), CPU verdicts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Row, select, true

from codegen.identity import PlanVersions
from cukiln.types import StageSeconds
from storage.database.session import Session, clock_of
from storage.database.sql import asks_predicted, change, chunks, core, is_predicted, rows_among
from storage.database.tables import LIVE, BuildRow, CandidateRow, GroupRow, JobProblemRow, JobRow
from storage.entities.groups import GroupKernel, kernels_of, load_group
from storage.entities.stage_times import Spent, shares
from storage.entities.verdicts import CPU, NewVerdict, known_verdicts, write_verdicts
from storage.queue import losses
from storage.queue.new_tasks import MEASURE, VERIFY, NewTask, add_again, measure_ref
from storage.queue.tasks import Lease, complete, go_on_alone, require_lease
from storage.transitions.apply_verdicts import (
    VERDICTS_AT_ONCE,
    NextStep,
    add_next_steps,
    compile_failures,
    cpu_verdicts,
    give_findings,
    give_verdicts,
    has_time_left,
    of_problems,
    skip_lost,
)

MEASURE_SECONDS = 0.5
"""Predicted for verifying and timing the candidate of a build: 0.3 s of samples at most, and its verification. It only
orders the queue and starts the ETA, which then follows what was observed."""
VERIFY_SECONDS, VERIFY_KERNEL_SECONDS = 1.0, 0.25
"""Predicted for verifying a group on the CPU: g++'s headers and the child, and each kernel."""


@dataclass(frozen=True)
class Versions:
    """Which stored results of a build are valid: verdicts of these verification plans, times under `drivers`, today's
    by device class, and what no limit ended that is larger now: `limits` by stage or device kind, then by name."""

    cpu_plans: PlanVersions
    gpu_plans: PlanVersions
    drivers: Mapping[str, str]
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Followed:
    """What follows from compiled builds: problems with a new task, and (kind, target) of tasks that newly wait."""

    next_steps: list[NextStep]
    waiting: list[tuple[str, str | None]]


Unverified = Row[Any]
"""A job (`job_id`) has candidates without a verdict on a `device_class` of a `build`, with its `group_id`, `target`."""


def apply_known_verdicts(
    session: Session,
    build_ids: Iterable[str],
    versions: Versions,
    which: ColumnElement[bool] | None = None,
    *,
    most: int | None,
) -> tuple[list[NextStep], bool]:
    """Give candidates of these builds without a verdict, in whichever job, what is stored of it: at most so many, and
    only `which`, a condition on their rows. Returns the problems whose candidates all have a verdict now (their next
    tasks are added), and whether there may be more candidates: call it again. Doing it twice changes nothing."""
    these = true() if which is None else which
    touched: list[int] = []

    def left() -> int | None:
        return None if most is None else most - len(touched)

    for ids in chunks(set(build_ids)):
        touched += give_verdicts(session, compile_failures(session, ids), these, left())
        proved = cpu_verdicts(session, ids, versions.cpu_plans)
        touched += give_verdicts(session, proved, these & of_problems(asks_predicted()), left())
        touched += give_findings(session, ids, versions.gpu_plans, versions.drivers, these, left())
    return add_next_steps(session, touched), most is not None and len(touched) >= most


def unverified(
    session: Session, build_ids: Iterable[str], which: ColumnElement[bool] | None = None
) -> list[Unverified]:
    """Those of these builds that compiled and have no verdict yet. `which`: a condition on candidates' rows."""
    candidate = core(CandidateRow).c
    columns = (
        BuildRow.id.label("build"),
        BuildRow.group_id,
        BuildRow.target,
        JobProblemRow.device_class,
        JobProblemRow.job_id,
    )
    query = (
        select(*columns)
        .distinct()
        .select_from(core(CandidateRow))
        .join(BuildRow, BuildRow.id == candidate.build)
        .join(JobProblemRow, JobProblemRow.id == candidate.job_problem_id)
        .join(JobRow, JobRow.id == JobProblemRow.job_id)
        .where(candidate.verdict.is_(None), BuildRow.state == "ok", BuildRow.group_id.is_not(None))
        .where(JobProblemRow.state.in_(LIVE), has_time_left(clock_of(session).now()))
        .where(true() if which is None else which)
    )
    return rows_among(session, query, candidate.build, build_ids)


def add_verification(
    session: Session, waiting: Iterable[Unverified], device_class: str | None = None
) -> list[tuple[str, str | None]]:
    """Tasks for these (on one device class), one of a group and kind. Returns (kind, target) of those that wait now."""
    by_place: dict[tuple[str, str, str], list[Unverified]] = {}
    for row in waiting:
        if device_class not in (None, row.device_class):
            continue
        if is_predicted(row.device_class):
            place = (VERIFY, row.group_id, row.target)
        else:
            place = (MEASURE, measure_ref(row.group_id, row.device_class), row.device_class)
        by_place.setdefault(place, []).append(row)
    # A job may have ended since its rows were read.
    still_live = select(JobRow.id).where(JobRow.state.in_(LIVE))
    job_ids = {row.job_id for rows in by_place.values() for row in rows}
    live = {id for (id,) in rows_among(session, still_live, JobRow.id, job_ids)}
    tasks = [
        NewTask(kind, ref, target, jobs, _seconds(kind, len({row.build for row in rows})))
        for (kind, ref, target), rows in sorted(by_place.items())
        if (jobs := tuple(sorted({row.job_id for row in rows} & live)))
    ]
    return [(task.kind, task.target) for task in add_again(session, tasks)]


def _seconds(kind: str, builds: int) -> float:
    return VERIFY_SECONDS + VERIFY_KERNEL_SECONDS * builds if kind == VERIFY else MEASURE_SECONDS * builds


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
