"""Verify: every kernel of a group is run on the CPU against its operator's reference before it may win."""

from __future__ import annotations

from codegen.kernel import Kernel
from cukiln.types import StageSeconds
from storage.groups import judge_group
from storage.verdicts import NewVerdict
from storage.verify_groups import builds_to_verify, complete_verified, record_verdicts, verify_shares
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
    found = [_new_verdict(by_id[verdict.kernel_id], verdict) for verdict in verdicts]
    spent = StageSeconds(wall=stopwatch.read().wall, cpu=sum(verdict.cpu_seconds for verdict in verdicts))
    version = context.plan_version
    with context.database.write() as session:
        record_verdicts(session, context.claim, found, version)
    judged = context.in_parts(lambda session: judge_group(session, context.claim, context.versions(session)))
    with context.database.read() as session:
        shared = verify_shares(session, context.claim, members, spent)
    again = context.complete(
        shared,
        lambda session: complete_verified(session, context.claim, members, plan_version=version, verify=spent),
    )
    context.wake(again)
    tell(context, judged)


def _new_verdict(subject: str, verdict: CpuVerdict) -> NewVerdict:
    return NewVerdict(
        subject, verdict.verdict, verdict.message, verdict.details, verdict.wall_seconds, verdict.cpu_seconds
    )
