"""Record what a planner found out, in one transaction: candidates, builds, groups, and the work that follows.

Planners run side by side and see each other's builds only here. So each build is given to exactly one group when the
plan is recorded, whatever the planner believed: a group keeps the builds that nobody else has taken meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update

from storage.builds import Build, NewBuild, known_builds
from storage.database import Session, clock_of
from storage.device_classes import is_predicted
from storage.errors import PlanOutdated
from storage.group_rows import add_group
from storage.items import Claim, complete
from storage.judge import LIVE, Judged, finish_judged, judge_builds
from storage.judge_gpu import judge_measured
from storage.judging_work import MEASURE_SECONDS, add_measuring, builds_to_prove, demand
from storage.new_items import COMPILE, UNENDED, VERIFY
from storage.problems import problems_to_plan
from storage.rows import chunks, insert_new
from storage.tables import CandidateRow, ItemRow, JobProblemRow, JobRow

__all__ = [
    "NewBuild",
    "NewCandidate",
    "NewGroup",
    "PlannedProblem",
    "RecordedPlan",
    "problems_to_plan",
    "record_plan",
]


@dataclass(frozen=True)
class NewCandidate:
    candidate: str
    schedule: dict[str, Any]
    kernel: str
    build: str


@dataclass(frozen=True)
class NewGroup:
    """Build ids in render order, as the planner would group those it did not know."""

    builds: tuple[str, ...]
    target: str
    toolchain: str
    predicted_seconds: float


@dataclass(frozen=True)
class PlannedProblem:
    """`rejections`: rule -> {count, example, message}. A problem with an `error` fails when it is finished."""

    id: int
    candidates: Sequence[NewCandidate]
    space_size: int
    rejections: Mapping[str, Any]
    lower_wall: float
    lower_cpu: float
    error: str | None = None


@dataclass(frozen=True)
class RecordedPlan:
    """`groups`: ids of the groups added; `judged`: problems that go on at once.

    `waiting`: (kind, target) of the items added that get judged what was compiled before.
    """

    groups: list[str]
    judged: list[Judged]
    waiting: list[tuple[str, str | None]]


def record_plan(
    session: Session,
    claim: Claim,
    problems: Sequence[PlannedProblem],
    builds: Mapping[str, NewBuild],
    groups: Sequence[NewGroup],
    *,
    plan_version: str,
    gpu_plan_version: str,
    drivers: Mapping[str, str],
    seconds_per_measurement: float = MEASURE_SECONDS,
) -> RecordedPlan:
    """Complete the plan item with everything that follows from it. Raises `LostClaim`.

    `builds` holds all builds that the candidates name, `groups` those to compile; `drivers` is today's by device class.
    What is known of builds is given to candidates at once: verdicts of the CPU to those of `predicted:` problems, times
    on a device class under its driver to the others. What stands unjudged, and nobody is at work on, is proved (in a
    group of its own) and measured. Work of other jobs that this one now waits for takes its priority if it is higher.
    Raises `PlanOutdated` when a build that was left out of `groups` as known is not made by anyone any more, or has no
    library and is to be measured.
    """
    complete(session, claim)
    job = _Job.load(session, str(claim.job_id))
    live = _update_problems(session, problems, claim.waited_seconds / max(1, len(problems)))
    candidates = [
        (problem, candidate) for problem in problems if problem.id in live for candidate in problem.candidates
    ]
    _insert_candidates(session, candidates)
    needed = {candidate.build for _, candidate in candidates}
    measured = {candidate.build for problem, candidate in candidates if not is_predicted(live[problem.id])}
    added = _add_groups(session, job, [_only(group, needed) for group in groups], builds, measured)
    if lost := needed - set(known_builds(session, needed, with_library=measured)):
        raise PlanOutdated(tuple(sorted(lost)))
    judged = {*judge_builds(session, needed, plan_version)}
    judged.update(judge_measured(session, needed, gpu_plan_version, drivers))
    judged.update(finish_judged(session, live))
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


def _update_problems(session: Session, problems: Sequence[PlannedProblem], in_queue: float) -> dict[int, str]:
    """Mark the problems planned; returns id and device class of those that still wait for a plan. `in_queue`: seconds
    that each had to wait for it."""
    now = clock_of(session).now()
    live = {}
    for problem in problems:
        found = session.execute(
            update(JobProblemRow)
            .where(JobProblemRow.id == problem.id, JobProblemRow.state.in_(LIVE), ~JobProblemRow.planned)
            .values(
                planned=True,
                state="running",
                started_at=now,
                space_size=problem.space_size,
                candidate_count=len(problem.candidates),
                rejections=dict(problem.rejections),
                seconds={
                    "lower": {"wall": problem.lower_wall, "cpu": problem.lower_cpu},
                    "queue": {"wall": in_queue, "cpu": 0.0},
                },
                error=problem.error,
            )
            .returning(JobProblemRow.device_class)
        ).one_or_none()
        if found is not None:
            live[problem.id] = found.device_class
    return live


def _insert_candidates(session: Session, candidates: Iterable[tuple[PlannedProblem, NewCandidate]]) -> None:
    rows = [
        {
            "job_problem_id": problem.id,
            "candidate": candidate.candidate,
            "schedule": candidate.schedule,
            "kernel": candidate.kernel,
            "build": candidate.build,
        }
        for problem, candidate in candidates
    ]
    insert_new(session, CandidateRow, rows)


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
