"""Conv2d_dgrad's search spaces, rules and costs: which algorithms are tried, what is rejected with which words."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import shapes_of
from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operators import operator
from codegen.predict import predict
from codegen.predict_before import predict_before
from codegen.ptxas_report import Resources
from codegen.rules import ACCEPTED, Rejected
from codegen.schedule import Schedule
from codegen.search import Search
from codegen.targets import target
from tests.conv2d_dgrad_kernels import dgrad
from tests.conv2d_kernels import DIRECT
from tests.test_conv2d_space import BY_ELEMENT, TENSOR

ROOT = Path(__file__).resolve().parent.parent
OP = operator("conv2d_dgrad")
HALF: dict[str, Any] = {"n": 8, "h": 28, "w": 28, "c": 128, "k": 128, "padding": 1, "dtype": "float16"}
STRIDED: dict[str, Any] = {**HALF, "stride": 2}
DEPTHWISE: dict[str, Any] = {**HALF, "groups": 128}
# 1024 threads on the CUDA cores, of which none has more than 64 registers.
WIDE: dict[str, int | str] = {
    "algorithm": "implicit_gemm", "tile_m": 64, "tile_n": 128, "tile_k": 8, "thread_m": 4, "thread_n": 2, "warp_m": 8,
    "stages": 2, "fragments": 1, "padding": 0, "unroll_k": 8, "min_blocks": 1, "split": "none", "split_k": 1,
    "raster": 0,
}  # fmt: skip


def algorithms(fields: dict[str, Any], arch: str = "sm_90a", **search: Any) -> Counter[str]:
    found = lower(dgrad(**fields), target(arch), Search(**(search or {"level": 1})))
    return Counter(str(one.schedule.get("algorithm")) for one in found.candidates)


@pytest.mark.parametrize("problem", shapes_of("conv2d_dgrad"), ids=lambda problem: problem["name"])
def test_a_public_gradient_has_schedules_at_levels_0_and_1(problem: dict[str, Any]) -> None:
    asked = OP.parse({name: value for name, value in problem.items() if name != "name"})
    none, one = (lower(asked, target("sm_90a"), Search(level=level, limit=16)) for level in (0, 1))
    assert len(none.candidates) == 1
    assert none.candidates[0] in one.candidates
    assert all(predict_before(candidate, target("sm_90a")).us > 0.0 for candidate in one.candidates)


def test_the_example_has_every_gradient_of_its_network() -> None:
    request = json.loads((ROOT / "examples" / "resnet18_dgrad.json").read_text())
    asked = [one for one in request["problems"] if one["operator"] == "conv2d_dgrad"]
    found = [OP.parse({name: value for name, value in one.items() if name != "name"}) for one in asked]
    # The stem's image needs no gradient.
    public = [
        one for one in shapes_of("conv2d_dgrad") if one["name"].startswith("resnet18/b8/") and "stem" not in one["name"]
    ]
    plain = {one.model_copy(update={"epilogue": ()}).digest for one in found}
    assert plain == {OP.parse({n: v for n, v in one.items() if n != "name"}).digest for one in public}
    search = Search.model_validate(request["search"])
    assert all(len(lower(one, target(request["target"]), search).candidates) == search.limit for one in found)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (HALF, {"implicit_gemm"}),
        (STRIDED, {"implicit_gemm"}),
        ({**HALF, "c": 8}, {"implicit_gemm", "direct"}),
        ({**STRIDED, "k": 8}, {"implicit_gemm", "direct"}),
        ({**HALF, "groups": 16}, {"implicit_gemm", "direct"}),
        (DEPTHWISE, {"direct"}),
        ({**DEPTHWISE, "k": 256, "stride": 2}, {"implicit_gemm", "direct"}),
    ],
)
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_levels_try_what_is_worth_it(fields: dict[str, Any], expected: set[str], layout: str) -> None:
    assert set(algorithms({**fields, "layout": layout})) == expected


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_every_kind_of_problem_has_a_schedule_to_begin_with(layout: str, dtype: str, arch: str) -> None:
    for c, k, groups, r, stride in (
        (3, 64, 1, 7, 2),
        (64, 64, 1, 3, 1),
        (64, 256, 1, 1, 1),
        (64, 128, 1, 1, 2),
        (32, 32, 32, 3, 2),
        (24, 36, 12, 3, 3),
        (5, 7, 1, 2, 1),
    ):
        problem = dgrad(
            h=17, w=19, c=c, k=k, groups=groups, r=r, s=r, padding=r // 2, layout=layout, dtype=dtype, stride=stride
        )
        found = lower(problem, target(arch), Search(level=0))
        if dtype == "bfloat16" and arch == "sm_75" and found.why_empty:
            assert "needs sm_80" in found.why_empty and max(c, k) > 8
        else:
            assert found.why_empty is None, (problem, found.why_empty)


def test_the_first_guess_counts_the_bytes_of_dy_once_not_for_every_tap() -> None:
    layer = {"n": 32, "h": 56, "w": 56, "c": 64, "k": 64, "padding": 1, "dtype": "float16"}
    for fields in (layer, {**layer, "k": 128, "stride": 2}):
        (found,) = lower(dgrad(**fields), target("sm_90a"), Search(level=0)).candidates
        assert (found.schedule.get("tile_m"), found.schedule.get("tile_n")) == (128, 64)


def test_a_level_is_inside_the_next() -> None:
    for fields in (HALF, STRIDED, {**STRIDED, "c": 4}, DEPTHWISE):
        one, two = (OP.space(dgrad(**fields), target("sm_90a"), Search(level=level)) for level in (1, 2))
        assert all(two.index_of(one.by_index(index)) is not None for index in range(one.size))
        assert one.size < two.size


def test_sums_are_divided_without_a_stride_alone() -> None:
    few = {**HALF, "n": 1, "h": 7, "w": 7, "c": 512, "k": 512}
    assert {one.schedule.get("split") for one in lower(dgrad(**few), target("sm_90a"), Search(level=1)).candidates} > {
        "none"
    }
    strided = lower(dgrad(**{**few, "stride": 2}), target("sm_90a"), Search(level=2, limit=200)).candidates
    assert {one.schedule.get("split") for one in strided} == {"none"}


def judge(fields: dict[str, Any], schedule: dict[str, int | str], **changes: int | str) -> object:
    return OP.rules(dgrad(**fields), Schedule.of({**schedule, **changes}), target("sm_90a"))


def test_good_schedules_are_accepted() -> None:
    assert judge(HALF, TENSOR) == ACCEPTED
    assert judge(STRIDED, TENSOR) == ACCEPTED
    assert judge(DEPTHWISE, DIRECT) == ACCEPTED
    assert judge({**DEPTHWISE, "stride": 3}, DIRECT, pixels=1) == ACCEPTED
    assert judge({**DEPTHWISE, "stride": [2, 1]}, DIRECT, window=3) == ACCEPTED
    # A thread that is told to manages with fewer registers than it would take.
    tf32 = {**HALF, "dtype": "float32", "allow_tf32": True}
    assert judge(tf32, TENSOR, tile_n=128, tile_k=16, warps_m=4, mma_k=8, maxnreg=128) == ACCEPTED


@pytest.mark.parametrize(
    ("fields", "schedule", "changes", "rule", "said"),
    [
        (DEPTHWISE, TENSOR, {}, "algorithm", "128 products with one column each are mostly padding"),
        (STRIDED, TENSOR, {"split": "workspace", "split_k": 2}, "split", "with stride 2 x 2 sums differ in length"),
        ({**HALF, "dtype": "float32"}, WIDE, {}, "registers", "about 71 registers per thread with the gather; 64 are"),
        ({**STRIDED, "k": 8}, TENSOR, {}, "stages", "3 stages for 1 steps: k = 32"),
        ({**HALF, "c": 3}, BY_ELEMENT, {"warps_m": 1, "warps_n": 1}, "gather", "32 threads for 32 x 64 vectors"),
        ({**HALF, "k": 3}, BY_ELEMENT, {"warps_m": 1, "warps_n": 1, "tile_k": 64}, "gather", "for 64 vectors of taps"),
        ({**HALF, "layout": "nchw"}, BY_ELEMENT, {"tile_n": 256}, "gather", "128 threads for 256 pixels and 32 taps"),
        ({**HALF, "layout": "nchw"}, TENSOR, {}, "copy", "copies at least 4 bytes; an operand is aligned to 2"),
        ({**HALF, "n": 2**15}, TENSOR, {}, "index", "dy has 4848615424 elements with what windows reach"),
        ({**DEPTHWISE, "n": 2**15}, DIRECT, {}, "index", "4848615424 elements"),
        ({**HALF, "c": 2**14, "k": 2**14, "n": 1}, TENSOR, {}, "index", "a group's filters have 2415919104 elements"),
        ({**HALF, "groups": 16, "c": 96}, DIRECT, {}, "filters", "would be of several groups of 6"),
        ({**DEPTHWISE, "stride": 14}, DIRECT, {"pixels": 8}, "pixels", "128 pixels are mostly padding for 32"),
        ({**DEPTHWISE, "stride": 2}, DIRECT, {"window": 3}, "window", "stride_w = 2"),
        ({**DEPTHWISE, "dilation": 2}, DIRECT, {"window": 3}, "window", "dilation_w = 2"),
    ],
)  # fmt: skip
def test_each_rule_says_why(
    fields: dict[str, Any], schedule: dict[str, int | str], changes: dict[str, int | str], rule: str, said: str
) -> None:
    found = judge(fields, schedule, **changes)
    assert isinstance(found, Rejected)
    assert (found.rule, said in found.message) == (rule, True), found


def test_too_many_phases_for_a_grid_are_rejected_with_the_number() -> None:
    many = {
        "n": 1, "h": 49152, "w": 43000, "stride": 2**15, "c": 64, "k": 64, "groups": 64, "r": 1, "s": 1,
        "dtype": "float16",
    }  # fmt: skip
    small: dict[str, int | str] = {**DIRECT, "threads": 64, "threads_k": 64, "filters": 1, "pixels": 1}
    found = judge(many, small)
    assert isinstance(found, Rejected)
    assert (found.rule, found.message) == (
        "grid",
        f"{2**30} phases of 4 blocks; a launch has at most {2**31 - 1}",
    )
    assert judge({**many, "h": 2**15, "w": 2**15}, small) == ACCEPTED


def test_a_pointwise_gradient_is_reached_with_64_bits() -> None:
    assert judge({**HALF, "r": 1, "s": 1, "padding": 0, "n": 2**15}, TENSOR) == ACCEPTED


def test_a_cap_on_the_workspace_rejects_with_the_number() -> None:
    problem = dgrad(**{**HALF, "n": 1})
    schedule = Schedule.of({**TENSOR, "split": "workspace", "split_k": 4})
    needed = 4 * 4 * 28 * 28 * 128
    assert OP.cost(problem, schedule).workspace_bytes == needed
    assert OP.rules(problem, schedule, target("sm_90a"), needed) == ACCEPTED
    assert OP.rules(problem, schedule, target("sm_90a"), needed - 1) == Rejected(
        "workspace", f"needs {needed} bytes of workspace, the limit is {needed - 1}"
    )


def test_cost_counts_the_taps_of_each_phase_and_no_zeros() -> None:
    plain, strided = (OP.cost(dgrad(**fields), Schedule.of(TENSOR)) for fields in (HALF, STRIDED))
    pixels, filters = 8 * 28 * 28 * 128, 128 * 9 * 128
    assert plain.flops == 2 * pixels * 9 * 128
    assert strided.flops == plain.flops // 4  # phases of 1, 2, 2 and 4 of 9 taps
    assert plain.bytes_read == 2 * (pixels + filters)
    assert strided.bytes_read == 2 * (pixels // 4 + filters)
    assert plain.bytes_written == strided.bytes_written == 2 * pixels
    one_by_one = {**STRIDED, "r": 1, "s": 1, "padding": 0, "epilogue": [{"op": "residual"}]}
    point = OP.cost(dgrad(**one_by_one), Schedule.of(TENSOR))
    assert point.flops == 2 * pixels // 4 * 128 + pixels


def test_work_is_that_of_the_phases_and_asks_the_dram_once() -> None:
    schedule = Schedule.of(TENSOR)
    plain, strided = (OP.work(dgrad(**fields), schedule, target("sm_90a")) for fields in (HALF, STRIDED))
    least = OP.cost(dgrad(**STRIDED), schedule)
    assert strided.dram_bytes == pytest.approx(least.bytes_read + least.bytes_written)
    assert plain.l2_bytes > 9 * 2 * 8 * 28 * 28 * 128
    # Of tiles of 64 rows, 32 of k: the plain one has 98 x 2 of 36 steps, each phase 25 x 2 of 4, 8, 8 and 16.
    assert plain.mma == 98 * 2 * 64 * 64 * 36 * 32
    assert strided.mma == 25 * 2 * 64 * 64 * (4 + 8 + 8 + 16) * 32
    assert (plain.blocks, strided.blocks, plain.steps, strided.steps) == (196, 200, 36, 9)
    assert (plain.longest, strided.longest) == (36, 16)


def test_a_prediction_waits_for_the_longest_phase_where_rounds_do_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sheet, resources, with_longest = target("sm_90a"), Resources(96, 0, 0, 0, 0, 1), type(OP).work

    def latencies() -> list[float]:
        found = []
        for images in (8, 512):
            (one,) = lower(dgrad(**{**STRIDED, "n": images}), sheet, Search(level=0)).candidates
            candidate = Candidate(one.problem, Schedule.of(TENSOR), one.kernel)
            found.append(predict(candidate, resources, sheet).roofs_us["latency"])
        return found

    few, many = latencies()
    monkeypatch.setattr(type(OP), "work", lambda *given: replace(with_longest(*given), longest=0))
    few_by_mean, many_by_mean = latencies()
    assert few > few_by_mean
    assert many == many_by_mean


def test_a_stride_is_predicted_to_cost_a_quarter_of_the_products_not_all() -> None:
    large = {**HALF, "n": 64, "c": 256, "k": 256}
    times = []
    for fields in (large, {**large, "stride": 2}):
        problem = dgrad(**fields)
        (found,) = lower(problem, target("sm_90a"), Search(level=0)).candidates
        times.append(predict_before(found, target("sm_90a")).us)
    assert 0.2 < times[1] / times[0] < 0.6
