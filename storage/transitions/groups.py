"""Groups: the kernels of one .cu file, the outcome of compiling them, which of them the CPU has to verify and their
verdicts, and their report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sqlalchemy import select

from codegen.identity import PlanVersions
from cukiln.types import AttributedSeconds, GroupReport, StageSeconds
from cukiln.types import GroupKernel as GroupKernelReport
from storage.database.session import Session, clock_of
from storage.database.sql import asks_predicted, change, change_each, core
from storage.database.tables import LIVE, BuildRow, CandidateRow, GroupRow, JobProblemRow
from storage.entities.groups import (
    FILES_OF_GROUPS,
    Build,
    Group,
    GroupKernel,
    compiled_for,
    kernels_of,
    known_builds,
    load_group,
)
from storage.entities.stage_times import Spent, by_phase, shares
from storage.entities.verdicts import CPU, NewVerdict, known_verdicts, write_verdicts
from storage.queue import losses
from storage.queue.tasks import Lease, complete, continue_alone, require_lease
from storage.transitions.apply_verdicts import (
    VERDICTS_AT_ONCE,
    NextStep,
    Unverified,
    Versions,
    add_next_steps,
    add_verification,
    apply_known_verdicts,
    of_problems,
    skip_lost,
    unverified,
)
from storage.transitions.pending_builds import MAX_ATTEMPTS, fulfil, return_builds

BUILDS_AT_ONCE = 16
"""Outcomes of one transaction."""


@dataclass(frozen=True)
class BuildOutcome:
    """`state`: ok (with code digest, resources, and the blob digest of the library that holds it), compile_error,
    compile_timeout (with the log, and the limit that was `reached`, by name, where one was)."""

    build: str
    state: str
    code_digest: str | None = None
    resources: Mapping[str, Any] | None = None
    log: str | None = None
    library: str | None = None
    reached: Mapping[str, float] | None = None


@dataclass(frozen=True)
class GroupFiles:
    """Blobs of a group's compile by name (FILES_OF_GROUPS), and what it took; `phases` as `GroupRow` has them, without
    the queue."""

    blobs: Mapping[str, str] = field(default_factory=dict)
    phases: Sequence[Mapping[str, Any]] = ()
    codegen: StageSeconds = field(default_factory=StageSeconds)
    compile: StageSeconds = field(default_factory=StageSeconds)


def record_builds(session: Session, lease: Lease, outcomes: Sequence[BuildOutcome]) -> None:
    """The outcome of some of a group's builds. Raises `LostLease`, `ValueError` for one compiled to no library."""
    require_lease(session, lease)
    if lacking := [outcome.build for outcome in outcomes if outcome.state == "ok" and outcome.library is None]:
        raise ValueError(f"group {lease.ref}: compiled, but without a library: {', '.join(lacking)}")
    rows = [{"id": outcome.build, "suspect": None, **asdict(outcome)} for outcome in outcomes]
    rows = [{name: value for name, value in row.items() if name != "build"} for row in rows]
    change_each(session, BuildRow, rows, BuildRow.state == "compiling", BuildRow.group_id == lease.ref)
    fulfil(session, [outcome.build for outcome in outcomes])


def apply_group_verdicts(session: Session, lease: Lease, versions: Versions) -> tuple[list[NextStep], bool]:
    """`apply_known_verdicts` of what the task's group has compiled, in whichever group. Raises `LostLease`."""
    require_lease(session, lease)
    build = core(BuildRow).c
    slices = select(build.slice).where(build.group_id == lease.ref)
    builds = session.scalars(select(build.id).where(build.slice.in_(slices)).order_by(build.id))
    return apply_known_verdicts(session, builds, versions, most=VERDICTS_AT_ONCE)


def what_follows(session: Session, lease: Lease, made: GroupFiles) -> tuple[list[Unverified], Spent]:
    """Which candidates wait for the group's builds, and what each problem has spent. It may be a lot: read before."""
    build = core(BuildRow).c
    rows = session.execute(select(build.id, build.state).where(build.group_id == lease.ref)).all()
    jobs = compiled_for(session, lease.ref)
    stages = {"codegen": made.codegen, "compile": made.compile, **by_phase(made.phases)}
    waiting = unverified(session, [row.id for row in rows if row.state == "ok"])
    return waiting, shares(session, jobs, [row.id for row in rows], stages, waited=jobs)


def complete_group(
    session: Session,
    lease: Lease,
    made: GroupFiles,
    waiting: Iterable[Unverified] = (),
    error: str | None = None,
    max_attempts: int = MAX_ATTEMPTS,
    *,
    alone: bool = False,
) -> list[tuple[str, str | None]]:
    """Complete a compile task: the group's blobs and times, and the tasks that verify or measure what is `waiting`.
    Builds whose outcome was not recorded failed together with `error`, which names none of them: they are pending
    again, as suspects, `alone` or in halves. Returns (kind, target) of the tasks that wait now. Raises `LostLease`."""
    complete(session, lease)
    group = core(GroupRow).c
    in_queue = lease.waited_seconds
    # Relative to the lease, as the others: it ended when they began.
    spans = [{"name": "queue", "seconds": in_queue, "start": -in_queue}, *(dict(phase) for phase in made.phases)]
    change(
        session,
        GroupRow,
        group.id == lease.ref,
        state="compiled" if error is None else "failed",
        finished_at=clock_of(session).now(),
        phases=spans,
        codegen_seconds=made.codegen.model_dump(),
        compile_seconds=made.compile.model_dump(),
        **{name: made.blobs.get(name) for name in FILES_OF_GROUPS},
    )
    return_builds(session, lease.ref, error or "its file left it out", max_attempts, alone=alone)
    return add_verification(session, waiting)


def group_report(session: Session, group_id: str) -> GroupReport | None:
    """The group as the service answers it; None if there is no such group."""
    group = load_group(session, group_id)
    if group is None:
        return None
    kernels = kernels_of(group)
    builds = known_builds(session, [kernel.build for kernel in kernels])
    return GroupReport.model_validate(
        {
            **group._mapping,
            "group": group.id,
            "jobs": sorted(compiled_for(session, group.id)),
            "kernels": [
                _report_kernel(kernel, builds.get(kernel.build), group.state, attributed)
                for kernel, attributed in zip(kernels, attribute(group), strict=True)
            ],
            "codegen": group.codegen_seconds,
            "compile": group.compile_seconds,
            "verify": group.verify_seconds,
            **{f"{name}_sha256": group._mapping[name] for name in FILES_OF_GROUPS},
        }
    )


def attribute(group: Group) -> list[AttributedSeconds | None]:
    """What each kernel takes of the phases that it was in, after the seconds predicted of it; alike where nothing was
    predicted of all that were in. The queue is not shared out. None for what is not compiled."""
    predicted = [kernel.predicted_seconds for kernel in kernels_of(group)]
    sums: list[dict[str, float]] = [{} for _ in predicted]
    for phase in group.phases:
        places = phase.get("kernels") or range(len(predicted))
        weights = {place: predicted[place] for place in places}
        if phase["name"] == "queue":
            continue
        if not all(weights.values()):
            weights = dict.fromkeys(weights, 1.0)
        whole = sum(weights.values())
        for place, weight in weights.items():
            sums[place][phase["name"]] = sums[place].get(phase["name"], 0.0) + phase["seconds"] * weight / whole
    return [AttributedSeconds(phases=phases) if phases else None for phases in sums]


def _report_kernel(
    kernel: GroupKernel, build: Build | None, group_state: str, attributed: AttributedSeconds | None
) -> GroupKernelReport:
    """A build that was forgotten is reported under its group's own state."""
    described = kernel.kernel_json
    return GroupKernelReport(
        build=kernel.build,
        kernel=kernel.kernel,
        namespace=f"kernel_{kernel.kernel[:16]}",
        operator=str(described.get("operator", "")),
        tunables=dict(described.get("tunables", {})),
        state=build.state if build else group_state,
        code_digest=build.code_digest if build else None,
        resources=build.resources if build else None,
        log=build.log if build else None,
        predicted_seconds=kernel.predicted_seconds,
        seconds=attributed,
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
    continue_alone(session, lease)
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
        continue_alone(session, lease)
    return again
