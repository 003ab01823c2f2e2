"""`cukiln prove`: which kernels it takes from a request, which part of the plan it runs, what it prints and returns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from codegen.operators import operator
from codegen.plan.verification_plan import EXACT_ORDERS, Case, Part, plan_cases
from codegen.ptx import rules
from cukiln.cli.main import app
from tests.support.kernels.cpu_helpers import loaded, matmul_kernel
from tests.support.run.places import FAULTY, ROOT
from workers.cpu.prove import RIGHT, UNTRANSLATED, WRONG, WRONG_USE, Options, prove

EXAMPLE = ROOT / "examples" / "rowsum"


@pytest.fixture(autouse=True)
def operators_from_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OPERATOR_PATH", f"{EXAMPLE}:{FAULTY}")
    with loaded([]):
        yield


def rowsum(**changes: Any) -> dict[str, Any]:
    problem = {"name": "one", "operator": "rowsum", "rows": 64, "columns": 64, **changes}
    return {"target": "sm_80", "problems": [problem]}


def cases() -> list[Case]:
    return list(plan_cases(operator("matmul"), matmul_kernel(split="workspace"), seed=1))


def test_without_a_choice_the_whole_plan_is_run() -> None:
    assert list(Part().of(cases())) == cases()


def test_one_case_is_the_one_with_that_number() -> None:
    assert list(Part(case=3).of(cases())) == [cases()[3]]


@pytest.mark.parametrize("order", EXACT_ORDERS)
def test_one_order_runs_each_launch_once_in_it(order: Any) -> None:
    for whole, part in zip(cases(), Part(order=order).of(cases()), strict=True):
        launches = [run.launch for run in part.runs]
        assert len(set(launches)) == len(launches)
        assert set(launches) == {run.launch for run in whole.runs}
        assert {run.order for run in part.runs} == {order}


@pytest.mark.parametrize("watch", [True, False])
def test_every_run_or_none_is_watched(watch: bool) -> None:
    assert {run.watch for case in Part(watch=watch).of(cases()) for run in case.runs} == {watch}


def test_the_first_candidate_is_verified_and_all_that_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    first = {**rowsum(), "search": {"level": 2}}
    assert prove(first, Options(as_json=True)) == RIGHT
    assert len(capsys.readouterr().out.splitlines()) == 1
    listed = {**rowsum(), "search": {"schedules": [{"pitch": 32}, {"pitch": 36}]}}
    assert prove(listed, Options(as_json=True)) == RIGHT
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [report["kernel"]["tunables"] for report in reports] == [{"pitch": 32}, {"pitch": 36}]
    assert all(report["verdict"] == "ok" and len(report["details"]["cases"]) == 6 for report in reports)


def test_a_wrong_kernel_is_reported_by_a_message_and_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    problem = {"operator": "faulty", "rows": 2, "columns": 128, "pitch": 131}
    request = {"problems": [problem], "search": {"schedules": [{"fault": 0}, {"fault": 1}]}}
    assert prove(request, Options()) == WRONG
    right, wrong = capsys.readouterr().out.strip().split("\n\nkernel_")
    assert "faulty: fault 0\n  ok, " in right
    assert "faulty: fault 1\n  " in wrong and "  ok, " not in wrong
    assert "[integer inputs," in wrong.replace("\n  ", " ")


@pytest.mark.parametrize(
    ("request_", "options", "says"),
    [
        (rowsum(), Options(problem="two"), "no problem is called 'two'"),
        ({"problems": []}, Options(), "problems"),
        (rowsum(columns=6), Options(), "6 columns are no multiple of the 4 that a copy moves"),
        (rowsum(rows=0), Options(), "greater than or equal to 1"),
        (rowsum(operator="colsum"), Options(), "unknown operator 'colsum'; allowed: "),
        ({**rowsum(), "target": "sm_1"}, Options(), "sm_1"),
        (rowsum(), Options(ptx=True, sanitize=True), "--ptx for what nvcc makes of them: leave one out"),
        (rowsum(search={"tunables": {"pitch": [33]}}), Options(), "pitch = 33 is not allowed; allowed: 32, 36"),
    ],
)
def test_a_request_that_cannot_be_verified_is_refused_in_words(
    request_: dict[str, Any], options: Options, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prove(request_, options) == WRONG_USE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("cukiln prove: ")
    assert says in printed.err


def test_with_ptx_what_nvcc_makes_of_a_kernel_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert prove(rowsum(), Options(ptx=True)) == RIGHT
    assert re.search(r"ok, [\d.]+ CPU seconds, \d+ instructions of PTX \(\d+ sums", capsys.readouterr().out)
    assert prove(rowsum(), Options(ptx=True, part=Part(case=0, watch=True), as_json=True)) == RIGHT
    verdict = json.loads(capsys.readouterr().out)
    assert re.match(r"rowsum/kernel\.cuh:\d+, kernel\.ptx:\d+", verdict["details"]["shared_memory"][0]["site"])


def test_ptx_without_a_translation_has_an_exit_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rules, "RULES", [each for each in rules.RULES if not each[0].match("bar.sync")])
    assert prove(rowsum(), Options(ptx=True)) == UNTRANSLATED
    assert "no rule for bar.sync" in " ".join(capsys.readouterr().out.split())


def test_an_unknown_order_is_refused_by_the_command(tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps(rowsum()))
    done = CliRunner().invoke(app, ["prove", str(file), "--order", "sideways"])
    assert done.exit_code != 0
    assert "allowed: ascending, descending, seeded" in f"{done.output}{done.exception}"
