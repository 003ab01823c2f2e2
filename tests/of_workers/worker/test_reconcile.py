"""What the database says is waiting gets wake-ups again, whatever happened to Redis, to workers and to budgets."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from cukiln.types import StageSeconds
from storage.blobs.blob_store import BlobStore
from storage.database.session import Database
from storage.entities import jobs
from storage.entities.candidates import candidates_of_problem
from storage.entities.heartbeats import register_toolchain
from storage.entities.jobs import problems_to_plan
from storage.queue import losses, new_tasks, tasks
from storage.transitions import accept, take_work
from storage.transitions.apply_verdicts import Versions
from storage.transitions.pending_builds import NewCandidate, PlannedProblem, end_plan, record_candidates
from tests.support.fixtures.queue import QueueWorld, events_of, wait_for
from tests.support.fixtures.storage import new_build, problem_ids
from tests.support.run.fake_clock import FakeClock
from workers import wake_ups
from workers.supervisor.valkey import EmbeddedValkey
from workers.worker.reconcile import Reconciler


class World:
    """A queue world whose time stands still until it is advanced."""

    def __init__(self, world: QueueWorld) -> None:
        self.clock = FakeClock()
        self.queue = world
        world.database.dispose()
        world.database = self.database = Database(world.settings.database_url, self.clock)
        self.reconciler = self.another_reconciler()

    def another_reconciler(self) -> Reconciler:
        blobs = BlobStore(self.database, self.queue.settings.blobs_url)
        return Reconciler(self.queue.settings, self.database, blobs, self.queue.redis)

    def queued(self, kind: str = "plan", target: str | None = None) -> int:
        return wake_ups.queued_wake_ups(self.queue.redis, kind, target)

    def take(self) -> tasks.Lease:
        with self.database.write() as session:
            lease = take_work.take(session, ["plan"], None, "worker", 5.0)
        assert lease is not None
        self.reconciler.run_once()  # as it does every second
        return lease


@pytest.fixture
def world(queue_world: QueueWorld) -> Iterator[World]:
    yield World(queue_world)


def test_missing_wake_ups_are_written_for_each_queue_once(world: World) -> None:
    world.queue.add("a", "b", wake_up=False)
    world.queue.add("c", kind="compile", target="sm_80", wake_up=False)
    world.queue.add("d", kind="verify", target="sm_80", wake_up=True)
    assert world.reconciler.run_once().wake_ups == 3
    assert (world.queued(), world.queued("compile", "sm_80")) == (2, 2)
    assert world.reconciler.run_once().wake_ups == 0


def test_a_flushed_redis_has_its_wake_ups_back_after_a_round(world: World) -> None:
    world.queue.add("a", "b", "c")
    world.queue.redis.flushall()
    world.reconciler.run_once()
    assert world.queued() == 3


def test_copies_of_the_reconciler_do_not_disturb_each_other(world: World) -> None:
    world.queue.add("a", wake_up=False)
    other = world.another_reconciler()
    assert world.reconciler.run_once().wake_ups + other.run_once().wake_ups == 1


def test_a_task_whose_lease_is_over_waits_again_with_a_wake_up(world: World) -> None:
    world.queue.add("a", wake_up=False)
    world.take()
    world.clock.advance(4.9)
    assert world.reconciler.run_once().expired == ()
    world.clock.advance(0.2)
    done = world.reconciler.run_once()
    assert [(task.kind, task.state) for task in done.expired] == [("plan", "waiting")]
    assert world.queued() == 0, "not before its pause"
    world.clock.advance(losses.pause_after(1))
    world.reconciler.run_once()
    assert world.queued() == 1
    assert world.take().losses == 1


def test_a_clock_that_is_set_neither_keeps_the_work_of_the_dead_nor_takes_that_of_the_living(world: World) -> None:
    world.queue.add("a", wake_up=False)
    lease = world.take()
    for hour in (3600.0, -7200.0):
        world.clock.set_by(hour)
        assert world.reconciler.run_once().expired == (), "no time has passed"
        world.clock.advance(4.0)
        with world.database.write() as session:
            assert tasks.renew(session, lease, 5.0, 0.0) is tasks.Renewal.HELD
        assert world.reconciler.run_once().expired == ()
    world.clock.set_by(-3600.0)
    world.clock.advance(5.1)
    assert [task.kind for task in world.reconciler.run_once().expired] == ["plan"]
    world.clock.set_by(-3600.0)  # beyond the end of its pause
    assert world.take().losses == 1


def test_a_reconciler_that_has_just_started_gives_a_lease_its_time(world: World) -> None:
    world.queue.add("a", wake_up=False)
    world.take()
    world.clock.advance(6.0)
    started = world.another_reconciler()
    assert started.run_once().expired == ()
    world.clock.advance(5.1)
    assert len(started.run_once().expired) == 1


def test_a_job_whose_task_was_lost_too_often_ends_and_its_watchers_are_notified(world: World) -> None:
    job = a_job(world)
    for _ in range(2 * losses.MOST):
        world.take()
        world.clock.advance(6.0)
        done = world.reconciler.run_once()
        world.clock.advance(30.0)
    assert [task.state for task in done.expired] == ["failed"]
    with world.database.read() as session:
        assert jobs.job_state(session, job).state == "failed"  # type: ignore[union-attr]
    last = events_of(world.queue.redis, job)[-1]
    assert (last.type, last.data) == ("state", {"state": "failed"})


def test_a_spent_budget_ends_the_search(world: World) -> None:
    job = a_job(world, budget_seconds=10.0)
    lease = world.take()
    world.clock.advance(11.0)
    assert world.reconciler.run_once().over_budget == (job,)
    with world.database.write() as session:
        assert tasks.renew(session, lease, 5.0, 0.0) in (tasks.Renewal.CANCELLED, tasks.Renewal.DEADLINE)


def test_builds_for_a_compiler_that_was_replaced_are_given_up_with_the_reason(world: World) -> None:
    job = a_job_for_two_compilers(world)
    beat(world, "old", "new")
    watch(world, world.queue.settings.toolchain_live_seconds + 2)
    assert verdicts(world, job) == {"c-old": None, "c-new": None}, "no worker at all: one may come"
    beat(world, "new")
    world.reconciler.run_once()
    assert verdicts(world, job) == {"c-old": "skipped", "c-new": None}
    with world.database.read() as session:
        (problem_id,) = problem_ids(session, job)
        (old,) = candidates_of_problem(session, problem_id, only=["c-old"])
    assert old.message == f"it was planned for the compiler {'o' * 12}, which no worker has now: submit it again"


@pytest.mark.parametrize("why", ["the database was away", "the clock was set forward", "the reconciler is new"])
def test_a_compiler_that_could_give_no_sign_of_life_is_not_gone(world: World, why: str) -> None:
    job = a_job_for_two_compilers(world)
    beat(world, "old", "new")
    watch(world, 10.0)
    if why == "the database was away":
        world.clock.advance(600.0)  # without a round
    elif why == "the clock was set forward":
        world.clock.set_by(3600.0)
    else:
        world.clock.advance(600.0)
        world.reconciler = world.another_reconciler()
    beat(world, "new")
    watch(world, 10.0)
    beat(world, "old", "new")
    watch(world, 10.0)
    assert verdicts(world, job) == {"c-old": None, "c-new": None}


def a_job_for_two_compilers(world: World) -> str:
    job = a_job(world)
    lease = world.take()
    candidates = {"c-old": "old", "c-new": "new"}
    builds = {name: new_build(name, toolchain=name[0] * 64) for name in candidates.values()}
    with world.database.write() as session:
        (problem,) = problems_to_plan(session, lease)
        named = [(problem.id, NewCandidate(name, {}, "k" * 64, build)) for name, build in candidates.items()]
        record_candidates(session, lease, named, builds, Versions({"matmul": "1"}, {"matmul": "1"}, {}))
        end_plan(session, lease, PlannedProblem(problem.id, 2, 2, {}, StageSeconds()))
        tasks.complete(session, lease)
    return job


def beat(world: World, *compilers: str) -> None:
    """Heartbeats."""
    with world.database.write() as session:
        for name in compilers:
            register_toolchain(session, name[0] * 64, {}, ["sm_80"])


def watch(world: World, seconds: float) -> None:
    """A round each second."""
    for _ in range(round(seconds)):
        world.clock.advance(1.0)
        world.reconciler.run_once()


def verdicts(world: World, job: str) -> dict[str, str | None]:
    with world.database.read() as session:
        (problem_id,) = problem_ids(session, job)
        return {candidate.candidate: candidate.verdict for candidate in candidates_of_problem(session, problem_id)}


def test_tasks_of_a_later_release_are_left_alone(world: World) -> None:
    world.queue.add("a", wake_up=False)
    with world.database.write() as session:
        new_tasks.add_tasks(session, [new_tasks.NewTask(kind="distil", ref="b")])
    assert world.reconciler.run_once().wake_ups == 1


def test_a_round_without_redis_still_expires_leases(world: World, valkey: EmbeddedValkey) -> None:
    world.queue.add("a", wake_up=False)
    world.take()
    world.clock.advance(6.0)
    valkey.stop()
    done = world.reconciler.run_once()
    assert (len(done.expired), done.wake_ups) == (1, 0)
    world.clock.advance(losses.pause_after(1))
    valkey.start()
    assert world.reconciler.run_once().wake_ups == 1


def test_the_loop_outlives_a_database_that_is_away_and_ends_when_told(world: World) -> None:
    world.queue.add("a", wake_up=False)
    path = world.queue.settings.data_dir / "cukiln.db"
    world.database.dispose()
    path.rename(path.with_suffix(".away"))
    path.write_bytes(b"no database" * 1000)  # never away itself: a connection would make an empty one
    stop = threading.Event()
    loop = threading.Thread(target=world.reconciler.run, args=(stop,))
    loop.start()
    try:
        wait_for(lambda: wake_ups.has_live_reconciler(world.queue.redis), what="a sign of life without a database")
        path.with_suffix(".away").rename(path)
        wait_for(lambda: world.queued() == 1, what="the wake-up")
    finally:
        stop.set()
        loop.join()


def a_job(world: World, budget_seconds: float | None = None) -> str:
    problem = accept.NewProblem(
        name="p", operator="matmul", problem={}, target="sm_80", device_class="predicted:sm_80", key="0" * 64, search={}
    )
    with world.database.write() as session:
        return accept.create_jobs(session, [accept.NewJob([problem], budget_seconds=budget_seconds)])[0].id
