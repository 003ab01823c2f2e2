"""Verify: every kernel of a group is run on the CPU against its operator's reference before it may win."""

from __future__ import annotations

from codegen.kernel import Kernel
from cukiln.types import StageSeconds
from storage.verdicts import NewVerdict, builds_to_verify, record_verified
from workers.limits import process_limits
from workers.steps.context import StepContext
from workers.steps.progress import tell
from workers.stopwatch import Stopwatch
from workers.verify_cpu import CpuVerdict, verify_on_cpu


def verify(context: StepContext) -> None:
    """Judge what the item's group compiled and nobody has judged; verdicts belong to slices."""
    with context.database.read() as session:
        members = builds_to_verify(session, context.claim.ref, context.plan_version)
    slices = {Kernel.from_json(member.kernel_json): member.slice for member in members}
    stopwatch = Stopwatch()
    verdicts = verify_on_cpu(
        list(slices),
        context.toolchain,
        context.processes,
        process_limits(context.settings.verify_limits),
        seed=context.fresh_seed(),
        sanitize=context.settings.verify_sanitize,
        cancel=context.cancel,
    )
    context.check()
    by_id = {kernel.id: digest for kernel, digest in slices.items()}
    with context.database.write() as session:
        judged = record_verified(
            session,
            context.claim,
            [_new_verdict(by_id[verdict.kernel_id], verdict) for verdict in verdicts],
            plan_version=context.plan_version,
            verify=StageSeconds(wall=stopwatch.read().wall, cpu=sum(verdict.cpu_seconds for verdict in verdicts)),
        )
    tell(context, judged)


def predicted_seconds(kernels: int) -> float:
    """Of one verify item; orders the queue and the ETA. A fixed part (g++'s headers, the child) and one per kernel."""
    return 1.0 + 0.25 * kernels


def _new_verdict(subject: str, verdict: CpuVerdict) -> NewVerdict:
    return NewVerdict(
        subject, verdict.verdict, verdict.message, verdict.details, verdict.wall_seconds, verdict.cpu_seconds
    )
