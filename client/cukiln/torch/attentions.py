"""`attention`: softmax(scale · q kᵀ) v of each head, forward; gradients are PyTorch's own."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from cukiln.torch.dispatch import Operator, Tensors, run
from cukiln.torch.layouts import ALIGNED, is_packed, packed
from cukiln.torch.library import define, lowered
from cukiln.torch.modes import of_own_operators, ordinary, recorded, transformed
from cukiln.torch.plan import FLOATS, Plan, View, seen_as


@dataclass(frozen=True, slots=True)
class Options:
    causal: bool
    scale: float | None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention` of (batch, heads, positions, elements).

    k and v may have fewer heads, each for as many neighbours among those of q. `causal`: a query sees the keys up to
    its own place, where the last query stands beside the last key; PyTorch's `is_causal` has the first ones side by
    side. Without a kernel for gradients, a call that is recorded for one is PyTorch's own. The result is stored as q
    is: heads behind positions where they are so there.
    """
    if torch.compiler.is_compiling():
        return _dispatched(q, k, v, causal, scale)
    tensors, options = pack(q, k, v, causal, scale)
    if not ordinary(tensors):
        return _dispatched(q, k, v, causal, scale)
    return own(tensors, options) if recorded(tensors) else run(ATTENTION, tensors, options)


def _dispatched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None) -> torch.Tensor:
    if transformed() or of_own_operators((q, k, v)):
        return own(*pack(q, k, v, causal, scale))
    return lowered(ATTENTION, q, k, v, causal, scale)


def pack(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None
) -> tuple[Tensors, Options]:
    return (q, k, v), Options(causal, None if scale is None else float(scale))


def plan(tensors: Tensors, options: Options) -> Plan | None:
    q, k, v = tensors
    if q.dtype not in (torch.float16, torch.bfloat16) or any(tensor.dtype is not q.dtype for tensor in tensors):
        return None
    if any(tensor.dim() != 4 or tensor.data_ptr() % ALIGNED for tensor in tensors):
        return None
    (batch, heads, queries, width), (_, kv_heads, keys, _) = q.shape, k.shape
    same = tuple(k.shape) == (batch, kv_heads, keys, width) and tuple(v.shape[:3]) == (batch, kv_heads, keys)
    if not same or heads % kv_heads or not (4 <= width <= 512 and 4 <= v.shape[3] <= 512):
        return None
    behind = heads_behind(q)
    views = [_view(tensor, behind) for tensor in tensors]
    if None in views:
        return None
    scale = width**-0.5 if options.scale is None else options.scale
    if not 2**-20 <= scale <= 2**20:
        return None
    problem: dict[str, Any] = {"operator": "attention", "batch": batch, "seq_q": queries, "seq_kv": keys}
    problem |= {"heads_q": heads, "heads_kv": kv_heads, "head_dim_qk": width, "head_dim_vo": v.shape[3]}
    problem |= {"dtype": FLOATS[q.dtype], "layout": "bshd" if behind else "bhsd", "causal": options.causal}
    problem["scale"] = scale
    for name, view in zip(("q", "k", "v"), views, strict=True):
        assert view is not None
        if not is_packed(*view):
            problem[f"{name}_strides"] = list(view[1][:3])
    shape = (batch, heads, queries, v.shape[3])
    sizes = (batch, queries, heads, v.shape[3]) if behind else shape
    strides = packed(sizes)
    return Plan(
        problem=problem,
        inputs=tuple(seen_as(tensor, view) for tensor, view in zip(tensors, views, strict=True) if view),
        shape=shape,
        dtype=q.dtype,
        strides=(strides[0], strides[2], strides[1], strides[3]) if behind else strides,
        out=(sizes, strides) if behind else None,
        attributes=(-1, 0 if options.causal else -1),
        scalars=(scale,),
    )


def _view(tensor: torch.Tensor, behind: bool) -> View | None:
    """The kernel's axes, heads behind positions or before them; None where a head is not contiguous."""
    if tensor.stride(3) != 1:
        return None
    seen = tensor.transpose(1, 2) if behind else tensor
    dense = packed(seen.shape)
    # The stride of an axis of one index means nothing.
    strides = tuple(d if n == 1 else s for n, s, d in zip(seen.shape, seen.stride(), dense, strict=True))
    return tuple(seen.shape), strides


def heads_behind(q: torch.Tensor) -> bool:
    """Whether a position has its heads side by side, as a projection leaves them."""
    return q.dim() == 4 and not q.is_contiguous() and q.transpose(1, 2).is_contiguous()


def own(tensors: Tensors, options: Options) -> torch.Tensor:
    q, k, v = tensors
    mask = None
    corner = options.causal and q.shape[-2] != k.shape[-2]
    if corner:
        places = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
        mask = places.tril(k.shape[-2] - q.shape[-2])
    return functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=options.causal and not corner,
        scale=options.scale,
        enable_gqa=bool(q.dim() == k.dim() == 4 and q.shape[1] != k.shape[1]),
    )


def form(made: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    return made.transpose(1, 2).contiguous().transpose(1, 2) if heads_behind(tensors[0]) else made.contiguous()


ATTENTION = Operator("attention", pack, plan, own, form)


def _recorded(*arguments: Any) -> torch.Tensor:
    tensors, options = pack(*arguments)
    return form(own(tensors, options), tensors)


define("(Tensor q, Tensor k, Tensor v, bool causal=False, float? scale=None) -> Tensor", ATTENTION, _recorded)
