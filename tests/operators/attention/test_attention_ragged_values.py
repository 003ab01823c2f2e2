"""Ragged batches that the verification plan does not have: NaN beside a sequence, tables that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.kernel import Kernel
from codegen.operators.attention.inputs import begins
from codegen.operators.attention.problem import AttentionProblem
from tests.operators.attention.kernels import OP, attention, kernel
from tests.support.kernels.attention_calls import library_of, require_reference, run_call, run_in_workspace
from workers.cpu.library import CpuLibrary, Outcome

Array = NDArray[Any]
NAN = float("nan")
KERNELS = {
    "Q in registers": kernel(qk=32, lse=True, stages=2, ragged=True),
    "Q shared": kernel("bfloat16", qk=32, lse=True, q_in="shared", tile_kv=16, ragged=True),
    "packed": kernel(qk=32, lse=True, ragged=True, packing="group"),
    "a list": kernel(qk=32, lse=True, ragged=True, walk="longest_first", tile_q=16, warps=1),
}
LAUNCH = [0, 1, 3]  # of a list three blocks walk
Q_LENGTHS, KV_LENGTHS = (40, 0, 3, 33), (75, 9, 20, 0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    return library_of(KERNELS.values(), tmp_path_factory.mktemp("cpu"))


def problem_of(own: Kernel, **fields: Any) -> AttentionProblem:
    given = {
        "lengths": "ragged", "batch": 4, "seq_q": 40, "seq_kv": 75, "q_lengths": Q_LENGTHS, "kv_lengths": KV_LENGTHS,
        "head_dim_qk": 32, "lse": True, "dtype": own.signature_dict["dtype"],
    }  # fmt: skip
    return attention(**{**given, **fields})


def run(
    library: CpuLibrary, own: Kernel, problem: AttentionProblem, inputs: dict[str, Array]
) -> tuple[Outcome, Array, Array]:
    return run_call(library, own, problem, inputs, LAUNCH)


def normals(problem: AttentionProblem) -> dict[str, Array]:
    return OP.make_inputs(problem, "normal", np.random.default_rng(8))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_a_sequence_reads_nothing_of_its_neighbours(name: str, causal: bool, library: CpuLibrary) -> None:
    """Each in turn has numbers, and all others are NaN; the tensors and the tables are those of the whole batch."""
    own = KERNELS[name]
    problem = problem_of(own, causal=causal)
    whole = normals(problem)
    _, expected, expected_lse = run(library, own, problem, whole)
    for number in range(4):
        rows, keys = (slice(*whole[table][number : number + 2]) for table in ("qo_indptr", "kv_indptr"))
        inputs = {**whole, **{tensor: np.full_like(whole[tensor], NAN) for tensor in ("q", "k", "v")}}
        inputs["q"][rows], inputs["k"][keys], inputs["v"][keys] = whole["q"][rows], whole["k"][keys], whole["v"][keys]
        outcome, out, lse = run(library, own, problem, inputs)
        assert (outcome.status, outcome.message) == ("ok", "")
        np.testing.assert_array_equal(out[rows], expected[rows])
        np.testing.assert_array_equal(lse[rows], expected_lse[rows])


def test_a_list_has_the_sequences_with_the_most_keys_first_and_of_each_the_last_queries(library: CpuLibrary) -> None:
    """Of equal ones the first comes first; those without queries have no tile."""
    problem = problem_of(
        KERNELS["a list"], batch=6, q_lengths=(1, 40, 9, 0, 17, 33), kv_lengths=(20, 75, 20, 70, 0, 33)
    )
    *outcome, workspace = run_in_workspace(library, KERNELS["a list"], problem, normals(problem), LAUNCH)
    numbers = workspace.view(np.int32).reshape(-1, 2)
    expected = [(1, 2), (1, 1), (1, 0), (5, 2), (5, 1), (5, 0), (0, 0), (2, 0), (4, 1), (4, 0)]
    assert (outcome[0].status, numbers[0].tolist()) == ("ok", [len(expected), 0])
    assert [tuple(pair) for pair in numbers[1 : 1 + len(expected)].tolist()] == expected
    require_reference(OP, problem, normals(problem), *outcome[1:])


@pytest.mark.parametrize("name", KERNELS)
def test_queries_without_keys_have_zeros_and_minus_infinity(name: str, library: CpuLibrary) -> None:
    own = KERNELS[name]
    problem = problem_of(own)
    outcome, out, lse = run(library, own, problem, normals(problem))
    assert outcome.status == "ok"
    assert (out[43:] == 0.0).all() and np.isneginf(lse[43:]).all() and np.isfinite(lse[:43]).all()


@pytest.mark.parametrize("name", KERNELS)
def test_other_tables_of_the_same_tensors_are_other_sequences(name: str, library: CpuLibrary) -> None:
    """A call is of any lengths, whatever a search was for."""
    own = KERNELS[name]
    searched = problem_of(own, causal=True)
    inputs = normals(searched)
    for of_q, of_kv in [((1, 74, 1, 0), (100, 1, 3, 0)), ((0, 0, 0, 76), (0, 0, 104, 0)), ((19,) * 4, (26,) * 4)]:
        called = problem_of(own, causal=True, seq_q=80, seq_kv=120, q_lengths=of_q, kv_lengths=of_kv)
        assert (called.total_q, called.total_kv) == (searched.total_q, searched.total_kv)
        given = {**inputs, "qo_indptr": begins(of_q), "kv_indptr": begins(of_kv)}
        outcome, out, lse = run(library, own, searched, given)
        assert (outcome.status, outcome.message) == ("ok", "")
        require_reference(OP, called, given, out, lse)


@pytest.mark.parametrize("name", KERNELS)
def test_rows_of_no_sequence_are_neither_read_nor_written(name: str, library: CpuLibrary) -> None:
    """Tensors may be longer than the tables: buffers of one size for calls of several."""
    own = KERNELS[name]
    problem = problem_of(own)
    inputs = normals(problem)
    inputs["qo_indptr"], inputs["kv_indptr"] = begins((20, 0, 3, 10)), begins((60, 9, 20, 0))
    for tensor, end in (("q", 33), ("k", 89), ("v", 89)):
        inputs[tensor][end:] = NAN
    outcome, out, lse = run(library, own, problem, inputs)
    assert (outcome.status, outcome.message) == ("ok", "")
    assert np.isfinite(out[:33]).all() and not np.isnan(lse[:33]).any()
    assert np.isnan(out[33:]).all() and np.isnan(lse[33:]).all()


@pytest.mark.parametrize("table", ["qo_indptr", "kv_indptr"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_run_on_the_cpu_reports_a_table_that_points_behind_its_tensor(
    name: str, table: str, library: CpuLibrary
) -> None:
    own = KERNELS[name]
    problem = problem_of(own)
    inputs = normals(problem)
    inputs[table] = inputs[table] + np.int32(20)
    outcome, _, _ = run(library, own, problem, inputs)
    assert outcome.status == "runtime_error" and "read of 16 bytes" in outcome.message, outcome.message
