"""The profile of a job over a real service: the API, the page, the command line; and of a file, without a service."""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import cukiln
from codegen.counts import Openings
from codegen.lower import lower
from codegen.operators import operator
from codegen.predict.predict_uncompiled import estimate
from codegen.predict.roofline import predict
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import target
from cukiln.cli.main import main
from cukiln.types import ProfileOperator, ProfilePage
from service.pages import pages
from storage.config.settings import load_settings
from storage.database.session import Database
from storage.entities.winners import publish_winner
from tests.support.fixtures.api import MATMUL, Api, publish, serving, shared_api
from tests.support.fixtures.browser import Open, browser, needs_chromium, numbers, open_page, screenshot
from tests.support.fixtures.service import Started
from tests.support.fixtures.storage import write_migrated
from tests.support.run.each_run import some_each_run

__all__ = ["browser", "open_page", "shared_api"]

RING: dict[str, Any] = {
    "name": "dense", "operator": "matmul", "m": 16, "n": 24, "k": 40, "layout": "nt", "dtype": "int64",
    "fraction_bits": 18,
}  # fmt: skip
CONV: dict[str, Any] = {
    "name": "f2", "operator": "conv2d", "n": 1, "h": 8, "w": 8, "c": 8, "k": 8, "r": 3, "s": 3, "padding": 1,
    "dtype": "float16", "winograd": "f2",
    "search": {"tunables": {"algorithm": ["winograd"], "output_tile": [2]}, "limit": 1},
}  # fmt: skip
PROBLEMS = [RING, CONV, {"name": "plain", "operator": "matmul", "m": 40, "n": 48, "k": 36, "layout": "nt"}]
REQUEST: dict[str, Any] = {"target": "sm_80", "search": {"level": 0, "limit": 1}, "problems": PROBLEMS}
COUNTS = (
    "times", "multiplications", "executed", "limb_products", "truncations", "bytes_read", "bytes_written", "launches",
    "workspace_bytes", "ring_bytes",
)  # fmt: skip
MATMUL_16: dict[str, Any] = {"operator": "matmul", "m": 16, "n": 16, "k": 16}
LOOKS = [
    *some_each_run([{}, {"viewport": {"width": 360, "height": 740}}]),
    pytest.param({"color_scheme": "dark"}, marks=pytest.mark.long),  # other colours alone, as of `test_pages`
]
KEY = "a key of more than 16 characters"
SHEET = target("sm_80")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def service(folder: Path, at_work: Started) -> Iterator[str]:
    """It has winners of the two problems that compile longest."""
    settings = load_settings(data_dir=folder, workers=1, port=0)
    database = Database(settings.database_url)
    write_migrated(Path(str(database.url.database)))
    for fields in (RING, CONV):
        publish_first(database, fields)
    database.dispose()
    with at_work(settings) as running:
        yield running.url


def publish_first(database: Database, fields: dict[str, Any]) -> None:
    """The first candidate of the problem's search, with the registers that are estimated before a compile."""
    search = Search.model_validate(fields.get("search", REQUEST["search"]))
    asked = {name: value for name, value in fields.items() if name not in ("name", "search")}
    (candidate,) = lower(operator(fields["operator"]).parse(asked), SHEET, search).candidates
    record = publish(database, candidate.problem.canonical(), search=search.canonical())
    resources = estimate(candidate, SHEET)
    own = {
        "candidate": candidate.id,
        "schedule": candidate.schedule.as_dict(),
        "kernel": candidate.kernel.id,
        "workspace_bytes": operator(fields["operator"]).cost(candidate.problem, candidate.schedule).workspace_bytes,
        "resources": resources.as_dict(),
        "predicted_us": predict(candidate, resources, SHEET).us,
    }
    with database.write() as session:
        front = [record.front[0].model_copy(update=own)]
        publish_winner(session, record.model_copy(update={"front": front}), attempt="another")


@pytest.fixture(scope="module")
def job(service: str) -> str:
    with cukiln.Client(service) as client:
        done = client.wait(client.submit(REQUEST), timeout=240)
        assert done.state == "done"
    return done.job


def asked(service: str, path: str, **parameters: Any) -> httpx.Response:
    return httpx.get(f"{service}{path}", params=parameters, trust_env=False)


def page_of(service: str, job: str, **parameters: Any) -> ProfilePage:
    answer = asked(service, f"/v1/jobs/{job}/profile", **parameters).raise_for_status()
    return ProfilePage.model_validate(answer.json())


def test_the_counts_are_those_of_the_operator_for_the_winners_schedule(service: str, job: str) -> None:
    page = page_of(service, job)
    assert [row.problem for row in page.operators] == ["dense", "f2", "plain"] and page.next_cursor is None
    for row, fields in zip(page.operators, PROBLEMS, strict=True):
        op = operator(str(fields["operator"]))
        problem = op.parse({name: value for name, value in fields.items() if name not in ("name", "search")})
        schedule = Schedule.of(row.schedule)
        launches = op.launches(problem, schedule, target("sm_80"))
        assert [kernel.counts.name for kernel in row.kernels] == [launch.function for launch in launches]
        for kernel, launch in zip(row.kernels, launches, strict=True):
            assert [part.name for part in kernel.primitives] == [part.name for part in launch.primitives]
            assert (
                sum(part.executed for part in kernel.primitives)
                == kernel.counts.executed
                == launch.total.multiplications
            )
            assert (
                sum(part.bytes_read for part in kernel.primitives)
                == kernel.counts.bytes_read
                == launch.total.bytes_read
            )
        counts, cost = row.counts, op.cost(problem, schedule)
        assert (counts.launches, counts.workspace_bytes) == (cost.launches, cost.workspace_bytes)
        assert counts.multiplications == op.multiplications(problem)
        assert counts.ring_bytes == op.ring_bytes(problem, schedule, Openings())


def test_nothing_was_measured_and_every_time_says_so(service: str, job: str) -> None:
    """A kernel's times add up to the run's; the winner's own prediction is that of the job."""
    with cukiln.Client(service) as client:
        predicted = {
            problem.name: problem.winner.predicted_us for problem in client.job(job).problems if problem.winner
        }
    for row in page_of(service, job).operators:
        assert row.counts.seconds_from == "predicted"
        assert row.counts.seconds == pytest.approx((predicted[row.problem] or 0.0) * 1e-6)
        kernels = [kernel.counts for kernel in row.kernels]
        assert sum(kernel.seconds or 0.0 for kernel in kernels) == pytest.approx(row.counts.seconds)
        assert {kernel.seconds_from for kernel in kernels} == {"predicted"}


def test_bytes_of_a_two_party_evaluation_depend_on_what_is_secret(service: str, job: str) -> None:
    secret, public = (page_of(service, job, filters=filters).operators[0] for filters in ("secret", "public"))
    truncated = 8 * 16 * 24
    assert public.counts.ring_bytes == truncated
    assert secret.counts.ring_bytes == truncated + 8 * (16 * 40 + 40 * 24)
    assert {row.counts.ring_bytes for row in page_of(service, job).operators[1:]} == {None}


def test_pages_follow_each_other(service: str, job: str) -> None:
    first = page_of(service, job, limit=2)
    rest = page_of(service, job, limit=2, cursor=first.next_cursor)
    assert [row.problem for row in (*first.operators, *rest.operators)] == ["dense", "f2", "plain"]
    assert rest.next_cursor is None
    with cukiln.Client(service) as client:
        assert [row.problem for row in client.profile(job)] == ["dense", "f2", "plain"]


@pytest.mark.parametrize(
    ("parameters", "kind"),
    [
        ({"filters": "hidden"}, "invalid-value"), ({"opened": "all"}, "invalid-value"), ({"limit": 0}, "invalid-value"),
        ({"cursor": "x"}, "invalid-cursor"), ({"schedule": 1}, "unknown-field"),
    ],
)  # fmt: skip
def test_what_it_cannot_be_asked_for(service: str, job: str, parameters: dict[str, Any], kind: str) -> None:
    answer = asked(service, f"/v1/jobs/{job}/profile", **parameters)
    assert 400 <= answer.status_code < 500 and answer.json()["type"].endswith(kind)


def test_a_job_without_a_winner_has_an_empty_profile(shared_api: Api) -> None:
    job = shared_api.submit(MATMUL).json()["job"]
    assert shared_api.client.get(f"/v1/jobs/{job}/profile").json()["operators"] == []
    assert "No problem of this job has a winner yet" in shared_api.client.get(f"/jobs/{job}/profile").text


EMPTY = {"name": "empty", **MATMUL_16, "search": {"tunables": {"tile_m": [256]}}}
WHY = "tile_m = 256 is mostly padding for m = 16"


def test_a_partial_job_says_which_problem_has_no_profile_and_why(
    service: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with cukiln.Client(service) as client:
        done = client.wait(client.submit({**REQUEST, "problems": [EMPTY, PROBLEMS[2]]}), timeout=240)
    assert done.state == "partial"
    page = page_of(service, done.job)
    (left_out,) = page.left_out
    assert [row.problem for row in page.operators] == ["plain"]
    assert (left_out.problem, left_out.state) == ("empty", "failed") and WHY in left_out.why
    first = page_of(service, done.job, limit=1)
    assert (first.operators, len(first.left_out)) == ([], 1) and first.next_cursor is not None
    text = asked(service, f"/jobs/{done.job}/profile").text
    assert 'data-left-out="empty"' in text and WHY in text
    code, text = printed(capsys, "profile", done.job, "--url", service, monkeypatch=monkeypatch)
    assert code == 0 and "plain on" in text and "empty (matmul) has no profile" in text
    text = printed(capsys, "profile", done.job, "--url", service, "--json", monkeypatch=monkeypatch)[1]
    assert [each["problem"] for each in json.loads(text)["left_out"]] == ["empty"]


def test_of_a_job_that_failed_no_winner_is_promised(service: str) -> None:
    with cukiln.Client(service) as client:
        done = client.wait(client.submit({**REQUEST, "problems": [EMPTY]}), timeout=240)
    assert done.state == "failed"
    text = asked(service, f"/jobs/{done.job}/profile").text
    assert "No problem of this job has a winner." in text and WHY in text


def test_the_page_leads_to_the_next_problems_and_says_what_its_sums_are_of(
    service: str, folder: Path, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "not of the whole job" not in asked(service, f"/jobs/{job}/profile").text
    monkeypatch.setattr(pages, "PROBLEMS_SHOWN", 2)
    path, shown = f"/jobs/{job}/profile?filters=public", []
    with serving(folder) as api:  # a second one, in this process
        while path:
            text = api.client.get(path).raise_for_status().text
            shown.append(re.findall(r'<tbody data-problem="(\w+)">\n<tr data-level', text))
            assert "on this page, not of the whole job" in text
            assert ("with public filters" in text) == ("dense" in shown[-1])  # others send nothing
            following = re.search(r'href="([^"]+)">next problems', text)
            path = html.unescape(following[1]) if following else ""
    assert shown == [["dense", "f2"], ["plain"]]


def test_the_page_leads_to_what_else_a_two_party_evaluation_may_open(service: str, job: str) -> None:
    text, shown = asked(service, f"/jobs/{job}/profile").text, {}
    for path, query in re.findall(r'href="(/jobs/\w+/profile)\?([^"]+)"', text):
        parameters = dict(httpx.QueryParams(html.unescape(query)))
        page = asked(service, path, **parameters).raise_for_status().text
        (first, *_) = re.findall(r'data-count="ring_bytes"[^>]*><data value="(\d+)"', page)
        shown[tuple(parameters.values())] = int(first)
    truncated, opened = 8 * 16 * 24, 8 * (16 * 40 + 40 * 24)
    assert shown == {("public", "multiplied"): truncated, ("secret", "inputs"): truncated + opened}


def test_reading_it_takes_a_key_where_keys_are_needed(tmp_path: Path) -> None:
    with serving(tmp_path, api_key=KEY) as guarded:
        for path in (f"/v1/jobs/{'0' * 32}/profile", f"/jobs/{'0' * 32}/profile"):
            assert guarded.client.get(path).status_code == 401
            assert guarded.client.get(path, headers={"Authorization": f"Bearer {KEY}"}).status_code == 404


@needs_chromium
@pytest.mark.parametrize("look", LOOKS)
def test_the_page_shows_what_the_api_says(service: str, job: str, look: dict[str, Any], open_page: Open) -> None:
    page = open_page(f"{service}/jobs/{job}", java_script_enabled=False, **look)
    page.get_by_role("link", name="Profile of the winners").click()
    page.wait_for_url("**/profile")
    for row in page_of(service, job).operators:
        levels = {
            "operator": [row.counts],
            "kernel": [kernel.counts for kernel in row.kernels],
            "primitive": [part for kernel in row.kernels for part in kernel.primitives],
        }
        for level, counts in levels.items():
            for name in COUNTS:
                cells = f"[data-problem='{row.problem}'] [data-level={level}] [data-count={name}]"
                assert numbers(page, cells) == [value for count in counts if (value := getattr(count, name))], cells
    assert screenshot(page, f"page-profile-{'-'.join(look) or 'light'}").stat().st_size > 10_000
    width, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert width <= window, "the page scrolls sideways"


def test_what_rings_alone_have_takes_no_column_from_other_jobs(service: str, job: str) -> None:
    with cukiln.Client(service) as client:
        plain = client.wait(client.submit({**REQUEST, "problems": PROBLEMS[1:]}), timeout=240).job
    with_ring, without = (asked(service, f"/jobs/{name}/profile").text for name in (job, plain))
    for name, label in (("truncations", "truncations"), ("ring_bytes", "ring bytes")):
        for mark in (f'data-count="{name}"', f">{label}</th>"):
            assert mark in with_ring and mark not in without
    assert 'data-count="bytes_read"' in without
    assert "Ring bytes are" in with_ring and "Ring bytes are" not in without


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["cukiln", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out + output.err


def test_the_command_prints_what_the_api_says(
    service: str, job: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = printed(capsys, "profile", job, "--url", service, "--json", monkeypatch=monkeypatch)
    assert code == 0
    assert [ProfileOperator.model_validate(row) for row in json.loads(text)["operators"]] == page_of(
        service, job
    ).operators
    code, text = printed(capsys, "profile", job, "--url", service, "--filters", "public", monkeypatch=monkeypatch)
    assert code == 0 and "mma_m16n8k32_u8" in text and "transform_image" in text and "with public filters" in text


def test_a_file_is_estimated_without_a_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest of its search by prediction; nothing is written to the data folder."""
    file = tmp_path / "request.json"
    file.write_text(json.dumps({**REQUEST, "search": {"level": 1}}), encoding="utf-8")
    monkeypatch.setenv("CUKILN_DATA", str(tmp_path / "data"))
    code, text = printed(capsys, "profile", str(file), "--json", monkeypatch=monkeypatch)
    dense, f2, _ = (ProfileOperator.model_validate(row) for row in json.loads(text)["operators"])
    assert code == 0 and not (tmp_path / "data").exists()
    assert {dense.counts.seconds_from, f2.counts.seconds_from} == {"predicted"}
    assert dense.counts.multiplications == 16 * 24 * 40 and dense.counts.truncations == 16 * 24
    assert (f2.schedule["algorithm"], f2.counts.launches) == ("winograd", 4)
    assert [kernel.counts.once_for for kernel in f2.kernels] == ["w", None, None, None]
    text = printed(capsys, "profile", str(file), monkeypatch=monkeypatch)[1]
    assert "(p)" in text and "transform_filters (once for w)" in text


def test_a_file_of_which_one_problem_has_no_schedule_shows_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps({**REQUEST, "problems": [EMPTY, PROBLEMS[2]]}), encoding="utf-8")
    code, text = printed(capsys, "profile", str(file), monkeypatch=monkeypatch)
    assert code == 3 and "plain on" in text and "empty (matmul) has no profile" in text
    file.write_text(json.dumps({**REQUEST, "problems": [EMPTY]}), encoding="utf-8")
    code, text = printed(capsys, "profile", str(file), monkeypatch=monkeypatch)
    assert code == 2 and WHY in text


def test_what_is_wrong_with_a_file_is_said_as_the_service_says_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"problems": [{**RING, "fraction_bits": 64}, {"operator": "sort"}]}), encoding="utf-8")
    code, text = printed(capsys, "profile", str(file), monkeypatch=monkeypatch)
    assert code == 2 and "problems[0].fraction_bits" in text and "problems[1].operator" in text


def test_a_file_with_half_of_a_surrogate_pair_in_a_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"problems": [{**RING, "name": "\ud800"}]}), encoding="utf-8")
    code, text = printed(capsys, "profile", str(file), monkeypatch=monkeypatch)
    assert code == 2 and "problems[0].name should be a valid string" in text
