"""What of a job can be measured elsewhere: its candidates with their builds, as rows; the service makes a bundle of
them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, select

from storage.database import Session
from storage.rows import chunks, core
from storage.tables import BuildRow, CandidateRow, JobProblemRow, ToolchainRow

ExportedCandidate = Row[Any]
"""Fields of its build are None while nothing has begun it. `verdict` and `message` are the candidate's own."""


@dataclass(frozen=True)
class ExportedProblem:
    name: str
    operator: str
    problem: dict[str, Any]
    target: str
    device_class: str
    key: str
    search: dict[str, Any]
    space_size: int
    candidates: list[ExportedCandidate]


def exported_problems(session: Session, job_id: str) -> list[ExportedProblem]:
    """The job's problems in their order, each with its candidates by id."""
    asked, candidate, build = core(JobProblemRow).c, core(CandidateRow).c, core(BuildRow).c
    found: dict[int, ExportedProblem] = {}
    for row in session.execute(select(core(JobProblemRow)).where(asked.job_id == job_id).order_by(asked.position)):
        names = ("name", "operator", "problem", "target", "device_class", "key", "search", "space_size")
        found[row.id] = ExportedProblem(**{name: row._mapping[name] for name in names}, candidates=[])
    rows = session.execute(
        select(
            candidate.job_problem_id,
            candidate.candidate,
            candidate.schedule,
            candidate.kernel,
            candidate.build,
            candidate.verdict,
            candidate.message,
            candidate.prediction,
            build.slice,
            build.toolchain,
            build.state,
            build.code_digest,
            build.library,
            build.resources,
        )
        .join(BuildRow, build.id == candidate.build, isouter=True)
        .join(JobProblemRow, asked.id == candidate.job_problem_id)
        .where(asked.job_id == job_id)
        .order_by(candidate.candidate)
    )
    for row in rows:
        found[row.job_problem_id].candidates.append(row)
    return list(found.values())


def toolchain_descriptions(session: Session, digests: Iterable[str]) -> dict[str, dict[str, Any]]:
    """How the toolchains describe themselves, of those that are known."""
    table = core(ToolchainRow).c
    described: dict[str, dict[str, Any]] = {}
    for ids in chunks(set(digests)):
        rows = session.execute(select(table.digest, table.description).where(table.digest.in_(ids)))
        described.update((row.digest, row.description) for row in rows)
    return described
