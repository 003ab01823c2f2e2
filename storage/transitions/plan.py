"""Record the result of a plan task, a part at a time: candidates, the builds that they need, and what follows from
stored results. Writing a part twice changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update

from cukiln.types import StageSeconds
from storage.database.device_classes import is_predicted
from storage.database.session import Session, clock_of
from storage.database.sql import core, insert_new
from storage.database.tables import LIVE, CandidateRow, JobProblemRow
from storage.entities.builds import NewBuild
from storage.entities.stage_times import add_seconds
from storage.entities.verdicts import forget_outgrown
from storage.queue.new_tasks import COMPILE
from storage.queue.tasks import Claim, hold
from storage.transitions.judge import Judged, finish_judged
from storage.transitions.pending_builds import want_builds
from storage.transitions.pending_verification import Followed, Versions, add_judging, judge_known, unjudged

CANDIDATES_AT_ONCE = 400
"""Of one transaction: about 60 ms of two shared cores."""


@dataclass(frozen=True)
class NewCandidate:
    candidate: str
    schedule: dict[str, Any]
    kernel: str
    build: str


@dataclass(frozen=True)
class PlannedProblem:
    """The result of lowering a problem. `rejections`: rule -> {count, example, message}. A problem with an `error`
    fails when it is finished."""

    id: int
    candidate_count: int
    space_size: int
    rejections: Mapping[str, Any]
    lower: StageSeconds
    error: str | None = None


def record_candidates(
    session: Session,
    claim: Claim,
    candidates: Iterable[tuple[int, NewCandidate]],
    builds: Mapping[str, NewBuild],
    versions: Versions,
) -> Followed:
    """Add candidates (by the ids of their problems, which are not marked planned yet) and request that their builds,
    which `builds` has by id, are compiled and verified. Returns what waits now. Raises `LostClaim`."""
    hold(session, claim)
    pairs = list(candidates)
    problem = core(JobProblemRow).c
    classes: dict[int, str] = dict(
        session.execute(
            select(problem.id, problem.device_class).where(
                problem.id.in_({id for id, _ in pairs}), problem.state.in_(LIVE), ~problem.planned
            )
        ).all()
    )
    rows: list[dict[str, Any]] = []
    needed: set[str] = set()
    to_measure: set[str] = set()
    for id, candidate in pairs:
        if id in classes:
            rows.append({"job_problem_id": id, **vars(candidate)})
            needed.add(candidate.build)
            if not is_predicted(classes[id]):
                to_measure.add(candidate.build)
    insert_new(session, CandidateRow, rows)
    new_builds = [builds[build] for build in sorted(needed)]
    forget_outgrown(session, needed, versions.limits)
    pending = want_builds(session, claim.job_id, new_builds, to_measure, versions.limits.get(COMPILE))
    of_problems = core(CandidateRow).c.job_problem_id.in_(classes)
    judged, _ = judge_known(session, needed, versions, of_problems, most=None)
    waiting = add_judging(session, unjudged(session, needed, of_problems))
    return Followed(judged, [*waiting, *((COMPILE, target) for target in pending.elements())])


def end_plan(session: Session, claim: Claim, problem: PlannedProblem, in_queue: float = 0.0) -> list[Judged]:
    """Mark a problem planned, all of whose candidates are recorded; returns it if its next task is added at once.
    `in_queue`: seconds that it waited for a planner. Raises `LostClaim`."""
    hold(session, claim)
    planned = session.scalar(
        update(JobProblemRow)
        .where(JobProblemRow.id == problem.id, JobProblemRow.state.in_(LIVE), ~JobProblemRow.planned)
        .values(
            planned=True,
            state="running",
            started_at=clock_of(session).now(),
            space_size=problem.space_size,
            candidate_count=problem.candidate_count,
            rejections=dict(problem.rejections),
            error=problem.error,
        )
        .returning(JobProblemRow.id)
    )
    if planned is None:
        return []
    add_seconds(session, {problem.id: {"lower": problem.lower, "queue": StageSeconds(wall=in_queue)}})
    return finish_judged(session, [problem.id])
