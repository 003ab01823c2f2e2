"""The operators `torch.ops.cukiln.*`: what `torch.compile`, `torch.export` and tracers see of a call."""

from collections.abc import Callable
from typing import Any

import torch

from cukiln.torch.modes import recorded as may_be_recorded

LIBRARY: Any = torch.library.Library("cukiln", "DEF")  # type: ignore[no-untyped-call]
Implementation = Callable[..., torch.Tensor]


def define(schema: str, compute: Implementation, fake: Implementation, recorded: Implementation) -> Any:
    """An operator, and its overload. `compute`: for tensors of CPUs and GPUs, a new tensor; `fake`: of the same shape,
    strides and type for tensors without data; `recorded`: the call where gradients are asked for."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(torch.ops.cukiln, name).default

    def autograd(*arguments: Any) -> torch.Tensor:
        if may_be_recorded(argument for argument in arguments if isinstance(argument, torch.Tensor)):
            return recorded(*arguments)
        return below_autograd(overload, *arguments)

    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, compute, key)
    LIBRARY.impl(name, autograd, "Autograd")
    torch.library.register_fake(f"cukiln::{name}", fake, lib=LIBRARY)
    return overload


def below_autograd(overload: Any, *arguments: Any) -> torch.Tensor:
    """The operator without what records it for gradients; tracers see it still."""
    with torch._C._AutoDispatchBelowAutograd():
        made: torch.Tensor = overload(*arguments)
    return made
