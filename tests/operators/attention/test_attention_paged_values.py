"""Calls of paged caches that the verification plan does not have: shared pages, tables that do not fit, split keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.kernel import Kernel
from codegen.operators.attention.inputs import begins
from codegen.operators.attention.problem import AttentionProblem
from tests.operators.attention.kernels import OP, attention, kernel
from tests.support.kernels.attention_calls import library_of, require_reference, run_call
from workers.cpu.library import CpuLibrary, Outcome

Array = NDArray[Any]
NAN = float("nan")
KERNELS = {
    "pages of 1": kernel(qk=32, lse=True, stages=2, page_size=1),
    "pages of 16": kernel("bfloat16", qk=32, lse=True, q_in="shared", tile_kv=16, page_size=16),
    "pages of 64": kernel(qk=32, lse=True, page_size=64),
    "pages of 16, split": kernel(qk=32, lse=True, page_size=16, split="workspace"),
    "pages of 16, packed, split": kernel(qk=32, lse=True, page_size=16, split="workspace", packing="group"),
}
Q_LENGTHS, KV_LENGTHS = (40, 0, 3, 33), (75, 9, 20, 0)
FIRST = 7  # outputs: behind q, k, v and four tables


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    return library_of(KERNELS.values(), tmp_path_factory.mktemp("cpu"))


def problem_of(own: Kernel, **fields: Any) -> AttentionProblem:
    s = own.signature_dict
    given = {
        "lengths": "paged", "page_size": s["page_size"], "batch": 4, "seq_q": 40, "seq_kv": 75, "q_lengths": Q_LENGTHS,
        "kv_lengths": KV_LENGTHS, "head_dim_qk": 32, "lse": True, "dtype": s["dtype"],
    }  # fmt: skip
    return attention(**{**given, **fields})


def run(
    library: CpuLibrary, own: Kernel, problem: AttentionProblem, inputs: dict[str, Array]
) -> tuple[Outcome, Array, Array]:
    return run_call(library, own, problem, inputs, [0, 3])


def normals(problem: AttentionProblem) -> dict[str, Array]:
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
    assert not np.array_equal(out[40:43], before[40:43])


@pytest.mark.parametrize("name", KERNELS)
def test_only_the_keys_of_the_last_page_are_read(name: str, library: CpuLibrary) -> None:
    """A sequence that grows by a key writes it to the cache and adds one to its last page."""
    own = KERNELS[name]
    size = own.signature_dict["page_size"]
    problem = problem_of(own)
    inputs = normals(problem)
    page = int(inputs["kv_indices"][inputs["kv_indptr"][1] - 1])
    place = (75 - 1) % size
    if size > 1:
        inputs["kv_last_page_len"][0] -= 1
        for tensor in ("k", "v"):
            inputs[tensor][page, place:] = NAN
    outcome, out, lse = run(library, own, problem, inputs)
    assert (outcome.status, outcome.message) == ("ok", "")
    assert np.isfinite(out).all() and not np.isnan(lse).any()
    shorter = problem_of(own, kv_lengths=(75 - (size > 1), 9, 20, 0))
    require_reference(OP, shorter, inputs, out, lse)


@pytest.mark.parametrize("name", KERNELS)
def test_queries_without_pages_have_zeros_and_minus_infinity(name: str, library: CpuLibrary) -> None:
    own = KERNELS[name]
    problem = problem_of(own)
    inputs = normals(problem)
    inputs["kv_last_page_len"][3] = 2**30  # of no page
    outcome, out, lse = run(library, own, problem, inputs)
    assert outcome.status == "ok"
    assert (out[43:] == 0.0).all() and np.isneginf(lse[43:]).all() and np.isfinite(lse[:43]).all()


@pytest.mark.parametrize("name", KERNELS)
def test_entries_behind_the_last_sequence_are_not_read(name: str, library: CpuLibrary) -> None:
    """Tensors and tables may be longer than the sequences: buffers of one size for calls of several."""
    own = KERNELS[name]
    size = own.signature_dict["page_size"]
    problem = problem_of(own)
    inputs = normals(problem)
    fewer = (75, 9, 0, 0)
    inputs["qo_indptr"], inputs["kv_indptr"] = begins((20, 0, 3, 10)), begins([-(-keys // size) for keys in fewer])
    inputs["kv_indices"][int(inputs["kv_indptr"][-1]) :] = 2**30
    inputs["q"][33:] = NAN
    outcome, out, lse = run(library, own, problem, inputs)
    assert (outcome.status, outcome.message) == ("ok", "")
    assert np.isfinite(out[:33]).all() and not np.isnan(lse[:33]).any()
    assert np.isnan(out[33:]).all() and np.isnan(lse[33:]).all()


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("wrong", ["a page behind the cache", "a page before the cache", "entries behind the table"])
def test_a_run_on_the_cpu_reports_what_points_outside(wrong: str, name: str, library: CpuLibrary) -> None:
    own = KERNELS[name]
    problem = problem_of(own)
    inputs = normals(problem)
    if wrong == "entries behind the table":
        inputs["kv_indptr"][1:] += 1000
        inputs["kv_indptr"][0] += 1000
    else:
        inputs["kv_indices"][1] = inputs["k"].shape[0] + 3 if "behind" in wrong else -1
    outcome, _, _ = run(library, own, problem, inputs)
    assert outcome.status == "runtime_error" and "read of" in outcome.message, outcome.message
