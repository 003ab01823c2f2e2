"""Gradients of a convolution's filters. What they share with matmul (`codegen/device/gemm/`) is mutated in matmul's
module."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from benchmarks.shapes import shapes_of
from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.conv2d_wgrad.far import last_filters
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem
from codegen.operators.convolution.operator import ConvolutionOperator
from codegen.operators.matmul.grid import k_steps
from codegen.operators.matmul.split import workspace_pitch
from codegen.problem import LARGEST_ELEMENTS, LARGEST_EXTENT, indexable
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from tests.operators.conv2d import convolutions
from tests.operators.conv2d.convolutions import (
    BY_ELEMENT,
    DEPTHWISE,
    HALF,
    LAYOUTS,
    MANY_THREADS,
    OUT,
    POINT,
    REGISTERS,
    STEM,
    TENSOR,
    TF32,
    WIDE,
)
from tests.operators.conv2d.kernels import DIRECT_WGRAD as DIRECT
from tests.operators.conv2d.kernels import SIZES, Kernels, conv2d, convolution
from tests.operators.harness import declarations as declare
from tests.operators.harness import machine_code as claim
from tests.operators.harness.checks import add_checks
from tests.operators.harness.declarations import LEVEL_1, SM_90A, Fields, Rejection
from tests.operators.harness.machine_code import Codes
from tests.support.kernels import cpu_helpers
from workers.cpu.build import build_cpu
from workers.cpu.library import POISON, CpuLibrary

NAME = "conv2d_wgrad"
OP, OF = operator(NAME), Kernels(NAME)
TURNED = {**HALF, "layout": "nchw"}
FIRST: dict[str, Any] = {"layout": "nchw", "align": (1, 1, 1)}
SLICED: dict[str, Any] = {**DIRECT, "split": "workspace", "split_k": 8}
ALONE: dict[str, Any] = {**DIRECT, "split_k": 1}
WORKSPACE: dict[str, Any] = {"split": "workspace"}
level_0 = partial(convolutions.level_0, NAME)


def wgrad(**fields: Any) -> Conv2dWgradProblem:
    problem = convolution(NAME, **fields)
    assert isinstance(problem, Conv2dWgradProblem)
    return problem


# ---- problems

MASKED = [{"op": "masked_activation", "where_set": {"op": "relu"}}]
PROBLEMS = convolutions.problems(
    NAME,
    refused=[
        ({"n": 2**20, "h": 50, "w": 50}, "padding", f"output pixels (n p q); at most {LARGEST_EXTENT} can be indexed"),
        ({"n": 2**21, "c": 2**20}, "padding", f"x would span 263882790666240 elements; at most {LARGEST_ELEMENTS}"),
        ({"epilogue": [{"op": "bias", "axis": "m"}]}, "epilogue.0.bias.axis", "'k'"),
        ({"epilogue": MASKED}, "epilogue", "masked_activation is for outputs of a layer"),
    ],
    aligned=[
        ({}, (4, 4, 4)),
        ({"dtype": "float16"}, (8, 8, 8)),
        ({"dtype": "float16", "out_dtype": "float32"}, (8, 8, 4)),
        ({"c": 3, "dtype": "float16"}, (8, 1, 1)),
        ({"c": 4, "k": 6, "dtype": "float16"}, (2, 4, 4)),
        ({"groups": 8, "dtype": "float16"}, (1, 2, 2)),
        ({"c": 24, "groups": 24, "dtype": "float16"}, (8, 8, 1)),  # neighbouring channels, each with its own filter
        ({"c": 6, "groups": 6, "dtype": "float16"}, (4, 1, 1)),  # several filters for each channel
        ({"layout": "nchw", "dtype": "float16"}, (8, 1, 8)),
        ({"layout": "nchw", "h": 5, "w": 5, "dtype": "float16"}, (1, 1, 8)),
    ],
    operands=[
        (
            {"layout": layout, "groups": 4, "epilogue": [{"op": "residual"}, {"op": "bias"}], "out_dtype": "float16"},
            [("dy", "float32", "in", dy), ("x", "float32", "in", x), ("residual", "float16", "in", dw),
             ("bias", "float16", "in", (24,)), ("dw", "float16", "out", dw)],
        )
        for layout, dy, x, dw in (
            ("nhwc", (2, 10, 8, 24), (2, 12, 10, 16), (24, 3, 3, 4)),
            ("nchw", (2, 24, 10, 8), (2, 16, 12, 10), (24, 4, 3, 3)),
        )
    ],
    unspecialised=[
        (
            {},
            {"n": 5, "h": 40, "c": 32, "k": 8, "stride": 2, "padding": 1, "dilation": 2},
            [2, 2, 1, 1, 1, 1, 2, 2],
        )
    ],
)  # fmt: skip


def test_the_fields_are_those_of_the_convolution_and_the_keys_are_not() -> None:
    fields = {"stride": 2, "padding": [1, 0], "groups": 4, "dtype": "float16", "out_dtype": "float32"}
    problem, other = wgrad(**fields), conv2d(**fields)
    assert {**problem.canonical(), "operator": "conv2d"} == other.canonical()
    assert problem.digest != other.digest
    assert (problem.sum_length, other.sum_length) == (2 * 6 * 4, 3 * 3 * 4), "sums run over pixels"
    with pytest.raises(TypeError, match="got a problem of operator 'conv2d'"):
        OP.signature(other)
    with pytest.raises(TypeError, match="got a problem of operator 'conv2d_wgrad'"):
        operator("conv2d").signature(problem)


@pytest.mark.parametrize(("layout", "stored"), [("nhwc", True), ("nchw", False)])
def test_a_1_x_1_filter_is_a_product_of_stored_matrices_with_channels_last(layout: str, stored: bool) -> None:
    assert wgrad(layout=layout, r=1, s=1).pointwise is stored
    assert not wgrad(layout=layout, r=1, s=1, stride=2).pointwise


# ---- rules, levels and costs

# 1024 threads, of which none has more than 64 registers.
CROWDED = {**MANY_THREADS, "tile_m": 128, "tile_n": 64, "warp_m": 4, "fragments": 2}
NARROW = {"warps_m": 1, "warps_n": 1, "tile_n": 32}
SEARCHES = declare.Searches(
    public=shapes_of(NAME),
    nested=[HALF, {**HALF, "c": 1}, DEPTHWISE, {**HALF, "dtype": "float32"}],
    tried=[
        ({**fields, "layout": layout}, expected)
        for layout in LAYOUTS
        for fields, expected in (
            (HALF, {"implicit_gemm"}),
            ({**HALF, "c": 8}, {"implicit_gemm"}),
            ({**HALF, "groups": 16}, {"implicit_gemm"}),
            (DEPTHWISE, {"direct"}),
            ({**DEPTHWISE, "k": 256}, {"implicit_gemm", "direct"}),
            ({**HALF, "c": 1}, {"implicit_gemm", "direct"}),
        )
    ],
    begun=convolutions.begun(
        NAME,
        [(3, 64, 1, 7, 1), (64, 64, 1, 3, 1), (64, 256, 1, 1, 1), (32, 32, 32, 3, 1), (24, 36, 12, 3, 1),
         (12, 36, 12, 5, 1), (5, 7, 1, 2, 1)],
        lambda c, k, groups: c // groups == 1,
    ),
    accepted=[
        (HALF, TENSOR),
        (HALF, {**TENSOR, **WORKSPACE, "split_k": 16}),
        (DEPTHWISE, ALONE),
        (DEPTHWISE, SLICED),
        # With a limit, a thread has fewer registers than the compiler would give it.
        (TF32, {**TENSOR, "tile_k": 16, "mma_k": 8, "maxnreg": 128}),
        # A pointwise image is reached with 64 bits.
        ({**HALF, **POINT, "n": 2**15}, TENSOR),
    ],
    rejected=[
        Rejection(fields, {**schedule, **changes}, rule, said)
        for fields, schedule, changes, rule, said in (
            (DEPTHWISE, TENSOR, {}, "algorithm", "128 products with one row each are mostly padding"),
            ({**HALF, "dtype": "float32"}, CROWDED, {}, "registers",
             "about 75 registers per thread with the gather; 64 are"),
            (HALF, ALONE, {}, "algorithm", "filters of one channel; those of this problem have 128"),
            (HALF, TENSOR, {**WORKSPACE, "split_k": 256}, "split_k", "256 slices of 196 steps (k = 6272, tile_k"),
            (HALF, TENSOR, {**WORKSPACE, "split_k": 64}, "split_k", "36 tiles in 64 slices; sm_90a has enough"),
            (HALF, TENSOR, {**WORKSPACE, "split_k": 1}, "split", "1 slice repeats split = none"),
            (DEPTHWISE, SLICED, {"split_k": 1000}, "split_k", "1000 slices of 392 steps"),
            ({**HALF, "c": 3}, BY_ELEMENT, NARROW, "registers", ""),
            ({**HALF, "c": 3}, BY_ELEMENT, {"tile_n": 256}, "gather", "128 threads for 256 vectors of taps"),
            ({**TURNED, "h": 27, "w": 27}, BY_ELEMENT, {**NARROW, "tile_k": 64}, "gather",
             "32 threads for 64 vectors of dy's pixels"),
            (TURNED, TENSOR, {}, "copy", "copies at least 4 bytes; an operand is aligned to 2"),
            ({**HALF, "n": 2**15}, TENSOR, {}, "index", "3774873600 elements with their padding; 32 bits reach"),
            ({**DEPTHWISE, "n": 2**15}, ALONE, {}, "index", "3774873600 elements"),
            ({"n": 1, "h": 1, "w": 2**29, "c": 1, "k": 1, "r": 1, "s": 3}, ALONE, {"filters": 1, "threads_k": 1},
             "index", "an axis of the image has 536870912 elements with its padding; 268435456 are counted"),
            ({**HALF, "c": 16, "groups": 16, "k": 96}, ALONE, {}, "filters", "would be of several groups of 6"),
            ({**DEPTHWISE, "c": 2, "k": 2, "groups": 2}, ALONE, {}, "filters",
             "filters = 4 is mostly padding for k = 2"),
            (DEPTHWISE, ALONE, {"threads_k": 64, "filters": 8}, "threads_k",
             "blocks of 512 filters are mostly padding"),
            (DEPTHWISE, ALONE, {"elements": 10}, "elements", "elements = 10 of filters that have 9"),
            ({**DEPTHWISE, "n": 1, "h": 1, "w": 1}, ALONE, {"threads": 128}, "threads", "32 threads along 1 pixels"),
        )
    ],
    capped=[
        (HALF, {**TENSOR, **WORKSPACE, "split_k": 4}, 4 * 4 * 128 * 9 * 128),
        (HALF, {**TENSOR, "split": "atomic", "split_k": 4}, 4 * 128 * 9 * 128),
        (DEPTHWISE, {**SLICED, "split_k": 10}, 4 * 10 * 128 * 12),  # rows of 9 elements are 3 whole vectors
    ],
    meaningless=[
        ({**HALF, "c": 1}, search, field, said)
        for search, field, said in (
            ({"tunables": {"split_k": [0]}}, "search.tunables.split_k",
             "split_k = 0 is not allowed; allowed: 1 to 1024"),
            ({"tunables": {"split_k": [1025]}}, "search.tunables.split_k", "split_k = 1025 is not allowed"),
            ({"tunables": {"elements": [26]}}, "search.tunables.elements",
             "elements = 26 is not allowed; allowed: 1 to 25"),
            ({"tunables": {"algorithm": ["fft"]}}, "search.tunables.algorithm", "allowed: implicit_gemm, direct"),
            ({"tunables": {"elements": [2], "tile_m": [64]}}, "search.tunables", "elements, tile_m leave nothing"),
            ({"schedules": [{**SLICED, "tile_m": 64}]}, "search.schedules.0.tile_m", "unknown tunable 'tile_m'"),
            ({"schedules": [{"algorithm": "direct", "elements": 26}]}, "search.schedules.0.elements",
             "elements = 26 is not allowed"),
        )
    ],
)  # fmt: skip


@pytest.mark.parametrize("shape", shapes_of(NAME), ids=lambda shape: shape["name"])
def test_the_first_schedule_of_a_public_gradient_fills_the_device(shape: Fields) -> None:
    asked = OP.parse({name: value for name, value in shape.items() if name != "name"})
    assert isinstance(asked, Conv2dWgradProblem)
    (first,) = lower(asked, SM_90A, Search(level=0)).candidates
    t, blocks = first.schedule.as_dict(), OP.work(asked, first.schedule, SM_90A).blocks
    steps = k_steps(asked.pixels, int(t.get("tile_k", 32))) // int(t["split_k"])
    assert blocks >= 0.9 * SM_90A.sm_count or steps < 6, (blocks, steps, first.schedule)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("fields", [POINT, {}, {"groups": 64}])
@pytest.mark.parametrize("level", [1, 2])
def test_levels_try_every_usual_split(level: int, fields: Fields, dtype: str) -> None:
    problem = wgrad(**{"n": 32, "h": 56, "w": 56, "c": 64, "k": 64, "padding": 1, **fields, "dtype": dtype})
    for part in OP.space(problem, SM_90A, Search(level=level)).parts:
        assert {1, 4, 8, 16, 32, 64} <= set(part.tunables["split_k"])
    lowered = lower(problem, SM_90A, Search(tunables={"split_k": [1, 4, 8, 16, 32, 64]}))
    assert {candidate.schedule.get("split_k") for candidate in lowered.candidates} >= {1, 4, 8, 16}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_single_tile_gets_as_many_slices_as_fill_the_device(dtype: str) -> None:
    first = level_0(n=256, h=112, w=112, c=16, k=16, **POINT, dtype=dtype)
    assert int(first.schedule.get("split_k")) > 64
    assert OP.work(first.problem, first.schedule, SM_90A).blocks >= SM_90A.sm_count


@pytest.mark.parametrize("slices", [[3, 5], [7, 100], [1000]])
@pytest.mark.parametrize(("algorithm", "groups"), [("implicit_gemm", 1), ("direct", 16)])
def test_any_list_of_slices_is_tried(algorithm: str, groups: int, slices: list[int]) -> None:
    search = Search(tunables={"split_k": list(slices), "algorithm": [algorithm]})
    lowered = lower(wgrad(**{**HALF, "n": 512, "c": 16, "k": 16, **POINT, "groups": groups}), SM_90A, search)
    assert {candidate.schedule.get("split_k") for candidate in lowered.candidates} == set(slices)


def test_without_workspace_sums_are_not_divided() -> None:
    lowered = lower(wgrad(**HALF), SM_90A, LEVEL_1, workspace_limit=0)
    assert {candidate.schedule.get("split") for candidate in lowered.candidates} == {"none"}
    assert "the limit is 0" in lowered.rejections["workspace"].message


def test_cost_counts_every_operand_once() -> None:
    cost = OP.cost(wgrad(**HALF, out_dtype="float32"), Schedule.of({**TENSOR, **WORKSPACE, "split_k": 4}))
    outputs, pixels = 128 * 9 * 128, 8 * 28 * 28
    assert cost.flops == 2 * outputs * pixels
    assert cost.bytes_read == 2 * (pixels * 128 + pixels * 128)
    assert (cost.bytes_written, cost.launches, cost.workspace_bytes) == (4 * outputs, 2, 4 * 4 * outputs)


@pytest.mark.parametrize(("fields", "schedule"), [({}, BY_ELEMENT), ({"groups": 128}, ALONE)])
def test_pixels_that_no_window_meets_cost_nothing(fields: Fields, schedule: Fields) -> None:
    gradient, image = 2 * 8 * 14 * 14 * 128, 2 * 8 * 28 * 28 * 128
    for layout, seen in (("nhwc", image // 4), ("nchw", image // 2)):
        problem, tested = wgrad(**{**HALF, **POINT, "stride": 2, **fields}, layout=layout), Schedule.of(schedule)
        least = OP.cost(problem, tested)
        assert least.bytes_read == gradient + seen
        assert OP.work(problem, tested, SM_90A).dram_bytes == least.bytes_read + least.bytes_written


def test_the_launch_that_adds_up_slices_of_direct_sums_writes_no_more_than_the_gradient() -> None:
    problem, sliced = wgrad(**DEPTHWISE), Schedule.of(SLICED)
    work, least = OP.work(problem, sliced, SM_90A), OP.cost(problem, sliced)
    (reduce,) = work.others
    assert reduce.dram_bytes == least.bytes_written
    assert work.dram_bytes == least.bytes_read


def test_work_asks_the_dram_for_the_image_once_and_the_l2_for_every_tap() -> None:
    problem, schedule = wgrad(**HALF), Schedule.of(TENSOR)
    work, least = OP.work(problem, schedule, SM_90A), OP.cost(problem, schedule)
    assert work.dram_bytes == least.bytes_read + least.bytes_written
    assert work.l2_bytes > 9 * 2 * problem.n * problem.h * problem.w * problem.c
    assert work.blocks == 2 * 9 * 128 // 64


def test_slices_make_a_predicted_time_shorter_where_tiles_are_few() -> None:
    problem = wgrad(n=64, h=56, w=56, c=64, k=64, padding=1, dtype="float16")
    (best,) = lower(problem, SM_90A, Search(level=1, keep=1)).candidates
    assert int(best.schedule.get("split_k")) > 1


def test_most_candidates_of_level_1_share_kernels() -> None:
    candidates = lower(wgrad(**HALF), SM_90A, LEVEL_1).candidates
    counts = Counter(candidate.kernel for candidate in candidates)
    assert len(candidates) >= 1.5 * len(counts), "slices are chosen at launch"


# ---- kernels on the CPU


def verified() -> dict[str, Kernel]:
    by_name: dict[str, Kernel] = {}
    for layout, dtype in product(LAYOUTS, ("float16", "bfloat16", "float32")):
        words = {"layout": layout, "dtype": dtype}
        # 2-byte elements that are gathered one by one are too narrow for cp.async.
        copy = REGISTERS if layout == "nchw" and dtype != "float32" else {}
        by_name[f"tensor {layout} {dtype}"] = OF.tensor({**words, "epilogue": ("bias", "relu", "residual")}, **copy)
        by_name[f"direct {layout} {dtype}"] = OF.direct({**words, "align": (4, 1, 1)}, filters=2)
        if dtype == "bfloat16":  # has a conversion and an mma of its own, which these two call
            continue
        by_name[f"tensor {layout} {dtype}, 1 element"] = OF.tensor(
            {**words, "align": (1, 1, 1)}, **REGISTERS, epilogue_path="shared"
        )
        by_name[f"tensor {layout} {dtype}, fp32 out"] = OF.tensor(
            {**words, "out_dtype": "float32"}, **copy, **WORKSPACE, epilogue_path="shared"
        )
        align = (4, 4 if layout == "nhwc" else 1, 1)
        by_name[f"direct {layout} {dtype}, depthwise"] = OF.direct(
            {**words, "align": align, "depthwise": True, "epilogue": ("bias", "clip")}, **WORKSPACE
        )
    for dtype in ("float16", "bfloat16", "float32"):
        by_name[f"tensor {dtype}, 1 x 1"] = OF.tensor({"dtype": dtype, "pointwise": True}, **WIDE, **WORKSPACE)
    for split, copy in (("workspace", {}), ("atomic", REGISTERS), ("stream", {"stages": 3})):
        by_name[f"tensor nhwc, {split}"] = OF.tensor({"epilogue": ("bias",)}, split=split, **copy)
        words = {"layout": "nchw", "dtype": "float32", "epilogue": ("bias",)}
        by_name[f"tensor nchw, {split}"] = OF.tensor(words, split=split, **copy)
    for align in ((2, 2, 2), (8, 2, 4), (2, 4, 8), (8, 4, 4)):
        by_name[f"tensor nhwc {align}"] = OF.tensor({"align": align}, stages=3)
    for layout, width in product(LAYOUTS, (1, 4)):
        words = {"layout": layout, "align": (width, width if layout == "nhwc" else 1, width), "epilogue": ("residual",)}
        by_name[f"simt {layout} {width}"] = OF.simt(words, stages=2, fragments=2, padding=4)
        by_name[f"simt {layout} {width}, split"] = OF.simt(words, **WORKSPACE)
    alone = {"align": (4, 4, 1), "depthwise": True}
    by_name["simt, 1 x 1"] = OF.simt({"pointwise": True})
    by_name["direct, fp32 out of fp16"] = OF.direct(
        {"align": (8, 8, 1), "depthwise": True, "out_dtype": "float32"}, filters=8, elements=9, **WORKSPACE
    )
    by_name["direct, atomic"] = OF.direct({"align": (1, 1, 1)}, filters=1, split="atomic")
    by_name["direct, all threads along the filters"] = OF.direct(alone, threads_k=64)
    by_name["direct nchw, all threads along the pixels"] = OF.direct(FIRST, filters=1, threads_k=1, threads=256)
    by_name["direct nchw, few pixels of a warp"] = OF.direct(FIRST, filters=2, threads_k=16, threads=128)
    by_name["direct, 1 x 1"] = OF.direct(alone, elements=1)
    by_name["direct, gelu"] = OF.direct({"align": (8, 1, 1), "epilogue": ("bias", "gelu")}, filters=8, elements=25)
    return by_name


def sanitized() -> list[Kernel]:
    return [
        OF.tensor({"epilogue": ("bias", "gelu")}),
        OF.simt({**FIRST, "epilogue": ("bias", "mask")}, **WORKSPACE),
        OF.direct({"align": (4, 4, 1), "depthwise": True}, **WORKSPACE),
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_test_problems_have_every_geometry(layout: str) -> None:
    kernel = OF.tensor({"layout": layout}, copy="registers")
    problems = [problem for problem in OP.test_problems(kernel) if isinstance(problem, Conv2dWgradProblem)]
    assert any(max(problem.stride) > 1 for problem in problems)
    assert any(max(problem.dilation) > 1 for problem in problems)
    assert any(max(problem.corner) > 1 for problem in problems) and any(problem.n > 2 for problem in problems)
    assert any(problem.groups > 1 and max(problem.dilation) > 1 for problem in problems)
    step = int(kernel.tunables.get("tile_k"))
    assert any(problem.p * problem.q < step for problem in problems), "a step of several images"
    assert any(problem.q < step < problem.p * problem.q for problem in problems), "a step of several rows"


SPLIT: dict[str, Kernel] = {
    "tensor": OF.tensor({}, **WORKSPACE, epilogue_path="shared"),
    "simt": OF.simt({"layout": "nchw"}, **WORKSPACE),
    "direct": OF.direct({"align": (4, 4, 1), "depthwise": True}, **WORKSPACE),
    "direct, several filters of a channel": OF.direct(FIRST, filters=2, **WORKSPACE),
}


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    helpers, folder = cpu_helpers, tmp_path_factory.mktemp("split")
    build = build_cpu(list(SPLIT.values()), helpers.toolchain(), helpers.processes(), helpers.LIMITS, folder=folder)
    ((path, _),) = build.libraries
    return CpuLibrary(Path(path))


@pytest.mark.parametrize("slices", [1, 3, 1000])
@pytest.mark.parametrize("name", SPLIT)
def test_the_workspace_is_what_the_slices_write(name: str, slices: int, on_cpu: CpuLibrary) -> None:
    kernel = SPLIT[name]
    problem = OP.test_problems(kernel)[1]
    assert isinstance(problem, Conv2dWgradProblem)
    is_direct = kernel.tunables.get("algorithm") == "direct"
    assert isinstance(OP, ConvolutionOperator)
    as_product, _ = OP.divided(problem, kernel.tunables.as_dict())
    tile_k = 64 // int(kernel.tunables.get("threads_k")) if is_direct else int(kernel.tunables.get("tile_k"))
    used = min(slices, k_steps(problem.pixels, tile_k))  # none is empty
    launch = OP.launch_values(Schedule.of({**kernel.tunables.as_dict(), "split_k": slices}))
    try:
        tensors = on_cpu.allocate(OP.operands(problem))
        inputs = OP.make_inputs(problem, "integer", np.random.default_rng(1))
        for tensor in tensors:
            if tensor.operand.role == "in":
                tensor.fill(inputs[tensor.operand.name])
        workspace = on_cpu.workspace(kernel.namespace, OP.integers(problem), launch)
        assert workspace is not None
        rows, pitch = as_product.batch * as_product.m, workspace_pitch(as_product.n)
        assert workspace.nbytes == 4 * used * rows * pitch
        workspace[...] = POISON
        outcome = on_cpu.run(
            kernel.namespace, tensors, workspace, integers=OP.integers(problem), launch=launch,
            scalars=OP.scalars(problem), order="seeded", seed=1, exact=True, cpu_seconds=10.0,
        )  # fmt: skip
        assert (outcome.status, outcome.message) == ("ok", "")
        sums = workspace.view(np.uint32).reshape(used, rows, pitch)[:, :, : as_product.n]
        assert (sums != 0xFFFFFFFF).all(), "a sum that no slice wrote"
    finally:
        on_cpu.free()


CONFIGS: dict[str, tuple[str, Fields, Fields]] = {
    "simt nhwc": ("simt", {"epilogue": ("bias",)}, {"stages": 2}),
    "simt nchw, split": ("simt", {"layout": "nchw"}, WORKSPACE),
    "fp16 nhwc": ("tensor", {"epilogue": ("bias",)}, {"stages": 3, "tile_m": 64, "warps_m": 4}),
    "fp16 nhwc, 1 element": ("tensor", {"align": (1, 1, 1)}, {**REGISTERS, **WORKSPACE}),
    # More threads than vectors of the image.
    "fp16 nhwc, narrow": ("tensor", {}, {"tile_m": 128, "tile_n": 16, "warps_m": 8, "warps_n": 1}),
    "tf32 nchw": ("tensor", {"layout": "nchw", "dtype": "float32", "epilogue": ("bias",)}, {"stages": 3}),
    "bf16 nchw, stream-K": ("tensor", {"layout": "nchw", "dtype": "bfloat16"}, {**REGISTERS, "split": "stream"}),
    "direct nhwc": ("direct", {"align": (4, 1, 1), "epilogue": ("bias", "residual")}, {}),
    "direct nhwc, depthwise": ("direct", {"align": (4, 4, 1), "depthwise": True}, WORKSPACE),
    "direct nchw": ("direct", {**FIRST, "epilogue": ("bias",)}, {"filters": 2}),
    "direct nchw, depthwise": (
        "direct", {**FIRST, "depthwise": True}, {"threads_k": 1, "threads": 128, "filters": 2, **WORKSPACE}
    ),
}  # fmt: skip
GATHER, OF_DIRECT, LAUNCH, GEOMETRY = "gather.cuh", "direct.cuh", "kernel.cuh", "conv/launch.cuh"
CORNER_W, TAP_H = "q * arguments.stride_w - arguments.padding", "(channels_last ? third : second) * arguments.dilation"
END_W = "arguments.padding_w + arguments.walk.row_w"
BETWEEN = "arguments.between_images"
SHUFFLED = "sum += shuffle_xor(sum, apart * (C::channels_last ? C::threads_k : 1));"
ADDED = "total.data[0] += load_shared<1>(shared + r * C::tile_m + filter).data[0];"
MUTATIONS = declare.Mutations(
    kernels=lambda called: Kernels(NAME, called).made(CONFIGS),
    files=OP.files,
    counts={"barrier": 2},
    wrong={
        "rows above the image count": (GATHER, "h >= 0", "true"),
        "columns left of the image count": (GATHER, "w >= 0", "true"),
        "the padding behind for that before": (GEOMETRY, "as_distance(extents[top])", "as_distance(extents[bottom])"),
        "all images are the first": (
            GATHER, "unsigned(image) * arguments.image_pitch", "0u * arguments.image_pitch"
        ),
        "a row of pixels never ends": (GATHER, "w >= end_w", "false"),
        "an image of pixels never ends": (GATHER, "h >= end_h", "false"),
        "a row ends where the corner's does": (GATHER, f"tap.w - {END_W}", f"0 - {END_W}"),
        "no next row": (GATHER, "over_row ? walk.row_h : 0", "0"),
        "no next row in the image": (GATHER, "over_row ? walk.row_offset : 0", "0u"),
        "no next image": (GATHER, "over_image ? walk.image_offset : 0", "0u"),
        "whole rows of a step lost": (LAUNCH, "unsigned(rows % a.out_height) * a.stride_h", "0u * a.stride_h"),
        "whole images of a step lost": (LAUNCH, "unsigned(images) * a.image_pitch", "0u * a.image_pitch"),
        "dy's images follow each other": (
            GATHER, f"(arguments.step_images + over) * {BETWEEN}", f"0 * {BETWEEN}"
        ),
        "dy's image never ends": (GATHER, "within >= per_image", "false"),
        "dy of the first group": (GATHER, "tile.matrix * given.stride_a", "0 * given.stride_a"),
        "channels of the first group": (GATHER, "tile.matrix * given.stride_b", "0 * given.stride_b"),
        "the bias of the first group": (GATHER, "matrix * m + row", "row"),
        "direct: channels of the first group": (OF_DIRECT, "known / (arguments.filters / arguments.groups)", "0"),
        "a depthwise filter sees its neighbour's channel": (OF_DIRECT, "j * arguments.channel_pitch", "0"),
        "a row of the filter never ends": (OF_DIRECT, "s + 1 == arguments.filter_width", "false"),
        "one lane's sums for all of its warp's": (OF_DIRECT, SHUFFLED, "sum += 0.0f;"),
        "the sums of the first warps alone": (OF_DIRECT, ADDED, "total.data[0] += 0.0f;"),
        "a slice goes on to the last pixel": (OF_DIRECT, "pixel < share.end", "pixel < arguments.k"),
    },
)  # fmt: skip
SPREAD = {
    **convolutions.SPREAD, "float32 of halves": 3, "algorithm direct": 8, "split none": 10, "split workspace": 8,
    "split atomic": 4, "direct in slices": 2, "pointwise": 3, "align_dy 1": 8, "align_dy 8": 3, "align_x 1": 25,
    "align_x 8": 1, "align_dw 1": 8, "align_dw 8": 1,
}  # fmt: skip

# ---- winners


def compiled() -> dict[str, Kernel]:
    return {
        **convolutions.gathered_beside_stored(NAME, {**HALF, "out_dtype": "float32"}),
        "tf32 3x3": level_0(**TF32).kernel,
        "fp16 1x1": level_0(**{**HALF, **POINT}).kernel,
        "fp16 stem": level_0(**STEM).kernel,
        "fp16 nchw": level_0(**TURNED).kernel,
        "fp32 3x3": level_0(**{**HALF, "dtype": "float32"}).kernel,
        "fp16 depthwise": level_0(**DEPTHWISE).kernel,
    }


def test_a_gather_has_no_branches_of_its_own(codes: dict[str, Codes]) -> None:
    convolutions.require_no_branches(codes[NAME])


CHANGES: list[dict[str, Any]] = [{"stride": 2}, POINT, {"groups": 128}, {"layout": "nchw", "groups": 4}]


def planned(change: Fields) -> list[Candidate]:
    """Of each algorithm and division of sums one."""
    problem = wgrad(**{**HALF, "n": 2, **change})
    candidates = lower(problem, SM_90A, Search(tunables={"split_k": [1, 3]})).candidates
    chosen = {
        (candidate.schedule.get("algorithm"), candidate.schedule.get("split")): candidate for candidate in candidates
    }
    assert {"none", "workspace"} <= {str(split) for _, split in chosen}
    return [candidate for (_, split), candidate in chosen.items() if split != "atomic"]


def large(images: int) -> Candidate:
    problem = wgrad(n=images, h=128, w=128, c=4, k=8, groups=4, r=1, s=1, dtype="float16")
    assert problem.pointwise and not problem.depthwise
    return OP.candidate(problem, Schedule.of({**DIRECT, "threads_k": 2, "elements": 1, "filters": 2}))


DO_NOT_FIT = "stride and padding) do not fit the tensors"
CALLS = {
    "winner": declare.Library(
        candidate=lambda: level_0(padding=1, dtype="float16", out_dtype="float32"),
        record={
            "operands": ["dy", "x", "dw"],
            "extents": {**SIZES, "p": 12, "q": 10, "groups": 1},
            "attributes": [1, 1, 1, 1, 1, 1, 1, 1],
            "scalars": [],
        },
        refused={
            "a tensor less": ({"dw": None, "numbers": ()}, "TypeError",
                              "2 tensors were given; this kernel takes 3: dy, x, 0 of the epilogue and dw"),
            "dtype": ({"dy": "T((2, 12, 10, 24))"}, "TypeError", "dy is float32; float16 is allowed"),
            "dtype of dw": ({"dw": "H(24, 3, 3, 16)"}, "TypeError", "dw is float16; float32 is allowed"),
            "channels": ({"x": "H(2, 12, 10, 24)"}, "ValueError", "x has 24 channels and dw 16"),
            "filters": ({"dy": "H(2, 12, 10, 32)"}, "ValueError", "k differs between dw and dy"),
            "strides": ({"x": "H(2, 12, 10, 16, strides=(2000, 160, 16, 1))"}, "ValueError",
                        "x has stride 2000 along axis 0; it must be packed (stride 1920)"),
            "vectors": ({"dy": "H(2, 12, 10, 12)", "dw": f"F(12, 3, 3, 16, {OUT})"}, "ValueError",
                        "k / groups is 12; this kernel moves 8 elements at once"),
            "overlap": ({"x": f"H(2, 12, 10, 16, {OUT})"}, "ValueError", "dw overlaps x"),
            "device": ({"x": "H(2, 12, 10, 16, device=1)"}, "ValueError", "x is on cuda:1, but dy is on cuda:0"),
            "padding behind": ({5: 2}, "ValueError", DO_NOT_FIT),
            "another geometry": ({0: 2}, "ValueError", DO_NOT_FIT),
        },
    )
}  # fmt: skip
OF_JOB: Fields = {"n": 8, "h": 14, "w": 14, "c": 64, "k": 64, "r": 3, "s": 3, "padding": 1, "dtype": "float16"}

DECLARED = (
    declare.Declarations(
        operator=NAME,
        problem=SIZES,
        problems=PROBLEMS,
        searches=SEARCHES,
        references=convolutions.references(
            epilogue=[{"op": "bias"}, {"op": "relu"}, {"op": "residual"}],
            device_epilogue=[{"op": "bias"}, {"op": "gelu"}, {"op": "residual"}, {"op": "mask"}],
            bounded={"c": 12, "k": 6},
        ),
        verifications=declare.Verifications(kernels=verified, sanitized=sanitized),
        mutations=MUTATIONS,
        random_cases=convolutions.random_cases(NAME, SPREAD),
        machine_code=declare.MachineCode(
            kernels=compiled,
            compared=convolutions.COMPARED,
            claims={
                # Words of 4 bytes are not turned by ldmatrix.
                "fp16 3x3": claim.ALIGNED,
                "tf32 3x3": (claim.by_tensor_cores, claim.without_ldmatrix, claim.copies_16_bytes),
                "fp16 1x1": claim.ALIGNED,
                "fp16 stem": (claim.by_tensor_cores,),
                "fp16 nchw": (claim.by_tensor_cores,),
                "fp32 3x3": (claim.on_cuda_cores,),
                "fp16 depthwise": (claim.on_cuda_cores, claim.loads_16_bytes),
            },
        ),
        launches=declare.Launches(
            planned={str(change): partial(planned, change) for change in CHANGES},
            # 32 bits reach the smaller image alone.
            counted={f"{images} images": (partial(large, images), count) for images, count in ((4096, 1), (32768, 0))},
        ),
        calls=CALLS,
        job=declare.Job(
            problems={"fp16": {**OF_JOB, "out_dtype": "float32"},
                      "depthwise nchw": {**OF_JOB, "layout": "nchw", "groups": 64}},
            failing=[
                ({"n": 65536, "h": 128, "w": 128, "c": 8, "k": 8, "r": 3, "s": 3, "dtype": "float16"}, {"level": 0},
                 {"index": 1}, ""),
                (OF_JOB, {"tunables": {"split": ["workspace"], "split_k": [4]}, "workspace_limit_bytes": 1000},
                 {"workspace": None}, "bytes of workspace, the limit is 1000"),
            ],
        ),
    ),
)  # fmt: skip
add_checks(globals())


def test_filters_of_which_the_gradients_would_be_too_many_make_no_problem() -> None:
    """Two pixels take 2^30 filters for offsets beyond 32 bits: of 400 channels those have 2.6e12 gradients."""
    own = operator("conv2d_wgrad")
    assert isinstance(own, ConvolutionOperator)
    fields = {"n": 1, "h": 3, "w": 3, "c": 400, "k": 8, "r": 2, "s": 3}
    problem = own.own(own.parse({"operator": "conv2d_wgrad", **fields}))
    assert isinstance(problem, Conv2dWgradProblem)
    tunables = {"tile_m": 16, "tile_n": 16, "tile_k": 16, "split": "none", "split_k": 1, "raster": 0}
    assert (problem.pixels, last_filters([problem], tunables, own.product, 1)) == (2, [])
    assert indexable(type(problem), problem.canonical()) == problem
    with pytest.raises(ValidationError):
        indexable(type(problem), {**problem.canonical(), "r": 0})
