"""A tensor as cuDNN takes it."""

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.operand import Operand


@dataclass(frozen=True)
class Tensor:
    """Four extents and their strides in elements."""

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(operand: Operand, order: Sequence[int]) -> "Tensor":
        """An operand of rank 4 with its dimensions in that order, whatever their order in memory."""
        extents, strides = (tuple(numbers[axis] for axis in order) for numbers in (operand.shape, operand.strides))
        return Tensor(operand.dtype, extents, strides)
