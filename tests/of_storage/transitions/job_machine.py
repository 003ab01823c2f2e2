"""Jobs, workers and losses in any order, as a state machine of hypothesis."""

from __future__ import annotations

import shutil
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from sqlalchemy import event, select

from storage.database.session import Database, Session
from storage.database.sql import is_predicted
from storage.database.tables import (
    LIVE,
    BuildRow,
    CandidateRow,
    GroupRow,
    JobProblemRow,
    JobRow,
    PendingBuildRow,
    TaskRow,
)
from storage.entities.groups import kernels_of, load_group
from storage.entities.heartbeats import register_toolchain
from storage.entities.task_kinds import measure_ref, parse_plan_ref
from storage.queue import tasks
from storage.queue.new_tasks import UNENDED, jobs_of
from storage.queue.tasks import Renewal
from storage.transitions import accept, end_jobs, take_work
from storage.transitions.measure import forget_group_library
from storage.transitions.take_work import FileLimits
from tests.support.fixtures.storage import GPU_CLASS, OTHER_CLASS, TARGET, TOOLCHAIN, new_problem
from tests.support.processes.played_workers import (
    LEASE,
    OTHER_TOOLCHAIN,
    Attempt,
    Luck,
    Transactions,
    reconcile,
)
from tests.support.run.fake_clock import FakeClock
from tests.support.service.model_of_jobs import Model, Worker, take_picture

CPU_CLASS = f"predicted:{TARGET}"


CLASSES = (CPU_CLASS, GPU_CLASS, OTHER_CLASS)


BUILDS = ("a", "b", "c")


BAD = ("incorrect", "runtime_error", "run_timeout", "skipped")


GIVES_UP = ("fail", "retry", "release", "lose")


COMPILING, MEASURING = ("finish", "verify", "compile"), ("compare", "measure")


WORKERS = (
    Worker(("plan",)),
    Worker(COMPILING, (TARGET,), TOOLCHAIN),
    Worker(COMPILING, (TARGET,), OTHER_TOOLCHAIN),
    Worker(("compile",), (TARGET,)),
    Worker(("verify",), (TARGET,)),
    Worker(MEASURING, (GPU_CLASS,)),
    Worker(MEASURING, (OTHER_CLASS,)),
)


ANY_WORKER = Worker(("finish", "compare", "verify", "measure", "compile", "plan"))


MOST_ROUNDS = 2000


some_builds = st.lists(st.sampled_from(BUILDS), min_size=1, max_size=3, unique=True)


some_files = st.builds(FileLimits, workers=st.sampled_from([1, 2]), kernels=st.sampled_from([1, 2, 9]))


lucks = st.builds(
    Luck,
    bad=st.sampled_from(["", "", "a", "b", "c", "n", "abcn"]),
    failure=st.sampled_from(["compile_error", "compile_timeout"]),
    verdict=st.sampled_from(BAD),
    parts=st.booleans(),
    dies_after=st.sampled_from([None, None, None, 0, 1, 2]),
)


GOOD_LUCK = Luck()


def _do_not_wait_for_the_disk(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA synchronous=OFF")


class Jobs(RuleBasedStateMachine):
    template: Path

    @initialize()
    def open(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "cukiln.db"
        shutil.copy(self.template, path)
        self.clock = FakeClock()
        self.database = Database(f"sqlite:///{path}", self.clock)
        event.listen(self.database.engine, "connect", _do_not_wait_for_the_disk)
        self.model = Model()
        self.attempts: list[Attempt] = []
        self.reconcilers: list[Transactions] = []
        self.seen: dict[tuple[int, str], str] = {}  # verdicts by candidate row
        self.asked: dict[int, list[str]] = {}  # builds by problem

    def teardown(self) -> None:
        if not hasattr(self, "database"):
            return
        try:
            self.end_everything()
        finally:
            self.database.dispose()
            self.folder.cleanup()

    # ---- what happens

    @rule(
        problems=st.lists(st.tuples(st.sampled_from(CLASSES), some_builds), min_size=1, max_size=3),
        priority=st.sampled_from(["low", "normal", "normal", "high"]),
        budget=st.sampled_from([None, None, 100.0]),
        name=st.sampled_from("xy"),
    )
    def submit(self, problems: list[tuple[str, list[str]]], priority: Any, budget: float | None, name: str) -> None:
        new = [new_problem(name, device_class=device_class) for device_class, _ in problems]
        with self.database.write() as session:
            job = accept.create_jobs(session, [accept.NewJob(new, priority=priority, budget_seconds=budget)])[0]
            query = select(JobProblemRow.id).where(JobProblemRow.job_id == job.id).order_by(JobProblemRow.position)
            self.asked.update(zip(session.scalars(query), (builds for _, builds in problems), strict=True))
        self.model.used[job.id] = 0.0

    @rule(count=st.sampled_from([3, 6, 12]), device_class=st.sampled_from(CLASSES))
    def submit_a_large_job(self, count: int, device_class: str) -> None:
        first = len(self.asked)
        self.submit([(device_class, [f"n{first}{number:02}" for number in range(count)])], "normal", None, f"l{first}")
        self.work_to_the_end_as(Worker(("plan",)), FileLimits(), GOOD_LUCK)

    @rule(
        classes=st.lists(st.sampled_from(CLASSES), min_size=2, max_size=3),
        shared=st.booleans(),
        budget=st.sampled_from([None, 100.0]),
    )
    def share_a_file(self, classes: list[str], shared: bool, budget: float | None) -> None:
        """Jobs with a new build each, and some with the first one's, wait for one worker."""
        first = len(self.asked)
        for place, device_class in enumerate(classes):
            builds = dict.fromkeys([f"n{first + place}", *([f"n{first}"] if shared else [])])
            self.submit([(device_class, list(builds))], "normal", None if place else budget, f"z{first + place}")
        for _ in classes:
            self.work_to_the_end_as(Worker(("plan",)), FileLimits(), GOOD_LUCK)
        self.take(Worker(("compile",)), FileLimits(), GOOD_LUCK)

    @rule(
        data=st.data(),
        files=some_files,
        luck=lucks,
        transactions=st.sampled_from([0, 1, 2, 3, 99, 99]),
        then=st.sampled_from(["goes on", "goes on", "dies", "fail", *GIVES_UP]),
    )
    def a_worker_is_free(
        self, data: st.DataObject, files: FileLimits, luck: Luck, transactions: int, then: str
    ) -> None:
        """It makes so many transactions before anything else happens: so that much gets far in few steps."""
        if useful := self.useful_workers():
            attempt = self.take(data.draw(st.sampled_from(useful)), files, luck)
            while attempt in self.attempts and transactions:
                self.go_on(attempt)
                transactions -= 1
            if attempt in self.attempts and then != "goes on":
                self.end_early(attempt, then)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def a_worker_continues(self, data: st.DataObject) -> None:
        """It makes one transaction."""
        self.go_on(data.draw(st.sampled_from(self.attempts)))

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def a_worker_continues_to_its_end(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(self.attempts))
        while self.go_on(attempt):
            pass

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def a_worker_dies(self, data: st.DataObject) -> None:
        """What it has written stands; its lease runs out."""
        self.end_early(data.draw(st.sampled_from(self.attempts)), "dies")

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), how=st.sampled_from(GIVES_UP))
    def a_worker_gives_up(self, data: st.DataObject, how: str) -> None:
        self.end_early(data.draw(st.sampled_from(self.attempts)), how)

    @precondition(lambda self: self.attempts)
    @rule(data=st.data())
    def a_lease_is_renewed(self, data: st.DataObject) -> None:
        attempt = data.draw(st.sampled_from(self.attempts))
        with self.database.write() as session:
            held = attempt.holds(session)
            assert (tasks.renew(session, attempt.lease, LEASE, 0.0) in (Renewal.HELD, Renewal.DEADLINE)) == held

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        with self.database.write() as session:
            live = session.scalars(select(JobRow.id).where(JobRow.state.in_(LIVE)).order_by(JobRow.id)).all()
            if live:
                end_jobs.cancel_job(session, data.draw(st.sampled_from(live)))

    @rule(seconds=st.sampled_from([1.0, 61.0, 101.0]), at_once=st.booleans())
    def time_passes(self, seconds: float, at_once: bool) -> None:
        """`at_once`: the reconciler sees to it before anything else happens."""
        self.clock.advance(seconds)
        if at_once:
            self.reconcile()

    @precondition(lambda self: len(self.reconcilers) < 2)
    @rule()
    def a_reconciler_begins(self) -> None:
        self.reconcilers.append(reconcile(self.database))
        self.a_reconciler_continues(-1)

    @precondition(lambda self: self.reconcilers)
    @rule(place=st.sampled_from([0, -1]))
    def a_reconciler_continues(self, place: int) -> None:
        """It makes one transaction, or looks what there is for the next."""
        if next(self.reconcilers[place], "ended") == "ended":
            del self.reconcilers[place]

    @rule(data=st.data(), parts=st.sampled_from([1, 99]))
    def lose_library(self, data: st.DataObject, parts: int) -> None:
        with self.database.read() as session:
            held = session.scalars(select(BuildRow.library).where(BuildRow.library.is_not(None)).order_by(BuildRow.id))
            libraries = held.all()
        library = str(data.draw(st.sampled_from(libraries))) if libraries else None
        while library is not None and parts:
            with self.database.write() as session:
                _, more = forget_group_library(session, library)
            parts = parts - 1 if more else 0

    @rule(toolchain=st.sampled_from([TOOLCHAIN, OTHER_TOOLCHAIN]))
    def a_compiler_is_there(self, toolchain: str) -> None:
        """Where it is the only one from then on, builds of the other are given up."""
        with self.database.write() as session:
            register_toolchain(session, toolchain, {}, [TARGET])

    # ---- how it is done

    def useful_workers(self) -> list[Worker]:
        with self.database.read() as session:
            picture = take_picture(session)
        return [worker for worker in WORKERS if picture.choices(worker)]

    def take(self, worker: Worker, files: FileLimits, luck: Luck) -> Attempt | None:
        """A free worker takes a lease, and reads what it is to do."""
        limits = FileLimits(worker.toolchain, files.workers, files.kernels)
        name = f"w{len(self.attempts)}"
        with self.database.write() as session:
            picture = take_picture(session)
            self.release_what_is_lost(session)
            lease = take_work.take(session, worker.kinds, worker.targets, name, LEASE, limits)
            group = load_group(session, lease.ref) if lease is not None and lease.kind == "compile" else None
            builds = [kernel.build for kernel in kernels_of(group)] if group else []
            self.model.leased(picture, worker, files.kernels, lease, builds)
        if lease is None:
            return None
        attempt = Attempt(self.database, self.model, self.asked, lease, luck)
        self.attempts.append(attempt)
        attempt.go_on()
        return attempt

    def release_what_is_lost(self, session: Session) -> None:
        """A file whose task has ended is not compiled any more."""
        running = set(
            session.scalars(select(TaskRow.token).where(TaskRow.kind == "compile", TaskRow.state == "leased"))
        )
        for token in set(self.model.compiling.values()) - running:
            self.model.ended(token)

    def go_on(self, attempt: Attempt) -> bool:
        goes_on = attempt.go_on()
        if not goes_on:
            self.attempts.remove(attempt)
        return goes_on

    def end_early(self, attempt: Attempt, how: str) -> None:
        self.attempts.remove(attempt)
        if how != "dies":
            attempt.give_up(how)

    def work_to_the_end_as(self, worker: Worker, files: FileLimits, luck: Luck) -> bool:
        """Returns whether there was anything to do."""
        attempt = self.take(worker, files, luck)
        while attempt is not None and self.go_on(attempt):
            pass
        return attempt is not None

    def reconcile(self) -> None:
        for _ in islice(reconcile(self.database), MOST_ROUNDS):
            pass

    # ---- what must hold

    @invariant()
    def every_live_problem_has_work_that_leads_to_its_end(self) -> None:
        with self.database.read() as session:
            work = {(task.kind, task.ref): task for task in session.scalars(select(TaskRow))}
            work = {place: task for place, task in work.items() if task.state in UNENDED}
            live_jobs = {job.id: job for job in session.scalars(select(JobRow).where(JobRow.state.in_(LIVE)))}
            problems = session.scalars(select(JobProblemRow).where(JobProblemRow.state.in_(LIVE))).all()
            for task in work.values():
                for_jobs = set(jobs_of(session, task.id))
                assert for_jobs and for_jobs <= live_jobs.keys(), f"{task.kind} is wanted by {for_jobs}"
            for problem in problems:
                deadline = live_jobs[problem.job_id].deadline
                in_time = deadline is None or deadline > self.clock.now()
                for place in self.waits_for(session, problem, in_time):
                    assert place in work, f"{problem.device_class} waits for {place}, which is not there"
                    wanting = jobs_of(session, work[place].id)
                    assert problem.job_id in wanting, f"{place} is wanted by {wanting}, not by {problem.job_id}"
            ended = live_jobs.keys() - {problem.job_id for problem in problems}
            assert not ended, "a job whose problems have all ended has ended"

    def waits_for(self, session: Session, problem: JobProblemRow, in_time: bool) -> list[tuple[str, str]]:
        """Each is needed; for a problem that is not planned yet, the task that plans it."""
        if not in_time:
            return []  # the reconciler sees to its end
        if not problem.planned:
            return [
                ("plan", ref)
                for ref in session.scalars(select(TaskRow.ref).where(TaskRow.kind == "plan"))
                if parse_plan_ref(ref)[0] == problem.job_id
            ]
        open_candidates = session.execute(
            select(CandidateRow.build, BuildRow)
            .join(BuildRow, BuildRow.id == CandidateRow.build, isouter=True)
            .where(CandidateRow.job_problem_id == problem.id, CandidateRow.verdict.is_(None))
        ).all()
        if not open_candidates:
            ends = session.execute(
                select(TaskRow.kind, TaskRow.ref).where(
                    TaskRow.ref == str(problem.id),
                    TaskRow.state.in_(UNENDED),
                    TaskRow.kind.in_(("compare", "finish")),
                )
            ).all()
            assert len(ends) == 1, "either comparing or finishing is next"
            return [(ends[0].kind, ends[0].ref)]
        return [place for name, build in open_candidates for place in self.place_of(session, problem, name, build)]

    def place_of(
        self, session: Session, problem: JobProblemRow, name: str, build: BuildRow | None
    ) -> list[tuple[str, str]]:
        assert build is not None, f"nothing makes build {name}"
        group = str(build.group_id)
        if build.state == "given_up":
            return []  # the reconciler skips its candidates
        if build.state in ("pending", "compiling"):
            assert session.get(PendingBuildRow, (problem.job_id, name)) is not None, f"{name} is not demanded"
            return [("compile", group)] if build.state == "compiling" else []
        running = session.scalars(select(TaskRow.id).filter_by(kind="compile", ref=group, state="leased")).one_or_none()
        if running is not None and problem.job_id in jobs_of(session, running):
            return [("compile", group)]  # whose worker sees to what follows
        verifying = ("verify", group)  # also of what did not compile, where the worker died before it was verified
        if build.state == "ok" and not is_predicted(problem.device_class):
            assert build.library is not None
            verifying = ("measure", measure_ref(group, problem.device_class))
        failed = session.scalar(select(TaskRow.id).filter_by(kind=verifying[0], ref=verifying[1], state="failed"))
        return [] if failed is not None else [verifying]  # the reconciler skips its candidates

    @invariant()
    def a_build_is_pending_for_a_job_or_compiling_in_one_file(self) -> None:
        with self.database.read() as session:
            demanded = set(session.scalars(select(PendingBuildRow.build)))
            running = {
                task.ref: self.members_of(session, task.ref)
                for task in session.scalars(select(TaskRow).where(TaskRow.kind == "compile", TaskRow.state == "leased"))
            }
            for build in session.scalars(select(BuildRow)):
                # One that compiles may have lost its last job a moment ago.
                assert build.state != "pending" or build.id in demanded
                assert build.id not in demanded or build.state in ("pending", "compiling")
                if build.state == "compiling":
                    assert build.id in running[str(build.group_id)]

    def members_of(self, session: Session, group_id: str) -> list[str]:
        group = load_group(session, group_id)
        assert group is not None and group.state == "compiling"
        return [kernel.build for kernel in kernels_of(group)]

    @invariant()
    def seconds_are_charged_to_the_jobs_that_they_were_spent_for(self) -> None:
        with self.database.read() as session:
            self.model.check(session)

    @invariant()
    def a_verdict_stays_but_for_code_that_a_gpu_found_wrong(self) -> None:
        with self.database.read() as session:
            rows = session.execute(
                select(
                    CandidateRow.job_problem_id,
                    CandidateRow.candidate,
                    CandidateRow.verdict,
                    CandidateRow.measured_us,
                    JobProblemRow.device_class,
                ).join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
            ).all()
        for row in rows:
            before = self.seen.get((row.job_problem_id, row.candidate))
            on_gpu = not is_predicted(row.device_class)
            invalidated = before == "ok" and on_gpu and row.verdict in BAD
            assert before is None or before == row.verdict or invalidated
            assert (row.measured_us is not None) == (row.verdict == "ok" and on_gpu)
            if row.verdict is not None:
                self.seen[row.job_problem_id, row.candidate] = row.verdict

    def end_everything(self) -> None:
        """Workers that do their work, and a reconciler, bring every job to its end."""
        for attempt in list(self.attempts):
            while self.go_on(attempt):
                pass
        for reconciler in self.reconcilers:
            for _ in reconciler:
                pass
        idle = 0
        for _ in range(MOST_ROUNDS):
            if self.work_to_the_end_as(ANY_WORKER, FileLimits(), GOOD_LUCK):
                idle = 0
                continue
            self.clock.advance(LEASE + 1)
            self.reconcile()
            idle += 1
            if idle > 2:
                break
        self.seconds_are_charged_to_the_jobs_that_they_were_spent_for()
        self.a_verdict_stays_but_for_code_that_a_gpu_found_wrong()
        self.nothing_is_left()

    def nothing_is_left(self) -> None:
        with self.database.read() as session:
            assert session.scalars(select(TaskRow.kind).where(TaskRow.state.in_(UNENDED))).all() == []
            assert session.scalars(select(JobRow.id).where(JobRow.state.in_(LIVE))).all() == []
            assert session.scalars(select(JobProblemRow.id).where(JobProblemRow.state.in_(LIVE))).all() == []
            assert session.scalars(select(PendingBuildRow.build)).all() == []
            unmade = BuildRow.state.in_(("pending", "compiling", "given_up"))
            assert session.scalars(select(BuildRow.id).where(unmade)).all() == []
            assert session.scalars(select(GroupRow.id).where(GroupRow.state == "compiling")).all() == []
            assert session.scalars(select(CandidateRow.candidate).where(CandidateRow.verdict.is_(None))).all() == []
            planned = select(JobProblemRow.id, JobProblemRow.error).where(JobProblemRow.state == "done")
            for problem_id, error in session.execute(planned).all():
                query = select(CandidateRow.build).where(CandidateRow.job_problem_id == problem_id)
                builds, asked = session.scalars(query).all(), self.asked[problem_id]
                # A budget may end between two parts of a plan: the error says so.
                cut = error is not None and "its search space was lowered" in error
                assert sorted(builds) == sorted(asked) or (cut and set(builds) < set(asked))
