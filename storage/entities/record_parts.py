"""The parts of a winner record: one of this service, and one of each import.

A record is a function of its parts, whatever the order in which they came. So an import can be withdrawn as a whole,
and the record is what it would be without it. What was measured here stands before imports, but for those of a key that
may overwrite; between parts, the newest driver's times count.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from cukiln.types import FrontEntry, WinnerRecord
from storage.database.session import Session, clock_of
from storage.database.sql import change, insert_new, remove
from storage.database.tables import ImportedFindingRow, ImportedWinnerRow, ImportRow, VerdictRow, WinnerRow
from storage.entities.pareto_front import pareto, point_of
from storage.entities.searches import merge_searches
from storage.entities.verdicts import GPU, wrong_codes
from storage.entities.winners import RUN, publish_winner, used_by, withdraw_winner, write_uses


@dataclass(frozen=True)
class Part:
    """`source`: the import's id; empty for this service's own. `overwrites`: it counts beside that."""

    source: str
    overwrites: bool
    record: WinnerRecord

    @property
    def measured_at(self) -> float:
        return max((entry.measured_on.measured_at for entry in self.record.front if entry.measured_on), default=0.0)

    @property
    def driver(self) -> str | None:
        return self.record.front[0].measured_on.driver if self.record.front[0].measured_on else None


def own_part(session: Session, key: str) -> WinnerRecord | None:
    """The part of this service."""
    row = session.execute(select(WinnerRow.own, WinnerRow.record).where(WinnerRow.key == key)).one_or_none()
    part = None if row is None else row.record if row.own is None else row.own
    return WinnerRecord.model_validate(part) if part else None


def imported_part(session: Session, import_id: str, key: str) -> WinnerRecord | None:
    """The part of an import."""
    record = session.scalar(select(ImportedWinnerRow.record).filter_by(import_id=import_id, key=key))
    return WinnerRecord.model_validate(record) if record else None


def publish_own(session: Session, part: WinnerRecord, attempt: str) -> None:
    """Replace the part of this service, and with it the record."""
    if _imported(session, part.key):
        _write_record(session, part.key, part, attempt)
    else:
        publish_winner(session, part, attempt=attempt)


def publish_imported(session: Session, import_id: str, part: WinnerRecord, attempt: str) -> None:
    """Replace the part of an import, and with it the record."""
    _write_imported(session, import_id, part.key, part)
    rejoin(session, [part.key], attempt)


def rejoin(session: Session, keys: Iterable[str], attempt: str | None = None) -> None:
    """Make the records of these keys anew, from their parts as they are now."""
    for key in sorted(set(keys)):
        _write_record(session, key, own_part(session, key), attempt or clock_of(session).new_id())


def withdraw_code(session: Session, code_digests: Iterable[str]) -> list[str]:
    """Let no record answer with this code, which a GPU here found wrong; the keys of those that did. Searches of what
    is left go: the next job that asks for the problem does not count as cached."""
    keys = keys_with(session, code_digests)
    rejoin(session, keys)
    return keys


def withdraw_files(session: Session, digests: Iterable[str]) -> list[str]:
    """Kernels that cannot be run without these lost blobs leave their records, whose searches go. Returns the keys."""
    lost = set(digests)
    keys = keys_with(session, lost)
    for key in keys:
        for part in _imported(session, key):
            _write_imported(session, part.source, key, _without_files(part.record, lost))
        own = own_part(session, key)
        _write_record(session, key, _without_files(own, lost) if own else None, clock_of(session).new_id())
    return keys


def withdraw_record(session: Session, key: str) -> None:
    """Let nothing of the record answer any more, nor of its parts."""
    remove(session, ImportedWinnerRow, ImportedWinnerRow.key == key)
    _write_record(session, key, None, clock_of(session).new_id())


def keys_with(session: Session, digests: Iterable[str]) -> list[str]:
    """The keys whose record, or a part of it, names such a file or code."""
    return sorted({key for keys in used_by(session, digests).values() for key in keys})


def join(own: WinnerRecord | None, imported: Sequence[Part], wrong: Collection[str]) -> WinnerRecord | None:
    """The record of its parts, without `wrong` code; None where nothing is left of them."""
    parts = [part for part in imported if own is None or part.overwrites]
    parts = [Part(part.source, part.overwrites, left) for part in parts if (left := without_code(part.record, wrong))]
    parts = sorted([*parts, *([Part("", True, own)] if own else [])], key=lambda part: (part.measured_at, part.source))
    parts = [part for part in parts if part.driver == parts[-1].driver]
    if len(parts) < 2:
        return parts[0].record if parts else None
    entries: dict[str, FrontEntry] = {}
    searches: list[dict[str, Any]] = []
    for part in parts:
        entries |= {entry.candidate: entry for entry in part.record.front}
        searches = merge_searches(searches, part.record.searches)
    front = [entries[point.candidate] for point in pareto(point_of(entry) for entry in entries.values())]
    best = next(part.record for part in reversed(parts) if front[0] in part.record.front)
    return best.model_copy(update={"front": front, "searches": searches})


def without_code(record: WinnerRecord, wrong: Collection[str]) -> WinnerRecord | None:
    """The record without the entries that have such code; None where none is left."""
    left = [entry for entry in record.front if entry.code_digest not in wrong]
    return record if len(left) == len(record.front) else _with_front(record, left)


def _without_files(record: WinnerRecord, lost: set[str]) -> WinnerRecord | None:
    """The record without the entries that cannot be run without such a file; None where none is left."""
    return _with_front(
        record, [entry for entry in record.front if lost.isdisjoint(getattr(entry, name) for name in RUN)]
    )


def _with_front(record: WinnerRecord, left: list[FrontEntry]) -> WinnerRecord | None:
    """What is left of a record, whose searches' result is not known any more."""
    if not left:
        return None
    # The runner-up's margin is one over the fastest, and it may itself be withdrawn.
    second = {"runner_up": None} if len(left) < len(record.front) else {}
    return record.model_copy(update={"front": left, "searches": [], **second})


def _write_imported(session: Session, import_id: str, key: str, part: WinnerRecord | None) -> None:
    remove(session, ImportedWinnerRow, ImportedWinnerRow.import_id == import_id, ImportedWinnerRow.key == key)
    if part is not None:
        row = {"import_id": import_id, "key": key, "record": part.model_dump(mode="json")}
        insert_new(session, ImportedWinnerRow, [row])


def _write_record(session: Session, key: str, own: WinnerRecord | None, attempt: str) -> None:
    imported = _imported(session, key)
    codes = {entry.code_digest for part in imported for entry in part.record.front}
    if own is not None:
        own = without_code(own, wrong_codes(session, [entry.code_digest for entry in own.front]))
    joined = join(own, imported, _wrong_of_imports(session, codes))
    if joined is None:
        withdraw_winner(session, key, attempt)
    else:
        publish_winner(session, joined, attempt=attempt)
    stored = (own.model_dump(mode="json") if own else {}) if imported else None
    change(session, WinnerRow, WinnerRow.key == key, own=stored)
    if imported:
        parts = [part.record for part in imported] + ([own] if own else [])
        write_uses(session, key, [part.model_dump(mode="json") for part in parts])


def _imported(session: Session, key: str) -> list[Part]:
    rows = session.execute(
        select(ImportedWinnerRow.import_id, ImportRow.overwrites, ImportedWinnerRow.record)
        .join(ImportRow, ImportRow.id == ImportedWinnerRow.import_id)
        .where(ImportedWinnerRow.key == key, ImportRow.withdrawn_at.is_(None))
    )
    return [Part(row.import_id, row.overwrites, WinnerRecord.model_validate(row.record)) for row in rows]


def _wrong_of_imports(session: Session, codes: Collection[str]) -> set[str]:
    """Those of the codes that a GPU here found wrong, or another import did and no GPU here found right."""
    reported = select(ImportedFindingRow.code_digest).join(ImportRow, ImportRow.id == ImportedFindingRow.import_id)
    reported = reported.where(ImportedFindingRow.code_digest.in_(codes), ImportRow.withdrawn_at.is_(None))
    right = select(VerdictRow.subject).where(
        VerdictRow.subject.in_(codes), VerdictRow.venue == GPU, VerdictRow.verdict == "ok"
    )
    wrong = wrong_codes(session, codes)
    return wrong | (set(session.scalars(reported)) - set(session.scalars(right)))
