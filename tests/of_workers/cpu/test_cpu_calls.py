"""Matmul's kernels on problems that the plan does not have: strides of every kind, NaN, extents out of range."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search.schedule import Schedule
from tests.support.fixtures.codegen import matmul
from tests.support.kernels.cpu_helpers import LIMITS, SMALL_TILE, processes, toolchain
from workers.cpu.build import build_cpu
from workers.cpu.library import CpuLibrary, Outcome

OP = operator("matmul")
Array = NDArray[Any]
# What a kernel is called with beside its own problem: a problem of the same signature, its inputs, changed extents.
Call = Callable[..., tuple[Outcome, Array]]

STRIDES: dict[str, dict[str, Any]] = {
    "one A for all": {"batch": 3, "stride_a": 0},
    "one B for all": {"batch": 3, "stride_b": 0},
    "one A and one B for all": {"batch": 3, "stride_a": 0, "stride_b": 0},
    "matrices apart": {"batch": 3, "stride_a": 5000, "stride_b": 6000, "stride_c": 7000},
    "rows apart": {"batch": 2, "lda": 80, "ldb": 88, "ldc": 96},
    "rows apart, no multiple of a vector": {"batch": 2, "lda": 81, "ldb": 83, "ldc": 85},
    "matrices apart, no multiple of a vector": {"batch": 2, "stride_a": 5001, "stride_b": 6001, "stride_c": 7001},
    "one B for all, A unaligned": {"batch": 3, "lda": 77, "stride_b": 0, "epilogue": [{"op": "residual"}]},
}  # fmt: skip
LAYOUTS = ("nn", "nt", "tn", "tt")
NOT_NUMBERS = matmul(m=36, n=36, k=8, epilogue=[
    {"op": "relu"}, {"op": "clip", "lo": -2.0, "hi": 2.0}, {"op": "leaky_relu", "slope": 0.5}, {"op": "mask"},
    {"op": "cast", "dtype": "float16"},
])  # fmt: skip


def strided(name: str, layout: str) -> MatmulProblem:
    return matmul(m=44, n=60, k=20, layout=layout, **({"lda": 64, "ldb": 64, "ldc": 64} | STRIDES[name]))


def kernel_of(problem: MatmulProblem) -> Kernel:
    return OP.candidate(problem, Schedule.of({**SMALL_TILE, "stages": 2, "raster": 0})).kernel


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    """The kernels of all tests."""
    problems = [strided(name, layout) for name in STRIDES for layout in LAYOUTS]
    kernels = list({kernel_of(problem).id: kernel_of(problem) for problem in [*problems, NOT_NUMBERS]}.values())
    build = build_cpu(kernels, toolchain(), processes(), LIMITS, folder=tmp_path_factory.mktemp("cpu"))
    ((path, _),) = build.libraries
    return CpuLibrary(path)


@pytest.fixture(scope="module")
def call(library: CpuLibrary) -> Call:
    """Runs a problem's kernel."""

    def run(problem: MatmulProblem, inputs: Mapping[str, Array], **changed: int) -> tuple[Outcome, Array]:
        tensors = library.allocate(OP.operands(problem))
        try:
            for tensor in tensors:
                tensor.fill(inputs[tensor.operand.name]) if tensor.operand.role == "in" else tensor.poison()
            outcome = library.run(
                kernel_of(problem).namespace, tensors, None,
                integers=list((dict(zip(OP.extent_names, OP.extents(problem), strict=True)) | changed).values()),
                launch=[1], scalars=OP.scalars(problem), order="seeded", seed=1, exact=True, cpu_seconds=5.0,
            )  # fmt: skip
            return outcome, tensors[-1].view.copy()
        finally:
            tensors = []
            library.free()

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", STRIDES)
def test_batches_and_rows_lie_where_their_strides_say(name: str, layout: str, call: Call) -> None:
    problem = strided(name, layout)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(3))
    outcome, out = call(problem, inputs)
    assert (outcome.status, outcome.message) == ("ok", "")
    expected, bound = OP.reference(problem, inputs, exact=True)
    assert bound.max() == 0.0
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("fields", "aligns"),
    [
        ({}, (4, 4, 4)),
        ({"lda": 81}, (1, 4, 4)),
        ({"ldb": 83}, (4, 1, 4)),
        ({"ldc": 85}, (4, 4, 1)),
        ({"batch": 2, "stride_a": 5001}, (1, 4, 4)),
        ({"stride_a": 5001}, (4, 4, 4)),  # one matrix: its stride says nothing
        ({"n": 59}, (4, 1, 1)),
        ({"k": 19}, (1, 4, 4)),
    ],
)
def test_what_is_unaligned_takes_the_path_that_reads_one_element_at_once(
    fields: dict[str, int], aligns: tuple[int, int, int]
) -> None:
    signature = OP.signature(matmul(**{"m": 44, "n": 60, "k": 20, "lda": 64, "ldb": 64, "ldc": 64, **fields}))
    assert tuple(signature[f"align_{operand}"] for operand in "abc") == aligns


def test_the_aligned_path_would_be_wrong_for_unaligned_rows(call: Call) -> None:
    problem = strided("rows apart", "nn")
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(3))
    outcome, _ = call(problem, inputs, lda=79)
    assert outcome.status == "runtime_error"
    assert "misaligned" in outcome.message


def test_nan_and_infinity_go_through_comparisons(call: Call) -> None:
    inputs = {name: np.array(values) for name, values in
              OP.make_inputs(NOT_NUMBERS, "integer", np.random.default_rng(5)).items()}  # fmt: skip
    inputs["a"][1, 0], inputs["a"][2, 0], inputs["a"][3, 0] = np.nan, np.inf, -np.inf
    inputs["b"][0, :] = 1.0
    inputs["mask"][...] = 3
    inputs["mask"][:, 5] = 0
    _, out = call(NOT_NUMBERS, inputs)
    rest = np.arange(NOT_NUMBERS.n) != 5
    assert np.isnan(out[1, rest]).all()
    assert (out[2, rest] == 2.0).all()
    assert (out[3, rest] == 0.0).all()
    assert (out[:, 5] == 0.0).all()  # dropped, whatever stood there
    inputs["a"][1:4] = 0.0
    others = np.r_[0, 4 : NOT_NUMBERS.m]
    np.testing.assert_array_equal(out[others], OP.reference(NOT_NUMBERS, inputs, exact=True)[0][others])


@pytest.mark.parametrize(
    "changed",
    [
        {"m": 0},
        {"n": -4},
        {"k": 0},
        {"batch": 0},
        {"m": 2**32 + 44},
        {"k": 2**31},
        {"batch": 2**31 - 1025},
        {"n": 2**63 - 4},
    ],
    ids=str,
)
def test_launch_code_refuses_extents_that_it_cannot_index(changed: dict[str, int], call: Call) -> None:
    problem = strided("rows apart", "nn")
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(3))
    outcome, out = call(problem, inputs, **changed)
    assert outcome.status == "runtime_error"
    assert "the number of launches is 0" in outcome.message
    assert np.isnan(out).all()


def test_a_wrong_index_does_not_reach_another_operand(library: CpuLibrary) -> None:
    """Operands lie 4 GiB apart and more: an index that wrapped at 32 bits lies behind one, not in the next."""
    problem = strided("rows apart", "nn")
    tensors = library.allocate(OP.operands(problem))
    try:
        addresses = sorted(tensor.view.ctypes.data for tensor in tensors)
    finally:
        tensors = []
        library.free()
    assert min(after - before for before, after in pairwise(addresses)) > 2**32


@pytest.mark.parametrize("rows", [2**10, 2**16, 2**20, 2**22])
def test_a_wrong_stride_is_reported_with_the_operand_that_it_left(rows: int, call: Call) -> None:
    problem = strided("rows apart", "nn")
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(3))
    outcome, _ = call(problem, inputs, lda=rows * 4)
    assert outcome.status == "runtime_error"
    assert re.search(r"read of \d+ bytes at offset \d+ of a \(\d+ bytes\): outside of it", outcome.message)
