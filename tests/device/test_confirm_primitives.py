"""`make test-gpu` up to the GPU, and what it writes; the CPU emulations stand in for a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from codegen.primitives import CONFIRMED, primitive_digest, primitives
from codegen.text.render_cpu import CPU_HEADERS
from codegen.text.render_group import DEVICE_HEADERS
from tests.gpu import confirm_primitives, run_primitives
from tests.gpu.confirm_primitives import (
    CONFIRMS,
    DIFFERS,
    LEFT_OPEN,
    NO_GPU,
    NOT_RUN,
    check_on_gpu,
    confirm,
    main,
)
from tests.gpu.primitive_checks import CHECKS, Check
from tests.gpu.primitive_inputs import Words
from tests.gpu.run_primitives import (
    BuildFailed,
    ContextLost,
    CpuEmulations,
    CupyGpu,
    NoCompiler,
    RunFailed,
    build_cubin,
    runs_on,
)
from tests.support.gpu import fake_gpu
from workers.compile import find_compilers
from workers.compile.toolchain import DEVICE_FLAGS
from workers.cpu.build import CPU_FLAGS

CHECK = {check.name: check for check in CHECKS}
# Few of them, so that a run takes no time.
SOME = tuple(CHECK[name] for name in ("votes", "ldmatrix x1", "ldmatrix x2", "ldmatrix x4", "m16n8k16_f16 integers"))


class PlayedGpu:
    """Gives the emulations' results, after `change`."""

    def __init__(
        self, emulations: CpuEmulations, change: Callable[[Check, Words], Words] | None = None, arch: str = "sm_80"
    ) -> None:
        self.arch = arch
        self.description = {"device": "a played GPU", "driver": "1.2", "arch": arch}
        self._emulations, self._change = emulations, change

    def run(self, check: Check, words: Words) -> Words:
        outputs = self._emulations.run(check, words)
        return self._change(check, outputs) if self._change else outputs


def added(name: str, block: int, word: int, amount: int) -> Callable[[Check, Words], Words]:
    """A change of one word's bits, seen as an integer, in the results of one check."""

    def change(check: Check, outputs: Words) -> Words:
        if check.name == name:
            outputs[block, word] += np.uint32(amount % 2**32)
        return outputs

    return change


def written(target: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(target.read_text())
    return record


# --- what a run does


def test_a_gpu_that_agrees_confirms_every_primitive(emulations: CpuEmulations, tmp_path: Path) -> None:
    target = tmp_path / "confirmed.json"
    assert confirm(PlayedGpu(emulations), emulations, "13.2.86", target) == CONFIRMS
    record = written(target)
    assert record["primitives"].keys() == primitives() and record["failed"] == {}
    entry = record["primitives"]["ldmatrix"]
    assert entry["digest"] == primitive_digest("ldmatrix")
    assert entry["values"] == 64 * 32 * (1 + 2 + 4) and entry["worst"] == 0
    for part in (record, entry):
        assert (part["device"], part["driver"], part["arch"], part["cuda"]) == (
            "a played GPU",
            "1.2",
            "sm_80",
            "13.2.86",
        )
        assert part["date"].startswith("20")


def test_a_primitive_that_differs_is_listed_and_not_confirmed(
    emulations: CpuEmulations, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "confirmed.json"
    target.write_text(json.dumps({"primitives": {"ldmatrix": {"digest": primitive_digest("ldmatrix")}}}))
    gpu = PlayedGpu(emulations, added("ldmatrix x2", 5, 17, 1))
    assert confirm(gpu, emulations, "13.2.86", target, SOME) == DIFFERS
    record = written(target)
    assert record["primitives"].keys() == {"vote_any", "vote_all", "vote_ballot", "mma_m16n8k16_f16"}
    assert record["failed"].keys() == {"ldmatrix"}
    assert "ldmatrix x2: block 5, word 17 of 64: the GPU gives 0x" in record["failed"]["ldmatrix"]
    assert record["failed"]["ldmatrix"] in capsys.readouterr().out


def test_a_kernel_that_does_not_run_fails_its_primitives(emulations: CpuEmulations, tmp_path: Path) -> None:
    def broken(check: Check, outputs: Words) -> Words:
        if check.name == "votes":
            raise RunFailed("an illegal memory access was encountered")
        return outputs

    target = tmp_path / "confirmed.json"
    assert confirm(PlayedGpu(emulations, broken), emulations, "13.2.86", target, SOME) == DIFFERS
    assert written(target)["failed"]["vote_any"] == "votes: an illegal memory access was encountered"


def test_an_error_of_the_machine_is_said_and_the_other_checks_are_run(
    emulations: CpuEmulations, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(check: Check, outputs: Words) -> Words:
        if check.name == "votes":
            raise RuntimeError("Failed to find CUDA headers")
        return outputs

    target = tmp_path / "confirmed.json"
    target.write_text(json.dumps({"primitives": {"vote_any": {"digest": "before"}}}))
    assert confirm(PlayedGpu(emulations, broken), emulations, "13.2.86", target, SOME) == LEFT_OPEN
    assert "votes: WRONG: not checked: RuntimeError: Failed to find CUDA headers" in capsys.readouterr().out
    record = written(target)
    assert record["failed"] == {} and record["primitives"]["vote_any"] == {"digest": "before"}
    assert {"ldmatrix", "mma_m16n8k16_f16"} <= record["primitives"].keys()


@pytest.mark.parametrize("kind", [RunFailed, ContextLost])
def test_what_is_the_machines_is_in_no_journal_and_is_checked_by_the_next_run(
    kind: type[RunFailed], emulations: CpuEmulations, tmp_path: Path
) -> None:
    def full(check: Check, outputs: Words) -> Words:
        if check.name == "votes":
            raise kind("cudaErrorMemoryAllocation: out of memory", is_verdict=False)
        return outputs

    target, journal = tmp_path / "confirmed.json", tmp_path / "primitives.jsonl"
    assert confirm(PlayedGpu(emulations, full), emulations, "13.2.86", target, SOME[:2], journal) == LEFT_OPEN
    assert written(target)["failed"] == {}
    assert confirm(PlayedGpu(emulations), emulations, "13.2.86", target, SOME[:2], journal) == CONFIRMS
    assert "vote_any" in written(target)["primitives"]


@pytest.mark.parametrize(
    "line",
    [{"worst": 10**500}, {"worst": float("nan")}, {"values": -1}, {"values": True}, {"failure": None}],
    ids=lambda line: next(iter(line)),
)
def test_a_damaged_line_of_the_journal_is_checked_again(
    line: dict[str, Any], emulations: CpuEmulations, tmp_path: Path
) -> None:
    target, journal, gpu = tmp_path / "confirmed.json", tmp_path / "primitives.jsonl", PlayedGpu(emulations)
    assert confirm(gpu, emulations, "13.2.86", target, SOME[:1], journal) == CONFIRMS
    undamaged, last = written(target)["primitives"], json.loads(journal.read_bytes().splitlines()[-1])
    journal.write_text(json.dumps({**last, **line}))
    assert confirm(gpu, emulations, "13.2.86", target, SOME[:1], journal) == CONFIRMS
    again = written(target)["primitives"]
    assert all(again[name] == {**entry, "date": again[name]["date"]} for name, entry in undamaged.items())


def test_a_context_that_one_check_loses_is_no_failure_of_those_behind_it(
    emulations: CpuEmulations, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(check: Check, outputs: Words) -> Words:
        if check.name != "votes":
            raise ContextLost("an illegal memory access was encountered")
        return outputs

    target, journal = tmp_path / "confirmed.json", tmp_path / "primitives.jsonl"
    assert confirm(PlayedGpu(emulations, lost), emulations, "13.2.86", target, SOME, journal) == LEFT_OPEN
    assert written(target)["failed"].keys() == {"ldmatrix"}, "and not those of tensor cores"
    assert "the checks after this one were not run" in capsys.readouterr().out
    assert confirm(PlayedGpu(emulations), emulations, "13.2.86", target, SOME, journal) == DIFFERS
    assert "mma_m16n8k16_f16" in written(target)["primitives"], "a new process goes on behind it"


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize(("number", "is_verdict"), [(700, True), (2, False), (214, False)])
def test_a_context_is_lost_where_the_device_says_so_again(is_lost: bool, number: int, is_verdict: bool) -> None:
    class CudaError(Exception):
        status = number  # an illegal access, no memory, an error of the memory itself

    def fails(*_: object) -> None:
        raise CudaError("an error of CUDA")

    runtime = SimpleNamespace(CUDARuntimeError=CudaError, deviceSynchronize=fails if is_lost else lambda: None)
    driver = SimpleNamespace(CUDADriverError=CudaError)
    gpu = object.__new__(CupyGpu)
    gpu._cupy = SimpleNamespace(asarray=fails, cuda=SimpleNamespace(runtime=runtime, driver=driver))
    with pytest.raises(RunFailed) as raised:
        gpu.run(SOME[0], np.zeros(1, np.uint32))
    assert (isinstance(raised.value, ContextLost), raised.value.is_verdict) == (is_lost, is_verdict)


class Killed(BaseException):
    """What ends a run in the middle."""


def test_a_run_that_was_cut_off_has_confirmed_what_it_did_and_the_next_one_confirms_the_rest(
    emulations: CpuEmulations, tmp_path: Path
) -> None:
    target, journal = tmp_path / "confirmed.json", tmp_path / "primitives.jsonl"
    ran: list[str] = []

    def killed(check: Check, outputs: Words) -> Words:
        ran.append(check.name)
        if check.name == "ldmatrix x2" and len(ran) == 3:
            raise Killed
        return outputs

    def run() -> int:
        return confirm(PlayedGpu(emulations, killed), emulations, "13.2.86", target, SOME, journal)

    with pytest.raises(Killed):
        run()
    # Not what has another check before it.
    assert written(target)["primitives"].keys() == {"vote_any", "vote_all", "vote_ballot"}
    with journal.open("ab") as file:
        file.write(b'{"key": "cut sh')
    assert run() == CONFIRMS
    assert ran == [check.name for check in SOME[:3]] + ["ldmatrix x4", "m16n8k16_f16 integers", "ldmatrix x2"]
    whole = tmp_path / "whole.json"
    assert confirm(PlayedGpu(emulations), emulations, "13.2.86", whole, SOME) == CONFIRMS

    def undated(path: Path) -> dict[str, Any]:
        return {name: {**entry, "date": ""} for name, entry in written(path)["primitives"].items()}

    assert undated(target) == undated(whole)
    ran.clear()
    assert run() == CONFIRMS and ran == [], "all of it stands in the journal"


@pytest.mark.parametrize("another", [{"driver": "1.3"}, {"device": "another GPU"}])
def test_what_another_gpu_or_driver_did_is_done_again(
    another: dict[str, str], emulations: CpuEmulations, tmp_path: Path
) -> None:
    journal, ran = tmp_path / "primitives.jsonl", list[str]()

    def note(check: Check, outputs: Words) -> Words:
        ran.append(check.name)
        return outputs

    gpu = PlayedGpu(emulations, note)
    for _ in range(2):
        confirm(gpu, emulations, "13.2.86", tmp_path / "confirmed.json", SOME[:1], journal)
    assert ran == ["votes"]
    gpu.description |= another
    confirm(gpu, emulations, "13.2.86", tmp_path / "confirmed.json", SOME[:1], journal)
    assert ran == ["votes"] * 2


def test_an_older_gpu_leaves_what_it_has_not_as_it_was(emulations: CpuEmulations, tmp_path: Path) -> None:
    target = tmp_path / "confirmed.json"
    assert confirm(PlayedGpu(emulations), emulations, "13.2.86", target, SOME) == CONFIRMS
    before = written(target)["primitives"]
    assert confirm(PlayedGpu(emulations, arch="sm_75"), emulations, "13.2.86", target, SOME) == CONFIRMS
    after = written(target)["primitives"]
    assert after["mma_m16n8k16_f16"] == before["mma_m16n8k16_f16"]
    assert after["vote_all"]["arch"] == "sm_75"


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def none(ordinal: int) -> None:
        raise RunFailed("no GPU: cudaErrorNoDevice")

    monkeypatch.setattr(confirm_primitives, "CupyGpu", none)
    before = CONFIRMED.read_bytes()
    assert main([]) == NO_GPU
    assert capsys.readouterr().err.startswith("no GPU: cudaErrorNoDevice; nothing is confirmed")
    assert CONFIRMED.read_bytes() == before


def entry(name: str, digest: str = "") -> dict[str, Any]:
    return {"digest": digest or primitive_digest(name), "arch": "sm_90a"}


def test_what_a_run_elsewhere_confirmed_is_taken_as_far_as_its_text_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, elsewhere = tmp_path / "confirmed.json", tmp_path / "back.json"
    names = ("vote_all", "vote_any", "vote_ballot")
    target.write_text(json.dumps({"primitives": {name: entry(name) for name in names}}))
    brought = {"ldmatrix": entry("ldmatrix"), "vote_all": {**entry("vote_all"), "values": 7}, "mma": entry("mma", "0")}
    failed = {"vote_any": "votes: block 1", "vote_ballot": "votes: block 2"}
    texts = {"vote_any": primitive_digest("vote_any"), "vote_ballot": "0"}
    content = {"device": "NVIDIA H100", "primitives": brought, "failed": failed, "failed_digests": texts}
    elsewhere.write_text(json.dumps(content))
    assert main(["--take", str(elsewhere), "--result", str(target)]) == DIFFERS
    record = written(target)
    # One that differed there with another text says nothing about this one.
    assert record["primitives"].keys() == {"ldmatrix", "vote_all", "vote_ballot"}
    assert record["primitives"]["vote_all"]["values"] == 7 and record["failed"] == {"vote_any": "votes: block 1"}
    said = capsys.readouterr().out
    assert "2 primitives are taken from" in said and "vote_any: differed there: votes: block 1" in said
    assert "mma: left out, its text here is another one" in said and "vote_ballot: left out" in said


def test_what_differed_by_an_older_file_is_not_confirmed_any_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, elsewhere = tmp_path / "confirmed.json", tmp_path / "back.json"
    target.write_text(json.dumps({"primitives": {name: entry(name) for name in ("vote_all", "vote_any")}}))
    elsewhere.write_text(json.dumps({"primitives": {}, "failed": {"vote_any": "votes: block 1", "gone": "block 2"}}))
    assert main(["--take", str(elsewhere), "--result", str(target)]) == DIFFERS
    assert written(target)["primitives"].keys() == {"vote_all"}
    assert written(target)["failed"] == {"vote_any": "votes: block 1"}
    assert "vote_any: differed there: votes: block 1" in capsys.readouterr().out


@pytest.mark.parametrize("text", [None, "{", "[]", '{"primitives": {"ldmatrix": 1}}'])
def test_what_is_no_result_is_not_taken(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "back.json"
    if text is not None:
        path.write_text(text)
    assert main(["--take", str(path), "--result", str(tmp_path / "confirmed.json")]) == DIFFERS
    assert f"{path} is no confirmed.json of a run elsewhere" in capsys.readouterr().err
    assert not (tmp_path / "confirmed.json").exists()


FAKE_GPU = "tests.support.gpu.fake_gpu"


@pytest.mark.parametrize("variable", ["CUKILN_NVCC", "CUKILN_CXX"])
def test_without_a_compiler_nothing_is_run_and_no_primitive_differs(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "none"))
    monkeypatch.setattr(confirm_primitives, "CHECKS", SOME[:1])
    assert main(["--gpu-module", FAKE_GPU, "--result", str(tmp_path / "confirmed.json")]) == NOT_RUN
    said = f"not run: no compiler: {tmp_path / 'none'}: No such file or directory; nothing is confirmed"
    assert capsys.readouterr().err.strip() == said
    assert not (tmp_path / "confirmed.json").exists()


def test_where_no_nvcc_is_named_its_absence_is_no_difference_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUKILN_NVCC", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(find_compilers, "in_wheels", lambda pattern: [])
    monkeypatch.setattr(find_compilers, "TOOLKIT", "/nowhere")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(NoCompiler, match="no nvcc: name one with CUKILN_NVCC"):
        run_primitives.nvcc_version()


def test_the_gpu_module_that_is_named_runs_the_kernels_on_the_device_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [{}, {"name": "Another", "uuid": "GPU-2"}]
    monkeypatch.setenv(fake_gpu.VARIABLE, fake_gpu.configure(tmp_path / "gpu.json", devices=devices))
    monkeypatch.setattr(confirm_primitives, "CHECKS", SOME[:1])
    monkeypatch.setattr(confirm_primitives, "CupyGpu", lambda ordinal: pytest.fail("another module was named"))
    target = tmp_path / "confirmed.json"
    assert main(["--gpu-module", FAKE_GPU, "--device", "GPU-2", "--result", str(target)]) == CONFIRMS
    assert written(target)["device"] == "Another" and "vote_any" in written(target)["primitives"]
    assert main(["--gpu-module", FAKE_GPU, "--device", "7"]) == NO_GPU


def test_a_gpu_module_that_runs_no_such_kernels_confirms_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = SimpleNamespace(list_devices=fake_gpu.list_devices, open_gpu=fake_gpu.open_gpu)
    monkeypatch.setitem(sys.modules, "without_primitives", module)
    assert main(["--gpu-module", "without_primitives"]) == NOT_RUN
    assert capsys.readouterr().err.startswith("not run: without_primitives has no function primitives_gpu")


def test_the_script_runs_on_the_cpu_alone() -> None:
    command = [sys.executable, "-m", "tests.gpu.confirm_primitives", "--cpu-only"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert finished.returncode == CONFIRMS, finished.stdout + finished.stderr
    assert len(finished.stdout.splitlines()) == len(CHECKS)


def test_the_script_needs_nothing_but_numpy() -> None:
    program = """
import json, sys
before = set(sys.modules)
import tests.gpu.confirm_primitives
files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before}
print(json.dumps({name: "site-packages" in file for name, file in files.items()}))
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    imported: dict[str, bool] = json.loads(finished.stdout)
    assert {name.split(".")[0] for name, installed in imported.items() if installed} == {"numpy"}
    assert {name for name in imported if name.startswith("codegen")} == {"codegen", "codegen.primitives"}


# --- how far results may differ


def outcome(emulations: CpuEmulations, name: str, block: int, word: int, amount: int) -> str:
    return check_on_gpu(CHECK[name], emulations, PlayedGpu(emulations, added(name, block, word, amount))).failure


def test_sums_of_integers_must_be_exact(emulations: CpuEmulations) -> None:
    assert outcome(emulations, "m16n8k16_f16 integers", 3, 4, 1).startswith("block 3, word 4 of 128")
    assert outcome(emulations, "m16n8k32_s8", 3, 4, 1).startswith("block 3, word 4 of 128")


def test_other_sums_must_be_equal_to_the_bit(emulations: CpuEmulations) -> None:
    assert outcome(emulations, "m16n8k16_f16 numbers", 0, 0, 0) == ""
    assert outcome(emulations, "m16n8k16_f16 numbers", 0, 0, 1) != ""


@pytest.mark.parametrize("name", ["m16n8k16_f16 numbers", "m16n8k16_bf16 numbers", "m16n8k8_tf32 numbers"])
def test_a_gpu_that_took_subnormal_operands_for_zeros_would_differ(name: str, emulations: CpuEmulations) -> None:
    def flushed(check: Check, outputs: Words) -> Words:
        outputs[64:128] = 0  # the blocks with subnormal a and without d
        return outputs

    assert check_on_gpu(CHECK[name], emulations, PlayedGpu(emulations, flushed)).failure.startswith("block 64")


def test_a_gpu_that_rounded_tf32_operands_would_differ(emulations: CpuEmulations) -> None:
    class Rounding(PlayedGpu):
        def run(self, check: Check, words: Words) -> Words:
            lanes = words.reshape(len(words), 32, 10).copy()
            lanes[:, :, 4:] += np.uint32(0x1000)
            return emulations.run(check, lanes.reshape(words.shape))

    assert check_on_gpu(CHECK["m16n8k8_tf32 integers"], emulations, Rounding(emulations)).failure != ""


@pytest.mark.parametrize("name", [check.name for check in CHECKS if "numbers" in check.name])
def test_a_number_for_a_nan_differs(name: str, emulations: CpuEmulations) -> None:
    def replaced(check: Check, outputs: Words) -> Words:
        nan = (
            np.isnan(outputs.view(np.float16 if "f16_f16" in name else np.float32))
            .reshape(*outputs.shape, -1)
            .any(axis=2)
        )
        assert nan.any()
        return np.where(nan, np.uint32(0), outputs)

    assert check_on_gpu(CHECK[name], emulations, PlayedGpu(emulations, replaced)).failure != ""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_no_check_accepts_a_wrong_sign_in_its_largest_number(check: Check, emulations: CpuEmulations) -> None:
    def turned(_: Check, outputs: Words) -> Words:
        floats = np.nan_to_num(np.abs(outputs.view(np.float32)), nan=0.0, posinf=0.0)
        outputs.reshape(-1)[int(floats.argmax())] ^= np.uint32(0x80000000)
        return outputs

    assert check_on_gpu(check, emulations, PlayedGpu(emulations, turned)).failure != ""


def test_functions_may_differ_by_their_units_in_the_last_place(emulations: CpuEmulations) -> None:
    words = CHECK["arithmetic"].inputs(confirm_primitives.random_of(CHECK["arithmetic"]))
    outputs = emulations.run(CHECK["arithmetic"], words)
    each = outputs.shape[1] // 32  # results of a thread
    exp = outputs[:, 1::each].view(np.float32)
    block, thread = (int(i) for i in np.argwhere((exp > 1) & (exp < 100))[0])
    assert outcome(emulations, "arithmetic", block, each * thread + 1, 3) == ""
    assert outcome(emulations, "arithmetic", block, each * thread + 1, 4) != ""
    assert outcome(emulations, "arithmetic", block, each * thread, 1) != ""  # fma has one result alone


# --- completeness


def test_every_primitive_is_checked() -> None:
    assert {name for check in CHECKS for name in check.primitives} == primitives()


def test_kernels_call_the_primitives_that_their_checks_name() -> None:
    text = run_primitives.KERNELS.read_text()
    for name in primitives():
        assert f"{name}(" in text or f"{name}<" in text, name


@pytest.mark.parametrize(
    ("driver", "compiler", "loads"),
    [(13000, "13.2.86", True), (12090, "13.2.86", False), (12020, "12.9.86", True), (0, "13.2.86", True)],
)
def test_a_driver_that_loads_no_kernel_confirms_nothing(
    driver: int, compiler: str, loads: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unbuilt(*arguments: object) -> None:
        raise BuildFailed("it came so far")

    monkeypatch.setattr(
        confirm_primitives, "CupyGpu", lambda ordinal: SimpleNamespace(cuda=driver, arch="sm_90a", load=None)
    )
    monkeypatch.setattr(confirm_primitives, "nvcc_version", lambda: compiler)
    monkeypatch.setattr(confirm_primitives, "build_cubin", unbuilt)
    assert main([]) == (DIFFERS if loads else NO_GPU)
    assert capsys.readouterr().err.startswith("it came so far" if loads else "the driver is for CUDA 12.9, ")


def test_cuda_12_compiles_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKILN_CUDA", "12")
    monkeypatch.delenv("CUKILN_NVCC", raising=False)
    assert build_cubin(CHECKS, "sm_90a", tmp_path).stat().st_size > 0
    assert run_primitives.nvcc_version().startswith("12.")


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_nvcc_compiles_the_kernels(arch: str, tmp_path: Path) -> None:
    assert build_cubin([check for check in CHECKS if runs_on(check, arch)], arch, tmp_path).stat().st_size > 0


def test_the_kernels_are_built_as_candidates_are() -> None:
    """From the same headers in the same order, without those that need an operator, and with the same flags."""
    operators = {"epilogue.cuh", "check_tensors.h"}
    assert (
        tuple(device_header for device_header in DEVICE_HEADERS if device_header not in operators)
        == run_primitives.DEVICE_HEADERS
    )
    assert tuple(cpu_header for cpu_header in CPU_HEADERS if cpu_header not in operators) == run_primitives.CPU_HEADERS
    assert (
        tuple(cpu_flag for cpu_flag in CPU_FLAGS if cpu_flag not in ("-fmax-errors=20", "-pipe"))
        == run_primitives.CPU_FLAGS
    )
    assert DEVICE_FLAGS[:3] == run_primitives.DEVICE_FLAGS
