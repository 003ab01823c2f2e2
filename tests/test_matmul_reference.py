"""The reference and its bound: fp32 arithmetic stays inside, a wrong kernel does not. NumPy's fp32 plays the kernel."""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.compare import within, worst
from codegen.kernel import Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.reduced import reduced_problems
from codegen.search import Search
from codegen.targets import target
from tests.fixtures_codegen import EVERY_NODE, default_candidate, matmul

OP = operator("matmul")
Float32 = npt.NDArray[np.float32]
_erf = np.frompyfunc(math.erf, 1, 1)


def in_fp32(
    problem: MatmulProblem, inputs: dict[str, npt.NDArray[Any]], *, drop: int = 0, exact: bool = False
) -> Float32:
    """The operator in fp32, sums in plain order; `drop` leaves out the last elements along k."""
    a, b = inputs["a"], inputs["b"]
    a = a.swapaxes(-1, -2) if problem.a_transposed else a
    b = b.swapaxes(-1, -2) if problem.b_transposed else b
    value = np.zeros((*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), problem.m, problem.n), dtype=np.float32)
    for index in range(problem.k - drop):
        value = value + a[..., :, index, None] * b[..., None, index, :]
    tensors = iter([inputs[one.name] for one in OP.operands(problem)[3:]])
    for node in problem.epilogue:
        tensor = next(tensors) if node.operand_dtype else None
        value = _node(node, value, tensor, exact)
    assert value.dtype == np.float32
    return value


def _node(node: Any, x: Float32, tensor: Any, exact: bool) -> Float32:
    one, half = np.float32(1), np.float32(0.5)
    if not node.exact and exact:
        return x
    with np.errstate(over="ignore"):
        match node.op:
            case "bias":
                return x + (tensor[:, None] if node.axis == "m" else tensor)
            case "residual":
                return x + tensor
            case "mask":
                return np.where(tensor != 0, x, np.float32(0))
            case "scale":
                return x * np.float32(node.value)
            case "relu":
                return np.maximum(x, np.float32(0))
            case "leaky_relu":
                return np.where(x < 0, x * np.float32(node.slope), x)
            case "clip":
                return np.clip(x, np.float32(node.lo), np.float32(node.hi))
            case "gelu":
                return half * x * (one + _erf(x * np.float32(math.sqrt(0.5))).astype(np.float32))
            case "sigmoid":
                return one / (one + np.exp(-x))
            case "silu":
                return x / (one + np.exp(-x))
            case "tanh":
                return np.tanh(x)
            case "cast" if node.dtype == "float16":
                return x.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).astype(np.uint32).view(np.float32)


PROBLEMS = st.fixed_dictionaries(
    {
        "m": st.integers(1, 12), "n": st.integers(1, 12), "k": st.integers(1, 70), "batch": st.integers(1, 2),
        "layout": st.sampled_from(["nn", "nt", "tn", "tt"]),
        "epilogue": st.lists(st.sampled_from(EVERY_NODE), max_size=5),
    }
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(PROBLEMS, st.integers(0, 2**32))
def test_fp32_is_within_the_bound_on_normal_inputs(fields: dict[str, Any], seed: int) -> None:
    problem = matmul(**fields)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(seed))
    result, bound = OP.reference(problem, inputs)
    assert result.shape == bound.shape == OP.operands(problem)[2].shape
    assert np.all(np.isfinite(bound))
    assert within(in_fp32(problem, inputs), result, bound).all()


@settings(deadline=None, max_examples=150)
@given(PROBLEMS, st.integers(0, 2**32))
def test_fp32_equals_the_exact_reference_on_integer_inputs(fields: dict[str, Any], seed: int) -> None:
    problem = matmul(**fields)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(seed))
    result, bound = OP.reference(problem, inputs, exact=True)
    out = in_fp32(problem, inputs, exact=True)
    # Five scales and slopes in a row may need more than 24 bits after the finer inputs that casts get.
    assert np.mean(bound == 0.0) > (0.9 if any(node["op"] == "cast" for node in fields["epilogue"]) else 0.9999)
    assert np.array_equal(out[bound == 0.0].astype(np.float64), result[bound == 0.0])
    assert within(out, result, bound).all()


@settings(deadline=None, max_examples=100)
@given(PROBLEMS, st.integers(0, 2**32))
def test_fp32_is_within_the_bound_on_integer_inputs_with_activations(fields: dict[str, Any], seed: int) -> None:
    problem = matmul(**fields)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(seed))
    assert within(in_fp32(problem, inputs), *OP.reference(problem, inputs)).all()


@pytest.mark.parametrize("kind", ["normal", "integer"])
@pytest.mark.parametrize("k", [1, 8, 64, 500])
def test_a_kernel_that_drops_an_element_along_k_is_outside_the_bound(kind: Any, k: int) -> None:
    problem = matmul(m=24, n=24, k=k)
    inputs = OP.make_inputs(problem, kind, np.random.default_rng(3))
    result, bound = OP.reference(problem, inputs)
    right = within(in_fp32(problem, inputs, drop=1), result, bound)
    assert np.mean(right) < 0.7


@pytest.mark.parametrize("node", EVERY_NODE, ids=lambda node: node["op"])
def test_leaving_a_node_out_is_noticed(node: dict[str, Any]) -> None:
    with_it, without = matmul(epilogue=[node]), matmul()
    for kind, exact in (("normal", False), ("integer", True)):
        if exact and node["op"] in ("gelu", "silu", "tanh", "sigmoid"):
            continue
        if not exact and node["op"] == "cast":
            continue  # a bound that allows a rounding also allows its absence: only exact inputs show it
        inputs = OP.make_inputs(with_it, kind, np.random.default_rng(1))  # type: ignore[arg-type]
        assert not within(in_fp32(without, inputs), *OP.reference(with_it, inputs, exact)).all()


def test_the_bound_is_gamma_k_times_the_sizes() -> None:
    problem = matmul(m=2, n=3, k=4)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(0))
    sizes = np.abs(inputs["a"].astype(np.float64)) @ np.abs(inputs["b"].astype(np.float64))
    u = 2.0**-24
    _, bound = OP.reference(problem, inputs)
    assert bound == pytest.approx(4 * u / (1 - 4 * u) * sizes, rel=1e-5)
    assert np.all(bound >= 4 * u / (1 - 4 * u) * sizes)


def test_a_repeated_operand_is_the_same_matrix_in_every_batch() -> None:
    problem = matmul(m=5, n=6, k=7, batch=3, stride_b=0)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(0))
    assert inputs["b"].shape == (3, 7, 6)
    assert np.array_equal(inputs["b"][0], inputs["b"][2])
    assert not np.array_equal(inputs["a"][0], inputs["a"][2])


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_integer_inputs_give_varied_results(layout: str) -> None:
    problem = matmul(m=33, n=20, k=48, layout=layout, epilogue=[{"op": "clip", "lo": -6.0, "hi": 40.0}, {"op": "mask"}])
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(0))
    result, _ = OP.reference(problem, inputs, exact=True)
    assert np.mean(result != 0) > 0.4
    assert len(np.unique(result)) > 20
    assert set(np.unique(inputs["mask"])) == {0, 1, 2, 255}


def test_integer_sums_stay_exact_for_any_length() -> None:
    problem = matmul(m=1, n=1, k=2**20 + 4096, layout="tn")
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(0))
    assert np.abs(inputs["a"]).astype(np.float64).T @ np.abs(inputs["b"]).astype(np.float64) <= 2**22
    assert np.count_nonzero(inputs["a"]) > 2**19
    assert OP.reference(problem, inputs)[1].max() == 0.0


def test_nothing_is_claimed_beyond_the_range_of_a_type() -> None:
    half = matmul(epilogue=[{"op": "scale", "value": 1e6}, {"op": "cast", "dtype": "float16"}, {"op": "tanh"}])
    single = matmul(
        epilogue=[{"op": "scale", "value": 1e38}, {"op": "scale", "value": 1e38}, {"op": "scale", "value": 0.0}]
    )
    for problem in (half, single):
        inputs = OP.make_inputs(problem, "normal", np.random.default_rng(0))
        result, bound = OP.reference(problem, inputs)
        assert np.all(np.isfinite(result))
        assert np.mean(np.isposinf(bound)) > 0.9
        assert not np.any(np.isnan(bound))


@pytest.mark.parametrize(
    ("value", "bound", "right"),
    [
        (1.0, 0.0, True),
        (1.5, 0.4, False),
        (1.5, 0.5, True),
        (math.nan, 1.0, False),
        (math.inf, 1.0, False),
        (math.inf, math.inf, True),
    ],
)
def test_within_demands_equality_at_0_and_never_takes_nan(value: float, bound: float, right: bool) -> None:
    out, reference, bounds = np.array([value], dtype=np.float32), np.array([1.0]), np.array([bound])
    assert within(out, reference, bounds)[0] == right
    assert worst(out, reference, bounds)[1] == bound


def test_worst_gives_the_place_of_the_largest_error() -> None:
    out, reference = np.array([[1.0, 5.0]], dtype=np.float32), np.array([[1.5, 3.0]])
    assert worst(out, reference, np.array([[0.1, 0.2]])) == (2.0, 0.2)
    assert worst(np.array([math.nan]), np.array([0.0]), np.array([0.3])) == (math.inf, 0.3)


def reduced(kernel: Kernel) -> list[MatmulProblem]:
    return [problem for problem in OP.test_problems(kernel) if isinstance(problem, MatmulProblem)]


@pytest.mark.parametrize(
    ("layout", "a", "b", "c"),
    [(layout, *aligned) for layout in ("nn", "nt", "tn", "tt") for aligned in product((0, 1), repeat=3)],
)
def test_reduced_problems_have_the_kernel_s_own_signature(layout: str, a: int, b: int, c: int) -> None:
    problem = matmul(m=64, n=64, k=64, layout=layout, lda=64 + a, ldb=64 + b, ldc=64 + c, epilogue=EVERY_NODE[:8])
    for candidate in lower(problem, target("sm_90a"), Search(level=2, limit=12)).candidates:
        kernel = candidate.kernel
        even, ragged, smallest, many = reduced(kernel)
        tile = {name: int(kernel.tunables.get(f"tile_{name}")) for name in "mnk"}
        stages = int(kernel.tunables.get("stages"))
        for one in (even, ragged, smallest, many):
            assert OP.candidate(one, candidate.schedule).kernel == kernel
        assert all(getattr(even, name) % tile[name] == 0 for name in "mnk")
        assert even.k // tile["k"] > stages
        assert all(getattr(ragged, name) % tile[name] != 0 for name in "mnk")
        assert ragged.k > tile["k"] * stages
        assert ragged.lda > ragged.stored("a")[1]
        tiles = [-(-getattr(many, name) // tile[name]) for name in "mnk"]
        assert (many.batch, *tiles) == (2, 5, 2, 1)
        assert max(smallest.m, smallest.n, smallest.k) <= 4
        assert ragged.batch * ragged.m * ragged.n * ragged.k < 4_000_000


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_no_extent_pitch_or_stride_of_the_reduced_problems_stands_for_another_by_chance(layout: str) -> None:
    kernel = default_candidate(matmul(layout=layout)).kernel
    allowed = {tunable.name: tunable.allowed for tunable in OP.tunables}
    names = ("tile_m", "tile_n", "tile_k", "stages")
    for a, b, c in product((1, 4), repeat=3):
        signature = {**kernel.signature_dict, "align_a": a, "align_b": b, "align_c": c}
        for values in product(*(allowed[name] for name in names)):
            _, ragged, _, many = reduced_problems(signature, dict(zip(names, values, strict=True)))
            for fields in (("m", "n", "k"), ("lda", "ldb", "ldc"), ("stride_a", "stride_b", "stride_c")):
                for one, other in combinations(fields, 2):
                    assert any(getattr(problem, one) != getattr(problem, other) for problem in (ragged, many))


def test_reduced_problems_of_small_tiles_have_several_tiles_and_matrices() -> None:
    kernel = default_candidate(matmul(m=16, n=16, k=64)).kernel
    even, ragged, smallest, _ = reduced(kernel)
    assert (even.m, even.n) > (16, 16)
    assert ragged.batch == 2
    assert ragged.m > 4 * 16
    assert smallest.batch > 1
