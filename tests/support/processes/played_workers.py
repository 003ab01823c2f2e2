"""Workers and the reconciler as the storage functions see them: one transaction after the other, with time for anything
to happen in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select

from cukiln.types import StageSeconds
from storage.database.session import Database, Session
from storage.database.sql import asks_predicted, chunks
from storage.database.tables import CandidateRow, JobRow, TaskJobRow, TaskRow
from storage.entities.groups import GroupKernel, NewBuild, compiled_for, kernels_of, load_group
from storage.entities.heartbeats import gone_toolchains, live_toolchains
from storage.entities.jobs import problems_to_plan
from storage.entities.stage_times import Spent, add_seconds
from storage.entities.verdicts import NewVerdict
from storage.errors import LostLease
from storage.queue import tasks
from storage.queue.tasks import Lease, Renewal, require_lease
from storage.transfer.withdrawals import find_broken_off
from storage.transitions import end_attempt
from storage.transitions.apply_verdicts import CandidateVerdict, NextStep, Versions
from storage.transitions.charge_turns import spend
from storage.transitions.end_jobs import expire_budgets, find_ended, finish_problem
from storage.transitions.groups import (
    BuildOutcome,
    GroupFiles,
    apply_group_verdicts,
    builds_to_verify,
    complete_group,
    complete_verified,
    record_builds,
    record_verdicts,
    skip_build,
    verify_shares,
    what_follows,
)
from storage.transitions.measure import (
    apply_measured_verdicts,
    candidates_to_measure,
    complete_measured,
    invalidate_contenders,
    record_compared,
    record_measured,
)
from storage.transitions.pending_builds import NewCandidate, PlannedProblem, end_plan, give_up_place, record_candidates
from tests.support.fixtures.storage import DRIVER, TOOLCHAIN, VERSIONS, measured, new_build
from tests.support.service.model_of_jobs import Model

LEASE = 60.0
LIVE_SECONDS = 90.0  # without a sign of life, after which a compiler counts as gone
OTHER_TOOLCHAIN = "u" * 64
PLAN, GPU_PLAN = VERSIONS["cpu_plans"], VERSIONS["gpu_plans"]
AT_ONCE = 2  # candidates, and builds, of one transaction
second = StageSeconds(wall=1.0, cpu=1.0)
Transactions = Iterator[None]


def build_named(name: str) -> NewBuild:
    """Build `c` has a toolchain of its own; what is predicted of a build follows from its name."""
    seconds = {"a": 0.2, "b": 3.0, "c": 5.0}.get(name) or (0.3, 2.0, 6.0)[int(name[1:]) % 3]
    toolchain = OTHER_TOOLCHAIN if name == "c" else TOOLCHAIN
    return new_build(name, toolchain=toolchain, predicted_seconds=seconds)


@dataclass(frozen=True)
class Luck:
    """What comes out of an attempt. `bad`: how the names of bad builds begin, of which a compiler says `failure`, a GPU
    `verdict`; `parts`: not all is measured at once; `dies_after`: the compiler has gone through so many kernels and
    names none of the others."""

    bad: str = ""
    failure: str = "compile_error"
    verdict: str = "incorrect"
    parts: bool = False
    dies_after: int | None = None

    def is_bad(self, build: str) -> bool:
        return build[0] in self.bad


class Attempt:
    """A worker with a lease. `go_on` makes its next transaction; after a lost lease nothing is written."""

    def __init__(self, database: Database, model: Model, asked: dict[int, list[str]], lease: Lease, luck: Luck) -> None:
        self.database, self.model, self.asked, self.lease, self.luck = database, model, asked, lease, luck
        self._transactions: Transactions = getattr(self, f"_{lease.kind}")()
        self.goes_on = True

    def go_on(self) -> bool:
        """Returns whether there may be more to do."""
        try:
            next(self._transactions)
        except StopIteration:
            self.goes_on = False
        except LostLease:
            self.goes_on = False
            with self.database.read() as session:
                assert tasks.renew(session, self.lease, LEASE, 0.0) in (Renewal.LOST, Renewal.CANCELLED)
        if not self.goes_on:
            self.model.ended(self.lease.token)
        return self.goes_on

    def give_up(self, how: str) -> None:
        """End the attempt early: fail, retry, release or lose."""
        self.model.ended(self.lease.token)
        try:
            with self.database.write() as session:
                if how == "release":
                    end_attempt.release(session, self.lease)
                elif how == "lose":
                    end_attempt.lose(session, self.lease, "the machine failed")
                else:
                    end_attempt.fail(session, self.lease, "no luck", retry=how == "retry")
        except LostLease:
            pass

    def holds(self, session: Session) -> bool:
        task = session.get(TaskRow, self.lease.task_id)
        return task is not None and task.state == "leased" and task.token == self.lease.token

    def _plan(self) -> Transactions:
        with self.database.read() as session:
            problems = problems_to_plan(session, self.lease)
        yield
        pairs = [(problem, build) for problem in problems for build in self.asked[problem.id]]
        for some in chunks(pairs, AT_ONCE):
            with self.database.write() as session:
                new = [(row.id, NewCandidate(f"{row.name}-{name}", {}, f"{name:0>64}", name)) for row, name in some]
                builds = {name: build_named(name) for _, name in some}
                record_candidates(session, self.lease, new, builds, Versions(**VERSIONS))
                spend(session, self.lease.job_id, 0.1)
            self.model.used[self.lease.job_id] += 0.1
            self.model.had[self.lease.job_id] += 0.1
            yield
        for problem in problems:
            with self.database.write() as session:
                planned = PlannedProblem(problem.id, len(self.asked[problem.id]), 9, {}, second)
                end_plan(session, self.lease, planned)
            self.model.spent[problem.id, "lower"] += 1
            yield
        with self.database.write() as session:
            tasks.complete(session, self.lease)

    def _compile(self) -> Transactions:
        with self.database.read() as session:
            group = load_group(session, self.lease.ref)
        assert group is not None
        yield
        outcomes = [self._outcome(kernel.build) for kernel in kernels_of(group)][: self.luck.dies_after]
        for some in chunks(outcomes, AT_ONCE):
            with self.database.write() as session:
                record_builds(session, self.lease, some)
            self.model.recorded([outcome.build for outcome in some])
            yield
        yield from self._in_parts(lambda session: apply_group_verdicts(session, self.lease, Versions(**VERSIONS)))
        made = GroupFiles(codegen=second, compile=second, phases=[{"name": "cicc", "seconds": 0.5}])
        error = "the compiler died" if len(outcomes) < len(kernels_of(group)) else None
        with self.database.read() as session:
            unverified, spent = what_follows(session, self.lease, made)
            builds, jobs_of_file = [kernel.build for kernel in kernels_of(group)], compiled_for(session, group.id)
            parts = self.model.shares(session, jobs_of_file, builds, {"codegen": 1.0, "compile": 1.0, "cicc": 0.5})
            assert parts or not self.holds(session), "nothing is charged for a file that was compiled"
        yield

        def end(session: Session) -> None:
            complete_group(session, self.lease, made, unverified, error)

        yield from self._complete(spent, parts, end)

    def _in_parts(self, part: Callable[[Session], tuple[list[NextStep], bool]]) -> Transactions:
        more = True
        while more:
            with self.database.write() as session:
                _, more = part(session)
            yield

    def _complete(
        self, spent: Spent, parts: Mapping[tuple[int, str], float], end: Callable[[Session], object]
    ) -> Transactions:
        *some, last = list(chunks(spent, AT_ONCE)) or [[]]
        for problems in some:
            with self.database.write() as session:
                require_lease(session, self.lease)
                add_seconds(session, {problem: spent[problem] for problem in problems})
            self.model.took(parts, problems)
            yield
        with self.database.write() as session:
            end(session)
            add_seconds(session, {problem: spent[problem] for problem in last})
        self.model.took(parts, last)

    def _outcome(self, build: str) -> BuildOutcome:
        if self.luck.is_bad(build):
            return BuildOutcome(build, self.luck.failure, log="error: no")
        return BuildOutcome(build, "ok", f"code-{build}", {}, None, f"{self.lease.ref}-{build}")

    def _verify(self) -> Transactions:
        with self.database.read() as session:
            asked = builds_to_verify(session, self.lease.ref, PLAN)
        yield
        if asked and self.lease.is_lost:
            lost, *asked = asked
            yield from self._in_parts(lambda session: skip_build(session, self.lease, lost.build))
        asked = asked[:1] if self.lease.is_alone else asked
        with self.database.write() as session:
            record_verdicts(session, self.lease, [self._verdict(kernel) for kernel in asked], PLAN)
        yield
        yield from self._in_parts(lambda session: apply_group_verdicts(session, self.lease, Versions(**VERSIONS)))
        with self.database.read() as session:
            spent = verify_shares(session, self.lease, asked, second)
            parts = self._spent_verifying(session, [kernel.build for kernel in asked])
        yield

        def end(session: Session) -> None:
            complete_verified(session, self.lease, asked, plans=PLAN, verify=second)

        yield from self._complete(spent, parts, end)

    def _verdict(self, kernel: GroupKernel) -> NewVerdict:
        verdict = "incorrect" if self.luck.is_bad(kernel.build) else "ok"
        return NewVerdict(kernel.slice, "matmul", verdict, None, {}, 1.0, 1.0)

    def _spent_verifying(self, session: Session, asked: Sequence[str]) -> Mapping[tuple[int, str], float]:
        """For what was verified, or where that was nothing for all that was to be verified."""
        group = load_group(session, self.lease.ref)
        if group is None:
            assert not self.holds(session), "a group that is verified was removed"
            return {}
        spent = {"verify": 1.0}
        verified = self.model.shares(session, self.lease.jobs, asked, spent, asks_predicted())
        return verified or self.model.shares(
            session, self.lease.jobs, [kernel.build for kernel in kernels_of(group)], spent
        )

    def _measure(self) -> Transactions:
        with self.database.read() as session:
            waiting = candidates_to_measure(session, self.lease.ref, str(self.lease.target), GPU_PLAN)
        yield
        waiting = waiting[:1] if self.luck.parts or self.lease.is_alone else waiting
        lost = self.lease.is_lost
        results = [measured(candidate, self._measured_verdict(candidate.build, lost)) for candidate in waiting]
        with self.database.write() as session:
            record_measured(session, self.lease, results, driver=DRIVER, plans=GPU_PLAN)
        for result in results:
            self.model.spent[result.problem_id, "verify"] += 1
            self.model.spent[result.problem_id, "measure"] += 2
        yield
        yield from self._in_parts(
            lambda session: apply_measured_verdicts(session, results, str(self.lease.target), GPU_PLAN)
        )
        try:
            with self.database.write() as session:
                complete_measured(session, self.lease, results, plans=GPU_PLAN)
        except ValueError:  # nothing was found for what waits, in the last attempt
            self.give_up("retry")

    def _measured_verdict(self, build: str, lost: bool) -> str:
        return "skipped" if lost else self.luck.verdict if self.luck.is_bad(build) else "ok"

    def _compare(self) -> Transactions:
        right = self._right()
        yield
        bad = [name for name in right if self.luck.is_bad(name.partition("-")[2])]
        wrong = [CandidateVerdict(int(self.lease.ref), name, self.luck.verdict, "drifted") for name in bad]
        yield from self._in_parts(lambda session: invalidate_contenders(session, self.lease, wrong))
        with self.database.write() as session:
            record_compared(session, self.lease, {} if right else None, measure=second)
        self.model.spent[int(self.lease.ref), "measure"] += 1

    def _finish(self) -> Transactions:
        right = self._right()
        yield
        winner, error = (right[0], None) if right else (None, "none is right")
        with self.database.write() as session:
            finish_problem(session, self.lease, winner=winner, error=error, extra_seconds={"compile": second})
        self.model.spent[int(self.lease.ref), "compile"] += 1

    def _right(self) -> Sequence[str]:
        its_candidates = select(CandidateRow.candidate).where(CandidateRow.job_problem_id == int(self.lease.ref))
        with self.database.read() as session:
            return session.scalars(
                its_candidates.where(CandidateRow.verdict == "ok").order_by(CandidateRow.candidate)
            ).all()


def reconcile(database: Database) -> Transactions:
    """A round of the reconciler."""
    with database.write() as session:
        expire_budgets(session)
        end_attempt.expire_leases(session)
        late = select(JobRow.id).where(JobRow.deadline <= database.clock.now())
        of_late = TaskRow.id.in_(select(TaskJobRow.task_id).where(TaskJobRow.job_id.in_(late), TaskJobRow.wanted))
        left = select(TaskRow.kind).where(of_late, TaskRow.state.in_(("waiting", "leased")))
        assert set(session.scalars(left)) <= {"finish"}, "a job that is out of time wants more than its end"
    yield
    while True:
        with database.read() as session:
            gone = gone_toolchains(session, live_toolchains(session, LIVE_SECONDS))
        if not gone:
            break
        yield
        with database.write() as session:
            give_up_place(session, *gone[0], AT_ONCE)
        yield
    for all_jobs in (False, True):
        while True:
            with database.read() as session:
                part = find_ended(session, all_jobs=all_jobs) or find_broken_off(session)
            if part is None:
                break
            yield
            with database.write() as session:
                part(session)
            yield
