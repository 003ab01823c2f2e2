"""What stands in the tables of a call can be read by a library of target `cpu`: what points outside is refused."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cukiln
from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operators import operator
from codegen.problem import Problem
from codegen.targets import target
from codegen.text.render_emulation import render_emulation
from codegen.text.render_library import render_library, winner_exports
from tests.operators.attention.kernels import attention
from tests.operators.harness.declarations import LEVEL_0
from tests.operators.mla.kernels import mla
from tests.support.fixtures.compile import LIMITS
from workers.compile.compile_file import FileCompiler
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes

Tensors = dict[str, NDArray[Any]]
OF_ALL: dict[str, Any] = {
    "batch": 3, "seq_q": 20, "seq_kv": 90, "heads_q": 4, "dtype": "float16", "q_lengths": [20, 0, 9],
    "kv_lengths": [90, 5, 40],
}  # fmt: skip
PROBLEMS: dict[str, Problem] = {
    "paged": attention(**OF_ALL, heads_kv=2, head_dim_qk=64, lengths="paged", page_size=16),
    "ragged": attention(**OF_ALL, heads_kv=2, head_dim_qk=64, lengths="ragged"),
    "mla": mla(**OF_ALL, queries="ragged", page_size=16),
}
# By table: what is changed of it, of those of which library, and what is said. 6, 1 and 3 pages of at least 11.
OUTSIDE: list[tuple[str, str, dict[int, int], str]] = [
    *(
        (name, table, change, said)
        for name in ("paged", "mla")
        for table, change, said in (
            ("kv_indices", {3: 1005}, "kv_indices[3] is 1005; pages from 0 to 11 are there"),
            ("kv_indices", {9: 2**31 - 1}, "kv_indices[9] is 2147483647; pages from 0 to 11 are there"),
            ("kv_indices", {0: -1}, "kv_indices[0] is -1; pages from 0 to 11 are there"),
            ("kv_indptr", {3: 11}, "kv_indptr ends with 11, but there are 10 entries of kv_indices; at most so many"),
            ("kv_indptr", {1: -6}, "kv_indptr[1] is -6, but 0 stands before it; entries that do not decrease"),
            ("kv_indptr", {1: 8}, "kv_indptr[2] is 7, but 8 stands before it"),
            ("kv_last_page_len", {0: 17}, "kv_last_page_len[0] is 17; 1 to 16 keys of a page are allowed"),
            ("kv_last_page_len", {2: 0}, "kv_last_page_len[2] is 0; 1 to 16 keys of a page are allowed"),
            ("qo_indptr", {3: 2900}, "qo_indptr ends with 2900, but there are 29 queries; at most so many are allowed"),
            ("qo_indptr", {0: -5}, "qo_indptr begins with -5; 0 is allowed"),
            ("qo_indptr", {1: 30}, "qo_indptr[2] is 20, but 30 stands before it"),
        )
    ),
    ("ragged", "kv_indptr", {3: 136}, "kv_indptr ends with 136, but there are 135 keys; at most so many are allowed"),
    ("ragged", "kv_indptr", {0: 1}, "kv_indptr begins with 1; 0 is allowed"),
]  # fmt: skip


def candidate_of(name: str) -> Candidate:
    (candidate,) = lower(PROBLEMS[name], target("cpu"), LEVEL_0).candidates
    return candidate


@pytest.fixture(scope="module")
def kernels(
    tmp_path_factory: pytest.TempPathFactory, toolchain: Toolchain, processes: Processes
) -> dict[str, cukiln.Kernel]:
    files = FileCompiler(tmp_path_factory.mktemp("tables"), toolchain, processes, LIMITS)
    loaded = {}
    for name in PROBLEMS:
        candidate = candidate_of(name)
        text = render_emulation(candidate.kernel, operator(candidate.kernel.operator).launch_values(candidate.schedule))
        library = files.link_emulation(text, winner_exports(candidate.kernel))
        loaded[name] = cukiln.load(library, sha256=hashlib.sha256(library).hexdigest())
    return loaded


def call(kernel: cukiln.Kernel, name: str, table: str = "", change: dict[int, int] | None = None) -> NDArray[Any]:
    problem = PROBLEMS[name]
    own = operator(str(problem.canonical()["operator"]))
    tensors: Tensors = {
        key: np.array(value) for key, value in own.make_inputs(problem, "normal", np.random.default_rng(1)).items()
    }
    for index, value in (change or {}).items():
        tensors[table][index] = value
    outs = {
        operand.name: np.zeros(operand.shape, operand.dtype)
        for operand in own.operands(problem)
        if operand.role == "out"
    }
    attributes = own.integers(problem)[len(own.extent_names) :]
    kernel(*tensors.values(), *outs.values(), attributes=attributes, scalars=own.scalars(problem))
    return outs["out"]


@pytest.mark.parametrize("name", PROBLEMS)
def test_tables_that_point_inside_are_taken(name: str, kernels: dict[str, cukiln.Kernel]) -> None:
    assert np.abs(call(kernels[name], name)).max() > 0


@pytest.mark.parametrize(("name", "table", "change", "said"), OUTSIDE)
def test_a_table_that_points_outside_is_refused_with_the_entry_and_what_is_allowed(
    name: str, table: str, change: dict[int, int], said: str, kernels: dict[str, cukiln.Kernel]
) -> None:
    with pytest.raises(ValueError, match=r"\w") as caught:
        call(kernels[name], name, table, change)
    assert said in str(caught.value)


def test_what_no_sequence_uses_may_stand_in_a_table(kernels: dict[str, cukiln.Kernel]) -> None:
    """Entries behind the last sequence's, and the last page's length of a sequence without pages."""
    changed = {"kv_indices": {9: 4}, "kv_last_page_len": {0: 16}}
    for table, change in changed.items():
        call(kernels["paged"], "paged", table, change)
    with pytest.raises(ValueError, match="kv_indptr"):
        call(kernels["paged"], "paged", "kv_indptr", {3: 12})


def test_libraries_of_gpus_do_not_read_tables() -> None:
    candidate = candidate_of("paged")
    launch = operator("attention").launch_values(candidate.schedule)
    assert "check_tables" in render_emulation(candidate.kernel, launch)
    assert "check_tables" not in render_library([candidate.kernel], target="sm_80", launch=launch)
