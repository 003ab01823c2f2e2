"""Whatever happens in whatever order, every live problem has work that leads to its end, no build is compiled twice at
once or lost, and each second that was spent is charged to a job that it was spent for."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import event, select

from cukiln.types import StageSeconds
from storage import items, jobs
from storage.builds import NewBuild
from storage.clock import FakeClock
from storage.database import Database, Session
from storage.device_classes import is_predicted
from storage.errors import LostClaim
from storage.group_rows import GroupKernel
from storage.groups import BuildOutcome, GroupFiles, complete_group, judge_failed, load_group, record_builds
from storage.items import Claim, FileLimits, Renewal
from storage.judge import LIVE
from storage.judging_work import Versions
from storage.measurements import (
    ToMeasure,
    WrongContender,
    candidates_to_measure,
    forget_group_library,
    measure_ref,
    record_compared,
    record_measured,
)
from storage.new_items import jobs_of, parse_plan_ref
from storage.plans import NewCandidate, PlannedProblem, end_plan, problems_to_plan, record_candidates
from storage.problems import JobProblem, finish_problem
from storage.tables import BuildRow, CandidateRow, DemandRow, ItemJobRow, ItemRow, JobProblemRow, JobRow
from storage.verdicts import NewVerdict
from storage.verify_groups import builds_to_verify, complete_verified, judge_verified
from tests.fixtures_storage import (
    DRIVER,
    GPU_CLASS,
    OTHER_CLASS,
    TARGET,
    TOOLCHAIN,
    VERSIONS,
    clear_all,
    measured,
    migrated_file,  # noqa: F401 - a fixture
    new_build,
    new_problem,
)

CPU_CLASS = f"predicted:{TARGET}"
CLASSES = (CPU_CLASS, GPU_CLASS, OTHER_CLASS)
BUILDS = ("a", "b", "c")
KINDS = ("finish", "compare", "verify", "measure", "compile", "plan")
OTHER = "u" * 64  # a second toolchain, which only some workers have
NEXT = ("compare", "finish")  # of a problem whose candidates are all judged
LEASE = 60.0
BAD = ("incorrect", "runtime_error", "run_timeout", "skipped")
UNENDED = ("waiting", "claimed")
spent = StageSeconds(wall=1.0, cpu=1.0)
some_bad = st.lists(st.sampled_from(BUILDS), max_size=1)
some_builds = st.lists(st.sampled_from(BUILDS), min_size=1, max_size=3, unique=True)


class Held:
    """A claim with what its worker had read when it took it: by the time it writes, the world may have moved on."""

    def __init__(self, claim: Claim, seen: Sequence[Any]) -> None:
        self.claim, self.seen = claim, seen


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
        self.held: list[Held] = []
        self.seen: dict[tuple[int, str], str] = {}  # verdicts by candidate row
        self.asked: dict[int, list[str]] = {}  # builds by problem
        self.compiled_seconds = 0.0  # of files that were recorded

    def teardown(self) -> None:
        try:
            self.end_everything()
        finally:
            self.database.dispose()
            self.folder.cleanup()

    # ---- what happens

    @rule(
        problems=st.lists(st.tuples(st.sampled_from(CLASSES), some_builds), min_size=1, max_size=3),
        priority=st.sampled_from(["low", "normal", "high"]),
        budget=st.sampled_from([None, None, 100.0]),
        name=st.sampled_from("xy"),
    )
    def submit(self, problems: Any, priority: Any, budget: float | None, name: str) -> None:
        new = [new_problem(name, device_class=device_class) for device_class, _ in problems]
        with self.database.write() as session:
            job = jobs.create_job(session, jobs.NewJob(new, priority=priority, budget_seconds=budget))
            query = select(JobProblemRow.id).where(JobProblemRow.job_id == job.id).order_by(JobProblemRow.position)
            for problem_id, (_, builds) in zip(session.scalars(query), problems, strict=True):
                self.asked[problem_id] = builds

    @rule(data=st.data(), kernels=st.sampled_from([1, 2, 9]), toolchain=st.sampled_from([None, TOOLCHAIN]))
    def claim(self, data: st.DataObject, kernels: int, toolchain: str | None) -> None:
        with self.database.write() as session:
            waiting = {kind for kind, _ in items.waiting_counts(session)}
            if waiting:
                kind = data.draw(st.sampled_from(sorted(waiting)))
                self.take(session, kind, FileLimits(toolchain=toolchain, kernels=kernels))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), bad=some_bad, verdict=st.sampled_from(BAD), part=st.booleans())
    def work(self, data: st.DataObject, bad: list[str], verdict: str, part: bool) -> None:
        """A worker writes what it found."""
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        try:
            self.write(held, bad, verdict, part)
        except LostClaim:
            with self.database.read() as session:
                assert items.renew(session, held.claim, LEASE) in (Renewal.LOST, Renewal.CANCELLED)

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
            with self.database.write() as session:
                taken = self.take(session, "plan")
            if taken:
                self.write(self.held.pop(), (), "ok", part=False)
        with self.database.write() as session:
            self.take(session, "compile")

    @rule(kinds=st.permutations(KINDS), bad=some_bad, verdict=st.sampled_from(BAD), kernels=st.sampled_from([1, 2, 9]))
    def work_at_once(self, kinds: Sequence[str], bad: list[str], verdict: str, kernels: int) -> None:
        """Nothing comes in between: so that much gets far in few steps."""
        with self.database.write() as session:
            taken = any(self.take(session, kind, FileLimits(kernels=kernels)) for kind in kinds)
        if taken:
            self.write(self.held.pop(), bad, verdict, part=False)

    @precondition(lambda self: any(held.claim.kind == "compile" for held in self.held))
    @rule(data=st.data(), recorded=st.integers(0, 2))
    def compiler_dies(self, data: st.DataObject, recorded: int) -> None:
        """A file crashes or hangs, and the words name no kernel; before that some builds may have been recorded."""
        place = data.draw(st.sampled_from([n for n, held in enumerate(self.held) if held.claim.kind == "compile"]))
        claim = self.held.pop(place).claim
        with suppress(LostClaim):
            with self.database.write() as session:
                some = [self.outcome(claim, build, ()) for build in self.members(session, claim)[:recorded]]
                record_builds(session, claim, some, Versions(**VERSIONS))
            with self.database.write() as session:
                self.complete(session, claim, "the compiler died")

    @precondition(lambda self: any(held.claim.kind in ("plan", "compile", "verify") for held in self.held))
    @rule(data=st.data(), bad=some_bad)
    def worker_dies_between_two_transactions(self, data: st.DataObject, bad: list[str]) -> None:
        """It has written a part, and its lease runs out."""
        some = [n for n, held in enumerate(self.held) if held.claim.kind in ("plan", "compile", "verify")]
        held = self.held.pop(data.draw(st.sampled_from(some)))
        with suppress(LostClaim), self.database.write() as session:
            if held.claim.kind == "plan":
                self.plan_a_part(session, held.claim)
            elif held.claim.kind == "compile":
                builds = self.members(session, held.claim)[:1]
                outcomes = [self.outcome(held.claim, build, bad) for build in builds]
                record_builds(session, held.claim, outcomes, Versions(**VERSIONS))
            else:
                found = [self.verdict(kernel, bad) for kernel in held.seen[:1]]
                judge_verified(session, held.claim, found, plan_version=VERSIONS["plan_version"], most=1)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=st.sampled_from(["fail", "retry", "release"]))
    def drop(self, data: st.DataObject, how: str) -> None:
        held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        with suppress(LostClaim), self.database.write() as session:
            if how == "release":
                items.release(session, held.claim)
            else:
                items.fail(session, held.claim, "no luck", retry=how == "retry")

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        with self.database.write() as session:
            live = session.scalars(select(JobRow.id).where(JobRow.state.in_(LIVE)).order_by(JobRow.id)).all()
            if live:
                jobs.cancel_job(session, data.draw(st.sampled_from(live)))
                clear_all(session)

    @rule(seconds=st.sampled_from([1.0, 61.0, 101.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.reconcile()

    @rule(build=st.sampled_from(BUILDS))
    def lose_library(self, build: str) -> None:
        with self.database.write() as session:
            library = session.scalar(select(BuildRow.library).where(BuildRow.id == build))
            if library is not None:
                forget_group_library(session, library)

    # ---- how workers do it

    def take(self, session: Session, kind: str, files: FileLimits | None = None) -> bool:
        claim = items.claim(session, [kind], None, f"w{len(self.held)}", LEASE, files)
        if claim is not None:
            if kind == "compile":
                builds = self.members(session, claim)
                assert len(builds) == len(set(builds)) > 0
                leased = {build for held in self.held for build in self.still_held(session, held.claim)}
                assert leased.isdisjoint(builds), "compiled twice at once"
            self.held.append(Held(claim, self.read(session, claim)))
        return claim is not None

    def still_held(self, session: Session, claim: Claim) -> list[str]:
        """The builds of a file whose lease is not over."""
        item = session.get_one(ItemRow, claim.item_id)
        mine = claim.kind == "compile" and item.state == "claimed" and item.token == claim.token
        return self.members(session, claim) if mine else []

    def members(self, session: Session, claim: Claim) -> list[str]:
        group = load_group(session, claim.ref)
        assert group is not None
        return [kernel.build for kernel in group.kernels]

    def read(self, session: Session, claim: Claim) -> Sequence[Any]:
        if claim.kind == "verify":
            return builds_to_verify(session, claim.ref, VERSIONS["plan_version"])
        if claim.kind == "measure":
            return candidates_to_measure(session, claim.ref, str(claim.target), VERSIONS["gpu_plan_version"])
        return ()

    def write(self, held: Held, bad: Sequence[str], verdict: str, part: bool) -> None:
        claim = held.claim
        if claim.kind == "plan":
            self.plan(claim)
            return
        with self.database.write() as session:
            if claim.kind == "compile":
                outcomes = [self.outcome(claim, build, bad) for build in self.members(session, claim)]
                record_builds(session, claim, outcomes, Versions(**VERSIONS))
                judge_failed(session, claim, Versions(**VERSIONS))
                self.complete(session, claim, None)
            elif claim.kind == "verify":
                found = [self.verdict(kernel, bad) for kernel in held.seen]
                judge_verified(session, claim, found, plan_version=VERSIONS["plan_version"])
                complete_verified(session, claim, held.seen, plan_version=VERSIONS["plan_version"], verify=spent)
            elif claim.kind == "measure":
                waiting: Sequence[ToMeasure] = held.seen[:1] if part else held.seen
                results = [measured(one, verdict if one.build in bad else "ok") for one in waiting]
                record_measured(session, claim, results, driver=DRIVER, plan_version=VERSIONS["gpu_plan_version"])
            elif claim.kind == "compare":
                mine = select(CandidateRow.candidate).where(CandidateRow.job_problem_id == int(claim.ref))
                right = session.scalars(mine.where(CandidateRow.verdict == "ok")).all()
                wrong = [WrongContender(one, verdict, "drifted", {}) for one in right if one[-1] in bad]
                record_compared(session, claim, {} if right else None, wrong=wrong, measure=spent)
            else:
                finish_problem(session, claim, winner=None, error="none")

    def plan(self, claim: Claim) -> None:
        """In two transactions, as the planner does with a large search."""
        with self.database.write() as session:
            self.plan_a_part(session, claim)
        with self.database.write() as session:
            problems = problems_to_plan(session, claim)
            self.record(session, claim, [(one, build) for one in problems for build in self.asked[one.id]])
            for problem in problems:
                end_plan(session, claim, PlannedProblem(problem.id, len(self.asked[problem.id]), 9, {}, spent))
            items.complete(session, claim)

    def plan_a_part(self, session: Session, claim: Claim) -> None:
        problems = problems_to_plan(session, claim)
        self.record(session, claim, [(one, build) for one in problems for build in self.asked[one.id]][:2])

    def record(self, session: Session, claim: Claim, pairs: Sequence[tuple[JobProblem, str]]) -> None:
        candidates = [(one.id, NewCandidate(f"{one.name}-{build}", {}, f"{build:0>64}", build)) for one, build in pairs]
        builds = self.new({build for _, build in pairs})
        record_candidates(session, claim, candidates, builds, Versions(**VERSIONS))

    def new(self, builds: set[str]) -> dict[str, NewBuild]:
        """Build `c` has a toolchain of its own."""
        return {
            build: new_build(build, toolchain=OTHER if build == "c" else TOOLCHAIN, predicted_seconds=1.0)
            for build in builds
        }

    def outcome(self, claim: Claim, build: str, bad: Sequence[str]) -> BuildOutcome:
        if build in bad:
            return BuildOutcome(build, "compile_error", log="error: no")
        return BuildOutcome(build, "ok", f"code-{build}", {}, None, f"{claim.ref}-{build}")

    def complete(self, session: Session, claim: Claim, error: str | None) -> None:
        complete_group(session, claim, GroupFiles(compile=spent), error)
        self.compiled_seconds += 1.0

    def verdict(self, kernel: GroupKernel, bad: Sequence[str]) -> NewVerdict:
        return NewVerdict(kernel.slice, "incorrect" if kernel.build in bad else "ok", None, {}, 1.0, 1.0)

    def reconcile(self) -> None:
        with self.database.write() as session:
            jobs.expire_budgets(session)
            items.expire_leases(session)
            late = select(JobRow.id).where(JobRow.deadline <= self.clock.now())
            of_late = ItemRow.id.in_(select(ItemJobRow.item_id).where(ItemJobRow.job_id.in_(late), ItemJobRow.wanted))
            kept = select(ItemRow.kind).where(of_late, ItemRow.state.in_(UNENDED))
            assert set(session.scalars(kept)) <= {"finish"}, "a job that is out of time wants more than its end"
        with self.database.write() as session:
            clear_all(session)

    # ---- what must hold

    @invariant()
    def every_live_problem_has_work_that_leads_to_its_end(self) -> None:
        if not hasattr(self, "database"):
            return
        with self.database.read() as session:
            work = {(item.kind, item.ref): item for item in session.scalars(select(ItemRow))}
            work = {place: item for place, item in work.items() if item.state in UNENDED}
            live_jobs = set(session.scalars(select(JobRow.id).where(JobRow.state.in_(LIVE))))
            problems = session.scalars(select(JobProblemRow).where(JobProblemRow.state.in_(LIVE))).all()
            for item in work.values():
                wanting = set(jobs_of(session, item.id))
                assert wanting and wanting <= live_jobs, f"{item.kind} is wanted by {wanting}"
            for problem in problems:
                assert problem.job_id in live_jobs
                for place in self.waits_for(session, problem):
                    assert place in work, f"{problem.device_class} waits for {place}, which is not there"
                    assert problem.job_id in jobs_of(session, work[place].id)

    @invariant()
    def a_build_is_pending_for_a_job_or_compiling_in_one_file(self) -> None:
        if not hasattr(self, "database"):
            return
        with self.database.read() as session:
            demanded = set(session.scalars(select(DemandRow.build)))
            running = {
                item.ref: self.members_of(session, item.ref)
                for item in session.scalars(
                    select(ItemRow).where(ItemRow.kind == "compile", ItemRow.state == "claimed")
                )
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
        return [kernel.build for kernel in group.kernels]

    @invariant()
    def the_seconds_of_all_jobs_are_those_that_were_spent(self) -> None:
        if not hasattr(self, "database"):
            return
        with self.database.read() as session:
            charged = sum(
                problem.seconds.get("compile", {}).get("wall", 0.0)
                for problem in session.scalars(select(JobProblemRow))
            )
        assert abs(charged - self.compiled_seconds) < 1e-6

    def waits_for(self, session: Session, problem: JobProblemRow) -> list[tuple[str, str]]:
        """Each is needed; for a problem that is not planned yet, the item that plans it."""
        if not problem.planned:
            return [
                ("plan", ref)
                for ref in session.scalars(select(ItemRow.ref).where(ItemRow.kind == "plan"))
                if parse_plan_ref(ref)[0] == problem.job_id
            ]
        open_candidates = session.execute(
            select(CandidateRow.build, BuildRow)
            .join(BuildRow, BuildRow.id == CandidateRow.build, isouter=True)
            .where(CandidateRow.job_problem_id == problem.id, CandidateRow.verdict.is_(None))
        ).all()
        if not open_candidates:
            ends = session.execute(
                select(ItemRow.kind, ItemRow.ref).where(
                    ItemRow.ref == str(problem.id), ItemRow.state.in_(UNENDED), ItemRow.kind.in_(NEXT)
                )
            ).all()
            assert len(ends) == 1, "exactly one of comparing and finishing is next"
            return [(ends[0].kind, ends[0].ref)]
        places = []
        for name, build in open_candidates:
            assert build is not None, f"nobody makes build {name}"
            if build.state in ("pending", "compiling"):
                assert session.get(DemandRow, (problem.job_id, name)) is not None, f"{name} is not demanded"
                if build.state == "compiling":
                    places.append(("compile", str(build.group_id)))
            elif build.state != "ok":
                # Recorded, not yet judged: by the worker that has the file, or after it died by a verify item.
                running = {"kind": "compile", "ref": build.group_id, "state": "claimed"}
                item = session.scalars(select(ItemRow).filter_by(**running)).one_or_none()
                places.append(("verify" if item is None else "compile", str(build.group_id)))
            elif is_predicted(problem.device_class):
                places.append(("verify", str(build.group_id)))
            else:
                assert build.state == "ok" and build.library is not None
                places.append(("measure", measure_ref(str(build.group_id), problem.device_class)))
        return places

    @invariant()
    def a_verdict_stays_but_for_code_that_a_gpu_found_wrong(self) -> None:
        if not hasattr(self, "database"):
            return
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
            condemned = before == "ok" and on_gpu and row.verdict in BAD
            assert before is None or before == row.verdict or condemned
            assert (row.measured_us is not None) == (row.verdict == "ok" and on_gpu)
            if row.verdict is not None:
                self.seen[row.job_problem_id, row.candidate] = row.verdict

    def end_everything(self) -> None:
        """Workers that do their work, and a reconciler, bring every job to its end."""
        if not hasattr(self, "database"):
            return
        for _ in range(600):
            self.clock.advance(LEASE + 1)
            self.reconcile()
            with self.database.write() as session:
                claim = items.claim(session, KINDS, None, "last", LEASE)
                seen = self.read(session, claim) if claim else ()
            if claim is None:
                break
            self.write(Held(claim, seen), (), "ok", part=False)
            self.every_live_problem_has_work_that_leads_to_its_end()
        with self.database.read() as session:
            assert session.scalars(select(ItemRow.kind).where(ItemRow.state.in_(UNENDED))).all() == []
            assert session.scalars(select(JobRow.id).where(JobRow.state.in_(LIVE))).all() == []
            assert session.scalars(select(JobProblemRow.id).where(JobProblemRow.state.in_(LIVE))).all() == []


def test_every_job_ends_whatever_happens(migrated_file: Path) -> None:  # noqa: F811
    Jobs.template = migrated_file
    examples = int(os.environ.get("CUKILN_TEST_JOB_ORDERS", "15"))
    quiet = list(HealthCheck)
    chosen = settings(max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=quiet)
    run_state_machine_as_test(Jobs, settings=chosen)
