"""`reduce`: a function of the elements along any axes, and its gradients."""

from collections.abc import Sequence
from functools import partial
from operator import index
from typing import Any, Literal, TypeAlias, get_args

import torch

from cukiln.errors import UsageError
from cukiln.torch.dispatch import Operator, Tensors
from cukiln.torch.layouts import ALIGNED, is_packed, packed
from cukiln.torch.library import apply, call, define, dispatched, forward
from cukiln.torch.plan import FLOATS, RINGS, Plan

Function: TypeAlias = Literal["sum", "mean", "sum_of_squares", "max", "min", "argmax", "variance", "logsumexp"]
Options: TypeAlias = tuple[tuple[int, ...], str, bool]  # axes, the function, whether reduced axes stay, of extent 1
_OF_SQUARES = ("sum_of_squares", "variance")
_OF_INTEGERS = ("sum", "max", "min", "argmax")


def reduce(x: torch.Tensor, dims: int | Sequence[int], op: Function = "sum", *, keepdim: bool = False) -> torch.Tensor:
    """The function of all elements along `dims`: sum, mean, sum_of_squares, max, min, argmax (int64; of several axes in
    row-major order), variance (divided by the number of elements), logsumexp. Floats are folded in float32."""
    if op not in get_args(Function):
        raise UsageError(f"op is {op!r}; allowed: {', '.join(get_args(Function))}")
    axes = [index(dim) for dim in (dims if isinstance(dims, Sequence) else [dims])]
    return call(REDUCE, dispatched, _recorded, x, axes, op, keepdim)


def sum_of_axes(x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """The gradient of a bias, say."""
    return reduce(x, axes, "sum")


def pack(x: torch.Tensor, dims: Sequence[int], op: str = "sum", keepdim: bool = False) -> tuple[Tensors, Options]:
    return (x,), (tuple(dims) or tuple(range(x.dim())), op, keepdim)  # none are all, as PyTorch has it


def plan(tensors: Tensors, options: Options) -> Plan | None:
    (x,), (dims, op, keepdim) = tensors, options
    dtype = {**FLOATS, **RINGS}.get(x.dtype)
    if dtype is None or (x.dtype in RINGS and op not in _OF_INTEGERS) or x.data_ptr() % ALIGNED:
        return None
    if x.dtype is torch.int64 and op == "argmax":
        return None
    if not dims or not all(-x.dim() <= dim < x.dim() for dim in dims):
        return None
    reduced = {dim % x.dim() for dim in dims}
    if len(reduced) != len(dims):
        return None
    kept = [axis for axis in range(x.dim()) if axis not in reduced]
    shape = tuple(1 if axis in reduced else x.shape[axis] for axis in range(x.dim()) if keepdim or axis in kept)
    # Axes of one index are none, whatever their stride.
    real = [axis for axis in range(x.dim()) if x.shape[axis] > 1]
    sizes, strides = tuple(x.shape[axis] for axis in real), tuple(x.stride(axis) for axis in real)
    axes = [place for place, axis in enumerate(real) if axis in reduced]
    if not axes or len(sizes) > 8 or not _apart(sizes, strides):
        return None
    problem: dict[str, Any] = {"operator": "reduce", "shape": list(sizes), "axes": axes, "fn": op, "dtype": dtype}
    problem |= {} if is_packed(sizes, strides) else {"strides": list(strides)}
    made = torch.int64 if op == "argmax" or (op == "sum" and x.dtype in RINGS) else x.dtype
    if made is not x.dtype:
        problem["out_dtype"] = "int64"
    out = tuple(size for place, size in enumerate(sizes) if place not in axes) or (1,)
    return Plan(
        problem=problem,
        inputs=(None if sizes == tuple(x.shape) else (sizes, strides),),
        shape=shape,
        dtype=made,
        out=None if out == shape else (out, packed(out)),
        attributes=(sum(2 ** (len(sizes) - 1 - axis) for axis in axes),),
    )


def _apart(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two indices are one element, as far as that shows in strides alone."""
    reach = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if stride < reach:
            return False
        reach = stride * size
    return True


def own(tensors: Tensors, options: Options) -> torch.Tensor:
    (x,), (dims, op, keepdim) = tensors, options
    axes = list(dims)
    if op == "argmax":
        return _argmax(x, axes, keepdim)
    if op == "sum_of_squares":
        return x.square().sum(axes, keepdim=keepdim)
    if op == "variance":
        return torch.var(x, axes, correction=0, keepdim=keepdim)
    functions: dict[str, Any] = {
        "sum": torch.sum,
        "mean": torch.mean,
        "max": torch.amax,
        "min": torch.amin,
        "logsumexp": torch.logsumexp,
    }
    made: torch.Tensor = functions[op](x, axes, keepdim=keepdim)
    return made


def _argmax(x: torch.Tensor, axes: Sequence[int], keepdim: bool) -> torch.Tensor:
    if len(axes) == 1:
        return torch.argmax(x, axes[0], keepdim=keepdim)
    if not axes:  # all of a tensor without axes
        return torch.argmax(x)
    reduced = sorted(axis % max(x.dim(), 1) for axis in axes)
    kept = [axis for axis in range(x.dim()) if axis not in reduced]
    made = x.permute(*kept, *reduced).flatten(len(kept)).argmax(-1)
    for axis in reduced if keepdim else []:
        made = made.unsqueeze(axis)
    return made


REDUCE = Operator("reduce", pack, plan, own)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dims: Sequence[int], op: str, keepdim: bool, direct: bool) -> torch.Tensor:
        out = forward(REDUCE, direct, x, dims, op, keepdim)
        if op == "argmax":
            ctx.mark_non_differentiable(out)
        of_result = op in ("max", "min", "logsumexp")
        ctx.save_for_backward(x if of_result or op in _OF_SQUARES else None, out if of_result else None)
        _, (ctx.dims, ctx.op, ctx.keepdim) = pack(x, dims, op, keepdim)
        ctx.shape = x.shape
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # A tensor without axes has none, though PyTorch takes 0 and -1 as theirs.
        axes = sorted(dim % len(ctx.shape) for dim in ctx.dims if ctx.shape)

        def spread(tensor: torch.Tensor) -> torch.Tensor:
            for axis in [] if ctx.keepdim else axes:
                tensor = tensor.unsqueeze(axis)
            return tensor

        if ctx.op == "argmax":
            return None, None, None, None, None
        count = 1
        for axis in axes:
            count *= ctx.shape[axis]
        dy = spread(gradients[0])
        x, out = ctx.saved_tensors
        if ctx.op in ("sum", "mean"):
            dx = (dy if ctx.op == "sum" else dy / count).expand(ctx.shape)
        elif ctx.op in _OF_SQUARES:
            middle = x - x.mean(axes, keepdim=True) if ctx.op == "variance" else x
            dx = dy * middle * (2 / max(count, 1) if ctx.op == "variance" else 2)
        else:
            dx = _of_values(ctx.op, dy, x, spread(out), axes)
        return dx, None, None, None, None


def _of_values(op: str, dy: torch.Tensor, x: torch.Tensor, out: torch.Tensor, axes: list[int]) -> torch.Tensor:
    if op == "logsumexp":
        return dy * (x - out).exp()
    equal = x == out  # equal greatest elements have equal shares, as of torch.amax
    return dy * equal / equal.sum(axes, keepdim=True)


_recorded = partial(apply, REDUCE, _Reduce)
define("(Tensor x, int[] dims, str op, bool keepdim=False) -> Tensor", REDUCE, _recorded)
