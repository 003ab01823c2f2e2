"""An RQ worker that takes wake-ups and nothing else, and that outlives its Redis.

What RQ 3.0 does with a job was written for trusted queues: it imports any function, callback or serialiser that the
job's hash names, fetches webhooks, unpickles `meta`. Here the hash is read by `read_wake_up` alone, which refuses every
field beyond a plain wake-up. It is forgotten as soon as it is taken: what it was for is in the database. A worker that
has had no wake-up for some seconds looks without one: Redis may be silent, or full.

```
worker  ── wake-ups ──► worker child, a fork that is kept
   │ heartbeat every second, gone after 4 s       └── run_wake_up: leases, renews, completes in the database
```
"""

import gc
import json
import logging
import os
import resource
import secrets
import select
import signal
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

from redis import Redis
from redis.exceptions import RedisError
from rq import Queue, Worker, worker_registration
from rq.exceptions import DequeueTimeout, StopRequested
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.utils import now

from workers import wake_ups
from workers.processes.die_with_parent import die_with_parent
from workers.processes.supervised_process import StoppedWatch

log = logging.getLogger("cukiln.worker")

HEARTBEAT_SECONDS = 1.0
HEARTBEAT_TTL_SECONDS = 4  # RQ adds a literal 60 to its own; a worker that is gone should be known to be gone
CHILD_GRACE_SECONDS = 5.0  # for a worker child to hand its task back when the worker is stopped
AWAY_SECONDS = 0.2  # between two looks for a Redis that is away
LOOK_SECONDS = 3.0  # without a wake-up, until the database is asked
WAKE_UP_WAIT_SECONDS = 1.0  # of one call to Redis, so that heartbeats continue
CALL_SECONDS = WAKE_UP_WAIT_SECONDS + 1.0
"""What the connection has to allow a call."""

_WAKE_UP_BYTES = 4096  # of the decompressed call; a real one has about 60
_PLAIN_FIELDS = frozenset(
    b"status created_at data origin description enqueued_at timeout ttl result_ttl failure_ttl".split()
)


Perform = Callable[[str, str | None], bool]
"""(kind, target) of a wake-up; returns whether there was work."""

MAX_GROWTH_BYTES = 256 << 20
_MESSAGE_BYTES = 4096
_THERE_WAS = b"1"
_STOPPING = {signal.SIGTERM, signal.SIGINT}


class WorkerChild:
    """A fork that performs wake-ups, one after the other, until it fails or has grown: a new one costs 20 ms. SIGKILLed
    by the kernel when the worker ends, however that ends. For the worker's main thread."""

    def __init__(self, perform: Perform) -> None:
        worker = os.getpid()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # the worker's handlers are not for the child
            self.pid = os.fork()
            if self.pid == 0:
                self._channel.close()
                _perform_wake_ups(theirs, worker, perform)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def give(self, kind: str, target: str | None) -> bool:
        """False where it has ended."""
        try:
            self._channel.send(json.dumps((kind, target)).encode())
        except ConnectionError:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Whether it has performed what it was given, or ended, within that time."""
        waiting = select.poll()
        waiting.register(self._channel, select.POLLIN)
        return bool(waiting.poll(1000 * seconds))

    def answer(self) -> bool | None:
        """After `wait`: whether there was work; None where it cannot be given another wake-up."""
        try:
            answer = self._channel.recv(1)
        except ConnectionError:
            return None
        return answer == _THERE_WAS if answer else None

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Itself alone: what it started dies with it."""
        os.kill(self.pid, number)  # of a child that is not reaped yet, so never another's

    def end(self) -> int:
        """Once it is idle or has ended: its exit code, negative for a signal."""
        self._channel.close()
        self.kill()  # changes nothing where it is ending by itself
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _perform_wake_ups(channel: socket.socket, worker: int, perform: Perform) -> NoReturn:
    try:
        os.setpgrp()  # Ctrl-C is for the worker, which passes it on
        die_with_parent(worker)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        most = _resident_bytes() + MAX_GROWTH_BYTES
        while message := channel.recv(_MESSAGE_BYTES):
            there_was = perform(*json.loads(message))
            if _resident_bytes() > most:
                break
            channel.send(_THERE_WAS if there_was else b"0")
    except BaseException:  # nothing may unwind into the worker's loop, of which this process holds a copy
        log.exception("the worker child %d failed", os.getpid())
        os._exit(1)
    os._exit(0)


def _resident_bytes() -> int:
    """At most, so far; of a fork, from what it had of its parent."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class WakeUpJob(Job):
    """A job whose hash is only ever read as a wake-up. `refusal` says why it is none."""

    refusal: str | None = "never read"

    def restore(self, raw_data: Mapping[bytes, bytes]) -> None:
        """Instead of RQ's parsing, which trusts the hash."""
        call = read_wake_up(raw_data)
        self.origin = raw_data.get(b"origin", b"").decode("utf-8", "replace")
        self.refusal = call if isinstance(call, str) else None
        if not isinstance(call, str):
            self._func_name, self._instance, self._args, self._kwargs = wake_ups.WAKE_UP_FUNCTION, None, call, {}

    @property
    def func(self) -> NoReturn:
        raise PermissionError("a wake-up names no function to import")

    def perform(self) -> NoReturn:
        raise PermissionError("a wake-up is run by its worker, never by RQ")


def read_wake_up(fields: Mapping[bytes, bytes]) -> tuple[str, str | None] | str:
    """The (kind, target) of a plain wake-up, or the reason why a job's hash is none."""
    for name, value in fields.items():
        if value and name not in _PLAIN_FIELDS:
            return f"the field {name.decode('utf-8', 'replace')!r} is not allowed in a wake-up"
    packed = zlib.decompressobj()
    try:
        call = json.loads(packed.decompress(fields.get(b"data", b""), _WAKE_UP_BYTES))
    except (zlib.error, ValueError, RecursionError):
        return "its call is not compressed JSON"
    if not wake_ups.is_wake_up(call, fields.get(b"origin", b"").decode("utf-8", "replace")):
        return f"its call is not {wake_ups.WAKE_UP_FUNCTION}(kind, target) in the queue of that kind and target"
    kind, target = call[2]
    return kind, target


class QueueWorker(Worker):
    """Takes wake-ups from `queues`; a worker child calls `perform(kind, target)` for each.

    `before_fork` closes what must not be shared with a child. `before_wake_up` returns whether a worker child that has
    run before may be used again. `beat` is called about every second; `may_continue` before each look for a wake-up:
    False ends the worker. None of them may raise. `look`: what the worker child is given where no wake-up comes.
    """

    job_class = WakeUpJob

    def __init__(
        self,
        queues: Sequence[str],
        connection: Redis,
        perform: Perform,
        *,
        before_fork: Callable[[], None] = lambda: None,
        before_wake_up: Callable[[], bool] = lambda: True,
        beat: Callable[[], None] = lambda: None,
        may_continue: Callable[[], bool] = lambda: True,
        look: tuple[str, str | None] | None = None,
    ) -> None:
        name = f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        super().__init__(
            list(queues),
            name=name,
            connection=connection,
            worker_ttl=16,  # RQ blocks for worker_ttl - 15 seconds: one, so that heartbeats continue
            job_class=WakeUpJob,
            serializer=JSONSerializer,
            prepare_for_work=False,  # it would talk to a Redis that may be away
        )
        self.hostname, self.pid, self.ip_address = socket.gethostname(), os.getpid(), "unknown"
        self.birth_date = self.last_heartbeat = now()
        self._perform = perform
        self._before_fork = before_fork
        self._before_wake_up = before_wake_up
        self._beat = beat
        self._may_continue = may_continue
        self._look = look
        self._look_at = time.monotonic() + LOOK_SECONDS
        self._waiting = self._busy = False
        self._child: WorkerChild | None = None
        self._kill_child_at: float | None = None

    def work(self, *args: Any, **kwargs: Any) -> bool:  # the arguments of RQ's are of no use here
        """Until a signal asks to stop. Redis may come and go meanwhile. Returns whether a wake-up was taken."""
        taken = False
        self._install_signal_handlers()  # type: ignore[no-untyped-call]
        gc.collect()
        gc.freeze()  # what is loaded now is never copied into a worker child because the collector touched it
        try:
            while not self._stop_requested and self._may_continue():
                wake_up = self._take()
                if wake_up is not None:
                    taken = True
                    self.execute_job(*wake_up)
                    # BLPOP prefers the first queue that has something: turned, no target starves another.
                    self._ordered_queues = [*self._ordered_queues[1:], *self._ordered_queues[:1]]
                elif self._look is not None and time.monotonic() >= self._look_at:
                    self._perform_one(*self._look)
        except StopRequested:
            log.debug("stopped while waiting for a wake-up")
        self._end_child()
        self._leave()
        return taken

    def _take(self) -> tuple[Job, Queue] | None:
        self._find_child()
        try:
            self._waiting = True
            if self._stop_requested:  # the signal came before the line above
                raise StopRequested
            self._live()
            return self.queue_class.dequeue_any(
                self._ordered_queues,
                self.dequeue_timeout,
                connection=self.connection,
                job_class=self.job_class,
                serializer=self.serializer,
            )
        except DequeueTimeout:
            return None
        except RedisError as error:
            log.warning("Redis is away, or holds something that is no wake-up: %s", error)
            time.sleep(AWAY_SECONDS)
            return None
        except (ValueError, TypeError) as error:  # an id that is no text or no id: it has been popped, so it is gone
            log.error("refused a wake-up that cannot be read: %s", error)
            return None
        finally:
            self._waiting = False

    def execute_job(self, job: Job, queue: Queue) -> None:
        """Refuse it, or forget it and have the worker child perform it."""
        assert isinstance(job, WakeUpJob)
        refusal = job.refusal or (None if job.origin == queue.name else f"it was written for {job.origin!r}")
        if refusal is not None:
            log.error("refused wake-up %s in %s: %s", job.id, queue.name, refusal)
            job.origin = queue.name
        try:
            wake_ups.forget(self.connection, job)
        except RedisError as error:
            log.warning("wake-up %s not removed: %s", job.id, error)  # taken twice, it finds nothing left to lease
        if refusal is None:
            self._perform_one(*job.args)

    def _perform_one(self, kind: str, target: str | None) -> None:
        """Whatever waits. Where something did, more may: without wake-ups the next look is at once."""
        there_was = self._give(kind, target) and self._await_child()
        self._look_at = time.monotonic() + (0.0 if there_was else LOOK_SECONDS)

    def _give(self, kind: str, target: str | None) -> bool:
        """To a worker child that lives; False where the worker is stopped before: another worker begins it."""
        if not self._before_wake_up():
            self._end_child()
        while not self._stop_requested:
            child = self._find_child()
            if self._stop_requested:  # while it was forked: it got no signal
                break
            if child.give(kind, target):
                return True
            self._end_child()
        return False

    def _find_child(self) -> WorkerChild:
        if self._child is None:
            self._before_fork()
            self._child = WorkerChild(self._perform)
        return self._child

    def _await_child(self) -> bool:
        """Until it has performed or ended; whether there was work. One that is stopped is killed."""
        assert self._child is not None
        self._busy, stopped = True, StoppedWatch()
        while not self._child.wait(HEARTBEAT_SECONDS):
            self._live()
            is_late = self._kill_child_at is not None and time.monotonic() > self._kill_child_at
            if is_late or stopped.too_long(self._child.pid):
                self._child.kill()
        self._busy = False
        there_was = self._child.answer()
        if there_was is None and (code := self._end_child()) != 0:
            log.warning("the worker child ended with %d; its task waits again when its lease is over", code)
        return bool(there_was)

    def _end_child(self) -> int:
        """Of one that is idle or has ended; returns its exit code."""
        child, self._child = self._child, None
        return 0 if child is None else child.end()

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """First signal: the worker child hands its task back, the worker ends. The second kills the worker child."""
        again, self._stop_requested = self._stop_requested, True
        self._kill_child_at = time.monotonic() + CHILD_GRACE_SECONDS
        if self._child is not None:
            self._child.kill(signal.SIGKILL if again else signal.SIGTERM)
        if self._waiting and not again:
            raise StopRequested

    def _live(self) -> None:
        self._beat()
        try:
            self.heartbeat()
        except RedisError as error:
            log.warning("no heartbeat: %s", error)

    def heartbeat(self, timeout: int | None = None, pipeline: Any = None) -> None:
        """Write the whole registration, so that it is back one second after a flush. Raises RedisError."""
        self.last_heartbeat = now()
        state = "busy" if self._busy else "idle"
        with self.connection.pipeline() as batch:
            batch.hset(self.key, mapping={**self.serialize(), "state": state})
            batch.expire(self.key, HEARTBEAT_TTL_SECONDS)
            worker_registration.register(self, batch)
            batch.execute()

    def _leave(self) -> None:
        try:
            with self.connection.pipeline() as batch:
                worker_registration.unregister(self, batch)
                batch.delete(self.key)
                batch.execute()
        except RedisError as error:
            log.warning("not unregistered, the registration ends by itself: %s", error)
