"""Names and messages that the service and the workers share over Redis: queues, wake-ups, events.

Redis holds nothing that cannot be lost: a wake-up says "something of this kind may be waiting", an event gives a
watcher something that the database also has. So everything is best effort: where Redis is away, the writer logs it,
returns False and continues; a call that is not answered in half a second is given up, and none is made for the second
after it.
"""

import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote_plus

import redis.asyncio
from redis import Redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisAway
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisSilent
from redis.retry import Retry
from rq import Queue, Worker
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY

log = logging.getLogger("cukiln.wake_ups")

PLAN = "plan"
COMPILE = "compile"
GPU = "gpu"
# Which kind of worker does which kind of task. A compile worker has the compiler that verify and finish need too.
WORKER_OF = {
    "plan": PLAN,
    "compile": COMPILE,
    "verify": COMPILE,
    "finish": COMPILE,
    "measure": GPU,
    "compare": GPU,
}
# What comes last in a job's way goes first: what is begun gets finished before more is begun.
TASKS_OF = {PLAN: ("plan",), COMPILE: ("finish", "verify", "compile"), GPU: ("compare", "measure")}

WAKE_UP_FUNCTION = "workers.worker.run_task.run_wake_up"  # the only function that a wake-up may name
WAKE_UP_SECONDS = 24 * 3600  # what a crash between taking a wake-up and forgetting it leaves behind ends by itself

RECONCILER_KEY = "cukiln:reconciler"  # there as long as one is at work

EVENTS_PER_JOB = 1_000  # about half a megabyte; a watcher that was away for longer reads the state from the database
EVENT_SECONDS = 3600  # after the last one
READ_AT_ONCE = 20
"""Events of one read: while a watcher takes them, all others and every other request wait."""
ANSWER_SECONDS = 0.5
SILENT_SECONDS = 1.0

T = TypeVar("T")

_TARGET = re.compile(r"[a-z0-9_]{1,16}")
# A product's name as its driver gives it; the colon would make it a `predicted:<target>`.
_DEVICE_CLASS = re.compile(r"[!-9;-~]([ -9;-~]{0,126}[!-9;-~])?")
_EVENT_ID = re.compile(r"[0-9]{1,20}(-[0-9]{1,20})?")


def queue_name(kind: str, target: str | None) -> str:
    """RQ queue of a task kind or worker kind: `cukiln:plan`, `cukiln:compile:<target>`, `cukiln:gpu:<device class>`
    with the class as in a URL's query (`NVIDIA+H200`), so that no two share a queue.

    Raises ValueError for an unknown kind, or a target that is missing, malformed, or not wanted (plan)."""
    worker = WORKER_OF.get(kind, kind)
    if worker not in TASKS_OF:
        raise ValueError(f"unknown kind of work {kind!r}: allowed are {', '.join([*WORKER_OF, GPU])}")
    if worker == PLAN:
        return "cukiln:plan"
    if worker == GPU:
        if target is None or not is_device_class(target):
            raise ValueError(f"{kind} needs a device class such as NVIDIA H200, not {target!r}")
        return f"cukiln:{worker}:{quote_plus(target)}"
    if target is None or not _TARGET.fullmatch(target):
        raise ValueError(f"{kind} needs a target such as sm_80, not {target!r}")
    return f"cukiln:{worker}:{target}"


def is_device_class(name: str) -> bool:
    """Whether it can be the product's name of a GPU: up to 128 printable ASCII characters, without a colon."""
    return _DEVICE_CLASS.fullmatch(name) is not None


def connect(url: str, *, answer_seconds: float = ANSWER_SECONDS) -> Redis:
    """A client that bridges a reconnect (3 tries in about 0.1 s) and gives up after `answer_seconds` of silence."""
    return Redis.from_url(
        url, retry=_Breaker(), socket_timeout=answer_seconds, socket_connect_timeout=min(answer_seconds, ANSWER_SECONDS)
    )


def connect_async(url: str, *, wait_seconds: float = 1.0) -> redis.asyncio.Redis:
    """For an event loop: a silent server is given up after the `wait_seconds` of `follow` and what a call may take."""
    from redis.asyncio.retry import Retry as AsyncRetry

    retry = AsyncRetry(ExponentialBackoff(cap=0.05, base=0.01), retries=3, supported_errors=(RedisAway,))
    timeout = wait_seconds + ANSWER_SECONDS
    return redis.asyncio.Redis.from_url(
        url,
        retry=retry,
        socket_timeout=timeout,
        socket_connect_timeout=ANSWER_SECONDS,
        driver_info=None,  # its version is looked up in the file system for each client, on the event loop
    )


class _Breaker(Retry):
    """Tries again where a connection broke; after an unanswered call, others fail at once for a while."""

    def __init__(self) -> None:
        super().__init__(ExponentialBackoff(cap=0.05, base=0.01), retries=3, supported_errors=(RedisAway,))
        self._silent_until = 0.0

    def __deepcopy__(self, memo: object) -> "_Breaker":
        return self  # each connection takes a copy: what one has met holds for all

    def call_with_retry(self, do: Callable[[], T], *args: Any, **options: Any) -> T:
        if time.monotonic() < self._silent_until:
            raise RedisAway("it did not answer a moment ago")
        try:
            return super().call_with_retry(do, *args, **options)
        except RedisSilent:
            self._silent_until = time.monotonic() + SILENT_SECONDS
            raise


def add_wake_ups(client: Redis, kind: str, target: str | None, count: int = 1) -> bool:
    """Write a wake-up for each task that has just become waiting. False where Redis is away: the reconciler will."""
    queue = Queue(queue_name(kind, target), connection=client, serializer=JSONSerializer)
    worker = WORKER_OF.get(kind, kind)
    try:
        with client.pipeline() as pipeline:
            for _ in range(count):
                queue.enqueue_call(
                    WAKE_UP_FUNCTION,
                    args=(worker, None if worker == PLAN else target),
                    timeout=-1,  # the lease and the deadline of the task bound the work, not RQ
                    ttl=WAKE_UP_SECONDS,
                    result_ttl=0,
                    failure_ttl=60,
                    description=queue.name,
                    pipeline=pipeline,
                )
            pipeline.execute()
    except RedisError as error:
        log.warning("no wake-up written to %s, the reconciler will: %s", queue.name, error)
        return False
    return True


def ensure_wake_ups(client: Redis, kind: str, target: str | None, waiting: int, *, at_most: int = 1000) -> int:
    """Write the wake-ups that `waiting` tasks lack, `at_most` at once; returns how many. One too many is harmless."""
    try:
        missing = min(waiting - queued_wake_ups(client, kind, target), at_most)
    except RedisError as error:
        log.warning("cannot count the wake-ups of %s: %s", queue_name(kind, target), error)
        return 0
    return missing if missing > 0 and add_wake_ups(client, kind, target, missing) else 0


def queued_wake_ups(client: Redis, kind: str, target: str | None) -> int:
    """Wake-ups waiting in the queue. Raises RedisError."""
    return Queue(queue_name(kind, target), connection=client, serializer=JSONSerializer).count


def is_wake_up(call: object, queue: str) -> bool:
    """Whether a deserialised RQ call is exactly what `add_wake_ups` writes to this queue."""
    match call:
        case [function, None, [str(kind), None | str() as target], {**nothing}]:
            if function != WAKE_UP_FUNCTION or nothing or kind not in TASKS_OF or (kind == PLAN and target is not None):
                return False
            try:
                return queue_name(kind, target) == queue
            except ValueError:
                return False
    return False


def forget(client: Redis, wake_up: Job) -> None:
    """Remove what is left of a taken wake-up. Raises RedisError."""
    name = Queue.redis_queue_namespace_prefix + wake_up.origin
    with client.pipeline() as pipeline:
        pipeline.lrem(f"{name}:intermediate", 1, wake_up.id)
        pipeline.delete(wake_up.key)
        pipeline.execute()


def sweep_taken(client: Redis, kind: str, target: str | None, seen: Set[str]) -> Set[str]:
    """Remove what was taken and not forgotten when `seen` was returned; returns what is. Raises RedisError."""
    key = f"{Queue.redis_queue_namespace_prefix}{queue_name(kind, target)}:intermediate"
    taken: Any = client.lrange(key, 0, -1)
    for wake_up in taken:
        if _text(wake_up) in seen:
            client.lrem(key, 1, wake_up)
            client.delete(f"{Job.redis_job_namespace_prefix}{_text(wake_up)}")
    return frozenset(map(_text, taken))


def live_workers(client: Redis, queue: str | None = None) -> list[str]:
    """Names of the workers (of `queue`, where given) whose heartbeat is fresh: `host.pid.random`. Raises RedisError."""
    registry = WORKERS_BY_QUEUE_KEY % queue if queue is not None else REDIS_WORKER_KEYS
    keys: Any = client.smembers(registry)
    prefix = Worker.redis_worker_namespace_prefix
    return [_text(key).removeprefix(prefix) for key in sorted(keys) if client.exists(key)]


def worker_count(client: Redis, kind: str, target: str | None) -> int:
    """Live workers of a queue; 0 where Redis is away."""
    try:
        return len(live_workers(client, queue_name(kind, target)))
    except RedisError:
        return 0


def reconciler_lives(client: Redis, seconds: float) -> bool:
    """Note that a reconciler is at work; the note ends by itself after `seconds`. False where Redis is away."""
    try:
        client.set(RECONCILER_KEY, "alive", px=int(1000 * seconds))
    except RedisError as error:
        log.warning("the reconciler's sign of life was not written: %s", error)
        return False
    return True


def has_live_reconciler(client: Redis) -> bool:
    """Whether one has noted lately that it is at work. Raises RedisError."""
    return bool(client.exists(RECONCILER_KEY))


@dataclass(frozen=True)
class Event:
    """One entry of a job's stream. `id` grows and is what a watcher sends back as Last-Event-ID."""

    id: str
    type: str
    data: dict[str, Any]


def events_key(job_id: str) -> str:
    return f"cukiln:events:{job_id}"


def publish(client: Redis, job_id: str, type: str, data: Mapping[str, Any], *, length: int = EVENTS_PER_JOB) -> bool:
    """Append an event to the job's stream. False where Redis is away: watchers then read it from the database."""
    key = events_key(job_id)
    fields: dict[Any, Any] = {"type": type, "data": json.dumps(data, separators=(",", ":"), allow_nan=False)}
    try:
        with client.pipeline(transaction=False) as pipeline:
            pipeline.xadd(key, fields, maxlen=length, approximate=True)
            pipeline.expire(key, EVENT_SECONDS)
            pipeline.execute()
    except RedisError as error:
        log.warning("event %s of job %s not published: %s", type, job_id, error)
        return False
    return True


def valid_event_id(text: str) -> bool:
    """Whether a Last-Event-ID is one of ours: `milliseconds` or `milliseconds-sequence`."""
    return _EVENT_ID.fullmatch(text) is not None


async def follow(
    client: redis.asyncio.Redis, job_id: str, after: str = "0", *, wait_seconds: float = 1.0
) -> AsyncIterator[list[Event]]:
    """Batches of events after the id `after`, for ever; empty after `wait_seconds` of silence. Raises RedisError."""
    while True:
        answer: Any = await client.xread(
            {events_key(job_id): after}, count=READ_AT_ONCE, block=max(1, int(wait_seconds * 1000))
        )
        events = events_in(answer)
        if events:
            after = events[-1].id
        yield events


def events_in(answer: Any) -> list[Event]:
    """From XREAD's answer: a list of pairs under RESP2, a mapping under RESP3, nothing after a timeout."""
    if not answer:
        return []
    entries = next(iter(answer.values())) if isinstance(answer, dict) else answer[0][1]
    if entries and isinstance(entries[0], list):  # RESP3 wraps the entries of a stream once more
        entries = entries[0]
    return [Event(_text(id), _text(fields[b"type"]), json.loads(fields[b"data"])) for id, fields in entries]


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def url_file(folder: Path) -> Path:
    """Where a running server's URL stands, for a worker that is started by hand beside `cukiln serve`."""
    return folder / "url"
