"""Winner records: read by key, published by compare-and-set on the revision with the token of the attempt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert, select, update

from cukiln.types import WinnerRecord
from storage.database import Session, clock_of
from storage.errors import Conflict
from storage.rows import chunks, core
from storage.tables import WinnerRow

UNSETTLED = {"revision", "updated_at"}
"""Fields of a record that publishing sets: records that differ only here say the same."""


@dataclass(frozen=True)
class Published:
    """`changed` is False when the record already said this, or this attempt had published it."""

    revision: int
    changed: bool


def get_winners(session: Session, keys: Iterable[str]) -> dict[str, WinnerRecord]:
    """The records there are, by key."""
    found: dict[str, WinnerRecord] = {}
    for ids in chunks(set(keys)):
        rows = session.execute(select(WinnerRow.key, WinnerRow.record).where(WinnerRow.key.in_(ids)))
        found.update((key, WinnerRecord.model_validate(record)) for key, record in rows)
    return found


def winner_revisions(session: Session, keys: Iterable[str]) -> dict[str, int]:
    """Revisions by key, for whoever keeps records in memory."""
    found: dict[str, int] = {}
    for ids in chunks(set(keys)):
        rows = session.execute(select(WinnerRow.key, WinnerRow.revision).where(WinnerRow.key.in_(ids)))
        found.update(rows.all())
    return found


def publish_winner(session: Session, record: WinnerRecord, *, expected_revision: int, attempt: str) -> Published:
    """Replace revision `expected_revision` (0: there is none) by `record`; its revision and time are set here.

    Publishing twice with one `attempt`, or what the record says already, changes nothing. Raises `Conflict` when
    another attempt has published since the caller read: read, merge, publish again.
    """
    now = clock_of(session).now()
    row = session.execute(
        select(WinnerRow.revision, WinnerRow.attempt, WinnerRow.record).where(WinnerRow.key == record.key)
    ).one_or_none()
    if row is not None and (row.attempt == attempt or _says(row.record) == _says(record.model_dump(mode="json"))):
        return Published(row.revision, changed=False)
    found = row.revision if row is not None else 0
    if found != expected_revision:
        raise Conflict(record.key, expected_revision, found)
    revised = record.model_copy(update={"revision": found + 1, "updated_at": now}).model_dump(mode="json")
    values = {
        "revision": found + 1,
        "operator": record.operator,
        "target": record.target,
        "device_class": record.device_class,
        "problem": record.problem,
        "record": revised,
        "searches": record.searches,
        "attempt": attempt,
        "updated_at": now,
    }
    if row is None:
        session.execute(insert(core(WinnerRow)).values(key=record.key, **values))
        return Published(1, changed=True)
    swapped = session.execute(
        update(core(WinnerRow))
        .where(WinnerRow.key == record.key, WinnerRow.revision == expected_revision)
        .values(**values)
        .returning(WinnerRow.revision)
    ).one_or_none()
    if swapped is None:
        raise Conflict(record.key, expected_revision, found)
    return Published(found + 1, changed=True)


def _says(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in UNSETTLED}
