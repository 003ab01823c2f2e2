"""CUDA tensors without a GPU: DLPack capsules around addresses that are never read. For children of tests."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

CUDA, HOST = 2, 1
CAPSULES = (b"dltensor", b"dlpack_exchange_api")  # a capsule keeps the address of its name, not the name
CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class FakeTensor:
    """A DLPack exporter: `dtype` as "float32", strides in elements (None: contiguous). Without an address each has
    memory of its own, 16 MiB from the next."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: str = "float32",
        *,
        strides: Sequence[int] | None = None,
        device: int = 0,
        device_type: int = CUDA,
        address: int | None = None,
        offset: int = 0,
    ) -> None:
        if address is None:
            address = next(_FREE)
        kind = dtype.rstrip("0123456789")
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*strides) if strides is not None else None
        self._device = (device_type, device)
        self._tensor = _Tensor(
            address, device_type, device, len(shape), CODES[kind], int(dtype[len(kind) :]), 1,
            ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64)),
            ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64)) if self._strides is not None else None,
            offset, None, None,
        )  # fmt: skip

    def __dlpack__(self, **_: Any) -> Any:
        _KEPT.append(self)  # the capsule's consumer may outlive this object
        return _capsule(ctypes.addressof(self._tensor), CAPSULES[0])

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


_KEPT: list[FakeTensor] = []
_FREE = itertools.count(0x70000000, 1 << 24)


class _VersionedTensor(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", ctypes.c_ubyte * (ctypes.sizeof(_Tensor) - 16)),
    )


class _ExchangeApi(ctypes.Structure):
    """DLPackExchangeAPI of dlpack.h: how PyTorch hands out tensors together with its current stream."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("previous", ctypes.c_void_p),
        ("allocator", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
        ("to_object", ctypes.c_void_p),
        ("borrow_object", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    )


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
def _from_object(tensor: StreamTensor, out: Any) -> int:
    made = _VersionedTensor((1, 3))
    ctypes.memmove(made.tensor, ctypes.addressof(tensor._tensor), len(made.tensor))
    _VERSIONED.append((made, tensor))
    out[0] = ctypes.addressof(made)
    return 0


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
def _to_object(managed: int, out: Any) -> int:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(None))
    out[0] = id(None)
    return 0


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
def _current_stream(device_type: int, device: int, out: Any) -> int:
    out[0] = StreamTensor.current
    return 0


_VERSIONED: list[Any] = []
_API = _ExchangeApi(
    (1, 3), None, None, ctypes.cast(_from_object, ctypes.c_void_p).value,
    ctypes.cast(_to_object, ctypes.c_void_p).value, None, ctypes.cast(_current_stream, ctypes.c_void_p).value,
)  # fmt: skip


def _capsule(address: int, name: bytes) -> Any:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return make(address, name, None)


class StreamTensor(FakeTensor):
    """A tensor of a framework that says its current stream, as PyTorch does."""

    current = 77
    __dlpack_c_exchange_api__ = _capsule(ctypes.addressof(_API), CAPSULES[1])
