"""What the vendor's libraries need of a GPU, and how their operands come into its memory."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from codegen.dtypes import dtype
from codegen.operator import Operand
from workers.gpu.interface import PEER_ERRORS, DeviceArray, GpuError, GpuFault, LaunchRefused, VendorCall
from workers.gpu.tensors import stored_as
from workers.vendor.cublaslt import LibraryMissing
from workers.vendor.epilogue import NAME, After

HostArray = npt.NDArray[Any]
Beat = Callable[[str], None]  # gets what takes long: a process that measures must not be silent for a minute


class Bench(Protocol):
    """What is needed of a GPU: `arrays` is cupy, `stream` the handle of the stream that everything is queued on."""

    arrays: Any
    stream: int

    def address(self, array: DeviceArray) -> int: ...

    def synchronize(self) -> None: ...

    def faults(self) -> AbstractContextManager[None]: ...

    def kernel(self, text: str, name: str) -> Callable[..., None]:
        """A kernel from CUDA C++, called with grid, block and arguments (NumPy scalars)."""


@dataclass(frozen=True)
class OperandSet:
    """A set of operands: flat arrays by name. `product`: what the library writes, `out` or a buffer of its own."""

    arrays: Mapping[str, DeviceArray]
    product: DeviceArray
    out: DeviceArray

    def copies(self, count: int) -> "tuple[OperandSet, ...]":
        """`count` sets: this one and copies of it."""
        return (self, *(self._copy() for _ in range(count - 1)))

    def _copy(self) -> "OperandSet":
        product = self.product.copy()
        out = product if self.out is self.product else self.out.copy()
        return OperandSet({name: array.copy() for name, array in self.arrays.items()}, product, out)


def described(
    library: str, version: str, *algorithm: str, fused: bool = True, workspace_bytes: int = 0
) -> dict[str, Any]:
    """What `VendorCall.describe` answers; `algorithm`: sentences, of which some may be empty."""
    named = {"library": library, "version": version, "algorithm": "; ".join(filter(None, algorithm))}
    return {**named, "fused": fused, "workspace_bytes": workspace_bytes}


class FailedLibrary:
    """In the place of a library that raised what is no refusal: its launches are refused, with the error's name."""

    def __init__(self, library: str, error: Exception) -> None:
        self._library, self._message = library, f"{library} failed: {type(error).__name__}: {error}"

    def describe(self) -> dict[str, Any]:
        return described(self._library, "", self._message, fused=False)

    def run(self, number: int) -> None:
        raise LaunchRefused(self._message)

    def result(self, number: int) -> DeviceArray:
        raise LaunchRefused(self._message)


def or_its_error(
    bench: Bench, library: str, offer: Callable[[], Sequence[VendorCall]]
) -> Sequence[VendorCall | FailedLibrary]:
    """What one of several libraries offers. Its errors are its own: the others are compared with all the same."""
    try:
        return offer()
    except PEER_ERRORS as error:
        bench.synchronize()  # raises GpuFault where that was a fault
        return [FailedLibrary(library, error)]


@contextmanager
def gpu_errors(sets: int, prefix: str = "", *own: type[Exception]) -> Iterator[None]:
    """What keeps a library from a problem becomes GpuError: it is missing, the GPU has no room for so many sets of its
    operands, or errors of its `own`, with `prefix` before them."""
    try:
        yield
    except LibraryMissing as error:
        raise GpuError(str(error)) from error
    except MemoryError as error:
        raise GpuError(f"no memory on the GPU for {sets} sets of the vendor's operands: {error}") from error
    except own as error:
        raise GpuError(f"{prefix}: {error}") from error


def kernel_after(bench: Bench, work: After, names: Sequence[str]) -> Callable[[OperandSet], None]:
    """Compiles the kernel after the library's; what is returned queues it. `names`: the operands that it reads."""
    kernel = bench.kernel(work.device_text(), NAME)
    rows, columns, batch, *steps = work.extents()
    fixed = (*map(np.int32, (rows, columns, batch)), *map(np.int64, steps))
    values = tuple(map(np.float32, work.scalars()))

    def queue(operands: OperandSet) -> None:
        tensors = (bench.address(operands.arrays[name]) for name in names)
        pointers = (bench.address(operands.product), bench.address(operands.out))
        kernel(work.grid, work.block, (*map(np.uint64, pointers), *fixed, *map(np.uint64, tensors), *values))

    return queue


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
