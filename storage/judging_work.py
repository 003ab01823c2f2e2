"""The work that gets builds judged: proofs on the CPU where `predicted:` problems wait, measuring where others do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sqlalchemy import func, select, true

from storage.database import Session, clock_of
from storage.device_classes import is_predicted
from storage.judge import LIVE, Judged, has_time_left, judge_builds
from storage.judge_gpu import judge_measured
from storage.new_items import MEASURE, VERIFY, NewItem, add_again, measure_ref
from storage.rows import chunks
from storage.tables import BuildRow, CandidateRow, JobProblemRow, JobRow

MEASURE_SECONDS = 0.5
"""Predicted for proving and timing one candidate: 0.3 s of samples at most, and its proof. Only orders the queue and
starts the ETA, which from then on follows what was observed."""
VERIFY_SECONDS, VERIFY_KERNEL_SECONDS = 1.0, 0.25
"""Predicted for proving a group on the CPU: g++'s headers and the child, and each kernel."""


@dataclass(frozen=True)
class Versions:
    """What counts as known of a build: verdicts of these test plans, and times under `drivers`, today's by device
    class."""

    plan_version: str
    gpu_plan_version: str
    drivers: Mapping[str, str]


@dataclass(frozen=True)
class Followed:
    """What follows from builds that are compiled: problems that go on, and (kind, target) of the items that wait now
    and did not before."""

    judged: list[Judged]
    waiting: list[tuple[str, str | None]]


@dataclass(frozen=True)
class _Unjudged:
    """So many unjudged candidates of live problems of a job with time left, on a device class, name this build, which
    has compiled."""

    build: str
    group_id: str | None
    target: str
    device_class: str
    job_id: str
    candidates: int


def judge_known(session: Session, build_ids: Iterable[str], versions: Versions) -> list[Judged]:
    """Give the candidates of these builds what is known of them, in whichever job; returns the problems that go on."""
    builds = set(build_ids)
    judged = {*judge_builds(session, builds, versions.plan_version)}
    judged.update(judge_measured(session, builds, versions.gpu_plan_version, versions.drivers))
    return sorted(judged)


def add_judging(
    session: Session, build_ids: Iterable[str], device_class: str | None = None, job_id: str | None = None
) -> list[tuple[str, str | None]]:
    """Verify and measure items for what is unjudged of these builds (on one device class, for one job, where given):
    one per group and way to judge it, for all jobs that wait for it. Returns (kind, target) of those that wait now and
    did not before."""
    by_place: dict[tuple[str, str], list[_Unjudged]] = {}
    targets: dict[tuple[str, str], str] = {}
    for one in _unjudged(session, build_ids, job_id):
        if device_class not in (None, one.device_class):
            continue
        if is_predicted(one.device_class):
            place, target = (VERIFY, str(one.group_id)), one.target
        else:
            place, target = (MEASURE, measure_ref(str(one.group_id), one.device_class)), one.device_class
        by_place.setdefault(place, []).append(one)
        targets[place] = target
    items = [
        NewItem(kind, ref, targets[kind, ref], tuple(sorted({one.job_id for one in waiting})), _seconds(kind, waiting))
        for (kind, ref), waiting in by_place.items()
    ]
    return [(item.kind, item.target) for item in add_again(session, items)]


def _seconds(kind: str, waiting: list[_Unjudged]) -> float:
    if kind == VERIFY:
        return VERIFY_SECONDS + VERIFY_KERNEL_SECONDS * len({one.build for one in waiting})
    return MEASURE_SECONDS * sum(one.candidates for one in waiting)


def _unjudged(session: Session, build_ids: Iterable[str], job_id: str | None) -> list[_Unjudged]:
    columns = (BuildRow.id, BuildRow.group_id, BuildRow.target, JobProblemRow.device_class, JobProblemRow.job_id)
    found: list[_Unjudged] = []
    for ids in chunks(set(build_ids)):
        rows = session.execute(
            select(*columns, func.count())
            .select_from(CandidateRow)
            .join(BuildRow, BuildRow.id == CandidateRow.build)
            .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
            .join(JobRow, JobRow.id == JobProblemRow.job_id)
            .where(CandidateRow.build.in_(ids), CandidateRow.verdict.is_(None), BuildRow.state == "ok")
            .where(JobProblemRow.state.in_(LIVE), BuildRow.group_id.is_not(None))
            .where(has_time_left(clock_of(session).now()))
            .where(true() if job_id is None else JobProblemRow.job_id == job_id)
            .group_by(*columns)
            .order_by(BuildRow.id)
        )
        found += [_Unjudged(*row) for row in rows]
    return found
