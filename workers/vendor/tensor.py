"""A tensor as cuDNN takes it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    """Four extents and their strides in elements."""

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
