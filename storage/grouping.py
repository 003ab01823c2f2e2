"""What grouping kernels saved: the files that were compiled last, beside an estimate of a file for each kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Row, func, select

from cukiln.types import FileCosts, Grouping
from storage.database import Session
from storage.tables import GroupRow

RECENT_GROUPS = 1000
PAID_ONCE = frozenset({"preprocess", "nvcc", "link"})
"""Phases that a file takes however many kernels it holds. The others have a fixed part too, which the estimate leaves
out: so it is a lower bound of what files of one kernel would take."""


def grouping(session: Session) -> Grouping:
    """Over the groups that were compiled last, at most `RECENT_GROUPS`, as far as each became one file at once: where
    one was split or tried again, its phases are of several."""
    rows = session.execute(
        select(func.json_array_length(GroupRow.kernels).label("kernels"), GroupRow.phases, GroupRow.compile_seconds)
        .where(GroupRow.state == "compiled", GroupRow.library.is_not(None))
        .order_by(GroupRow.created_at.desc())
        .limit(RECENT_GROUPS)
    ).all()
    files = [row for row in rows if [phase["name"] for phase in row.phases].count("nvcc") == 1]
    grouped = [row for row in files if row.kernels > 1]
    return Grouping(
        grouped=_costs(grouped),
        files_of_one=_costs(row for row in files if row.kernels == 1),
        alone_estimate=sum(map(_alone, grouped)) if grouped else None,
    )


def _alone(row: Row[Any]) -> float:
    """Seconds of the group's kernels in files of their own: what does not grow with kernels is paid for each."""
    once: float = sum(phase["seconds"] for phase in row.phases if phase["name"] in PAID_ONCE)
    wall: float = row.compile_seconds.get("wall", 0.0)
    kernels: int = row.kernels
    return wall + (kernels - 1) * once


def _costs(rows: Iterable[Row[Any]]) -> FileCosts:
    kept = list(rows)
    return FileCosts(
        files=len(kept),
        kernels=sum(row.kernels for row in kept),
        seconds=sum(row.compile_seconds.get("wall", 0.0) for row in kept),
    )
