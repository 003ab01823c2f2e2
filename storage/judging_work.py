"""The work that gets builds judged: proofs on the CPU where `predicted:` problems wait, measuring where others do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, select, true

from storage.database import Session, clock_of
from storage.device_classes import asks_predicted, is_predicted
from storage.judge import (
    LIVE,
    Judged,
    compile_failures,
    cpu_verdicts,
    finish_judged,
    give_verdicts,
    has_time_left,
    of_problems,
)
from storage.judge_gpu import give_findings
from storage.new_items import MEASURE, VERIFY, NewItem, add_again, measure_ref
from storage.rows import chunks, core
from storage.tables import BuildRow, CandidateRow, JobProblemRow, JobRow

MEASURE_SECONDS = 0.5
"""Predicted for proving and timing the candidate of a build: 0.3 s of samples at most, and its proof. Only orders the
queue and starts the ETA, which from then on follows what was observed."""
VERIFY_SECONDS, VERIFY_KERNEL_SECONDS = 1.0, 0.25
"""Predicted for proving a group on the CPU: g++'s headers and the child, and each kernel."""


@dataclass(frozen=True)
class Versions:
    """What counts as known of a build: verdicts of these test plans, times under `drivers`, today's by device class,
    and what no limit ended that is larger now: `limits` by stage or venue, then by name."""

    plan_version: str
    gpu_plan_version: str
    drivers: Mapping[str, str]
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Followed:
    """What follows from builds that are compiled: problems that go on, and (kind, target) of the items that wait now
    and did not before."""

    judged: list[Judged]
    waiting: list[tuple[str, str | None]]


@dataclass(frozen=True)
class Unjudged:
    """A job with time left has unjudged candidates on a device class that name this build, which has compiled."""

    build: str
    group_id: str
    target: str
    device_class: str
    job_id: str


def judge_known(
    session: Session,
    build_ids: Iterable[str],
    versions: Versions,
    which: ColumnElement[bool] | None = None,
    *,
    most: int | None,
) -> tuple[list[Judged], bool]:
    """Give unjudged candidates of these builds, in whichever job, what is known of them: that they do not compile, a
    proof on the CPU (`predicted:` problems), else a finding or a time of a GPU. At most so many, and only `which`, a
    condition on their rows.

    Returns the problems that are now completely judged (their next items are added), and whether there may be more
    candidates: call it again. Doing it twice changes nothing.
    """
    these = true() if which is None else which
    touched: list[int] = []

    def left() -> int | None:
        return None if most is None else most - len(touched)

    for ids in chunks(set(build_ids)):
        touched += give_verdicts(session, compile_failures(session, ids), these, left())
        proved = cpu_verdicts(session, ids, versions.plan_version)
        touched += give_verdicts(session, proved, these & of_problems(asks_predicted()), left())
        touched += give_findings(session, ids, versions.gpu_plan_version, versions.drivers, these, left())
    return finish_judged(session, touched), most is not None and len(touched) >= most


def unjudged(session: Session, build_ids: Iterable[str], which: ColumnElement[bool] | None = None) -> list[Unjudged]:
    """Who waits for these builds to be judged, now that they are compiled. `which`: a condition on candidates' rows."""
    candidate = core(CandidateRow).c
    columns = (
        BuildRow.id.label("build"),
        BuildRow.group_id,
        BuildRow.target,
        JobProblemRow.device_class,
        JobProblemRow.job_id,
    )
    found: list[Unjudged] = []
    for ids in chunks(set(build_ids)):
        rows = session.execute(
            select(*columns)
            .distinct()
            .select_from(core(CandidateRow))
            .join(BuildRow, BuildRow.id == candidate.build)
            .join(JobProblemRow, JobProblemRow.id == candidate.job_problem_id)
            .join(JobRow, JobRow.id == JobProblemRow.job_id)
            .where(candidate.build.in_(ids), candidate.verdict.is_(None), BuildRow.state == "ok")
            .where(JobProblemRow.state.in_(LIVE), BuildRow.group_id.is_not(None))
            .where(has_time_left(clock_of(session).now()))
            .where(true() if which is None else which)
        )
        found += [Unjudged(**row._mapping) for row in rows]
    return found


def add_judging(
    session: Session, waiting: Iterable[Unjudged], device_class: str | None = None
) -> list[tuple[str, str | None]]:
    """Verify and measure items for these (on one device class, where given): one per group and way to judge it, for all
    jobs that wait for it. Returns (kind, target) of those that wait now and did not before."""
    by_place: dict[tuple[str, str], list[Unjudged]] = {}
    targets: dict[tuple[str, str], str] = {}
    for one in waiting:
        if device_class not in (None, one.device_class):
            continue
        if is_predicted(one.device_class):
            place, target = (VERIFY, one.group_id), one.target
        else:
            place, target = (MEASURE, measure_ref(one.group_id, one.device_class)), one.device_class
        by_place.setdefault(place, []).append(one)
        targets[place] = target
    live = _live(session, {one.job_id for some in by_place.values() for one in some})
    items = [
        NewItem(kind, ref, targets[kind, ref], jobs, _seconds(kind, len({one.build for one in some})))
        for (kind, ref), some in sorted(by_place.items())
        if (jobs := tuple(sorted({one.job_id for one in some} & live)))
    ]
    return [(item.kind, item.target) for item in add_again(session, items)]


def _live(session: Session, job_ids: Collection[str]) -> set[str]:
    """Those that have not ended since they were looked for."""
    found: set[str] = set()
    for ids in chunks(job_ids):
        found.update(session.scalars(select(JobRow.id).where(JobRow.id.in_(ids), JobRow.state.in_(LIVE))))
    return found


def _seconds(kind: str, builds: int) -> float:
    return VERIFY_SECONDS + VERIFY_KERNEL_SECONDS * builds if kind == VERIFY else MEASURE_SECONDS * builds
