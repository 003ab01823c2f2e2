"""Which points of a record's Pareto front a request's policy allows."""

from __future__ import annotations

from cukiln.types import FrontEntry, WinnerRecord


def usable(record: WinnerRecord, workspace_limit_bytes: int | None, deterministic: bool = False) -> list[FrontEntry]:
    """The allowed points, the fastest first."""
    return [
        entry
        for entry in record.front
        if (workspace_limit_bytes is None or entry.workspace_bytes <= workspace_limit_bytes)
        and (entry.deterministic or not deterministic)
    ]
