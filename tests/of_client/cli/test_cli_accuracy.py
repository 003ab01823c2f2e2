"""`cukiln accuracy`: what a winner's verification and the vendor's library say of their distance from float64."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cukiln.cli.candidates import accuracy_rows, print_accuracy
from cukiln.types import WinnerRecord
from tests.support.fixtures.client import ScriptedService, exit_code, job_json, record_json

VENDOR = {
    "library": "cuBLASLt", "version": "13", "algorithm": "one", "fused": True, "workspace_bytes": 0,
    "median_us": 9.0, "low_us": 8.9, "high_us": 9.1, "max_error": 0.00124, "error_bound": 0.25,
}  # fmt: skip


def case(kind: str, m: int, length: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "extents": [m, 5], "sum_length": length, "max_error": 0.0, "max_ratio": 0.0, **more}


CASES = [
    case("integer", 4, 512),
    case("normal", 4, 512, max_error=0.0015, error_bound=0.25, max_ratio=0.0421),
    case("integer", 3, 17),
    case("normal", 3, 17, max_error=0.00015, error_bound=0.0125, max_ratio=0.5),
    case("normal", 2, 9, max_error=None),  # no number: it was wrong
]


COMPARED = {
    "candidate": "c" * 64, "median_us": 8.0, "low_us": 7.9, "high_us": 8.1, "ratio": 1.0, "ratio_low": 1.0,
    "ratio_high": 1.0, "tie": False, "max_error": 0.0016, "error_bound": 0.24,
}  # fmt: skip


def record(**more: Any) -> dict[str, Any]:
    made = record_json(problem={"operator": "matmul", "dtype": "float16", "out_dtype": "float32"}, **more)
    made["front"][0]["verdict"] = {"venue": "cpu", "cases": CASES}
    return made


def compared() -> dict[str, Any]:
    """A winner of a comparison on a GPU."""
    made = record(vendor=VENDOR)
    made["front"][0]["measurement"] = COMPARED
    return made


def test_a_row_for_each_sum_length() -> None:
    short, long = (SimpleNamespace(**row) for row in accuracy_rows("ffn1", WinnerRecord.model_validate(record())))
    assert [short.sum_length, long.sum_length] == [17, 512]
    assert (short.max_error, short.error_bound, short.share_of_bound) == (0.00015, 0.0125, 0.5)
    assert short.integers is True and long.integers is True
    assert (short.vendor_error, long.vendor_error) == (None, None)


def test_a_comparison_has_our_error_and_the_vendors_on_the_same_inputs() -> None:
    *_, ours = (SimpleNamespace(**row) for row in accuracy_rows("ffn1", WinnerRecord.model_validate(compared())))
    assert (ours.extents, ours.sum_length, ours.integers) == ([4, 5], 512, True)
    assert (ours.max_error, ours.error_bound, ours.vendor_error, ours.vendor_bound) == (0.0016, 0.24, 0.00124, 0.25)


def test_integers_that_differ_or_were_not_tried_are_not_called_equal() -> None:
    made = record()
    made["front"][0]["verdict"] = {"cases": [{**CASES[0], "max_error": 1.0}, CASES[1], CASES[3]]}
    short, long = (SimpleNamespace(**row) for row in accuracy_rows("ffn1", WinnerRecord.model_validate(made)))
    assert (short.integers, long.integers) == (None, False)


def test_the_table_has_every_figure_and_says_what_it_means() -> None:
    def printed(made: dict[str, Any]) -> str:
        output = io.StringIO()
        print_accuracy(Console(file=output, width=140), accuracy_rows("ffn1", WinnerRecord.model_validate(made)))
        return output.getvalue()

    rows = [" ".join(line.split()) for line in printed(compared()).splitlines()]
    assert rows[2:4] == [
        "ffn1 matmul float16 → float32 512 1.5e-03 2.5e-01 4.21 % equal -",
        "ffn1 matmul float16 → float32 512 1.6e-03 2.4e-01 - equal 1.2e-03 of 2.5e-01",
    ]
    assert "vendor" in printed(compared()) and "vendor" not in printed(record())


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    return exit_code(monkeypatch, "accuracy", *arguments)


def test_the_command_asks_for_the_records_of_the_jobs_winners(
    scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.on("GET", "/v1/jobs/job1", job_json())
    scripted.on("GET", f"/v1/kernels/{'a' * 64}", record())
    assert run(monkeypatch, "job1", "--url", scripted.url) == 0
    assert "ffn1" in capsys.readouterr().out
    assert run(monkeypatch, "job1", "--json", "--url", scripted.url) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["sum_length"] for row in answer["accuracy"]] == [17, 512]


def test_a_job_without_winners_says_so(
    scripted: ScriptedService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.on("GET", "/v1/jobs/job1", job_json("running"))
    assert run(monkeypatch, "job1", "--url", scripted.url) == 0
    assert capsys.readouterr().out.startswith("No winners: ")
