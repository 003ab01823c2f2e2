"""A worker of one GPU: which one it is, its heartbeats, and when it must not be used any more. A worker never loads
CUDA itself. A GPU that answers no new child is drained: its device row says why, the task goes back uncounted, and the
worker ends with EXIT_DRAINED. Started again, it has a child compute something first, and takes work only once that came
out right."""

import importlib.util
import logging
import time
from dataclasses import replace

from storage.config.own_modules import gpu_plans
from storage.config.settings import Settings
from storage.database.database_errors import DATABASE_AWAY
from storage.database.session import Database
from storage.entities.heartbeats import drained_reason, register_device
from workers.compile.toolchain import ToolchainMissing, toolchain_of
from workers.gpu.engine import probe
from workers.gpu.interface import Device, GpuMissing, require_driver
from workers.processes.processes import Limits, Processes
from workers.wake_ups import is_device_class

log = logging.getLogger("cukiln.worker")

EXIT_DRAINED = 69  # sysexits.h: a service that is needed is unavailable
BEAT_SECONDS = 1.0
# Of the child that lists the GPUs: importing CuPy takes a second, a driver that has to load its module ten.
PROBE_LIMITS = Limits(wall_seconds=60.0, cpu_seconds=60.0, memory_bytes=8 * 2**30, output_bytes=2**20)
# Of one that opens a GPU: CuPy compiles what a warm-up needs, by CUB 1.4 CPU seconds for each kind of element and
# reduction, 30 in all where nothing is in its cache, beside compilers that use all CPUs.
WARM_UP_LIMITS = replace(PROBE_LIMITS, wall_seconds=600.0, cpu_seconds=300.0)
INSTALL_CUPY = (
    "CuPy is not installed, and nothing can be measured without it: `make run` installs it in a checkout on a machine "
    "with a GPU, `pip install cupy-cuda13x` (for CUDA 12: cupy-cuda12x) anywhere"
)


def cuda_of_kernels(settings: Settings, processes: Processes) -> int:
    """The major release of the compiler here; where there is none, of the one that is asked for."""
    try:
        return toolchain_of(settings, processes).cuda
    except ToolchainMissing:
        return settings.cuda


def find_gpus(settings: Settings, processes: Processes) -> list[Device]:
    """The GPUs of this machine, asked in a child. Raises GpuMissing (also without CuPy, and DriverTooOld),
    InfrastructureError."""
    if settings.gpu_module == "workers.cuda.cupy_gpu" and importlib.util.find_spec("cupy") is None:
        raise GpuMissing(INSTALL_CUPY)
    devices = probe(settings.gpu_module, processes, PROBE_LIMITS)
    if not devices:
        raise GpuMissing("no GPU is found on this machine: `nvidia-smi` lists those that the driver reports")
    for device in devices:
        if not is_device_class(device.name):
            raise GpuMissing(f"a GPU calls itself {device.name!r}, which cannot be the name of a device class")
    if any(device.cuda for device in devices):
        require_driver(devices, cuda_of_kernels(settings, processes))
    return devices


class DeviceBeat:
    """Register this worker's GPU as alive about every second; ask the database whether the GPU was drained."""

    def __init__(self, database: Database, device: Device, worker: str) -> None:
        self._database = database
        self._device = device
        self._worker = worker
        self._plans = gpu_plans()
        self._next = 0.0
        self.drained: str | None = None

    def start(self) -> None:
        """The first heartbeat; it ends an old drain, because the GPU answers again."""
        self.register(fresh=True)
        self.drained = None
        self._next = time.monotonic() + BEAT_SECONDS

    def __call__(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + BEAT_SECONDS
        try:
            self.register(fresh=False)
        except DATABASE_AWAY as error:
            log.warning("GPU not registered: %s", error)

    def may_continue(self) -> bool:
        """Whether another wake-up may be taken. While the database is away nothing can be leased anyway."""
        try:
            with self._database.read() as session:
                self.drained = drained_reason(session, self._device.uuid)
        except DATABASE_AWAY as error:
            log.warning("not known whether the GPU is drained: %s", error)
        return self.drained is None

    def register(self, *, fresh: bool) -> None:
        """`fresh`: the GPU answers; else it stays drained where it was, and is not shown as gone."""
        device = self._device
        with self._database.write() as session:
            register_device(
                session,
                uuid=device.uuid,
                device_class=device.name,
                capability=".".join(map(str, device.capability)),
                driver=device.driver,
                description={
                    # By these the service, which has no GPU, distinguishes a record of today from an older one.
                    "plan_versions": dict(self._plans),
                    **{name: getattr(device, name) for name in ("multiprocessors", "l2_bytes", "memory_bytes")},
                },
                worker=self._worker,
                fresh=fresh,
            )
