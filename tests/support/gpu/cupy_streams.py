"""The streams of CuPy 14 without a GPU (`cupy/cuda/stream.pyx`): handles of their own, a stack of those that were
entered, captures that another stream may not wait for, and arrays that are handed over by DLPack."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np

LEGACY = 1  # a stream's number in `__dlpack__`: the default stream, which is also what None means


class CudaError(RuntimeError):
    """As `cupy.cuda.runtime.CUDARuntimeError`."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def fake_cuda(**more: Any) -> Any:
    """A module `cupy` of errors alone, and what is added to its `cuda`."""
    driver = SimpleNamespace(CUDADriverError=type("CUDADriverError", (RuntimeError,), {}))
    runtime = SimpleNamespace(CUDARuntimeError=CudaError, streamCaptureModeRelaxed=2)
    core = SimpleNamespace(set_reduction_accelerators=lambda names: None)
    return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, driver=driver, **more), _core=core)


class Stream:
    """Of `cuda`; `capturing`: whether what is queued goes into a graph. A capture that was broken is broken until its
    end, where CUDA says so."""

    def __init__(self, cuda: StackedStreams, pointer: int) -> None:
        self._cuda, self.ptr = cuda, pointer
        self.capturing = self.broken = False

    def use(self) -> None:
        self._cuda.current = self

    def __enter__(self) -> Stream:
        self._cuda.stack.append(self)
        self._cuda.current = self
        return self

    def __exit__(self, *error: object) -> None:
        self._cuda.stack.pop()
        self._cuda.current = self._cuda.stack[-1]

    def begin_capture(self, mode: int | None = None) -> None:
        if self.ptr in (0, LEGACY):
            raise RuntimeError("cannot capture on the default (legacy) stream")
        self.capturing, self.broken = True, False

    def end_capture(self) -> Any:
        self.capturing = False
        if self.broken:
            raise CudaError(901, "cudaErrorStreamCaptureInvalidated: operation failed due to a previous error")
        return SimpleNamespace(launch=lambda stream: None, upload=lambda stream: None)

    def synchronize(self) -> None:
        if self.capturing:
            self.broken = True
            raise CudaError(900, "cudaErrorStreamCaptureUnsupported: not permitted when stream is capturing")

    def be_waited_for(self, other: Stream) -> None:
        """`other` waits for an event that was recorded here. The default stream joins no capture."""
        if self.capturing and other.ptr in (0, LEGACY):
            self.broken = True
            raise CudaError(906, "cudaErrorStreamCaptureImplicit: the legacy stream would depend on a capturing one")


class StackedStreams:
    """`cupy` as a module whose `cuda` has these streams: leaving one makes the top of the stack of entered ones
    current, not the one before. `launched_on`: where kernels ran."""

    def __init__(self) -> None:
        self.null = Stream(self, 0)
        self.stack = [self.null]
        self.current = self.null
        self.launched_on: list[Stream] = []
        self._pointers = itertools.count(0x7000, 0x100)

    def stream(self, non_blocking: bool) -> Stream:
        assert non_blocking
        return Stream(self, next(self._pointers))

    def kernel(self, text: str, name: str) -> Any:
        def launch(*arguments: Any, shared_mem: int) -> None:
            self.launched_on.append(self.current)

        launch.compile = lambda: None  # type: ignore[attr-defined]
        return launch

    def fetch(self, array: Any, stream: Any) -> Any:
        with stream:  # as `ndarray.get` does where an array is not contiguous
            return np.asarray(array)

    def hand_over(self, stream: int | None) -> None:
        """What `ndarray.__dlpack__` does about streams: the one that is asked for waits for the current one."""
        if stream == 0 or (stream is not None and stream < -1):
            raise ValueError(f"a stream is -1, 1, 2 or a handle, not {stream}")
        if stream == -1:
            return
        asked = self.null if stream in (None, LEGACY) else Stream(self, int(stream or 0))
        if asked.ptr != self.current.ptr:
            self.current.be_waited_for(asked)

    def module(self) -> Any:
        cupy = fake_cuda(
            Device=lambda ordinal: SimpleNamespace(use=lambda: None),
            Stream=self.stream,
            get_current_stream=lambda device=-1: self.current,
            compiler=SimpleNamespace(CompileException=type("CompileException", (Exception,), {})),
        )
        runtime = cupy.cuda.runtime
        runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
        runtime.deviceGetAttribute = lambda which, ordinal: 232448
        runtime.getDeviceCount = lambda: 1
        runtime.driverGetVersion = runtime.runtimeGetVersion = lambda: 13020
        runtime.getDeviceProperties = lambda ordinal: {
            "name": b"NVIDIA H200", "major": 9, "minor": 0, "multiProcessorCount": 132, "l2CacheSize": 60 << 20,
            "totalGlobalMem": 1 << 37,
        }  # fmt: skip
        cupy.RawKernel, cupy.asnumpy = self.kernel, self.fetch
        return cupy
