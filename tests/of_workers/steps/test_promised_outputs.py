"""What a winner's PTX gives on the CPU is promised to the bit; a GPU that gives anything else is refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from codegen.kernel import Candidate, Kernel
from codegen.plan.ptx_plan import Ways
from codegen.targets import target
from storage.entities.libraries import PtxVerdict
from storage.entities.verdicts import GPU, Verdict
from tests.gpu import check_promises
from tests.gpu.data_sheet import sheet_of
from tests.support.fixtures.gpu_line import GpuLine, probe, search
from tests.support.fixtures.line import Line
from tests.support.gpu import lost_context
from tests.support.gpu.gpu_tasks import LIMITS, Gpu, matmul_candidate, matmul_problem
from tests.support.kernels.compile_cache import CachingProcesses
from tests.support.kernels.cpu_helpers import toolchain
from tests.support.kernels.ptx_mutants import ptx_of, verdict_of
from workers.compile.compile_group import compile_group
from workers.compile.toolchain import Toolchain
from workers.gpu.interface import Device, open_gpu
from workers.processes.processes import Processes
from workers.steps.run_ptx import broken_promise, promise

SMALL = matmul_problem()
PLAIN, SPLIT = matmul_candidate(SMALL), matmul_candidate(SMALL, split="workspace", split_k=2)
GELU = matmul_candidate(matmul_problem(epilogue=[{"op": "gelu"}]))
COPIES = {"way": ["copy"], "slices": [1], "fault": ["none"]}


@cache
def promised_by(candidate: Candidate) -> list[dict[str, Any]]:
    verdict = verdict_of(candidate.kernel, ptx_of((candidate.kernel,)))
    assert verdict.verdict == "ok", verdict.message
    return [promise(case, case["runs"][0]["launch"]) for case in verdict.details["cases"] if "sha256" in case]


def stored(promised: list[dict[str, Any]]) -> PtxVerdict:
    return PtxVerdict("ok", "", "p", 1, 1.0, 1.0, promised)


def gpu_verdict(cases: list[dict[str, Any]], venue: str = GPU) -> Verdict:
    return Verdict(venue=venue, details={"cases": cases})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    processes = Processes()
    kernels = [PLAIN.kernel, SPLIT.kernel]
    made = compile_group(kernels, target("sm_90a"), toolchain(), processes, LIMITS)
    processes.close()
    assert made.artifact is not None, made.why
    path = tmp_path_factory.mktemp("group") / "group.so"
    path.write_bytes(made.artifact.library)
    yield path


def test_what_no_rounding_is_left_open_for_is_promised() -> None:
    promised = promised_by(PLAIN)
    assert [of["kind"] for of in promised] == ["integer", "normal"] * 2
    assert len({of["sha256"] for of in promised}) == 4
    assert promised == promised_by.__wrapped__(PLAIN)
    assert promised_by(GELU) == []
    assert not Ways(fusible=False, approximate=False, loose=True, tensor=False).is_settled


def test_the_simulated_gpu_gives_what_is_promised(gpu: Gpu, library: Path) -> None:
    outcome = gpu.run(gpu.task([(PLAIN, library), (SPLIT, library)], verified=False))
    for candidate, result in zip((PLAIN, SPLIT), outcome.results, strict=True):
        assert (result.verdict, result.message) == ("ok", "")
        assert sum("sha256" in case for case in result.details["cases"]) == 4
        assert broken_promise(stored(promised_by(candidate)), gpu_verdict(result.details["cases"])) is None


def test_a_wrong_bit_of_a_gpu_is_refused_by_name_though_it_is_within_the_bound(gpu: Gpu, library: Path) -> None:
    gpu.configure(nudged={PLAIN.kernel.id: 2})
    [result] = gpu.run(gpu.task([(PLAIN, library)], verified=False)).results
    assert result.verdict == "ok", result.message
    promised = promised_by(PLAIN)
    words = broken_promise(stored(promised), gpu_verdict(result.details["cases"]))
    normal = next(of for of in promised if of["kind"] == "normal")
    assert words is not None and f"its PTX promises {normal['sha256']} [normal inputs, extents" in words
    assert words.startswith("its output on the GPU has SHA-256 ") and f"seed {normal['seed']}]" in words


def test_nothing_is_broken_where_nothing_is_promised_or_no_gpu_has_looked() -> None:
    case = {"extents": [8], "kind": "normal", "seed": 1, "launches": [[1]], "inputs_sha256": "c", "sha256": "a" * 64}
    own = {"extents": [8], "kind": "normal", "seed": 1, "launch": [1], "inputs_sha256": "c", "sha256": "b" * 64}
    assert broken_promise(stored([own]), gpu_verdict([case])) is not None
    assert broken_promise(stored([]), gpu_verdict([case])) is None
    assert broken_promise(stored([own]), gpu_verdict([])) is None
    assert broken_promise(stored([own]), gpu_verdict([{**case, "seed": 2}])) is None
    assert broken_promise(stored([own]), gpu_verdict([{**case, "inputs_sha256": "of another NumPy"}])) is None
    for damaged in ({"sha256": "a"}, {**case, "launches": []}, {**case, "launches": 5}, {**case, "seed": [[]]}):
        assert broken_promise(stored([own]), gpu_verdict([damaged])) is None  # as an import may have it
    assert broken_promise(stored([own]), gpu_verdict([case], "cpu")) is None
    assert broken_promise(None, gpu_verdict([case])) is None and broken_promise(stored([own]), None) is None


def test_a_record_says_what_its_kernels_promise(line: Line) -> None:
    job = line.job({"tunables": {**COPIES, "factor": [1]}})
    [entry] = line.record().front
    assert entry.ptx is not None and entry.ptx.promised is not None
    assert [of.kind for of in entry.ptx.promised] == ["integer", "normal"] * 2
    assert all(len(of.sha256) == 64 for of in entry.ptx.promised)
    winner = job.problems[0].winner
    assert winner is not None and winner.ptx is not None and winner.ptx.promised is None  # a record says it


@pytest.mark.parametrize(("promises", "winner"), [("tell", "copy"), ("refuse", "workspace")])
def test_a_candidate_whose_gpu_broke_its_promise_is_marked_or_gives_way_to_the_next(
    promises: str, winner: str, gpu_line: GpuLine, line: Line
) -> None:
    line.job({"tunables": {**COPIES, "factor": [1]}})
    mark = line.record().front[0].ptx
    assert mark is not None and mark.promised is not None
    promised = mark.promised  # of the same kernel as the GPU's first

    def cases(schedule: Mapping[str, Any]) -> list[dict[str, Any]]:
        given = [{**of.model_dump(exclude={"launch"}), "launches": [of.launch]} for of in promised]
        return [{**of, "sha256": "0" * 64} for of in given] if schedule["way"] == "copy" else []

    settings = gpu_line.world.settings.model_copy(update={"promises": promises})
    gpu_line.workplace = replace(gpu_line.workplace, settings=settings)
    gpu_line.gpu.cases = cases
    gpu_line.gpu.alone = lambda schedule: {"copy": 100.0, "workspace": 200.0}[schedule["way"]]
    job = gpu_line.job((probe(), search(factor=[1], way=["copy", "workspace"])))
    chosen = job.problems[0].winner
    assert chosen is not None and chosen.ptx is not None and chosen.schedule["way"] == winner
    words = f"its output on the GPU has SHA-256 {'0' * 64}, its PTX promises {promised[0].sha256} [integer inputs"
    refused = [of for of in gpu_line.candidates(job.job) if of.verdict == "incorrect"]
    if promises == "tell":
        assert refused == [] and str(chosen.ptx.broken).startswith(words)
    else:
        [of] = refused
        assert of.schedule["way"] == "copy" and str(of.message).startswith(words) and chosen.ptx.broken is None


SIMULATED = ["--gpu-module", "tests.support.gpu.fake_gpu"]


def require_compared_and_named(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kernel:
    """The kernel, of which the promise holds, and is named where its output is another."""
    monkeypatch.setattr(check_promises, "PROBLEMS", {"float32": check_promises.PROBLEMS["float32"]})
    assert check_promises.main(SIMULATED) == check_promises.RIGHT
    assert "float32: 4 outputs with the promised SHA-256" in capsys.readouterr().out
    kernel = check_promises.candidates_of(target("sm_90a"))["float32"].kernel
    gpu.configure(nudged={kernel.id: 2})
    assert check_promises.main(SIMULATED) == check_promises.WRONG
    assert "float32: WRONG: its output on the GPU has SHA-256 " in capsys.readouterr().out
    return kernel


def test_make_test_gpu_compares_them_and_names_what_is_broken(
    gpu: Gpu,
    caching_processes: CachingProcesses,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def in_this_process(module: str, device: str, name: str, sheet: str, tools: Toolchain) -> str:
        candidate = check_promises.candidates_of(target(sheet))[name]
        return check_promises.check(open_gpu(module, device), candidate, target(sheet), tools, caching_processes)

    monkeypatch.setattr(check_promises, "in_a_process", in_this_process)
    require_compared_and_named(gpu, monkeypatch, capsys)


def test_a_process_that_a_check_ends_is_that_of_one_kernel(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_promises, "check_here", lost_context.check_here)
    monkeypatch.setattr(check_promises, "PROBLEMS", {name: {} for name in (lost_context.LOST, "reduce")})
    assert check_promises.main(SIMULATED) == check_promises.WRONG
    said = capsys.readouterr().out
    assert f"{lost_context.LOST}: WRONG: " in said and f"reduce: {lost_context.RIGHT}" in said


@pytest.mark.long  # the same with real checks: the two before it
def test_make_test_gpu_checks_each_in_a_process_of_its_own(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = require_compared_and_named(gpu, monkeypatch, capsys)
    # A context that is lost is that of one kernel.
    monkeypatch.setattr(check_promises, "PROBLEMS", {"float32": {}, "reduce": {}})
    gpu.configure(faulty=[kernel.id[:12]])
    assert check_promises.main(SIMULATED) == check_promises.WRONG
    said = capsys.readouterr().out
    assert "float32: WRONG: " in said and "\nreduce: " in said and "reduce: WRONG" not in said


def test_where_nothing_can_be_compared_the_reason_is_said(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated = ["--gpu-module", "tests.support.gpu.fake_gpu"]
    gpu.configure(devices=[{"cuda": 11080}])
    assert check_promises.main(simulated) == check_promises.NO_GPU
    assert "is for CUDA 11.8, and kernels are compiled by CUDA" in capsys.readouterr().err
    gpu.configure(devices=[{"capability": [7, 0]}])
    assert check_promises.main(simulated) == check_promises.NOT_RUN
    assert capsys.readouterr().err.startswith("not run: unknown target 'sm_70'")
    monkeypatch.setenv("CUKILN_NVCC", "/nowhere/nvcc")
    assert check_promises.main(simulated) == check_promises.NOT_RUN
    assert capsys.readouterr().err.startswith("not run: no compiler: ")


@pytest.mark.parametrize(("capability", "name"), [((9, 0), "sm_90a"), ((10, 3), "sm_100"), ((12, 1), "sm_120")])
def test_a_check_compiles_for_the_target_that_a_client_with_its_gpu_names(
    capability: tuple[int, int], name: str
) -> None:
    assert sheet_of(Device("GPU", "GPU-1", capability, "580", 1, 1, 1)).name == name
