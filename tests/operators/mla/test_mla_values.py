"""Calls that the verification plan does not have: shared pages, tables that do not fit, tensors longer than the tables,
values that are seen by none, large scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.kernel import Kernel
from codegen.operators.attention.inputs import begins
from codegen.operators.mla.problem import CACHES, MlaProblem
from tests.operators.mla.kernels import OP, kernel, mla
from tests.support.kernels.attention_calls import library_of, require_reference, run_call
from workers.cpu.library import CpuLibrary, Outcome

Array = NDArray[Any]
NAN = float("nan")
KERNELS = {
    "pages of 1": kernel(lse=True, ragged=True, page_size=1, tile_kv=32),
    "pages of 16, split": kernel("bfloat16", lse=True, ragged=True, page_size=16, split="workspace"),
    "pages of 64": kernel(lse=True, ragged=True, page_size=64, stages=3),
}
Q_LENGTHS, KV_LENGTHS = (10, 0, 3, 4), (75, 9, 20, 0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    return library_of(KERNELS.values(), tmp_path_factory.mktemp("cpu"))


def problem_of(own: Kernel, **fields: Any) -> MlaProblem:
    s = own.signature_dict
    given = {
        "queries": "ragged", "page_size": s["page_size"], "batch": 4, "seq_q": 10, "seq_kv": 75, "q_lengths": Q_LENGTHS,
        "kv_lengths": KV_LENGTHS, "heads_q": 3, "lse": True, "dtype": s["dtype"],
    }  # fmt: skip
    return mla(**{**given, **fields})


def run(
    library: CpuLibrary, own: Kernel, problem: MlaProblem, inputs: dict[str, Array]
) -> tuple[Outcome, Array, Array]:
    return run_call(library, own, problem, inputs, [3])


def normals(problem: MlaProblem) -> dict[str, Array]:
    return OP.make_inputs(problem, "normal", np.random.default_rng(8))


@pytest.mark.parametrize("name", KERNELS)
def test_sequences_may_share_pages(name: str, library: CpuLibrary) -> None:
    """The third sequence begins with the pages of the first one, as calls with a common prefix do."""
    own = KERNELS[name]
    problem = problem_of(own, causal=True)
    inputs = normals(problem)
    first, third = (int(inputs["kv_indptr"][number]) for number in (0, 2))
    before = run(library, own, problem, inputs)[1]
    inputs["kv_indices"][third] = inputs["kv_indices"][first]
    outcome, out, lse = run(library, own, problem, inputs)
    assert (outcome.status, outcome.message) == ("ok", "")
    require_reference(OP, problem, inputs, out, lse)
    assert not np.array_equal(out[10:13], before[10:13])


@pytest.mark.parametrize("name", KERNELS)
def test_only_the_keys_of_the_last_page_are_read(name: str, library: CpuLibrary) -> None:
    """A sequence that grows by a key writes it to the caches and adds one to its last page."""
    own = KERNELS[name]
    size = own.signature_dict["page_size"]
    problem = problem_of(own)
    inputs = normals(problem)
    page = int(inputs["kv_indices"][inputs["kv_indptr"][1] - 1])
    if size > 1:
        inputs["kv_last_page_len"][0] -= 1
        for tensor in CACHES:
            inputs[tensor][page, (75 - 1) % size :] = NAN
    outcome, out, lse = run(library, own, problem, inputs)
    assert (outcome.status, outcome.message) == ("ok", "")
    assert np.isfinite(out).all() and not np.isnan(lse).any()
    require_reference(OP, problem_of(own, kv_lengths=(75 - (size > 1), 9, 20, 0)), inputs, out, lse)


@pytest.mark.parametrize("name", KERNELS)
def test_queries_without_pages_have_zeros_and_minus_infinity(name: str, library: CpuLibrary) -> None:
    own = KERNELS[name]
    problem = problem_of(own)
    outcome, out, lse = run(library, own, problem, normals(problem))
    assert outcome.status == "ok"
    assert (out[13:] == 0.0).all() and np.isneginf(lse[13:]).all() and np.isfinite(lse[:13]).all()


@pytest.mark.parametrize("name", KERNELS)
def test_entries_behind_the_last_sequence_are_not_read_and_tokens_behind_it_not_written(
    name: str, library: CpuLibrary
) -> None:
    own = KERNELS[name]
    size = own.signature_dict["page_size"]
    problem = problem_of(own)
    inputs = normals(problem)
    inputs["qo_indptr"] = begins((5, 0, 3, 2))
    inputs["kv_indptr"] = begins([-(-keys // size) for keys in (75, 9, 0, 0)])
    inputs["kv_indices"][int(inputs["kv_indptr"][-1]) :] = 2**30
    inputs["q_nope"][10:] = NAN
    outcome, out, lse = run(library, own, problem, inputs)
    assert (outcome.status, outcome.message) == ("ok", "")
    assert np.isfinite(out[:10]).all() and not np.isnan(lse[:10]).any()
    assert np.isnan(out[10:]).all() and np.isnan(lse[10:]).all()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("wrong", ["a page behind the cache", "a page before the cache", "entries behind the table"])
def test_a_run_on_the_cpu_reports_what_points_outside(wrong: str, name: str, library: CpuLibrary) -> None:
    own = KERNELS[name]
    problem = problem_of(own)
    inputs = normals(problem)
    if wrong == "entries behind the table":
        inputs["kv_indptr"] += 1000
    else:
        inputs["kv_indices"][1 if own.signature_dict["page_size"] < 64 else 0] = (
            inputs["ckv_cache"].shape[0] + 3 if "behind" in wrong else -1
        )
    outcome, _, _ = run(library, own, problem, inputs)
    assert outcome.status == "runtime_error" and "read of" in outcome.message, outcome.message


@pytest.mark.parametrize("name", KERNELS)
def test_large_scores_of_either_sign_overflow_nothing(name: str, library: CpuLibrary) -> None:
    own = KERNELS[name]
    problem = problem_of(own, causal=True)
    inputs = normals(problem)
    for tensor, factor in (("q_nope", 100.0), ("q_pe", -100.0)):
        inputs[tensor] = (inputs[tensor].astype(np.float32) * factor).astype(inputs[tensor].dtype)
    outcome, out, lse = run(library, own, problem, inputs)
    assert (outcome.status, outcome.message) == ("ok", "")
    assert np.abs(lse[np.isfinite(lse)]).max() > 100.0
    require_reference(OP, problem, inputs, out, lse)


@pytest.mark.parametrize("name", KERNELS)
def test_a_nan_in_a_query_is_in_its_own_row_alone(name: str, library: CpuLibrary) -> None:
    own = KERNELS[name]
    problem = problem_of(own, batch=1, q_lengths=None, kv_lengths=None)
    inputs = normals(problem)
    inputs["q_pe"][4, 1] = NAN
    outcome, out, lse = run(library, own, problem, inputs)
    assert outcome.status == "ok"
    rows = np.isnan(out).any(2)
    assert rows[4, 1] and rows.sum() == 1 and np.isnan(out[4, 1]).all() and np.isnan(lse).sum() == 1
