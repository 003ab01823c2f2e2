"""Attention of numbers that the verification plan does not have: large scores, NaN that nothing may read, no keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.kernel import Kernel
from codegen.operators.attention.problem import AttentionProblem
from codegen.plan.verification_plan import check_output
from tests.operators.attention.kernels import OP, attention, definition, kernel
from tests.support.kernels.cpu_helpers import LIMITS, processes, toolchain
from workers.cpu.build import build_cpu
from workers.cpu.library import CpuLibrary

Array = NDArray[Any]
NAN = float("nan")
SEQ_KV = OP.extent_names.index("seq_kv")
KERNELS = {
    "Q in registers": kernel(qk=32, lse=True, stages=2),
    "Q shared": kernel("bfloat16", qk=32, lse=True, q_in="shared", layout="bhsd", tile_kv=16),
    "capped": kernel(qk=32, lse=True, softcap=True),
    "split": kernel("bfloat16", qk=32, lse=True, tile_kv=16, split="workspace"),
    "split, Q shared": kernel(qk=32, lse=True, q_in="shared", layout="bhsd", tile_kv=16, stages=2, split="workspace"),
    "packed": kernel(qk=32, lse=True, packing="group"),
    "packed, split": kernel("bfloat16", qk=32, lse=True, layout="bhsd", tile_kv=16, split="workspace", packing="group"),
}
SPLIT = ("split", "split, Q shared", "packed, split")
PACKED = ("packed", "packed, split")
PLAIN = ("Q in registers", "Q shared", "packed", *SPLIT)
# Of a weight and of out, in either type.
ROUNDINGS = {"float16": 2.0**-9, "bfloat16": 2.0**-6}
GREATEST_EXPONENTS = {"float16": 2.0**28, "bfloat16": 2.0**31}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    build = build_cpu(list(KERNELS.values()), toolchain(), processes(), LIMITS, folder=tmp_path_factory.mktemp("cpu"))
    ((path, _),) = build.libraries
    return CpuLibrary(path)


def problem_of(own: Kernel, **fields: Any) -> AttentionProblem:
    s = own.signature_dict
    given = {"seq_q": 40, "seq_kv": 75, "head_dim_qk": 32, "lse": True, "dtype": s["dtype"], "layout": s["layout"]}
    return attention(**{**given, **({"softcap": 20.0} if s["softcap"] else {}), **fields})


def normals(problem: AttentionProblem) -> dict[str, Array]:
    return OP.make_inputs(problem, "normal", np.random.default_rng(8))


def positions(problem: AttentionProblem, array: Array) -> Array:
    """A view of the tensor with its positions first."""
    return array.transpose(1, 0, 2, 3) if problem.layout == "bshd" else array.transpose(2, 0, 1, 3)


def run(
    library: CpuLibrary,
    own: Kernel,
    problem: AttentionProblem,
    inputs: dict[str, Array],
    seq_kv: int | None = None,
    parts: int = 3,
) -> tuple[Array, Array]:
    """out in the problem's layout and lse, in float64. `seq_kv`: of the call, where it has fewer keys. `parts` of them,
    where the kernel splits keys."""
    tensors = library.allocate(OP.operands(problem))
    integers = OP.integers(problem)
    if seq_kv is not None:
        integers[SEQ_KV] = seq_kv
    launch = [0, parts if "split" in own.tunables.as_dict() else 0]
    try:
        workspace = library.workspace(own.namespace, integers, launch)
        for tensor in tensors:
            if tensor.operand.role == "in":
                tensor.fill(inputs[tensor.operand.name])
            else:
                tensor.poison()
        outcome = library.run(
            own.namespace, tensors, workspace, integers=integers, launch=launch, scalars=OP.scalars(problem),
            order="seeded", seed=1, exact=False, cpu_seconds=5.0,
        )  # fmt: skip
        assert (outcome.status, outcome.message) == ("ok", "")
        out, lse = (tensor.view.astype(np.float64) for tensor in tensors[3:])
        return out, lse
    finally:
        tensors = []
        tensor = workspace = None
        library.free()


def require_definition(problem: AttentionProblem, inputs: dict[str, Array], out: Array, lse: Array) -> None:
    expected, bound = OP.reference(problem, inputs)
    got = np.concatenate([out.reshape(-1), lse.reshape(-1)])
    assert check_output(got, expected, bound, exact=False).ok
    np.testing.assert_allclose(got, definition(problem, inputs).astype(float), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("name", KERNELS)
def test_a_call_with_fewer_keys_reads_none_of_those_behind_the_last(name: str, library: CpuLibrary) -> None:
    own = KERNELS[name]
    for fewer in (1, 16, 33, 64, 74):
        whole, part = problem_of(own), problem_of(own, seq_kv=fewer)
        inputs = normals(whole)
        for tensor in ("k", "v"):
            positions(whole, inputs[tensor])[fewer:] = NAN
        seen = {
            tensor: array
            if tensor == "q"
            else np.ascontiguousarray(array[:, :fewer] if whole.layout == "bshd" else array[:, :, :fewer])
            for tensor, array in inputs.items()
        }
        require_definition(part, seen, *run(library, own, whole, inputs, seq_kv=fewer))


@pytest.mark.parametrize("name", KERNELS)
def test_without_keys_out_is_zeros_and_lse_minus_infinity(name: str, library: CpuLibrary) -> None:
    own = KERNELS[name]
    for causal in (False, True):
        problem = problem_of(own, causal=causal)
        out, lse = run(library, own, problem, normals(problem), seq_kv=0)
        assert (out == 0.0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("name", KERNELS)
def test_a_query_before_all_keys_has_zeros_and_minus_infinity(name: str, library: CpuLibrary) -> None:
    own = KERNELS[name]
    problem = problem_of(own, seq_q=60, seq_kv=20, causal=True)
    inputs = normals(problem)
    out, lse = run(library, own, problem, inputs)
    assert (positions(problem, out)[:40] == 0.0).all() and (lse[:, :, :40] == -np.inf).all()
    assert (lse[:, :, 40:] > -np.inf).all()
    require_definition(problem, inputs, out, lse)


@pytest.mark.parametrize("name", PLAIN)
def test_weights_fit_16_bits_up_to_the_greatest_exponent_that_is_documented(name: str, library: CpuLibrary) -> None:
    """The greatest is rounded before it is subtracted, which all weights have as a factor."""
    own, element = KERNELS[name], 13.5
    score, largest = 32 * element**2, GREATEST_EXPONENTS[own.signature_dict["dtype"]]
    # As `bind` has the factor of a score.
    to_bits = np.linspace(0.5, 1.0, 500, endpoint=False).astype(np.float32) * np.float32(largest / score)
    exponents = score * to_bits.astype(np.float64)
    lost = exponents - exponents.astype(np.float32)
    half_an_ulp = largest * 2.0**-25
    assert max(lost) > 0.9 * half_an_ulp and min(lost) < -0.9 * half_an_ulp
    for at in (np.argmax(lost), np.argmin(lost), len(lost) - 1):
        problem = problem_of(own, scale=float(to_bits[at]) / np.log2(np.e))
        inputs = {operand.name: np.ones(operand.shape) for operand in OP.operands(problem) if operand.role == "in"}
        inputs |= {operand: element * inputs[operand] for operand in ("q", "k")}
        out, lse = run(library, own, problem, inputs)
        assert (np.abs(out - 1.0) <= ROUNDINGS[problem.dtype]).all(), lost[at]
        np.testing.assert_allclose(lse, exponents[at], rtol=2.0**-21)


@pytest.mark.parametrize("name", KERNELS)
def test_a_nan_in_a_query_is_in_its_own_row_alone(name: str, library: CpuLibrary) -> None:
    own = KERNELS[name]
    problem = problem_of(own)
    inputs = normals(problem)
    before, lse_before = run(library, own, problem, inputs)
    positions(problem, inputs["q"])[17, 0, 2, 5] = NAN
    out, lse = run(library, own, problem, inputs)
    wrong = np.isnan(out)
    assert positions(problem, wrong)[17, 0].reshape(4, 32)[2].all() and wrong.sum() == 32
    assert np.isnan(lse[0, 2, 17]) and np.isnan(lse).sum() == 1
    np.testing.assert_array_equal(out[~wrong], before[~wrong])
    np.testing.assert_array_equal(lse[~np.isnan(lse)], lse_before[~np.isnan(lse)])


@pytest.mark.parametrize("name", KERNELS)
def test_a_nan_in_a_key_that_no_query_sees_is_in_no_row(name: str, library: CpuLibrary) -> None:
    """Of v it would be: a weight of 0 times a NaN of the same tile is one, as in PyTorch."""
    own = KERNELS[name]
    problem = problem_of(own, seq_q=20, window_left=10)
    inputs = normals(problem)
    positions(problem, inputs["k"])[:45] = NAN
    out, lse = run(library, own, problem, inputs)
    assert np.isfinite(out).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("greatest", [1e4, -1e4, 0.0])
@pytest.mark.parametrize("name", PLAIN)
def test_scores_of_ten_thousand(name: str, greatest: float, library: CpuLibrary) -> None:
    """The key with the greatest score of a row has all of its weight, wherever it is; all scores lie 40 apart."""
    own = KERNELS[name]
    problem = problem_of(own, scale=1.0, batch=1)
    inputs = normals(problem)
    best = np.random.default_rng(2).permutation(75)
    q, k = (positions(problem, inputs[tensor]) for tensor in ("q", "k"))
    q[...], k[...] = 0.0, 0.0
    q[..., 0], q[..., 1] = 64.0, 8.0  # exact in both types
    k[..., 0] = greatest / 64.0
    k[..., 1] = (-5.0 * best)[:, None, None].astype(k.dtype)
    at = int(np.argmin(best))
    out, lse = run(library, own, problem, inputs)
    top = float(64.0 * np.float64(k[at, 0, 0, 0]))
    values = positions(problem, inputs["v"])[at].astype(float)
    for head in range(4):
        expected = np.broadcast_to(values[0, head // 2], (40, 32))
        got = positions(problem, out)[:, 0, head]
        np.testing.assert_allclose(got, expected, rtol=ROUNDINGS[own.signature_dict["dtype"]])
    np.testing.assert_allclose(lse, top / np.log(2.0), rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("name", KERNELS)
def test_equal_scores_of_any_size_have_equal_weights(name: str, library: CpuLibrary) -> None:
    own = KERNELS[name]
    for size in (0.0, 1.0, 30.0, -30.0):
        problem = problem_of(own, scale=0.5)
        inputs = normals(problem)
        inputs["q"][...], inputs["k"][...] = size / 4.0, 0.25
        out, lse = run(library, own, problem, inputs)
        mean = positions(problem, inputs["v"]).astype(float).mean(0)
        for head in range(4):
            np.testing.assert_allclose(
                positions(problem, out)[:, 0, head], np.broadcast_to(mean[0, head // 2], (40, 32)), atol=0.01
            )
        require_definition(problem, inputs, out, lse)


def test_a_cap_bounds_what_a_key_can_take(library: CpuLibrary) -> None:
    own = KERNELS["capped"]
    problem = problem_of(own, softcap=1.0, scale=1.0)
    inputs = normals(problem)
    out, lse = run(library, own, problem, inputs)
    assert (lse <= np.log2(75.0) + 1.0 / np.log(2.0) + 1e-4).all()
    require_definition(problem, inputs, out, lse)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize(("heads", "of_kv"), [(3, 1), (12, 4), (16, 2), (80, 2), (3, 3)])
def test_groups_of_any_size_are_packed(name: str, heads: int, of_kv: int, library: CpuLibrary) -> None:
    """Fewer heads than a tile has rows, more, and one."""
    own = KERNELS[name]
    for queries in (1, 5):
        problem = problem_of(own, batch=2, seq_q=queries, heads_q=heads, heads_kv=of_kv, causal=True, window_left=40)
        inputs = normals(problem)
        require_definition(problem, inputs, *run(library, own, problem, inputs))


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("window", [None, 20])
def test_any_number_of_splits_is_right(name: str, window: int | None, library: CpuLibrary) -> None:
    """More than there are tiles, too, and more than a block sees: then some have nothing to add."""
    own = KERNELS[name]
    problem = problem_of(own, causal=True, window_left=window)
    inputs = normals(problem)
    results = [run(library, own, problem, inputs, parts=parts) for parts in (1, 2, 3, 4, 5, 6, 100)]
    for out, lse in results:
        require_definition(problem, inputs, out, lse)
    np.testing.assert_array_equal(results[-1][0], results[-3][0])  # 75 keys are 5 tiles: 100 splits are 5


@pytest.mark.parametrize("name", SPLIT)
def test_a_workspace_has_what_splits_leave_and_no_more(name: str, library: CpuLibrary) -> None:
    own = KERNELS[name]
    problem = problem_of(own, batch=2, head_dim_vo=24)
    rows = 2 * 4 * 40
    for parts, split in ((0, 1), (1, 1), (4, 4), (5, 5), (9, 5), (1024, 5)):
        workspace = library.workspace(own.namespace, OP.integers(problem), [0, parts])
        assert workspace is not None and workspace.nbytes == 4 * split * rows * (24 + 2)
    library.free()


@pytest.mark.parametrize("name", SPLIT)
def test_a_nan_in_a_split_is_in_the_merged_row(name: str, library: CpuLibrary) -> None:
    """Of a row whose scores of one split are NaN no other split makes a number."""
    own = KERNELS[name]
    problem = problem_of(own, causal=True)
    inputs = normals(problem)
    positions(problem, inputs["k"])[70] = NAN
    out, lse = run(library, own, problem, inputs, parts=5)
    rows = positions(problem, np.isnan(out)).reshape(40, -1)
    assert rows[35:].all() and not rows[:35].any()
    assert np.isnan(lse[:, :, 35:]).all() and np.isfinite(lse[:, :, :35]).all()
