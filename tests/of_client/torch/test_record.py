"""`cukiln.torch.record`: the problems of a model's calls, as `cukiln tune` takes them; `counted`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cukiln.errors import UsageError
from cukiln.job_request import read_request

if TYPE_CHECKING:
    from tests.support.kernels.reference_kernel import PlayedService


def layer(grad: bool = False) -> Any:
    """Two products of the same problem, and a softmax."""
    import torch

    import cukiln.torch as ck

    x, w = torch.ones(4, 8, requires_grad=grad), torch.ones(8, 8, requires_grad=grad)
    return ck.softmax(ck.matmul(ck.matmul(x, w, activation="relu"), w, activation="relu"))


def test_each_problem_is_written_once_and_pytorch_computes(service: PlayedService, tmp_path: Path) -> None:
    import cukiln.torch as ck

    file = tmp_path / "request.json"
    with ck.record(file) as problems:
        layer()
        layer()
    assert [problem["operator"] for problem in problems] == ["matmul", "softmax"]
    assert json.loads(file.read_text()) == {"problems": problems} == read_request(str(file))
    assert not service.asked
    layer()
    assert [{**problem, "target": "cpu"} for problem in problems] == service.asked


@pytest.mark.parametrize("of", ["torch", "jax"])
@pytest.mark.parametrize("file", ["no/such/x.json", "folder"])
def test_a_file_that_cannot_be_written_is_refused_before_the_model_runs(file: str, of: str, tmp_path: Path) -> None:
    if of == "jax":
        pytest.importorskip("jax_tvm_ffi")
    framework = importlib.import_module(f"cukiln.{of}")
    (tmp_path / "folder").mkdir()
    ran = False
    with (
        pytest.raises(UsageError, match=rf"cannot be written to {tmp_path / file} \("),
        framework.record(tmp_path / file),
    ):
        ran = True
    assert not ran


def test_a_model_that_raises_leaves_what_it_called_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import cukiln.torch as ck

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt), ck.record("request.json", target="sm_80"):
        layer()
        monkeypatch.chdir(tmp_path / "elsewhere")
        raise KeyboardInterrupt
    request = json.loads((tmp_path / "request.json").read_text())
    assert (request["target"], len(request["problems"])) == ("sm_80", 2)


def test_tracing_that_raises_leaves_what_it_called_before(tmp_path: Path) -> None:
    pytest.importorskip("jax_tvm_ffi")
    import cukiln.jax as cj

    with pytest.raises(KeyboardInterrupt), cj.record(tmp_path / "request.json"):
        cj.softmax([[1.0, 2.0]])
        raise KeyboardInterrupt
    (problem,) = json.loads((tmp_path / "request.json").read_text())["problems"]
    assert problem["operator"] == "softmax"


def test_a_request_names_the_target_that_is_given(tmp_path: Path) -> None:
    import cukiln.torch as ck

    with ck.record(tmp_path / "request.json", target="sm_90a"):
        layer()
    assert read_request(str(tmp_path / "request.json"))["target"] == "sm_90a"


def test_every_recorded_problem_is_one_that_its_operator_takes() -> None:
    import torch

    import cukiln.torch as ck
    from codegen.operators import operator
    from tests.support.kernels.torch_graphs import FUSED, operands

    with ck.record() as problems:
        for function, _ in FUSED.values():
            torch._dynamo.reset()
            torch.compile(function, backend="cukiln", options={"inner": "eager"})(operands())
    assert {problem["operator"] for problem in problems} == {
        "matmul", "conv2d", "softmax", "layer_norm", "rms_norm", "attention",
    }  # fmt: skip
    for problem in problems:
        operator(problem["operator"]).parse(problem)


def test_problems_of_gradients_are_recorded_too(service: PlayedService) -> None:
    import cukiln.torch as ck

    with ck.record() as problems:
        layer(grad=True).sum().backward()
    assert {problem.get("layout") for problem in problems} == {"nn", "nt", "tn", None}


def test_a_graph_that_was_compiled_while_recording_has_kernels_afterwards(service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck
    from tests.support.kernels.torch_graphs import linear, operands

    call = torch.compile(linear, backend="cukiln", options={"inner": "aot_eager"})
    with ck.record() as problems:
        call(operands())
    assert len(problems) == 1 and service.calls == 0
    call(operands())
    assert service.calls == 1


def test_a_model_that_fails_ends_the_recording(service: PlayedService, tmp_path: Path) -> None:
    import cukiln.torch as ck

    with pytest.raises(ZeroDivisionError), ck.record(tmp_path / "request.json"):
        layer()
        _ = 1 // 0
    assert json.loads((tmp_path / "request.json").read_text())["problems"]
    layer()
    assert service.calls == 3


def test_calls_are_counted_by_what_computed_them(played: Callable[..., PlayedService]) -> None:
    import cukiln.torch as ck
    from tests.support.kernels.reference_kernel import PlayedService

    service = played(PlayedService(lacks=lambda problem: problem["operator"] == "softmax"))
    for _ in range(2):  # with kernels that are being found, and with those that are there
        with ck.counted() as calls:
            layer()
        assert (calls.kernels, calls.own) == (2, 1)
    layer()
    assert (calls.kernels, service.calls) == (2, 6)
