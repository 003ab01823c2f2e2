"""Compile: one group of kernels becomes a cubin and a library; what nvcc refuses is remembered by build."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from codegen.compile_model import CompiledFile
from codegen.kernel import Kernel
from codegen.render_group import render_device
from codegen.targets import target as find_target
from cukiln.types import StageSeconds
from storage.groups import BuildOutcome, Group, load_group, record_compiled, start_group
from workers.compile_file import Phase
from workers.compile_group import Artifact, GroupOutcome, compile_group, stored_resources
from workers.limits import process_limits
from workers.steps.context import GiveUp, StepContext
from workers.steps.phases import placed
from workers.steps.progress import publish_progress, tell
from workers.steps.take_along import take_along
from workers.steps.verify import predicted_seconds
from workers.stopwatch import Stopwatch
from workers.toolchain import Toolchain


class WrongToolchain(Exception):
    """This worker's compiler is not the one that the group's builds are keyed by; another worker may have it."""


def compile_kernels(context: StepContext) -> None:
    """Compile the group of the item; its builds, artifacts and what gets them judged are written in one transaction."""
    with context.database.write() as session:
        group = load_group(session, context.claim.ref)
        if group is None:
            raise GiveUp(f"group {context.claim.ref} does not exist")
        start_group(session, context.claim)
    toolchain = _toolchain(context, group)
    group = take_along(context, group, toolchain.digest)
    kernels = {Kernel.from_json(member.kernel_json): member.build for member in group.kernels}
    stopwatch = Stopwatch()
    outcome = compile_group(
        list(kernels),
        find_target(group.target),
        toolchain,
        context.processes,
        process_limits(context.settings.compile_limits),
        context.cancel,
        context.stopwatch,
    )
    codegen = _own_seconds(stopwatch, outcome)
    context.check()
    _record(context, group, kernels, outcome, codegen)


def _toolchain(context: StepContext, group: Group) -> Toolchain:
    """This worker's, as the group wants it: its own, or the same for screening. Raises WrongToolchain."""
    own = context.toolchain
    for toolchain in (own, own.for_screening()):
        if group.toolchain == toolchain.digest:
            return toolchain
    raise WrongToolchain(f"group {group.id} was planned for toolchain {group.toolchain}, this worker has {own.digest}")


def _own_seconds(stopwatch: Stopwatch, outcome: GroupOutcome) -> StageSeconds:
    """What of `compile_group` was not the tools': rendering, the assertions, reading the cubin."""
    spent = stopwatch.read()
    return StageSeconds(wall=max(0.0, spent.wall - outcome.wall_seconds), cpu=spent.cpu)


def _record(
    context: StepContext,
    group: Group,
    kernels: dict[Kernel, str],
    outcome: GroupOutcome,
    codegen: StageSeconds,
) -> None:
    # A group that compiled whole is one artifact; of one that was split, the artifact with the most kernels is shown.
    shown = max(outcome.artifacts, key=lambda artifact: len(artifact.kernels), default=None)
    source = shown.source if shown else render_device(list(kernels)).text
    uploading_at = context.stopwatch.read().wall
    blobs = context.blobs.put_many(
        [
            (source.encode(), "text/x-cuda"),
            (_log(outcome, shown).encode(), "text/plain"),
            *([(shown.cubin, "application/x-cubin"), (shown.ptx, "application/gzip")] if shown else []),
            # Every library is kept: what is measured later, perhaps elsewhere, is loaded from it.
            *((artifact.library, "application/x-sharedlib") for artifact in outcome.artifacts),
        ]
    )
    upload = Phase("upload", context.stopwatch.read().wall - uploading_at, uploading_at)
    text, log, *rest = [blob.digest for blob in blobs]
    cubin, ptx = rest[:2] if shown else (None, None)
    libraries = rest[2:]
    with context.database.write() as session:
        recorded = record_compiled(
            session,
            context.claim,
            [_build_outcome(kernels[kernel], outcome, kernel, libraries) for kernel in kernels],
            source=text,
            log=log,
            library=libraries[outcome.artifacts.index(shown)] if shown else None,
            cubin=cubin,
            ptx=ptx,
            phases=placed([*outcome.phases, upload], context.since_claim, list(kernels)),
            codegen=codegen,
            compile=StageSeconds(wall=outcome.wall_seconds, cpu=outcome.cpu_seconds),
            plan_version=context.plan_version,
            gpu_plan_version=context.gpu_plan_version,
            drivers=context.drivers(session),
            verify_predicted_seconds=predicted_seconds(len(kernels)),
            files=_files(kernels, outcome),
        )
    for kind, target in recorded.waiting:
        context.enqueue(kind, target)
    tell(context, recorded.judged)
    for job in recorded.jobs - {context.claim.job_id}:
        publish_progress(context, job)


def _log(outcome: GroupOutcome, shown: Artifact | None) -> str:
    """The words of the tools: of the file that is shown, then of every kernel that failed."""
    failed = [f"== {kernel}: {found.status}\n{found.log}" for kernel, found in outcome.outcomes.items() if found.log]
    return "\n".join([*([shown.log] if shown else []), *failed])


def _files(kernels: Iterable[Kernel], outcome: GroupOutcome) -> list[CompiledFile]:
    by_id = {kernel.id: kernel for kernel in kernels}
    return [
        CompiledFile.of([by_id[name] for name in one.kernels], one.cpu_seconds, one.peak_memory_bytes)
        for one in outcome.artifacts
    ]


def _build_outcome(build: str, outcome: GroupOutcome, kernel: Kernel, libraries: Sequence[str]) -> BuildOutcome:
    """`libraries`: blob digests by artifact."""
    found = outcome.outcomes[kernel.id]
    resources = stored_resources(kernel, found.resources) if found.resources is not None else None
    library = libraries[found.artifact] if found.artifact is not None else None
    return BuildOutcome(build, found.status, found.code_digest, resources, found.log, library)
