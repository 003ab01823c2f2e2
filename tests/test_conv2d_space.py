"""Conv2d's search spaces and rules: which algorithms are tried, what is rejected with which words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shapes import shapes_of
from codegen.errors import InvalidSearch
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.conv2d import direct
from codegen.operators.conv2d.problem import Conv2dProblem
from codegen.operators.matmul import tensor_rules
from codegen.predict_before import predict_before
from codegen.rules import ACCEPTED, Rejected
from codegen.schedule import Schedule
from codegen.search import Search
from codegen.targets import target
from tests.conv2d_kernels import DIRECT, conv2d

ROOT = Path(__file__).resolve().parent.parent
OP = operator("conv2d")
HALF: dict[str, Any] = {"n": 8, "h": 28, "w": 28, "c": 128, "k": 128, "padding": 1, "dtype": "float16"}
DEPTHWISE: dict[str, Any] = {**HALF, "groups": 128}
MOBILENET = [one for one in shapes_of("conv2d") if one["name"].startswith("mobilenet")]
TENSOR: dict[str, int | str] = {
    "algorithm": "implicit_gemm", "tile_m": 64, "tile_n": 64, "tile_k": 32, "warps_m": 2, "warps_n": 2, "stages": 3,
    "fragments": 2, "mma_k": 16, "copy": "cp_async", "epilogue_path": "shared", "min_blocks": 1, "maxnreg": 0,
    "split": "none", "split_k": 1, "stream_blocks": 0, "raster": 0, "epilogue": "fused",
}  # fmt: skip
BY_ELEMENT: dict[str, int | str] = {**TENSOR, "copy": "registers", "stages": 2, "fragments": 1}


def algorithms(fields: dict[str, Any], arch: str = "sm_90a", **search: Any) -> Counter[str]:
    found = lower(conv2d(**fields), target(arch), Search(**(search or {"level": 1})))
    return Counter(str(one.schedule.get("algorithm")) for one in found.candidates)


@pytest.mark.parametrize("problem", shapes_of("conv2d"), ids=lambda problem: problem["name"])
def test_a_public_convolution_has_schedules_at_levels_0_and_1(problem: dict[str, Any]) -> None:
    asked = OP.parse({name: value for name, value in problem.items() if name != "name"})
    none, one = (lower(asked, target("sm_90a"), Search(level=level, limit=16)) for level in (0, 1))
    assert len(none.candidates) == 1
    assert none.candidates[0] in one.candidates
    assert all(predict_before(candidate, target("sm_90a")).us > 0.0 for candidate in one.candidates)


def test_the_example_has_every_convolution_of_its_network() -> None:
    request = json.loads((ROOT / "examples" / "resnet18.json").read_text())
    found = [OP.parse({name: value for name, value in one.items() if name != "name"}) for one in request["problems"]]
    plain = {one.model_copy(update={"epilogue": ()}).digest for one in found}
    public = [one for one in shapes_of("conv2d") if one["name"].startswith("resnet18/b8/")]
    assert plain == {OP.parse({n: v for n, v in one.items() if n != "name"}).digest for one in public}
    search = Search.model_validate(request["search"])
    assert all(len(lower(one, target(request["target"]), search).candidates) == search.limit for one in found)


def basic_blocks() -> Iterator[tuple[int, ...]]:
    """(pixels along an axis, channels, filters, taps along an axis, stride) of ResNet-18's convolutions after the stem,
    from its definition (He et al., arXiv:1512.03385, table 1)."""
    size, channels = 56, 64
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            yield size, channels, width, 3, stride
            if channels != width:
                yield size, channels, width, 1, stride
            size, channels = size // stride, width
            yield size, channels, width, 3, 1


def bottlenecks() -> Iterator[tuple[int, ...]]:
    """Those of ResNet-50, with the stride in the 3 x 3 (torchvision's, "v1.5")."""
    size, channels = 56, 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            yield size, channels, width, 1, 1
            yield size, width, width, 3, stride
            if not block:
                yield size, channels, 4 * width, 1, stride
            size, channels = size // stride, 4 * width
            yield size, width, channels, 1, 1


def test_the_training_example_has_every_layer_of_both_networks_in_all_directions() -> None:
    request = json.loads((ROOT / "examples" / "resnet_training.json").read_text())
    search, sheet = Search.model_validate(request["search"]), target(request["target"])
    wanted = set()
    for network, blocks in (("resnet18", basic_blocks()), ("resnet50", bottlenecks())):
        for way, (h, c, k, r, stride) in product(("forward", "dgrad", "wgrad"), {(224, 3, 64, 7, 2), *blocks}):
            own = "conv2d" if way == "forward" else f"conv2d_{way}"
            fields = {"h": h, "w": h, "c": c, "k": k, "r": r, "s": r, "stride": stride, "padding": r // 2}
            out = {"out_dtype": "float32"} if way == "wgrad" else {}
            for images in (8, 32):
                one = {"operator": own, "n": images, "dtype": "float16", **fields, **out}
                wanted.add((f"{network}/b{images}", way, operator(own).parse(one).digest))
    named = {one.pop("name"): operator(one["operator"]).parse(one) for one in request["problems"]}
    found = [("/".join(name.split("/")[:2]), name.split("/")[-1], one.digest) for name, one in named.items()]
    assert len(found) == len(request["problems"]) == 2 * 3 * (11 + 23)
    assert set(found) == wanted
    for one in named.values():
        assert lower(one, sheet, search).candidates


def test_level_1_of_a_large_layer_has_the_warps_that_read_least() -> None:
    """64 x 64 outputs: what the gather needs beside them fits, too."""
    found = lower(conv2d(**{**HALF, "n": 256, "c": 256, "k": 256}), target("sm_90a"), Search(level=1)).candidates
    warps = {tensor_rules.warp_tile(one.schedule.as_dict()) for one in found}
    assert max(rows * columns for rows, columns in warps) == 64 * 64


@pytest.mark.parametrize("problem", MOBILENET, ids=lambda problem: problem["name"])
def test_depthwise_blocks_of_public_layers_have_no_idle_threads(problem: dict[str, Any]) -> None:
    asked = OP.parse({name: value for name, value in problem.items() if name != "name"})
    assert isinstance(asked, Conv2dProblem)
    (found,) = lower(asked, target("sm_90a"), Search(level=0)).candidates
    across = direct.block(found.schedule.as_dict())[1]
    assert asked.k % across == 0
    assert across * 2 >= 64, "bytes of neighbouring threads that lie together"


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("problem", MOBILENET, ids=lambda problem: problem["name"])
def test_public_depthwise_layers_have_neighbours_where_the_stride_is_1(problem: dict[str, Any], dtype: str) -> None:
    fields = {name: value for name, value in problem.items() if name != "name"}
    asked = OP.parse({**fields, "dtype": dtype, "out_dtype": dtype})
    none, one = (lower(asked, target("sm_90a"), Search(level=level)).candidates for level in (0, 1))
    wanted = {0, 3} if problem["stride"] == [1, 1] else {0}
    assert {found.schedule.get("window") for found in one} == wanted
    assert none[0].schedule.get("window") == max(wanted)
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
def test_a_window_is_tried_where_a_problem_can_have_it(changes: dict[str, Any], window: int) -> None:
    problem = conv2d(**{**DEPTHWISE, **changes})
    assert direct.window_of(problem) == window
    for level in (1, 2):
        found = OP.space(problem, target("sm_90a"), Search(level=level)).parts
        tried = {value for part in found for value in part.tunables.get("window", ())}
        assert tried == {0, window}
    assert judge({**DEPTHWISE, **changes}, DIRECT, window=window, filters=2) == ACCEPTED


def test_a_window_is_predicted_to_issue_about_half_of_the_instructions() -> None:
    """As compiled for sm_90a: 205 for a row of the filter, where three taps apart are 393."""
    problem, wide = conv2d(**DEPTHWISE), {**DIRECT, "filters": 8, "pixels": 4}
    counts = []
    for window in (0, 3):
        work = OP.work(problem, Schedule.of({**wide, "window": window}), target("sm_90a"))
        counts.append((work.fma + work.other_instructions) / (work.blocks * work.threads * 3))
    assert counts == pytest.approx([393, 205], rel=0.03)


def test_a_thread_has_no_more_channels_than_one_access() -> None:
    for channels, most in ((33, 1), (34, 2), (36, 4), (40, 8)):
        problem = conv2d(**{**HALF, "c": channels, "k": channels, "groups": channels})
        found = lower(problem, target("sm_90a"), Search(level=1)).candidates
        assert max(int(one.schedule.get("filters")) for one in found) == most


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (HALF, {"implicit_gemm"}),
        ({**HALF, "c": 8}, {"implicit_gemm", "direct"}),
        ({**HALF, "groups": 16}, {"implicit_gemm", "direct"}),
        (DEPTHWISE, {"direct"}),
        ({**DEPTHWISE, "k": 256}, {"implicit_gemm", "direct"}),
    ],
)
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_levels_try_what_is_worth_it(fields: dict[str, Any], expected: set[str], layout: str) -> None:
    assert set(algorithms({**fields, "layout": layout})) == expected


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
        (5, 7, 1, 2),
    ):
        problem = conv2d(h=17, w=19, c=c, k=k, groups=groups, r=r, s=r, padding=r // 2, layout=layout, dtype=dtype)
        found = lower(problem, target(arch), Search(level=0))
        if dtype == "bfloat16" and arch == "sm_75" and found.why_empty:
            assert "needs sm_80" in found.why_empty and c > 8
        else:
            assert found.why_empty is None, (problem, found.why_empty)


def test_a_level_is_inside_the_next() -> None:
    for fields in (HALF, {**HALF, "c": 4}, DEPTHWISE):
        one, two = (OP.space(conv2d(**fields), target("sm_90a"), Search(level=level)) for level in (1, 2))
        assert all(two.index_of(one.by_index(index)) is not None for index in range(one.size))
        assert one.size < two.size


def test_a_joined_space_is_enumerable_by_index() -> None:
    space = OP.space(conv2d(**{**HALF, "c": 4}), target("sm_90a"), Search(level=1))
    every = [space.by_index(index) for index in range(space.size)]
    assert len(set(every)) == space.size == len(list(space))
    assert [space.index_of(one) for one in every] == list(range(space.size))
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
def test_a_search_that_names_tunables_tries_what_has_them(tunables: dict[str, Any], expected: set[str]) -> None:
    assert set(algorithms({**HALF, "c": 4}, tunables=tunables)) == expected


def test_any_list_of_slices_is_tried() -> None:
    found = lower(conv2d(**{**HALF, "n": 1}), target("sm_90a"), Search(tunables={"split_k": [3, 5]}))
    assert {one.schedule.get("split_k") for one in found.candidates} == {3, 5}


@pytest.mark.parametrize(
    ("search", "field", "said"),
    [
        ({"tunables": {"warp_m": [4]}}, "search.tunables.warp_m", "unknown tunable 'warp_m'"),
        ({"tunables": {"pixels": [3]}}, "search.tunables.pixels", "pixels = 3 is not allowed; allowed: 1, 2, 4, 8"),
        ({"tunables": {"algorithm": ["fft"]}}, "search.tunables.algorithm", "allowed: implicit_gemm, direct"),
        ({"tunables": {"pixels": [2], "tile_m": [64]}}, "search.tunables", "pixels, tile_m leave nothing"),
        (
            {"schedules": [dict(TENSOR), {"tile_m": 64}]},
            "search.schedules.1.algorithm",
            "schedule 1 has no 'algorithm'",
        ),
        ({"schedules": [{"algorithm": "fft"}]}, "search.schedules.0.algorithm", "'fft' is not allowed"),
        ({"schedules": [{**DIRECT, "tile_m": 64}]}, "search.schedules.0.tile_m", "unknown tunable 'tile_m'"),
        ({"schedules": [{"algorithm": "direct"}]}, "search.schedules.0.epilogue", "has no 'epilogue'"),
    ],
)
def test_searches_that_mean_nothing_are_refused(search: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(InvalidSearch) as refused:
        lower(conv2d(**{**HALF, "c": 4}), target("sm_90a"), Search(**search))
    assert refused.value.field == field
    assert said in refused.value.message


def judge(fields: dict[str, Any], schedule: dict[str, int | str], **changes: int | str) -> object:
    return OP.rules(conv2d(**fields), Schedule.of({**schedule, **changes}), target("sm_90a"))


def test_good_schedules_are_accepted() -> None:
    assert judge(HALF, TENSOR) == ACCEPTED
    assert judge(DEPTHWISE, DIRECT) == ACCEPTED
    # A thread that is told to manages with fewer registers than it would take.
    assert judge(HALF, TENSOR, tile_n=128, fragments=1, maxnreg=128) == ACCEPTED


@pytest.mark.parametrize(
    ("fields", "schedule", "changes", "rule", "said"),
    [
        (DEPTHWISE, TENSOR, {}, "algorithm", "128 products with one column each are mostly padding"),
        ({**HALF, "c": 8}, TENSOR, {"tile_k": 64, "stages": 4}, "stages", "4 stages for 2 steps"),
        ({**HALF, "c": 3}, BY_ELEMENT, {"warps_m": 1, "warps_n": 1, "tile_k": 64}, "gather", "32 threads for 64"),
        ({**HALF, "layout": "nchw"}, BY_ELEMENT, {"tile_n": 256}, "gather", "128 threads for 256 pixels and 32 taps"),
        ({**HALF, "layout": "nchw"}, TENSOR, {}, "copy", "copies at least 4 bytes; an operand is aligned to 2"),
        ({**HALF, "n": 2**15}, TENSOR, {}, "index", "3774873600 elements with its padding; 32 bits reach"),
        ({**DEPTHWISE, "n": 2**15}, DIRECT, {}, "index", "3774873600 elements"),
        ({**HALF, "groups": 16, "k": 96}, DIRECT, {}, "filters", "would be of several groups of 6"),
        ({**DEPTHWISE, "c": 2, "k": 2, "groups": 2}, DIRECT, {}, "filters", "filters = 4 is mostly padding for k = 2"),
        (DEPTHWISE, DIRECT, {"threads_k": 64, "filters": 8}, "threads_k", "blocks of 512 filters are mostly padding"),
        (DEPTHWISE, DIRECT, {"taps": 64}, "taps", "taps = 64 is mostly padding for 9"),
        ({**DEPTHWISE, "n": 1, "h": 3, "w": 3}, DIRECT, {"pixels": 8}, "pixels", "blocks of 128 pixels are mostly"),
        (DEPTHWISE, DIRECT, {"window": 5}, "window", "with filters of 5 columns, stride_w = 1 and dilation_w"),
        (DEPTHWISE, DIRECT, {"window": 5}, "window", "is depthwise, in nhwc, with 3 columns, stride_w = 1"),
        ({**DEPTHWISE, "k": 256}, DIRECT, {"window": 3}, "window", "this one is not depthwise"),
        ({**DEPTHWISE, "layout": "nchw"}, DIRECT, {"window": 3}, "window", "in nchw"),
        ({**DEPTHWISE, "stride": [1, 2]}, DIRECT, {"window": 3}, "window", "stride_w = 2"),
        ({**DEPTHWISE, "dilation": [1, 3]}, DIRECT, {"window": 3}, "window", "dilation_w = 3"),
        ({**DEPTHWISE, "w": 2}, DIRECT, {"window": 3, "pixels": 4}, "pixels", "4 neighbouring pixels are mostly"),
        ({**DEPTHWISE, "n": 64}, DIRECT, {"window": 3, "pixels": 8, "filters": 8, "threads": 512},
         "registers", "512 threads of about 158"),
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


def test_a_cap_on_the_workspace_rejects_with_the_number() -> None:
    problem = conv2d(**{**HALF, "n": 1})
    schedule = Schedule.of({**TENSOR, "split": "workspace", "split_k": 4})
    needed = 4 * 4 * 28 * 28 * 128
    assert OP.cost(problem, schedule).workspace_bytes == needed
    assert OP.rules(problem, schedule, target("sm_90a"), needed) == ACCEPTED
    assert OP.rules(problem, schedule, target("sm_90a"), needed - 1) == Rejected(
        "workspace", f"needs {needed} bytes of workspace, the limit is {needed - 1}"
    )


NODES: list[dict[str, Any]] = [{"op": "bias"}, {"op": "relu"}]


@pytest.mark.parametrize("fields", [HALF, DEPTHWISE, {**HALF, "layout": "nchw"}, {**HALF, "n": 1, "c": 2048}])
def test_levels_1_and_2_try_the_default_schedule_with_a_separate_epilogue(fields: dict[str, Any]) -> None:
    problem, sheet = conv2d(**fields, epilogue=NODES), target("sm_90a")
    (default,) = OP.space(problem, sheet, Search(level=0))
    for level in (1, 2):
        every = OP.space(problem, sheet, Search(level=level))
        (found,) = (one for one in every if one.get("epilogue") == "separate")
        undivided = {name: value for name, value in default.as_dict().items() if name in found.as_dict()}
        undivided |= {name: value for name, value in (("split", "none"), ("split_k", 1)) if name in undivided}
        undivided |= {"stream_blocks": 0} if "stream_blocks" in undivided else {}
        assert found == Schedule.of({**undivided, "epilogue": "separate"})
        assert OP.rules(problem, found, sheet) == ACCEPTED
        sample = lower(problem, sheet, Search(level=level, limit=3)).candidates
        assert [one.schedule for one in sample][:2] == [default, found]
        assert len({one.schedule for one in sample}) == 3
    assert all(one.get("epilogue") == "fused" for one in OP.space(conv2d(**fields), sheet, Search(level=1)))


def test_every_layer_of_the_example_has_a_separate_epilogue_to_compare_with() -> None:
    request = json.loads((ROOT / "examples" / "resnet18.json").read_text())
    for one in request["problems"]:
        problem = OP.parse({name: value for name, value in one.items() if name != "name"})
        found = OP.space(problem, target(request["target"]), Search(level=1)).parts[-1].by_index(0)
        assert found.get("epilogue") == "separate"
        assert OP.rules(problem, found, target(request["target"])) == ACCEPTED


def test_a_search_may_ask_for_separate_epilogues() -> None:
    problem, both = conv2d(**HALF, epilogue=NODES), {"epilogue": ["fused", "separate"]}
    found = lower(problem, target("sm_90a"), Search(tunables={**both, "tile_m": [64], "tile_n": [64]}))
    assert {one.schedule.get("epilogue") for one in found.candidates} == {"fused", "separate"}
    alone = lower(conv2d(**HALF), target("sm_90a"), Search(tunables={**both, "tile_m": [64], "tile_n": [64]}))
    assert {one.schedule.get("epilogue") for one in alone.candidates} == {"fused"}
    assert alone.rejections["epilogue"].message == "there is no epilogue that could be separate"


SEPARATE = {"epilogue": "separate"}


def test_a_separate_epilogue_needs_sums_that_are_whole_and_room_for_them() -> None:
    with_nodes = {**HALF, "epilogue": NODES}
    assert judge(with_nodes, TENSOR, **SEPARATE) == ACCEPTED
    divided = judge({**with_nodes, "n": 1}, TENSOR, **SEPARATE, split="workspace", split_k=4)
    assert isinstance(divided, Rejected) and divided.rule == "epilogue"
    schedule, needed = Schedule.of({**TENSOR, **SEPARATE}), 4 * 8 * 28 * 28 * 128
    assert OP.rules(conv2d(**with_nodes), schedule, target("sm_90a"), needed) == ACCEPTED
    assert OP.rules(conv2d(**with_nodes), schedule, target("sm_90a"), needed - 1) == Rejected(
        "workspace", f"needs {needed} bytes of workspace, the limit is {needed - 1}"
    )
    assert OP.rules(conv2d(**with_nodes, out_dtype="float32"), schedule, target("sm_90a"), 0) == ACCEPTED


@pytest.mark.parametrize(("out_dtype", "size"), [("float16", 2), ("float32", 4)])
@pytest.mark.parametrize("images", [8, 512])
def test_the_work_of_a_separate_epilogue_has_its_launches_and_their_traffic(
    out_dtype: str, size: int, images: int
) -> None:
    problem = conv2d(**{**HALF, "n": images}, out_dtype=out_dtype, epilogue=[*NODES, {"op": "residual"}])
    fused, apart = Schedule.of(TENSOR), Schedule.of({**TENSOR, **SEPARATE})
    cost, sheet, outputs = OP.cost(problem, apart), target("sm_90a"), images * 28 * 28 * 128
    assert (cost.launches, cost.workspace_bytes) == (4, 4 * outputs if size == 2 else 0)
    assert OP.cost(problem, fused).launches == 1
    work = OP.work(problem, apart, sheet)
    bias, relu, residual = work.others
    assert [one.l2_bytes for one in work.others] == [
        8 * outputs + size * 128, 8 * outputs, 4 * outputs + size * outputs + size * outputs
    ]  # fmt: skip
    # What the launch before left in the L2 comes from there; 205 MB of sums do not stay.
    in_l2 = images == 8
    assert relu.dram_bytes == (0 if in_l2 else 8 * outputs)
    assert residual.dram_bytes == (0 if in_l2 else 4 * outputs) + 2 * size * outputs
    assert bias.dram_bytes == relu.dram_bytes + size * 128
    plain = OP.work(conv2d(**{**HALF, "n": images}, out_dtype="float32"), fused, sheet)
    assert (work.dram_bytes, work.mma) == (plain.dram_bytes, plain.mma)


def test_cost_counts_every_operand_once() -> None:
    problem = conv2d(**HALF, epilogue=[{"op": "bias"}, {"op": "relu"}])
    cost = OP.cost(problem, Schedule.of(TENSOR))
    outputs = 8 * 28 * 28 * 128
    assert cost.flops == 2 * outputs * 9 * 128 + 2 * outputs
    assert cost.bytes_read == 2 * (8 * 28 * 28 * 128 + 128 * 9 * 128 + 128)
    assert (cost.bytes_written, cost.launches, cost.workspace_bytes) == (2 * outputs, 1, 0)


def test_pixels_that_no_window_meets_cost_nothing() -> None:
    apart: dict[str, Any] = {**HALF, "r": 1, "s": 1, "padding": 0, "stride": 2}
    weights, image = 2 * 128 * 128, 2 * 8 * 28 * 28 * 128
    for layout, seen in (("nhwc", image // 4), ("nchw", image // 2)):
        problem = conv2d(**apart, layout=layout)
        schedule = Schedule.of(BY_ELEMENT)
        assert OP.cost(problem, schedule).bytes_read == seen + weights
        work, least = OP.work(problem, schedule, target("sm_90a")), OP.cost(problem, schedule)
        assert work.dram_bytes == least.bytes_read + least.bytes_written


def test_work_asks_the_dram_for_the_image_once_and_the_l2_for_every_tap() -> None:
    problem = conv2d(**HALF)
    work = OP.work(problem, Schedule.of(TENSOR), target("sm_90a"))
    least = OP.cost(problem, Schedule.of(TENSOR))
    assert work.dram_bytes == least.bytes_read + least.bytes_written
    assert work.l2_bytes > 9 * least.bytes_read
    assert work.blocks == -(-8 * 28 * 28 // 64) * 2
