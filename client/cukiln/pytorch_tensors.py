"""PyTorch's tensors that a library cannot take as they are: without memory, or with other values than those in it."""

import sys
from collections.abc import Iterable
from typing import Any


def check_values(tensors: Iterable[Any]) -> None:
    """Raises `ValueError` for one that is negated whenever PyTorch reads or writes it, as the imaginary part of a
    conjugated tensor is: a library reads and writes memory. (A conjugated one is complex, which no kernel takes.)"""
    for place, tensor in enumerate(tensors):
        if getattr(tensor, "is_neg", None) is not None and tensor.is_neg():
            raise ValueError(
                f"tensor {place} of the call is a negated view: its memory holds the values with the other sign "
                "(is_neg() is true); pass tensor.resolve_neg(), and as an output a tensor that is no such view"
            )


def have_no_memory(tensors: Iterable[Any]) -> bool:
    """Whether some have shapes and dtypes alone."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    return any(isinstance(tensor, FakeTensor) or getattr(tensor, "is_meta", False) for tensor in tensors)
