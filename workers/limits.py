"""What the settings mean to the process seam."""

from __future__ import annotations

import os
from pathlib import Path

from storage.settings import LimitSettings, Settings
from workers.access import secrets_of
from workers.processes import Limits, Processes


def process_limits(settings: LimitSettings) -> Limits:
    return Limits(
        wall_seconds=settings.wall_seconds,
        cpu_seconds=settings.cpu_seconds,
        memory_bytes=settings.memory_bytes,
        output_bytes=settings.output_bytes,
    )


def fenced_processes(settings: Settings) -> Processes:
    """Whose children may touch nothing of the service, and read the compilers' further folders."""
    reads = [Path(folder) for folder in settings.tool_folders.split(os.pathsep) if folder]
    return Processes(secrets=secrets_of(settings), reads=reads)
