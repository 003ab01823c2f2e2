"""Leases that nothing renews, and toolchains without a sign of life.

Told without comparing the clocks of two machines, or one clock with itself.

Each renewal changes a lease's row. What has not changed for as long as a lease lasts, by this process's monotonic
time, belongs to a worker that is gone: a clock that is set back by an hour does not hold its work for an hour, and one
that is set forward takes nothing from the living. A watch that has just begun gives a dead worker's lease its time.

Of a toolchain time without a look does not count: while the database was away, no worker could give a sign.
"""

from __future__ import annotations

from sqlalchemy import select

from storage.database import Session, clock_of
from storage.rows import core
from storage.tables import ItemRow, ToolchainRow
from storage.toolchains import LiveToolchain


class LeaseWatch:
    """To be asked again and again, by one process."""

    def __init__(self, lease_seconds: float) -> None:
        """`lease_seconds`: for how long workers take their leases."""
        self._lease_seconds = lease_seconds
        self._seen: dict[int, tuple[str | None, float | None, float]] = {}

    def silent(self, session: Session) -> list[int]:
        """The items whose leases are over."""
        item = core(ItemRow).c
        now = clock_of(session).monotonic()
        claimed = session.execute(select(item.id, item.token, item.lease_expires_at).where(item.state == "claimed"))
        seen = {}
        for id, token, expires_at in claimed:
            before = self._seen.get(id)
            unchanged = before is not None and before[:2] == (token, expires_at)
            seen[id] = (token, expires_at, before[2] if before is not None and unchanged else now)
        self._seen = seen
        return sorted(id for id, (_, _, since) in seen.items() if now - since > self._lease_seconds)


class ToolchainWatch:
    """To be asked again and again, by one process."""

    def __init__(self, live_seconds: float) -> None:
        """`live_seconds`: a toolchain that is silent for longer is gone."""
        self._live_seconds = live_seconds
        self._most_between_looks = live_seconds / 10
        self._watched, self._looked_at = 0.0, 0.0
        self._seen: dict[str, tuple[float, float]] = {}

    def live(self, session: Session) -> list[LiveToolchain]:
        """The toolchains that are not gone."""
        now = clock_of(session).monotonic()
        self._watched += min(now - self._looked_at, self._most_between_looks)
        self._looked_at = now
        rows = session.execute(select(core(ToolchainRow)).order_by(ToolchainRow.digest)).all()
        for row in rows:
            if self._seen.get(row.digest, (None,))[0] != row.seen_at:
                self._seen[row.digest] = (row.seen_at, self._watched)
        return [row for row in rows if self._watched - self._seen[row.digest][1] <= self._live_seconds]
