"""New work: items are found by kind and ref, so that adding one twice adds one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import select

from storage.database import Session, clock_of
from storage.rows import chunks, insert_new
from storage.tables import ItemRow

PLAN, COMPILE, VERIFY, FINISH = "plan", "compile", "verify", "finish"

_places = select(ItemRow.kind, ItemRow.ref)


@dataclass(frozen=True)
class NewItem:
    """`ref` says what to work on; `predicted_seconds` orders items of one priority, longest first."""

    kind: str
    ref: str
    target: str | None = None
    job_id: str | None = None
    priority: int = 0
    predicted_seconds: float = 0.0


def add_items(session: Session, items: Iterable[NewItem]) -> int:
    """Add what is not there yet (found by kind and ref, whatever its state); returns how many were new."""
    now = clock_of(session).now()
    wanted = {(item.kind, item.ref): item for item in items}
    known: set[tuple[str, str]] = set()
    for refs in chunks({ref for _, ref in wanted}):
        known.update((kind, ref) for kind, ref in session.execute(_places.where(ItemRow.ref.in_(refs))))
    rows = [
        {
            "kind": item.kind,
            "ref": item.ref,
            "target": item.target,
            "job_id": item.job_id,
            "priority": item.priority,
            "predicted_seconds": item.predicted_seconds,
            "state": "waiting",
            "attempt": 0,
            "created_at": now,
        }
        for place, item in wanted.items()
        if place not in known
    ]
    insert_new(session, ItemRow, rows)
    return len(rows)


def plan_ref(job_id: str, first: int, last: int) -> str:
    """The `ref` of a plan item: a job's problems at positions first to last, both included."""
    return f"{job_id}:{first}-{last}"


def parse_plan_ref(ref: str) -> tuple[str, int, int]:
    """Job id, first and last position of a plan item's `ref`."""
    job_id, positions = ref.split(":")
    first, last = positions.split("-")
    return job_id, int(first), int(last)
