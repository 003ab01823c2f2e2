"""Winner records in process memory over the database, as the bytes that are sent: for FRESH_SECONDS, then the stamp is
read, which costs an index look-up and no JSON. Misses are not cached: after a job's last event its winner is read."""

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from cachetools import LRUCache
from pydantic_core import from_json, to_json

from storage.database.session import Database
from storage.database.sql import chunks
from storage.entities.winners import Elsewhere, Stamp, measured_elsewhere, stored_winners, usable, winner_stamps

FRESH_SECONDS = 0.05
CAPACITY_BYTES = 128 << 20
OVERHEAD_BYTES = 512
"""Of an entry beside its JSON: the key, the objects, its place in the dictionary."""
READ_AT_ONCE = 1_000
PARTS_BYTES = 32 << 20
"""Of parts of records: reading a record's JSON takes ten times as long as sending it."""


@dataclass(frozen=True)
class CachedWinner:
    """A record as the bytes that are sent."""

    stamp: Stamp
    json: bytes

    @cached_property
    def etag(self) -> str:
        """Not the revision alone: another data folder behind the same address counts from 1 again."""
        return f'"{self.stamp[0]}-{hashlib.sha256(self.json).hexdigest()[:32]}"'

    def allowed(self, workspace_limit_bytes: int | None, deterministic: bool) -> bytes | None:
        """The record with its usable kernels; None where it has none."""
        if workspace_limit_bytes is None and not deterministic:
            return self.json
        record = json.loads(self.json)
        front = usable(record["front"], workspace_limit_bytes, deterministic)
        if len(front) == len(record["front"]):
            return self.json
        return json.dumps({**record, "front": front}, separators=(",", ":")).encode() if front else None


_PartKey = tuple[str, Stamp, tuple[str, ...]]
"""Key, stamp and fields."""


@dataclass(frozen=True)
class _Entry:
    winner: CachedWinner
    checked_at: float


def part_of(record: bytes, names: Sequence[str]) -> bytes:
    """JSON of these fields of a record: `revision`, or `front.so_sha256` of each kernel in its front."""
    whole = from_json(record, cache_strings="keys")
    part = {name: whole.get(name) for name in names if not name.startswith("front.")}
    of_kernels = [name.removeprefix("front.") for name in names if name.startswith("front.")]
    if of_kernels and "front" not in part:
        part["front"] = [{name: kernel.get(name) for name in of_kernels} for kernel in whole["front"]]
    return to_json(part)


class WinnerCache:
    """Keys → records, for any number of threads; a database of its own, so that lookups wait for no write lock."""

    def __init__(
        self,
        database: Database,
        clock: Callable[[], float] = time.monotonic,
        capacity_bytes: int = CAPACITY_BYTES,
    ) -> None:
        self.database, self._clock = database, clock
        self._lock = threading.Lock()
        self.entries: LRUCache[str, _Entry] = LRUCache(capacity_bytes, _size)
        self._parts: LRUCache[_PartKey, bytes] = LRUCache(PARTS_BYTES, lambda part: len(part) + OVERHEAD_BYTES)

    def get(self, keys: Iterable[str]) -> dict[str, CachedWinner]:
        """The records that exist, none older than FRESH_SECONDS."""
        winners: dict[str, CachedWinner] = {}
        for some in chunks(dict.fromkeys(keys), READ_AT_ONCE):
            now = self._clock()
            with self._lock:
                entries = {key: self.entries[key] for key in some if key in self.entries}
            fresh = {key: entry.winner for key, entry in entries.items() if now - entry.checked_at <= FRESH_SECONDS}
            winners |= fresh
            if doubtful := [key for key in some if key not in fresh]:
                winners |= self._ask(
                    doubtful, {key: entry.winner for key, entry in entries.items() if key not in fresh}, now
                )
        return winners

    def fresh(self, key: str) -> CachedWinner | None:
        """The record where memory alone can answer."""
        with self._lock:
            entry = self.entries.get(key)
        return entry.winner if entry is not None and self._clock() - entry.checked_at <= FRESH_SECONDS else None

    def part(self, key: str, winner: CachedWinner, names: tuple[str, ...]) -> bytes:
        """`part_of` the whole record under the key."""
        place = (key, winner.stamp, names)
        with self._lock:
            part = self._parts.get(place)
        if part is None:
            part = part_of(winner.json, names)
            with self._lock, contextlib.suppress(ValueError):  # larger than the whole cache
                self._parts[place] = part
        return part

    def elsewhere(self, misses: Sequence[Elsewhere]) -> dict[int, tuple[str, str]]:
        """`storage.entities.winners.measured_elsewhere`. Not cached, as misses are not."""
        places: dict[int, tuple[str, str]] = {}
        for first in range(0, len(misses), READ_AT_ONCE):
            with self.database.read() as session:
                some = measured_elsewhere(session, misses[first : first + READ_AT_ONCE])
            places.update((first + place, class_and_key) for place, class_and_key in some.items())
        return places

    def close(self) -> None:
        self.database.dispose()

    def _ask(self, keys: Sequence[str], stale: dict[str, CachedWinner], now: float) -> dict[str, CachedWinner]:
        with self.database.read() as session:
            stamps = winner_stamps(session, list(stale)) if stale else {}
            winners = {key: winner for key, winner in stale.items() if stamps.get(key) == winner.stamp}
            stored = stored_winners(session, [key for key in keys if key not in winners])
        winners |= {key: CachedWinner(*record) for key, record in stored.items()}
        self._remember(winners, now, removed=[key for key in stale if key not in winners])
        return winners

    def _remember(self, winners: dict[str, CachedWinner], now: float, removed: Iterable[str]) -> None:
        with self._lock:
            for key in removed:
                self.entries.pop(key, None)
            for key, winner in winners.items():
                entry = self.entries.get(key)
                if entry is None or entry.winner.stamp[0] <= winner.stamp[0]:
                    try:
                        self.entries[key] = _Entry(winner, now)
                    except ValueError:  # larger than the whole cache
                        self.entries.pop(key, None)


def _size(entry: _Entry) -> int:
    return len(entry.winner.json) + OVERHEAD_BYTES
