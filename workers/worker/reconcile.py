"""Bring wake-ups, leases and budgets back in line with the database, every second.

Every worker may die, Redis may be flushed, a wake-up lost or doubled: this loop is what makes it harmless. Any number
of copies may run; each round is a few short transactions, of which those that find nothing write nothing.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from threading import Event

from redis import Redis
from redis.exceptions import RedisError

from storage.blobs.blob_store import BlobStore
from storage.config.settings import Settings
from storage.database.database_errors import DATABASE_AWAY
from storage.database.session import Database, Session
from storage.entities import jobs
from storage.entities.heartbeats import gone_toolchains, standing_toolchains
from storage.maintenance.retention import Keep, Removed, collect, find_half_accepted
from storage.queue.losses import SilenceWatch
from storage.queue.tasks import silent_leases
from storage.transfer.withdrawals import find_broken_off
from storage.transitions import end_attempt, take_work
from storage.transitions.end_jobs import CLEARED_AT_ONCE, expire_budgets, find_ended
from storage.transitions.pending_builds import give_up_place
from workers import wake_ups

log = logging.getLogger("cukiln.reconcile")

SWEEP_SECONDS = 60.0  # between looks for what crashes leave behind; nothing waits for it
COLLECT_SECONDS = 86_400.0  # between the ends and beginnings of removing what is old
COLLECT_FIRST_SECONDS = 600.0  # after the start
COLLECT_ROUND_SECONDS = 0.5  # of one round: leases and budgets are looked at in between
ALIVE_ROUNDS = 3  # missed rounds before a reconciler counts as gone
ROUND_SECONDS = 5.0  # a long round: many leases at once, a sweep of many files


@dataclass(frozen=True)
class Round:
    """What one round did."""

    expired: tuple[end_attempt.Expired, ...] = ()
    over_budget: tuple[str, ...] = ()
    wake_ups: int = 0


@dataclass
class Reconciler:
    """`run` until `stop` is set, or `run_once`."""

    settings: Settings
    database: Database
    blobs: BlobStore
    redis: Redis
    _leases: SilenceWatch = field(init=False)
    _toolchains: SilenceWatch = field(init=False)
    _sweep_at: float = field(default=0.0, init=False)
    _collect_at: float = field(default_factory=lambda: time.monotonic() + COLLECT_FIRST_SECONDS, init=False)
    _collector: Iterator[Removed] | None = field(default=None, init=False)
    _removed: Removed = field(default=Removed(), init=False)
    _taken: dict[tuple[str, str | None], Set[str]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._leases = SilenceWatch(self.settings.lease_seconds)
        live_seconds = self.settings.toolchain_live_seconds
        self._toolchains = SilenceWatch(live_seconds, live_seconds / 10)

    def run(self, stop: Event) -> None:
        """A round every `settings.poll_seconds`. A database that is away ends a round, not the loop."""
        while not stop.is_set():
            # Also where the database is away: the loop is there, and says so.
            wake_ups.reconciler_lives(self.redis, ALIVE_ROUNDS * self.settings.poll_seconds + ROUND_SECONDS)
            try:
                self.run_once()
            except DATABASE_AWAY as error:
                log.warning("this round was not finished: %s", error)
                self.database.dispose()  # of a file that was put away and is back, connections may hold another
            stop.wait(self.settings.poll_seconds)

    def run_once(self) -> Round:
        """End budgets and leases, settle what that ended, write the missing wake-ups; sometimes sweep."""
        with self.database.write() as session:
            over_budget = expire_budgets(session)
            expired = end_attempt.expire_leases(session, silent_leases(session, self._leases))
            touched = {*over_budget, *(job for task in expired if task.state != "waiting" for job in task.jobs)}
            states = [jobs.job_state(session, job) for job in sorted(touched)]
        self._give_up_gone_compilers()
        self._clear_ended()
        for task in expired:
            log.warning("lease of %s %s ended, it is %s", task.kind, task.ref, task.state)
        for state in states:
            if state is not None and state.finished_at is not None:
                wake_ups.publish(self.redis, state.id, "state", {"state": state.state})
        written = self._write_wake_ups()
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + SWEEP_SECONDS
            self._sweep()
        if self._collector is not None or time.monotonic() >= self._collect_at:
            self._collect_some()
        return Round(tuple(expired), tuple(over_budget), written)

    def _write_wake_ups(self) -> int:
        with self.database.read() as session:
            waiting = take_work.waiting_counts(session)
        needed: Counter[tuple[str, str | None]] = Counter()
        for (kind, target), count in waiting.items():
            worker = wake_ups.WORKER_OF.get(kind)
            if kind == wake_ups.COMPILE:
                # One at least: it may be about to start.
                count = min(count, max(1, wake_ups.worker_count(self.redis, kind, target)))
            if worker is None:
                log.debug("%d tasks of kind %s are for workers of another release", count, kind)
                continue
            needed[(worker, None if worker == wake_ups.PLAN else target)] += count
        for queue in needed:
            self._taken.setdefault(queue, frozenset())
        return sum(wake_ups.ensure_wake_ups(self.redis, kind, target, n) for (kind, target), n in needed.items())

    def _clear_ended(self, *, all_jobs: bool = False) -> None:
        self.database.in_parts(lambda session: find_ended(session, all_jobs=all_jobs) or find_broken_off(session))

    def _give_up_gone_compilers(self) -> None:
        """A worker that is started again is silent for less than this."""

        def next_part(session: Session) -> Callable[[Session], None] | None:
            gone = gone_toolchains(session, standing_toolchains(session, self._toolchains))
            return (lambda session: give_up_place(session, *gone[0], CLEARED_AT_ONCE)) if gone else None

        self.database.in_parts(next_part)

    def _collect_some(self) -> None:
        """A part of what is old; the next round continues. Bytes are swept later."""
        until = time.monotonic() + COLLECT_ROUND_SECONDS
        if self._collector is None:
            keep = Keep(self.settings.keep_days * 86_400, self.settings.keep_bytes)
            self._collector, self._removed = collect(self.database, keep), Removed()
        collector, self._collector = self._collector, None  # one that fails is begun anew
        for removed in collector:
            self._removed += removed
            self.database.pause()
            if time.monotonic() >= until:
                self._collector = collector
                return
        self._collect_at = time.monotonic() + COLLECT_SECONDS
        if self._removed != Removed():
            log.info("removed what was old: %s", self._removed)

    def _sweep(self) -> None:
        self._clear_ended(all_jobs=True)
        self.database.in_parts(find_half_accepted)
        swept = self.blobs.sweep()
        if swept.files:
            log.info("swept %d left-over files, %d bytes", swept.files, swept.bytes)
        for (kind, target), seen in self._taken.items():
            try:
                self._taken[(kind, target)] = wake_ups.sweep_taken(self.redis, kind, target, seen)
            except RedisError as error:
                log.warning("taken wake-ups not swept: %s", error)
