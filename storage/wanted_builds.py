"""Builds that a job's problems need: each is compiled by one group, then proved or measured.

Planners run side by side and see each other's builds only here. So each build is given to exactly one group when it is
asked for, whatever the planner believed: a group keeps the builds that nobody else has taken meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select, update

from storage.builds import Build, NewBuild, known_builds
from storage.database import Session
from storage.device_classes import is_predicted
from storage.errors import PlanOutdated
from storage.group_rows import add_group
from storage.judge import Judged, finish_judged, judge_builds
from storage.judge_gpu import judge_measured
from storage.judging_work import MEASURE_SECONDS, add_measuring, builds_to_prove, demand
from storage.new_items import COMPILE, UNENDED, VERIFY
from storage.rows import chunks
from storage.tables import ItemRow, JobRow


@dataclass(frozen=True)
class NewGroup:
    """Build ids in render order, as the planner would group those it did not know."""

    builds: tuple[str, ...]
    target: str
    toolchain: str
    predicted_seconds: float


@dataclass(frozen=True)
class RecordedPlan:
    """`groups`: ids of the groups added; `judged`: problems that go on at once.

    `waiting`: (kind, target) of the items added that get judged what was compiled before.
    """

    groups: list[str]
    judged: list[Judged]
    waiting: list[tuple[str, str | None]]


def see_to_builds(
    session: Session,
    job_id: str,
    problems: Mapping[int, str],
    wanted: Iterable[tuple[int, str]],
    builds: Mapping[str, NewBuild],
    groups: Sequence[NewGroup],
    *,
    plan_version: str,
    gpu_plan_version: str,
    drivers: Mapping[str, str],
    seconds_per_measurement: float = MEASURE_SECONDS,
) -> RecordedPlan:
    """See to it that what the job's problems (device classes by id) want is compiled and judged. `wanted`: problem and
    build of each of their unjudged candidates, whose rows are written already.

    `builds` holds all these builds, `groups` those to compile; `drivers` is today's by device class. What is known of
    builds is given to candidates at once: verdicts of the CPU to those of `predicted:` problems, times on a device
    class under its driver to the others. What stands unjudged, and nobody is at work on, is proved (in a group of its
    own) and measured. Work of other jobs that this one now waits for takes its priority if it is higher.
    Raises `PlanOutdated` when a build that was left out of `groups` as known is not made by anyone any more, or has no
    library and is to be measured.
    """
    job = _Job.load(session, job_id)
    pairs = list(wanted)
    needed = {build for _, build in pairs}
    measured = {build for problem, build in pairs if not is_predicted(problems[problem])}
    added = _add_groups(session, job, [_only(group, needed) for group in groups], builds, measured)
    if lost := needed - set(known_builds(session, needed, with_library=measured)):
        raise PlanOutdated(tuple(sorted(lost)))
    judged = {*judge_builds(session, needed, plan_version)}
    judged.update(judge_measured(session, needed, gpu_plan_version, drivers))
    judged.update(finish_judged(session, problems))
    left = demand(session, needed)
    verifications = _add_verifications(session, job, builds_to_prove(left), builds)
    waiting = add_measuring(session, left, seconds_per_measurement)
    _raise_priorities(session, job, needed)
    waiting += [(VERIFY, target) for _, target in verifications]
    return RecordedPlan([*added, *(group_id for group_id, _ in verifications)], sorted(judged), waiting)


@dataclass(frozen=True)
class _Job:
    id: str
    priority: int

    @staticmethod
    def load(session: Session, job_id: str) -> _Job:
        return _Job(job_id, session.scalars(select(JobRow.priority).where(JobRow.id == job_id)).one())


def _add_groups(
    session: Session, job: _Job, groups: Sequence[NewGroup], builds: Mapping[str, NewBuild], measured: set[str]
) -> list[str]:
    added = []
    grouped = [build for group in groups for build in group.builds]
    taken = set(known_builds(session, grouped, with_library=measured))
    for group in groups:
        mine = [build for build in dict.fromkeys(group.builds) if build not in taken]
        taken.update(mine)
        if mine:
            share = group.predicted_seconds * len(mine) / len(group.builds)
            kernels = [builds[build] for build in mine]
            added.append(
                add_group(session, COMPILE, job.id, job.priority, group.target, group.toolchain, kernels, share)
            )
    return added


def _add_verifications(
    session: Session, job: _Job, to_prove: set[str], builds: Mapping[str, NewBuild]
) -> list[tuple[str, str]]:
    """Groups that only get proved what was compiled before: for another test plan, cut short by a cancel, or measured
    until now. Returns their ids and targets.
    """
    unjudged = known_builds(session, to_prove).values()
    at_work = _groups_at_work(session, {build.verify_group_id for build in unjudged})
    by_toolchain: dict[tuple[str, str], list[Build]] = {}
    for build in unjudged:
        if build.verify_group_id not in at_work:
            by_toolchain.setdefault((build.target, build.toolchain), []).append(build)
    added = []
    for (target, toolchain), found in by_toolchain.items():
        members = [builds[build.id] for build in found]
        added.append((add_group(session, VERIFY, job.id, job.priority, target, toolchain, members, 0.0), target))
    return added


def _groups_at_work(session: Session, group_ids: set[str | None]) -> set[str]:
    """Those with a compile or verify item that waits or is claimed."""
    found: set[str] = set()
    for ids in chunks(group for group in group_ids if group is not None):
        found.update(
            session.scalars(
                select(ItemRow.ref).where(
                    ItemRow.kind.in_((COMPILE, VERIFY)), ItemRow.ref.in_(ids), ItemRow.state.in_(UNENDED)
                )
            )
        )
    return found


def _raise_priorities(session: Session, job: _Job, needed: set[str]) -> None:
    """Compiling and proving of a less urgent job that this one waits for becomes as urgent as this one."""
    known = known_builds(session, needed).values()
    groups = {group for build in known for group in (build.group_id, build.verify_group_id) if group is not None}
    for ids in chunks(groups):
        session.execute(
            update(ItemRow)
            .where(ItemRow.kind.in_((COMPILE, VERIFY)), ItemRow.ref.in_(ids), ItemRow.priority < job.priority)
            .values(priority=job.priority)
            .execution_options(synchronize_session=False)
        )


def _only(group: NewGroup, needed: set[str]) -> NewGroup:
    """The group without builds that only problems ended meanwhile would have needed."""
    kept = tuple(build for build in group.builds if build in needed)
    share = len(kept) / len(group.builds) if group.builds else 0.0
    return NewGroup(kept, group.target, group.toolchain, group.predicted_seconds * share)
