"""References and comparisons work on a GPU's arrays: nothing but what CuPy has, and the bits that NumPy gives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.arrays import SMALLEST_NORMAL, as_float64, erf, namespace_of, powers_of_two
from codegen.dtypes import dtype
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.matmul.problem import MatmulProblem
from codegen.plan.gpu_verification_plan import reduced_cases
from codegen.plan.verification_plan import OutputCheck, check_output, differing
from codegen.search.search import Search
from codegen.targets import target
from tests.support.fixtures.codegen import EVERY_NODE, matmul
from tests.support.gpu import cupy_names, strict_arrays
from tests.support.gpu.strict_arrays import StrictArray, on_device, on_host
from tests.support.run.each_run import some_each_run

OP = operator("matmul")
TYPES: dict[str, dict[str, Any]] = {
    f"{inputs} to {out}": {"dtype": inputs.removesuffix("*"), "out_dtype": out, "allow_tf32": inputs.endswith("*")}
    for inputs in ("float32", "float32*", "float16", "bfloat16", "int8")
    for out in ("float32", "float16", "bfloat16", *(["int32"] if inputs == "int8" else []))
}
EXACT_CHAIN = [node for node in EVERY_NODE if node["op"] not in ("gelu", "silu", "tanh", "sigmoid")][:8]
APPROXIMATE_CHAIN = [
    {"op": "bias", "axis": "n"}, {"op": "gelu"}, {"op": "silu"}, {"op": "residual"}, {"op": "tanh"},
    {"op": "scale", "value": 0.1}, {"op": "sigmoid"}, {"op": "cast", "dtype": "bfloat16"},
]  # fmt: skip
CHAINS = {"plain": [], "exact": EXACT_CHAIN, "approximate": APPROXIMATE_CHAIN}
WITH_CHAINS = [(types, chain) for types, chain in product(TYPES, CHAINS) if chain == "plain" or "int32" not in types]
# More would keep a GPU waiting: whether tf32 loses something of A, of B, of each whether it is whole numbers, and
# whether all of A are numbers.
MOST_WAITS = 7


@pytest.fixture(autouse=True)
def namespace() -> Iterator[ModuleType]:
    with strict_arrays.strict_namespace() as namespace:
        yield namespace


def both(
    problem: MatmulProblem, kind: Any, seed: int, exact: bool
) -> tuple[tuple[npt.NDArray[Any], ...], tuple[StrictArray, ...]]:
    """The reference's two answers from NumPy arrays and from strict ones."""
    inputs = OP.make_inputs(problem, kind, np.random.default_rng(seed))
    on_cpu = OP.reference(problem, inputs, exact)
    there: Any = {name: on_device(values) for name, values in inputs.items()}
    on_gpu: Any = OP.reference(problem, there, exact)
    assert all(type(array) is StrictArray for array in on_gpu)
    return on_cpu, on_gpu


def equal_bits(left: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    return left.dtype == other.dtype and left.shape == other.shape and left.tobytes() == other.tobytes()


@pytest.mark.parametrize(("types", "chain"), some_each_run(WITH_CHAINS, 16))
def test_the_reference_on_a_device_has_the_bits_of_numpy(types: str, chain: str) -> None:
    for layout, batch in (("nn", 1), ("nt", 3), ("tn", 3), ("tt", 1)):
        problem = matmul(m=9, n=14, k=33, batch=batch, layout=layout, epilogue=CHAINS[chain], **TYPES[types])
        for kind, exact in product(("integer", "normal", "special"), (True, False)):
            on_cpu, on_gpu = both(problem, kind, 5, exact)
            assert all(equal_bits(array, on_host(other)) for array, other in zip(on_cpu, on_gpu, strict=True))


@pytest.mark.parametrize("shift", [-9, 0, 3])
@pytest.mark.parametrize(("last", "exact"), [(1, True), (2, False), (-1, True), (-2, False)])
def test_sums_of_24_bits_are_exact_and_longer_ones_are_not(shift: int, last: int, exact: bool) -> None:
    parts = [*[2**21] * 7, 2**21 - 1, last]  # 2^24 with a last part of 1
    problem = matmul(m=1, n=1, k=len(parts))
    a, b = np.full((1, len(parts)), 2.0**shift, np.float32), np.array(parts, np.float32)[:, None]
    namespaces: tuple[Any, ...] = (np.asarray, on_device)
    for on in namespaces:
        _, bound = OP.reference(problem, {"a": on(a), "b": on(b)})
        assert (float(bound[0, 0]) == 0.0) is exact


def test_zeros_alone_give_an_exact_zero() -> None:
    zeros = np.zeros((3, 3), np.float32)
    namespaces: tuple[Any, ...] = (np.asarray, on_device)
    for on in namespaces:
        result, bound = OP.reference(matmul(m=3, n=3, k=3), {"a": on(zeros), "b": on(zeros)})
        assert float(result[1, 1]) == float(bound[1, 1]) == 0.0


SHAPES = {"m": st.integers(1, 9), "n": st.integers(1, 9), "k": st.integers(1, 70), "batch": st.integers(1, 2)}


@settings(max_examples=100)
@given(
    st.fixed_dictionaries(SHAPES), st.sampled_from(list(TYPES.values())),
    st.lists(st.sampled_from(EVERY_NODE), max_size=5), st.sampled_from(["integer", "normal"]), st.booleans(),
)  # fmt: skip
def test_any_chain_has_the_bits_of_numpy(
    shape: dict[str, int], types: dict[str, Any], chain: list[dict[str, Any]], kind: Any, exact: bool
) -> None:
    problem = matmul(**shape, **types, epilogue=[] if types["out_dtype"] == "int32" else chain)
    on_cpu, on_gpu = both(problem, kind, 1, exact)
    assert all(equal_bits(array, on_host(other)) for array, other in zip(on_cpu, on_gpu, strict=True))


@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_a_reference_hardly_waits_for_the_device(types: dict[str, Any]) -> None:
    for kind in ("integer", "normal"):
        StrictArray.waits = 0
        both(matmul(m=9, n=14, k=33, **types), kind, 5, False)
        assert StrictArray.waits <= MOST_WAITS


RELU, LEAKY_RELU = [{"op": "relu"}], [{"op": "leaky_relu", "slope": 0.1}]
OF_FEW_VALUES = {
    "argmax": {"fn": "argmax"},
    "max, relu": {"fn": "max", "epilogue": RELU},
    "max of products": {"fn": "max", "map": "multiply"},
    "max of products, relu": {"fn": "max", "map": "multiply", "epilogue": RELU},
    "min of products, relu": {"fn": "min", "map": "multiply", "epilogue": RELU},
    "min, leaky_relu": {"fn": "min", "epilogue": LEAKY_RELU},
    "gradient of relu": {"fn": "sum", "map": "relu_grad"},
    "sum": {"fn": "sum", "epilogue": RELU},
    "logsumexp": {"fn": "logsumexp"},
    "masked relu": {"where_set": {"op": "relu"}},
    "masked square": {"where_set": {"op": "square"}, "where_clear": {"op": "gelu"}},
    "masked polynomials": {
        "where_set": {"op": "polynomial", "coefficients": [0.0, -1.0, 0.0]},
        "where_clear": {"op": "polynomial", "coefficients": [1.0, 0.5, 0.25]},
    },
}


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("fields", OF_FEW_VALUES.values(), ids=OF_FEW_VALUES)
def test_subnormals_that_a_device_takes_for_0_refuse_no_right_output(fields: dict[str, Any], name: str) -> None:
    """As a kernel computes it, which does not take them so."""
    if "fn" in fields:
        op, fields = operator("reduce"), {"shape": [4, 65536], "axes": [0], **fields}
    else:
        op, fields = operator("masked_activation"), {"shape": [1000], **fields}
    problem, special = op.parse({"dtype": name, **fields}), 0
    candidates = lower(problem, target("sm_90a"), Search(level=1, limit=6)).candidates
    for kernel in {candidate.kernel.id: candidate.kernel for candidate in candidates}.values():
        for case in (case for case in reduced_cases(op, kernel, 7) if case.kind == "special"):
            special += 1
            inputs = op.make_inputs(case.problem, "special", np.random.default_rng(case.seed))
            value, _ = op.reference(case.problem, inputs, False)
            out_dtype = next(each.dtype for each in op.operands(case.problem) if each.role == "out")
            out = value.astype(np.float32).astype(dtype(out_dtype).numpy)
            there: Any = {name: on_device(values) for name, values in inputs.items()}
            expected, bound = op.reference(case.problem, there, False)
            checked = check_output(as_float64(on_device(out), out_dtype), expected, bound, exact=False, signed=True)
            assert checked.ok, (case.problem, checked.sentence())
    assert special > 0


def spoiled(values: npt.NDArray[Any], changes: dict[int, float]) -> npt.NDArray[Any]:
    out = values.copy()
    for place, value in changes.items():
        out.reshape(-1)[place] = value
    return out


FINITE: list[dict[int, float]] = [{}, {5: 77.0}]
CHANGES = [*FINITE, {7: np.nan, 3: 1.0}, {2: np.inf}, {0: -np.inf, 11: 3.0}]


@pytest.mark.parametrize(
    ("name", "changes"),
    [*product(("float32", "float16", "bfloat16"), CHANGES), *product(("int32",), FINITE)],
)
@pytest.mark.parametrize("exact", [True, False])
def test_comparisons_on_a_device_are_those_of_numpy(name: str, changes: dict[int, float], exact: bool) -> None:
    rng = np.random.default_rng(0)
    expected = rng.integers(-40, 40, (3, 4)).astype(np.float64)
    out = spoiled(expected, changes).astype(dtype(name).numpy)
    for bound in (np.zeros((3, 4)), rng.uniform(0, 50, (3, 4)), np.full((3, 4), np.inf), np.zeros((4,))):
        on_cpu = check_output(out, expected, bound, exact=exact)
        there = check_output(as_float64(on_device(out), name), on_device(expected), on_device(bound), exact=exact)
        assert same(on_cpu, there)
        assert on_cpu.ok is not bool(changes) or not np.isfinite(bound).all() or not exact


def same(left: OutputCheck, other: OutputCheck) -> bool:
    """Equal, NaN being NaN, and with Python's own numbers, which become JSON."""
    assert all(type(part) in (int, float, tuple, type(None)) for part in vars(other).values())
    return repr(left) == repr(other)


def test_an_output_without_elements_is_right(namespace: ModuleType) -> None:
    empty = np.zeros((0, 4))
    assert same(
        check_output(empty, empty, empty, exact=True), check_output(*map(on_device, (empty, empty, empty)), exact=True)
    )


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int32"])
def test_bits_that_differ_are_counted_on_a_device(name: str) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype(name).numpy)
    other = spoiled(array, {4: 100.0, 9: 101.0})
    assert differing(on_device(array), on_device(array)) == 0
    assert differing(on_device(array), on_device(other)) == differing(array, other) == 2


def test_minus_zero_and_zero_differ_in_their_bits_only() -> None:
    zero, minus = np.zeros(3, np.float32), -np.zeros(3, np.float32)
    assert differing(on_device(zero), on_device(minus)) == 3
    assert check_output(on_device(minus), on_device(zero.astype(np.float64)), on_device(np.zeros(3)), exact=True).ok


def test_every_bfloat16_is_read_from_its_bits() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    values = bits.view(dtype("bfloat16").numpy)
    with np.errstate(invalid="ignore"):  # signalling NaN
        expected = values.astype(np.float64)
        for values_ in (as_float64(bits, "bfloat16"), as_float64(values, "bfloat16")):
            np.testing.assert_array_equal(values_, expected)
        flushed = np.where(np.abs(expected) < SMALLEST_NORMAL, np.copysign(0.0, expected), expected)
        np.testing.assert_array_equal(on_host(as_float64(on_device(values), "bfloat16")), flushed)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "int32", "int8", "uint8"])
def test_values_of_every_type_become_float64(name: str) -> None:
    values = np.array([0, 1, 3, 100]).astype(dtype(name).numpy)
    result = as_float64(on_device(values), name)
    assert equal_bits(on_host(result), values.astype(np.float64))


def test_a_namespace_is_what_an_array_says_or_where_its_type_is(namespace: ModuleType) -> None:
    class Speaks:
        def __array_namespace__(self) -> ModuleType:
            return namespace

    assert namespace_of(np.zeros(3)) is np
    assert namespace_of(np.float64(1.0)) is np
    assert namespace_of(on_device(np.zeros(3))) is namespace
    assert namespace_of(Speaks()) is namespace


def test_powers_of_two_are_exact() -> None:
    exponents = np.arange(-1022, 1024, dtype=np.int32)
    assert equal_bits(powers_of_two(exponents), np.ldexp(1.0, exponents))
    assert equal_bits(on_host(powers_of_two(on_device(exponents))), np.ldexp(1.0, exponents))


def test_the_error_function_is_that_of_the_namespace() -> None:
    values = np.linspace(-4.0, 4.0, 33)
    assert equal_bits(on_host(erf(on_device(values))), erf(values))
    assert erf(np.array([0.0]))[0] == 0.0


def test_a_reference_that_would_copy_to_the_host_does_not_pass() -> None:
    device: Any = on_device(np.ones((3, 3)))
    host = np.ones((3, 3))
    refused: list[Any] = [
        lambda: np.asarray(device), lambda: np.abs(device), lambda: np.where(device > 0.0, 1.0, 0.0),
        lambda: device + host, lambda: host + device, lambda: device * np.float64(2.0), lambda: list(device),
        lambda: bool(device), lambda: device[host > 0.0], lambda: np.matmul(host, device),
        lambda: namespace_of(device).where(device > 0.0, 1.0, 0.0), lambda: namespace_of(device).maximum(1.0, device),
        lambda: namespace_of(device).max(device, initial=0.0), lambda: on_device(host).astype(dtype("bfloat16").numpy),
    ]  # fmt: skip
    for attempt in refused:
        with pytest.raises(TypeError):
            attempt()
    with pytest.raises(AttributeError):
        namespace_of(device).errstate  # noqa: B018
    with pytest.raises(AttributeError):
        device.flat  # noqa: B018


def test_strict_arrays_allow_nothing_that_cupy_lacks() -> None:
    assert set(strict_arrays.FUNCTIONS) <= set(cupy_names.FUNCTIONS.split())
    own = {name for name in vars(StrictArray) if not name.startswith("_")} - {"waits"}
    assert own <= set(cupy_names.ATTRIBUTES.split())
    special = {name for name in vars(StrictArray) if name.startswith("__")} - set(vars(object))
    assert special - {"__module__", "__dict__", "__weakref__", "__annotations__"} <= set(cupy_names.OPERATORS.split())
    assert "__array_namespace__" not in special


def test_the_names_are_those_of_the_cupy_that_is_installed() -> None:
    cupy = pytest.importorskip("cupy")
    assert set(strict_arrays.FUNCTIONS) <= set(dir(cupy))
    assert {name for name in vars(StrictArray) if not name.startswith("_")} - {"waits"} <= set(dir(cupy.ndarray))
