"""How an attempt at a task ends in the database, in the queue and for watchers."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from storage.blobs.blob_store import PREFIX, BlobStore
from storage.blobs.object_store import LocalObjects
from storage.database.tables import TaskRow
from storage.entities import jobs
from storage.queue import losses, new_tasks, tasks
from storage.reports.progress import waiting_for
from storage.transitions import accept, end_attempt, take_work
from tests.support.fixtures.queue import QueueWorld, events_of, running_job
from workers import wake_ups
from workers.processes.processes import InfrastructureError, Processes
from workers.steps.context import Cancel, Cancelled, GiveUp, StepContext, Workplace
from workers.supervisor.valkey import EmbeddedValkey
from workers.worker.run_task import run_step, run_wake_up


class Attempt:
    """A job with one plan task, leased once."""

    def __init__(self, world: QueueWorld) -> None:
        self.world = world
        problem = accept.NewProblem(
            name="p",
            operator="matmul",
            problem={},
            target="sm_80",
            device_class="predicted:sm_80",
            key="0" * 64,
            search={},
        )
        with world.database.write() as session:
            self.job = accept.create_jobs(session, [accept.NewJob([problem])])[0].id
            lease = take_work.take(session, ["plan"], None, "worker", 5.0)
        assert lease is not None
        self.context = StepContext(a_workplace(world), lease, Cancel())

    def run(self, step: Callable[[StepContext], None]) -> None:
        run_step(self.context, {"plan": step})

    @property
    def wake_ups(self) -> int:
        return wake_ups.queued_wake_ups(self.world.redis, "plan", None)

    def take_again(self) -> tasks.Lease | None:
        with self.world.database.write() as session:
            return take_work.take(session, ["plan"], None, "another", 5.0)

    def is_held(self) -> bool:
        with self.world.database.write() as session:
            return tasks.renew(session, self.context.lease, 5.0, 0.0) is tasks.Renewal.HELD


def a_workplace(world: QueueWorld) -> Workplace:
    blobs = BlobStore(world.database, world.settings.blobs_url)
    return Workplace(world.settings, world.database, blobs, world.redis, Processes(), "worker")


@pytest.fixture
def attempt(queue_world: QueueWorld) -> Attempt:
    return Attempt(queue_world)


def raising(error: BaseException) -> Callable[[StepContext], None]:
    def step(context: StepContext) -> None:
        raise error

    return step


def nothing(context: StepContext) -> None:
    return None


def told_to(reason: Any, then: BaseException | None = None) -> Callable[[StepContext], None]:
    """A step that is stopped while it runs, and notices, or sees its tools fail."""

    def step(context: StepContext) -> None:
        context.cancel.because(reason)
        if then is not None:
            raise then
        context.check()

    return step


def test_a_task_whose_step_returns_is_done(attempt: Attempt) -> None:
    attempt.run(nothing)
    assert not attempt.is_held()
    assert attempt.take_again() is None
    assert attempt.wake_ups == 0


def test_a_task_that_its_step_has_ended_stays_as_it_is(attempt: Attempt) -> None:
    def step(context: StepContext) -> None:
        with context.database.write() as session:
            tasks.complete(session, context.lease)

    attempt.run(step)
    assert attempt.take_again() is None


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyError("missing"), OSError("odd")])
def test_a_broken_attempt_is_followed_by_another_with_a_wake_up(attempt: Attempt, error: Exception) -> None:
    attempt.run(raising(error))
    assert attempt.wake_ups == 1
    again = attempt.take_again()
    assert again is not None
    assert again.attempt == 2


@pytest.mark.parametrize(
    "error", [InfrastructureError("killed"), MemoryError(), OSError(errno.ENOSPC, "full"), OSError(errno.EROFS, "ro")]
)
def test_an_attempt_that_the_machine_failed_does_not_count_and_is_followed_by_another_after_a_pause(
    attempt: Attempt, error: Exception
) -> None:
    began = time.monotonic()
    attempt.run(raising(error))
    assert attempt.wake_ups == 0, "the reconciler writes it when the pause is over"
    while (again := attempt.take_again()) is None:
        time.sleep(0.02)
    assert time.monotonic() - began >= losses.pause_after(1)
    assert (again.attempt, again.losses) == (1, 1)


def test_what_cannot_be_done_fails_at_once_and_watchers_learn_why(attempt: Attempt) -> None:
    attempt.run(raising(GiveUp("no such thing")))
    assert attempt.take_again() is None
    assert attempt.wake_ups == 0
    events = [(event.type, event.data) for event in events_of(attempt.world.redis, attempt.job)]
    ref = attempt.context.lease.ref
    assert events == [
        ("failed", {"kind": "plan", "ref": ref, "error": "no such thing"}),
        ("state", {"state": "failed"}),
    ]


def test_the_last_attempt_fails_the_task(attempt: Attempt) -> None:
    limited = attempt.world.settings.model_copy(update={"max_attempts": 1})
    attempt.context.workplace.settings = limited
    attempt.run(raising(RuntimeError("broken")))
    with attempt.world.database.read() as session:
        state = jobs.job_state(session, attempt.job)
    assert state is not None
    assert state.state == "failed"


@pytest.mark.parametrize("reason", ["stopping", "deadline"])
@pytest.mark.parametrize("then", [None, RuntimeError("the compiler was killed"), Cancelled("stopping")])
def test_a_stop_of_the_worker_or_of_a_budget_gives_the_task_back_uncounted(
    attempt: Attempt, reason: str, then: BaseException | None
) -> None:
    attempt.run(told_to(reason, then))
    assert attempt.wake_ups == 1
    again = attempt.take_again()
    assert again is not None
    assert again.attempt == 1


@pytest.mark.parametrize("reason", ["lost", "cancelled"])
@pytest.mark.parametrize("then", [None, RuntimeError("the compiler was killed")])
def test_any_other_reason_to_stop_leaves_the_task_to_the_database(
    attempt: Attempt, reason: str, then: BaseException | None
) -> None:
    attempt.run(told_to(reason, then))
    assert attempt.is_held()
    assert attempt.wake_ups == 0


def test_work_that_was_finished_before_the_word_to_stop_counts(attempt: Attempt) -> None:
    attempt.run(lambda context: context.cancel.because("stopping"))
    assert not attempt.is_held()
    assert attempt.take_again() is None


@pytest.mark.parametrize("step", [nothing, raising(RuntimeError("late")), raising(GiveUp("late")), told_to("stopping")])
def test_an_attempt_that_lost_its_task_changes_nothing(attempt: Attempt, step: Callable[[StepContext], None]) -> None:
    with attempt.world.database.write() as session:
        end_attempt.release(session, attempt.context.lease)
    other = attempt.take_again()
    assert other is not None
    attempt.run(step)
    with attempt.world.database.write() as session:
        assert tasks.renew(session, other, 5.0, 0.0) is tasks.Renewal.HELD
    assert events_of(attempt.world.redis, attempt.job) == []


def test_the_first_reason_to_stop_stays() -> None:
    cancel = Cancel()
    cancel.because("cancelled")
    cancel.because("stopping")
    assert cancel.reason == "cancelled"
    assert cancel.is_set()


def test_results_do_not_need_redis(attempt: Attempt, valkey: EmbeddedValkey) -> None:
    valkey.stop()

    def step(context: StepContext) -> None:
        context.publish("progress", {"done": 1})
        context.wake([("compile", "sm_80"), ("verify", "sm_80")])

    attempt.run(step)
    assert attempt.take_again() is None
    assert not attempt.is_held()


def test_a_wake_up_without_a_task_does_nothing(queue_world: QueueWorld) -> None:
    assert run_wake_up(a_workplace(queue_world), {}, "plan", None) is False


def test_a_worker_leaves_the_targets_of_others_alone(queue_world: QueueWorld) -> None:
    queue_world.add("a", kind="compile", target="sm_80", wake_up=False)
    workplace = a_workplace(queue_world)
    workplace.targets = ("sm_90a",)
    assert run_wake_up(workplace, {}, "compile", "sm_80") is False
    assert queue_world.waiting() == 1


# ---- a machine that can do nothing


def waits_for(world: QueueWorld, job: str) -> str | None:
    with world.database.read() as session:
        return waiting_for(session, job, 30.0)


def task_of(world: QueueWorld, job: str) -> tuple[str, int, int]:
    with world.database.read() as session:
        (task,) = session.scalars(select(TaskRow))
    return task.state, task.attempt, task.losses


@pytest.mark.parametrize("broken", ["temporary files", "blob store"])
def test_a_worker_whose_machine_can_do_nothing_takes_nothing_and_says_why_and_continues_by_itself(
    queue_world: QueueWorld,
    tmp_path: Path,
    broken: str,
) -> None:
    folder = tmp_path / "away"

    class Broken(LocalObjects):
        def put(self, path: str, data: bytes) -> None:
            if not folder.exists():
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            super().put(path, data)

    workplace = a_workplace(queue_world)
    if broken == "temporary files":
        workplace.processes = Processes(root=folder)
    else:
        workplace.blobs = BlobStore(queue_world.database, "", Broken(tmp_path / "blobs", PREFIX))
    with queue_world.database.write() as session:
        job = running_job(session)
        new_tasks.add_tasks(session, [new_tasks.NewTask("plan", f"{job}:0-0", jobs=(job,))])
    for _ in range(losses.MOST + 1):
        assert not run_wake_up(workplace, {"plan": nothing}, "plan", None)
    assert task_of(queue_world, job) == ("waiting", 0, 0)
    assert f"worker paused: {'the ' if broken == 'blob store' else ''}{broken}" in str(waits_for(queue_world, job))
    folder.mkdir()
    assert run_wake_up(workplace, {"plan": nothing}, "plan", None)
    assert task_of(queue_world, job)[0] == "done"
    assert waits_for(queue_world, job) is None
    workplace.processes.close()


def test_a_machine_that_failed_an_attempt_is_looked_at_before_the_next(attempt: Attempt, tmp_path: Path) -> None:
    workplace = attempt.context.workplace
    assert workplace.why_paused() is None
    workplace.processes = Processes(root=tmp_path / "away")
    assert workplace.why_paused() is None, "there is no reason to look"
    attempt.run(raising(OSError(errno.ENOSPC, "full")))
    assert "temporary files cannot be written (No such file or directory)" in str(workplace.why_paused())
