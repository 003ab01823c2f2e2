"""Compile: one group of kernels becomes a cubin and a library; what nvcc refuses is remembered by build."""

from codegen.kernel import Kernel
from codegen.targets import target as find_target
from codegen.text.ptxas_report import first_error_line
from codegen.text.render_group import render_device
from cukiln.types import StageSeconds
from storage.database.sql import chunks
from storage.entities.groups import kernels_of, load_group
from storage.entities.task_kinds import COMPILE
from storage.transitions.groups import (
    BUILDS_AT_ONCE,
    BuildOutcome,
    GroupFiles,
    apply_group_verdicts,
    complete_group,
    record_builds,
    what_follows,
)
from storage.transitions.pending_builds import pending_counts
from workers.compile.compile_group import GroupOutcome, KernelOutcome, compile_group, stored_resources
from workers.processes.stopwatch import Stopwatch
from workers.steps.context import GiveUp, StepContext


class WrongToolchain(Exception):
    """This worker's compiler is not the one that the group's builds are keyed by; another worker may have it."""


def compile_kernels(context: StepContext) -> None:
    """Compile the group of the task; record its builds and artifacts, and what gets them verified."""
    with context.database.read() as session:
        group = load_group(session, context.lease.ref)
    if group is None:
        raise GiveUp(f"group {context.lease.ref} does not exist")
    toolchain = context.toolchain
    if group.toolchain != toolchain.digest:
        raise WrongToolchain(
            f"group {group.id} was planned for toolchain {group.toolchain}, this worker has {toolchain.digest}"
        )
    kernels = {Kernel.from_json(member.kernel_json): member.build for member in kernels_of(group)}
    stopwatch = Stopwatch()
    outcome = compile_group(
        list(kernels),
        find_target(group.target),
        toolchain,
        context.processes,
        context.settings.limits("compile"),
        context.cancel,
        context.stopwatch,
    )
    spent = stopwatch.read()
    # What was not the tools': rendering, the assertions, reading the cubin.
    codegen = StageSeconds(wall=max(0.0, spent.wall - outcome.wall_seconds), cpu=spent.cpu)
    context.check()
    _record(context, kernels, outcome, codegen)


def _record(context: StepContext, kernels: dict[Kernel, str], outcome: GroupOutcome, codegen: StageSeconds) -> None:
    """The builds a part at a time, then the group: whatever of it a crash leaves out is compiled again."""
    shown = outcome.artifact
    source = shown.source if shown else render_device(list(kernels)).text
    # The messages of the tools: of the file that compiled, then of every kernel that failed.
    logs = [shown.log] if shown else []
    logs += [f"== {kernel}: {made.status}\n{made.log}" for kernel, made in outcome.outcomes.items() if made.log]
    logs += [f"== left, {len(outcome.left)} kernels\n{outcome.why}"] if outcome.left else []
    files = {"source": (source.encode(), "text/x-cuda"), "log": ("\n".join(logs).encode(), "text/plain")}
    if shown:
        # The library is kept: what is measured later, perhaps elsewhere, is loaded from it.
        files["library"] = shown.library, "application/x-sharedlib"
        files |= {"cubin": (shown.cubin, "application/x-cubin"), "ptx": (shown.ptx, "application/gzip")}
    digests, upload = context.uploaded(files)
    made = GroupFiles(
        blobs=digests,
        phases=context.placed([*outcome.phases, upload], list(kernels)),
        codegen=codegen,
        compile=StageSeconds(wall=outcome.wall_seconds, cpu=outcome.cpu_seconds),
    )
    outcomes = [
        _build_outcome(build, kernel, outcome.outcomes[kernel.id], digests.get("library"))
        for kernel, build in kernels.items()
        if kernel.id in outcome.outcomes
    ]
    for some in chunks(outcomes, BUILDS_AT_ONCE):
        with context.database.write() as session:
            record_builds(session, context.lease, some)
        if len(outcomes) > BUILDS_AT_ONCE:
            context.database.pause()
    next_steps = context.in_parts(
        lambda session: apply_group_verdicts(session, context.lease, context.versions(session))
    )
    with context.database.read() as session:
        unverified, spent = what_follows(session, context.lease, made)
    why = first_error_line(outcome.why) or "the compiler died or hung" if outcome.left else None
    most = context.settings.max_attempts
    waiting = context.complete(
        spent,
        lambda session: complete_group(session, context.lease, made, unverified, why, most, alone=outcome.hung),
    )
    with context.database.read() as session:
        pending = pending_counts(session, context.settings.workers) if outcome.left else {}
    context.wake([*waiting, *((COMPILE, target) for target, count in pending.items() for _ in range(count))])
    context.publish_steps(next_steps)


def _build_outcome(build: str, kernel: Kernel, made: KernelOutcome, library: str | None) -> BuildOutcome:
    resources = stored_resources(kernel, made.resources) if made.resources is not None else None
    holds = library if made.status == "ok" else None
    return BuildOutcome(build, made.status, made.code_digest, resources, made.log, holds, made.limit)
