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
from storage.problems import problems_to_plan
from storage.rows import core, insert_new
from storage.seconds import add_seconds
from storage.tables import CandidateRow, JobProblemRow

__all__ = [
    "CANDIDATES_AT_ONCE",
    "NewBuild",
    "NewCandidate",
    "PlannedProblem",
    "end_plan",
    "problems_to_plan",
    "record_candidates",
]

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
    when it is finished. `screening`: the builds are those of screening, after which the best candidates get others
    (`storage.screening`)."""

    id: int
    candidate_count: int
    space_size: int
    rejections: Mapping[str, Any]
    lower: StageSeconds
    error: str | None = None
    screening: bool = False


def record_candidates(
    session: Session,
    claim: Claim,
    candidates: Iterable[tuple[int, NewCandidate]],
    builds: Mapping[str, NewBuild],
    versions: Versions,
    screening: Iterable[int] = (),
) -> Followed:
    """Add candidates (by the ids of their problems, which are not marked planned yet) and see to their builds, which
    `builds` has by id. `screening`: the problems whose builds are those of screening. Returns what waits now. Raises
    `LostClaim`."""
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
    live = [(id, one) for id, one in pairs if id in classes]
    screened = set(screening)
    insert_new(
        session,
        CandidateRow,
        [
            {
                "job_problem_id": id,
                "candidate": one.candidate,
                "schedule": one.schedule,
                "kernel": one.kernel,
                "build": one.build,
                "screening_build": one.build if id in screened else None,
            }
            for id, one in live
        ],
    )
    return see_to_builds(session, claim.job_id, [(id, classes[id], one.build) for id, one in live], builds, versions)


def see_to_builds(
    session: Session,
    job_id: str,
    wanted: Iterable[tuple[int, str, str]],
    builds: Mapping[str, NewBuild],
    versions: Versions,
) -> Followed:
    """See to it that what candidates of the job need is compiled and judged. `wanted`: problem, device class and build
    of each, whose rows are written already."""
    rows = set(wanted)
    needed = {build for _, _, build in rows}
    to_measure = {build for _, device_class, build in rows if not is_predicted(device_class)}
    pending = want_builds(session, job_id, [builds[build] for build in sorted(needed)], to_measure)
    mine = core(CandidateRow).c.job_problem_id.in_({id for id, _, _ in rows})
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
            screening=problem.screening,
        )
        .returning(JobProblemRow.id)
    ).one_or_none()
    if found is None:
        return []
    add_seconds(session, {problem.id: {"lower": problem.lower, "queue": StageSeconds(wall=in_queue)}})
    return finish_judged(session, [problem.id])
