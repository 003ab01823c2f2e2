"""Which candidates stay on a problem's Pareto front, and in what order: pure decisions, no stores."""

from __future__ import annotations

from collections.abc import Sequence

from cukiln.types import FrontEntry, RankedBy


def merge_front(known: Sequence[FrontEntry], new: FrontEntry) -> list[FrontEntry]:
    """The front with `new` in it, fastest first: entries that nothing beats in time, workspace and determinism at once.

    A measurement is never replaced by a prediction: where anything was measured, entries that were only predicted go.
    An older entry for the candidate of `new` gives way to it.
    """
    entries = [entry for entry in known if entry.candidate != new.candidate or _replaces(entry, new)]
    entries.append(new)
    if any(entry.measured_us is not None for entry in entries):
        entries = [entry for entry in entries if entry.measured_us is not None]
    front = [entry for entry in entries if not any(_beats(other, entry) for other in entries if other is not entry)]
    return sorted(front, key=_order)


def ranked_by(front: Sequence[FrontEntry]) -> RankedBy:
    return "predicted" if front[0].measured_us is None else "measured"


def _replaces(known: FrontEntry, new: FrontEntry) -> bool:
    """Whether a known entry for the same candidate says more than the new one."""
    return known.measured_us is not None and new.measured_us is None


def _beats(first: FrontEntry, second: FrontEntry) -> bool:
    """Better in one respect and worse in none; of two equal entries the one with the smaller candidate id."""
    no_worse = (
        _microseconds(first) <= _microseconds(second)
        and first.workspace_bytes <= second.workspace_bytes
        and first.deterministic >= second.deterministic
    )
    same = _respects(first) == _respects(second)
    return no_worse and (not same or first.candidate < second.candidate)


def _respects(entry: FrontEntry) -> tuple[float, int, bool]:
    return _microseconds(entry), entry.workspace_bytes, entry.deterministic


def _microseconds(entry: FrontEntry) -> float:
    """The measurement where there is one; the two never meet in one front (see `merge_front`)."""
    time = entry.measured_us if entry.measured_us is not None else entry.predicted_us
    return float("inf") if time is None else time


def _order(entry: FrontEntry) -> tuple[float, int, str]:
    return _microseconds(entry), entry.workspace_bytes, entry.candidate
