"""`cukiln.torch.masked_activation` and `attention`."""

from __future__ import annotations

from collections.abc import Callable
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


def packed_bits(mask: Tensor) -> Tensor:
    """Words of 32 bits, the lowest first."""
    flat = functional.pad(mask.flatten().to(torch.int64), (0, -mask.numel() % 32)).view(-1, 32)
    words = (flat << torch.arange(32)).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "bits": packed_bits, "bool": lambda mask: mask, "uint8": lambda mask: mask.to(torch.uint8) * 7,
}  # fmt: skip
POLYNOMIAL = (0.5, -1.0, 0.25, 2.0)
FUNCTIONS: list[tuple[Any, Any, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    ("relu", "identity", torch.relu, lambda x: x),
    ("gelu", "silu", functional.gelu, functional.silu),
    (POLYNOMIAL, "square", lambda x: 0.5 - x + 0.25 * x * x + 2 * x**3, torch.square),
    ("identity", POLYNOMIAL[:3], lambda x: x, lambda x: 0.5 - x + 0.25 * x * x),
]


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("where_set, where_clear, f, g", FUNCTIONS)
def test_a_mask_chooses_the_function_of_each_element(
    kind: str, where_set: Any, where_clear: Any, f: Any, g: Any, service: PlayedService
) -> None:
    x, chosen = torch.randn(5, 3, 7, requires_grad=True), torch.rand(5, 3, 7) < 0.5
    expected = torch.where(chosen, f(x), g(x))
    dy = torch.randn_like(x)
    for options in ({}, {"enabled": False}):  # the kernel, and PyTorch's own
        with ck.using(**options) if options else torch.enable_grad():
            made = ck.masked_activation(x, MASKS[kind](chosen), where_set, where_clear)
        torch.testing.assert_close(made, expected, **CLOSE)
        gradients = torch.autograd.grad(made, x, dy), torch.autograd.grad(expected, x, dy, retain_graph=True)
        torch.testing.assert_close(*gradients, **CLOSE)
    (problem,) = service.asked
    assert problem["mask"] == ("bits" if kind == "bits" else "bytes") and service.calls == 1


def test_masked_activation_of_half_precision_is_rounded_once(service: PlayedService) -> None:
    x, mask = torch.randn(64, dtype=torch.float16), torch.rand(64) < 0.5
    made = ck.masked_activation(x, mask, POLYNOMIAL, "square")
    with ck.using(enabled=False):
        torch.testing.assert_close(made, ck.masked_activation(x, mask, POLYNOMIAL, "square"), rtol=0, atol=0)


def test_masks_and_functions_that_are_none_are_refused(service: PlayedService) -> None:
    x, mask = torch.randn(64), torch.rand(64) < 0.5
    with pytest.raises(UsageError, match="'tanh' is no function of masked_activation; allowed: identity, relu"):
        ck.masked_activation(x, mask, "tanh")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a polynomial has 2 coefficients; allowed: 3 or 4"):
        ck.masked_activation(x, mask, (1.0, 2.0))
    with pytest.raises(RuntimeError, match="must match the size"):
        ck.masked_activation(x, mask[1:])
    assert not service.asked


@pytest.mark.parametrize("grad", [False, True])
def test_masked_activation_is_what_pytorch_asks_of_an_operator(grad: bool, service: PlayedService) -> None:
    x, mask = torch.randn(5, 7, requires_grad=grad), torch.rand(5, 7) < 0.5
    for kind in ("bits", "bool"):
        arguments = (x, MASKS[kind](mask), "gelu", [], "polynomial", list(POLYNOMIAL))
        torch.library.opcheck(torch.ops.cukiln.masked_activation.default, arguments)


HALF = {"dtype": torch.float16}


def heads(positions: int, count: int = 4, width: int = 16, *, behind: bool = False) -> Tensor:
    if behind:
        return torch.randn(2, positions, count, width, **HALF).transpose(1, 2)
    return torch.randn(2, count, positions, width, **HALF)


# q, k, v, and what of the problem they are.
ATTENTIONS: dict[str, tuple[Callable[[], list[Tensor]], dict[str, Any]]] = {
    "packed": (lambda: [heads(9) for _ in range(3)], {"layout": "bhsd", "seq_q": 9, "seq_kv": 9, "heads_kv": 4}),
    "heads behind positions": (lambda: [heads(9, behind=True) for _ in range(3)], {"layout": "bshd", "heads_q": 4}),
    "parts of one projection": (
        lambda: [part.transpose(1, 2) for part in torch.randn(2, 9, 3, 4, 16, **HALF).unbind(2)],
        {"layout": "bhsd", "q_strides": [1728, 16, 192], "v_strides": [1728, 16, 192]},
    ),
    "shared keys": (lambda: [heads(9), heads(9, 2), heads(9, 2)], {"heads_q": 4, "heads_kv": 2}),
    "a step": (lambda: [heads(1), heads(9), heads(9)], {"seq_q": 1, "seq_kv": 9}),
    "wider values": (lambda: [heads(9), heads(9), heads(9, width=24)], {"head_dim_qk": 16, "head_dim_vo": 24}),
}  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_follows_from_how_heads_lie_in_memory(name: str, causal: bool, service: PlayedService) -> None:
    make, fields = ATTENTIONS[name]
    q, k, v = make()
    made = ck.attention(q, k, v, causal=causal, scale=0.3)
    (problem,) = service.asked
    assert problem.items() >= {**fields, "causal": causal, "scale": 0.3}.items() and service.calls == 1
    with ck.using(enabled=False):
        expected = ck.attention(q, k, v, causal=causal, scale=0.3)
    torch.testing.assert_close(made, expected, rtol=5e-3, atol=5e-3)
    repeated = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1).float() for tensor in (k, v))
    scores = q.float() @ next(repeated).mT * 0.3
    if causal:
        sees = torch.ones(scores.shape[-2:]).tril(k.shape[2] - q.shape[2]).bool()
        scores = scores.masked_fill(~sees, -torch.inf)
    torch.testing.assert_close(made.float(), scores.softmax(-1) @ next(repeated), rtol=5e-3, atol=5e-3)
    assert made.transpose(1, 2).is_contiguous() == (name == "heads behind positions" or q.shape[2] == 1)


def test_what_no_attention_takes_and_what_is_recorded_is_pytorchs_own(service: PlayedService) -> None:
    q = heads(9)
    own = functional.scaled_dot_product_attention
    torch.testing.assert_close(ck.attention(q.float(), q.float(), q.float()), own(q.float(), q.float(), q.float()))
    torch.testing.assert_close(ck.attention(q[0], q[0], q[0]), own(q[0], q[0], q[0]))
    turned = q.mT.contiguous().mT
    torch.testing.assert_close(ck.attention(turned, q, q), own(turned, q, q))
    k = heads(9).requires_grad_()
    made = torch.autograd.grad(ck.attention(q, k, q).float().sum(), k)
    torch.testing.assert_close(made, torch.autograd.grad(own(q, k, q).float().sum(), k))
    assert not service.asked


@pytest.mark.parametrize("behind", some_each_run([False, True]))
@pytest.mark.parametrize("grad", [False, True])
def test_attention_is_what_pytorch_asks_of_an_operator(behind: bool, grad: bool, service: PlayedService) -> None:
    q, k, v = (heads(9, behind=behind).requires_grad_(grad) for _ in range(3))
    torch.library.opcheck(torch.ops.cukiln.attention.default, (q, k, v))
    torch.library.opcheck(torch.ops.cukiln.attention.default, (q[:, :, :4], k, v, True, 0.5))
