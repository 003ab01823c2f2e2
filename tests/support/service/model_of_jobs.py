"""What jobs are owed, in plain Python: whose turn it is, what each is charged, how long each may wait for others, and
which seconds were spent. It reads rows, and shares no rule with the modules that it is held against."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pytest import approx
from sqlalchemy import ColumnElement, select, true

from storage.database.session import Session, clock_of
from storage.database.tables import (
    LIVE,
    BuildRow,
    CandidateRow,
    JobProblemRow,
    JobRow,
    PendingBuildRow,
    TaskJobRow,
    TaskRow,
)
from storage.queue.tasks import Lease

TURN = 4.0  # predicted seconds
LEAST = 0.5  # that a task counts for
LONGEST_FILE = 12.0  # a job that comes new begins at most so far behind those that wait
FILE = 0.4  # that any file costs


@dataclass(frozen=True)
class Worker:
    """`kinds`: what it does, the first first; `targets`, `toolchain`: None for any."""

    kinds: tuple[str, ...]
    targets: tuple[str, ...] | None = None
    toolchain: str | None = None


@dataclass(frozen=True)
class Job:
    """`used`: charged so far, `began`: before the latest charge; `in_time`: live, and not past its deadline."""

    id: str
    priority: int
    created_at: float
    used: float
    began: float
    live: bool
    in_time: bool

    @property
    def turns(self) -> int:
        return int(self.used / TURN)


@dataclass(frozen=True)
class Item:
    kind: str
    target: str | None
    state: str
    seconds: float
    jobs: frozenset[str]
    may_be_taken: bool


@dataclass(frozen=True)
class Build:
    kernel: str
    target: str
    toolchain: str
    seconds: float
    suspect: str | None
    jobs: frozenset[str]
    may_be_taken: bool


@dataclass(frozen=True)
class Picture:
    """What a free worker may take: tasks that have not ended, builds that are pending."""

    jobs: Mapping[str, Job]
    tasks: Mapping[int, Item]
    pending: Mapping[str, Build]
    demanding: frozenset[str]  # jobs

    def choices(self, worker: Worker) -> list[tuple[Job, str]]:
        """The jobs that it could work for, and the kind of work."""
        waiting = [
            (self.jobs[job], task.kind)
            for task in self.tasks.values()
            if task.state == "waiting" and task.kind in worker.kinds and task.may_be_taken
            if worker.targets is None or task.target is None or task.target in worker.targets
            for job in task.jobs
            if self.jobs[job].in_time or task.kind == "finish"
        ]
        if "compile" in worker.kinds:
            waiting += [
                (self.jobs[job], "compile")
                for build in self.pending.values()
                if build.may_be_taken
                if worker.targets is None or build.target in worker.targets
                if worker.toolchain in (None, build.toolchain)
                for job in build.jobs
                if self.jobs[job].in_time
            ]
        return waiting

    def next_for(self, worker: Worker) -> tuple[Job, str] | None:
        """The most urgent; of those the one that has had the fewest turns; what is begun; the oldest."""

        def order(choice: tuple[Job, str]) -> tuple[int, int, int, float, str]:
            job, kind = choice
            return -job.priority, job.turns, worker.kinds.index(kind), job.created_at, job.id

        return min(self.choices(worker), key=order, default=None)

    def charges(self, lease: Lease, builds: Collection[str]) -> dict[str, float]:
        """Predicted seconds, shared by all that need the work, and each build by all that need the build."""
        task = self.tasks.get(lease.task_id)
        if task is not None:
            wanting = {job: task.seconds / len(task.jobs) for job in task.jobs}
        else:
            wanting = defaultdict(float)
            for build in (self.pending[build] for build in builds):
                waiting = [job for job in build.jobs if self.jobs[job].in_time]
                for job in waiting:
                    wanting[job] += (build.seconds + FILE / len(builds)) / len(waiting)
        return {job: max(seconds, LEAST / len(wanting)) for job, seconds in wanting.items()}

    def begins(self, job: Job, charged: Collection[str]) -> float:
        """A charge is added to what the job was charged before, but to no less than where the others are: the first of
        those under way; where none is, the last of those that wait, and a longest file behind it."""
        others = [other for other in self.jobs.values() if other.live and other.priority == job.priority]
        others = [other for other in others if other.id not in charged]
        leased = {job for task in self.tasks.values() if task.state == "leased" for job in task.jobs}
        waiting = {job for task in self.tasks.values() if task.state == "waiting" for job in task.jobs}
        under_way = [other.began for other in others if other.id in leased]
        behind = [other.used - LONGEST_FILE for other in others if other.id in waiting | self.demanding]
        return max(job.used, min(under_way) if under_way else max(behind, default=0.0))


def _is_over(not_before: float | None, now: float) -> bool:
    return not_before is None or not_before <= now


def take_picture(session: Session) -> Picture:
    now = clock_of(session).now()
    jobs = {
        row.id: Job(
            row.id,
            row.priority,
            row.created_at,
            row.used_seconds,
            row.turn_seconds,
            row.state in LIVE,
            row.state in LIVE and (row.deadline is None or row.deadline > now),
        )
        for row in session.scalars(select(JobRow))
    }
    wanting: dict[int, set[str]] = {}
    for row in session.scalars(select(TaskJobRow).where(TaskJobRow.wanted)):
        wanting.setdefault(row.task_id, set()).add(row.job_id)
    tasks = {
        row.id: Item(
            row.kind,
            row.target,
            row.state,
            row.predicted_seconds,
            frozenset(wanting.get(row.id, ())),
            _is_over(row.not_before, now),
        )
        for row in session.scalars(select(TaskRow).where(TaskRow.state.in_(("waiting", "leased"))))
    }
    demands: dict[str, set[str]] = {}
    for pending_build in session.scalars(select(PendingBuildRow)):
        demands.setdefault(pending_build.build, set()).add(pending_build.job_id)
    pending = {
        row.id: Build(
            row.kernel,
            row.target,
            row.toolchain,
            row.predicted_seconds,
            row.suspect,
            frozenset(demands.get(row.id, ())),
            _is_over(row.not_before, now),
        )
        for row in session.scalars(select(BuildRow).where(BuildRow.state == "pending"))
    }
    demanding = frozenset(job for some in demands.values() for job in some)
    return Picture(jobs, tasks, pending, demanding)


@dataclass
class Model:
    """What has happened so far. `used`: charged to each job; `had`: the same without what it was moved on because it
    came late; `ahead`: seconds that another job was served, while this one's work waited, since it was served last;
    `compiling`: the token of the attempt that has leased a build and not said what became of it; `spent`: by problem
    and stage."""

    used: dict[str, float] = field(default_factory=dict)
    had: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    ahead: dict[str, dict[str, float]] = field(default_factory=dict)
    compiling: dict[str, str] = field(default_factory=dict)
    spent: defaultdict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))

    def leased(self, picture: Picture, worker: Worker, kernels: int, lease: Lease | None, builds: list[str]) -> None:
        """A free worker took this; `builds`: of its file, which may have so many `kernels`."""
        turn = picture.next_for(worker)
        if lease is None or turn is None:
            assert lease is None and turn is None, f"{worker} took {lease}, it is the turn of {turn}"
            return
        lead, kind = turn
        assert lease.kind == kind and lead.id in lease.jobs, f"{lease} was taken, it was the turn of {turn}"
        if kind == "compile":
            self._leased(picture, worker, kernels, lease, builds, lead)
        charges = picture.charges(lease, builds)
        assert set(charges) == set(lease.jobs), "charged to other jobs than those that need the work"
        for job, seconds in charges.items():
            self.used[job] = picture.begins(picture.jobs[job], charges) + seconds
            self.had[job] += seconds
            self.ahead.pop(job, None)
        self._nothing_waits_too_long(picture, worker, lead, charges)

    def _leased(
        self, picture: Picture, worker: Worker, kernels: int, lease: Lease, builds: list[str], lead: Job
    ) -> None:
        assert len(builds) == len(set(builds)) > 0
        assert set(builds) <= set(picture.pending), "leased, though not pending"
        assert self.compiling.keys().isdisjoint(builds), "compiled twice at once"
        file = [picture.pending[build] for build in builds]
        assert len({(build.target, build.toolchain, build.suspect) for build in file}) == 1
        assert worker.toolchain in (None, file[0].toolchain)
        assert worker.targets is None or file[0].target in worker.targets
        assert len(file) <= kernels or file[0].suspect is not None
        assert any(lead.id in build.jobs for build in file)
        assert all(build.may_be_taken for build in file), "not before its pause is over"
        assert all(any(picture.jobs[job].in_time for job in build.jobs) for build in file), "no job in time needs it"
        self.compiling.update(dict.fromkeys(builds, lease.token))

    def _nothing_waits_too_long(
        self, picture: Picture, worker: Worker, lead: Job, charges: Mapping[str, float]
    ) -> None:
        """What the worker could have done instead has waited for a bounded time of each other job's work."""
        for job in {waiting for waiting, _ in picture.choices(worker) if waiting.id not in charges}:
            assert job.priority <= lead.priority
            if job.priority < lead.priority:
                continue
            assert self.had[job.id] > 0.0 or lead.turns == 0, "a newcomer is next"
            ahead = self.ahead.setdefault(job.id, {})
            ahead[lead.id] = ahead.get(lead.id, 0.0) + charges[lead.id]
            most = TURN + LONGEST_FILE + self.had[job.id] + charges[lead.id]
            assert ahead[lead.id] <= most + 1e-6, f"{job} waits for {ahead[lead.id]} s of {lead}"

    def recorded(self, builds: Collection[str]) -> None:
        for build in builds:
            self.compiling.pop(build, None)

    def ended(self, token: str) -> None:
        """The attempt holds nothing any more."""
        self.compiling = {build: held for build, held in self.compiling.items() if held != token}

    def shares(
        self,
        session: Session,
        jobs: Collection[str],
        builds: Collection[str],
        seconds: Mapping[str, float],
        problems: ColumnElement[bool] = true(),  # noqa: B008 - frozen
    ) -> dict[tuple[int, str], float]:
        """Each kernel of a file takes an equal part, split evenly over the problems of these jobs that use it (only
        such `problems`)."""
        rows = session.execute(
            select(CandidateRow.build, CandidateRow.job_problem_id)
            .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
            .where(CandidateRow.build.in_(builds), JobProblemRow.job_id.in_(jobs), problems)
        )
        users: dict[str, set[int]] = {}
        for build, problem in rows:
            users.setdefault(build, set()).add(problem)
        parts: defaultdict[tuple[int, str], float] = defaultdict(float)
        for sharing in users.values():
            for problem in sharing:
                for stage, spent in seconds.items():
                    parts[problem, stage] += spent / len(users) / len(sharing)
        return parts

    def took(self, parts: Mapping[tuple[int, str], float], problems: Collection[int]) -> None:
        """The parts of these problems were written."""
        for (problem, stage), seconds in parts.items():
            if problem in problems:
                self.spent[problem, stage] += seconds

    def check(self, session: Session) -> None:
        """Charges and seconds are as the database has them."""
        used = dict(session.execute(select(JobRow.id, JobRow.used_seconds)).all())
        assert used == approx({job: self.used.get(job, 0.0) for job in used}), "charged to the wrong job"
        spent = {
            (problem, stage): took["wall"]
            for problem, stages in session.execute(select(JobProblemRow.id, JobProblemRow.seconds))
            for stage, took in stages.items()
            if stage != "queue"
        }
        assert spent == approx(dict(self.spent)), "the seconds of all problems are not those that were spent for them"
