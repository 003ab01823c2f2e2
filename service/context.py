"""What every handler works with: one object per application, made at start, closed at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from redis import Redis

from codegen.targets import targets
from service.resolve import Known
from service.winner_cache import WinnerCache
from storage.blobs import BlobStore
from storage.database import Database
from storage.operator_path import load_operator_path
from storage.settings import Settings
from storage.toolchains import LiveToolchain, live_toolchains
from workers import tickets


@dataclass(frozen=True)
class Service:
    """The settings and the open parts. `redis` is None where no REDIS_URL is known: then nothing is announced."""

    settings: Settings
    database: Database
    blobs: BlobStore
    redis: Redis | None
    winners: WinnerCache

    @classmethod
    def open(cls, settings: Settings) -> Service:
        load_operator_path(settings)
        database = Database(settings.database_url)
        redis = tickets.connect(settings.redis_url) if settings.redis_url else None
        return cls(settings, database, BlobStore(database, settings.blobs_url), redis, WinnerCache(database))

    def close(self) -> None:
        if self.redis is not None:
            self.redis.close()
        self.database.dispose()

    def toolchains(self) -> list[LiveToolchain]:
        """The toolchains of workers that gave a sign of life lately."""
        with self.database.read() as session:
            return live_toolchains(session, self.settings.toolchain_live_seconds)

    def known(self) -> Known:
        """What requests may name now. Without any live toolchain every data sheet counts: a worker may come."""
        compiled = {name for toolchain in self.toolchains() for name in toolchain.targets}
        sheets = set(targets())
        return Known(self.settings.default_target, frozenset(sheets & compiled or sheets))


def service_of(request: Request) -> Service:
    service: Any = request.app.state.service
    assert isinstance(service, Service)
    return service


ServiceDep = Annotated[Service, Depends(service_of)]
