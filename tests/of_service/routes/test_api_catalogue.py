"""What the service says about itself: operators, targets, timings, groups, probes, its own documentation."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cukiln.types import GroupReport, Operators, Targets, Timings
from service.http.errors import KINDS, TYPE_PREFIX
from storage.database.tables import GroupRow
from storage.entities.heartbeats import register_toolchain
from tests.support.fixtures.api import MATMUL, Api, publish, serving
from workers import wake_ups
from workers.supervisor.valkey import EmbeddedValkey
from workers.worker.queue_worker import QueueWorker

TOOLCHAIN = "7" * 64
GROUP = "a" * 32


def register(api: Api, *targets: str) -> None:
    with api.database.write() as session:
        register_toolchain(session, TOOLCHAIN, {"nvcc": "13.2"}, targets)


def test_operators_are_json_schemas_with_their_tunables(shared_api: Api) -> None:
    parsed = Operators.model_validate_json(shared_api.client.get("/v1/operators").content)
    matmul = next(operator for operator in parsed.operators if operator.operator == "matmul")
    jsonschema.validate(MATMUL, matmul.schema_)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**MATMUL, "m": 0}, matmul.schema_)
    jsonschema.validate({"level": 2, "limit": 3}, matmul.search)
    assert len(matmul.tunables) >= 6
    assert all({"allowed", "default", "launch_time", "meaning"} == set(tunable) for tunable in matmul.tunables.values())


def allowed_for(api: Api, problem: dict[str, Any], name: str) -> list[Any] | dict[str, int]:
    """What the service says may be asked of a tunable for this problem, and takes when it is asked."""
    fault = api.submit(problem, search={"tunables": {name: ["no such value"]}}).json()
    if fault["type"] == TYPE_PREFIX + "unknown-tunable":
        return []
    assert (fault["type"], fault["field"]) == (TYPE_PREFIX + "invalid-value", f"search.tunables.{name}")
    allowed: list[Any] | dict[str, int] = fault["allowed"]
    named = allowed if isinstance(allowed, list) else [allowed["minimum"], allowed["maximum"]]
    assert api.submit(problem, search={"tunables": {name: named}, "limit": 1}).status_code == 202
    return allowed


def test_every_tunable_value_that_is_listed_may_be_asked_for(api: Api) -> None:
    # Some are of kernels on CUDA cores, some of those on tensor cores, some of those over rings: what is listed is what
    # any of them takes.
    truncated = {"fraction_bits": 8, "truncation": {"policy": "tolerance", "ulp": 64}}
    problems = [MATMUL, {**MATMUL, "dtype": "float16"}, {**MATMUL, "dtype": "int64", **truncated}]
    (listed,) = (each for each in api.client.get("/v1/operators").json()["operators"] if each["operator"] == "matmul")
    for name, tunable in listed["tunables"].items():
        found = [allowed for problem in problems if (allowed := allowed_for(api, problem, name))]
        if isinstance(tunable["allowed"], dict):
            assert all(allowed == tunable["allowed"] for allowed in found), name
        else:
            assert {value for allowed in found for value in allowed} == set(tunable["allowed"]), name
        assert found, name


def test_an_integer_of_a_range_is_listed_by_its_ends(shared_api: Api) -> None:
    parsed = Operators.model_validate_json(shared_api.client.get("/v1/operators").content)
    matmul = next(operator for operator in parsed.operators if operator.operator == "matmul")
    assert matmul.tunables["split_k"]["allowed"] == {"minimum": 1, "maximum": 1024}
    assert matmul.tunables["split_k"]["launch_time"] is True


def test_problems_of_one_search_are_each_asked_whether_they_have_its_tunables(shared_api: Api) -> None:
    cores, tensor = {**MATMUL, "name": "cores"}, {**MATMUL, "name": "tensor", "dtype": "float16"}
    for search, count in (({"tunables": {"warps_m": [2]}}, 1), ({"tunables": {"thread_m": [4]}}, 1)):
        answer = shared_api.client.post("/v1/jobs", json={"problems": [cores, tensor], "search": search})
        assert (answer.status_code, answer.json()["type"]) == (422, TYPE_PREFIX + "unknown-tunable")
        assert len(answer.json().get("errors") or [answer.json()]) == count


def test_targets_name_the_toolchains_that_are_alive(api: Api) -> None:
    before = Targets.model_validate_json(api.client.get("/v1/targets").content)
    assert {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100"} <= {target.target for target in before.targets}
    assert before.toolchains == []
    register(api, "sm_80", "sm_90a")
    after = Targets.model_validate_json(api.client.get("/v1/targets").content)
    alive = {target.target for target in after.targets if target.toolchains == [TOOLCHAIN]}
    assert alive == {"sm_80", "sm_90a"}
    assert after.toolchains[0]["description"] == {"nvcc": "13.2"}


def test_a_target_that_no_live_toolchain_compiles_for_is_refused(api: Api) -> None:
    register(api, "sm_80", "sm_90a", "sm_999")
    refused = api.submit(target="sm_75").json()
    assert refused["type"] == TYPE_PREFIX + "unknown-target"
    assert refused["allowed"] == ["sm_80", "sm_90a"]
    assert api.submit(target="sm_90a").status_code == 202


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/lookups"])
def test_a_request_without_a_target_is_refused_with_the_list(tmp_path: Path, path: str) -> None:
    with serving(tmp_path, default_target=None) as api:
        register(api, "sm_80", "sm_90a")
        answer = api.client.post(path, json={"problems": [{**MATMUL, "target": "sm_80"}, MATMUL, MATMUL]})
        assert (answer.status_code, answer.json()["type"]) == (422, TYPE_PREFIX + "unknown-target")
        assert (answer.json()["field"], answer.json()["allowed"]) == ("target", ["sm_80", "sm_90a"])
        assert "No target is named" in answer.json()["detail"]
        assert answer.json().get("errors") in (None, []) or len(answer.json()["errors"]) == 1
        of_all = {"problems": [{**MATMUL, "target": "sm_80"}]}
        assert api.client.post(path, json=of_all).status_code in (200, 202)


def test_timings_count_problems_by_operator_and_by_job(api: Api) -> None:
    publish(api.database)
    job = api.submit(MATMUL, {**MATMUL, "name": "again"}).json()["job"]
    by_operator = Timings.model_validate_json(api.client.get("/v1/timings").content)
    assert [(row.operator, row.problems, row.cached) for row in by_operator.timings] == [("matmul", 2, 2)]
    by_job = Timings.model_validate_json(api.client.get("/v1/timings", params={"by": "job"}).content)
    assert [row.job for row in by_job.timings] == [job]
    assert api.client.get("/v1/timings", params={"by": "day"}).json()["timings"][0]["day"]


def group(api: Api, **changes: Any) -> None:
    with api.database.write() as session:
        row = {"id": GROUP, "target": "sm_80", "state": "waiting", "kernels": [], "created_at": time.time(), **changes}
        session.add(GroupRow(**row))


def test_a_group_shows_its_source_and_nvccs_words(api: Api) -> None:
    source = api.blobs.put(b"__global__ void run();\n", "text/x-cuda")
    log = api.blobs.put("ptxas info: \xb5s <script>\n".encode(), "text/plain")
    group(api, state="compiled", source=source.digest, log=log.digest, phases=[{"name": "cicc", "seconds": 0.5}])
    report = GroupReport.model_validate_json(api.client.get(f"/v1/groups/{GROUP}").content)
    assert (report.state, report.source_sha256) == ("compiled", source.digest)
    assert [(phase.name, phase.seconds) for phase in report.phases] == [("cicc", 0.5)]
    for what, blob in (("source", source), ("log", log)):
        answer = api.client.get(f"/v1/groups/{GROUP}/{what}")
        assert answer.content == api.blobs.get(blob.digest)
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"


NOT_THERE = {
    "source": "The group has no source yet: it is not compiled.",
    "log": "The group has no log yet: it is not compiled.",
    "ptx": "The group has no PTX: it is not compiled yet,",
}


@pytest.mark.parametrize("what", NOT_THERE)
def test_a_group_that_is_not_compiled_has_no_files(api: Api, what: str) -> None:
    group(api)
    answer = api.client.get(f"/v1/groups/{GROUP}/{what}")
    assert (answer.status_code, answer.json()["type"]) == (404, TYPE_PREFIX + "group-file-not-found")
    assert answer.json()["detail"].startswith(NOT_THERE[what])
    nowhere = api.client.get(f"/v1/groups/{'b' * 32}/{what}")
    assert (nowhere.status_code, nowhere.json()["type"]) == (404, TYPE_PREFIX + "group-not-found")


@pytest.mark.parametrize(
    "path", ["/", "/healthz", "/docs", "/openapi.json", "/v1/jobs", "/v1/operators", "/v1/timings"]
)
def test_head_answers_as_get_does_without_the_body(shared_api: Api, path: str) -> None:
    get, head = shared_api.client.get(path), shared_api.client.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(get.content))
    assert head.headers["content-type"] == get.headers["content-type"]


def test_the_process_is_alive_though_everything_else_is_missing(tmp_path: Path) -> None:
    with serving(tmp_path, redis_url="redis://127.0.0.1:9/0") as api:
        assert api.client.get("/healthz").json() == {"status": "ok", "checks": {}}


def test_ready_needs_a_database_blobs_redis_and_every_kind_of_worker(tmp_path: Path, valkey: EmbeddedValkey) -> None:
    with serving(tmp_path / "ready", redis_url=valkey.url) as api:
        assert missing(api) == {"workers": "worker compile", "planner": "worker plan", "reconciler": "worker reconcile"}
        register(api, "sm_80")
        assert set(missing(api)) == {"planner", "reconciler"}
        redis = wake_ups.connect(valkey.url)
        planner = QueueWorker(["cukiln:plan"], redis, lambda kind, target: None)
        planner.heartbeat()
        assert set(missing(api)) == {"reconciler"}
        wake_ups.reconciler_lives(redis, 60.0)
        ready = api.client.get("/readyz")
        everything = {"database", "blobs", "disk", "pauses", "redis", "workers", "planner", "reconciler"}
        assert (ready.status_code, set(ready.json()["checks"])) == (200, everything)
        redis.delete(planner.key)  # as when its heartbeat ends
        assert set(missing(api)) == {"planner"}
        redis.close()
        valkey.stop()
        assert set(missing(api)) == {"redis"}
        folder = tmp_path / "ready" / "blobs"
        folder.rename(tmp_path / "away")
        assert set(missing(api)) == {"redis", "blobs"}


def missing(api: Api) -> dict[str, str]:
    """What /readyz says is not there, with the command that it tells to run, if any."""
    answer = api.client.get("/readyz")
    assert answer.status_code == 503 and answer.headers["retry-after"]
    body = answer.json()
    assert body["type"] == TYPE_PREFIX + "not-ready"
    commands = {
        error["field"]: re.search(r"`cukiln ([a-z ]+)`", error["detail"]) for error in body.get("errors") or [body]
    }
    return {field: match[1] if match else "" for field, match in commands.items()}


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]


def test_the_docs_page_needs_nothing_from_elsewhere(shared_api: Api) -> None:
    answer = shared_api.client.get("/docs")
    page = _Tags()
    page.feed(answer.text)
    assert "script" not in page.tags
    assert all(link.startswith(("#", "/openapi.json")) for link in page.links)
    identifiers = set(re.findall(r"id='([^']+)'", answer.text))
    assert {link[1:] for link in page.links if link.startswith("#")} <= identifiers
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for kind in KINDS:
        assert TYPE_PREFIX + kind in answer.text
    for path in shared_api.client.get("/openapi.json").json()["paths"]:
        assert path in answer.text
    assert "`" not in answer.text, "backticks are shown as code"


CALLS = {
    ("post", "/v1/jobs"), ("get", "/v1/jobs"), ("get", "/v1/jobs/{job}"), ("delete", "/v1/jobs/{job}"),
    ("post", "/v1/jobs/{job}/retry"),
    ("delete", "/v1/builds/{build}"),
    ("delete", "/v1/kernels/{key}"),
    ("get", "/v1/jobs/{job}/events"), ("get", "/v1/jobs/{job}/timeline"),
    ("get", "/v1/jobs/{job}/candidates"), ("get", "/v1/jobs/{job}/rejections"),
    ("get", "/v1/jobs/{job}/profile"),
    ("get", "/v1/groups/{group}"), ("get", "/v1/groups/{group}/source"), ("get", "/v1/groups/{group}/log"),
    ("get", "/v1/groups/{group}/ptx"),
    ("get", "/v1/candidates/{candidate}"), ("get", "/v1/jobs/{job}/bundle"), ("get", "/v1/jobs/{job}/trace"),
    ("post", "/v1/results"), ("get", "/v1/imports"), ("delete", "/v1/imports/{import_id}"),
    ("post", "/v1/lookups"), ("get", "/v1/kernels/{key}"), ("get", "/v1/blobs/sha256/{digest}"),
    ("get", "/v1/operators"), ("get", "/v1/targets"), ("get", "/v1/timings"), ("get", "/healthz"), ("get", "/readyz"),
}  # fmt: skip


def test_the_openapi_document_has_every_call_with_its_problems(shared_api: Api) -> None:
    document = shared_api.client.get("/openapi.json").json()
    found = {(method, path): call for path, calls in document["paths"].items() for method, call in calls.items()}
    assert set(found) == CALLS
    for (method, path), call in found.items():
        if path == "/healthz":
            continue
        assert "application/problem+json" in call["responses"]["default"]["content"], (method, path)
        assert "HTTPValidationError" not in str(call)
    body = found["post", "/v1/jobs"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/JobRequest"}
    example = found["post", "/v1/jobs"]["requestBody"]["content"]["application/json"]["example"]
    assert shared_api.client.post("/v1/lookups", json=example).status_code == 200
    assert {"200", "202", "413", "415", "422", "429"} <= set(found["post", "/v1/jobs"]["responses"])


def test_every_reference_of_the_openapi_document_leads_somewhere(shared_api: Api) -> None:
    document = shared_api.client.get("/openapi.json").json()
    references = set(re.findall(r"#/components/schemas/([A-Za-z_0-9]+)", str(document)))
    assert references <= set(document["components"]["schemas"])
