"""`softmax` along the last axis, and its gradient."""

from functools import partial
from math import prod
from typing import Any

import torch

from cukiln.torch.dispatch import Operator, Tensors
from cukiln.torch.layouts import is_aligned, is_packed
from cukiln.torch.library import apply, call, define, forward, in_single_precision
from cukiln.torch.plan import FLOATS, Plan


def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """e^x / Σ e^x along `dim`, as `torch.softmax`; sums are of float32. Kernels are for the last axis."""
    return call(SOFTMAX, in_single_precision, _recorded, x, dim)


def pack(x: torch.Tensor, dim: int) -> tuple[Tensors, tuple[int]]:
    return (x,), (dim,)


def plan(tensors: Tensors, options: tuple[int]) -> Plan | None:
    (x,), (dim,) = tensors, options
    if x.dtype not in FLOATS or x.dim() == 0 or dim not in (-1, x.dim() - 1) or not is_packed(x.shape, x.stride()):
        return None
    if not is_aligned(x.data_ptr(), (x.shape[-1],), x.element_size()):
        return None
    problem = {
        "operator": "softmax",
        "shape": [prod(x.shape[:-1]), x.shape[-1]],
        "dtype": FLOATS[x.dtype],
    }
    return Plan(problem, inputs=(None,), shape=tuple(x.shape), dtype=x.dtype)


def own(tensors: Tensors, options: tuple[int]) -> torch.Tensor:
    return torch.softmax(tensors[0], options[0])


SOFTMAX = Operator("softmax", pack, plan, own)


class _Softmax(torch.autograd.Function):
    """`direct`: not by way of PyTorch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, direct: bool) -> torch.Tensor:
        out = forward(SOFTMAX, direct, x, dim)
        ctx.save_for_backward(out)
        ctx.dim, ctx.dtype = dim, x.dtype
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (out,) = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradients[0], out, ctx.dim, ctx.dtype), None, None


_recorded = partial(apply, SOFTMAX, _Softmax)
define("(Tensor x, int dim) -> Tensor", SOFTMAX, _recorded)
