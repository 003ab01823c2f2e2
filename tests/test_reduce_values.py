"""What reductions are of values that the test plan does not draw (NaN, infinities, none); the reference's bounds, and
the reference on a GPU's arrays."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.arrays import erf
from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.operators.reduce.problem import MAPS, OF_NOTHING, ReduceProblem
from codegen.schedule import Schedule
from codegen.test_plan import judge
from tests.cpu_helpers import LIMITS, processes, toolchain
from tests.reduce_kernels import reduction
from tests.strict_arrays import on_device, on_host, strict_namespace
from workers.build_cpu import build_cpu
from workers.cpu_library import CpuLibrary

OP = operator("reduce")
Array = NDArray[Any]
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


def problems() -> dict[tuple[str, bool], tuple[ReduceProblem, Candidate]]:
    """By function and whether rows are reduced."""
    found = {}
    for fn in {fn for fn, *_ in SPECIAL.values()}:
        for rows in (True, False):
            problem = reduction(shape=[4, 96] if rows else [96, 16], axes=[1 if rows else 0], fn=fn)
            found[fn, rows] = problem, OP.candidate(problem, Schedule.of(ROWS if rows else COLUMNS))
    return found


def empty() -> dict[tuple[str, str, int], tuple[ReduceProblem, Candidate]]:
    """Problems of which an axis that is reduced has extent 0."""
    found = {}
    one = {"threads": 64, "lanes": 4, "vector": 1, "unroll": 2, "split": "none", "slices": 1}
    for number, (shape, axes) in enumerate((([0, 8], [0]), ([4, 0, 3], [0, 1]), ([6, 0], [1]), ([0], [0]))):
        for fn, algorithm in product(OF_NOTHING, ("row", "column")):
            problem = reduction(shape=shape, axes=axes, fn=fn)
            schedule = Schedule.of({"algorithm": algorithm, **one})
            found[fn, algorithm, number] = problem, OP.candidate(problem, schedule)
    return found


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    both = [*problems().values(), *empty().values()]
    kernels = list({candidate.kernel.id: candidate.kernel for _, candidate in both}.values())
    build = build_cpu(kernels, toolchain(), processes(), LIMITS, folder=tmp_path_factory.mktemp("cpu"))
    ((path, _),) = build.libraries
    return CpuLibrary(path)


def run(library: CpuLibrary, problem: ReduceProblem, candidate: Candidate, inputs: Mapping[str, Array]) -> Array:
    tensors = library.allocate(OP.operands(problem))
    launch, namespace = OP.launch_values(candidate.schedule), candidate.kernel.namespace
    workspace = library.workspace(namespace, OP.extents(problem), launch)
    try:
        for tensor in tensors:
            tensor.fill(inputs[tensor.operand.name]) if tensor.operand.role == "in" else tensor.poison()
        outcome = library.run(
            namespace, tensors, workspace, extents=OP.extents(problem), launch=launch, scalars=OP.scalars(problem),
            order="seeded", seed=1, exact=False, cpu_seconds=5.0,
        )  # fmt: skip
        assert (outcome.status, outcome.message) == ("ok", "")
        found: Array = tensors[1].view.copy()
        return found
    finally:
        tensors, workspace = [], None
        library.free()


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values_give_what_is_documented(name: str, rows: bool, library: CpuLibrary) -> None:
    fn, special, rest, expected = SPECIAL[name]
    problem, candidate = problems()[fn, rows]
    line = np.full(96, rest, np.float32)
    for place, value in special.items():
        line[place] = value
    others = np.arange(96, dtype=np.float32)
    matrix = np.stack([line, *[others] * (problem.outputs - 1)])
    out = run(library, problem, candidate, {"x": matrix if rows else matrix.T})
    np.testing.assert_array_equal(out[0], np.array(expected, out.dtype))
    plain = {"max": 95.0, "min": 0.0, "argmax": 95, "sum": 4560.0}
    if fn in plain:
        assert (out[1:] == plain[fn]).all()


@pytest.mark.parametrize("fn", OF_NOTHING)
def test_nothing_has_the_identity(fn: str, library: CpuLibrary) -> None:
    for problem, candidate in (one for name, one in empty().items() if name[0] == fn):
        out = run(library, problem, candidate, {"x": np.zeros(problem.shape, np.float32)})
        assert out.shape == problem.out_shape
        assert (out == (-INF if fn == "logsumexp" else 0.0)).all()


# ---- the reference


@pytest.mark.parametrize("fn", ["sum", "mean", "sum_of_squares", "max", "min", "variance", "logsumexp"])
@pytest.mark.parametrize("name", MAPS)
def test_a_result_in_fp32_is_inside_of_the_bound_and_a_wrong_one_is_not(fn: str, name: str) -> None:
    problem = reduction(shape=[200, 30], axes=[0], fn=fn, map=name)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(3))
    expected, bound = OP.reference(problem, inputs)
    assert judge(in_fp32(problem, inputs), expected, bound, exact=False).ok
    short = {name: without_the_one_that_counts(fn, problem, inputs, values) for name, values in inputs.items()}
    lost = in_fp32(reduction(shape=[199, 30], axes=[0], fn=fn, map=name), short)
    assert judge(lost, expected, bound, exact=False).wrong > 5


def without_the_one_that_counts(fn: str, problem: ReduceProblem, inputs: Mapping[str, Array], given: Array) -> Array:
    """One element less of each column: the last; of an extreme the one that it is."""
    lost = np.full(given.shape[1], len(given) - 1)
    if fn in ("max", "min"):
        values = mapped_in_fp32(problem, inputs)
        lost = values.argmax(axis=0) if fn == "max" else values.argmin(axis=0)
    left = np.arange(len(given))[:, None] != lost
    return given.T[left.T].reshape(given.shape[1], -1).T


def in_fp32(problem: ReduceProblem, inputs: Mapping[str, Array]) -> Array:
    """Another computation: NumPy's fp32, derivatives by differences of float64."""
    values = mapped_in_fp32(problem, inputs)
    if problem.fn == "sum_of_squares":
        return (values * values).sum(axis=0)  # type: ignore[no-any-return]
    if problem.fn == "variance":
        return values.var(axis=0)  # type: ignore[no-any-return]
    if problem.fn == "logsumexp":
        return np.log(np.exp(values).sum(axis=0))  # type: ignore[no-any-return]
    found: Array = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}[problem.fn](values, axis=0)
    return found


def mapped_in_fp32(problem: ReduceProblem, inputs: Mapping[str, Array]) -> Array:
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
    found: Array = (functions[name](x + step) - functions[name](x - step)) / (2.0 * step)
    return found


def test_argmax_is_numpys() -> None:
    problem = reduction(shape=[7, 9, 11], axes=[0, 2], fn="argmax", dtype="float16")
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(2))
    flat = inputs["x"].transpose(1, 0, 2).reshape(9, 77)
    np.testing.assert_array_equal(OP.reference(problem, inputs)[0], flat.argmax(axis=1))


def test_written_maps_stand_behind_the_sums() -> None:
    problem = reduction(shape=[5, 6], axes=[0], map="multiply", write_map=True, dtype="float16", out_dtype="float32")
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(2))
    expected, bound = OP.reference(problem, inputs, exact=True)
    products = inputs["dy"].astype(np.float64) * inputs["x"].astype(np.float64)
    np.testing.assert_array_equal(expected, [*products.sum(axis=0), *products.reshape(-1)])
    assert (bound == 0.0).all()


@pytest.mark.parametrize("fn", ["sum", "mean", "sum_of_squares", "max", "argmax", "variance", "logsumexp"])
@pytest.mark.parametrize("name", ["identity", "gelu_grad", "silu_grad"])
def test_the_reference_on_a_device_has_the_values_of_numpy(fn: str, name: str) -> None:
    chosen = "identity" if fn == "argmax" else name
    nodes = [] if fn == "argmax" else [{"op": "residual"}, {"op": "gelu"}]
    problem = reduction(shape=[5, 6, 7], axes=[1], fn=fn, map=chosen, write_map=chosen != "identity", epilogue=nodes)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(6))
    here = OP.reference(problem, inputs)
    with strict_namespace():
        there: Any = OP.reference(problem, {name: on_device(values) for name, values in inputs.items()})
        found = [on_host(one) for one in there]
    for one, other in zip(here, found, strict=True):
        np.testing.assert_array_equal(one, other)
