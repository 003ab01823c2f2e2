"""What a plan task made is recorded a part at a time: candidates, builds, and what follows from stored results.

Pending builds, a row of `pending_builds` for each job that needs one: compiling while a worker has leased it
(`storage.transitions.take_work`), pending again where it could not, and deleted when no job needs it any more."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, exists, select, update

from cukiln.types import StageSeconds
from storage.database.session import Session, clock_of
from storage.database.sql import change, chunks, core, insert_new, is_predicted, remove, rows_among
from storage.database.tables import (
    LIVE,
    PENDING_OR_GIVEN_UP,
    UNBUILT,
    BuildRow,
    CandidateRow,
    GroupRow,
    JobProblemRow,
    JobRow,
    PendingBuildRow,
    TaskRow,
)
from storage.entities.groups import NewBuild
from storage.entities.stage_times import add_seconds
from storage.entities.task_kinds import COMPILE, VERIFY
from storage.entities.verdicts import forget_outgrown, is_outgrown
from storage.queue import losses
from storage.queue.new_tasks import NewTask, add_again, add_jobs, jobs_of
from storage.queue.tasks import Lease, require_lease
from storage.transitions.apply_verdicts import (
    Followed,
    NextStep,
    Versions,
    add_next_steps,
    add_verification,
    apply_known_verdicts,
    has_time_left,
    unverified,
)

MAX_ATTEMPTS = 3
_UNTRIED = {"suspect": None, "attempts": 0, "losses": 0, "not_before": None, "reached": None, "log": None}

build, pending_build = core(BuildRow).c, core(PendingBuildRow).c


def want_builds(
    session: Session,
    job_id: str,
    builds: Sequence[NewBuild],
    to_measure: Collection[str],
    limits: Mapping[str, float] | None = None,
) -> Counter[str]:
    """Make the job's builds pending: those that are not compiled, were given up, or were ended by a limit that is
    larger now (by name in `limits`), and of `to_measure` also what has lost its library. Returns how
    many of them are pending or compiling, by target. Doing it twice changes nothing."""
    now = clock_of(session).now()
    by_id = {new.id: new for new in builds}
    rows = [_row(new, now) for new in by_id.values()]
    for some in chunks(rows, 1000):
        insert_new(session, BuildRow, some)
    columns = (build.id, build.state, build.library, build.group_id, build.reached)
    present = rows_among(session, select(*columns), build.id, by_id)
    lost = [
        row.id
        for row in present
        if row.state == "given_up"
        or (row.state == "ok" and row.library is None and row.id in to_measure)
        or is_outgrown(row.reached, limits)
    ]
    for id in lost:
        again = {**_row(by_id[id], now), **_UNTRIED}
        change(session, BuildRow, build.id == id, **again)
    unbuilt = [*lost, *(row.id for row in present if row.state in UNBUILT)]
    rows = [
        {
            "job_id": job,
            "build": id,
            "target": by_id[id].target,
            "toolchain": by_id[id].toolchain,
            "predicted_seconds": by_id[id].predicted_seconds,
            "wanted_at": now,
        }
        for job, id in [*((job_id, id) for id in unbuilt), *_waiting_for(session, lost)]
    ]
    for some in chunks(rows, 1000):
        insert_new(session, PendingBuildRow, some)
    _join_running_files(session, job_id, {row.group_id for row in present if row.state == "compiling"})
    return Counter(by_id[id].target for id in unbuilt)


def _waiting_for(session: Session, builds: Collection[str]) -> list[tuple[str, str]]:
    """Live jobs with candidates without a verdict of these builds, which are pending again: job and build."""
    waiting = (
        select(JobProblemRow.job_id, CandidateRow.build)
        .join(CandidateRow, CandidateRow.job_problem_id == JobProblemRow.id)
        .where(CandidateRow.verdict.is_(None), JobProblemRow.state.in_(LIVE))
        .distinct()
    )
    return rows_among(session, waiting, CandidateRow.build, builds)


def _row(new: NewBuild, now: float) -> dict[str, Any]:
    return {**vars(new), "state": "pending", "created_at": now}


def _join_running_files(session: Session, job_id: str, groups: Collection[str | None]) -> None:
    task = core(TaskRow).c
    for refs in chunks(group for group in groups if group is not None):
        running = select(task.id).where(task.kind == COMPILE, task.ref.in_(refs), task.state == "leased")
        add_jobs(session, [(id, job_id) for id in session.scalars(running)])


def fulfil(session: Session, build_ids: Iterable[str]) -> None:
    """These builds are compiled, or never will be: no job waits for their compile any more."""
    for ids in chunks(build_ids):
        remove(session, PendingBuildRow, pending_build.build.in_(ids))


def abandon_group(session: Session, group_id: str, error: str | None = None, max_attempts: int = MAX_ATTEMPTS) -> None:
    """`return_builds` of a group whose attempt ended before its time."""
    _apply_recorded(session, group_id)
    return_builds(session, group_id, error, max_attempts)


def lose_group(session: Session, group_id: str, error: str, *, stalled: bool = False) -> None:
    """Builds of a lost group that are still compiling are pending again after a pause, alone, or given up."""
    _apply_recorded(session, group_id)
    now = clock_of(session).now()
    compiling = (build.group_id == group_id) & (build.state == "compiling")
    rows = session.execute(select(build.id, build.suspect, build.losses).where(compiling)).all()
    _wait_from_now(session, [row.id for row in rows])
    count = losses.weight(session, max((row.losses for row in rows), default=0.0), stalled=stalled)
    for row in rows:
        many = row.losses + count
        values = {
            "state": "pending",
            "losses": many,
            "not_before": now + losses.pause_after(many),
            "suspect": row.id if many >= losses.TOGETHER else row.suspect,
        }
        change(session, BuildRow, build.id == row.id, **values)
    _forget(session, [row.id for row in rows])
    give_up_builds(session, [row.id for row in rows if row.losses + count >= losses.MOST], losses.why_skipped(error))


def _apply_recorded(session: Session, group_id: str) -> None:
    """What a group has recorded stands, and is verified; a verify task gives verdicts to what did not compile."""
    ended = session.execute(
        select(build.id, build.state).where(build.group_id == group_id, build.state.not_in(UNBUILT))
    ).all()
    add_verification(session, unverified(session, [row.id for row in ended]))
    if any(row.state != "ok" for row in ended):
        task = core(TaskRow).c
        row = session.execute(select(task.id, task.target).where(task.kind == COMPILE, task.ref == group_id)).one()
        if jobs := jobs_of(session, row.id):
            add_again(session, [NewTask(VERIFY, group_id, row.target, jobs)])


def return_builds(
    session: Session, group_id: str, error: str | None, max_attempts: int, *, alone: bool = False
) -> None:
    """Let the builds of a group that are still compiling be pending again. With an `error` they are suspect: they are
    tried in halves of the file, unless `alone`, and after that alone, each `max_attempts` times before it is given
    up."""
    compiling = (build.group_id == group_id) & (build.state == "compiling")
    columns = (build.id, build.suspect, build.attempts)
    rows = session.execute(select(*columns).where(compiling).order_by(build.predicted_seconds.desc(), build.id)).all()
    ids = [row.id for row in rows]
    _wait_from_now(session, ids)
    if error is None:
        change(session, BuildRow, compiling, state="pending")
        _forget(session, ids)  # a job that has ended may have been the last that needed them
        return
    group = core(GroupRow).c
    was_alone = len(session.execute(select(group.kernels).where(group.id == group_id)).scalar_one()) == 1
    # Each is tried next in half of the file that failed, or in one of its own.
    whole = not alone and all(row.suspect is None for row in rows) and len(rows) > 3
    for place, id in enumerate(ids):
        label = f"{group_id}:{place % 2}" if whole else id
        values = {"state": "pending", "suspect": label, "attempts": build.attempts + (1 if was_alone else 0)}
        change(session, BuildRow, build.id == id, **values)
    _forget(session, ids)
    if was_alone and rows and rows[0].attempts + 1 >= max_attempts:
        give_up_builds(session, ids, error)


def _wait_from_now(session: Session, build_ids: Sequence[str]) -> None:
    for ids in chunks(build_ids):
        change(session, PendingBuildRow, pending_build.build.in_(ids), wanted_at=clock_of(session).now())


def give_up_builds(session: Session, build_ids: Sequence[str], message: str) -> None:
    """Candidates are skipped, and the builds deleted, in parts (`end_jobs`); any later job tries them anew."""
    for ids in chunks(build_ids):
        change(session, BuildRow, build.id.in_(ids), state="given_up", log=message)
    fulfil(session, build_ids)


def give_up_place(session: Session, target: str, toolchain: str, most: int) -> None:
    """`give_up_builds` of some for whose compiler there is no worker any more."""
    place = (build.state == "pending") & (build.target == target) & (build.toolchain == toolchain)
    ids = session.scalars(select(build.id).where(PENDING_OR_GIVEN_UP, place).limit(most)).all()
    give_up_builds(
        session, ids, f"it was planned for the compiler {toolchain[:12]}, which no worker has now: submit it again"
    )


def forget_given_up(session: Session, build_ids: Sequence[str]) -> None:
    """When none of their candidates is left to be skipped."""
    given_up = build.id.in_(build_ids) & (build.state == "given_up")
    change(session, BuildRow, given_up, state="pending", **_UNTRIED)
    _forget(session, build_ids)


def drop_pending_builds(session: Session, job_id: str, most: int) -> None:
    """Delete up to `most` rows of `pending_builds` of a job that has ended."""
    ids = session.scalars(select(pending_build.build).where(pending_build.job_id == job_id).limit(most)).all()
    for some in chunks(ids):
        remove(session, PendingBuildRow, pending_build.job_id == job_id, pending_build.build.in_(some))
    _forget(session, ids)


def drop_unneeded(session: Session, job_id: str, build_ids: Sequence[str]) -> None:
    """Delete the job's pending builds, of these, that none of its candidates waits for any more."""
    waiting = exists().where(
        CandidateRow.build == build.id,
        CandidateRow.verdict.is_(None),
        JobProblemRow.id == CandidateRow.job_problem_id,
        JobProblemRow.job_id == job_id,
    )
    needed = {id for (id,) in rows_among(session, select(build.id).where(waiting), build.id, build_ids)}
    unneeded = [id for id in build_ids if id not in needed]
    for ids in chunks(unneeded):
        remove(session, PendingBuildRow, pending_build.job_id == job_id, pending_build.build.in_(ids))
    _forget(session, unneeded)


def _forget(session: Session, build_ids: Sequence[str]) -> None:
    """Delete pending ones that no job needs; one that only lost its library is `ok` again."""
    for ids in chunks(build_ids):
        unwanted = build.id.in_(ids) & (build.state == "pending") & ~exists().where(pending_build.build == build.id)
        rows = session.execute(select(build.id, build.code_digest).where(unwanted)).all()
        new = [row.id for row in rows if row.code_digest is None]
        compiled = [row.id for row in rows if row.code_digest is not None]
        remove(session, BuildRow, build.id.in_(new))
        change(session, BuildRow, build.id.in_(compiled), state="ok")


def pending_counts(session: Session, most: int, targets: Sequence[str] | None = None) -> dict[str, int]:
    """Pending builds that live jobs need, by target (of all, unless given); of each target at most `most`."""
    places = session.scalars(select(pending_build.target).distinct()).all() if targets is None else targets
    now = clock_of(session).now()
    counts = {}
    for target in places:
        pending = pending_of_live_jobs(now).where(pending_build.target == target)
        counts[target] = len(session.execute(pending.with_only_columns(build.id).distinct().limit(most)).all())
    return {target: count for target, count in counts.items() if count}


def pending_of_live_jobs(now: float) -> Any:
    """Pending builds of jobs that have time left; found by job, however many others are pending."""
    return (
        select(build.id, build.predicted_seconds)
        .join(core(PendingBuildRow), pending_build.build == build.id)
        .join(JobRow, JobRow.id == pending_build.job_id)
        .where(is_pending(now), has_time_left(now))
    )


def is_pending(now: float) -> ColumnElement[bool]:
    """Of a build's row: it may be compiled now."""
    return and_(build.state == "pending", losses.is_over(build.not_before, now))


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
