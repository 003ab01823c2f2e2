"""What every handler works with: one object per application, made at start, closed at its end. How far a watched job is
it reads once for all watchers that ask at the same time."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request
from redis import Redis

from codegen.identity import CUDA
from codegen.targets import targets
from service.http.room import BodyRooms
from service.keyring import KeyRing
from service.requests.resolve import Known
from service.threads import Announcer, Together, Write
from service.winner_cache import CachedWinner, WinnerCache
from storage.blobs.blob_store import BlobStore
from storage.config.operator_path import load_operator_path
from storage.config.settings import Settings
from storage.database.database_errors import DATABASE_ERRORS
from storage.database.session import Database
from storage.entities.heartbeats import LiveDevice, LiveToolchain, live_devices, live_toolchains, measures_under
from storage.entities.searches import MeasuredUnder
from storage.reports.progress import JobProgress, job_progress
from workers import wake_ups

DRAINED_SECONDS = 24 * 3600.0
BUSY_SECONDS = 10.0
"""How long a request that writes may wait for another writer: then 503. A worker waits longer: no caller does."""
MOST_READS = 1000
"""Records that are read at once for requests of one record each."""
MOST_WATCHERS = 256
"""Whose jobs are read at once."""


@dataclass(frozen=True)
class Alive:
    """Toolchains and GPUs of workers with a recent heartbeat."""

    toolchains: list[LiveToolchain]
    devices: list[LiveDevice]

    def known(self, default_target: str | None, cuda: int = CUDA) -> Known:
        """What requests may name. Without a live toolchain every data sheet counts: a worker may start later."""
        compiled = {name for toolchain in self.toolchains for name in toolchain.targets}
        sheets = set(targets())
        classes: dict[int, set[str]] = {}
        for device in self.devices:
            if device.drained is None:
                classes.setdefault(int(device.capability.replace(".", "")), set()).add(device.device_class)
        ordered = {capability: sorted(names) for capability, names in classes.items()}
        return Known(default_target, frozenset(sheets & compiled or sheets), ordered, cuda)

    def measures_under(self, device_class: str, operator: str) -> set[MeasuredUnder]:
        """The drivers and verification plans of the class's GPUs that take work of the operator."""
        of_class = [device for device in self.devices if device.device_class == device_class and device.drained is None]
        return {measures_under(device, operator) for device in of_class}


@dataclass(frozen=True)
class Service:
    """The settings and the open parts. `redis` and its `announcer` are None where no REDIS_URL is known."""

    settings: Settings
    database: Database
    blobs: BlobStore
    redis: Redis | None
    announcer: Announcer | None
    winners: WinnerCache
    keys: KeyRing
    bodies: BodyRooms
    winner_reads: Together[str, CachedWinner | None]
    progress_reads: Together[str, JobProgress | None]

    @classmethod
    def open(cls, settings: Settings) -> "Service":
        load_operator_path(settings)
        database = Database(settings.database_url, busy_seconds=BUSY_SECONDS)
        redis = wake_ups.connect(settings.redis_url) if settings.redis_url else None
        winners = WinnerCache(Database(settings.database_url))

        def read(keys: Sequence[str]) -> list[CachedWinner | None]:
            records = winners.get(keys)
            return [records.get(key) for key in keys]

        winner_reads = Together[str, CachedWinner | None]("winner-reads", read, MOST_READS)
        progress = partial(read_progress, database, settings.toolchain_live_seconds)
        progress_reads = Together[str, JobProgress | None]("progress-reads", progress, MOST_WATCHERS)
        blobs, bodies = BlobStore(database, settings.blobs_url), BodyRooms(settings.max_body_bytes)
        announcer = Announcer(redis) if redis is not None else None
        keys = KeyRing(settings, winners.database)
        return cls(settings, database, blobs, redis, announcer, winners, keys, bodies, winner_reads, progress_reads)

    def announce(self, write: Write) -> None:
        """Write to Redis, where there is one, without waiting for it."""
        if self.announcer is not None:
            self.announcer.later(write)

    def close(self) -> None:
        if self.announcer is not None:
            self.announcer.close()
        if self.redis is not None:
            self.redis.close()
        self.winner_reads.close()
        self.progress_reads.close()
        self.winners.close()
        self.database.dispose()

    def known(self) -> Known:
        """What requests may name now."""
        return self.alive().known(self.settings.default_target, self.settings.cuda)

    def alive(self, *, with_drained: bool = False) -> Alive:
        """By the workers' heartbeats; `with_drained`: also GPUs that were drained within a day."""
        within = self.settings.toolchain_live_seconds
        with self.database.read() as session:
            since = self.database.clock.now() - within
            # A worker that drained its GPU may have ended; the reason stays visible.
            devices = live_devices(session, DRAINED_SECONDS if with_drained else within, with_drained=with_drained)
            alive = [device for device in devices if device.drained is not None or device.seen_at >= since]
            return Alive(live_toolchains(session, within), alive)


async def _service(request: Request) -> Service:
    """A dependency that takes no thread: a probe is answered while all of them are busy."""
    return service_of(request)


def service_of(request: Request) -> Service:
    service: Any = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceDep = Annotated[Service, Depends(_service)]


log = logging.getLogger("cukiln.service")


def read_progress(database: Database, live_seconds: float, jobs: Sequence[str]) -> list[JobProgress | None]:
    """Of each; None where there is no such job or the database does not answer."""
    by_job = {job: _read(database, live_seconds, job) for job in dict.fromkeys(jobs)}
    return [by_job[job] for job in jobs]


def _read(database: Database, live_seconds: float, job: str) -> JobProgress | None:
    try:
        with database.read() as session:
            return job_progress(session, job, live_seconds)
    except DATABASE_ERRORS as error:
        log.warning("job %s cannot be read for its watchers: %s", job, error)
        return None
