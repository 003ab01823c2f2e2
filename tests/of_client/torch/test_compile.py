"""`torch.compile(model, backend="cukiln")`: what becomes a kernel, what stays, and that both compute the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.kernels.reference_kernel import PlayedService


def compiled(function: Callable[..., Any], inner: str = "eager", **options: Any) -> Callable[..., Any]:
    import torch

    torch._dynamo.reset()
    made: Callable[..., Any] = torch.compile(
        function, backend="cukiln", fullgraph=True, options={"inner": inner, **options}
    )
    return made


def same(made: Any, expected: Any) -> None:
    import torch

    coarse = getattr(expected, "dtype", None) is torch.bfloat16  # whose steps between operators are rounded in eager
    torch.testing.assert_close(made, expected, rtol=1.6e-2 if coarse else 1e-5, atol=1e-2 if coarse else 1e-5)


def test_what_a_kernel_computes_is_one_call(service: PlayedService) -> None:
    import cukiln.torch as ck
    from tests.support.kernels.torch_graphs import FUSED, operands

    for name, (function, calls) in FUSED.items():
        before = service.calls
        made, expected = compiled(function)(operands()), function(operands())
        same(made, expected)
        assert dict(ck.replaced()[-1].calls) == calls, name
        assert service.calls - before == sum(calls.values()), name
        assert made.stride() == expected.stride(), name


def test_what_would_compute_something_else_stays_apart(service: PlayedService) -> None:
    import cukiln.torch as ck
    from tests.support.kernels.torch_graphs import APART, operands

    for name, (function, calls) in APART.items():
        of_call, of_eager = operands(), operands()
        same(compiled(function)(of_call), function(of_eager))
        assert dict(ck.replaced()[-1].calls) == calls, name


def test_what_no_kernel_computes_is_left_and_said_so(service: PlayedService) -> None:
    import cukiln.torch as ck
    from tests.support.kernels.torch_graphs import LEFT, operands

    for name, (function, why) in LEFT.items():
        same(compiled(function)(operands()), function(operands()))
        assert dict(ck.replaced()[-1].calls) == {}, name
        assert list(ck.replaced()[-1].left) == [why], name
    assert not service.asked


def test_what_no_kernel_is_known_for_stays_as_it_was(played: Callable[..., PlayedService]) -> None:
    import torch

    import cukiln.torch as ck
    from cukiln.torch.graph_pass import NO_KERNEL
    from tests.support.kernels.reference_kernel import PlayedService

    missing = {"matmul"}
    service = played(PlayedService(lacks=lambda problem: problem["operator"] in missing))
    x, w = torch.randn(8, 16), torch.randn(16, 4)

    def function(x: Any, w: Any) -> Any:
        return torch.softmax(torch.relu(x @ w), -1)

    call = compiled(function)
    same(call(x, w), function(x, w))
    assert dict(ck.replaced()[-1].calls) == {"softmax": 1}
    assert dict(ck.replaced()[-1].left) == {f"matmul ({NO_KERNEL})": 1}
    assert service.calls == 1 and [len(problem.get("epilogue", [])) for problem in service.asked] == [1, 0, 0]
    missing.clear()
    same(call(x, w), function(x, w))
    assert service.calls == 2  # it stays until it is compiled again
    with ck.record() as problems:
        same(call(x, w), function(x, w))
    assert [problem["operator"] for problem in problems] == ["matmul", "softmax"]
    assert dict(ck.replaced()[-1].calls) == {"matmul + relu": 1, "softmax": 1}


def test_a_graph_that_is_compiled_after_a_recording_has_the_kernels_that_came_meanwhile(
    played: Callable[..., PlayedService],
) -> None:
    import torch

    import cukiln.torch as ck
    from tests.support.kernels.reference_kernel import PlayedService

    missing = True
    service, x = played(PlayedService(lacks=lambda problem: missing)), torch.randn(8, 16)
    call = compiled(lambda x: torch.softmax(x, -1))
    with ck.counted():
        call(x)
        assert service.calls == 0
        missing = False
        with ck.record():
            pass
        call(x)
    assert service.calls == 1


def test_a_miss_is_asked_for_again_by_a_compiler_once_its_time_has_come(
    played: Callable[..., PlayedService], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from cukiln.torch import dispatch, find_kernels
    from tests.support.kernels.reference_kernel import PlayedService

    now, missing = 1000.0, True
    for module in (dispatch, find_kernels):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    service = played(PlayedService(lacks=lambda problem: missing), retry_seconds=20.0)
    call, x = compiled(lambda x: torch.softmax(x, -1)), torch.randn(8, 16)
    call(x)
    missing = False
    for seconds, asked, calls in ((19, 1, 0), (2, 2, 1)):
        now += seconds
        torch._dynamo.reset()
        call(x)
        assert (len(service.asked), service.calls) == (asked, calls)


def test_a_call_that_waited_in_vain_keeps_no_kernel_from_a_compiler(played: Callable[..., PlayedService]) -> None:
    import threading

    import torch

    import cukiln.torch as ck
    from tests.support.kernels.reference_kernel import PlayedService

    go = threading.Event()

    class Late(PlayedService):
        def lookup(self, *arguments: Any, **options: Any) -> Any:
            assert go.wait(60)
            return super().lookup(*arguments, **options)

    service, x = played(Late(), wait_seconds=0.01), torch.randn(8, 16)
    ck.softmax(x)
    assert service.calls == 0
    go.set()
    compiled(lambda x: torch.softmax(torch.relu(x), -1))(torch.randn(4, 32))  # another problem
    assert service.calls == 1


def test_a_shorter_call_is_taken_where_the_longest_has_no_kernel(played: Callable[..., PlayedService]) -> None:
    import torch

    import cukiln.torch as ck
    from tests.support.kernels.reference_kernel import PlayedService

    x, w = torch.randn(8, 16), torch.randn(16, 4)

    def function(x: Any, w: Any) -> Any:
        return torch.relu(x @ w)

    for on_miss, calls in (("none", {"matmul": 1}), ("tune", {})):
        service = played(PlayedService(lacks=lambda problem: bool(problem.get("epilogue"))), on_miss=on_miss)
        same(compiled(function)(x, w), function(x, w))
        assert dict(ck.replaced()[-1].calls) == calls
        # Where misses are tuned, the parts of the longest call are not asked for.
        assert len(service.asked) == (2 if on_miss == "none" else 1)


def test_graphs_without_kernels_are_compiled_again_by_another_configuration(
    played: Callable[..., PlayedService],
) -> None:
    import torch

    import cukiln.torch as ck
    from tests.support.kernels.reference_kernel import PlayedService

    played(PlayedService(lacks=lambda problem: True))
    x = torch.randn(8, 16)
    call, others = compiled(lambda x: torch.softmax(x, -1)), len(ck.replaced())
    for configured, graphs in ((False, 1), (False, 1), (True, 2), (True, 2)):
        if configured:
            ck.configure(enabled=False, target="cpu")
        call(x)
        assert len(ck.replaced()) - others == graphs


def test_all_may_be_replaced_whatever_is_known(played: Callable[..., PlayedService]) -> None:
    import torch

    import cukiln.torch as ck
    from tests.support.kernels.reference_kernel import PlayedService

    played(PlayedService(lacks=lambda problem: True))
    call = compiled(lambda x: torch.softmax(x, -1), replace="all")
    same(call(torch.ones(4, 8)), torch.full((4, 8), 0.125))
    assert dict(ck.replaced()[-1].calls) == {"softmax": 1}


def test_what_a_compiler_asks_for_is_not_counted_as_a_call(service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck

    with ck.counted() as calls:
        same(compiled(lambda x: torch.softmax(x, -1))(torch.ones(4, 8)), torch.full((4, 8), 0.125))
    assert (calls.kernels, calls.own, service.calls) == (1, 0, 1)


FEW = ["gelu", "a residual in place", "leaky_relu", "a block's end", "layer_norm", "a view of what is overwritten"]


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.long)])
def test_gradients_are_those_of_eager(few: bool, service: PlayedService) -> None:
    import torch

    from tests.support.kernels.torch_graphs import APART, FUSED, operands

    cases = {**FUSED, **APART}
    del cases["an operand is written to between"]  # which eager refuses, too
    for name in FEW if few else cases:
        function, _ = cases[name]
        of_call, of_eager = operands(grad=True), operands(grad=True)
        results = []
        for t, call in ((of_call, compiled(function, "aot_eager")), (of_eager, function)):
            made = call(t)
            outs = [made] if isinstance(made, torch.Tensor) else list(made)
            loss = sum((out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() for out in outs)
            tensors = [tensor for tensor in vars(t).values() if tensor.requires_grad]
            of_tensors = torch.autograd.grad(loss, tensors, allow_unused=True) if loss.requires_grad else []
            results.append([*outs, *[gradient for gradient in of_tensors if gradient is not None]])
        rough = name in ("autocast ends between", "attention")
        torch.testing.assert_close(*results, rtol=2e-2 if rough else 1e-4, atol=5e-2 if rough else 1e-4, msg=name)


def test_gradients_of_layers_have_kernels_too(service: PlayedService) -> None:
    from tests.support.kernels.torch_graphs import FUSED, operands

    made = compiled(FUSED["a block's end"][0], "aot_eager")(operands(grad=True))
    made.sum().backward()
    assert {problem["operator"] for problem in service.asked} >= {"conv2d", "conv2d_dgrad", "conv2d_wgrad"}


def test_a_result_that_is_overwritten_keeps_its_gradient(service: PlayedService) -> None:
    """PyTorch's leaky_relu keeps its argument, a fused one would keep its result."""
    import torch

    import cukiln.torch as ck
    from tests.support.kernels.torch_graphs import linear, operands

    def function(t: Any) -> Any:
        y = torch.nn.functional.leaky_relu(linear(t))
        y += 1
        return y

    results = []
    for call in (compiled(function, "aot_eager"), function):
        t = operands(grad=True)
        results.append(torch.autograd.grad(call(t).square().sum(), [t.x, t.w]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert dict(ck.replaced()[-1].calls) == {"matmul + bias": 1}


@pytest.mark.parametrize("ambient", [False, True])
def test_autocast_has_the_types_that_it_has_in_eager(ambient: bool, service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck
    from tests.support.kernels.torch_graphs import linear, operands

    def inside(t: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.nn.functional.gelu(linear(t))

    def ambiently(t: Any) -> Any:
        return torch.nn.functional.gelu(linear(t))

    function = ambiently if ambient else inside
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=ambient), torch.no_grad():
        made, expected = compiled(function, "aot_eager")(operands()), function(operands())
    assert made.dtype is expected.dtype is torch.bfloat16
    same(made, expected)
    assert dict(ck.replaced()[-1].calls) == {"matmul + bias + gelu": 1}
    assert [problem["dtype"] for problem in service.asked] == ["bfloat16"]
    assert not torch.is_autocast_enabled("cpu")


def test_dropout_of_training_stays_between(service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck
    from tests.support.kernels.torch_graphs import linear, operands

    def function(t: Any) -> Any:
        return torch.nn.functional.dropout(linear(t), 0.5, True) + t.r

    torch.manual_seed(5)
    made = compiled(function)(operands())
    torch.manual_seed(5)
    operands()
    assert dict(ck.replaced()[-1].calls) == {"matmul + bias": 1}
    assert 0 < int((made - operands().r).eq(0).sum()) < made.numel()


def test_shapes_that_change_are_left_to_the_inner_backend(service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck

    layer = torch.nn.Linear(16, 16).eval()
    call = compiled(layer)
    for rows in (6, 7, 9):
        x = torch.randn(rows, 16)
        same(call(x), layer(x))
    first, second = ck.replaced()[-2:]
    assert (dict(first.calls), dict(second.calls)) == ({"matmul + bias": 1}, {})
    assert list(second.left) == ["matmul (shapes that are not constant; torch.compile(dynamic=False) has them so)"]


def test_functions_that_are_transformed_are_left(service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck
    from tests.support.kernels.torch_graphs import operands

    def function(t: Any) -> Any:
        return torch.vmap(lambda row: torch.nn.functional.linear(row[None], t.w))(t.x)

    same(compiled(function)(operands()), function(operands()))
    assert dict(ck.replaced()[-1].calls) == {}


def test_calls_on_a_device_without_kernels_are_left(played: Callable[..., PlayedService]) -> None:
    import cukiln.torch as ck
    from tests.support.kernels.torch_graphs import linear, operands

    service = played(target="sm_90a")
    same(compiled(linear)(operands()), linear(operands()))
    assert list(ck.replaced()[-1].left) == ["matmul (on cpu)"]
    assert not service.asked


def test_only_the_operators_that_are_named_are_replaced(
    service: PlayedService, caplog: pytest.LogCaptureFixture
) -> None:
    import torch

    from tests.support.kernels.torch_graphs import linear, operands

    with caplog.at_level(logging.INFO, "cukiln.torch"):
        compiled(lambda t: torch.softmax(linear(t), -1), operators=["matmul"])(operands())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "cukiln.torch"]
    assert line.endswith("replaced 1 matmul + bias")
    assert [problem["operator"] for problem in service.asked] == ["matmul"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"inner": "tvm"}, "inner is 'tvm'; allowed: inductor, aot_eager, eager"),
        ({"inner": "eager", "operators": ["mla"]}, "operators has 'mla'; allowed: matmul, conv2d"),
        ({"inner": "eager", "replace": "most"}, "replace is 'most'; allowed: known, all"),
        ({"inner": "eager", "max_autotune": True}, "no options such as 'max_autotune'"),
    ],
)
def test_options_that_are_not_there_are_refused(options: dict[str, Any], message: str) -> None:
    import torch

    with pytest.raises(Exception, match=message):
        torch.compile(lambda x: x + 1, backend="cukiln", options=options)(torch.ones(2))


def test_the_backend_is_there_by_the_packages_metadata() -> None:
    from importlib.metadata import entry_points

    import cukiln.torch as ck

    (entry,) = entry_points(group="torch_dynamo_backends", name="cukiln")
    assert entry.load() is ck.backend


def test_a_checkout_registers_the_backend_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends import registry

    import cukiln.torch as ck
    from cukiln.torch.compile_backend import register

    registry.list_backends()
    for names in (registry._BACKENDS, registry._COMPILER_FNS):
        monkeypatch.delitem(names, "cukiln", raising=False)
    register()
    assert registry.lookup_backend("cukiln") is ck.backend


@pytest.mark.long
def test_inductor_compiles_the_rest(service: PlayedService) -> None:
    import torch

    from tests.support.kernels.torch_graphs import linear, operands

    def function(t: Any) -> Any:
        return torch.exp(torch.nn.functional.gelu(linear(t))) * t.r - 1

    call = compiled(function, "inductor", max_autotune=False)
    t, of_eager = operands(grad=True), operands(grad=True)
    made, expected = call(t), function(of_eager)
    same(made, expected)
    made.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close([t.x.grad, t.w.grad], [of_eager.x.grad, of_eager.w.grad], rtol=1e-4, atol=1e-4)
    assert [problem["operator"] for problem in service.asked].count("matmul") == service.calls - 1 == 3
