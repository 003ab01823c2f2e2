"""What the processes of `cukiln serve` stand on: tools, GPUs, a migrated database, a queue. Its imports take a second,
so the supervisor imports it only once the fork server is busy with its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from redis.exceptions import RedisError

from storage.database import Database
from storage.errors import StorageError
from storage.operator_path import check_operator_path
from storage.settings import Settings
from workers import tickets
from workers.embedded_valkey import EmbeddedValkey, ValkeyFailed
from workers.gpu.interface import Device
from workers.processes import Processes
from workers.queue_worker import HORSE_GRACE_SECONDS
from workers.start_checks import ServeError, gpus_to_use, refuse_silent_redis
from workers.toolchain import ToolchainMissing, find_toolchain

GPU_WORKER = "gpu worker"
API_GRACE_SECONDS = 3.0  # open event streams would keep it alive for ever


@dataclass(frozen=True)
class Kept:
    """A process that is kept running, and how long it may take to end."""

    name: str
    argv: Sequence[str]
    grace_seconds: float


def check_machine(settings: Settings) -> list[Device]:
    """The GPUs to measure on. Raises ServeError where operators, compilers or GPUs are not what the settings say."""
    try:
        check_operator_path(settings)
        with closing(Processes()) as processes:
            find_toolchain(processes, nvcc=settings.nvcc, host_compiler=settings.host_compiler)
            return gpus_to_use(settings, processes)
    except (ToolchainMissing, StorageError) as error:
        raise ServeError(str(error)) from error


def migrate(settings: Settings) -> None:
    """Raises ServeError."""
    database = Database(settings.database_url)
    try:
        database.migrate()
    except StorageError as error:
        raise ServeError(str(error)) from error
    finally:
        database.dispose()


def start_queue(settings: Settings) -> EmbeddedValkey | None:
    """A running valkey of our own, where the settings name no server. Raises ServeError."""
    if settings.redis_url is not None:
        refuse_silent_redis(settings.redis_url)
        return None
    valkey = EmbeddedValkey(settings.data_dir / "valkey")
    try:
        valkey.start()
    except ValkeyFailed as error:
        raise ServeError(str(error)) from error
    return valkey


def start_again(valkey: EmbeddedValkey) -> str | None:
    """Start a valkey that has ended; why it does not start."""
    try:
        valkey.start()
    except ValkeyFailed as error:
        return str(error)
    return None


def kept_processes(settings: Settings, api: Sequence[str], worker: Sequence[str], gpus: Sequence[Device]) -> list[Kept]:
    """In the order in which they are started."""
    grace = HORSE_GRACE_SECONDS + 1
    kept = [
        Kept("api", api, API_GRACE_SECONDS),
        Kept("reconcile", [*worker, "reconcile"], 2.0),
        Kept("plan worker", [*worker, tickets.PLAN], grace),
    ]
    kept += [Kept(f"compile worker {n}", [*worker, tickets.COMPILE], grace) for n in range(1, settings.workers + 1)]
    for number, device in enumerate(gpus, 1):
        kept.append(Kept(f"{GPU_WORKER} {number}", [*worker, tickets.GPU, "--device", device.uuid], grace))
    return kept


def live_workers(redis_url: str) -> set[str]:
    """`host.pid` of the workers that take tickets; none where the queue does not answer."""
    client = tickets.connect(redis_url)
    try:
        return {name.rpartition(".")[0] for name in tickets.live_workers(client)}
    except RedisError:
        return set()
    finally:
        client.close()
