"""A job's work on a time axis."""

from __future__ import annotations

from typing import Any

from cukiln.types import Timeline
from storage.database.session import Database
from storage.reports.times import timeline
from storage.transitions import end_attempt
from tests.support.fixtures.storage import add_job, compile_leased, compile_next, plan_next, take_one, verify_next
from tests.support.run.fake_clock import FakeClock


def read(database: Database, job: str, **options: Any) -> Timeline:
    with database.read() as session:
        drawn = timeline(session, job, **options)
    assert drawn is not None
    return drawn


def times(drawn: Timeline) -> dict[str, list[tuple[str, float, float | None, float | None]]]:
    """By lane: kind, and when the step was queued, begun, ended, since the job came."""

    def since(at: float | None) -> float | None:
        return None if at is None else at - drawn.created_at

    return {
        lane.name.partition(" ")[0]: [
            (step.kind, step.queued_at - drawn.created_at, since(step.started_at), since(step.finished_at))
            for step in lane.steps
        ]
        for lane in drawn.lanes
    }


def test_each_step_of_a_job_has_its_wait_and_its_time(database: Database, clock: FakeClock) -> None:
    job = add_job(database).id
    clock.advance(1)
    leased = take_one(database, "plan")
    with database.write() as session:
        end_attempt.release(session, leased)
    plan_next(database, "a", "b")
    clock.advance(2)
    lease = take_one(database, "compile")
    clock.advance(4)
    compile_leased(database, lease)
    verify_next(database)
    clock.advance(8)
    drawn = read(database, job)
    assert times(drawn) == {
        "plan": [("plan", 0.0, 1.0, 1.0), ("plan", 1.0, 1.0, 1.0)],  # released, then done
        "group": [("compile", 1.0, 3.0, 7.0), ("verify", 7.0, 7.0, 7.0)],
        "problem": [("finish", 7.0, None, None)],
    }
    group = drawn.lanes[1]
    assert (group.kernels, group.name) == (2, f"group {str(group.group)[:8]}")
    assert drawn.at - drawn.created_at == 15.0


def test_each_attempt_is_a_step_with_the_wait_before_it(database: Database, clock: FakeClock) -> None:
    job = add_job(database).id
    lease = take_one(database, "plan")
    clock.advance(3)
    with database.write() as session:
        assert end_attempt.fail(session, lease, "no memory", retry=True) == "waiting"
    clock.advance(2)
    drawn = read(database, job)
    assert times(drawn) == {"plan": [("plan", 0.0, 0.0, 3.0), ("plan", 3.0, None, None)]}
    assert [(step.state, step.attempt) for step in drawn.lanes[0].steps] == [("failed", 1), ("waiting", 1)]


def test_work_for_several_jobs_is_on_the_axis_of_each_and_no_other(database: Database, clock: FakeClock) -> None:
    first = add_job(database).id
    plan_next(database, "a", "b")
    clock.advance(1)
    second = add_job(database).id
    plan_next(database, "a")  # it finds that a is still to be made
    clock.advance(2)
    leases = [take_one(database, "compile", kernels=1) for _ in range(2)]
    clock.advance(4)
    for lease in leases:
        compile_leased(database, lease)
    (shared,) = (lease.ref for lease in leases if second in lease.jobs)
    drawn = read(database, second)
    assert times(drawn) == {
        "plan": [("plan", 0.0, 0.0, 0.0)],
        # It is as old as the first of its pending builds.
        "group": [("compile", -1.0, 2.0, 6.0), ("verify", 6.0, None, None)],
    }
    (lane,) = (lane for lane in drawn.lanes if lane.group)
    assert (lane.group, lane.name) == (shared, f"group {shared[:8]}")
    assert [lane.group for lane in read(database, first).lanes if lane.group] == [lease.ref for lease in leases]


def test_a_file_that_was_begun_before_the_job_came_is_on_its_axis_where_it_waits_for_it(
    database: Database, clock: FakeClock
) -> None:
    add_job(database)
    plan_next(database, "a", "b")
    lease = take_one(database, "compile")
    clock.advance(3)
    second = add_job(database).id
    plan_next(database, "a")
    third = add_job(database).id
    plan_next(database, "c")
    clock.advance(4)
    compile_leased(database, lease)
    assert times(read(database, second)) == {
        "plan": [("plan", 0.0, 0.0, 0.0)],
        "group": [("compile", -3.0, -3.0, 4.0), ("verify", 4.0, None, None)],
    }
    assert set(times(read(database, third))) == {"plan"}


def test_attempts_at_a_build_are_groups_of_their_own(database: Database, clock: FakeClock) -> None:
    job = add_job(database).id
    plan_next(database, "a")
    for _ in range(2):
        lease = take_one(database, "compile")
        clock.advance(3)
        with database.write() as session:
            end_attempt.fail(session, lease, "the disk is full", retry=True)
    lanes = [lane for lane in read(database, job).lanes if lane.group]
    assert [[(step.state, step.attempt) for step in lane.steps] for lane in lanes] == [[("failed", 1)]] * 2
    assert len({lane.group for lane in lanes}) == 2


def test_what_another_job_did_before_the_job_came_is_not_on_the_axis(database: Database, clock: FakeClock) -> None:
    add_job(database)
    plan_next(database, "a")
    clock.advance(1)
    compile_next(database)
    verify_next(database)
    clock.advance(1)
    second = add_job(database).id
    plan_next(database, "a")
    assert set(times(read(database, second))) == {"plan", "problem"}


def test_lanes_beyond_the_limit_are_counted(database: Database) -> None:
    job = add_job(database, count=5).id
    plan_next(database, "a", "b", "c")
    for _ in range(3):
        take_one(database, "compile", kernels=1)
    drawn = read(database, job, max_lanes=2)
    assert (len(drawn.lanes), drawn.lanes_left_out) == (2, 2)
    with database.read() as session:
        assert timeline(session, "0" * 32) is None
