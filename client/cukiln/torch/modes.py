"""When a call must go through PyTorch's dispatcher, and what autocast makes of its tensors."""

from typing import TYPE_CHECKING

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from collections.abc import Iterable

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_TRACED = (FakeTensor, FunctionalTensor)  # which take every operator
_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
_autocast, _tracing = torch._C._is_any_autocast_enabled, torch._C._get_tracing_state


def ordinary(tensors: "Iterable[torch.Tensor]") -> bool:
    """Whether nothing but the tensors themselves says what a call computes: they are no subclass, nothing traces,
    transforms or casts."""
    if _modes() or _transforms() or _autocast() or _tracing() is not None or forward_mode():
        return False
    for tensor in tensors:  # noqa: SIM110 (`all` takes twice the time)
        if type(tensor) not in _PLAIN:
            return False
    return True


def recorded(tensors: "Iterable[torch.Tensor]") -> bool:
    """Whether a gradient may be asked for of what is computed from these."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor.requires_grad:
                return True
    return False


def transformed() -> bool:
    """Inside of `torch.func`'s grad, vmap and their like, and of forward mode. Their levels have PyTorch's operators
    alone."""
    return not torch.compiler.is_compiling() and (_transforms() or forward_mode())


def of_own_operators(arguments: "Iterable[object]") -> bool:
    """Whether one is a tensor of a class that computes PyTorch's operators itself, and supports no others: a nested
    or a distributed one."""
    return any(
        isinstance(argument, torch.Tensor)
        and not isinstance(argument, _TRACED)
        and type(argument).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        for argument in arguments
    )


def forward_mode() -> bool:
    """Whether tensors may carry tangents, which no kernel computes."""
    level: int = forward_ad._current_level
    return level >= 0


def uses_tf32(operation: str) -> bool:
    """Whether PyTorch's own `matmul` or `conv` of float32 may, on GPUs. It says so in a microsecond where its settings
    are asked by their public names. What Dynamo traces does not depend on it."""
    if torch.compiler.is_dynamo_compiling():
        return False
    precision: str = torch._C._get_fp32_precision_getter("cuda", operation)
    return precision == "tf32"


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """What autocast would have an operator of its lower precision compute in."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """As autocast does: of floats, but for float64."""
    if dtype is None or not tensor.is_floating_point() or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(dtype)


def single_precision(tensor: torch.Tensor) -> torch.Tensor:
    """What autocast makes of an argument of an operator that it computes in float32, on GPUs."""
    return cast(tensor, torch.float32) if tensor.is_cuda and autocast_dtype(tensor) is not None else tensor
