"""Builds, winner records and candidates, found by the first digits of their ids."""

from __future__ import annotations

from typing import Literal

from sqlalchemy import Text, cast, select

from storage.database.session import Session
from storage.database.tables import BuildRow, CandidateRow, JobProblemRow, WinnerRow

MOST_NAMED = 10
"""Of the ids that a short prefix could mean."""
IDS = {"build": BuildRow.id, "candidate": CandidateRow.candidate, "kernel": WinnerRow.key}

Named = Literal["build", "candidate", "kernel"]


def ids_beginning(session: Session, kind: Named, prefix: str, job: str | None = None) -> list[str]:
    """Ids that begin so (lower-case hex), in order, MOST_NAMED at most: of winner records those that answer, of
    candidates those of one job where it is given."""
    id = IDS[kind]
    # A range, and not LIKE, which no index of SQLite's answers; "g" comes after every hexadecimal digit.
    query = select(id).distinct().where(id >= prefix, id < prefix + "g").order_by(id).limit(MOST_NAMED)
    if kind == "kernel":
        query = query.where(cast(WinnerRow.record, Text) != "{}")
    if job is not None:
        problems = select(JobProblemRow.id).where(JobProblemRow.job_id == job)
        query = query.where(CandidateRow.job_problem_id.in_(problems))
    return list(session.scalars(query))
