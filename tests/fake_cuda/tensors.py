"""CUDA tensors without a GPU: DLPack capsules around addresses that nobody reads. For child processes of the tests."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

CUDA, HOST = 2, 1
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
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        _KEPT.append(self)  # the capsule's consumer may outlive this object
        return make(ctypes.addressof(self._tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


_KEPT: list[FakeTensor] = []
_FREE = itertools.count(0x70000000, 1 << 24)
