"""What holds for convolutions in all directions: schedules in every level, exact sums, the examples."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from benchmarks.shapes import shapes_of
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.convolution import far
from codegen.problem import Problem
from codegen.run_once import LastBlocks
from codegen.search.rules import ACCEPTED
from codegen.search.search import Search
from codegen.targets import target
from service.http.faults import faults_of
from tests.operators.conv2d.convolutions import level_0
from tests.operators.conv2d.kernels import convolution
from tests.operators.harness.declarations import LEVEL_0, LEVEL_1, SM_90A
from tests.support.run.each_run import some_each_run
from tests.support.run.places import ROOT

OPERATORS = ("conv2d", "conv2d_dgrad", "conv2d_wgrad")
EXAMPLES = {"conv2d": "resnet18", "conv2d_dgrad": "resnet18_dgrad", "conv2d_wgrad": "resnet18_wgrad"}
PROBLEMS = 150
LAST_STAGE: dict[str, Any] = {"n": 1, "h": 7, "w": 7, "c": 960, "k": 960, "groups": 960, "r": 3, "s": 3, "padding": 1}


def test_a_refusal_over_http_has_the_field_and_the_numbers() -> None:
    op = operator("conv2d")
    fields = {"n": 1, "h": 2, "w": 2, "c": 4, "k": 4, "r": 3, "s": 3, "epilogue": [{"op": "bias", "axis": "n"}]}
    with pytest.raises(ValidationError) as refused:
        op.parse(fields)
    faults = {fault.field: fault for fault in faults_of(refused.value, op.problem_type, fields)}
    assert set(faults) == {"padding", "epilogue[0].axis"}
    assert "h = 2 is 2 with it" in faults["padding"].detail


@pytest.mark.parametrize(
    ("name", "fields", "shared", "most"),
    some_each_run(
        [
            ("conv2d", {"n": 1, "h": 1, "w": 1, "c": 2**21, "k": 1, "r": 1, "s": 1}, "w", 2**21),
            ("conv2d_dgrad", {"n": 1, "h": 2, "w": 2, "c": 1, "k": 2**20, "r": 2, "s": 1, "padding": 1}, "w", 2**21),
            ("conv2d_wgrad", {"n": 2, "h": 1024, "w": 1024, "c": 1, "k": 2, "r": 1, "s": 1}, "dy", 2 * 2**21),
            (
                "conv2d_wgrad",
                {"n": 2, "h": 1024, "w": 1024, "c": 1, "k": 2, "r": 1, "s": 1, "layout": "nchw"},
                "dy",
                2**22,
            ),
        ],
        2,
    ),
)
def test_a_sum_with_more_products_than_are_exact_has_fewer_of_them(
    name: str, fields: dict[str, Any], shared: str, most: int
) -> None:
    op, problem = operator(name), convolution(name, **fields)
    inputs = op.make_inputs(problem, "integer", np.random.default_rng(4))
    assert 0 < np.count_nonzero(inputs[shared]) < most
    assert (op.reference(problem, inputs, exact=True)[1] == 0.0).all()


# ---- levels


def random_problem(name: str, rnd: random.Random) -> Problem:
    """Small and large extents, few and many channels, depthwise, multipliers and groups."""
    while True:
        c, k = rnd.choice([1, 2, 3, 5, 8, 16, 24, 64, 96, 256, 960]), rnd.choice([1, 2, 3, 6, 8, 10, 32, 64, 256])
        kind = rnd.choice(["one", "one", "depthwise", "multiplier", "groups"])
        groups = {"one": 1, "groups": 4}.get(kind, c)
        k = {"depthwise": c, "multiplier": 2 * c, "groups": 4 * k}.get(kind, k)
        c = 4 * c if kind == "groups" else c
        r, h = rnd.choice([1, 1, 3, 3, 5, 7]), rnd.choice([1, 2, 4, 7, 14, 28, 56, 112])
        fields = {
            "operator": name, "n": rnd.choice([1, 1, 2, 8, 32]), "h": h, "w": rnd.choice([h, h, 1, 7, 13]), "c": c,
            "k": k, "r": r, "s": rnd.choice([r, r, 1, 3]), "groups": groups, "stride": rnd.choice([1, 1, 2, 3]),
            "padding": rnd.choice([0, 1, r // 2, r - 1]), "dilation": rnd.choice([1, 1, 2]),
            "layout": rnd.choice(["nhwc", "nchw"]), "dtype": rnd.choice(["float32", "float16", "bfloat16"]),
        }  # fmt: skip
        try:
            return operator(name).parse(fields)
        except ValidationError:
            continue  # no output


@pytest.mark.parametrize("name", OPERATORS)
def test_random_convolutions_have_schedules_in_every_level(name: str) -> None:
    rnd = random.Random(7)
    for problem in (random_problem(name, rnd) for _ in range(PROBLEMS)):
        zero = lower(problem, SM_90A, LEVEL_0)
        assert zero.why_empty is None, (problem, zero.why_empty)
        (first,) = zero.candidates
        for level in (1, 2):
            # A sample begins with the first guess where the level has it.
            (candidate,) = lower(problem, SM_90A, Search(level=level, limit=1)).candidates
            assert candidate == first, (problem, level)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(
    "fields",
    [
        {**LAST_STAGE, "layout": "nchw"},
        {**LAST_STAGE, "layout": "nchw", "h": 4, "w": 4},
        {**LAST_STAGE, "h": 14, "w": 14, "c": 576, "k": 576, "groups": 576, "stride": 2, "layout": "nchw"},
        {"n": 2, "h": 28, "w": 28, "c": 4, "k": 1, "r": 3, "s": 3},
        {"n": 2, "h": 28, "w": 28, "c": 1, "k": 8, "r": 3, "s": 3},
    ],
)
def test_level_1_has_several_schedules_of_narrow_and_small_layers(
    fields: dict[str, Any], name: str, dtype: str
) -> None:
    problem = operator(name).parse({"operator": name, **fields, "dtype": dtype})
    assert len(lower(problem, SM_90A, LEVEL_1).candidates) >= 4


@pytest.mark.parametrize(
    ("name", "change", "tile"),
    [
        ("conv2d_dgrad", {}, (128, 64)),
        ("conv2d_dgrad", {"k": 128, "stride": 2}, (128, 64)),
        ("conv2d_wgrad", {}, (64, 128)),
    ],
)
def test_the_first_guess_counts_the_bytes_that_are_gathered_once_not_for_every_tap(
    name: str, change: dict[str, Any], tile: tuple[int, int]
) -> None:
    layer = {"n": 32, "h": 56, "w": 56, "c": 64, "k": 64, "padding": 1, "dtype": "float16"}
    schedule = level_0(name, **{**layer, **change}).schedule
    assert (schedule.get("tile_m"), schedule.get("tile_n")) == tile


# ---- examples


def unnamed(shape: dict[str, Any]) -> Any:
    return operator(shape["operator"]).parse({name: value for name, value in shape.items() if name != "name"})


def example(name: str) -> dict[str, Any]:
    request: dict[str, Any] = json.loads((ROOT / "examples" / f"{name}.json").read_text())
    return request


@pytest.mark.parametrize("name", OPERATORS)
def test_the_example_has_every_layer_of_its_network(name: str) -> None:
    request = example(EXAMPLES[name])
    problems = [unnamed(shape) for shape in request["problems"] if shape["operator"] == name]
    # The stem's image needs no gradient; the example has filters' gradients in fp32.
    public = [
        shape
        for shape in shapes_of(name)
        if shape["name"].startswith("resnet18/b8/") and not shape["name"].endswith("/wgrad_fp16")
        if name != "conv2d_dgrad" or "stem" not in shape["name"]
    ]
    plain = {problem.model_copy(update={"epilogue": ()}).digest for problem in problems}
    assert plain == {unnamed(shape).digest for shape in public}
    assert name != "conv2d_wgrad" or (len(problems) == len(public) and not any(p.epilogue for p in problems))
    search, sheet = Search.model_validate(request["search"]), target(request["target"])
    assert all(len(lower(problem, sheet, search).candidates) == search.limit for problem in problems)


def test_every_layer_of_the_example_has_a_separate_epilogue_to_compare_with() -> None:
    request, op = example("resnet18"), operator("conv2d")
    for problem in map(unnamed, request["problems"]):
        space: Any = op.space(problem, target(request["target"]), LEVEL_1)
        separate = space.parts[-1].by_index(0)
        assert separate.get("epilogue") == "separate"
        assert op.rules(problem, separate, target(request["target"])) == ACCEPTED


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
    request = example("resnet_training")
    search, sheet = Search.model_validate(request["search"]), target(request["target"])
    wanted = set()
    for network, blocks in (("resnet18", basic_blocks()), ("resnet50", bottlenecks())):
        for way, (h, c, k, r, stride) in product(("forward", "dgrad", "wgrad"), {(224, 3, 64, 7, 2), *blocks}):
            own = "conv2d" if way == "forward" else f"conv2d_{way}"
            fields = {"h": h, "w": h, "c": c, "k": k, "r": r, "s": r, "stride": stride, "padding": r // 2}
            out = {"out_dtype": "float32"} if way == "wgrad" else {}
            for images in (8, 32):
                layer = {"operator": own, "n": images, "dtype": "float16", **fields, **out}
                wanted.add((f"{network}/b{images}", way, operator(own).parse(layer).digest))
    named = {shape["name"]: unnamed(shape) for shape in request["problems"]}
    layers = [("/".join(name.split("/")[:2]), name.split("/")[-1], problem.digest) for name, problem in named.items()]
    assert len(layers) == len(request["problems"]) == 2 * 3 * (11 + 23)
    assert set(layers) == wanted
    for layer in named.values():
        assert lower(layer, sheet, search).candidates


@pytest.mark.parametrize(("groups", "divided"), [(1, 3), (2, 0)])
def test_the_last_images_of_divided_sums_are_the_last_blocks_of_one_group_alone(groups: int, divided: int) -> None:
    """Partial sums of a group lie behind those of all images of the group before."""
    op = operator("conv2d")
    few, many = (convolution("conv2d", n=n, h=4, w=4, c=8, k=8, r=1, s=1, groups=groups) for n in (2, 2**26))
    tiles = {"tile_m": 16, "tile_n": 16, "tile_k": 16}
    for split, launches in (("none", 1), ("workspace", divided and 2), ("atomic", divided), ("stream", divided and 2)):
        last = far.of_product({**tiles, "split": split}, op.product, lambda p: 1, 1)  # type: ignore[attr-defined]
        assert len(last(few, many)) == launches, split
        assert len(far.with_nodes(last, 2)(few, many)) == (launches and launches + 2), split


@pytest.mark.parametrize("name", OPERATORS)
def test_a_far_case_is_of_a_problem_that_can_be_had(name: str) -> None:
    """Of few channels there are more pixels than can be indexed before their elements lie beyond 32 bits."""
    narrow = convolution(name, n=2, h=5, w=5, c=1, k=1, r=2, s=2, stride=2)
    reach = far.Reach(stored=True, whole=True, within=lambda p: True)
    assert far.last_images([narrow], reach, lambda few, many: (LastBlocks(1),), lambda many: ()) == []
