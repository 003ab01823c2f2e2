"""`layer_norm` and `rms_norm`, and their gradients."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch.nn import functional

from cukiln.torch.dispatch import Operator, Tensors
from cukiln.torch.layouts import is_aligned, is_packed
from cukiln.torch.library import apply, call, define, dispatched, forward, in_single_precision
from cukiln.torch.plan import FLOATS, Plan

# The axes of a row, whether there is a weight, whether there is a bias, epsilon.
Options = tuple[tuple[int, ...], bool, bool, float | None]


def layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """As `torch.nn.functional.layer_norm`; sums are of float32."""
    return call(LAYER_NORM, in_single_precision, _layer_norm, x, normalized_shape, weight, bias, eps)


def rms_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """As `torch.nn.functional.rms_norm`; sums are of float32."""
    return call(RMS_NORM, dispatched, _rms_norm, x, normalized_shape, weight, eps)


def pack_layer_norm(
    x: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensors, Options]:
    options = (tuple(normalized_shape), weight is not None, bias is not None, float(eps))
    return tuple([tensor for tensor in (x, weight, bias) if tensor is not None]), options


def pack_rms_norm(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> tuple[Tensors, Options]:
    options = (tuple(normalized_shape), weight is not None, False, None if eps is None else float(eps))
    return (x,) if weight is None else (x, weight), options


def plan(operator: str, tensors: Tensors, options: Options) -> Plan | None:
    x, *vectors = tensors
    row, scale, shift, epsilon = options
    columns = prod(row)
    if x.dtype not in FLOATS or not row or tuple(x.shape[x.dim() - len(row) :]) != row:
        return None
    for tensor in tensors:
        packed = tensor.dtype is x.dtype and is_packed(tensor.shape, tensor.stride())
        if not packed or not is_aligned(tensor.data_ptr(), (columns,), tensor.element_size()):
            return None
    if any(tuple(vector.shape) != row for vector in vectors):
        return None
    epsilon = _epsilon(x, epsilon)
    rows = x.numel() // columns
    problem = {
        "operator": operator,
        "shape": [rows, columns],
        "dtype": FLOATS[x.dtype],
        "scale": scale,
        "shift": shift,
        "epsilon": epsilon,
    }
    view = None if len(row) == 1 else ((rows, columns), (columns, 1))
    return Plan(
        problem=problem,
        inputs=(view, *[None if view is None else ((columns,), (1,)) for _ in vectors]),
        shape=tuple(x.shape),
        dtype=x.dtype,
        out=view,
        scalars=(epsilon,),
    )


def _epsilon(x: torch.Tensor, given: float | None) -> float:
    """PyTorch's default is that of the type that it computes in: for fp16 and bf16 float32's."""
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if given is None else given


def own_layer_norm(tensors: Tensors, options: Options) -> torch.Tensor:
    row, scale, shift, epsilon = options
    x, *rest = tensors
    weight = rest.pop(0) if scale else None
    assert epsilon is not None
    return functional.layer_norm(x, row, weight, rest[0] if shift else None, epsilon)


def own_rms_norm(tensors: Tensors, options: Options) -> torch.Tensor:
    row, scale, _, epsilon = options
    return functional.rms_norm(tensors[0], row, tensors[1] if scale else None, epsilon)


LAYER_NORM = Operator("layer_norm", pack_layer_norm, partial(plan, "layer_norm"), own_layer_norm)
RMS_NORM = Operator("rms_norm", pack_rms_norm, partial(plan, "rms_norm"), own_rms_norm)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        direct: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.row, ctx.eps = list(normalized_shape), eps
        return forward(LAYER_NORM, direct, x, normalized_shape, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        of_x, _, of_weight, of_bias, _, _ = ctx.needs_input_grad
        # Means and deviations are computed again, as PyTorch's own gradient takes them on this device.
        _, mean, deviation = torch.ops.aten.native_layer_norm(x, ctx.row, weight, bias, ctx.eps)
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            gradients[0], x, ctx.row, mean, deviation, weight, bias, [of_x, of_weight, of_bias]
        )
        return dx, None, dweight, dbias, None, None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        normalized_shape: Sequence[int],
        weight: torch.Tensor | None,
        eps: float | None,
        direct: bool,
    ) -> torch.Tensor:
        of_weight = None if weight is None else (weight.shape, weight.dtype)
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.axes, ctx.eps, ctx.of_weight = len(normalized_shape), eps, of_weight
        return forward(RMS_NORM, direct, x, normalized_shape, weight, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, _, of_weight, _, _ = ctx.needs_input_grad
        axes = tuple(range(-ctx.axes, 0))
        exact = torch.promote_types(x.dtype, torch.float32)
        values, dy = x.to(exact), gradients[0].to(exact)
        epsilon = _epsilon(x, ctx.eps)
        factor = torch.rsqrt(values.square().mean(axes, keepdim=True) + epsilon)
        normal = values * factor
        dx = dweight = None
        if of_x:
            scaled = dy if weight is None else dy * weight.to(exact)
            dx = (factor * (scaled - normal * (scaled * normal).mean(axes, keepdim=True))).to(x.dtype)
        if of_weight:
            shape, dtype = ctx.of_weight
            dweight = (dy * normal).sum_to_size(shape).to(dtype)
        return dx, None, dweight, None, None


_layer_norm = partial(apply, LAYER_NORM, _LayerNorm)
_rms_norm = partial(apply, RMS_NORM, _RmsNorm)
define(
    "(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, Tensor? bias=None, float eps=1e-05) -> Tensor",
    LAYER_NORM,
    _layer_norm,
)
define("(Tensor x, SymInt[] normalized_shape, Tensor? weight=None, float? eps=None) -> Tensor", RMS_NORM, _rms_norm)
