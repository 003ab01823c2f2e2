"""The peer of reductions: which problems one call of CuPy computes, and that it is the problem that it computes. NumPy,
which has the same functions, stands in for CuPy on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.operators import operator
from codegen.operators.reduce.problem import ReduceProblem
from codegen.plan.verification_plan import check_output
from tests.support.gpu.numpy_bench import quiet
from workers.gpu.interface import LaunchRefused
from workers.vendor import reduction

OP = operator("reduce")


class NumpyBench:
    """NumPy in CuPy's place."""

    arrays: Any = np
    stream = 0

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def synchronize(self) -> None:
        pass

    def faults(self) -> AbstractContextManager[None]:
        return nullcontext()

    def kernel(self, text: str, name: str) -> Any:
        raise NotImplementedError


def reduce(**fields: Any) -> ReduceProblem:
    problem = OP.parse({"operator": "reduce", "shape": [5, 6, 7], "axes": [1], **fields})
    assert isinstance(problem, ReduceProblem)
    return problem


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize("axes", [[1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("fn", reduction.FUNCTIONS)
def test_the_call_computes_the_problem(fn: str, axes: list[int], dtype: str) -> None:
    problem = reduce(fn=fn, axes=axes, dtype=dtype, strides=[60, 8, 1])
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(3))
    calls: list[Any] = list(reduction.offers(NumpyBench(), problem, inputs, 2, quiet))
    if not reduction.computes(problem):
        assert ((fn == "argmax" and axes == [0, 2]) or (fn == "mean" and dtype == "int32")) and calls == []
        return
    expected, bound = OP.reference(problem, inputs)
    for call, library in zip(calls, ("CuPy", "PyTorch"), strict=False):
        call.outs[1].fill(0) if library == "CuPy" else call.memory.outs[1].fill(0)
        call.run(1)
        for number in (0, 1):
            result = call.result(number)
            assert result.shape == expected.shape
            assert check_output(result, expected, bound, exact=False).wrong == 0
        assert call.describe()["library"] == library and fn[:3] in call.describe()["algorithm"]
    has_pytorch = importlib.util.find_spec("torch") is not None
    takes_it = (fn, dtype) != ("variance", "int32") and not (fn == "argmax" and len(axes) > 1)
    assert len(calls) == 1 + (has_pytorch and takes_it)


@pytest.mark.parametrize("failing", ["CuPy", "PyTorch"])
def test_an_error_of_one_library_leaves_the_other(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Any:
        raise KeyError("axis")

    if failing == "PyTorch":
        monkeypatch.setattr(reduction, "by_pytorch", fails)
    else:
        monkeypatch.setattr(reduction.ReductionCall, "run", fails)
        monkeypatch.setattr(reduction, "by_pytorch", lambda *given: [])
    problem = reduce()
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(3))
    calls = reduction.offers(NumpyBench(), problem, inputs, 1, quiet)
    lost = calls[-1]
    assert lost.describe()["library"] == failing and len(calls) == (2 if failing == "PyTorch" else 1)
    with pytest.raises(LaunchRefused, match=f"{failing} failed: KeyError: 'axis'"):
        lost.run(0)


def test_without_pytorch_cupy_alone_is_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    problem = reduce()
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(3))
    (call,) = reduction.offers(NumpyBench(), problem, inputs, 1, quiet)
    assert call.describe()["library"] == "CuPy"


def test_a_pytorch_whose_libraries_cannot_be_opened_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudnn.so.9: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    problem = reduce()
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(3))
    cupys, lost = reduction.offers(NumpyBench(), problem, inputs, 1, quiet)
    assert cupys.describe()["library"] == "CuPy"
    with pytest.raises(LaunchRefused, match=r"PyTorch failed: OSError: libcudnn\.so\.9"):
        lost.run(0)


@pytest.mark.parametrize(
    "fields",
    [
        {"fn": "sum_of_squares"},
        {"fn": "logsumexp"},
        {"dtype": "bfloat16"},
        {"map": "square"},
        {"epilogue": [{"op": "relu"}]},
        {"map": "relu_grad", "write_map": True},
        {"shape": [5, 0, 7]},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_what_one_call_does_not_compute_has_no_peer(fields: dict[str, Any]) -> None:
    problem = reduce(**fields)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(3))
    assert reduction.offers(NumpyBench(), problem, inputs, 1, quiet) == []


def test_a_call_that_is_refused_is_a_refused_launch() -> None:
    problem = reduce()
    wrong = [np.zeros(3, np.float32)]
    call = reduction.ReductionCall(NumpyBench(), problem, [np.zeros((5, 6, 7), np.float32)], wrong)
    with pytest.raises(LaunchRefused, match="CuPy's sum"):
        call.run(0)


def test_cupys_own_call_has_cub_again_which_what_verifies_does_without() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy, which needs no GPU here, is not installed")
    before = cupy._core.get_reduction_accelerators()
    cupy._core.set_reduction_accelerators([])
    try:
        without = cupy._core.get_reduction_accelerators()
        with pytest.raises(LaunchRefused), reduction.accelerated(cupy):
            assert cupy._core.get_reduction_accelerators() != without
            raise LaunchRefused("whatever happens in it")
        assert cupy._core.get_reduction_accelerators() == without == []
    finally:
        cupy._core.set_reduction_accelerators(before)
