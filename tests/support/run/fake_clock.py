"""A clock that stands still until `advance` or `set_by`; its ids count upwards."""

from __future__ import annotations

from storage.database.session import Clock


class FakeClock(Clock):
    def __init__(self, start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._passed = 0.0
        self._ids = 0

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._passed

    def new_id(self) -> str:
        self._ids += 1
        return f"{self._ids:032x}"

    def advance(self, seconds: float) -> None:
        self._now += seconds
        self._passed += seconds

    def set_by(self, seconds: float) -> None:
        """The machine's clock is set, while no time passes."""
        self._now += seconds
