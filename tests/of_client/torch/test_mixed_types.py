"""Gradients of calls whose bias or residual is of another type than the product, and of tensors without axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import cukiln.torch as ck  # noqa: E402

if TYPE_CHECKING:
    from tests.support.kernels.reference_kernel import PlayedService

SHORT, WIDE = torch.bfloat16, torch.float32
ACTIVATIONS: dict[str | None, Any] = {None: lambda z: z, "relu": torch.relu, "gelu": torch.nn.functional.gelu}


def gradients(function: Callable[..., Any], *tensors: Any) -> list[Any]:
    """The result, and the gradient of each tensor."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    made = function(*leaves)
    (made.float() * torch.linspace(0.5, 1.5, made.numel()).view(made.shape)).sum().backward()
    return [made, *[leaf.grad for leaf in leaves]]


def equal(call: Callable[..., Any], own: Callable[..., Any], *tensors: Any) -> None:
    """To bfloat16's rounding, and of the same types."""
    torch.testing.assert_close(gradients(call, *tensors), gradients(own, *tensors), rtol=0.02, atol=0.1)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize(
    "types", [(SHORT, SHORT, WIDE), (SHORT, WIDE, SHORT), (SHORT, WIDE, WIDE), (WIDE, SHORT, SHORT)]
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_a_product_whose_sums_are_of_other_types(
    types: Any, activation: Any, service: PlayedService
) -> None:
    a, b = torch.randn(4, 8).to(types[0]), torch.randn(8, 6).to(types[0])
    bias, residual = torch.randn(6).to(types[1]), torch.randn(4, 6).to(types[2])
    equal(
        lambda a, b, bias, residual: ck.matmul(a, b, bias=bias, residual=residual, activation=activation),
        lambda a, b, bias, residual: ACTIVATIONS[activation](a @ b + bias + residual),
        *(a, b, bias, residual),
    )


@pytest.mark.parametrize("types", [(SHORT, WIDE), (WIDE, SHORT)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_a_convolution_whose_residual_is_of_another_type(
    types: Any, activation: Any, service: PlayedService
) -> None:
    x, w = torch.randn(2, 4, 6, 6).to(types[0]), torch.randn(8, 4, 3, 3).to(types[0])
    bias, residual = torch.randn(8).to(types[0]), torch.randn(2, 8, 4, 4).to(types[1])
    own = torch.nn.functional.conv2d
    equal(
        lambda x, w, bias, residual: ck.conv2d(x, w, bias, residual=residual, activation=activation),
        lambda x, w, bias, residual: ACTIVATIONS[activation](own(x, w, bias) + residual),
        *(x, w, bias, residual),
    )


def test_so_they_are_where_the_call_is_compiled(service: PlayedService) -> None:
    a, b, r = torch.randn(4, 8, dtype=SHORT), torch.randn(8, 6, dtype=SHORT), torch.randn(4, 6)
    equal(compiled(lambda a, b, r: ck.matmul(a, b, residual=r)), lambda a, b, r: a @ b + r, a, b, r)


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
    "logsumexp": torch.logsumexp,
    "variance": lambda x, axes, keepdim: x.var(axes, correction=0, keepdim=keepdim),
    "sum_of_squares": lambda x, axes, keepdim: x.square().sum(axes, keepdim=keepdim),
}


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [0, -1, []])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_a_number_is_reduced_as_pytorch_reduces_it(op: Any, dims: Any, keepdim: bool, service: PlayedService) -> None:
    own = REDUCTIONS[op]
    equal(lambda x: ck.reduce(x, dims, op, keepdim=keepdim), lambda x: own(x, dims, keepdim=keepdim), torch.tensor(3.0))


def test_the_place_of_a_number_is_0(service: PlayedService) -> None:
    x = torch.tensor(3.0)
    assert [int(ck.reduce(x, dims, "argmax")) for dims in (0, -1, [])] == [0, 0, 0]


@pytest.mark.parametrize(
    ("call", "own"),
    [
        (ck.softmax, lambda x: torch.softmax(x, -1)),
        (lambda x: ck.masked_activation(x, torch.tensor(True)), torch.relu),
        (lambda x: ck.masked_activation(x, torch.tensor([0], dtype=torch.int32)), lambda x: x),
    ],
)
def test_a_number_is_what_pytorch_makes_of_it(call: Any, own: Any, service: PlayedService) -> None:
    equal(call, own, torch.tensor(3.0))
