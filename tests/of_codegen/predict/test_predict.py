"""The prediction: occupancy by the calculator's rules, ranks that make sense, and what each resource costs."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.matmul import tensor
from codegen.operators.matmul.kernel_family import Stored, aligns
from codegen.predict.roofline import Prediction, occupancy, predict
from codegen.search.search import Search
from codegen.targets import target, targets
from codegen.text.ptxas_report import Resources
from tests.support.fixtures.codegen import default_candidate, fp32_gflops, matmul, tensor_gflops

LARGE = {"m": 4096, "n": 4096, "k": 4096}
WIDE = {"tile_m": 128, "tile_n": 128, "tile_k": 16, "thread_m": 8, "thread_n": 8, "warp_m": 4}
TINY = {"tile_m": 16, "tile_n": 16, "tile_k": 16, "thread_m": 1, "thread_n": 1, "warp_m": 4}
SMALL = {"tile_m": 16, "tile_n": 16, "tile_k": 16, "thread_m": 2, "thread_n": 4, "warp_m": 4}


def report(registers: int = 96, shared: int = 0, spilled: int = 0) -> Resources:
    return Resources(registers, shared, spilled, spilled, 0, 1)


def predicted(fields: dict[str, int], schedule: dict[str, int], arch: str = "sm_90a", **resources: int) -> Prediction:
    return predict(default_candidate(matmul(**fields), arch, **schedule), report(**resources), target(arch))


# Figures of NVIDIA's CUDA Occupancy Calculator.
@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "blocks", "limited_by"),
    [
        ("sm_90a", 256, 32, 0, 8, "threads"),
        ("sm_90a", 256, 128, 0, 2, "registers"),
        ("sm_90a", 256, 255, 0, 1, "registers"),
        ("sm_90a", 32, 32, 0, 32, "blocks"),
        ("sm_90a", 256, 32, 100 * 1024, 2, "shared_memory"),
        ("sm_90a", 256, 32, 113 * 1024, 2, "shared_memory"),
        ("sm_90a", 256, 32, 114 * 1024, 1, "shared_memory"),
        ("sm_90a", 1024, 72, 0, 0, "registers"),
        ("sm_75", 256, 65, 0, 3, "registers"),
        ("sm_75", 256, 32, 32 * 1024, 2, "shared_memory"),
        ("sm_75", 64, 32, 0, 16, "threads"),
        ("sm_86", 512, 41, 0, 2, "registers"),
        ("sm_80", 96, 33, 0, 16, "registers"),
    ],
)
def test_occupancy_is_the_calculator_s(
    arch: str, threads: int, registers: int, shared: int, blocks: int, limited_by: str
) -> None:
    occupied = occupancy(threads, registers, shared, target(arch))
    assert (occupied.blocks_per_sm, occupied.limited_by) == (blocks, limited_by)
    assert occupied.fraction == pytest.approx(blocks * math.ceil(threads / 32) * 32 / target(arch).max_threads_per_sm)


@given(st.integers(1, 32), st.integers(1, 254), st.integers(0, 60000), st.sampled_from(sorted(targets())))
def test_more_resources_never_raise_occupancy(warps: int, registers: int, shared: int, arch: str) -> None:
    sheet = target(arch)
    now = occupancy(32 * warps, registers, shared, sheet).blocks_per_sm
    assert occupancy(32 * warps, registers + 1, shared, sheet).blocks_per_sm <= now
    assert occupancy(32 * warps, registers, shared + 512, sheet).blocks_per_sm <= now
    assert now * 32 * warps <= sheet.max_threads_per_sm


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100"])
def test_register_blocking_beats_one_output_per_thread_on_a_large_problem(arch: str) -> None:
    assert predicted(LARGE, WIDE, arch, registers=128).us < predicted(LARGE, TINY, arch, registers=32).us / 2


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100"])
def test_small_tiles_beat_large_ones_on_a_small_problem(arch: str) -> None:
    small = {"m": 128, "n": 128, "k": 1024}
    assert predicted(small, SMALL, arch, registers=48).us < predicted(small, WIDE, arch, registers=128).us


def test_tiles_that_are_mostly_padding_cost_what_they_compute() -> None:
    narrow = {"m": 16, "n": 8192, "k": 1024}
    assert predicted(narrow, {**WIDE, "tile_m": 16}).us < predicted(narrow, WIDE).us


def test_spills_cost_time() -> None:
    clean, spilled = predicted(LARGE, WIDE), predicted(LARGE, WIDE, spilled=400)
    assert spilled.us > 1.1 * clean.us
    assert spilled.spilled
    assert not clean.spilled


def test_low_occupancy_costs_time_where_a_thread_has_few_independent_sums() -> None:
    few = {**SMALL, "tile_m": 32, "tile_n": 32, "thread_m": 2, "thread_n": 2, "fragments": 1}
    assert predicted(LARGE, few, registers=255).us > predicted(LARGE, few, registers=32).us


def test_a_kernel_that_does_not_fit_comes_last() -> None:
    fits = predicted(LARGE, TINY)
    assert predicted(LARGE, {**WIDE, "thread_m": 4, "thread_n": 4}, registers=128).us > fits.us
    assert predicted(LARGE, {**WIDE, "thread_m": 4, "thread_n": 4}, registers=128).occupancy == 0.0


def test_double_buffering_helps() -> None:
    assert predicted(LARGE, {**WIDE, "stages": 2}).us < predicted(LARGE, {**WIDE, "stages": 1}).us


def test_padding_helps_where_a_tile_is_turned() -> None:
    assert predicted(LARGE, {**WIDE, "padding": 4}).us < predicted(LARGE, {**WIDE, "padding": 0}).us


def test_bands_help_where_the_operands_exceed_the_l2() -> None:
    huge = {"m": 16384, "n": 16384, "k": 16384}
    rows, bands = predicted(huge, {**WIDE, "raster": 0}, "sm_86"), predicted(huge, {**WIDE, "raster": 8}, "sm_86")
    assert bands.roofs_us["dram"] < rows.roofs_us["dram"]


@pytest.mark.parametrize("arch", sorted(targets()))
def test_no_prediction_beats_the_data_sheet(arch: str) -> None:
    op, problem, sheet = operator("matmul"), matmul(**LARGE), target(arch)
    flops = op.cost(problem, default_candidate(problem, arch).schedule).flops
    for candidate in lower(problem, sheet, Search(level=2, limit=60)).candidates:
        prediction = predict(candidate, report(op.estimated_registers(candidate.kernel)), sheet)
        assert prediction.us > flops / fp32_gflops(sheet) / 1e3
        assert math.isfinite(prediction.us)
        assert prediction.bound_by in prediction.roofs_us


def test_a_streaming_problem_is_bound_by_dram() -> None:
    prediction = predicted(
        {"m": 16, "n": 16384, "k": 8192}, {**SMALL, "tile_n": 64, "thread_n": 8}, "sm_75", registers=64
    )
    assert prediction.bound_by == "dram"
    assert prediction.us > 4 * 16384 * 8192 / 320e9 * 1e6


def test_the_prediction_is_deterministic_and_json() -> None:
    schedule, two = predicted(LARGE, WIDE), predicted(LARGE, WIDE)
    assert schedule == two
    assert json.loads(json.dumps(schedule.as_dict())) == schedule.as_dict()


def test_cost_counts_what_must_be_computed_and_moved() -> None:
    op = operator("matmul")
    problem = matmul(
        m=10, n=20, k=30, batch=4, stride_b=0, epilogue=[{"op": "bias"}, {"op": "mask"}, {"op": "residual"}]
    )
    cost = op.cost(problem, default_candidate(matmul()).schedule)
    outputs = 4 * 10 * 20
    assert cost.flops == 2 * outputs * 30 + 3 * outputs
    assert cost.bytes_read == 4 * (4 * 10 * 30 + 20 * 30 + 20) + outputs + 4 * outputs
    assert cost.bytes_written == 4 * outputs
    assert (cost.launches, cost.workspace_bytes) == (1, 0)


# Tensor cores.
MMA_ARCHS = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"]
DECODE = {"m": 16, "n": 4096, "k": 4096, "dtype": "bfloat16", "layout": "nt"}
LONG = {"m": 128, "n": 128, "k": 16384, "dtype": "float16"}


def on_tensor_cores(fields: dict[str, Any], arch: str = "sm_90a", **changes: int | str) -> Prediction:
    """Of the level-0 schedule with some tunables changed, with the registers that the rules expect."""
    problem = matmul(**fields)
    candidate = default_candidate(problem, arch, **changes)
    stored = Stored.of(problem, aligns(problem)[:2])
    expected = tensor.registers(candidate.schedule.as_dict(), stored)
    return predict(candidate, report(min(expected, 255)), target(arch))


def square(extent: int, dtype: str = "float16", **fields: Any) -> dict[str, Any]:
    return {"m": extent, "n": extent, "k": extent, "dtype": dtype, **fields}


@pytest.mark.parametrize("arch", MMA_ARCHS)
@pytest.mark.parametrize(
    ("fields", "rate"),
    [
        (square(8192), "float16"),
        (square(8192, "bfloat16", layout="nt"), "bfloat16"),
        (square(8192, "float32", allow_tf32=True), "tf32"),
        (square(8192, "int8", layout="nt"), "int8"),
    ],
)
def test_a_large_square_reaches_much_of_what_mma_sync_can(fields: dict[str, Any], rate: str, arch: str) -> None:
    sheet = target(arch)
    reached = 2 * 8192**3 / on_tensor_cores(fields, arch).us / 1e3
    assert 0.4 < reached / (sheet.mma_share * tensor_gflops(sheet, rate)) < 1.0


def test_types_rank_by_their_rates() -> None:
    int8, float16, tf32 = (
        on_tensor_cores(fields).us
        for fields in (
            square(8192, "int8", layout="nt"),
            square(8192),
            square(8192, "float32", allow_tf32=True),
        )
    )
    cuda_cores = predicted({"m": 8192, "n": 8192, "k": 8192}, WIDE, registers=128).us
    assert int8 < float16 < tf32 < cuda_cores


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("n", [4096, 6144, 28672])
def test_decoding_is_bound_by_dram(n: int, arch: str) -> None:
    prediction = on_tensor_cores({**DECODE, "n": n}, arch)
    assert prediction.bound_by == "dram"
    assert prediction.us > 2 * n * 4096 / target(arch).dram_gb_s / 1e3


@pytest.mark.parametrize("arch", MMA_ARCHS)
def test_slices_make_a_long_sum_of_few_tiles_faster(arch: str) -> None:
    tiles = {"tile_m": 64, "tile_n": 64, "warps_m": 2, "warps_n": 2}
    whole = on_tensor_cores(LONG, arch, **tiles, split="none", split_k=1)
    sliced = {count: on_tensor_cores(LONG, arch, **tiles, split="workspace", split_k=count) for count in (4, 16)}
    assert sliced[16].us < sliced[4].us < whole.us / 2
    assert whole.roofs_us.keys() < sliced[4].roofs_us.keys() == whole.roofs_us.keys() | {"other_launches"}


@pytest.mark.parametrize("way", ["workspace", "atomic"])
def test_slices_of_a_full_grid_cost_time(way: str) -> None:
    whole = on_tensor_cores(square(4096))
    assert on_tensor_cores(square(4096), split=way, split_k=2).us > whole.us + 2.0


def test_a_second_launch_has_its_own_time() -> None:
    for way, launches in (("workspace", 1), ("atomic", 2)):
        prediction = on_tensor_cores(LONG, split=way, split_k=8)
        assert prediction.roofs_us["other_launches"] > 2.0 * launches


def test_stream_k_fills_the_last_round() -> None:
    # 144 tiles are a round of 132 and one of 12.
    fields = {"m": 1536, "n": 1536, "k": 16384, "dtype": "float16"}
    tiles = {"tile_m": 128, "tile_n": 128, "warps_m": 2, "warps_n": 2, "stages": 5, "split": "none", "split_k": 1}
    whole = on_tensor_cores(fields, **tiles)
    stream = on_tensor_cores(fields, **{**tiles, "split": "stream", "stream_blocks": 132})
    assert stream.us < 0.75 * whole.us
    # Tiles that fill 15.5 rounds of 16 have little to gain.
    full = square(8192)
    assert on_tensor_cores(full, split="stream", stream_blocks=132).us > 0.95 * on_tensor_cores(full).us


def test_more_stages_hide_more_latency() -> None:
    tiles = {"tile_m": 64, "tile_n": 64, "tile_k": 32, "warps_m": 1, "warps_n": 1, "split": "none", "split_k": 1}
    fields = {"m": 512, "n": 512, "k": 8192, "dtype": "float16"}
    deep, flat = (on_tensor_cores(fields, **tiles, stages=stages) for stages in (4, 2))
    assert deep.us <= flat.us
    assert deep.roofs_us["latency"] < flat.roofs_us["latency"]


def test_reading_fragments_ahead_helps() -> None:
    few = {"tile_m": 64, "tile_n": 64, "warps_m": 1, "warps_n": 1}
    assert on_tensor_cores(square(4096), **few).us < on_tensor_cores(square(4096), **few, fragments=1).us


def test_whole_rows_of_the_output_cost_less_traffic() -> None:
    shared, direct = (on_tensor_cores(square(2048), epilogue_path=way).roofs_us["l2"] for way in ("shared", "direct"))
    assert shared < direct


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120"])
def test_no_prediction_on_tensor_cores_beats_the_data_sheet(arch: str) -> None:
    problem, sheet = matmul(**square(2048)), target(arch)
    flops = 2 * 2048**3
    for candidate in lower(problem, sheet, Search(level=2, limit=60)).candidates:
        prediction = predict(candidate, report(128), sheet)
        assert prediction.us > flops / tensor_gflops(sheet, "float16") / 1e3
        assert math.isfinite(prediction.us)
        assert json.loads(json.dumps(prediction.as_dict())) == prediction.as_dict()


def test_cost_counts_elements_of_each_type() -> None:
    op = operator("matmul")
    problem = matmul(m=16, n=32, k=64, dtype="float16", out_dtype="bfloat16", epilogue=[{"op": "bias"}, {"op": "mask"}])
    cost = op.cost(problem, default_candidate(problem).schedule)
    assert cost.bytes_read == 2 * (16 * 64 + 64 * 32) + 2 * 32 + 16 * 32
    assert cost.bytes_written == 2 * 16 * 32
