"""What the processes of `cukiln serve` stand on: tools, GPUs, a migrated database, a queue. Its imports take a second,
so the supervisor imports it only once the fork server is busy with its own."""

from collections.abc import Sequence
from contextlib import closing

from redis.exceptions import RedisError

from storage.blobs.blob_store import BlobStore
from storage.config.operator_path import load_operator_path
from storage.config.settings import Settings
from storage.database.session import Database
from workers import wake_ups
from workers.compile.toolchain import toolchain_of
from workers.gpu.interface import Device
from workers.processes.processes import fenced_processes
from workers.supervisor.start_checks import gpus_to_use, refuse_silent_redis
from workers.supervisor.valkey import EmbeddedValkey
from workers.worker.queue_worker import CHILD_GRACE_SECONDS

API_GRACE_SECONDS = 3.0  # open event streams would keep it alive for ever


def check_machine(settings: Settings) -> list[Device]:
    """The GPUs to measure on. Raises StorageError, ToolchainMissing, ServeError."""
    load_operator_path(settings, only_check=True)
    with closing(fenced_processes(settings)) as processes:
        toolchain_of(settings, processes)
        return gpus_to_use(settings, processes)


def open_stores(settings: Settings) -> None:
    """The database, migrated, and the blobs. Raises StorageError."""
    database = Database(settings.database_url)
    try:
        database.migrate()
        BlobStore(database, settings.blobs_url).require()
    finally:
        database.dispose()


def start_queue(settings: Settings) -> EmbeddedValkey | None:
    """A running valkey of our own, where the settings name no server. Raises ServeError."""
    if settings.redis_url is not None:
        refuse_silent_redis(settings.redis_url)
        return None
    valkey = EmbeddedValkey(settings.data_dir / "valkey")
    valkey.start()
    return valkey


def roles(
    settings: Settings, api: Sequence[str], worker: Sequence[str], gpus: Sequence[Device]
) -> list[tuple[str, Sequence[str], float]]:
    """Name, command and seconds to end of each kept process, in the order in which they are started."""
    grace = CHILD_GRACE_SECONDS + 1
    compilers = range(1, settings.workers + 1)
    return [
        ("api", api, API_GRACE_SECONDS),
        ("reconcile", [*worker, "reconcile"], 2.0),
        ("plan worker", [*worker, wake_ups.PLAN], grace),
        *((f"compile worker {n}", [*worker, wake_ups.COMPILE], grace) for n in compilers),
        *((f"gpu worker {n}", [*worker, wake_ups.GPU, "--device", gpu.uuid], grace) for n, gpu in enumerate(gpus, 1)),
    ]


def live_workers(redis_url: str) -> set[str]:
    """`host.pid` of the workers that take wake-ups; none where the queue does not answer."""
    with closing(wake_ups.connect(redis_url)) as client:
        try:
            return {name.rpartition(".")[0] for name in wake_ups.live_workers(client)}
        except RedisError:
            return set()
