"""Valid keys, and the addresses that send wrong ones."""

import asyncio
import hashlib
import hmac
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from anyio import CapacityLimiter, to_thread
from cachetools import LRUCache

from storage.config.settings import Settings
from storage.database.session import Database
from storage.entities.keys import INCLUDED, Key, Scope, all_keys, opens, parts_of

FRESH_SECONDS = 0.5
"""A revoked key is refused after this time and one read of the database, within a second."""
WRONG_KEYS, WRONG_SECONDS = 10, 60.0
"""Wrong keys that an address may send in this time; then it is refused."""
ADDRESSES = 10_000
"""That are stored, for wrong keys and for right ones."""


@dataclass(frozen=True)
class Caller:
    """The sender of a request. `key`: the id of a stored key; None for CUKILN_API_KEY, and where no key is needed."""

    name: str
    key: str | None
    scopes: frozenset[Scope]
    overwrites: bool

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes


ANYONE = Caller("loopback", None, INCLUDED["admin"], overwrites=False)
"""On a service that needs no key."""
OPERATOR = Caller("CUKILN_API_KEY", None, INCLUDED["admin"], overwrites=False)


class KeyRing:
    """CUKILN_API_KEY, and the keys of the database as they were at most FRESH_SECONDS ago.

    A service needs a key once it has CUKILN_API_KEY or a stored key was ever made: revoking the last one must not open
    the service."""

    def __init__(self, settings: Settings, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._operator = settings.api_key.get_secret_value() if settings.api_key else None
        self._database, self._clock = database, clock
        self._keys: dict[str, Key] = {}
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    async def needs_key(self, *, as_last_read: bool = False) -> bool:
        """Whether requests need one; `as_last_read` asks no database. Raises what the database raises."""
        if self._operator is not None:
            return True
        was_read = self._read_at > float("-inf")
        return bool(self._keys if as_last_read and was_read else await self._stored())

    async def caller(self, token: str) -> Caller | None:
        """What the key stands for; None for a wrong or revoked one. Raises what the database raises."""
        if self._operator is not None and hmac.compare_digest(_digest(token), _digest(self._operator)):
            return OPERATOR
        parts = parts_of(token)
        key = (await self._stored()).get(parts[0]) if parts else None
        if parts is None or key is None or not opens(key, parts[1]):
            return None
        scopes = frozenset[Scope]().union(*(INCLUDED[scope] for scope in key.scopes))
        return Caller(key.name, key.id, scopes, key.overwrites)

    async def stands(self, caller: Caller) -> bool:
        """Whether an admitted caller still is: its key is not revoked; without one, no key is required by now."""
        if caller is OPERATOR:
            return True
        if caller.key is None:
            return not await self.needs_key()
        key = (await self._stored()).get(caller.key)
        return key is not None and key.revoked_at is None

    async def _stored(self) -> dict[str, Key]:
        if self._clock() - self._read_at > FRESH_SECONDS:
            if self._reading is None:
                self._reading = asyncio.create_task(self._read_again())
            await asyncio.shield(self._reading)  # all that wait for it continue together, in their order
        return self._keys

    async def _read_again(self) -> None:
        asked_at = self._clock()
        try:
            # A thread of its own: all that requests have may be busy.
            self._keys = await to_thread.run_sync(self._read, limiter=CapacityLimiter(1))
            self._read_at = asked_at
        finally:
            self._reading = None

    def _read(self) -> dict[str, Key]:
        with self._database.read() as session:
            return {key.id: key for key in all_keys(session)}


class WrongKeys:
    """Recent wrong keys by address. A key that was right from there is still accepted: others may share a proxy."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: LRUCache[str, deque[float]] = LRUCache(ADDRESSES)
        self._right: LRUCache[tuple[str, bytes], None] = LRUCache(ADDRESSES)

    def wait_seconds(self, address: str, token: str) -> float:
        """How long the address waits before this key is looked at; 0.0: not at all."""
        times = self._wrong.get(address)
        if times is None or len(times) < WRONG_KEYS or (address, _digest(token)) in self._right:
            return 0.0
        return max(0.0, times[0] + WRONG_SECONDS - self._clock())

    def note_wrong(self, address: str) -> None:
        self._wrong.setdefault(address, deque(maxlen=WRONG_KEYS)).append(self._clock())

    def note_right(self, address: str, token: str) -> None:
        self._right[address, _digest(token)] = None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
