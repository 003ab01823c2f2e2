"""Convolutions forward, and the text that all three share (`codegen/device/conv/`)."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest

from benchmarks.shapes import shapes_of
from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operator import CONV
from codegen.operators import operator
from codegen.operators.conv2d import Conv2dProblem
from codegen.operators.convolution import direct
from codegen.operators.matmul import tensor
from codegen.problem import LARGEST_ELEMENTS, LARGEST_EXTENT
from codegen.search.rules import ACCEPTED, Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from tests.operators.conv2d import convolutions
from tests.operators.conv2d.convolutions import (
    BY_ELEMENT,
    DEPTHWISE,
    DO_NOT_FIT,
    HALF,
    LAYOUTS,
    OUT,
    POINT,
    REGISTERS,
    SPREAD_OF_IMAGES,
    STEM,
    TF32,
    WIDE,
)
from tests.operators.conv2d.kernels import DIRECT, SIZES, Kernels, conv2d
from tests.operators.harness import declarations as declare
from tests.operators.harness import machine_code as claim
from tests.operators.harness.checks import add_checks
from tests.operators.harness.declarations import LEVEL_0, LEVEL_1, SM_90A, Fields, Rejection
from tests.operators.harness.machine_code import Code, Codes

NAME = "conv2d"
OP, OF = operator(NAME), Kernels(NAME)
FUSED = {"epilogue": "fused"}
SEPARATE = {"epilogue": "separate"}
TENSOR, ELEMENTS, ALONE = ({**schedule, **FUSED} for schedule in (convolutions.TENSOR, BY_ELEMENT, DIRECT))
level_0 = partial(convolutions.level_0, NAME)

# ---- problems

PROBLEMS = convolutions.problems(
    NAME,
    refused=[
        ({"n": 2**20, "h": 50, "w": 50}, "padding", f"output pixels (n p q); at most {LARGEST_EXTENT} can be indexed"),
        ({"c": 2**29, "k": 1}, "padding", "4831838208 products in a sum (r s c / groups)"),
        ({"n": 2**20, "c": 2**12, "k": 2**12, "groups": 2**12, "h": 3, "w": 3}, "padding", "groups of all images"),
        ({"n": 2**21, "c": 2**20}, "padding", f"x would span 263882790666240 elements; at most {LARGEST_ELEMENTS}"),
        ({"epilogue": [{"op": "bias", "axis": "n"}]}, "epilogue.0.bias.axis", "'k'"),
    ],
    alike=[({"epilogue": [{"op": "bias"}]}, {"epilogue": [{"op": "bias", "axis": "k"}]})],
    aligned=[
        ({}, (4, 4, 4)),
        ({"dtype": "float16"}, (8, 8, 8)),
        ({"c": 3, "dtype": "float16"}, (1, 1, 8)),
        ({"c": 4, "k": 6, "dtype": "float16"}, (4, 4, 2)),
        ({"c": 4, "s": 2, "dtype": "float16"}, (4, 8, 8)),
        ({"groups": 8, "dtype": "float16"}, (2, 2, 1)),
        ({"c": 24, "groups": 24, "dtype": "float16"}, (8, 1, 8)),  # neighbouring channels, each with its own filter
        ({"layout": "nchw", "dtype": "float16"}, (1, 8, 8)),
        ({"layout": "nchw", "r": 1, "s": 1, "dtype": "float16"}, (8, 8, 8)),
        ({"layout": "nchw", "r": 1, "s": 1, "h": 5, "w": 5, "dtype": "float16"}, (1, 8, 1)),
    ],
    operands=[
        (
            {"layout": layout, "groups": 4, "epilogue": [{"op": "residual"}, {"op": "bias"}, {"op": "mask"}]},
            [("x", "float32", "in", x), ("w", "float32", "in", w), ("residual", "float32", "in", out),
             ("bias", "float32", "in", (24,)), ("mask", "uint8", "in", out), ("out", "float32", "out", out)],
        )
        for layout, x, w, out in (
            ("nhwc", (2, 12, 10, 16), (24, 3, 3, 4), (2, 10, 8, 24)),
            ("nchw", (2, 16, 12, 10), (24, 4, 3, 3), (2, 24, 10, 8)),
        )
    ],
    unspecialised=[
        (
            {"epilogue": [{"op": "bias"}, {"op": "clip", "lo": 0.0, "hi": 6.0}]},
            {"n": 5, "h": 40, "c": 32, "k": 8, "stride": 2, "padding": 1, "dilation": 2,
             "epilogue": [{"op": "bias"}, {"op": "clip", "lo": -1.0, "hi": 1.0}]},
            [2, 2, 1, 1, 1, 1, 2, 2, -1.0, 1.0],
        )
    ],
)  # fmt: skip


def test_a_bias_is_that_of_the_axis_of_the_filters() -> None:
    nodes = [{"op": "bias"}, {"op": "clip", "lo": 0.0, "hi": 6.0}]
    assert OP.signature(conv2d(epilogue=nodes))["epilogue"] == ("bias.n", "clip")
    assert OP.signature(conv2d(layout="nchw", epilogue=nodes[:1]))["epilogue"] == ("bias.m",)


def test_paddings_of_both_sides_count() -> None:
    assert len({conv2d(padding=[[0, 1], sides]).digest for sides in (0, [0, 1], [1, 0], 1)}) == 4


@pytest.mark.parametrize(
    ("fields", "out"),
    [
        ({}, (10, 8)),
        ({"padding": 1}, (12, 10)),
        ({"padding": [2, 0], "stride": [2, 3]}, (7, 3)),
        ({"padding": [[0, 1], [2, 0]]}, (11, 10)),
        ({"padding": [[0, 1], [0, 1]], "stride": 2}, (6, 5)),
        ({"dilation": [2, 4]}, (8, 2)),
        ({"h": 7, "w": 8, "stride": 3}, (2, 2)),  # an element of w is left over, none of h
        ({"r": 12, "s": 10}, (1, 1)),
        ({"r": 1, "s": 1, "padding": 3}, (18, 16)),
    ],
)
def test_the_output_has_as_many_pixels_as_windows_fit(fields: Fields, out: tuple[int, int]) -> None:
    problem = conv2d(**fields)
    assert (problem.p, problem.q) == out
    assert [operand.shape for operand in OP.operands(problem) if operand.role == "out"] == [(2, *out, 24)]


# ---- rules, levels and costs

TURNED = {**HALF, "layout": "nchw"}
SEARCHES = declare.Searches(
    public=shapes_of(NAME),
    nested=[HALF, {**HALF, "c": 4}, DEPTHWISE],
    tried=[
        ({**fields, "layout": layout}, expected)
        for layout in LAYOUTS
        for fields, expected in (
            (HALF, {"implicit_gemm"}),
            ({**HALF, "c": 8}, {"implicit_gemm", "direct"}),
            ({**HALF, "groups": 16}, {"implicit_gemm", "direct"}),
            (DEPTHWISE, {"direct"}),
            ({**DEPTHWISE, "k": 256}, {"implicit_gemm", "direct"}),
        )
    ],
    begun=convolutions.begun(
        NAME,
        [(3, 64, 1, 7, 1), (64, 64, 1, 3, 1), (64, 256, 1, 1, 1), (32, 32, 32, 3, 1), (24, 36, 12, 3, 1),
         (5, 7, 1, 2, 1)],
        lambda c, k, groups: c <= 8,
    ),
    accepted=[
        (HALF, TENSOR),
        (DEPTHWISE, ALONE),
        # With a limit, a thread has fewer registers than the compiler would give it.
        (HALF, {**TENSOR, "tile_n": 128, "fragments": 1, "maxnreg": 128}),
        # A pointwise image is reached with 64 bits.
        ({**HALF, **POINT, "n": 2**15}, TENSOR),
    ],
    rejected=[
        Rejection(fields, {**schedule, **changes}, rule, said)
        for fields, schedule, changes, rule, said in (
            (DEPTHWISE, TENSOR, {}, "algorithm", "128 products with one column each are mostly padding"),
            ({**HALF, "c": 8}, TENSOR, {"tile_k": 64, "stages": 4}, "stages", "4 stages for 2 steps"),
            ({**HALF, "c": 3}, ELEMENTS, {"warps_m": 1, "warps_n": 1, "tile_k": 64}, "gather", "32 threads for 64"),
            (TURNED, ELEMENTS, {"tile_n": 256}, "gather", "128 threads for 256 pixels and 32 taps"),
            (TURNED, TENSOR, {}, "copy", "copies at least 4 bytes; an operand is aligned to 2"),
            ({**HALF, "n": 2**15}, TENSOR, {}, "index", "3774873600 elements with its padding; 32 bits reach"),
            ({**DEPTHWISE, "n": 2**15}, ALONE, {}, "index", "3774873600 elements"),
            ({**HALF, "groups": 16, "k": 96}, ALONE, {}, "filters", "would be of several groups of 6"),
            ({**DEPTHWISE, "c": 2, "k": 2, "groups": 2}, ALONE, {}, "filters",
             "filters = 4 is mostly padding for k = 2"),
            (DEPTHWISE, ALONE, {"threads_k": 64, "filters": 8}, "threads_k",
             "blocks of 512 filters are mostly padding"),
            (DEPTHWISE, ALONE, {"taps": 64}, "taps", "taps = 64 is mostly padding for 9"),
            ({**DEPTHWISE, "n": 1, "h": 3, "w": 3}, ALONE, {"pixels": 8}, "pixels", "blocks of 128 pixels are mostly"),
            (DEPTHWISE, ALONE, {"window": 5}, "window", "with filters of 5 columns, stride_w = 1 and dilation_w"),
            (DEPTHWISE, ALONE, {"window": 5}, "window", "is depthwise, in nhwc, with 3 columns, stride_w = 1"),
            ({**DEPTHWISE, "k": 256}, ALONE, {"window": 3}, "window", "this one is not depthwise"),
            ({**DEPTHWISE, "layout": "nchw"}, ALONE, {"window": 3}, "window", "in nchw"),
            ({**DEPTHWISE, "stride": [1, 2]}, ALONE, {"window": 3}, "window", "stride_w = 2"),
            ({**DEPTHWISE, "dilation": [1, 3]}, ALONE, {"window": 3}, "window", "dilation_w = 3"),
            ({**DEPTHWISE, "w": 2}, ALONE, {"window": 3, "pixels": 4}, "pixels", "4 neighbouring pixels are mostly"),
            ({**DEPTHWISE, "n": 64}, ALONE, {"window": 3, "pixels": 8, "filters": 8, "threads": 512},
             "registers", "512 threads of about 158"),
        )
    ],
    capped=[
        ({**HALF, "n": 1}, {**TENSOR, "split": "workspace", "split_k": 4}, 4 * 4 * 28 * 28 * 128),
        ({**HALF, "epilogue": [{"op": "bias"}, {"op": "relu"}]}, {**TENSOR, **SEPARATE}, 4 * 8 * 28 * 28 * 128),
    ],
    meaningless=[
        ({**HALF, "c": 4}, search, field, said)
        for search, field, said in (
            ({"tunables": {"warp_m": [4]}}, "search.tunables.warp_m", "unknown tunable 'warp_m'"),
            ({"tunables": {"pixels": [3]}}, "search.tunables.pixels",
             "pixels = 3 is not allowed; allowed: 1, 2, 4, 8"),
            ({"tunables": {"algorithm": ["fft"]}}, "search.tunables.algorithm", "allowed: implicit_gemm, direct"),
            ({"tunables": {"pixels": [2], "tile_m": [64]}}, "search.tunables", "pixels, tile_m leave nothing"),
            ({"schedules": [TENSOR, {"pixels": 2}]}, "search.schedules.1.pixels", "unknown tunable 'pixels'"),
            ({"schedules": [{"algorithm": "fft"}]}, "search.schedules.0.algorithm", "'fft' is not allowed"),
            ({"schedules": [{**DIRECT, "tile_m": 64}]}, "search.schedules.0.tile_m", "unknown tunable 'tile_m'"),
            ({"schedules": [{"algorithm": "direct", "taps": 8}]}, "search.schedules.0.taps", "taps = 8 is not allowed"),
        )
    ],
)  # fmt: skip
MOBILENET = [shape for shape in shapes_of(NAME) if shape["name"].startswith("mobilenet")]


def check_output(fields: Fields, schedule: Fields, **changes: Any) -> object:
    return OP.rules(conv2d(**fields), Schedule.of({**schedule, **changes}), SM_90A)


def test_level_1_of_a_large_layer_has_the_warps_that_read_least() -> None:
    """64 x 64 outputs: what the gather needs beside them fits, too."""
    candidates = lower(conv2d(**{**HALF, "n": 256, "c": 256, "k": 256}), SM_90A, LEVEL_1).candidates
    warps = {tensor.warp_tile(candidate.schedule.as_dict()) for candidate in candidates}
    assert max(rows * columns for rows, columns in warps) == 64 * 64


@pytest.mark.parametrize("problem", MOBILENET, ids=lambda problem: problem["name"])
def test_depthwise_blocks_of_public_layers_have_no_idle_threads(problem: Fields) -> None:
    asked = OP.parse({name: value for name, value in problem.items() if name != "name"})
    assert isinstance(asked, Conv2dProblem)
    (candidate,) = lower(asked, SM_90A, LEVEL_0).candidates
    across = direct.block(candidate.schedule.as_dict())[1]
    assert asked.k % across == 0
    assert across * 2 >= 64, "bytes of neighbouring threads that lie together"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("problem", MOBILENET, ids=lambda problem: problem["name"])
def test_public_depthwise_layers_have_neighbours_where_the_stride_is_1(problem: Fields, dtype: str) -> None:
    fields = {name: value for name, value in problem.items() if name != "name"}
    asked = OP.parse({**fields, "dtype": dtype, "out_dtype": dtype})
    zero, one = (lower(asked, SM_90A, level).candidates for level in (LEVEL_0, LEVEL_1))
    wanted = {0, 3} if problem["stride"] == [1, 1] else {0}
    assert {candidate.schedule.get("window") for candidate in one} == wanted
    assert zero[0].schedule.get("window") == max(wanted)
    assert len(one) <= 16


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"r": 2, "s": 7, "stride": [3, 1], "dilation": [2, 1], "padding": [0, 5]}, 7),
        ({"s": 5}, 5),
        ({"s": 4}, 0),
        ({"stride": [1, 2]}, 0),
        ({"dilation": [1, 2]}, 0),
        ({"layout": "nchw"}, 0),
        ({"k": 256}, 0),
    ],
)
def test_a_window_is_tried_where_a_problem_can_have_it(changes: Fields, window: int) -> None:
    problem = conv2d(**{**DEPTHWISE, **changes})
    assert direct.window_of(problem) == window
    for level in (1, 2):
        parts = OP.space(problem, SM_90A, Search(level=level)).parts
        assert {value for part in parts for value in part.tunables.get("window", ())} == {0, window}
    assert check_output({**DEPTHWISE, **changes}, DIRECT, window=window, filters=2) == ACCEPTED


def test_a_window_is_predicted_to_issue_about_half_of_the_instructions() -> None:
    """As compiled for sm_90a: 205 for a row of the filter, where three taps apart are 393."""
    problem, wide = conv2d(**DEPTHWISE), {**DIRECT, "filters": 8, "pixels": 4}
    counts = []
    for window in (0, 3):
        work = OP.work(problem, Schedule.of({**wide, "window": window}), SM_90A)
        counts.append((work.fma + work.other_instructions) / (work.blocks * work.threads * 3))
    assert counts == pytest.approx([393, 205], rel=0.03)


def test_a_thread_has_no_more_channels_than_one_access() -> None:
    for channels, most in ((33, 1), (34, 2), (36, 4), (40, 8)):
        problem = conv2d(**{**HALF, "c": channels, "k": channels, "groups": channels})
        candidates = lower(problem, SM_90A, LEVEL_1).candidates
        assert max(int(candidate.schedule.get("filters")) for candidate in candidates) == most


def test_a_joined_space_is_enumerable_by_index() -> None:
    space = OP.space(conv2d(**{**HALF, "c": 4}), SM_90A, LEVEL_1)
    every = [space.by_index(index) for index in range(space.size)]
    assert len(set(every)) == space.size == len(list(space))
    assert [space.index_of(schedule) for schedule in every] == list(range(space.size))
    with pytest.raises(IndexError):
        space.by_index(space.size)
    assert space.index_of(Schedule.of({"algorithm": "winograd"})) is None


@pytest.mark.parametrize(
    ("tunables", "expected"),
    [
        ({"pixels": [1, 8]}, {"direct"}),
        ({"tile_m": [64]}, {"implicit_gemm"}),
        ({"algorithm": ["direct"]}, {"direct"}),
        ({"algorithm": ["direct", "implicit_gemm"]}, {"direct", "implicit_gemm"}),
        ({"min_blocks": [1]}, {"implicit_gemm"}),
    ],
)
def test_a_search_that_names_tunables_tries_what_has_them(tunables: Any, expected: set[str]) -> None:
    candidates = lower(conv2d(**{**HALF, "c": 4}), SM_90A, Search(tunables=tunables)).candidates
    assert {candidate.schedule.get("algorithm") for candidate in candidates} == expected


def test_any_list_of_slices_is_tried() -> None:
    lowered = lower(conv2d(**{**HALF, "n": 1}), SM_90A, Search(tunables={"split_k": [3, 5]}))
    assert {candidate.schedule.get("split_k") for candidate in lowered.candidates} == {3, 5}


NODES: list[dict[str, Any]] = [{"op": "bias"}, {"op": "relu"}]


@pytest.mark.parametrize("fields", [HALF, DEPTHWISE, TURNED, {**HALF, "n": 1, "c": 2048}])
def test_levels_1_and_2_try_the_default_schedule_with_a_separate_epilogue(fields: Fields) -> None:
    problem = conv2d(**fields, epilogue=NODES)
    (default,) = OP.space(problem, SM_90A, LEVEL_0)
    for level in (1, 2):
        every = OP.space(problem, SM_90A, Search(level=level))
        (separate,) = (schedule for schedule in every if schedule.get("epilogue") == "separate")
        undivided = {name: value for name, value in default.as_dict().items() if name in separate.as_dict()}
        plain = {"split": "none", "split_k": 1, "stream_blocks": 0}
        undivided |= {name: value for name, value in plain.items() if name in undivided}
        assert separate == Schedule.of({**undivided, "epilogue": "separate"})
        assert OP.rules(problem, separate, SM_90A) == ACCEPTED
        sample = lower(problem, SM_90A, Search(level=level, limit=3)).candidates
        assert [candidate.schedule for candidate in sample][:2] == [default, separate]
        assert len({candidate.schedule for candidate in sample}) == 3
    assert all(schedule.get("epilogue") == "fused" for schedule in OP.space(conv2d(**fields), SM_90A, LEVEL_1))


def test_a_search_may_ask_for_separate_epilogues() -> None:
    search = Search(tunables={"epilogue": ["fused", "separate"], "tile_m": [64], "tile_n": [64]})
    lowered, alone = (lower(conv2d(**HALF, epilogue=nodes), SM_90A, search) for nodes in (NODES, []))
    assert {candidate.schedule.get("epilogue") for candidate in lowered.candidates} == {"fused", "separate"}
    assert {candidate.schedule.get("epilogue") for candidate in alone.candidates} == {"fused"}
    assert alone.rejections["epilogue"].message == "there is no epilogue that could be separate"


def test_a_separate_epilogue_needs_sums_that_are_whole_and_room_for_them() -> None:
    with_nodes = {**HALF, "epilogue": NODES}
    assert check_output(with_nodes, TENSOR, **SEPARATE) == ACCEPTED
    divided = check_output({**with_nodes, "n": 1}, {**TENSOR, **SEPARATE}, split="workspace", split_k=4)
    assert isinstance(divided, Rejected) and divided.rule == "epilogue"
    schedule = Schedule.of({**TENSOR, **SEPARATE})
    assert OP.rules(conv2d(**with_nodes, out_dtype="float32"), schedule, SM_90A, 0) == ACCEPTED


@pytest.mark.parametrize(("out_dtype", "size"), [("float16", 2), ("float32", 4)])
@pytest.mark.parametrize("images", [8, 512])
def test_the_work_of_a_separate_epilogue_has_its_launches_and_their_traffic(
    out_dtype: str, size: int, images: int
) -> None:
    problem = conv2d(**{**HALF, "n": images}, out_dtype=out_dtype, epilogue=[*NODES, {"op": "residual"}])
    fused, apart = Schedule.of(TENSOR), Schedule.of({**TENSOR, **SEPARATE})
    cost, outputs = OP.cost(problem, apart), images * 28 * 28 * 128
    assert (cost.launches, cost.workspace_bytes) == (4, 4 * outputs if size == 2 else 0)
    assert OP.cost(problem, fused).launches == 1
    work = OP.work(problem, apart, SM_90A)
    bias, relu, residual = work.others
    assert [other.l2_bytes for other in work.others] == [
        8 * outputs + size * 128, 8 * outputs, 4 * outputs + size * outputs + size * outputs
    ]  # fmt: skip
    # What the launch before left in the L2 comes from there; 205 MB of sums do not stay.
    in_l2 = images == 8
    assert relu.dram_bytes == (0 if in_l2 else 8 * outputs)
    assert residual.dram_bytes == (0 if in_l2 else 4 * outputs) + 2 * size * outputs
    assert bias.dram_bytes == relu.dram_bytes + size * 128
    plain = OP.work(conv2d(**{**HALF, "n": images}, out_dtype="float32"), fused, SM_90A)
    assert (work.dram_bytes, work.mma) == (plain.dram_bytes, plain.mma)


def test_cost_counts_every_operand_once() -> None:
    cost = OP.cost(conv2d(**HALF, epilogue=NODES), Schedule.of(TENSOR))
    outputs = 8 * 28 * 28 * 128
    assert cost.flops == 2 * outputs * 9 * 128 + 2 * outputs
    assert cost.bytes_read == 2 * (8 * 28 * 28 * 128 + 128 * 9 * 128 + 128)
    assert (cost.bytes_written, cost.launches, cost.workspace_bytes) == (2 * outputs, 1, 0)


def test_pixels_that_no_window_meets_cost_nothing() -> None:
    weights, image, schedule = 2 * 128 * 128, 2 * 8 * 28 * 28 * 128, Schedule.of(ELEMENTS)
    for layout, seen in (("nhwc", image // 4), ("nchw", image // 2)):
        problem = conv2d(**{**HALF, **POINT, "stride": 2}, layout=layout)
        least = OP.cost(problem, schedule)
        assert least.bytes_read == seen + weights
        assert OP.work(problem, schedule, SM_90A).dram_bytes == least.bytes_read + least.bytes_written


def test_work_asks_the_dram_for_the_image_once_and_the_l2_for_every_tap() -> None:
    problem, schedule = conv2d(**HALF), Schedule.of(TENSOR)
    work, least = OP.work(problem, schedule, SM_90A), OP.cost(problem, schedule)
    assert work.dram_bytes == least.bytes_read + least.bytes_written
    assert work.l2_bytes > 9 * least.bytes_read
    assert work.blocks == -(-8 * 28 * 28 // 64) * 2


# ---- kernels on the CPU

NEIGHBOURS = ((3, 1), (3, 4), (5, 2), (5, 8), (7, 4), (7, 8))  # window, pixels


def verified() -> dict[str, Kernel]:
    by_name: dict[str, Kernel] = {}
    for layout, dtype in product(LAYOUTS, ("float16", "bfloat16", "float32")):
        words = {"layout": layout, "dtype": dtype}
        # 2-byte elements that are gathered one by one are too narrow for cp.async.
        copy = REGISTERS if layout == "nchw" and dtype != "float32" else {}
        by_name[f"tensor {layout} {dtype}"] = OF.tensor({**words, "epilogue": ("bias", "relu", "residual")}, **copy)
        by_name[f"direct {layout} {dtype}"] = OF.direct({**words, "align": (1, 1, 4)}, filters=2)
        if dtype == "bfloat16":  # has a conversion and an mma of its own, which these two call
            continue
        by_name[f"tensor {layout} {dtype}, 1 x 1"] = OF.tensor({**words, "pointwise": True}, **WIDE)
        by_name[f"tensor {layout} {dtype}, 1 element"] = OF.tensor(
            {**words, "align": (1, 1, 1)}, **REGISTERS, epilogue_path="shared"
        )
        by_name[f"direct {layout} {dtype}, depthwise"] = OF.direct(
            {**words, "align": (4 if layout == "nhwc" else 1, 1, 4), "depthwise": True, "epilogue": ("bias", "clip")}
        )
    for split, copy in (("workspace", {}), ("atomic", REGISTERS), ("stream", {"stages": 3})):
        by_name[f"tensor nhwc, {split}"] = OF.tensor({"epilogue": ("bias",)}, split=split, **copy)
        words = {"layout": "nchw", "dtype": "float32", "epilogue": ("bias",)}
        by_name[f"tensor nchw, {split}"] = OF.tensor(words, split=split, **copy)
    for align in ((2, 2, 2), (4, 4, 1), (2, 4, 8), (4, 8, 4)):
        by_name[f"tensor nhwc {align}"] = OF.tensor({"align": align}, stages=3)
    for layout, width in product(LAYOUTS, (1, 4)):
        words = {"layout": layout, "align": (width if layout == "nhwc" else 1, width, width), "epilogue": ("residual",)}
        by_name[f"simt {layout} {width}"] = OF.simt(words, stages=2, fragments=2, padding=4)
        by_name[f"simt {layout} {width}, split"] = OF.simt(words, split="workspace")
        by_name[f"simt {layout} {width}, 1 x 1"] = OF.simt({**words, "align": (width,) * 3, "pointwise": True})
    by_name["direct, fp32 out of fp16"] = OF.direct(
        {"align": (8, 1, 4), "depthwise": True, "out_dtype": "float32"}, filters=8
    )
    by_name["direct, 8 pixels, few taps"] = OF.direct(
        {"align": (1, 1, 1)}, filters=1, pixels=8, threads=128, threads_k=1
    )
    by_name["direct, 1 x 1"] = OF.direct({"align": (4, 4, 8), "pointwise": True}, filters=8)
    for (window, pixels), dtype in zip(NEIGHBOURS, 2 * ("float16", "float32", "bfloat16"), strict=True):
        by_name[f"direct, window {window}, {pixels} pixels, {dtype}"] = OF.direct(
            {"dtype": dtype, "align": (4, 1, 4), "depthwise": True, "epilogue": ("bias", "relu")},
            window=window, pixels=pixels, taps=32 if window == 7 else 16,
        )  # fmt: skip
    for align in ((1, 1, 1), (2, 8, 2), (8, 2, 8)):
        words = {"align": align, "depthwise": True}
        by_name[f"direct, window 3 {align}"] = OF.direct(words, filters=max(align), window=3, pixels=4)
    by_name["separate, direct, window 5"] = OF.direct(
        {"align": (4, 1, 4), "depthwise": True, "epilogue": ("bias", "residual")}, window=5, pixels=4, **SEPARATE
    )
    for layout in LAYOUTS:
        words, copy = (
            {"layout": layout, "epilogue": ("bias", "residual", "gelu")},
            REGISTERS if layout == "nchw" else {},
        )
        by_name[f"separate, tensor {layout}"] = OF.tensor(words, **copy, **SEPARATE)
        by_name[f"separate, simt {layout}"] = OF.simt({"layout": layout, "epilogue": ("scale", "bias")}, **SEPARATE)
        words = {"layout": layout, "align": (1, 1, 8), "epilogue": ("bias", "relu")}
        by_name[f"separate, direct {layout}"] = OF.direct(words, **SEPARATE)
        words = {"layout": layout, "align": (1, 1, 4), "epilogue": ("bias", "masked_activation.bits.square.relu")}
        by_name[f"direct {layout}, masked"] = OF.direct(words)
        by_name[f"tensor {layout}, masked"] = OF.tensor(words, copy="registers")
        by_name[f"separate, direct {layout}, masked"] = OF.direct(words, **SEPARATE)
    by_name["separate, 1 x 1, fp32 out of bf16"] = OF.tensor(
        {"dtype": "bfloat16", "out_dtype": "float32", "align": (8, 8, 4), "pointwise": True, "epilogue": ("bias",)},
        **WIDE, **SEPARATE,
    )  # fmt: skip
    nodes = ("bias", "residual", "mask", "scale", "leaky_relu", "clip", "cast.float16", "silu")
    by_name["separate, every node"] = OF.tensor({"align": (8, 8, 2), "epilogue": nodes}, **SEPARATE)
    by_name["direct, gelu"] = OF.direct({"align": (1, 1, 8), "epilogue": ("bias", "gelu")}, filters=8, taps=32)
    return by_name


def sanitized() -> list[Kernel]:
    return [
        OF.tensor({"epilogue": ("bias", "gelu")}),
        OF.simt({"layout": "nchw", "align": (1, 1, 1), "epilogue": ("bias", "mask")}),
        OF.direct({"align": (4, 1, 4), "depthwise": True}),
        OF.direct({"align": (4, 1, 4), "depthwise": True}, window=3, pixels=4),
    ]


def reduced(kernel: Kernel) -> list[Conv2dProblem]:
    return [problem for problem in OP.test_problems(kernel) if isinstance(problem, Conv2dProblem)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_test_problems_have_every_geometry(layout: str) -> None:
    problems = reduced(OF.tensor({"layout": layout}, copy="registers"))
    assert any(max(problem.stride) > 1 for problem in problems)
    assert any(max(problem.dilation) > 1 for problem in problems)
    assert any(max(problem.corner) > 1 for problem in problems) and any(problem.n > 1 for problem in problems)
    assert any(problem.groups > 1 and max(problem.dilation) > 1 for problem in problems)
    assert any(convolutions.left(problem) for problem in problems), "a stride that does not divide"
    assert all(problem.r != problem.s or problem.stride[0] != problem.stride[1] for problem in problems[1:])


@pytest.mark.parametrize(("window", "pixels"), NEIGHBOURS)
def test_problems_of_neighbouring_pixels_have_tails_in_rows(window: int, pixels: int) -> None:
    problems = reduced(OF.direct({"align": (4, 1, 4), "depthwise": True}, window=window, pixels=pixels))
    tails = {1, max(1, pixels - 1), pixels, pixels + 1} - ({2} if pixels == 1 else set())
    assert {problem.q for problem in problems} >= tails
    assert all((problem.s, problem.stride[1], problem.dilation[1]) == (window, 1, 1) for problem in problems)
    assert any(problem.taps > 16 for problem in problems), "more rows of the filter than come at once"
    assert {problem.stride[0] for problem in problems} == {1, 2, 3}
    assert any(problem.dilation[0] > 1 for problem in problems) and any(problem.n > 1 for problem in problems)
    assert any(min(problem.corner) > 0 for problem in problems)


CONFIGS: dict[str, tuple[str, Fields, Fields]] = {
    "simt nhwc": ("simt", {"epilogue": ("bias",)}, {"stages": 2}),
    "simt nchw, split": ("simt", {"layout": "nchw"}, {"split": "workspace"}),
    "fp16 nhwc": ("tensor", {"epilogue": ("bias",)}, {"stages": 3, "tile_m": 64, "warps_m": 4}),
    "fp16 nhwc, 1 element": ("tensor", {"align": (1, 1, 1)}, {"copy": "registers", "split": "workspace"}),
    # More threads than vectors of the image.
    "fp16 nhwc, wide": ("tensor", {}, {"tile_m": 16, "tile_n": 128, "warps_m": 1, "warps_n": 4}),
    "tf32 nchw": ("tensor", {"layout": "nchw", "dtype": "float32", "epilogue": ("bias",)}, {"stages": 3}),
    "bf16 nchw, stream-K": ("tensor", {"layout": "nchw", "dtype": "bfloat16"}, {**REGISTERS, "split": "stream"}),
    "separate nhwc": ("tensor", {"epilogue": ("bias", "residual", "relu")}, SEPARATE),
    "separate nchw": (
        "tensor", {"layout": "nchw", "dtype": "float32", "epilogue": ("scale", "bias", "residual")}, SEPARATE
    ),
    "direct nhwc": ("direct", {"align": (1, 1, 4), "epilogue": ("bias", "residual")}, {}),
    "direct nhwc, depthwise": ("direct", {"align": (4, 1, 4), "depthwise": True, "epilogue": ("bias",)}, {}),
    "direct nhwc, neighbours": (
        "direct", {"align": (4, 1, 4), "depthwise": True, "epilogue": ("bias",)}, {"window": 3, "pixels": 4}
    ),
    # Several vectors of a pixel, and more rows of the filter than come at once.
    "direct nhwc, neighbours by 2 channels": (
        "direct", {"align": (2, 1, 2), "depthwise": True}, {"window": 5, "threads_k": 3, "threads": 96}
    ),
    "direct nchw": ("direct", {"layout": "nchw", "align": (1, 1, 1), "epilogue": ("bias",)}, {"filters": 2}),
    "direct nchw, depthwise": ("direct", {"layout": "nchw", "align": (1, 1, 1), "depthwise": True}, {"threads_k": 2}),
}  # fmt: skip
GATHER, OF_DIRECT, OF_WINDOW = "conv/gather.cuh", "conv/direct.cuh", "conv/window.cuh"
OWN_GATHER, OF_NODES, LAUNCH = "gather.cuh", "separate.cuh", "conv/launch.cuh"
ABOVE, LEFT = (f"(corner.{axis} + tap.{axis} < 0 ? 0 : corner.{axis} + tap.{axis})" for axis in "hw")
SMALLER = "gemm::smaller(Pixels::taps, arguments.k - first)"
WEIGHT = "arguments.template weight<C::channels_last>(of_all, first, tap)"
OVER_THE_END = "arguments.out_width / C::pixels + (arguments.out_width < C::pixels)"
ROW = "row += arguments.dilation_h * arguments.row_pitch;"
COLUMN, TURNED_OVER = "shared + s * B::pitch", "shared + (C::window - 1 - s) * B::pitch"
STORED = "store_global<width>(sums, value);"
ROUNDED = f"for (float& one : value.data) one = round_to_bfloat16(one); {STORED}"
APPLIED = "C::Epilogue::template apply_node<index>(value, Position{filter, filter, first}, arguments.epilogue);"
FILTER, OF_OTHER = "C::channels_last ? first : first / per_image", "C::channels_last ? first / per_image : first"
MUTATIONS = declare.Mutations(
    kernels=lambda called: Kernels(NAME, called).made(CONFIGS),
    files=(
        *(name for name in CONV if name != "conv/channel_planes.cuh"),
        *OP.files,
    ),  # test_conv2d_ring has its mutants
    counts={"barrier": 2},
    definitions={"bounds": 1},
    wrong={
        "rows above the image count": (GATHER, "corner.h + tap.h", ABOVE),
        "columns left of the image count": (GATHER, "corner.w + tap.w", LEFT),
        "the padding behind for that before": (LAUNCH, "as_distance(extents[top])", "as_distance(extents[bottom])"),
        "all images are the first": (GATHER, "image * arguments.image_pitch", "0 * arguments.image_pitch"),
        "the inner digit never turns over": (GATHER, "at.inner >= arguments.radix_inner", "false"),
        "the middle digit never turns over": (GATHER, "at.middle >= arguments.radix_middle", "false"),
        "no carry to the middle digit": (GATHER, "step.middle + over_inner", "step.middle"),
        "no carry to the outer digit": (GATHER, "step.outer + over_middle", "step.outer"),
        "filters of the first group": (OWN_GATHER, "arguments.group_of(tile.matrix) * stride", "0 * stride"),
        "the bias of the first group": (OWN_GATHER, "group_of(matrix) * (filters / groups)", "0"),
        "channels of the first group": (OF_DIRECT, "known / (arguments.filters / arguments.groups)", "0"),
        "a depthwise filter sees its neighbour's channel": (OF_DIRECT, "j * arguments.channel_pitch", "0"),
        "the last tap lost": (OF_DIRECT, SMALLER, f"{SMALLER} - 1"),
        "taps of the first chunk again": (OF_DIRECT, WEIGHT, WEIGHT.replace("first", "0")),
        "strips go over the ends of rows": (OF_WINDOW, "(arguments.out_width - 1) / C::pixels + 1", OVER_THE_END),
        "strips of the first image": (OF_WINDOW, "arguments.images * arguments.out_height", "arguments.out_height"),
        "rows of a strip without their stride": (OF_WINDOW, "h += arguments.dilation_h;", "h += 1;"),
        "the dilation counted and not moved": (OF_WINDOW, ROW, "row += arguments.row_pitch;"),
        "every column the first": (OF_WINDOW, "x * arguments.pixel_pitch", "0 * arguments.pixel_pitch"),
        "the columns of the filter turned over": (OF_WINDOW, COLUMN, TURNED_OVER),
        "the first pixel of a strip everywhere": (OF_WINDOW, "first + i", "first"),
        "a node takes the filter of another layout": (OF_NODES, FILTER, OF_OTHER),
        "the sums are rounded between nodes": (OF_NODES, STORED, ROUNDED),
        "every node applies the first": (OF_NODES, APPLIED, APPLIED.replace("<index>", "<0>")),
        "channels first written as last": (OWN_GATHER, "(pixel - image * per_image)", "pixel"),
    },
)

# ---- winners


def compiled() -> dict[str, Kernel]:
    wide = {"depthwise": True, "epilogue": ("relu",)}
    return {
        **convolutions.gathered_beside_stored(NAME, HALF),
        "bf16 3x3 with stride": level_0(**{**HALF, "dtype": "bfloat16", "stride": 2}).kernel,
        "tf32 3x3": level_0(**TF32).kernel,
        "fp16 1x1": level_0(**{**HALF, **POINT}).kernel,
        "fp16 stem": level_0(**STEM).kernel,
        "fp16 nchw": level_0(**TURNED).kernel,
        "fp32 3x3": level_0(**{**HALF, "dtype": "float32"}).kernel,
        "fp16 depthwise": level_0(**DEPTHWISE).kernel,
        "fp16 depthwise with stride": level_0(**{**DEPTHWISE, "stride": 2}).kernel,
        "fp16 depthwise 7x7": OF.direct(wide | {"align": (8, 1, 8)}, window=7, filters=8, pixels=8, threads=256),
        "fp32 depthwise 7x7": OF.direct(
            wide | {"align": (4, 1, 4), "dtype": "float32"}, window=7, pixels=8, threads=256
        ),
    }


def loads_what_neighbours_share_once(kernel: Kernel, code: Code) -> None:
    window, pixels, filters = (int(kernel.tunables.get(name)) for name in ("window", "pixels", "filters"))
    columns = pixels + window - 1
    assert code.count("ld.global.nc.v4") == columns
    assert code.count("fma.rn.f32") == window * pixels * filters
    if kernel.signature_dict["dtype"] == "float16":
        # Those of the row of the image, and of the filter's one element at a time.
        assert code.count("cvt.f32.f16") == columns * filters + 1


def has_about_the_registers_that_are_estimated(kernel: Kernel, code: Code) -> None:
    assert abs(code.resources.registers - OP.estimated_registers(kernel)) <= 20


def has_the_tunables(window: int, pixels: int, filters: int) -> Any:
    def has_its_tunables(kernel: Kernel, code: Code) -> None:
        chosen = tuple(int(kernel.tunables.get(name)) for name in ("window", "pixels", "filters"))
        assert chosen == (window, pixels, filters)

    return has_its_tunables


STRIPS = (loads_what_neighbours_share_once, has_about_the_registers_that_are_estimated)


def test_a_gather_has_no_branches_of_its_own(codes: dict[str, Codes]) -> None:
    convolutions.require_no_branches(codes[NAME])


EPILOGUE = [{"op": "bias"}, {"op": "leaky_relu", "slope": 0.25}, {"op": "residual"}]
CHANGES: list[dict[str, Any]] = [
    {}, {"stride": 2}, POINT, {"groups": 4}, {"groups": 128, "w": 29}, {"c": 4}, {"c": 4, "epilogue": EPILOGUE},
]  # fmt: skip


def planned(layout: str, change: Fields) -> list[Candidate]:
    """Of level 1, of each algorithm, division of sums, epilogue and window one."""
    candidates = lower(conv2d(**{**HALF, "n": 1, "layout": layout, **change}), SM_90A, LEVEL_1).candidates
    chosen: dict[Any, Candidate] = {}
    for name, algorithms in (("algorithm", "*"), ("split", "implicit_gemm"), ("epilogue", "*"), ("window", "direct")):
        for candidate in candidates:
            if algorithms in ("*", candidate.schedule.get("algorithm")):
                chosen[candidate.schedule.get(name)] = candidate
    assert (3 in chosen) == (layout == "nhwc" and "w" in change)
    assert ("separate" in chosen) == ("epilogue" in change)
    return list(chosen.values())


def large(images: int) -> Candidate:
    problem = conv2d(n=images, h=128, w=128, c=4, k=4, r=1, s=1, dtype="float16")
    assert problem.pointwise
    return OP.candidate(problem, Schedule.of(DIRECT))


def other_numbers(*numbers: float) -> dict[str, Any]:
    return {"numbers": numbers}


CALLS = {
    "winner": declare.Library(
        candidate=lambda: level_0(padding=1, dtype="float16", epilogue=EPILOGUE),
        record={
            "operands": ["x", "w", "bias", "residual", "out"],
            "extents": {**SIZES, "p": 12, "q": 10, "groups": 1},
            "attributes": [1, 1, 1, 1, 1, 1, 1, 1],
            "scalars": [0.25],
        },
        refused={
            "a tensor less": ({"residual": None, "numbers": ()}, "TypeError",
                              "4 tensors were given; this kernel takes 5: x, w, 2 of the epilogue and out"),
            "no geometry": (other_numbers(0.25), "TypeError", "this call takes 5 tensors, then 9 numbers"),
            "dtype": ({"w": "T((24, 3, 3, 16))"}, "TypeError", "w is float32; float16 is allowed"),
            "rank": ({"x": "H(2, 120, 16)"}, "ValueError", "rank 4 (n, h, w, c) is allowed"),
            "channels": ({"w": "H(24, 3, 3, 12)"}, "ValueError", "16 channels and w 12"),
            "filters": ({"w": "H(16, 3, 3, 16)"}, "ValueError", "k differs between w and out"),
            "images": ({"x": "H(3, 12, 10, 16)"}, "ValueError", "n differs between x and out"),
            "strides": ({"x": "H(2, 12, 10, 16, strides=(2000, 160, 16, 1))"}, "ValueError",
                        "x has stride 2000 along axis 0; it must be packed (stride 1920)"),
            "vectors": ({"x": "H(2, 12, 10, 12)", "w": "H(24, 3, 3, 12)"}, "ValueError",
                        "c / groups is 12; this kernel moves 8 elements at once"),
            "address": ({"x": "H(2, 12, 10, 16, address=0x40000008)"}, "ValueError", "16 bytes"),
            "bias": ({"bias": "H(16)"}, "ValueError", "bias must be a contiguous vector of 24"),
            "residual": ({"residual": "H(2, 12, 5, 48)"}, "ValueError", "the shape of out"),
            "device": ({"w": "H(24, 3, 3, 16, device=1)"}, "ValueError", "w is on cuda:1, but x is on cuda:0"),
            "overlap": ({"residual": "out"}, "ValueError", "out overlaps residual"),
            "another geometry": ({0: 2}, "ValueError", DO_NOT_FIT),
            "padding behind": ({3: 0}, "ValueError", DO_NOT_FIT),
            "half a row of padding": ({2: 1.5}, "TypeError", "argument 7, top, must be an integer"),
            "a negative padding": ({2: -1, 3: 3}, "ValueError", DO_NOT_FIT),
            "a negative stride": ({0: -1}, "ValueError", DO_NOT_FIT),
        },
    ),
    # A kernel of neighbouring pixels takes any height of the filter.
    "neighbours": declare.Library(
        candidate=lambda: level_0(c=16, k=16, groups=16, padding=1, dtype="float16"),
        taken={
            "more rows": ({"w": "H(16, 5, 3, 1)", **other_numbers(1, 1, 2, 2, 1, 1, 1, 1)}, 1),
            "padding of one side": (other_numbers(1, 1, 0, 2, 2, 0, 1, 1), 1),
        },
        refused={
            "other columns": ({"w": "H(16, 3, 5, 1)", **other_numbers(1, 1, 1, 1, 2, 2, 1, 1)}, "ValueError",
                              "w has 5 columns; this kernel is for filters of 3"),
            "a stride": ({"out": f"H(2, 12, 5, 16, {OUT})", **other_numbers(1, 2, 1, 1, 1, 1, 1, 1)}, "ValueError",
                         "the attributes (such as stride and padding)"),
            "a dilation": (other_numbers(1, 1, 1, 1, 2, 2, 1, 2), "ValueError",
                           "the attributes (such as stride and padding) do not fit"),
        },
    ),
}  # fmt: skip
OF_JOB: Fields = {"n": 2, "h": 14, "w": 14, "c": 64, "k": 64, "r": 3, "s": 3, "padding": 1}

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
        random_cases=convolutions.random_cases(NAME, {**SPREAD_OF_IMAGES, "epilogue separate": 5}),
        machine_code=declare.MachineCode(
            kernels=compiled,
            compared=convolutions.COMPARED,
            claims={
                **dict.fromkeys(("fp16 3x3", "bf16 3x3 with stride", "tf32 3x3", "fp16 1x1"), claim.ALIGNED),
                **dict.fromkeys(("fp16 stem", "fp16 nchw"), (claim.by_tensor_cores,)),
                "fp32 3x3": (claim.on_cuda_cores,),
                "fp16 depthwise": (claim.on_cuda_cores, claim.loads_16_bytes, has_the_tunables(3, 4, 8), *STRIPS),
                "fp16 depthwise with stride": (claim.loads_16_bytes,),
                "fp16 depthwise 7x7": (has_the_tunables(7, 8, 8), *STRIPS),
                "fp32 depthwise 7x7": (has_the_tunables(7, 8, 4), *STRIPS),
            },
        ),
        launches=declare.Launches(
            planned={
                f"{layout} {number}": partial(planned, layout, change)
                for layout in LAYOUTS
                for number, change in enumerate(CHANGES)
            },
            # 32 bits reach the smaller image alone.
            counted={f"{images} images": (partial(large, images), count) for images, count in ((4096, 1), (32768, 0))},
        ),
        calls=CALLS,
        job=declare.Job(
            each_run="depthwise nchw",
            problems={
                "fp16": {**OF_JOB, "dtype": "float16", "epilogue": NODES},
                "depthwise nchw": {**OF_JOB, "layout": "nchw", "groups": 64, "dtype": "float16"},
            },
            failing=[
                ({"n": 65536, "h": 128, "w": 128, "c": 8, "k": 8, "r": 3, "s": 3, "dtype": "float16"}, {"level": 0},
                 {"index": 1}, "")
            ],
        ),
    ),
)  # fmt: skip
add_checks(globals())
