"""Loads and allocations on a thread while another one captures a CUDA graph."""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

from cukiln.gpu import DRIVER

_RELAXED = 2  # cuda.h: CU_STREAM_CAPTURE_MODE_RELAXED


@contextmanager
def outside_captures() -> Iterator[None]:
    """A capture forbids its own thread, and mostly all others, to load and to allocate, and is broken by it: it could
    not be replayed. What is made here outlives captures, so this thread is allowed to. Without a driver, or where it
    has no GPU, nothing is captured, and nothing is done.
    """
    exchange, mode = _exchange(), ctypes.c_int(_RELAXED)
    if exchange is None or exchange(ctypes.byref(mode)) != 0:
        yield
        return
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _exchange() -> "ctypes._NamedFuncPointer | None":
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return None
    driver.cuInit(0)  # again is free; what it says is said by the first call that needs it
    return driver.cuThreadExchangeStreamCaptureMode
