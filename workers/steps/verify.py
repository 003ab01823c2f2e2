"""Verify: every kernel of a group is run on the CPU against its operator's reference before it may win."""

import time
from collections.abc import Mapping

from codegen.kernel import Kernel
from codegen.primitives import TURING_SUMS
from codegen.targets import target as find_target
from cukiln.types import StageSeconds
from storage.entities.verdicts import NewVerdict
from storage.transitions.apply_verdicts import NextStep
from storage.transitions.groups import (
    apply_group_verdicts,
    builds_to_verify,
    complete_verified,
    record_verdicts,
    skip_build,
    verify_shares,
)
from workers.cpu.verify import CpuVerdict, verify_on_cpu
from workers.processes.stopwatch import Stopwatch
from workers.steps.context import StepContext

RECORD_SECONDS = 2.0
"""Between two transactions of verdicts: what a lost worker had found since the last is found again."""


def verify(context: StepContext) -> None:
    """Verify what the task's group compiled, recorded as it comes. After losses one kernel is verified alone."""
    lease, next_steps = context.lease, list[NextStep]()
    plans = context.cpu_plans(lease.target)
    with context.database.read() as session:
        members = builds_to_verify(session, lease.ref, plans)
    if members and lease.is_lost:
        lost, *members = members
        next_steps = context.in_parts(lambda session: skip_build(session, lease, lost.build))
    members = members[:1] if lease.is_alone else members
    kernels = [Kernel.from_json(member.kernel_json) for member in members]
    of = {kernel.id: (member.slice, kernel.operator) for kernel, member in zip(kernels, members, strict=True)}
    stopwatch = Stopwatch()
    recorder = _Recorder(context, of)
    verdicts = verify_on_cpu(
        kernels,
        context.toolchain,
        context.processes,
        context.settings.limits("verify"),
        seed=context.fresh_seed(),
        sanitize=context.settings.verify_sanitize,
        sums=TURING_SUMS if lease.target is None else find_target(lease.target).tensor_sums,
        cancel=context.cancel,
        on_result=recorder.add,
    )
    context.check()
    spent = StageSeconds(wall=stopwatch.read().wall, cpu=sum(verdict.cpu_seconds for verdict in verdicts))
    recorder.record()
    next_steps += context.in_parts(
        lambda session: apply_group_verdicts(session, context.lease, context.versions(session))
    )
    with context.database.read() as session:
        shared = verify_shares(session, context.lease, members, spent)
    again = context.complete(
        shared,
        lambda session: complete_verified(session, context.lease, members, plans=plans, verify=spent),
    )
    context.wake(again)
    context.publish_steps(next_steps)


class _Recorder:
    """Writes verdicts, some seconds' worth at a time."""

    def __init__(self, context: StepContext, of: Mapping[str, tuple[str, str]]) -> None:
        self._context, self._of = context, of  # slice and operator by kernel
        self._found: list[NewVerdict] = []
        self._recorded_at = time.monotonic()

    def add(self, verdict: CpuVerdict) -> None:
        subject, operator = self._of[verdict.kernel_id]
        outcome = (verdict.verdict, verdict.message, verdict.details, verdict.wall_seconds, verdict.cpu_seconds)
        self._found.append(NewVerdict(subject, operator, *outcome))
        if time.monotonic() - self._recorded_at > RECORD_SECONDS:
            self.record()

    def record(self) -> None:
        context, verdicts = self._context, self._found
        with context.database.write() as session:
            record_verdicts(session, context.lease, verdicts, context.cpu_plans(context.lease.target))
        self._found, self._recorded_at = [], time.monotonic()
