"""GPUs over HTTP: which device classes a job measures on, which record a lookup takes, what is reported of devices."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import update

from cukiln.types import Job, Targets
from service.winner_cache import FRESH_SECONDS
from storage.database.session import Database
from storage.database.tables import CandidateRow, DeviceRow, JobProblemRow
from storage.entities.heartbeats import drain_device
from tests.support.fixtures.api import MATMUL, Api, publish, register_gpu
from tests.support.fixtures.storage import counted_statements

H200, H100, A100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
PREDICTED = "predicted:sm_90a"


def classes_of(api: Api, *problems: dict[str, Any], target: str = "sm_90a", **fields: Any) -> list[tuple[str, str]]:
    answer = api.submit(*problems, target=target, **fields)
    assert answer.status_code in (200, 202), answer.text
    return [(problem.name, problem.device_class) for problem in Job.model_validate_json(answer.content).problems]


def silent(database: Database, uuid: str, seconds: float) -> None:
    """The last sign of life of the GPU's worker is so old."""
    with database.write() as session:
        session.execute(update(DeviceRow).where(DeviceRow.uuid == uuid).values(seen_at=DeviceRow.seen_at - seconds))


def test_without_a_gpu_a_job_predicts(api: Api) -> None:
    assert classes_of(api) == [("problem0", PREDICTED)]


@pytest.mark.parametrize("target", ["sm_90a", "sm_90"])
def test_a_job_is_measured_on_the_live_gpu_of_its_architecture(target: str, api: Api) -> None:
    register_gpu(api.database)
    register_gpu(api.database, number=1)  # two of a class are one class
    assert classes_of(api, target=target) == [("problem0", H200)]
    assert classes_of(api, target="sm_80") == [("problem0", "predicted:sm_80")]
    assert classes_of(api, target="sm_100") == [("problem0", "predicted:sm_100")]


def test_a_job_is_measured_on_every_live_class_of_its_architecture(api: Api) -> None:
    for device_class, capability in ((H200, "9.0"), (H100, "9.0"), (A100, "8.0")):
        register_gpu(api.database, device_class, capability)
    named = {**MATMUL, "name": "ffn1"}
    assert classes_of(api, named, {**MATMUL, "m": 65}) == [
        *[("ffn1", H100), ("ffn1", H200)],
        *[("problem1", H100), ("problem1", H200)],
    ]
    assert classes_of(api, {**MATMUL, "target": "sm_80"}) == [("problem0", A100)]
    assert classes_of(api, named, device_class=H200) == [("ffn1", H200)]
    mixed = [named, {**MATMUL, "device_class": PREDICTED}]
    assert classes_of(api, *mixed, device_class=H200) == [("ffn1", H200), ("problem1", PREDICTED)]


def test_an_emulation_is_never_measured(api: Api) -> None:
    """Target `cpu` has the data sheet of `sm_80`, of which there is a GPU."""
    register_gpu(api.database, A100, "8.0")
    assert classes_of(api, target="cpu") == [("problem0", "predicted:cpu")]
    refused = api.submit({**MATMUL, "device_class": A100}, target="cpu").json()
    assert (refused["field"], refused["allowed"]) == ("problems[0].device_class", ["predicted:cpu"])


def test_a_name_that_two_problems_have_is_refused_whatever_the_number_of_classes(api: Api) -> None:
    register_gpu(api.database, H200)
    register_gpu(api.database, H100)
    refused = api.submit({**MATMUL, "name": "x"}, {**MATMUL, "name": "x"}, target="sm_90a").json()
    assert (refused["type"], refused["field"]) == ("urn:cukiln:problem:duplicate-name", "problems[1].name")


@pytest.mark.parametrize("why", ["drained", "silent"])
def test_a_gpu_that_takes_no_work_is_no_class_of_a_job(why: str, api: Api) -> None:
    uuid = register_gpu(api.database)
    if why == "silent":
        silent(api.database, uuid, 60.0)
    else:
        with api.database.write() as session:
            drain_device(session, uuid, "it fell off the bus")
    assert classes_of(api) == [("problem0", PREDICTED)]
    refused = api.submit(target="sm_90a", device_class=H200)
    assert (refused.status_code, refused.json()["field"]) == (422, "device_class")
    assert refused.json()["allowed"] == [PREDICTED]


def test_one_drained_gpu_of_a_class_leaves_the_others(api: Api) -> None:
    uuid = register_gpu(api.database)
    register_gpu(api.database, number=1)
    with api.database.write() as session:
        drain_device(session, uuid, "ECC errors")
    assert classes_of(api) == [("problem0", H200)]


def test_a_class_that_is_not_live_for_the_target_is_refused_with_those_that_are(api: Api) -> None:
    register_gpu(api.database)
    refused = api.submit({**MATMUL, "device_class": H200, "target": "sm_80"}, target="sm_90a").json()
    assert (refused["field"], refused["allowed"]) == ("problems[0].device_class", ["predicted:sm_80"])
    refused = api.submit({**MATMUL, "device_class": "NVIDIA B200"}, target="sm_90a").json()
    assert refused["allowed"] == [H200, PREDICTED]
    assert refused["detail"] == "No live worker measures sm_90a kernels on 'NVIDIA B200'."


def test_a_prediction_does_not_count_as_cached_once_there_is_a_gpu(api: Api) -> None:
    publish(api.database, target="sm_90a")
    assert api.submit(target="sm_90a").status_code == 200
    register_gpu(api.database)
    assert api.submit(target="sm_90a").status_code == 202
    publish(api.database, target="sm_90a", device_class=H200)
    assert api.submit(target="sm_90a").status_code == 200
    register_gpu(api.database, H100)
    answer = api.submit(target="sm_90a")
    assert answer.status_code == 202
    assert [(each["device_class"], each["cached"]) for each in answer.json()["problems"]] == [
        (H100, False),
        (H200, True),
    ]


def test_candidates_of_a_name_are_those_of_all_its_classes(api: Api) -> None:
    register_gpu(api.database, H200)
    register_gpu(api.database, H100)
    job = api.submit({**MATMUL, "name": "ffn1"}, {**MATMUL, "name": "other"}, target="sm_90a").json()["job"]
    with api.database.write() as session:
        for (problem,) in session.execute(JobProblemRow.__table__.select().with_only_columns(JobProblemRow.id)):
            for candidate in ("a", "b"):
                fields = {"schedule": {}, "kernel": "k" * 64, "build": "b" * 64}
                session.add(CandidateRow(job_problem_id=problem, candidate=candidate * 64, **fields))
    found, cursor = [], None
    while True:
        asked: dict[str, Any] = {"problem": "ffn1", "limit": 3, **({"cursor": cursor} if cursor else {})}
        page = api.client.get(f"/v1/jobs/{job}/candidates", params=asked).json()
        found += [(each["problem"], each["device_class"], each["candidate"][0]) for each in page["candidates"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == [("ffn1", device_class, candidate) for device_class in (H100, H200) for candidate in "ab"]


def lookup(api: Api, target: str = "sm_90a", **fields: Any) -> tuple[str | None, str]:
    """The device class of the answer, None for a miss; and its key."""
    body = {"problems": [MATMUL], "target": target, **fields}
    (result,) = api.client.post("/v1/lookups", json=body).json()["results"]
    return result["record"] and result["record"]["device_class"], result["key"]


def test_a_lookup_prefers_the_live_class_then_what_was_measured_then_a_prediction(api: Api) -> None:
    missed = lookup(api)
    predicted = publish(api.database, target="sm_90a")
    assert missed == (None, predicted.key)
    assert lookup(api) == (PREDICTED, predicted.key)
    imported = publish(api.database, target="sm_90a", device_class="NVIDIA GH200 480GB")
    publish(api.database, {**MATMUL, "m": 65}, target="sm_90a", device_class="NVIDIA AAA")  # of another problem
    publish(api.database, target="sm_80", device_class=A100)  # of another architecture
    assert lookup(api) == (imported.device_class, imported.key)
    register_gpu(api.database)
    assert lookup(api) == (imported.device_class, imported.key)
    measured = publish(api.database, target="sm_90a", device_class=H200)
    assert lookup(api) == (H200, measured.key)
    assert lookup(api, device_class=PREDICTED) == (PREDICTED, predicted.key)
    assert lookup(api, device_class="NVIDIA B200")[0] is None
    assert lookup(api, "sm_80")[0] == A100


def test_a_miss_has_the_key_that_a_job_would_publish(api: Api) -> None:
    publish(api.database, {**MATMUL, "m": 65}, target="sm_90a", device_class="NVIDIA AAA")
    for fields in ({}, {}, {"device_class": PREDICTED}):
        (problem,) = api.submit(target="sm_90a", **fields).json()["problems"]
        assert lookup(api, **fields) == (None, problem["key"])
        register_gpu(api.database)  # the first time around there is none


def test_a_record_without_a_kernel_that_the_policy_allows_gives_way_to_the_next(api: Api) -> None:
    publish(api.database, target="sm_90a")
    publish(api.database, target="sm_90a", device_class=H200, workspace=(4096,))
    assert lookup(api)[0] == H200
    assert lookup(api, workspace_limit_bytes=0)[0] == PREDICTED


def test_a_lookup_asks_for_no_more_however_many_classes_have_records(api: Api) -> None:
    def asked() -> tuple[int, int]:
        with counted_statements(api.service.winners.database) as statements:
            assert [lookup(api, problems=[{**MATMUL, "m": m}])[0] for m in (64, 65)] == ["NVIDIA G000", PREDICTED]
        asked = [statement for statement in statements if "winners" in statement]
        return len(asked), sum(statement.count("?") for statement in asked)

    publish(api.database, target="sm_90a", device_class="NVIDIA G000")
    publish(api.database, {**MATMUL, "m": 65}, target="sm_90a")
    asked()
    time.sleep(2 * FRESH_SECONDS)
    before = asked()
    for number in range(1, 30):
        publish(api.database, {**MATMUL, "m": 1000}, target="sm_90a", device_class=f"NVIDIA G{number:03}")
        publish(api.database, target="sm_90a", device_class=f"NVIDIA G{number:03}")
    time.sleep(2 * FRESH_SECONDS)
    assert asked() == before


def test_what_was_measured_elsewhere_is_looked_for_on_the_next_classes_in_turn(api: Api) -> None:
    for number in range(12):
        publish(
            api.database, target="sm_90a", device_class=f"NVIDIA G{number:03}", workspace=(4096 if number != 3 else 0,)
        )
    assert lookup(api)[0] == "NVIDIA G000"
    assert lookup(api, workspace_limit_bytes=0)[0] == "NVIDIA G003"
    assert lookup(api, "sm_80")[0] is None


def test_what_requests_may_name_is_asked_of_the_database_once_each(api: Api) -> None:
    with counted_statements(api.service.database) as statements:
        api.service.known()
    assert [
        table
        for table in ("toolchains", "devices")
        if sum(f"FROM {table}" in statement for statement in statements) == 1
    ] == [
        "toolchains",
        "devices",
    ]


def test_targets_tell_the_gpus_and_why_one_takes_no_work(api: Api) -> None:
    live, gone = register_gpu(api.database), register_gpu(api.database, number=1)
    drained = register_gpu(api.database, H100)
    with api.database.write() as session:
        drain_device(session, drained, "it fell off the bus")
    silent(api.database, drained, 3600.0)  # a worker ends when its GPU is drained
    silent(api.database, gone, 3600.0)
    parsed = Targets.model_validate_json(api.client.get("/v1/targets").content)
    assert [(device.uuid, device.drained) for device in parsed.devices] == [
        (drained, "it fell off the bus"),
        (live, None),
    ]
    (_, first) = parsed.devices
    assert (first.device_class, first.capability, first.driver) == (H200, "9.0", "580.95.05")
    assert (first.multiprocessors, first.memory_bytes, first.worker) == (132, 150_000_000_000, "host:1")
    classes = {target.target: target.device_classes for target in parsed.targets}
    assert (classes["sm_90a"], classes["sm_80"]) == ([H200, PREDICTED], ["predicted:sm_80"])
    silent(api.database, drained, 24 * 3600.0)
    assert [each["uuid"] for each in api.client.get("/v1/targets").json()["devices"]] == [live]


@pytest.mark.parametrize("changed", ["driver", "plan_version"])
def test_what_another_driver_or_test_plan_measured_is_measured_again(changed: str, api: Api) -> None:
    register_gpu(api.database)
    publish(api.database, target="sm_90a", device_class=H200)
    assert api.submit(target="sm_90a").status_code == 200
    register_gpu(api.database, **{changed: "another"})  # type: ignore[arg-type]
    assert api.submit(target="sm_90a").status_code == 202
    assert lookup(api)[0] == H200  # it is still the best that is known
    register_gpu(api.database, number=1)  # one that would measure the same times
    assert api.submit(target="sm_90a").status_code == 200


def test_a_job_says_which_gpu_it_waits_for_in_vain(api: Api) -> None:
    uuid = register_gpu(api.database)
    job = api.submit(target="sm_90a").json()["job"]

    def waiting_for() -> str | None:
        return Job.model_validate_json(api.client.get(f"/v1/jobs/{job}").content).progress.waiting_for

    assert waiting_for() is None
    silent(api.database, uuid, 60.0)
    assert waiting_for() == f"no live worker measures on {H200}: the worker of {uuid}, host:1, is gone"
    register_gpu(api.database)
    assert waiting_for() is None
    with api.database.write() as session:
        drain_device(session, uuid, "it fell off the bus")
    assert waiting_for() == f"no live worker measures on {H200}: {uuid} was drained: it fell off the bus"
    register_gpu(api.database, number=1)
    assert waiting_for() is None
    silent(api.database, f"GPU-{H200}-1", 60.0)
    api.client.delete(f"/v1/jobs/{job}")
    assert waiting_for() is None
    predicted = api.submit(target="sm_80").json()
    assert predicted["progress"]["waiting_for"] is None
