"""Wake-ups and events over a real valkey, and over one that is away."""

from __future__ import annotations

import asyncio
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tests.support.fixtures.queue import events_of
from workers import wake_ups
from workers.supervisor.valkey import EmbeddedValkey
from workers.worker.queue_worker import read_wake_up


@pytest.fixture
def client(valkey: EmbeddedValkey) -> Redis:
    return wake_ups.connect(valkey.url)


@pytest.fixture
def away(tmp_path: Path) -> Redis:
    """A client whose server is not there."""
    return wake_ups.connect(f"unix://{tmp_path}/no.sock")


@pytest.mark.parametrize(
    ("kind", "target", "queue"),
    [
        ("plan", None, "cukiln:plan"),
        ("plan", "sm_80", "cukiln:plan"),
        ("compile", "sm_80", "cukiln:compile:sm_80"),
        ("verify", "sm_90a", "cukiln:compile:sm_90a"),
        ("finish", "sm_120", "cukiln:compile:sm_120"),
        ("measure", "NVIDIA H200", "cukiln:gpu:NVIDIA+H200"),
        ("compare", "NVIDIA GeForce RTX 4090", "cukiln:gpu:NVIDIA+GeForce+RTX+4090"),
        ("gpu", "NVIDIA A100-SXM4-80GB", "cukiln:gpu:NVIDIA+A100-SXM4-80GB"),
        ("gpu", "NVIDIA H100 (PCIe)", "cukiln:gpu:NVIDIA+H100+%28PCIe%29"),
    ],
)
def test_each_kind_of_task_has_the_queue_of_its_workers(kind: str, target: str | None, queue: str) -> None:
    assert wake_ups.queue_name(kind, target) == queue


@pytest.mark.parametrize(
    ("kind", "target"),
    [
        ("brew", None),
        ("compile", None),
        ("verify", "sm_80:x"),
        ("finish", ""),
        ("measure", None),
        ("measure", ""),
        ("measure", "predicted:sm_80"),
        ("compare", " NVIDIA H200"),
        ("gpu", "NVIDIA H200 "),
        ("gpu", "NVIDIA\nH200"),
        ("gpu", "x" * 129),
    ],
)
def test_no_queue_for_an_unknown_kind_or_a_malformed_target(kind: str, target: str | None) -> None:
    with pytest.raises(ValueError, match=kind):
        wake_ups.queue_name(kind, target)


@pytest.mark.parametrize("other", ["NVIDIA-H200", "nvidia H200", "NVIDIA+H200", "NVIDIA%20H200", "NVIDIA  H200"])
def test_no_two_device_classes_share_a_queue(other: str) -> None:
    assert wake_ups.queue_name("gpu", other) != wake_ups.queue_name("gpu", "NVIDIA H200")


def test_every_kind_of_task_is_done_by_one_kind_of_worker() -> None:
    done = [(item, worker) for worker, kinds in wake_ups.TASKS_OF.items() for item in kinds]
    assert sorted(done) == sorted(wake_ups.WORKER_OF.items())


@pytest.mark.parametrize(
    ("kind", "target"), [("plan", None), ("plan", "sm_80"), ("verify", "sm_80"), ("measure", "Simulated GPU")]
)
def test_a_written_wake_up_is_read_as_its_workers_kind_and_target(client: Redis, kind: str, target: str | None) -> None:
    assert wake_ups.add_wake_ups(client, kind, target)
    [key] = client.keys("rq:job:*")
    worker = wake_ups.WORKER_OF[kind]
    fields: Any = client.hgetall(key)
    assert read_wake_up(fields) == (worker, None if worker == "plan" else target)
    assert 0 < client.ttl(key) <= wake_ups.WAKE_UP_SECONDS


def test_missing_wake_ups_are_counted_against_what_is_queued(client: Redis) -> None:
    wake_ups.add_wake_ups(client, "verify", "sm_80")
    assert wake_ups.ensure_wake_ups(client, "compile", "sm_80", 4) == 3
    assert wake_ups.ensure_wake_ups(client, "finish", "sm_80", 4) == 0
    assert wake_ups.ensure_wake_ups(client, "compile", "sm_80", 9, at_most=2) == 2
    assert wake_ups.queued_wake_ups(client, "compile", "sm_80") == 6
    assert wake_ups.queued_wake_ups(client, "compile", "sm_90a") == 0


def test_where_redis_is_away_nothing_is_raised_and_the_caller_gets_false(away: Redis) -> None:
    assert wake_ups.add_wake_ups(away, "plan", None) is False
    assert wake_ups.ensure_wake_ups(away, "plan", None, 3) == 0
    assert wake_ups.publish(away, "job", "state", {}) is False


def test_only_wake_ups_that_stay_taken_between_two_sweeps_are_removed(client: Redis) -> None:
    key = "rq:queue:cukiln:plan:intermediate"
    client.rpush(key, "dead")
    client.hset("rq:job:dead", "data", b"x")
    seen = wake_ups.sweep_taken(client, "plan", None, frozenset())
    client.rpush(key, "fresh")
    wake_ups.sweep_taken(client, "plan", None, seen)
    assert client.lrange(key, 0, -1) == [b"fresh"]
    assert not client.exists("rq:job:dead")


def test_events_come_back_in_order_and_after_an_id(client: Redis) -> None:
    for number in range(5):
        wake_ups.publish(client, "job", "progress", {"number": number})
    wake_ups.publish(client, "other", "progress", {"number": 99})
    events = events_of(client, "job")
    assert [(event.type, event.data["number"]) for event in events] == [("progress", n) for n in range(5)]
    assert events_of(client, "job", events[2].id) == events[3:]
    assert events_of(client, "job", events[-1].id) == []
    assert all(wake_ups.valid_event_id(event.id) for event in events)
    assert 0 < client.ttl(wake_ups.events_key("job")) <= wake_ups.EVENT_SECONDS


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "1-2-3", "$", "1" * 30, "١"])
def test_a_malformed_last_event_id_is_found(text: str) -> None:
    assert not wake_ups.valid_event_id(text)


def test_a_stream_is_kept_to_its_length(client: Redis) -> None:
    for number in range(500):
        wake_ups.publish(client, "job", "progress", {"number": number}, length=100)
    events = events_of(client, "job")
    assert events[-1].data == {"number": 499}
    assert 100 <= len(events) <= 250  # trimming is approximate: whole nodes of the stream


def test_following_yields_what_is_published_meanwhile_and_gives_turns(valkey: EmbeddedValkey, client: Redis) -> None:
    async def watch() -> list[list[int]]:
        follower = wake_ups.connect_async(valkey.url)
        batches: list[list[int]] = []
        wake_ups.publish(client, "job", "progress", {"number": 1})
        async for events in wake_ups.follow(follower, "job", wait_seconds=0.02):
            batches.append([event.data["number"] for event in events])
            if not events:
                if len(batches) > 2:
                    break
                wake_ups.publish(client, "job", "progress", {"number": 2})
        await follower.aclose()
        return batches

    assert asyncio.run(watch()) == [[1], [], [2], []]


def test_a_watcher_of_a_long_history_gets_a_few_events_at_once(valkey: EmbeddedValkey, client: Redis) -> None:
    count = 2 * wake_ups.READ_AT_ONCE + 1

    async def watch() -> list[list[int]]:
        async with wake_ups.connect_async(valkey.url) as follower:
            batches = []
            async for events in wake_ups.follow(follower, "job", wait_seconds=0.02):
                if not events:
                    return batches
                batches.append([event.data["number"] for event in events])
        raise AssertionError("it follows for ever")

    for number in range(count):
        wake_ups.publish(client, "job", "progress", {"number": number})
    batches = asyncio.run(watch())
    assert [number for batch in batches for number in batch] == [*range(count)]
    assert [len(batch) for batch in batches] == [20, 20, 1]


def call(*words: object) -> dict[bytes, bytes]:
    return {b"origin": b"cukiln:compile:sm_80", b"data": zlib.compress(json.dumps(words).encode())}


FUNCTION = wake_ups.WAKE_UP_FUNCTION


def test_the_plain_call_is_a_wake_up() -> None:
    assert read_wake_up(call(FUNCTION, None, ["compile", "sm_80"], {})) == ("compile", "sm_80")


@pytest.mark.parametrize(
    "fields",
    [
        call("os.system", None, ["compile", "sm_80"], {}),
        call(FUNCTION, "instance", ["compile", "sm_80"], {}),
        call(FUNCTION, None, ["compile", "sm_80"], {"more": 1}),
        call(FUNCTION, None, ["compile", "sm_80", "more"], {}),
        call(FUNCTION, None, ["compile", "sm_90a"], {}),
        call(FUNCTION, None, ["verify", "sm_80"], {}),
        call(FUNCTION, None, ["plan", None], {}),
        call(FUNCTION, None, ["compile", None], {}),
        call(FUNCTION, None, [["compile"], "sm_80"], {}),
        call(FUNCTION, None, ["gpu", "sm_80"], {}),
        call(FUNCTION),
        {b"origin": b"cukiln:gpu:NVIDIA+H200"} | {b"data": call(FUNCTION, None, ["gpu", "NVIDIA H100"], {})[b"data"]},
        {b"origin": b"cukiln:gpu:NVIDIA+H200"} | {b"data": call(FUNCTION, None, ["gpu", "NVIDIA+H200"], {})[b"data"]},
        {b"origin": b"cukiln:plan"} | {b"data": call(FUNCTION, None, ["plan", "sm_80"], {})[b"data"]},
        {b"origin": b"cukiln:compile:sm_80", b"data": b"not compressed"},
        {b"origin": b"cukiln:compile:sm_80", b"data": zlib.compress(b"\xff")},
        {b"origin": b"cukiln:compile:sm_80", b"data": zlib.compress(b"[" * 100_000)},
        {b"origin": b"\xff", b"data": call(FUNCTION, None, ["compile", "sm_80"], {})[b"data"]},
        {},
    ],
)
def test_any_other_call_is_refused(fields: dict[bytes, bytes]) -> None:
    assert isinstance(read_wake_up(fields), str)


BEYOND = (
    "success_callback_name failure_callback_name stopped_callback_name webhooks meta dependency_ids dependency_id "
    "retries_left repeats_left rate_limit_key group_id result exc_info anything"
)


@pytest.mark.parametrize("name", BEYOND.split())
def test_a_field_beyond_a_plain_wake_up_is_refused_by_name(name: str) -> None:
    fields = call(FUNCTION, None, ["compile", "sm_80"], {}) | {name.encode(): b"x"}
    assert name in str(read_wake_up(fields))
