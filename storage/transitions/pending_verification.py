"""Tasks that follow a compile: verification on the CPU for `predicted:` problems, measuring for others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Row, select, true

from codegen.identity import PlanVersions
from storage.database.device_classes import asks_predicted, is_predicted
from storage.database.session import Session, clock_of
from storage.database.sql import chunks, core, rows_among
from storage.database.tables import LIVE, BuildRow, CandidateRow, JobProblemRow, JobRow
from storage.queue.new_tasks import MEASURE, VERIFY, NewTask, add_again, measure_ref
from storage.transitions.apply_verdicts import (
    NextStep,
    add_next_steps,
    compile_failures,
    cpu_verdicts,
    give_findings,
    give_verdicts,
    has_time_left,
    of_problems,
)

MEASURE_SECONDS = 0.5
"""Predicted for verifying and timing the candidate of a build: 0.3 s of samples at most, and its verification. It only
orders the queue and starts the ETA, which then follows what was observed."""
VERIFY_SECONDS, VERIFY_KERNEL_SECONDS = 1.0, 0.25
"""Predicted for verifying a group on the CPU: g++'s headers and the child, and each kernel."""


@dataclass(frozen=True)
class Versions:
    """Which stored results of a build are valid: verdicts of these verification plans, times under `drivers`, today's
    by device class, and what no limit ended that is larger now: `limits` by stage or device kind, then by name."""

    cpu_plans: PlanVersions
    gpu_plans: PlanVersions
    drivers: Mapping[str, str]
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Followed:
    """What follows from compiled builds: problems with a new task, and (kind, target) of tasks that newly wait."""

    next_steps: list[NextStep]
    waiting: list[tuple[str, str | None]]


Unverified = Row[Any]
"""A job (`job_id`) with time left has candidates without a verdict on a `device_class` that name a compiled `build`,
with its `group_id` and `target`."""


def apply_known_verdicts(
    session: Session,
    build_ids: Iterable[str],
    versions: Versions,
    which: ColumnElement[bool] | None = None,
    *,
    most: int | None,
) -> tuple[list[NextStep], bool]:
    """Give candidates of these builds without a verdict, in whichever job, what is stored: that they do not compile, a
    verdict of the CPU (`predicted:` problems), else a verdict or a time of a GPU. At most so many, and only `which`, a
    condition on their rows.

    Returns the problems whose candidates all have a verdict now (their next tasks are added), and whether there may be
    more candidates: call it again. Doing it twice changes nothing.
    """
    these = true() if which is None else which
    touched: list[int] = []

    def left() -> int | None:
        return None if most is None else most - len(touched)

    for ids in chunks(set(build_ids)):
        touched += give_verdicts(session, compile_failures(session, ids), these, left())
        proved = cpu_verdicts(session, ids, versions.cpu_plans)
        touched += give_verdicts(session, proved, these & of_problems(asks_predicted()), left())
        touched += give_findings(session, ids, versions.gpu_plans, versions.drivers, these, left())
    return add_next_steps(session, touched), most is not None and len(touched) >= most


def unverified(
    session: Session, build_ids: Iterable[str], which: ColumnElement[bool] | None = None
) -> list[Unverified]:
    """Those of these builds that compiled and have no verdict yet. `which`: a condition on candidates' rows."""
    candidate = core(CandidateRow).c
    columns = (
        BuildRow.id.label("build"),
        BuildRow.group_id,
        BuildRow.target,
        JobProblemRow.device_class,
        JobProblemRow.job_id,
    )
    query = (
        select(*columns)
        .distinct()
        .select_from(core(CandidateRow))
        .join(BuildRow, BuildRow.id == candidate.build)
        .join(JobProblemRow, JobProblemRow.id == candidate.job_problem_id)
        .join(JobRow, JobRow.id == JobProblemRow.job_id)
        .where(candidate.verdict.is_(None), BuildRow.state == "ok", BuildRow.group_id.is_not(None))
        .where(JobProblemRow.state.in_(LIVE), has_time_left(clock_of(session).now()))
        .where(true() if which is None else which)
    )
    return rows_among(session, query, candidate.build, build_ids)


def add_verification(
    session: Session, waiting: Iterable[Unverified], device_class: str | None = None
) -> list[tuple[str, str | None]]:
    """Verify and measure tasks for these (on one device class, where given): one per group and kind, for all jobs that
    wait for it. Returns (kind, target) of those that wait now and did not before."""
    by_place: dict[tuple[str, str, str], list[Unverified]] = {}
    for row in waiting:
        if device_class not in (None, row.device_class):
            continue
        if is_predicted(row.device_class):
            place = (VERIFY, row.group_id, row.target)
        else:
            place = (MEASURE, measure_ref(row.group_id, row.device_class), row.device_class)
        by_place.setdefault(place, []).append(row)
    # A job may have ended since its rows were read.
    still_live = select(JobRow.id).where(JobRow.state.in_(LIVE))
    job_ids = {row.job_id for rows in by_place.values() for row in rows}
    live = {id for (id,) in rows_among(session, still_live, JobRow.id, job_ids)}
    tasks = [
        NewTask(kind, ref, target, jobs, _seconds(kind, len({row.build for row in rows})))
        for (kind, ref, target), rows in sorted(by_place.items())
        if (jobs := tuple(sorted({row.job_id for row in rows} & live)))
    ]
    return [(task.kind, task.target) for task in add_again(session, tasks)]


def _seconds(kind: str, builds: int) -> float:
    return VERIFY_SECONDS + VERIFY_KERNEL_SECONDS * builds if kind == VERIFY else MEASURE_SECONDS * builds
