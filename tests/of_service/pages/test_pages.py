"""The pages in a real browser, over a real service and a real job; with and without JavaScript, narrow, dark."""

from __future__ import annotations

import hashlib
import html
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

import cukiln
from cukiln.types import StageName
from service.pages import page_filters
from service.pages.pages import FOLDER, static_files, static_url
from storage.config.settings import load_settings
from tests.support.fixtures.api import MATMUL, Api, publish, serving
from tests.support.fixtures.browser import (
    Open,
    browser,
    drawn,
    needs_chromium,
    numbers,
    open_page,
    plotted,
    screenshot,
)
from tests.support.fixtures.queue import wait_for
from tests.support.fixtures.service import AtWork, Started
from tests.support.run.each_run import some_each_run

__all__ = ["browser", "open_page"]

STAGES: list[StageName] = ["lower", "codegen", "compile", "verify", "measure"]
PROBLEM = {"operator": "matmul", "m": 40, "n": 48, "k": 36, "layout": "nt"}
REQUEST: dict[str, Any] = {
    "target": "sm_80",
    "search": {"level": 1, "limit": 2},
    "problems": [
        {"name": "plain", **PROBLEM},
        {"name": "fused", **PROBLEM, "epilogue": [{"op": "bias", "axis": "n"}, {"op": "scale", "value": 0.5}]},
    ],
}  # that of `integration/test_cli_real_service.py`: its kernels are compiled once in a run
HOSTILE = "<img src=x onerror=alert(1)>"
KEY = "a key of more than 16 characters"
PHONE = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "is_mobile": True}
LOOKS = {
    "light": {},
    "dark": {"color_scheme": "dark"},
    "narrow": PHONE,
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, at_work: Started) -> Iterator[AtWork]:
    with at_work(load_settings(data_dir=tmp_path_factory.mktemp("service"), workers=1, port=0)) as running:
        assert isinstance(running, AtWork)
        yield running


@pytest.fixture(scope="module")
def service(running: AtWork) -> str:
    return running.url


@pytest.fixture(scope="module")
def job(service: str) -> str:
    """A job that was compiled and verified here, and the same once more from the cache."""
    with cukiln.Client(service) as client:
        done = client.wait(client.submit(REQUEST), timeout=240)
        assert done.state == "done"
        assert client.wait(client.submit(REQUEST), timeout=240).cached
    return done.job


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with serving(tmp_path_factory.mktemp("guarded"), api_key=KEY) as served:
        yield served


def answer(url: str) -> Any:
    return httpx.get(url, trust_env=False).raise_for_status().json()


def sent(api: Api, problem: dict[str, Any] = MATMUL) -> str:
    response = api.client.post("/v1/jobs", json={"problems": [problem]}, headers={"Authorization": f"Bearer {KEY}"})
    job: str = response.json()["job"]
    return job


def spent(seconds: dict[str, Any], part: str = "wall") -> list[float]:
    return [seconds[stage][part] for stage in STAGES]


# ---- without JavaScript


@needs_chromium
def test_without_javascript_the_tables_hold_what_the_api_says(service: str, job: str, open_page: Open) -> None:
    page = open_page(service, java_script_enabled=False)
    by_operator, by_day = (answer(f"{service}/v1/timings?by={by}")["timings"] for by in ("operator", "day"))
    assert len(by_operator) == len(by_day) == 1
    for row, table in ((by_operator[0], "#operators"), (by_day[0], "#days")):
        assert page.locator(f"{table} tbody tr").count() == 1
        assert numbers(page, f"{table} td[data-count=problems]") == [row["problems"]]
        assert numbers(page, f"{table} td[data-count=cached]") == [row["cached"]] == [2]
        both = [each for stage in STAGES for each in (row["seconds"][stage]["wall"], row["seconds"][stage]["cpu"])]
        assert numbers(page, f"{table} td[data-stage]") == both
    assert page.locator(f"#jobs tr[data-job='{job}'] .state").inner_text() == "done"
    phases = by_operator[0]["phases"]
    waited = phases.pop("queue")
    assert numbers(page, "#phases td[data-count=seconds]") == sorted(filter(None, phases.values()), reverse=True)
    assert numbers(page, "#phases [data-count=waited]") == [waited]
    assert page.locator("canvas:visible, select:visible").count() == 0, "what needs a script is not shown without one"


@needs_chromium
def test_without_javascript_a_job_is_read_from_its_tables(service: str, job: str, open_page: Open) -> None:
    page = open_page(f"{service}/jobs/{job}", java_script_enabled=False)
    report, timeline = answer(f"{service}/v1/jobs/{job}"), answer(f"{service}/v1/jobs/{job}/timeline")
    for part in ("wall", "cpu"):
        assert numbers(page, f"#stages tr[data-part={part}]") == spent(report["seconds"], part)
    for problem in report["problems"]:
        row = f"#problems tr[data-problem={problem['name']}]"
        assert numbers(page, f"{row} td[data-stage=compile]")[0] == problem["seconds"]["compile"]["wall"]
        said = f"verified: {problem['winner']['verified']}, PTX {problem['winner']['ptx']['verdict']}"
        assert said in page.locator(row).inner_text()
    steps = [step for lane in timeline["lanes"] for step in lane["steps"]]
    assert numbers(page, "#timeline [data-count=took]") == [each["finished_at"] - each["started_at"] for each in steps]
    assert numbers(page, "#timeline [data-count=waited]") == [each["started_at"] - each["queued_at"] for each in steps]
    (timing,) = [row for row in answer(f"{service}/v1/timings?by=job")["timings"] if row["job"] == job]
    assert numbers(page, "#phases [data-count=waited]") == [timing["phases"].pop("queue")]
    spent_in = sorted(filter(None, timing["phases"].values()), reverse=True)
    assert numbers(page, "#phases td[data-count=seconds]") == spent_in


# ---- charts


@needs_chromium
def test_the_charts_plot_what_the_api_says(service: str, job: str, open_page: Open) -> None:
    page = drawn(open_page(service))
    (by_operator,), (by_day,) = (answer(f"{service}/v1/timings?by={by}")["timings"] for by in ("operator", "day"))
    stages = {stage: [by_operator["seconds"][stage]["wall"]] for stage in STAGES}
    assert plotted(page, "chart-operators") == {"labels": ["matmul"], "datasets": stages}
    assert plotted(page, "chart-days")["labels"] == [by_day["day"]]
    assert plotted(page, "chart-days")["datasets"] == stages
    computed = by_day["problems"] - by_day["cached"]
    assert plotted(page, "chart-cache")["datasets"] == {"computed": [computed], "from the cache": [2]}
    page.select_option("#part", "cpu")
    page.wait_for_selector("#main[data-drawn='2']")
    assert plotted(page, "chart-operators")["datasets"]["compile"] == [by_operator["seconds"]["compile"]["cpu"]]


@needs_chromium
def test_the_phases_are_drawn_when_they_are_asked_for(service: str, job: str, open_page: Open) -> None:
    page = drawn(open_page(service))
    assert page.evaluate("Chart.getChart('chart-phases') === undefined")
    page.click("#phases-details summary")
    page.wait_for_selector("#main[data-drawn='2']")
    (by_operator,) = answer(f"{service}/v1/timings")["timings"]
    found = plotted(page, "chart-phases")
    assert {"render", "cicc", "ptxas", "host", "link", "upload"} <= set(found["labels"])
    assert "queue" not in found["labels"], "it overlaps other work"
    assert found["datasets"]["seconds"] == [by_operator["phases"][name] for name in found["labels"]]
    assert found["datasets"]["seconds"] == sorted(found["datasets"]["seconds"], reverse=True)


@needs_chromium
def test_the_time_axis_has_a_bar_for_each_wait_and_each_step(service: str, job: str, open_page: Open) -> None:
    page = drawn(open_page(f"{service}/jobs/{job}"))
    timeline = answer(f"{service}/v1/jobs/{job}/timeline")
    found = plotted(page, "chart-timeline")
    assert found["labels"] == [lane["name"] for lane in timeline["lanes"]]
    wanted: dict[str, list[Any]] = {"wait": []}
    for lane in timeline["lanes"]:
        for step in lane["steps"]:
            queued, began, ended = (
                step[at] - timeline["created_at"] for at in ("queued_at", "started_at", "finished_at")
            )
            wanted["wait"].append({"y": lane["name"], "x": [queued, began]})
            wanted.setdefault(step["kind"], []).append({"y": lane["name"], "x": [began, ended]})
    assert found["datasets"] == wanted
    assert {"wait", "plan", "compile", "verify", "finish"} == set(wanted)
    report = answer(f"{service}/v1/jobs/{job}")
    assert plotted(page, "chart-stages")["datasets"]["verify"] == [
        report["seconds"]["verify"][part] for part in ("wall", "cpu")
    ]


@needs_chromium
def test_a_job_that_took_no_time_has_no_chart_of_it(service: str, job: str, open_page: Open) -> None:
    with cukiln.Client(service) as client:
        report = client.wait(client.submit(REQUEST))
        assert report.cached
    page = drawn(open_page(f"{service}/jobs/{report.job}"))
    assert page.evaluate("document.getElementById('chart-stages').checkVisibility()") is False
    page = drawn(open_page(f"{service}/jobs/{job}"))
    assert page.evaluate("document.getElementById('chart-stages').checkVisibility()") is True


@needs_chromium
def test_a_running_job_is_followed_without_a_reload(running: AtWork, service: str, job: str, open_page: Open) -> None:
    """Its kernels are those of `job`, for other extents."""
    with cukiln.Client(service) as client, running.without("finish"):
        new = client.submit({**REQUEST, "problems": [{"name": "new", **PROBLEM, "m": 41}]})
        wait_for(lambda: client.job(new.job).progress.verify.done == 2)
        page = drawn(open_page(f"{service}/jobs/{new.job}"))
        overview = drawn(open_page(service))
        for each in (page, overview):
            each.evaluate("window.stays = true")
        assert page.locator("#status .state").inner_text() == "running"
        screenshot(page, "page-job-running")
        screenshot(overview, "page-overview-running")
    page.locator("#status .state.done").wait_for()
    overview.locator(f"tr[data-job='{new.job}'] .state.done").wait_for()
    wait_for(lambda: "finish" in plotted(page, "chart-timeline")["datasets"])
    assert page.evaluate("window.stays") and overview.evaluate("window.stays")
    assert numbers(page, "#stages tr[data-part=wall]") == spent(answer(f"{service}/v1/jobs/{new.job}")["seconds"])
    assert page.get_attribute("#main", "data-poll") == "0", "what has ended is not asked for again"


# ---- looks


@needs_chromium
@pytest.mark.parametrize(("which", "look"), some_each_run([*product(["overview", "job"], LOOKS)], 3))
def test_the_page_fits_its_window_in_every_look(which: str, look: str, service: str, job: str, open_page: Open) -> None:
    page = drawn(open_page(service if which == "overview" else f"{service}/jobs/{job}", **LOOKS[look]))
    page.locator("#phases-details summary").click()
    page.wait_for_timeout(300)
    shown = screenshot(page, f"page-{which}-{look}")
    assert shown.stat().st_size > 10_000
    width, window = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert width <= window, "the page scrolls sideways"
    for canvas in page.locator("canvas:visible").all():
        box = canvas.bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= window and box["height"] > 50


@needs_chromium
def test_charts_and_text_follow_a_change_to_dark(service: str, job: str, open_page: Open) -> None:
    page = drawn(open_page(service, color_scheme="light"))
    brightness = """() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
        Chart.getChart('chart-days').options.scales.y.ticks.color]
        .map(colour => colour.match(/[0-9.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3)"""
    back, text, ticks = page.evaluate(brightness)
    assert back > 240 and text < 60 and ticks < 120
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector("#main[data-drawn='2']")
    back, text, ticks = page.evaluate(brightness)
    assert back < 40 and text > 200 and ticks > 140


# ---- what a page must not do


@needs_chromium
def test_the_policy_holds_back_scripts_and_styles_that_are_not_ours(api: Api, browser: Any) -> None:
    page = browser.new_page()
    refused: list[str] = []
    page.on("console", lambda said: refused.append(said.text) if "Content Security Policy" in said.text else None)
    page.goto(api.url)
    for tag, text in (("script", "window.ran = 1"), ("style", "body{color:red}")):
        page.evaluate(
            "([tag, text]) => document.body.append(Object.assign(document.createElement(tag), {textContent: text}))",
            [tag, text],
        )
    page.wait_for_timeout(200)
    assert page.evaluate("window.ran") is None
    assert len(refused) == 2
    page.close()


@needs_chromium
def test_names_of_a_request_are_text_on_the_page(api: Api, open_page: Open) -> None:
    job = api.submit({**MATMUL, "name": HOSTILE}).json()["job"]
    page = drawn(open_page(f"{api.url}/jobs/{job}"))
    assert page.locator("#problems tbody th").inner_text().startswith(HOSTILE)
    assert page.locator("img").count() == 0


@needs_chromium
def test_a_long_name_leaves_room_for_the_other_columns(api: Api, open_page: Open) -> None:
    job = api.submit({**MATMUL, "name": "x" * 256}).json()["job"]
    page = drawn(open_page(f"{api.url}/jobs/{job}", viewport={"width": 1280, "height": 800}))
    shown, wide = page.evaluate(
        "(({clientWidth, scrollWidth}) => [clientWidth, scrollWidth])(document.querySelector('#problems'))"
    )
    assert wide == shown


@needs_chromium
def test_a_named_job_is_shown_by_its_name_and_found_by_its_label(api: Api, open_page: Open) -> None:
    label = {"team": 'a & b="c"' + HOSTILE}
    job = api.submit(name=HOSTILE, labels=label).json()["job"]
    api.submit(labels={"team": "other"})
    page = drawn(open_page(f"{api.url}/jobs/{job}"))
    assert HOSTILE in page.locator("h1").inner_text() and page.title() == f"cukiln: {HOSTILE}"
    page.locator("a.label").click()
    assert page.locator("#jobs tbody tr").count() == 1
    assert HOSTILE in page.locator(f"tr[data-job='{job}'] th").inner_text()
    assert page.locator("img").count() == 0
    page.get_by_role("link", name="all jobs").click()
    assert page.locator("#jobs tbody tr").count() == 2


def test_pages_allow_nothing_but_their_own_files(shared_api: Api) -> None:
    for path in ("/", "/jobs/nothing"):
        response = shared_api.client.get(path)
        policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
        assert (policy["default-src"], policy["script-src"], policy["style-src"]) == ("'none'", "'self'", "'self'")
        assert response.headers["cache-control"] == "no-store"
        assert not re.findall(r"<script(?![^>]* src=)|<style| style=| on\w+=", response.text)
        assert not re.findall(r"""(?:src|href)=["'](?:\w+:)?//""", response.text)


def test_a_job_that_is_not_there_is_a_404_in_words(shared_api: Api) -> None:
    for job in ("0" * 32, "nothing", HOSTILE.replace("/", "")):
        response = shared_api.client.get(f"/jobs/{job}")
        assert response.status_code == 404
        assert "There is no job" in response.text and "<img" not in response.text


def test_a_job_says_what_running_its_candidates_from_ptx_took(api: Api) -> None:
    job = api.submit(ptx="all").json()
    assert (job["ptx"], job["problems"][0]["ptx"]) == ("all", {"kernels": {}, "cpu_seconds": 0.0})
    assert "PTX of 0 kernels: 0.0 CPU s" in api.client.get(f"/jobs/{job['job']}").text
    other = api.submit().json()
    assert (other["ptx"], other["problems"][0]["ptx"]) == ("winners", None)
    assert "PTX of" not in api.client.get(f"/jobs/{other['job']}").text


def test_a_service_that_runs_no_ptx_refuses_to_run_all_of_it(tmp_path: Path) -> None:
    with serving(tmp_path, verify_ptx="none") as api:
        refused = api.submit(ptx="all")
        detail = refused.json()
        assert (refused.status_code, detail["field"], detail["allowed"]) == (422, "ptx", ["winners"])
        assert "CUKILN_VERIFY_PTX=none" in detail["detail"]
        assert api.submit().status_code == 202


def test_nor_does_it_try_such_a_job_again(tmp_path: Path) -> None:
    with serving(tmp_path) as api:
        path = f"/v1/jobs/{api.submit(ptx='all').json()['job']}"
        assert api.client.delete(path).status_code < 300
    with serving(tmp_path, verify_ptx="none") as api:
        refused = api.client.post(f"{path}/retry")
        assert (refused.status_code, refused.json()["field"]) == (422, "ptx")
        assert "CUKILN_VERIFY_PTX=none" in refused.json()["detail"]


def test_an_empty_service_has_a_page_and_a_queued_job_has_one(api: Api) -> None:
    assert "No job has been sent yet" in api.client.get("/").text
    job = api.submit().json()["job"]
    assert f"/jobs/{job}" in api.client.get("/").text
    assert "queued" in api.client.get(f"/jobs/{job}").text
    assert api.client.get("/", params={"cursor": "rubbish"}).status_code == 400


def test_a_large_job_shows_its_first_problems_and_says_where_the_rest_is(api: Api) -> None:
    publish(api.database)
    job = api.submit(*({**MATMUL, "name": f"p{number}"} for number in range(203))).json()["job"]
    text = api.client.get(f"/jobs/{job}").text
    assert len(re.findall("data-problem=", text)) == 200
    assert f"Not shown: 3 problems. All are in <code>/v1/jobs/{job}</code>" in text
    assert "This job caused no work." in text


def test_older_jobs_are_on_further_pages(api: Api) -> None:
    publish(api.database)
    jobs = [api.submit(labels={"a": "b"}).json()["job"] for _ in range(27)]
    api.submit()
    first = api.client.get("/?label=a=b").text
    (older,) = re.findall(r'href="(/\?cursor=[^"]+)"', first)
    second = api.client.get(html.unescape(older)).text
    shown = [re.findall(r'data-job="(\w+)"', text) for text in (first, second)]
    assert [*shown[0], *shown[1]] == jobs[::-1]


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (page_filters.seconds, 0.0123, "0.012"),
        (page_filters.seconds, 4.312, "4.31"),
        (page_filters.seconds, 58.21, "58.2"),
        (page_filters.seconds, 1204.4, "1,204"),
        (page_filters.seconds, 0.0, "0.00"),
        (page_filters.seconds, None, "–"),
        (page_filters.duration, 0.8, "0.80 s"),
        (page_filters.duration, 5.0, "5 s"),
        (page_filters.duration, 80.2, "1 min 20 s"),
        (page_filters.duration, 7500.0, "2 h 5 min"),
        (page_filters.moment, 0.0, "1970-01-01 00:00:00"),
        (page_filters.microseconds, 6.957, "6.96 µs"),
        (page_filters.microseconds, 12345.6, "12,346 µs"),
    ],
)
def test_numbers_are_written_with_about_three_digits(write: Any, value: float | None, text: str) -> None:
    assert write(value) == text


@pytest.mark.parametrize(("part", "whole", "text"), [(1, 4, "25 %"), (0, 4, "0 %"), (0, 0, "–")])
def test_a_share_of_nothing_is_a_dash(part: int, whole: int, text: str) -> None:
    assert page_filters.share(part, whole) == text


# ---- with an API key


@pytest.mark.parametrize("header", [None, f"Bearer {KEY}x", f"Basic {KEY}"])
def test_without_the_key_a_page_tells_nothing(guarded: Api, header: str | None) -> None:
    job = sent(guarded)
    texts = set()
    for path in ("/", f"/jobs/{job}", f"/jobs/{'0' * 32}"):
        response = guarded.client.get(path, headers={"Authorization": header} if header else {})
        assert (response.status_code, response.headers["www-authenticate"]) == (401, 'Bearer realm="cukiln"')
        assert job[:8] not in response.text and "matmul" not in response.text
        texts.add(response.text)
    assert len(texts) == 1, "a path does not tell whether its job exists"


@needs_chromium
def test_the_key_is_asked_for_once_and_kept_in_the_tab(guarded: Api, open_page: Open) -> None:
    job = sent(guarded)
    page = open_page(guarded.url)
    for wrong in ("wrong", "ключ"):
        page.fill("#key", wrong)
        page.click("button")
        page.wait_for_selector("#key-error:not([hidden])")
        screenshot(page, "page-key")
    page.route("**/*", lambda route: route.fulfill(status=503, body="the service is away"))
    page.fill("#key", KEY)
    page.click("button")
    page.wait_for_selector("#key-error:not([hidden])")
    assert page.evaluate("sessionStorage.length") == 0, "a key is kept once it has been taken"
    page.unroute("**/*")
    page.click("button")
    drawn(page).click(f"tr[data-job='{job}'] a")
    page.wait_for_url(f"**/jobs/{job}")
    assert drawn(page).locator("#status .state").inner_text() == "queued"
    assert KEY not in page.url and page.context.cookies() == []
    assert page.evaluate("localStorage.length") == 0
    again = page.context.new_page()
    again.goto(guarded.url)
    again.wait_for_selector("#key-form:not([hidden])")
    again.close()


# ---- static files


def test_static_files_are_kept_for_good_under_their_own_digest_alone(shared_api: Api) -> None:
    for name, file in static_files().items():
        response = shared_api.client.get(static_url(name))
        assert response.content == (FOLDER / name).read_bytes()
        assert hashlib.sha256(response.content).hexdigest().startswith(file.digest)
        assert response.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert response.headers["x-content-type-options"] == "nosniff"
        for other in ("", "?v=0123456789abcdef"):
            assert shared_api.client.get(f"/static/{name}{other}").headers["cache-control"] == "no-cache"


@pytest.mark.parametrize(
    "path", ["../app.py", "%2e%2e/app.py", "..%2fapp.py", "vendor", "vendor/README.md", "//etc/passwd"]
)
def test_nothing_else_is_served_as_a_static_file(shared_api: Api, path: str) -> None:
    assert shared_api.client.get(f"/static/{path}").status_code == 404


def test_vendored_files_are_those_that_their_page_names() -> None:
    page = (FOLDER / "vendor" / "README.md").read_text()
    rows = re.findall(
        r"^\| `([\w.]+\.js)` \|.*?\| ([\d.]+) \|.*?`([\w.]+)` \| `([0-9a-f]{64})` \|$", page, re.MULTILINE
    )
    assert {row[0] for row in rows} == {path.name for path in (FOLDER / "vendor").glob("*.js")}
    for name, version, licence, digest in rows:
        content = (FOLDER / "vendor" / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
        assert f"v{version}".encode() in content[:200]
        assert "MIT" in (FOLDER / "vendor" / licence).read_text()
