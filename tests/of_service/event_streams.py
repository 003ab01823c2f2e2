"""Event streams of jobs, as a client reads them."""

from __future__ import annotations

from collections.abc import Iterator

from httpx_sse import EventSource, ServerSentEvent

from storage.transitions.end_jobs import cancel_job
from tests.support.fixtures.api import Api


def watch(api: Api, job: str, after: str | None = None) -> Iterator[ServerSentEvent]:
    headers = {"Last-Event-ID": after} if after else {}
    with api.client.stream("GET", f"/v1/jobs/{job}/events", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield from EventSource(response).iter_sse()


def end(api: Api, job: str) -> None:
    with api.database.write() as session:
        cancel_job(session, job)
