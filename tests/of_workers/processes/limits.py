"""Limits of processes, and waiting for what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from workers.processes.processes import Limits

LIMITS = Limits(wall_seconds=20, cpu_seconds=20, memory_bytes=400 << 20, output_bytes=1 << 20)


def limits(**changes: float) -> Limits:
    return Limits(**{**vars(LIMITS), **changes})


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
