"""Settings' limits as those of the process seam."""

from __future__ import annotations

from storage.settings import LimitSettings
from workers.processes import Limits


def process_limits(settings: LimitSettings) -> Limits:
    return Limits(
        wall_seconds=settings.wall_seconds,
        cpu_seconds=settings.cpu_seconds,
        memory_bytes=settings.memory_bytes,
        output_bytes=settings.output_bytes,
    )
