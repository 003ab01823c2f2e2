"""Conv2d_wgrad's search spaces and rules: which algorithms and splits are tried, what is rejected with which words."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import shapes_of
from codegen.errors import InvalidSearch
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem
from codegen.operators.matmul.grid import k_steps
from codegen.predict_before import predict_before
from codegen.rules import ACCEPTED, Rejected
from codegen.schedule import Schedule
from codegen.search import Search
from codegen.targets import target
from tests.conv2d_wgrad_kernels import DIRECT, wgrad

ROOT = Path(__file__).resolve().parent.parent
OP = operator("conv2d_wgrad")
SM_90A = target("sm_90a")
HALF: dict[str, Any] = {"n": 8, "h": 28, "w": 28, "c": 128, "k": 128, "padding": 1, "dtype": "float16"}
DEPTHWISE: dict[str, Any] = {**HALF, "groups": 128}
TENSOR: dict[str, int | str] = {
    "algorithm": "implicit_gemm", "tile_m": 64, "tile_n": 64, "tile_k": 32, "warps_m": 2, "warps_n": 2, "stages": 3,
    "fragments": 2, "mma_k": 16, "copy": "cp_async", "epilogue_path": "shared", "min_blocks": 1, "maxnreg": 0,
    "split": "none", "split_k": 1, "stream_blocks": 0, "raster": 0,
}  # fmt: skip
BY_ELEMENT: dict[str, int | str] = {**TENSOR, "copy": "registers", "stages": 2, "fragments": 1}
# 1024 threads on the CUDA cores, of which none has more than 64 registers.
WIDE: dict[str, int | str] = {
    "algorithm": "implicit_gemm", "tile_m": 128, "tile_n": 64, "tile_k": 8, "thread_m": 4, "thread_n": 2, "warp_m": 4,
    "stages": 2, "fragments": 2, "padding": 0, "unroll_k": 8, "min_blocks": 1, "split": "none", "split_k": 1,
    "raster": 0,
}  # fmt: skip
SLICED: dict[str, int | str] = {**DIRECT, "split": "workspace", "split_k": 8}
ALONE: dict[str, int | str] = {**DIRECT, "split_k": 1}


def unnamed(problem: dict[str, Any]) -> Conv2dWgradProblem:
    found = OP.parse({name: value for name, value in problem.items() if name != "name"})
    assert isinstance(found, Conv2dWgradProblem)
    return found


def test_the_example_has_every_gradient_of_its_network() -> None:
    request = json.loads((ROOT / "examples" / "resnet18_wgrad.json").read_text())
    found = [unnamed(one) for one in request["problems"]]
    public = [one for one in shapes_of("conv2d_wgrad") if one["name"].startswith("resnet18/b8/")]
    assert {one.digest for one in found} == {unnamed(one).digest for one in public} and len(found) == len(public)
    search = Search.model_validate(request["search"])
    assert all(len(lower(one, target(request["target"]), search).candidates) == search.limit for one in found)


@pytest.mark.parametrize("shape", shapes_of("conv2d_wgrad"), ids=lambda shape: shape["name"])
def test_the_gradient_of_a_public_convolution_has_schedules_and_the_first_fills_the_device(
    shape: dict[str, Any],
) -> None:
    asked = unnamed(shape)
    none, one = (lower(asked, SM_90A, Search(level=level, limit=16)) for level in (0, 1))
    (first,) = none.candidates
    assert first in one.candidates
    assert all(predict_before(candidate, SM_90A).us > 0.0 for candidate in one.candidates)
    t, blocks = first.schedule.as_dict(), OP.work(asked, first.schedule, SM_90A).blocks
    steps = k_steps(asked.pixels, int(t.get("tile_k", 32))) // int(t["split_k"])
    assert blocks >= 0.9 * SM_90A.sm_count or steps < 6, (blocks, steps, first.schedule)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (HALF, {"implicit_gemm"}),
        ({**HALF, "c": 8}, {"implicit_gemm"}),
        ({**HALF, "groups": 16}, {"implicit_gemm"}),
        (DEPTHWISE, {"direct"}),
        ({**DEPTHWISE, "k": 256}, {"implicit_gemm", "direct"}),
        ({**HALF, "c": 1}, {"implicit_gemm", "direct"}),
    ],
)
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_levels_try_what_is_worth_it(fields: dict[str, Any], expected: set[str], layout: str) -> None:
    found = lower(wgrad(**{**fields, "layout": layout}), SM_90A, Search(level=1))
    assert {one.schedule.get("algorithm") for one in found.candidates} == expected


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_every_kind_of_problem_has_a_schedule_to_begin_with(layout: str, dtype: str, arch: str) -> None:
    for c, k, groups, r in (
        (3, 64, 1, 7),
        (64, 64, 1, 3),
        (64, 256, 1, 1),
        (32, 32, 32, 3),
        (24, 36, 12, 3),
        (12, 36, 12, 5),
        (5, 7, 1, 2),
    ):
        problem = wgrad(h=17, w=19, c=c, k=k, groups=groups, r=r, s=r, padding=r // 2, layout=layout, dtype=dtype)
        found = lower(problem, target(arch), Search(level=0))
        if dtype == "bfloat16" and arch == "sm_75" and found.why_empty:
            assert "needs sm_80" in found.why_empty and c // groups > 1
        else:
            assert found.why_empty is None, (problem, found.why_empty)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("fields", [{"r": 1, "s": 1, "padding": 0}, {}, {"groups": 64}])
@pytest.mark.parametrize("level", [1, 2])
def test_levels_try_every_usual_split(level: int, fields: dict[str, Any], dtype: str) -> None:
    problem = wgrad(**{"n": 32, "h": 56, "w": 56, "c": 64, "k": 64, "padding": 1, **fields, "dtype": dtype})
    space = OP.space(problem, SM_90A, Search(level=level))
    for part in space.parts:
        assert {1, 4, 8, 16, 32, 64} <= set(part.tunables["split_k"])
    found = lower(problem, SM_90A, Search(tunables={"split_k": [1, 4, 8, 16, 32, 64]}))
    assert {one.schedule.get("split_k") for one in found.candidates} >= {1, 4, 8, 16}


def test_a_single_tile_gets_as_many_slices_as_fill_the_device() -> None:
    layer = {"n": 256, "h": 112, "w": 112, "c": 16, "k": 16, "r": 1, "s": 1, "padding": 0}
    for fields in ({"dtype": "float16"}, {"dtype": "float32"}):
        (first,) = lower(wgrad(**layer, **fields), SM_90A, Search(level=0)).candidates
        assert int(first.schedule.get("split_k")) > 64
        assert OP.work(first.problem, first.schedule, SM_90A).blocks >= SM_90A.sm_count


def test_the_first_guess_counts_the_bytes_of_the_image_once_not_for_every_tap() -> None:
    layer = {"n": 32, "h": 56, "w": 56, "c": 64, "k": 64, "padding": 1, "dtype": "float16"}
    (found,) = lower(wgrad(**layer), SM_90A, Search(level=0)).candidates
    assert (found.schedule.get("tile_m"), found.schedule.get("tile_n")) == (64, 128)


def test_a_level_is_inside_the_next() -> None:
    for fields in (HALF, {**HALF, "c": 1}, DEPTHWISE, {**HALF, "dtype": "float32"}):
        one, two = (OP.space(wgrad(**fields), SM_90A, Search(level=level)) for level in (1, 2))
        assert all(two.index_of(one.by_index(index)) is not None for index in range(one.size))
        assert one.size < two.size


@pytest.mark.parametrize("slices", [[3, 5], [7, 100], [1000]])
@pytest.mark.parametrize("algorithm", ["implicit_gemm", "direct"])
def test_any_list_of_slices_is_tried(algorithm: str, slices: list[int]) -> None:
    fields = {"n": 512, "c": 16, "k": 16, "r": 1, "s": 1, "padding": 0, "groups": 16 if algorithm == "direct" else 1}
    asked = Search(tunables={"split_k": list(slices), "algorithm": [algorithm]})
    found = lower(wgrad(**{**HALF, **fields}), SM_90A, asked)
    assert {one.schedule.get("split_k") for one in found.candidates} == set(slices)


@pytest.mark.parametrize(
    ("search", "field", "said"),
    [
        ({"tunables": {"split_k": [0]}}, "search.tunables.split_k", "split_k = 0 is not allowed; allowed: 1 to 1024"),
        ({"tunables": {"split_k": [1025]}}, "search.tunables.split_k", "split_k = 1025 is not allowed"),
        (
            {"tunables": {"elements": [26]}},
            "search.tunables.elements",
            "elements = 26 is not allowed; allowed: 1 to 25",
        ),
        ({"tunables": {"algorithm": ["fft"]}}, "search.tunables.algorithm", "allowed: implicit_gemm, direct"),
        ({"tunables": {"elements": [2], "tile_m": [64]}}, "search.tunables", "elements, tile_m leave nothing"),
        ({"schedules": [{**SLICED, "tile_m": 64}]}, "search.schedules.0.tile_m", "unknown tunable 'tile_m'"),
        ({"schedules": [{"algorithm": "direct"}]}, "search.schedules.0.elements", "has no 'elements'"),
    ],
)
def test_searches_that_mean_nothing_are_refused(search: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(InvalidSearch) as refused:
        lower(wgrad(**{**HALF, "c": 1}), SM_90A, Search(**search))
    assert refused.value.field == field
    assert said in refused.value.message


def judge(fields: dict[str, Any], schedule: dict[str, int | str], **changes: int | str) -> object:
    return OP.rules(wgrad(**fields), Schedule.of({**schedule, **changes}), SM_90A)


def test_good_schedules_are_accepted() -> None:
    assert judge(HALF, TENSOR) == ACCEPTED
    assert judge(HALF, TENSOR, split="workspace", split_k=16) == ACCEPTED
    assert judge(DEPTHWISE, ALONE) == judge(DEPTHWISE, SLICED) == ACCEPTED
    # A thread that is told to manages with fewer registers than it would take.
    tf32 = {**HALF, "dtype": "float32", "allow_tf32": True}
    assert judge(tf32, TENSOR, tile_k=16, mma_k=8, maxnreg=128) == ACCEPTED


@pytest.mark.parametrize(
    ("fields", "schedule", "changes", "rule", "said"),
    [
        (DEPTHWISE, TENSOR, {}, "algorithm", "128 products with one row each are mostly padding"),
        ({**HALF, "dtype": "float32"}, WIDE, {}, "registers", "about 75 registers per thread with the gather; 64 are"),
        (HALF, ALONE, {}, "algorithm", "filters of one channel; those of this problem have 128"),
        (HALF, TENSOR, {"split": "workspace", "split_k": 256}, "split_k", "256 slices of 196 steps (k = 6272, tile_k"),
        (HALF, TENSOR, {"split": "workspace", "split_k": 64}, "split_k", "36 tiles in 64 slices; sm_90a has enough"),
        (HALF, TENSOR, {"split": "workspace", "split_k": 1}, "split", "1 slice repeats split = none"),
        (DEPTHWISE, SLICED, {"split_k": 1000}, "split_k", "1000 slices of 392 steps"),
        ({**HALF, "c": 3}, BY_ELEMENT, {"warps_m": 1, "warps_n": 1, "tile_n": 32}, "registers", ""),
        ({**HALF, "c": 3}, BY_ELEMENT, {"tile_n": 256}, "gather", "128 threads for 256 vectors of taps"),
        (
            {**HALF, "h": 27, "w": 27, "layout": "nchw"},
            BY_ELEMENT,
            {"warps_m": 1, "warps_n": 1, "tile_n": 32, "tile_k": 64},
            "gather",
            "32 threads for 64 vectors of dy's pixels",
        ),
        ({**HALF, "layout": "nchw"}, TENSOR, {}, "copy", "copies at least 4 bytes; an operand is aligned to 2"),
        ({**HALF, "n": 2**15}, TENSOR, {}, "index", "3774873600 elements with their padding; 32 bits reach"),
        ({**DEPTHWISE, "n": 2**15}, ALONE, {}, "index", "3774873600 elements"),
        (
            {"n": 1, "h": 1, "w": 2**29, "c": 1, "k": 1, "r": 1, "s": 3},
            ALONE,
            {"filters": 1, "threads_k": 1},
            "index",
            "an axis of the image has 536870912 elements with its padding; 268435456 are counted",
        ),
        ({**HALF, "c": 16, "groups": 16, "k": 96}, ALONE, {}, "filters", "would be of several groups of 6"),
        ({**DEPTHWISE, "c": 2, "k": 2, "groups": 2}, ALONE, {}, "filters", "filters = 4 is mostly padding for k = 2"),
        (DEPTHWISE, ALONE, {"threads_k": 64, "filters": 8}, "threads_k", "blocks of 512 filters are mostly padding"),
        (DEPTHWISE, ALONE, {"elements": 10}, "elements", "elements = 10 of filters that have 9"),
        ({**DEPTHWISE, "n": 1, "h": 1, "w": 1}, ALONE, {"threads": 128}, "threads", "32 threads along 1 pixels"),
    ],
)  # fmt: skip
def test_each_rule_says_why(
    fields: dict[str, Any], schedule: dict[str, int | str], changes: dict[str, int | str], rule: str, said: str
) -> None:
    found = judge(fields, schedule, **changes)
    assert isinstance(found, Rejected)
    assert (found.rule, said in found.message) == (rule, True), found


def test_a_pointwise_image_is_reached_with_64_bits() -> None:
    assert judge({**HALF, "r": 1, "s": 1, "padding": 0, "n": 2**15}, TENSOR) == ACCEPTED


@pytest.mark.parametrize(
    ("fields", "schedule", "needed"),
    [
        (HALF, {**TENSOR, "split": "workspace", "split_k": 4}, 4 * 4 * 128 * 9 * 128),
        (HALF, {**TENSOR, "split": "atomic", "split_k": 4}, 4 * 128 * 9 * 128),
        (DEPTHWISE, {**SLICED, "split_k": 10}, 4 * 10 * 128 * 12),  # rows of 9 elements are 3 whole vectors
    ],
)
def test_a_cap_on_the_workspace_rejects_with_the_number(
    fields: dict[str, Any], schedule: dict[str, int | str], needed: int
) -> None:
    problem, asked = wgrad(**fields), Schedule.of(schedule)
    assert OP.cost(problem, asked).workspace_bytes == needed
    assert OP.rules(problem, asked, SM_90A, needed) == ACCEPTED
    assert OP.rules(problem, asked, SM_90A, needed - 1) == Rejected(
        "workspace", f"needs {needed} bytes of workspace, the limit is {needed - 1}"
    )


def test_without_workspace_sums_are_not_divided() -> None:
    found = lower(wgrad(**HALF), SM_90A, Search(level=1), workspace_limit=0)
    assert {one.schedule.get("split") for one in found.candidates} == {"none"}
    assert "the limit is 0" in found.rejections["workspace"].message


def test_cost_counts_every_operand_once() -> None:
    problem = wgrad(**HALF, out_dtype="float32")
    cost = OP.cost(problem, Schedule.of({**TENSOR, "split": "workspace", "split_k": 4}))
    outputs, pixels = 128 * 9 * 128, 8 * 28 * 28
    assert cost.flops == 2 * outputs * pixels
    assert cost.bytes_read == 2 * (pixels * 128 + pixels * 128)
    assert (cost.bytes_written, cost.launches, cost.workspace_bytes) == (4 * outputs, 2, 4 * 4 * outputs)


@pytest.mark.parametrize(("fields", "schedule"), [({}, BY_ELEMENT), ({"groups": 128}, ALONE)])
def test_pixels_that_no_window_meets_cost_nothing(fields: dict[str, Any], schedule: dict[str, int | str]) -> None:
    apart: dict[str, Any] = {**HALF, "r": 1, "s": 1, "padding": 0, "stride": 2, **fields}
    gradient, image = 2 * 8 * 14 * 14 * 128, 2 * 8 * 28 * 28 * 128
    for layout, seen in (("nhwc", image // 4), ("nchw", image // 2)):
        problem, one = wgrad(**apart, layout=layout), Schedule.of(schedule)
        least = OP.cost(problem, one)
        assert least.bytes_read == gradient + seen
        assert OP.work(problem, one, SM_90A).dram_bytes == least.bytes_read + least.bytes_written


def test_the_launch_that_adds_up_slices_of_direct_sums_writes_no_more_than_the_gradient() -> None:
    problem, sliced = wgrad(**DEPTHWISE), Schedule.of(SLICED)
    work, least = OP.work(problem, sliced, SM_90A), OP.cost(problem, sliced)
    (reduce,) = work.others
    assert reduce.dram_bytes == least.bytes_written
    assert work.dram_bytes == least.bytes_read


def test_work_asks_the_dram_for_the_image_once_and_the_l2_for_every_tap() -> None:
    problem = wgrad(**HALF)
    work, least = (of(problem, Schedule.of(TENSOR)) for of in (lambda *a: OP.work(*a, SM_90A), OP.cost))
    assert work.dram_bytes == least.bytes_read + least.bytes_written
    assert work.l2_bytes > 9 * 2 * problem.n * problem.h * problem.w * problem.c
    assert work.blocks == 2 * 9 * 128 // 64


def test_slices_make_a_predicted_time_shorter_where_tiles_are_few() -> None:
    problem = wgrad(n=64, h=56, w=56, c=64, k=64, padding=1, dtype="float16")
    (best,) = lower(problem, SM_90A, Search(level=1, keep=1)).candidates
    assert int(best.schedule.get("split_k")) > 1


def test_most_candidates_of_level_1_share_kernels() -> None:
    found = lower(wgrad(**HALF), SM_90A, Search(level=1)).candidates
    counts = Counter(one.kernel for one in found)
    assert len(found) >= 1.5 * len(counts), "slices are chosen at launch"
