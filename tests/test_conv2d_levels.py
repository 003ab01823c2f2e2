"""Every level has schedules for every convolution, forward and backward, and level 0's is in all of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pydantic import ValidationError

from codegen.lower import lower
from codegen.operators import operator
from codegen.problem import Problem
from codegen.search import Search
from codegen.targets import target

OPERATORS = ("conv2d", "conv2d_dgrad", "conv2d_wgrad")
DRAWS = 150
LAST_STAGE: dict[str, Any] = {"n": 1, "h": 7, "w": 7, "c": 960, "k": 960, "groups": 960, "r": 3, "s": 3, "padding": 1}


def drawn(name: str, rnd: random.Random) -> Problem:
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
def test_drawn_convolutions_have_schedules_in_every_level(name: str) -> None:
    rnd, sheet = random.Random(7), target("sm_90a")
    for problem in (drawn(name, rnd) for _ in range(DRAWS)):
        zero = lower(problem, sheet, Search(level=0))
        assert zero.why_empty is None, (problem, zero.why_empty)
        (first,) = zero.candidates
        for level in (1, 2):
            # A sample begins with the first guess where the level has it.
            (one,) = lower(problem, sheet, Search(level=level, limit=1)).candidates
            assert one == first, (problem, level)


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
    assert len(lower(problem, target("sm_90a"), Search(level=1)).candidates) >= 4
