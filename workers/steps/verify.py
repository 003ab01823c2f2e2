"""Verify: every kernel of a group is run on the CPU against its operator's reference before it may win."""

from __future__ import annotations

import time
from collections.abc import Mapping

from codegen.kernel import Kernel
from cukiln.types import StageSeconds
from storage.group_rows import GroupKernel
from storage.groups import judge_group
from storage.judge import Judged
from storage.verdicts import NewVerdict
from storage.verify_groups import builds_to_verify, complete_verified, record_verdicts, skip_build, verify_shares
from workers.limits import process_limits
from workers.steps.context import StepContext
from workers.steps.progress import tell
from workers.stopwatch import Stopwatch
from workers.verify_cpu import CpuVerdict, verify_on_cpu

RECORD_SECONDS = 2.0
"""Between two transactions of verdicts: what a lost worker had found since the last is found again."""


def verify(context: StepContext) -> None:
    """Judge what the item's group compiled and nobody has judged; verdicts belong to slices. They are recorded as they
    come: an attempt that is lost has done its part. After losses one kernel is judged alone, and the item waits again
    for the rest."""
    members, judged = _what_to_verify(context)
    slices = {Kernel.from_json(member.kernel_json): member.slice for member in members}
    by_id = {kernel.id: digest for kernel, digest in slices.items()}
    stopwatch = Stopwatch()
    recorder = _Recorder(context, by_id)
    verdicts = verify_on_cpu(
        list(slices),
        context.toolchain,
        context.processes,
        process_limits(context.settings.verify_limits),
        seed=context.fresh_seed(),
        sanitize=context.settings.verify_sanitize,
        cancel=context.cancel,
        on_result=recorder.add,
    )
    context.check()
    spent = StageSeconds(wall=stopwatch.read().wall, cpu=sum(verdict.cpu_seconds for verdict in verdicts))
    version = context.plan_version
    recorder.record()
    judged += context.in_parts(lambda session: judge_group(session, context.claim, context.versions(session)))
    with context.database.read() as session:
        shared = verify_shares(session, context.claim, members, spent)
    again = context.complete(
        shared,
        lambda session: complete_verified(session, context.claim, members, plan_version=version, verify=spent),
    )
    context.wake(again)
    tell(context, judged)


def _what_to_verify(context: StepContext) -> tuple[list[GroupKernel], list[Judged]]:
    """The kernels of this attempt, and the problems that go on because one was skipped that was lost too often."""
    claim, judged = context.claim, list[Judged]()
    with context.database.read() as session:
        members = builds_to_verify(session, claim.ref, context.plan_version)
    if members and claim.is_lost:
        lost, *members = members
        judged = context.in_parts(lambda session: skip_build(session, claim, lost.build))
    return (members[:1] if claim.is_alone else members), judged


class _Recorder:
    """Writes verdicts, some seconds' worth at a time."""

    def __init__(self, context: StepContext, slices: Mapping[str, str]) -> None:
        self._context, self._slices = context, slices  # digests by kernel
        self._found: list[NewVerdict] = []
        self._recorded_at = time.monotonic()

    def add(self, verdict: CpuVerdict) -> None:
        self._found.append(_new_verdict(self._slices[verdict.kernel_id], verdict))
        if time.monotonic() - self._recorded_at > RECORD_SECONDS:
            self.record()

    def record(self) -> None:
        context, found = self._context, self._found
        with context.database.write() as session:
            record_verdicts(session, context.claim, found, context.plan_version)
        self._found, self._recorded_at = [], time.monotonic()


def _new_verdict(subject: str, verdict: CpuVerdict) -> NewVerdict:
    return NewVerdict(
        subject, verdict.verdict, verdict.message, verdict.details, verdict.wall_seconds, verdict.cpu_seconds
    )
