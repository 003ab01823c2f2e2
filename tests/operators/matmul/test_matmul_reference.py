"""The reference and its bound: what a right kernel computes stays inside, a wrong kernel does not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.dtypes import dtype
from codegen.operators import operator
from codegen.plan.verification_plan import check_output
from tests.support.fixtures.codegen import EVERY_NODE, matmul
from tests.support.kernels.kernel_in_numpy import computed, cut_off, summed, tf32, through_bfloat16

OP = operator("matmul")
# Every combination of types: A and B, out, and whether tf32 is allowed.
TYPES: dict[str, dict[str, Any]] = {
    f"{inputs} to {out}": {"dtype": inputs.removesuffix("*"), "out_dtype": out, "allow_tf32": inputs.endswith("*")}
    for inputs in ("float32", "float32*", "float16", "bfloat16", "int8")
    for out in ("float32", "float16", "bfloat16", *(["int32"] if inputs == "int8" else []))
}
TENSOR_TYPES = {name: types for name, types in TYPES.items() if not name.startswith("float32 ")}


def with_chain(types: dict[str, Any], chain: list[dict[str, Any]]) -> dict[str, Any]:
    """The types with an epilogue, where they take one."""
    return {**types, "epilogue": [] if types["out_dtype"] == "int32" else chain}


def right_share(out: Any, reference: Any, bound: Any) -> float:
    output_check = check_output(out, reference, bound, exact=False)
    return 1 - output_check.wrong / output_check.size


SHAPES = {
    "m": st.integers(1, 12), "n": st.integers(1, 12), "k": st.integers(1, 70), "batch": st.integers(1, 2),
    "layout": st.sampled_from(["nn", "nt", "tn", "tt"]),
}  # fmt: skip
CHAINS = st.lists(st.sampled_from(EVERY_NODE), max_size=5)
PROBLEMS = st.builds(
    lambda shape, types, chain: {**shape, **with_chain(types, chain)},
    st.fixed_dictionaries(SHAPES),
    st.sampled_from(list(TYPES.values())),
    CHAINS,
)


@settings(max_examples=300)
@given(PROBLEMS, st.integers(0, 2**32))
def test_a_kernel_is_within_the_bound_on_normal_inputs(fields: dict[str, Any], seed: int) -> None:
    problem = matmul(**fields)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(seed))
    result, bound = OP.reference(problem, inputs)
    (out,) = (operand for operand in OP.operands(problem) if operand.role == "out")
    assert result.shape == bound.shape == out.shape
    assert not np.any(np.isnan(bound))
    assert np.all(np.isfinite(bound)) or problem.dtype == "int8"  # whose sums may be beyond float16
    assert right_share(computed(problem, inputs), result, bound) == 1.0


@settings(max_examples=300)
@given(PROBLEMS, st.integers(0, 2**32))
def test_a_kernel_equals_the_exact_reference_on_integer_inputs(fields: dict[str, Any], seed: int) -> None:
    problem = matmul(**fields)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(seed))
    result, bound = OP.reference(problem, inputs, exact=True)
    assert np.all(bound == 0.0)
    assert np.array_equal(computed(problem, inputs, exact=True).astype(np.float64), result)


@settings(max_examples=100)
@given(PROBLEMS, st.integers(0, 2**32))
def test_a_kernel_is_within_the_bound_on_integer_inputs_with_activations(fields: dict[str, Any], seed: int) -> None:
    problem = matmul(**fields)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(seed))
    assert right_share(computed(problem, inputs), *OP.reference(problem, inputs)) == 1.0


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("kind", ["normal", "integer"])
@pytest.mark.parametrize("k", [1, 8, 64, 500])
def test_a_kernel_that_drops_an_element_along_k_is_outside_the_bound(types: dict[str, Any], kind: Any, k: int) -> None:
    problem = matmul(m=24, n=24, k=k, **types)
    inputs = OP.make_inputs(problem, kind, np.random.default_rng(3))
    result, bound = OP.reference(problem, inputs)
    assert right_share(computed(problem, inputs, drop=1), result, bound) < 0.7


@pytest.mark.parametrize("types", [type for type in TYPES.values() if type["dtype"] != "int8"],
                         ids=[name for name in TYPES if not name.startswith("int8")])  # fmt: skip
def test_a_kernel_that_rounds_products_to_bfloat16_is_outside_the_bound(types: dict[str, Any]) -> None:
    problem = matmul(k=64, **types)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(5))
    out = computed(problem, inputs, spoil=through_bfloat16)
    # An output of 8 bits hides some of it.
    assert right_share(out, *OP.reference(problem, inputs)) < (0.8 if problem.out_dtype == "bfloat16" else 0.3)
    if problem.out_dtype == "float32" and not problem.allow_tf32:
        inputs = OP.make_inputs(problem, "normal", np.random.default_rng(5))
        out = computed(problem, inputs, spoil=through_bfloat16)
        assert right_share(out, *OP.reference(problem, inputs)) < 0.2


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("k", [1, 7, 64, 300, 5000])
def test_integer_sums_are_exact_in_any_order(types: dict[str, Any], k: int) -> None:
    problem = matmul(m=9, n=7, k=k, **types)
    rng = np.random.default_rng(k)
    inputs = OP.make_inputs(problem, "integer", rng)
    a, b = (inputs[name].astype(np.float32) for name in "ab")
    assert np.array_equal(a.astype(inputs["a"].dtype), inputs["a"])  # values of the dtype
    products = a.T[:, :, None] * b[:, None, :]
    exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
    for _ in range(3):
        order = rng.permutation(k)
        total = np.zeros((9, 7), np.float32)
        for index in order:
            total += products[index]
        assert np.array_equal(total, exact)
    largest = np.max(np.sum(np.abs(products), axis=0))
    assert np.array_equal(total + largest, exact + np.float64(largest))  # and there is room for one bit more
    assert np.array_equal(summed(problem, inputs).astype(np.float64), exact)


@pytest.mark.parametrize("source", ["float32*", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("out", ["float16", "bfloat16"])
@pytest.mark.parametrize("k", [16, 64, 300])
def test_some_integer_results_fit_the_output_some_are_halfway_and_none_overflows(source: str, out: str, k: int) -> None:
    problem = matmul(m=96, n=96, k=k, **TYPES[f"{source} to {out}"])
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(1))
    sums = summed(problem, inputs).astype(np.float64)
    result, bound = OP.reference(problem, inputs, exact=True)
    assert np.all(bound == 0.0)
    spacing = np.ldexp(1.0, np.frexp(sums)[1] - {"float16": 11, "bfloat16": 8}[out])
    fits, halfway = result == sums, np.abs(result - sums) == spacing / 2
    assert np.mean(fits) > 0.02
    assert np.mean(halfway) > 0.02
    assert np.mean(~fits & ~halfway) > 0.02 or k == 16
    assert np.array_equal(result, sums.astype(np.float32).astype(dtype(out).numpy).astype(np.float64))


def test_tf32_may_be_rounded_or_left_alone_and_nothing_worse() -> None:
    problem, plain = matmul(k=2, allow_tf32=True), matmul(k=2)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(2))
    result, bound = OP.reference(problem, inputs)

    def share(change: Any) -> float:
        changed = {name: change(value) for name, value in inputs.items()}
        return right_share(computed(plain, changed), result, bound)

    assert share(tf32) == share(lambda values: values) == 1.0
    assert share(lambda values: tf32(values.astype(np.float16).astype(np.float32))) == 1.0
    assert share(cut_off) < 0.9
    bfloat16 = dtype("bfloat16").numpy
    assert share(lambda values: values.astype(bfloat16).astype(np.float32)) < 0.9
    exact, free = OP.reference(plain, inputs)
    assert np.all(free * 100 < bound) and np.allclose(exact, result)


@pytest.mark.parametrize("k", [128, 256, 1000])
def test_operands_of_positive_sums_that_are_cut_off_for_tf32_are_outside_the_bound(k: int) -> None:
    problem = matmul(m=24, n=24, k=k, allow_tf32=True)
    inputs = OP.make_inputs(problem, "positive", np.random.default_rng(4))
    result, bound = OP.reference(problem, inputs)
    assert right_share(computed(problem, inputs), result, bound) == 1.0
    assert right_share(computed(problem, {name: cut_off(x) for name, x in inputs.items()}), result, bound) < 0.2


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_subnormal_inputs_count(name: str) -> None:
    problem = matmul(m=8, n=8, k=8, dtype=name, out_dtype="float32", allow_tf32=True)
    smallest = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-136}[name]
    a = (np.arange(64).reshape(8, 8) % 7 * smallest).astype(dtype(name).numpy)
    b = np.full((8, 8), 2.0, dtype(name).numpy)
    result, bound = OP.reference(problem, {"a": a, "b": b})
    assert np.array_equal(result, computed(problem, {"a": a, "b": b}))
    assert result.max() > 0.0
    assert np.all(bound < smallest)


def test_int8_sums_wrap_around_as_int32_does() -> None:
    problem = matmul(m=2, n=1, k=2**17 + 3, dtype="int8")
    a = np.full((2, problem.k), -128, np.int8)
    a[1] = 127
    inputs = {"a": a, "b": np.full((problem.k, 1), -128, np.int8)}
    result, bound = OP.reference(problem, inputs)
    assert result[0, 0] == (128 * 128 * problem.k + 2**31) % 2**32 - 2**31 < 0 < 128 * 128 * problem.k
    assert result[1, 0] == -128 * 127 * problem.k
    assert np.all(bound == 0.0)
    assert np.array_equal(computed(problem, inputs), result)


def test_int8_sums_become_float32_by_one_rounding() -> None:
    problem = matmul(m=1, n=3, k=2**12, dtype="int8", out_dtype="float32")
    a = np.full((1, problem.k), 127, np.int8)
    b = np.full((problem.k, 3), 127, np.int8)
    b[0] = 126, 0, -127
    result, bound = OP.reference(problem, {"a": a, "b": b})
    sums = 127.0 * (127.0 * (problem.k - 1) + np.array([[126.0, 0.0, -127.0]]))
    assert np.array_equal(result, sums)
    odd = sums > 2**24
    assert odd.all()
    assert np.array_equal(bound > 0.0, sums.astype(np.float32) != sums)
    assert np.all(bound <= 4.0)
    assert right_share(computed(problem, {"a": a, "b": b}), result, bound) == 1.0


def test_int8_inputs_use_their_whole_range_and_small_ones_where_a_clip_would_flatten_them() -> None:
    free = OP.make_inputs(matmul(dtype="int8"), "normal", np.random.default_rng(0))
    assert {int(free[name].min()) for name in "ab"} == {-128}
    assert {int(free[name].max()) for name in "ab"} == {127}
    clip = {"op": "clip", "lo": -6.0, "hi": 9.0}
    for chain, out in (([clip], "float32"), ([{"op": "scale", "value": 0.001}, clip], "bfloat16")):
        problem = matmul(dtype="int8", out_dtype=out, epilogue=chain)
        for kind in ("normal", "integer"):
            inputs = OP.make_inputs(problem, kind, np.random.default_rng(0))  # type: ignore[arg-type]
            result, _ = OP.reference(problem, inputs)
            assert 0.05 < np.mean((result > -6.0) & (result < 9.0)) < 0.95


def test_int8_sums_fit_float16_where_that_is_the_output() -> None:
    for kind in ("normal", "integer"):
        problem = matmul(k=500, dtype="int8", out_dtype="float16")
        result, bound = OP.reference(problem, OP.make_inputs(problem, kind, np.random.default_rng(0)))  # type: ignore[arg-type]
        assert np.all(np.isfinite(bound))
        assert np.max(np.abs(result)) > 2048.0


@pytest.mark.parametrize(
    ("types", "node"),
    [
        pytest.param(TYPES[name], node, id=f"{name} {node['op']}.{node.get('dtype', '')}")
        for name in ("float32 to float32", "float16 to float16", "bfloat16 to bfloat16", "int8 to float32")
        for node in EVERY_NODE
        if node.get("dtype") != TYPES[name]["out_dtype"]  # what is rounded to a type twice is what is rounded once
    ],
)
def test_leaving_a_node_out_is_noticed(types: dict[str, Any], node: dict[str, Any]) -> None:
    with_it, without = matmul(epilogue=[node], **types), matmul(**types)
    for kind, exact in (("normal", False), ("integer", True)):
        if exact and node["op"] in ("gelu", "silu", "tanh", "sigmoid"):
            continue
        if not exact and node["op"] == "cast":
            continue  # a bound that allows a rounding also allows its absence: only exact inputs show it
        inputs = OP.make_inputs(with_it, kind, np.random.default_rng(1))  # type: ignore[arg-type]
        assert right_share(computed(without, inputs), *OP.reference(with_it, inputs, exact)) < 1.0


def test_the_bound_is_gamma_k_times_the_sizes() -> None:
    problem = matmul(m=2, n=3, k=4)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(0))
    sizes = np.abs(inputs["a"].astype(np.float64)) @ np.abs(inputs["b"].astype(np.float64))
    u = 2.0**-24
    _, bound = OP.reference(problem, inputs)
    assert bound == pytest.approx(4 * u / (1 - 4 * u) * sizes, rel=1e-5)
    assert np.all(bound >= 4 * u / (1 - 4 * u) * sizes)
    half = matmul(m=2, n=3, k=32, dtype="float16", out_dtype="float32")
    inputs = OP.make_inputs(half, "normal", np.random.default_rng(0))
    sizes = np.abs(inputs["a"].astype(np.float64)) @ np.abs(inputs["b"].astype(np.float64))
    _, bound = OP.reference(half, inputs)
    assert bound == pytest.approx(128 * u / (1 - 128 * u) * sizes, rel=1e-5)


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
