"""Record what a planner found out, in one transaction: candidates, builds, groups, and the work that follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import update

from storage.builds import NewBuild
from storage.database import Session, clock_of
from storage.items import Claim, complete
from storage.judge import LIVE
from storage.judging_work import MEASURE_SECONDS
from storage.problems import problems_to_plan
from storage.rows import insert_new
from storage.tables import CandidateRow, JobProblemRow
from storage.wanted_builds import NewGroup, RecordedPlan, see_to_builds

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
class PlannedProblem:
    """`rejections`: rule -> {count, example, message}. A problem with an `error` fails when it is finished.
    `screening`: the builds are those of screening, after which the best candidates get others (`storage.screening`)."""

    id: int
    candidates: Sequence[NewCandidate]
    space_size: int
    rejections: Mapping[str, Any]
    lower_wall: float
    lower_cpu: float
    error: str | None = None
    screening: bool = False


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
    """Complete the plan item with everything that follows from it. Raises `LostClaim`, and `PlanOutdated` as
    `see_to_builds` does, which says what becomes of the builds and what the other parameters are."""
    complete(session, claim)
    live = _update_problems(session, problems, claim.waited_seconds / max(1, len(problems)))
    candidates = [
        (problem, candidate) for problem in problems if problem.id in live for candidate in problem.candidates
    ]
    _insert_candidates(session, candidates)
    return see_to_builds(
        session,
        str(claim.job_id),
        live,
        ((problem.id, candidate.build) for problem, candidate in candidates),
        builds,
        groups,
        plan_version=plan_version,
        gpu_plan_version=gpu_plan_version,
        drivers=drivers,
        seconds_per_measurement=seconds_per_measurement,
    )


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
                screening=problem.screening,
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
            "screening_build": candidate.build if problem.screening else None,
        }
        for problem, candidate in candidates
    ]
    insert_new(session, CandidateRow, rows)
