"""A request that is being written when the service stops is answered with what became of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import service.__main__
from service.routes import accept_job
from storage.entities.jobs import list_jobs
from storage.transitions.accept import PROBLEMS_AT_ONCE, create_jobs, create_large_job
from storage.transitions.end_jobs import cancel_job
from tests.support.fixtures.api import MATMUL, serving

CLOSE_SECONDS = 0.1


@pytest.mark.parametrize("asks", ["a job", "a large job", "a retry"])
def test_a_job_that_is_written_while_the_service_stops_is_not_to_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: str
) -> None:
    writes, stopped = threading.Event(), threading.Event()

    def late(write: Callable[..., Any]) -> Callable[..., Any]:
        def begun(*arguments: Any) -> Any:
            writes.set()
            assert stopped.wait(30)
            return write(*arguments)

        return begun

    monkeypatch.setattr(service.__main__, "CLOSE_SECONDS", CLOSE_SECONDS)
    with serving(tmp_path) as api, ThreadPoolExecutor(1) as clients:
        before = api.submit().json()["job"]
        with api.database.write() as session:
            cancel_job(session, before)
        for write in (create_jobs, create_large_job):
            monkeypatch.setattr(accept_job, write.__name__, late(write))
        if asks == "a retry":
            asked = clients.submit(api.client.post, f"/v1/jobs/{before}/retry")
        else:
            count = 1 if asks == "a job" else PROBLEMS_AT_ONCE + 1
            asked = clients.submit(api.submit, *({**MATMUL, "m": 8 * (n + 1), "name": f"p{n}"} for n in range(count)))
        assert writes.wait(30)
        api.server.should_exit = True
        time.sleep(0.5 + CLOSE_SECONDS)  # it has cancelled what it still answers
        stopped.set()
        answer = asked.result(30)
        assert answer.status_code == 202
        with api.database.read() as session:
            assert {job.job for job in list_jobs(session).jobs} == {before, answer.json()["job"]}
