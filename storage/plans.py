"""Record what a planner finds out, a part at a time: candidates, the builds that they need, and what follows from those
that are known. Whatever part was written twice was written once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select, update

from cukiln.types import StageSeconds
from storage.builds import NewBuild
from storage.database import Session, clock_of
from storage.device_classes import is_predicted
from storage.items import Claim, hold
from storage.judge import LIVE, Judged, finish_judged
from storage.judging_work import Followed, Versions, add_judging, judge_known, unjudged
from storage.new_items import COMPILE
from storage.pending_builds import want_builds
from storage.rows import core, insert_new
from storage.seconds import add_seconds
from storage.tables import CandidateRow, JobProblemRow
from storage.verdicts import forget_outgrown

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
    """What lowering a problem came to. `rejections`: rule -> {count, example, message}. A problem with an `error` fails
    when it is finished."""

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
    """Add candidates (by the ids of their problems, which are not marked planned yet) and see to it that their builds,
    which `builds` has by id, are compiled and judged. Returns what waits now. Raises `LostClaim`."""
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
    for id, one in pairs:
        if id in classes:
            rows.append({"job_problem_id": id, **vars(one)})
            needed.add(one.build)
            if not is_predicted(classes[id]):
                to_measure.add(one.build)
    insert_new(session, CandidateRow, rows)
    new_builds = [builds[build] for build in sorted(needed)]
    forget_outgrown(session, needed, versions.limits)
    pending = want_builds(session, claim.job_id, new_builds, to_measure, versions.limits.get(COMPILE))
    mine = core(CandidateRow).c.job_problem_id.in_(classes)
    judged, _ = judge_known(session, needed, versions, mine, most=None)
    waiting = add_judging(session, unjudged(session, needed, mine))
    return Followed(judged, [*waiting, *((COMPILE, target) for target in pending.elements())])


def end_plan(session: Session, claim: Claim, problem: PlannedProblem, in_queue: float = 0.0) -> list[Judged]:
    """Mark a problem planned, all of whose candidates are recorded; returns it if it goes on at once. `in_queue`:
    seconds that it waited for a planner. Raises `LostClaim`."""
    hold(session, claim)
    found = session.execute(
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
    ).one_or_none()
    if found is None:
        return []
    add_seconds(session, {problem.id: {"lower": problem.lower, "queue": StageSeconds(wall=in_queue)}})
    return finish_judged(session, [problem.id])
