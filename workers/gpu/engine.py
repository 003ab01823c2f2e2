"""Measuring, as a service's steps and a run without a service have it done: candidates are verified and timed, the few
best of a problem are compared. Where candidates come from and where results go is the caller's."""

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.gpu.child_life import Listeners
from workers.gpu.interface import Device
from workers.gpu.lease import lease_file
from workers.gpu.measure_on_gpu import Outcome, run_gpu_task
from workers.gpu.task import GpuTask, TaskCandidate, TaskKind, operator_folders
from workers.processes.processes import Limits, Processes


@dataclass(frozen=True)
class Engine:
    """A GPU, and how it is used. `module` drives it, `locks` holds its lease, `cache` what its own kernels compile to;
    `seconds`: of one candidate's samples."""

    module: str
    device: Device
    locks: Path
    cache: Path
    processes: Processes
    limits: Limits
    seconds: float
    seed: Callable[[], int] = field(default=lambda: secrets.randbits(48))

    def run(
        self,
        kind: TaskKind,
        problems: Mapping[str, Mapping[str, Any]],
        candidates: Sequence[TaskCandidate],
        best_us: Mapping[str, float],
        listeners: Listeners,
        cancel: threading.Event | None = None,
    ) -> Outcome:
        """`problems`: canonical, by the keys that `candidates` and `best_us` use. Raises GpuGone,
        InfrastructureError."""
        task = GpuTask(
            kind,
            gpu=self.module,
            device=self.device.uuid,
            lease=str(lease_file(self.locks, self.device.uuid)),
            operators=operator_folders(problems.values()),
            seed=self.seed(),
            problems=problems,
            candidates=tuple(candidates),
            best_us={key: us for key, us in best_us.items() if key in problems},
            seconds=self.seconds,
        )
        return run_gpu_task(
            task,
            self.processes,
            self.limits,
            cache=self.cache,
            cancel=cancel,
            on_result=listeners.on_result,
            on_comparison=listeners.on_comparison,
        )
