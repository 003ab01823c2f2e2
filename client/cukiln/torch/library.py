"""The operators `torch.ops.cukiln.*`: what `torch.compile`, `torch.export` and tracers see of a call."""

from collections.abc import Callable
from typing import Any

import torch

from cukiln.torch.dispatch import Operator, run
from cukiln.torch.modes import (
    autocast_dtype,
    cast,
    forward_mode,
    of_own_operators,
    ordinary,
    single_precision,
    transformed,
)
from cukiln.torch.modes import recorded as may_be_recorded

DEFINED: dict[str, Operator] = {}  # by name
LIBRARY: Any = torch.library.Library("cukiln", "DEF")  # type: ignore[no-untyped-call]


def define(schema: str, operator: Operator, recorded: Callable[..., torch.Tensor]) -> None:
    """The operator for CPUs, GPUs and tensors without data. `recorded`: the call where gradients are asked for."""
    DEFINED[operator.name] = operator
    LIBRARY.define(f"{operator.name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))

    def compute(*arguments: Any) -> torch.Tensor:
        tensors, options = operator.pack(*arguments)
        return operator.form(run(operator, tensors, options), tensors)

    def own(*arguments: Any) -> torch.Tensor:
        tensors, options = operator.pack(*arguments)
        return operator.form(operator.own(tensors, options), tensors)

    def autograd(*arguments: Any) -> torch.Tensor:
        if forward_mode():
            return own(*arguments)
        if may_be_recorded(argument for argument in arguments if isinstance(argument, torch.Tensor)):
            return recorded(*arguments)
        return _below_autograd(operator, *arguments)

    for key in ("CPU", "CUDA"):
        LIBRARY.impl(operator.name, compute, key)
    LIBRARY.impl(operator.name, autograd, "Autograd")
    torch.library.register_fake(f"cukiln::{operator.name}", own, lib=LIBRARY)


def call(
    operator: Operator,
    by_dispatcher: Callable[..., torch.Tensor],
    recorded: Callable[..., torch.Tensor],
    *arguments: Any,
) -> torch.Tensor:
    """By way of PyTorch's dispatcher where something traces or casts, `recorded` where gradients are asked for, else at
    once."""
    if torch.compiler.is_compiling():
        own = of_own_operators(arguments)
        return operator.own(*operator.pack(*arguments)) if own else by_dispatcher(operator, *arguments)
    tensors, options = operator.pack(*arguments)
    if not ordinary(tensors):
        own = transformed() or of_own_operators(tensors)
        return operator.own(tensors, options) if own else by_dispatcher(operator, *arguments)
    return recorded(*arguments, direct=True) if may_be_recorded(tensors) else run(operator, tensors, options)


def apply(
    operator: Operator, function: type[torch.autograd.Function], *arguments: Any, direct: bool = False
) -> torch.Tensor:
    """The call as one that is recorded for gradients. PyTorch's dispatcher leaves out what a default stands for."""
    if not direct:
        left_out = getattr(torch.ops.cukiln, operator.name).default._schema.arguments[len(arguments) :]
        arguments = (*arguments, *[argument.default_value for argument in left_out])
    made: torch.Tensor = function.apply(*arguments, direct)  # type: ignore[no-untyped-call]
    return made


def forward(operator: Operator, direct: bool, *arguments: Any) -> torch.Tensor:
    """The call inside of what records it for gradients. `direct`: not by way of PyTorch's dispatcher."""
    return run(operator, *operator.pack(*arguments)) if direct else _below_autograd(operator, *arguments)


def dispatched(operator: Operator, *arguments: Any) -> torch.Tensor:
    """The call by way of PyTorch's dispatcher."""
    made: torch.Tensor = getattr(torch.ops.cukiln, operator.name).default(*arguments)
    return made


def lowered(operator: Operator, first: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`dispatched`, with what autocast makes of the tensors of an operator of its lower precision."""
    lower = autocast_dtype(first)
    made = [cast(value, lower) if isinstance(value, torch.Tensor) else value for value in (first, *rest)]
    return dispatched(operator, *made)


def in_single_precision(operator: Operator, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`dispatched`, with what autocast makes of an argument of an operator that it computes in float32."""
    return dispatched(operator, single_precision(x), *rest)


def _below_autograd(operator: Operator, *arguments: Any) -> torch.Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return dispatched(operator, *arguments)
