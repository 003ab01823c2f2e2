"""New work: items are found by kind and ref, so that adding one twice adds one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import select, update

from storage.attempts import waits_again
from storage.database import Session, clock_of
from storage.rows import chunks, insert_new
from storage.tables import ItemRow

PLAN: Final = "plan"
COMPILE: Final = "compile"
VERIFY: Final = "verify"
MEASURE: Final = "measure"
REFINE: Final = "refine"
COMPARE: Final = "compare"
FINISH: Final = "finish"
UNENDED = ("waiting", "claimed")

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


def add_again(session: Session, items: Iterable[NewItem]) -> list[NewItem]:
    """Add what is not there yet, let what has ended wait anew, and make what has not ended at least as urgent.

    Returns the items that wait now and did not before. Their kinds are those that may have more to do later.
    """
    wanted = {(item.kind, item.ref): item for item in items}
    states: dict[tuple[str, str], str] = {}
    ids: dict[tuple[str, str], int] = {}
    for refs in chunks({ref for _, ref in wanted}):
        for kind, ref, state, id in session.execute(
            _places.add_columns(ItemRow.state, ItemRow.id).where(ItemRow.ref.in_(refs))
        ):
            if (kind, ref) in wanted:
                states[kind, ref], ids[kind, ref] = state, id
    for place, state in states.items():
        item = wanted[place]
        mine = update(ItemRow).where(ItemRow.kind == item.kind, ItemRow.ref == item.ref)
        if state in UNENDED:
            urgent = mine.where(ItemRow.priority < item.priority).values(priority=item.priority)
            session.execute(urgent.execution_options(synchronize_session=False))
        else:
            anew = {**waits_again(session, ids[place], state), **_anew(session, item)}
            session.execute(mine.values(**anew).execution_options(synchronize_session=False))
    add_items(session, (item for place, item in wanted.items() if place not in states))
    return [item for place, item in wanted.items() if states.get(place) not in UNENDED]


def _anew(session: Session, item: NewItem) -> dict[str, Any]:
    """A row as `add_items` would write it. Without its token, whoever held it learns that the claim is lost."""
    return {
        "error": None,
        "attempt": 0,
        "target": item.target,
        "job_id": item.job_id,
        "priority": item.priority,
        "predicted_seconds": item.predicted_seconds,
        "created_at": clock_of(session).now(),
    }


def plan_ref(job_id: str, first: int, last: int) -> str:
    """The `ref` of a plan item: a job's problems at positions first to last, both included."""
    return f"{job_id}:{first}-{last}"


def parse_plan_ref(ref: str) -> tuple[str, int, int]:
    """Job id, first and last position of a plan item's `ref`."""
    job_id, positions = ref.split(":")
    first, last = positions.split("-")
    return job_id, int(first), int(last)
