"""Reductions: what is refused, where the fault is said to be, and what is filled in."""

from __future__ import annotations

import json
import math
import random
from itertools import cycle, permutations
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from benchmarks.shapes import shapes_of
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.reduce.axes import packed_strides
from codegen.operators.reduce.problem import FUNCTIONS, LARGEST_COUNT, ReduceProblem
from codegen.predict_before import predict_before
from codegen.rules import Accepted, Rejected
from codegen.schedule import Schedule
from codegen.search import Search
from codegen.targets import target
from tests.drawn import seed_of_this_run
from tests.drawn_reduce import drawn_problem
from tests.reduce_kernels import reduction

OP = operator("reduce")
ROOT = Path(__file__).resolve().parent.parent


def faults(**fields: Any) -> dict[str, str]:
    """Where the problem is refused, and the sentence."""
    with pytest.raises(ValidationError) as refused:
        reduction(**fields)
    return {".".join(map(str, error["loc"])): error["msg"] for error in refused.value.errors()}


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"shape": [], "axes": [0]}, "shape", "at least 1 item"),
        ({"shape": [2] * 9}, "shape", "at most 8 items"),
        ({"shape": [60, -1]}, "shape.1", "greater than or equal to 0"),
        ({"shape": [60, 1.5]}, "shape.1", "valid integer"),
        ({"axes": []}, "axes", "at least 1 item"),
        ({"axes": [2]}, "axes", "has 2, and the shape has 2 axes; -2 to 1 are allowed"),
        ({"axes": [0, -3]}, "axes", "has -3, and the shape has 2 axes; -2 to 1 are allowed"),
        ({"axes": [1, 1]}, "axes", "names axis 1 more than once; each is allowed once"),
        ({"axes": [0, -2]}, "axes", "names axis 0 more than once"),
        ({"axes": [0, "1"]}, "axes.1", "valid integer"),
        ({"shape": [60, 0]}, "axes", "leave an axis of extent 0, so that there is nothing to compute"),
        ({"shape": [2**30, 2], "axes": [0, 1]}, "axes", f"2147483648 values of an output; at most {LARGEST_COUNT}"),
        ({"shape": [2, 2**30, 2]}, "axes", f"2147483648 outputs; at most {LARGEST_COUNT}"),
        ({"strides": [48]}, "strides", "has 1 strides for 2 axes; one for each axis is allowed"),
        ({"strides": [48, -1]}, "strides.1", "greater than or equal to 0"),
        ({"strides": [47, 1]}, "strides", "of axis 0 is 47, less than the 48 elements"),
        ({"strides": [48, 0]}, "strides", "of axis 1 is 0, less than the 1 elements"),
        ({"shape": [0, 48], "fn": "max"}, "fn", "allowed there: sum, sum_of_squares, logsumexp"),
        ({"shape": [0, 48], "fn": "argmax"}, "fn", "is argmax, which has no value where a reduced axis has extent 0"),
        ({"shape": [0, 48], "fn": "mean"}, "fn", "is mean, which has no value"),
        ({"fn": "median"}, "fn", "'logsumexp'"),
        ({"dtype": "int8"}, "dtype", "'int32'"),
        ({"dtype": "int32", "map": "square"}, "map", "is square; of int32 only identity is allowed"),
        ({"fn": "argmax", "map": "relu_grad"}, "map", "with argmax only identity is allowed"),
        ({"write_map": True}, "write_map", "would copy the input"),
        ({"out_dtype": "int32"}, "out_dtype", "is int32; of sum of float32 allowed are float32, float16, bfloat16"),
        ({"fn": "argmax", "out_dtype": "float32"}, "out_dtype", "allowed are int32, int64"),
        ({"dtype": "int32", "fn": "variance", "out_dtype": "int64"}, "out_dtype", "allowed are float32, float16"),
        ({"fn": "argmax", "epilogue": [{"op": "relu"}]}, "epilogue", "with out_dtype int32 it must be empty"),
        ({"epilogue": [{"op": "bias", "axis": "n"}]}, "epilogue.0", "does not match any of the expected tags"),
        ({"keepdims": True}, "keepdims", "not permitted"),
    ],
)  # fmt: skip
def test_what_cannot_be_computed_is_refused_by_name(fields: dict[str, Any], field: str, said: str) -> None:
    found = faults(**fields)
    assert list(found) == [field]
    assert said in found[field]


def test_defaults_become_explicit() -> None:
    assert reduction(axes=[-1, 0], shape=[3, 4, 5]).canonical() == {
        "operator": "reduce", "shape": [3, 4, 5], "axes": [0, 2], "strides": [20, 5, 1], "dtype": "float32",
        "fn": "sum", "map": "identity", "write_map": False, "out_dtype": "float32", "epilogue": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "fn", "out"),
    [
        ("float16", "sum", "float16"), ("bfloat16", "argmax", "int32"), ("int32", "sum", "int64"),
        ("int32", "sum_of_squares", "int64"), ("int32", "max", "int32"), ("int32", "mean", "float32"),
        ("int32", "variance", "float32"), ("int32", "logsumexp", "float32"),
    ],
)  # fmt: skip
def test_the_output_has_a_dtype_of_its_own(dtype: str, fn: str, out: str) -> None:
    assert reduction(dtype=dtype, fn=fn).out_dtype == out


def test_the_stride_of_one_element_says_nothing() -> None:
    assert reduction(shape=[4, 1, 6], strides=[6, 77, 1]).digest == reduction(shape=[4, 1, 6]).digest


def test_problems_of_the_same_lists_share_kernels() -> None:
    flat = OP.signature(reduction(shape=[676, 16], axes=[0]))
    assert OP.signature(reduction(shape=[4, 13, 13, 16], axes=[0, 1, 2])) == flat
    assert OP.signature(reduction(shape=[4, 13, 13, 16], axes=[0, 2])) != flat
    assert OP.signature(reduction(shape=[16, 676], axes=[1])) != flat


def permuted(shape: list[int], order: list[int], apart: int = 1) -> dict[str, Any]:
    """Shape and strides of an array whose axes lie in this order, the outermost first."""
    packed = packed_strides([shape[axis] for axis in order])
    return {"shape": shape, "strides": [packed[order.index(axis)] * apart for axis in range(len(shape))]}


CHANNELS_LAST = permuted([8, 64, 28, 28], [0, 2, 3, 1])


@pytest.mark.parametrize(
    ("fields", "kept_axes", "scattered"),
    [
        ({**permuted([512, 256, 256], [2, 1, 0]), "axes": [1]}, 2, True),
        ({**CHANNELS_LAST, "axes": [0]}, 2, True),
        ({**CHANNELS_LAST, "axes": [2]}, 3, True),
        ({**CHANNELS_LAST, "axes": [3]}, 3, True),
        ({**CHANNELS_LAST, "axes": [2, 3]}, 2, False),
        ({**CHANNELS_LAST, "axes": [0, 2, 3]}, 1, False),
    ],
)  # fmt: skip
def test_a_permuted_array_is_read_in_its_own_order(fields: dict[str, Any], kept_axes: int, scattered: bool) -> None:
    problem = reduction(**fields, dtype="float16")
    found = OP.signature(problem)
    assert (found["inner"], found["align"]) == ("kept", 8)
    assert (found["kept_axes"], found["scattered"]) == (kept_axes, scattered)
    (first,) = lower(problem, target("sm_90a"), Search(level=0)).candidates
    assert first.schedule.get("vector") == 8
    # All that is not as in C order is that each output may be a sector of its own.
    cost, work = OP.cost(problem, first.schedule), OP.work(problem, first.schedule, target("sm_90a"))
    outputs = problem.outputs * 32 if scattered else problem.outputs * 2
    assert work.l2_bytes == cost.bytes_read + outputs + cost.workspace_bytes


@pytest.mark.parametrize("axes", [[0], [1], [2], [0, 2], [1, 2]])
def test_test_problems_have_the_signature_of_a_permuted_array(axes: list[int]) -> None:
    for order in permutations(range(4)):
        problem = reduction(**permuted([4, 5, 6, 8], list(order)), axes=axes)
        for candidate in lower(problem, target("sm_90a"), Search(level=1)).candidates[:2]:
            assert all(OP.signature(one) == OP.signature(problem) for one in OP.test_problems(candidate.kernel))


@pytest.mark.parametrize(
    ("fields", "least"),
    [
        ({**permuted([256, 64, 256], [0, 1, 2], 2), "axes": [1]}, 2.0),  # every other element
        ({**permuted([256, 64, 256], [2, 1, 0]), "axes": [0, 2], "fn": "argmax"}, 16.0),  # its order is not the array's
    ],
)  # fmt: skip
def test_sectors_of_which_a_warp_needs_little_are_predicted(fields: dict[str, Any], least: float) -> None:
    problem, packed = reduction(**fields, dtype="float16"), reduction(**{**fields, "strides": None}, dtype="float16")
    where = target("sm_90a")
    for one in lower(problem, where, Search(level=1)).candidates:
        assert OP.work(problem, one.schedule, where).l2_bytes >= least * OP.cost(problem, one.schedule).bytes_read
    best, of_packed = (
        min(predict_before(one, where).us for one in lower(given, where, Search(level=1)).candidates)
        for given in (problem, packed)
    )
    assert best > 1.5 * of_packed


def test_the_schema_takes_what_the_problem_takes() -> None:
    schema = OP.schema()
    jsonschema.validate({"operator": "reduce", "shape": [8, 4], "axes": [-1], "fn": "max"}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"operator": "reduce", "shape": [8, 4], "axes": []}, schema)


@pytest.mark.parametrize("fields", shapes_of("reduce"), ids=lambda fields: fields["name"])
def test_a_public_reduction_has_schedules_at_level_1(fields: dict[str, Any]) -> None:
    problem = OP.parse({name: value for name, value in fields.items() if name != "name"})
    found = lower(problem, target("sm_90a"), Search(level=1))
    assert 12 <= len(found.candidates) <= 64
    vectors = {one.schedule.get("vector") for one in found.candidates}
    assert vectors == {16 // {"float32": 4, "float16": 2}[fields["dtype"]]}  # 16 bytes


def test_the_example_has_every_public_reduction_fused_gradients_too() -> None:
    request = json.loads((ROOT / "examples" / "bias_gradients.json").read_text())
    public = shapes_of("reduce")
    assert request["problems"] == public
    fused = [OP.parse({k: v for k, v in one.items() if k != "name"}) for one in public if "write_map" in one]
    assert len(fused) == 2
    assert all(isinstance(one, ReduceProblem) and one.write_map for one in fused)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize(
    "shape", [[1], [1023, 1023], [17, 5001, 3], [0, 5], [2, 3, 2, 3, 2, 3], [2**20, 8], [8, 2**20]]
)
def test_every_problem_has_a_schedule_to_begin_with(shape: list[int], arch: str) -> None:
    for fn in ("sum", "logsumexp"):
        for axes in ([0], list(range(len(shape)))):
            problem = reduction(shape=shape, axes=axes, fn=fn)
            assert lower(problem, target(arch), Search(level=0)).why_empty is None


EXTENTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 17, 64, 100, 1000, 4096, 50_000, 2**20, 2**25)
FEW_VALUES: list[dict[str, Any]] = [
    {"shape": [32, 3, 224, 224], "axes": [1], "dtype": "float16"},
    *({"shape": [extent, 4096, 4096], "axes": [0]} for extent in range(1, 9)),
    {"shape": [32, 5, 56, 56], "axes": [1]},
]


def drawn_problems() -> list[ReduceProblem]:
    """Those of the property test, and small and large extents in any order."""
    rng = random.Random(seed_of_this_run())
    found = [drawn_problem(number, rng) for number in range(120)]
    while len(found) < 240:
        shape = rng.choices(EXTENTS, k=rng.randint(1, 4))
        if math.prod(shape) > LARGEST_COUNT:
            continue
        axes, fn = rng.sample(range(len(shape)), rng.randint(1, len(shape))), rng.choice(FUNCTIONS)
        found.append(reduction(shape=shape, axes=axes, fn=fn, dtype=rng.choice(("float32", "float16"))))
    return [*found, *(reduction(**fields) for fields in FEW_VALUES)]


def test_every_level_has_candidates_and_those_of_the_levels_below() -> None:
    for problem, arch in zip(drawn_problems(), cycle(("sm_90a", "sm_75", "sm_80")), strict=False):
        levels = [lower(problem, target(arch), Search(level=level)) for level in (0, 1)]
        first, most = ({one.schedule for one in level.candidates} for level in levels)
        assert len(first) == 1, (problem, levels[0].why_empty)
        assert first <= most, (problem, levels[1].why_empty)
        widest = OP.space(problem, target(arch), Search(level=2))
        assert all(widest.index_of(one) is not None for one in most), problem


@pytest.mark.parametrize(
    ("schedule", "rule", "said"),
    [
        ({"lanes": 128}, "lanes", "128 threads side by side of a block of 64"),
        ({"vector": 2, "algorithm": "row", "lanes": 8}, "vector", "the reduced axes, whose elements are no neighbours"),
        ({"vector": 8}, "vector", "vectors of 8 elements; rows begin at multiples of 4 (4 bytes each)"),
        ({"slices": 3}, "slices", "3 slices where split is none"),
        ({"split": "workspace"}, "slices", "1 slices where split is workspace"),
        ({"split": "workspace", "slices": 59}, "slices", "59 slices of 60 steps; 30 have some"),
        ({"lanes": 32}, "lanes", "32 threads side by side are mostly idle for 12"),
        ({"threads": 1024}, "threads", "128 rows of threads are mostly idle for 60"),
        ({"unroll": 16}, "unroll", "16 vectors in flight, 8 apart, are mostly none of 60"),
    ],
)  # fmt: skip
def test_a_rule_says_its_numbers(schedule: dict[str, Any], rule: str, said: str) -> None:
    right = {"algorithm": "column", "threads": 64, "lanes": 8, "vector": 4, "unroll": 4, "split": "none", "slices": 1}
    assert isinstance(OP.rules(reduction(), Schedule.of(right), target("sm_90a")), Accepted)
    found = OP.rules(reduction(), Schedule.of({**right, **schedule}), target("sm_90a"))
    assert isinstance(found, Rejected)
    assert (found.rule, said in found.message) == (rule, True), found


def test_a_workspace_over_the_limit_breaks_a_rule() -> None:
    found = lower(reduction(shape=[676000, 16]), target("sm_90a"), Search(level=1), workspace_limit=1000)
    assert {"workspace"} <= set(found.rejections)
    assert all(one.schedule.get("split") == "none" for one in found.candidates)
