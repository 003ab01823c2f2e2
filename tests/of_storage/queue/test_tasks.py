"""Tasks: which is leased, by which worker, and what follows a lost lease."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import update

from storage.database.session import Database
from storage.database.tables import JobRow, TaskRow
from storage.entities import jobs
from storage.entities.heartbeats import live_toolchains, register_toolchain
from storage.entities.task_kinds import (
    COMPARE,
    COMPILE,
    FINISH,
    MEASURE,
    PLAN,
    VERIFY,
    grace_seconds,
    parse_plan_ref,
    plan_ref,
)
from storage.errors import LostLease
from storage.queue import losses, new_tasks, tasks
from storage.queue.new_tasks import NewTask
from storage.queue.tasks import TURN_SECONDS, Lease, Renewal
from storage.transitions import accept, end_attempt, end_jobs, take_work
from storage.transitions.charge_turns import spend
from tests.support.fixtures.storage import TARGET, add_job, new_problem, plan_next, take_one
from tests.support.processes.fresh_processes import FRESH
from tests.support.run.fake_clock import FakeClock

KINDS = ("finish", "measure", "verify")


def job_of(database: Database, priority: jobs.Priority = "normal", **changes: Any) -> str:
    """A job of no more work than a test adds."""
    with database.write() as session:
        job = accept.create_jobs(session, [accept.NewJob([new_problem()], priority=priority, **changes)])[0].id
        lease = take_work.take(session, ["plan"], None, "w", 5.0)
        assert lease is not None and lease.jobs == (job,)
        tasks.complete(session, lease)
        session.execute(update(JobRow).where(JobRow.id == job).values(used_seconds=0.0, turn_seconds=0.0))
    return job


def add(database: Database, *new: NewTask, job: str | None = None) -> int:
    """For a job of their own, or `job`."""
    job_id = job or job_of(database)
    with database.write() as session:
        return new_tasks.add_tasks(session, [replace(task, jobs=task.jobs or (job_id,)) for task in new])


def take(database: Database, kinds: Any = KINDS, targets: Any = None, seconds: float = 5.0) -> Lease | None:
    with database.write() as session:
        return take_work.take(session, kinds, targets, "w", seconds)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (NewTask("finish", "a"), NewTask("measure", "b", predicted_seconds=9)),
        (NewTask("measure", "a"), NewTask("verify", "b", predicted_seconds=9)),
        (NewTask("measure", "a", predicted_seconds=2), NewTask("measure", "b", predicted_seconds=1)),
    ],
    ids=["the first kind", "then the next", "longest first"],
)
@pytest.mark.parametrize("better_is_older", [True, False])
def test_the_best_waiting_task_of_a_job_is_leased(
    database: Database, better: NewTask, worse: NewTask, better_is_older: bool
) -> None:
    add(database, *((better, worse) if better_is_older else (worse, better)))
    assert [lease.ref for lease in (take(database), take(database)) if lease] == ["a", "b"]
    assert take(database) is None


def test_of_equal_tasks_the_oldest_is_leased(database: Database) -> None:
    add(database, *(NewTask("measure", ref) for ref in ("b", "a", "c")))
    assert [lease.ref for lease in (take(database), take(database), take(database)) if lease] == ["b", "a", "c"]


def test_a_worker_gets_only_its_kinds_and_targets(database: Database) -> None:
    add(database, NewTask("measure", "a", target="sm_90a"), NewTask("plan", "b"))
    assert take(database, KINDS, ["sm_80"]) is None
    anything = take(database, ["plan", "measure"], ["sm_80"])
    assert anything is not None and anything.ref == "b"  # a task without a target fits every worker
    lease = take(database, KINDS, ["sm_80", "sm_90a"])
    assert lease is not None and (lease.ref, lease.target) == ("a", "sm_90a")


def add_work(database: Database, job: str, count: int, seconds: float = TURN_SECONDS) -> None:
    add(
        database,
        *(NewTask("measure", f"{job}-{n}", jobs=(job,), predicted_seconds=seconds) for n in range(count)),
        job=job,
    )


def jobs_served(database: Database, turns: int) -> list[str]:
    """Whose task is leased, turn after turn, each ended before the next."""
    served = []
    for _ in range(turns):
        lease = take_one(database, *KINDS)
        served += lease.jobs
        with database.write() as session:
            tasks.complete(session, lease)
    return served


def test_jobs_of_one_priority_take_turns_whatever_they_brought(database: Database, clock: FakeClock) -> None:
    large = job_of(database)
    add_work(database, large, 20)
    assert jobs_served(database, 3) == [large] * 3
    under_way = take_one(database, *KINDS)
    clock.advance(1)
    small = job_of(database)
    add_work(database, small, 4)
    served = jobs_served(database, 6)
    # The newcomer at once, but no more often than the other from then on.
    assert served[0] == small
    assert Counter(served[:4]) == {small: 2, large: 2}
    assert under_way.jobs == (large,)


def test_a_newcomer_takes_turns_where_one_worker_has_just_ended_its_work(database: Database) -> None:
    old = job_of(database)
    add_work(database, old, 20)
    assert jobs_served(database, 8) == [old] * 8
    new = job_of(database)
    add_work(database, new, 20)
    served = jobs_served(database, 8)
    assert served == [new, new, new, old, new, old, new, old]  # begins a longest file behind


def test_a_newcomer_does_not_wait_for_all_that_a_later_one_wants(database: Database) -> None:
    """Though a job that no worker can serve has had nothing for long."""
    stuck, old = job_of(database), job_of(database)
    add(database, NewTask("compare", "on a GPU that is gone", jobs=(stuck,)), job=stuck)
    add_work(database, old, 20)
    assert jobs_served(database, 15) == [old] * 15
    under_way = take_one(database, *KINDS)
    first = job_of(database)
    add_work(database, first, 10)
    assert jobs_served(database, 1) == [first]
    with database.write() as session:
        tasks.complete(session, under_way)
    later = job_of(database)
    add_work(database, later, 20)
    assert jobs_served(database, 8) == [later, later, later, old, first, later, old, first]


def test_a_turn_is_as_long_as_its_work_is_predicted_to_be(database: Database) -> None:
    first, second = job_of(database), job_of(database)
    add_work(database, first, 9)
    add_work(database, second, 36, seconds=TURN_SECONDS / 4)
    assert Counter(jobs_served(database, 15)) == {first: 3, second: 12}


def test_within_a_turn_what_is_begun_goes_first_and_then_the_oldest_job(database: Database) -> None:
    first, second, third = (job_of(database) for _ in range(3))
    for job in (third, second, first):
        add(database, NewTask("verify", f"v-{job}", jobs=(job,)), job=job)
    add(database, NewTask("finish", "f", jobs=(third,)), job=third)
    assert jobs_served(database, 4) == [third, first, second, third]


def test_a_job_that_was_blocked_does_not_catch_up_with_what_the_others_used(database: Database) -> None:
    starved, busy = job_of(database), job_of(database)
    add_work(database, busy, 20)
    assert jobs_served(database, 10) == [busy] * 10
    under_way = take_one(database, *KINDS)
    add_work(database, starved, 10)
    assert Counter(jobs_served(database, 10)) == {starved: 6, busy: 4}
    assert under_way.jobs == (busy,)


def test_priority_goes_before_turns(database: Database) -> None:
    urgent, other = job_of(database, "high"), job_of(database)
    add_work(database, urgent, 5)
    add_work(database, other, 5)
    assert jobs_served(database, 5) == [urgent] * 5


def test_work_that_several_jobs_want_is_charged_to_each_and_as_urgent_as_the_most_urgent(database: Database) -> None:
    low, high, other = job_of(database, "low"), job_of(database, "high"), job_of(database)
    add(database, NewTask("measure", "shared", jobs=(low, high), predicted_seconds=8.0))
    add_work(database, other, 1)
    lease = take_one(database, *KINDS)
    assert (lease.ref, lease.jobs) == ("shared", tuple(sorted((low, high))))
    with database.read() as session:
        used = {job: session.get_one(JobRow, job).used_seconds for job in (low, high, other)}
    assert used == {low: 4.0, high: 4.0, other: 0.0}


def test_work_that_no_job_needs_is_not_leased(database: Database) -> None:
    with database.write() as session:
        new_tasks.add_tasks(session, [NewTask("measure", "a")])
    assert take(database) is None


def test_a_plan_task_gives_way_when_it_is_another_jobs_turn(database: Database) -> None:
    add_job(database, count=64)
    lease = take_one(database, "plan")
    with database.read() as session:
        assert not take_work.yields(session, lease, ["plan"])  # the rest of its own job waits
    add_job(database, priority="low")
    with database.read() as session:
        assert not take_work.yields(session, lease, ["plan"])
    add_job(database)
    with database.write() as session:
        assert not take_work.yields(session, lease, ["plan"])
        spend(session, lease.job_id, TURN_SECONDS)
        assert take_work.yields(session, lease, ["plan"])
        assert not take_work.yields(session, lease, ["verify"])


def test_a_task_is_added_once_whatever_became_of_it(database: Database) -> None:
    assert add(database, NewTask("measure", "a"), NewTask("verify", "a")) == 2
    assert add(database, NewTask("measure", "a"), NewTask("measure", "b")) == 1
    lease = take_one(database, "measure")
    with database.write() as session:
        tasks.complete(session, lease)
    assert add(database, NewTask("measure", "a")) == 0
    assert lease.ref == "a"


def test_waiting_tasks_are_counted_by_kind_and_target(database: Database) -> None:
    add(database, NewTask("finish", "a"), NewTask("verify", "b", "sm_80"), NewTask("verify", "c", "sm_80"))
    add(database, NewTask("verify", "d", "sm_90a"))
    take_one(database, "finish")
    add_job(database)
    plan_next(database, "x", "y", "z")
    with database.read() as session:
        assert take_work.waiting_counts(session) == {
            ("verify", "sm_80"): 2,
            ("verify", "sm_90a"): 1,
            ("compile", TARGET): 3,  # builds that are pending
        }


def _take_all(url: str, worker: str, results: Any) -> None:
    database = Database(url)
    while True:
        with database.write() as session:
            lease = take_work.take(session, KINDS, None, worker, 60.0)
        if lease is None:
            return
        results.put((lease.ref, lease.token))


def test_processes_that_lease_at_once_never_get_the_same_task(database: Database, database_url: str) -> None:
    add(database, *(NewTask(KINDS[number % 3], f"i{number}") for number in range(60)))
    results: Any = FRESH.Queue()
    processes = [FRESH.Process(target=_take_all, args=(database_url, f"w{n}", results)) for n in range(4)]
    for process in processes:
        process.start()
    leased = [results.get(timeout=120) for _ in range(60)]
    for process in processes:
        process.join(120)
    assert Counter(ref for ref, _ in leased) == {f"i{number}": 1 for number in range(60)}
    assert len({token for _, token in leased}) == 60
    assert results.empty()


def test_an_expired_lease_is_leased_again_under_another_token(database: Database, clock: FakeClock) -> None:
    add(database, NewTask("measure", "a", "sm_80"))
    first = take_one(database, "measure", seconds=5.0)
    clock.advance(4.9)
    with database.write() as session:
        assert end_attempt.expire_leases(session) == []
    clock.advance(0.2)
    with database.write() as session:
        (expired,) = end_attempt.expire_leases(session)
    assert (expired.ref, expired.target, expired.state) == ("a", "sm_80", "waiting")
    clock.advance(losses.pause_after(1))
    second = take_one(database, "measure")
    assert (second.task_id, second.attempt, second.losses) == (first.task_id, 1, 1)
    assert second.token != first.token


def test_a_renewed_lease_does_not_expire(database: Database, clock: FakeClock) -> None:
    add(database, NewTask("measure", "a"))
    lease = take_one(database, "measure", seconds=5.0)
    for _ in range(5):
        clock.advance(4)
        with database.write() as session:
            assert tasks.renew(session, lease, 5.0, 0.0) is Renewal.HELD
            assert end_attempt.expire_leases(session) == []


@pytest.mark.parametrize("act", ["complete", "fail", "release"])
def test_a_lost_lease_writes_nothing(database: Database, clock: FakeClock, act: str) -> None:
    add(database, NewTask("measure", "a"))
    lost = take_one(database, "measure", seconds=5.0)
    clock.advance(6)
    with database.write() as session:
        end_attempt.expire_leases(session)
    clock.advance(losses.pause_after(1))
    holder = take_one(database, "measure")
    with pytest.raises(LostLease, match="nothing was written"), database.write() as session:
        register_toolchain(session, "written by the loser", {}, ["sm_80"])
        match act:
            case "complete":
                tasks.complete(session, lost)
            case "fail":
                end_attempt.fail(session, lost, "e", retry=True)
            case _:
                end_attempt.release(session, lost)
    with database.read() as session:
        assert live_toolchains(session, 60) == []
    with database.write() as session:
        tasks.complete(session, holder)  # the holder is not disturbed


def test_a_lease_is_completed_once(database: Database) -> None:
    add(database, NewTask("measure", "a"))
    lease = take_one(database, "measure")
    with database.write() as session:
        tasks.complete(session, lease)
    with pytest.raises(LostLease), database.write() as session:
        tasks.complete(session, lease)


def test_renew_says_why_a_lease_is_over(database: Database, clock: FakeClock) -> None:
    add(database, NewTask("measure", "a"))
    lease = take_one(database, "measure")
    with database.write() as session:
        assert tasks.renew(session, replace(lease, token="other"), 5, 0.0) is Renewal.LOST
        assert tasks.renew(session, replace(lease, task_id=99), 5, 0.0) is Renewal.LOST
        tasks.complete(session, lease)
        assert tasks.renew(session, lease, 5, 0.0) is Renewal.LOST
    job = add_job(database)
    planning = take_one(database, "plan")
    with database.write() as session:
        end_jobs.cancel_job(session, job.id)
        assert tasks.renew(session, planning, 5, 0.0) is Renewal.CANCELLED
    add_job(database, budget_seconds=10.0)
    planning = take_one(database, "plan", seconds=60)
    clock.advance(9)
    with database.write() as session:
        assert tasks.renew(session, planning, 60, 0.0) is Renewal.HELD
        clock.advance(1)
        assert tasks.renew(session, planning, 60, 0.0) is Renewal.DEADLINE
        assert tasks.renew(session, planning, 60, grace_seconds=0.5) is Renewal.HELD
        clock.advance(0.5)
        assert tasks.renew(session, planning, 60, grace_seconds=0.5) is Renewal.DEADLINE
        assert tasks.renew(session, planning, 60, grace_seconds=math.inf) is Renewal.HELD


def test_work_on_a_group_may_end_a_little_later_than_its_job_and_finishing_whenever() -> None:
    grace = {kind: grace_seconds(kind) for kind in (PLAN, COMPILE, VERIFY, MEASURE, COMPARE, FINISH)}
    assert grace[PLAN] == grace[COMPARE] == 0.0 < grace[COMPILE] == grace[VERIFY] == grace[MEASURE] < 10.0
    assert grace[FINISH] == math.inf


def test_the_first_lease_starts_the_job_and_its_budget(database: Database, clock: FakeClock) -> None:
    job = add_job(database, count=40, budget_seconds=30.0)
    clock.advance(100)  # waiting in the queue does not use the budget up
    take_one(database, "plan")
    started = clock.now()
    clock.advance(5)
    take_one(database, "plan")
    with database.read() as session:
        status = jobs.job_state(session, job.id)
    assert status is not None
    assert (status.state, status.started_at, status.deadline) == ("running", started, started + 30)


def test_tasks_past_their_jobs_deadline_are_passed_over_but_finishing_is_not(
    database: Database, clock: FakeClock
) -> None:
    job = add_job(database, budget_seconds=10.0)
    plan_next(database, "k")
    add(database, NewTask("finish", "77"), job=job.id)
    clock.advance(10)
    assert take(database, ["compile", "verify"]) is None
    finishing = take(database, ["compile", "finish"])
    assert finishing is not None and finishing.ref == "77"


def test_a_failed_attempt_is_retried_until_no_attempt_is_left(database: Database) -> None:
    add_job(database)
    states = []
    for _ in range(3):
        lease = take_one(database, "plan")
        with database.write() as session:
            states.append(end_attempt.fail(session, lease, "the disk is full", retry=True, max_attempts=3))
    assert states == ["waiting", "waiting", "failed"]
    assert take(database, ["plan"]) is None


def test_what_cannot_be_retried_fails_at_once(database: Database) -> None:
    job = add_job(database)
    lease = take_one(database, "plan")
    with database.write() as session:
        assert end_attempt.fail(session, lease, "no such operator", retry=False) == "failed"
        status = jobs.job_state(session, job.id)
    assert status is not None and status.state == "failed"
    assert status.error is not None and "no such operator" in status.error


def test_a_task_whose_workers_keep_dying_comes_back_after_growing_pauses_and_fails(
    database: Database, clock: FakeClock
) -> None:
    job = add_job(database)
    states, pauses = [], []
    while "failed" not in states:
        paused_at = clock.now()
        while (lease := take(database, ["plan"])) is None:
            clock.advance(0.25)
        pauses.append(clock.now() - paused_at)
        assert (lease.attempt, lease.losses) == (1, len(states))
        clock.advance(6)
        with database.write() as session:
            states.extend(expired.state for expired in end_attempt.expire_leases(session))
    with database.read() as session:
        status = jobs.job_state(session, job.id)
    assert states == ["waiting"] * (2 * losses.MOST - 1) + ["failed"]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert status is not None and status.state == "failed"
    assert status.error is not None and "worker w stopped answering" in status.error


@pytest.mark.parametrize(("kind", "most"), [("finish", losses.MOST), ("compare", losses.MOST), ("measure", 10)])
def test_a_machine_that_fails_an_attempt_uses_up_none(
    database: Database, clock: FakeClock, kind: str, most: int
) -> None:
    add(database, NewTask(kind, "1"))
    how = []
    for _ in range(most):
        lease = take_one(database, kind)
        assert lease.attempt == 1
        with database.write() as session:
            how.append(end_attempt.lose(session, lease, "the disk is full"))
        assert take(database, [kind]) is None
        clock.advance(30)
    assert how == ["paused"] * (most - 1) + ["failed"]
    assert take(database, [kind]) is None


def test_a_loss_counts_little_for_ten_minutes_after_other_work_was_lost(database: Database, clock: FakeClock) -> None:
    """Also where that has come to its end since."""
    for ref in ("1", "2", "3"):
        add(database, NewTask("finish", ref))
        lost = take_one(database, "finish")
        with database.write() as session:
            end_attempt.lose(session, lost, "the disk is full")
        clock.advance(1)
        again = take_one(database, "finish")
        with database.write() as session:
            tasks.complete(session, again)
    add(database, NewTask("finish", "last"))
    counted = []
    for minutes in (8, 3):
        clock.advance(60 * minutes)
        lease = take_one(database, "finish")
        with database.write() as session:
            end_attempt.lose(session, lease, "the disk is full")
            counted.append(session.get_one(TaskRow, lease.task_id).losses - lease.losses)
    assert counted == [losses.GENERAL_SHARE, 1.0]


def test_a_released_task_waits_again_and_its_attempt_does_not_count(database: Database) -> None:
    add(database, NewTask("measure", "a"))
    for _ in range(5):
        lease = take_one(database, "measure")
        assert lease.attempt == 1
        with database.write() as session:
            end_attempt.release(session, lease)
    with database.read() as session:
        row = session.get_one(TaskRow, lease.task_id)
        assert (row.state, row.token, row.worker) == ("waiting", None, None)


def test_a_plan_tasks_ref_names_its_problems() -> None:
    assert parse_plan_ref(plan_ref("j" * 32, 32, 63)) == ("j" * 32, 32, 63)
    assert len(plan_ref("j" * 32, 9_968, 9_999)) <= 64
