"""`cukiln worker plan`, `cukiln worker compile [--target sm_80 …]`, `cukiln worker reconcile`: one server process.

Everything heavy is loaded, found and compiled here once, before the first fork: a horse then reaches its step in
milliseconds (see `workers.warm_up`).
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

import tenacity

from codegen.errors import TextError
from codegen.operators import operators
from codegen.render_group import group_headers
from codegen.scan_functions import remember_headers
from storage.blobs import BlobStore
from storage.database import Database
from storage.errors import SettingsError, StorageError
from storage.failures import DATABASE_ERRORS
from storage.logs import set_up_logging
from storage.operator_path import load_operator_path
from storage.settings import Settings, load_settings
from storage.toolchains import register_toolchain
from workers import embedded_valkey, tickets
from workers.processes import Processes
from workers.queue_worker import QueueWorker
from workers.reconcile import Reconciler
from workers.run_ticket import run_ticket
from workers.steps.context import Step, Workplace
from workers.toolchain import ToolchainMissing, supported_targets
from workers.warm_up import warm_up

log = logging.getLogger("cukiln.worker")

EXIT_CONFIG = 78  # sysexits.h
DATABASE_WAIT_SECONDS = 60.0  # until the schema is there: `serve` or the API migrates it, perhaps on another machine
_DATABASE_AWAY: tuple[type[Exception], ...] = (*DATABASE_ERRORS, StorageError, OSError)


class WorkerError(Exception):
    """This worker cannot start; the message says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="cukiln worker", description="Run one worker of the cukiln server.")
    parser.add_argument("kind", choices=[tickets.PLAN, tickets.COMPILE, "reconcile"])
    parser.add_argument("--target", action="append", default=[], help="compile for this target only; may be repeated")
    arguments = parser.parse_args(argv)
    try:
        settings = load_settings()
        set_up_logging(settings.log_level)
        if arguments.kind == "reconcile":
            run_reconciler(settings)
        else:
            from workers.steps import STEPS

            run_worker(arguments.kind, settings, STEPS, targets=arguments.target or None)
    except (SettingsError, ToolchainMissing, WorkerError) as error:
        sys.stderr.write(f"cukiln worker: {error}\n")
        return EXIT_CONFIG
    return 0


def redis_url(settings: Settings) -> str:
    """REDIS_URL, else that of the embedded valkey which runs over the data folder. Raises WorkerError."""
    if settings.redis_url:
        return settings.redis_url
    try:
        return embedded_valkey.url_file(settings.data_dir / "valkey").read_text()
    except FileNotFoundError:
        raise WorkerError(
            f"no Redis: set REDIS_URL, or start `cukiln serve` on the data folder {settings.data_dir} first"
        ) from None


def run_worker(
    kind: str, settings: Settings, steps: Mapping[str, Step], *, targets: Sequence[str] | None = None
) -> None:
    """Take tickets until SIGTERM or SIGINT. Raises ToolchainMissing, WorkerError."""
    workplace = make_workplace(settings)
    beat: Callable[[], None] = _nothing
    if kind == tickets.COMPILE:
        known = [target.name for target in supported_targets(workplace.toolchain)]
        unknown = sorted(set(targets or ()) - set(known))
        if unknown:
            raise WorkerError(f"nvcc here cannot compile for {', '.join(unknown)}: allowed are {', '.join(known)}")
        workplace.targets = tuple(targets or known)
        beat = ToolchainBeat(workplace)
        remember_operators()
    else:
        find_early(workplace)
    log.info("processes are fenced by %s", workplace.processes.isolation)  # asked before the fork: 10 ms
    warm_up(workplace.database)
    queues = [tickets.queue_name(kind, target) for target in workplace.targets or (None,)]
    QueueWorker(
        queues,
        tickets.connect(redis_url(settings)),
        functools.partial(run_ticket, workplace, steps),
        before_fork=workplace.database.dispose,
        beat=beat,
    ).work()


def remember_operators() -> None:
    """Read every operator's headers before the first fork. One whose text cannot be read fails where it is used."""
    for name in operators():
        try:
            remember_headers(group_headers([name]))
        except TextError as error:
            log.warning("kernels of operator %s will be refused: %s", name, error)


def find_early(workplace: Workplace) -> None:
    """Find the toolchain before the first fork, so that no horse has to. A plan worker can do without: its step says so
    where it needs one."""
    try:
        log.info("toolchain %s", workplace.toolchain.digest[:16])
    except ToolchainMissing as error:
        log.warning("%s", error)


def run_reconciler(settings: Settings) -> None:
    """Reconcile until SIGTERM or SIGINT."""
    workplace = make_workplace(settings)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, functools.partial(_end_loop, stop))
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
        redis=tickets.connect(redis_url(settings)),
        processes=Processes(),
        name=f"{socket.gethostname()}.{os.getpid()}",
    )


def wait_for_schema(database: Database, seconds: float = DATABASE_WAIT_SECONDS) -> None:
    """Until the database answers and is migrated. Raises WorkerError."""
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(_DATABASE_AWAY),
        wait=tenacity.wait_exponential(multiplier=0.1, max=2.0),
        stop=tenacity.stop_after_delay(seconds),
        reraise=True,
    )
    try:
        retrying(database.check)
    except _DATABASE_AWAY as error:
        raise WorkerError(f"the database is not ready after {seconds:g} s: {error}") from error


class ToolchainBeat:
    """Tell the database every so often that this worker's toolchain is alive."""

    def __init__(self, workplace: Workplace) -> None:
        self._workplace = workplace
        self._every = workplace.settings.toolchain_live_seconds / 3
        self._next = 0.0

    def __call__(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        toolchain = self._workplace.toolchain
        try:
            with self._workplace.database.write() as session:
                register_toolchain(session, toolchain.digest, toolchain.describe(), list(self._workplace.targets or ()))
        except _DATABASE_AWAY as error:
            log.warning("toolchain not registered: %s", error)


def _nothing() -> None:
    return None


def _end_loop(stop: threading.Event, number: int, frame: FrameType | None) -> None:
    # The main thread may hold the event's lock in `wait` right now: only a thread may set it.
    threading.Thread(target=stop.set).start()


if __name__ == "__main__":
    sys.exit(main())
