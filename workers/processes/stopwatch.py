"""Wall and CPU seconds of a stage of this process."""

import time
from dataclasses import dataclass, field

from cukiln.types import StageSeconds


@dataclass
class Stopwatch:
    """Runs from its making. CPU seconds are of all threads of this process, children not included."""

    _wall: float = field(default_factory=time.perf_counter)
    _cpu: float = field(default_factory=time.process_time)

    def read(self) -> StageSeconds:
        return StageSeconds(wall=time.perf_counter() - self._wall, cpu=time.process_time() - self._cpu)
