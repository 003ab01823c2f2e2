"""What a step is given: the task it works on, the stores, and the request to stop."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from redis import Redis

from codegen.identity import PlanVersions
from codegen.kernel import Kernel
from codegen.primitives import TURING_SUMS
from codegen.targets import architectures
from codegen.targets import target as find_target
from storage.blobs.blob_store import BlobStore
from storage.config.own_modules import gpu_plans
from storage.config.settings import Settings
from storage.database.session import Database, Session
from storage.database.sql import chunks
from storage.database.tables import LIVE
from storage.entities.heartbeats import drivers_of, is_paused, set_pause
from storage.entities.jobs import load_problem
from storage.entities.stage_times import PROBLEMS_AT_ONCE, Spent, add_seconds
from storage.entities.task_kinds import COMPILE
from storage.entities.verdicts import CPU, GPU
from storage.queue.tasks import Lease, require_lease
from storage.reports.progress import job_progress
from storage.transitions.apply_verdicts import NextStep, Versions
from storage.transitions.take_work import FileLimits
from workers import wake_ups
from workers.compile.compile_file import Phase
from workers.compile.toolchain import Toolchain, toolchain_of
from workers.cpu.verify import cpu_plans
from workers.gpu.interface import Device
from workers.processes.processes import InfrastructureError, Processes
from workers.processes.stopwatch import Stopwatch

T = TypeVar("T")
StopReason = Literal["lost", "cancelled", "deadline", "stopping"]
ROOM_BYTES = 4 << 20
"""A group's source, PTX, cubin and library together take less."""
MOST_PUBLISHED = 16
"""Jobs that get events of one step: where more share a group, the others get those of their own steps."""
PROGRESS_SECONDS = 0.2
"""Between two such events of a job from one process; the API compares with the database."""


class Cancelled(Exception):
    """`reason`: the lease was lost, the job cancelled, its budget spent, or the worker is stopping."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason = reason


class GiveUp(Exception):
    """The task cannot be done, now or later: it is failed without another attempt. The message goes to the user."""


class HandBack(Exception):
    """The step has done a part, and the task waits again for the rest, because it is another job's turn."""


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
    """What the tasks of one worker share. Made once in the worker, before it forks."""

    settings: Settings
    database: Database
    blobs: BlobStore
    redis: Redis
    processes: Processes
    name: str  # of the worker, as `tasks.worker` shows it
    targets: tuple[str, ...] | None = None  # which targets' tasks it takes; None: plan tasks, which have none
    device: Device | None = None  # of a worker that measures; its targets are the device's class
    progress_published_at: dict[str, float] = field(default_factory=dict)  # by job, `time.monotonic()`
    in_doubt: bool = True  # whether this machine can do any work, until it was looked at

    def compile_workers(self, target: str) -> int:
        """Live compile workers of the target; where none is known, as many as the settings say."""
        return wake_ups.worker_count(self.redis, wake_ups.COMPILE, target) or self.settings.workers

    def file_limits(self, target: str) -> FileLimits:
        """What a compile worker may take at once."""
        return FileLimits(
            toolchain=self.toolchain.digest,
            workers=self.compile_workers(target),
            kernels=self.settings.group_kernels,
            bytes=self.settings.group_memory_bytes,
        )

    def why_paused(self) -> str | None:
        """Why this machine can do no work now: looked at where it failed an attempt, or never was."""
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
        return toolchain_of(self.settings, self.processes)


@dataclass(frozen=True)
class StepContext:
    """One attempt at one task.

    A step either ends the task itself, in the transaction that writes its results, or returns, and the task is
    completed then; both under the lease, so that an attempt that has lost its lease writes nothing. It raises
    `Cancelled` (see `check`) where `cancel` was set, `GiveUp` where another attempt is useless; anything else is
    tried again.
    """

    workplace: Workplace
    lease: Lease
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

    def cpu_plans(self, target: str | None) -> PlanVersions:
        """Of the CPU verdicts that count here for kernels of a target; None: of those that add as Turing does."""
        sums = TURING_SUMS if target is None else find_target(target).tensor_sums
        return cpu_plans(sanitize=self.settings.verify_sanitize, sums=sums)

    def uploaded(self, files: Mapping[str, tuple[bytes, str]]) -> tuple[dict[str, str], Phase]:
        """The digests of the files, bytes with a media type by name, that are stored now; and how long that took."""
        start = self.stopwatch.read().wall
        blobs = self.blobs.put_many(list(files.values()))
        digests = {name: blob.digest for name, blob in zip(files, blobs, strict=True)}
        return digests, Phase("upload", self.stopwatch.read().wall - start, start)

    def placed(self, phases: Sequence[Phase], kernels: Sequence[Kernel] = ()) -> list[dict[str, Any]]:
        """As the database keeps them: starts count from the lease, kernels by their place, none for all."""
        since_lease = max(0.0, self.database.clock.now() - self.lease.leased_at - self.stopwatch.read().wall)
        place_of = {kernel.id: place for place, kernel in enumerate(kernels)}
        rows: list[dict[str, Any]] = []
        for phase in phases:
            rows.append({"name": phase.name, "seconds": phase.seconds, "start": since_lease + phase.start})
            places = [place_of[id] for id in phase.kernels if id in place_of]
            if 0 < len(places) < len(place_of):
                rows[-1]["kernels"] = places
        return rows

    @property
    def device(self) -> Device:
        """The GPU of this worker. Raises GiveUp where it has none: the task came to the wrong kind of worker."""
        if self.workplace.device is None:
            raise GiveUp(f"{self.lease.kind} {self.lease.ref} needs a worker with a GPU")
        return self.workplace.device

    def versions(self, session: Session) -> Versions:
        """What counts as known of builds here, today."""
        settings = self.settings
        by_venue = {
            COMPILE: settings.limits("compile"),
            CPU: settings.limits("verify"),
            GPU: settings.limits("measure"),
        }
        limits = {name: limit_settings.by_name for name, limit_settings in by_venue.items()}
        # Only times that were measured under today's driver count.
        drivers = drivers_of(session, settings.toolchain_live_seconds)
        others = {
            name: self.cpu_plans(name) for name, sheet in architectures().items() if sheet.tensor_sums != TURING_SUMS
        }
        return Versions(self.cpu_plans(None), gpu_plans(), drivers, limits, others)

    def fresh_seed(self) -> int:
        """Drawn anew for every verification. 12 digits of hex: exact also in JSON readers with doubles only."""
        return int(self.database.clock.new_id()[:12], 16)

    def check(self) -> None:
        """Raise `Cancelled` where the step should stop."""
        if self.cancel.is_set():
            raise Cancelled(self.cancel.reason or "stopping")

    def publish(self, type: str, data: Mapping[str, Any], *, job_id: str | None = None) -> None:
        """Publish to the watchers of the task's jobs, or of `job_id`. Best effort."""
        for job in self.lease.jobs if job_id is None else (job_id,):
            wake_ups.publish(self.redis, job, type, data, length=self.settings.event_stream_length)

    def publish_steps(self, next_steps: Sequence[NextStep]) -> None:
        """What a step came to, for the watchers."""
        self.publish_problems([entry.problem for entry in next_steps])
        self.publish_progress()

    def publish_progress(self) -> None:
        """One `progress` event to each job of the task, with its counts as they are now."""
        published_at, now = self.workplace.progress_published_at, time.monotonic()
        for old in [job for job, at in published_at.items() if now - at >= PROGRESS_SECONDS]:
            del published_at[old]
        for job in self.lease.jobs[:MOST_PUBLISHED]:
            if job in published_at:
                continue
            published_at[job] = now
            with self.database.read() as session:
                report = job_progress(session, job, self.settings.toolchain_live_seconds)
            if report is not None:
                counts = {name: getattr(report, name).model_dump(mode="json") for name in ("progress", "seconds")}
                self.publish("progress", {"state": report.state, **counts}, job_id=job)

    def publish_problems(self, problem_ids: Sequence[int]) -> None:
        """One `problem` event for each problem that has ended."""
        with self.database.read() as session:
            ended = [
                problem for id in problem_ids if (problem := load_problem(session, id)) and problem.state not in LIVE
            ]
        for problem in ended:
            event = {name: getattr(problem, name) for name in ("name", "key", "state", "winner", "error")}
            self.publish("problem", event, job_id=problem.job_id)

    def in_parts(self, part: Callable[[Session], tuple[list[NextStep], bool]]) -> list[NextStep]:
        """Run write transactions of `part` while there may be more. Wakes what continues, and returns all of it."""
        next_steps: list[NextStep] = []
        more = True
        while more:
            with self.database.write() as session:
                some, more = part(session)
            self.wake((), some)
            next_steps += some
            if more:
                self.database.pause()
        return next_steps

    def complete(self, spent: Spent, end: Callable[[Session], T]) -> T:
        """End the task by `end`, with the last part of what was `spent`. Raises `LostLease`."""
        *parts, last = list(chunks(spent, PROBLEMS_AT_ONCE)) or [[]]
        for some in parts:
            with self.database.write() as session:
                require_lease(session, self.lease)
                add_seconds(session, {problem: spent[problem] for problem in some})
            self.database.pause()
        with self.database.write() as session:
            ended = end(session)
            add_seconds(session, {problem: spent[problem] for problem in last})
        return ended

    def wake(self, waiting: Iterable[tuple[str, str | None]], next_steps: Iterable[NextStep] = ()) -> None:
        """Write wake-ups for work that was just committed: of pending builds as many as workers. Best effort."""
        counts = Counter([*waiting, *((entry.kind, entry.target) for entry in next_steps)])
        for (kind, target), count in counts.items():
            if kind == wake_ups.COMPILE:
                workers = self.workplace.compile_workers(str(target))
                wake_ups.ensure_wake_ups(self.redis, kind, target, min(count, workers))
            else:
                wake_ups.add_wake_ups(self.redis, kind, target, count)


Step = Callable[[StepContext], None]


def why_unable(processes: Processes, blobs: BlobStore) -> str | None:
    """What is wrong, and what to do; None where all is well."""
    try:
        with processes.private_folder("room") as folder:
            _fill(folder / "room")
    except (OSError, InfrastructureError) as error:
        return f"temporary files cannot be written ({_reason(error)}): make room, or set TMPDIR to another disk"
    try:
        blobs.try_out()
    except Exception as error:  # noqa: BLE001 - each kind of store has its own
        return f"the blob store takes no bytes ({_reason(error)}): make room in it, or bring it back"
    return None


def _fill(path: Path) -> None:
    with path.open("wb") as file:
        file.write(bytes(ROOM_BYTES))
        file.flush()
        os.fsync(file.fileno())


def _reason(error: BaseException) -> str:
    """Without the path, which is another one each time."""
    reason = error.__cause__ if isinstance(error, InfrastructureError) and error.__cause__ is not None else error
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return type(reason).__name__
