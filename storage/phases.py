"""Where compiling spends its time: seconds of each of the compilers' phases, and what grouping kernels saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Row, select

from cukiln.types import FileCosts, PhaseTimings, PhaseTotal
from storage.database import Session
from storage.tables import GroupRow

RECENT_GROUPS = 1000
GROW_WITH_KERNELS = frozenset({"cicc", "ptxas", "host"})
"""Phases of which a file with more kernels has more. They have a fixed part too, which the estimate leaves out: so it
is a lower bound of what files of one kernel would take."""


def phase_timings(session: Session) -> PhaseTimings:
    """Sums over the groups that were compiled last, at most `RECENT_GROUPS`."""
    rows = session.execute(
        select(GroupRow.kernels, GroupRow.phases, GroupRow.compile_seconds)
        .where(GroupRow.state == "compiled", GroupRow.source.is_not(None))
        .order_by(GroupRow.created_at.desc())
        .limit(RECENT_GROUPS)
    ).all()
    compiled = [row for row in rows if row.phases]
    grouped = [row for row in compiled if len(row.kernels) > 1]
    return PhaseTimings(
        phases=_totals(compiled),
        grouped=_costs(grouped),
        files_of_one=_costs(row for row in compiled if len(row.kernels) == 1),
        alone_estimate=sum(map(_alone, grouped)) if grouped else None,
    )


def _alone(row: Row[Any]) -> float:
    """Seconds of the group's kernels in files of their own: what does not grow with kernels is paid for each."""
    fixed: float = sum(phase["seconds"] for phase in row.phases if phase["name"] not in GROW_WITH_KERNELS)
    wall: float = row.compile_seconds.get("wall", 0.0)
    return wall + (len(row.kernels) - 1) * fixed


def _totals(rows: Iterable[Row[Any]]) -> list[PhaseTotal]:
    """The longest first."""
    seconds: dict[str, float] = {}
    files: dict[str, int] = {}
    for row in rows:
        for phase in row.phases:
            seconds[phase["name"]] = seconds.get(phase["name"], 0.0) + phase["seconds"]
        for name in {phase["name"] for phase in row.phases}:
            files[name] = files.get(name, 0) + 1
    longest = sorted(seconds, key=lambda name: (-seconds[name], name))
    return [PhaseTotal(name=name, files=files[name], seconds=seconds[name]) for name in longest]


def _costs(rows: Iterable[Row[Any]]) -> FileCosts:
    kept = list(rows)
    return FileCosts(
        files=len(kept),
        kernels=sum(len(row.kernels) for row in kept),
        seconds=sum(row.compile_seconds.get("wall", 0.0) for row in kept),
    )
