"""`masked_activation`: one function where a mask is set, another elsewhere, and its gradient."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch

from cukiln.errors import UsageError
from cukiln.torch import activations
from cukiln.torch.dispatch import Operator, Tensors
from cukiln.torch.layouts import ALIGNED, is_packed
from cukiln.torch.library import apply, call, define, dispatched, forward
from cukiln.torch.plan import FLOATS, Plan, seen_as

Function: TypeAlias = Literal["identity", "relu", "gelu", "silu", "square"]
Polynomial: TypeAlias = Sequence[float]  # three or four coefficients, the constant first
BITS = 32  # of a word of a packed mask


@dataclass(frozen=True, slots=True)
class Options:
    where_set: str
    where_clear: str
    of_set: tuple[float, ...]  # coefficients of polynomials
    of_clear: tuple[float, ...]


def masked_activation(
    x: torch.Tensor,
    mask: torch.Tensor,
    where_set: Function | Polynomial = "relu",
    where_clear: Function | Polynomial = "identity",
) -> torch.Tensor:
    """`where_set(x)` where the mask is set, else `where_clear(x)`, computed in float32 and rounded once.

    `mask`: bool or uint8 of x's shape, or packed: int32 words, whose bit i, the lowest being 0, belongs to element
    32 · word + i. A function is named, or a polynomial of three or four coefficients, the constant first.
    """
    return call(MASKED, dispatched, _recorded, x, mask, *_named(where_set), *_named(where_clear))


def _named(function: Function | Polynomial) -> tuple[str, list[float]]:
    if isinstance(function, str):
        return function, []
    return "polynomial", [float(coefficient) for coefficient in function]


def pack(
    x: torch.Tensor,
    mask: torch.Tensor,
    where_set: str,
    of_set: Sequence[float],
    where_clear: str,
    of_clear: Sequence[float],
) -> tuple[Tensors, Options]:
    for name, coefficients in ((where_set, of_set), (where_clear, of_clear)):
        if name == "polynomial" and len(coefficients) not in (3, 4):
            raise UsageError(f"a polynomial has {len(coefficients)} coefficients; allowed: 3 or 4")
        if name != "polynomial" and name not in get_args(Function):
            raise UsageError(f"{name!r} is no function of masked_activation; allowed: {', '.join(get_args(Function))}")
    return (x, mask), Options(where_set, where_clear, tuple(of_set), tuple(of_clear))


def plan(tensors: Tensors, options: Options) -> Plan | None:
    x, mask = tensors
    bits = mask.dtype is torch.int32
    shape = (-(-x.numel() // BITS),) if bits else tuple(x.shape)
    if x.dtype not in FLOATS or tuple(mask.shape) != shape or not (bits or mask.dtype in (torch.bool, torch.uint8)):
        return None
    if any(not is_packed(tensor.shape, tensor.stride()) or tensor.data_ptr() % ALIGNED for tensor in tensors):
        return None
    problem = {
        "operator": "masked_activation",
        "shape": [x.numel()],
        "dtype": FLOATS[x.dtype],
        "mask": "bits" if bits else "bytes",
        "where_set": _node(options.where_set, options.of_set),
        "where_clear": _node(options.where_clear, options.of_clear),
    }
    flat = ((x.numel(),), (1,))
    return Plan(
        problem=problem,
        inputs=(seen_as(x, flat), None if bits else seen_as(mask, flat)),
        shape=tuple(x.shape),
        dtype=x.dtype,
        out=None if x.dim() == 1 else flat,
        scalars=(*options.of_set, *options.of_clear),
    )


def _node(name: str, coefficients: Sequence[float]) -> dict[str, Any]:
    return {"op": name, "coefficients": list(coefficients)} if coefficients else {"op": name}


# ---- PyTorch's own way

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "square": torch.square,
    **{name: activations.OWN[name] for name in ("relu", "gelu", "silu")},
}


def own(tensors: Tensors, options: Options) -> torch.Tensor:
    x, mask = tensors
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    made = torch.where(
        _unpacked(mask, x),
        _applied(options.where_set, options.of_set, exact),
        _applied(options.where_clear, options.of_clear, exact),
    )
    return made.to(x.dtype)


def _unpacked(mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The mask as bool of x's shape."""
    if mask.dtype is not torch.int32:
        return mask != 0
    places = torch.arange(BITS, dtype=torch.int32, device=mask.device)
    return (mask.unsqueeze(-1) >> places & 1).flatten()[: x.numel()].reshape(x.shape) != 0


def _applied(name: str, coefficients: Sequence[float], x: torch.Tensor) -> torch.Tensor:
    if name != "polynomial":
        return _FUNCTIONS[name](x)
    made = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        made = made * x + coefficient
    return made


def _slope(name: str, coefficients: Sequence[float], dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy times the derivative at x. Differentiable again."""
    made: torch.Tensor
    if name == "identity":
        return dy
    if name == "relu":
        made = torch.ops.aten.threshold_backward(dy, x, 0)
    elif name == "gelu":
        made = torch.ops.aten.gelu_backward(dy, x)
    elif name == "silu":
        share = x.sigmoid()  # aten::silu_backward has no gradient of its own
        made = dy * share * (1 + x * (1 - share))
    elif name == "square":
        made = 2 * x * dy
    else:
        slopes = [power * coefficient for power, coefficient in enumerate(coefficients)][1:]
        made = dy * _applied("polynomial", slopes, x)
    return made


MASKED = Operator("masked_activation", pack, plan, own)


class _MaskedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor, *rest: Any) -> torch.Tensor:
        *functions, direct = rest
        ctx.save_for_backward(x, mask)
        ctx.functions = functions
        return forward(MASKED, direct, x, mask, *functions)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, mask = ctx.saved_tensors
        where_set, of_set, where_clear, of_clear = ctx.functions
        exact = torch.promote_types(x.dtype, torch.float32)
        dy, values = gradients[0].to(exact), x.to(exact)
        of_both = _slope(where_set, of_set, dy, values), _slope(where_clear, of_clear, dy, values)
        return torch.where(_unpacked(mask, x), *of_both).to(x.dtype), None, None, None, None, None, None


_recorded = partial(apply, MASKED, _MaskedActivation)
define(
    "(Tensor x, Tensor mask, str where_set, float[] of_set, str where_clear, float[] of_clear) -> Tensor",
    MASKED,
    _recorded,
)
