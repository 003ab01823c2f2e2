"""Workspaces of calls: one buffer for each stream of each device, used again by every call on that stream.

Calls on one stream run one after the other, so they may use the same memory; calls on two streams may run at once, so
they never do. A graph under capture is a stream of its own here: it may be replayed on any stream, at any time later.
"""

import ctypes
import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from cukiln.errors import DeviceError
from cukiln.kernels.capture import outside_captures

# Handles that the driver gives a meaning (CUDA Driver API, "Stream synchronization behavior").
LEGACY_STREAMS, STREAM_OF_THREAD = (0, 1), 2
ALIGNED = 16  # bytes, of a workspace's address


@dataclass(frozen=True)
class Buffer:
    """Memory of a GPU, freed with the last reference to `owner`."""

    address: int
    bytes: int
    owner: object


class Memory(Protocol):
    """The pool's interface to a GPU."""

    def capture_of(self, device: int, stream: int) -> int:
        """The number of the capture that the stream is part of; 0: of none."""

    def of_framework(self, device: int, stream: int, size: int, tensor: Any) -> Buffer:
        """Memory of `tensor`'s framework, which may be freed early: its next use comes after the kernels on
        `stream`."""

    def of_driver(self, device: int, size: int) -> Buffer:
        """Memory outside all frameworks, also while a stream is captured. Freeing it waits for the device."""


@dataclass
class _Place:
    """The memory of one stream, or of one captured graph."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    buffers: list[Buffer] = field(default_factory=list)


class WorkspacePool:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        # By device, stream, number of the capture, number of the thread.
        self._places: dict[tuple[int, int, int, int], _Place] = {}
        self._threads, self._this_thread = itertools.count(1), threading.local()

    @contextmanager
    def lend(self, device: int, stream: int, size: int, tensor: Any) -> Iterator[int]:
        """The address of `size` bytes or more for kernels that are queued on `stream` inside the `with`.

        The stream is locked meanwhile: launches of another thread, with the same workspace, must not come between those
        of one call. Raises `DeviceError` or what the framework raises where there is no memory left.
        """
        capture = self._memory.capture_of(device, stream)
        key = (device, stream, capture, self._thread() if stream == STREAM_OF_THREAD else 0)
        with self._lock:
            place = self._places.setdefault(key, _Place())
        with place.lock:
            if not place.buffers or place.buffers[-1].bytes < size:
                if capture:
                    # Recorded launches keep their buffer: a graph is replayed with its addresses.
                    place.buffers.append(self._memory.of_driver(device, size))
                else:
                    place.buffers.clear()  # first: where memory is short, the new buffer may need what the old one had
                    place.buffers.append(self._memory.of_framework(device, stream, size, tensor))
            yield place.buffers[-1].address

    def release(self, *, captured: bool) -> int:
        """Give the buffers back, with `captured` those of graphs too; how many bytes they had."""
        with self._lock:
            places = [place for key, place in self._places.items() if captured or not key[2]]
        released = 0
        for place in places:  # the places stay: a thread may be about to use one
            with place.lock:
                released += sum(buffer.bytes for buffer in place.buffers)
                place.buffers.clear()
        return released

    def _thread(self) -> int:
        """A number that no other thread has, now or later; the interpreter's own are used again."""
        if not hasattr(self._this_thread, "number"):
            self._this_thread.number = next(self._threads)
        number: int = self._this_thread.number
        return number


class GpuMemory:
    """Memory of a real GPU: from PyTorch or CuPy for their tensors, else from the driver."""

    @cached_property
    def _driver(self) -> "_Driver":
        return _Driver()

    def capture_of(self, device: int, stream: int) -> int:
        return 0 if stream in LEGACY_STREAMS else self._driver.capture_of(device, stream)

    def of_framework(self, device: int, stream: int, size: int, tensor: Any) -> Buffer:
        # Both reuse freed memory on the stream that it was allocated on, so that stream is made current.
        # A tensor's framework is imported already.
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        if torch is not None and isinstance(tensor, torch.Tensor):
            # ExternalStream(0) would make a new stream.
            legacy = stream in LEGACY_STREAMS
            of_call = torch.cuda.default_stream(device) if legacy else torch.cuda.ExternalStream(stream, device=device)
            with torch.cuda.stream(of_call):
                made = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
            return Buffer(made.data_ptr(), size, made)
        if cupy is not None and isinstance(tensor, cupy.ndarray):
            # PyTorch's allocator sees to captures of other threads itself.
            with cupy.cuda.Device(device), cupy.cuda.ExternalStream(stream, device), outside_captures():
                pointer = cupy.cuda.alloc(size)
            return Buffer(pointer.ptr, size, pointer)
        return self.of_driver(device, size)

    def of_driver(self, device: int, size: int) -> Buffer:
        owner = _Allocation(self._driver, device, size)
        return Buffer(owner.address, size, owner)


class _Driver:
    """The few calls of libcuda.so.1 that the pool makes."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceError(f"no NVIDIA driver: {error}; `cukiln doctor` shows what is here") from error
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            reason = text.value.decode() if text.value else "unknown error"
            raise DeviceError(f"no workspace for the call: {name}: {reason} (CUDA error {code})")

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """The device's primary context, which frameworks and our libraries use too, is current."""
        if device not in self._contexts:
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("cuDeviceGet", ctypes.byref(handle), device)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
            self._contexts[device] = context
        self.call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def capture_of(self, device: int, stream: int) -> int:
        active, number = ctypes.c_int(), ctypes.c_uint64()
        with self.on(device):
            self.call(
                "cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), ctypes.byref(active), ctypes.byref(number),
                None, None, None,
            )  # fmt: skip
        return number.value if active.value else 0


class _Allocation:
    """cuMemAlloc; cuMemFree with the last reference, which waits for the kernels that use it."""

    def __init__(self, driver: _Driver, device: int, size: int) -> None:
        address = ctypes.c_uint64()
        with driver.on(device), outside_captures():
            driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.address, self._driver, self._device = address.value, driver, device

    def __del__(self) -> None:
        # Not where the interpreter ends: the driver may be gone, and has freed all then.
        if hasattr(self, "address") and not sys.is_finalizing():
            with self._driver.on(self._device), outside_captures():
                self._driver.call("cuMemFree_v2", ctypes.c_uint64(self.address))


@contextmanager
def of_cpu(size: int) -> Iterator[int]:
    """The address of `size` bytes for a call on CPU tensors, which is done when it returns: it shares no memory."""
    memory = ctypes.create_string_buffer(size + ALIGNED)
    yield -(-ctypes.addressof(memory) // ALIGNED) * ALIGNED


POOL = WorkspacePool(GpuMemory())


def release_workspaces(*, captured: bool = False) -> int:
    """Give back the workspaces that calls of loaded kernels share, and say how many bytes they had.

    Safe at any time, kernels that still run included; the next call that needs a workspace makes a new one. Those of
    captured graphs stay, because a graph is replayed with their addresses. With `captured` they go too: only where no
    graph that a kernel was captured in will be replayed again.
    """
    return POOL.release(captured=captured)
