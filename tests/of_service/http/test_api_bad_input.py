"""Bad input is a 4xx that names the field and what is allowed; nothing of it is written or queued."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.operators import operators
from cukiln.types import ProblemDetail
from service.http.errors import KINDS, MAX_FAULTS
from service.http.strict_json import read_json, shape
from tests.support.fixtures.api import MATMUL, Api

PREFIX = "urn:cukiln:problem:"


@pytest.fixture(autouse=True)
def nothing_is_written(shared_api: Api) -> Iterator[None]:
    before = shared_api.rows()
    yield
    assert shared_api.rows() == before


def problem(answer: Any) -> ProblemDetail:
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    detail = ProblemDetail.model_validate_json(answer.content)
    assert detail.status == answer.status_code == KINDS[detail.type.removeprefix(PREFIX)].status
    assert detail.title and detail.detail.endswith((".", ")", "!", "?")), detail.detail
    return detail


def job(**fields: Any) -> dict[str, Any]:
    return {"problems": [{**MATMUL, **fields}]}


FIRST = "problems[0]"
BAD_JOBS: list[tuple[str, Any, str, str | None]] = [
    ("not an object", [], "invalid-value", None),
    ("no problems", {}, "missing-field", "problems"),
    ("empty problems", {"problems": []}, "invalid-value", "problems"),
    ("too many problems", {"problems": [{}] * 10_001}, "invalid-value", "problems"),
    ("a problem that is no object", {"problems": [3]}, "invalid-value", "problems[0]"),
    ("unknown job field", {**job(), "colour": "red"}, "unknown-field", "colour"),
    ("no operator", {"problems": [{"m": 1}]}, "missing-field", f"{FIRST}.operator"),
    ("unknown operator", {"problems": [{"operator": "matmult"}]}, "unknown-operator", f"{FIRST}.operator"),
    ("operator of a wrong type", {"problems": [{"operator": ["matmul"]}]}, "unknown-operator", f"{FIRST}.operator"),
    ("unknown field", job(zeta=1), "unknown-field", f"{FIRST}.zeta"),
    ("missing extent", {"problems": [{"operator": "matmul", "m": 1, "n": 1}]}, "missing-field", f"{FIRST}.k"),
    ("wrong dtype", job(dtype="float99"), "invalid-value", f"{FIRST}.dtype"),
    ("dtype of a wrong type", job(dtype=32), "invalid-value", f"{FIRST}.dtype"),
    ("float sums of integers", job(dtype="int8", acc_dtype="float32"), "invalid-value", f"{FIRST}.acc_dtype"),
    ("integers out of floats", job(dtype="float16", out_dtype="int32"), "invalid-value", f"{FIRST}.out_dtype"),
    ("epilogue on int32", job(dtype="int8", epilogue=[{"op": "relu"}]), "invalid-value", f"{FIRST}.epilogue"),
    ("tf32 as a number", job(allow_tf32=1), "invalid-value", f"{FIRST}.allow_tf32"),
    ("zero", job(m=0), "invalid-value", f"{FIRST}.m"),
    ("negative", job(n=-1), "invalid-value", f"{FIRST}.n"),
    ("fraction", job(k=1.5), "invalid-value", f"{FIRST}.k"),
    ("text", job(m="64"), "invalid-value", f"{FIRST}.m"),
    ("boolean", job(m=True), "invalid-value", f"{FIRST}.m"),
    ("null", job(m=None), "invalid-value", f"{FIRST}.m"),
    ("over 32 bits", job(m=2**31), "invalid-value", f"{FIRST}.m"),
    ("over 64 bits", job(m=2**64), "invalid-value", f"{FIRST}.m"),
    ("over every width", job(m=10**400), "invalid-value", f"{FIRST}.m"),
    ("overflow of an index", job(m=2**30, n=2**30, k=2**30), "extent-too-large", f"{FIRST}.lda"),
    ("rows that overlap", job(lda=3), "invalid-value", f"{FIRST}.lda"),
    ("unknown layout", job(layout="xx"), "invalid-value", f"{FIRST}.layout"),
    ("unknown epilogue node", job(epilogue=[{"op": "magic"}]), "invalid-value", f"{FIRST}.epilogue[0]"),
    ("field of an epilogue node", job(epilogue=[{"op": "gelu", "a": 1}]), "unknown-field", f"{FIRST}.epilogue[0].a"),
    ("bias axis", job(epilogue=[{"op": "bias", "axis": "q"}]), "invalid-value", f"{FIRST}.epilogue[0].axis"),
    ("scale too large", job(epilogue=[{"op": "scale", "value": 1e39}]), "invalid-value", f"{FIRST}.epilogue[0].value"),
    ("endless epilogue", job(epilogue=[{"op": "relu"}] * 1000), "invalid-value", f"{FIRST}.epilogue"),
    ("unknown target", {**job(), "target": "sm_42"}, "unknown-target", "target"),
    ("a problem's unknown target", job(target="sm_42"), "unknown-target", f"{FIRST}.target"),
    ("target of a wrong type", {**job(), "target": 80}, "invalid-value", "target"),
    ("unknown tunable", {**job(), "search": {"tunables": {"magic": [1]}}}, "unknown-tunable", "search.tunables.magic"),
    ("a problem's tunable", job(search={"tunables": {"x": [1]}}), "unknown-tunable", f"{FIRST}.search.tunables.x"),
    ("value", job(search={"tunables": {"tile_m": [63]}}), "invalid-value", f"{FIRST}.search.tunables.tile_m"),
    ("no tunables", job(search={"tunables": {}}), "empty-search-space", f"{FIRST}.search.tunables"),
    ("no values", job(search={"tunables": {"tile_m": []}}), "empty-search-space", f"{FIRST}.search.tunables.tile_m"),
    ("no schedules", {**job(), "search": {"schedules": []}}, "empty-search-space", "search.schedules"),
    ("an empty schedule", {**job(), "search": {"schedules": [{}]}}, "empty-search-space", "search.schedules[0]"),
    ("a value of a schedule", job(search={"schedules": [{"tile_m": 65}]}), "invalid-value", None),
    ("two searches", {**job(), "search": {"level": 1, "schedules": [{"a": 1}]}}, "invalid-value", "search"),
    ("unknown level", {**job(), "search": {"level": 3}}, "invalid-value", "search.level"),
    ("no schedules wanted", {**job(), "search": {"level": 1, "limit": 0}}, "invalid-value", "search.limit"),
    ("negative seed", {**job(), "search": {"level": 1, "seed": -1}}, "invalid-value", "search.seed"),
    ("unknown priority", {**job(), "priority": "urgent"}, "invalid-value", "priority"),
    ("empty budget", {**job(), "budget": {}}, "missing-field", "budget.seconds"),
    ("no time", {**job(), "budget": {"seconds": 0}}, "invalid-value", "budget.seconds"),
    ("endless budget", {**job(), "budget": {"seconds": 1e300}}, "invalid-value", "budget.seconds"),
    ("negative limit", {**job(), "workspace_limit_bytes": -1}, "invalid-value", "workspace_limit_bytes"),
    ("determinism as a number", {**job(), "deterministic": 1}, "invalid-value", "deterministic"),
    ("PTX of some", {**job(), "ptx": "some"}, "invalid-value", "ptx"),
    ("PTX as a truth", {**job(), "ptx": True}, "invalid-value", "ptx"),
    ("fraction of a byte", {**job(), "workspace_limit_bytes": 0.5}, "invalid-value", "workspace_limit_bytes"),
    ("device class", {**job(), "device_class": "NVIDIA H100"}, "invalid-value", "device_class"),
    ("another's class", job(device_class="predicted:sm_75"), "invalid-value", f"{FIRST}.device_class"),
    ("empty name", job(name=""), "invalid-value", f"{FIRST}.name"),
    ("control characters", job(name="a\u0000b"), "invalid-value", f"{FIRST}.name"),
    ("one name twice", {"problems": [{**MATMUL, "name": "a"}] * 2}, "duplicate-name", "problems[1].name"),
    ("a default's name", {"problems": [{**MATMUL, "name": "problem1"}, MATMUL]}, "duplicate-name", "problems[1].name"),
]


@pytest.mark.parametrize(("body", "kind", "field"), [case[1:] for case in BAD_JOBS], ids=[case[0] for case in BAD_JOBS])
def test_a_bad_job_names_its_field(shared_api: Api, body: Any, kind: str, field: str | None) -> None:
    detail = problem(shared_api.client.post("/v1/jobs", content=json.dumps(body), headers=JSON))
    assert detail.type == PREFIX + kind, detail
    if field is not None:
        assert detail.field == field, detail


JSON = {"Content-Type": "application/json"}
ALLOWED: list[tuple[Any, Any]] = [
    (job(layout="xx"), ["nn", "nt", "tn", "tt"]),
    ({**job(), "priority": "urgent"}, ["low", "normal", "high"]),
    (job(device_class="GPU"), ["predicted:sm_80"]),
]
MOST = 2**31 - 1 - 1024
CONV = {"operator": "conv2d", "n": 1, "h": 8, "w": 8, "c": 8, "k": 8, "r": 3, "s": 3}
TWO = {"type": "array", "minItems": 2, "maxItems": 2}


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"stride": 0}, [{"type": "integer", "minimum": 1, "maximum": MOST}, TWO]),
        ({"padding": "same"}, [{"type": "integer", "minimum": 0, "maximum": MOST}, TWO]),
        ({"padding": [1, 2, 3]}, [{"type": "integer", "minimum": 0, "maximum": MOST}, TWO]),
        ({"padding": [1, -1]}, [{"type": "integer", "minimum": 0, "maximum": MOST}, TWO]),
        ({"padding": [[0, -1], 1]}, {"type": "integer", "minimum": 0, "maximum": MOST}),
        ({"stride": [1, 0]}, {"type": "integer", "minimum": 1, "maximum": MOST}),
    ],
)
def test_every_alternative_of_a_place_is_allowed(shared_api: Api, change: dict[str, Any], allowed: Any) -> None:
    assert problem(shared_api.submit({**CONV, **change})).allowed == allowed


@pytest.mark.parametrize(("body", "allowed"), ALLOWED)
def test_an_error_says_what_is_allowed(shared_api: Api, body: Any, allowed: Any) -> None:
    assert problem(shared_api.client.post("/v1/jobs", json=body)).allowed == allowed


def test_an_unknown_operator_is_refused_with_all_that_there_are(shared_api: Api) -> None:
    detail = problem(shared_api.client.post("/v1/jobs", json={"problems": [{"operator": "x"}]}))
    assert detail.allowed == sorted(operators())
    assert "matmul" in detail.allowed


@pytest.mark.parametrize("name", ["", "a\nb", "a\n", "\x85", "x" * 257])
def test_a_name_is_one_line(shared_api: Api, name: str) -> None:
    detail = problem(shared_api.submit({**MATMUL, "name": name}))
    assert detail.detail == f"{FIRST}.name should be 1 to 256 characters without control characters."


def test_a_refused_value_is_shown_in_part(shared_api: Api) -> None:
    for value in ("x" * 10_000, 10**300):
        detail = problem(shared_api.submit({**MATMUL, "search": {"tunables": {"tile_m": [value]}}}))
        assert str(value)[:50] in detail.detail and len(detail.detail) < 300


def test_bounds_of_a_number_are_what_is_allowed(shared_api: Api) -> None:
    detail = problem(shared_api.submit({**MATMUL, "m": 0}))
    assert detail.allowed is not None
    assert detail.allowed["minimum"] == 1 and detail.allowed["maximum"] > 10**6


def test_targets_that_are_allowed_are_listed(shared_api: Api) -> None:
    detail = problem(shared_api.submit(target="sm_42"))
    listed = [target["target"] for target in shared_api.client.get("/v1/targets").json()["targets"]]
    assert detail.allowed == sorted(listed)


@pytest.mark.parametrize("value", [True, None, 1.5, [64], {"tile_m": 64}])
@pytest.mark.parametrize("kind", ["schedules", "tunables"])
def test_a_tunables_value_of_a_wrong_type_is_one_error(shared_api: Api, kind: str, value: Any) -> None:
    search = {"schedules": [{"tile_m": value}]} if kind == "schedules" else {"tunables": {"tile_m": [value]}}
    detail = problem(shared_api.submit(search=search))
    where = "search.schedules[0].tile_m" if kind == "schedules" else "search.tunables.tile_m[0]"
    assert (detail.field, detail.errors) == (where, None)
    assert detail.detail == f"{where} should be an integer or a string."
    assert detail.allowed == [{"type": "integer"}, {"type": "string"}]


def test_all_errors_are_listed_up_to_a_limit(shared_api: Api) -> None:
    two = problem(shared_api.submit({**MATMUL, "m": 0, "zeta": 1}))
    assert two.errors is not None
    assert {error["field"] for error in two.errors} == {"problems[0].m", "problems[0].zeta"}
    many = shared_api.submit(*({**MATMUL, "m": 0} for _ in range(500)))
    assert many.json()["errors"][-1]["field"] == f"problems[{MAX_FAULTS - 1}].m"
    assert len(many.json()["errors"]) == MAX_FAULTS


def test_what_stands_at_the_job_is_wrong_once(shared_api: Api) -> None:
    detail = problem(shared_api.submit(*([MATMUL] * 50), target="sm_42"))
    assert detail.errors is None and detail.field == "target"


BAD_BODIES: list[tuple[str, bytes, str]] = [
    ("empty", b"", "malformed-json"),
    ("cut off", b'{"problems": [', "malformed-json"),
    ("NaN", b'{"problems": NaN}', "malformed-json"),
    ("Infinity", b'{"a": -Infinity}', "malformed-json"),
    ("half a surrogate pair", b'{"problems": "\\ud800"}', "malformed-json"),
    ("two values", b"{} {}", "malformed-json"),
    ("latin-1", b'{"problems": "\xe9"}', "not-utf-8"),
    ("UTF-16", '{"problems": []}'.encode("utf-16"), "not-utf-8"),
    ("a key twice", b'{"problems": [], "problems": [1]}', "duplicate-key"),
    ("a key twice inside", b'{"problems": [{"m": 1, "m": 2}]}', "duplicate-key"),
    ("a bomb of arrays", b"[" * 100_000, "nested-too-deep"),
    ("a closed bomb", b"[" * 5_000 + b"]" * 5_000, "nested-too-deep"),
    ("a bomb of objects", b'{"a":' * 50_000, "nested-too-deep"),
    ("a bomb inside", b'{"problems": [{"epilogue": ' + b"[" * 900 + b"]" * 900 + b"}]}", "nested-too-deep"),
]


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/lookups"])
@pytest.mark.parametrize(("body", "kind"), [case[1:] for case in BAD_BODIES], ids=[case[0] for case in BAD_BODIES])
def test_a_body_that_is_not_clean_json_is_refused(shared_api: Api, path: str, body: bytes, kind: str) -> None:
    assert problem(shared_api.client.post(path, content=body, headers=JSON)).type == PREFIX + kind


@pytest.mark.parametrize(
    ("body", "where", "field"),
    [
        ('{"problems": [], "problems": [1]}', "the body", "problems"),
        ('{"problems": [{}, {"n": 2, "m": 1, "m": 2}]}', "problems[1]", "problems[1].m"),
        ('{"search": {"tunables": {"a": {}, "a": {}, "b": 1, "b": 1}}}', "search.tunables", "search.tunables.a"),
        ('{"x": {"a": 1, "a": 2}, "x": 3}', "the body", "x"),
    ],
)
def test_a_key_twice_is_named_with_its_place(shared_api: Api, body: str, where: str, field: str) -> None:
    detail = problem(shared_api.client.post("/v1/jobs", content=body, headers=JSON))
    assert (detail.type, detail.field) == (PREFIX + "duplicate-key", field)
    assert f"stands twice in {where}." in (detail.detail or "")


@pytest.mark.parametrize("spelled", ["1e400", "9" * 5000, "-1e999"])
def test_a_number_beyond_all_widths_is_refused_by_its_field(shared_api: Api, spelled: str) -> None:
    body = '{"problems": [{"operator": "matmul", "m": %s, "n": 1, "k": 1}]}' % spelled  # noqa: UP031
    detail = problem(shared_api.client.post("/v1/jobs", content=body, headers=JSON))
    assert (detail.type, detail.field) == (PREFIX + "invalid-value", "problems[0].m")


@pytest.mark.parametrize("spelled", ["1e400", "9" * 5000])
def test_a_scalar_beyond_all_widths_is_refused_by_its_field(shared_api: Api, spelled: str) -> None:
    body = json.dumps(job(epilogue=[{"op": "scale", "value": 12345}])).replace("12345", spelled)
    detail = problem(shared_api.client.post("/v1/jobs", content=body, headers=JSON))
    assert (detail.type, detail.field) == (PREFIX + "invalid-value", "problems[0].epilogue[0].value")


WIDE: list[tuple[Any, str]] = [
    (job(epilogue=[1] * 10_001), f"{FIRST}.epilogue"),
    ({**job(), "search": {"schedules": [1] * 10_001}}, "search.schedules"),
    ({**job(), "search": {"tunables": {f"t{i}": [1] for i in range(1_001)}}}, "search.tunables"),
    (job(**{f"field{i}": 1 for i in range(1_001)}), FIRST),
]


@pytest.mark.parametrize(("body", "field"), WIDE)
def test_what_is_wider_than_any_field_is_refused_as_a_whole(shared_api: Api, body: Any, field: str) -> None:
    detail = problem(shared_api.client.post("/v1/jobs", json=body))
    assert (detail.type, detail.field, detail.errors) == (PREFIX + "invalid-value", field, None)


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/lookups"])
def test_ten_megabytes_are_too_large(shared_api: Api, path: str) -> None:
    body = b'{"problems": [' + b" " * 10_000_000 + b"]}"
    assert problem(shared_api.client.post(path, content=body, headers=JSON)).type == PREFIX + "body-too-large"


def test_a_body_without_a_length_is_too_large_as_soon_as_it_is(shared_api: Api) -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 200_000_000:
            sent += 1_000_000
            yield b" " * 1_000_000

    answer = shared_api.client.post("/v1/jobs", content=endless(), headers=JSON)
    assert problem(answer).type == PREFIX + "body-too-large"
    assert sent < 100_000_000


def test_a_length_that_is_too_large_is_refused_before_the_body(shared_api: Api) -> None:
    with socket.create_connection(("127.0.0.1", shared_api.port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999999999999999\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
def test_another_content_type_is_refused(shared_api: Api, media_type: str) -> None:
    answer = shared_api.client.post("/v1/jobs", content=json.dumps(job()), headers={"Content-Type": media_type})
    assert problem(answer).type == PREFIX + "unsupported-media-type"


BAD_CALLS: list[tuple[str, str, str]] = [
    ("PUT", "/v1/jobs", "method-not-allowed"),
    ("POST", f"/v1/jobs/{'0' * 32}", "method-not-allowed"),
    ("DELETE", f"/v1/blobs/sha256/{'0' * 64}", "method-not-allowed"),
    ("GET", "/nothing", "not-found"),
    ("GET", "/metrics", "not-found"),
    ("GET", "/v1", "not-found"),
    ("GET", "/v1/jobs/", "not-found"),
    ("GET", "/v2/jobs", "not-found"),
    ("GET", f"/v1/jobs/{'0' * 32}/profile", "job-not-found"),
    ("GET", f"/v1/jobs/{'0' * 32}/trace", "job-not-found"),
    ("GET", f"/v1/jobs/{'0' * 32}", "job-not-found"),
    ("GET", "/v1/jobs/%00", "job-not-found"),
    ("GET", "/v1/jobs/%ff%fe", "job-not-found"),
    ("DELETE", f"/v1/jobs/{'0' * 32}", "job-not-found"),
    ("GET", f"/v1/jobs/{'0' * 32}/events", "job-not-found"),
    ("GET", f"/v1/jobs/{'0' * 32}/candidates", "job-not-found"),
    ("GET", f"/v1/jobs/{'0' * 32}/rejections", "job-not-found"),
    ("GET", f"/v1/groups/{'0' * 32}", "group-not-found"),
    ("GET", "/v1/groups/..%2f..%2fetc", "not-found"),
    ("GET", f"/v1/groups/{'0' * 32}/source", "group-not-found"),
    ("GET", f"/v1/groups/{'0' * 32}/log", "group-not-found"),
    ("GET", f"/v1/kernels/{'0' * 64}", "kernel-not-found"),
    ("GET", "/v1/kernels/x", "kernel-not-found"),
    ("GET", f"/v1/blobs/sha256/{'0' * 64}", "blob-not-found"),
    ("GET", "/v1/blobs/sha256/xyz", "invalid-digest"),
    ("GET", f"/v1/blobs/sha256/{'A' * 64}", "invalid-digest"),
    ("GET", "/v1/jobs?limit=0", "invalid-value"),
    ("GET", "/v1/jobs?limit=x", "invalid-value"),
    ("GET", "/v1/jobs?state=sleeping", "invalid-value"),
    ("GET", "/v1/jobs?cursor=nonsense", "invalid-cursor"),
    ("GET", "/v1/jobs?cursor=%00", "invalid-cursor"),
    ("GET", "/v1/jobs?cursor=WyJhIiwxXQ", "invalid-cursor"),
    ("GET", "/v1/timings?by=week", "invalid-value"),
    ("GET", "/v1/jobs?staet=done", "unknown-field"),
    ("GET", "/v1/jobs?limit=1&limit=2", "invalid-value"),
    ("GET", "/v1/targets?verbose", "unknown-field"),
    ("HEAD", "/v1/timings?by=week", "invalid-value"),
]


@pytest.mark.parametrize("job", ["d92468d", "D92468D0", "0" * 33, "nothing"])
def test_what_can_be_no_jobs_id_is_answered_with_what_can(shared_api: Api, job: str) -> None:
    answer = problem(shared_api.client.get(f"/v1/jobs/{job}"))
    assert answer.detail == f"{job!r} names no job: give 32 lower-case hexadecimal digits, or the first 8 or more."


@pytest.mark.parametrize(("method", "path", "kind"), BAD_CALLS)
def test_a_bad_call_is_a_problem(shared_api: Api, method: str, path: str, kind: str) -> None:
    answer = shared_api.client.request(method, path)
    if method == "HEAD":
        assert (answer.status_code, answer.content) == (KINDS[kind].status, b"")
        return
    assert problem(answer).type == PREFIX + kind


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/jobs", ["GET", "HEAD", "POST"]),
        (f"/v1/jobs/{'0' * 32}", ["DELETE", "GET", "HEAD"]),
        (f"/v1/jobs/{'0' * 32}/events", ["GET"]),
        (f"/v1/blobs/sha256/{'0' * 64}", ["GET", "HEAD"]),
        ("/v1/lookups", ["POST"]),
        ("/healthz", ["GET", "HEAD"]),
    ],
)
def test_a_method_that_is_not_allowed_is_answered_with_all_that_are(
    shared_api: Api, path: str, methods: list[str]
) -> None:
    answer = shared_api.client.request("PATCH", path)
    found = problem(answer)
    assert (found.type, found.allowed) == (PREFIX + "method-not-allowed", methods)
    assert answer.headers["allow"] == ", ".join(methods)


@pytest.mark.parametrize(
    ("query", "allowed"),
    [
        ("limit=0", {"type": "integer", "minimum": 1, "maximum": 1000}),
        ("limit=x", {"type": "integer", "minimum": 1, "maximum": 1000}),
        ("state=sleeping", ["queued", "running", "done", "partial", "failed", "cancelled"]),
        ("page=2", ["cursor", "label", "limit", "name", "state"]),
    ],
)
def test_a_wrong_parameter_is_refused_with_what_is_allowed(shared_api: Api, query: str, allowed: Any) -> None:
    found = problem(shared_api.client.get(f"/v1/jobs?{query}"))
    assert (found.field, found.allowed) == (query.partition("=")[0], allowed)


def test_a_probe_may_add_what_it_likes(shared_api: Api) -> None:
    assert shared_api.client.get("/healthz?at=1795268732").status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"problems": {}}, "problems should be an array."),
        ({"problems": []}, "problems needs at least 1 item."),
        ({"problems": [7]}, "problems[0] should be an object."),
        ({"problems": [MATMUL], "budget": 5}, "budget should be an object."),
        ({"problems": [{**MATMUL, "m": "64"}]}, "problems[0].m should be an integer."),
        ({"problems": [{**MATMUL, "m": 0}]}, "problems[0].m should be greater than or equal to 1."),
        ({"problems": [{**MATMUL, "epilogue": "relu"}]}, "problems[0].epilogue should be an array."),
        ({"problems": [{**MATMUL, "epilogue": [{"op": "x"}]}]}, "problems[0].epilogue[0] names an unknown op 'x'."),
        ({"problems": [MATMUL], "search": {"tunables": {"tile_m": [7]}}}, "tile_m = 7 is not allowed"),
    ],
)
def test_an_error_speaks_of_json_and_keeps_the_names_of_fields(shared_api: Api, body: Any, message: str) -> None:
    """Messages use JSON's terms: no tuples, no dictionaries, no instances of Budget."""
    assert problem(shared_api.client.post("/v1/jobs", json=body)).detail.startswith(message)


def test_no_answer_repeats_a_request_without_end(shared_api: Api) -> None:
    long = "x" * 100_000
    answer = shared_api.submit({**MATMUL, long: 1, "name": long, "target": long, "operator": long})
    assert problem(answer)
    assert len(answer.content) < 5_000


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(["matmul", "nn"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["op", "m", "level", "tunables", "schedules", "seconds", "tile_m"]) | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)
JOB_FIELDS = ["target", "search", "priority", "budget", "workspace_limit_bytes", "device_class", "deterministic", "ptx"]
PROBLEM_FIELDS = ["m", "n", "k", "batch", "layout", "dtype", "epilogue", "lda", "stride_a", "name", "search", "target"]
bad_problems = st.builds(
    lambda base, changes: {**base, **changes},
    st.sampled_from([MATMUL, {}]),
    st.dictionaries(st.sampled_from(PROBLEM_FIELDS), values, min_size=1, max_size=3),
)
bodies = values | st.builds(
    lambda fields, problems: {**fields, "problems": problems},
    st.dictionaries(st.sampled_from(JOB_FIELDS), values, max_size=3),
    st.lists(bad_problems | values, max_size=3),
)


@settings(max_examples=150)
@given(body=bodies)
def test_no_json_makes_the_service_fail(shared_api: Api, body: Any) -> None:
    # Lookups read what jobs read and write nothing, so that what happens to be valid leaves no row.
    answer = shared_api.client.post("/v1/lookups", content=json.dumps(body), headers=JSON)
    assert answer.status_code < 500
    if answer.status_code != 200:
        problem(answer)


@settings(max_examples=150)
@given(body=st.binary(max_size=200) | st.text(alphabet='{}[]",:\\u0d8ntrue 1.-e', max_size=60).map(str.encode))
def test_no_bytes_make_the_service_fail(shared_api: Api, body: bytes) -> None:
    answer = shared_api.client.post("/v1/jobs", content=body, headers=JSON)
    assert 400 <= answer.status_code < 500
    problem(answer)


@given(value=values.filter(lambda value: "NaN" not in json.dumps(value) and "Infinity" not in json.dumps(value)))
def test_the_strict_reader_reads_what_the_standard_one_does(value: Any) -> None:
    text = json.dumps(value)
    if "\\ud" not in text:
        assert read_json(text.encode()) == json.loads(text)


@given(levels=st.integers(0, 40), text=st.text())
def test_depth_counts_brackets_outside_of_strings(levels: int, text: str) -> None:
    assert shape(b"[" * levels + json.dumps(text).encode() + b"]" * levels).depth == levels


def test_a_fault_of_ours_may_have_the_name_of_one_of_pydantics(shared_api: Api) -> None:
    lengths = {"lengths": "ragged", "batch": 1, "seq_q": 10, "seq_kv": 10, "q_lengths": [11], "kv_lengths": [10]}
    attention = {"operator": "attention", "heads_q": 1, "heads_kv": 1, "head_dim_qk": 64, **lengths}
    answer = shared_api.client.post("/v1/jobs", json={"problems": [attention]})
    fault = problem(answer)
    assert (answer.status_code, fault.field) == (422, "problems[0].q_lengths"), answer.text
    assert "has 11, but seq_q, the longest, is 10" in fault.detail
