"""Following a job: no event is lost, and waiting ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from cukiln import BadRequest, Progress, ServiceUnreachable, UnexpectedAnswer, WaitTimeout
from cukiln.client import Client
from tests.support.fixtures.client import (
    DONE,
    EVENTS,
    ScriptedService,
    job_json,
    message,
    problem_json,
    progress_json,
    stream,
)

Clients = Callable[..., Client]


def test_a_broken_stream_continues_after_the_last_event(
    scripted: ScriptedService, client_of: Clients, waits: list[float]
) -> None:
    first = stream(message("1-0", "progress", {"n": 1}), message("2-0", "progress", {"n": 2}))
    scripted.on("GET", EVENTS, first, stream(": still here\n\n", message("3-0", "progress", {"n": 3}), DONE))
    events = list(client_of(scripted.url).events("job1"))
    assert [event.id for event in events] == ["1-0", "2-0", "3-0", "9-0"]
    assert [event.data.get("n") for event in events] == [1, 2, 3, None]
    assert [seen.headers.get("last-event-id") for seen in scripted.seen] == [None, "2-0"]
    assert len(waits) == 1


def test_the_pause_that_the_stream_asks_for_is_kept(
    scripted: ScriptedService, client_of: Clients, waits: list[float]
) -> None:
    scripted.on("GET", EVENTS, stream("retry: 2500\n\n"), stream(DONE))
    assert [event.type for event in client_of(scripted.url).events("job1")] == ["end"]
    assert waits == [2.5]


def test_events_can_be_read_from_the_middle(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("GET", EVENTS, stream(DONE))
    list(client_of(scripted.url).events("job1", last_event_id="5-0"))
    assert scripted.seen[0].headers["last-event-id"] == "5-0"


def test_a_stream_that_never_says_anything_is_given_up(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("GET", EVENTS, stream(": nothing\n\n"))
    with pytest.raises(ServiceUnreachable, match="the event stream ended before the job did"):
        list(client_of(scripted.url, attempts=3).events("job1"))
    assert len(scripted.seen) == 3


def test_an_event_between_two_failures_starts_the_count_anew(scripted: ScriptedService, client_of: Clients) -> None:
    steps = [stream(message(f"{i}-0", "progress", {"n": i})) for i in range(6)]
    scripted.on("GET", EVENTS, *steps, stream(DONE))
    assert len(list(client_of(scripted.url, attempts=2).events("job1"))) == 7


@pytest.mark.parametrize("answer", [Response("{}", media_type="application/json"), stream("data: [1]\n\n")])
def test_what_is_not_an_event_stream_says_so(answer: Response, scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("GET", EVENTS, answer)
    with pytest.raises(UnexpectedAnswer):
        list(client_of(scripted.url).events("job1"))


def test_a_refused_stream_raises_what_the_service_said(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("GET", EVENTS, problem_json(400, "invalid-event-id", "Last-Event-ID is not one of ours"))
    with pytest.raises(BadRequest, match="Last-Event-ID"):
        list(client_of(scripted.url).events("job1", last_event_id="x"))


def test_tune_reports_each_change_once_and_returns_the_final_job(scripted: ScriptedService, client_of: Clients) -> None:
    half = message("1-0", "progress", progress_json(2))
    nested = message("2-0", "progress", {"state": "running", "progress": progress_json(3)})
    scripted.on("POST", "/v1/jobs", job_json("queued"))
    scripted.on("GET", EVENTS, stream(half, half, nested, message("3-0", "stage", {"any": "thing"}), DONE))
    scripted.on("GET", "/v1/jobs/job1", job_json("done"))
    seen: list[Progress] = []
    job = client_of(scripted.url).tune([{"operator": "matmul"}], progress=seen.append)
    assert job.state == "done"
    assert job.problems[0].winner is not None
    assert [progress.verify.done for progress in seen] == [0, 2, 3, 4]


def test_a_cached_job_is_not_waited_for(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("POST", "/v1/jobs", job_json("done", cached=True))
    assert client_of(scripted.url).tune([{"operator": "matmul"}]).cached
    assert len(scripted.seen) == 1


def test_an_end_that_is_read_before_its_row_is_waited_for(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("POST", "/v1/jobs", job_json("queued"))
    scripted.on("GET", EVENTS, stream(DONE))
    scripted.on("GET", "/v1/jobs/job1", job_json("running"), job_json("partial"))
    assert client_of(scripted.url).tune([{"operator": "matmul"}]).state == "partial"


def test_waiting_ends_at_its_timeout_although_the_stream_stays_open(
    scripted: ScriptedService, client_of: Clients
) -> None:
    async def endless() -> Any:
        import asyncio

        yield ": open\n\n"
        await asyncio.sleep(20)

    def open_stream(request: Request) -> Response:
        return StreamingResponse(endless(), media_type="text/event-stream")

    scripted.on("POST", "/v1/jobs", job_json("queued"))
    scripted.on("GET", EVENTS, open_stream)
    scripted.on("GET", "/v1/jobs/job1", job_json("running"))
    with pytest.raises(WaitTimeout, match=r"job1 is not finished after 0\.2 s") as caught:
        client_of(scripted.url).tune([{"operator": "matmul"}], timeout=0.2)
    assert caught.value.job == "job1"
