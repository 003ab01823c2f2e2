"""Small groups that wait, of whichever job, are compiled in the file of the one that was claimed."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from codegen.compile_model import estimate
from codegen.group import longest_group
from codegen.kernel import Kernel
from codegen.share_file import Small, sharing
from storage.compile_models import load_model
from storage.group_rows import Group, GroupKernel
from storage.jobs import job_state
from storage.join_groups import WaitingGroup, groups_to_join, join_groups
from workers.steps.context import StepContext

log = logging.getLogger("cukiln.take_along")


def take_along(context: StepContext, group: Group, toolchain: str) -> Group:
    """The claimed group, of this toolchain, with those that joined it. Raises LostClaim."""
    with context.database.read() as session:
        waiting = groups_to_join(session, context.claim)
        if not waiting:
            return group
        model = load_model(session, toolchain)
        job = job_state(session, context.claim.job_id) if context.claim.job_id is not None else None
    read = [(one.id, kernels) for one in waiting if (kernels := _readable(one))]
    chosen = sharing(
        Small(_kernels(group.kernels), longest_group(job.budget_seconds if job else None)),
        [small for _, small in read],
        workers=context.compile_workers(group.target),
        model=model,
        max_kernels=context.settings.group_kernels,
        max_bytes=context.settings.group_memory_bytes,
    )
    if not chosen:
        return group
    with context.database.write() as session:
        return join_groups(session, context.claim, [read[place][0] for place in chosen])


def _readable(waiting: WaitingGroup) -> Small | None:
    """None for kernels that this worker does not know: of an operator or a release that another one has."""
    try:
        kernels = _kernels(waiting.kernels)
        for kernel in kernels:
            estimate(kernel)
    except (LookupError, TypeError, ValueError) as error:
        log.debug("group %s is left to another worker: %s", waiting.id, error)
        return None
    return Small(kernels, longest_group(waiting.budget_seconds))


def _kernels(members: Sequence[GroupKernel]) -> tuple[Kernel, ...]:
    return tuple(Kernel.from_json(member.kernel_json) for member in members)
