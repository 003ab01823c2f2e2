"""Plans, compiled groups and verdicts: builds are shared, compiled once, verified once; problems are finished once."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from cukiln.types import StageSeconds
from storage.database.session import Database
from storage.database.tables import BuildRow, CandidateRow, JobProblemRow, TaskRow
from storage.entities import jobs
from storage.entities.candidates import candidates_of_problem, set_predictions
from storage.entities.groups import kernels_of, known_builds, load_group
from storage.entities.jobs import load_problem, problems_to_plan
from storage.entities.verdicts import NewVerdict, known_verdicts
from storage.errors import LostLease
from storage.queue import losses, tasks
from storage.queue.new_tasks import jobs_of
from storage.queue.tasks import Renewal
from storage.reports.times import timeline
from storage.transitions import accept, end_attempt, end_jobs, take_work
from storage.transitions.apply_verdicts import Versions, note_lost
from storage.transitions.end_jobs import finish_problem
from storage.transitions.groups import BuildOutcome, builds_to_verify
from storage.transitions.pending_builds import NewCandidate, PlannedProblem, end_plan, record_candidates
from tests.support.fixtures.storage import (
    CPU_PLAN,
    SITES,
    TARGET,
    VERSIONS,
    EveryOperator,
    add_job,
    cancel,
    clear_all,
    compile_leased,
    compile_next,
    end_budgets,
    new_build,
    new_problem,
    plan_next,
    problem_ids,
    record,
    record_group,
    record_verified,
    take_one,
    verify_leased,
    verify_next,
)
from tests.support.run.fake_clock import FakeClock
from workers.steps.finish import is_cut_short


def verdicts_of(database: Database, job_id: str) -> list[dict[str, str | None]]:
    """Candidate -> verdict, for each problem of the job."""
    with database.read() as session:
        return [
            {candidate.candidate: candidate.verdict for candidate in candidates_of_problem(session, problem_id)}
            for problem_id in problem_ids(session, job_id)
        ]


def unended(database: Database, *kinds: str) -> list[str]:
    with database.read() as session:
        query = select(TaskRow.kind).where(TaskRow.state.in_(("waiting", "leased"))).order_by(TaskRow.id)
        return [kind for kind in session.scalars(query) if not kinds or kind in kinds]


def finish_next(database: Database, winner: str | None = "c-a", error: str | None = None) -> str | None:
    lease = take_one(database, "finish")
    with database.write() as session:
        return finish_problem(session, lease, winner=winner, error=error)


def test_a_job_goes_from_plan_to_done(database: Database) -> None:
    job = add_job(database)
    assert plan_next(database, "a", "b").waiting == [("compile", TARGET)] * 2
    assert compile_next(database, bad=["b"]).waiting == [("verify", TARGET)]
    assert verdicts_of(database, job.id) == [{"c-a": None, "c-b": "compile_error"}]
    assert len(verify_next(database)) == 1
    assert verdicts_of(database, job.id) == [{"c-a": "ok", "c-b": "compile_error"}]
    assert finish_next(database) == "done"
    assert unended(database) == []
    with database.read() as session:
        (fine, failed) = candidates_of_problem(session, problem_ids(session, job.id)[0])
    assert failed.message == "x.cu(7): error: no such thing"
    assert fine.code_digest == "code-a"
    cases = [{"exact": False, "max_error": 0.25, "error_bound": 0.5}]
    assert fine.verification is not None and fine.verification.details == {"cases": cases, "shared_memory": SITES}


def test_a_group_in_which_nothing_compiled_needs_no_verification(database: Database) -> None:
    add_job(database)
    plan_next(database, "a", "b")
    recorded = compile_next(database, bad=["a", "b"])
    assert recorded.waiting == []
    assert len(recorded.next_steps) == 1
    assert unended(database) == ["finish"]


def test_a_problem_is_finished_when_its_last_candidate_is_verified_and_once(database: Database) -> None:
    add_job(database)
    plan_next(database, "a", "b")
    compile_next(database, kernels=1)
    compile_next(database)
    assert verify_next(database) == []
    assert len(verify_next(database)) == 1
    assert unended(database) == ["finish"]


def test_a_problem_without_candidates_is_finished_at_once_with_its_reason(database: Database) -> None:
    job = add_job(database)
    lease = take_one(database, "plan")
    with database.write() as session:
        recorded = record(session, lease, [])
    assert (recorded.waiting, len(recorded.next_steps)) == ([], 1)
    assert finish_next(database, winner=None, error="rule: too many") == "failed"
    with database.read() as session:
        status = jobs.job_state(session, job.id)
    assert status is not None and status.error == "1 of 1 problem failed; the first, p0: rule: too many"


@pytest.mark.parametrize(("good", "shown"), [(0, "failed"), (1, "done")])
def test_a_plan_whose_problems_end_before_its_attempt_is_not_shown_as_cancelled(
    database: Database, good: int, shown: str
) -> None:
    job = add_job(database, count=1 + good)
    lease = take_one(database, "plan")
    with database.write() as session:
        for problem in problems_to_plan(session, lease):
            end_plan(session, lease, PlannedProblem(problem.id, 0, 2, {}, StageSeconds(), error="rule: too many"))
    for winner in [None] + ["c-a"] * good:
        finish_next(database, winner=winner, error=None if winner else "rule: too many")
    with database.read() as session:
        rows = timeline(session, job.id)
    assert rows is not None
    assert [(step.kind, step.state) for lane in rows.lanes for step in lane.steps if step.kind == "plan"] == [
        ("plan", shown)
    ]


def test_a_job_with_some_failed_problems_is_partial(database: Database) -> None:
    add_job(database, count=2)
    plan_next(database, "a")
    compile_next(database)
    verify_next(database)
    assert finish_next(database) is None
    assert finish_next(database, winner=None, error="nothing was right") == "partial"


def test_a_job_with_a_winner_that_lost_other_candidates_is_partial(database: Database) -> None:
    job = add_job(database, count=1)
    plan_next(database, "a")
    compile_next(database)
    verify_next(database)
    with database.write() as session:
        note_lost(session, problem_ids(session, job.id), losses.why_skipped("killed"))
    assert finish_next(database) == "partial"


def test_a_planned_task_is_planned_once(database: Database, clock: FakeClock) -> None:
    """A planner that was thought dead comes back after another has done its work."""
    add_job(database)
    late = take_one(database, "plan")
    clock.advance(6)
    with database.write() as session:
        end_attempt.expire_leases(session)
    clock.advance(losses.pause_after(1))
    plan_next(database, "a")
    with pytest.raises(LostLease), database.write() as session:
        record(session, late, ["b"])
    with database.read() as session:
        assert set(known_builds(session, ["a", "b"])) == {"a"}
        assert problems_to_plan(session, late) == []


def test_a_build_that_two_jobs_plan_is_compiled_once(database: Database) -> None:
    first, second = add_job(database), add_job(database)
    first_lease, second_lease = take_one(database, "plan"), take_one(database, "plan")
    with database.write() as session:
        record(session, first_lease, ["a", "b"])
    ours = take_one(database, "compile")
    with database.write() as session:
        assert record(session, second_lease, ["b", "c"]).waiting == [("compile", TARGET)] * 2
    theirs = take_one(database, "compile")
    with database.read() as session:
        groups = [load_group(session, lease.ref) for lease in (ours, theirs)]
        assert [sorted(kernel.build for kernel in kernels_of(group)) for group in groups if group] == [
            ["a", "b"],
            ["c"],
        ]
        # What is compiling when the second job comes is for that first_lease, too.
        assert jobs_of(session, ours.task_id) == tuple(sorted((first.id, second.id)))
    for lease in (ours, theirs):
        compile_leased(database, lease)
    verify_next(database)
    verify_next(database)
    assert verdicts_of(database, first.id) == [{"c-a": "ok", "c-b": "ok"}]
    assert verdicts_of(database, second.id) == [{"c-b": "ok", "c-c": "ok"}]
    assert unended(database) == ["finish", "finish"]


def test_a_plan_that_is_recorded_twice_is_recorded_once(database: Database, clock: FakeClock) -> None:
    """A planner dies between two parts: the next one begins with the first again."""
    job = add_job(database)
    lease = take_one(database, "plan")
    with database.write() as session:
        (problem,) = problems_to_plan(session, lease)
        part = [(problem.id, NewCandidate(f"c-{build}", {}, f"{build:0>64}", build)) for build in "ab"]
        builds = {build: new_build(build) for build in "ab"}
        record_candidates(session, lease, part, builds, Versions(**VERSIONS))
    compile_next(database)
    assert verdicts_of(database, job.id) == [{"c-a": None, "c-b": None}]
    verify_next(database)
    assert unended(database) == ["plan"]  # all that is recorded is verified, but more may come
    clock.advance(6)
    with database.write() as session:
        end_attempt.expire_leases(session)
    clock.advance(losses.pause_after(1))
    assert plan_next(database, "a", "b", "c").waiting == [("compile", TARGET)]
    compile_next(database)
    verify_next(database)
    assert verdicts_of(database, job.id) == [{"c-a": "ok", "c-b": "ok", "c-c": "ok"}]
    assert unended(database) == ["finish"]


def test_what_is_stored_is_not_done_again(database: Database) -> None:
    add_job(database)
    plan_next(database, "a", "b")
    compile_next(database, bad=["b"])
    verify_next(database)
    finish_next(database)
    later = add_job(database)
    recorded = plan_next(database, "a", "b")
    assert recorded.waiting == []
    assert len(recorded.next_steps) == 1
    assert verdicts_of(database, later.id) == [{"c-a": "ok", "c-b": "compile_error"}]
    assert unended(database) == ["finish"]


def test_an_equal_slice_under_another_toolchain_keeps_its_verdict(database: Database) -> None:
    add_job(database)
    plan_next(database, "a")
    compile_next(database)
    verify_next(database)
    with database.write() as session:
        session.get_one(BuildRow, "a").id = "a-older"  # as if the toolchain had changed
    add_job(database)
    plan_next(database, "a")
    assert compile_next(database).waiting == []
    assert unended(database, "verify") == []


def test_a_verdict_counts_for_targets_whose_tensor_cores_add_alike(database: Database) -> None:
    add_job(database)
    plan_next(database, "a")
    compile_next(database)
    verify_next(database)
    finish_next(database)
    for others, waiting in (({"sm_90": EveryOperator("2")}, []), ({TARGET: EveryOperator("2")}, [("verify", TARGET)])):
        add_job(database)
        lease = take_one(database, "plan")
        with database.write() as session:
            assert record(session, lease, ["a"], other_cpu_plans=others).waiting == waiting


def test_another_test_plan_version_verifies_without_compiling(database: Database) -> None:
    add_job(database)
    plan_next(database, "a", "b")
    compile_next(database, bad=["b"])
    verify_next(database)
    finish_next(database)
    later = add_job(database)
    lease = take_one(database, "plan")
    with database.write() as session:
        recorded = record(session, lease, ["a", "b"], cpu_plans=EveryOperator("2"))
    assert recorded.waiting == [("verify", TARGET)]
    assert unended(database) == ["verify"]
    # A third job meanwhile relies on that verification.
    third = add_job(database)
    lease = take_one(database, "plan")
    with database.write() as session:
        assert record(session, lease, ["a"], cpu_plans=EveryOperator("2")).waiting == []
    lease = take_one(database, "verify")
    assert lease.jobs == tuple(sorted((later.id, third.id)))
    with database.write() as session:
        asked = builds_to_verify(session, lease.ref, EveryOperator("2"))
        assert [kernel.build for kernel in asked] == ["a"]
        ok = NewVerdict("slice-a", "matmul", "ok", None, {}, 1.0, 1.0)
        next_steps = record_verified(session, lease, [ok], asked, plan_version="2")
    assert len(next_steps) == 2
    assert verdicts_of(database, later.id) == [{"c-a": "ok", "c-b": "compile_error"}]
    assert verdicts_of(database, third.id) == [{"c-a": "ok"}]


def test_a_kernel_that_comes_to_be_wanted_while_its_group_is_verified_is_verified_next(database: Database) -> None:
    add_job(database)
    plan_next(database, "a", "b")
    compile_next(database)
    with database.write() as session:  # as if `b` had been measured alone until now
        session.query(CandidateRow).filter(CandidateRow.build == "b").delete()
    lease = take_one(database, "verify")
    with database.read() as session:
        asked = builds_to_verify(session, lease.ref, **CPU_PLAN)
    later = add_job(database)
    plan_next(database, "b")
    with database.write() as session:
        ok = NewVerdict("slice-a", "matmul", "ok", None, {}, 1.0, 1.0)
        record_verified(session, lease, [ok], asked)
    assert unended(database) == ["verify", "finish"]
    verify_next(database)
    assert verdicts_of(database, later.id) == [{"c-b": "ok"}]


def test_what_a_more_urgent_job_needs_too_is_done_first(database: Database) -> None:
    add_job(database, priority="low")
    plan_next(database, "shared")
    add_job(database)
    plan_next(database, "other")
    add_job(database, priority="high")
    plan_next(database, "shared")
    lease = take_one(database, "compile", kernels=1)
    with database.read() as session:
        group = load_group(session, lease.ref)
        assert group is not None and kernels_of(group)[0].build == "shared"
    compile_leased(database, lease)
    following = take_one(database, "verify", "compile")
    assert (following.kind, following.ref) == ("verify", lease.ref)


def test_a_verification_that_forgets_a_kernel_is_refused(database: Database) -> None:
    add_job(database)
    plan_next(database, "a", "b")
    compile_next(database)
    lease = take_one(database, "verify")
    with pytest.raises(ValueError, match=f"no verdict for {'b':0>64}"), database.write() as session:
        only_one = [NewVerdict("slice-a", "matmul", "ok", None, {}, 1.0, 1.0)]
        record_verified(session, lease, only_one, builds_to_verify(session, lease.ref, **CPU_PLAN))
    assert len(verify_leased(database, lease)) == 1  # nothing was written: the lease still holds


def test_a_failure_replaces_an_ok_and_is_never_replaced(database: Database) -> None:
    add_job(database)
    plan_next(database, "a")
    compile_next(database)
    lease = take_one(database, "verify")

    def write(verdict: str) -> None:
        with database.write() as session:
            row = session.get_one(TaskRow, lease.task_id)
            row.state, row.token = "leased", lease.token
            session.flush()
            new = NewVerdict("slice-a", "matmul", verdict, verdict, {"seed": verdict}, 1.0, 1.0)
            record_verified(session, lease, [new], ())

    for verdict, kept in (("ok", "ok"), ("incorrect", "incorrect"), ("ok", "incorrect"), ("run_timeout", "incorrect")):
        write(verdict)
        with database.read() as session:
            stored = known_verdicts(session, ["slice-a"], "cpu", **CPU_PLAN)["slice-a"]
        assert (stored.verdict, stored.details) == (kept, {"seed": kept})


def test_compiling_records_the_group(database: Database, clock: FakeClock) -> None:
    add_job(database)
    plan_next(database, "a", "b")
    lease = take_one(database, "compile")
    clock.advance(3)
    compile_leased(database, lease)
    with database.read() as session:
        group = load_group(session, lease.ref)
    assert group is not None
    assert (group.state, group.source, group.cubin) == ("compiled", "a" * 64, "d" * 64)
    assert group.finished_at is not None and group.finished_at - group.created_at == 3


def test_a_build_that_compiled_comes_with_its_library(database: Database) -> None:
    add_job(database)
    plan_next(database, "a")
    lease = take_one(database, "compile")
    with pytest.raises(ValueError, match="without a library: a"), database.write() as session:
        record_group(session, lease, [BuildOutcome("a", "ok", "code")])
    with database.read() as session:
        assert {build.state for build in known_builds(session, ["a"]).values()} == {"compiling"}


def test_a_groups_seconds_are_shared_out_to_the_problems_that_use_its_kernels(database: Database) -> None:
    job = add_job(database, count=33)
    plan_next(database, "a")  # 32 problems
    plan_next(database, "a", "b")  # the last one
    compile_next(database, kernels=1)
    compile_next(database)
    verify_next(database)
    verify_next(database)
    with database.read() as session:
        spent = [load_problem(session, problem_id) for problem_id in problem_ids(session, job.id)]
    seconds = [problem.seconds for problem in spent if problem is not None]
    # The group of kernel `a`: 8 s over 33 problems; that of `b`: 8 s, all of the last problem.
    assert seconds[0]["compile"]["wall"] == pytest.approx(8 / 33)
    assert seconds[-1]["compile"] == {"wall": pytest.approx(8 / 33 + 8), "cpu": pytest.approx(8 / 33 + 8)}
    assert sum(each["compile"]["wall"] for each in seconds) == pytest.approx(16)
    assert sum(each["codegen"]["cpu"] for each in seconds) == pytest.approx(2)
    assert sum(each["verify"]["wall"] for each in seconds) == pytest.approx(8)
    assert seconds[0]["lower"] == {"wall": 0.5, "cpu": 0.25}


def test_predictions_are_written_to_candidates(database: Database) -> None:
    job = add_job(database)
    plan_next(database, "a", "b")
    with database.write() as session:
        (problem_id,) = problem_ids(session, job.id)
        set_predictions(session, problem_id, {"c-b": {"us": 1.5, "occupancy": 0.5}})
        set_predictions(session, 7777, {"x": {"us": 1.0}})
        set_predictions(session, problem_id, {})
        predictions = {
            candidate.candidate: (candidate.predicted_us, candidate.prediction)
            for candidate in candidates_of_problem(session, problem_id)
        }
    assert predictions == {"c-a": (None, None), "c-b": (1.5, {"us": 1.5, "occupancy": 0.5})}


def test_finishing_needs_a_winner_or_a_reason_and_counts_its_own_time(database: Database) -> None:
    job = add_job(database)
    plan_next(database)
    lease = take_one(database, "finish")
    for winner, error in ((None, None), ("c", "e")):
        with pytest.raises(ValueError, match="either a winner or an error"), database.write() as session:
            finish_problem(session, lease, winner=winner, error=error)
    with database.write() as session:
        spent = {"compile": StageSeconds(wall=2, cpu=3)}
        finish_problem(session, lease, winner="c-a", error=None, extra_seconds=spent)
        problem = load_problem(session, problem_ids(session, job.id)[0])
    assert problem is not None and problem.seconds["compile"] == {"wall": 2, "cpu": 3}
    with pytest.raises(LostLease), database.write() as session:
        finish_problem(session, lease, winner="c-b", error=None)


# How work ends before its time.


def test_a_cancelled_job_stops_everything_that_it_alone_waits_for(database: Database) -> None:
    job = add_job(database, count=40)
    plan_next(database, "a")
    lease = take_one(database, "compile")
    with database.write() as session:
        status = end_jobs.cancel_job(session, job.id)
        assert tasks.renew(session, lease, 5, 0.0) is Renewal.CANCELLED
    assert status is not None and status.state == "cancelled"
    assert unended(database) == []
    with pytest.raises(LostLease):
        compile_leased(database, lease)
    cancel(database, job.id)
    with database.read() as session:
        assert known_builds(session, ["a"]) == {}
        group = load_group(session, lease.ref)
        states = {load_problem(session, problem_id).state for problem_id in problem_ids(session, job.id)}  # type: ignore[union-attr]
    assert group is not None and group.state == "cancelled"
    assert states == {"cancelled"}
    assert verdicts_of(database, job.id)[0] == {"c-a": "skipped"}


def test_a_file_that_another_job_needs_survives_a_cancel(database: Database) -> None:
    first, second = add_job(database), add_job(database)
    plan_next(database, "a")
    plan_next(database, "a")
    lease = take_one(database, "compile")
    cancel(database, first.id)
    with database.write() as session:
        assert tasks.renew(session, lease, 5, 0.0) is Renewal.HELD
        assert jobs_of(session, lease.task_id) == (second.id,)
    compile_leased(database, lease)
    cancel(database, first.id)  # again: nothing happens
    assert len(verify_next(database)) == 1
    assert verdicts_of(database, second.id) == [{"c-a": "ok"}]
    assert finish_next(database) == "done"
    with database.read() as session:
        assert [jobs.job_state(session, job.id).state for job in (first, second)] == ["cancelled", "done"]  # type: ignore[union-attr]


def test_a_verification_that_another_job_waits_for_survives_a_cancel(database: Database) -> None:
    first = add_job(database)
    plan_next(database, "a")
    compile_next(database)
    second = add_job(database)
    assert plan_next(database, "a").waiting == []
    lease = take_one(database, "verify")
    cancel(database, first.id)
    assert len(verify_leased(database, lease)) == 1
    assert verdicts_of(database, second.id) == [{"c-a": "ok"}]


def test_after_a_cancel_the_next_job_takes_up_what_was_left(database: Database) -> None:
    first = add_job(database)
    plan_next(database, "a")
    compile_next(database)
    cancel(database, first.id)
    second = add_job(database)
    assert plan_next(database, "a").waiting == [("verify", TARGET)]  # compiled, not verified
    assert unended(database) == ["verify"]
    verify_next(database)
    assert verdicts_of(database, second.id) == [{"c-a": "ok"}]


def test_a_spent_budget_finishes_with_what_was_verified(database: Database, clock: FakeClock) -> None:
    job = add_job(database, count=33, budget_seconds=60.0)
    plan_next(database, "a", "b")
    compile_next(database, kernels=1)
    verify_next(database)
    assert end_budgets(database) == []
    clock.advance(61)
    assert end_budgets(database) == [job.id]
    assert end_budgets(database) == []
    assert verdicts_of(database, job.id)[0] == {"c-a": "ok", "c-b": "skipped"}
    assert unended(database) == ["finish"] * 33
    with database.read() as session:
        unplanned = load_problem(session, problem_ids(session, job.id)[32])
    assert unplanned is not None
    assert unplanned.error == "the budget of 60 seconds ended before its search space was lowered"
    states = []
    for _ in range(33):
        lease = take_one(database, "finish")
        ended = {"winner": None, "error": "-"} if int(lease.ref) == unplanned.id else {"winner": "c-a", "error": None}
        with database.write() as session:
            states.append(finish_problem(session, lease, **ended))
    assert states == [None] * 32 + ["partial"]


def test_each_job_out_of_time_reports_its_own_budget(database: Database, clock: FakeClock) -> None:
    for seconds in (5.0, 60.0):
        add_job(database, budget_seconds=seconds)
        take_one(database, "plan")
    clock.advance(61)
    end_budgets(database)
    with database.read() as session:
        errors = session.scalars(select(JobProblemRow.error).order_by(JobProblemRow.id)).all()
    assert errors == [f"the budget of {budget} seconds ended before its search space was lowered" for budget in (5, 60)]


def test_a_problem_of_which_a_budget_left_a_part_planned_is_not_covered(database: Database, clock: FakeClock) -> None:
    add_job(database)
    plan_next(database, "b")
    compile_next(database)
    verify_next(database)
    add_job(database, budget_seconds=5.0)
    lease = take_one(database, "plan")
    with database.write() as session:
        (problem,) = problems_to_plan(session, lease)
        recorded = (problem.id, NewCandidate("c-b", {}, f"{'b':0>64}", "b"))
        record_candidates(session, lease, [recorded], {"b": new_build("b")}, Versions(**VERSIONS))
    clock.advance(6)
    end_budgets(database)
    with database.read() as session:
        cut, stored = load_problem(session, problem.id), candidates_of_problem(session, problem.id)
    assert cut is not None
    assert [row.verdict for row in stored] == ["ok"], "the others of its search were not even recorded"
    assert is_cut_short(cut, stored, None)


def test_a_later_verdict_does_not_change_what_an_ended_job_was_verified_on(
    database: Database, clock: FakeClock
) -> None:
    ended = add_job(database, budget_seconds=10.0)
    other = add_job(database)
    plan_next(database, "a")
    plan_next(database, "a")
    clock.advance(11)
    end_budgets(database)
    compile_next(database)
    verify_next(database)
    assert verdicts_of(database, ended.id) == [{"c-a": "skipped"}]
    assert verdicts_of(database, other.id) == [{"c-a": "ok"}]


def test_what_another_job_needs_of_a_job_out_of_time_is_compiled(database: Database, clock: FakeClock) -> None:
    add_job(database, budget_seconds=10.0)
    other = add_job(database)
    plan_next(database, "a")
    plan_next(database, "a")
    clock.advance(11)
    compile_next(database)
    end_budgets(database)
    verify_next(database)
    assert verdicts_of(database, other.id) == [{"c-a": "ok"}]


def test_nothing_is_compiled_for_a_job_out_of_time(database: Database, clock: FakeClock) -> None:
    add_job(database, budget_seconds=10.0)
    plan_next(database, "a")
    clock.advance(11)
    with database.write() as session:
        assert take_work.take(session, ["compile"], None, "w", 5) is None
        assert take_work.waiting_counts(session) == {}
    end_budgets(database)
    with database.write() as session:
        assert take_work.waiting_counts(session) == {("finish", TARGET): 1}
        assert known_builds(session, ["a"]) == {}


def test_a_group_that_cannot_be_verified_skips_its_candidates_and_stores_nothing(database: Database) -> None:
    job = add_job(database)
    plan_next(database, "a", "b")
    compile_next(database, kernels=1)
    lease = take_one(database, "verify")
    with database.write() as session:
        assert end_attempt.fail(session, lease, "the disk is full", retry=False) == "failed"
        clear_all(session)
    # Of two equal builds either is compiled first.
    (verdicts,) = verdicts_of(database, job.id)
    assert verdicts in ({"c-a": "skipped", "c-b": None}, {"c-a": None, "c-b": "skipped"})
    compile_next(database)
    assert len(verify_next(database)) == 1  # the problem continues without it
    # The next job tries again.
    later = add_job(database)
    assert plan_next(database, "a", "b").waiting == [("verify", TARGET)]
    verify_next(database)
    assert verdicts_of(database, later.id) == [{"c-a": "ok", "c-b": "ok"}]


def test_a_problem_whose_finishing_keeps_failing_fails_with_the_reason(database: Database) -> None:
    job = add_job(database)
    plan_next(database)
    lease = take_one(database, "finish")
    with database.write() as session:
        end_attempt.fail(session, lease, "no room for the library", retry=False)
        status = jobs.job_state(session, job.id)
    assert status is not None and status.state == "failed"
    assert status.error is not None and "no room for the library" in status.error


def test_what_a_plan_recorded_before_it_failed_for_good_is_skipped(database: Database) -> None:
    job = add_job(database)
    lease = take_one(database, "plan")
    with database.write() as session:
        (problem,) = problems_to_plan(session, lease)
        part = [(problem.id, NewCandidate("c-a", {}, f"{'a':0>64}", "a"))]
        record_candidates(session, lease, part, {"a": new_build("a")}, Versions(**VERSIONS))
        end_attempt.fail(session, lease, "no such operator", retry=False)
        clear_all(session)
    assert verdicts_of(database, job.id) == [{"c-a": "skipped"}]
    with database.read() as session:
        assert known_builds(session, ["a"]) == {}
        (candidate,) = candidates_of_problem(session, problem.id)
    assert candidate.message == "its problem failed: no such operator"


def test_a_job_of_cached_problems_is_done_at_once(database: Database) -> None:
    with database.write() as session:
        cached = [new_problem("a", cached=True, winner="c"), new_problem("b", cached=True, winner="c")]
        job = accept.create_jobs(session, [accept.NewJob(cached)])[0]
    assert (job.state, job.cached, job.tasks) == ("done", True, 0)
    assert unended(database) == []


def test_only_what_is_not_cached_is_planned(database: Database) -> None:
    problems = [new_problem(f"p{n}", cached=n != 70, winner="c" if n != 70 else None) for n in range(100)]
    with database.write() as session:
        job = accept.create_jobs(session, [accept.NewJob(problems)])[0]
    assert (job.state, job.cached, job.tasks) == ("queued", False, 1)
    lease = take_one(database, "plan")
    with database.read() as session:
        assert [problem.position for problem in problems_to_plan(session, lease)] == [70]
