"""A worker runs nothing but wake-ups, and each task once at a time, whatever dies."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rq import Callback, Queue, Retry
from rq.rate_limit import RateLimit
from rq.repeat import Repeat
from rq.serializers import JSONSerializer
from rq.webhook import Webhook
from sqlalchemy import update

from storage.database.tables import JobRow
from storage.queue.new_tasks import NewTask, add_tasks
from storage.transitions import accept, end_jobs
from tests.support.fixtures.queue import Entry, QueueWorld, make_world, running_job, wait_for
from tests.support.processes.running import still_runs
from workers import wake_ups
from workers.supervisor.valkey import EmbeddedValkey
from workers.wake_ups import live_workers
from workers.worker.queue_worker import QueueWorker

# ---- forged wake-ups

EVIL = """
from pathlib import Path
from typing import Any
MARK = Path(__file__).with_name("it-ran")
MARK.write_text("imported")
def run(*args, **kwargs):
    MARK.write_text("called")
    raise SystemExit
"""
PLAIN: dict[str, Any] = {"args": ["plan", None], "timeout": -1}


class Target:
    """A worker that forgeries are aimed at, a module it could import, and an address that a webhook could fetch."""

    def __init__(self, world: QueueWorld, modules: Path, listener: socket.socket) -> None:
        self.world = world
        self.mark = modules / "it-ran"
        self.queue = Queue("cukiln:plan", connection=world.redis, serializer=JSONSerializer)
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        self.listener = listener

    def set_field(self, name: str, value: bytes | str) -> None:
        """A plain wake-up with one more field."""
        job = self.queue.create_job(wake_ups.WAKE_UP_FUNCTION, **PLAIN)
        job.origin = self.queue.name
        job.save()
        self.world.redis.hset(job.key, name, value)
        self.queue.push_job_id(job.id)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("forged")
    modules = folder / "modules"
    modules.mkdir()
    (modules / "evil_module.py").write_text(EVIL)
    server = EmbeddedValkey(folder / "valkey")
    server.start()
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.MonkeyPatch.context() as patch:
        listener.setblocking(False)
        patch.setenv("PYTHONPATH", str(modules))
        with make_world(folder, server.url) as world:
            world.execute("plan")
            yield Target(world, modules, listener)
    server.stop()


class Unpickled:
    """What runs a shell where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def with_pickled_call(target: Target) -> None:
    Queue("cukiln:plan", connection=target.world.redis).enqueue(
        wake_ups.WAKE_UP_FUNCTION, Unpickled(target.mark), result_ttl=0
    )


def after_a_plain_wake_up(target: Target) -> None:
    """A job that RQ enqueues when the wake-up it depends on has succeeded."""
    wake_up = target.queue.create_job(wake_ups.WAKE_UP_FUNCTION, **PLAIN)
    target.queue.enqueue("evil_module.run", depends_on=wake_up)
    target.queue.enqueue_job(wake_up)


def with_a_number_for_a_hash(target: Target) -> None:
    target.world.redis.set("rq:job:number", 1)
    target.queue.push_job_id("number")


def with_a_name_that_is_no_text(target: Target) -> None:
    target.world.redis.rpush(target.queue.key, b"\xff\xfe")


FORGERIES: dict[str, Callable[[Target], object]] = {
    "another function": lambda t: t.queue.enqueue("evil_module.run"),
    "a shell": lambda t: t.queue.enqueue("os.system", f"touch {t.mark}"),
    "another argument": lambda t: t.queue.enqueue(wake_ups.WAKE_UP_FUNCTION, "plan", None, "evil_module"),
    "another queue's arguments": lambda t: t.queue.enqueue(wake_ups.WAKE_UP_FUNCTION, "compile", "sm_80"),
    "on_success": lambda t: t.queue.enqueue_call(
        wake_ups.WAKE_UP_FUNCTION, **PLAIN, on_success=Callback("evil_module.run")
    ),
    "on_failure": lambda t: t.queue.enqueue_call("no.function", on_failure=Callback("evil_module.run")),
    "on_failure of a wake-up": lambda t: t.queue.enqueue_call(
        wake_ups.WAKE_UP_FUNCTION, **PLAIN, on_failure=Callback("evil_module.run")
    ),
    "on_stopped": lambda t: t.queue.enqueue_call(
        wake_ups.WAKE_UP_FUNCTION, **PLAIN, on_stopped=Callback("evil_module.run")
    ),
    "a webhook": lambda t: t.queue.enqueue_call(
        wake_ups.WAKE_UP_FUNCTION, **PLAIN, webhooks=[Webhook(t.address, job_status="finished")]
    ),
    "a webhook on failure": lambda t: t.queue.enqueue_call(
        "no.function", webhooks=[Webhook(t.address, job_status="failed")]
    ),
    "a retry": lambda t: t.queue.enqueue_call(wake_ups.WAKE_UP_FUNCTION, **PLAIN, retry=Retry(max=3)),
    "a repeat": lambda t: t.queue.enqueue_call(wake_ups.WAKE_UP_FUNCTION, **PLAIN, repeat=Repeat(times=3)),
    "a rate limit": lambda t: t.queue.enqueue_call(
        wake_ups.WAKE_UP_FUNCTION, **PLAIN, rate_limit=RateLimit("key", concurrency=1)
    ),
    "meta": lambda t: t.set_field("meta", pickle.dumps(Unpickled(t.mark))),
    "a result": lambda t: t.set_field("result", pickle.dumps(Unpickled(t.mark))),
    "a dependency": lambda t: t.set_field("dependency_ids", '["other"]'),
    "an unknown field": lambda t: t.set_field("on_anything", "evil_module.run"),
    "a pickled call": with_pickled_call,
    "a dependant": after_a_plain_wake_up,
    "a number for a hash": with_a_number_for_a_hash,
    "a name that is no text": with_a_name_that_is_no_text,
    "a name without a job": lambda t: t.queue.push_job_id("nothing"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_wake_up_runs_nothing_and_the_worker_continues(target: Target, forgery: str) -> None:
    FORGERIES[forgery](target)
    [ref] = target.world.add(f"after_{list(FORGERIES).index(forgery)}")
    wait_for(lambda: target.world.journal("end", ref), what="the honest wake-up")
    wait_for(lambda: not target.queue.count and not undecided(target), what="no wake-up to be left")
    assert not target.mark.exists()
    with pytest.raises(BlockingIOError):
        target.listener.accept()
    assert not target.world.redis.keys("rq:failed:*")
    target.world.redis.delete("rq:job:number")


def undecided(target: Target) -> list[Any]:
    """Jobs that are neither forgotten nor waiting for ever for another."""
    keys = [key for key in target.world.redis.keys("rq:job:*") if target.world.redis.type(key) == b"hash"]
    return [key for key in keys if target.world.redis.hget(key, "status") != b"deferred"]


def test_the_mark_and_the_listener_would_notice(target: Target) -> None:
    """The traps of the tests above work: RQ's own worker falls into them."""
    from rq import SimpleWorker

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(target.mark.parent))
        queue = Queue("trap", connection=target.world.redis, serializer=JSONSerializer)
        queue.enqueue_call("os.getpid", on_success=Callback("evil_module.run"))
        SimpleWorker([queue], connection=target.world.redis, serializer=JSONSerializer).work(burst=True)
    assert target.mark.read_text() == "called"
    target.mark.unlink()
    del sys.modules["evil_module"]


# ---- deaths


def runs_again(world: QueueWorld, ref: str) -> None:
    wait_for(lambda: world.journal("end", ref), what=f"{ref} to be run again\n{world.logs()}")
    assert [entry.attempt for entry in world.journal("start", ref)] == [1, 2]
    assert not world.journal("TWICE")


@pytest.mark.long  # as the next, where the child dies with its worker
def test_a_task_whose_worker_and_its_child_were_killed_is_run_again_by_another(queue_world: QueueWorld) -> None:
    worker = queue_world.start("plan")
    queue_world.start("reconcile")
    [ref] = queue_world.add("first")
    [start] = wait_until_started(queue_world, ref)
    queue_world.start("plan")
    wait_until_live(queue_world, 2)
    worker.kill()
    os.kill(start.pid, signal.SIGKILL)
    runs_again(queue_world, ref)


def test_a_worker_child_dies_with_its_worker_and_its_compiler_with_it(brief_leases: QueueWorld) -> None:
    worker = brief_leases.start("plan")
    [ref] = brief_leases.add("first")
    [start] = wait_until_started(brief_leases, ref)
    worker_child = psutil.Process(start.pid)
    above = psutil.Process(worker.pid)  # its fence server is the parent of the tools that the worker child runs
    wait_for(lambda: [child for child in above.children(recursive=True) if child.name() == "sleep"])
    tree = above.children(recursive=True)
    worker.kill()
    worker.wait()
    wait_for(lambda: not any(still_runs(process) for process in [worker_child, *tree]), what="the tree to die")
    brief_leases.start("plan")
    brief_leases.start("reconcile")
    runs_again(brief_leases, ref)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_task_whose_worker_child_was_killed_or_stopped_is_run_again(
    brief_leases: QueueWorld,
    number: signal.Signals,
) -> None:
    brief_leases.start("plan")
    brief_leases.start("reconcile")
    [ref] = brief_leases.add("first")
    [start] = wait_until_started(brief_leases, ref)
    os.kill(start.pid, number)
    runs_again(brief_leases, ref)


def test_a_child_hanging_in_native_code_is_ended_before_its_task_is_given_away(brief_leases: QueueWorld) -> None:
    brief_leases.start("plan")
    brief_leases.start("plan")
    brief_leases.start("reconcile")
    [ref] = brief_leases.add("deaf")
    wait_for(lambda: len(brief_leases.journal("start", ref)) > 1, what="the second attempt")
    assert not brief_leases.journal("TWICE")


def test_a_worker_child_that_cannot_renew_its_lease_ends_itself(brief_leases: QueueWorld) -> None:
    brief_leases.start("plan")
    [ref] = brief_leases.add("first")
    [start] = wait_until_started(brief_leases, ref)
    worker_child = psutil.Process(start.pid)
    with brief_leases.database.write() as session:
        add_tasks(session, [NewTask(kind="finish", ref="0")])  # until this is committed nothing else can write
        wait_for(lambda: not still_runs(worker_child), what="the worker child to end")
    assert not brief_leases.journal("end", ref)


def test_a_stopped_worker_hands_its_task_back_uncounted_with_a_wake_up(queue_world: QueueWorld) -> None:
    worker = queue_world.start("plan")
    [ref] = queue_world.add("forever")
    wait_until_started(queue_world, ref)
    worker.terminate()
    assert worker.wait(10) == 0
    assert queue_world.waiting() == wake_ups.queued_wake_ups(queue_world.redis, "plan", None) == 1
    queue_world.start("plan")
    wait_for(lambda: len(queue_world.journal("start", ref)) == 2)
    assert {entry.attempt for entry in queue_world.journal("start", ref)} == {1}
    assert live_workers(queue_world.redis) != []


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_an_idle_worker_stops_at_once_and_leaves_no_registration(
    queue_world: QueueWorld,
    number: signal.Signals,
) -> None:
    worker = queue_world.start("plan")
    wait_until_live(queue_world, 1)
    worker.send_signal(number)
    assert worker.wait(10) == 0
    assert live_workers(queue_world.redis) == []
    assert not queue_world.redis.smembers("rq:workers")


def test_the_step_of_a_cancelled_job_is_stopped_and_its_worker_child_takes_the_next(queue_world: QueueWorld) -> None:
    worker = psutil.Process(queue_world.start("plan").pid)
    with queue_world.database.write() as session:
        job = running_job(session, priority=10)
        add_tasks(session, [NewTask(kind="plan", ref="forever:0-0", jobs=(job,))])
    wake_ups.add_wake_ups(queue_world.redis, "plan", None)
    [start] = wait_until_started(queue_world, "forever:0-0")
    wait_for(lambda: [child for child in worker.children(recursive=True) if child.name() == "sleep"])
    tree = [child for child in worker.children(recursive=True) if child.name() == "sleep"]
    with queue_world.database.write() as session:
        end_jobs.cancel_job(session, job)
    wait_for(lambda: not any(still_runs(process) for process in tree), what="the compiler to end")
    [ref] = queue_world.add("quick")
    wait_for(lambda: queue_world.journal("end", ref))
    assert not queue_world.journal("end", "forever:0-0")
    assert queue_world.journal("end", ref)[0].pid == start.pid


def test_work_is_stopped_at_its_jobs_deadline_but_not_what_finishes_them(brief_leases: QueueWorld) -> None:
    with brief_leases.database.write() as session:
        jobs = [running_job(session) for _ in range(2)]
        plan = NewTask(kind="plan", ref="watchful_plan:0-0", jobs=(jobs[0],))
        finish = NewTask(kind="finish", ref="watchful_finish:0-0", target="sm_80", jobs=(jobs[1],))
        add_tasks(session, [plan, finish])
    wake_ups.add_wake_ups(brief_leases.redis, "plan", None)
    wake_ups.add_wake_ups(brief_leases.redis, "compile", "sm_80")
    for kind in ("plan", "compile"):
        brief_leases.start(kind)
    for task in (plan, finish):
        wait_until_started(brief_leases, task.ref)
    with brief_leases.database.write() as session:
        session.execute(update(JobRow).values(deadline=time.time() - 1.0))
    [end] = wait_until_ended(brief_leases, finish.ref)
    assert end.at - brief_leases.journal("start", finish.ref)[0].at >= 2.0
    assert not brief_leases.journal("end", plan.ref)


@pytest.mark.parametrize("end", ["killed", "grown"])
def test_a_worker_child_that_has_ended_or_grown_is_followed_by_another(queue_world: QueueWorld, end: str) -> None:
    """Without the reconciler: the wake-up that comes next is not lost."""
    queue_world.start("plan")
    [first] = queue_world.add("quick" if end == "killed" else "grow")
    [done] = wait_until_ended(queue_world, first)
    if end == "killed":
        os.kill(done.pid, signal.SIGKILL)
    wait_for(lambda: not alive_pid(done.pid), what="the worker child to end")
    [second] = queue_world.add("quick_2")
    [again] = wait_until_ended(queue_world, second)
    assert again.pid != done.pid
    assert [entry.attempt for entry in queue_world.journal("start")] == [1, 1]


@pytest.mark.parametrize("moment", ["before the wake-up is given", "while a worker child is forked for it"])
def test_a_wake_up_that_is_taken_as_the_worker_is_stopped_is_not_begun(
    queue_world: QueueWorld,
    tmp_path: Path,
    moment: str,
) -> None:
    def stopped() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def before_wake_up() -> bool:
        if moment == "before the wake-up is given":
            stopped()
            return True
        is_to_stop.set()
        return False  # so that another worker child is forked

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    is_to_stop = threading.Event()
    worker = QueueWorker(
        ["cukiln:plan"],
        queue_world.redis,
        lambda kind, target: (tmp_path / "begun").touch(),
        before_fork=lambda: stopped() if is_to_stop.is_set() else None,
        before_wake_up=before_wake_up,
    )
    wake_ups.add_wake_ups(queue_world.redis, "plan", None)
    try:
        assert worker.work()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert not (tmp_path / "begun").exists()
    assert live_workers(queue_world.redis) == []


# ---- a Redis that comes and goes


def test_a_worker_outlives_its_redis_and_its_result_is_kept(queue_world: QueueWorld, valkey: EmbeddedValkey) -> None:
    worker = queue_world.start("plan")
    queue_world.start("reconcile")
    [ref] = queue_world.add("brief")
    wait_until_started(queue_world, ref)
    valkey.stop()
    wait_for(lambda: queue_world.journal("end", ref))
    wait_for(lambda: queue_world.waiting() == 0)
    time.sleep(1.5)  # some rounds of an idle worker without its Redis
    queue_world.add("quick", wake_up=False)
    valkey.start()
    wait_for(lambda: queue_world.journal("end", "quick:0-0"), what="the next task")
    assert worker.poll() is None
    assert len(queue_world.journal("start", ref)) == 1


def test_a_flushed_redis_costs_a_moment(queue_world: QueueWorld) -> None:
    queue_world.start("plan")
    wait_until_live(queue_world, 1)
    refs = queue_world.add("brief", "quick_1", "quick_2")
    wait_until_started(queue_world, refs[0])
    queue_world.redis.flushall()
    queue_world.start("reconcile")
    wait_for(lambda: len(queue_world.journal("end")) == 3, what="all tasks")
    wait_until_live(queue_world, 1)  # it registers itself again
    assert len(queue_world.journal("start")) == 3


def test_a_doubled_wake_up_runs_a_task_once(queue_world: QueueWorld) -> None:
    queue_world.start("plan")
    queue_world.start("plan")
    wait_until_live(queue_world, 2)
    for _ in range(5):
        wake_ups.add_wake_ups(queue_world.redis, "plan", None)
    [ref] = queue_world.add("quick")
    wait_for(lambda: wake_ups.queued_wake_ups(queue_world.redis, "plan", None) == 0)
    wait_for(lambda: queue_world.journal("end", ref))
    [again] = queue_world.add("quick_2")
    wait_for(lambda: queue_world.journal("end", again))
    assert len(queue_world.journal("start")) == 2


def wait_until_live(world: QueueWorld, count: int) -> None:
    wait_for(lambda: len(live_workers(world.redis)) >= count, what=f"{count} workers\n{world.logs()}")


def wait_until_ended(world: QueueWorld, ref: str) -> list[Entry]:
    wait_for(lambda: world.journal("end", ref), what=f"{ref} to end\n{world.logs()}")
    return world.journal("end", ref)


def wait_until_started(world: QueueWorld, ref: str) -> list[Entry]:
    wait_for(lambda: world.journal("start", ref), what=f"{ref} to start\n{world.logs()}")
    return world.journal("start", ref)


def alive_pid(pid: int) -> bool:
    try:
        return still_runs(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def a_problem() -> accept.NewProblem:
    return accept.NewProblem(
        name="p", operator="matmul", problem={}, target="sm_80", device_class="predicted:sm_80", key="0" * 64, search={}
    )
