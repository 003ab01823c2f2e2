"""The problems of convolutions and of their gradients, as they follow from tensors; PyTorch's own way."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from cukiln.torch import activations
from cukiln.torch.dispatch import Operator, Tensors, as_on_gpu
from cukiln.torch.layouts import ALIGNED, is_packed, packed
from cukiln.torch.modes import uses_tf32
from cukiln.torch.plan import FLOATS, Plan, View

Pair: TypeAlias = tuple[int, int]
Numbers: TypeAlias = int | Sequence[int]


@dataclass(frozen=True, slots=True)
class Geometry:
    """What no tensor of a convolution shows."""

    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    @property
    def arguments(self) -> tuple[list[int], list[int], list[int], int]:
        return list(self.stride), list(self.padding), list(self.dilation), self.groups


@dataclass(frozen=True, slots=True)
class Options:
    geometry: Geometry
    bias: bool = False
    residual: bool = False
    activation: str | None = None
    tf32: bool = False
    # Of gradients: the shape of what is computed.
    shape: tuple[int, ...] = ()


def pair(numbers: Numbers) -> Pair:
    if isinstance(numbers, int):
        return numbers, numbers
    if len(numbers) == 1:
        return numbers[0], numbers[0]
    first, second = numbers
    return first, second


def paddings(padding: Numbers | str, w: torch.Tensor, dilation: Pair, stride: Pair) -> Pair | None:
    """None where PyTorch's own has to say what it makes of them."""
    if padding == "valid":
        return 0, 0
    if padding == "same" and w.dim() == 4 and stride == (1, 1):
        both = [spread * (size - 1) for size, spread in zip(w.shape[2:], dilation, strict=True)]
        return None if both[0] % 2 or both[1] % 2 else (both[0] // 2, both[1] // 2)
    return None if isinstance(padding, str) else pair(padding)


def _tf32(x: torch.Tensor) -> bool:
    return x.dtype is torch.float32 and as_on_gpu(x) and uses_tf32("conv")


def pack(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    activation: str | None = None,
) -> tuple[Tensors, Options]:
    geometry = Geometry(pair(stride), pair(padding), pair(dilation), groups)
    options = Options(geometry, bias is not None, residual is not None, activation, _tf32(x))
    return tuple([tensor for tensor in (x, w, bias, residual) if tensor is not None]), options


def pack_gradient(
    first: torch.Tensor,
    second: torch.Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[Tensors, Options]:
    """Of dy and w, or of dy and x, with the shape of x, or of w."""
    geometry = Geometry(pair(stride), pair(padding), pair(dilation), groups)
    return (first, second), Options(geometry, tf32=_tf32(first), shape=tuple(shape))


# ---- the problems


def channels_last(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one of two operands is stored so, and not in the other way too."""
    return any(
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
        for tensor in (one, other)
    )


def _view(shape: Sequence[int], last: bool) -> View:
    """How a kernel sees a packed tensor of PyTorch's axes n, c, h, w."""
    n, c, h, w = shape
    sizes = (n, h, w, c) if last else (n, c, h, w)
    return sizes, packed(sizes)


def _strides(shape: tuple[int, ...], last: bool) -> tuple[int, ...]:
    """Of PyTorch's axes."""
    of_memory = packed(_view(shape, last)[0])
    return (of_memory[0], of_memory[3], of_memory[1], of_memory[2]) if last else of_memory


def _stored(tensor: torch.Tensor, last: bool) -> bool:
    in_memory = tensor.permute(0, 2, 3, 1) if last else tensor
    return is_packed(in_memory.shape, in_memory.stride()) and tensor.data_ptr() % ALIGNED == 0


def _problem(
    kind: str, x: Sequence[int], w: Sequence[int], options: Options, dtype: torch.dtype
) -> dict[str, Any] | None:
    """None where the geometry makes no convolution, which PyTorch's own operator says then."""
    n, c, height, width = x
    k, per_group, r, s = w
    of = options.geometry
    groups = of.groups
    if groups < 1 or per_group * groups != c or k % groups or min(*of.stride, *of.dilation) < 1 or min(of.padding) < 0:
        return None
    dilation = _dilation(options, w)
    if any(
        size + 2 * pad < spread * (taps - 1) + 1
        for size, pad, spread, taps in zip((height, width), of.padding, dilation, (r, s), strict=True)
    ):
        return None
    problem: dict[str, Any] = {"operator": kind, "n": n, "h": height, "w": width, "c": c, "k": k, "r": r, "s": s}
    problem |= {"groups": groups, "stride": list(of.stride), "dilation": list(dilation)}
    problem |= {"padding": [[pad, pad] for pad in of.padding], "dtype": FLOATS[dtype]}
    return problem | ({"allow_tf32": True} if options.tf32 else {})


def _dilation(options: Options, w: Sequence[int]) -> Pair:
    """Of a filter with one element it means nothing."""
    first, second = (1 if taps == 1 else spread for taps, spread in zip(w[2:], options.geometry.dilation, strict=True))
    return first, second


def _attributes(options: Options, w: Sequence[int]) -> tuple[int, ...]:
    (top, left), of = options.geometry.padding, options.geometry
    return (*of.stride, top, top, left, left, *_dilation(options, w))


def result_shape(x: Sequence[int], w: Sequence[int], options: Options) -> tuple[int, ...]:
    of = options.geometry
    rows, columns = (
        (size + 2 * pad - spread * (taps - 1) - 1) // step + 1
        for size, pad, spread, taps, step in zip(x[2:], of.padding, of.dilation, w[2:], of.stride, strict=True)
    )
    return x[0], w[0], rows, columns


def plan(tensors: Tensors, options: Options) -> Plan | None:
    x, w, *rest = tensors
    if x.dtype not in FLOATS or any(tensor.dtype is not x.dtype for tensor in tensors) or x.dim() != 4 or w.dim() != 4:
        return None
    last = channels_last(x, w)
    problem = _problem("conv2d", x.shape, w.shape, options, x.dtype)
    if problem is None or not _stored(x, last) or not _stored(w, last):
        return None
    shape = result_shape(x.shape, w.shape, options)
    views: list[View | None] = [_view(x.shape, last), _view(w.shape, last)]
    for tensor, vector in zip(rest, [True] * options.bias + [False] * options.residual, strict=True):
        if tuple(tensor.shape) != ((shape[1],) if vector else shape):
            return None
        stored = is_packed(tensor.shape, tensor.stride()) if vector else _stored(tensor, last)
        if not stored or tensor.data_ptr() % ALIGNED:
            return None
        views.append(None if vector else _view(shape, last))
    bias = {"op": "bias"} if options.bias else None
    if epilogue := activations.nodes(bias, options.residual, options.activation):
        problem["epilogue"] = epilogue
    return Plan(
        problem={**problem, "layout": "nhwc" if last else "nchw"},
        inputs=tuple(views) if last else (None,) * len(views),
        shape=shape,
        dtype=x.dtype,
        strides=_strides(shape, last),
        out=_view(shape, last) if last else None,
        attributes=_attributes(options, w.shape),
        scalars=activations.scalars(options.activation),
    )


def _plan_gradient(kind: str, tensors: Tensors, options: Options) -> Plan | None:
    dy, other = tensors
    x, w = (options.shape, other.shape) if kind == "conv2d_dgrad" else (other.shape, options.shape)
    if dy.dtype not in FLOATS or other.dtype is not dy.dtype or not dy.dim() == len(x) == len(w) == 4:
        return None
    problem = _problem(kind, x, w, options, dy.dtype)
    last = channels_last(dy, other)
    if problem is None or tuple(dy.shape) != result_shape(x, w, options):
        return None
    if not _stored(dy, last) or not _stored(other, last):
        return None
    return Plan(
        problem={**problem, "layout": "nhwc" if last else "nchw"},
        inputs=(_view(dy.shape, last), _view(other.shape, last)) if last else (None, None),
        shape=options.shape,
        dtype=dy.dtype,
        strides=_strides(options.shape, last),
        out=_view(options.shape, last) if last else None,
        attributes=_attributes(options, w),
    )


# ---- PyTorch's own way


def own(tensors: Tensors, options: Options) -> torch.Tensor:
    x, w, *rest = tensors
    bias = rest.pop(0) if options.bias else None
    made = functional.conv2d(x, w, bias, *options.geometry.arguments)
    return activations.apply(options.activation, made + rest[0] if options.residual else made)


def own_dgrad(tensors: Tensors, options: Options) -> torch.Tensor:
    dy, w = tensors
    return _backward(dy, dy.new_empty(1).expand(options.shape), w, options, 0)


def own_wgrad(tensors: Tensors, options: Options) -> torch.Tensor:
    dy, x = tensors
    return _backward(dy, x, dy.new_empty(1).expand(options.shape), options, 1)


def _backward(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, options: Options, which: int) -> torch.Tensor:
    stride, padding, dilation, groups = options.geometry.arguments
    gradients = torch.ops.aten.convolution_backward(
        dy, x, w, None, stride, padding, dilation, False, [0, 0], groups, [which == 0, which == 1, False]
    )
    made: torch.Tensor = gradients[which]
    return made


def form(made: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    if made.dim() == 4 and channels_last(*tensors[:2]):
        return made.contiguous(memory_format=torch.channels_last)
    return made.contiguous()


CONV2D = Operator("conv2d", pack, plan, own, form)
DGRAD = Operator("conv2d_dgrad", pack_gradient, partial(_plan_gradient, "conv2d_dgrad"), own_dgrad, form)
WGRAD = Operator("conv2d_wgrad", pack_gradient, partial(_plan_gradient, "conv2d_wgrad"), own_wgrad, form)
