"""`cukiln worker plan`, `compile [--target sm_80 …]`, `gpu [--device …]`, `reconcile`: one server process.

Everything heavy is loaded and found here once, before the first fork: a worker child reaches its step in milliseconds.
"""

import argparse
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import tenacity

from codegen.errors import TextError
from codegen.operators import operators
from codegen.primitives import HOPPER_SUMS, TURING_SUMS
from codegen.text.render_group import group_headers
from codegen.text.scan_functions import read_headers
from storage.blobs.blob_store import BlobStore
from storage.config.files import UMASK
from storage.config.logs import set_up_logging
from storage.config.operator_path import load_operator_path
from storage.config.own_modules import CHILD as GPU_CHILD
from storage.config.own_modules import gpu_plans
from storage.config.settings import Settings, load_settings
from storage.database.database_errors import DATABASE_AWAY
from storage.database.session import Database
from storage.entities.heartbeats import register_toolchain
from storage.errors import SettingsError
from workers import wake_ups
from workers.compile.toolchain import ToolchainMissing, supported_targets
from workers.cpu.ptx import ptx_plans
from workers.cpu.verify import CHILD, CHILD_ENVIRONMENT, cpu_plans
from workers.gpu.engine import why_silent
from workers.gpu.interface import GpuMissing, choose_device
from workers.gpu.lease import lease_file
from workers.gpu.measure_on_gpu import child_environment
from workers.gpu.task import GpuTask
from workers.processes.processes import InfrastructureError, fenced_processes
from workers.steps.context import Step, Workplace
from workers.worker.gpu_worker import EXIT_DRAINED, WARM_UP_LIMITS, DeviceBeat, find_gpus
from workers.worker.queue_worker import CALL_SECONDS, QueueWorker
from workers.worker.reconcile import Reconciler
from workers.worker.run_task import run_wake_up

log = logging.getLogger("cukiln.worker")

DATABASE_WAIT_SECONDS = 60.0  # until the schema is there: `serve` or the API migrates it, perhaps on another machine


class WorkerError(Exception):
    """This worker cannot start; the message says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cukiln worker", description="Run one worker of the cukiln server.")
    kinds = (
        "plan: problems become candidates; compile: groups, verification and winners; gpu: measuring on one GPU, exit "
    )
    kinds += "code 69 when it stopped answering; reconcile: tasks of dead workers and missing wake-ups"
    parser.add_argument("kind", choices=[wake_ups.PLAN, wake_ups.COMPILE, wake_ups.GPU, "reconcile"], help=kinds)
    parser.add_argument("--target", action="append", help="compile: for this target only; may be repeated")
    parser.add_argument("--device", help="gpu: its UUID, or its number in the driver's order (default: 0)")
    arguments = parser.parse_args(argv)
    for name, kind in (("target", wake_ups.COMPILE), ("device", wake_ups.GPU)):
        if getattr(arguments, name) is not None and arguments.kind != kind:
            parser.error(f"--{name} is an option of {kind} workers, not of {arguments.kind}")
    os.umask(UMASK)
    try:
        settings = load_settings()
        set_up_logging(settings.log_level)
        if arguments.kind == "reconcile":
            run_reconciler(settings)
            return 0
        from workers.steps import STEPS

        if arguments.kind == wake_ups.GPU:
            return run_gpu_worker(settings, STEPS, device="0" if arguments.device is None else arguments.device)
        run_worker(arguments.kind, settings, STEPS, targets=arguments.target)
    except (SettingsError, ToolchainMissing, GpuMissing, InfrastructureError, WorkerError) as error:
        sys.stderr.write(f"cukiln worker: {error}\n")
        return os.EX_CONFIG
    return 0


def prepare() -> None:
    """In the fork server of `cukiln serve`, before its first fork: what every worker would find out again."""
    remember_versions(load_settings())
    remember_operators()


def redis_url(settings: Settings) -> str:
    """REDIS_URL, else that of the embedded valkey which runs over the data folder. Raises WorkerError."""
    if settings.redis_url:
        return settings.redis_url
    try:
        return wake_ups.url_file(settings.data_dir / "valkey").read_text()
    except FileNotFoundError:
        raise WorkerError(
            f"no Redis: set REDIS_URL, or start `cukiln serve` on the data folder {settings.data_dir} first"
        ) from None


def run_worker(
    kind: str, settings: Settings, steps: Mapping[str, Step], *, targets: Sequence[str] | None = None
) -> None:
    """Take wake-ups until SIGTERM or SIGINT. Raises ToolchainMissing, WorkerError."""
    workplace = make_workplace(settings)
    if kind == wake_ups.COMPILE:
        supported = [target.name for target in supported_targets(workplace.toolchain)]
        unknown = sorted(set(targets or ()) - set(supported))
        if unknown:
            raise WorkerError(f"nvcc here cannot compile for {', '.join(unknown)}: allowed are {', '.join(supported)}")
        workplace.targets = tuple(targets or supported)
        remember_operators()
        _take_wake_ups(kind, workplace, steps, _toolchain_beat(workplace))
        return
    try:  # before the first fork, so that no worker child has to; a step that needs one says so
        log.info("toolchain %s", workplace.toolchain.digest[:16])
    except ToolchainMissing as error:
        log.warning("%s", error)
    _take_wake_ups(kind, workplace, steps)


def run_gpu_worker(settings: Settings, steps: Mapping[str, Step], *, device: str) -> int:
    """Until SIGTERM, SIGINT or a drain; the exit status. Raises GpuMissing, InfrastructureError, WorkerError."""
    with contextlib.closing(fenced_processes(settings)) as processes:
        gpu = choose_device(find_gpus(settings, processes), device)
    workplace = make_workplace(settings)
    workplace.device, workplace.targets = gpu, (gpu.name,)
    beat = DeviceBeat(workplace.database, gpu, workplace.name)
    task = GpuTask("measure", settings.gpu_module, gpu.uuid, str(lease_file(settings.gpu_lock_dir, gpu.uuid)))
    if not beat.may_continue():
        cache = settings.data_dir / "gpu-cache"
        if (silent := why_silent(task, workplace.processes, WARM_UP_LIMITS, cache=cache)) is not None:
            log.error("%s %s stays drained (%s): %s", gpu.name, gpu.uuid, beat.drained, silent)
            beat.register(fresh=False)
            return EXIT_DRAINED
    log.info("measuring on %s %s, driver %s", gpu.name, gpu.uuid, gpu.driver)
    beat.start()
    _take_wake_ups(wake_ups.GPU, workplace, steps, beat, beat.may_continue)
    if beat.drained is None:
        return 0
    log.error("%s %s is drained and takes no more work: %s", gpu.name, gpu.uuid, beat.drained)
    return EXIT_DRAINED


def _take_wake_ups(
    kind: str,
    workplace: Workplace,
    steps: Mapping[str, Step],
    beat: Callable[[], None] = lambda: None,
    may_continue: Callable[[], bool] = lambda: True,
) -> None:
    """`beat` and `may_continue`: as of QueueWorker."""
    # What fences in the tools that this worker runs; asked before the fork, which then has it.
    means = workplace.processes.means.in_force()
    log.info("fence: %s; `cukiln doctor` says more", ", ".join(name for name, is_there, _ in means if is_there))
    for name, is_there, reason in means:
        if not is_there:
            log.warning("fence: %s: %s", name, reason)
    remember_versions(workplace.settings)
    keep_warm(kind, workplace)
    queues = [wake_ups.queue_name(kind, target) for target in workplace.targets or (None,)]
    QueueWorker(
        queues,
        wake_ups.connect(redis_url(workplace.settings), answer_seconds=CALL_SECONDS),
        functools.partial(run_wake_up, workplace, steps),
        before_fork=workplace.database.dispose,  # a worker child must not inherit a connection
        before_wake_up=lambda: keep_warm(kind, workplace),
        beat=beat,
        may_continue=may_continue,
        look=(kind, workplace.targets[0] if workplace.targets else None),
    ).work()


def keep_warm(kind: str, workplace: Workplace) -> bool:
    """What forks the children that run kernels; False where a worker child that was forked before does not find it."""
    if kind == wake_ups.COMPILE:
        return workplace.processes.keep_warm(CHILD, CHILD_ENVIRONMENT)
    if kind == wake_ups.GPU:
        return workplace.processes.keep_warm(GPU_CHILD, child_environment())
    return True


def remember_versions(settings: Settings) -> None:
    """Of the test plans, before the first fork: reading all the texts that they stand for takes 0.4 s."""
    for sums in (TURING_SUMS, HOPPER_SUMS):
        cpu_plans(sanitize=settings.verify_sanitize, sums=sums)
        ptx_plans(sums)
    gpu_plans()


def remember_operators() -> None:
    """Read every operator's headers before the first fork. One whose text cannot be read fails where it is used."""
    for name in operators():
        try:
            read_headers(group_headers([name]))
        except TextError as error:
            log.warning("kernels of operator %s will be refused: %s", name, error)


def run_reconciler(settings: Settings) -> None:
    """Reconcile until SIGTERM or SIGINT."""
    workplace = make_workplace(settings)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # The main thread may hold the event's lock in `wait` right then: only a thread may set it.
        signal.signal(number, lambda number, frame: threading.Thread(target=stop.set).start())
    Reconciler(settings, workplace.database, workplace.blobs, workplace.redis).run(stop)


def make_workplace(settings: Settings) -> Workplace:
    """Open what a worker needs. Waits for the database's schema. Raises WorkerError, SettingsError."""
    load_operator_path(settings)
    database = Database(settings.database_url)
    wait_for_schema(database)
    return Workplace(
        settings=settings,
        database=database,
        blobs=BlobStore(database, settings.blobs_url),
        redis=wake_ups.connect(redis_url(settings)),
        processes=fenced_processes(settings),
        name=f"{socket.gethostname()}.{os.getpid()}",
    )


def wait_for_schema(database: Database, seconds: float = DATABASE_WAIT_SECONDS) -> None:
    """Until the database answers and is migrated. Raises WorkerError."""
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(DATABASE_AWAY),
        wait=tenacity.wait_exponential(multiplier=0.1, max=2.0),
        stop=tenacity.stop_after_delay(seconds),
        reraise=True,
    )
    try:
        retrying(database.check)
    except DATABASE_AWAY as error:
        raise WorkerError(f"the database is not ready after {seconds:g} s: {error}") from error


def _toolchain_beat(workplace: Workplace) -> Callable[[], None]:
    """Registers this worker's toolchain as alive every so often."""
    toolchain, due = workplace.toolchain, 0.0

    def beat() -> None:
        nonlocal due
        if time.monotonic() < due:
            return
        due = time.monotonic() + workplace.settings.toolchain_live_seconds / 3
        try:
            with workplace.database.write() as session:
                register_toolchain(session, toolchain.digest, toolchain.describe(), list(workplace.targets or ()))
        except DATABASE_AWAY as error:
            log.warning("toolchain not registered: %s", error)

    return beat


if __name__ == "__main__":
    sys.exit(main())
