"""An API without workers: a test takes their steps itself, when it says so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from redis import Redis

from storage.blobs.blob_store import BlobStore
from storage.transitions import take_work
from tests.support.fixtures.api import Api, serving
from workers import wake_ups
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes
from workers.steps import STEPS
from workers.steps.context import Cancel, StepContext, Workplace
from workers.supervisor.valkey import EmbeddedValkey

TARGETS = ("sm_80", "cpu")


@dataclass(frozen=True)
class WorkedApi:
    api: Api
    redis: Redis
    processes: Processes
    toolchain: Toolchain

    @classmethod
    @contextmanager
    def over(cls, folder: Path, processes: Processes, toolchain: Toolchain) -> Iterator[Self]:
        valkey = EmbeddedValkey(folder / "valkey")
        valkey.start()
        redis = wake_ups.connect(valkey.url)
        try:
            with serving(folder / "data", workers=1) as api:
                yield cls(api, redis, processes, toolchain)
        finally:
            redis.close()
            valkey.stop()

    def work(self) -> None:
        """All that waits, for these targets."""
        blobs = BlobStore(self.api.database, self.api.settings.blobs_url)
        workplace = Workplace(self.api.settings, self.api.database, blobs, self.redis, self.processes, "all", TARGETS)
        while True:
            with self.api.database.write() as session:
                lease = take_work.take(session, list(STEPS), list(TARGETS), "all", 600.0)
            if lease is None:
                return
            STEPS[lease.kind](StepContext(workplace, lease, Cancel()))
