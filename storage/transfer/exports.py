"""What of a job can be measured elsewhere: its candidates with their builds, as rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Row, select

from storage.database.session import Session
from storage.database.sql import core, rows_among
from storage.database.tables import BuildRow, CandidateRow, JobProblemRow, ToolchainRow

ExportedCandidate = Row[Any]
"""Fields of its build are None while nothing has begun it. `verdict` and `message` are the candidate's own."""
Exported = tuple[Row[Any], list[ExportedCandidate]]
"""A `storage.database.tables.JobProblemRow` with its candidates."""


def exported_problems(session: Session, job_id: str) -> list[Exported]:
    """The job's problems in their order, each with its candidates by id."""
    asked, candidate, build = core(JobProblemRow).c, core(CandidateRow).c, core(BuildRow).c
    of_job = select(core(JobProblemRow)).where(asked.job_id == job_id).order_by(asked.position)
    problems: dict[int, Exported] = {row.id: (row, []) for row in session.execute(of_job)}
    built = ("slice", "toolchain", "state", "code_digest", "library", "resources")
    rows = session.execute(
        select(*candidate, *(build[name] for name in built))
        .join(BuildRow, build.id == candidate.build, isouter=True)
        .join(JobProblemRow, asked.id == candidate.job_problem_id)
        .where(asked.job_id == job_id)
        .order_by(candidate.candidate)
    )
    for row in rows:
        _, candidates = problems[row.job_problem_id]
        candidates.append(row)
    return list(problems.values())


def toolchain_descriptions(session: Session, digests: Iterable[str]) -> dict[str, dict[str, Any]]:
    """How the toolchains describe themselves, of those that are stored."""
    table = core(ToolchainRow).c
    query = select(table.digest, table.description)
    return dict(rows_among(session, query, table.digest, digests))
