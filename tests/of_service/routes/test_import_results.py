"""What was measured elsewhere comes back: records as of a GPU, with their provenance; nothing twice, nothing wrong."""

from __future__ import annotations

import copy
import json
import re
import sqlite3
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from markupsafe import escape

from cukiln.cli.elsewhere import import_results, parts_of, read_results, result_files
from cukiln.client import Client
from cukiln.errors import BadRequest, UsageError
from cukiln.kernels.load_kernel import choose
from cukiln.types import Job, WinnerRecord
from cukiln.vendor_text import vendor_of_record
from storage.config.settings import Settings, load_settings
from tests.support.fixtures.elsewhere import REQUEST, results_in
from tests.support.fixtures.service import Started

CHANGED = {"unsteady": ["the clock went from 1980 to 1700 MHz"], "limited_by": ["sw_power_cap"]}

MISSING = "the vendor's library failed: no cuDNN"

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return load_settings(data_dir=tmp_path_factory.mktemp("import"), port=0, workers=1, gpus="none")


@pytest.fixture(scope="module")
def client(settings: Settings, at_work: Started) -> Iterator[Client]:
    """A fresh service without a GPU."""
    with at_work(settings) as running, Client(running.url, cache_dir=settings.data_dir / "client") as found:
        yield found


@pytest.fixture(scope="module")
def measured(measured: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """On a GPU that changed while the first problem's best took turns, and had a cap throughout; no vendor has the
    second problem."""
    content = results_in(measured)
    first, second = (problem["comparison"] for problem in content["problems"])
    first |= CHANGED
    second |= {"vendor": None, "vendor_missing": MISSING}
    for contender in second["contenders"]:
        contender["vendor_ratio"] = None
    folder = tmp_path_factory.mktemp("changed")
    (folder / "results.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def results(measured: Path) -> dict[str, Any]:
    return results_in(measured)


@pytest.fixture(scope="module")
def job(client: Client, measured: Path) -> Job:
    (sent,) = import_results(client, measured)
    return client.wait(sent, timeout=120)


@pytest.fixture(scope="module")
def records(client: Client, job: Job) -> dict[str, WinnerRecord]:
    assert job.state == "done", job
    return {problem.name: client.kernel(problem.key) for problem in job.problems}


def changed(results: dict[str, Any], edit: Edit) -> dict[str, Any]:
    copied = copy.deepcopy(results)
    edit(copied)
    return copied


def candidate(results: dict[str, Any], number: int = 0) -> Any:
    return results["problems"][0]["candidates"][number]


def rows(settings: Settings) -> dict[str, int]:
    tables = ("jobs", "job_problems", "candidates", "builds", "verdicts", "measurements", "winners", "tasks")
    with sqlite3.connect(settings.data_dir / "cukiln.db") as connection:
        return {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}


def test_a_record_is_of_the_device_that_measured(
    records: dict[str, WinnerRecord], results: dict[str, Any], job: Job
) -> None:
    for problem, sent in zip(job.problems, results["problems"], strict=True):
        record = records[problem.name]
        assert (record.device_class, record.ranked_by) == (results["device"]["name"], "measured")
        median_us = record.vendor.median_us if record.vendor else None
        assert median_us == (sent["comparison"]["vendor"] or {}).get("median_us")
        by_id = {each["candidate"]: each for each in sent["candidates"]}
        for entry in record.front:
            assert entry.verified == "gpu"
            assert entry.code_digest == by_id[entry.candidate]["code_digest"]
            assert entry.measured_us is not None
        best = min(sent["comparison"]["contenders"], key=lambda contender: contender["median_us"])
        assert record.front[0].measured_us == best["median_us"]
        ratio = record.front[0].vendor_ratio
        assert (ratio.model_dump() if ratio else None) == best["vendor_ratio"]
        assert problem.winner is not None and problem.winner.vendor_ratio == ratio
        where = record.front[0].measured_on
        assert where is not None and where.unsteady == problem.winner.unsteady == sent["comparison"]["unsteady"]
        assert where.limited_by == problem.winner.limited_by == sent["comparison"]["limited_by"]
        assert where.vendor_missing == problem.winner.vendor_missing == sent["comparison"]["vendor_missing"]
    assert [record.vendor is None for record in records.values()] == [False, True]


def test_the_page_of_a_job_shows_the_vendor_beside_the_winner_and_what_became_of_the_gpu(
    client: Client, records: dict[str, WinnerRecord], job: Job
) -> None:
    page = urllib.request.urlopen(f"{client.url}/jobs/{job.job}").read().decode()
    cells = re.findall(r'<small class="vendor">vendor ([^<]*)</small>', page)
    vendors = [vendor for record in records.values() if (vendor := vendor_of_record(record))]
    assert [cell.partition(": ")[2] for cell in cells] == [vendor.text for vendor in vendors]
    assert f'<small class="vendor-missing">vendor not compared: {escape(MISSING)}</small>' in page
    assert len(cells) == 1 and all(re.fullmatch(r".* µs: .*NumPy \([0-9.]+–[0-9.]+\)", cell) for cell in cells)
    assert page.count('<small class="unsteady">unsteady: the clock went from 1980 to 1700 MHz</small>') == 1
    assert page.count('<small class="limited">limited throughout by sw_power_cap</small>') == 1


def test_a_record_says_where_it_was_measured_and_when(
    records: dict[str, WinnerRecord], results: dict[str, Any], job: Job
) -> None:
    for record in records.values():
        verification = record.front[0].verdict
        assert verification["venue"] == "gpu"
        assert verification["plan_version"] == results["plan_versions"]["matmul"]
        device = results["device"]
        imported = record.front[0].imported
        assert imported is not None
        assert (imported.id, imported.by) == (job.job, "loopback")
        assert (imported.device, imported.uuid) == (device["name"], device["uuid"])
        assert imported.measured_at == results["written_at"] <= imported.imported_at


def test_the_winners_library_can_be_fetched_and_chosen(client: Client, records: dict[str, WinnerRecord]) -> None:
    for record in records.values():
        assert client.blob(record.front[0].so_sha256)[:4] == b"\x7fELF"
        assert choose(record) == record.front[0]


def test_candidates_have_their_verdicts_and_times(client: Client, job: Job, results: dict[str, Any]) -> None:
    shown = {(each.problem, each.candidate): each for each in client.candidates(job.job)}
    sent = {(p["name"], each["candidate"]): each for p in results["problems"] for each in p["candidates"]}
    assert shown.keys() == sent.keys()
    for key, one in shown.items():
        assert (one.verdict, one.verified) == ("ok", "gpu")
        assert one.measured_us == sent[key]["measurement"]["median_us"]


def test_importing_twice_changes_nothing(
    client: Client, job: Job, measured: Path, settings: Settings, records: dict[str, WinnerRecord]
) -> None:
    before = rows(settings)
    (again,) = import_results(client, measured)
    assert (again.job, again.state) == (job.job, "done")
    assert rows(settings) == before
    assert {name: client.kernel(record.key).revision for name, record in records.items()} == {
        name: record.revision for name, record in records.items()
    }


def test_a_lookup_finds_what_was_imported(client: Client, job: Job) -> None:
    answers = client.lookup(REQUEST["problems"], target="sm_90a", device_class=job.problems[0].device_class)
    assert [result.record is not None for result in answers] == [True, True]


def test_code_of_another_compiler_is_refused_by_candidate(client: Client, results: dict[str, Any], job: Job) -> None:
    """The best candidate's code is not what this service's nvcc makes: it says so, and the next one wins."""
    first, second = results["problems"]

    def other_code(content: dict[str, Any]) -> None:
        content["device"]["name"] = "Another GPU"
        content["problems"] = [content["problems"][0]]
        content["problems"][0]["comparison"] = None
        for one in content["problems"][0]["candidates"]:
            one["measurement"]["device"] = "Another GPU"
        fastest = min(content["problems"][0]["candidates"], key=lambda each: each["measurement"]["median_us"])
        fastest["code_digest"] = "0" * 64

    assert second["name"] != first["name"]
    sent = changed(results, other_code)
    fastest = min(first["candidates"], key=lambda each: each["measurement"]["median_us"])["candidate"]
    ended = client.wait(client.send_results(sent), timeout=120)
    assert ended.state == "done", ended
    shown = {each.candidate: each for each in client.candidates(ended.job)}
    assert shown[fastest].verdict == "skipped"
    assert "another nvcc made that" in (shown[fastest].message or "")
    assert client.kernel(ended.problems[0].key).front[0].candidate != fastest


def test_results_that_only_have_other_code_have_no_winner(client: Client, results: dict[str, Any], job: Job) -> None:
    def other_code(content: dict[str, Any]) -> None:
        content["problems"] = [content["problems"][1]]
        content["problems"][0]["name"] = "foreign"
        content["problems"][0]["comparison"] = None
        for number, one in enumerate(content["problems"][0]["candidates"]):
            one["code_digest"] = f"{number:064x}"

    ended = client.wait(client.send_results(changed(results, other_code)), timeout=120)
    assert ended.state == "failed"
    assert "another nvcc made that" in (ended.problems[0].error or "")


def test_imported_details_do_not_say_where_and_how_it_was_verified(
    client: Client, results: dict[str, Any], job: Job
) -> None:
    def forged(content: dict[str, Any]) -> None:
        content["device"]["name"] = "Fourth GPU"
        content["problems"] = [content["problems"][0]]
        content["problems"][0]["comparison"] = None
        for each in content["problems"][0]["candidates"]:
            each["measurement"]["device"] = "Fourth GPU"
            each["details"] |= {"venue": "here", "plan_version": "newer"}

    ended = client.wait(client.send_results(changed(results, forged)), timeout=120)
    assert ended.state == "done", ended
    first = client.kernel(ended.problems[0].key).front[0]
    for details in (first.verdict, client.candidate(first.candidate, job=ended.job).details):
        assert details is not None
        assert (details["venue"], details["plan_version"]) == ("gpu", results["plan_versions"]["matmul"])


def test_what_was_not_measured_leaves_the_search_open(client: Client, results: dict[str, Any], job: Job) -> None:
    def unmeasured(content: dict[str, Any]) -> None:
        content["device"]["name"] = "Third GPU"
        content["complete"] = False
        content["problems"] = [content["problems"][0]]
        content["problems"][0]["comparison"] = None
        for one in content["problems"][0]["candidates"]:
            one["measurement"]["device"] = "Third GPU"
        one = candidate(content)
        one |= {"verdict": "skipped", "message": "left out by --limit", "measurement": None, "details": {}}

    ended = client.wait(client.send_results(changed(results, unmeasured)), timeout=120)
    assert ended.state == "done"
    assert client.kernel(ended.problems[0].key).searches == []


def set_path(*path: Any) -> Edit:
    """Put the last of `path` where the others lead."""
    *places, last, value = path

    def edit(content: dict[str, Any]) -> None:
        found: Any = content
        for place in places:
            found = found[place]
        found[last] = value

    return edit


FIRST = ("problems", 0, "candidates", 0)
IN_TWO_DAYS = time.time() + 2 * 86_400
WRONG: list[tuple[Edit, str, str]] = [
    (set_path("schema", 2), "schema", "1"),
    (set_path("colour", 1), "colour", "not a field"),
    (set_path("plan_versions", "matmul", "0" * 64), "plan_versions", "another version of the verification plan"),
    (set_path("problems", 0, "generator", "0" * 64), "problems[0].generator", "another release"),
    (set_path("problems", 0, "problem", "zeta", 1), "problems[0].problem.zeta", "not a field"),
    (set_path("problems", 0, "problem", "m", 41), "problems[0].candidates[0].candidate", "is not the id"),
    (set_path("problems", 0, "operator", "matmult"), "problems[0].operator", "unknown operator"),
    (set_path("problems", 0, "target", "sm_80"), "problems[0].target", "runs no code for sm_80"),
    (set_path("problems", 0, "target", "cpu"), "problems[0].target", "'cpu' is not an architecture"),
    (set_path("problems", 0, "search", {"level": 7}), "problems[0].search.level", ""),
    (set_path("problems", 0, "search", {"level": 1, "screening": 1}), "problems[0].search.screening", "not a field"),
    (set_path("problems", 0, "space_size", 10**30), "problems[0].space_size", "9007199254740991"),
    (set_path("problems", 0, "space_size", 1), "problems[0].space_size", "come from no space of 1"),
    (set_path("problems", 0, "name", "small"), "problems[1].name", "already called"),
    (set_path("problems", 0, "deterministic", True), "problems[1].deterministic", "one policy"),
    (set_path("problems", 0, "candidates", []), "problems[0].candidates", "at least 1"),
    (set_path(*FIRST, "candidate", "0" * 64), "problems[0].candidates[0].candidate", "is not the id"),
    (set_path(*FIRST, "kernel", "0" * 64), "problems[0].candidates[0].kernel", "is not the id"),
    (set_path(*FIRST, "code_digest", "xyz"), "problems[0].candidates[0].code_digest", ""),
    (set_path(*FIRST, "code_digest", None), "problems[0].candidates[0].code_digest", "has code"),
    (set_path(*FIRST, "toolchain", "0" * 64), "problems[0].candidates[0].toolchain", "no such toolchain"),
    (set_path(*FIRST, "resources", {"registers": 3}), "problems[0].candidates[0].resources", "lacks"),
    (set_path(*FIRST, "details", {"deep": [{"seed": 10**400}]}), "problems[0].candidates[0].details", "holds 1000"),
    (set_path(*FIRST, "details", {"words": "x" * 17_000}), "problems[0].candidates[0].details", "16384"),
    (set_path(*FIRST, "details", "seed", "x"), "problems[0].candidates[0].details.seed", ""),
    (set_path(*FIRST, "details", "cases", "x"), "problems[0].candidates[0].details.cases", ""),
    (set_path(*FIRST, "details", "cases", [None]), "problems[0].candidates[0].details.cases[0]", ""),
    (
        set_path(*FIRST, "details", "cases", 0, "max_error", "x"),
        "problems[0].candidates[0].details.cases[0].max_error",
        "",
    ),
    (
        set_path(*FIRST, "details", "cases", 0, "error_bound", {}),
        "problems[0].candidates[0].details.cases[0].error_bound",
        "",
    ),
    (
        set_path(*FIRST, "details", "cases", 0, "extents", 3),
        "problems[0].candidates[0].details.cases[0].extents",
        "",
    ),
    (set_path(*FIRST, "details", "shared_memory", "x"), "problems[0].candidates[0].details.shared_memory", ""),
    (set_path(*FIRST, "details", "limit", 5), "problems[0].candidates[0].details.limit", ""),
    (set_path(*FIRST, "prediction", "us", -1), "problems[0].candidates[0].prediction.us", "greater than or equal to 0"),
    (set_path(*FIRST, "prediction", "occupancy", "x"), "problems[0].candidates[0].prediction.occupancy", ""),
    (set_path(*FIRST, "verdict", "fine"), "problems[0].candidates[0].verdict", ""),
    (set_path(*FIRST, "verdict", "incorrect"), "problems[0].candidates[0].measurement", "if, and only if"),
    (set_path(*FIRST, "measurement", None), "problems[0].candidates[0].measurement", "if, and only if"),
    (set_path(*FIRST, "measurement", "median_us", -1.0), "problems[0].candidates[0].measurement", "no measurement"),
    (set_path(*FIRST, "measurement", "low_us", 1e9), "problems[0].candidates[0].measurement", "no measurement"),
    (set_path("device", "name", "predicted:sm_80"), "device.name", "predictions"),
    (set_path("written_at", IN_TWO_DAYS), "written_at", "in the future"),
    (
        set_path(*FIRST, "measurement", "measured_at", IN_TWO_DAYS),
        "problems[0].candidates[0].measurement.measured_at",
        "in the future",
    ),
    (set_path(*FIRST, "measurement", "measured_at", -1.0), "problems[0].candidates[0].measurement.measured_at", "0 to"),
    (
        set_path("problems", 0, "comparison", "measured_at", IN_TWO_DAYS),
        "problems[0].comparison.measured_at",
        "in the future",
    ),
    (set_path(*FIRST, "measurement", "median_us", "1"), "problems[0].candidates[0].measurement", ""),
    (set_path(*FIRST, "measurement", "device", "Other"), "problems[0].candidates[0].measurement", "one device"),
    (set_path(*FIRST, "measurement", "driver", "1"), "problems[0].candidates[0].measurement", "one driver"),
    (
        set_path("problems", 0, "comparison", "contenders", 0, "candidate", "0" * 64),
        "problems[0].comparison.contenders[0].candidate",
        "correct candidates",
    ),
    (
        set_path("problems", 0, "comparison", "contenders", 0, "ratio", 0.0),
        "problems[0].comparison.contenders[0]",
        "no measurement",
    ),
    (
        set_path("problems", 0, "comparison", "contenders", 0, "vendor_ratio", "low", 2e9),
        "problems[0].comparison.contenders[0].vendor_ratio",
        "is no measurement",
    ),
    (
        set_path("problems", 0, "comparison", "vendor", None),
        "problems[0].comparison.contenders[0].vendor_ratio",
        "send null",
    ),
    (set_path("problems", 0, "comparison", "contenders", []), "problems[0].comparison.contenders", "has contenders"),
]


@pytest.mark.parametrize(
    ("edit", "field", "message"), WRONG, ids=[f"{number}-{each[1]}" for number, each in enumerate(WRONG)]
)
def test_what_does_not_fit_is_refused_by_name(
    edit: Edit, field: str, message: str, client: Client, results: dict[str, Any], job: Job, settings: Settings
) -> None:
    before = rows(settings)
    with pytest.raises(BadRequest) as caught:
        client.send_results(changed(results, edit))
    error = caught.value
    assert error.status == 422
    assert error.detail is not None
    faults = error.detail.errors or [error.detail.model_dump()]
    faults = [(str(fault.get("field")), f"{fault.get('detail')} {fault.get('allowed')}".lower()) for fault in faults]
    assert any(place.startswith(field) and message.lower() in said for place, said in faults), faults
    assert rows(settings) == before, "nothing of it is written"


def test_a_schedule_that_is_not_of_the_problem_is_refused(client: Client, results: dict[str, Any], job: Job) -> None:
    from codegen.identity import candidate_id, problem_digest

    def edit(content: dict[str, Any]) -> None:
        own = candidate(content)
        own["schedule"]["tile_m"] = 7
        own["candidate"] = candidate_id(problem_digest(content["problems"][0]["problem"]), own["schedule"])

    with pytest.raises(BadRequest, match="no such schedule"):
        client.send_results(changed(results, edit))


@pytest.mark.parametrize("body", [b"NaN", b'{"schema": NaN}', b"[]", b'{"schema": 1, "schema": 1}', b'"\\u0000"'])
def test_what_is_no_json_object_is_refused(body: bytes, client: Client) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{client.url}/v1/results", content=body, headers=headers, timeout=60)
    assert answer.status_code in (400, 422) and answer.headers["content-type"] == "application/problem+json"


def test_large_results_are_sent_in_parts(results: dict[str, Any]) -> None:
    whole = list(parts_of(results, 10**9))
    assert whole == [results]
    parts = list(parts_of(results, 1))
    assert [[problem["name"] for problem in part["problems"]] for part in parts] == [["wide"], ["small"]]
    assert all(part["device"] == results["device"] for part in parts)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[]", "no list of problems"), (None, "cannot read")])
def test_a_file_that_holds_no_results_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_results(*result_files(tmp_path if text is not None else path))


def test_results_of_a_stand_alone_run_are_plain_json(results: dict[str, Any]) -> None:
    assert json.loads(json.dumps(results, allow_nan=False)) == results
