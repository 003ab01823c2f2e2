"""What a step is given: the item it works on, the stores, and the word to stop."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from redis import Redis
from redis.exceptions import RedisError

from storage.blobs import BlobStore
from storage.database import Database, Session
from storage.devices import drivers_of
from storage.items import Claim, hold
from storage.judge import Judged
from storage.judging_work import Versions
from storage.lease_builds import FileLimits
from storage.new_items import COMPILE
from storage.pauses import is_paused, set_pause
from storage.rows import chunks
from storage.seconds import PROBLEMS_AT_ONCE, Spent, add_seconds
from storage.settings import Settings
from storage.verdicts import CPU, GPU
from workers import tickets
from workers.able import why_unable
from workers.compile_file import Phase
from workers.gpu.interface import Device
from workers.gpu.plan_version import gpu_plan_version
from workers.limits import process_limits
from workers.processes import Processes
from workers.stopwatch import Stopwatch
from workers.toolchain import Toolchain, find_toolchain
from workers.verify_cpu import plan_version

T = TypeVar("T")
StopReason = Literal["lost", "cancelled", "deadline", "stopping"]


class Cancelled(Exception):
    """The step was told to stop and did. `reason`: the lease was lost, the job cancelled, its budget spent, or the
    worker is stopping and the item will be done by another."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason


class GiveUp(Exception):
    """The item cannot be done, now or later: it is failed without another attempt. The message goes to the user."""


class HandBack(Exception):
    """The step has done a part, and the item waits again for the rest, because it is another job's turn."""


class Cancel(threading.Event):
    """Set when the step should stop; the first reason stays."""

    def __init__(self) -> None:
        super().__init__()
        self.reason: StopReason | None = None

    def because(self, reason: StopReason) -> None:
        if self.reason is None:
            self.reason = reason
        self.set()


@dataclass
class Workplace:
    """What the items of one worker share. Made once in the worker, before it forks."""

    settings: Settings
    database: Database
    blobs: BlobStore
    redis: Redis
    processes: Processes
    name: str  # of the worker, as `items.worker` shows it
    targets: tuple[str, ...] | None = None  # which targets' items it takes; None: plan items, which have none
    device: Device | None = None  # of a worker that measures; its targets are the device's class
    progress_told_at: dict[str, float] = field(default_factory=dict)  # by job, `time.monotonic()`
    in_doubt: bool = True  # whether this machine can do any work, until it was looked at

    def compile_workers(self, target: str) -> int:
        """Live compile workers of the target, on whichever machine; where none is known, as many as the settings
        say."""
        try:
            live = len(tickets.live_workers(self.redis, tickets.queue_name(tickets.COMPILE, target)))
        except RedisError:
            live = 0
        return live or self.settings.workers

    def file_limits(self, target: str) -> FileLimits:
        """What a compile worker may take at once."""
        return FileLimits(
            toolchain=self.toolchain.digest,
            workers=self.compile_workers(target),
            kernels=self.settings.group_kernels,
            bytes=self.settings.group_memory_bytes,
        )

    def why_paused(self) -> str | None:
        """Why this machine can do no work now, where the machine has failed an attempt, or was never looked at: then it
        is looked at, and others are told."""
        if not self.in_doubt:
            return None
        reason = why_unable(self.processes, self.blobs)
        with self.database.read() as session:
            was_paused = is_paused(session, self.name)
        if reason is not None or was_paused:
            with self.database.write() as session:
                set_pause(session, self.name, reason)
        self.in_doubt = reason is not None
        return reason

    @cached_property
    def toolchain(self) -> Toolchain:
        """Found on first use (0.1 s). Raises ToolchainMissing."""
        return find_toolchain(self.processes, nvcc=self.settings.nvcc, host_compiler=self.settings.host_compiler)


@dataclass(frozen=True)
class StepContext:
    """One attempt at one item.

    A step either ends the item itself, in the transaction that writes its results, or returns, and the item is
    completed then; both under the claim, so that an attempt that has lost its lease writes nothing. It raises
    `Cancelled` (see `check`) where `cancel` was set, `GiveUp` where another attempt is useless; anything else is
    tried again.
    """

    workplace: Workplace
    claim: Claim
    cancel: Cancel
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    phases: list[Phase] = field(default_factory=list)  # by the stopwatch; what the step does not record otherwise

    @property
    def settings(self) -> Settings:
        return self.workplace.settings

    @property
    def database(self) -> Database:
        return self.workplace.database

    @property
    def blobs(self) -> BlobStore:
        return self.workplace.blobs

    @property
    def redis(self) -> Redis:
        return self.workplace.redis

    @property
    def processes(self) -> Processes:
        return self.workplace.processes

    @property
    def toolchain(self) -> Toolchain:
        return self.workplace.toolchain

    @property
    def plan_version(self) -> str:
        """Of the CPU verdicts that count here."""
        return plan_version(sanitize=self.settings.verify_sanitize)

    @property
    def gpu_plan_version(self) -> str:
        """Of the verdicts and measurements of GPUs that count here."""
        return gpu_plan_version()

    @property
    def since_claim(self) -> float:
        """Seconds from the claim to the start of the stopwatch."""
        since = self.database.clock.now() - self.claim.claimed_at
        return max(0.0, since - self.stopwatch.read().wall)

    def drivers(self, session: Session) -> dict[str, str]:
        """Today's driver of each device class with a live GPU: only times that were measured under it count."""
        return drivers_of(session, self.settings.toolchain_live_seconds)

    @property
    def device(self) -> Device:
        """The GPU of this worker. Raises GiveUp where it has none: the item came to the wrong kind of worker."""
        if self.workplace.device is None:
            raise GiveUp(f"{self.claim.kind} {self.claim.ref} needs a worker with a GPU")
        return self.workplace.device

    def versions(self, session: Session) -> Versions:
        """What counts as known of builds here, today."""
        settings = self.settings
        by_venue = {COMPILE: settings.compile_limits, CPU: settings.verify_limits, GPU: settings.measure_limits}
        limits = {name: process_limits(one).by_name for name, one in by_venue.items()}
        return Versions(self.plan_version, self.gpu_plan_version, self.drivers(session), limits)

    def fresh_seed(self) -> int:
        """Drawn anew for every proof. 12 digits of hex: exact also in JSON readers that know doubles only."""
        return int(self.database.clock.new_id()[:12], 16)

    def check(self) -> None:
        """Raise `Cancelled` where the step should stop."""
        if self.cancel.is_set():
            raise Cancelled(self.cancel.reason or "stopping")

    def publish(self, type: str, data: Mapping[str, Any], *, job_id: str | None = None) -> None:
        """Tell the watchers of the item's jobs, or of `job_id`. Best effort."""
        for job in self.claim.jobs if job_id is None else (job_id,):
            tickets.publish(self.redis, job, type, data, length=self.settings.event_stream_length)

    def in_parts(self, part: Callable[[Session], tuple[list[Judged], bool]]) -> list[Judged]:
        """Run write transactions of `part` as long as it says that there may be more; others have the database between
        them. Wakes what goes on, and returns all of it."""
        judged: list[Judged] = []
        more = True
        while more:
            with self.database.write() as session:
                some, more = part(session)
            self.wake((), some)
            judged += some
            if more:
                self.database.pause()
        return judged

    def complete(self, spent: Spent, end: Callable[[Session], T]) -> T:
        """End the item by `end`, in one transaction with the last part of what was `spent`; other parts have theirs
        before. Raises `LostClaim`."""
        *parts, last = list(chunks(spent, PROBLEMS_AT_ONCE)) or [[]]
        for some in parts:
            with self.database.write() as session:
                hold(session, self.claim)
                add_seconds(session, {problem: spent[problem] for problem in some})
            self.database.pause()
        with self.database.write() as session:
            ended = end(session)
            add_seconds(session, {problem: spent[problem] for problem in last})
        return ended

    def wake(self, waiting: Iterable[tuple[str, str | None]], judged: Iterable[Judged] = ()) -> None:
        """Write tickets for work (kind and target) that was just committed: one each, and for pending builds as many
        as there are workers to take them. Best effort: the reconciler finds missing ones."""
        counts = Counter([*waiting, *((one.kind, one.target) for one in judged)])
        for (kind, target), count in counts.items():
            if kind == tickets.COMPILE:
                workers = self.workplace.compile_workers(str(target))
                tickets.ensure_tickets(self.redis, kind, target, min(count, workers))
            else:
                tickets.add_tickets(self.redis, kind, target, count)


Step = Callable[[StepContext], None]
