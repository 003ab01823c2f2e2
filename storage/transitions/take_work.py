"""A worker takes the best of what waits: a task, or pending builds, of which it makes a group with a compile task.

Whatever was planned before, a file is made of what is pending now, for the job whose turn it is and others of its
priority, as long as pays (`codegen.predict.compile_cost`): so a newcomer waits for one file at most, small jobs share
one, and the last files of a large job end at about the same time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import exists, func, insert, select, update

from codegen.predict.compile_cost import (
    FIXED_BYTES,
    FIXED_SECONDS,
    MAX_BYTES,
    MAX_KERNELS,
    MAX_SECONDS,
    ROUNDING,
    file_seconds,
)
from storage.database.session import Session, clock_of
from storage.database.sql import change, core
from storage.database.tables import BuildRow, GroupRow, JobRow, PendingBuildRow, TaskJobRow, TaskRow
from storage.entities.task_kinds import COMPILE, FINISH, UNTIMED, VERIFY
from storage.queue import losses
from storage.queue.new_tasks import jobs_of
from storage.queue.tasks import (
    Lease,
    Turn,
    best_waiting,
    in_turn,
    oldest_first,
    turn,
    turn_of,
    turn_of_lease,
)
from storage.transitions.apply_verdicts import has_time_left
from storage.transitions.charge_turns import take_turn
from storage.transitions.pending_builds import build, is_pending, pending_build, pending_counts, pending_of_live_jobs

BUDGET_SHARE = 12
"""A file is compiled, then verified in about twice that time, beside others: some end before a budget does."""


@dataclass(frozen=True)
class FileLimits:
    """What a worker may put into one file. `toolchain`: of its own, None for any; `workers` that compile, with it."""

    toolchain: str | None = None
    workers: int = 1
    kernels: int = MAX_KERNELS
    bytes: float = MAX_BYTES


def next_to_compile(
    session: Session, targets: Sequence[str] | None, limits: FileLimits, now: float
) -> tuple[Turn, str] | None:
    """The turn and the id of the job that a free worker compiles for."""
    row = session.execute(
        select(JobRow.id, *turn(session))
        .where(has_time_left(now))
        .where(_has_pending(targets, limits.toolchain, now))
        .order_by(*in_turn(session), *oldest_first())
        .limit(1)
    ).one_or_none()
    return None if row is None else (turn_of(row), row.id)


def yields(session: Session, lease: Lease, kinds: Sequence[str], targets: Sequence[str] | None = None) -> bool:
    """Whether work of `kinds`, for `targets`, waits for a job whose turn is before that of the lease's."""
    best = best_waiting(session, kinds, targets, clock_of(session).now(), untimed=UNTIMED)
    return best is not None and turn_of(best) < turn_of_lease(session, lease)


def yields_to_any(
    session: Session, lease: Lease, kinds: Sequence[str], targets: Sequence[str] | None, toolchain: str
) -> bool:
    """As `yields`, with pending builds for the toolchain, which are work of kind compile."""
    if yields(session, lease, kinds, targets):
        return True
    now = clock_of(session).now()
    pending = next_to_compile(session, targets, FileLimits(toolchain), now) if COMPILE in kinds else None
    return pending is not None and pending[0] < turn_of_lease(session, lease)


def lease_builds(
    session: Session, job_id: str, targets: Sequence[str] | None, limits: FileLimits, now: float
) -> tuple[int, dict[str, float]]:
    """Take the longest pending builds of the job, and of others of its priority where that leaves room. Returns the id
    of the group's compile task, not leased yet, and the predicted seconds that its jobs are charged."""
    first = _first(session, job_id, targets, limits, now)
    file = _File(limits, _longest_file(session, first, limits, now))
    if first.suspect is not None:
        same = pending_of_live_jobs(now).with_only_columns(build.id).where(build.suspect == first.suspect)
        file.builds = list(session.execute(select(core(BuildRow)).where(build.id.in_(same)).order_by(build.id)))
    else:
        for job in _jobs_to_fill_from(session, job_id, first, limits, now):
            if not file.take(job, _longest_of(session, job.id, first, limits.kernels, now)):
                break
    return _record(session, file.builds, first, now)


def _has_pending(targets: Sequence[str] | None, toolchain: str | None, now: float) -> Any:
    pending = exists().where(pending_build.job_id == JobRow.id, pending_build.build == build.id, is_pending(now))
    return _that_fit(pending, targets, toolchain).correlate(JobRow)


def _that_fit(query: Any, targets: Sequence[str] | None, toolchain: str | None) -> Any:
    """Of rows of `pending_builds` those for these targets and this toolchain; None: for any."""
    if targets is not None:
        query = query.where(pending_build.target.in_(targets))
    return query if toolchain is None else query.where(pending_build.toolchain == toolchain)


def _pending_of(job_id: str, now: float) -> Any:
    return (
        select(core(BuildRow))
        .join(core(PendingBuildRow), pending_build.build == build.id)
        .where(pending_build.job_id == job_id, is_pending(now))
    )


def _first(session: Session, job_id: str, targets: Sequence[str] | None, limits: FileLimits, now: float) -> Any:
    """A build at the place that the file is for, one that is not suspect where there are any."""
    query = _that_fit(_pending_of(job_id, now), targets, limits.toolchain)
    innocent = session.execute(query.where(build.suspect.is_(None)).limit(1)).one_or_none()
    return innocent or session.execute(query.limit(1)).one()


def _longest_file(session: Session, first: Any, limits: FileLimits, now: float) -> float:
    """Predicted seconds that a file should take now. More builds than fill a file for each worker need not be
    counted."""
    place = (pending_build.target == first.target) & (pending_build.toolchain == first.toolchain)
    some = pending_of_live_jobs(now).where(place).distinct().limit(limits.workers * limits.kernels)
    seconds: float = sum(row.predicted_seconds for row in session.execute(some))
    others = select(TaskRow.predicted_seconds, func.coalesce(TaskRow.started_at, now)).where(
        TaskRow.state == "leased", TaskRow.kind.in_((COMPILE, VERIFY, FINISH)), TaskRow.target == first.target
    )
    busy = [max(0.0, predicted - (now - started)) for predicted, started in session.execute(others)]
    return file_seconds(seconds, limits.workers, busy)


def _jobs_to_fill_from(session: Session, job_id: str, first: Any, limits: FileLimits, now: float) -> list[Any]:
    """The job itself, then others of its priority in their turns, of which each adds a build at least."""
    columns = (JobRow.id, JobRow.priority, JobRow.budget_seconds)
    first_job = session.execute(select(*columns).where(JobRow.id == job_id)).one()
    others = session.execute(
        select(*columns)
        .where(has_time_left(now))
        .where(JobRow.priority >= first_job.priority, JobRow.id != job_id)
        .where(_has_pending([first.target], first.toolchain, now))
        .order_by(*in_turn(session), *oldest_first())
        .limit(limits.kernels)
    )
    return [first_job, *others]


def _longest_of(session: Session, job_id: str, first: Any, most: int, now: float) -> list[Any]:
    place = (pending_build.target == first.target) & (pending_build.toolchain == first.toolchain)
    longest = (
        _pending_of(job_id, now).where(place, build.suspect.is_(None)).order_by(pending_build.predicted_seconds.desc())
    )
    return list(session.execute(longest.limit(most)))


def longest_group(budget_seconds: float | None) -> float:
    """Predicted seconds that a file with builds of a job may take. A job with a budget gets files so short that the
    first have verdicts long before its end, though each costs its fixed seconds again."""
    if budget_seconds is None:
        return MAX_SECONDS
    return min(MAX_SECONDS, max(2 * FIXED_SECONDS, budget_seconds / BUDGET_SHARE))


@dataclass
class _File:
    limits: FileLimits
    longest: float
    builds: list[Any] = field(default_factory=list)

    def take(self, job: Any, pending: Sequence[Any]) -> bool:
        """Add what fits of the job's builds; returns whether there is room for more."""
        longest = min(self.longest, longest_group(job.budget_seconds))
        taken = {row.id for row in self.builds}
        kernels = {row.kernel for row in self.builds}
        seconds = FIXED_SECONDS + sum(row.predicted_seconds for row in self.builds)
        bytes = FIXED_BYTES + sum(row.predicted_bytes for row in self.builds)
        for row in pending:
            if self.builds and (
                len(self.builds) >= self.limits.kernels
                or seconds + row.predicted_seconds > longest + ROUNDING
                or bytes + row.predicted_bytes > self.limits.bytes
            ):
                return False
            # The same kernel from another text, of another release, would be two namespaces of one name.
            if row.id not in taken and row.kernel not in kernels:
                self.builds.append(row)
                self.longest = longest  # a job with a budget keeps the file short for all that are in it
                kernels.add(row.kernel)
                seconds, bytes = seconds + row.predicted_seconds, bytes + row.predicted_bytes
        return True


def _record(session: Session, builds: Sequence[Any], first: Any, now: float) -> tuple[int, dict[str, float]]:
    group_id = clock_of(session).new_id()
    ids = [row.id for row in builds]
    predicted = FIXED_SECONDS + sum(row.predicted_seconds for row in builds)
    jobs = _jobs(session, builds, now)
    entries = [
        {
            "build": row.id,
            "id": row.kernel,
            "slice": row.slice,
            "kernel": row.kernel_json,
            "predicted_seconds": row.predicted_seconds,
        }
        for row in builds
    ]
    session.execute(
        insert(core(GroupRow)).values(
            id=group_id,
            target=first.target,
            toolchain=first.toolchain,
            state="compiling",
            kernels=entries,
            predicted_seconds=predicted,
            created_at=now,
        )
    )
    change(session, BuildRow, build.id.in_(ids), state="compiling", group_id=group_id)
    task = {
        "kind": COMPILE,
        "ref": group_id,
        "target": first.target,
        "predicted_seconds": predicted,
        "state": "waiting",
        "attempt": 0,
        "created_at": now - max(waited for waited, _ in jobs.values()),
        "available_at": None,
    }
    task_id: int = session.execute(insert(core(TaskRow)).values(**task).returning(core(TaskRow).c.id)).scalar_one()
    session.execute(
        insert(core(TaskJobRow)),
        [
            {"task_id": task_id, "job_id": job, "wanted": True, "waited_seconds": waited}
            for job, (waited, _) in jobs.items()
        ],
    )
    return task_id, {job: seconds for job, (_, seconds) in jobs.items()}


def _jobs(session: Session, builds: Sequence[Any], now: float) -> dict[str, tuple[float, float]]:
    """The jobs with time left that need these builds: how long the first of each has been pending, and the job's part
    of the predicted seconds. A build that several need is shared evenly, and so is what the file costs anyway."""
    rows = session.execute(
        select(pending_build.job_id, pending_build.build, pending_build.wanted_at)
        .join(JobRow, JobRow.id == pending_build.job_id)
        .where(pending_build.build.in_([row.id for row in builds]), has_time_left(now))
        .order_by(pending_build.job_id)
    ).all()
    seconds = {row.id: row.predicted_seconds for row in builds}
    users = Counter(row.build for row in rows)
    jobs: dict[str, tuple[float, float]] = {}
    for row in rows:
        waited, charged = jobs.get(row.job_id, (0.0, 0.0))
        part = (seconds[row.build] + FIXED_SECONDS / len(builds)) / users[row.build]
        jobs[row.job_id] = (max(waited, now - row.wanted_at), charged + part)
    return jobs


MOST_COUNTED = 1000
"""Pending builds of a target: no more wake-ups are written at once."""


def take(
    session: Session,
    kinds: Sequence[str],
    targets: Sequence[str] | None,
    worker: str,
    lease_seconds: float,
    files: FileLimits | None = None,
) -> Lease | None:
    """Take the best waiting work: highest priority, then of jobs whose turn it is (`storage.queue.tasks`), then the
    order of `kinds`, then the oldest job's, then longest predicted, then oldest. Pending builds are work of kind
    compile, as much as `files` allow. `targets`: that the worker can serve (None: any), architectures or device
    classes. Work of jobs past their deadline is left, except `finish`. The first lease starts a job and its budget."""
    now = clock_of(session).now()
    place = {kind: number for number, kind in enumerate(kinds)}
    files = files or FileLimits()
    task = best_waiting(session, kinds, targets, now, untimed=UNTIMED)
    to_compile = next_to_compile(session, targets, files, now) if COMPILE in place else None
    if to_compile is not None and (task is None or (to_compile[0], place[COMPILE]) < (turn_of(task), place[task.kind])):
        task_id, charges = lease_builds(session, to_compile[1], targets, files, now)
    elif task is not None:
        task_id = task.id
        jobs = jobs_of(session, task_id)
        charges = dict.fromkeys(jobs, task.predicted_seconds / len(jobs))
    else:
        return None
    take_turn(session, charges)
    token = clock_of(session).new_id()
    taken = session.execute(
        update(TaskRow)
        .where(TaskRow.id == task_id, TaskRow.state == "waiting")
        .values(
            state="leased",
            attempt=TaskRow.attempt + 1,
            token=token,
            worker=worker,
            lease_expires_at=now + lease_seconds,
            started_at=now,
        )
        .returning(*core(TaskRow).c)
    ).one()
    queued = JobRow.id.in_(list(charges)) & (JobRow.state == "queued")
    change(session, JobRow, queued, state="running", started_at=now, deadline=JobRow.budget_seconds + now)
    same = ("kind", "ref", "target", "attempt", "token", "worker", "lease_expires_at", "losses")
    return Lease(
        **{name: taken._mapping[name] for name in same},
        task_id=taken.id,
        jobs=tuple(sorted(charges)),
        leased_at=now,
        waited_seconds=max(0.0, now - (taken.available_at or taken.created_at)),
    )


def waiting_counts(session: Session) -> Mapping[tuple[str, str | None], int]:
    """Tasks by (kind, target) that may be taken now, pending builds included: so many wake-ups there should be."""
    rows = session.execute(
        select(TaskRow.kind, TaskRow.target, func.count())
        .where(TaskRow.state == "waiting", losses.is_over(TaskRow.not_before, clock_of(session).now()))
        .group_by(TaskRow.kind, TaskRow.target)
    )
    counts: dict[tuple[str, str | None], int] = {(kind, target): count for kind, target, count in rows}
    counts.update(((COMPILE, target), count) for target, count in pending_counts(session, MOST_COUNTED).items())
    return counts
