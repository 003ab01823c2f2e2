"""Winner records in process memory over the database.

A record is answered from memory for FRESH_SECONDS; then its revision is asked for, which costs an index look-up and no
JSON. So every process sees a new revision within that time, with Redis or without. A miss is never remembered: who is
told that a job is done finds its winner.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cukiln.types import WinnerRecord
from storage.database import Database
from storage.winners import get_winners, recorded_classes, winner_revisions

FRESH_SECONDS = 0.05
CAPACITY = 20_000  # records, about 5 KB each


@dataclass(frozen=True)
class CachedWinner:
    """A record and its JSON, which is written once and sent many times."""

    record: WinnerRecord
    json: bytes
    checked_at: float


class WinnerCache:
    """Keys → records. Safe to use from any number of threads."""

    def __init__(
        self, database: Database, clock: Callable[[], float] = time.monotonic, capacity: int = CAPACITY
    ) -> None:
        self._database, self._clock, self._capacity = database, clock, capacity
        self._lock = threading.Lock()
        self._known: OrderedDict[str, CachedWinner] = OrderedDict()

    def get(self, keys: Iterable[str]) -> dict[str, CachedWinner]:
        """The records that exist, none older than FRESH_SECONDS."""
        wanted = list(dict.fromkeys(keys))
        now = self._clock()
        found = self._fresh(wanted, now)
        doubtful = [key for key in wanted if key not in found]
        if doubtful:
            found |= self._ask(doubtful, now)
        return found

    def device_classes(self) -> list[str]:
        """The classes that have records. Not remembered, for the sake of misses."""
        with self._database.read() as session:
            return recorded_classes(session)

    def _fresh(self, keys: Sequence[str], now: float) -> dict[str, CachedWinner]:
        with self._lock:
            known = {key: self._known[key] for key in keys if key in self._known}
        return {key: winner for key, winner in known.items() if now - winner.checked_at <= FRESH_SECONDS}

    def _ask(self, keys: Sequence[str], now: float) -> dict[str, CachedWinner]:
        with self._lock:
            stale = {key: self._known[key] for key in keys if key in self._known}
        with self._database.read() as session:
            revisions = winner_revisions(session, list(stale)) if stale else {}
            unchanged = {key for key, winner in stale.items() if revisions.get(key) == winner.record.revision}
            records = get_winners(session, [key for key in keys if key not in unchanged])
        found = {key: CachedWinner(stale[key].record, stale[key].json, now) for key in unchanged}
        for key, record in records.items():
            found[key] = CachedWinner(record, record.model_dump_json().encode(), now)
        self._remember(found, gone=[key for key in stale if key not in found])
        return found

    def _remember(self, found: dict[str, CachedWinner], gone: Iterable[str]) -> None:
        with self._lock:
            for key in gone:
                self._known.pop(key, None)
            for key, winner in found.items():
                known = self._known.get(key)
                if known is None or known.record.revision <= winner.record.revision:
                    self._known[key] = winner
                self._known.move_to_end(key)
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)
