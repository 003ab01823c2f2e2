"""`cukiln candidates`: every page, the fastest first, no figure lost on a narrow terminal."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from cukiln.cli.candidates import fastest_first, print_candidates
from cukiln.types import CandidateReport
from tests.support.fixtures.client import ScriptedService, exit_code, problem_json

H200 = "NVIDIA H200"


def candidate(name: str, **changes: Any) -> dict[str, Any]:
    """One on the CPU, that was verified as right."""
    return {
        "problem": "ffn1",
        "device_class": "predicted:sm_90a",
        "candidate": name * 64,
        "schedule": {"tile_m": 128, "tile_n": 64, "stages": 2},
        "kernel": "b" * 64,
        "group": "c" * 32,
        "verdict": "ok",
        "message": None,
        "verified": "cpu",
        "max_error": 0.00123,
        "error_bound": 0.0456,
        "registers": 128,
        "shared_bytes": 24_576,
        "spill_bytes": 0,
        "occupancy": 0.25,
        "predicted_us": 20.0,
        "measured_us": None,
        **changes,
    }


def measured(name: str, us: float, **changes: Any) -> dict[str, Any]:
    figures = {"measured_us": us, "spread": 0.0123, "tflops": 512.4, "verified": "gpu", "device_class": H200}
    return candidate(name, **{**figures, **changes})


def printed(width: int, *candidates: dict[str, Any]) -> str:
    output = io.StringIO()
    found = [CandidateReport.model_validate(each) for each in candidates]
    print_candidates(Console(file=output, width=width), fastest_first(found))
    return output.getvalue()


def test_what_the_ptx_showed_has_a_column_where_any_was_run() -> None:
    mark = {"verdict": "ok", "message": None, "cpu_seconds": 1.2}
    text = printed(200, candidate("a", ptx=mark), candidate("b"))
    head, first, second = (line.split() for line in text.splitlines()[1:4])
    assert head[:3] == ["candidate", "verdict", "PTX"]
    assert (first[2], second[2]) == ("ok", "-")
    assert "PTX: what nvcc made of the kernel" in text
    assert "PTX" not in printed(200, candidate("b"))


def names(*candidates: dict[str, Any]) -> str:
    found = fastest_first([CandidateReport.model_validate(each) for each in candidates])
    return "".join(each.candidate[0] for each in found)


def test_the_fastest_right_one_comes_first() -> None:
    wrong = {"verdict": "incorrect", "message": "max error 3"}
    assert names(candidate("a"), candidate("b", predicted_us=5.0), candidate("c", **wrong, predicted_us=1.0)) == "bac"
    # What was measured stands before what was only predicted, and is never ordered by its prediction.
    one, two = measured("a", 12.0, predicted_us=1.0), measured("b", 11.0, predicted_us=2.0)
    unmeasured = measured("c", 0.0, measured_us=None, predicted_us=0.5)
    assert names(one, two, unmeasured) == "bac"
    assert names(candidate("b"), candidate("a")) == "ab"  # equal times: one order
    assert names(candidate("a", verdict=None, predicted_us=None), candidate("b")) == "ba"


def test_problems_keep_the_order_of_the_job() -> None:
    first, second = {"problem": "z"}, {"problem": "a"}
    found = names(measured("1", 9.0, **first), measured("2", 8.0, **second), measured("3", 7.0, **first))
    assert found == "312"
    text = printed(120, measured("1", 9.0, **first), candidate("2", **first), measured("3", 9.0, **second))
    headings = [line for line in text.splitlines() if (" on " in line and ":" not in line) or " on predicted:" in line]
    assert headings == [f"z on {H200}", "z on predicted:sm_90a", f"a on {H200}"]


LONG = {f"{name}_{axis}": 128 for name in ("tile", "thread", "warp", "cluster") for axis in "mnk"}
FIGURES = ["ok", "1.2e-03 of 4.6e-02", "11 µs", "1.23 %", "512", "128", "24,576", "25 %", "20 µs"]


@pytest.mark.parametrize("width", [60, 80, 100, 125, 140, 170, 220])
def test_no_figure_is_lost_on_a_narrow_terminal(width: int) -> None:
    text = printed(width, measured("a", 11.0, schedule=LONG), measured("b", 12.0, verdict="compile_timeout"))
    rows = [line for line in text.splitlines() if line.startswith("aaaaaaaaaaaa ")]
    for figure in FIGURES:
        assert sum(f"  {figure}  " in f"{row}  ".replace("aaaa ", "aaaa  ") for row in rows) >= 1, figure
    assert "compile_timeout" in text
    assert " ".join(text.split()).count("128×128×128") == 4
    tables = text.partition("\nverdict:")[0]
    assert max(map(len, tables.splitlines())) <= width
    assert (len(rows) == 1) == (width >= 170)  # a long schedule is wrapped before a table is cut in two


def test_columns_without_a_figure_are_left_out_with_their_notes() -> None:
    text = printed(200, candidate("a"))
    for word in ("measured", "spread", "TFLOP/s"):
        assert word not in text
    assert "predicted: an estimate" in text
    bare = {"max_error": None, "error_bound": None, "registers": None, "shared_bytes": None, "spill_bytes": None}
    text = printed(200, candidate("a", **bare, occupancy=None, predicted_us=None, verdict=None))
    assert text.splitlines()[1].split() == ["candidate", "schedule"]
    assert len(text.strip().splitlines()) == 3


@pytest.fixture
def with_pages(scripted: ScriptedService) -> ScriptedService:
    """A job of three candidates on two pages."""

    def answer(request: Request) -> Response:
        asked = dict(request.query_params)
        assert asked.pop("limit") == "1000"
        if asked.get("problem") == "absent":
            return problem_json(422, "invalid-value", "The job has no problem 'absent'.", field="problem")
        if "cursor" in asked:
            assert asked["cursor"] == "a/b+c="
            return JSONResponse({"candidates": [measured("c", 10.0)], "next_cursor": None})
        page = [measured("a", 12.0), measured("b", 11.0)]
        return JSONResponse({"candidates": page, "next_cursor": "a/b+c="})

    scripted.on("GET", "/v1/jobs/job1/candidates", answer)
    return scripted


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return exit_code(monkeypatch, "candidates", *arguments)


def test_the_command_reads_every_page(
    with_pages: ScriptedService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "job1", "--problem", "ffn1", "--url", with_pages.url) == 0
    out = capsys.readouterr().out
    assert [line[0] for line in out.splitlines() if line[:12] in ("a" * 12, "b" * 12, "c" * 12)][:3] == ["c", "b", "a"]
    assert run(monkeypatch, "job1", "--json", "--url", with_pages.url) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["job"] == "job1"
    assert [each["measured_us"] for each in answer["candidates"]] == [10.0, 11.0, 12.0]
    assert CandidateReport.model_validate(answer["candidates"][0]).device_class == H200


def test_a_job_or_problem_that_is_not_there_is_one_line(
    with_pages: ScriptedService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "job1", "--problem", "absent", "--url", with_pages.url) == 2
    assert capsys.readouterr().err == "cukiln: The job has no problem 'absent'\n"
    assert run(monkeypatch, "job2", "--url", with_pages.url) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_job_without_candidates_says_why(
    scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.on("GET", "/v1/jobs/job1/candidates", {"candidates": [], "next_cursor": None})
    assert run(monkeypatch, "job1", "--url", scripted.url) == 0
    assert capsys.readouterr().out.startswith("No candidates: ")
    assert run(monkeypatch, "job1", "--json", "--url", scripted.url) == 0
    assert json.loads(capsys.readouterr().out) == {"job": "job1", "candidates": []}
