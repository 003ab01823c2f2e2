"""How measuring ends before its time: cancelled, out of time, given up, its libraries lost."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from cukiln.types import StageSeconds
from storage.database.session import Database
from storage.database.tables import BuildRow, TaskJobRow, TaskRow
from storage.entities.groups import known_builds
from storage.errors import LostLease
from storage.queue import tasks
from storage.queue.tasks import Renewal
from storage.transitions import end_attempt, end_jobs, take_work
from storage.transitions.apply_verdicts import NextStep
from storage.transitions.end_jobs import expire_budgets
from storage.transitions.groups import BuildOutcome, GroupFiles, group_report, record_builds
from storage.transitions.measure import (
    forget_group_library,
    record_compared,
)
from storage.transitions.pending_builds import MAX_ATTEMPTS
from tests.support.fixtures.measuring import (
    COMPARISON,
    CPU_CLASS,
    add,
    candidates,
    finish_next,
    ids_of,
    measure_leased_on,
    state_of,
    take_one_in,
    take_target,
    unended,
    verdicts,
)
from tests.support.fixtures.storage import (
    GPU_CLASS,
    OTHER_CLASS,
    TARGET,
    cancel,
    clear_all,
    compile_leased,
    compile_next,
    end_budgets,
    measure_leased,
    measure_next,
    measured,
    plan_next,
    record,
    record_group,
    take_one,
    to_measure,
    verify_next,
)
from tests.support.run.fake_clock import FakeClock

# ---- how work ends before its time


def test_work_on_a_gpu_that_another_job_waits_for_survives_a_cancel(database: Database) -> None:
    first, second = add(database, GPU_CLASS), add(database, GPU_CLASS, priority="high")
    with database.write() as session:
        leases = [take_one_in(session, "plan"), take_one_in(session, "plan")]
        for lease in sorted(leases, key=lambda each: each.job_id != first.id):
            record(session, lease, ["a"])
    compile_next(database)
    lease = take_one(database, "measure")
    assert lease.jobs == tuple(sorted([first.id, second.id]))
    for job, renewal in ((second, Renewal.HELD), (first, Renewal.CANCELLED)):
        with database.write() as session:
            end_jobs.cancel_job(session, job.id)
            assert tasks.renew(session, lease, 5, 0.0) is renewal
    assert unended(database) == []


@pytest.mark.parametrize("kind", ["measure", "compare"])
def test_a_cancel_ends_the_work_on_a_gpu_that_no_other_job_waits_for(database: Database, kind: str) -> None:
    job = add(database, GPU_CLASS)
    other = add(database, OTHER_CLASS, CPU_CLASS)
    plan_next(database, "a")
    plan_next(database, "a")
    compile_next(database)
    if kind == "compare":
        measure_leased_on(database, GPU_CLASS)
    lease = take_target(database, GPU_CLASS, kind)
    with database.write() as session:
        end_jobs.cancel_job(session, job.id)
        assert tasks.renew(session, lease, 5, 0.0) is Renewal.CANCELLED
    assert unended(database) == [("measure", OTHER_CLASS), ("verify", TARGET)]
    with database.read() as session:
        wanting = select(TaskJobRow.job_id).join(TaskRow, TaskRow.id == TaskJobRow.task_id)
        waiting = wanting.where(TaskRow.state == "waiting", TaskJobRow.wanted)
        assert set(session.scalars(waiting)) == {other.id}
    again = add(database, GPU_CLASS)
    plan_next(database, "a")
    if kind == "measure":
        measure_leased_on(database, GPU_CLASS)
    assert verdicts(database, again) == [{"c-a": "ok"}]


def test_a_spent_budget_ends_measuring_with_what_was_measured(database: Database, clock: FakeClock) -> None:
    job = add(database, GPU_CLASS, budget_seconds=60.0)
    plan_next(database, "a", "b")
    compile_next(database, kernels=1)
    compile_next(database, kernels=1)
    measure_next(database)
    lease = take_one(database, "measure", seconds=1000)
    clock.advance(61)
    assert end_budgets(database) == [job.id]
    with database.write() as session:
        assert tasks.renew(session, lease, 5, 0.0) is Renewal.CANCELLED
    assert end_budgets(database) == []
    # There is no time left to compare in.
    assert unended(database) == [("finish", TARGET)]
    assert sorted(str(verdict) for verdict in verdicts(database, job)[0].values()) == ["ok", "skipped"]


@pytest.mark.parametrize("leased", [False, True])
def test_a_budget_that_ends_while_a_problem_is_compared_finishes_it(
    database: Database, clock: FakeClock, leased: bool
) -> None:
    job = add(database, GPU_CLASS, budget_seconds=60.0)
    plan_next(database, "a")
    compile_next(database)
    measure_next(database)
    lease = take_one(database, "compare", seconds=1000) if leased else None
    clock.advance(61)
    with database.write() as session:
        assert take_work.take(session, ["compare"], None, "w", 5) is None
        assert expire_budgets(session) == [job.id]
        assert expire_budgets(session) == []
        clear_all(session)
    assert unended(database) == [("finish", TARGET)]
    if lease is not None:
        with pytest.raises(LostLease), database.write() as session:
            record_compared(session, lease, COMPARISON, measure=StageSeconds())
    finish_next(database)
    assert state_of(database, job) == "done"


@pytest.mark.parametrize("ended", [False, True])
def test_a_budget_leaves_measuring_to_a_job_with_time_left(database: Database, clock: FakeClock, ended: bool) -> None:
    """Whether or not anything has noticed by then that the budget is spent."""
    spent = add(database, GPU_CLASS, budget_seconds=10.0)
    other = add(database, GPU_CLASS)
    plan_next(database, "a")
    plan_next(database, "a")
    compile_next(database)
    clock.advance(11)
    assert not ended or end_budgets(database) == [spent.id]
    measure_next(database)
    assert verdicts(database, other) == [{"c-a": "ok"}]
    assert verdicts(database, spent) == [{"c-a": "skipped" if ended else "ok"}]
    end_budgets(database)
    assert unended(database) == [("compare", GPU_CLASS), ("finish", TARGET)]


def test_a_job_whose_candidates_were_verified_otherwise_leaves_no_work_behind(database: Database) -> None:
    """Its code was found wrong on another GPU. After its deadline no worker leases its work, nor ends it."""
    job = add(database, GPU_CLASS, budget_seconds=60.0)
    add(database, OTHER_CLASS)
    plan_next(database, "a")
    plan_next(database, "a")
    compile_next(database)
    lease = take_target(database, OTHER_CLASS)
    measure_leased(database, lease, [measured(candidate, "incorrect") for candidate in to_measure(database, lease)])
    assert ("measure", GPU_CLASS) in unended(database)
    finish_next(database, winner=None)
    finish_next(database, winner=None)
    assert (state_of(database, job), unended(database)) == ("failed", [])


def test_a_spent_budget_cancels_what_is_not_needed_any_more(database: Database, clock: FakeClock) -> None:
    add(database, GPU_CLASS, budget_seconds=60.0)
    add(database, OTHER_CLASS)
    plan_next(database, "a", "b")
    plan_next(database, "a")
    compile_next(database, bad=["b"])
    lease = take_target(database, OTHER_CLASS)
    measure_leased(database, lease, [measured(candidate, "incorrect") for candidate in to_measure(database, lease)])
    clock.advance(61)
    with database.write() as session:
        expire_budgets(session)
    assert unended(database) == [("finish", TARGET), ("finish", TARGET)]


def test_measuring_that_fails_for_good_skips_its_candidates_and_stores_nothing(
    database: Database, clock: FakeClock
) -> None:
    job = add(database, GPU_CLASS, OTHER_CLASS, CPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    for attempt in range(MAX_ATTEMPTS):
        lease = take_target(database, GPU_CLASS)
        assert lease.attempt == attempt + 1
        with database.write() as session:
            state = end_attempt.fail(session, lease, "its step is broken", retry=True)
    assert state == "failed"
    with database.write() as session:
        clear_all(session)
    assert verdicts(database, job) == [{"c-a": "skipped"}, {"c-a": None}, {"c-a": None}]
    assert unended(database) == [("finish", TARGET), ("measure", OTHER_CLASS), ("verify", TARGET)]
    later = add(database, GPU_CLASS)
    assert plan_next(database, "a").waiting == [("measure", GPU_CLASS)]
    lease = take_target(database, GPU_CLASS)
    assert lease.attempt == 1
    measure_leased(database, lease, [measured(candidate) for candidate in to_measure(database, lease)])
    assert verdicts(database, later) == [{"c-a": "ok"}]


def test_verifying_that_fails_for_good_skips_what_waits_for_the_cpu_alone(database: Database) -> None:
    job = add(database, GPU_CLASS, CPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    lease = take_one(database, "verify")
    with database.write() as session:
        end_attempt.fail(session, lease, "the disk is full", retry=False)
        clear_all(session)
    assert verdicts(database, job) == [{"c-a": None}, {"c-a": "skipped"}]
    measure_next(database)
    assert verdicts(database, job) == [{"c-a": "ok"}, {"c-a": "skipped"}]


def test_a_more_urgent_job_moves_the_measuring_it_shares_forward(database: Database) -> None:
    add(database, GPU_CLASS, priority="low")
    plan_next(database, "shared")
    compile_next(database)
    add(database, GPU_CLASS)
    plan_next(database, "other")
    compile_next(database)
    add(database, GPU_CLASS, priority="high")
    plan_next(database, "shared")
    assert [candidate.build for candidate in to_measure(database, take_one(database, "measure"))] == ["shared"]


# ---- libraries


def test_what_compiled_must_come_with_a_library(database: Database) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a")
    lease = take_one(database, "compile")
    with pytest.raises(ValueError, match="without a library: a"), database.write() as session:
        record_builds(session, lease, [BuildOutcome("a", "ok", "code-a", {})])
    compile_leased(database, lease)


def test_each_kernel_of_a_group_is_measured_from_its_own_library(database: Database) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a", "b")
    lease = take_one(database, "compile")
    outcomes = [BuildOutcome(build, "ok", f"code-{build}", {}, None, f"library of {build}") for build in ("a", "b")]
    files = GroupFiles({"source": "s", "log": "l", "library": "library of a", "cubin": "c", "ptx": "p", "sass": "q"})
    with database.write() as session:
        recorded = record_group(session, lease, outcomes, files)
        report = group_report(session, lease.ref)
    assert recorded.waiting == [("measure", GPU_CLASS)]
    assert report is not None and (report.ptx_sha256, report.sass_sha256) == ("p", "q")
    asked = to_measure(database, take_one(database, "measure"))
    assert [(row.build, row.library) for row in asked] == [("a", "library of a"), ("b", "library of b")]


def lose_library(database: Database, build: str) -> list[NextStep]:
    with database.write() as session:
        return forget_group_library(session, str(session.get_one(BuildRow, build).library))[0]


def test_a_lost_library_skips_what_waits_for_it_and_the_next_job_compiles_it_again(database: Database) -> None:
    job = add(database, GPU_CLASS, CPU_CLASS)
    plan_next(database, "a", "b")
    compile_next(database, kernels=1)
    compile_next(database, kernels=1)
    (problem_id, _) = ids_of(database, job)
    assert lose_library(database, "a") == []
    assert lose_library(database, "b") == [NextStep(problem_id, "finish", TARGET)]
    assert verdicts(database, job) == [{"c-a": "skipped", "c-b": "skipped"}, {"c-a": None, "c-b": None}]
    message = candidates(database, job)[0]["c-a"].message
    assert message is not None and "was lost: submit the problem again" in message
    later = add(database, GPU_CLASS)
    assert plan_next(database, "a", "b").waiting == [("compile", TARGET)] * 2
    compile_next(database)
    while any(kind == "measure" for kind, _ in unended(database)):  # those of what was lost find nothing to do
        measure_leased_on(database, GPU_CLASS)
    assert verdicts(database, later) == [{"c-a": "ok", "c-b": "ok"}]
    # The verdict on the CPU that was waiting was not forgotten on the way.
    while any(kind == "verify" for kind, _ in unended(database)):
        verify_next(database)
    assert verdicts(database, job)[1] == {"c-a": "ok", "c-b": "ok"}


def test_what_is_compiled_again_is_also_verified_where_it_is_needed(database: Database) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    lose_library(database, "a")
    job = add(database, GPU_CLASS, CPU_CLASS)
    plan_next(database, "a")
    assert sorted(compile_next(database).waiting) == [("measure", GPU_CLASS), ("verify", TARGET)]
    verify_next(database)
    assert verdicts(database, job)[1] == {"c-a": "ok"}


def test_a_build_without_a_library_is_good_enough_for_the_cpu(database: Database) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    lose_library(database, "a")
    add(database, CPU_CLASS)
    lease = take_one(database, "plan")
    with database.write() as session:
        assert record(session, lease, ["a"]).waiting == [("verify", TARGET)]


def test_a_library_that_is_lost_while_a_plan_is_made_is_compiled_again(database: Database) -> None:
    add(database, GPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    job = add(database, GPU_CLASS)
    lease = take_one(database, "plan")
    lose_library(database, "a")
    with database.write() as session:
        assert record(session, lease, ["a"]).waiting == [("compile", TARGET)]
    compile_next(database)
    measure_next(database)  # the task of the first group: nothing is left of it
    measure_next(database)
    assert verdicts(database, job) == [{"c-a": "ok"}]


@pytest.mark.parametrize("leased", [False, True])
def test_compiling_again_that_is_cancelled_leaves_what_stood(database: Database, leased: bool) -> None:
    add(database, CPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    verify_next(database)
    lose_library(database, "a")
    job = add(database, GPU_CLASS)
    plan_next(database, "a", "new")
    if leased:
        take_one(database, "compile")
    cancel(database, job.id)
    with database.read() as session:
        builds = known_builds(session, ["a", "new"])
    assert {build.id: (build.state, build.code_digest) for build in builds.values()} == {"a": ("ok", "code-a")}
    later = add(database, CPU_CLASS)
    assert [step.kind for step in plan_next(database, "a").next_steps] == ["finish"]
    assert verdicts(database, later) == [{"c-a": "ok"}]


@pytest.mark.parametrize("leased", [False, True])
def test_what_waits_for_the_cpu_is_verified_though_compiling_again_is_cancelled(
    database: Database, leased: bool
) -> None:
    """Its verify task comes to nothing while the build is pending anew."""
    waiting = add(database, CPU_CLASS)
    plan_next(database, "a")
    compile_next(database)
    lose_library(database, "a")
    job = add(database, GPU_CLASS)
    plan_next(database, "a")
    verify_next(database)
    assert verdicts(database, waiting) == [{"c-a": None}]
    lease = take_one(database, "compile") if leased else None
    cancel(database, job.id)
    compile_leased(database, lease or take_one(database, "compile"))
    verify_next(database)
    assert verdicts(database, waiting) == [{"c-a": "ok"}]
    assert unended(database) == [("finish", TARGET)]
