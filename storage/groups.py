"""Groups: the kernels of one .cu file, what a compile worker made of them, and the report of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update

from codegen.compile_model import CompiledFile
from cukiln.types import AttributedSeconds, GroupReport, Phase, StageSeconds
from cukiln.types import GroupKernel as GroupKernelReport
from storage.builds import Build, known_builds
from storage.compile_models import learn
from storage.database import Session, clock_of
from storage.group_rows import Group, GroupKernel, jobs_that_share, load_group, start_group
from storage.items import Claim, complete
from storage.join_groups import owners
from storage.judge import Judged, judge_builds
from storage.judge_gpu import judge_measured
from storage.judging_work import MEASURE_SECONDS, add_measuring, builds_to_prove, demand
from storage.new_items import VERIFY, NewItem, add_items
from storage.rows import core
from storage.seconds import by_phase, share_out
from storage.tables import BuildRow, GroupRow, ItemRow

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
    """`state`: ok (with code digest, resources, and the blob digest of the library that holds it), compile_error,
    compile_timeout (with the log)."""

    build: str
    state: str
    code_digest: str | None = None
    resources: Mapping[str, Any] | None = None
    log: str | None = None
    library: str | None = None


@dataclass(frozen=True)
class RecordedGroup:
    """`waiting`: (kind, target) of the verify and measure items that were added; `judged`: problems that go on; `jobs`:
    whose kernels were in the file."""

    waiting: list[tuple[str, str | None]]
    judged: list[Judged]
    jobs: set[str]


def record_compiled(
    session: Session,
    claim: Claim,
    outcomes: Sequence[BuildOutcome],
    *,
    source: str | None,
    log: str | None,
    library: str | None,
    cubin: str | None,
    ptx: str | None = None,
    sass: str | None = None,
    phases: Sequence[Mapping[str, Any]],
    codegen: StageSeconds,
    compile: StageSeconds,
    plan_version: str,
    gpu_plan_version: str,
    drivers: Mapping[str, str],
    verify_predicted_seconds: float = 0.0,
    seconds_per_measurement: float = MEASURE_SECONDS,
    files: Sequence[CompiledFile] = (),
) -> RecordedGroup:
    """Complete a compile item: its builds' states, the group's blobs and times (`phases` as in
    `storage.tables.GroupRow`, without the queue), and the items that get judged what
    stands and nobody has judged: one on the CPU, one per device class on GPUs. `drivers`: by device class, today's.
    `files`: what those that compiled took, for the sizing of the next groups.

    One outcome for each build of the group, with a library where it compiled, or `ValueError`. Raises `LostClaim`.
    """
    complete(session, claim)
    group = load_group(session, claim.ref)
    if group is None or {kernel.build for kernel in group.kernels} != {outcome.build for outcome in outcomes}:
        raise ValueError(f"group {claim.ref}: one outcome for each of its builds, no other")
    if lacking := [outcome.build for outcome in outcomes if outcome.state == "ok" and outcome.library is None]:
        raise ValueError(f"group {claim.ref}: compiled, but without a library: {', '.join(lacking)}")
    _update_builds(session, group, outcomes)
    now = clock_of(session).now()
    blobs = {"source": source, "log": log, "library": library, "cubin": cubin, "ptx": ptx, "sass": sass}
    in_queue = claim.waited_seconds
    # By the claim's time, as the others: it ended when they began.
    spans = [{"name": "queue", "seconds": in_queue, "start": -in_queue}, *(dict(phase) for phase in phases)]
    times = {"codegen_seconds": codegen.model_dump(), "compile_seconds": compile.model_dump()}
    session.execute(
        update(core(GroupRow))
        .where(core(GroupRow).c.id == group.id)
        .values(state="compiled", finished_at=now, phases=spans, **blobs, **times)
    )
    if group.toolchain is not None:
        learn(session, group.toolchain, files)
    builds = [outcome.build for outcome in outcomes]
    jobs = jobs_that_share(session, group.id)
    share_out(session, jobs, builds, {"codegen": codegen, "compile": compile, **by_phase(phases)})
    for one in owners(session, claim, group):
        share_out(
            session, [one.job_id] if one.job_id else [], one.builds, {"queue": StageSeconds(wall=one.waited_seconds)}
        )
    judged = {*judge_builds(session, builds, plan_version), *judge_measured(session, builds, gpu_plan_version, drivers)}
    left = demand(session, builds)
    waiting = [
        *_add_verification(session, claim, group, builds_to_prove(left), verify_predicted_seconds),
        *add_measuring(session, left, seconds_per_measurement),
    ]
    return RecordedGroup(waiting, sorted(judged), jobs)


def _update_builds(session: Session, group: Group, outcomes: Sequence[BuildOutcome]) -> None:
    for outcome in outcomes:
        session.execute(
            update(BuildRow)
            .where(BuildRow.id == outcome.build, BuildRow.state == "pending", BuildRow.group_id == group.id)
            .values(
                state=outcome.state,
                code_digest=outcome.code_digest,
                library=outcome.library,
                resources=dict(outcome.resources) if outcome.resources is not None else None,
                log=outcome.log,
            )
        )


def _add_verification(
    session: Session, claim: Claim, group: Group, builds: set[str], predicted_seconds: float
) -> list[tuple[str, str | None]]:
    """A verify item for those of the group's builds that a proof on the CPU is wanted of. The others have no group that
    proves them: whoever wants it later sees to it."""
    proved = (BuildRow.verify_group_id == group.id) & BuildRow.id.not_in(builds)
    session.execute(update(core(BuildRow)).where(proved).values(verify_group_id=None))
    if not builds:
        return []
    # The item's own priority, not the job's: a more urgent job may have raised it.
    priority = session.scalars(select(ItemRow.priority).where(ItemRow.id == claim.item_id)).one()
    add_items(session, [NewItem(VERIFY, group.id, group.target, group.job_id, priority, predicted_seconds)])
    return [(VERIFY, group.target)]


def group_report(session: Session, group_id: str) -> GroupReport | None:
    """The group as the service answers it; None if there is no such group. One that joined another has the files of
    that one, and no times."""
    group = load_group(session, group_id)
    if group is None:
        return None
    file = (load_group(session, group.joined_to) if group.joined_to else None) or group
    builds = known_builds(session, [kernel.build for kernel in group.kernels])
    return GroupReport(
        group=group.id,
        job=group.job_id,
        target=group.target,
        state=group.state,
        joined_to=group.joined_to,
        toolchain=group.toolchain,
        kernels=[
            _report_kernel(kernel, builds.get(kernel.build), file.state, attributed)
            for kernel, attributed in zip(group.kernels, attribute(group), strict=True)
        ],
        phases=[Phase(**phase) for phase in group.phases],
        predicted_seconds=group.predicted_seconds,
        codegen=StageSeconds(**group.codegen_seconds),
        compile=StageSeconds(**group.compile_seconds),
        verify=StageSeconds(**group.verify_seconds),
        source_sha256=file.source,
        log_sha256=file.log,
        library_sha256=file.library,
        cubin_sha256=file.cubin,
        ptx_sha256=file.ptx,
        sass_sha256=file.sass,
    )


def attribute(group: Group) -> list[AttributedSeconds | None]:
    """What each kernel takes of the phases that it was in, after the seconds predicted of it; alike where nothing was
    predicted of all that were in. The queue is nobody's. None for what is not compiled."""
    sums: list[dict[str, float]] = [{} for _ in group.kernels]
    for phase in group.phases:
        places = phase.get("kernels") or range(len(group.kernels))
        weights = {place: group.kernels[place].predicted_seconds for place in places}
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
        predicted_seconds=kernel.predicted_seconds,
        seconds=attributed,
    )
