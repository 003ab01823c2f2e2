"""Record what a plan task made, a part at a time: candidates, builds, and what follows from stored results."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update

from cukiln.types import StageSeconds
from storage.database.session import Session, clock_of
from storage.database.sql import core, insert_new, is_predicted
from storage.database.tables import LIVE, CandidateRow, JobProblemRow
from storage.entities.groups import NewBuild
from storage.entities.stage_times import add_seconds
from storage.entities.verdicts import forget_outgrown
from storage.queue.new_tasks import COMPILE
from storage.queue.tasks import Lease, require_lease
from storage.transitions.apply_verdicts import (
    Followed,
    NextStep,
    Versions,
    add_next_steps,
    add_verification,
    apply_known_verdicts,
    unverified,
)
from storage.transitions.pending_builds import want_builds

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
    """`rejections`: rule -> {count, example, message}. A problem with an `error` fails when it is finished."""

    id: int
    candidate_count: int
    space_size: int
    rejections: Mapping[str, Any]
    lower: StageSeconds
    error: str | None = None


def record_candidates(
    session: Session,
    lease: Lease,
    candidates: Iterable[tuple[int, NewCandidate]],
    builds: Mapping[str, NewBuild],
    versions: Versions,
) -> Followed:
    """Add candidates (by the ids of their problems, which are not marked planned yet) and request that their builds,
    which `builds` has by id, are compiled and verified. Returns what waits now. Raises `LostLease`."""
    require_lease(session, lease)
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
    pending = want_builds(session, lease.job_id, new_builds, to_measure, versions.limits.get(COMPILE))
    of_problems = core(CandidateRow).c.job_problem_id.in_(classes)
    next_steps, _ = apply_known_verdicts(session, needed, versions, of_problems, most=None)
    waiting = add_verification(session, unverified(session, needed, of_problems))
    return Followed(next_steps, [*waiting, *((COMPILE, target) for target in pending.elements())])


def end_plan(session: Session, lease: Lease, problem: PlannedProblem, in_queue: float = 0.0) -> list[NextStep]:
    """Mark a problem planned, all of whose candidates are recorded; returns it if its next task is added at once.
    `in_queue`: seconds that it waited for a planner. Raises `LostLease`."""
    require_lease(session, lease)
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
    return add_next_steps(session, [problem.id])
