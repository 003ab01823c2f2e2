"""Each rule of the tensor-core kernel rejects what breaks it, with its name and the numbers, and accepts the rest."""

from __future__ import annotations

from typing import Any

import pytest

from codegen.operator import LaunchBounds
from codegen.operators import operator
from codegen.operators.matmul import tensor_rules
from codegen.problem import LARGEST_EXTENT
from codegen.rules import ACCEPTED, Accepted, Rejected
from codegen.schedule import Schedule
from codegen.targets import target
from tests.fixtures_codegen import matmul

OP = operator("matmul")
GOOD = {
    "tile_m": 64, "tile_n": 64, "tile_k": 32, "warps_m": 2, "warps_n": 2, "stages": 3, "fragments": 2, "mma_k": 16,
    "copy": "cp_async", "epilogue_path": "shared", "static_k": 0, "min_blocks": 1, "maxnreg": 0, "split": "none",
    "raster": 0, "split_k": 1, "stream_blocks": 0,
}  # fmt: skip
TURING = {"copy": "registers", "stages": 2, "mma_k": 8}
CUBE = {"m": 1024, "n": 1024, "k": 1024, "dtype": "float16"}
# Nine tiles leave multiprocessors idle on every device.
UNEVEN = {"m": 192, "n": 192, "k": 16384}
STREAM = {"split": "stream", "stream_blocks": 132}


def judge(
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
        (UNEVEN, STREAM),
        ({}, {"tile_n": 128, "fragments": 1, "maxnreg": 128}),
        ({}, {"tile_n": 128, "stages": 2, "fragments": 1, "min_blocks": 4}),
    ],
)
def test_a_good_schedule_is_accepted(fields: dict[str, Any], change: dict[str, Any], arch: str) -> None:
    if change is STREAM:
        change = {**STREAM, "stream_blocks": target(arch).sm_count}
    assert judge(change, fields, arch) == ACCEPTED


def test_turing_has_its_own_pipeline() -> None:
    assert judge(TURING, arch="sm_75") == ACCEPTED


@pytest.mark.parametrize(
    ("rule", "change", "fields", "arch", "said"),
    [
        ("mma", {"mma_k": 32}, {}, "sm_90a", "mma.sync on float16 has k = 8 or 16, not mma_k = 32"),
        ("mma", {"mma_k": 8}, {"dtype": "bfloat16"}, "sm_90a", "bfloat16 has k = 16, not mma_k = 8"),
        ("mma", {}, {"dtype": "float32", "allow_tf32": True}, "sm_90a", "tf32 has k = 8, not mma_k = 16"),
        ("mma", {}, {"dtype": "int8"}, "sm_90a", "int8 has k = 32, not mma_k = 16"),
        ("mma", {**TURING, "mma_k": 16}, {}, "sm_75", "float16 with k = 16 needs sm_80; the target is sm_75"),
        ("mma", {}, {"dtype": "bfloat16"}, "sm_75", "bfloat16 with k = 16 needs sm_80"),
        ("mma", {"mma_k": 32}, {"dtype": "int8"}, "sm_75", "int8 with k = 32 needs sm_80"),
        ("tile_k", {"tile_k": 8}, {}, "sm_90a", "tile_k = 8 is 16 bytes; 32, 64, 128 are allowed"),
        ("tile_k", {"tile_k": 128}, {}, "sm_90a", "tile_k = 128 is 256 bytes"),
        ("tile_k", {"tile_k": 16, "mma_k": 32}, {"dtype": "int8", "layout": "nt"}, "sm_90a", "is 16 bytes"),
        ("warp_tile", {"warps_m": 8}, {}, "sm_90a", "64 rows for 8 warps are no multiple of 16 each"),
        ("warp_tile", {"warps_n": 8}, {}, "sm_90a", "64 columns for 8 warps are no multiple of 16 each"),
        ("warp_tile", {"tile_m": 16, "warps_m": 4}, {}, "sm_90a", "16 rows for 4 warps"),
        ("threads", {"tile_m": 256, "tile_n": 256, "warps_m": 8, "warps_n": 8}, {}, "sm_90a",
         "8 x 8 warps are 2048 threads; at most 1024"),
        ("fragments", {"tile_k": 16}, {}, "sm_90a", "even number of 32-byte k-steps; tile_k = 16 has 1"),
        ("copy", {"copy": "registers", "stages": 3}, {}, "sm_90a", "1 or 2 stages, not 3"),
        ("copy", {**TURING, "copy": "cp_async"}, {}, "sm_75", "cp.async needs sm_80; the target is sm_75"),
        ("copy", {}, {"n": 1023}, "sm_90a", "at least 4 bytes; an operand is aligned to 2"),
        ("copy", {"mma_k": 32, "tile_k": 64}, {"dtype": "int8", "n": 1022, "layout": "nn"}, "sm_90a", "aligned to 1"),
        ("copy", {"mma_k": 32, "tile_k": 64}, {"dtype": "int8", "layout": "tn"}, "sm_90a",
         "layout tn needs copy = registers"),
        ("copy", {"stages": 1}, {}, "sm_90a", "2 stages at least"),
        ("split", {"split": "workspace"}, {}, "sm_90a", "split = workspace with 1 slice"),
        ("split", {"split_k": 2}, {}, "sm_90a", "split_k = 2 needs split = workspace or atomic"),
        ("split", {"stream_blocks": 4}, {}, "sm_90a", "stream_blocks = 4 needs split = stream"),
        ("split", {**STREAM, "split_k": 2}, {}, "sm_90a", "split_k is 1, not 2"),
        ("split_k", {"split": "atomic", "split_k": 33}, {}, "sm_90a", "33 slices of 32 steps (k = 1024, tile_k = 32)"),
        ("split_k", {"split": "workspace", "split_k": 5}, {}, "sm_90a", "has enough with 1056 blocks"),
        ("stream_blocks", {"split": "stream"}, {}, "sm_90a", "needs at least 1 block"),
        ("stream_blocks", STREAM, {"m": 64, "n": 64}, "sm_90a", "132 blocks for 32 steps leave some empty"),
        ("stream_blocks", {**STREAM, "stream_blocks": 3}, UNEVEN, "sm_90a", "3 blocks take 9 whole tiles"),
        ("stream_blocks", STREAM, {}, "sm_90a", "256 tiles fill 2 x 132 multiprocessors without stream-K"),
        ("stream_blocks", {**STREAM, "stages": 2, "stream_blocks": 132 * 12}, UNEVEN, "sm_90a", "x 132 at a time"),
        ("maxnreg", {"maxnreg": 128, "min_blocks": 2}, {}, "sm_90a", "maxnreg = 128 or min_blocks = 2, not both"),
        ("maxnreg", {"maxnreg": 255, "tile_m": 256, "warps_m": 8}, {}, "sm_90a",
         "512 threads of 255 registers; sm_90a has 65536"),
        ("registers", {"maxnreg": 64}, {}, "sm_90a", "maxnreg = 64 would spill"),
        ("registers", {"tile_m": 128, "tile_n": 256}, {}, "sm_90a", "at most 255"),
        ("registers", {"tile_m": 128, "tile_n": 128, "warps_m": 4, "warps_n": 4, "min_blocks": 2}, {}, "sm_90a",
         "2 x 512 threads of about"),
        ("shared_memory", {"tile_m": 128, "tile_n": 128, "tile_k": 64, "stages": 8}, {}, "sm_90a",
         "262144 bytes of shared memory; sm_90a has 232448 per block"),
        ("shared_memory", {"stages": 7, "tile_k": 64}, {}, "sm_86", "114688 bytes of shared memory; sm_86 has 101376"),
        ("min_blocks", {"tile_k": 64, "stages": 4, "min_blocks": 4}, {}, "sm_90a", "4 x 66560 bytes of shared memory"),
        ("min_blocks", {**TURING, "tile_m": 128, "tile_n": 128, "warps_m": 4, "warps_n": 4, "min_blocks": 3}, {},
         "sm_75", "3 x 512 threads; sm_75 holds 1024"),
        ("maxnreg", {"maxnreg": 128}, {}, "sm_90a", "about 116 registers fit into 128 unasked"),
        ("min_blocks", {"min_blocks": 4}, {}, "sm_90a", "about 116 registers fit into 128 unasked"),
        ("static_k", {"static_k": 512}, {}, "sm_90a", "static_k = 512 is neither 0 nor k = 1024"),
        ("static_k", {"static_k": 2048}, {"k": 2048}, "sm_90a", "or over 1024"),
        ("tile_m", {}, {"m": 32}, "sm_90a", "tile_m = 64 is mostly padding for m = 32"),
        ("tile_n", {}, {"n": 31, "layout": "nt"}, "sm_90a", "tile_n = 64 is mostly padding for n = 31"),
        ("tile_k", {"stages": 2, "tile_k": 64}, {"k": 32}, "sm_90a", "tile_k = 64 is mostly padding for k = 32"),
        ("stages", {}, {"k": 64}, "sm_90a", "3 stages for 2 steps: k = 64, tile_k = 32"),
        ("stages", {"split": "workspace", "split_k": 16}, {"m": 64, "n": 64}, "sm_90a", "3 stages for 2 steps"),
        ("raster", {"raster": 1}, {"m": 64}, "sm_90a", "orders 1 x 16 tiles as 0 does"),
        ("raster", {"raster": 8}, {"m": 512}, "sm_90a", "bands of 8 rows order 8 rows of tiles"),
        ("grid", {"tile_m": 16, "tile_n": 16, "warps_m": 1, "warps_n": 1, "copy": "registers", "stages": 2},
         {"batch": LARGEST_EXTENT, "m": 17, "n": 17, "k": 96, "stride_a": 0, "stride_b": 0}, "sm_90a",
         f"{4 * LARGEST_EXTENT} blocks; a launch has at most {LARGEST_EXTENT}"),
    ],
)  # fmt: skip
def test_what_breaks_a_rule_is_rejected_with_the_numbers(
    rule: str, change: dict[str, Any], fields: dict[str, Any], arch: str, said: str
) -> None:
    outcome = judge(change, fields, arch)
    assert isinstance(outcome, Rejected)
    assert (outcome.rule, said in outcome.message) == (rule, True), outcome


@pytest.mark.parametrize(
    ("change", "fields", "needed"),
    [
        ({"split": "workspace", "split_k": 3}, {"m": 100, "n": 202, "batch": 2}, 3 * 4 * 2 * 100 * 204),
        ({"split": "atomic", "split_k": 3}, {"m": 100, "n": 202, "batch": 2}, 4 * 2 * 100 * 204),
        (STREAM, UNEVEN, 4 * 2 * 132 * 64 * 64),
        ({}, {}, 0),
    ],
)
def test_a_workspace_over_the_limit_is_rejected_with_the_bytes(
    change: dict[str, Any], fields: dict[str, Any], needed: int
) -> None:
    cost = OP.cost(matmul(**{**CUBE, **fields}), Schedule.of({**GOOD, **change}))
    assert cost.workspace_bytes == needed
    assert judge(change, fields, limit=needed) == ACCEPTED
    refused = Rejected("workspace", f"needs {needed} bytes of workspace, the limit is {needed - 1}")
    assert judge(change, fields, limit=needed - 1) == refused


def test_every_static_assert_of_the_kernel_has_its_rule() -> None:
    texts = operator("matmul").kernel_texts
    lines = [line for file in ("gemm/tile.cuh", "gemm/tensor.cuh") for line in texts[file].splitlines()]
    known = {
        "a row is a power of two of chunks": "tile_k, and the values of tile_m and tile_n",
        "a tile row must be a whole number of vectors": "tile_k, and the values of tile_m and tile_n",
        "threads is what the warps make it": "threads",
        "a warp computes pieces of 16 x 16": "warp_tile",
        "warps must cover the tile": "warp_tile",
        "tile_k must be whole k-steps": "tile_k",
        "two fragment buffers need an even number of k-steps": "fragments",
        "a copy needs a stage that nobody reads": "copy",
        "registers hold one step": "copy",
        "every lane writes as many vectors as the others": "warp_tile",
    }
    asserted = [line.rsplit('"', 2)[1] for line in lines if "static_assert(" in line]
    assert sorted(asserted) == sorted(known)


def test_shared_memory_is_the_ring_or_what_the_epilogue_exchanges() -> None:
    ring = {**GOOD, "stages": 2}
    assert tensor_rules.shared_bytes(ring, 2) == 2 * (64 + 64) * 32 * 2
    assert tensor_rules.shared_bytes(ring, 1) == 4 * 16 * (32 + 8) * 4
    assert tensor_rules.shared_bytes({**ring, "epilogue_path": "direct"}, 1) == 2 * (64 + 64) * 32
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
        (STREAM, ("run", "reduce"), [LaunchBounds(128), LaunchBounds(256)]),
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
    assert [(one.name, one.value) for one in config.fields] == [
        ("tensor_cores", True), ("a_transposed", False), ("b_transposed", False),
        ("align_a", 8), ("align_b", 8), ("align_c", 4),
        ("tile_m", 64), ("tile_n", 64), ("tile_k", 32), ("warps_m", 2), ("warps_n", 2), ("stages", 3), ("fragments", 2),
        ("mma_k", 16), ("async_copies", True), ("shared_epilogue", True), ("split", 1), ("static_k", 0),
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
        (STREAM, {"m": 128, "n": 65, "k": 64}, {(1, 2), (1, 3), (1, 5), (1, 8)}),
        (STREAM, {"m": 1, "n": 1, "k": 1}, {(1, 1)}),
    ],
)
def test_test_launches_have_every_raster_and_leave_no_block_without_a_step(
    change: dict[str, Any], fields: dict[str, Any], wanted: set[tuple[int, int]]
) -> None:
    kernel = OP.candidate(matmul(**CUBE), Schedule.of({**GOOD, **change})).kernel
    launches = OP.test_launches(kernel, matmul(dtype="float16", **fields))
    assert len({tuple(one) for one in launches}) == len(launches)
    assert {raster for raster, *_ in launches} == ({0, 8} if fields["m"] <= 64 else {0, 1, 4, 8})
    assert {(slices, blocks) for _, slices, blocks in launches} == wanted
