"""The child that owns a GPU: what it verifies, how it times, what it compares; and what its parent makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.arrays import compared
from codegen.dtypes import dtype
from codegen.kernel import Candidate
from codegen.operand import Operand
from codegen.operators import operator
from codegen.plan import gpu_verification_plan
from codegen.search.search import Search
from codegen.targets import target
from cukiln.types import Comparison, Measurement
from storage.config import own_modules
from storage.config import own_modules as plan_version
from storage.config.own_modules import gpu_plans, texts_of
from storage.config.settings import Settings
from tests.support.gpu import fake_gpu
from tests.support.gpu.gpu_tasks import LAUNCH, LIMITS, Gpu, matmul_candidate, matmul_problem
from tests.support.kernels.cpu_helpers import SMALL_TENSOR_TILE, toolchain
from tests.support.kernels.hostile_libraries import CONTROL, HOSTILE, Hostile, build
from tests.support.run.forget_caches import forget_caches
from workers.compile.compile_group import compile_group
from workers.cpu.library import POISON
from workers.gpu import measure_on_gpu
from workers.gpu.check_library import refusal
from workers.gpu.engine import probe, why_silent
from workers.gpu.interface import DEFAULT_MODULE, Device, GpuFault, GpuMissing
from workers.gpu.measure import MeasureTask
from workers.gpu.measure_on_gpu import INHERITED, child_environment
from workers.gpu.run_on_gpu import run_task
from workers.gpu.samplers import SAMPLE_US, alone
from workers.gpu.task import VENDOR, CandidateResult, GpuTask, TaskKind
from workers.gpu.tensors import DeviceTensor, Operands, on_device, workspace
from workers.gpu.verify_and_time import set_count
from workers.processes.child_protocol import Hearing, new_key
from workers.processes.processes import InfrastructureError, Processes

SMALL = matmul_problem()
OTHER = matmul_candidate(matmul_problem(m=24))
FIRST, SECOND, THIRD = (matmul_candidate(SMALL, unroll_k=value) for value in (1, 2, 4))


def control(gpu: Gpu, *candidates: Candidate, name: str = "good") -> Path:
    return build(CONTROL, gpu.folder / f"{name}.so", *dict.fromkeys(candidate.kernel.id for candidate in candidates))


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Candidate], Path]]:
    """Three kernels as nvcc and g++ make them: CUDA cores, CUDA cores with a workspace, tensor cores on bfloat16 with
    rows that lie apart."""
    tensor_problem = operator("matmul").parse(
        {"operator": "matmul", "m": 40, "n": 24, "k": 48, "dtype": "bfloat16", "layout": "nt", "ldc": 32, "batch": 2,
         "stride_b": 0, "epilogue": [{"op": "bias", "axis": "n"}, {"op": "gelu"}]}
    )  # fmt: skip
    tensor = operator("matmul").candidate(
        tensor_problem,
        replace(FIRST.schedule).of({**SMALL_TENSOR_TILE, "tile_k": 32, "mma_k": 16, **LAUNCH}),
    )
    candidates = [FIRST, matmul_candidate(SMALL, split="workspace", split_k=2), tensor]
    processes = Processes()
    made = compile_group(
        [candidate.kernel for candidate in candidates], target("sm_90a"), toolchain(), processes, LIMITS
    )
    processes.close()
    assert made.artifact is not None, made.why
    path = tmp_path_factory.mktemp("group") / "group.so"
    path.write_bytes(made.artifact.library)
    yield candidates, path


# A right library


def test_real_libraries_are_verified_and_measured(gpu: Gpu, group: tuple[list[Candidate], Path]) -> None:
    candidates, path = group
    outcome = gpu.run(gpu.task([(candidate, path) for candidate in candidates], verified=False))
    assert [(result.verdict, result.message) for result in outcome.results] == [("ok", "")] * 3
    assert outcome.device == fake_gpu.list_devices()[0] and outcome.comparisons == {}
    for result in outcome.results:
        measurement = Measurement.model_validate(result.measurement)
        assert measurement.low_us <= measurement.median_us <= measurement.high_us
        assert (measurement.device, measurement.uuid, measurement.driver) == (
            "Simulated GPU",
            fake_gpu.UUID,
            "simulated-1",
        )
        assert measurement.cold and measurement.before == measurement.after != {}
        assert measurement.median_us * measurement.launches_per_sample >= 0.9 * SAMPLE_US
        assert result.verify_cpu > 0 and result.measure_wall > 0


def test_a_kernel_over_a_ring_is_verified_bit_by_bit(gpu: Gpu) -> None:
    """On its own extents, too: limbs of int64, out of the range of float64, with carries, beside a bias."""
    fields = {"m": 40, "n": 24, "k": 600, "dtype": "int64", "layout": "nt", "epilogue": [{"op": "bias"}]}
    problem = operator("matmul").parse({"operator": "matmul", "fraction_bits": 18, "rounding": "nearest", **fields})
    small = {"tile_m": 32, "tile_n": 16, "warps_m": 2, "warps_n": 1, "stages": 2, "chain_k": 512}
    (schedule,) = operator("matmul").space(
        problem, target("sm_90a"), Search(schedules=[{"algorithm": "limbs", **small}])
    )
    candidate, processes = operator("matmul").candidate(problem, schedule), Processes()
    made = compile_group([candidate.kernel], target("sm_90a"), toolchain(), processes, LIMITS)
    processes.close()
    assert made.artifact is not None, made.why
    path = gpu.folder / "ring.so"
    path.write_bytes(made.artifact.library)
    (result,) = gpu.run(gpu.task([(candidate, path)], verified=False)).results
    assert (result.verdict, result.message) == ("ok", "")
    own = [case for case in result.details["cases"] if case["extents"][:4] == [1, 40, 24, 600]]
    assert [(case["kind"], case["max_error"]) for case in own] == [("integer", 0), ("normal", 0), ("normal", 0)]


def test_details_have_the_cases_and_the_errors_of_the_cpus(gpu: Gpu, group: tuple[list[Candidate], Path]) -> None:
    candidates, path = group
    (result,) = gpu.run(gpu.task([(candidates[2], path)], verified=False)).results
    full = [case for case in result.details["cases"] if case["extents"][:4] == [2, 40, 24, 48]]
    assert [case["kind"] for case in full] == ["integer", "normal", "normal"]  # the last is the one after timing
    assert full[1]["seed"] != full[2]["seed"] and result.details["seed"] == 7
    for case in result.details["cases"]:
        assert case["max_error"] >= 0 and case["max_ratio"] <= 1
        assert case["error_bound"] >= 0 if case["max_error"] else True
    assert max(case["max_error"] for case in full) > 0


def test_a_verified_kernel_is_verified_on_its_own_problem_only(gpu: Gpu, group: tuple[list[Candidate], Path]) -> None:
    candidates, path = group
    (result,) = gpu.run(gpu.task([(candidates[0], path)], verified=True)).results
    assert [case["extents"][1:4] for case in result.details["cases"]] == [[48, 40, 24]] * 3


def test_a_faulting_kernel_loses_its_context_and_the_next_one_gets_another(
    gpu: Gpu, group: tuple[list[Candidate], Path]
) -> None:
    candidates, path = group
    gpu.configure(faulty=[candidates[0].kernel.id[:12]])
    outcome = gpu.run(gpu.task([(candidate, path) for candidate in candidates[:2]]))
    first, second = outcome.results
    assert first.verdict == "runtime_error" and "illegal memory access" in first.message and first.tainted
    assert second.verdict == "ok"
    assert (gpu.folder / "gpu.opens").read_text() == "2"


ANSWERS = [
    "out of memory (CUDA error 2)",
    "no kernel image is available for execution on the device (CUDA error 209)",
    "device kernel image is invalid (CUDA error 200)",
    "the provided PTX was compiled with an unsupported toolchain. (CUDA error 222)",
    "system has unsupported display driver / cuda driver combination (CUDA error 803)",
]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        *((answer, "measure") for answer in ANSWERS),
        (ANSWERS[0], "compare"),
        *(pytest.param(answer, "compare", marks=pytest.mark.long) for answer in ANSWERS[1:]),
    ],
)
def test_a_machine_that_cannot_load_kernels_gives_no_verdict_on_them(gpu: Gpu, answer: str, kind: TaskKind) -> None:
    gpu.configure(load=answer, loads_well=1)
    candidates = [(FIRST, control(gpu, FIRST)), (SECOND, control(gpu, SECOND, name="second"))]
    with pytest.raises(InfrastructureError, match=r"look at the GPU's memory and at its driver") as raised:
        gpu.run(gpu.task(candidates, kind=kind))
    assert answer in str(raised.value)
    # What came before it is right all the same.
    assert [result.verdict for result in gpu.results] == (["ok"] if kind == "measure" else [])


@pytest.mark.parametrize("answer", ["named symbol not found (CUDA error 500)", "invalid argument (CUDA error 1)"])
def test_kernels_that_no_driver_would_load_are_wrong(gpu: Gpu, answer: str) -> None:
    gpu.configure(load=answer)
    (result,) = gpu.run(gpu.task([(FIRST, control(gpu, FIRST))])).results
    assert result.verdict == "runtime_error" and answer in result.message


# Time


def test_a_candidate_clearly_slower_than_the_best_so_far_is_dropped(gpu: Gpu) -> None:
    times = {FIRST.kernel.id[:12]: 10.0, SECOND.kernel.id[:12]: 30.0, THIRD.kernel.id[:12]: 9.0}
    gpu.configure(times=times, sample_us=20.0)
    good = control(gpu, FIRST, SECOND, THIRD)
    outcome = gpu.run(gpu.task([(each, good) for each in (FIRST, SECOND, THIRD)]))
    stopped = [Measurement.model_validate(result.measurement).stopped for result in outcome.results]
    medians = [Measurement.model_validate(result.measurement).median_us for result in outcome.results]
    assert stopped == ["tight", "loser", "tight"]
    assert medians == pytest.approx([10.0, 30.0, 9.0], rel=0.01)
    assert [result.verdict for result in outcome.results] == ["ok"] * 3


def test_the_best_of_another_task_drops_a_loser_too(gpu: Gpu) -> None:
    gpu.configure(times={FIRST.kernel.id[:12]: 10.0})
    (result,) = gpu.run(gpu.task([(FIRST, control(gpu, FIRST))], best_us={"0": 5.0})).results
    assert Measurement.model_validate(result.measurement).stopped == "loser"


def test_candidates_of_a_problem_are_verified_together_and_results_come_in_the_tasks_order(gpu: Gpu) -> None:
    other = matmul_problem(m=32)
    others = [matmul_candidate(other, unroll_k=value) for value in (1, 2)]
    good = control(gpu, FIRST, SECOND)
    mixed = [FIRST, others[0], SECOND, others[1]]
    outcome = gpu.run(gpu.task([(each, good) for each in mixed]))
    assert [result.candidate for result in outcome.results] == [candidate.id for candidate in mixed]
    assert [result.candidate for result in gpu.results] == [FIRST.id, SECOND.id, others[0].id, others[1].id]


def device(**fields: Any) -> Device:
    return Device.from_dict({**fake_gpu.DEFAULT_DEVICE, **fields})


@pytest.mark.parametrize(
    ("l2", "memory", "one_set", "expected"),
    [
        (50 << 20, 100 << 30, 1 << 20, (101, True)),
        (50 << 20, 100 << 30, 200 << 20, (2, True)),
        (50 << 20, 100 << 30, 1 << 10, (2048, False)),
        (50 << 20, 100 << 20, 10 << 20, (2, False)),
        (50 << 20, 100 << 20, 90 << 20, (1, False)),
    ],
)
def test_sets_are_twice_the_l2_at_most_2048_and_a_quarter_of_the_memory(
    l2: int, memory: int, one_set: int, expected: tuple[int, bool]
) -> None:
    assert set_count(device(l2_bytes=l2, memory_bytes=memory), one_set) == expected


class Recorder:
    """A GPU whose timers only write down which calls they were made of, each of `us` microseconds."""

    def __init__(self, us: float) -> None:
        self.us = us
        self.samples: list[tuple[int, ...]] = []
        self._made: list[int] = []

    def synchronize(self) -> None: ...

    def calls(self, count: int) -> list[Callable[[], None]]:
        return [lambda number=number: self._made.append(number) for number in range(count)]  # type: ignore[misc]

    def timer(self, calls: list[Callable[[], None]]) -> Any:
        self._made = []
        for call in calls:
            call()
        made, recorder = tuple(self._made), self

        class Timer:
            def sample(self) -> float:
                recorder.samples.append(made)
                return recorder.us * len(made)

        return Timer()


@pytest.mark.parametrize("us", [0.5, 3.0, 7.0, 40.0, 500.0])
@pytest.mark.parametrize("sets", [1, 2, 7, 100])
def test_samples_are_long_enough_and_go_round_all_sets(us: float, sets: int) -> None:
    recorder = Recorder(us)
    sampler = alone(recorder, recorder.calls(sets), cold=True)  # type: ignore[arg-type]
    recorder.samples.clear()
    times = [sampler() for _ in range(2 * sets)]
    assert times == pytest.approx([us] * (2 * sets))
    assert {len(calls) for calls in recorder.samples} == {sampler.launches}
    assert sampler.launches * us >= SAMPLE_US
    assert {number for calls in recorder.samples for number in calls} >= set(range(sets - sets // 2))
    # Between two runs on a set all others of the rotation have had theirs.
    order = [number for calls in recorder.samples for number in calls]
    rotation = len(set(order))
    assert all(order[place] == order[place - rotation] for place in range(rotation, len(order)))
    assert rotation > sets / 2


# Buffers


class HostGpu:
    arrays = np

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)


def operand(**fields: Any) -> Operand:
    return Operand(**{"name": "out", "dtype": "float32", "role": "out", "shape": (3, 5), "strides": (8, 1), **fields})


def test_an_operand_is_aligned_as_asked_and_no_better() -> None:
    for alignment in (4, 8, 16):
        tensor = DeviceTensor(HostGpu(), operand(), guard=64, alignment=alignment)  # type: ignore[arg-type]
        assert tensor.pointer % alignment == 0 and tensor.pointer % (2 * alignment) != 0
    assert DeviceTensor(HostGpu(), operand(), guard=64, alignment=256).pointer % 256 == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (-1, "wrote outside of out, 1 bytes before it"),
        (-64, "wrote outside of out, 64 bytes before it"),
        ((2 * 8 + 5) * 4, "wrote outside of out, 0 bytes behind its end"),
        ((2 * 8 + 5) * 4 + 63, "wrote outside of out, 63 bytes behind its end"),
        (5 * 4, "wrote between the rows of out, at element 5"),
        (15 * 4 + 3, "wrote between the rows of out, at element 15"),
        (4 * 4, None),
    ],
)
def test_what_is_written_beside_an_operand_is_found(offset: int, message: str | None) -> None:
    import ctypes

    tensor = DeviceTensor(HostGpu(), operand(), guard=64, alignment=256)  # type: ignore[arg-type]
    tensor.poison()
    ctypes.memset(tensor.pointer + offset, 0, 1)
    assert tensor.harm() == message


def test_poison_is_nan_and_reaches_every_element() -> None:
    for name in ("float32", "float16", "bfloat16"):
        tensor = DeviceTensor(HostGpu(), operand(dtype=name), guard=64, alignment=256)  # type: ignore[arg-type]
        tensor.view[...] = 0
        tensor.poison()
        assert np.isnan(compared([(tensor.view, tensor.operand.dtype)])).all() and tensor.view.shape == (3, 5)


def test_inputs_are_written_with_their_strides_and_a_changed_one_is_named() -> None:
    problem = operator("matmul").parse(
        {"operator": "matmul", "m": 6, "n": 4, "k": 4, "lda": 8, "batch": 3, "stride_b": 0, "dtype": "bfloat16"}
    )
    own = operator("matmul")
    operands = own.operands(problem)
    host = own.make_inputs(problem, "normal", np.random.default_rng(1))
    inputs = on_device(HostGpu(), host, operands)  # type: ignore[arg-type]
    for name, values in host.items():
        assert (inputs[name] == values.view(np.uint16)).all()
        assert 0 in inputs[name].strides if name == "b" else True
    made = Operands(HostGpu(), operands, verifying=True)  # type: ignore[arg-type]
    made.write(inputs)
    assert made.harm() is None
    a = made.tensors[0]
    assert (compared([(a.view, a.operand.dtype)]) == host["a"].astype(np.float64)).all()
    a.view[2, 1, 3] ^= 1
    assert made.harm() == "changed 1 elements of its input a"


def test_a_workspace_has_exactly_the_bytes_that_were_asked_for() -> None:
    assert workspace(HostGpu(), 0, verifying=True) is None  # type: ignore[arg-type]
    space = workspace(HostGpu(), 100, verifying=True)  # type: ignore[arg-type]
    assert space is not None and space.bytes == 100 and space.pointer % 16 == 0
    assert (space.view == POISON).all() and dtype("uint8").bytes == 1


# One process for all


def test_the_reference_of_a_problem_is_computed_once_for_all_its_candidates(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = operator("matmul")
    computed = []
    real = type(own).reference

    def counting(self: Any, problem: Any, inputs: Any, exact: bool = False) -> Any:
        computed.append((problem.m, problem.k))
        return real(self, problem, inputs, exact)

    monkeypatch.setattr(type(own), "reference", counting)
    good = control(gpu, FIRST, SECOND, THIRD)
    said: list[dict[str, Any]] = []
    task = gpu.task([(each, good) for each in (FIRST, SECOND, THIRD)])
    MeasureTask(fake_gpu.open_gpu("0"), task, said.append).run()  # type: ignore[arg-type]
    assert [line["candidate"]["verdict"] for line in said if "candidate" in line] == ["ok"] * 3
    assert computed == [(48, 24)] * 3  # integers, normals, and the normals after timing


def test_a_kernel_is_verified_on_reduced_problems_once_and_its_failure_is_that_of_all_its_candidates(gpu: Gpu) -> None:
    wrong = build(Hostile("incorrect", "", "return 0;"), gpu.folder / "wrong.so", FIRST.kernel.id)
    emulation = matmul_candidate(SMALL, unroll_k=1, raster=1)
    assert emulation.kernel == FIRST.kernel and emulation.id != FIRST.id
    said: list[dict[str, Any]] = []
    task = gpu.task([(FIRST, wrong), (emulation, wrong)], verified=False)
    MeasureTask(fake_gpu.open_gpu("0"), task, said.append).run()  # type: ignore[arg-type]
    results = [line["candidate"] for line in said if "candidate" in line]
    assert [result["verdict"] for result in results] == ["incorrect"] * 2
    assert results[0]["message"] == results[1]["message"]
    assert [len(result["details"]["cases"]) for result in results] == [1, 1]
    assert len([line for line in said if str(line.get("beat")).startswith("integer inputs")]) == 1


def test_a_problem_that_the_gpus_memory_does_not_hold_is_skipped(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: Any) -> Any:
        raise MemoryError("out of memory allocating 1,000 bytes")

    monkeypatch.setattr("workers.gpu.verify_and_time.on_device", too_much)
    said: list[dict[str, Any]] = []
    task = gpu.task([(FIRST, control(gpu, FIRST))])
    MeasureTask(fake_gpu.open_gpu("0"), task, said.append).run()  # type: ignore[arg-type]
    result = said[-1]["candidate"]
    assert result["verdict"] == "skipped" and "does not hold this problem" in result["message"]


@pytest.mark.parametrize("kind", ["measure", "compare"])
def test_what_a_candidate_is_verified_with_is_made_before_any_code_of_it_runs(gpu: Gpu, kind: TaskKind) -> None:
    good = control(gpu, FIRST, SECOND)
    said: list[dict[str, Any]] = []
    run_task(gpu.task([(FIRST, good), (SECOND, good)], kind=kind), said.append)
    (kinds,) = zip(*(line for line in said if "waiting" not in line), strict=True)
    first = kinds.index("start")
    assert kinds[0] == "ready" and set(kinds[1:first]) == {"beat"}
    assert not any("making the" in str(line.get("beat")) and "inputs" in line["beat"] for line in said[first:])
    # Integers (where they are verified), normals, and the normals after timing: inputs and reference of each.
    making = [line["beat"] for line in said[1:first] if line["beat"].startswith("making") and "inputs" in line["beat"]]
    assert len(making) == (6 if kind == "measure" else 4)


def test_a_foreign_library_has_its_verdict_before_anything_of_it_runs(gpu: Gpu) -> None:
    foreign = gpu.folder / "none.so"
    foreign.write_bytes(b"not a library")
    said: list[dict[str, Any]] = []
    MeasureTask(fake_gpu.open_gpu("0"), gpu.task([(FIRST, foreign)]), said.append).run()  # type: ignore[arg-type]
    assert said[-2] == {"start": FIRST.id} and said[-1]["candidate"]["verdict"] == "runtime_error"
    assert "no library that can be read" in said[-1]["candidate"]["message"]


def test_a_device_that_is_lost_before_a_candidate_runs_is_no_verdict(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any) -> Any:
        raise GpuFault("lost")

    monkeypatch.setattr("workers.gpu.verify_and_time.on_device", lost)
    said: list[dict[str, Any]] = []
    task = gpu.task([(FIRST, control(gpu, FIRST))])
    with pytest.raises(GpuFault, match="lost"):
        MeasureTask(fake_gpu.open_gpu("0"), task, said.append).run()  # type: ignore[arg-type]
    assert not any("start" in line or "candidate" in line for line in said)


# Comparing


def compare(gpu: Gpu, *candidates: Candidate, **more: Any) -> Comparison:
    good = control(gpu, *candidates)
    outcome = gpu.run(gpu.task([(candidate, good) for candidate in candidates], kind="compare", **more))
    assert outcome.results == []
    return Comparison.model_validate(outcome.comparisons["0"])


def test_finalists_are_ranked_with_the_vendors_best_beside_them(gpu: Gpu) -> None:
    gpu.configure(
        times={FIRST.kernel.id[:12]: 10.0, SECOND.kernel.id[:12]: 10.02, THIRD.kernel.id[:12]: 12.0},
        vendor_us=[11.0, 8.0, 14.0],
        sample_us=20.0,
    )
    comparison = compare(gpu, THIRD, SECOND, FIRST)
    assert comparison.overhead_us == pytest.approx(20.0, abs=3.0) and comparison.unsteady == []
    assert (comparison.launches_per_sample or 0) * 8.0 >= 0.9 * SAMPLE_US
    by_name = {contender.candidate: contender for contender in comparison.contenders}
    assert comparison.contenders[-1].candidate == THIRD.id
    assert by_name[THIRD.id].ratio == pytest.approx(1.2, rel=0.01) and not by_name[THIRD.id].tie
    assert [contender.tie for contender in comparison.contenders[:2]] == [False, True]
    assert all(contender.low_us <= contender.median_us <= contender.high_us for contender in comparison.contenders)
    flops = 2 * 48 * 40 * 24
    assert by_name[THIRD.id].tflops == pytest.approx(flops / 12.0 / 1e6, rel=0.01)
    assert all(0 < (contender.max_error or 0) <= (contender.error_bound or 0) for contender in comparison.contenders)
    assert comparison.vendor is not None and comparison.vendor_missing is None
    assert comparison.vendor.algorithm == "simulated algorithm 1 (the fastest of 3)"
    assert comparison.vendor.median_us == pytest.approx(8.0, rel=0.01)
    for contender, us in ((by_name[FIRST.id], 10.0), (by_name[SECOND.id], 10.02), (by_name[THIRD.id], 12.0)):
        beside = contender.vendor_ratio
        assert beside is not None and beside.low <= beside.ratio <= beside.high and not beside.tie
        assert beside.ratio == pytest.approx(8.0 / us, rel=0.01)
    assert comparison.vendor.max_error is not None and 0 < comparison.vendor.max_error <= (
        comparison.vendor.error_bound or 0
    )
    assert comparison.rounds >= 8 and comparison.cold and comparison.uuid == fake_gpu.UUID


def test_a_vendor_that_is_as_fast_is_a_tie(gpu: Gpu) -> None:
    gpu.configure(times={FIRST.kernel.id[:12]: 10.0, SECOND.kernel.id[:12]: 12.0}, vendor_us=[10.03])
    ratios = {contender.candidate: contender.vendor_ratio for contender in compare(gpu, FIRST, SECOND).contenders}
    assert [ratios[name] is not None and ratios[name].tie for name in (FIRST.id, SECOND.id)] == [True, False]
    alone = compare(gpu, FIRST, vendor=False)
    assert alone.contenders[0].vendor_ratio is None


@pytest.mark.parametrize(
    ("throttled", "reasons"),
    [
        # The first state is the child's, before it begins; each ranking has two.
        ([[], [], ["hw_slowdown"]], []),
        ([[], [], ["hw_slowdown"], ["hw_slowdown"]], ["throttling ended: hw_slowdown"]),
    ],
)
def test_a_comparison_on_a_throttled_gpu_is_done_once_more_and_then_marked(
    gpu: Gpu, throttled: list[list[str]], reasons: list[str]
) -> None:
    gpu.configure(throttled=throttled)
    comparison = compare(gpu, FIRST, SECOND, vendor=False)
    assert (comparison.unsteady, comparison.limited_by) == (reasons, [])


def test_a_cap_that_holds_throughout_is_named_and_nothing_is_compared_again(gpu: Gpu) -> None:
    # A second time would find it gone, and then there again.
    gpu.configure(throttled=[[], ["sw_power_cap"], ["sw_power_cap"], [], ["sw_power_cap"]])
    comparison = compare(gpu, FIRST, SECOND, vendor=False)
    assert (comparison.unsteady, comparison.limited_by) == ([], ["sw_power_cap"])


@pytest.mark.parametrize(
    ("vendor", "message"),
    [
        ({"vendor_us": []}, "has nothing for this problem"),
        ({"vendor": "raises"}, "the vendor's library failed: IndexError: tuple index out of range"),
        ({"vendor": "result raises"}, "the vendor's library failed: TypeError: no array"),
        ({"vendor": "first raises", "vendor_us": [9.0]}, "refuses all of its algorithms: NumPy failed: KeyError: 'q'"),
        ({"vendor": "crash"}, "did not survive: the process ended with signal 6"),
        (
            {"vendor": "first faults", "vendor_us": [9.0]},
            "did not survive: the process ended with exit status 3: an illegal memory access",
        ),
        ({"vendor": "fault"}, "did not survive: the process ended with exit status 3: an illegal memory access"),
    ],
)
def test_a_vendor_that_fails_is_missing_and_says_why(gpu: Gpu, vendor: dict[str, Any], message: str) -> None:
    gpu.configure(**vendor)
    comparison = compare(gpu, FIRST, SECOND)
    assert comparison.vendor is None and message in (comparison.vendor_missing or "")
    assert len(comparison.contenders) == 2


@pytest.mark.parametrize(
    ("vendor", "message"),
    [("first raises", "NumPy failed: KeyError: 'q'"), ("first refuses", "CUBLAS_STATUS_NOT_SUPPORTED")],
)
def test_an_algorithm_that_fails_is_named_beside_the_one_that_runs(gpu: Gpu, vendor: str, message: str) -> None:
    gpu.configure(vendor=vendor)
    comparison = compare(gpu, FIRST)
    assert comparison.vendor is not None and comparison.vendor_missing is None
    assert comparison.vendor.algorithm == f"simulated algorithm 1; refused: {message}"


def test_what_a_vendor_is_asked_for_is_heard_by_the_parent(gpu: Gpu) -> None:
    said: list[dict[str, Any]] = []
    run_task(gpu.task([(FIRST, control(gpu, FIRST))], kind="compare"), said.append)
    asked = said.index({"start": VENDOR})
    assert said[asked + 1] == {"beat": "what NumPy offers"}


def test_a_wrong_vendor_is_shown_with_its_error(gpu: Gpu) -> None:
    gpu.configure(vendor="wrong")
    comparison = compare(gpu, FIRST)
    assert comparison.vendor is not None and (comparison.vendor.max_error or 0) > (comparison.vendor.error_bound or 0)


def test_none_left_to_compare_is_no_comparison(gpu: Gpu) -> None:
    bad = build(HOSTILE["leaves the tail unwritten"], gpu.folder / "bad.so", FIRST.kernel.id)
    outcome = gpu.run(gpu.task([(FIRST, bad)], kind="compare"))
    assert outcome.comparisons == {"0": None} and [result.verdict for result in outcome.results] == ["incorrect"]


@pytest.mark.parametrize("vendor", ["ok", "crash"])
def test_several_problems_are_compared_in_one_child_and_a_death_costs_its_own_alone(gpu: Gpu, vendor: str) -> None:
    gpu.configure(vendor=vendor)
    good = control(gpu, FIRST, SECOND, THIRD, OTHER)
    task = gpu.task([(each, good) for each in (FIRST, SECOND, OTHER)], kind="compare")
    compared: list[str] = []
    outcome = gpu.run(task, on_comparison=lambda problem, comparison: compared.append(problem))
    assert compared == ["0", "1"] and list(outcome.comparisons) == compared and outcome.results == []
    shown = [Comparison.model_validate(outcome.comparisons[problem]) for problem in compared]
    assert [len(comparison.contenders) for comparison in shown] == [2, 1]
    assert [comparison.vendor is None for comparison in shown] == [vendor == "crash"] * 2
    # A vendor that ends its process is left out of that problem alone.
    assert int((gpu.folder / "gpu.opens").read_text()) == (1 if vendor == "ok" else 3)


# The parent


def test_a_cancelled_task_keeps_what_it_has(gpu: Gpu) -> None:
    cancel = threading.Event()
    good = control(gpu, FIRST, SECOND)
    slow = build(HOSTILE["never ends"], gpu.folder / "slow.so", THIRD.kernel.id)

    class Results(list[Any]):
        def append(self, result: Any) -> None:
            super().append(result)
            cancel.set()

    gpu.results = Results()
    outcome = gpu.run(gpu.task([(FIRST, good), (THIRD, slow), (SECOND, good)]), cancel=cancel)
    assert [result.candidate for result in outcome.results] == [FIRST.id]
    assert gpu.left_behind() == []


def chatter(gpu: Gpu, name: str, size: int, *candidates: Candidate) -> Path:
    """A library that is right, but writes `size` bytes to stderr at its first launch."""
    words = Hostile("ok", "", f"if (calls == 1) raw(SYS_write, 2, (long)words, {size}); return rightly(call);")
    made = replace(words, more=f"static char words[{size}];")
    return build(made, gpu.folder / f"{name}.so", *(candidate.kernel.id for candidate in candidates))


def test_a_child_that_used_up_a_limit_over_many_is_replaced_without_a_verdict(gpu: Gpu) -> None:
    pairs = [(each, chatter(gpu, each.id[:8], 600_000, each)) for each in (FIRST, SECOND, THIRD)]
    outcome = gpu.run(gpu.task(pairs), limits=replace(LIMITS, output_bytes=1_000_000))
    assert [result.verdict for result in outcome.results] == ["ok"] * 3
    assert (gpu.folder / "gpu.opens").read_text() == "3"


def test_a_candidate_that_reaches_a_limit_alone_is_to_blame(gpu: Gpu) -> None:
    pairs = [(FIRST, chatter(gpu, "loud", 2_000_000, FIRST)), (SECOND, control(gpu, SECOND))]
    outcome = gpu.run(gpu.task(pairs), limits=replace(LIMITS, output_bytes=1_000_000))
    assert [(result.verdict, result.message) for result in outcome.results] == [
        ("runtime_error", "reached the limit on output"),
        ("ok", ""),
    ]


def test_a_child_that_fails_by_itself_is_no_verdict(gpu: Gpu) -> None:
    gpu.configure(open="bug")
    with pytest.raises(InfrastructureError, match="an unforeseen error"):
        gpu.run(gpu.task([(FIRST, control(gpu, FIRST))]))
    assert gpu.results == []


def test_the_child_inherits_no_credentials(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUKILN_API_KEY", "DATABASE_URL", "AWS_SECRET_ACCESS_KEY", "REDIS_URL"):
        monkeypatch.setenv(name, "secret")
    for name in INHERITED:
        monkeypatch.setenv(name, "kept")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # of the vendor's libraries alone
    environment = child_environment(gpu.folder)
    assert "secret" not in environment.values() and list(environment.values()).count("kept") == len(INHERITED)
    assert environment["NVIDIA_SIMULATED_GPU"] == os.environ["NVIDIA_SIMULATED_GPU"]
    assert environment["CUPY_CACHE_DIR"] == str(gpu.folder) and "NVIDIA_TF32_OVERRIDE" not in environment


def test_whether_a_gpu_is_silent_is_asked_with_what_cupy_has_compiled_before(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, asked, run = gpu.folder / "cache", list[dict[str, Any]](), gpu.processes.run

    def noted(*arguments: Any, **options: Any) -> Any:
        asked.append(options)
        return run(*arguments, **options)

    monkeypatch.setattr(gpu.processes, "run", noted)
    assert why_silent(gpu.task([]), gpu.processes, LIMITS, cache=cache) is None
    assert asked[0]["env"]["CUPY_CACHE_DIR"] == str(cache) and cache in asked[0]["writes"] and cache.is_dir()


def test_probing_lists_the_devices_and_says_why_there_are_none(gpu: Gpu) -> None:
    gpu.configure(devices=[{}, {"name": "Another", "uuid": "GPU-2"}])
    devices = probe("tests.support.gpu.fake_gpu", gpu.processes, LIMITS)
    assert [(each.name, each.uuid) for each in devices] == [("Simulated GPU", fake_gpu.UUID), ("Another", "GPU-2")]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("tests.no_such_module", "cannot be imported: No module named 'tests.no_such_module'"),
        ("no_such_package.gpu", "cannot be imported: No module named 'no_such_package'"),
        ("tests.support.gpu.gpu_tasks", "has no function list_devices"),
        ("", "cannot be imported: Empty module name"),
    ],
)
def test_a_module_that_drives_no_gpu_is_a_sentence_about_the_setting(gpu: Gpu, module: str, message: str) -> None:
    with pytest.raises(GpuMissing) as raised:
        probe(module, gpu.processes, LIMITS)
    assert str(raised.value) == (
        f"CUKILN_GPU_MODULE names {module!r}, which {message}; leave it out for workers.cuda.cupy_gpu"
    )


def test_the_module_that_is_named_there_is_the_settings_own() -> None:
    assert Settings.model_fields["gpu_module"].default == DEFAULT_MODULE == plan_version.DRIVEN_BY


def test_a_module_that_finds_no_gpu_is_quoted(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        devices = probe("workers.cuda.cupy_gpu", gpu.processes, LIMITS)
    except GpuMissing as error:
        assert str(error)
    else:
        assert devices


@pytest.mark.parametrize("schema", ["PLAN_SCHEMA"])
def test_the_plan_version_differs_on_the_plan(monkeypatch: pytest.MonkeyPatch, schema: str) -> None:
    before = gpu_plans()
    assert before == gpu_plans()
    monkeypatch.setattr(gpu_verification_plan, schema, 1000)
    forget_caches(plan_version)
    try:
        assert set(gpu_plans().values()).isdisjoint(before.values())
    finally:
        monkeypatch.undo()
        forget_caches(plan_version)


def test_the_plan_version_covers_every_module_of_ours_that_the_child_loads() -> None:
    script = (
        f"import sys, {plan_version.CHILD}, {DEFAULT_MODULE}\n"
        # A folder without __init__.py is a module, too, but has no text.
        "print(*(name for name, module in sys.modules.items() if name.startswith('workers.') and module.__file__))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "workers.cuda.cupy_timer" in loaded and "workers.gpu.leftovers" in loaded
    assert loaded <= texts_of(plan_version.CHILD, DEFAULT_MODULE, packages=("workers",)).keys()


def test_a_new_import_belongs_to_the_plan_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_package").mkdir()
    names = {"__init__": "", "first": "import os\n", "second": "VALUE = 1\n", "third": "", "never": ""}
    for name, text in names.items():
        (tmp_path / "own_package" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert set(texts_of("own_package.first", packages=("own_package",))) == {"own_package", "own_package.first"}
    text = "from own_package import second\ndef late():\n    from own_package.third import anything\n"
    (tmp_path / "own_package" / "first.py").write_text(text)
    forget_caches(own_modules)
    texts = texts_of("own_package.first", packages=("own_package",))
    assert texts.keys() >= {"own_package.first", "own_package.second", "own_package.third"}
    assert texts["own_package.second"] == "VALUE = 1\n" and "own_package.never" not in texts


def test_the_plan_version_differs_on_the_text_of_a_module_of_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gpu_plans()
    real = texts_of

    def changed(*names: str, packages: Collection[str]) -> dict[str, str]:
        return {**real(*names, packages=packages), "workers.cuda.cupy_timer": "other"}

    monkeypatch.setattr(plan_version, "texts_of", changed)
    forget_caches(plan_version)
    try:
        assert set(gpu_plans().values()).isdisjoint(before.values())
    finally:
        monkeypatch.undo()
        forget_caches(plan_version)


# A child that says what a test sets

READY: dict[str, Any] = {"ready": {"device": fake_gpu.DEFAULT_DEVICE, "state": {}}}
BEATS: list[Any] = [0.5, {"beat": "timing"}] * 40


def says(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, *children: list[Any]) -> GpuTask:
    """A task of three for children that say this."""
    monkeypatch.setattr(measure_on_gpu, "CHILD", "tests.support.processes.lying_child")
    gpu.configure(says=children)
    return gpu.task([(each, gpu.folder / "none.so") for each in (FIRST, SECOND, THIRD)])


def results_of(candidate: Candidate, median_us: float = 1.0) -> list[Any]:
    result = CandidateResult(candidate.id, "ok", "", {}, {"median_us": median_us})
    return [{"start": candidate.id}, {"candidate": asdict(result)}]


def verdicts(results: list[CandidateResult]) -> list[tuple[str, str]]:
    return [(result.candidate, result.verdict) for result in results]


REST = [READY, *results_of(SECOND), *results_of(THIRD)]
ALL_OK = [(each.id, "ok") for each in (FIRST, SECOND, THIRD)]
FORGED = [(FIRST.id, "runtime_error"), *ALL_OK[1:]]


@pytest.mark.parametrize(
    "more",
    [
        results_of(FIRST)[1:],  # a second result
        [{"start": SECOND.id}, *results_of(FIRST)[1:]],
        ["what the child said, but with the number of a line that was forged"],
    ],
)
def test_of_two_results_of_a_candidate_the_first_is_not_believed(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, more: list[Any]
) -> None:
    outcome = gpu.run(says(gpu, monkeypatch, [READY, *results_of(FIRST, 0.001), *more, 60], REST))
    assert verdicts(outcome.results) == FORGED
    first = outcome.results[0]
    assert first.message.startswith("wrote into the pipe to its parent: ") and first.measurement is None
    # What keeps results as they come gets it as well.
    assert verdicts(gpu.results) == [ALL_OK[0], *FORGED]


@pytest.mark.parametrize("line", ["", "{}", '{"beat": "unmarked"}', json.dumps(results_of(FIRST)[1])])
def test_a_line_without_the_mark_is_of_the_running_candidate(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    outcome = gpu.run(says(gpu, monkeypatch, [READY, {"start": FIRST.id}, line, 60], REST))
    assert verdicts(outcome.results) == FORGED
    assert outcome.results[0].message == f"wrote into the pipe to its parent: {line[:200]!r}"


def test_a_result_of_another_candidate_is_of_the_running_one(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = gpu.run(says(gpu, monkeypatch, [READY, {"start": FIRST.id}, *results_of(SECOND)[1:], 60], REST))
    assert verdicts(outcome.results) == FORGED


def test_a_child_that_is_silent_before_any_candidate_runs_is_no_verdict(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = says(gpu, monkeypatch, [READY, {"beat": "making the reference"}, 60])
    with pytest.raises(InfrastructureError, match="ended before its task while making the reference: it was silent"):
        gpu.run(task, silence_seconds=3.0)
    assert gpu.results == []


LATE = [READY, {"start": FIRST.id}, *BEATS]


def test_a_candidate_that_was_cut_by_the_limit_of_its_child_is_looked_at_again(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = says(gpu, monkeypatch, LATE, [READY, *results_of(FIRST), *REST[1:]])
    assert verdicts(gpu.run(task, limits=replace(LIMITS, wall_seconds=3.0)).results) == ALL_OK


def test_a_candidate_that_is_cut_twice_does_not_end(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = gpu.run(says(gpu, monkeypatch, LATE, LATE, REST), limits=replace(LIMITS, wall_seconds=3.0))
    assert verdicts(outcome.results) == [(FIRST.id, "run_timeout"), *ALL_OK[1:]]


def test_another_processs_time_on_the_gpu_is_none_of_the_limit(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[Any] = [0.5, {"waiting": "another process"}] * 10
    task = says(gpu, monkeypatch, [*waiting, READY, *BEATS[:4], *results_of(FIRST), *REST[1:]])
    outcome = gpu.run(task, limits=replace(LIMITS, wall_seconds=4.0))
    assert verdicts(outcome.results) == ALL_OK
    assert (gpu.folder / "gpu.opens").read_text() == "1" and outcome.wall_seconds > 4.0


# What both sides say


def test_the_key_and_the_pipe_are_out_of_a_librarys_easy_reach(tmp_path: Path) -> None:
    script = (
        "import os\nfrom workers.processes.child_protocol import Saying\nsay = Saying()\nprint('printed')\n"
        "own = [os.readlink(f'/proc/self/fd/{number}') for number in (0, 1, 2)]\n"
        "say({'stdin': own[0], 'apart': own[1] == own[2], 'pipe': max(map(int, os.listdir('/proc/self/fd')))})"
    )
    key = new_key()
    results = []
    for _ in range(4):
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, input=key, capture_output=True, check=True)
        assert done.stderr == b"printed\n"
        results.append(Hearing(key)(done.stdout.rstrip(b"\n")))
    assert all((result["stdin"], result["apart"]) == ("/dev/null", True) and result["pipe"] > 64 for result in results)
    assert len({result["pipe"] for result in results}) > 1


def test_a_line_counts_once_in_its_place_and_with_its_own_text() -> None:
    key = new_key()
    script = "from workers.processes.child_protocol import Saying; say = Saying(); say({'a': 1}); say({'b': 2})"
    done = subprocess.run([sys.executable, "-c", script], input=key, capture_output=True, check=True)
    first, second = done.stdout.splitlines()
    hear = Hearing(key)
    assert (hear(first), hear(second)) == ({"a": 1}, {"b": 2})
    for wrong in (second, first[:-2] + b"3}", first[33:], b"", b" ".join([first[:32], second[33:]])):
        with pytest.raises(ValueError, match="no answer"):
            Hearing(key)(wrong)
    again = Hearing(key)
    again(first)
    with pytest.raises(ValueError, match="no answer"):
        again(first)
    with pytest.raises(ValueError, match="no answer"):
        Hearing(new_key())(first)


def test_a_task_survives_json() -> None:
    task = GpuTask("measure", "m", "d", "l", {"a": "b"}, 1, {"p": {"operator": "x"}}, (), {"p": 1.5})
    assert GpuTask.from_json(task.to_json()) == task


# What a library may be


def test_a_library_as_it_is_built_here_is_ours(group: tuple[list[Candidate], Path]) -> None:
    candidates, path = group
    assert refusal(path.read_bytes(), [candidate.kernel.id for candidate in candidates]) is None
    assert refusal(path.read_bytes(), [candidates[0].kernel.id]) is None  # it may hold more than is asked for


def test_a_library_without_the_kernel_is_refused(group: tuple[list[Candidate], Path]) -> None:
    words = refusal(group[1].read_bytes(), [SECOND.kernel.id])
    assert words == f"it does not export cukiln_launch_{SECOND.kernel.id[:16]}"


@pytest.mark.parametrize("length", [0, 3, 64, 200, 1000, 0x400])
def test_a_library_that_was_cut_off_is_refused(group: tuple[list[Candidate], Path], length: int) -> None:
    assert refusal(group[1].read_bytes()[:length], []) is not None


def test_no_change_of_a_byte_of_the_headers_makes_the_check_fail(group: tuple[list[Candidate], Path]) -> None:
    """It refuses or accepts; it never raises, whatever the file says of itself."""
    data = group[1].read_bytes()
    rng = np.random.default_rng(3)
    for place in (*range(0x2C0), *map(int, rng.integers(0x2C0, 0x900, 600))):
        changed = bytearray(data)
        changed[place] ^= int(rng.integers(1, 256))
        words = refusal(bytes(changed), [])
        assert words is None or isinstance(words, str)
