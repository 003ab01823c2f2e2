"""Verify: every kernel of a group is run on the CPU against its operator's reference before it may win."""

from __future__ import annotations

from codegen.kernel import Kernel
from cukiln.types import StageSeconds
from storage.judge import Judged
from storage.verdicts import NewVerdict
from storage.verify_groups import builds_to_verify, complete_verified, judge_verified
from workers.limits import process_limits
from workers.steps.context import StepContext
from workers.steps.progress import publish_problems, publish_progress
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
    judged: list[Judged] = []
    more = True
    while more:
        with context.database.write() as session:
            some, more = judge_verified(session, context.claim, found, plan_version=context.plan_version)
        context.wake((), some)
        judged += some
        if more:
            context.database.pause()
    with context.database.write() as session:
        again = complete_verified(session, context.claim, members, plan_version=context.plan_version, verify=spent)
    context.wake(again)
    publish_problems(context, [one.problem for one in judged])
    publish_progress(context)


def _new_verdict(subject: str, verdict: CpuVerdict) -> NewVerdict:
    return NewVerdict(
        subject, verdict.verdict, verdict.message, verdict.details, verdict.wall_seconds, verdict.cpu_seconds
    )
