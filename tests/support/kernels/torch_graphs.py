"""Functions as models write them, and what the compile backend makes of each. Imports torch: tests import it late."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

Tensor = torch.Tensor
Case = tuple[Callable[[Any], Any], dict[str, int]]


def operands(grad: bool = False) -> SimpleNamespace:
    """x: 6×16, a layer w: 16×16 with bias, r: like its result; an image, filters, an image's residual; heads."""
    torch.manual_seed(2)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape).requires_grad_(grad)

    return SimpleNamespace(
        x=make(6, 16), w=make(16, 16), bias=make(16), r=make(6, 16), image=make(1, 8, 6, 6), filters=make(8, 8, 3, 3),
        channels=make(8), shortcut=make(1, 8, 6, 6), q=torch.randn(2, 10, 4, 16).transpose(1, 2).bfloat16(),
    )  # fmt: skip


def linear(t: Any) -> Tensor:
    return F.linear(t.x, t.w, t.bias)


def conv(t: Any) -> Tensor:
    return F.conv2d(t.image, t.filters, t.channels, padding=1)


def add_(first: Tensor, second: Tensor) -> Tensor:
    first += second
    return first


# One kernel each.
FUSED: dict[str, Case] = {
    "a layer": (linear, {"matmul + bias": 1}),
    "gelu": (lambda t: F.gelu(linear(t)), {"matmul + bias + gelu": 1}),
    "relu in place": (lambda t: F.relu(linear(t), inplace=True), {"matmul + bias + relu": 1}),
    "relu_": (lambda t: linear(t).relu_(), {"matmul + bias + relu": 1}),
    "without a bias": (lambda t: torch.tanh(F.linear(t.x, t.w)), {"matmul + tanh": 1}),
    "a product and a vector": (lambda t: F.silu(t.x @ t.w + t.bias), {"matmul + bias + silu": 1}),
    "a vector and a product": (lambda t: t.bias + t.x.matmul(t.w.t()), {"matmul + bias": 1}),
    "addmm": (lambda t: torch.addmm(t.bias, t.x, t.w).sigmoid(), {"matmul + bias + sigmoid": 1}),
    "addmm of a matrix": (lambda t: torch.addmm(t.r, t.x, t.w), {"matmul + residual": 1}),
    "a residual": (lambda t: F.relu(linear(t) + t.r), {"matmul + bias + residual + relu": 1}),
    "a residual before": (lambda t: torch.add(t.r, linear(t)), {"matmul + bias + residual": 1}),
    "a residual in place": (lambda t: add_(linear(t), t.r), {"matmul + bias + residual": 1}),
    "leaky_relu": (lambda t: F.leaky_relu(linear(t)), {"matmul + bias + leaky_relu": 1}),
    "a batch": (lambda t: torch.bmm(t.x[None], t.w[None]), {"matmul": 1}),
    "dropout of inference": (lambda t: F.dropout(linear(t), 0.1, False) + t.r, {"matmul + bias + residual": 1}),
    "a convolution": (conv, {"conv2d + bias": 1}),
    "a convolution's relu": (lambda t: F.relu(conv(t), True), {"conv2d + bias + relu": 1}),
    "a block's end": (lambda t: F.relu(add_(conv(t), t.shortcut), True), {"conv2d + bias + residual + relu": 1}),
    "as wide as the image": (lambda t: F.conv2d(t.image, t.filters, padding="same").relu(), {"conv2d + relu": 1}),
    "softmax": (lambda t: F.softmax(t.x, dim=-1) * t.x.softmax(1) * torch.softmax(t.x, -1), {"softmax": 3}),
    "layer_norm": (lambda t: F.layer_norm(t.x, (16,), t.bias, t.bias), {"layer_norm": 1}),
    "rms_norm": (lambda t: F.rms_norm(t.x, (16,), t.bias), {"rms_norm": 1}),
    "attention": (lambda t: F.scaled_dot_product_attention(t.q, t.q, t.q, is_causal=True), {"attention": 1}),
}  # fmt: skip


def with_another_user(t: Any) -> tuple[Tensor, Tensor]:
    y = linear(t)
    return F.gelu(y), y * 2


def overwritten_view(t: Any) -> tuple[Tensor, Tensor]:
    y = linear(t)
    view = y.view(-1)
    y.relu_()
    return y, view


def operand_written_between(t: Any) -> Tensor:
    x = t.x.clone()
    y = F.linear(x, t.w, t.bias)
    x.mul_(3)
    return F.relu(y)


def residual_written_between(t: Any) -> Tensor:
    r = t.r.clone()
    y = F.linear(t.x, t.w, t.bias)
    r.mul_(3)
    return y + r


def into_the_residual(t: Any) -> tuple[Tensor, Tensor]:
    r = t.r.clone()
    view = r.view(-1)
    r += linear(t)
    return r, view


def autocast_between(t: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(t)
    return y + t.r


def no_gradients_between(t: Any) -> Tensor:
    with torch.no_grad():
        y = linear(t)
    return F.relu(y)


# What is behind the product stays by itself.
APART: dict[str, Case] = {
    "a result with another user": (with_another_user, {"matmul + bias": 1}),
    "a view of what is overwritten": (overwritten_view, {"matmul + bias": 1}),
    "an operand is written to between": (operand_written_between, {"matmul + bias": 1}),
    "the residual is written to between": (residual_written_between, {"matmul + bias": 1}),
    "the residual is overwritten": (into_the_residual, {"matmul + bias": 1}),
    "autocast ends between": (autocast_between, {"matmul + bias": 1}),
    "gradients begin between": (no_gradients_between, {"matmul + bias": 1}),
    "added to itself": (lambda t: (lambda y: y + y)(linear(t)), {"matmul + bias": 1}),
    "added twice as much": (lambda t: torch.add(linear(t), t.r, alpha=2), {"matmul + bias": 1}),
    "a residual for all rows": (lambda t: linear(t) + t.r[:1], {"matmul + bias": 1}),
    "a residual of another type": (lambda t: linear(t) + t.r.double(), {"matmul + bias": 1}),
    "a residual stored the other way": (lambda t: linear(t) + t.w[:, :6].t(), {"matmul + bias": 1}),
    "gelu by tanh": (lambda t: F.gelu(linear(t), approximate="tanh"), {"matmul + bias": 1}),
    "another slope": (lambda t: F.leaky_relu(linear(t), 0.2), {"matmul + bias": 1}),
    "a residual behind the activation": (lambda t: F.relu(linear(t)) + t.r, {"matmul + bias + relu": 1}),
    "a second activation": (lambda t: F.relu(linear(t)).tanh(), {"matmul + bias + relu": 1}),
    "a number": (lambda t: linear(t) + 1, {"matmul + bias": 1}),
}

# No kernel computes these; why, as `Replaced.left` says it.
LEFT: dict[str, tuple[Callable[[Any], Any], str]] = {
    "float64": (lambda t: F.linear(t.x.double(), t.w.double()), "matmul (of float64)"),
    "a vector": (lambda t: t.w @ t.bias, "matmul (of a vector)"),
    "softmax of columns": (lambda t: F.softmax(t.x, 0), "softmax (not along the last axis)"),
    "softmax to float64": (lambda t: torch.softmax(t.x, -1, dtype=torch.float64), "softmax (of another type)"),
    "one image": (lambda t: F.conv2d(t.image[0], t.filters), "conv2d (of one image)"),
    "padding of one side": (
        lambda t: F.conv2d(t.image, t.filters[:, :, :2, :2], padding="same"),
        "conv2d (arguments that kernels do not have)",
    ),
    "a part of the sum": (
        lambda t: torch.addmm(t.bias, t.x, t.w, beta=2),
        "matmul (arguments that kernels do not have)",
    ),
    "attention of float32": (
        lambda t: F.scaled_dot_product_attention(t.q.float(), t.q.float(), t.q.float()),
        "attention (of float32)",
    ),
    "attention with a mask": (
        lambda t: F.scaled_dot_product_attention(t.q, t.q, t.q, torch.ones(10, 10, dtype=torch.bool)),
        "attention (with a mask or a dropout)",
    ),
}
