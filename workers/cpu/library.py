"""A library of kernels built for the CPU, through its C entry points. Used only in the process that may die of it."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from codegen.dtypes import dtype
from codegen.operand import Operand
from codegen.plan.verification_plan import Order
from codegen.run_once import LastBlocks

Status = Literal["ok", "runtime_error", "run_timeout"]
STATUSES: tuple[Status, ...] = ("ok", "runtime_error", "run_timeout")
ORDERS: tuple[Order, ...] = ("ascending", "descending", "seeded")  # as harness.h numbers them
WIDEST_ACCESS = 16  # bytes that one thread moves with one instruction
MOST_LAUNCHES = 16  # of a call, as max_launches of harness.h
POISON = 0xFF  # all bits set: NaN in every float type, -1 in every signed integer type


class Call(ctypes.Structure):
    """`cukiln::cpu::Call` of harness.h."""

    _fields_ = (
        ("pointers", ctypes.POINTER(ctypes.c_void_p)),
        ("integers", ctypes.POINTER(ctypes.c_int64)),
        ("launch", ctypes.POINTER(ctypes.c_int32)),
        ("scalars", ctypes.POINTER(ctypes.c_double)),
        ("workspace", ctypes.c_void_p),
        ("order", ctypes.c_int32),
        ("exact", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("cpu_seconds", ctypes.c_double),
        ("watch", ctypes.c_int32),
        ("last_blocks", ctypes.POINTER(ctypes.c_uint64)),
    )


class _Site(ctypes.Structure):
    """`cukiln::cpu::SiteReport` of harness.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("access", ctypes.c_char_p),
        ("line", ctypes.c_int32),
        ("bytes", ctypes.c_int32),
        ("warp_accesses", ctypes.c_uint64),
        ("wavefronts", ctypes.c_uint64),
        ("ideal", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class SharedAccess:
    """One place of the source that accesses shared memory. `bytes`: of one lane. `wavefronts` is how often shared
    memory was busy with its `warp_accesses`, `ideal` how often it would have been without bank conflicts."""

    site: str  # file:line
    kind: Literal["read", "write", "cp_async", "ldmatrix"]
    bytes: int
    warp_accesses: int
    wavefronts: int
    ideal: int


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `tainted`: kernel code faulted or wrote where it must not, so this process may be damaged.
    `shared_memory`: of a race-checked run, what it counted up to its end."""

    status: Status
    message: str
    tainted: bool
    shared_memory: tuple[SharedAccess, ...] = ()


class Tensor:
    """An operand in guarded memory. `view` has the operand's shape and strides; gaps between its rows are poison.

    `sparse`: of memory that is too large to touch, the last elements of each axis, in that shape, are all that is
    filled, poisoned and looked at; `view` is of them."""

    def __init__(self, operand: Operand, memory: NDArray[np.uint8], *, sparse: tuple[int, ...] | None = None) -> None:
        self.operand = operand
        self.address = memory.ctypes.data
        self._memory, self._sparse = memory, sparse is not None
        self._flat: NDArray[Any] = memory.view(dtype(operand.dtype).numpy)
        size = self._flat.itemsize
        whole = as_strided(self._flat, operand.shape, tuple(stride * size for stride in operand.strides))
        self.view = whole[tuple(slice(-extent, None) for extent in sparse)] if sparse else whole

    @cached_property
    def _gaps(self) -> NDArray[np.bool_] | None:
        """The elements between rows; null where none."""
        covered = np.zeros(self._flat.shape, np.bool_)
        as_strided(covered, self.operand.shape, self.operand.strides)[...] = True
        return None if covered.all() else ~covered

    def poison(self) -> None:
        if self._sparse:
            unsigned = np.dtype(f"u{self.view.itemsize}")
            self.view.view(unsigned)[...] = np.iinfo(unsigned).max
        else:
            self._memory[...] = POISON

    def fill(self, values: NDArray[Any]) -> None:
        self.poison()
        self.view[...] = values

    def broken_gap(self) -> int | None:
        """The first element between rows that no longer holds the poison; null where none."""
        if self._sparse or self._gaps is None:
            return None
        bytes_of_elements = self._memory.reshape(-1, self._flat.itemsize)
        changed = self._gaps & (bytes_of_elements != POISON).any(axis=1)
        return int(np.argmax(changed)) if changed.any() else None


def alignment_of(operand: Operand) -> int:
    """Bytes that the operand's address is a multiple of: what its operator asks for, else as wide as all its rows start
    anyway, and no better. cudaMalloc aligns to 256 bytes, but a framework's view into a tensor starts anywhere that its
    rows do."""
    if operand.align:
        return operand.align * dtype(operand.dtype).bytes
    distances = [operand.shape[-1] if operand.shape else 1]
    distances += [stride for extent, stride in zip(operand.shape[:-1], operand.strides[:-1], strict=True) if extent > 1]
    size = dtype(operand.dtype).bytes
    return math.gcd(WIDEST_ACCESS, *(distance * size for distance in distances))


def _numbers_of(last: Sequence[LastBlocks]) -> Any:
    of_each = [
        number for each in (last if len(last) > 1 else [*last] * MOST_LAUNCHES) for number in (each.count, each.of)
    ]
    return (ctypes.c_uint64 * (2 * MOST_LAUNCHES))(*of_each)


class CpuLibrary:
    """The kernels of one shared library. Not for two threads: buffers and the report belong to the library."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.cukiln_allocate.restype = ctypes.c_void_p
        self._library.cukiln_allocate.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int)
        self._library.cukiln_message.restype = ctypes.c_char_p

    def allocate(self, operands: Sequence[Operand], sparse: Sequence[Operand] | None = None) -> list[Tensor]:
        """Guarded memory for every operand, each aligned as its class allows and no better. `sparse`: operands of the
        shapes that are touched of them."""
        tensors = []
        for number, operand in enumerate(operands):
            memory = self._memory(operand.name, operand.bytes, alignment_of(operand), writable=operand.role == "out")
            tensors.append(Tensor(operand, memory, sparse=sparse[number].shape if sparse else None))
        return tensors

    def workspace(self, namespace: str, integers: Sequence[int], launch: Sequence[int]) -> NDArray[np.uint8] | None:
        """Guarded workspace of the size that the kernel asks for; null where it asks for none."""
        ask = getattr(self._library, f"{namespace}_workspace_bytes")
        ask.restype = ctypes.c_int64
        size = ask((ctypes.c_int64 * len(integers))(*integers), (ctypes.c_int32 * len(launch))(*launch))
        return self._memory("workspace", size, WIDEST_ACCESS, writable=True) if size else None

    def free(self) -> None:
        """Gives all memory back; views into it must not be used again."""
        self._library.cukiln_free_all()

    def run(
        self,
        namespace: str,
        tensors: Sequence[Tensor],
        workspace: NDArray[np.uint8] | None,
        *,
        integers: Sequence[int],
        launch: Sequence[int],
        scalars: Sequence[float],
        order: Order,
        seed: int,
        exact: bool,
        cpu_seconds: float,
        watch: bool = False,
        last: Sequence[LastBlocks] = (),
    ) -> Outcome:
        """Run every launch of the kernel's plan. `watch`: look for races on shared memory and count its bank conflicts.
        `last`: the blocks that alone run, of each launch, or the same of all; where there are none, all.
        Raises MemoryError where no memory could be mapped."""
        call = Call(
            pointers=(ctypes.c_void_p * len(tensors))(*(tensor.address for tensor in tensors)),
            integers=(ctypes.c_int64 * len(integers))(*integers),
            launch=(ctypes.c_int32 * len(launch))(*launch),
            scalars=(ctypes.c_double * len(scalars))(*scalars),
            workspace=None if workspace is None else workspace.ctypes.data,
            order=ORDERS.index(order),
            exact=int(exact),
            seed=seed % 2**64,
            cpu_seconds=cpu_seconds,
            watch=int(watch),
            last_blocks=_numbers_of(last) if last else None,
        )
        status = getattr(self._library, f"{namespace}_run")(ctypes.byref(call))
        if status < 0:
            raise MemoryError("no memory for the stacks of a block's threads or for its shared memory")
        message = self._library.cukiln_message().decode("utf-8", "replace")
        sites = self._shared_memory() if watch else ()
        return Outcome(STATUSES[status], message, bool(self._library.cukiln_tainted()), sites)

    def _shared_memory(self) -> tuple[SharedAccess, ...]:
        sites: list[SharedAccess] = []
        site = _Site()
        while self._library.cukiln_site(len(sites), ctypes.byref(site)):
            place, kind = f"{site.file.decode()}:{site.line}", site.access.decode()
            sites.append(SharedAccess(place, kind, site.bytes, site.warp_accesses, site.wavefronts, site.ideal))
        return tuple(sites)

    def _memory(self, name: str, size: int, alignment: int, *, writable: bool) -> NDArray[np.uint8]:
        address = self._library.cukiln_allocate(name.encode(), size, alignment, int(writable))
        if address is None:
            raise MemoryError(f"no memory for {size} bytes of {name}")
        memory = (ctypes.c_uint8 * size).from_address(address)
        return np.frombuffer(memoryview(memory), np.uint8)
