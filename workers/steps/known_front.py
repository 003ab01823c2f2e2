"""Which kernels of a winner record still count beside those that a job has found now."""

from __future__ import annotations

from collections.abc import Sequence

from cukiln.types import FrontEntry, WinnerRecord
from storage.database import Session
from storage.searches import MeasuredUnder
from storage.verdicts import wrong_codes


def measured_under(entry: FrontEntry) -> MeasuredUnder | None:
    """What an entry's time is valid for; None where it was predicted."""
    if entry.measured_on is None:
        return None
    return MeasuredUnder(entry.measured_on.driver, entry.verdict.get("plan_version"))


def still_in_front(
    session: Session, known: WinnerRecord, entries: Sequence[FrontEntry], lost: set[str]
) -> list[FrontEntry]:
    """The record's entries that stay in the running beside the new ones: whose files can be fetched (`lost`: blobs
    that cannot), whose code no GPU found wrong, and whose time is of the same driver."""
    wrong = wrong_codes(session, [old.code_digest for old in known.front])
    now = entries[0].measured_on
    return [
        old
        for old in known.front
        if lost.isdisjoint(old.blobs)
        and old.code_digest not in wrong
        and (now is None or (old.measured_on is not None and old.measured_on.driver == now.driver))
    ]
