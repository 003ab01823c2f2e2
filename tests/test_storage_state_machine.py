"""Whatever happens in whatever order, every live problem has work that leads to its end, and nobody waits for ever."""

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
from storage.builds import NewBuild, known_builds
from storage.clock import FakeClock
from storage.database import Database, Session
from storage.device_classes import is_predicted
from storage.errors import LostClaim, PlanOutdated
from storage.groups import BuildOutcome, load_group, record_compiled
from storage.items import Claim, Renewal
from storage.join_groups import groups_to_join, join_groups
from storage.judge import LIVE, only_screened
from storage.measurements import (
    ToMeasure,
    WrongContender,
    candidates_to_measure,
    forget_group_library,
    measure_ref,
    record_compared,
    record_measured,
)
from storage.new_items import parse_plan_ref
from storage.plans import NewCandidate, NewGroup, PlannedProblem, problems_to_plan, record_plan
from storage.problems import finish_problem
from storage.screening import record_refined
from storage.tables import BuildRow, CandidateRow, ItemRow, JobProblemRow, JobRow
from storage.verdicts import NewVerdict, builds_to_verify, record_verified
from tests.fixtures_storage import (
    DRIVER,
    GPU_CLASS,
    OTHER_CLASS,
    PLAN,
    TARGET,
    TOOLCHAIN,
    measured,
    migrated_file,  # noqa: F401 - a fixture
    new_build,
    new_problem,
)

CPU_CLASS = f"predicted:{TARGET}"
CLASSES = (CPU_CLASS, GPU_CLASS, OTHER_CLASS)
BUILDS = ("a", "b", "c")
FAST = "fast-"  # begins the name of a build that screens
KINDS = ("finish", "compare", "refine", "verify", "measure", "compile", "plan")
NEXT = ("refine", "compare", "finish")  # of a problem whose candidates are all judged
LEASE = 60.0
BAD = ("incorrect", "runtime_error", "run_timeout", "skipped")
UNENDED = ("waiting", "claimed")
spent = StageSeconds(wall=1.0, cpu=1.0)
some_bad = st.lists(st.sampled_from(BUILDS), max_size=1)
some_best = st.sampled_from([None, 1, 1, 2])  # to compile in full, of those that are screened
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
        self.best: dict[int, int] = {}  # how many are compiled in full, by problem that is screened

    def teardown(self) -> None:
        try:
            self.end_everything()
        finally:
            self.database.dispose()
            self.folder.cleanup()

    # ---- what happens

    @rule(
        problems=st.lists(st.tuples(st.sampled_from(CLASSES), some_builds, some_best), min_size=1, max_size=3),
        priority=st.sampled_from(["low", "normal", "high"]),
        budget=st.sampled_from([None, None, 100.0]),
        name=st.sampled_from("xy"),
    )
    def submit(self, problems: Any, priority: Any, budget: float | None, name: str) -> None:
        new = [new_problem(name, device_class=device_class) for device_class, _, _ in problems]
        with self.database.write() as session:
            job = jobs.create_job(session, jobs.NewJob(new, priority=priority, budget_seconds=budget))
            query = select(JobProblemRow.id).where(JobProblemRow.job_id == job.id).order_by(JobProblemRow.position)
            for problem_id, (_, builds, best) in zip(session.scalars(query), problems, strict=True):
                self.asked[problem_id] = builds
                if best is not None and len(builds) > best:
                    self.best[problem_id] = best

    @rule(data=st.data(), along=st.sampled_from([0, 1, 9]))
    def claim(self, data: st.DataObject, along: int) -> None:
        with self.database.write() as session:
            waiting = {kind for kind, _ in items.waiting_counts(session)}
            if waiting:
                self.take(session, data.draw(st.sampled_from(sorted(waiting))), along)

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
        """Jobs with a new build each, and some with the first one's, wait for one claim."""
        first = len(self.asked)
        for place, device_class in enumerate(classes):
            builds = dict.fromkeys([f"n{first + place}", *([f"n{first}"] if shared else [])])
            self.submit([(device_class, list(builds), None)], "normal", None if place else budget, f"z{first + place}")
        with self.database.write() as session:
            taken = [self.take(session, "plan", 0) for _ in classes]
        for _ in filter(None, taken):
            self.write(self.held.pop(), (), "ok", part=False)
        with self.database.write() as session:
            self.take(session, "compile", 9)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), along=st.sampled_from([1, 9]))
    def take_more_along(self, data: st.DataObject, along: int) -> None:
        """What waits by the time that a worker comes to look is not what waited when it claimed; nor may it hold its
        claim any more."""
        held = data.draw(st.sampled_from(self.held))
        if held.claim.kind == "compile":
            with suppress(LostClaim), self.database.write() as session:
                self.take_along(session, held.claim, along)

    @rule(kinds=st.permutations(KINDS), bad=some_bad, verdict=st.sampled_from(BAD), along=st.sampled_from([0, 1, 9]))
    def work_at_once(self, kinds: Sequence[str], bad: list[str], verdict: str, along: int) -> None:
        """Nothing comes in between: so that much gets far in few steps."""
        with self.database.write() as session:
            taken = any(self.take(session, kind, along) for kind in kinds)
        if taken:
            self.write(self.held.pop(), bad, verdict, part=False)

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

    @rule(seconds=st.sampled_from([1.0, 61.0, 101.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.reconcile()

    @rule(build=st.sampled_from([*BUILDS, *(FAST + build for build in BUILDS)]))
    def lose_library(self, build: str) -> None:
        with self.database.write() as session:
            library = session.scalar(select(BuildRow.library).where(BuildRow.id == build))
            if library is not None:
                forget_group_library(session, library)

    # ---- how workers do it

    def take(self, session: Session, kind: str, along: int) -> bool:
        claim = items.claim(session, [kind], None, f"w{len(self.held)}", LEASE)
        if claim is not None:
            if kind == "compile":
                self.take_along(session, claim, along)
            self.held.append(Held(claim, self.read(session, claim)))
        return claim is not None

    def take_along(self, session: Session, claim: Claim, most: int) -> None:
        waiting = groups_to_join(session, claim)
        if chosen := [one.id for one in waiting[:most]]:
            group = join_groups(session, claim, chosen)
            builds = [kernel.build for kernel in group.kernels]
            assert len(builds) == len(set(builds))
            assert set(builds) >= {kernel.build for one in waiting[:most] for kernel in one.kernels}

    def read(self, session: Session, claim: Claim) -> Sequence[Any]:
        if claim.kind == "verify":
            return builds_to_verify(session, claim.ref, PLAN["plan_version"])
        if claim.kind == "refine":
            # Whom it would choose, and what it would name for them, as it reads it now.
            mine = select(CandidateRow.candidate).where(CandidateRow.job_problem_id == int(claim.ref))
            right = session.scalars(mine.where(CandidateRow.verdict == "ok").order_by(CandidateRow.candidate)).all()
            return right[: self.best[int(claim.ref)]]
        if claim.kind == "measure":
            return candidates_to_measure(session, claim.ref, str(claim.target), PLAN["gpu_plan_version"])
        return ()

    def write(self, held: Held, bad: Sequence[str], verdict: str, part: bool) -> None:
        claim = held.claim
        if claim.kind == "plan":
            self.plan(claim)
            return
        if claim.kind == "refine":
            self.refine(claim, held.seen)
            return
        with self.database.write() as session:
            if claim.kind == "compile":
                self.compile(session, claim, bad)
            elif claim.kind == "verify":
                found = [
                    NewVerdict(kernel.slice, "incorrect" if kernel.build[-1] in bad else "ok", None, {}, 1.0, 1.0)
                    for kernel in held.seen
                ]
                record_verified(session, claim, found, plan_version=PLAN["plan_version"], verify=spent)
            elif claim.kind == "measure":
                waiting: Sequence[ToMeasure] = held.seen[:1] if part else held.seen
                results = [measured(one, verdict if one.build[-1] in bad else "ok") for one in waiting]
                record_measured(session, claim, results, driver=DRIVER, plan_version=PLAN["gpu_plan_version"])
            elif claim.kind == "compare":
                mine = select(CandidateRow.candidate).where(CandidateRow.job_problem_id == int(claim.ref))
                right = session.scalars(mine.where(CandidateRow.verdict == "ok", ~only_screened())).all()
                wrong = [WrongContender(one, verdict, "drifted", {}) for one in right if one[-1] in bad]
                record_compared(session, claim, {} if right else None, wrong=wrong, measure=spent)
            else:
                finish_problem(session, claim, winner=None, error="none")

    def plan(self, claim: Claim) -> None:
        try:
            with self.database.write() as session:
                problems = problems_to_plan(session, claim)
                wanted = {problem.id: self.wanted(problem.id) for problem in problems}
                on_gpu = [problem.id for problem in problems if not is_predicted(problem.device_class)]
                to_measure = {build for one in on_gpu for build in wanted[one]}
                builds = {build for some in wanted.values() for build in some}
                planned = [
                    PlannedProblem(
                        problem.id,
                        [
                            NewCandidate(f"{problem.name}-{build[-1]}", {}, f"{build[-1]:0>64}", build)
                            for build in wanted[problem.id]
                        ],
                        9,
                        {},
                        0.0,
                        0.0,
                        screening=problem.id in self.best,
                    )
                    for problem in problems
                ]
                groups = self.groups(session, builds, to_measure)
                record_plan(session, claim, planned, self.new(builds), groups, **PLAN)
        except PlanOutdated as error:
            raise AssertionError("nothing came between reading and recording") from error

    def refine(self, claim: Claim, chosen: Sequence[str]) -> None:
        """As it was chosen when the item was taken, though the world may have moved on."""
        with self.database.write() as session:
            problem = session.get_one(JobProblemRow, int(claim.ref))
            builds = {candidate: candidate[-1] for candidate in chosen}
            to_measure = set() if is_predicted(problem.device_class) else set(builds.values())
            groups = self.groups(session, set(builds.values()), to_measure)
            record_refined(session, claim, builds, self.new(set(builds.values())), groups, spent=spent, **PLAN)
        self.seen = {place: verdict for place, verdict in self.seen.items() if place[0] != problem.id}

    def wanted(self, problem_id: int) -> list[str]:
        prefix = FAST if problem_id in self.best else ""
        return [prefix + build for build in self.asked[problem_id]]

    def new(self, builds: set[str]) -> dict[str, NewBuild]:
        """A build that screens has the slice of the full one."""
        return {build: new_build(build, f"slice-{build[-1]}") for build in builds}

    def groups(self, session: Session, builds: set[str], to_measure: set[str]) -> list[NewGroup]:
        """Of two builds at most, of one toolchain each."""
        unknown = sorted(builds - set(known_builds(session, builds, with_library=to_measure)))
        made = []
        for toolchain, mine in (
            (TOOLCHAIN, [build for build in unknown if not build.startswith(FAST)]),
            (FAST, [build for build in unknown if build.startswith(FAST)]),
        ):
            made += [NewGroup(tuple(mine[i : i + 2]), TARGET, toolchain, 1.0) for i in range(0, len(mine), 2)]
        return made

    def compile(self, session: Session, claim: Claim, bad: Sequence[str]) -> None:
        group = load_group(session, claim.ref)
        assert group is not None
        outcomes = [
            BuildOutcome(kernel.build, "compile_error", log="error: no")
            if kernel.build[-1] in bad
            else BuildOutcome(kernel.build, "ok", f"code-{kernel.build}", {}, None, f"{group.id}-{kernel.build}")
            for kernel in group.kernels
        ]
        record_compiled(
            session,
            claim,
            outcomes,
            source=None,
            log=None,
            library=None,
            cubin=None,
            phases=[],
            codegen=spent,
            compile=spent,
            **PLAN,
        )

    def reconcile(self) -> None:
        with self.database.write() as session:
            jobs.expire_budgets(session)
            items.expire_leases(session)
            late = select(JobRow.id).where(JobRow.deadline <= self.clock.now())
            kept = select(ItemRow.kind).where(ItemRow.job_id.in_(late), ItemRow.state.in_(UNENDED))
            assert set(session.scalars(kept)) <= {"finish"}, "nobody claims the work of a job that is out of time"

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
                assert item.job_id in live_jobs, f"{item.kind} is the work of a job that has ended"
            for problem in problems:
                assert problem.job_id in live_jobs
                for place in self.waits_for(session, problem):
                    assert place in work, f"{problem.device_class} waits for {place}, which nobody does"

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
            assert len(ends) == 1, "exactly one of refining, comparing and finishing is next"
            in_time = session.scalars(select(JobRow.deadline).where(JobRow.id == problem.job_id)).one() is None
            assert (ends[0].kind == "refine") == problem.screening or not in_time
            return [(ends[0].kind, ends[0].ref)]
        places = []
        for name, build in open_candidates:
            assert build is not None, f"nobody makes build {name}"
            if build.state == "pending":
                places.append(("compile", str(build.group_id)))
                group = load_group(session, str(build.group_id))
                assert group is not None
                assert group.state == "waiting" and name in [kernel.build for kernel in group.kernels]
            elif is_predicted(problem.device_class):
                places.append(("verify", str(build.verify_group_id)))
                assert name in [
                    kernel.build
                    for kernel in builds_to_verify(session, str(build.verify_group_id), PLAN["plan_version"])
                ]
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
        for _ in range(400):
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


def test_nobody_waits_for_ever(migrated_file: Path) -> None:  # noqa: F811
    Jobs.template = migrated_file
    examples = int(os.environ.get("CUKILN_TEST_JOB_ORDERS", "15"))
    quiet = list(HealthCheck)
    chosen = settings(max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=quiet)
    run_state_machine_as_test(Jobs, settings=chosen)
