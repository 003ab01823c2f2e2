"""A GPU in simulated time whose L2 keeps what was used last, whose samples cost time of their own, and whose times are
noisy: what comparisons have to see through."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workers.gpu.interface import Device
from workers.gpu.verify_and_time import set_count

L2_BYTES = 60 << 20
DEVICE = Device("Simulated", "GPU-0", (9, 0), "1", 132, L2_BYTES, 80 << 30)
WARM_SHARE = 0.6  # of its time, for a launch that finds its operands in the L2
HOST_US = 20.0  # between samples


@dataclass(frozen=True)
class Kernel:
    """`memory`: the name of the sets that it works on; ours share theirs, the vendor's library has its own."""

    name: str
    us: float
    memory: str = "ours"


class L2Gpu:
    """As `workers.gpu.interface.Gpu`, of which it has what samplers need. `sample_us`: what a sample costs beside its
    launches. `hits`, `launches`: by the kernel's name."""

    def __init__(self, set_bytes: int, *, sample_us: float = 0.0, noise: float = 0.0, seed: int = 0) -> None:
        self.sets, self.cold = set_count(DEVICE, set_bytes)
        self.seconds = 0.0
        self.hits: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self._bytes, self._sample_us, self._noise = set_bytes, sample_us, noise
        self._random = np.random.default_rng(seed)
        self._l2: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._recording: list[tuple[Kernel, int]] | None = None

    def now(self) -> float:
        return self.seconds

    def synchronize(self) -> None: ...

    def calls(self, kernel: Kernel) -> list[Callable[[], None]]:
        """On each set."""
        return [lambda number=number: self._call(kernel, number) for number in range(self.sets)]  # type: ignore[misc]

    def timer(self, calls: Sequence[Callable[[], None]]) -> Any:
        recorded = self._recording = []
        for call in calls:
            call()
        self._recording = None
        gpu = self

        class Timer:
            def sample(self) -> float:
                us = gpu._sample_us + sum(gpu._launch(*launch) for launch in recorded)
                us *= float(np.exp(gpu._random.normal(0.0, gpu._noise)))
                gpu.seconds += (us + HOST_US) * 1e-6
                return us

        return Timer()

    def forget_hits(self) -> dict[str, Any]:
        self.hits.clear()
        self.launches.clear()
        return {}

    def _call(self, kernel: Kernel, number: int) -> None:
        if self._recording is None:
            self._launch(kernel, number)
        else:
            self._recording.append((kernel, number))

    def _launch(self, kernel: Kernel, number: int) -> float:
        place = (kernel.memory, number)
        hit = place in self._l2
        self._l2[place] = None
        self._l2.move_to_end(place)
        while len(self._l2) > max(1, L2_BYTES // self._bytes):
            self._l2.popitem(last=False)
        hit = hit and self._bytes <= L2_BYTES
        self.hits[kernel.name] += hit
        self.launches[kernel.name] += 1
        return kernel.us * (WARM_SHARE if hit else 1.0)
