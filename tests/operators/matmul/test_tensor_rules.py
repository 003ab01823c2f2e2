"""Each rule of the tensor-core kernel rejects what breaks it, with its name and the numbers, and accepts the rest."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.operator import LaunchBounds
from codegen.operators import operator
from codegen.operators.matmul import tensor
from codegen.search.rules import ACCEPTED, Accepted, Rejected
from codegen.search.schedule import Schedule
from codegen.targets import target
from tests.operators.matmul.schedules import CUBE, FEW_TILES, GOOD, STREAMED, TURING
from tests.support.fixtures.codegen import matmul

OP = operator("matmul")


def check_output(
    change: dict[str, Any], fields: dict[str, Any] | None = None, arch: str = "sm_90a", limit: int | None = None
) -> Accepted | Rejected:
    problem = matmul(**{**CUBE, **(fields or {})})
    return OP.rules(problem, Schedule.of({**GOOD, **change}), target(arch), limit)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"])
@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"dtype": "float16"}, {}),
        ({"dtype": "float16"}, {"mma_k": 8}),
        ({"dtype": "bfloat16"}, {}),
        ({"dtype": "float32", "allow_tf32": True}, {"mma_k": 8}),
        ({"dtype": "int8", "layout": "nt"}, {"mma_k": 32, "tile_k": 64}),
        ({"dtype": "int8", "layout": "nn"}, {"mma_k": 32, "tile_k": 64, "copy": "registers", "stages": 2}),
        ({"dtype": "float16", "m": 1023, "n": 1023, "k": 1023}, {"copy": "registers", "stages": 1}),
        (FEW_TILES, STREAMED),
        ({}, {"tile_n": 128, "fragments": 1, "maxnreg": 128}),
        ({}, {"tile_n": 128, "stages": 2, "fragments": 1, "min_blocks": 4}),
    ],
)
def test_a_good_schedule_is_accepted(fields: dict[str, Any], change: dict[str, Any], arch: str) -> None:
    if change is STREAMED:
        change = {**STREAMED, "stream_blocks": target(arch).sm_count}
    assert check_output(change, fields, arch) == ACCEPTED


def test_turing_has_its_own_pipeline() -> None:
    assert check_output(TURING, arch="sm_75") == ACCEPTED


def test_every_static_assert_of_the_kernel_has_its_rule() -> None:
    texts = operator("matmul").kernel_texts
    lines = [line for file in ("gemm/tile.cuh", "gemm/tensor.cuh") for line in texts[file].splitlines()]
    by_name = {
        "a row is a power of two of chunks": "tile_k, and the values of tile_m and tile_n",
        "a tile row must be a whole number of vectors": "tile_k, and the values of tile_m and tile_n",
        "threads is what the warps make it": "threads",
        "a warp computes pieces of 16 x 16": "warp_tile",
        "warps must cover the tile": "warp_tile",
        "tile_k must be whole k-steps": "tile_k",
        "two fragment buffers need an even number of k-steps": "fragments",
        "a copy needs a stage that is not being read": "copy",
        "registers hold one step": "copy",
        "every lane writes as many vectors as the others": "warp_tile",
    }
    asserted = [line.rsplit('"', 2)[1] for line in lines if "static_assert(" in line]
    assert sorted(asserted) == sorted(by_name)


def test_shared_memory_is_the_ring_or_what_the_epilogue_exchanges() -> None:
    ring = {**GOOD, "stages": 2}
    assert tensor.shared_bytes(ring, 2) == 2 * (64 + 64) * 32 * 2
    assert tensor.shared_bytes(ring, 1) == 4 * 16 * (32 + 8) * 4
    assert tensor.shared_bytes({**ring, "epilogue_path": "direct"}, 1) == 2 * (64 + 64) * 32
    kernel = OP.candidate(matmul(**CUBE), Schedule.of(ring)).kernel
    assert OP.shared_bytes(kernel) == 16384


@pytest.mark.parametrize(
    ("change", "functions", "bounds"),
    [
        ({"min_blocks": 2}, ("run",), [LaunchBounds(128, 2)]),
        ({"maxnreg": 96}, ("run",), [LaunchBounds(128, 1, 96)]),
        ({"split": "workspace", "split_k": 2}, ("run", "reduce"), [LaunchBounds(128), LaunchBounds(256)]),
        ({"split": "atomic", "split_k": 2, "maxnreg": 128}, ("clear", "run", "reduce"),
         [LaunchBounds(256), LaunchBounds(128, 1, 128), LaunchBounds(256)]),
        (STREAMED, ("run", "reduce"), [LaunchBounds(128), LaunchBounds(256)]),
    ],
)  # fmt: skip
def test_a_kernel_answers_for_its_functions(
    change: dict[str, Any], functions: tuple[str, ...], bounds: list[LaunchBounds]
) -> None:
    problem, schedule = matmul(**CUBE), Schedule.of({**GOOD, **change})
    kernel = OP.candidate(problem, schedule).kernel
    assert OP.functions(kernel) == functions
    assert [OP.launch_bounds(kernel, name) for name in functions] == bounds
    assert OP.cost(problem, schedule).launches == len(functions)
    assert OP.deterministic(kernel) is (change.get("split") != "atomic")


def test_integer_sums_are_deterministic_in_any_order() -> None:
    problem = matmul(m=64, n=64, k=4096, dtype="int8", layout="nt")
    change = {"mma_k": 32, "tile_k": 64, "split": "atomic", "split_k": 4}
    assert OP.deterministic(OP.candidate(problem, Schedule.of({**GOOD, **change})).kernel)


def test_the_config_has_what_the_code_depends_on() -> None:
    schedule = Schedule.of({**GOOD, "split": "workspace", "split_k": 4, "maxnreg": 128, "raster": 1})
    config = OP.config(OP.candidate(matmul(**CUBE, out_dtype="float32"), schedule).kernel)
    assert list(config.fields.items()) == [
        ("tensor_cores", True), ("a_transposed", False), ("b_transposed", False),
        ("align_a", 8), ("align_b", 8), ("align_c", 4),
        ("tile_m", 64), ("tile_n", 64), ("tile_k", 32), ("warps_m", 2), ("warps_n", 2), ("stages", 3), ("fragments", 2),
        ("mma_k", 16), ("copy", 0), ("epilogue_path", 1), ("static_k", 0), ("split", 1),
        ("threads", 128),
    ]  # fmt: skip
    assert config.types == (("Input", "float16"), ("Accumulator", "float32"), ("Output", "float32"))


@pytest.mark.parametrize(
    ("change", "fields", "wanted"),
    [
        ({}, {"m": 65, "n": 65, "k": 160}, {(1, 0)}),
        ({"split": "workspace", "split_k": 2}, {"m": 65, "n": 65, "k": 160}, {(1, 0), (2, 0), (3, 0), (5, 0)}),
        ({"split": "atomic", "split_k": 2}, {"m": 65, "n": 65, "k": 33}, {(1, 0), (2, 0)}),
        ({"split": "workspace", "split_k": 2}, {"m": 65, "n": 65, "k": 1}, {(1, 0)}),
        (STREAMED, {"m": 128, "n": 65, "k": 64}, {(1, 2), (1, 3), (1, 5), (1, 8)}),
        (STREAMED, {"m": 1, "n": 1, "k": 1}, {(1, 1)}),
    ],
)
def test_test_launches_have_every_raster_and_leave_no_block_without_a_step(
    change: dict[str, Any], fields: dict[str, Any], wanted: set[tuple[int, int]]
) -> None:
    kernel = OP.candidate(matmul(**CUBE), Schedule.of({**GOOD, **change})).kernel
    launches = OP.test_launches(kernel, matmul(dtype="float16", **fields))
    assert len({tuple(launch) for launch in launches}) == len(launches)
    assert {raster for raster, *_ in launches} == ({0, 8} if fields["m"] <= 64 else {0, 1, 4, 8})
    assert {(slices, blocks) for _, slices, blocks in launches} == wanted
