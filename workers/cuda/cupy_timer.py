"""Times a fixed list of calls on a CUDA stream: recorded once as a graph, replayed between two events.

Before the first event the GPU is kept waiting by a small kernel, so that everything is queued when the event passes:
else the host's own time to launch would be part of the sample. Whether that worked is checked for every sample.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from workers.gpu.interface import PEER_ERRORS, GpuError

FIRST_HEAD_START_US = 50.0
LONGEST_HEAD_START_US = 20_000.0
TRIES = 10
WARM_UPS = 2


class GraphTimer:
    """Replays `calls`. `recorded`: as a graph; else they are launched one by one, and `why` says what kept them from
    being recorded.

    `cupy` is the module, `stream` its stream; `wait` queues a kernel that ends after that many microseconds; `faults`
    turns CUDA's errors into GpuFault.
    """

    def __init__(
        self,
        cupy: Any,
        stream: Any,
        calls: Sequence[Callable[[], None]],
        *,
        wait: Callable[[float], None],
        faults: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._cupy, self._stream, self._calls, self._wait, self._faults = cupy, stream, tuple(calls), wait, faults
        self._head_start_us = FIRST_HEAD_START_US
        self.why = ""
        self._graph = self._record()
        self.recorded = self._graph is not None
        with faults():
            self._events = (cupy.cuda.Event(), cupy.cuda.Event())
            if self._graph is not None:
                self._graph.upload(stream)
            for _ in range(WARM_UPS):
                self._launch()
            stream.synchronize()

    def sample(self) -> float:
        """Microseconds of one run of all calls."""
        with self._faults():
            for _ in range(TRIES):
                us, starved = self._once()
                if not starved or self._head_start_us >= LONGEST_HEAD_START_US:
                    break
                self._head_start_us = min(2 * self._head_start_us, LONGEST_HEAD_START_US)
        return us

    def _once(self) -> tuple[float, bool]:
        """One run; whether the GPU may have waited for the host: it came to the first event before all was queued."""
        start, end = self._events
        self._wait(self._head_start_us)
        start.record(self._stream)
        self._launch()
        end.record(self._stream)
        starved = bool(start.done)
        end.synchronize()
        return 1000.0 * float(self._cupy.cuda.get_elapsed_time(start, end)), starved

    def _launch(self) -> None:
        if self._graph is not None:
            self._graph.launch(self._stream)
            return
        for call in self._calls:
            call()

    def _record(self) -> Any:
        """The graph; None where a call cannot be recorded."""
        runtime = self._cupy.cuda.runtime
        errors = (runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError, GpuError)
        with self._faults():
            self._stream.synchronize()
            # Relaxed: a library may allocate memory on its first call, which the other modes forbid.
            self._stream.begin_capture(runtime.streamCaptureModeRelaxed)
        refused: Exception | None = None
        try:
            for call in self._calls:
                call()
        except (*errors, *PEER_ERRORS) as error:
            refused = error
        # The capture is ended in any case: the stream can do nothing else before.
        try:
            graph = self._stream.end_capture()
        except errors as error:
            refused = refused or error
        if refused is None:
            return graph
        self.why = str(refused)
        # An error that comes from the device, not from recording, is still there.
        with self._faults():
            self._stream.synchronize()
        return None
