"""A worker of one GPU: which one it is, its signs of life, and when it must not be used any more.

A worker never loads CUDA itself. Children ask which GPUs there are, prove and measure; a GPU that answers no new child
either is drained: its device row says why, the item goes back uncounted, and the worker ends with EXIT_DRAINED. Who
keeps the worker (`cukiln serve`, a container's restart policy) starts it again; on a GPU that is drained it has a child
compute something first, and takes work only once that came out right.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from storage.database import Database
from storage.devices import drained_reason, register_device
from storage.failures import DATABASE_AWAY
from storage.settings import Settings
from workers.gpu.interface import Device, GpuMissing
from workers.gpu.measure_on_gpu import child_environment, probe, shared_folders
from workers.gpu.plan_version import gpu_plan_version
from workers.gpu.task import GpuTask
from workers.processes import Limits, Processes
from workers.tickets import is_device_class

log = logging.getLogger("cukiln.worker")

EXIT_DRAINED = 69  # sysexits.h: a service that is needed is unavailable
BEAT_SECONDS = 1.0
# Of the child that lists the GPUs: importing CuPy takes a second, a driver that has to load its module ten.
PROBE_LIMITS = Limits(wall_seconds=60.0, cpu_seconds=60.0, memory_bytes=8 * 2**30, output_bytes=2**20)
INSTALL_CUPY = (
    "CuPy is not installed, and nothing can be measured without it: `make run` installs it in a checkout on a machine "
    "with a GPU, `pip install cupy-cuda13x` anywhere"
)


def find_gpus(settings: Settings, processes: Processes) -> list[Device]:
    """The GPUs of this machine, asked in a child. Raises GpuMissing where there is none, or nothing to drive it with:
    that CuPy is not installed is known without a child. Raises InfrastructureError."""
    if settings.gpu_module == "workers.gpu.cupy_gpu" and importlib.util.find_spec("cupy") is None:
        raise GpuMissing(INSTALL_CUPY)
    found = probe(settings.gpu_module, processes, PROBE_LIMITS)
    if not found:
        raise GpuMissing("no GPU is found on this machine: `nvidia-smi` lists those that the driver knows")
    for device in found:
        if not is_device_class(device.name):
            raise GpuMissing(f"a GPU calls itself {device.name!r}, which cannot be the name of a device class")
    return found


def pick_gpu(found: Sequence[Device], wanted: str) -> Device:
    """The one with that UUID, or that number in the order of the driver. Raises GpuMissing."""
    for number, device in enumerate(found):
        if wanted in (device.uuid, str(number)):
            return device
    known = ", ".join(f"{number} = {device.name} {device.uuid}" for number, device in enumerate(found))
    raise GpuMissing(f"there is no GPU {wanted} on this machine: it has {known}")


def why_silent(settings: Settings, processes: Processes, device: Device) -> str | None:
    """Why the GPU computes nothing right in a child of its own; None where it does. Waits for its lease, a minute at
    most. Raises InfrastructureError."""
    task = GpuTask(
        kind="measure",
        gpu=settings.gpu_module,
        device=device.uuid,
        lease=str(lease_file(settings, device)),
        operators={},
        seed=0,
        problems=(),
        candidates=(),
    )
    with processes.private_folder("gpu") as folder:
        path = folder / "task.json"
        path.write_text(json.dumps(task.to_json()), encoding="utf-8")
        finished = processes.run(
            [sys.executable, "-m", "workers.gpu.run_on_gpu", str(path)],
            cwd=folder,
            limits=PROBE_LIMITS,
            env=child_environment(folder),
            device=True,
            writes=shared_folders(task),
        )
    answers: dict[str, Any] = {}
    for line in finished.stdout.splitlines():
        with contextlib.suppress(ValueError):
            answers.update(json.loads(line))
    if "ready" in answers:
        return None
    return str(answers.get("gone") or answers.get("failed") or answers or finished.text().strip()[-500:])


def lease_file(settings: Settings, device: Device) -> Path:
    """What is locked while the GPU is used: the same file for all services of the machine."""
    return settings.gpu_lock_dir / f"{device.uuid}.lock"


class DeviceBeat:
    """Tell the database about every second that this worker's GPU is alive; ask it whether the GPU was drained."""

    def __init__(self, database: Database, device: Device, worker: str) -> None:
        self._database = database
        self._device = device
        self._worker = worker
        self._plan_version = gpu_plan_version()
        self._next = 0.0
        self.drained: str | None = None

    def start(self) -> None:
        """The first sign of life; it ends an old drain, because the GPU answers again. Raises what the database
        raises."""
        self._register(fresh=True)
        self.drained = None
        self._next = time.monotonic() + BEAT_SECONDS

    def stay_drained(self) -> None:
        """A sign of life of the worker, not of the GPU: whoever looks sees that it is drained, and not that it is
        gone."""
        self._register(fresh=False)

    def __call__(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + BEAT_SECONDS
        try:
            self._register(fresh=False)
        except DATABASE_AWAY as error:
            log.warning("GPU not registered: %s", error)

    def may_go_on(self) -> bool:
        """Whether another ticket may be taken. A database that is away says nothing against it: nothing can be claimed
        then."""
        try:
            with self._database.read() as session:
                self.drained = drained_reason(session, self._device.uuid)
        except DATABASE_AWAY as error:
            log.warning("not known whether the GPU is drained: %s", error)
        return self.drained is None

    def _register(self, *, fresh: bool) -> None:
        device = self._device
        with self._database.write() as session:
            register_device(
                session,
                uuid=device.uuid,
                device_class=device.name,
                capability=".".join(map(str, device.capability)),
                driver=device.driver,
                description={
                    # By these the service, which knows no GPU, tells a record of today from an older one.
                    "plan_version": self._plan_version,
                    **{
                        name: value
                        for name, value in asdict(device).items()
                        if name in ("multiprocessors", "l2_bytes", "memory_bytes")
                    },
                },
                worker=self._worker,
                fresh=fresh,
            )
