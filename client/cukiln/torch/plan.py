"""What a call of tensors needs of a kernel: the problem, and how the tensors are handed to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from cukiln.errors import DeviceError
from cukiln.kernels.load_kernel import Kernel

View: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # sizes, strides
Call: TypeAlias = Callable[..., torch.Tensor]

# What kernels compute in, by the names of problems.
FLOATS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
RINGS = {torch.int32: "int32", torch.int64: "int64"}


@dataclass(frozen=True, slots=True)
class Plan:
    """`inputs`: for each tensor of the call how the kernel sees it, None: as it is. `shape`, `strides`, `dtype`: of
    what the call returns; `out`: how the kernel sees that. `attributes`, `scalars`: numbers that no tensor shows."""

    problem: Mapping[str, Any]
    inputs: tuple[View | None, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None
    out: View | None = None
    attributes: tuple[int, ...] | None = ()
    scalars: tuple[float, ...] | None = ()


def seen_as(tensor: torch.Tensor, view: View) -> View | None:
    """None where the tensor has these sizes and strides itself; the stride of an axis of one index means nothing."""
    sizes, strides = view
    if tuple(tensor.shape) != sizes:
        return view
    same = all(n == 1 or s == t for n, s, t in zip(sizes, strides, tensor.stride(), strict=True))
    return None if same else view


def bind(plan: Plan, kernel: Kernel) -> Call:
    """The call: it takes the tensors of the plan, and returns a new one. All memory is PyTorch's, taken on the current
    stream, so that a CUDA graph may capture it."""
    run = kernel.bound(attributes=plan.attributes, scalars=plan.scalars)
    shape, strides, dtype, views, out_view = plan.shape, plan.strides, plan.dtype, plan.inputs, plan.out
    as_they_are = all(view is None for view in views)
    needed: int | None = None

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        nonlocal needed
        first = tensors[0]  # from which a new tensor takes half the time that one of nothing does
        if strides is not None:
            out = first.new_empty_strided(shape, strides, dtype=dtype)
        elif dtype is first.dtype:
            out = first.new_empty(shape)
        else:
            out = first.new_empty(shape, dtype=dtype)
        given: Any = tensors
        if not as_they_are:
            given = [
                tensor if view is None else tensor.as_strided(*view)
                for tensor, view in zip(tensors, views, strict=True)
            ]
        written = out if out_view is None else out.as_strided(*out_view)
        try:
            if needed is None:  # the record's own number is that of the record's problem
                needed = kernel.workspace_bytes(*given, written)
            if needed:
                workspace = first.new_empty(needed, dtype=torch.uint8)
                run(*given, written, workspace.data_ptr())
            else:
                run(*given, written)
        except RuntimeError as error:
            raise DeviceError(
                f"the kernel of {plan.problem['operator']} could not run: {str(error).strip().splitlines()[0]}"
            ) from error
        return out

    return call
