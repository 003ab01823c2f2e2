"""Lookups of frameworks: fields of records, gzip, jobs of what is missing."""

from __future__ import annotations

import gzip
import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from cukiln.types import FrontEntry, WinnerRecord
from service import context
from service.routes import accept_job, winners
from storage.database.session import Session
from storage.database.tables import JobProblemRow, JobRow
from storage.entities.jobs import tried_keys
from storage.entities.keys import create_key
from tests.support.fixtures.api import MATMUL, Api, publish, serving

PREFIX = "urn:cukiln:problem:"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with serving(tmp_path_factory.mktemp("api")) as api:
        yield api, publish(api.database)


def looked_up(api: Api, **fields: Any) -> Any:
    body = {"target": "sm_80", "problems": [MATMUL, {**MATMUL, "m": 65}], **fields}
    return api.client.post("/v1/lookups", json=body)


def test_a_lookup_answers_the_fields_that_are_named(published: tuple[Api, WinnerRecord]) -> None:
    api, record = published
    whole = json.loads(record.model_dump_json())
    named = ["revision", "front.so_sha256", "front.launch"]
    hit, miss = looked_up(api, fields=named).json()["results"]
    kernels = [{name: kernel[name] for name in ("so_sha256", "launch")} for kernel in whole["front"]]
    assert hit["record"] == {"revision": whole["revision"], "front": kernels}
    assert hit["key"] == record.key and miss["record"] is None


def test_every_field_may_be_named_and_all_of_them_are_the_record(published: tuple[Api, WinnerRecord]) -> None:
    api, record = published
    whole = json.loads(record.model_dump_json())
    assert looked_up(api, fields=list(WinnerRecord.model_fields)).json()["results"][0]["record"] == whole
    of_kernels = [f"front.{name}" for name in FrontEntry.model_fields]
    assert looked_up(api, fields=of_kernels).json()["results"][0]["record"] == {"front": whole["front"]}
    both = looked_up(api, fields=["front", "front.kernel"]).json()["results"][0]["record"]
    assert both == {"front": whole["front"]}


@pytest.mark.parametrize("fields", [[], ["fronts"], ["front."], ["front.front"], [7], "front", {"front": 1}])
def test_what_is_no_field_is_refused_with_those_that_are(fields: Any, published: tuple[Api, WinnerRecord]) -> None:
    answer = looked_up(published[0], fields=fields)
    assert answer.status_code == 422 and answer.json()["field"].startswith("fields"), answer.text
    if fields == ["fronts"]:
        assert {"revision", "front", "front.so_sha256"} <= set(answer.json()["allowed"])


def sent(api: Api, path: str, **headers: str) -> httpx.Response:
    """The answer as it is on the wire."""
    with httpx.Client(base_url=api.url, headers=headers, trust_env=False) as client:
        if "accept-encoding" not in headers:
            del client.headers["accept-encoding"]
        with client.stream("GET", path) as answer:
            answer._content = b"".join(answer.iter_raw())
            return answer


@pytest.mark.parametrize("accepted", ["gzip", "br, GZIP;q=0.5", "x-gzip"])
def test_a_large_answer_is_gzip_where_that_is_accepted(accepted: str, published: tuple[Api, WinnerRecord]) -> None:
    api, _ = published
    plain, small = sent(api, "/v1/operators"), sent(api, "/v1/operators", **{"accept-encoding": accepted})
    assert small.headers["content-encoding"] == "gzip" and "content-length" not in small.headers
    assert gzip.decompress(small.content) == plain.content and len(small.content) < len(plain.content) / 4
    assert plain.headers["vary"] == small.headers["vary"] == "Accept-Encoding"
    assert int(plain.headers["content-length"]) == len(plain.content)


@pytest.mark.parametrize("accepted", ["", "identity", "br", "gzip;q=0", "gzip; q=0.000", "*"])
def test_it_is_plain_where_that_is_not(accepted: str, published: tuple[Api, WinnerRecord]) -> None:
    answer = sent(published[0], "/v1/operators", **{"accept-encoding": accepted})
    assert "content-encoding" not in answer.headers and answer.content.startswith(b"{")


def test_small_answers_and_those_with_a_tag_are_sent_as_they_are(published: tuple[Api, WinnerRecord]) -> None:
    api, record = published
    for path in ("/healthz", f"/v1/kernels/{record.key}"):
        assert "content-encoding" not in sent(api, path, **{"accept-encoding": "gzip"}).headers
    assert "etag" in sent(api, f"/v1/kernels/{record.key}").headers


def test_a_lookup_of_many_is_gzip_in_parts(published: tuple[Api, WinnerRecord]) -> None:
    api, record = published
    body = {"target": "sm_80", "problems": [{**MATMUL, "name": f"p{n}"} for n in range(500)]}
    with httpx.Client(base_url=api.url, trust_env=False) as client:
        answer = client.post("/v1/lookups", json=body)
        head = client.head("/v1/operators")
    assert answer.headers["content-encoding"] == "gzip"
    assert (
        answer.json()["hits"] == 500 and WinnerRecord.model_validate(answer.json()["results"][499]["record"]) == record
    )
    assert "content-encoding" not in head.headers and int(head.headers["content-length"]) > 4096


def missing(api: Api, *problems: dict[str, Any], **fields: Any) -> Any:
    answer = api.client.post("/v1/lookups", json={"target": "sm_80", "problems": problems, "on_miss": "tune", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def problems_of(api: Api, job: str) -> list[tuple[str, int]]:
    return [
        (problem["name"], problem["problem"]["m"]) for problem in api.client.get(f"/v1/jobs/{job}").json()["problems"]
    ]


def test_misses_become_one_job_and_what_is_tried_is_not_sent_again(api: Api) -> None:
    publish(api.database)
    wide, wider = {**MATMUL, "m": 65, "name": "wide"}, {**MATMUL, "m": 66}
    first = missing(api, MATMUL, wide, wide, {**wider, "name": "wide"}, search={"level": 0}, priority="high")
    assert (first["hits"], first["misses"]) == (1, 3)
    hit, *others = first["results"]
    job = others[0]["tuning"]["job"]
    assert "tuning" not in hit and [other["tuning"] for other in others] == [{"job": job, "state": "queued"}] * 3
    assert problems_of(api, job) == [("wide", 65), ("wide (2)", 66)]
    assert api.client.get(f"/v1/jobs/{job}").json()["priority"] == "high"
    again = missing(api, MATMUL, wide, wider)
    assert [result.get("tuning") for result in again["results"]] == [None, *[{"job": job, "state": "queued"}] * 2]
    assert api.rows()["jobs"] == 1
    further = missing(api, wide, {**MATMUL, "m": 67})["results"]
    assert further[0]["tuning"]["job"] == job != further[1]["tuning"]["job"]
    assert problems_of(api, further[1]["tuning"]["job"]) == [("problem1", 67)]
    assert "tuning" not in looked_up(api).json()["results"][0] and api.rows()["jobs"] == 2


def test_equal_lookups_at_once_make_one_job(api: Api) -> None:
    problems = [{**MATMUL, "m": m} for m in range(70, 90)]
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda _: missing(api, *problems), range(16)))
    jobs = {result["tuning"]["job"] for answer in answers for result in answer["results"]}
    assert len(jobs) == 1 == api.rows()["jobs"]


@pytest.mark.parametrize("at_once", [1000, 1], ids=["one transaction", "several"])
def test_what_another_process_queues_between_the_look_and_the_job_is_not_queued_again(
    at_once: int, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process has its own lock: it comes first right after this one has looked."""
    monkeypatch.setattr(accept_job, "PROBLEMS_AT_ONCE", at_once)
    first = {**MATMUL, "m": 65}
    other: list[str] = []

    def looks(session: Session, *arguments: Any) -> Any:
        seen = tried_keys(session, *arguments)
        if not other:
            other.append(api.submit(first, target="sm_80").json()["job"])
        return seen

    monkeypatch.setattr(winners, "tried_keys", looks)
    answer = missing(api, first, {**MATMUL, "m": 66}, {**MATMUL, "m": 67})
    jobs = [result["tuning"]["job"] for result in answer["results"]]
    assert jobs[0] == other[0] and jobs[1] == jobs[2] != other[0]
    assert [m for _, m in problems_of(api, jobs[1])] == [66, 67]
    assert [job["job"] for job in api.client.get("/v1/jobs").json()["jobs"]] == [jobs[1], other[0]]


def test_a_process_that_is_always_slower_says_so(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winners, "tried_keys", lambda *_: {})
    api.submit(MATMUL, target="sm_80")
    answer = missing(api, MATMUL)
    assert "look up again" in answer["not_queued"] and answer["results"][0]["record"] is None
    assert len(api.client.get("/v1/jobs").json()["jobs"]) == 1


def test_names_that_a_job_refuses_are_made_unique(api: Api) -> None:
    named = [{**MATMUL, "m": m, "name": name} for m, name in ((70, "x"), (71, "x"), (72, "problem1"), (73, "x (2)"))]
    job = missing(api, *named)["results"][0]["tuning"]["job"]
    assert [name for name, _ in problems_of(api, job)] == ["x", "x (2)", "problem1", "x (2) (2)"]


def test_a_cancelled_problem_is_sent_again_and_a_failed_one_by_another_search_or_after_a_day(api: Api) -> None:
    job = missing(api, MATMUL)["results"][0]["tuning"]["job"]
    api.client.delete(f"/v1/jobs/{job}")
    second = missing(api, MATMUL)["results"][0]["tuning"]["job"]
    assert second != job
    with api.database.write() as session:
        session.execute(update(JobProblemRow).where(JobProblemRow.job_id == second).values(state="failed"))
        session.execute(update(JobRow).where(JobRow.id == second).values(state="failed"))
    assert missing(api, MATMUL)["results"][0]["tuning"] == {"job": second, "state": "failed"}
    third = missing(api, MATMUL, search={"level": 0})["results"][0]["tuning"]
    assert third["job"] not in (job, second)
    api.client.delete(f"/v1/jobs/{third['job']}")
    with api.database.write() as session:
        session.execute(update(JobRow).values(created_at=JobRow.created_at - 86_401))
    assert missing(api, MATMUL)["results"][0]["tuning"]["state"] == "queued"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"search": {"tunables": {"nothing": [1]}}}, "nothing"),
        ({"search": {"schedules": [{"tile_m": 7}]}}, "tile_m"),
    ],
)
def test_what_no_job_can_be_made_of_leaves_the_hits(fields: dict[str, Any], message: str, api: Api) -> None:
    publish(api.database)
    answer = missing(api, MATMUL, {**MATMUL, "m": 66}, **fields)
    assert answer["hits"] == 1 and message in answer["not_queued"] and api.rows()["jobs"] == 0


def test_what_is_for_another_gpu_is_not_queued(api: Api) -> None:
    answer = missing(api, {**MATMUL, "device_class": "NVIDIA H100"}, {**MATMUL, "m": 66})
    assert ["tuning" in result for result in answer["results"]] == [False, True]


def test_a_full_queue_answers_hits_and_says_why_nothing_was_queued(tmp_path: Path) -> None:
    with serving(tmp_path, max_queued_jobs=1) as api:
        publish(api.database)
        missing(api, {**MATMUL, "m": 65})
        answer = missing(api, MATMUL, {**MATMUL, "m": 66})
    assert answer["hits"] == 1 and answer["not_queued"].startswith("Waiting or running: 1 job, of at most 1.")


def test_a_locked_database_leaves_the_hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "BUSY_SECONDS", 0.1)
    with serving(tmp_path) as api:
        publish(api.database)
        lock = sqlite3.connect(str(api.database.url.database), isolation_level=None)
        lock.execute("BEGIN IMMEDIATE")
        answer = missing(api, MATMUL, {**MATMUL, "m": 66})
        lock.execute("ROLLBACK")
        lock.close()
    assert answer["hits"] == 1 and answer["not_queued"].startswith("The database does not answer.")


def test_a_key_that_may_only_read_queues_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        with api.database.write() as session:
            key = create_key(session, "reader", ["read"])
        body = {"target": "sm_80", "problems": [MATMUL]}
        headers = {"Authorization": f"Bearer {key}"}
        assert api.client.post("/v1/lookups", json=body, headers=headers).status_code == 200
        answer = api.client.post("/v1/lookups", json={**body, "on_miss": "tune"}, headers=headers)
        assert (answer.status_code, answer.json()["type"]) == (403, PREFIX + "forbidden")
        assert "on_miss: tune needs submit" in answer.json()["detail"] and api.rows()["jobs"] == 0
