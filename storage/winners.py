"""Winner records: read by key, published by compare-and-set on the revision with the token of the attempt.

Of a record whose last kernel was withdrawn the row stays, with an empty `record`: revisions only ever grow, so that who
keeps a record in memory never takes a later one for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import Select, Text, cast, func, insert, select, update

from cukiln.types import WinnerRecord
from storage.database import Session, clock_of
from storage.errors import Conflict
from storage.rows import chunks, core
from storage.tables import BuildRow, CandidateRow, JobProblemRow, WinnerRow

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
        found.update((key, WinnerRecord.model_validate(record)) for key, record in rows if record)
    return found


def winner_revisions(session: Session, keys: Iterable[str]) -> dict[str, int]:
    """Revisions by key, for whoever keeps records in memory; also of a record that was withdrawn."""
    found: dict[str, int] = {}
    for ids in chunks(set(keys)):
        rows = session.execute(select(WinnerRow.key, WinnerRow.revision).where(WinnerRow.key.in_(ids)))
        found.update(rows.all())
    return found


@cache  # every lookup asks this; putting it together takes longer than its answer
def _recorded_classes() -> Select[tuple[str]]:
    """One step into the index for each class, however many records there are: both databases would read the whole index
    for a DISTINCT."""
    first = select(func.min(WinnerRow.device_class).label("name")).cte("classes", recursive=True)
    after = select(func.min(WinnerRow.device_class)).where(WinnerRow.device_class > first.c.name).scalar_subquery()
    classes = first.union_all(select(after).where(first.c.name.is_not(None)))
    return select(classes.c.name).where(classes.c.name.is_not(None))


def recorded_classes(session: Session) -> list[str]:
    """The device classes that have records, in order."""
    return list(session.scalars(_recorded_classes()))


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
    if row is not None and not row.record and expected_revision == 0:  # withdrawn: who reads it sees none
        expected_revision = found
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


def withdraw_code(session: Session, code_digests: Iterable[str]) -> list[str]:
    """Let no record answer with this code any more; returns the keys of those that did.

    What is left of a record is the next revision of it. Its searches go, as their result is not known any more: the
    next job that asks for the problem does not count as cached.

    The keys are found from the builds of the code through three indexes. Beyond that it costs one look at the text of
    each record of a problem that ever had the code among its candidates, and nothing for all the others.
    """
    changed = []
    for digest in set(code_digests):
        asked = (
            select(JobProblemRow.key)
            .join(CandidateRow, CandidateRow.job_problem_id == JobProblemRow.id)
            .join(BuildRow, BuildRow.id == CandidateRow.build)
            .where(BuildRow.code_digest == digest, JobProblemRow.winner.is_not(None))
        )
        rows = session.execute(
            select(WinnerRow.key, WinnerRow.revision, WinnerRow.record).where(
                WinnerRow.key.in_(asked), cast(WinnerRow.record, Text).contains(digest)
            )
        ).all()
        for row in rows:
            if any(entry["code_digest"] == digest for entry in row.record["front"]):
                _withdraw(session, row.key, row.revision, row.record, digest)
                changed.append(row.key)
    return sorted(set(changed))


def _withdraw(session: Session, key: str, revision: int, record: dict[str, Any], code_digest: str) -> None:
    now, front = clock_of(session).now(), record["front"]
    left = [entry for entry in front if entry["code_digest"] != code_digest]
    # The runner-up's margin is one over the fastest, and it may itself have the code.
    beside = {"front": left, "searches": [], "runner_up": None, "revision": revision + 1, "updated_at": now}
    table = core(WinnerRow)
    session.execute(
        update(table)
        .where(table.c.key == key)
        .values(
            revision=revision + 1,
            record={**record, **beside} if left else {},
            searches=[],
            attempt=clock_of(session).new_id(),
            updated_at=now,
        )
    )


def _says(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in UNSETTLED}
