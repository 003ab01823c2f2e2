"""A Redis that does not answer, or takes nothing, delays work by seconds and answers by nothing that is felt."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.exceptions import ConnectionError as RedisAway
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisSilent

from service.routes import events
from tests.of_service.event_streams import end, watch
from tests.support.fixtures.api import MATMUL, Api, serving
from tests.support.fixtures.queue import QueueWorld, wait_for
from tests.support.run.each_run import some_each_run
from workers import wake_ups
from workers.supervisor.valkey import EmbeddedValkey

PATIENCE = 10.0
"""Seconds that a caller waits for an answer here: one call to a Redis that was silent took 20."""


@pytest.fixture
def live(tmp_path: Path, valkey: EmbeddedValkey) -> Iterator[Api]:
    with serving(tmp_path / "live", redis_url=valkey.url) as served:
        served.client.timeout = httpx.Timeout(PATIENCE)
        yield served


@contextmanager
def silent(server: EmbeddedValkey) -> Iterator[None]:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@contextmanager
def full(server: EmbeddedValkey) -> Iterator[None]:
    client = wake_ups.connect(server.url)
    client.config_set("maxmemory", 1)
    try:
        yield
    finally:
        client.config_set("maxmemory", 512 << 20)


def missing(api: Api) -> dict[str, str]:
    answer = api.client.get("/readyz").json()
    return {error["field"]: error["detail"] for error in answer.get("errors") or [answer]}


def test_after_a_call_that_was_not_answered_the_next_ones_fail_at_once_and_later_ones_are_right(
    valkey: EmbeddedValkey,
) -> None:
    client = wake_ups.connect(valkey.url)
    client.set("key", "before")
    with silent(valkey):
        with pytest.raises(RedisSilent):
            client.get("key")
        for _ in range(100):
            with pytest.raises(RedisAway, match="a moment ago"):
                client.ping()
        assert not wake_ups.publish(client, "job", "state", {})

    def answers() -> Any:
        try:
            return client.get("key")
        except RedisError:
            return None

    wait_for(lambda: answers() is not None)
    assert client.get("key") == b"before"  # not what was asked while it was silent


def test_jobs_are_sent_cancelled_and_watched_beside_a_silent_redis(
    live: Api,
    valkey: EmbeddedValkey,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "POLL_SECONDS", 0.1)
    with silent(valkey):
        with ThreadPoolExecutor(50) as pool:
            sent = list(pool.map(lambda m: live.submit({**MATMUL, "m": 64 + m}), range(50)))
        assert {answer.status_code for answer in sent} == {202}
        jobs = [answer.json()["job"] for answer in sent]
        assert live.client.delete(f"/v1/jobs/{jobs[0]}").status_code == 200
        assert "does not answer" in missing(live)["redis"]
        seen = watch(live, jobs[1])
        assert next(seen).event == "snapshot"
        end(live, jobs[1])
        assert [event.event for event in seen][-1] == "end"
    queued = wake_ups.connect(valkey.url)
    wait_for(lambda: live.submit({**MATMUL, "m": 9}) and wake_ups.queued_wake_ups(queued, "plan", None) > 0)


def test_a_redis_that_takes_no_writes_is_called_so_and_nothing_else_is(
    live: Api,
    valkey: EmbeddedValkey,
) -> None:
    with full(valkey):
        found = missing(live)
        assert "takes no writes" in found["redis"] and "maxmemory" in found["redis"]
        assert "planner" not in found and "reconciler" not in found
        assert live.submit().status_code == 202
    assert "redis" not in missing(live)


@pytest.mark.parametrize("fault", some_each_run(["silent", "full"]))
def test_work_continues_without_wake_ups(
    queue_world: QueueWorld,
    valkey: EmbeddedValkey,
    fault: str,
) -> None:
    worker = queue_world.start("plan")
    wait_for(lambda: wake_ups.live_workers(queue_world.redis), what="a worker")
    with {"silent": silent, "full": full}[fault](valkey):
        queue_world.add("quick", "quick_1", "quick_2", wake_up=False)
        wait_for(lambda: len(queue_world.journal("end")) == 3, what="the items")
    assert worker.poll() is None
    assert len(queue_world.journal("start")) == 3


def test_a_job_keeps_no_more_events_than_a_watcher_is_sent_again(valkey: EmbeddedValkey) -> None:
    client = wake_ups.connect(valkey.url)
    for number in range(3 * wake_ups.EVENTS_PER_JOB):
        assert wake_ups.publish(client, "job", "problem", {"name": f"p{number}"})
    key = wake_ups.events_key("job")
    assert client.xlen(key) < 1.2 * wake_ups.EVENTS_PER_JOB
    assert 0 < client.ttl(key) <= wake_ups.EVENT_SECONDS <= 3600
