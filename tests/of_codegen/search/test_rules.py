"""Each rule of the CUDA-core kernel rejects what breaks it, with its name and the numbers, and accepts the rest."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.operator import LaunchBounds
from codegen.operators import operator
from codegen.operators.matmul import simt
from codegen.problem import LARGEST_EXTENT, Problem
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, check_workspace, residency_rules
from codegen.search.schedule import Schedule
from codegen.targets import target
from tests.support.fixtures.codegen import matmul

GOOD = {
    "tile_m": 64, "tile_n": 64, "tile_k": 16, "thread_m": 4, "thread_n": 4, "warp_m": 4, "stages": 2, "fragments": 2,
    "padding": 4, "unroll_k": 8, "min_blocks": 1, "split": "none", "raster": 0, "split_k": 1,
}  # fmt: skip


def check_output(
    change: dict[str, int | str], fields: dict[str, Any] | None = None, arch: str = "sm_90a"
) -> Accepted | Rejected:
    problem = matmul(**{"m": 1024, "n": 1024, "k": 1024, **(fields or {})})
    return operator("matmul").rules(problem, Schedule.of({**GOOD, **change}), target(arch))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_a_good_schedule_is_accepted(arch: str) -> None:
    assert check_output({}, arch=arch) == ACCEPTED


@pytest.mark.parametrize(
    ("rule", "change", "fields", "arch", "said"),
    [
        ("thread_tile", {"tile_m": 68, "thread_m": 8}, {}, "sm_90a", "threads of 8x4 do not cover a tile of 68x64"),
        ("thread_tile", {"tile_n": 68, "thread_n": 8}, {}, "sm_90a", "a tile of 64x68"),
        ("threads", {"tile_m": 128, "thread_m": 1, "tile_n": 64, "thread_n": 4}, {},
         "sm_90a", "= 2048 threads"),
        ("threads", {"tile_m": 16, "tile_n": 16}, {}, "sm_90a", "16x16 / 4x4 = 16 threads"),
        ("threads", {"tile_m": 48, "thread_m": 8, "tile_n": 48, "thread_n": 4}, {},
         "sm_90a", "= 72 threads"),
        ("warp", {"warp_m": 32}, {}, "sm_90a", "16 threads along m are no multiple of warp_m = 32"),
        ("warp", {"tile_n": 16, "thread_n": 4, "warp_m": 4}, {}, "sm_90a",
         "4 threads along n are no multiple of 32 / warp_m = 8"),
        ("warp", {"warp_m": 3}, {}, "sm_90a", "warp_m = 3"),
        ("unroll", {"unroll_k": 32}, {}, "sm_90a", "unroll_k = 32 does not divide tile_k = 16"),
        ("fragments", {"unroll_k": 1}, {}, "sm_90a", "even unroll_k, not 1"),
        ("padding", {"padding": 2}, {}, "sm_90a", "padding = 2"),
        ("vector", {"tile_k": 6, "unroll_k": 6}, {"layout": "nn"},
         "sm_90a", "a tile row of A has 6 elements, no multiple of 4"),
        ("vector", {"tile_k": 6, "unroll_k": 6}, {"layout": "tt"},
         "sm_90a", "a tile row of B has 6 elements, no multiple of 4"),
        ("shared_memory", {"tile_m": 256, "tile_n": 256, "tile_k": 32, "thread_m": 8, "thread_n": 8}, {},
         "sm_75", "133120 bytes of shared memory; sm_75 has 65536"),
        ("registers", {"thread_m": 16, "thread_n": 16, "tile_m": 128, "tile_n": 128}, {},
         "sm_90a", "at most 255"),
        ("registers", {"tile_m": 128, "tile_n": 128, "thread_m": 4, "fragments": 2, "min_blocks": 2}, {},
         "sm_90a", "2 x 1024 threads of about"),
        ("min_blocks", {"tile_m": 32, "tile_n": 32, "thread_m": 1, "thread_n": 1, "fragments": 1, "min_blocks": 2,
                        "tile_k": 8}, {},
         "sm_75", "2 x 1024 threads; sm_75 holds 1024"),
        ("min_blocks", {"tile_m": 128, "tile_n": 128, "thread_m": 8, "thread_n": 8, "fragments": 1,
                        "min_blocks": 2}, {},
         "sm_75", "2 x 33792 bytes of shared memory; sm_75 has 65536"),
        ("min_blocks", {"min_blocks": 2}, {}, "sm_90a", "fit unasked"),
        ("tile_m", {}, {"m": 32}, "sm_90a", "tile_m = 64 is mostly padding for m = 32"),
        ("tile_n", {}, {"n": 31}, "sm_90a", "tile_n = 64 is mostly padding for n = 31"),
        ("tile_k", {"stages": 1}, {"k": 8}, "sm_90a", "tile_k = 16 is mostly padding for k = 8"),
        ("stages", {}, {"k": 16}, "sm_90a", "2 stages with one step: k = 16, tile_k = 16"),
        ("stages", {"split": "workspace", "split_k": 40}, {"m": 64, "n": 64}, "sm_90a",
         "one step: k = 1024, tile_k = 16, split_k = 40"),
        ("split", {"split": "workspace"}, {}, "sm_90a", "split = workspace with 1 slice"),
        ("split", {"split": "atomic"}, {}, "sm_90a", "split = atomic with 1 slice"),
        ("split", {"split_k": 2}, {}, "sm_90a", "split_k = 2 needs split = workspace or atomic"),
        ("split_k", {"split": "workspace", "split_k": 65}, {}, "sm_90a",
         "65 slices of 64 steps (k = 1024, tile_k = 16)"),
        ("split_k", {"split": "atomic", "split_k": 5}, {}, "sm_90a",
         "256 tiles in 5 slices; sm_90a has enough with 1056 blocks"),
        ("raster", {"raster": 1}, {"m": 64}, "sm_90a", "orders 1 x 16 tiles as 0 does"),
        ("raster", {"raster": 8}, {"n": 64}, "sm_90a", "orders 16 x 1 tiles as 0 does"),
        ("raster", {"raster": 8}, {"m": 512}, "sm_90a", "bands of 8 rows order 8 rows of tiles"),
        ("grid", {"tile_m": 16, "tile_n": 16, "thread_m": 2, "warp_m": 8},
         {"batch": LARGEST_EXTENT, "m": 17, "n": 17, "k": 32, "stride_a": 0, "stride_b": 0}, "sm_90a",
         f"{4 * LARGEST_EXTENT} blocks; a launch has at most {LARGEST_EXTENT}"),
    ],
)  # fmt: skip
def test_what_breaks_a_rule_is_rejected_with_the_numbers(
    rule: str, change: dict[str, int | str], fields: dict[str, Any], arch: str, said: str
) -> None:
    outcome = check_output(change, fields, arch)
    assert isinstance(outcome, Rejected)
    assert outcome.rule == rule
    assert said in outcome.message


def test_workspace_is_checked_against_the_request_s_limit() -> None:
    assert check_workspace(100, None) is None
    assert check_workspace(100, 100) is None
    assert check_workspace(101, 100) == Rejected("workspace", "needs 101 bytes of workspace, the limit is 100")
    schedule = Schedule.of(GOOD)
    problem = matmul(m=1024, n=1024, k=1024)
    assert operator("matmul").rules(problem, schedule, target("sm_90a"), 0) == ACCEPTED
    assert isinstance(operator("matmul").rules(problem, schedule, target("sm_90a"), -1), Rejected)


@pytest.mark.parametrize(
    ("split", "bytes_needed"), [("workspace", 3 * 4 * 2 * 100 * 204), ("atomic", 4 * 2 * 100 * 204)]
)
def test_slices_over_the_workspace_limit_are_rejected_with_the_bytes(split: str, bytes_needed: int) -> None:
    problem = matmul(m=100, n=201, k=1024, batch=2)
    schedule = Schedule.of({**GOOD, "split": split, "split_k": 3})
    op, sheet = operator("matmul"), target("sm_90a")
    assert op.cost(problem, schedule).workspace_bytes == bytes_needed
    assert op.rules(problem, schedule, sheet, bytes_needed) == ACCEPTED
    assert op.rules(problem, schedule, sheet, bytes_needed - 1) == Rejected(
        "workspace", f"needs {bytes_needed} bytes of workspace, the limit is {bytes_needed - 1}"
    )


def test_check_chains_with_or() -> None:
    assert (check(True, "a", "x") or check(False, "b", "y") or ACCEPTED) == Rejected("b", "y")
    assert (check(True, "a", "x") or ACCEPTED) == ACCEPTED


def test_shared_memory_is_what_the_kernel_s_launch_code_asks_for() -> None:
    text = operator("matmul").kernel_texts["gemm/simt.cuh"]
    assert "C::stages * C::tile_k * (C::tile_m + C::tile_n + 2 * C::padding) * sizeof(typename C::Input)" in text
    assert simt.shared_bytes(GOOD) == 2 * 16 * (64 + 64 + 2 * 4) * 4


def test_every_static_assert_of_the_kernel_has_its_rule() -> None:
    texts = operator("matmul").kernel_texts
    lines = [line for file in ("gemm/tile.cuh", "gemm/simt.cuh") for line in texts[file].splitlines()]
    by_name = {
        "a tile row must be a whole number of vectors": "vector",
        "threads is what the tile and the thread tile make it": "config",
        "thread tiles must cover the tile": "thread_tile",
        "warps must cover the tile": "warp",
        "a block is 1 to 32 whole warps": "threads",
        "unrolled steps must cover the tile": "unroll",
        "two fragment buffers need an even number of unrolled steps": "fragments",
        "rows of shared memory stay aligned to vectors": "padding",
        "stream-K is for tensor cores": "not among the values of split",
    }
    asserted = [line.rsplit('"', 2)[1] for line in lines if "static_assert(" in line]
    assert sorted(asserted) == sorted(by_name)


def test_a_kernel_answers_for_its_own_threads_and_shared_memory() -> None:
    op = operator("matmul")
    kernel = op.candidate(matmul(m=1024, n=1024, k=1024), Schedule.of(GOOD)).kernel
    assert (op.launch_bounds(kernel, "run"), op.shared_bytes(kernel)) == (LaunchBounds(256, 1), 17408)


@pytest.mark.parametrize(
    ("split", "functions", "deterministic"),
    [("none", ("run",), True), ("workspace", ("run", "reduce"), True), ("atomic", ("clear", "run", "reduce"), False)],
)
def test_a_split_kernel_has_the_functions_that_sum_its_slices(
    split: str, functions: tuple[str, ...], deterministic: bool
) -> None:
    op, problem = operator("matmul"), matmul(m=128, n=128, k=4096)
    schedule = Schedule.of({**GOOD, "split": split, "split_k": 1 if split == "none" else 4})
    kernel = op.candidate(problem, schedule).kernel
    assert op.functions(kernel) == functions
    assert op.deterministic(kernel) is deterministic
    assert op.cost(problem, schedule).launches == len(functions)
    bounds = {name: op.launch_bounds(kernel, name) for name in functions}
    assert bounds.pop("run") == LaunchBounds(256, 1)
    assert set(bounds.values()) <= {LaunchBounds(256)}
    assert op.config(kernel).fields["split"] == [
        "none",
        "workspace",
        "atomic",
    ].index(split)


@pytest.mark.parametrize("split", ["none", "workspace"])
@pytest.mark.parametrize("k", [1, 16, 17, 64, 160])
def test_test_launches_have_every_raster_and_no_empty_slice(split: str, k: int) -> None:
    op = operator("matmul")
    kernel = op.candidate(matmul(), Schedule.of({**GOOD, "split": split, "split_k": 2})).kernel
    launches = op.test_launches(kernel, matmul(m=65, n=65, k=k))
    steps = -(-k // 16)
    assert len({tuple(launch) for launch in launches}) == len(launches)
    assert {raster for raster, _, _ in launches} == {0, 1, 4, 8}
    one_row = op.test_launches(kernel, matmul(m=1, k=k))
    assert {raster for raster, _, _ in one_row} == {0, 8}
    wanted = {1} if split == "none" else {1, min(2, steps), min(3, steps), steps}
    assert {slices for _, slices, _ in launches} == wanted


def test_a_problem_of_another_operator_is_a_programming_error() -> None:
    with pytest.raises(TypeError, match="'other'"):
        operator("matmul").signature(Problem(operator="other"))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_resident_blocks_share_a_multiprocessor_with_what_the_driver_reserves_of_each(arch: str) -> None:
    """CUDA C++ Programming Guide, compute capabilities: 1 KiB of each block's from 8.0 on."""
    card = target(arch)
    half = card.shared_per_sm // 2
    assert card.reserved_shared_bytes == (0 if arch == "sm_75" else 1024)
    most = half - card.reserved_shared_bytes
    assert residency_rules(2, 64, most, 32, card) is None
    rejected = residency_rules(2, 64, most + 1, 32, card)
    assert rejected == Rejected("min_blocks", f"2 x {half + 1} bytes of shared memory; {arch} has {card.shared_per_sm}")
