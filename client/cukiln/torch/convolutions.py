"""`conv2d` with bias, residual and activation in one kernel, and its gradients, which have kernels of their own."""

from functools import partial
from typing import Any, Literal

import torch
from torch.nn import functional

from cukiln.torch import activations
from cukiln.torch.activations import Activation
from cukiln.torch.convolution_plans import (
    CONV2D,
    DGRAD,
    WGRAD,
    Numbers,
    channels_last,
    own,
    pack,
    paddings,
    pair,
    result_shape,
)
from cukiln.torch.dispatch import Operator, run
from cukiln.torch.library import call, define, dispatched, forward, lowered
from cukiln.torch.modes import ordinary, recorded
from cukiln.torch.reductions import sum_of_axes


def conv2d(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers | Literal["same", "valid"] = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    *,
    residual: torch.Tensor | None = None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """`activation(conv2d(x, w) + bias + residual)`, as `torch.nn.functional.conv2d` convolves.

    x, w and residual are all contiguous, or all `torch.channels_last`, for a kernel to take them.
    """
    pads = paddings(padding, w, pair(dilation), pair(stride))
    if pads is None:  # more on one side than on the other
        made = functional.conv2d(x, w, bias, stride, padding, dilation, groups)  # type: ignore[arg-type]
        return activations.apply(activation, made if residual is None else made + residual)
    geometry = ([*pair(stride)], [*pads], [*pair(dilation)], groups)
    return call(CONV2D, lowered, _recorded, x, w, bias, residual, *geometry, activation)


# ---- gradients


class _Conv2d(torch.autograd.Function):
    """Of an activation whose gradient follows from its result."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        geometry: tuple[Any, ...],
        activation: str | None,
        direct: bool,
    ) -> torch.Tensor:
        out = forward(CONV2D, direct, x, w, bias, residual, *geometry, activation)
        ctx.save_for_backward(x, w, None if activation is None else out)
        ctx.geometry, ctx.activation = geometry, activation
        ctx.residual = None if residual is None else residual.shape
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w, out = ctx.saved_tensors
        of_x, of_w, of_bias, of_residual, *_ = ctx.needs_input_grad
        dz = _as(activations.gradient(ctx.activation, gradients[0], out), channels_last(x, w))
        of_convolution = dz.to(x.dtype)  # a residual of a wider type made the result one
        return (
            _gradient(DGRAD, of_convolution, w, x.shape, ctx.geometry) if of_x else None,
            _gradient(WGRAD, of_convolution, x, w.shape, ctx.geometry) if of_w else None,
            sum_of_axes(of_convolution, [0, 2, 3]) if of_bias else None,
            dz.sum_to_size(ctx.residual) if of_residual else None,
            None,
            None,
            None,
        )


class _Gradient(torch.autograd.Function):
    """Of the image or the filters: a convolution is linear in both, so gradients of these are convolutions again."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: Operator,
        dy: torch.Tensor,
        other: torch.Tensor,
        shape: tuple[int, ...],
        geometry: tuple[Any, ...],
        direct: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(dy, other)
        ctx.geometry, ctx.of_image = geometry, operator is DGRAD
        return forward(operator, direct, dy, other, shape, *geometry)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dy, other = ctx.saved_tensors
        _, of_dy, of_other, *_ = ctx.needs_input_grad
        again = _as(gradients[0], channels_last(dy, other))
        x, w = (again, other) if ctx.of_image else (other, again)
        of_operand = WGRAD if ctx.of_image else DGRAD
        return (
            None,
            _convolution(x, w, ctx.geometry) if of_dy else None,
            _gradient(of_operand, dy, again, other.shape, ctx.geometry) if of_other else None,
            None,
            None,
            None,
        )


def _as(tensor: torch.Tensor, last: bool) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def _convolution(x: torch.Tensor, w: torch.Tensor, geometry: tuple[Any, ...]) -> torch.Tensor:
    stride, padding, dilation, groups = geometry
    return conv2d(x, w, None, stride, padding, dilation, groups)


def _gradient(
    operator: Operator, dy: torch.Tensor, other: torch.Tensor, shape: tuple[int, ...], geometry: tuple[Any, ...]
) -> torch.Tensor:
    """Of the image, by dy and the filters, or of the filters, by dy and the image."""
    if not ordinary((dy, other)):
        return dispatched(operator, dy, other, list(shape), *geometry)
    if recorded((dy, other)):
        return _recorded_gradient(operator, dy, other, shape, *geometry, direct=True)
    return run(operator, *operator.pack(dy, other, shape, *geometry))


def _recorded_gradient(
    operator: Operator, dy: torch.Tensor, other: torch.Tensor, shape: Any, *geometry: Any, direct: bool = False
) -> torch.Tensor:
    made: torch.Tensor = _Gradient.apply(operator, dy, other, tuple(shape), geometry, direct)  # type: ignore[no-untyped-call]
    return made


def _spreads(residual: torch.Tensor, x: torch.Tensor, w: torch.Tensor, rest: tuple[Any, ...]) -> bool:
    """Whether the sum has more elements than the convolution, whose gradients are then sums, too."""
    _, options = pack(x, w, None, None, *rest[:4])
    made = result_shape(x.shape, w.shape, options)
    sizes = zip(reversed(residual.shape), reversed(made), strict=False)
    return residual.dim() > len(made) or any(size not in (1, there) for size, there in sizes)


def _recorded(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *rest: Any,
    direct: bool = False,
) -> torch.Tensor:
    stride, padding, dilation, groups, activation = (*rest, None)[:5]
    if x.dim() != 4 or (residual is not None and _spreads(residual, x, w, rest)):
        return own(*pack(x, w, bias, residual, stride, padding, dilation, groups, activation))
    geometry = (stride, padding, dilation, groups)
    fused = activation if activation in activations.OF_RESULT else None
    made: torch.Tensor = _Conv2d.apply(x, w, bias, residual, geometry, fused, direct)  # type: ignore[no-untyped-call]
    return made if activation == fused else activations.apply(activation, made)


define(
    "(Tensor x, Tensor w, Tensor? bias, Tensor? residual, SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation,"
    " SymInt groups, str? activation=None) -> Tensor",
    CONV2D,
    _recorded,
)
_GRADIENT = "SymInt[4] shape, SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, SymInt groups) -> Tensor"
define(f"(Tensor dy, Tensor w, {_GRADIENT}", DGRAD, partial(_recorded_gradient, DGRAD))
define(f"(Tensor dy, Tensor x, {_GRADIENT}", WGRAD, partial(_recorded_gradient, WGRAD))
