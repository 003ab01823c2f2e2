"""Winners that a client has looked up: in the process, and on the disk for later ones."""

import hashlib
import threading
import time
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from pydantic_core import from_json

from cukiln.forks import renew_after_fork
from cukiln.job_request import encode
from cukiln.local_cache import RECORD, CachedAnswer, LocalCache
from cukiln.types import LookedUp, WinnerRecord

REMEMBERED_LOOKUPS = 100_000  # of a client; the least recently used are dropped first
_IN_ORDER = ("extents", "attributes", "launch")  # of a launch: numbers by name, in the order of the library's arrays


class RecordMemory:
    """By the digest of what was sent. A neighbour's kernels are no winners of the problem: they stay in the process."""

    def __init__(self, cache: LocalCache) -> None:
        self._cache = cache
        self._lock = threading.Lock()
        self._winners: dict[str, LookedUp] = {}
        self._nearest: dict[str, LookedUp] = {}
        self._asked_again: set[str] = set()
        renew_after_fork(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._asked_again = set()  # by threads of the parent

    def winner(self, digest: str) -> LookedUp | None:
        result = self._winners.get(digest) or self._of_disk(digest)
        if result is not None:
            self._remember(self._winners, {digest: result})
        return result

    def nearest(self, digest: str) -> LookedUp | None:
        return self._nearest.get(digest)

    def _of_disk(self, digest: str) -> LookedUp | None:
        answer = self._cache.answer(digest)
        record = None if answer is None else cached_record(self._cache, answer)
        if answer is None or record is None:
            return None
        return LookedUp(name=None, key=answer.key, record=record, at=answer.at)

    def keep(self, answers: Mapping[str, LookedUp], url: str) -> None:
        """Remember winners here and on the disk, and forget those that the service at `url` has no more."""
        hits = {digest: answer for digest, answer in answers.items() if answer.is_winner}
        self._remember(self._winners, hits)
        self._remember(self._nearest, {digest: answer for digest, answer in answers.items() if answer.is_of_neighbour})
        for digest, answer in hits.items():
            if answer.record is not None:
                keep_record(self._cache, digest, answer.record, url, at=answer.at)
        for digest, answer in answers.items():
            if not answer.is_of_neighbour and answer.unanswered is None:
                self._nearest.pop(digest, None)
            if not answer.is_winner and answer.unanswered is None:
                self._winners.pop(digest, None)
                self._cache.drop_answer(digest)

    def claim(self, digests: Iterable[str]) -> set[str]:
        """Those that are not asked for again already; `release` gives them back."""
        with self._lock:
            new = set(digests) - self._asked_again
            self._asked_again |= new
        return new

    def release(self, digests: Iterable[str]) -> None:
        with self._lock:
            self._asked_again.difference_update(digests)

    def renew(self, digests: Iterable[str]) -> None:
        """What is remembered stays, as if it were answered now."""
        now = time.time()
        for memory in (self._winners, self._nearest):
            remembered = {digest: answer for digest in digests if (answer := memory.get(digest)) is not None}
            again = {digest: answer.model_copy(update={"at": now}) for digest, answer in remembered.items()}
            self._remember(memory, again)

    def _remember(self, memory: dict[str, LookedUp], new: Mapping[str, LookedUp]) -> None:
        """Add `new` as the most recently used, and drop the least recently used above the limit."""
        with self._lock:
            for digest, result in new.items():
                memory.pop(digest, None)
                memory[digest] = result
            if len(memory) > REMEMBERED_LOOKUPS:
                for digest in list(islice(memory, len(memory) - REMEMBERED_LOOKUPS)):
                    del memory[digest]


def cached_record(cache: LocalCache, answer: CachedAnswer) -> WinnerRecord | None:
    data = cache.get(answer.record, RECORD)
    try:
        # A fifth less time than reading and checking at once takes: most of a record is free-form.
        return None if data is None else record_of(from_json(data, cache_strings="keys"))
    except ValueError:  # of another release
        return None


def keep_record(
    cache: LocalCache, request: str, record: WinnerRecord, url: str, *, at: float, etag: str | None = None
) -> None:
    """As the answer to the request of that digest."""
    data = record_bytes(record)
    sha256 = hashlib.sha256(data).hexdigest()
    cache.keep_answer(request, CachedAnswer(url, record.key, record.revision, sha256, at, etag), data)


def record_bytes(record: WinnerRecord) -> bytes:
    """The record as JSON, one way to write it: its SHA-256 is what a lock file pins. What has its default value is left
    out, so that a later release's fields change nothing. Names are sorted; where their order means something, they are
    pairs."""
    written = record.model_dump(mode="json", exclude_defaults=True)
    for entry in written["front"]:
        launch = entry["launch"]
        entry["launch"] = {**launch, **{name: list(launch[name].items()) for name in _IN_ORDER if name in launch}}
    return encode(written)


def record_of(written: Any) -> WinnerRecord:
    """The record of which `record_bytes` wrote this JSON. Raises `ValueError`."""
    try:
        front = [{**entry, "launch": _with_names(entry["launch"])} for entry in written["front"]]
    except (LookupError, TypeError) as error:
        raise ValueError("it is no record, or one of another release") from error
    return WinnerRecord.model_validate({**written, "front": front})


def _with_names(launch: Mapping[str, Any]) -> dict[str, Any]:
    pairs = {name: launch[name] for name in _IN_ORDER if name in launch}
    if not all(isinstance(value, list) for value in pairs.values()):
        raise TypeError("its numbers are in no order")
    return {**launch, **{name: dict(value) for name, value in pairs.items()}}
