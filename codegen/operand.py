"""A tensor of a call: name, element type, shape and strides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from codegen.dtypes import dtype as type_of


def packed_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a C-contiguous array."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, extent))
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Operand:
    """A tensor of a call, in launch ABI order. Strides are in elements; a stride of 0 repeats. `align`: elements that
    its address is a multiple of, where the operator says so; 0: as many as all its rows start at."""

    name: str
    dtype: str
    role: Literal["in", "out"]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    align: int = 0

    @property
    def elements(self) -> int:
        """How many elements lie between the first and the last one, both included; 0 where there is none."""
        if 0 in self.shape:
            return 0
        return 1 + sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True))

    @property
    def bytes(self) -> int:
        """Of all its elements, and of what lies between them."""
        return self.elements * type_of(self.dtype).bytes

    @property
    def contiguous(self) -> bool:
        """Whether the strides are those of a C-contiguous array of this shape."""
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent > 1 and stride != expected:
                return False
            expected *= extent
        return True
