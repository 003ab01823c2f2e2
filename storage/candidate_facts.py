"""All that is known of one candidate: what it is made of, how it was judged, how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import RowMapping, select

from cukiln.types import CandidateFacts
from storage.database import Session
from storage.rows import core
from storage.tables import BuildRow, CandidateRow, JobProblemRow, ToolchainRow
from storage.verdicts import proofs_of
from storage.winners import get_winners


def candidate_facts(session: Session, candidate: str, job: str | None = None) -> CandidateFacts | None:
    """Of a candidate that was met in several jobs or on several devices: what was measured before what was only judged,
    and that before what was neither; the newest of each. None where no job has it."""
    rows = _rows(session, candidate, job)
    if not rows:
        return None
    row = max(rows, key=_worth)
    [proof] = proofs_of(session, [row])
    front = [entry for record in get_winners(session, [row["key"]]).values() for entry in record.front]
    published = next(
        (one for one in front if one.candidate == candidate and one.code_digest == row["code_digest"]), None
    )
    details: dict[str, Any] | None = None
    if proof is not None:
        details = {"venue": proof.venue, "plan_version": proof.plan_version, **proof.details}
    return CandidateFacts(
        candidate=row["candidate"],
        job=row["job_id"],
        name=row["name"],
        operator=row["operator"],
        problem=row["problem"],
        target=row["target"],
        device_class=row["device_class"],
        schedule=row["schedule"],
        kernel=row["kernel"],
        slice=row["slice"],
        code_digest=row["code_digest"],
        toolchain=row["description"],
        verdict=row["verdict"],
        message=row["message"],
        details=details,
        predicted_us=row["predicted_us"],
        measured_us=row["measured_us"],
        measurement=row["measurement"],
        cubin_sha256=published.cubin_sha256 if published else None,
        source_sha256=published.source_sha256 if published else None,
    )


def _worth(row: RowMapping) -> tuple[bool, bool, int]:
    return row["measured_us"] is not None, row["verdict"] is not None, row["problem_id"]


def _rows(session: Session, candidate: str, job: str | None) -> Sequence[RowMapping]:
    asked, row, build, made_by = (core(table).c for table in (JobProblemRow, CandidateRow, BuildRow, ToolchainRow))
    columns = (asked.job_id, asked.name, asked.operator, asked.problem, asked.target, asked.device_class, asked.key)
    figures = (row.candidate, row.schedule, row.kernel, row.verdict, row.message, row.predicted_us, row.measured_us)
    query = (
        select(
            asked.id.label("problem_id"),
            *columns,
            *figures,
            row.measurement,
            build.slice,
            build.code_digest,
            build.imported,
            made_by.description,
        )
        .join(core(JobProblemRow), asked.id == row.job_problem_id)
        .join(core(BuildRow), build.id == row.build, isouter=True)
        .join(core(ToolchainRow), made_by.digest == build.toolchain, isouter=True)
        .where(row.candidate == candidate)
    )
    if job is not None:
        query = query.where(asked.job_id == job)
    return session.execute(query).mappings().all()
