"""A job's candidates, page by page, and what its rules rejected."""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy import RowMapping, and_, or_, select

from codegen.operators import operator
from codegen.schedule import Schedule
from codegen.verified import verified_label
from cukiln.types import CandidatePage, CandidateReport, RejectionReport, Rejections, VerdictName, Verified
from storage.cursors import make_cursor, read_cursor
from storage.database import Session
from storage.device_classes import is_predicted
from storage.jobs import MAX_PAGE, job_state
from storage.rows import core
from storage.tables import BuildRow, CandidateRow, JobProblemRow
from storage.verdicts import Verdict, proofs_of


def candidate_page(
    session: Session,
    job_id: str,
    *,
    limit: int = 200,
    cursor: str | None = None,
    problem: str | None = None,
    verdict: VerdictName | None = None,
) -> CandidatePage | None:
    """Candidates in the order of the job's problems, then by id; of one problem (by name) or verdict where given.

    None if there is no such job. Raises `BadCursor`.
    """
    if job_state(session, job_id) is None:
        return None
    limit = max(1, min(limit, MAX_PAGE))
    asked, candidate, build = core(JobProblemRow).c, core(CandidateRow).c, core(BuildRow).c
    query = (
        select(
            asked.position,
            asked.name,
            asked.operator,
            asked.problem,
            asked.device_class,
            *(column for column in candidate if column.name != "build"),
            build.slice,
            build.code_digest,
            build.group_id,
            build.resources,
            build.imported,
        )
        .join(core(JobProblemRow), asked.id == candidate.job_problem_id)
        .join(core(BuildRow), build.id == candidate.build, isouter=True)
        .where(asked.job_id == job_id)
        .order_by(asked.position, candidate.candidate)
        .limit(limit + 1)
    )
    if problem is not None:
        query = query.where(asked.name == problem)
    if verdict is not None:
        query = query.where(candidate.verdict == verdict)
    if cursor is not None:
        position, after = read_cursor(cursor, (int, str))
        after_it = and_(asked.position == position, candidate.candidate > after)
        query = query.where(or_(asked.position > position, after_it))
    rows = session.execute(query).mappings().all()
    shown = rows[:limit]
    proofs = proofs_of(session, shown)
    more = len(rows) > limit
    return CandidatePage(
        candidates=[_report(row, proof) for row, proof in zip(shown, proofs, strict=True)],
        next_cursor=make_cursor(shown[-1]["position"], shown[-1]["candidate"]) if more else None,
    )


def has_problem(session: Session, job_id: str, name: str) -> bool:
    """Whether the job has a problem of this name."""
    named = select(JobProblemRow.id).where(JobProblemRow.job_id == job_id, JobProblemRow.name == name)
    return session.scalar(named) is not None


def rejections(session: Session, job_id: str) -> Rejections | None:
    """Counts per problem and rule, with one example each; None if there is no such job."""
    if job_state(session, job_id) is None:
        return None
    rows = session.execute(
        select(JobProblemRow.name, JobProblemRow.rejections)
        .where(JobProblemRow.job_id == job_id)
        .order_by(JobProblemRow.position)
    )
    return Rejections(
        rejections=[
            RejectionReport(problem=name, rule=rule, **{key: found[key] for key in ("count", "example", "message")})
            for name, by_rule in rows
            for rule, found in sorted(by_rule.items())
        ]
    )


def _report(row: RowMapping, proof: Verdict | None) -> CandidateReport:
    resources = row["resources"] or {}
    error = _worst_error(proof.details) if proof else {}
    return CandidateReport(
        problem=row["name"],
        device_class=row["device_class"],
        candidate=row["candidate"],
        schedule=row["schedule"],
        kernel=row["kernel"],
        group=row["group_id"],
        verdict=cast("VerdictName | None", row["verdict"]),
        message=row["message"],
        verified=_verified(row, proof) if row["verdict"] == "ok" and proof else None,
        max_error=error.get("max_error"),
        error_bound=error.get("error_bound"),
        registers=resources.get("registers"),
        shared_bytes=_sum_of(resources, "static_shared_bytes", "dynamic_shared_bytes"),
        spill_bytes=_sum_of(resources, "spill_load_bytes", "spill_store_bytes"),
        shared_memory=proof.details.get("shared_memory") if proof else None,
        occupancy=(row["prediction"] or {}).get("occupancy"),
        predicted_us=row["predicted_us"],
        measured_us=row["measured_us"],
        spread=(row["measurement"] or {}).get("spread"),
        tflops=_tflops(row),
    )


def _verified(row: RowMapping, proof: Verdict) -> Verified:
    """A candidate that the CPU proved right is not called proved on a GPU because that one found it wrong."""
    on_gpu = proof.venue == "gpu" and proof.verdict == "ok"
    return "gpu" if on_gpu or not is_predicted(row["device_class"]) else verified_label(row["operator"])


def _tflops(row: RowMapping) -> float | None:
    """Of the measured time. None where nothing was measured, or its operator is not loaded here."""
    if not row["measured_us"]:
        return None
    try:
        kind = operator(row["operator"])
        flops = kind.cost(kind.parse(row["problem"]), Schedule.of(row["schedule"])).flops
    except (ValueError, KeyError):  # UnknownOperator, or what another version of the operator made
        return None
    return float(flops / row["measured_us"] * 1e-6)


def _worst_error(details: dict[str, Any]) -> dict[str, Any]:
    """The random case with the largest error; exact cases allow none."""
    cases = [case for case in details.get("cases", []) if not case.get("exact") and case.get("max_error") is not None]
    return max(cases, key=lambda case: float(case["max_error"]), default={})


def _sum_of(resources: dict[str, Any], *names: str) -> int | None:
    found = [int(resources[name]) for name in names if name in resources]
    return sum(found) if found else None
