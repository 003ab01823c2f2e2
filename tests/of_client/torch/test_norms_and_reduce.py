"""`cukiln.torch.layer_norm`, `rms_norm` and `reduce`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cukiln.torch as ck  # noqa: E402
from cukiln.errors import UsageError  # noqa: E402
from tests.support.kernels.reference_kernel import PlayedService  # noqa: E402
from tests.support.run.each_run import some_each_run  # noqa: E402

Tensor = torch.Tensor
functional = torch.nn.functional
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


NORMS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], bool, bool]] = {
    "layer_norm": (ck.layer_norm, functional.layer_norm, True, True),
    "layer_norm without bias": (ck.layer_norm, functional.layer_norm, True, False),
    "layer_norm alone": (ck.layer_norm, functional.layer_norm, False, False),
    "rms_norm": (ck.rms_norm, functional.rms_norm, True, False),
    "rms_norm alone": (ck.rms_norm, functional.rms_norm, False, False),
}


def norm_operands(name: str, row: tuple[int, ...], dtype: Any, grad: bool) -> list[Any]:
    _, _, weight, bias = NORMS[name]
    tensors = [torch.randn(2, 3, *row)] + [torch.randn(row) for _ in range(weight + bias)]
    tensors = [tensor.to(dtype).requires_grad_(grad) for tensor in tensors]
    return [tensors[0], row, *tensors[1:]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("row", [(40,), (5, 8)])
@pytest.mark.parametrize("name", NORMS)
def test_rows_are_normalised(name: str, row: tuple[int, ...], dtype: Any, service: PlayedService) -> None:
    call, own, weight, bias = NORMS[name]
    arguments = norm_operands(name, row, dtype, False)
    # PyTorch's rms_norm of half precision rounds before it multiplies by the weight, too.
    ulp = torch.finfo(dtype).eps
    close = CLOSE if dtype is torch.float32 else {"rtol": 2 * ulp, "atol": 0.01 * ulp}
    torch.testing.assert_close(call(*arguments), own(*arguments), **close)
    torch.testing.assert_close(call(*arguments, eps=0.5), own(*arguments, eps=0.5), **close)
    first, second = service.asked
    assert first["shape"] == [6, 40] and (first["scale"], first["shift"]) == (weight, bias)
    assert second == {**first, "epsilon": 0.5} and service.calls == 2


WITH_ROWS = [*product(NORMS, ((40,), (5, 8)))]
GRADIENTS = [*product(WITH_ROWS, (False,))]
for call in (ck.layer_norm, ck.rms_norm):
    GRADIENTS += some_each_run([(of, True) for of in WITH_ROWS if NORMS[of[0]][0] is call], 2)


@pytest.mark.parametrize(("of", "compiled"), GRADIENTS)
def test_gradients_of_norms_are_right(of: tuple[str, tuple[int, ...]], compiled: bool, service: PlayedService) -> None:
    name, row = of
    call, own, _, _ = NORMS[name]
    x, row, *vectors = norm_operands(name, row, torch.float32, True)
    used = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    dy = torch.randn_like(x)
    made, expected = (
        torch.autograd.grad(of(x, row, *vectors), [x, *vectors], dy, create_graph=not compiled) for of in (used, own)
    )
    torch.testing.assert_close(made, expected, **CLOSE)
    if not compiled:
        made, expected = (
            torch.autograd.grad(of[0].square().sum(), [x, *vectors], allow_unused=True) for of in (made, expected)
        )
        torch.testing.assert_close(made[0], expected[0], **CLOSE)
    assert service.calls == 1


def test_what_no_norm_takes_is_pytorchs_own(service: PlayedService) -> None:
    x, w = torch.randn(40, 6).t(), torch.randn(40)
    torch.testing.assert_close(ck.layer_norm(x, (40,), w), functional.layer_norm(x, (40,), w))
    x = x.contiguous()
    torch.testing.assert_close(ck.rms_norm(x.double(), (40,)), functional.rms_norm(x.double(), (40,)))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        ck.layer_norm(x, (41,))
    assert not service.asked


@pytest.mark.parametrize("grad", [False, True])
def test_norms_are_what_pytorch_asks_of_operators(grad: bool, service: PlayedService) -> None:
    x, row, w, b = norm_operands("layer_norm", (5, 8), torch.float32, grad)
    torch.library.opcheck(torch.ops.cukiln.layer_norm.default, (x, row, w, b))
    torch.library.opcheck(torch.ops.cukiln.layer_norm.default, (x, row, None, b, 0.5))
    torch.library.opcheck(torch.ops.cukiln.rms_norm.default, (x, row, w))


X = (4, 6, 5, 8)
OWN: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "sum_of_squares": lambda x, dims, keepdim: (x * x).sum(dims, keepdim=keepdim),
    "max": torch.amax,
    "min": torch.amin,
    "variance": lambda x, dims, keepdim: torch.var(x, dims, correction=0, keepdim=keepdim),
    "logsumexp": torch.logsumexp,
}
AXES: list[Any] = [-1, (0, 1, 2), (0, 2), (1, 3), (0, 1, 2, 3)]


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", AXES)
@pytest.mark.parametrize("op", OWN)
def test_any_axes_are_reduced(op: Any, dims: Any, keepdim: bool, service: PlayedService) -> None:
    x = torch.randn(X, requires_grad=True)
    made, expected = ck.reduce(x, dims, op, keepdim=keepdim), OWN[op](x, dims, keepdim=keepdim)
    torch.testing.assert_close(made, expected, **CLOSE)
    assert service.calls == 1
    dy = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(made, x, dy), torch.autograd.grad(expected, x, dy), **CLOSE)


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("keepdim", [False, True])
def test_equal_extremes_share_the_gradient_evenly(op: Any, keepdim: bool, service: PlayedService) -> None:
    """As PyTorch's `amax` has it."""
    x = torch.randint(0, 3, X).float().requires_grad_()
    made, expected = ck.reduce(x, (0, 2), op, keepdim=keepdim), OWN[op](x, (0, 2), keepdim=keepdim)
    dy = torch.randn_like(expected)
    torch.testing.assert_close(torch.autograd.grad(made, x, dy), torch.autograd.grad(expected, x, dy), **CLOSE)


@pytest.mark.parametrize("op", OWN)
def test_gradients_of_gradients_of_reductions_are_right(op: Any, service: PlayedService) -> None:
    x = torch.randn(X, requires_grad=True)

    def twice(y: Tensor) -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)

    torch.testing.assert_close(twice(ck.reduce(x, (0, 2), op)), twice(OWN[op](x, (0, 2), keepdim=False)), **CLOSE)


@pytest.mark.parametrize(
    "make", [lambda x: x.permute(2, 0, 3, 1), lambda x: x[:, ::2], lambda x: x[:, :1], lambda x: x.unsqueeze(2).mT]
)
def test_strides_are_part_of_the_problem(make: Callable[[Tensor], Tensor], service: PlayedService) -> None:
    x = make(torch.randn(X))
    torch.testing.assert_close(ck.reduce(x, (0, -1)), x.sum((0, -1)), **CLOSE)
    torch.testing.assert_close(ck.reduce(x, 0, "argmax"), x.argmax(0))
    assert service.calls == 2


def test_the_greatest_of_several_axes_is_counted_row_by_row(service: PlayedService) -> None:
    x = torch.randn(X)
    made = ck.reduce(x, (1, 3), "argmax")
    assert made.dtype is torch.int64 and service.calls == 1
    torch.testing.assert_close(made, x.permute(0, 2, 1, 3).flatten(2).argmax(-1))
    with ck.using(enabled=False):
        torch.testing.assert_close(ck.reduce(x, (1, 3), "argmax", keepdim=True), made[:, None, :, None])


@pytest.mark.parametrize("op", ["sum", "max", "argmax"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_whole_numbers_stay_whole(op: Any, dtype: Any, service: PlayedService) -> None:
    x = torch.randint(-(2**30), 2**30, X, dtype=dtype)
    own = {"sum": torch.sum, "max": torch.amax, "argmax": torch.argmax}[op]
    torch.testing.assert_close(ck.reduce(x, 1, op), own(x, 1))
    assert service.calls == (not (op == "argmax" and dtype is torch.int64))


def test_what_no_reduction_takes_is_pytorchs_own_and_so_are_its_errors(service: PlayedService) -> None:
    x = torch.randn(X)
    for odd in (x.double(), x[..., 1:], x.expand(2, *X), torch.randn(0, 3), torch.randn(())):
        torch.testing.assert_close(ck.reduce(odd, -1), odd.sum(-1))
    with pytest.raises(IndexError, match="Dimension out of range"):
        ck.reduce(x, 4)
    with pytest.raises(UsageError, match="op is 'median'; allowed: sum, mean"):
        ck.reduce(x, 0, "median")  # type: ignore[arg-type]
    assert not service.asked


OPERATORS = [row for grad in (False, True) for row in some_each_run([*product((*OWN, "argmax"), (grad,))], 2)]


@pytest.mark.parametrize(("op", "grad"), OPERATORS)
def test_reduce_is_what_pytorch_asks_of_an_operator(op: str, grad: bool, service: PlayedService) -> None:
    x = torch.randn(X, requires_grad=grad and op != "argmax")
    torch.library.opcheck(torch.ops.cukiln.reduce.default, (x, [0, 2], op))
    torch.library.opcheck(torch.ops.cukiln.reduce.default, (x.detach(), [-1], op, True))
