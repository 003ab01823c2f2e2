"""Groups: the kernels of one .cu file, what a compile worker made of them, and the report of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update

from cukiln.types import GroupKernel as GroupKernelReport
from cukiln.types import GroupReport, Phase, StageSeconds
from storage.builds import Build, known_builds
from storage.database import Session, clock_of
from storage.group_rows import Group, GroupKernel, load_group, start_group
from storage.items import Claim, complete
from storage.judge import judge_builds
from storage.new_items import VERIFY, NewItem, add_items
from storage.rows import core
from storage.seconds import share_out
from storage.tables import BuildRow, GroupRow, ItemRow
from storage.verdicts import builds_without_verdict

__all__ = [
    "BuildOutcome",
    "Group",
    "GroupKernel",
    "RecordedGroup",
    "group_report",
    "load_group",
    "record_compiled",
    "start_group",
]


@dataclass(frozen=True)
class BuildOutcome:
    """`state`: ok (with code digest and resources), compile_error, compile_timeout (with the log)."""

    build: str
    state: str
    code_digest: str | None = None
    resources: Mapping[str, Any] | None = None
    log: str | None = None


@dataclass(frozen=True)
class RecordedGroup:
    """`verify`: a verify item was added; `judged`: problems whose finish items were added."""

    verify: bool
    judged: list[int]


def record_compiled(
    session: Session,
    claim: Claim,
    outcomes: Sequence[BuildOutcome],
    *,
    source: str | None,
    log: str | None,
    library: str | None,
    cubin: str | None,
    phases: Sequence[Mapping[str, Any]],
    codegen: StageSeconds,
    compile: StageSeconds,
    venue: str,
    plan_version: str,
    verify_predicted_seconds: float = 0.0,
) -> RecordedGroup:
    """Complete a compile item: its builds' states, the group's blobs and times, and a verify item if any build stands.

    One outcome for each build of the group, or `ValueError`. Raises `LostClaim`.
    """
    complete(session, claim)
    group = load_group(session, claim.ref)
    if group is None or {kernel.build for kernel in group.kernels} != {outcome.build for outcome in outcomes}:
        raise ValueError(f"group {claim.ref}: one outcome for each of its builds, no other")
    for outcome in outcomes:
        session.execute(
            update(BuildRow)
            .where(BuildRow.id == outcome.build, BuildRow.state == "pending", BuildRow.group_id == group.id)
            .values(
                state=outcome.state,
                code_digest=outcome.code_digest,
                resources=dict(outcome.resources) if outcome.resources is not None else None,
                log=outcome.log,
            )
        )
    now = clock_of(session).now()
    blobs = {"source": source, "log": log, "library": library, "cubin": cubin}
    times = {"codegen_seconds": codegen.model_dump(), "compile_seconds": compile.model_dump()}
    session.execute(
        update(core(GroupRow))
        .where(core(GroupRow).c.id == group.id)
        .values(state="compiled", finished_at=now, phases=[dict(phase) for phase in phases], **blobs, **times)
    )
    builds = [outcome.build for outcome in outcomes]
    share_out(session, group.job_id, builds, {"codegen": codegen, "compile": compile})
    return _go_on(session, claim, group, builds, venue, plan_version, verify_predicted_seconds)


def _go_on(
    session: Session,
    claim: Claim,
    group: Group,
    builds: Sequence[str],
    venue: str,
    plan_version: str,
    predicted_seconds: float,
) -> RecordedGroup:
    verify = bool(builds_without_verdict(session, known_builds(session, builds).values(), venue, plan_version))
    if verify:
        # The item's own priority, not the job's: a more urgent job may have raised it.
        priority = session.scalars(select(ItemRow.priority).where(ItemRow.id == claim.item_id)).one()
        add_items(session, [NewItem(VERIFY, group.id, group.target, group.job_id, priority, predicted_seconds)])
    return RecordedGroup(verify, judge_builds(session, builds, venue, plan_version))


def group_report(session: Session, group_id: str) -> GroupReport | None:
    """The group as the service answers it; None if there is no such group."""
    group = load_group(session, group_id)
    if group is None:
        return None
    builds = known_builds(session, [kernel.build for kernel in group.kernels])
    return GroupReport(
        group=group.id,
        job=group.job_id,
        target=group.target,
        state=group.state,
        toolchain=group.toolchain,
        kernels=[_report_kernel(kernel, builds.get(kernel.build), group.state) for kernel in group.kernels],
        phases=[Phase(**phase) for phase in group.phases],
        predicted_seconds=group.predicted_seconds,
        compile=StageSeconds(**group.compile_seconds),
        verify=StageSeconds(**group.verify_seconds),
        source_sha256=group.source,
        log_sha256=group.log,
        library_sha256=group.library,
        cubin_sha256=group.cubin,
    )


def _report_kernel(kernel: GroupKernel, build: Build | None, group_state: str) -> GroupKernelReport:
    """A build that was given up or taken over by a later group is reported under its group's own state."""
    described = kernel.kernel_json
    return GroupKernelReport(
        kernel=kernel.kernel,
        namespace=f"kernel_{kernel.kernel[:16]}",
        operator=str(described.get("operator", "")),
        tunables=dict(described.get("tunables", {})),
        state=build.state if build else group_state,
        code_digest=build.code_digest if build else None,
        resources=build.resources if build else None,
        log=build.log if build else None,
    )
