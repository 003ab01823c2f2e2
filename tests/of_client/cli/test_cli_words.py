"""What people read: schedules, durations, progress, the table's notes."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cukiln.cli.console import duration
from cukiln.cli.table import microseconds, notes, print_job, print_lookups, schedule_text, summary
from cukiln.cli.tune import LiveBars, PlainLines, counts, fraction, show_progress
from cukiln.types import Job, LookupResult, Progress, StageProgress, WinnerRecord
from tests.support.fixtures.client import job_json, progress_json, record_json


def progress(**changes: Any) -> Progress:
    return Progress.model_validate({**progress_json(), **changes})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.0004, "under 1 ms"),
        (0.0094, "9 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.6, "1 min 0 s"),
        (185, "3 min 5 s"),
        (7260, "2 h 1 min"),
    ],
)
def test_durations_read_as_a_person_says_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ({"tile_m": 128, "tile_n": 64, "tile_k": 16, "raster": 8}, "tile 128×64×16, raster 8"),
        ({"thread_m": 8, "thread_n": 4}, "thread 8×4"),
        ({"a_m": 1, "a_n": 2, "z_m": 3, "z_n": 4, "z_k": 5}, "z 3×4×5, a 1×2"),
        ({"tile_m": 128, "unroll_k": 8}, "tile_m 128, unroll_k 8"),
        ({"algorithm": "winograd", "m": 1, "n": 2}, "algorithm winograd, m 1, n 2"),
        ({}, ""),
    ],
)
def test_a_schedule_is_short_and_complete(schedule: dict[str, Any], text: str) -> None:
    assert schedule_text(schedule) == text


names = st.from_regex(r"[a-z]{1,6}(_[mnk])?", fullmatch=True)


@given(st.dictionaries(names, st.integers(0, 999), max_size=8))
def test_no_value_of_a_schedule_is_lost(schedule: dict[str, int]) -> None:
    text = schedule_text(schedule)
    shown = [value for part in text.split(", ") if part for value in part.rpartition(" ")[2].split("×")]
    assert sorted(map(int, shown)) == sorted(schedule.values())


@pytest.mark.parametrize(
    ("value", "text"), [(None, "unknown"), (0.5, "0.5 µs"), (812.4, "812 µs"), (12345.6, "12,346 µs")]
)
def test_kernel_times_are_in_microseconds(value: float | None, text: str) -> None:
    assert microseconds(value) == text


def test_a_log_of_progress_stays_short_and_never_goes_back() -> None:
    output = io.StringIO()
    lines = PlainLines(Console(file=output, width=200))
    for done in [*range(1001), 5, 1000]:
        stage = StageProgress(done=done, total=1000)
        lines.update(progress(lower=stage, compile=stage, verify=stage, finish=stage))
    written = output.getvalue().splitlines()
    assert len(written) == 21
    assert written[0].startswith("lower 0/1000, compile 0/1000")
    assert written[-1].startswith("lower 1000/1000, compile 1000/1000")


def test_a_stage_of_unknown_size_has_not_begun() -> None:
    whole, unknown = StageProgress(done=2, total=2), StageProgress(done=0, total=0)
    assert fraction(progress(lower=whole, compile=unknown, verify=unknown, finish=unknown)) == 0.25


@pytest.mark.parametrize(
    ("eta", "message"),
    [(None, "2 failed"), (0.0, "; under 1 s left"), (0.99, "; under 1 s left"), (75.0, "; about 1 min 15 s left")],
)
def test_the_time_left_is_an_estimate_or_nothing(eta: float | None, message: str) -> None:
    assert counts(progress(candidates_failed=2, eta_seconds=eta)).endswith(message)


def test_a_terminal_gets_a_bar_per_stage() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    display = LiveBars()
    display.update(progress(compile={"done": 3, "total": 8}, candidates_failed=2, eta_seconds=None))
    console.print(display.render())
    text = output.getvalue()
    for stage, unit in {
        "lower": "problems",
        "compile": "kernels",
        "verify": "candidates",
        "finish": "problems",
    }.items():
        assert any(line.find(stage) != -1 and unit in line for line in text.splitlines())
    assert "3/8" in text
    assert "candidates: 0 done, 2 failed" in text
    assert "left" not in text
    with show_progress(console) as update:
        update(progress())


def test_the_notes_explain_what_is_shown_and_nothing_else() -> None:
    shown = notes(Job.model_validate(job_json("done")))
    assert [line.split(":")[0] for line in shown] == [
        "verified cpu",
        "predicted µs",
        "seconds",
        "3 more schedules broke a rule of their operator and were not compiled",
    ]
    assert notes(Job.model_validate(job_json("queued"))) == shown[-2:]


@pytest.mark.parametrize("verdict", ["ok", "untranslated"])
def test_what_a_winners_ptx_showed_stands_beside_its_verification(verdict: str) -> None:
    job, record = job_json("done"), record_json()
    for winner in (job["problems"][0]["winner"], record["front"][0]):
        winner["ptx"] = {"verdict": verdict, "message": None, "cpu_seconds": 0.5}
    assert f"ptx {verdict}" in [line.split(":")[0] for line in notes(Job.model_validate(job))]
    output = io.StringIO()
    print_lookups(
        Console(file=output, width=80),
        [LookupResult.model_validate({"name": "ffn1", "key": "a" * 64, "record": record})],
    )
    for text in (printed(job, 80), output.getvalue()):
        assert f"ptx {verdict}" in text


LONGEST = {f"{name}_{axis}": 128 for name in ("tile", "thread", "warp", "cluster") for axis in "mnk"}


@pytest.mark.parametrize("width", [80, 100, 124, 125, 200])
def test_no_column_is_lost_on_a_narrow_terminal(width: int) -> None:
    job = job_json("done")
    job["problems"][0]["problem"]["dtype"] = "bfloat16"
    job["problems"][0]["winner"].update(schedule=LONGEST, verified="cpu-unconfirmed", predicted_us=123456.0)
    output = io.StringIO()
    print_job(Console(file=output, width=width), Job.model_validate(job))
    text = output.getvalue()
    for word in (
        "problem",
        "bfloat16",
        "winner's schedule",
        "cpu-unconfirmed",
        "predicted 123,456 µs",
        "verify s",
        "4.20",
    ):
        assert word in text
    assert " ".join(text.split()).count("128×128×128") == 4
    assert max(map(len, text.splitlines())) <= width


def test_of_a_table_of_100_columns_no_schedule_takes_more_than_four_lines() -> None:
    job = job_json("done")
    job["problems"][0]["problem"]["dtype"] = "bfloat16, tf32"
    schedule = {**LONGEST, **{f"another_tunable_{place}": place for place in range(4)}}
    job["problems"][0]["winner"].update(schedule=schedule, verified="cpu-unconfirmed", predicted_us=123456.0)
    first = printed(job, 100).split("\n\n")[0].splitlines()
    assert "another_tunable_3 3" in " ".join(" ".join(first).split())
    assert len(first) <= 1 + 4
    assert max(map(len, first)) <= 100


def printed(job: dict[str, Any], width: int = 140) -> str:
    output = io.StringIO()
    print_job(Console(file=output, width=width), Job.model_validate(job))
    return output.getvalue()


def many_winners(*schedules: dict[str, Any]) -> dict[str, Any]:
    job = job_json("done")
    (problem,) = job["problems"]
    problems = [
        {**problem, "name": f"p{i}", "winner": {**problem["winner"], "schedule": schedule}}
        for i, schedule in enumerate(schedules)
    ]
    return {**job, "problems": problems}


def test_what_many_schedules_agree_on_is_said_once() -> None:
    simt = {"tile_m": 64, "tile_n": 64, "raster": 0, "stages": 2, "padding": 4}
    tensor = {"tile_m": 64, "tile_n": 128, "raster": 0, "stages": 3, "copy": "cp_async"}
    text = printed(many_winners(simt, simt, tensor, tensor))
    assert "in every winner's schedule that has them: copy cp_async, padding 4, raster 0" in text
    rows = re.findall(r"^p\d +(.*?)  ", text, re.MULTILINE)
    assert rows == [*["tile 64×64, stages 2"] * 2, *["tile 64×128, stages 3"] * 2]
    assert "in every winner" not in printed(many_winners(simt, simt, tensor))


def test_a_problem_with_a_dtype_shows_it() -> None:
    job = job_json("done")
    assert "dtype" not in printed(job)
    job["problems"][0]["problem"] |= {"dtype": "float32", "allow_tf32": True}
    for width in (80, 140):
        assert "float32, tf32" in printed(job, width)


def test_a_cached_problem_shows_no_seconds() -> None:
    job = job_json("done", cached=True)
    job["problems"][0]["cached"] = True
    output = io.StringIO()
    print_job(Console(file=output, width=140), Job.model_validate(job))
    row = next(line for line in output.getvalue().splitlines() if line.startswith("ffn1"))
    assert row.split()[-4:] == ["-"] * 4


def test_a_measured_time_is_never_shown_as_predicted() -> None:
    job = job_json("done")
    winner = job["problems"][0]["winner"]
    winner.update(ranked_by="measured", measured_us=40.0, verified="gpu")
    job["problems"][0]["device_class"] = "NVIDIA H200"
    output = io.StringIO()
    print_job(Console(file=output, width=140), Job.model_validate(job))
    assert "measured 40 µs" in output.getvalue()
    assert "predicted" not in output.getvalue()


H200 = "NVIDIA H200"
RUNNER_UP = {"candidate": "e" * 64, "us": 12.6, "margin": 0.024, "tie": False}


def measured_job(*, cached: bool = False, **winner: Any) -> dict[str, Any]:
    """A job with one problem, measured on a GPU beside the vendor's library."""
    job = job_json("done", cached=cached)
    (problem,) = job["problems"]
    problem.update(device_class=H200, cached=cached)
    problem["seconds"]["measure"] = {"wall": 1.5, "cpu": 1.0}
    measured = {"verified": "gpu", "ranked_by": "measured", "measured_us": 12.3, "vendor_us": 13.284}
    problem["winner"].update(measured, vendor_library="cuBLASLt", runner_up=RUNNER_UP)
    problem["winner"].update(winner)
    return job


@pytest.mark.parametrize("width", [80, 100, 125, 140, 163, 200])
def test_a_measured_winner_is_shown_beside_the_vendors_library_and_the_runner_up(width: int) -> None:
    job = measured_job(schedule=LONGEST)
    job["problems"][0]["problem"]["dtype"] = "bfloat16"
    text = printed(job, width)
    for word in ("bfloat16", "gpu", "measured 12.3 µs", "13.3 µs, 1.08× cuBLASLt", "+2.4 %", "measure s", "1.50"):
        assert word in text
    assert " ".join(text.split()).count("128×128×128") == 4
    assert max(map(len, text.splitlines())) <= width
    tables = {80: 3, 100: 2, 125: 2, 140: 2, 163: 2, 200: 1}
    assert sum(line.startswith("problem ") for line in text.splitlines()) == tables[width]


@pytest.mark.parametrize(
    ("winner", "explained"),
    [
        ({}, ["measured µs", "× cuBLASLt", "runner-up"]),
        ({"runner_up": {**RUNNER_UP, "tie": True}}, ["measured µs", "× cuBLASLt", "tie"]),
        ({"runner_up": None}, ["measured µs", "× cuBLASLt"]),
        ({"vendor_us": None, "vendor_library": None}, ["measured µs", "runner-up"]),
        ({"vendor_library": None}, ["measured µs", "× vendor", "runner-up"]),
        ({"vendor_us": None, "runner_up": None}, ["measured µs"]),
    ],
)
def test_the_notes_of_a_measured_job_explain_the_words_of_its_table(
    winner: dict[str, Any], explained: list[str]
) -> None:
    job = measured_job(**winner)
    shown = notes(Job.model_validate(job))
    rest = ["seconds", "3 more schedules broke a rule of their operator and were not compiled"]
    assert [line.split(":")[0] for line in shown] == ["verified gpu", *explained, *rest]
    assert H200 in shown[1]
    text = printed(job, 200)
    assert ("vendor" in text.splitlines()[0]) == ("runner-up" in text.splitlines()[0]) == (len(explained) > 1)
    if winner.get("runner_up") and winner["runner_up"]["tie"]:
        assert "tie" in next(line for line in text.splitlines() if line.startswith("ffn1")).split()


OFF = {"vendor_us": 9.0, "vendor_library": "cuBLASLt", "vendor_max_error": 25.0, "vendor_error_bound": 7e-5}


@pytest.mark.parametrize("width", [80, 140, 200])
@pytest.mark.parametrize(
    ("error", "message"), [(25.0, "(its result is off by 25, allowed 7e-05)"), (None, "(its result is not a number)")]
)
def test_a_vendor_with_a_wrong_result_is_no_peer(width: int, error: float | None, message: str) -> None:
    job = measured_job(**{**OFF, "vendor_max_error": error})
    text = printed(job, width)
    assert "9 µs" in text and message in text
    assert "× cuBLASLt" not in text
    assert max(map(len, text.splitlines())) <= width
    shown = [line.split(":")[0] for line in notes(Job.model_validate(job))]
    assert "its result is off" in shown and "× cuBLASLt" not in shown


@pytest.mark.parametrize("bound", [25.0, 26.0, None])
def test_a_vendor_within_the_bound_or_not_looked_at_is_a_peer(bound: float | None) -> None:
    job = measured_job(**{**OFF, "vendor_error_bound": bound})
    assert "9 µs, 0.73× cuBLASLt" in printed(job)
    assert "its result is off" not in printed(job)


def test_what_keep_left_out_broke_no_rule() -> None:
    job = job_json("done")
    (problem,) = job["problems"]
    problem.update(candidates=2, rejected={"shared_memory": 3, "keep": 124})
    better = "more schedules were predicted slower than the best 2"
    lines = notes(Job.model_validate(job))
    assert lines[-2:] == [
        "3 more schedules broke a rule of their operator and were not compiled",
        f"124 {better} and were not compiled",
    ]
    job["problems"] = [problem, {**problem, "rejected": {"keep": 1}}]
    assert notes(Job.model_validate(job))[-1] == f"125 {better} of their problem and were not compiled"
    job["problems"] = [{**problem, "rejected": {"keep": 1}}]
    assert "broke a rule" not in printed(job)


def test_a_long_name_is_whole_in_several_lines() -> None:
    job = job_json("done")
    (problem,) = job["problems"]
    problem["name"] = "resnet50/b32/s2_1x1_reduce/wgrad"
    starts = [line.split(" ")[0] for line in printed(job, 200).splitlines()]
    assert starts[1:3] == ["resnet50/b32/", "s2_1x1_reduce/wgrad"]


def test_problems_on_several_classes_say_which() -> None:
    wide = 200
    job = measured_job()
    (problem,) = job["problems"]
    predicted = job_json("done")["problems"][0]
    job["problems"] = [{**problem, "name": "n" * 30}, {**predicted, "name": "n" * 30}]
    lines = [line.strip() for line in printed(job, wide).splitlines()]
    assert sum(line.startswith("n" * 20 + " ") for line in lines) == 2
    assert sum(line.split(" ")[0] == "n" * 10 for line in lines) == 2
    assert any(line.startswith(f"on {H200}") for line in lines)
    assert any(line.startswith("on predicted:sm_90a") for line in lines)
    assert f"\non {H200}" not in printed(measured_job(), wide)
    words = [line.split(":")[0] for line in notes(Job.model_validate(job))]
    assert sorted(word for word in words if word.endswith("µs")) == ["measured µs", "predicted µs"]


def test_a_cached_measured_problem_still_shows_the_vendor_on_a_narrow_terminal() -> None:
    text = printed(measured_job(cached=True), 80)
    assert "1.08× cuBLASLt" in text
    assert "compile s" not in text


CLEAR = {"ratio": 1.0831, "low": 1.0794, "high": 1.0879, "tie": False}
EQUAL = {"ratio": 1.0021, "low": 0.9962, "high": 1.0043, "tie": True}
RATIOS = [(CLEAR, "13.3 µs, 1.083× cuBLASLt (1.079–1.088)"), (EQUAL, "13.3 µs, tie with cuBLASLt (0.996–1.004)")]


@pytest.mark.parametrize(("ratio", "message"), RATIOS)
@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_ratio_to_the_vendor_has_its_interval_and_may_be_a_tie(
    ratio: dict[str, Any], message: str, width: int
) -> None:
    text = printed(measured_job(vendor_ratio=ratio), width)
    assert message in text and max(map(len, text.splitlines())) <= width
    (note,) = (line for line in notes(Job.model_validate(measured_job(vendor_ratio=ratio))) if "cuBLASLt" in line)
    assert note.split(":")[0] == ("tie with cuBLASLt" if ratio["tie"] else "× cuBLASLt")


@pytest.mark.parametrize(("ratio", "message"), RATIOS)
def test_a_lookup_shows_the_ratio_of_the_comparison_that_the_kernel_was_in(ratio: dict[str, Any], message: str) -> None:
    output = io.StringIO()
    answer = LookupResult.model_validate({"name": "ffn1", "key": "a" * 64, "record": compared_record(ratio)})
    print_lookups(Console(file=output, width=140), [answer])
    assert message in output.getvalue()


CHANGED = ["the clock went from 1980 to 1700 MHz"]


@pytest.mark.parametrize("width", [80, 200])
def test_a_winner_of_a_gpu_that_changed_or_was_held_back_is_marked_and_the_legend_says_why(width: int) -> None:
    job = measured_job(unsteady=CHANGED, limited_by=["sw_power_cap"])
    text = " ".join(printed(job, width).split())
    assert "(unsteady, limited)" in text and max(map(len, printed(job, width).splitlines())) <= width
    shown = notes(Job.model_validate(job))
    assert [line.split(":")[0] for line in shown][2:4] == ["unsteady", "limited"]
    assert shown[2].endswith(f": {CHANGED[0]} (ffn1)") and shown[3].endswith(": sw_power_cap (ffn1)")
    steady = printed(measured_job(), width)
    assert "steady" not in steady and "limited" not in steady


@pytest.mark.parametrize(("tie", "message"), [(False, "+2.4 % (1.9–2.8)"), (True, "tie (1.9–2.8)")])
@pytest.mark.parametrize("width", [80, 200])
def test_a_runner_up_has_its_interval(tie: bool, message: str, width: int) -> None:
    job = measured_job(runner_up={**RUNNER_UP, "tie": tie, "low": 0.0189, "high": 0.0281})
    assert message in printed(job, width) and max(map(len, printed(job, width).splitlines())) <= width


def test_a_legend_says_why_no_vendor_was_compared() -> None:
    job = measured_job(vendor_us=None, vendor_library=None, vendor_missing="the vendor's library failed: no cuDNN")
    (note,) = (line for line in notes(Job.model_validate(job)) if line.startswith("no vendor"))
    assert note == "no vendor: its library was not compared: the vendor's library failed: no cuDNN (ffn1)"
    assert not [line for line in notes(Job.model_validate(measured_job())) if line.startswith("no vendor")]


def test_a_legend_names_three_problems_of_each_reason() -> None:
    job = measured_job(limited_by=["sw_power_cap"])
    job["problems"] = [{**job["problems"][0], "name": f"p{number}"} for number in range(5)]
    (note,) = (line for line in notes(Job.model_validate(job)) if line.startswith("limited"))
    assert note.endswith(": sw_power_cap (p0, p1, p2 and 2 more)")


def test_a_lookup_marks_a_record_of_a_gpu_that_changed() -> None:
    record = compared_record(CLEAR)
    run = {
        "device": H200,
        "uuid": "GPU-0",
        "driver": "580",
        "cold": True,
        "before": {},
        "after": {},
        "measured_at": 0.0,
    }
    record["front"][0]["measured_on"] = {**run, "rounds": 9, "unsteady": CHANGED}
    output = io.StringIO()
    answer = LookupResult.model_validate({"name": "ffn1", "key": "a" * 64, "record": record})
    print_lookups(Console(file=output, width=200), [answer])
    assert "(unsteady)" in output.getvalue() and f"{CHANGED[0]} (ffn1)" in " ".join(output.getvalue().split())


@pytest.mark.parametrize(
    ("ratio", "won"),
    [
        (None, True),
        ({"ratio": 0.97, "low": 0.96, "high": 0.98, "tie": False}, True),
        ({"ratio": 0.97, "low": 0.96, "high": 1.01, "tie": True}, False),
        ({"ratio": 1.02, "low": 1.015, "high": 1.03, "tie": False}, False),
    ],
)
def test_a_vendor_has_not_won_by_a_tie(ratio: dict[str, Any] | None, won: bool) -> None:
    record = WinnerRecord.model_validate(compared_record(ratio, vendor_us=12.0))
    assert record.vendor_won(record.front[0]) == won


def compared_record(ratio: dict[str, Any] | None, vendor_us: float = 13.284) -> dict[str, Any]:
    """Of a kernel of 12.3 µs that was compared with the vendor's."""
    vendor = {
        "library": "cuBLASLt", "version": "13", "algorithm": "a", "fused": True, "workspace_bytes": 0,
        "median_us": vendor_us, "low_us": vendor_us, "high_us": vendor_us,
    }  # fmt: skip
    record = record_json(device_class=H200, ranked_by="measured", vendor=vendor)
    contender = {
        "candidate": "c" * 64, "median_us": 12.3, "low_us": 12.2, "high_us": 12.4,
        "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0, "tie": False, "vendor_ratio": ratio,
    }  # fmt: skip
    record["front"][0].update(measured_us=12.3, verified="gpu", measurement=contender)
    return record


def test_a_job_on_a_gpu_shows_the_measure_stage() -> None:
    stage = {"done": 3, "total": 8}
    none = {"done": 0, "total": 0}
    output = io.StringIO()
    PlainLines(Console(file=output, width=200)).update(progress(measure=stage, verify=none))
    assert output.getvalue().startswith("lower 0/4, compile 0/4, measure 3/8, finish 0/4; ")
    output = io.StringIO()
    PlainLines(Console(file=output, width=200)).update(progress(measure=stage))
    assert output.getvalue().startswith("lower 0/4, compile 0/4, verify 0/4, measure 3/8, finish 0/4; ")
    whole = {"done": 2, "total": 2}
    assert fraction(progress(lower=whole, compile=whole, measure=whole, finish=whole, verify=none)) == 1.0
    display = LiveBars()
    for shown, stages in (({}, "verify"), ({"measure": stage, "verify": none}, "measure")):
        display.update(progress(**shown))
        console = Console(file=io.StringIO(), force_terminal=True, width=100)
        console.print(display.render())
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert [name for name in ("verify", "measure") if name in text] == [stages]


def test_a_lookup_shows_measured_times_beside_the_vendors() -> None:
    vendor = {
        "library": "cuBLASLt", "version": "13", "algorithm": "a", "fused": True, "workspace_bytes": 0,
        "median_us": 13.284, "low_us": 13.0, "high_us": 13.5,
    }  # fmt: skip
    record = record_json(device_class=H200, ranked_by="measured", vendor=vendor)
    record["front"][0].update(measured_us=12.3, verified="gpu", schedule=LONGEST)
    found = [
        LookupResult.model_validate({"name": name, "key": "a" * 64, "record": each})
        for name, each in (("ffn1", record), ("ffn2", record_json()), ("ffn3", None))
    ]
    for width in (80, 140):
        output = io.StringIO()
        print_lookups(Console(file=output, width=width), found)
        text = output.getvalue()
        for word in ("measured 12.3 µs", "13.3 µs, 1.08× cuBLASLt", H200, "predicted 12.5 µs", "no winner yet"):
            assert word in text
        assert "its result is off" not in text
    output = io.StringIO()
    print_lookups(Console(file=output, width=140), found[1:])
    assert "vendor" not in output.getvalue()


def test_a_lookup_marks_a_vendor_with_a_wrong_result() -> None:
    vendor = {
        "library": "cuBLASLt", "version": "13", "algorithm": "a", "fused": False, "workspace_bytes": 0,
        "median_us": 9.0, "low_us": 9.0, "high_us": 9.0, "max_error": 25.0, "error_bound": 7e-5,
    }  # fmt: skip
    record = record_json(device_class=H200, ranked_by="measured", vendor=vendor)
    record["front"][0].update(measured_us=12.3, verified="gpu")
    found = [LookupResult.model_validate({"name": "ffn1", "key": "a" * 64, "record": record})]
    for width in (80, 140):
        output = io.StringIO()
        print_lookups(Console(file=output, width=width), found)
        text = " ".join(output.getvalue().split())
        assert "(its result is off by 25, allowed 7e-05)" in text
        assert "rounds between them" in text
        assert "× cuBLASLt" not in text


def test_the_summary_counts_every_verdict() -> None:
    job = job_json("partial")
    job["problems"][0].update(verdicts={"compile_error": 2, "ok": 61, "incorrect": 1})
    job["problems"].append({**job["problems"][0], "name": "second", "winner": None, "state": "failed", "error": "none"})
    text = summary(Job.model_validate(job), 4.2)
    assert text == (
        "Job job1: 1 of 2 without a winner, 2 problems, 128 candidates (122 ok, 4 compile_error, 2 incorrect), 4.2 s."
    )
