"""`cukiln.torch.conv2d`, and its gradients, which are operators of their own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cukiln.torch as ck  # noqa: E402
from tests.support.kernels.reference_kernel import PlayedService  # noqa: E402
from tests.support.run.each_run import some_each_run  # noqa: E402

Tensor = torch.Tensor
own = torch.nn.functional.conv2d
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def stored(last: bool, *shape: int) -> Tensor:
    made = torch.randn(shape)
    return made.contiguous(memory_format=torch.channels_last) if last else made


# Shape of x, filters, rows, columns, arguments.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, int, int], dict[str, Any]]] = {
    "3 x 3": ((2, 8, 6, 5), (4, 3, 3), {"padding": 1}),
    "strides, padding and dilation of each axis": (
        (1, 4, 11, 12), (8, 3, 2), {"stride": (2, 3), "padding": (2, 1), "dilation": (2, 4)},
    ),
    "groups": ((2, 8, 6, 5), (4, 3, 3), {"groups": 2}),
    "depthwise": ((1, 8, 6, 7), (8, 3, 3), {"groups": 8, "padding": "same"}),
    "1 x 1": ((2, 8, 6, 5), (12, 1, 1), {"dilation": 3, "padding": "valid"}),
    "one channel": ((2, 1, 6, 5), (4, 3, 3), {"stride": 2}),
}  # fmt: skip


def operands(name: str, last: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
    shape, (k, r, s), arguments = CASES[name]
    return stored(last, *shape), stored(last, k, shape[1] // arguments.get("groups", 1), r, s), arguments


WHOLE = [*product(CASES, (False, True), (False,))]
# Some of each layout.
COMPILED = [row for last in (False, True) for row in some_each_run([*product(CASES, (last,), (True,))], 2)]


@pytest.mark.parametrize(("name", "last", "compiled"), [*WHOLE, *COMPILED])
def test_the_image_the_filters_and_their_gradients_have_a_kernel_each(
    name: str, last: bool, compiled: bool, service: PlayedService
) -> None:
    x, w, arguments = operands(name, last)
    bias = torch.randn(w.shape[0], requires_grad=True)
    x.requires_grad_(), w.requires_grad_()

    def call(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return ck.conv2d(x, w, bias, activation="relu", **arguments)

    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = own(x, w, bias, **arguments).relu()
    dy = torch.randn_like(expected)
    made = call(x, w, bias)
    gradients = torch.autograd.grad(made, [x, w, bias], dy)
    torch.testing.assert_close(made, expected, **CLOSE)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, [x, w, bias], dy), **CLOSE)
    kinds = [problem["operator"] for problem in service.asked]
    assert kinds[:3] == ["conv2d", "conv2d_dgrad", "conv2d_wgrad"] and service.calls >= 3
    last = last and name != "one channel"  # which is stored both ways
    assert {problem["layout"] for problem in service.asked[:3]} == {"nhwc" if last else "nchw"}
    assert made.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


@pytest.mark.parametrize("last", [False, True])
def test_bias_residual_and_activation_are_of_the_same_kernel(last: bool, service: PlayedService) -> None:
    x, w, _ = operands("3 x 3", last)
    bias, residual = torch.randn(4), stored(last, 2, 4, 6, 5)
    made = ck.conv2d(x, w, bias, padding=1, residual=residual, activation="relu")
    torch.testing.assert_close(made, (own(x, w, bias, padding=1) + residual).relu(), **CLOSE)
    (problem,) = service.asked
    assert [node["op"] for node in problem["epilogue"]] == ["bias", "residual", "relu"]


PYTORCHS: dict[str, Callable[[], tuple[Tensor, Tensor, dict[str, Any]]]] = {
    "filters of another layout": lambda: (stored(True, 2, 8, 6, 5), stored(False, 4, 8, 3, 3), {}),
    "gaps": lambda: (stored(False, 2, 8, 6, 10)[..., ::2], stored(False, 4, 8, 3, 3), {}),
    "an image alone": lambda: (torch.randn(8, 6, 5), torch.randn(4, 8, 3, 3), {}),
    "more padding behind": lambda: (torch.randn(2, 8, 6, 5), torch.randn(4, 8, 2, 2), {"padding": "same"}),
    "float64": lambda: (torch.randn(2, 8, 6, 5).double(), torch.randn(4, 8, 3, 3).double(), {}),
    "no image": lambda: (torch.randn(0, 8, 6, 5), torch.randn(4, 8, 3, 3), {}),
}


@pytest.mark.parametrize("name", PYTORCHS)
def test_what_no_kernel_takes_is_pytorchs_own(name: str, service: PlayedService) -> None:
    x, w, arguments = PYTORCHS[name]()
    torch.testing.assert_close(ck.conv2d(x, w, **arguments), own(x, w, **arguments))
    assert not service.asked


def test_a_window_larger_than_the_image_is_pytorchs_error(service: PlayedService) -> None:
    with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
        ck.conv2d(torch.randn(1, 2, 2, 2), torch.randn(1, 2, 3, 3))


@pytest.mark.parametrize("last", [False, True])
def test_gradients_of_gradients_are_convolutions(last: bool, service: PlayedService) -> None:
    x, w, arguments = operands("strides, padding and dilation of each axis", last)
    x.requires_grad_(), w.requires_grad_()

    def twice(y: Tensor) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(y.square().sum(), [x, w], create_graph=True)
        return torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), [x, w])

    made, expected = twice(ck.conv2d(x, w, **arguments)), twice(own(x, w, **arguments))
    torch.testing.assert_close(made, expected, rtol=1e-3, atol=1e-2)
    assert service.calls == 9 and len(service.asked) == 3


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("last", some_each_run([False, True]))
def test_the_operators_are_what_pytorch_asks_of_them(last: bool, grad: bool, service: PlayedService) -> None:
    x, w, _ = operands("3 x 3", last)
    dy, geometry = stored(last, 2, 4, 6, 5), ([1, 1], [1, 1], [1, 1], 1)
    for tensor in (x, w, dy):
        tensor.requires_grad_(grad)
    torch.library.opcheck(torch.ops.cukiln.conv2d.default, (x, w, torch.randn(4), dy, *geometry, "relu"))
    torch.library.opcheck(torch.ops.cukiln.conv2d_dgrad.default, (dy, w, list(x.shape), *geometry))
    torch.library.opcheck(torch.ops.cukiln.conv2d_wgrad.default, (dy, x, list(w.shape), *geometry))
