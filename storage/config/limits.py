"""What one process tree may use."""

from dataclasses import dataclass
from typing import Any, Literal

EndedBy = Literal["wall", "cpu", "memory", "output", "processes", "cancelled"]


@dataclass(frozen=True)
class Limits:
    """Bounds of a whole process tree. Seconds and bytes; `output_bytes` bounds each file and the captured text."""

    wall_seconds: float
    cpu_seconds: float
    memory_bytes: int
    output_bytes: int

    @property
    def by_name(self) -> dict[str, float]:
        """By what `Finished.ended_by` calls them."""
        return {
            "wall": self.wall_seconds,
            "cpu": self.cpu_seconds,
            "memory": self.memory_bytes,
            "output": self.output_bytes,
        }

    def reached(self, ended_by: EndedBy | None) -> dict[str, float] | None:
        """The limit that ended a run, by name: what was found so is looked at again under a larger one."""
        return {name: value for name, value in self.by_name.items() if name == ended_by} or None

    def as_details(self, ended_by: EndedBy | None) -> dict[str, Any]:
        """The same among the details of a verdict."""
        limit = self.reached(ended_by)
        return {} if limit is None else {"limit": limit}


# What the settings have by default, and a run without a service has always.
COMPILE_LIMITS = Limits(wall_seconds=300.0, cpu_seconds=600.0, memory_bytes=8 * 2**30, output_bytes=64 * 2**20)
"""Of one compiler call with all that it starts."""
VERIFY_LIMITS = Limits(wall_seconds=120.0, cpu_seconds=120.0, memory_bytes=4 * 2**30, output_bytes=64 * 2**20)
"""Of one verification process."""
MEASURE_LIMITS = Limits(wall_seconds=900.0, cpu_seconds=3600.0, memory_bytes=32 * 2**30, output_bytes=64 * 2**20)
"""Of one process that owns a GPU."""
MEASURE_SECONDS = 0.3
"""Of one candidate's samples, at most."""
