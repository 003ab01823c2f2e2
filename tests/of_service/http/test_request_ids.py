"""The id of a request: in the answer's header, in a problem's body, in the log."""

from __future__ import annotations

import io
import logging
import re

import pytest

from service.http.request_ids import NameRequests
from service.routes import accept_job
from storage.config.logs import FORMAT, PrintableFormatter
from tests.support.fixtures.api import Api

NEW = re.compile(r"[0-9a-f]{32}")


@pytest.mark.parametrize("path", ["/healthz", "/v1/operators", "/v1/kernels/none", "/", "/nothing"])
def test_each_answer_has_the_callers_id(path: str, shared_api: Api) -> None:
    answer = shared_api.client.get(path, headers={"X-Request-ID": "train-7/step:12"})
    assert answer.headers["x-request-id"] == "train-7/step:12"
    if answer.status_code >= 400:
        assert answer.json()["request_id"] == "train-7/step:12"


@pytest.mark.parametrize("sent", [None, "", "two words", "x" * 129, "a\tb", "<script>"])
def test_an_id_that_is_missing_or_no_word_is_replaced(sent: str | None, shared_api: Api) -> None:
    answers = [shared_api.client.get("/nothing", headers={} if sent is None else {"X-Request-ID": sent}) for _ in "12"]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert all(NEW.fullmatch(own) for own in ids) and ids[0] != ids[1]
    assert [answer.json()["request_id"] for answer in answers] == ids


def test_the_log_of_a_defect_names_the_request(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        logging.getLogger("cukiln.service").warning("about to break")
        raise RuntimeError("broken")

    monkeypatch.setattr(accept_job, "resolve_jobs", broken)
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(PrintableFormatter(FORMAT))
    handler.addFilter(NameRequests())
    logging.getLogger("cukiln").addHandler(handler)
    try:
        name = {"name": "x" * 250}  # a body that is not batched with others
        problems = [
            {"operator": "matmul", "m": m, "n": 1, "k": 1, "name": f"{m}{name['name']}"[:256]} for m in range(40)
        ]
        answer = api.client.post("/v1/jobs", json={"problems": problems}, headers={"X-Request-ID": "r-1"})
    finally:
        logging.getLogger("cukiln").removeHandler(handler)
    assert answer.status_code == 500 and answer.json()["request_id"] == "r-1"
    lines = written.getvalue().splitlines()
    assert any("request r-1: about to break" in line for line in lines), lines
    assert any("request r-1: POST /v1/jobs failed" in line for line in lines), lines
