"""A machine's GPUs, as a service's steps and a run without a service use them: which there are, whether one answers,
and measuring: candidates are verified and timed, the few best of a problem are compared. Where candidates come from and
where results go is the caller's."""

import contextlib
import json
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.config.own_modules import CHILD
from workers.cpu.verify import MAX_MESSAGE_CHARACTERS
from workers.gpu.interface import Device, DriverTooOld, GpuMissing
from workers.gpu.lease import lease_file
from workers.gpu.measure_on_gpu import Outcome, child_environment, run_gpu_task, shared_folders
from workers.gpu.task import CandidateResult, GpuTask, TaskCandidate, TaskKind, operator_folders
from workers.processes.child_protocol import Hearing
from workers.processes.job_files import write_text
from workers.processes.processes import Finished, InfrastructureError, Limits, Processes


def probe(module: str, processes: Processes, limits: Limits) -> list[Device]:
    """The GPUs that `module` finds, asked in a child. Raises GpuMissing (also DriverTooOld), InfrastructureError."""
    answers, finished = _ask(module, processes, limits)
    if finished.ended_by is not None:
        raise GpuMissing(f"listing the GPUs reached its limit on {finished.ended_by}; does nvidia-smi answer?")
    if "gone" in answers:
        raise (DriverTooOld if answers.get("too_old") else GpuMissing)(answers["gone"])
    if "devices" not in answers:
        raise InfrastructureError(f"listing the GPUs failed: {finished.text().strip()[-MAX_MESSAGE_CHARACTERS:]}")
    return [Device.from_dict(device) for device in answers["devices"]]


def why_silent(task: GpuTask, processes: Processes, limits: Limits, *, cache: Path) -> str | None:
    """Why the GPU of a task without candidates computes nothing right, if so. `cache`: as of `Engine`; without it
    CuPy would compile anew all that a warm-up needs, for longer than a probe may take. Raises InfrastructureError."""
    answers, finished = _ask(task, processes, limits, cache)
    if "ready" in answers:
        return None
    return str(answers.get("gone") or answers.get("failed") or answers or finished.text().strip()[-500:])


def _ask(
    request: GpuTask | str, processes: Processes, limits: Limits, cache: Path | None = None
) -> tuple[dict[str, Any], Finished]:
    """What a child says that runs no code under test, of a task or of a module's GPUs."""
    with processes.private_folder("gpu") as folder:
        arguments, writes = ["--list", str(request)], list[Path]()
        if isinstance(request, GpuTask):
            write_text(folder / "task.json", json.dumps(request.to_json()))
            arguments, writes = [str(folder / "task.json")], shared_folders(request, *filter(None, [cache]))
        command, env = [sys.executable, "-m", CHILD, *arguments], child_environment(cache or folder)
        finished = processes.run(command, cwd=folder, limits=limits, env=env, device=True, writes=writes)
    answers: dict[str, Any] = {}
    for line in finished.stdout.splitlines():
        with contextlib.suppress(ValueError):
            answers.update(Hearing()(line))
    return answers, finished


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
        on_result: Callable[[CandidateResult], None],
        on_comparison: Callable[[str, dict[str, Any] | None], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> Outcome:
        """`problems`: canonical, by the keys that `candidates` and `best_us` use; the rest as of `run_gpu_task`. Raises
        GpuGone, InfrastructureError."""
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
            on_result=on_result,
            on_comparison=on_comparison,
        )
