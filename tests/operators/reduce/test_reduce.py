"""Reductions along any axes."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Mapping
from functools import partial
from itertools import cycle, permutations, product
from typing import Any

import numpy as np
import pytest

from benchmarks.shapes import public_shape, shapes_of
from codegen.arrays import erf
from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operand import packed_strides
from codegen.operators import operator
from codegen.operators.reduce.problem import FUNCTIONS, LARGEST_COUNT, MAPS, OF_INT64, OF_NOTHING, ReduceProblem
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.search.schedule import Schedule
from codegen.targets import target
from tests.operators.harness import declarations as declare
from tests.operators.harness.checks import add_checks
from tests.operators.harness.declarations import LEVEL_0, LEVEL_1, LEVEL_2, SM_90A, Array, Inputs, Rejection
from tests.operators.harness.machine_code import Code
from tests.operators.reduce.kernels import kernel, reduction
from tests.operators.reduce.random_cases import random_cases, random_problem
from tests.support.kernels import cpu_helpers
from tests.support.kernels.random_cases import seed_of_this_run
from tests.support.kernels.ring_integers import each, wrapped
from tests.support.run.places import ROOT
from workers.cpu.build import build_cpu
from workers.cpu.library import CpuLibrary

OP = operator("reduce")

# ---- problems

DEFAULTS = {"shape": [3, 4, 5], "axes": [0, 2], "strides": [20, 5, 1], "dtype": "float32", "fn": "sum",
            "map": "identity", "write_map": False, "out_dtype": "float32", "epilogue": []}  # fmt: skip
PROBLEMS = declare.Problems(
    refused=[
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
        ({"dtype": "int64", "map": "square"}, "map", "is square; of int64 only identity is allowed"),
        *(
            ({"dtype": "int64", "fn": fn}, "fn", f"is {fn}, which divides, multiplies without a shift, or tells where")
            for fn in ("mean", "sum_of_squares", "argmax", "variance", "logsumexp")
        ),
        ({"dtype": "int64", "out_dtype": "int32"}, "out_dtype", "of sum of int64 allowed are int64"),
        ({"dtype": "int64", "epilogue": [{"op": "relu"}]}, "epilogue", "with out_dtype int64 it must be empty"),
        ({"fn": "argmax", "map": "relu_grad"}, "map", "with argmax only identity is allowed"),
        ({"write_map": True}, "write_map", "would copy the input"),
        ({"out_dtype": "int32"}, "out_dtype", "is int32; of sum of float32 allowed are float32, float16, bfloat16"),
        ({"fn": "argmax", "out_dtype": "float32"}, "out_dtype", "allowed are int32, int64"),
        ({"dtype": "int32", "fn": "variance", "out_dtype": "int64"}, "out_dtype", "allowed are float32, float16"),
        ({"fn": "argmax", "epilogue": [{"op": "relu"}]}, "epilogue", "with out_dtype int32 it must be empty"),
        ({"epilogue": [{"op": "bias", "axis": "n"}]}, "epilogue.0", "does not match any of the expected tags"),
        ({"keepdims": True}, "keepdims", "not permitted"),
    ],
    defaults=[({"axes": [-1, 0], "shape": [3, 4, 5]}, DEFAULTS)],
    # The stride of one element says nothing.
    alike=[({"shape": [4, 1, 6], "strides": [6, 77, 1]}, {"shape": [4, 1, 6]})],
    aligned=[
        ({"dtype": dtype, "fn": fn}, {"out_dtype": out})
        for dtype, fn, out in (
            ("float16", "sum", "float16"), ("bfloat16", "argmax", "int32"), ("int32", "sum", "int64"),
            ("int32", "sum_of_squares", "int64"), ("int32", "max", "int32"), ("int32", "mean", "float32"),
            ("int32", "variance", "float32"), ("int32", "logsumexp", "float32"), ("int64", "max", "int64"),
        )
    ],
    # Problems of the same lists of axes share kernels.
    unspecialised=[({"shape": [676, 16]}, {"shape": [4, 13, 13, 16], "axes": [0, 1, 2]}, [14])],
    in_schema=[{"operator": "reduce", "shape": [8, 4], "axes": [-1], "fn": "max"}],
    out_of_schema=[{"operator": "reduce", "shape": [8, 4], "axes": []}],
)  # fmt: skip


def test_problems_of_other_lists_share_no_kernels() -> None:
    flat = OP.signature(reduction(shape=[676, 16], axes=[0]))
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
    signature = OP.signature(problem)
    assert (signature["inner"], signature["align"]) == ("kept", 8)
    assert (signature["kept_axes"], signature["scattered"]) == (kept_axes, scattered)
    (first,) = lower(problem, SM_90A, LEVEL_0).candidates
    assert first.schedule.get("vector") == 8
    # All that is not as in C order is that each output may be a sector of its own.
    cost, work = OP.cost(problem, first.schedule), OP.work(problem, first.schedule, SM_90A)
    outputs = problem.outputs * 32 if scattered else problem.outputs * 2
    assert work.l2_bytes == cost.bytes_read + outputs + cost.workspace_bytes


@pytest.mark.parametrize("axes", [[0], [1], [2], [0, 2], [1, 2]])
def test_test_problems_have_the_signature_of_a_permuted_array(axes: list[int]) -> None:
    for order in permutations(range(4)):
        problem = reduction(**permuted([4, 5, 6, 8], list(order)), axes=axes)
        for candidate in lower(problem, SM_90A, LEVEL_1).candidates[:2]:
            assert all(OP.signature(tested) == OP.signature(problem) for tested in OP.test_problems(candidate.kernel))


# ---- rules, levels and predictions

RIGHT = {"algorithm": "column", "threads": 64, "lanes": 8, "vector": 4, "unroll": 4, "split": "none", "slices": 1}
SEARCHES = declare.Searches(
    accepted=[({}, RIGHT)],
    public=shapes_of("reduce"),
    rejected=[
        Rejection({}, {**RIGHT, **change}, rule, said)
        for change, rule, said in (
            ({"lanes": 128}, "lanes", "128 threads side by side of a block of 64"),
            ({"vector": 2, "algorithm": "row", "lanes": 8}, "vector",
             "the reduced axes, whose elements are no neighbours"),
            ({"vector": 8}, "vector", "vectors of 8 elements; rows begin at multiples of 4 (4 bytes each)"),
            ({"slices": 3}, "slices", "3 slices where split is none"),
            ({"split": "workspace"}, "slices", "1 slices where split is workspace"),
            ({"split": "workspace", "slices": 59}, "slices", "59 slices of 60 steps; 30 have some"),
            ({"lanes": 32}, "lanes", "32 threads side by side are mostly idle for 12"),
            ({"threads": 1024}, "threads", "128 rows of threads are mostly idle for 60"),
            ({"unroll": 16}, "unroll", "16 vectors in flight, 8 apart, are mostly none of 60"),
        )
    ],
    begun=[
        (arch, {"shape": shape, "axes": axes, "fn": fn}, "")
        for arch, shape, fn in product(
            ("sm_75", "sm_80", "sm_90a"),
            ([1], [1023, 1023], [17, 5001, 3], [0, 5], [2, 3, 2, 3, 2, 3], [2**20, 8], [8, 2**20]),
            ("sum", "logsumexp"),
        )
        for axes in ([0], list(range(len(shape))))
    ],
)  # fmt: skip


@pytest.mark.parametrize("fields", shapes_of("reduce"), ids=lambda fields: fields["name"])
def test_level_1_of_a_public_reduction_has_dozens_of_schedules_by_16_bytes(fields: dict[str, Any]) -> None:
    problem = OP.parse({name: value for name, value in fields.items() if name != "name"})
    candidates = lower(problem, SM_90A, LEVEL_1).candidates
    assert 12 <= len(candidates) <= 64
    vectors = {candidate.schedule.get("vector") for candidate in candidates}
    assert vectors == {16 // {"float32": 4, "float16": 2}[fields["dtype"]]}


def test_the_example_has_every_public_reduction_fused_gradients_too() -> None:
    request = json.loads((ROOT / "examples" / "bias_gradients.json").read_text())
    public = shapes_of("reduce")
    assert request["problems"] == public
    fused = [OP.parse({k: v for k, v in shape.items() if k != "name"}) for shape in public if "write_map" in shape]
    assert len(fused) == 2
    assert all(isinstance(problem, ReduceProblem) and problem.write_map for problem in fused)


EXTENTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 17, 64, 100, 1000, 4096, 50_000, 2**20, 2**25)
FEW_VALUES: list[dict[str, Any]] = [
    {"shape": [32, 3, 224, 224], "axes": [1], "dtype": "float16"},
    *({"shape": [extent, 4096, 4096], "axes": [0]} for extent in range(1, 9)),
    {"shape": [32, 5, 56, 56], "axes": [1]},
]


def random_problems() -> list[ReduceProblem]:
    """Those of the random cases, and small and large extents in any order."""
    rng = random.Random(seed_of_this_run())
    problems = [random_problem(number, rng) for number in range(120)]
    while len(problems) < 240:
        shape = rng.choices(EXTENTS, k=rng.randint(1, 4))
        if math.prod(shape) > LARGEST_COUNT:
            continue
        axes, fn = rng.sample(range(len(shape)), rng.randint(1, len(shape))), rng.choice(FUNCTIONS)
        problems.append(reduction(shape=shape, axes=axes, fn=fn, dtype=rng.choice(("float32", "float16"))))
    return [*problems, *(reduction(**fields) for fields in FEW_VALUES)]


def test_every_level_has_candidates_and_those_of_the_levels_below() -> None:
    for problem, arch in zip(random_problems(), cycle(("sm_90a", "sm_75", "sm_80")), strict=False):
        levels = [lower(problem, target(arch), level) for level in (LEVEL_0, LEVEL_1)]
        first, most = ({candidate.schedule for candidate in level.candidates} for level in levels)
        assert len(first) == 1, (problem, levels[0].why_empty)
        assert first <= most, (problem, levels[1].why_empty)
        widest = OP.space(problem, target(arch), LEVEL_2)
        assert all(widest.index_of(schedule) is not None for schedule in most), problem


def test_a_workspace_over_the_limit_breaks_a_rule() -> None:
    lowered = lower(reduction(shape=[676000, 16]), SM_90A, LEVEL_1, workspace_limit=1000)
    assert {"workspace"} <= set(lowered.rejections)
    assert all(candidate.schedule.get("split") == "none" for candidate in lowered.candidates)


@pytest.mark.parametrize(
    ("fields", "least"),
    [
        ({**permuted([256, 64, 256], [0, 1, 2], 2), "axes": [1]}, 2.0),  # every other element
        ({**permuted([256, 64, 256], [2, 1, 0]), "axes": [0, 2], "fn": "argmax"}, 16.0),  # its order is not the array's
    ],
)  # fmt: skip
def test_sectors_of_which_a_warp_needs_little_are_predicted(fields: dict[str, Any], least: float) -> None:
    problem, packed = reduction(**fields, dtype="float16"), reduction(**{**fields, "strides": None}, dtype="float16")
    every, of_packed = (lower(given, SM_90A, LEVEL_1).candidates for given in (problem, packed))
    for candidate in every:
        read = OP.cost(problem, candidate.schedule).bytes_read
        assert OP.work(problem, candidate.schedule, SM_90A).l2_bytes >= least * read
    best, best_of_packed = (
        min(predict_uncompiled(candidate, SM_90A).us for candidate in some) for some in (every, of_packed)
    )
    assert best > 1.5 * best_of_packed


def test_a_problem_that_few_outputs_divide_is_predicted_faster_in_slices() -> None:
    candidates = lower(reduction(**public("mnist/b1000_conv1")), SM_90A, LEVEL_1).candidates
    ranked = sorted(candidates, key=lambda candidate: predict_uncompiled(candidate, SM_90A).us)
    assert ranked[0].schedule.get("split") == "workspace"
    assert ranked[-1].schedule.get("split") == "none"
    # 43 MB at an H100's 3,350 GB/s take 13 µs.
    assert 13.0 < predict_uncompiled(ranked[0], SM_90A).us < 26.0


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_comparisons_are_no_additions(fn: str) -> None:
    candidates = lower(reduction(shape=[676000, 16], fn=fn), SM_90A, LEVEL_1).candidates
    sliced = next(candidate for candidate in candidates if candidate.schedule.get("split") == "workspace")
    work = OP.work(sliced.problem, sliced.schedule, SM_90A)
    compared = fn in ("max", "min", "argmax")
    assert [work.fma == 0.0 for work in (work, *work.others)] == [compared, compared]


def test_bytes_are_those_of_each_operand_once() -> None:
    cost = OP.cost(reduction(**GRADIENT), level_0(**GRADIENT).schedule)
    elements = 32 * 28 * 28 * 128
    assert (cost.bytes_read, cost.bytes_written) == (2 * 4 * elements, 4 * elements + 4 * 128)


# ---- values that the verification plan does not have: NaN, infinities, none

ROWS = {"algorithm": "row", "threads": 64, "lanes": 16, "vector": 4, "unroll": 2, "split": "workspace", "slices": 3}
COLUMNS = {"algorithm": "column", "threads": 64, "lanes": 4, "vector": 4, "unroll": 2, "split": "none", "slices": 1}
NAN, INF = float("nan"), float("inf")
# The values that matter of 96, the others are those of `rest`, and what is made of them.
SPECIAL: dict[str, tuple[str, dict[int, float], float, float]] = {
    "a NaN is the maximum": ("max", {40: NAN, 41: INF}, 1.0, NAN),
    "a NaN is the minimum": ("min", {95: -INF, 0: NAN}, 1.0, NAN),
    "infinity is the maximum": ("max", {95: INF}, -1.0, INF),
    "of equal values the first": ("argmax", {17: 2.0, 18: 2.0, 90: 2.0}, 1.0, 17),
    "all values equal": ("argmax", {}, 1.0, 0),
    "all values the least": ("argmax", {}, -INF, 0),
    "a NaN is greater than infinity": ("argmax", {10: INF, 77: NAN, 78: NAN}, 1.0, 77),
    "a sum of infinities": ("sum", {3: INF, 80: INF}, 1.0, INF),
    "a sum of opposite infinities": ("sum", {3: INF, 80: -INF}, 1.0, NAN),
    "nothing but zeros": ("logsumexp", {}, -INF, -INF),
    "one value": ("logsumexp", {50: 3.0}, -INF, 3.0),
    "an infinity": ("logsumexp", {50: INF, 51: INF}, 1.0, INF),
    "a NaN": ("logsumexp", {50: NAN}, 1.0, NAN),
    "large values": ("logsumexp", {50: 1000.0}, 0.0, 1000.0),
    "values far from 0": ("variance", dict.fromkeys(range(48), 1e4 + 1), 1e4 - 1, 1.0),
    "a NaN in a variance": ("variance", {1: NAN}, 1.0, NAN),
}


def lines() -> dict[tuple[str, bool], Candidate]:
    """By function and whether rows are reduced."""
    by_name = {}
    for fn, rows in product({fn for fn, *_ in SPECIAL.values()}, (True, False)):
        problem = reduction(shape=[4, 96] if rows else [96, 16], axes=[1 if rows else 0], fn=fn)
        by_name[fn, rows] = OP.candidate(problem, Schedule.of(ROWS if rows else COLUMNS))
    return by_name


def empty() -> dict[tuple[str, str, int], Candidate]:
    """Of problems of which an axis that is reduced has extent 0."""
    by_name = {}
    for number, (shape, axes) in enumerate((([0, 8], [0]), ([4, 0, 3], [0, 1]), ([6, 0], [1]), ([0], [0]))):
        for fn, algorithm in product(OF_NOTHING, ("row", "column")):
            schedule = Schedule.of({**COLUMNS, "algorithm": algorithm, "vector": 1})
            by_name[fn, algorithm, number] = OP.candidate(reduction(shape=shape, axes=axes, fn=fn), schedule)
    return by_name


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    kernels = {candidate.kernel: None for candidate in [*lines().values(), *empty().values()]}
    helpers, folder = cpu_helpers, tmp_path_factory.mktemp("cpu")
    build = build_cpu(list(kernels), helpers.toolchain(), helpers.processes(), helpers.LIMITS, folder=folder)
    ((path, _),) = build.libraries
    return CpuLibrary(path)


def run(library: CpuLibrary, candidate: Candidate, inputs: Inputs) -> Array:
    problem, namespace = candidate.problem, candidate.kernel.namespace
    launch, integers = OP.launch_values(candidate.schedule), OP.integers(problem)
    tensors = library.allocate(OP.operands(problem))
    workspace = library.workspace(namespace, integers, launch)
    try:
        for tensor in tensors:
            tensor.fill(inputs[tensor.operand.name]) if tensor.operand.role == "in" else tensor.poison()
        outcome = library.run(
            namespace, tensors, workspace, integers=integers, launch=launch, scalars=OP.scalars(problem),
            order="seeded", seed=1, exact=False, cpu_seconds=5.0,
        )  # fmt: skip
        assert (outcome.status, outcome.message) == ("ok", "")
        (result,) = (tensor.view.copy() for tensor in tensors if tensor.operand.role == "out")
        return result
    finally:
        tensors, workspace = [], None
        library.free()


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_give_what_is_documented(name: str, rows: bool, on_cpu: CpuLibrary) -> None:
    fn, special, rest, expected = SPECIAL[name]
    candidate = lines()[fn, rows]
    line = np.full(96, rest, np.float32)
    for place, value in special.items():
        line[place] = value
    others = np.arange(96, dtype=np.float32)
    assert isinstance(candidate.problem, ReduceProblem)
    matrix = np.stack([line, *[others] * (candidate.problem.outputs - 1)])
    out = run(on_cpu, candidate, {"x": matrix if rows else matrix.T})
    np.testing.assert_array_equal(out[0], np.array(expected, out.dtype))
    plain = {"max": 95.0, "min": 0.0, "argmax": 95, "sum": 4560.0}
    if fn in plain:
        assert (out[1:] == plain[fn]).all()


@pytest.mark.parametrize("fn", OF_NOTHING)
def test_nothing_has_the_identity(fn: str, on_cpu: CpuLibrary) -> None:
    for candidate in (candidate for name, candidate in empty().items() if name[0] == fn):
        assert isinstance(candidate.problem, ReduceProblem)
        out = run(on_cpu, candidate, {"x": np.zeros(candidate.problem.shape, np.float32)})
        assert out.shape == candidate.problem.out_shape
        assert (out == (-INF if fn == "logsumexp" else 0.0)).all()


# ---- the reference


def in_fp32(problem: ReduceProblem, inputs: Inputs, lost: bool) -> Array:
    """Another computation: NumPy's fp32, derivatives by differences of float64. Lost is an element of each column: the
    last; of an extreme the one that it is."""
    values = mapped_in_fp32(problem, inputs)
    count = len(values)
    if lost:
        places = np.full(values.shape[1], count - 1)
        if problem.fn in ("max", "min"):
            places = values.argmax(axis=0) if problem.fn == "max" else values.argmin(axis=0)
        left = np.arange(count)[:, None] != places
        values = values.T[left.T].reshape(values.shape[1], -1).T
    if problem.fn == "sum_of_squares":
        return (values * values).sum(axis=0)  # type: ignore[no-any-return]
    if problem.fn == "variance":
        return values.var(axis=0)  # type: ignore[no-any-return]
    if problem.fn == "logsumexp":
        return np.log(np.exp(values).sum(axis=0))  # type: ignore[no-any-return]
    result: Array = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}[problem.fn](values, axis=0)
    return result


def mapped_in_fp32(problem: ReduceProblem, inputs: Inputs) -> Array:
    first: Array = inputs["dy" if problem.two_inputs else "x"].astype(np.float32)
    if problem.two_inputs:
        return first * slope(problem.map, inputs["x"].astype(np.float64)).astype(np.float32)  # type: ignore[no-any-return]
    return first * first if problem.map == "square" else first


def slope(name: str, x: Array) -> Array:
    functions: dict[str, Any] = {
        "relu_grad": lambda v: np.maximum(v, 0.0),
        "gelu_grad": lambda v: 0.5 * v * (1.0 + erf(v / np.sqrt(2.0))),
        "silu_grad": lambda v: v / (1.0 + np.exp(-v)),
        "tanh_grad": np.tanh,
        "sigmoid_grad": lambda v: 1.0 / (1.0 + np.exp(-v)),
    }
    if name == "multiply":
        return x
    step = 1e-5
    result: Array = (functions[name](x + step) - functions[name](x - step)) / (2.0 * step)
    return np.where(np.isnan(x), 1.0, result)  # of relu's, the only one with NaN: dy counts there


def definition(problem: ReduceProblem, inputs: Inputs) -> Array:
    """Of an argmax of the outer axes, and of a product that is written behind its sums; of int64 in Python."""
    if problem.dtype == "int64":
        values = inputs["x"].transpose(1, 0, 2).reshape(9, 77).astype(object)
        if problem.fn != "sum":
            return {"max": values.max, "min": values.min}[problem.fn](axis=1).astype(np.int64)  # type: ignore[no-any-return]
        return each(wrapped(64), values.sum(axis=1)).astype(np.int64)
    if problem.fn == "argmax":
        return inputs["x"].transpose(1, 0, 2).reshape(9, 77).argmax(axis=1)  # type: ignore[no-any-return]
    products = inputs["dy"].astype(np.float64) * inputs["x"].astype(np.float64)
    return np.array([*products.sum(axis=0), *products.reshape(-1)])


def on_device(fn: str, name: str) -> dict[str, Any]:
    chosen = "identity" if fn == "argmax" else name
    nodes = [] if fn == "argmax" else [{"op": "residual"}, {"op": "gelu"}]
    written = chosen != "identity"
    return {"shape": [5, 6, 7], "axes": [1], "fn": fn, "map": chosen, "write_map": written, "epilogue": nodes}


REFERENCES = declare.References(
    definition=definition,
    defined={
        "argmax": {"shape": [7, 9, 11], "axes": [0, 2], "fn": "argmax", "dtype": "float16"},
        **{f"{fn} of int64": {"shape": [7, 9, 11], "axes": [0, 2], "fn": fn, "dtype": "int64"} for fn in OF_INT64},
        "written maps": {"shape": [5, 6], "axes": [0], "map": "multiply", "write_map": True, "dtype": "float16",
                         "out_dtype": "float32"},
    },
    in_fp32=in_fp32,
    bounded={
        f"{fn} of {name}": {"shape": [200, 30], "axes": [0], "fn": fn, "map": name}
        for fn in FUNCTIONS if fn != "argmax" for name in MAPS
    },
    wrong=6,
    on_device=[
        ("normal", on_device(fn, name)) for fn in FUNCTIONS if fn != "min" for name in MAPS
        if name in ("identity", "gelu_grad", "silu_grad")
    ],
)  # fmt: skip

# ---- mutants

ROW, COLUMN = {"inner": "reduced"}, {"inner": "kept", "align": 4}
BY_COLUMNS = {"algorithm": "column", "lanes": 8, "vector": 4, "threads": 64}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "rows of a warp": {"words": {**ROW, "align": 4, "fn": "mean"}, "vector": 4, "threads": 128},
    "rows of warps, in slices": {"words": {**ROW, "fn": "variance"}, "lanes": 64, "threads": 128, "split": "workspace"},
    "short rows": {"words": {**ROW, "fn": "logsumexp", "kept_axes": 2}, "lanes": 4},
    "argmax of rows": {"words": {**ROW, "fn": "argmax", "align": 8, "dtype": "float16"}, "lanes": 64, "vector": 8},
    "argmax of columns": {"words": {**COLUMN, "fn": "argmax", "reduced_axes": 2}, **BY_COLUMNS, "split": "workspace"},
    "columns": {"words": {**COLUMN, "epilogue": ["scale", "residual"]}, **BY_COLUMNS},
    "logsumexp of columns": {"words": {**COLUMN, "fn": "logsumexp"}, **BY_COLUMNS, "split": "workspace"},
    "variance of columns": {"words": {**COLUMN, "fn": "variance", "kept_axes": 3}, **BY_COLUMNS},
    "scattered columns": {
        "words": {**COLUMN, "kept_axes": 3, "scattered": True, "epilogue": ["scale", "residual"]}, **BY_COLUMNS,
    },
    "scattered rows, in slices": {
        "words": {**ROW, "kept_axes": 2, "scattered": True, "dtype": "float16"}, "lanes": 4, "split": "workspace",
    },
    "whole numbers": {"words": {**COLUMN, "dtype": "int32"}, **BY_COLUMNS, "split": "workspace"},
    "a ring": {"words": {**COLUMN, "align": 2, "dtype": "int64"}, **BY_COLUMNS, "vector": 2, "split": "workspace"},
    "gelu's gradient": {"words": {**COLUMN, "map": "gelu_grad", "write_map": True}, **BY_COLUMNS, "split": "workspace"},
    "silu's gradient": {"words": {**ROW, "map": "silu_grad"}},
    "tanh's gradient": {"words": {**ROW, "map": "tanh_grad"}},
    "relu's gradient": {"words": {**ROW, "map": "relu_grad", "write_map": True, "dtype": "bfloat16"}},
}  # fmt: skip
OWN, SHARED = "kernel.cuh", "reduce.cuh"
_STATE = "(int64_t(i) * arguments.slices + slice)"
_MAPPED = "static_cast<Input*>(arguments.mapped) + batch.offset[u]"
_TAKE = "Fold<C>::take(states[i], column, first, depth);"
MUTATIONS = declare.Mutations(
    kernels=lambda name: {config: kernel(operator=name, **words) for config, words in CONFIGS.items()},
    files=tuple(OP.kernel_texts),
    counts={"barrier": 2, "bounds": 12},
    definitions={"bounds": 1},
    wrong={
        "an index that is not divided": (OWN, "(index - rest * along.extent[i])", "index"),
        "every slice is the first": (OWN, "static_cast<int>(blockIdx.y) * arguments.chunk", "0"),
        "the mean is a sum": (OWN, "C::fn == fn_mean ? divided(state.sum, arguments.count) : state.sum", "state.sum"),
        "nothing is divided by the count": (OWN, "sum / count", "sum"),
        "an index that counts vectors": (OWN, "(first + u * C::lanes) * C::vector", "(first + u * C::lanes)"),
        "a column's index that counts trips": (OWN, _TAKE, _TAKE.replace("depth", "1")),
        "states of the first slice": (OWN, _STATE, _STATE.replace("slice)", "y)")),
        "half of gelu's gradient": (OWN, "0.39894228040143268f", "0.0f"),
        "silu's gradient is sigmoid's": (OWN, "(1.0f + x * (1.0f - y))", "(1.0f - y)"),
        "tanh's gradient is not squared": (OWN, "1.0f - y * y", "1.0f - y"),
        "axes merged whatever their strides": (
            OWN, "found.stride[merged] == found.extent[i] * found.stride[i]", "true"
        ),
        "axes merged whatever their places": (
            OWN, "found.placed[merged] == found.extent[i] * found.placed[i]", "true"
        ),
        "outputs in the order of the input": (OWN, "offset_along<C::kept_axes>(arguments.placed, first)", "first"),
        "scattered outputs side by side": (OWN, "arguments.placed.stride[C::kept_axes - 1]", "1"),
        "a NaN is no maximum": (SHARED, "(is_nan(other.value) && !is_nan(state.value))", "false"),
        "a merged count is lost": (SHARED, "state.count = count;", "state.count = other.count;"),
        "distances of means do not count": (SHARED, "distance * distance * (state.count * share)", "0.0f"),
        "the mean does not move": (SHARED, "state.mean += distance * share;", "state.mean += 0.0f;"),
        "powers are not rescaled": (SHARED, "state.sum * power(-ahead)", "state.sum"),
        "smaller powers are not scaled": (SHARED, "other.sum * power(ahead)", "other.sum"),
        "the first warps' states": (SHARED, "warp / together * together", "0 * together"),
        "a column's own state twice": (SHARED, "half + thread", "thread"),
    },
)  # fmt: skip

# ---- random cases


def properties(arch: str, candidate: Candidate) -> Counter[str]:
    p, t, s = candidate.problem, candidate.schedule.as_dict(), candidate.kernel.signature_dict
    assert isinstance(p, ReduceProblem)
    counts = Counter([
        f"target {arch}", f"rank {len(p.shape)}", f"inputs {p.dtype}", f"out {p.out_dtype}", f"fn {p.fn}",
        f"map {p.map}", f"algorithm {t['algorithm']}", f"split {t['split']}", f"vector {t['vector']}",
        f"inner {s['inner']}", f"{s['kept_axes']} kept lists", f"{s['reduced_axes']} reduced lists",
    ])  # fmt: skip
    scattered = bool(s["scattered"])
    by_row, lanes = t["algorithm"] == "row", int(t["lanes"])
    about = {
        "written maps": p.write_map, "scattered": scattered, "all axes": not p.kept, "an epilogue": bool(p.epilogue),
        "scattered vectors": scattered and s["inner"] == "kept" and int(t["vector"]) > 1,
        "apart": not next(operand for operand in OP.operands(p) if operand.role == "in").contiguous,
        "rows of several warps": by_row and lanes > 32,
        "several rows of threads": not by_row and lanes < int(t["threads"]),
    }  # fmt: skip
    counts.update(name for name, true in about.items() if true)
    return counts


# What a case's number decides nearly as often as it goes round, the rest at about a third of how often it comes up.
SPREAD = {
    **{f"target {arch}": 25 for arch in ("sm_90a", "sm_80", "sm_75")},
    **{f"rank {rank}": 13 for rank in range(1, 7)},
    "inputs float32": 35, "inputs float16": 15, "inputs bfloat16": 15, "inputs int32": 9, "inputs int64": 3,
    **{f"fn {fn}": 8 for fn in FUNCTIONS}, **{f"map {name}": 1 for name in MAPS},
    "algorithm row": 20, "algorithm column": 20, "split none": 30, "split workspace": 20, "vector 1": 25, "vector 2": 2,
    "vector 4": 3, "vector 8": 1, "inner kept": 15, "inner reduced": 15, "inner none": 5, "1 kept lists": 30,
    "2 kept lists": 5, "1 reduced lists": 25, "2 reduced lists": 5, "scattered": 3, "scattered vectors": 1,
    "written maps": 5, "all axes": 8, "apart": 25, "rows of several warps": 2, "several rows of threads": 15,
    "an epilogue": 15, "out float32": 15, "out float16": 5, "out bfloat16": 5, "out int32": 3, "out int64": 3,
}  # fmt: skip

# ---- winners

GRADIENT: dict[str, Any] = {"shape": [32, 28, 28, 128], "axes": [0, 1, 2], "map": "gelu_grad", "write_map": True}


def level_0(**fields: Any) -> Candidate:
    (candidate,) = lower(reduction(**fields), SM_90A, LEVEL_0).candidates
    return candidate


def public(name: str) -> dict[str, Any]:
    return {field: value for field, value in public_shape(name).items() if field not in ("name", "operator")}


COMPILED: dict[str, dict[str, Any]] = {
    "columns": public("mnist/b1000_conv1"), "fp16 columns": public("ffn/bias"), "rows": public("rowsum"),
    "fp16 maximum": public("rowmax"), "all": public("all"), "middle": public("middle"), "gradient": GRADIENT,
    "variance of rows": {"shape": [4096, 4096], "axes": [1], "fn": "variance"},
    "logsumexp of rows": {"shape": [4096, 16384], "axes": [1], "fn": "logsumexp", "dtype": "bfloat16"},
    "argmax of columns": {"shape": [4096, 4096], "axes": [0], "fn": "argmax"},
}  # fmt: skip


def has_several_loads_of_16_bytes_in_flight(kernel: Kernel, code: Code) -> None:
    assert code.count("ld.global.nc.v4") >= int(kernel.tunables.get("unroll")) >= 4


def writes_maps_by_16_bytes(kernel: Kernel, code: Code) -> None:
    assert code.count("st.global.v4") >= int(kernel.tunables.get("unroll"))


def adds_nothing_atomically(kernel: Kernel, code: Code) -> None:
    assert code.count("atom") + code.count("red.") == 0


IN_FLIGHT = [has_several_loads_of_16_bytes_in_flight, adds_nothing_atomically]

PLANNED: list[dict[str, Any]] = [
    public("mnist/b100_conv1"), public("rowmax"), public("all"), public("middle"), GRADIENT,
    {"shape": [64, 96, 56, 56], "axes": [0, 2, 3]}, {"shape": [3, 5], "axes": [1], "fn": "variance"},
]  # fmt: skip


def planned(fields: dict[str, Any]) -> list[Candidate]:
    candidates = lower(reduction(**fields), SM_90A, LEVEL_1).candidates
    chosen = {(candidate.schedule.get("split"), candidate.schedule.get("lanes")): candidate for candidate in candidates}
    return list(chosen.values())[:3]


# Scattered outputs may begin anywhere: they are written one at a time.
PERMUTED = {"x": "F(16, 3, 12, strides=(1, 16, 48))", "out": "F(16, 12, address=0x50000004)"}
PACKED = {"x": "F(12, 3, 16)", "out": "F(12, 16, address=0x50000000)"}
DX = "address=0x60000000"
NO_FIT = "an extent is below 1 or beyond what the kernel can index"


def of_function(fn: str) -> declare.Library:
    """No values are refused where the function has none of them."""
    empty = {"x": "F(0, 16)"}
    said = "axis 0 of x has extent 0; this kernel's function has no value of no elements"
    return declare.Library(
        candidate=lambda: level_0(shape=[30, 16], fn=fn),
        taken={"5 values": ({"x": "F(5, 16)"}, 1), **({"no values": (empty, 1)} if fn in OF_NOTHING else {})},
        refused={} if fn in OF_NOTHING else {"no values": (empty, "ValueError", said)},
    )


CALLS = {
    "winner": declare.Library(
        candidate=lambda: level_0(**{**GRADIENT, "shape": [2, 12, 10, 16], "map": "relu_grad"}),
        record={"operands": ["dy", "x", "out", "dx"], "roles": ["in", "in", "out", "out"],
                "some extents": {"outputs": 16}, "attributes": [14], "scalars": []},
        # Other extents and ranks of the same lists.
        taken={"a matrix": ({"dy": "F(500, 16)", "x": "F(500, 16)", "dx": f"F(500, 16, {DX})", 0: 2}, 1)},
        refused={
            "a tensor less": ({"dx": None, "numbers": ()}, "TypeError",
                              "3 tensors were given; this kernel takes 4: dy, x, 0 of the epilogue, out, dx"),
            "no axes": ({"numbers": ()}, "TypeError", "this call takes 4 tensors, then 1 number"),
            "dtype": ({"x": "H(2, 12, 10, 16)"}, "TypeError", "x is float16; float32 is allowed"),
            "rank": ({"dy": "F()"}, "ValueError", "dy has rank 0; 1 to 8 is allowed"),
            "shape": ({"x": "F(2, 12, 5, 32)"}, "ValueError", "x must have the shape and the strides of dy"),
            "strides": ({"dx": f"F(2, 12, 10, 16, strides=(3840, 160, 16, 1), {DX})"}, "ValueError",
                        "dx must have the shape and the strides of dy"),
            "a stride of 0": ({"dy": "F(2, 12, 10, 16, strides=(0, 160, 16, 1))"}, "ValueError", "stride 0"),
            "gaps in out": ({"out": "F(16, strides=(2,), address=0x50000000)"}, "ValueError", "out must be packed"),
            "address": ({"dy": "F(2, 12, 10, 16, address=0x40000004)"}, "ValueError", "16 bytes"),
            "overlap": ({"dx": "dy"}, "ValueError", "dx overlaps dy"),
            "other axes": ({0: 12}, "ValueError", NO_FIT),
            "no axes at all": ({0: 0}, "ValueError", "an extent is below 1 or beyond"),
            "another output": ({"out": "F(8, address=0x50000000)"}, "ValueError", "an extent is below 1 or beyond"),
        },
    ),
    # The kernels' lists of axes are alike.
    "scattered": declare.Library(
        candidate=lambda: level_0(shape=[16, 3, 12], axes=[1], strides=[1, 16, 48]),
        taken={"permuted": ({**PERMUTED, 0: 2}, 1), "packed": ({**PACKED, 0: 2}, 1)},
    ),
    "in order": declare.Library(
        candidate=lambda: level_0(shape=[12, 3, 16], axes=[1]),
        taken={"packed": ({**PACKED, 0: 2}, 1)},
        refused={"permuted": ({**PERMUTED, "out": "F(16, 12, address=0x50000000)", 0: 2}, "ValueError", NO_FIT)},
    ),
    **{fn: of_function(fn) for fn in ("sum", "mean", "max", "argmax")},
}  # fmt: skip
OF_JOB: dict[str, dict[str, Any]] = {
    "gradient": GRADIENT,
    "argmax": {"shape": [512, 1000], "axes": [-1], "fn": "argmax"},
    "a ring": {"shape": [9, 7, 5], "axes": [0, 2], "dtype": "int64"},
    "nothing": {"shape": [0, 16], "axes": [0]},
}

DECLARED = (
    declare.Declarations(
        operator="reduce",
        problem={"shape": [60, 48], "axes": [0]},
        problems=PROBLEMS,
        searches=SEARCHES,
        references=REFERENCES,
        mutations=MUTATIONS,
        random_cases=declare.RandomCases(
            cases=random_cases, properties=properties, spread=SPREAD,
            in_5000={"3 kept lists": 10, "3 reduced lists": 10},
        ),
        machine_code=declare.MachineCode(
            kernels=lambda: {name: level_0(**fields).kernel for name, fields in COMPILED.items()},
            claims={**dict.fromkeys(COMPILED, IN_FLIGHT), "gradient": [*IN_FLIGHT, writes_maps_by_16_bytes]},
        ),
        launches=declare.Launches(planned={str(fields["shape"]): partial(planned, fields) for fields in PLANNED}),
        calls=CALLS,
        job=declare.Job(problems=OF_JOB, each_run="a ring"),
        without={"verifications": "mutations and random cases verify a kernel of every class"},
    ),
)  # fmt: skip
add_checks(globals())
