"""What the client sends, repeats, remembers and refuses."""

from __future__ import annotations

import gc
import hashlib
import pickle
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cukiln import (
    BadRequest,
    DigestMismatch,
    NotAuthorised,
    NotFound,
    ServiceBusy,
    ServiceError,
    ServiceFailed,
    ServiceUnreachable,
    UnexpectedAnswer,
    UsageError,
    shared_client,
)
from cukiln.client import Client
from cukiln.http.retries import delay
from cukiln.lock import Lock
from cukiln.operations import record_memory
from cukiln.operations.lookups import LARGEST_LOOKUP
from cukiln.settings import DEFAULT_URL, ClientSettings
from tests.support.fixtures.client import ScriptedService, closed_port, job_json, problem_json, record_json

BY_ID: dict[str, Callable[[Client, str], object]] = {
    "job": lambda client, id: client.job(id),
    "retry": lambda client, id: client.retry(id),
    "cancel": lambda client, id: client.cancel(id),
    "wait": lambda client, id: client.wait(id),
    "events": lambda client, id: next(client.events(id)),
    "candidates": lambda client, id: list(client.candidates(id)),
    "trace": lambda client, id: client.trace(id),
    "bundle": lambda client, id: client.bundle(id),
    "candidate": lambda client, id: client.candidate(id),
    "candidate of a job": lambda client, id: client.candidate("0" * 8, job=id),
    "kernel": lambda client, id: client.kernel(id),
    "blob": lambda client, id: client.blob(id),
    "forget": lambda client, id: client.forget(id),
    "withdraw_import": lambda client, id: client.withdraw_import(id),
}
MATMUL = {"operator": "matmul", "m": 4, "n": 4, "k": 4}
Clients = Callable[..., Client]


def busy(status: int, retry_after: str | None = None) -> Response:
    headers = {"Retry-After": retry_after} if retry_after else None
    return problem_json(status, "too-many-jobs", "Too many jobs are waiting", headers=headers)


@pytest.mark.parametrize("status", [429, 503, 507])
def test_a_busy_answer_is_repeated_after_the_time_it_names(
    status: int, scripted: ScriptedService, client_of: Clients, waits: list[float]
) -> None:
    scripted.on("GET", "/v1/jobs/job1", busy(status, "3"), job_json())
    assert client_of(scripted.url).job("job1").job == "job1"
    assert waits == [3.0]


def test_a_submission_is_repeated_when_it_was_refused_with_a_time(
    scripted: ScriptedService, client_of: Clients, waits: list[float]
) -> None:
    scripted.on("POST", "/v1/jobs", busy(503, "2"), job_json("queued"))
    assert client_of(scripted.url).submit({"problems": [MATMUL]}).state == "queued"
    assert waits == [2.0]


def test_a_submission_is_repeated_under_one_key_and_the_next_has_another(
    scripted: ScriptedService, client_of: Clients, waits: list[float]
) -> None:
    scripted.on("POST", "/v1/jobs", busy(503), job_json("queued"))
    client = client_of(scripted.url)
    for _ in "12":
        client.submit({"problems": [MATMUL]})
    keys = [seen.headers["idempotency-key"] for seen in scripted.calls("POST", "/v1/jobs")]
    assert len(keys) == 3 and keys[0] == keys[1] != keys[2] and len(waits) == 1


def test_what_may_not_happen_twice_is_not_repeated(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("DELETE", "/v1/kernels/k1", busy(503), job_json("queued"))
    with pytest.raises(ServiceBusy):
        client_of(scripted.url).forget("k1")
    assert len(scripted.calls("DELETE", "/v1/kernels/k1")) == 1


def test_a_wait_longer_than_the_patience_is_left_to_the_caller(
    scripted: ScriptedService, client_of: Clients, waits: list[float]
) -> None:
    scripted.on("GET", "/v1/jobs/job1", busy(429, "3600"))
    with pytest.raises(ServiceBusy) as caught:
        client_of(scripted.url).job("job1")
    assert caught.value.retry_after == 3600
    assert waits == []


def test_a_retry_after_date_is_understood(scripted: ScriptedService, client_of: Clients, waits: list[float]) -> None:
    scripted.on("GET", "/v1/jobs/job1", busy(503, "Wed, 21 Oct 2015 07:28:00 GMT"), job_json())
    client_of(scripted.url).job("job1")
    assert waits == [0.0]


def test_attempts_are_bounded_and_their_waits_grow(
    scripted: ScriptedService, client_of: Clients, waits: list[float]
) -> None:
    scripted.on("GET", "/v1/jobs/job1", busy(503))
    with pytest.raises(ServiceBusy):
        client_of(scripted.url, attempts=4).job("job1")
    assert len(scripted.seen) == 4
    assert len(waits) == 3
    assert all(0.05 * 2**i <= wait <= 0.1 * 2**i for i, wait in enumerate(waits))
    assert delay(50) <= 5.0


def test_a_refused_connection_is_repeated_then_reported(client_of: Clients, waits: list[float]) -> None:
    url = closed_port()
    with pytest.raises(ServiceUnreachable, match=r"no answer from the cukiln service at .*cukiln serve") as caught:
        client_of(url, attempts=3).submit({"problems": [MATMUL]})
    assert len(waits) == 2
    assert caught.value.url == f"{url}/v1/jobs"


@pytest.mark.parametrize(("call", "attempts"), [("job", 3), ("submit", 3), ("forget", 1)])
def test_a_connection_that_breaks_after_sending_is_repeated_only_where_that_is_safe(
    call: str, attempts: int, client_of: Clients
) -> None:
    connections = 0
    listener = socket.create_server(("127.0.0.1", 0))

    def hang_up() -> None:
        nonlocal connections
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections += 1
            connection.recv(65536)
            connection.close()

    thread = threading.Thread(target=hang_up, daemon=True)
    thread.start()
    client = client_of(f"http://127.0.0.1:{listener.getsockname()[1]}", attempts=3)
    with pytest.raises(ServiceUnreachable):
        {
            "job": partial(client.job, "job1"),
            "submit": partial(client.submit, {"problems": [MATMUL]}),
            "forget": partial(client.forget, "k1"),
        }[call]()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)
    assert connections == attempts


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, BadRequest),
        (413, BadRequest),
        (422, BadRequest),
        (401, NotAuthorised),
        (404, NotFound),
        (500, ServiceFailed),
    ],
)
def test_a_problem_becomes_a_typed_error_with_its_detail(
    status: int, error: type[ServiceError], scripted: ScriptedService, client_of: Clients
) -> None:
    answer = problem_json(status, "invalid-value", "m must be at least 1", field="problems[0].m", allowed=">= 1")
    scripted.on("POST", "/v1/jobs", answer)
    with pytest.raises(error, match=r"problems\[0\]\.m: m must be at least 1 \(allowed: >= 1\)") as caught:
        client_of(scripted.url).submit({"problems": [MATMUL]})
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is error
    assert str(copy) == str(caught.value)
    assert copy.detail.field == "problems[0].m"
    assert copy.status == status


@pytest.mark.parametrize(
    "answer",
    [
        Response("<html>nginx</html>", 502, media_type="text/html"),
        Response("<html>hello</html>", 200, media_type="text/html"),
        Response('{"job": 1}', 200, media_type="application/json"),
        Response('{"title": "no"}', 404, media_type="application/problem+json"),
    ],
    ids=["error page", "other site", "other shape", "other problem"],
)
def test_an_answer_that_is_not_cukilns_says_so(answer: Response, scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("GET", "/v1/jobs/job1", answer)
    with pytest.raises(UnexpectedAnswer, match="check"):
        client_of(scripted.url).job("job1")


@pytest.mark.parametrize("url", ["nonsense", "ftp://host", "http://", "http://host:port"])
def test_an_address_that_is_not_http_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="http://host:port"):
        Client(url)


def test_the_api_key_is_sent_as_a_bearer_token(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("GET", "/v1/jobs/job1", job_json())
    client_of(scripted.url, api_key="secret").job("job1")
    assert scripted.seen[0].headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize("url", ["nonsense", "ftp://host", "http://", "http://[::1"])
def test_a_nonsense_address_is_refused_with_the_variable_that_gives_it(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("CUKILN_URL", url)
    with pytest.raises(UsageError, match="CUKILN_URL"):
        Client()


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("CUKILN_API_KEY", key)
    with pytest.raises(UsageError, match="CUKILN_API_KEY") as caught:
        Client()
    assert key not in str(caught.value)


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    variables = {"CUKILN_URL": "http://host:1", "CUKILN_API_KEY": "secret", "XDG_CACHE_HOME": str(tmp_path)}
    settings = ClientSettings.from_environment(variables)
    assert (settings.url, settings.api_key, settings.cache_dir) == ("http://host:1", "secret", tmp_path / "cukiln")
    assert "secret" not in repr(settings)
    empty = ClientSettings.from_environment({"CUKILN_URL": "", "XDG_CACHE_HOME": "relative"})
    assert (empty.url, empty.cache_dir) == (DEFAULT_URL, Path.home() / ".cache/cukiln")


def test_tune_sends_what_was_asked_for_and_nothing_else(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("POST", "/v1/jobs", job_json("queued"))
    client = client_of(scripted.url)
    client.tune([MATMUL], target="sm_80", search={"level": 2}, budget=9.5, workspace_limit_bytes=0, wait=False)
    client.tune([MATMUL], wait=False)
    client.tune([MATMUL], deterministic=True, wait=False)
    client.tune([MATMUL], name="nightly", labels={"team": "nlp"}, wait=False)
    whole = {"problems": [MATMUL], "target": "sm_80", "search": {"level": 2}, "budget": {"seconds": 9.5}}
    assert scripted.seen[0].json == whole | {"workspace_limit_bytes": 0}
    assert scripted.seen[1].json == {"problems": [MATMUL]}
    assert scripted.seen[2].json == {"problems": [MATMUL], "deterministic": True}
    assert scripted.seen[3].json == {"problems": [MATMUL], "name": "nightly", "labels": {"team": "nlp"}}


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, b"bytes"])
def test_what_json_cannot_say_is_refused_before_sending(
    value: Any, scripted: ScriptedService, client_of: Clients
) -> None:
    with pytest.raises(UsageError, match="cannot be written as JSON"):
        client_of(scripted.url).tune([{**MATMUL, "m": value}])
    assert scripted.seen == []


def test_cancelling_an_ended_job_answers_the_job(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("DELETE", "/v1/jobs/job1", problem_json(409, "job-finished", "The job has already ended"))
    scripted.on("GET", "/v1/jobs/job1", job_json("done"))
    assert client_of(scripted.url).cancel("job1").state == "done"


def lookup_answer(request: Request) -> Response:
    problems = request.state.seen.json["problems"]
    records = {64: record_json()}
    results = [{"name": p.get("name"), "key": f"{p['m']:064x}", "record": records.get(p["m"])} for p in problems]
    return JSONResponse({"results": results, "hits": 0, "misses": 0})


def test_lookups_keep_their_order_and_only_hits_are_remembered(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("POST", "/v1/lookups", lookup_answer)
    client = client_of(scripted.url)
    asked = [{**MATMUL, "m": m} for m in (1, 64, 2, 1)]
    for _ in range(2):
        results = client.lookup(asked, target="sm_80")
        assert [int(result.key, 16) for result in results] == [1, 64, 2, 1]
        assert [result.record is not None for result in results] == [False, True, False, False]
    sent = [[p["m"] for p in seen.json["problems"]] for seen in scripted.seen]
    assert sent == [[1, 64, 2], [1, 2]]


def test_a_remembered_winner_is_asked_for_again_when_the_request_differs(
    scripted: ScriptedService, client_of: Clients
) -> None:
    scripted.on("POST", "/v1/lookups", lookup_answer)
    client, winner = client_of(scripted.url), {**MATMUL, "m": 64}
    reordered = dict(reversed(winner.items()))
    client.lookup([winner], target="sm_80")
    client.lookup([reordered], target="sm_80")
    assert len(scripted.seen) == 1
    client.lookup([winner], target="sm_90a")
    client.lookup([winner], target="sm_80", device_class="H200")
    client.lookup([winner], target="sm_80", refresh=True)
    assert len(scripted.seen) == 4


def test_many_lookups_are_sent_in_parts(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("POST", "/v1/lookups", lookup_answer)
    results = client_of(scripted.url).lookup([{**MATMUL, "m": m} for m in range(100, 100 + LARGEST_LOOKUP + 1)])
    assert [len(seen.json["problems"]) for seen in scripted.seen] == [LARGEST_LOOKUP, 1]
    assert int(results[-1].key, 16) == 100 + LARGEST_LOOKUP


def test_too_few_results_are_not_matched_to_the_wrong_problems(scripted: ScriptedService, client_of: Clients) -> None:
    scripted.on("POST", "/v1/lookups", {"results": [], "hits": 0, "misses": 0})
    client = client_of(scripted.url)
    (miss,) = client.lookup([MATMUL])
    assert miss.record is None and "0 results for 1 problem" in str(miss.unanswered)
    with pytest.raises(UnexpectedAnswer, match="0 results for 1 problem"):
        client.lookup([MATMUL], refresh=True)


def test_a_record_is_asked_for_with_its_etag(scripted: ScriptedService, client_of: Clients) -> None:
    key = "a" * 64
    first = JSONResponse(record_json(), headers={"ETag": '"r1"'})
    newer = JSONResponse(record_json(revision=2), headers={"ETag": '"r2"'})
    scripted.on("GET", f"/v1/kernels/{key}", first, Response(status_code=304), newer)
    client = client_of(scripted.url)
    assert [client.kernel(key).revision for _ in range(3)] == [1, 1, 2]
    assert [seen.headers.get("if-none-match") for seen in scripted.seen] == [None, '"r1"', '"r1"']


def test_a_client_keeps_what_was_most_recently_used_in_memory(
    scripted: ScriptedService, client_of: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_hits(request: Request) -> Response:
        problems = request.state.seen.json["problems"]
        results = [{"name": None, "key": f"{p['m']:064x}", "record": record_json()} for p in problems]
        return JSONResponse({"results": results, "hits": len(results), "misses": 0})

    monkeypatch.setattr(record_memory, "REMEMBERED_LOOKUPS", 2)
    scripted.on("POST", "/v1/lookups", all_hits)
    client = client_of(scripted.url)
    read: list[str] = []
    monkeypatch.setattr(client.cache, "answer", lambda digest: read.append(digest))  # nothing is on the disk
    for asked in ([1, 2], [1], [3], [1], [2]):  # 3 takes the place of 2, because 1 was used after it
        results = client.lookup([{**MATMUL, "m": m} for m in asked])
        assert [int(result.key, 16) for result in results] == asked
    assert [[p["m"] for p in seen.json["problems"]] for seen in scripted.seen] == [[1, 2], [3], [2]]
    assert len(read) == 4
    assert len(client.lookup([{**MATMUL, "m": m} for m in (7, 8, 9)])) == 3


def test_a_blob_is_fetched_once_and_kept_verified(scripted: ScriptedService, client_of: Clients) -> None:
    data = b"library"
    digest = hashlib.sha256(data).hexdigest()
    scripted.on("GET", f"/v1/blobs/sha256/{digest}", Response(data))
    client = client_of(scripted.url)
    assert client.blob(digest) == client.blob(digest) == data
    assert len(scripted.seen) == 1
    client.cache.path(digest).write_bytes(b"damaged")
    assert client.blob(digest) == data
    assert client.cache.path(digest).read_bytes() == data
    assert len(scripted.seen) == 2


def test_a_blob_with_other_content_is_refused_and_not_kept(scripted: ScriptedService, client_of: Clients) -> None:
    digest = "0" * 64
    scripted.on("GET", f"/v1/blobs/sha256/{digest}", Response(b"something else"))
    client = client_of(scripted.url)
    with pytest.raises(DigestMismatch) as caught:
        client.blob(digest)
    assert caught.value.expected == digest
    assert caught.value.found == hashlib.sha256(b"something else").hexdigest()
    assert not client.cache.path(digest).exists()


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "A" * 64, "0" * 63])
def test_a_digest_that_is_not_one_never_becomes_a_path(
    digest: str, scripted: ScriptedService, client_of: Clients
) -> None:
    with pytest.raises(UsageError, match="64 hexadecimal digits"):
        client_of(scripted.url).blob(digest)
    assert scripted.seen == []


@pytest.mark.parametrize("id", ["", " ", "\n", "job\0", "\ud800", 7])
@pytest.mark.parametrize("call", BY_ID)
def test_what_can_be_no_id_is_refused_before_anything_is_sent(
    scripted: ScriptedService, client_of: Clients, call: str, id: Any
) -> None:
    with pytest.raises(UsageError, match="expected"):
        BY_ID[call](client_of(scripted.url), id)
    assert scripted.seen == []


@pytest.mark.parametrize("id", ["..", ".", "a/b", "../../healthz", "a?b", "a%2Fb", "a#b", "a b", "ü", "a;b", "a&job=b"])
@pytest.mark.parametrize("call", sorted(BY_ID.keys() - {"blob", "candidate of a job"}))
def test_an_odd_id_stays_one_part_of_the_path(
    scripted: ScriptedService, client_of: Clients, call: str, id: str
) -> None:
    with pytest.raises(NotFound):
        BY_ID[call](client_of(scripted.url), id)
    for seen in scripted.seen:
        assert f"/{id}" in seen.path and seen.path.startswith("/v1/")


def test_a_shared_client_that_is_dropped_closes_its_connections_once_it_has_no_user(scripted: ScriptedService) -> None:
    scripted.on("GET", "/v1/operators", {"operators": []})

    def connected(key: str) -> Client:
        client = Client(transport=shared_client.shared_transport(scripted.url, key, False))
        client.operators()
        return client

    held, dropped = connected("held"), connected("dropped")
    connections = dropped._transport._client
    del dropped
    for number in range(shared_client.MOST_TRANSPORTS):
        assert connections is not None and not connections.is_closed
        shared_client.shared_client(f"http://127.0.0.1:{number + 1}")
    gc.collect()  # it is part of a cycle
    assert connections is not None and connections.is_closed
    held.operators()


NO_PROBLEMS: dict[str, Callable[[Client, Any], object]] = {
    "lookup": lambda client, problems: client.lookup(problems),
    "lookup_fields": lambda client, problems: client.lookup_fields(problems, ["key"]),
    "tune": lambda client, problems: client.tune(problems),
}


@pytest.mark.parametrize(
    ("problems", "message"),
    [
        (MATMUL, r"problems is one problem, or none; expected a list of them"),
        ("matmul", r"problems is one problem, or none; expected a list of them"),
        (None, r"problems is one problem, or none; expected a list of them"),
        (5, r"problems is one problem, or none; expected a list of them"),
        ([MATMUL, 1], r"problems\[1\] is 1; expected an object such as"),
        ([["operator", "matmul"]], r"problems\[0\] is \['operator', 'matmul'\]; expected an object such as"),
    ],
)
@pytest.mark.parametrize("call", NO_PROBLEMS.values(), ids=NO_PROBLEMS)
def test_what_is_no_list_of_problems_is_refused_before_it_is_sent(
    call: Callable[[Client, Any], object], problems: Any, message: str, scripted: ScriptedService, client_of: Clients
) -> None:
    client = client_of(scripted.url)
    with pytest.raises(UsageError, match=message):
        call(client, problems)
    with pytest.raises(UsageError, match="is 1; expected an object"):
        client.prepare(1)  # type: ignore[arg-type]
    assert not scripted.seen


def test_a_tilde_of_a_setting_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.toml").write_text('cache = "~/kept"\n')
    of_file = ClientSettings.from_environment({"CUKILN_CONFIG": "~/config.toml"})
    of_variable = ClientSettings.from_environment({"CUKILN_CONFIG": "~/config.toml", "CUKILN_CACHE": "~/ck"})
    assert (of_file.cache_dir, of_variable.cache_dir) == (tmp_path / "kept", tmp_path / "ck")
    monkeypatch.setenv("CUKILN_LOCK", "~/no.lock")
    with pytest.raises(UsageError, match=f"{tmp_path}/no.lock"):
        Lock.read()
    with pytest.raises(UsageError, match="set HOME, or name the whole path"):
        ClientSettings.from_environment({"CUKILN_CACHE": "~no-such-user/ck"})
