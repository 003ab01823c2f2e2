"""Measuring without a service: requests and bundles, budgets, killed runs, and what cannot be measured."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from codegen.lower import lower
from codegen.operators import operator
from codegen.search.search import Search
from codegen.targets import target
from cukiln.types import Comparison, Measurement
from tests.support.fixtures.elsewhere import (
    ROOT,
    Elsewhere,
    lines_of,
    results_in,
    verdicts,
)
from tests.support.fixtures.queue import wait_for
from tests.support.gpu.fake_gpu import VARIABLE, configure
from workers.gpu.interface import Device
from workers.gpu.task import CandidateResult
from workers.offline import measure_all, measure_bundle
from workers.offline.measure_all import in_turns
from workers.offline.measure_bundle import table
from workers.offline.measured import Conditions, Journal, append_line, in_short, read_lines
from workers.offline.work import (
    BundleError,
    WorkProblem,
    cuda_of,
    default_target_of,
    require_capability,
)

DEVICE = Device("Made Up", "GPU-1", (9, 0), "580.1", 132, 50 << 20, 1 << 37)


def result(candidate: str = "c", verdict: str = "ok", **details: Any) -> CandidateResult:
    return CandidateResult(candidate, verdict, "", details, None, 0.1, 0.1, 0.2, 0.2)


def test_a_bundle_is_measured_without_anything_of_the_server(measured: Path) -> None:
    results = results_in(measured)
    assert results["complete"] is True
    assert verdicts(results) == [["ok"] * 3, ["ok"] * 3]
    for problem in results["problems"]:
        right = {candidate["candidate"] for candidate in problem["candidates"]}
        for candidate in problem["candidates"]:
            times = Measurement.model_validate(candidate["measurement"])
            assert (times.device, times.driver) == (results["device"]["name"], results["device"]["driver"])
            assert candidate["prediction"]["us"] > 0
        comparison = Comparison.model_validate(problem["comparison"])
        assert {contender.candidate for contender in comparison.contenders} <= right


def test_a_run_that_is_repeated_measures_and_compares_nothing_again(
    measured: Path, exported: Path, elsewhere: Elsewhere
) -> None:
    def done() -> list[int]:
        return [len(lines_of(measured / "measured.jsonl", kind)) for kind in ("result", "compared")]

    before = done()
    again = elsewhere.run(exported, "--out", measured)
    assert again.returncode == 0, again.stdout + again.stderr
    assert done() == before == [6, 2]


def test_a_killed_run_loses_nothing_that_was_measured(exported: Path, elsewhere: Elsewhere) -> None:
    out = elsewhere.folder / "out"
    journal = out / "measured.jsonl"
    words = (exported, "--out", out)
    running = elsewhere.start(*words)
    wait_for(lambda: lines_of(journal, "result") or running.poll() is not None, seconds=120, what="a first result")
    running.kill()
    running.wait()
    lines = lines_of(journal, "result")
    assert lines, (elsewhere.folder / "log").read_text()
    journal.write_bytes(journal.read_bytes() + b'{"result": {"candidate": "cut sh')
    ended = elsewhere.run(*words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    candidates = [line["candidate"] for line in lines_of(journal, "result")]
    assert candidates[: len(lines)] == [each["candidate"] for each in lines]
    assert len(candidates) == len(set(candidates)) == 6
    assert verdicts(results_in(out)) == [["ok"] * 3, ["ok"] * 3]


def test_what_a_budget_leaves_unmeasured_is_named(exported: Path, elsewhere: Elsewhere) -> None:
    out = elsewhere.folder / "out"
    ended = elsewhere.run(exported, "--out", out, "--budget", "0.01")
    results = results_in(out)
    assert ended.returncode == 1
    assert results["complete"] is False
    assert verdicts(results) == [["skipped"] * 3, ["skipped"] * 3]
    assert {candidate["message"] for problem in results["problems"] for candidate in problem["candidates"]} == {
        "not measured: the run was not finished"
    }
    assert "wide: 3 skipped: not measured" in ended.stdout


def test_a_terminated_run_ends_in_order(exported: Path, elsewhere: Elsewhere) -> None:
    out = elsewhere.folder / "out"
    running = elsewhere.start(exported, "--out", out)
    wait_for(lambda: (out / "measured.jsonl").is_file() or running.poll() is not None, seconds=60)
    running.send_signal(signal.SIGTERM)
    assert running.wait(240) == 130, (elsewhere.folder / "log").read_text()
    assert results_in(out)["complete"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--problem", "none"), "no problem is called 'none'"),
        (("--device", "7"), "there is no GPU 7 on this machine: it has 0 = "),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(
    options: tuple[str, ...], message: str, exported: Path, elsewhere: Elsewhere
) -> None:
    ended = elsewhere.run(exported, "--out", elsewhere.folder / "out", *options)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stdout + ended.stderr
    assert message in ended.stderr
    assert not (elsewhere.folder / "out" / "results.json").exists()


def test_a_driver_that_cannot_load_the_kernels_ends_it_at_once(
    exported: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_by = {"a": {"versions": {"nvrtc": "12.9.86", "ptxas": "12.9.86"}}, "b": {"versions": {"nvcc": "13.2.86"}}}
    assert [cuda_of(some) for some in ({"a": made_by["a"]}, made_by, {})] == [12, 13, 0]
    gpu = configure(elsewhere.folder / "gpu.json", devices=[{"driver": "570.1", "cuda": 12080}])
    environment = {**elsewhere.environment(), VARIABLE: gpu}
    monkeypatch.setattr(Elsewhere, "environment", lambda machine: environment)
    ended = elsewhere.run(exported, "--out", elsewhere.folder / "out")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stdout + ended.stderr
    assert "release 580 or later" in ended.stderr
    assert not (elsewhere.folder / "out").exists()


def test_what_is_no_bundle_is_a_sentence(elsewhere: Elsewhere) -> None:
    ended = elsewhere.run(elsewhere.folder)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stdout + ended.stderr
    assert "`cukiln export-bundle` did not write" in ended.stderr


def test_without_a_gpu_it_says_so(exported: Path, elsewhere: Elsewhere) -> None:
    command = elsewhere.command(exported)
    command[command.index("tests.support.gpu.fake_gpu")] = "json"  # a module that drives no GPU
    ended = subprocess.run(command, env=elsewhere.environment(), capture_output=True, text=True, check=False)
    assert ended.returncode in (1, 2)
    assert ended.stderr.startswith("measure_bundle: ")


def test_the_target_of_a_device_is_the_one_that_can_do_most() -> None:
    assert default_target_of((9, 0)) == "sm_90a"
    assert default_target_of((8, 0)) == "sm_80"
    with pytest.raises(BundleError, match=r"capability 5\.2; there are: sm_75"):
        default_target_of((5, 2))


def test_code_for_another_architecture_is_not_measured() -> None:
    with pytest.raises(BundleError, match=r"compiled for sm_80, but NVIDIA H100 has compute capability 9\.0"):
        require_capability("ffn1", target("sm_80"), replace(DEVICE, name="NVIDIA H100"))


def test_an_emulation_is_not_measured_though_a_device_has_its_capability() -> None:
    with pytest.raises(BundleError, match="ffn1 is compiled for cpu, but NVIDIA A100"):
        require_capability("ffn1", target("cpu"), replace(DEVICE, name="NVIDIA A100", capability=(8, 0)))


def test_results_of_another_driver_or_test_plan_do_not_count(tmp_path: Path) -> None:
    conditions = Conditions(DEVICE, {"matmul": "plan"})
    Journal(tmp_path, conditions).add(result(), "code")
    assert Journal(tmp_path, conditions).result("c", "code") is not None
    assert Journal(tmp_path, Conditions(DEVICE, {"matmul": "other plan"})).result("c", "code") is None
    newer = Device(**{**DEVICE.__dict__, "driver": "590.1"})
    assert Journal(tmp_path, Conditions(newer, {"matmul": "plan"})).result("c", "code") is None
    # A run under another driver in between takes nothing away.
    assert Journal(tmp_path, conditions).result("c", "code") is not None


def test_results_are_of_code_and_not_of_candidates_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path, Conditions(DEVICE, {"matmul": "plan"}))
    journal.add(result(), "code")
    assert journal.result("c", "other code") is None
    assert journal.verified() == {"code"}


def test_a_line_that_was_cut_short_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    append_line(path, {"first": 1})
    path.write_bytes(path.read_bytes() + b'{"second": ')
    append_line(path, {"third": float("inf")})
    assert list(read_lines(path)) == [{"first": 1}, {"third": None}]


def test_the_table_has_a_line_for_each_problem(measured: Path) -> None:
    lines = table(results_in(measured)).splitlines()
    assert lines[1].split()[:2] == ["problem", "candidates"]
    assert [line.split()[0] for line in lines[2:4]] == ["wide", "small"]
    assert all(float(line.split()[3]) > 0 for line in lines[2:4])
    # The vendor's time over the best one's, with its interval.
    assert all(re.search(r" (\d\.\d{3}|tie) \(\d\.\d{3}–\d\.\d{3}\)", line) for line in lines[2:4])


def test_the_table_says_a_tie_with_the_vendor_and_shows_medians_of_an_older_release(measured: Path) -> None:
    results = results_in(measured)
    ratios = ({"ratio": 1.002, "low": 0.995, "high": 1.004, "tie": True}, None)
    for problem, ratio in zip(results["problems"], ratios, strict=True):
        problem["comparison"]["contenders"][0]["vendor_ratio"] = ratio
    results["problems"][0]["comparison"] |= {
        "unsteady": ["throttling began: hw_slowdown"],
        "limited_by": ["sw_power_cap"],
    }
    printed = table(results).splitlines()
    assert "wide: unsteady while the best took turns: throttling began: hw_slowdown" in printed
    assert "wide: limited throughout by sw_power_cap" in printed
    first, second = printed[2:4]
    assert "tie (0.995–1.004)" in first and "(" not in second
    results["problems"][1]["comparison"] |= {"vendor": None, "vendor_missing": "no cuDNN"}
    assert "small: the vendor's library was not compared: no cuDNN" in table(results).splitlines()


def bench(elsewhere: Elsewhere, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return elsewhere.bench(*words, "--gpu-module", "tests.support.gpu.fake_gpu", "--seconds", "0.01", "--out", "found")


def test_the_benchmark_of_kernels_says_all_of_its_shapes(exported: Path, elsewhere: Elsewhere) -> None:
    before = sorted((ROOT / "benchmarks" / "results").iterdir())
    ended = bench(elsewhere, "--bundle", exported, "--limit", "2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answer = json.loads(ended.stdout.splitlines()[-1])
    kernels = elsewhere.folder / "found" / "kernels.json"
    assert json.loads(kernels.read_bytes())["shapes"] == answer["shapes"]
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == before, "a part is not kept"
    assert set(answer["shapes"]) == {"wide", "small"}
    assert answer["prediction"]["fit"]["problems"] + answer["prediction"]["test"]["problems"] == 2
    assert answer["ceilings"]["copy_gb_s"] > 0
    for entry in answer["shapes"].values():
        assert entry["us"] > 0
        assert entry["tflops"] > 0
        assert entry["of_ceiling"] > 0
        assert entry["speed_low"] <= entry["speed"] <= entry["speed_high"] and entry["tie"] in (True, False)
    assert sum(kind["ties"] for kind in answer["by_kind"].values()) == sum(e["tie"] for e in answer["shapes"].values())
    # The same of what lies in a folder, without a GPU; ceilings of another card are no roofs of this one.
    found = elsewhere.folder / "found"
    ceilings = json.loads((found / "ceilings.json").read_bytes())
    (found / "ceilings.json").write_text(json.dumps({**ceilings, "uuid": "GPU-2"}))
    shown = bench(elsewhere, "--results", found, "--no-file")
    assert "ceilings.json is of GPU-2, the results of " in shown.stderr
    printed = json.loads(shown.stdout.splitlines()[-1])
    assert printed["ceilings"] == {} and printed["shapes"].keys() == answer["shapes"].keys()
    assert [printed["shapes"][name]["us"] for name in printed["shapes"]] == [e["us"] for e in answer["shapes"].values()]


@pytest.mark.long
def test_the_benchmark_of_kernels_compiles_its_shapes(elsewhere: Elsewhere) -> None:
    ended = bench(elsewhere, "--only", "bert_base/proj", "--limit", "1", "--budget", "400")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert set(json.loads(ended.stdout.splitlines()[-1])["shapes"]) == {"bert_base/proj"}


def test_the_benchmark_of_kernels_without_a_gpu_is_one_sentence(exported: Path, elsewhere: Elsewhere) -> None:
    command = [sys.executable, "-m", "benchmarks.bench_kernels", "--only", "square/*"]
    ended = subprocess.run(command, env=elsewhere.environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
    assert ended.stderr.startswith("bench-kernels measures on a GPU, and there is none to use: ")


def test_the_benchmark_of_kernels_that_is_cut_short_says_what_it_has(exported: Path, elsewhere: Elsewhere) -> None:
    ended = bench(elsewhere, "--bundle", exported, "--budget", "0.01")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    answer = json.loads(ended.stdout.splitlines()[-1])
    assert (answer["complete"], answer["without_winner"]) == (False, ["small", "wide"])
    ceilings = json.loads((elsewhere.folder / "found" / "ceilings.json").read_bytes())["ceilings"]
    assert answer["ceilings"] == ceilings


def test_relative_paths_are_those_of_the_caller_and_one_problem_with_few_candidates_can_be_asked_for(
    exported: Path, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(exported, elsewhere.folder / "bundle")
    monkeypatch.chdir(elsewhere.folder)
    monkeypatch.setenv("CUKILN_GPU_LOCKS", "locks of ours")
    options = ["--gpu-module", "tests.support.gpu.fake_gpu", "--seconds", "0.01", "--problem", "small", "--limit", "1"]
    for words, out in ((["bundle", "--out", "here/out"], "here/out"), (["bundle"], "bundle/measured")):
        assert measure_bundle.main([*words, *options]) == 0
        results = results_in(elsewhere.folder / out)
        assert [problem["name"] for problem in results["problems"]] == ["small"]
        assert sorted(verdicts(results)[0]) == ["ok", "skipped", "skipped"]
    assert [path.suffix for path in (elsewhere.folder / "locks of ours").iterdir()] == [".lock"]


def test_a_run_goes_problem_by_problem_the_cheapest_first(measured: Path) -> None:
    names = {
        candidate["candidate"]: problem["name"]
        for problem in results_in(measured)["problems"]
        for candidate in problem["candidates"]
    }
    lines = [json.loads(text) for text in (measured / "measured.jsonl").read_text().splitlines()]
    order = [names[line["result"]["candidate"]] for line in lines if "result" in line]
    assert order == ["small"] * 3 + ["wide"] * 3
    assert [names[line["compared"][0]] for line in lines if "compared" in line] == ["small", "wide"]


def test_with_a_budget_every_problem_is_compared_before_any_has_all_of_its_candidates(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert measure_all.BUDGETED_ROUNDS[-1] is None and len(measure_all.BUDGETED_ROUNDS) > 1
    monkeypatch.setattr(measure_all, "BUDGETED_ROUNDS", (1, None))
    monkeypatch.setenv("CUKILN_GPU_LOCKS", str(tmp_path / "locks"))
    options = ["--gpu-module", "tests.support.gpu.fake_gpu", "--seconds", "0.01"]
    assert measure_bundle.main([str(exported), "--out", str(out), "--budget", "600", *options]) == 0
    results = results_in(out)
    predicted = {
        problem["name"]: [
            candidate["candidate"]
            for candidate in sorted(
                problem["candidates"], key=lambda candidate: (candidate["prediction"]["us"], candidate["candidate"])
            )
        ]
        for problem in results["problems"]
    }
    names = {member: name for name, members in predicted.items() for member in members}
    lines = [json.loads(text) for text in (out / "measured.jsonl").read_text().splitlines()]
    written = [("result" in line, line) for line in lines if "result" in line or "compared" in line]
    first = written[: next(number for number, (_, line) in enumerate(written) if "compared" in line)]
    seen = [line["result"]["candidate"] for _, line in first]
    assert seen == predicted["small"][:1] + predicted["wide"][:1]
    then = [names[line["compared"][0]] for result, line in written[len(first) :][:2] if not result]
    assert then == ["small", "wide"]
    assert sum(result for result, _ in written) == len(names) == 6


def lowered_problem(fields: dict[str, Any]) -> WorkProblem:
    kind, sheet = operator(fields["operator"]), target("sm_90a")
    problem = kind.parse({name: value for name, value in fields.items() if name != "name"})
    candidates = lower(problem, sheet, Search(level=0)).candidates
    return WorkProblem(fields["name"], kind, problem, sheet, {}, candidates, {})


def test_operators_and_dtypes_have_turns_so_that_none_waits_for_all_of_another() -> None:
    """However many and however expensive the problems of one kind are."""
    convolution = {"n": 1, "h": 14, "w": 14, "r": 1, "s": 1, "c": 64}
    given: list[dict[str, Any]] = [
        {"name": f"{operator} {k}", "operator": operator, "k": k, **convolution}
        for operator in ("conv2d", "conv2d_wgrad")
        for k in (256, 128, 64)
    ]
    given += [{"name": f"sum {n}", "operator": "reduce", "shape": [64, n], "axes": [1]} for n in (512, 256)]
    given += [{"name": "half sum", "operator": "reduce", "shape": [64, 4096], "axes": [1], "dtype": "float16"}]
    given += [{"name": "product", "operator": "matmul", "m": 2048, "n": 2048, "k": 2048}]
    turns = [turn.name for turn in in_turns(map(lowered_problem, given))]
    assert sorted(turns[:5]) == ["conv2d 64", "conv2d_wgrad 64", "half sum", "product", "sum 256"]
    assert turns[5:] == ["sum 512", "conv2d 128", "conv2d_wgrad 128", "conv2d 256", "conv2d_wgrad 256"]


def test_results_keep_the_worst_error_of_a_verification_and_what_was_wrong() -> None:
    cases = [
        {"kind": "integer", "exact": True, "max_error": 0.0},
        {"kind": "normal", "exact": False, "max_error": 1e-4, "error_bound": 2e-4},
        {"kind": "normal", "exact": False, "max_error": 1e-3, "error_bound": 2e-3},
    ]
    assert in_short({"seed": 7, "cases": cases}) == {"seed": 7, "cases": cases[2:]}
    wrong = {"kind": "integer", "exact": True, "max_error": None, "wrong": 3}
    assert in_short({"seed": 7, "cases": [*cases, wrong]})["cases"] == [cases[2], wrong]
    faulted = {"kind": "integer", "exact": True}
    assert in_short({"seed": 7, "cases": [*cases, faulted]})["cases"] == [cases[2], faulted]
    promised = {**cases[0], "sha256": "5e", "inputs_sha256": "f4"}
    assert in_short({"cases": [*cases, promised]})["cases"] == [cases[2], promised]
    assert in_short({}) == {}
