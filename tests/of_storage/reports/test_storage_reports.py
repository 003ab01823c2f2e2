"""Reports: jobs, candidates, rejections, groups, timings: true, and with a fixed number of queries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import insert

from codegen.predict.compile_cost import FIXED_SECONDS
from codegen.text import render_group
from codegen.text.render_group import primitives_of
from cukiln.types import PtxCost, StageSeconds
from storage.database.pages import make_cursor
from storage.database.session import Database
from storage.database.sql import core
from storage.database.tables import CandidateRow, JobProblemRow, VerdictRow
from storage.entities.candidates import forget_ptx_verdicts, set_predictions, write_ptx_verdicts
from storage.entities.heartbeats import live_toolchains, register_toolchain
from storage.entities.jobs import load_problem, problems_to_plan
from storage.entities.libraries import PtxVerdict
from storage.entities.stage_times import add_seconds
from storage.entities.verdicts import NewVerdict
from storage.entities.winners import publish_winner
from storage.errors import BadCursor
from storage.queue import tasks
from storage.reports.candidates import candidate_page, rejections
from storage.reports.job import job_report
from storage.reports.progress import FINISH_SECONDS, job_progress
from storage.reports.times import By, timings
from storage.transitions import accept, end_attempt
from storage.transitions.apply_verdicts import VERDICTS_AT_ONCE, Versions
from storage.transitions.end_jobs import finish_problem
from storage.transitions.groups import (
    apply_group_verdicts,
    builds_to_verify,
    complete_verified,
    group_report,
    record_verdicts,
)
from storage.transitions.pending_builds import NewCandidate, PlannedProblem, end_plan, record_candidates
from tests.support.fixtures.storage import (
    CPU_PLAN,
    SITES,
    TARGET,
    TOOLCHAIN,
    VERSIONS,
    EveryOperator,
    add_job,
    cancel,
    compile_leased,
    compile_next,
    counted_statements,
    end_budgets,
    new_build,
    new_problem,
    plan_next,
    plan_predicted,
    problem_ids,
    take_one,
    verify_next,
    winner_record,
)
from tests.support.run.fake_clock import FakeClock

ENOUGH_QUERIES = 20


def finish_with_record(database: Database, winner: str) -> None:
    lease = take_one(database, "finish")
    with database.write() as session:
        problem = load_problem(session, int(lease.ref))
        assert problem is not None
        publish_winner(session, winner_record(problem.key, winner), attempt=lease.token)
        finish_problem(session, lease, winner=winner, error=None)


def test_a_job_counts_each_kernel_that_was_run_from_its_ptx_once_and_nothing_before_its_verification(
    database: Database,
) -> None:
    job = add_job(database, ptx="all")
    plan_next(database, "a", "b", "c")
    compile_next(database)
    verify_next(database)
    verdict = PtxVerdict("ok", "", "plan", 1, 1.0, 2.0)
    with database.write() as session:
        [problem] = problem_ids(session, job.id)
        again = {"job_problem_id": problem, "candidate": "c-again", "schedule": {}, "kernel": "a", "build": "a"}
        session.execute(insert(core(CandidateRow)), [again])
        write_ptx_verdicts(session, {"a": verdict, "b": verdict, "c": replace(verdict, verdict="untranslated")})

    def cost() -> PtxCost | None:
        with database.read() as session:
            report = job_report(session, job.id)
        assert report is not None
        return report.problems[0].ptx

    assert cost() == PtxCost(kernels={}, cpu_seconds=0.0)
    with database.write() as session:
        add_seconds(session, {problem: {"ptx": StageSeconds(cpu=6.0)}})
    assert cost() == PtxCost(kernels={"ok": 2, "untranslated": 1}, cpu_seconds=6.0)
    with database.write() as session:
        forget_ptx_verdicts(session, ["b", "c"])
    assert cost() == PtxCost(kernels={"ok": 1}, cpu_seconds=6.0)


def test_a_finished_job_is_reported(database: Database, clock: FakeClock) -> None:
    job = add_job(database, budget_seconds=90.0, priority="high")
    clock.advance(2)
    plan_next(database, "a", "b")
    compile_next(database, bad=["b"])
    verify_next(database)
    clock.advance(3)
    finish_with_record(database, "c-a")
    with database.read() as session:
        report = job_report(session, job.id)
    assert report is not None
    assert (report.job, report.state, report.cached, report.priority) == (job.id, "done", False, "high")
    assert (report.started_at or 0) - report.created_at == 2
    assert (report.finished_at or 0) - report.created_at == 5
    assert report.budget_seconds == 90
    assert report.progress.eta_seconds is None
    assert report.seconds.compile == StageSeconds(wall=8, cpu=8)
    (problem,) = report.problems
    assert (problem.name, problem.state, problem.candidates) == ("p0", "done", 2)
    assert problem.verdicts == {"compile_error": 1, "ok": 1}
    assert problem.rejected == {"rule": 2}
    assert problem.seconds.lower == StageSeconds(wall=0.5, cpu=0.25)
    assert problem.seconds.codegen == StageSeconds(wall=1, cpu=1)
    assert problem.seconds.verify == StageSeconds(wall=4, cpu=4)
    assert problem.winner is not None
    assert (problem.winner.candidate, problem.winner.so_sha256) == ("c-a", "1" * 64)
    assert (problem.winner.verified, problem.winner.ranked_by, problem.winner.predicted_us) == (
        "cpu",
        "predicted",
        12.5,
    )


def test_a_winner_that_left_the_front_is_answered_by_the_fronts_best(database: Database) -> None:
    job = add_job(database)
    plan_next(database, "a")
    compile_next(database)
    verify_next(database)
    finish_with_record(database, "c-a")
    with database.write() as session:
        key = new_problem("p0").key
        publish_winner(session, winner_record(key, "better"), attempt="another")
        report = job_report(session, job.id)
    assert report is not None and report.problems[0].winner is not None
    assert report.problems[0].winner.candidate == "better"


def test_unknown_jobs_and_groups_have_no_report(database: Database) -> None:
    with database.read() as session:
        assert job_report(session, "nope") is None
        assert job_progress(session, "nope") is None
        assert candidate_page(session, "nope") is None
        assert rejections(session, "nope") is None
        assert group_report(session, "nope") is None


def counts(database: Database, job_id: str) -> tuple[tuple[int, int], ...]:
    with database.read() as session:
        progress = job_progress(session, job_id)
    assert progress is not None
    stages = (progress.progress.lower, progress.progress.compile, progress.progress.verify, progress.progress.finish)
    return tuple((stage.done, stage.total) for stage in stages)


def test_progress_counts_problems_kernels_and_candidates(database: Database) -> None:
    job = add_job(database, count=33)
    assert counts(database, job.id) == ((0, 33), (0, 0), (0, 0), (0, 33))
    plan_next(database, "a")
    assert counts(database, job.id) == ((32, 33), (0, 1), (0, 32), (0, 33))
    lease = take_one(database, "compile")
    plan_next(database, "a", "b")
    assert counts(database, job.id) == ((33, 33), (0, 2), (0, 34), (0, 33))
    compile_leased(database, lease)
    assert counts(database, job.id) == ((33, 33), (1, 2), (0, 34), (0, 33))
    compile_next(database, bad=["b"])
    assert counts(database, job.id) == ((33, 33), (2, 2), (1, 34), (0, 33))
    verify_next(database)
    finish_with_record(database, "c-a")
    assert counts(database, job.id) == ((33, 33), (2, 2), (34, 34), (1, 33))
    with database.read() as session:
        progress = job_progress(session, job.id)
    assert progress is not None
    assert (progress.progress.candidates_done, progress.progress.candidates_failed) == (34, 1)
    assert (progress.state, progress.seconds.compile.wall) == ("running", pytest.approx(16))


def compile_and_verify(database: Database) -> None:
    """One kernel."""
    compile_next(database, kernels=1)
    verify_next(database)


def test_what_a_cancel_left_out_is_not_done(database: Database, clock: FakeClock) -> None:
    job = add_job(database, count=33)
    plan_next(database, "a", "b", "c")
    compile_and_verify(database)
    compile_next(database, kernels=1)
    cancel(database, job.id)
    assert counts(database, job.id) == ((32, 33), (2, 3), (32, 96), (0, 33))
    with database.read() as session:
        progress = job_progress(session, job.id)
    assert progress is not None
    assert (progress.progress.candidates_done, progress.progress.candidates_failed) == (32, 0)


@pytest.mark.parametrize("shared", ["not", "pending", "compiling"])
def test_what_a_later_job_compiles_is_not_the_work_of_a_cancelled_one(
    database: Database, clock: FakeClock, shared: str
) -> None:
    job = add_job(database)
    plan_next(database, "a", "b")
    compile_and_verify(database)
    if shared != "not":
        add_job(database)
        plan_next(database, "a", "b")
    lease = take_one(database, "compile") if shared == "compiling" else None
    clock.advance(1)
    cancel(database, job.id)
    clock.advance(1)
    if shared == "not":
        add_job(database)
        plan_next(database, "a", "b")
    compile_leased(database, lease or take_one(database, "compile"))
    verify_next(database)
    assert counts(database, job.id) == ((1, 1), (1, 2), (1, 2), (0, 1))


def test_what_a_spent_budget_left_out_is_not_done(database: Database, clock: FakeClock) -> None:
    job = add_job(database, count=33, budget_seconds=60.0)
    plan_next(database, "a", "b")
    compile_and_verify(database)
    clock.advance(61)
    assert end_budgets(database) == [job.id]
    assert counts(database, job.id) == ((32, 33), (1, 2), (32, 64), (0, 33))
    finish_with_record(database, "c-a")
    assert counts(database, job.id) == ((32, 33), (1, 2), (32, 64), (1, 33))


def test_cached_problems_are_done(database: Database) -> None:
    with database.write() as session:
        job = accept.create_jobs(session, [accept.NewJob([new_problem("a", cached=True, winner="c")])])[0]
    assert counts(database, job.id) == ((1, 1), (0, 0), (0, 0), (1, 1))


def eta(database: Database, job_id: str) -> float | None:
    with database.read() as session:
        progress = job_progress(session, job_id)
    assert progress is not None
    return progress.progress.eta_seconds


def test_the_eta_follows_predictions_then_what_was_observed(database: Database, clock: FakeClock) -> None:
    job = add_job(database)
    assert eta(database, job.id) is None  # not planned yet
    plan_predicted(database, a=2.0, b=2.0, c=2.0)
    # 3 kernels of predicted 2 s; on a machine that has verified nothing yet, verifying is taken to last as long.
    assert eta(database, job.id) == pytest.approx(3 * 2 * 2 + FINISH_SECONDS)
    compile_next(database, kernels=1)  # took 8 s instead of 2 and those of the file
    verify_next(database)  # 4 s: half of the compile
    each = 2 * 8 / (2 + FIXED_SECONDS) * 1.5
    assert eta(database, job.id) == pytest.approx(2 * each + FINISH_SECONDS)
    take_one(database, "compile", worker="w1", kernels=1)
    take_one(database, "compile", worker="w2", kernels=1)
    assert eta(database, job.id) == pytest.approx((2 * each + FINISH_SECONDS) / 2)
    clock.advance(2)
    # two at work, two seconds in
    assert eta(database, job.id) == pytest.approx((2 * each - 2 * 2 + FINISH_SECONDS) / 2)
    clock.advance(100)
    # Both should have ended, each after the 8 s that the first one took.
    assert eta(database, job.id) == pytest.approx((2 * each - 2 * 8 + FINISH_SECONDS) / 2)


def test_the_eta_counts_the_problems_that_are_to_be_finished(database: Database, clock: FakeClock) -> None:
    job = add_job(database, count=5)
    plan_next(database, "a")
    compile_next(database)
    verify_next(database)
    assert eta(database, job.id) == pytest.approx(5 * FINISH_SECONDS)
    first = take_one(database, "finish")
    clock.advance(6)
    with database.write() as session:
        finish_problem(session, first, winner=None, error="none")
    assert eta(database, job.id) == pytest.approx(4 * 6)  # as long as the first one took
    take_one(database, "finish", worker="w1")
    take_one(database, "finish", worker="w2")
    clock.advance(1)
    assert eta(database, job.id) == pytest.approx((4 * 6 - 2 * 1) / 2)
    clock.advance(100)
    assert eta(database, job.id) == pytest.approx(2 * 6 / 2)  # both should have ended; the other two still wait


def test_the_eta_counts_the_jobs_that_are_served_beside_and_before(database: Database, clock: FakeClock) -> None:
    beside = add_job(database)
    plan_predicted(database, a=2.0)
    clock.advance(1)
    job = add_job(database)
    plan_predicted(database, b=2.0)
    # Each kernel is verified for as long as it is compiled; jobs of one priority take turns.
    assert eta(database, job.id) == eta(database, beside.id) == pytest.approx(8 + 2 * FINISH_SECONDS)
    clock.advance(1)
    add_job(database, priority="low")
    plan_predicted(database, low=2.0)
    assert eta(database, job.id) == pytest.approx(8 + 2 * FINISH_SECONDS)
    large = add_job(database, count=3)
    plan_predicted(database, c=2.0, d=2.0, e=2.0)
    # Of a larger job no more than of its own work is done before its end, and of smaller ones all before the larger's.
    assert eta(database, job.id) == pytest.approx(12 + 3 * FINISH_SECONDS)
    assert eta(database, large.id) == pytest.approx(20 + 5 * FINISH_SECONDS)
    add_job(database, count=2, priority="high")
    plan_predicted(database, high=4.0, higher=4.0)
    assert eta(database, job.id) == pytest.approx(12 + 16 + 5 * FINISH_SECONDS)


@pytest.mark.parametrize("count", [1_500, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_job_of_many_problems_is_reported_with_a_handful_of_queries(database: Database, count: int) -> None:
    small = add_job(database)
    with database.write() as session:
        new = [new_problem(f"p{n}", key=f"{n % 50:064x}") for n in range(count)]
        job = accept.create_jobs(session, [accept.NewJob(new)])[0]
        ids = problem_ids(session, job.id)
        done = {"planned": True, "state": "done", "winner": "c1", "candidate_count": 2}
        session.query(JobProblemRow).update(done)
        rows = [
            {"job_problem_id": i, "candidate": f"c{c}", "schedule": {}, "kernel": "k", "build": "b", "verdict": v}
            for i in ids
            for c, v in enumerate(("ok", "incorrect"))
        ]
        session.execute(insert(core(CandidateRow)), rows)
        for number in range(50):
            record = winner_record(f"{number:064x}", "c1")
            publish_winner(session, record, attempt=f"t{number}")
    with counted_statements(database) as seen, database.read() as session:
        report = job_report(session, job.id)
    assert report is not None and len(report.problems) == count
    assert all(problem.winner and problem.verdicts == {"ok": 1, "incorrect": 1} for problem in report.problems)
    assert report.progress.verify.done == 2 * count
    assert len(seen) <= ENOUGH_QUERIES
    with counted_statements(database) as of_one, database.read() as session:
        job_report(session, small.id)
    assert len(seen) == len(of_one)
    with counted_statements(database) as seen, database.read() as session:
        page = candidate_page(session, job.id, limit=1000)
    assert page is not None and len(page.candidates) == 1000
    assert len(seen) <= ENOUGH_QUERIES


@pytest.mark.parametrize("count", [1_500, pytest.param(10_000, marks=pytest.mark.long)])
def test_many_problems_that_share_a_kernel_are_verified_with_a_handful_of_queries(
    database: Database, count: int
) -> None:
    """Creating, planning and verifying do not query per problem or candidate."""
    with counted_statements(database) as seen:
        job = add_job(database, count=count)
    assert len([statement for statement in seen if "INSERT" in statement]) <= ENOUGH_QUERIES
    with database.write() as session:
        problems = problem_ids(session, job.id)
        session.query(JobProblemRow).update({"planned": True, "state": "running"})
        rows = [
            {"job_problem_id": i, "candidate": "c", "schedule": {}, "kernel": "k", "build": "a"} for i in problems[1:]
        ]
        session.execute(insert(core(CandidateRow)), rows)
        session.get_one(JobProblemRow, problems[0]).planned = False
        session.get_one(JobProblemRow, problems[0]).state = "queued"
    plan_next(database, "a")
    compile_next(database)
    lease = take_one(database, "verify")
    with database.read() as session:
        asked = builds_to_verify(session, lease.ref, **CPU_PLAN)
    verdicts = [NewVerdict("slice-a", "matmul", "ok", None, {}, 1.0, 1.0)]
    parts: list[int] = []
    more = True
    with counted_statements(database) as seen:
        while more:
            with database.write() as session:
                record_verdicts(session, lease, verdicts, EveryOperator("1"))
                next_steps, more = apply_group_verdicts(session, lease, Versions(**VERSIONS))
            parts.append(len(next_steps))
        with database.write() as session:
            assert (
                complete_verified(session, lease, asked, verify=StageSeconds(wall=4.0), plans=EveryOperator("1")) == []
            )
    assert sum(parts) == count
    assert max(parts) <= VERDICTS_AT_ONCE
    assert len(seen) <= 2 * len(parts) * ENOUGH_QUERIES


def planned_job(database: Database) -> str:
    """Two problems with candidates a1, a2 and b1; verified but a2, which does not compile."""
    with database.write() as session:
        job = accept.create_jobs(session, [accept.NewJob([new_problem("first"), new_problem("second")])])[0]
    lease = take_one(database, "plan")
    with database.write() as session:
        first, second = problems_to_plan(session, lease)
        builds = {name: new_build(name) for name in ("a1", "a2", "b1")}
        pairs = [
            (problem.id, NewCandidate(name, {"n": name}, builds[name].kernel, name))
            for problem, names in ((first, ("a2", "a1")), (second, ("b1",)))
            for name in names
        ]
        record_candidates(session, lease, pairs, builds, Versions(**VERSIONS))
        for problem, candidates, count in ((first, 2, 3), (second, 1, 5)):
            rejected = {"threads": {"count": count, "example": {"n": 1}, "message": "too many threads"}}
            end_plan(session, lease, PlannedProblem(problem.id, candidates, 9, rejected, StageSeconds()))
        tasks.complete(session, lease)
    compile_next(database, bad=["a2"])
    verify_next(database, wrong=["b1"])
    return job.id


def test_candidates_are_listed_in_order_page_by_page(database: Database) -> None:
    job_id = planned_job(database)
    seen, cursor = [], None
    with database.read() as session:
        for _ in range(3):
            page = candidate_page(session, job_id, limit=1, cursor=cursor)
            assert page is not None
            seen += [(candidate.problem, candidate.candidate) for candidate in page.candidates]
            cursor = page.next_cursor
    assert seen == [("first", "a1"), ("first", "a2"), ("second", "b1")]
    assert cursor is None


@pytest.mark.parametrize("cursor", ["x", make_cursor("a", "b"), make_cursor(1)])
def test_a_candidate_cursor_from_elsewhere_is_refused(database: Database, cursor: str) -> None:
    job = add_job(database)
    with pytest.raises(BadCursor), database.read() as session:
        candidate_page(session, job.id, cursor=cursor)


def test_candidates_are_filtered_by_problem_and_verdict(database: Database) -> None:
    job_id = planned_job(database)
    with database.read() as session:
        by_problem = candidate_page(session, job_id, problem="second")
        by_verdict = candidate_page(session, job_id, verdict="compile_error")
    assert by_problem is not None and [candidate.candidate for candidate in by_problem.candidates] == ["b1"]
    assert by_verdict is not None and [candidate.candidate for candidate in by_verdict.candidates] == ["a2"]


@pytest.mark.parametrize(
    ("venue", "confirmed", "label"),
    [
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu-unconfirmed"),
        ("gpu", False, "gpu"),
    ],
)
def test_a_candidate_is_reported_with_its_verification_and_resources(
    database: Database, monkeypatch: pytest.MonkeyPatch, venue: str, confirmed: bool, label: str
) -> None:
    everything = primitives_of("matmul") if confirmed else frozenset()
    monkeypatch.setattr(render_group, "confirmed_primitives", lambda _: everything)
    job_id = planned_job(database)
    with database.write() as session:
        (first, _) = problem_ids(session, job_id)
        set_predictions(session, first, {"a1": {"us": 7.5, "occupancy": 0.75}})
        if venue == "gpu":
            measured = {"cases": [{"exact": False, "max_error": 0.125, "error_bound": 1.0}]}
            session.add(
                VerdictRow(
                    subject="code-a1",
                    venue="gpu",
                    plan_version="1",
                    verdict="ok",
                    details=measured,
                    wall_seconds=1,
                    cpu_seconds=1,
                    created_at=0,
                )
            )
            session.flush()
        page = candidate_page(session, job_id)
    assert page is not None
    fine, broken, wrong = page.candidates
    assert (fine.verdict, fine.verified, fine.message) == ("ok", label, None)
    assert (fine.max_error, fine.error_bound) == ((0.125, 1.0) if venue == "gpu" else (0.25, 0.5))
    assert (fine.registers, fine.shared_bytes, fine.spill_bytes) == (32, 64, 4)
    # No GPU counts accesses: its verdict is shown with what the CPU run counted, and so is a run that was wrong.
    assert [site.model_dump() for site in fine.shared_memory or ()] == SITES
    assert wrong.shared_memory == fine.shared_memory
    assert broken.shared_memory is None
    assert (fine.predicted_us, fine.occupancy, fine.measured_us) == (7.5, 0.75, None)
    assert fine.group is not None and fine.group == broken.group
    assert (broken.verdict, broken.verified, broken.registers) == ("compile_error", None, None)
    assert broken.message == "x.cu(7): error: no such thing"
    assert (wrong.verdict, wrong.verified, wrong.message) == ("incorrect", None, "off by one")


def test_rejections_are_counted_per_problem_and_rule(database: Database) -> None:
    job_id = planned_job(database)
    with database.read() as session:
        rejected = rejections(session, job_id)
    assert rejected is not None
    assert [(rejection.problem, rejection.rule, rejection.count) for rejection in rejected.rejections] == [
        ("first", "threads", 3),
        ("second", "threads", 5),
    ]
    assert (rejected.rejections[0].example, rejected.rejections[0].message) == ({"n": 1}, "too many threads")


def test_a_group_is_reported(database: Database) -> None:
    job, other = add_job(database), add_job(database)
    plan_predicted(database, a=2.5, b=1.5)
    plan_predicted(database, a=2.5)
    lease = take_one(database, "compile")
    with database.read() as session:
        begun = group_report(session, lease.ref)
    assert begun is not None
    assert (begun.state, [kernel.state for kernel in begun.kernels]) == ("compiling", ["compiling", "compiling"])
    compile_leased(database, lease, bad=["b"])
    verify_next(database)
    with database.read() as session:
        report = group_report(session, lease.ref)
    assert report is not None
    assert (report.target, report.toolchain, report.state) == (TARGET, TOOLCHAIN, "compiled")
    assert report.jobs == sorted([job.id, other.id])
    assert report.predicted_seconds == pytest.approx(4 + FIXED_SECONDS)
    assert (report.compile.wall, report.verify.wall) == (8, 4)
    assert [(phase.name, phase.seconds) for phase in report.phases] == [("queue", 0.0), ("cicc", 1.5)]
    assert (report.source_sha256, report.log_sha256) == ("a" * 64, "b" * 64)
    assert (report.library_sha256, report.cubin_sha256) == ("c" * 64, "d" * 64)
    fine, broken = report.kernels
    assert (fine.kernel, fine.namespace) == (f"{'a':0>64}", "kernel_" + "0" * 16)
    assert (fine.operator, fine.tunables, fine.state) == ("matmul", {"n": "a"}, "ok")
    assert (fine.code_digest, (fine.resources or {})["registers"]) == ("code-a", 32)
    assert (fine.predicted_seconds, broken.predicted_seconds) == (2.5, 1.5)
    assert (broken.state, broken.log) == ("compile_error", "x.cu(7): error: no such thing")


@pytest.mark.parametrize("end", ["released", "failed", "lost", "cancelled"])
def test_a_group_that_came_to_nothing_says_how_and_where_its_kernels_are(
    database: Database, clock: FakeClock, end: str
) -> None:
    job = add_job(database)
    plan_next(database, "a", "b")
    lease = take_one(database, "compile")
    with database.write() as session:
        match end:
            case "released":
                end_attempt.release(session, lease)
            case "failed":
                end_attempt.fail(session, lease, "the disk is full", retry=True)
            case "lost":
                clock.advance(6)
                end_attempt.expire_leases(session)
    if end == "cancelled":
        cancel(database, job.id)
    with database.read() as session:
        report = group_report(session, lease.ref)
    assert report is not None
    # Of a build that no job needs any more there is nothing left but the group's own word.
    states = ["cancelled"] * 2 if end == "cancelled" else ["pending"] * 2
    assert (report.state, [kernel.state for kernel in report.kernels]) == (end, states)
    assert (report.jobs, report.phases, report.library_sha256) == ([job.id], [], None)


@pytest.mark.parametrize("by", ["operator", "job", "day"])
def test_timings_are_summed(database: Database, clock: FakeClock, by: By) -> None:
    first = add_job(database)
    plan_next(database, "a")
    compile_next(database)
    clock.advance(86_400)
    with database.write() as session:
        cached = new_problem("x", cached=True, winner="c")
        other = new_problem("y", operator="reduce", cached=True, winner="c")
        second = accept.create_jobs(session, [accept.NewJob([cached, other])])[0]
    with database.read() as session:
        report = timings(session, by)
    rows = {(row.operator, row.job or row.day): row for row in report.timings}
    keys = {
        "operator": [("matmul", None), ("reduce", None)],
        "job": [("matmul", second.id), ("reduce", second.id), ("matmul", first.id)],
        "day": [("matmul", "2023-11-15"), ("reduce", "2023-11-15"), ("matmul", "2023-11-14")],
    }[by]
    assert sorted(rows) == sorted(keys)
    spent = rows[keys[0] if by == "operator" else keys[2]]
    assert spent.seconds.compile == StageSeconds(wall=8, cpu=8)
    assert spent.seconds.lower == StageSeconds(wall=0.5, cpu=0.25)
    assert spent.seconds.measure == StageSeconds()
    matmul = rows[keys[0]]
    assert (matmul.problems, matmul.cached) == ((2, 1) if by == "operator" else (1, 1))
    if by != "operator":
        assert [row.operator for row in report.timings] == ["matmul", "reduce", "matmul"]  # latest first


def test_toolchains_are_live_while_their_workers_say_so(database: Database, clock: FakeClock) -> None:
    with database.write() as session:
        register_toolchain(session, "old", {"nvcc": "13.0"}, ["sm_80"])
        clock.advance(20)
        register_toolchain(session, "new", {"nvcc": "13.2"}, ["sm_80"])
        assert [toolchain.digest for toolchain in live_toolchains(session, 30)] == ["new", "old"]
        clock.advance(20)
        register_toolchain(session, "new", {"nvcc": "13.2"}, ["sm_80", "sm_90a"])
        (live,) = live_toolchains(session, 30)
    assert (live.digest, live.description, live.targets) == ("new", {"nvcc": "13.2"}, ["sm_80", "sm_90a"])
