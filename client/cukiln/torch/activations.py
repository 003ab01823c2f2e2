"""The activations that a kernel's epilogue has: as nodes of problems, as PyTorch's operators, their gradients."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch.nn import functional

from cukiln.errors import UsageError

Activation: TypeAlias = Literal["relu", "gelu", "silu", "tanh", "sigmoid", "leaky_relu"]
SLOPE = 0.01  # of leaky_relu: PyTorch's default, and that of problems
OWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": lambda x: functional.leaky_relu(x, SLOPE),
}
# Their gradients follow from their results; those of the others need what they were applied to.
OF_RESULT = ("relu", "tanh", "sigmoid", "leaky_relu")


def check(activation: str | None) -> None:
    """Raises `UsageError` for one that is not there."""
    if activation is not None and activation not in OWN:
        raise UsageError(f"activation is {activation!r}; allowed: None, {', '.join(get_args(Activation))}")


def apply(activation: str | None, x: torch.Tensor) -> torch.Tensor:
    check(activation)
    return x if activation is None else OWN[activation](x)


def gradient(activation: str | None, dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of what the activation was applied to, by its result `y`. Differentiable again."""
    aten = torch.ops.aten
    made: torch.Tensor
    if activation is None:
        return dy
    if activation == "relu":
        made = aten.threshold_backward(dy, y, 0)
    elif activation == "tanh":
        made = aten.tanh_backward(dy, y)
    elif activation == "sigmoid":
        made = aten.sigmoid_backward(dy, y)
    else:
        made = aten.leaky_relu_backward(dy, y, SLOPE, True)
    return made


def nodes(bias: dict[str, Any] | None, residual: bool, activation: str | None) -> list[dict[str, Any]]:
    """The epilogue `activation(x + bias + residual)` of a problem."""
    check(activation)
    epilogue = [] if bias is None else [bias]
    if residual:
        epilogue.append({"op": "residual"})
    if activation is not None:
        epilogue.append({"op": activation})
    return epilogue


def scalars(activation: str | None) -> tuple[float, ...]:
    return (SLOPE,) if activation == "leaky_relu" else ()
