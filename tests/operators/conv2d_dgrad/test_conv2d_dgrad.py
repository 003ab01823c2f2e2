"""Gradients of a convolution's image. The text that convolutions share is mutated in conv2d's module."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from math import gcd
from typing import Any

import numpy as np
import pytest

from benchmarks.shapes import shapes_of
from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.conv2d_dgrad.problem import MOST_RESIDUES, Conv2dDgradProblem
from codegen.operators.conv2d_dgrad.residue_classes import count, largest, phases
from codegen.operators.convolution.inputs import elements_used
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.predict.roofline import predict
from codegen.problem import LARGEST_EXTENT as MOST
from codegen.search.rules import ACCEPTED, Rejected
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.text.ptxas_report import Resources
from tests.operators.conv2d import convolutions
from tests.operators.conv2d.convolutions import (
    BY_ELEMENT,
    DEFINED,
    DEPTHWISE,
    DO_NOT_FIT,
    HALF,
    LAYOUTS,
    MANY_THREADS,
    OUT,
    POINT,
    REGISTERS,
    SPREAD_OF_IMAGES,
    TENSOR,
    TF32,
    WIDE,
)
from tests.operators.conv2d.kernels import DIRECT, SIZES, Kernels, convolution
from tests.operators.harness import declarations as declare
from tests.operators.harness import machine_code as claim
from tests.operators.harness.checks import add_checks
from tests.operators.harness.declarations import LEVEL_1, SM_90A, Fields, Rejection
from tests.operators.harness.launches import Plans
from tests.operators.harness.machine_code import Codes

NAME = "conv2d_dgrad"
OP, OF = operator(NAME), Kernels(NAME)
STRIDED = {**HALF, "stride": 2}
TURNED = {**HALF, "layout": "nchw"}
# A thread per phase, filter and pixel.
THINNEST: dict[str, Any] = {**DIRECT, "threads": 64, "threads_k": 64, "filters": 1, "pixels": 1}
level_0 = partial(convolutions.level_0, NAME)


def dgrad(**fields: Any) -> Conv2dDgradProblem:
    problem = convolution(NAME, **fields)
    assert isinstance(problem, Conv2dDgradProblem)
    return problem


# ---- problems

TAGS, RESIDUES = "does not match any of the expected tags", "131072 residues of the stride along h"
PROBLEMS = convolutions.problems(
    NAME,
    refused=[
        ({"n": 2**20, "h": 50, "w": 50, "stride": 9}, "padding", f"2621440000 pixels of dx (n h w); at most {MOST}"),
        ({"h": 2**17, "stride": 2**17}, "padding", f"{RESIDUES}; at most {MOST_RESIDUES}"),
        ({"h": 1, "r": 2**17, "padding": 2**17, "stride": 2**18}, "padding", RESIDUES),
        ({"epilogue": [{"op": "bias"}]}, "epilogue.0", TAGS),
        ({"epilogue": [{"op": "relu"}]}, "epilogue.0", TAGS),
    ],
    aligned=[
        ({}, (4, 4, 4)),
        ({"dtype": "float16"}, (8, 8, 8)),
        ({"c": 3, "dtype": "float16"}, (8, 1, 1)),
        ({"c": 4, "k": 6, "dtype": "float16"}, (2, 4, 4)),
        ({"c": 4, "dtype": "float16", "out_dtype": "float32"}, (8, 4, 4)),
        ({"groups": 8, "dtype": "float16"}, (1, 2, 2)),
        ({"c": 24, "groups": 24, "dtype": "float16"}, (8, 1, 8)),  # neighbouring channels, each with its own filter
        ({"layout": "nchw", "dtype": "float16"}, (1, 1, 8)),
        ({"layout": "nchw", "dtype": "float16", "stride": [2, 1]}, (1, 1, 1)),
        ({"layout": "nchw", "r": 1, "s": 1, "dtype": "float16"}, (8, 8, 8)),
        ({"layout": "nchw", "r": 1, "s": 1, "h": 5, "w": 5, "c": 2, "dtype": "float16"}, (1, 2, 1)),
    ],
    operands=[
        (
            {"layout": layout, "groups": 4, "stride": [2, 1], "epilogue": [{"op": "residual"}, {"op": "mask"}]},
            [("dy", "float32", "in", dy), ("w", "float32", "in", w), ("residual", "float32", "in", dx),
             ("mask", "uint8", "in", dx), ("dx", "float32", "out", dx)],
        )
        for layout, dy, w, dx in (
            ("nhwc", (2, 5, 8, 24), (24, 3, 3, 4), (2, 12, 10, 16)),
            ("nchw", (2, 24, 5, 8), (24, 4, 3, 3), (2, 16, 12, 10)),
        )
    ],
    # Of the geometry, only whether it is strided counts.
    unspecialised=[
        (
            {"stride": 2},
            {"n": 5, "h": 40, "c": 32, "k": 8, "stride": [1, 3], "padding": 1, "dilation": 2},
            [1, 3, 1, 1, 1, 1, 2, 2],
        )
    ],
)  # fmt: skip


def test_a_stride_is_part_of_a_signature() -> None:
    assert OP.signature(dgrad(stride=2)) != OP.signature(dgrad())


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"stride": 2}, {"stride": [3, 2], "padding": [2, 1]}, {"stride": 2, "dilation": 2, "padding": 1},
        {"stride": [4, 6], "dilation": [2, 4]}, {"stride": 5, "r": 2, "s": 4}, {"h": 3, "w": 3, "stride": [7, 2]},
        {"h": 1, "w": 2, "r": 1, "s": 1, "padding": 1, "stride": 2}, {"r": 1, "s": 1, "stride": 2},
    ],
)  # fmt: skip
def test_phases_have_every_pixel_and_every_product_once(fields: Fields) -> None:
    """Beside a count of the pairs that meet."""
    p = dgrad(**fields)
    axes = []
    for axis, (extent, outputs, taps) in enumerate(((p.h, p.p, p.r), (p.w, p.q, p.s))):
        fits = np.zeros(extent, dtype=int)
        for row in range(extent):
            quotients = [divmod(row + p.corner[axis] - tap * p.dilation[axis], p.stride[axis]) for tap in range(taps)]
            fits[row] = sum(rest == 0 for _, rest in quotients)
            assert sum(rest == 0 and 0 <= quotient < outputs for quotient, rest in quotients) <= fits[row]
        axes.append(fits)
    result = phases(p)
    assert sum(number for number, _ in result) == count(p)
    assert sum(number * phase.rows * phase.columns for number, phase in result) == p.h * p.w
    products = sum(number * phase.rows * phase.columns * phase.r * phase.s for number, phase in result)
    assert products == axes[0].sum() * axes[1].sum()
    most = largest(p)
    assert all(phase.rows <= most.rows and phase.columns <= most.columns for _, phase in result)
    assert max(phase.taps for _, phase in result) <= most.taps


def test_the_phases_of_a_usual_stride() -> None:
    result = sorted(
        (phase.r, phase.s, phase.rows, phase.columns, number) for number, phase in phases(dgrad(stride=2, padding=1))
    )
    assert result == [(1, 1, 6, 5, 1), (1, 2, 6, 5, 1), (2, 1, 6, 5, 1), (2, 2, 6, 5, 1)]
    of_point = sorted((phase.taps, number) for number, phase in phases(dgrad(stride=2, r=1, s=1, k=1)))
    assert of_point == [(0, 1), (0, 1), (0, 1), (1, 1)] or of_point == [(0, 3), (1, 1)]


# ---- rules, levels and costs

MANY_PHASES = {
    "n": 1, "h": 49152, "w": 43000, "stride": 2**15, "c": 64, "k": 64, "groups": 64, "r": 1, "s": 1, "dtype": "float16",
}  # fmt: skip
# 1024 threads, of which none has more than 64 registers.
CROWDED = {**MANY_THREADS, "tile_m": 64, "tile_n": 128, "warp_m": 8, "fragments": 1}
NARROW = {"warps_m": 1, "warps_n": 1}
SEARCHES = declare.Searches(
    public=shapes_of(NAME),
    nested=[HALF, STRIDED, {**STRIDED, "c": 4}, DEPTHWISE],
    tried=[
        ({**fields, "layout": layout}, expected)
        for layout in LAYOUTS
        for fields, expected in (
            (HALF, {"implicit_gemm"}),
            (STRIDED, {"implicit_gemm"}),
            ({**HALF, "c": 8}, {"implicit_gemm", "direct"}),
            ({**STRIDED, "k": 8}, {"implicit_gemm", "direct"}),
            ({**HALF, "groups": 16}, {"implicit_gemm", "direct"}),
            (DEPTHWISE, {"direct"}),
            ({**DEPTHWISE, "k": 256, "stride": 2}, {"implicit_gemm", "direct"}),
        )
    ],
    begun=convolutions.begun(
        NAME,
        [(3, 64, 1, 7, 2), (64, 64, 1, 3, 1), (64, 256, 1, 1, 1), (64, 128, 1, 1, 2), (32, 32, 32, 3, 2),
         (24, 36, 12, 3, 3), (5, 7, 1, 2, 1)],
        lambda c, k, groups: max(c, k) <= 8,
    ),
    accepted=[
        (HALF, TENSOR),
        (STRIDED, TENSOR),
        (DEPTHWISE, DIRECT),
        ({**DEPTHWISE, "stride": 3}, {**DIRECT, "pixels": 1}),
        ({**DEPTHWISE, "stride": [2, 1]}, {**DIRECT, "window": 3}),
        # With a limit, a thread has fewer registers than the compiler would give it.
        (TF32, {**TENSOR, "tile_n": 128, "tile_k": 16, "warps_m": 4, "mma_k": 8, "maxnreg": 128}),
        # A pointwise gradient is reached with 64 bits.
        ({**HALF, **POINT, "n": 2**15}, TENSOR),
        ({**MANY_PHASES, "h": 2**15, "w": 2**15}, THINNEST),
    ],
    rejected=[
        Rejection(fields, {**schedule, **changes}, rule, said)
        for fields, schedule, changes, rule, said in (
            (DEPTHWISE, TENSOR, {}, "algorithm", "128 products with one column each are mostly padding"),
            (STRIDED, TENSOR, {"split": "workspace", "split_k": 2}, "split", "with stride 2 x 2 sums differ in length"),
            ({**HALF, "dtype": "float32"}, CROWDED, {}, "registers",
             "about 71 registers per thread with the gather; 64 are"),
            ({**STRIDED, "k": 8}, TENSOR, {}, "stages", "3 stages for 1 steps: k = 32"),
            ({**HALF, "c": 3}, BY_ELEMENT, NARROW, "gather", "32 threads for 32 x 64 vectors"),
            ({**HALF, "k": 3}, BY_ELEMENT, {**NARROW, "tile_k": 64}, "gather", "for 64 vectors of taps"),
            (TURNED, BY_ELEMENT, {"tile_n": 256}, "gather", "128 threads for 256 pixels and 32 taps"),
            (TURNED, TENSOR, {}, "copy", "copies at least 4 bytes; an operand is aligned to 2"),
            ({**HALF, "n": 2**15}, TENSOR, {}, "index", "dy has 4848615424 elements with what windows reach"),
            ({**DEPTHWISE, "n": 2**15}, DIRECT, {}, "index", "4848615424 elements"),
            ({**HALF, "c": 2**14, "k": 2**14, "n": 1}, TENSOR, {}, "index",
             "a group's filters have 2415919104 elements"),
            ({**HALF, "groups": 16, "c": 96}, DIRECT, {}, "filters", "would be of several groups of 6"),
            ({**DEPTHWISE, "stride": 14}, DIRECT, {"pixels": 8}, "pixels", "128 pixels are mostly padding for 32"),
            ({**DEPTHWISE, "stride": 2}, DIRECT, {"window": 3}, "window", "stride_w = 2"),
            ({**DEPTHWISE, "dilation": 2}, DIRECT, {"window": 3}, "window", "dilation_w = 2"),
        )
    ],
    capped=[({**HALF, "n": 1}, {**TENSOR, "split": "workspace", "split_k": 4}, 4 * 4 * 28 * 28 * 128)],
)  # fmt: skip


def test_too_many_phases_for_a_grid_are_rejected_with_the_number() -> None:
    outcome = OP.rules(dgrad(**MANY_PHASES), Schedule.of(THINNEST), SM_90A)
    assert outcome == Rejected("grid", f"{2**30} phases of 4 blocks; a launch has at most {2**31 - 1}")


def test_sums_are_divided_without_a_stride_alone() -> None:
    few = {**HALF, "n": 1, "h": 7, "w": 7, "c": 512, "k": 512}
    plain = lower(dgrad(**few), SM_90A, LEVEL_1).candidates
    strided = lower(dgrad(**{**few, "stride": 2}), SM_90A, Search(level=2, limit=200)).candidates
    assert {candidate.schedule.get("split") for candidate in plain} > {"none"}
    assert {candidate.schedule.get("split") for candidate in strided} == {"none"}


def test_cost_counts_the_taps_of_each_phase_and_no_zeros() -> None:
    schedule = Schedule.of(TENSOR)
    plain, strided = (OP.cost(dgrad(**fields), schedule) for fields in (HALF, STRIDED))
    pixels, filters = 8 * 28 * 28 * 128, 128 * 9 * 128
    assert plain.flops == 2 * pixels * 9 * 128
    assert strided.flops == plain.flops // 4  # phases of 1, 2, 2 and 4 of 9 taps
    assert plain.bytes_read == 2 * (pixels + filters)
    assert strided.bytes_read == 2 * (pixels // 4 + filters)
    assert plain.bytes_written == strided.bytes_written == 2 * pixels
    point = OP.cost(dgrad(**{**STRIDED, **POINT, "epilogue": [{"op": "residual"}]}), schedule)
    assert point.flops == 2 * pixels // 4 * 128 + pixels


def test_work_is_that_of_the_phases_and_asks_the_dram_once() -> None:
    schedule = Schedule.of(TENSOR)
    plain, strided = (OP.work(dgrad(**fields), schedule, SM_90A) for fields in (HALF, STRIDED))
    least = OP.cost(dgrad(**STRIDED), schedule)
    assert strided.dram_bytes == pytest.approx(least.bytes_read + least.bytes_written)
    assert plain.l2_bytes > 9 * 2 * 8 * 28 * 28 * 128
    # Of tiles of 64 rows, 32 of k: the plain one has 98 x 2 of 36 steps, each phase 25 x 2 of 4, 8, 8 and 16.
    assert plain.mma == 98 * 2 * 64 * 64 * 36 * 32
    assert strided.mma == 25 * 2 * 64 * 64 * (4 + 8 + 8 + 16) * 32
    assert (plain.blocks, strided.blocks, plain.steps, strided.steps) == (196, 200, 36, 9)
    assert (plain.longest, strided.longest) == (36, 16)


def test_a_prediction_waits_for_the_longest_phase_where_rounds_do_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    resources, with_longest = Resources(96, 0, 0, 0, 0, 1), type(OP).work

    def latencies() -> list[float]:
        values = []
        for images in (8, 512):
            default = level_0(**{**STRIDED, "n": images})
            candidate = Candidate(default.problem, Schedule.of(TENSOR), default.kernel)
            values.append(predict(candidate, resources, SM_90A).roofs_us["latency"])
        return values

    few, many = latencies()
    monkeypatch.setattr(type(OP), "work", lambda *given: replace(with_longest(*given), longest=0))
    few_by_mean, many_by_mean = latencies()
    assert few > few_by_mean
    assert many == many_by_mean


def test_a_stride_is_predicted_to_cost_a_quarter_of_the_products_not_all() -> None:
    large = {**HALF, "n": 64, "c": 256, "k": 256}
    plain, strided = (predict_uncompiled(level_0(**fields), SM_90A).us for fields in (large, {**large, "stride": 2}))
    assert 0.2 < strided / plain < 0.6


# ---- the reference


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_no_pixel_depends_on_is_nan(layout: str) -> None:
    problem = dgrad(layout=layout, **DEFINED["windows of padding alone"])
    dy = OP.make_inputs(problem, "normal", np.random.default_rng(1))["dy"]
    rows = [any(0 <= 2 * p - 4 + r < 2 for r in (0, 1)) for p in range(problem.p)]
    used = np.logical_and.outer(rows, rows)
    assert 0 < used.sum() < used.size
    np.testing.assert_array_equal(np.isnan(dy[0, :, :, 0] if layout == "nhwc" else dy[0, 0]), ~used)
    assert elements_used(dgrad(layout=layout)).all()


@pytest.mark.parametrize(
    ("fields", "longest"),
    [({}, 9 * 24), ({"stride": 2}, 4 * 24), ({"stride": [3, 2]}, 2 * 24), ({"stride": 2, "dilation": 2}, 9 * 24),
     ({"r": 5, "stride": [2, 1], "groups": 2}, 3 * 3 * 12)],
)  # fmt: skip
def test_the_bound_is_that_of_the_longest_sum(fields: Fields, longest: int) -> None:
    assert dgrad(**fields).longest_sum == longest


# ---- kernels on the CPU


def verified() -> dict[str, Kernel]:
    by_name: dict[str, Kernel] = {}
    for layout, dtype in product(LAYOUTS, ("float16", "bfloat16", "float32")):
        words, last = {"layout": layout, "dtype": dtype}, layout == "nhwc"
        # 2-byte elements that are gathered one by one are too narrow for cp.async.
        copy = REGISTERS if not last and dtype != "float32" else {}
        by_name[f"tensor {layout} {dtype}"] = OF.tensor({**words, "epilogue": ("scale", "residual")}, **copy)
        by_name[f"direct {layout} {dtype}"] = OF.direct({**words, "align": (1, 4 if last else 1, 4)}, filters=2)
        if dtype == "bfloat16":  # has a conversion and an mma of its own, which these two call
            continue
        by_name[f"tensor {layout} {dtype}, strided"] = OF.tensor(
            {**words, "strided": True, "epilogue": ("residual", "mask")}, **copy, stages=2
        )
        by_name[f"tensor {layout} {dtype}, 1 x 1"] = OF.tensor({**words, "pointwise": True}, **WIDE)
        by_name[f"tensor {layout} {dtype}, 1 element, strided"] = OF.tensor(
            {**words, "align": (1, 1, 1), "strided": True}, **REGISTERS, epilogue_path="shared"
        )
        for strided in (False, True):
            align = (4, 1, 4) if last else (1, 1, 1 if strided else 4)
            by_name[f"direct {layout} {dtype}, depthwise{', strided' * strided}"] = OF.direct(
                {**words, "align": align, "depthwise": True, "strided": strided, "epilogue": ("clip",)}
            )
    for split, copy in (("workspace", {}), ("atomic", REGISTERS), ("stream", {"stages": 3})):
        by_name[f"tensor nhwc, {split}"] = OF.tensor({"epilogue": ("residual",)}, split=split, **copy)
        by_name[f"tensor nchw, {split}"] = OF.tensor({"layout": "nchw", "dtype": "float32"}, split=split, **copy)
    for align in ((2, 2, 2), (4, 1, 1), (2, 4, 4), (4, 8, 8)):
        copy = REGISTERS if 1 in align else {}
        by_name[f"tensor nhwc {align}"] = OF.tensor({"align": align}, **(copy or {"stages": 3}))
        by_name[f"tensor nhwc {align}, strided"] = OF.tensor({"align": align, "strided": True}, **WIDE, **copy)
    for layout, width in product(LAYOUTS, (1, 4)):
        gathered = width if layout == "nhwc" else 1
        words = {"layout": layout, "align": (gathered, gathered, width), "epilogue": ("residual",)}
        by_name[f"simt {layout} {width}"] = OF.simt(words, stages=2, fragments=2, padding=4)
        by_name[f"simt {layout} {width}, split"] = OF.simt(words, split="workspace")
        by_name[f"simt {layout} {width}, 1 x 1"] = OF.simt({**words, "align": (width,) * 3, "pointwise": True})
        if layout == "nhwc" or width == 1:
            by_name[f"simt {layout} {width}, strided"] = OF.simt({**words, "strided": True}, stages=2)
    by_name["direct, fp32 out of fp16"] = OF.direct(
        {"align": (8, 1, 4), "depthwise": True, "out_dtype": "float32", "strided": True}, filters=8
    )
    by_name["direct, 8 pixels, few taps"] = OF.direct(
        {"align": (1, 1, 1), "strided": True}, filters=1, pixels=8, threads=128, threads_k=1
    )
    for window, pixels, strided in ((3, 4, False), (5, 2, True), (7, 8, True)):
        by_name[f"direct, window {window}, {pixels} pixels{', strided' * strided}"] = OF.direct(
            {"align": (4, 1, 4), "depthwise": True, "strided": strided}, window=window, pixels=pixels
        )
    by_name["direct, strided"] = OF.direct({"align": (1, 8, 8), "strided": True}, filters=8, taps=32)
    by_name["direct nchw, strided"] = OF.direct({"layout": "nchw", "strided": True}, filters=4, threads_k=2)
    by_name["direct, 1 x 1"] = OF.direct({"align": (4, 8, 8), "pointwise": True}, filters=8)
    return by_name


def sanitized() -> list[Kernel]:
    return [
        OF.tensor({"strided": True, "epilogue": ("residual",)}),
        OF.simt({"layout": "nchw", "align": (1, 1, 1), "strided": True, "epilogue": ("mask",)}),
        OF.direct({"align": (4, 1, 4), "depthwise": True, "strided": True}),
    ]


def reduced(layout: str, strided: bool) -> list[Conv2dDgradProblem]:
    problems = OP.test_problems(OF.tensor({"layout": layout, "strided": strided}, copy="registers"))
    return [problem for problem in problems if isinstance(problem, Conv2dDgradProblem)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_test_problems_have_every_geometry(layout: str) -> None:
    plain, strided = reduced(layout, False), reduced(layout, True)
    for some in (plain, strided):
        assert any(max(problem.dilation) > 1 for problem in some) and any(max(problem.corner) > 1 for problem in some)
        assert any(problem.n > 1 for problem in some)
        assert any(problem.groups > 1 and max(problem.dilation) > 1 for problem in some)
    assert any(gcd(problem.stride[a], problem.dilation[a]) > 1 for problem in strided for a in (0, 1))
    assert any(convolutions.left(problem) for problem in strided), "a stride that does not divide"
    assert any(problem.stride[0] != problem.stride[1] and min(problem.stride) > 1 for problem in strided)
    for problem in strided[1:]:
        kinds = {(phase.rows, phase.columns, phase.taps) for _, phase in phases(problem)}
        assert len(kinds) > 1, "phases that differ"
    without = [problem for problem in strided if any(phase.taps == 0 for _, phase in phases(problem))]
    assert without and len(without) < len(strided), "phases without taps, and not in all problems"


CONFIGS: dict[str, tuple[str, Fields, Fields]] = {
    "simt nhwc, strided": ("simt", {"strided": True}, {"stages": 2}),
    "fp16 nhwc": ("tensor", {"epilogue": ("residual",)}, {"stages": 3, "tile_m": 64, "warps_m": 4}),
    "fp16 nhwc, strided": ("tensor", {"strided": True}, {"stages": 3}),
    "fp16 nhwc, 1 element": ("tensor", {"align": (1, 1, 1), "strided": True}, REGISTERS),
    "tf32 nchw, strided": ("tensor", {"layout": "nchw", "dtype": "float32", "strided": True}, {"stages": 3}),
    "bf16 nchw, stream-K": ("tensor", {"layout": "nchw", "dtype": "bfloat16"}, {**REGISTERS, "split": "stream"}),
    "direct nhwc, strided": ("direct", {"align": (1, 4, 4), "strided": True, "epilogue": ("residual",)}, {}),
    "direct nhwc, depthwise": ("direct", {"align": (4, 1, 4), "depthwise": True, "strided": True}, {}),
    "direct nhwc, neighbours": ("direct", {"align": (4, 1, 4), "depthwise": True, "strided": True}, {"window": 3}),
    "direct nchw": ("direct", {"layout": "nchw", "align": (1, 1, 1)}, {"filters": 2}),
    "direct nchw, strided": ("direct", {"layout": "nchw", "strided": True}, {"filters": 2}),
}
PHASES, FILTERS, KERNEL = "phases.cuh", "filters.cuh", "kernel.cuh"
FITS = "(phase + along.padding - first * along.dilation) % along.stride != 0"
OF_PHASE = "(along.extent - 1 - phase) / along.stride + 1"
OF_PLACE = "static_cast<int>(blockIdx.x) - number * per_phase"
CORNER = "last * along.dilation - along.padding - phase"
PLAIN_CORNER = "(along.taps - 1) * along.dilation - along.padding"
BEFORE = "conv::as_distance(before)"
TAPS = "(along.taps - 1 - first) / along.tap_step + 1"
MUTATIONS = declare.Mutations(
    kernels=lambda called: Kernels(NAME, called).made(CONFIGS),
    files=(PHASES, FILTERS, KERNEL),  # test_conv2d_ring has the mutants of planes.cuh
    counts={"bounds": 12},
    wrong={
        "every phase begins with the first tap": (PHASES, FITS, "false"),
        "taps tried beyond those that differ": (PHASES, "gemm::smaller(along.taps, along.tap_step)", "along.taps + 1"),
        "a phase without taps has one": (PHASES, f"first < end ? {TAPS} : 0", "1"),
        "the last tap lost": (PHASES, TAPS, "(along.taps - 1 - first) / along.tap_step"),
        "rows of a phase rounded down": (PHASES, OF_PHASE, "along.extent / along.stride"),
        "the phase forgotten in the corner": (PHASES, CORNER, CORNER.removesuffix(" - phase")),
        "padding of a whole window": (PHASES, PLAIN_CORNER, PLAIN_CORNER.replace(" - 1", "")),
        "the padding behind for that before": (KERNEL, BEFORE, BEFORE.replace("before", "behind")),
        "the first tap for the last": (PHASES, "of_h.last * weight_row + of_w.last * weight_column", "0"),
        "the filter is not turned over": (PHASES, "r * h.tap_step * weight_row", "-r * h.tap_step * weight_row"),
        "taps one after the other": (PHASES, "s * w.tap_step * weight_column", "s * weight_column"),
        "pixels of dx one after the other": (PHASES, "first_w + column * w.stride", "first_w + column"),
        "all phases at the first row": (PHASES, "first_h + row * h.stride", "row * h.stride"),
        "all images are the first": (PHASES, "int64_t(image) * h.extent", "0 * h.extent"),
        "phases of the taps alone": (PHASES, "number / along.tap_step", "0"),
        "a first pixel before the axis": (PHASES, "rest < 0 ? rest + along.stride : rest", "rest"),
        "filters of the first group": (
            FILTERS, "given.group_of(tile.matrix) * given.stride_a", "0 * given.stride_a"
        ),
        "filters of the first group, by rows": (FILTERS, "tile.matrix * given.stride_b", "0 * given.stride_b"),
        "channels of the tile's first thread": (FILTERS, "i * V::rows_at_once * phase.weight_channel", "0"),
        "direct filters of the first group": (PHASES, "group * stride_b", "0 * stride_b"),
        "direct blocks of all phases": (KERNEL, OF_PLACE, "static_cast<int>(blockIdx.x)"),
    },
)  # fmt: skip

# ---- random cases


def properties(arch: str, candidate: Candidate) -> Counter[str]:
    p, counts = candidate.problem, convolutions.properties(arch, candidate)
    assert isinstance(p, Conv2dDgradProblem)
    every = [phase for _, phase in phases(p)]
    about = {
        "strided tensor cores": p.strided and counts["tensor cores"],
        "phases without taps": any(phase.taps == 0 for phase in every),
        "phases of several lengths": len({phase.taps for phase in every if phase.taps}) > 1,
        "a stride and a dilation with a divisor": any(gcd(p.stride[a], p.dilation[a]) > 1 for a in (0, 1)),
        "dilation with groups and stride": p.groups > 1 and max(p.dilation) > 1 and p.strided,
    }
    counts.update(name for name, true in about.items() if true)
    return counts


SPREAD = {
    **SPREAD_OF_IMAGES, "strided tensor cores": 6, "phases without taps": 10, "phases of several lengths": 5,
    "a stride and a dilation with a divisor": 3, "dilation with groups and stride": 5,
}  # fmt: skip

# ---- winners


def compiled() -> dict[str, Kernel]:
    return {
        **convolutions.gathered_beside_stored(NAME, HALF),
        "fp16 3x3 with stride": level_0(**STRIDED).kernel,
        "tf32 3x3": level_0(**TF32).kernel,
        "fp16 nchw with stride": level_0(**STRIDED, layout="nchw").kernel,
        "fp32 3x3 with stride": level_0(**{**STRIDED, "dtype": "float32"}).kernel,
        "fp16 depthwise with stride": level_0(**STRIDED, groups=128).kernel,
    }


def test_a_gather_has_no_branches_of_its_own(codes: dict[str, Codes]) -> None:
    convolutions.require_no_branches(codes[NAME])


CHANGES: list[dict[str, Any]] = [
    {},
    {"c": 4, "stride": [1, 40]},
    {"stride": [2, 3], "groups": 16, "layout": "nchw"},
]


def planned(change: Fields) -> list[Candidate]:
    """Of each way to compute it one: directly, and with every division of the sums."""
    candidates = lower(dgrad(**{**HALF, "n": 1, **change}), SM_90A, LEVEL_1).candidates
    return list({candidate.schedule.as_dict().get("split", "direct"): candidate for candidate in candidates}.values())


def large(images: int) -> Candidate:
    problem = dgrad(n=images, h=128, w=128, c=4, k=4, r=1, s=1, dtype="float16")
    assert problem.pointwise
    return OP.candidate(problem, Schedule.of(DIRECT))


def of_many_phases() -> list[Candidate]:
    """More of all groups than an int holds."""
    sizes = {"n": 1, "h": 2**14, "w": 2**14, "c": 64, "k": 64, "groups": 64, "r": 1, "s": 1, "dtype": "float16"}
    candidate = OP.candidate(dgrad(**sizes, stride=2**14), Schedule.of(THINNEST))
    assert OP.rules(candidate.problem, candidate.schedule, SM_90A) == ACCEPTED
    assert OP.work(candidate.problem, candidate.schedule, SM_90A).blocks == 2**28
    return [candidate]


WITH_RESIDUAL: Fields = {"padding": 1, "dtype": "float16", "epilogue": [{"op": "residual"}]}


def test_many_phases_are_one_row_of_blocks(plans: Plans) -> None:
    ((_, (run,), _),) = plans[NAME, "many phases"]
    assert (run.grid[0], run.grid[1]) == (2**28, 1)


CALLS = {
    "winner": declare.Library(
        candidate=lambda: level_0(**WITH_RESIDUAL, stride=2),
        record={
            "operands": ["dy", "w", "residual", "dx"],
            "extents": {**SIZES, "p": 6, "q": 5, "groups": 1},
            "attributes": [2, 2, 1, 1, 1, 1, 1, 1],
            "scalars": [],
        },
        refused={
            "a tensor less": ({"residual": None}, "TypeError",
                              "3 tensors were given; this kernel takes 4: dy, w, 1 of the epilogue and dx"),
            "no geometry": ({"numbers": (2,)}, "TypeError", "this call takes 4 tensors, then 8 numbers"),
            "dtype": ({"w": "T((24, 3, 3, 16))"}, "TypeError", "w is float32; float16 is allowed"),
            "rank": ({"dy": "H(2, 30, 24)"}, "ValueError", "dy has rank 3; rank 4 (n, p, q, k) is allowed"),
            "channels": ({"w": "H(24, 3, 3, 12)"}, "ValueError", "dx has 16 channels and w 12"),
            "filters": ({"w": "H(16, 3, 3, 16)"}, "ValueError", "k differs between w and dy"),
            "images": ({"dy": "H(3, 6, 5, 24)"}, "ValueError", "n differs between dx and dy"),
            "strides": ({"dy": "H(2, 6, 5, 24, strides=(800, 120, 24, 1))"}, "ValueError",
                        "dy has stride 800 along axis 0; it must be packed (stride 720)"),
            "vectors of dy": ({"dy": "H(2, 6, 5, 20)", "w": "H(20, 3, 3, 16)"}, "ValueError",
                              "k / groups is 20; this kernel moves 8 elements at once"),
            "vectors of dx": ({"w": "H(24, 3, 3, 12)", "dx": f"H(2, 12, 10, 12, {OUT})",
                               "residual": "H(2, 12, 10, 12)"}, "ValueError",
                              "c / groups is 12; this kernel moves 8 elements at once"),
            "address": ({"dy": "H(2, 6, 5, 24, address=0x40000008)"}, "ValueError", "16 bytes"),
            "residual": ({"residual": "H(2, 12, 5, 32)"}, "ValueError", "the shape of dx"),
            "overlap": ({"residual": "dx"}, "ValueError", "dx overlaps residual"),
            "in place": ({"w": f"H(24, 3, 3, 16, {OUT})"}, "ValueError", "dx overlaps w"),
            "device": ({"dx": "H(2, 12, 10, 16, device=1)"}, "ValueError", "dx is on cuda:1, but dy is on cuda:0"),
            "the residual's device": ({"residual": "H(2, 12, 10, 16, device=1)"}, "ValueError",
                                      "residual is on cuda:1, but dx is on cuda:0"),
            "another geometry": ({0: 3}, "ValueError", DO_NOT_FIT),
            "a stride of 0": ({0: 0}, "ValueError", DO_NOT_FIT),
            "padding behind": ({3: 3}, "ValueError", DO_NOT_FIT),
            "a negative dilation": ({7: -1}, "ValueError", DO_NOT_FIT),
        },
    ),
    # A kernel without phases.
    "plain": declare.Library(
        candidate=lambda: level_0(**WITH_RESIDUAL),
        refused={"a stride": ({"dy": "H(2, 6, 5, 24)", 0: 2, 1: 2}, "ValueError", DO_NOT_FIT)},
    ),
}  # fmt: skip
OF_JOB: Fields = {"n": 2, "h": 14, "w": 14, "c": 64, "k": 64, "r": 3, "s": 3, "padding": 1, "dtype": "float16"}

DECLARED = (
    declare.Declarations(
        operator=NAME,
        problem=SIZES,
        problems=PROBLEMS,
        searches=SEARCHES,
        references=convolutions.references(
            epilogue=[{"op": "scale", "value": 0.5}, {"op": "residual"}, {"op": "mask"}],
            device_epilogue=[{"op": "residual"}, {"op": "mask"}],
            bounded={"c": 6, "k": 12},
            strides=(1, 2),
        ),
        verifications=declare.Verifications(kernels=verified, sanitized=sanitized),
        mutations=MUTATIONS,
        random_cases=convolutions.random_cases(NAME, SPREAD, about=properties),
        machine_code=declare.MachineCode(
            kernels=compiled,
            compared=convolutions.COMPARED,
            claims={
                **dict.fromkeys(("fp16 3x3", "fp16 3x3 with stride", "tf32 3x3"), claim.ALIGNED),
                "fp16 nchw with stride": (claim.by_tensor_cores,),
                "fp32 3x3 with stride": (claim.on_cuda_cores,),
                "fp16 depthwise with stride": (claim.on_cuda_cores, claim.loads_16_bytes),
            },
        ),
        launches=declare.Launches(
            planned={
                **{str(change): partial(planned, change) for change in CHANGES},
                "many phases": of_many_phases,
            },
            # 32 bits reach the smaller dy alone.
            counted={f"{images} images": (partial(large, images), count) for images, count in ((4096, 1), (32768, 0))},
        ),
        calls=CALLS,
        job=declare.Job(
            each_run="depthwise",
            problems={
                "strided": {**OF_JOB, "stride": 2, "epilogue": [{"op": "residual"}]},
                "depthwise": {**OF_JOB, "groups": 64, "layout": "nchw"},
            },
            failing=[
                ({"n": 2**15, "h": 128, "w": 128, "c": 8, "k": 8, "r": 3, "s": 3, "dtype": "float16"}, {"level": 0},
                 {"index": 1}, "")
            ],
        ),
    ),
)  # fmt: skip
add_checks(globals())
