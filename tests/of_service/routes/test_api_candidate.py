"""GET /v1/candidates/{id}: one candidate by its id or its first digits, as it is known best or as one job has it."""

from __future__ import annotations

from typing import Any

import pytest

from cukiln.types import CandidateFacts
from tests.support.fixtures.api import Api, publish
from tests.support.fixtures.candidate import MEASUREMENT, facts
from tests.support.service.stored_candidate import store_candidate


def asked(api: Api, candidate: str, **parameters: str) -> dict[str, Any]:
    answer = api.client.get(f"/v1/candidates/{candidate}", params=parameters)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("digits", [8, 20, 64])
def test_a_candidate_is_found_by_its_id_and_by_its_first_digits(api: Api, digits: int) -> None:
    job = store_candidate(api.database, facts())

    assert CandidateFacts(**asked(api, facts().candidate[:digits])) == facts(job=job)


def test_what_was_measured_is_answered_before_what_was_only_verified(api: Api) -> None:
    measured = {"device_class": "NVIDIA H200", "measured_us": 5.0, "measurement": MEASUREMENT}
    on_gpu = store_candidate(api.database, facts(**measured))
    predicted = store_candidate(api.database, facts())

    assert (asked(api, facts().candidate)["job"], asked(api, facts().candidate)["measured_us"]) == (on_gpu, 5.0)
    assert asked(api, facts().candidate, job=predicted)["device_class"] == "predicted:sm_80"


def test_what_is_not_known_yet_is_null(api: Api) -> None:
    store_candidate(api.database, facts(verdict=None, details=None, code_digest=None, predicted_us=None))
    found = asked(api, facts().candidate)

    assert [found[name] for name in ("verdict", "details", "code_digest", "predicted_us", "cubin_sha256")] == [None] * 5


def test_a_published_winner_names_its_files(api: Api) -> None:
    record = publish(api.database, {"operator": "matmul", "m": 64, "n": 64, "k": 64})
    entry = record.front[0]
    store_candidate(api.database, facts(candidate=entry.candidate, code_digest=entry.code_digest), key=record.key)
    found = asked(api, entry.candidate)

    assert (found["cubin_sha256"], found["source_sha256"]) == (entry.cubin_sha256, entry.source_sha256)


def test_a_winner_of_other_code_names_no_files(api: Api) -> None:
    record = publish(api.database, {"operator": "matmul", "m": 64, "n": 64, "k": 64})
    store_candidate(api.database, facts(candidate=record.front[0].candidate, code_digest="d" * 64), key=record.key)

    assert asked(api, record.front[0].candidate)["cubin_sha256"] is None


def test_digits_that_several_begin_with_are_refused_with_their_names(api: Api) -> None:
    names = ["ab" * 32, "ab" * 31 + "ff"]
    for name in names:
        store_candidate(api.database, facts(candidate=name))
    answer = api.client.get("/v1/candidates/abababab")

    assert (answer.status_code, answer.headers["content-type"]) == (409, "application/problem+json")
    assert answer.json()["type"] == "urn:cukiln:problem:ambiguous-prefix"
    assert answer.json()["allowed"] == names
    assert asked(api, names[1])["candidate"] == names[1]


@pytest.mark.parametrize(
    "wrong", ["abababa", "ABABABAB", "ab" * 33, "zzzzzzzz", "abababab", "%25%25%25%25%25%25%25%25"]
)
def test_what_is_no_candidate_is_a_clean_404(api: Api, wrong: str) -> None:
    store_candidate(api.database, facts())
    answer = api.client.get(f"/v1/candidates/{wrong}")

    assert answer.status_code == 404
    assert answer.json()["type"] == "urn:cukiln:problem:candidate-not-found"
    assert answer.json()["field"] == "candidate"


def test_a_job_that_does_not_have_it_is_a_404_and_one_that_is_none_a_422(api: Api) -> None:
    store_candidate(api.database, facts())
    path = f"/v1/candidates/{facts().candidate}"

    assert api.client.get(path, params={"job": "0" * 32}).status_code == 404
    assert api.client.get(path, params={"job": "x"}).status_code == 422
    assert api.client.get(path, params={"jop": "0" * 32}).status_code == 422
