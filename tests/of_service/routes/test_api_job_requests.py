"""What is sent twice under an Idempotency-Key; names and labels of jobs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.routes import accept_job
from storage.transitions import accept
from tests.support.fixtures.api import MATMUL, Api, serving

PREFIX = "urn:cukiln:problem:"
LARGE = [{**MATMUL, "m": m, "name": f"layer {m} {'x' * 100}"} for m in range(1, 60)]  # more than is batched


def send(api: Api, key: str | None, *problems: dict[str, Any], **fields: Any) -> httpx.Response:
    headers = {} if key is None else {"Idempotency-Key": key}
    body = {"target": "sm_80", "problems": list(problems or (MATMUL,)), **fields}
    return api.client.post("/v1/jobs", json=body, headers=headers)


@pytest.mark.parametrize("problems", [(MATMUL,), LARGE], ids=["small", "large"])
def test_what_is_sent_twice_under_one_key_is_one_job(problems: Any, api: Api) -> None:
    answers = [send(api, key, *problems) for key in ("a", "a", "b", None, None)]
    assert [answer.status_code for answer in answers] == [202] * 5
    ids = [answer.json()["job"] for answer in answers]
    assert ids[0] == ids[1] and len(set(ids)) == 4
    assert answers[1].headers["location"] == f"/v1/jobs/{ids[0]}"
    assert api.rows()["jobs"] == 4


def test_a_job_of_many_transactions_is_one_too(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "PROBLEMS_AT_ONCE", 20)
    monkeypatch.setattr(accept_job, "PROBLEMS_AT_ONCE", 20)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: send(api, "a", *LARGE), range(8)))
    assert {answer.json()["job"] for answer in answers} == {answers[0].json()["job"]}
    listed = api.client.get("/v1/jobs").json()["jobs"]
    assert [(job["job"], job["problem_count"]) for job in listed] == [(answers[0].json()["job"], len(LARGE))]


def test_requests_at_once_make_one_job(api: Api) -> None:
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: send(api, "a"), range(64)))
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["job"] for answer in answers}) == 1 == api.rows()["jobs"]


def test_the_answer_is_the_job_as_it_stands(api: Api) -> None:
    job = send(api, "a").json()["job"]
    assert api.client.delete(f"/v1/jobs/{job}").status_code == 200
    again = send(api, "a")
    assert (again.status_code, again.json()["job"], again.json()["state"]) == (202, job, "cancelled")


def test_another_request_under_the_key_is_refused(api: Api) -> None:
    job = send(api, "a").json()["job"]
    for other in (send(api, "a", {**MATMUL, "m": 65}), send(api, "a", priority="high")):
        assert (other.status_code, other.json()["type"]) == (422, PREFIX + "idempotency-key-reused")
        assert job in other.json()["detail"] and other.json()["field"] == "Idempotency-Key"
    assert api.rows()["jobs"] == 1


def test_a_request_that_was_refused_may_be_mended_under_its_key(api: Api) -> None:
    assert send(api, "a", {**MATMUL, "m": 0}).status_code == 422
    assert send(api, "a").status_code == 202


@pytest.mark.parametrize("key", ["", "two words", "x" * 256, "über"])
def test_a_key_that_is_no_key_is_refused(key: str, shared_api: Api) -> None:
    headers = [(b"Idempotency-Key", key.encode())]
    body = {"target": "sm_80", "problems": [MATMUL]}
    answer = shared_api.client.post("/v1/jobs", json=body, headers=headers)
    assert (answer.status_code, answer.json()["field"]) == (422, "Idempotency-Key"), answer.text


def test_a_full_queue_still_answers_what_it_has(tmp_path: Path) -> None:
    with serving(tmp_path, max_queued_jobs=1) as api:
        job = send(api, "a").json()["job"]
        assert send(api, "b").status_code == 429
        assert send(api, "a").json()["job"] == job


def test_a_job_that_another_process_wrote_meanwhile_is_found(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with several API processes on one database: the look finds nothing, the row is there."""
    job = send(api, "a").json()["job"]
    looks, look = [], accept_job.sent_before

    def late(*arguments: Any) -> Any:
        looks.append(arguments)
        return {} if len(looks) <= 2 else look(*arguments)

    monkeypatch.setattr(accept_job, "sent_before", late)
    again = send(api, "a")
    assert (again.status_code, again.json().get("job"), len(looks)) == (202, job, 3)


def test_bodies_that_share_a_key_cost_no_other_request_its_job(api: Api) -> None:
    """Sent at once, they are written together."""
    requests = [(key, m) for m in (64, 65) for key in ("shared", "shared", None, None)] * 4
    with ThreadPoolExecutor(len(requests)) as threads:
        answers = list(threads.map(lambda request: send(api, request[0], {**MATMUL, "m": request[1]}), requests))
    without = [answer.status_code for answer, (key, _) in zip(answers, requests, strict=True) if key is None]
    shared = [answer for answer, (key, _) in zip(answers, requests, strict=True) if key is not None]
    assert without == [202] * 16
    assert sorted({answer.status_code for answer in shared}) == [202, 422]
    assert len({answer.json()["job"] for answer in shared if answer.status_code == 202}) == 1
    assert api.rows()["jobs"] == 17


def test_several_keys_are_refused(shared_api: Api) -> None:
    headers = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    answer = shared_api.client.post("/v1/jobs", json={"target": "sm_80", "problems": [MATMUL]}, headers=headers)
    assert (answer.status_code, answer.json()["field"]) == (422, "Idempotency-Key")


def test_a_retry_is_made_once(api: Api) -> None:
    job = send(api, None).json()["job"]
    api.client.delete(f"/v1/jobs/{job}")
    headers = {"Idempotency-Key": "again"}
    ids = [api.client.post(f"/v1/jobs/{job}/retry", headers=headers).json()["job"] for _ in "12"]
    assert ids[0] == ids[1] != job and api.rows()["jobs"] == 2


def test_jobs_have_names_and_labels_and_are_listed_by_them(api: Api) -> None:
    bert = send(api, None, name="BERT large", labels={"team": "nlp", "model/rev": "1 = 2"}).json()
    gpt = send(api, None, name="GPT", labels={"team": "nlp"}).json()
    send(api, None)
    assert (bert["name"], bert["labels"]) == ("BERT large", {"team": "nlp", "model/rev": "1 = 2"})
    listed = {
        query: [job["job"] for job in api.client.get(f"/v1/jobs?{query}").json()["jobs"]]
        for query in (
            "label=team=nlp",
            "label=team=nlp&label=model/rev=1 = 2",
            "label=team=nlp&label=team=x",
            "name=GPT",
            "name=gpt",
            "label=team=x",
        )
    }
    assert list(listed.values()) == [[gpt["job"], bert["job"]], [bert["job"]], [], [gpt["job"]], [], []]
    summary = api.client.get("/v1/jobs?name=GPT").json()["jobs"][0]
    assert (summary["name"], summary["labels"]) == ("GPT", {"team": "nlp"})
    api.client.delete(f"/v1/jobs/{bert['job']}")
    again = api.client.post(f"/v1/jobs/{bert['job']}/retry").json()
    assert (again["name"], again["labels"]) == (bert["name"], bert["labels"])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": 7}, "name"),
        ({"labels": {"team": 7}}, "labels.team"),
        ({"labels": {"two words": "x"}}, "labels"),
        ({"labels": {str(n): "x" for n in range(17)}}, "labels"),
        ({"labels": []}, "labels"),
    ],
)
def test_wrong_names_and_labels_are_refused(fields: dict[str, Any], field: str, shared_api: Api) -> None:
    answer = send(shared_api, None, **fields)
    assert answer.status_code == 422 and answer.json()["field"].startswith(field), answer.text


@pytest.mark.parametrize("query", ["label=team", "label==x", "label=", "label=two words=x", "label=a=%00", "name=%00"])
def test_a_wrong_label_filter_is_refused(query: str, shared_api: Api) -> None:
    answer = shared_api.client.get(f"/v1/jobs?{query}")
    assert (answer.status_code, answer.json()["type"]) == (422, PREFIX + "invalid-value")
