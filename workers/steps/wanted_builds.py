"""Builds that a step wants for a job's candidates: what nobody has compiled becomes groups, written with the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from codegen.compile_model import PRIOR, CompileModel
from codegen.group import group, longest_group
from codegen.identity import build_id
from codegen.kernel import Kernel
from codegen.render_group import slice_digest
from storage.builds import NewBuild, known_builds
from storage.compile_models import idle_workers, load_model
from storage.database import Session
from storage.errors import PlanOutdated
from storage.jobs import JobStatus
from storage.wanted_builds import NewGroup, RecordedPlan
from workers.steps.context import StepContext

RECORD_ATTEMPTS = 10  # each is outdated only by another job that was cancelled in the milliseconds before it

Record = Callable[[Session, Mapping[str, NewBuild], Sequence[NewGroup]], RecordedPlan]
"""Writes a step's results, with the builds and groups to compile; raises `PlanOutdated` as `see_to_builds` does."""


@dataclass(frozen=True)
class WantedBuild:
    """A kernel's build under a toolchain, by its digest."""

    new: NewBuild
    kernel: Kernel
    target: str
    toolchain: str

    @classmethod
    def of(cls, kernel: Kernel, target: str, toolchain: str) -> WantedBuild:
        text = slice_digest(kernel)
        build = build_id(kernel.id, text, toolchain, target)
        new = NewBuild(build, kernel.id, text, kernel.to_json(), PRIOR.kernel_seconds(kernel))
        return cls(new, kernel, target, toolchain)


def record_wanted(
    context: StepContext, wanted: Mapping[str, WantedBuild], to_measure: Set[str], job: JobStatus | None, record: Record
) -> RecordedPlan:
    """Group what nobody has built of `wanted` (by build id), or whose library is lost though it is to be measured, and
    `record` it all, in one transaction; again where a build that was being made was given up meanwhile. Then write the
    tickets of what waits. Raises PlanOutdated where that does not end."""
    for attempt in range(RECORD_ATTEMPTS):
        context.check()
        with context.database.read() as session:
            known = known_builds(session, list(wanted), with_library=to_measure)
            unknown = {build: one for build, one in wanted.items() if build not in known}
            models = {name: load_model(session, name) for name in {one.toolchain for one in unknown.values()}}
            groups = _groups(context, session, unknown, models, longest_group(job.budget_seconds if job else None))
        builds = {build: one.new for build, one in wanted.items()}
        for build, one in unknown.items():
            seconds = models[one.toolchain].kernel_seconds(one.kernel)
            builds[build] = replace(one.new, predicted_seconds=seconds)
        try:
            with context.database.write() as session:
                recorded = record(session, builds, groups)
        except PlanOutdated:
            if attempt + 1 == RECORD_ATTEMPTS:
                raise
            continue
        _write_tickets(context, groups, recorded)
        return recorded
    raise AssertionError("unreachable: the last attempt returns or raises")


def _write_tickets(context: StepContext, groups: Sequence[NewGroup], recorded: RecordedPlan) -> None:
    for new_group in groups:
        context.enqueue("compile", new_group.target)
    for kind, target in recorded.waiting:
        context.enqueue(kind, target)
    for judged in recorded.judged:
        context.enqueue(judged.kind, judged.target)


def _groups(
    context: StepContext,
    session: Session,
    unknown: Mapping[str, WantedBuild],
    models: Mapping[str, CompileModel],
    max_seconds: float,
) -> list[NewGroup]:
    """Groups of one target and toolchain each, those that take longest first, sized by what compiling took before."""
    found: list[NewGroup] = []
    for target, toolchain in sorted({(one.target, one.toolchain) for one in unknown.values()}):
        mine = {b: one for b, one in unknown.items() if (one.target, one.toolchain) == (target, toolchain)}
        build_of = {one.kernel: build for build, one in mine.items()}
        for members in group(
            list(build_of),
            workers=idle_workers(session, context.claim, target, context.compile_workers(target)),
            model=models[toolchain],
            max_seconds=max_seconds,
            max_kernels=context.settings.group_kernels,
            max_bytes=context.settings.group_memory_bytes,
        ):
            found.append(
                NewGroup(
                    builds=tuple(build_of[kernel] for kernel in members),
                    target=target,
                    toolchain=toolchain,
                    predicted_seconds=models[toolchain].seconds(members),
                )
            )
    return found
