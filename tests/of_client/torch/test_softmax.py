"""`cukiln.torch.softmax`."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cukiln.torch as ck  # noqa: E402
from tests.support.kernels.reference_kernel import PlayedService  # noqa: E402

R = torch.randn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(40,), (6, 40), (2, 3, 40), (2, 1, 3, 1)])
def test_rows_are_normalised(dtype: Any, shape: tuple[int, ...], service: PlayedService) -> None:
    x = R(shape, dtype=dtype)
    torch.testing.assert_close(ck.softmax(x), torch.softmax(x, -1))
    torch.testing.assert_close(ck.softmax(x, len(shape) - 1), torch.softmax(x, -1))
    (first, second) = service.asked
    assert first == second and first["shape"] == [x.numel() // shape[-1], shape[-1]]


@pytest.mark.parametrize(
    "x, dim",
    [(R(6, 40), 0), (R(40, 6).t(), -1), (R(6, 80)[:, ::2], -1), (R(6, 41)[:, 1:], -1), (R(()), 0), (R(6, 0), -1),
     (R(241)[1:].view(6, 40), -1)],
)  # fmt: skip
def test_other_axes_and_layouts_are_pytorchs_own(x: Any, dim: int, service: PlayedService) -> None:
    torch.testing.assert_close(ck.softmax(x, dim), torch.softmax(x, dim))
    assert not service.asked


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_right_twice(compiled: bool, service: PlayedService) -> None:
    x, dy = R(6, 40, requires_grad=True), R(6, 40)
    call = torch.compile(lambda x: ck.softmax(x), fullgraph=True, backend="aot_eager") if compiled else ck.softmax
    (made,) = torch.autograd.grad(call(x), x, dy, create_graph=not compiled)
    (expected,) = torch.autograd.grad(torch.softmax(x, -1), x, dy, create_graph=True)
    torch.testing.assert_close(made, expected)
    if not compiled:
        again = torch.autograd.grad(made.square().sum(), x), torch.autograd.grad(expected.square().sum(), x)
        torch.testing.assert_close(*again)


@pytest.mark.parametrize("grad", [False, True])
def test_the_operator_is_what_pytorch_asks_of_one(grad: bool, service: PlayedService) -> None:
    for dim in (-1, 0):
        torch.library.opcheck(torch.ops.cukiln.softmax.default, (R(6, 40, requires_grad=grad), dim))
