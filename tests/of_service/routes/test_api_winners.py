"""Winner records over HTTP: looked up in numbers, read with their revision, never older than they may be."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import pytest
from sqlalchemy import delete, select

from cukiln.types import Lookups, WinnerRecord
from service.winner_cache import FRESH_SECONDS, OVERHEAD_BYTES, WinnerCache
from storage.database.session import Database, Session
from storage.database.tables import BuildRow, CandidateRow, JobProblemRow, WinnerRow
from storage.entities.record_parts import withdraw_code
from storage.entities.verdicts import NewVerdict, write_verdicts, wrong_codes
from storage.entities.winners import Stamp, stored_winners
from storage.transitions import accept
from tests.support.fixtures.api import MATMUL, Api, publish
from tests.support.fixtures.storage import EveryOperator

OTHER = {**MATMUL, "m": 65}


def record_in(cache: WinnerCache, key: str) -> WinnerRecord:
    return WinnerRecord.model_validate_json(cache.get([key])[key].json)


def test_a_lookup_answers_hits_and_misses_in_order(api: Api) -> None:
    record = publish(api.database)
    answer = api.client.post("/v1/lookups", json={"problems": [OTHER, {**MATMUL, "name": 'a "name"'}, OTHER]})
    lookups = Lookups.model_validate_json(answer.content)
    assert (lookups.hits, lookups.misses) == (1, 2)
    assert [result.name for result in lookups.results] == ["problem0", 'a "name"', "problem2"]
    assert [result.record for result in lookups.results] == [None, record, None]
    assert lookups.results[1].key == record.key
    assert lookups.results[0].key == lookups.results[2].key != record.key


def test_a_jobs_body_is_a_lookups_body(api: Api) -> None:
    publish(api.database, target="sm_90a")
    body = {
        "problems": [MATMUL],
        "target": "sm_90a",
        "search": {"level": 2},
        "priority": "low",
        "budget": {"seconds": 1},
    }
    assert api.client.post("/v1/lookups", json=body).json()["hits"] == 1
    assert api.rows()["jobs"] == 0


def test_a_lookup_may_name_any_device_class(api: Api) -> None:
    publish(api.database)
    body = {"problems": [MATMUL, {**MATMUL, "device_class": "NVIDIA H200"}]}
    answer = api.client.post("/v1/lookups", json=body).json()
    assert [result["record"] is None for result in answer["results"]] == [False, True]


@pytest.mark.parametrize(
    ("policy", "candidates"),
    [
        ({}, ["0", "1", "2"]),
        ({"workspace_limit_bytes": 100}, ["1", "2"]),
        ({"workspace_limit_bytes": 0}, ["2"]),
        ({"deterministic": True}, ["0"]),
        ({"workspace_limit_bytes": 0, "deterministic": True}, None),
    ],
)
def test_a_policy_picks_from_the_front(api: Api, policy: dict[str, object], candidates: list[str] | None) -> None:
    publish(api.database, workspace=(4096, 64, 0))
    result = api.client.post("/v1/lookups", json={"problems": [MATMUL], **policy}).json()["results"][0]
    front = result["record"] and [entry["candidate"].lstrip("0") or "0" for entry in result["record"]["front"]]
    assert front == candidates


def test_ten_thousand_problems_are_one_lookup(api: Api) -> None:
    publish(api.database, {**MATMUL, "m": 9_999})
    problems = [{**MATMUL, "m": m} for m in range(1, 10_001)]
    answer = api.client.post("/v1/lookups", json={"problems": problems}).json()
    assert (answer["hits"], answer["misses"], len(answer["results"])) == (1, 9_999, 10_000)
    assert answer["results"][9_998]["record"] is not None


def test_a_new_revision_is_answered_by_every_process(api: Api) -> None:
    now = 100.0
    cache = WinnerCache(api.database, clock=lambda: now)
    first = publish(api.database)
    assert record_in(cache, first.key) == first
    second = publish(api.database, predicted_us=1.0)
    assert second.revision == first.revision + 1
    now += FRESH_SECONDS / 2
    assert record_in(cache, first.key) == first
    now += FRESH_SECONDS
    assert record_in(cache, first.key) == second


def test_an_unchanged_record_is_not_read_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    cache = WinnerCache(api.database, clock=lambda: now)
    record = publish(api.database)
    cache.get([record.key])
    read: list[str] = []

    def reading(session: Session, keys: Iterable[str]) -> dict[str, tuple[Stamp, bytes]]:
        read.extend(wanted := list(keys))
        return stored_winners(session, wanted)

    monkeypatch.setattr("service.winner_cache.stored_winners", reading)
    now += 10 * FRESH_SECONDS
    assert record_in(cache, record.key) == record
    assert read == []


def test_a_miss_is_never_remembered(api: Api) -> None:
    cache = WinnerCache(api.database, clock=lambda: 100.0)
    key = api.client.post("/v1/lookups", json={"problems": [MATMUL]}).json()["results"][0]["key"]
    assert cache.get([key]) == {}
    publish(api.database)
    assert key in cache.get([key])


def test_a_record_that_is_gone_is_a_miss(api: Api) -> None:
    now = 100.0
    cache = WinnerCache(api.database, clock=lambda: now)
    key = publish(api.database).key
    assert key in cache.get([key])
    with api.database.write() as session:
        session.execute(delete(WinnerRow))
    now += 2 * FRESH_SECONDS
    assert cache.get([key]) == {}


def test_a_full_cache_forgets_the_oldest_and_still_answers(api: Api) -> None:
    records = [publish(api.database, {**MATMUL, "m": m}) for m in (1, 2, 3)]
    keys = [record.key for record in records]
    size = max(len(record.model_dump_json()) for record in records) + OVERHEAD_BYTES + 100
    cache = WinnerCache(api.database, clock=lambda: 100.0, capacity_bytes=2 * size)
    assert set(cache.get(keys)) == set(keys)
    assert [cache.fresh(key) is not None for key in keys] == [False, True, True]
    assert size < cache.entries.currsize <= 2 * size
    assert set(cache.get(keys)) == set(keys)


def test_a_record_larger_than_the_whole_cache_is_answered_and_not_stored(api: Api) -> None:
    key = publish(api.database).key
    cache = WinnerCache(api.database, clock=lambda: 100.0, capacity_bytes=OVERHEAD_BYTES)
    assert key in cache.get([key])
    assert (cache.fresh(key), cache.entries.currsize) == (None, 0)


def test_records_that_are_gone_take_no_room(api: Api) -> None:
    now = 100.0
    cache = WinnerCache(api.database, clock=lambda: now)
    keys = [publish(api.database, {**MATMUL, "m": m}).key for m in (1, 2)]
    cache.get(keys)
    with api.database.write() as session:
        session.execute(delete(WinnerRow))
    now += 2 * FRESH_SECONDS
    assert (cache.get(keys), cache.entries.currsize) == ({}, 0)


def test_a_record_is_sent_once_per_revision(api: Api) -> None:
    first = publish(api.database)
    path = f"/v1/kernels/{first.key}"
    answer = api.client.get(path)
    assert WinnerRecord.model_validate_json(answer.content) == first
    again = api.client.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == answer.headers["etag"]
    second = publish(api.database, predicted_us=1.0)
    time.sleep(2 * FRESH_SECONDS)
    newer = api.client.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert (newer.status_code, newer.json()["revision"]) == (200, second.revision)


def test_the_same_revision_of_another_data_folder_is_sent(api: Api) -> None:
    first = publish(api.database)
    path = f"/v1/kernels/{first.key}"
    etag = api.client.get(path).headers["etag"]
    with api.database.write() as session:
        session.execute(delete(WinnerRow))
    second = publish(api.database, predicted_us=1.0)
    assert second.revision == first.revision
    time.sleep(2 * FRESH_SECONDS)
    answer = api.client.get(path, headers={"If-None-Match": etag})
    assert answer.status_code == 200
    assert WinnerRecord.model_validate_json(answer.content) == second


def found_wrong(database: Database, record: WinnerRecord, index: int) -> None:
    """A GPU finds the code of one of the record's kernels wrong, which a job had among its candidates."""
    entry = record.front[index]
    with database.write() as session:
        problem = accept.NewProblem(
            "p", record.operator, record.problem, record.target, record.device_class, record.key, {}, True,
            record.front[0].candidate,
        )  # fmt: skip
        job = accept.create_jobs(session, [accept.NewJob([problem])])[0].id
        problem_id = session.scalars(select(JobProblemRow.id).where(JobProblemRow.job_id == job)).one()
        session.add(
            BuildRow(
                id=entry.candidate, kernel=entry.kernel, slice="s", toolchain=entry.toolchain, target=record.target,
                state="ok", code_digest=entry.code_digest, created_at=0.0,
            )
        )  # fmt: skip
        session.add(
            CandidateRow(
                job_problem_id=problem_id, candidate=entry.candidate, schedule={}, kernel=entry.kernel,
                build=entry.candidate,
            )
        )  # fmt: skip
    with database.write() as session:
        finding = NewVerdict(entry.code_digest, "matmul", "incorrect", "3 of 9 elements are wrong", {}, 0.0, 0.0)
        write_verdicts(session, [finding], "gpu", EveryOperator("g1"))
        withdraw_code(session, wrong_codes(session, {entry.code_digest}))


@pytest.mark.parametrize("left", [1, 0])
def test_code_that_a_gpu_found_wrong_is_answered_no_more(left: int, api: Api) -> None:
    published = publish(api.database, workspace=(64, 0)[: left + 1])
    other = publish(api.database, {**MATMUL, "m": 65})
    assert api.submit().status_code == 200
    found_wrong(api.database, published, 0)
    time.sleep(2 * FRESH_SECONDS)
    (result,) = api.client.post("/v1/lookups", json={"problems": [MATMUL]}).json()["results"]
    if left:
        record = WinnerRecord.model_validate(result["record"])
        assert record.front == published.front[1:]
        assert (record.revision, record.searches, record.runner_up) == (published.revision + 1, [], None)
    else:
        assert result["record"] is None
        assert api.client.get(f"/v1/kernels/{published.key}").status_code == 404
    assert api.submit().status_code == 202
    assert api.client.get(f"/v1/kernels/{other.key}").json() == json.loads(other.model_dump_json())


def test_a_record_after_a_withdrawn_one_is_taken_for_a_new_one(api: Api) -> None:
    """By a process, too, that has not looked in between: revisions do not begin anew."""
    now = 100.0
    cache = WinnerCache(api.database, clock=lambda: now)
    first = publish(api.database)
    cache.get([first.key])
    found_wrong(api.database, first, 0)
    second = publish(api.database, predicted_us=1.0, code_digest="9" * 64)
    assert second.revision == 3
    now += 2 * FRESH_SECONDS
    assert record_in(cache, first.key) == second


def test_a_record_has_the_parameters_and_the_methods_of_a_call(api: Api) -> None:
    path = f"/v1/kernels/{publish(api.database).key}"
    refused = api.client.get(path, params={"revison": 1})
    assert (refused.status_code, refused.json()["field"]) == (422, "revison")
    refused = api.client.post(path)
    assert (refused.status_code, refused.headers["allow"]) == (405, "DELETE, GET, HEAD")
    head = api.client.head(path)
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", api.client.get(path).headers["etag"])


def test_a_record_is_found_by_the_first_digits_of_its_key(api: Api) -> None:
    record = publish(api.database)
    answer = api.client.get(f"/v1/kernels/{record.key[:8]}")
    assert (answer.status_code, answer.json()["key"]) == (200, record.key)
    assert answer.headers["ETag"] == api.client.get(f"/v1/kernels/{record.key}").headers["ETag"]
    for wrong in (record.key[:7], "0" * 8, "z" * 64):
        assert api.client.get(f"/v1/kernels/{wrong}").status_code == 404
