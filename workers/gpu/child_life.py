"""What a child that owns the GPU has done until its end, in the eyes of its parent, and what is said of that end."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from workers.gpu.task import CandidateResult
from workers.processes.processes import Finished, InfrastructureError


@dataclass(frozen=True)
class Listeners:
    """What is reported of a task at once: see `workers.gpu.measure_on_gpu.run_gpu_task`."""

    on_result: Callable[[CandidateResult], None] | None = None
    on_comparison: Callable[[str, dict[str, Any] | None], None] | None = None


@dataclass
class Life:
    """What one child has done. `running`: what it touches now, for `problem`. `doing`: what it said last of what takes
    long. `failed`: its own message where Python failed. `garbage`: a line that is not the child's own. `forger`: the
    candidate whose result may be forged as well; `compared`: the problem whose comparison came last, which may be
    forged, too."""

    ready: bool = False
    running: str | None = None
    running_since: float = 0.0
    doing: str = ""
    problem: str = ""
    judged: list[str] = field(default_factory=list)
    compared: str | None = None
    has_compared: bool = False
    gone: str | None = None
    failed: str | None = None
    garbage: str | None = None
    forger: str | None = None
    heard: float = field(default_factory=time.monotonic)
    reported_cpu: float = 0.0


def end_words(finished: Finished, words: str) -> str:
    cause = f": {words}" if words else ""
    if finished.ended_by is not None:
        return f"it was silent, or reached its limit on {finished.ended_by}, after {finished.wall_seconds:.1f} s{cause}"
    if finished.returncode < 0:
        return f"the process ended with signal {-finished.returncode}{cause}"
    return f"the process ended with exit status {finished.returncode}{cause}"


def ended_early(life: Life, finished: Finished, words: str) -> InfrastructureError:
    """Of a child that ran no code under test."""
    doing = f" while {life.doing}" if life.doing else ""
    end = end_words(finished, words)
    return InfrastructureError(f"the child that uses the GPU ended before its task{doing}: {end}")
