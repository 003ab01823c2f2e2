"""What the vendor's libraries need of a GPU, and how their operands come into its memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from codegen.dtypes import dtype
from codegen.operator import Operand
from workers.gpu.interface import DeviceArray, GpuFault, LaunchRefused, VendorCall
from workers.gpu.tensors import stored_as

HostArray = npt.NDArray[Any]


class Bench(Protocol):
    """What is needed of a GPU: `arrays` is cupy, `stream` the handle of the stream that everything is queued on."""

    arrays: Any
    stream: int

    def address(self, array: DeviceArray) -> int: ...

    def synchronize(self) -> None: ...

    def faults(self) -> AbstractContextManager[None]: ...

    def kernel(self, text: str, name: str) -> Callable[..., None]:
        """A kernel from CUDA C++, called with grid, block and arguments (NumPy scalars)."""


def laid_out(operand: Operand, values: HostArray) -> HostArray:
    """The operand's memory with those values; all bits are set in the gaps between its rows."""
    element = dtype(operand.dtype)
    flat = np.empty(operand.elements, element.numpy)
    flat.view(np.uint8)[...] = 0xFF
    strides = [stride * element.bytes for stride in operand.strides]
    as_strided(flat, operand.shape, strides)[...] = values.astype(element.numpy, copy=False)
    return flat.view(stored_as(operand.dtype))


def poisoned(bench: Bench, elements: int, element: np.dtype[Any]) -> DeviceArray:
    """All bits set: NaN, as floating point."""
    return bench.arrays.full(elements * element.itemsize, 0xFF, np.uint8).view(element)


def runs(bench: Bench, call: VendorCall) -> bool:
    """Whether the algorithm can be launched; after it, nothing is loaded or compiled any more."""
    try:
        call.run(0)
    except GpuFault:
        raise
    except LaunchRefused:
        bench.synchronize()  # raises GpuFault where the refusal was a fault
        return False
    bench.synchronize()
    return True
