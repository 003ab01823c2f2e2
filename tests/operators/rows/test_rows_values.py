"""Softmax and the norms of rows that the verification plan does not have: infinities and NaN, in every algorithm."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.rows.problem import RowProblem
from tests.operators.rows.kernels import OPERATORS, kernel, problem
from tests.support.kernels.cpu_helpers import LIMITS, processes, toolchain
from workers.cpu.build import build_cpu
from workers.cpu.library import CpuLibrary

Array = NDArray[Any]
NAN, INF = float("nan"), float("inf")
SCHEDULES = ("registers, a warp", "shared, a warp", "online, a warp")
COLUMNS = 300
# What three elements of a row are, among others from -2 to 2.
NOTHING_LEFT = {"+infinity": (INF, 0.0, 0.0), "two infinities": (INF, 1.0, INF), "NaN": (0.0, NAN, 1.0)}


def own(name: str, schedule: str) -> Kernel:
    return kernel(name, schedule, scale=False, shift=False)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    kernels = [own(name, schedule) for name in OPERATORS for schedule in SCHEDULES]
    kernels.append(own("layer_norm", "online, a block"))
    build = build_cpu(kernels, toolchain(), processes(), LIMITS, folder=tmp_path_factory.mktemp("cpu"))
    ((path, _),) = build.libraries
    return CpuLibrary(path)


def run(library: CpuLibrary, name: str, schedule: str, x: Array) -> Array:
    op = operator(name)
    flags = {} if name == "softmax" else {"scale": False, "shift": False}
    asked: RowProblem = problem(name, *x.shape, **flags)
    tensors = library.allocate(op.operands(asked))
    try:
        (source,) = (tensor for tensor in tensors if tensor.operand.role == "in")
        (out,) = (tensor for tensor in tensors if tensor.operand.role == "out")
        source.fill(x)
        out.poison()
        outcome = library.run(
            own(name, schedule).namespace, tensors, None, integers=op.integers(asked), launch=[],
            scalars=op.scalars(asked), order="seeded", seed=1, exact=False, cpu_seconds=5.0,
        )  # fmt: skip
        assert (outcome.status, outcome.message) == ("ok", "")
        result: Array = out.view.copy()
        return result
    finally:
        tensors = []
        source = out = None
        library.free()


def rows() -> Array:
    return np.random.default_rng(5).uniform(-2.0, 2.0, (3, COLUMNS)).astype(np.float32)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("special", NOTHING_LEFT)
def test_a_row_of_softmax_without_a_result_is_nan_throughout(special: str, schedule: str, library: CpuLibrary) -> None:
    x = rows()
    x[1, [0, 150, 299]] = NOTHING_LEFT[special]
    out = run(library, "softmax", schedule, x)
    assert np.isnan(out[1]).all()
    np.testing.assert_allclose(out[[0, 2]].sum(1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_softmax_of_minus_infinities(schedule: str, library: CpuLibrary) -> None:
    x = rows()
    x[0], x[1, ::2], x[2] = -INF, -INF, np.where(np.arange(COLUMNS) == 77, 1e30, -INF)
    out = run(library, "softmax", schedule, x)
    assert np.isnan(out[0]).all()
    assert (out[1, ::2] == 0.0).all()
    assert out[1].sum() == pytest.approx(1.0, rel=1e-5)
    assert (out[2] == (np.arange(COLUMNS) == 77)).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_a_nan_makes_a_normalised_row_nan_and_no_other(name: str, schedule: str, library: CpuLibrary) -> None:
    for place in (0, 150, 200, 299):
        x = rows()
        x[1, place] = NAN
        out = run(library, name, schedule, x)
        assert np.isnan(out[1]).all()
        assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_layer_norm_far_from_0(schedule: str, library: CpuLibrary) -> None:
    x = rows()
    far = x + np.float32(1e5)
    wide = far.astype(np.float64)
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(run(library, "layer_norm", schedule, far), expected, atol=0.02)


# Four times the error of PyTorch 2.13 on the CPU.
@pytest.mark.parametrize(("columns", "most"), [(4096, 1.6e-5), (65_536, 1.1e-4), (262_144, 1.2e-4)])
def test_two_outliers_where_online_looks_cost_layer_norm_no_more_than_pytorch(
    columns: int, most: float, library: CpuLibrary
) -> None:
    x = np.random.default_rng(0).standard_normal((2, columns)).astype(np.float32)
    x[:, [0, -1]] = 3000.0
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    if find_spec("torch") is not None:
        torch = import_module("torch")
        theirs = torch.nn.functional.layer_norm(torch.tensor(x), (columns,)).numpy()
        most = min(most, 4.0 * float(np.abs(theirs - expected).max()))
    ours = run(library, "layer_norm", "online, a block", x)
    assert np.abs(ours - expected).max() <= most
    _, bound = operator("layer_norm").reference(problem("layer_norm", *x.shape, scale=False, shift=False), {"x": x})
    assert np.isfinite(bound).all()
    assert bound.max() < 1e-3 * expected.max()
