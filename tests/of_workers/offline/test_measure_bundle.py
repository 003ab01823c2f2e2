"""Measuring without a service: requests and bundles, budgets, killed runs, and what cannot be measured."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from codegen.targets import target
from cukiln.types import Comparison, Measurement
from tests.support.fixtures.elsewhere import (
    REQUEST,
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
from workers.offline import compile_ahead, measure_bundle
from workers.offline.measure_all import in_turns
from workers.offline.measure_bundle import table
from workers.offline.measured import Conditions, Journal, append_line, in_short, read_lines
from workers.offline.work import RequestError, Work, default_target_of, require_capability, work_of_request

DEVICE = Device("Made Up", "GPU-1", (9, 0), "580.1", 132, 50 << 20, 1 << 37)


def result(candidate: str = "c", verdict: str = "ok", **details: Any) -> CandidateResult:
    return CandidateResult(candidate, verdict, "", details, None, 0.1, 0.1, 0.2, 0.2)


def test_a_request_is_tuned_without_anything_of_the_server(measured: Path) -> None:
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


def test_a_run_that_is_repeated_measures_nothing_again(measured: Path, elsewhere: Elsewhere) -> None:
    before = len(lines_of(measured / "measured.jsonl", "result")), (measured / "compiled.jsonl").read_bytes()
    again = elsewhere.run(elsewhere.request(), "--out", measured)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (len(lines_of(measured / "measured.jsonl", "result")), (measured / "compiled.jsonl").read_bytes()) == before
    assert "0 kernels to compile" in again.stdout


def test_a_killed_run_loses_nothing_that_was_measured(elsewhere: Elsewhere) -> None:
    out = elsewhere.folder / "out"
    journal = out / "measured.jsonl"
    words = (elsewhere.request(), "--out", out)
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
    assert candidates[: len(lines)] == [one["candidate"] for one in lines]
    assert len(candidates) == len(set(candidates)) == 6
    assert verdicts(results_in(out)) == [["ok"] * 3, ["ok"] * 3]


def test_what_a_budget_leaves_unmeasured_is_named(elsewhere: Elsewhere) -> None:
    out = elsewhere.folder / "out"
    ended = elsewhere.run(elsewhere.request(), "--out", out, "--budget", "0.01")
    results = results_in(out)
    assert ended.returncode == 1
    assert results["complete"] is False
    assert verdicts(results) == [["skipped"] * 3, ["skipped"] * 3]
    assert {candidate["message"] for problem in results["problems"] for candidate in problem["candidates"]} == {
        "not measured: the run was not finished"
    }
    assert "wide: 3 skipped: not measured" in ended.stdout


def test_a_terminated_run_ends_in_order(elsewhere: Elsewhere) -> None:
    out = elsewhere.folder / "out"
    running = elsewhere.start(elsewhere.request(), "--out", out)
    wait_for(lambda: (out / "measured.jsonl").is_file() or running.poll() is not None, seconds=60)
    running.send_signal(signal.SIGTERM)
    assert running.wait(240) == 130, (elsewhere.folder / "log").read_text()
    assert results_in(out)["complete"] is False


def test_one_problem_and_few_candidates_can_be_asked_for(elsewhere: Elsewhere) -> None:
    out = elsewhere.folder / "out"
    ended = elsewhere.run(elsewhere.request(), "--out", out, "--problem", "small", "--limit", "1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (problem,) = results_in(out)["problems"]
    assert (problem["name"], len(problem["candidates"]), problem["search"]["keep"]) == ("small", 1, 1)


@pytest.mark.parametrize(
    ("request_", "options", "words"),
    [
        ({"problems": []}, (), "not a job request: problems"),
        ({"problems": [{"operator": "matmult"}]}, (), "problem0: unknown operator 'matmult'"),
        ({"problems": [{"operator": "matmul", "m": 1, "n": 1}]}, (), "problem0: k: Field required"),
        ({**REQUEST, "colour": "red"}, (), "not a job request: colour"),
        ({**REQUEST, "target": "sm_75"}, (), "compiled for sm_75, but"),
        (REQUEST, ("--problem", "none"), "no problem is called 'none'"),
        (REQUEST, ("--device", "7"), "there is no GPU 7 on this machine: it has 0 = "),
        (REQUEST, ("--nvcc", "/nowhere/nvcc"), "/nowhere/nvcc, which is not an executable file"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(
    request_: dict[str, Any], options: tuple[str, ...], words: str, elsewhere: Elsewhere
) -> None:
    ended = elsewhere.run(elsewhere.request(request_), "--out", elsewhere.folder / "out", *options)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stdout + ended.stderr
    assert words in ended.stderr
    assert not (elsewhere.folder / "out" / "results.json").exists()


def test_a_driver_that_cannot_load_the_kernels_ends_it_before_any_is_compiled(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = work_of_request(REQUEST, "sm_90a", SimpleNamespace(digest="0" * 64, describe=dict))  # type: ignore[arg-type]
    made_by = {"a": {"versions": {"nvrtc": "12.9.86", "ptxas": "12.9.86"}}, "b": {"versions": {"nvcc": "13.2.86"}}}
    assert [measure_bundle.cuda_of(replace(work, toolchains=some)) for some in ({"a": made_by["a"]}, made_by, {})] == [
        12, 13, 0,
    ]  # fmt: skip
    gpu = configure(elsewhere.folder / "gpu.json", devices=[{"driver": "570.1", "cuda": 12080}])
    environment = {**elsewhere.environment(), VARIABLE: gpu}
    monkeypatch.setattr(Elsewhere, "environment", lambda machine: environment)
    ended = elsewhere.run(elsewhere.request(), "--out", elsewhere.folder / "out")
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stdout + ended.stderr
    assert "release 580 or later" in ended.stderr
    assert not (elsewhere.folder / "out").exists()


def test_without_a_gpu_it_says_so(elsewhere: Elsewhere) -> None:
    (elsewhere.folder / "no_gpu_here.py").write_text("def list_devices():\n    return []\n")
    command = elsewhere.command(elsewhere.request())
    command[command.index("tests.support.gpu.fake_gpu")] = "json"  # a module that drives no GPU
    ended = subprocess.run(command, env=elsewhere.environment(), capture_output=True, text=True, check=False)
    assert ended.returncode in (1, 2)
    assert ended.stderr.startswith("measure_bundle: ")


def test_the_target_of_a_device_is_the_one_that_can_do_most() -> None:
    assert default_target_of((9, 0)) == "sm_90a"
    assert default_target_of((8, 0)) == "sm_80"
    with pytest.raises(RequestError, match=r"capability 5\.2; there are: sm_75"):
        default_target_of((5, 2))


def test_an_emulation_is_not_measured_though_a_device_has_its_capability() -> None:
    problem = SimpleNamespace(name="ffn1", target=target("cpu"))
    with pytest.raises(RequestError, match="ffn1 is compiled for cpu, but NVIDIA A100"):
        require_capability(cast(Work, SimpleNamespace(problems=[problem])), (8, 0), "NVIDIA A100")


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
    assert journal.proven() == {"code"}


def test_a_line_that_was_cut_short_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    append_line(path, {"first": 1})
    path.write_bytes(path.read_bytes() + b'{"second": ')
    append_line(path, {"third": float("inf")})
    assert list(read_lines(path)) == [{"first": 1}, {"third": None}]


def test_a_damaged_library_is_not_used_but_compiled_again(measured: Path, elsewhere: Elsewhere) -> None:
    out = Path(shutil.copytree(measured, elsewhere.folder / "out"))
    (library, *_) = sorted((out / "lib").iterdir())
    library.write_bytes(library.read_bytes()[:-1] + b"?")
    words = (elsewhere.request(), "--out", out)
    ended = elsewhere.run(*words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "0 kernels to compile" not in ended.stdout
    assert "0 kernels to compile" in elsewhere.run(*words).stdout


def test_the_table_has_a_line_for_each_problem(measured: Path) -> None:
    lines = table(results_in(measured)).splitlines()
    assert lines[1].split()[:2] == ["problem", "candidates"]
    assert [line.split()[0] for line in lines[2:4]] == ["wide", "small"]
    assert all(float(line.split()[3]) > 0 for line in lines[2:4])


def test_the_benchmark_of_kernels_says_all_of_its_shapes(tmp_path: Path, elsewhere: Elsewhere) -> None:
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"tiny": REQUEST["problems"]}))
    start = (
        "import sys, pathlib, benchmarks.shapes as s, benchmarks.bench_kernels as b\n"
        f"found = __import__('json').loads(pathlib.Path({str(shapes)!r}).read_text())\n"
        "s.shape_sets = lambda: found\n"
        "sys.exit(b.main())"
    )
    command = [
        sys.executable,
        "-c",
        start,
        "--gpu-module",
        "tests.support.gpu.fake_gpu",
        "--limit",
        "2",
        "--seconds",
        "0.01",
    ]
    command += ["--out", "found"]
    before = sorted((ROOT / "benchmarks" / "results").iterdir())
    ended = subprocess.run(
        command, env=elsewhere.environment(), cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    answer = json.loads(ended.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "found" / "kernels.json").read_bytes())["shapes"] == answer["shapes"]
    assert sorted((ROOT / "benchmarks" / "results").iterdir()) == before, "a part is not kept"
    assert set(answer["shapes"]) == {"wide", "small"}
    assert answer["prediction"]["fit"]["problems"] + answer["prediction"]["test"]["problems"] == 2
    assert answer["ceilings"]["copy_gb_s"] > 0
    for entry in answer["shapes"].values():
        assert entry["us"] > 0
        assert entry["tflops"] > 0
        assert entry["of_ceiling"] > 0


def test_the_benchmark_of_kernels_without_a_gpu_is_one_sentence(elsewhere: Elsewhere) -> None:
    command = [sys.executable, "-m", "benchmarks.bench_kernels", "--only", "square/*"]
    ended = subprocess.run(command, env=elsewhere.environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
    assert ended.stderr.startswith("bench-kernels measures on a GPU, and there is none to use: ")


def test_the_benchmark_of_kernels_that_is_cut_short_says_what_it_has(tmp_path: Path, elsewhere: Elsewhere) -> None:
    words = [
        "--gpu-module",
        "tests.support.gpu.fake_gpu",
        "--only",
        "bert_base/proj",
        "--limit",
        "1",
        "--budget",
        "0.01",
    ]
    command = [sys.executable, "-m", "benchmarks.bench_kernels", *words, "--out", "found"]
    paths = {"PYTHONPATH": elsewhere.environment()["PYTHONPATH"]}
    ended = subprocess.run(
        command, env=elsewhere.environment() | paths, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    answer = json.loads(ended.stdout.splitlines()[-1])
    assert (answer["complete"], answer["without_winner"]) == (False, ["bert_base/proj"])
    assert answer["ceilings"] == json.loads((tmp_path / "found" / "ceilings.json").read_bytes())["ceilings"]


def test_relative_paths_are_those_of_the_caller(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[Any] = list(REQUEST["problems"])
    name = elsewhere.request({"problems": problems[1:], "search": {"level": 0}}).name
    monkeypatch.chdir(elsewhere.folder)
    monkeypatch.setenv("CUKILN_GPU_LOCKS", "locks of ours")
    for words, out in (((name, "--out", "here/out"), "here/out"), ((name,), "request-measured")):
        options = ["--gpu-module", "tests.support.gpu.fake_gpu", "--seconds", "0.01", "--workers", "2"]
        assert measure_bundle.main([*words, *options]) == 0
        assert verdicts(results_in(elsewhere.folder / out)) == [["ok"]]
    assert [path.suffix for path in (elsewhere.folder / "locks of ours").iterdir()] == [".lock"]


def test_a_run_goes_problem_by_problem_the_cheapest_first_and_compares_each_at_once(measured: Path) -> None:
    names = {
        candidate["candidate"]: problem["name"]
        for problem in results_in(measured)["problems"]
        for candidate in problem["candidates"]
    }
    lines = [json.loads(text) for text in (measured / "measured.jsonl").read_text().splitlines()]
    order = [names[line["result"]["candidate"]] for line in lines if "result" in line]
    assert order == ["small"] * 3 + ["wide"] * 3
    assert [names[line["compared"][0]] for line in lines if "compared" in line] == ["small", "wide"]


def test_with_a_budget_every_problem_is_compared_before_any_has_all_of_its_candidates(elsewhere: Elsewhere) -> None:
    out = elsewhere.folder / "out"
    request = {**REQUEST, "search": {"level": 1, "limit": 6}}
    ended = elsewhere.run(elsewhere.request(request), "--out", out, "--budget", "600")
    assert ended.returncode == 0, ended.stdout + ended.stderr
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
    told = [("result" in line, line) for line in lines if "result" in line or "compared" in line]
    first = told[: next(number for number, (_, line) in enumerate(told) if "compared" in line)]
    seen = [line["result"]["candidate"] for _, line in first]
    assert seen == predicted["small"][:4] + predicted["wide"][:4]
    then = [names[line["compared"][0]] for result, line in told[len(first) :][:2] if not result]
    assert then == ["small", "wide"]
    assert sum(result for result, _ in told) == len(names) > 8


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
    toolchain = SimpleNamespace(digest="0" * 64, describe=dict)
    work = work_of_request({"search": {"level": 0}, "problems": given}, "sm_90a", toolchain)  # type: ignore[arg-type]
    turns = [turn.name for turn in in_turns(work.problems)]
    assert sorted(turns[:5]) == ["conv2d 64", "conv2d_wgrad 64", "half sum", "product", "sum 256"]
    assert turns[5:] == ["sum 512", "conv2d 128", "conv2d_wgrad 128", "conv2d 256", "conv2d_wgrad 256"]


def test_kernels_of_the_first_problems_are_compiled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain = SimpleNamespace(digest="0" * 64, describe=dict)
    work = work_of_request(REQUEST, "sm_90a", toolchain)  # type: ignore[arg-type]
    ordered = in_turns(work.problems)
    assert [problem.name for problem in ordered] == ["small", "wide"]
    kernels = [{candidate.kernel for candidate in problem.candidates} for problem in ordered]
    monkeypatch.setattr(compile_ahead, "WAVE_SECONDS", 0.01)
    waves = list(compile_ahead.waves_of(work, ordered, workers=2))
    assert [{kernel for members, _ in wave for kernel in members} for wave in waves] == kernels
    monkeypatch.setattr(compile_ahead, "WAVE_SECONDS", 1000.0)
    (together,) = compile_ahead.waves_of(work, ordered, workers=2)
    assert sorted(kernel.id for members, _ in together for kernel in members) == sorted(
        kernel.id for kernel, _ in work.waiting.values()
    )


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
    assert in_short({}) == {}
