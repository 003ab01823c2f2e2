"""Events over HTTP: replayed, followed, ended; from the database where Redis has nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio import BrokenResourceError
from httpx_sse import EventSource
from redis import Redis
from sqlalchemy import update
from sqlalchemy.exc import OperationalError
from starlette.types import Message, Receive, Scope, Send

from service import context as service_context
from service.http.handle_errors import AnswerDefects
from service.keyring import FRESH_SECONDS
from service.routes import events
from storage.database.session import Session
from storage.database.tables import JobRow
from storage.entities.keys import create_key, parts_of, revoke_key
from storage.reports.progress import JobProgress, job_progress
from tests.of_service.event_streams import end, watch
from tests.support.fixtures.api import MATMUL, Api, publish, serving
from tests.support.fixtures.queue import wait_for
from workers import wake_ups
from workers.supervisor.valkey import EmbeddedValkey


@pytest.fixture
def redis(valkey: EmbeddedValkey) -> Iterator[Redis]:
    with wake_ups.connect(valkey.url) as client:
        yield client


@pytest.fixture
def live(tmp_path: Path, valkey: EmbeddedValkey) -> Iterator[Api]:
    with serving(tmp_path / "live", redis_url=valkey.url) as served:
        yield served


@pytest.fixture
def without_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    monkeypatch.setattr(events, "POLL_SECONDS", 0.05)
    with serving(tmp_path / "alone", redis_url="redis://127.0.0.1:9/0") as served:
        yield served


def submit(api: Api, **changes: Any) -> str:
    return str(api.submit({**MATMUL, **changes}).json()["job"])


def test_events_are_replayed_from_the_first_and_end_with_the_job(live: Api, redis: Redis) -> None:
    job = submit(live)
    for number in range(3):
        wake_ups.publish(redis, job, "progress", {"number": number})
    end(live, job)
    wake_ups.publish(redis, job, "state", {"state": "cancelled"})
    found = list(watch(live, job))
    assert [event.event for event in found] == ["progress"] * 3 + ["state", "end"]
    assert [event.json().get("number") for event in found[:3]] == [0, 1, 2]
    assert found[-1].json() == {"job": job, "state": "cancelled"}


def test_last_event_id_continues_behind_it(live: Api, redis: Redis) -> None:
    job = submit(live)
    for number in range(3):
        wake_ups.publish(redis, job, "progress", {"number": number})
    end(live, job)
    wake_ups.publish(redis, job, "state", {"state": "cancelled"})
    second = list(watch(live, job))[1]
    rest = list(watch(live, job, after=second.id))
    assert [event.json().get("number") for event in rest[:1]] == [2]
    assert [event.event for event in rest] == ["progress", "state", "end"]


def test_events_come_while_the_job_runs(live: Api, redis: Redis) -> None:
    job = submit(live)
    stream = watch(live, job)
    assert next(stream).event == "snapshot"
    wake_ups.publish(redis, job, "progress", {"number": 1})
    assert next(stream).json() == {"number": 1}
    live.client.delete(f"/v1/jobs/{job}").raise_for_status()
    assert [event.event for event in stream] == ["state", "end"]


def test_a_lost_stream_begins_with_a_snapshot(live: Api, redis: Redis) -> None:
    job = submit(live)
    wake_ups.publish(redis, job, "progress", {"number": 1})
    redis.flushall()
    end(live, job)
    found = list(watch(live, job, after="1-0"))
    assert [event.event for event in found] == ["snapshot", "end"]
    data = found[0].json()
    assert (data["job"], data["state"]) == (job, "cancelled")
    assert "compile" in data["progress"]


def test_a_stream_that_lost_its_beginning_begins_with_a_snapshot(live: Api, redis: Redis) -> None:
    job = submit(live)
    wake_ups.publish(redis, job, "progress", {"number": 1})
    end(live, job)
    assert [event.event for event in watch(live, job, after="1-0")] == ["snapshot", "progress", "end"]


def test_the_end_needs_no_event(live: Api, redis: Redis) -> None:
    job = submit(live)
    stream = watch(live, job)
    next(stream)
    end(live, job)  # in the database alone
    assert [event.event for event in stream] == ["end"]


def test_progress_that_no_event_reported_is_shown(live: Api, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are shared: another job may compile and verify what this one waits for."""
    monkeypatch.setattr(events, "POLL_SECONDS", 0.05)
    job = submit(live)
    stream = watch(live, job)
    assert next(stream).json()["state"] == "queued"
    with live.database.write() as session:
        session.execute(update(JobRow).values(state="running"))
    event = next(stream)
    assert (event.event, event.json()["state"]) == ("snapshot", "running")
    with live.database.read() as session:
        now = job_progress(session, job)
    assert now is not None
    known = {"state": "running", "progress": {**now.progress.model_dump(mode="json"), "eta_seconds": 7.0}}
    wake_ups.publish(redis, job, "progress", known)
    assert next(stream).event == "progress"
    end(live, job)
    assert [event.event for event in stream] == ["end"], "what an event has reported is not reported again"


def test_a_job_that_was_cached_ends_at_once(live: Api) -> None:
    publish(live.database)
    job = submit(live)
    assert [event.event for event in watch(live, job)] == ["snapshot", "end"]


def test_without_redis_the_job_is_accepted_and_its_watcher_reads_the_database(without_redis: Api) -> None:
    job = submit(without_redis)
    stream = watch(without_redis, job)
    first = next(stream)
    assert (first.event, first.json()["state"]) == ("snapshot", "queued")
    end(without_redis, job)
    last = list(stream)
    assert [event.event for event in last] == ["end"]
    assert last[0].json()["state"] == "cancelled"


def test_a_watcher_survives_the_end_of_redis(live: Api, valkey: EmbeddedValkey) -> None:
    job = submit(live)
    stream = watch(live, job)
    next(stream)
    valkey.stop()
    end(live, job)
    assert [event.event for event in stream][-1] == "end"


def test_a_new_job_wakes_a_planner(live: Api, redis: Redis) -> None:
    live.submit(*({**MATMUL, "m": m} for m in range(1, 40)))  # two plan tasks of at most 32 problems
    assert live.rows()["tasks"] == 2
    wait_for(lambda: wake_ups.queued_wake_ups(redis, wake_ups.PLAN, None) == 2)


@pytest.mark.parametrize("after", ["x", "1-2-3", "-1", "99999999999999999999", "1-99999999999999999999", "$"])
def test_an_id_of_no_event_is_refused(live: Api, after: str) -> None:
    job = submit(live)
    answer = live.client.get(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": after})
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:cukiln:problem:invalid-event-id")
    assert answer.json()["field"] == "Last-Event-ID"


def test_many_watchers_leave_room_for_other_calls(live: Api) -> None:
    job = submit(live)
    with ExitStack() as stack:
        for _ in range(60):  # more than the threads that handlers share
            response = stack.enter_context(live.client.stream("GET", f"/v1/jobs/{job}/events"))
            assert next(EventSource(response).iter_sse()).event == "snapshot"
        assert live.client.get(f"/v1/jobs/{job}").status_code == 200


def test_watchers_of_a_job_share_a_read_that_is_slow(live: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, most, reads = 0, 0, 0

    def slow(session: Session, job_id: str, live_seconds: float) -> JobProgress | None:
        nonlocal reading, most, reads
        reading, reads = reading + 1, reads + 1
        most = max(most, reading)
        time.sleep(0.3)
        reading -= 1
        return job_progress(session, job_id, live_seconds)

    job = submit(live)
    monkeypatch.setattr(service_context, "job_progress", slow)
    with ExitStack() as stack:
        streams = [stack.enter_context(live.client.stream("GET", f"/v1/jobs/{job}/events")) for _ in range(20)]
        assert all(next(EventSource(stream).iter_sse()).event == "snapshot" for stream in streams)
        assert (most, reads < 20) == (1, True)


@pytest.mark.parametrize("with_redis", [True, False])
def test_a_stream_ends_with_its_key(
    live: Api, without_redis: Api, redis: Redis, monkeypatch: pytest.MonkeyPatch, with_redis: bool
) -> None:
    monkeypatch.setattr(events, "POLL_SECONDS", 0.05)
    api = live if with_redis else without_redis
    job = submit(api)
    with api.database.write() as session:
        key = create_key(session, "ci", ["read"])
    id, _ = parts_of(key) or ("", "")
    time.sleep(FRESH_SECONDS)
    headers = {"Authorization": f"Bearer {key}"}
    with api.client.stream("GET", f"/v1/jobs/{job}/events", headers=headers) as response:
        stream = EventSource(response).iter_sse()
        assert next(stream).event == "snapshot"
        with api.database.write() as session:
            revoke_key(session, id)
        revoked_at = time.monotonic()
        time.sleep(FRESH_SECONDS + 0.1)
        wake_ups.publish(redis, job, "progress", {"secret": 1})
        assert list(stream) == []
        assert time.monotonic() - revoked_at < 2.0


def test_what_no_key_had_opened_ends_once_one_is_needed(live: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLL_SECONDS", 0.05)
    stream = watch(live, submit(live))
    next(stream)
    with live.database.write() as session:
        create_key(session, "first", ["admin"])
    assert list(stream) == []


def test_so_many_streams_are_open_at_once_and_one_more_is_refused_with_a_time_to_retry(
    live: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MOST_STREAMS", 2)
    path = f"/v1/jobs/{submit(live)}/events"
    with live.client.stream("GET", path) as first, live.client.stream("GET", path) as second:
        assert (first.status_code, second.status_code) == (200, 200)
        refused = live.client.get(path)
        assert (refused.status_code, refused.json()["type"]) == (503, "urn:cukiln:problem:busy")
        assert int(refused.headers["retry-after"]) >= 1
        assert live.client.get(f"{path}x").status_code == 404

    def place() -> bool:
        with live.client.stream("GET", path) as response:
            return response.status_code == 200

    wait_for(place, what="the end of one of the streams")


def test_a_watcher_waits_while_the_database_is_away(without_redis: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    job = submit(without_redis)
    calls = 0

    def failing(session: Session, job_id: str, live_seconds: float) -> JobProgress | None:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise OperationalError("", {}, Exception())
        return job_progress(session, job_id, live_seconds)

    monkeypatch.setattr(service_context, "job_progress", failing)
    assert next(watch(without_redis, job)).event == "snapshot"
    assert calls == 3


def test_a_closed_service_ends_its_streams(tmp_path: Path, valkey: EmbeddedValkey) -> None:
    with serving(tmp_path / "closing", redis_url=valkey.url) as api:
        stream = watch(api, submit(api))
        next(stream)
    with pytest.raises(httpx.HTTPError):
        list(stream)


@pytest.mark.parametrize(("errors", "is_raised"), [([BrokenResourceError()], False), ([ValueError()], True)])
def test_a_client_that_leaves_while_an_event_is_handed_on_is_no_defect(
    errors: list[Exception], is_raised: bool
) -> None:
    """FastAPI's task group ends so, at a moment that no test meets by itself."""

    async def leaving(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ExceptionGroup("unhandled errors in a TaskGroup", errors)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        pass

    scope = {"type": "http", "method": "GET", "path": "/v1/jobs/x/events"}
    with pytest.raises(ExceptionGroup) if is_raised else nullcontext():
        asyncio.run(AnswerDefects(leaving)(scope, receive, send))
