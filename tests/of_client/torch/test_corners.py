"""Where a call of `cukiln.torch` could differ from PyTorch's: small values, mixed types, tangents, broadcasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.kernels.reference_kernel import PlayedService


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rms_norm_without_epsilon_takes_pytorchs(dtype: str, service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck

    x = (torch.randn(16, 32) * 1e-3).to(getattr(torch, dtype))  # squares below the epsilon of fp16 and bf16
    own = torch.nn.functional.rms_norm
    ulp = torch.finfo(x.dtype).eps
    torch.testing.assert_close(ck.rms_norm(x, (32,)), own(x, (32,)), rtol=4 * ulp, atol=0.01)
    assert service.calls == 1
    weights = torch.linspace(-1, 1, x.numel()).view(x.shape)
    of_call, of_own = (x.clone().requires_grad_() for _ in range(2))
    for call, leaf in ((ck.rms_norm, of_call), (own, of_own)):
        (call(leaf, (32,)).float() * weights).sum().backward()
    assert of_call.grad is not None and of_own.grad is not None
    scale = float(of_own.grad.abs().max())
    torch.testing.assert_close(of_call.grad, of_own.grad, rtol=8 * ulp, atol=8 * ulp * scale)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_residual_with_more_images_than_the_convolution(compiled: bool, service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck

    x, w, r = torch.randn(1, 4, 6, 6), torch.randn(8, 4, 3, 3), torch.randn(5, 8, 4, 4)
    own = torch.nn.functional.conv2d

    def fused(x: Any, w: Any, r: Any) -> Any:
        return ck.conv2d(x, w, residual=r)

    call = torch.compile(lambda x, w, r: own(x, w) + r, backend="cukiln", options={"inner": "aot_eager"})
    results = []
    for function in (call if compiled else fused, lambda x, w, r: own(x, w) + r):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, w, r)]
        function(*leaves).square().sum().backward()
        results.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_tangents_of_forward_mode_are_pytorchs(service: PlayedService) -> None:
    import torch
    from torch.autograd import forward_ad

    import cukiln.torch as ck

    a, b = torch.randn(6, 5), torch.randn(5, 4)
    x, calls = torch.randn(2, 8), [lambda t: ck.softmax(t), lambda t: ck.rms_norm(t, (8,)), lambda t: ck.reduce(t, 1)]
    ck.matmul(a, b)
    for call in calls:
        call(x)
    asked = service.calls
    with forward_ad.dual_level():
        made = ck.matmul(forward_ad.make_dual(a, torch.ones_like(a)), b.clone().requires_grad_())
        torch.testing.assert_close(forward_ad.unpack_dual(made).tangent, torch.ones_like(a) @ b)
        for call in calls:
            assert forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x)))).tangent is not None
        made = torch.ops.cukiln.matmul(forward_ad.make_dual(a, torch.ones_like(a)), b)
        assert forward_ad.unpack_dual(made).tangent is not None
    assert service.calls == asked


@pytest.mark.parametrize("op", ["sum", "mean", "variance", "logsumexp", "max"])
def test_no_axes_are_all_axes(op: Any, service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck

    x = torch.randn(3, 4)
    results = []
    for dims in ([], [0, 1]):
        leaf = x.clone().requires_grad_()
        made = ck.reduce(leaf, dims, op)
        made.backward()
        results.append((made, leaf.grad))
    torch.testing.assert_close(*results)


def test_axes_of_numpy_are_axes(service: PlayedService) -> None:
    import numpy as np
    import torch

    import cukiln.torch as ck

    x = torch.randn(3, 4)
    torch.testing.assert_close(ck.reduce(x, np.int64(1)), x.sum(1))  # type: ignore[arg-type]


def test_what_is_recorded_for_a_gpu_may_lose_bits_to_tf32_where_pytorch_may(service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck

    x, w = torch.randn(1, 4, 6, 6), torch.randn(8, 4, 3, 3)
    may = torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32"
    with ck.record() as of_gpu:
        ck.conv2d(x, w)
    with ck.record(target="cpu") as of_cpu:
        ck.conv2d(x, w)
    assert [problem.get("allow_tf32", False) for problem in (*of_gpu, *of_cpu)] == [may, False]


@pytest.mark.parametrize("added", ["bias", "residual"])
def test_a_sum_of_another_type_is_not_part_of_the_product(added: str, service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck

    x, w = torch.randn(4, 8).half(), torch.randn(8, 6).half()
    wide = torch.randn(6) if added == "bias" else torch.randn(4, 6)
    call = torch.compile(lambda x, w, wide: x @ w + wide, backend="cukiln", options={"inner": "eager"})
    torch.testing.assert_close(call(x, w, wide), x @ w + wide, rtol=2e-3, atol=2e-3)
    assert dict(ck.replaced()[-1].calls) == {"matmul": 1}


def test_silu_of_a_mask_has_gradients_of_gradients(service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck

    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(3, 8) > 0.5
    assert torch.autograd.gradgradcheck(lambda t: ck.masked_activation(t, mask, "silu", "square"), (x,))


def test_same_padding_with_a_stride_is_refused_as_pytorch_does(service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck

    with pytest.raises(RuntimeError, match="padding='same' is not supported for strided convolutions"):
        ck.conv2d(torch.randn(1, 4, 6, 6), torch.randn(8, 4, 3, 3), stride=2, padding="same")


def test_what_no_gradient_reads_may_be_written_before_it(service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck

    a, w = torch.randn(4, 8), torch.randn(8, 6).requires_grad_()
    made = ck.matmul(a, w)
    with torch.no_grad():
        w.mul_(2)
    made.sum().backward()
    torch.testing.assert_close(w.grad, a.t() @ torch.ones(4, 6))


def test_a_search_that_breaks_off_is_tried_again(played: Callable[..., PlayedService]) -> None:
    import math

    import torch

    import cukiln.torch as ck
    from cukiln.torch import dispatch
    from tests.support.kernels.reference_kernel import PlayedService

    class Broken(PlayedService):
        def lookup(self, problems: Any, **options: Any) -> Any:
            raise SystemExit  # what no CukilnError is

    played(Broken())
    a, b = torch.randn(4, 8), torch.randn(8, 6)
    torch.testing.assert_close(ck.matmul(a, b), a @ b)
    ((_, entry),) = dispatch.current().table.items()
    assert entry.ready.is_set() and not math.isinf(entry.until)


@pytest.mark.parametrize("shapes", [((2, 3, 0), (0, 4)), ((2, 3, 4), (4, 0)), ((0, 3, 4), (4, 5))], ids=str)
def test_gradients_of_empty_products_are_pytorchs(shapes: Any, service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck

    results = []
    for function in (ck.matmul, torch.matmul):
        a, b = (torch.ones(shape, requires_grad=True) for shape in shapes)
        out = function(a, b)
        results.append([out, *torch.autograd.grad(out.square().sum(), (a, b))])
    torch.testing.assert_close(*results)
    assert service.calls == 0


@pytest.mark.parametrize("op", ["sum", "mean", "variance", "sum_of_squares", "logsumexp"])
def test_gradients_of_reductions_of_nothing_are_empty(op: Any, service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck

    x = torch.ones(0, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(ck.reduce(x, 0, op).sum(), x)
    assert dx.shape == (0, 4)
    assert service.calls == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_tensors_of_classes_with_operators_of_their_own_are_pytorchs(compiled: bool, service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck

    functional = torch.nn.functional
    rows = [torch.randn(n, 8) for n in (2, 3)]
    w, image = torch.randn(8, 6), torch.randn(1, 2, 4, 8)
    filters, mask = torch.randn(3, 2, 3, 3), torch.rand(1, 2, 4, 8) > 0.5

    class Wrapper(torch.Tensor):
        """Computes what it wraps does, and knows PyTorch's operators alone."""

        of: torch.Tensor

        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            assert function.namespace == "aten", function
            plain = [a.of if isinstance(a, Wrapper) else a for a in arguments]
            return function(*plain, **(options or {}))

    def wrapped() -> Any:
        made = torch.Tensor._make_wrapper_subclass(Wrapper, image.shape, dtype=image.dtype)
        made.of = image
        return made

    def nested() -> Any:
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    of_nested: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
        (lambda x: ck.matmul(x, w), lambda x: x @ w),
        (lambda x: ck.softmax(x), lambda x: torch.softmax(x, -1)),
        (lambda x: ck.rms_norm(x, (8,)), lambda x: functional.rms_norm(x, (8,))),
    ]
    for call, own in of_nested:
        call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
        torch.testing.assert_close(call(nested()).unbind(), own(nested()).unbind())
    calls: list[Callable[[Any], Any]] = [
        lambda x: ck.conv2d(x, filters),
        lambda x: ck.layer_norm(x, (8,)),
        lambda x: ck.reduce(x, (0, 2), "logsumexp"),
        lambda x: ck.masked_activation(x, mask),
        lambda x: ck.attention(x, image, image),
    ]
    for call in [] if compiled else calls:
        torch.testing.assert_close(call(wrapped()), call(image))
    assert service.calls == (0 if compiled else 4)  # of the plain images; attention has no kernels of float32


def test_a_product_of_a_vector_is_compiled_whole_as_of_a_gpu(service: PlayedService) -> None:
    import torch

    import cukiln.torch as ck

    a, b = torch.randn(8, requires_grad=True), torch.randn(8, 6)
    with ck.record():  # calls on CPU tensors are those of a GPU, where float32 may be multiplied as tf32
        call = torch.compile(lambda a, b: ck.matmul(a, b, activation="relu"), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(call(a, b), torch.relu(a @ b))
