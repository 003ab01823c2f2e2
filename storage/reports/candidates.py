"""A job's candidates: page by page, to be measured elsewhere, one with all that is stored; what its rules rejected."""

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Row, RowMapping, select

from codegen.operators import operator
from codegen.search.schedule import Schedule
from codegen.targets import target
from codegen.text.render_group import verified_label
from cukiln.types import (
    CandidateFacts,
    CandidatePage,
    CandidateReport,
    RejectionReport,
    Rejections,
    VerdictName,
    Verified,
)
from storage.database.pages import read_page
from storage.database.session import Session
from storage.database.sql import core, is_predicted, rows_among
from storage.database.tables import BuildRow, CandidateRow, JobProblemRow, ToolchainRow
from storage.entities.jobs import MAX_PAGE, job_state
from storage.entities.libraries import PUBLISHED_AS
from storage.entities.verdicts import GPU, Verdict, verdicts_to_show
from storage.entities.winners import get_winners


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
    of_job, candidate, build = core(JobProblemRow).c, core(CandidateRow).c, core(BuildRow).c
    query = (
        select(
            of_job.position,
            of_job.name,
            of_job.operator,
            of_job.problem,
            of_job.target,
            of_job.device_class,
            *(column for column in candidate if column.name != "build"),
            build.slice,
            build.code_digest,
            build.group_id,
            build.resources,
            build.imported,
            build.ptx_verdict,
        )
        .join(core(JobProblemRow), of_job.id == candidate.job_problem_id)
        .join(core(BuildRow), build.id == candidate.build, isouter=True)
        .where(of_job.job_id == job_id)
    )
    if problem is not None:
        query = query.where(of_job.name == problem)
    if verdict is not None:
        query = query.where(candidate.verdict == verdict)
    rows, next_cursor = read_page(session, query, (of_job.position, candidate.candidate), (int, str), limit, cursor)
    reports = [_report(row, of) for row, of in zip(rows, verdicts_to_show(session, rows), strict=True)]
    return CandidatePage(candidates=reports, next_cursor=next_cursor)


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
            RejectionReport(problem=name, rule=rule, **{key: counted[key] for key in ("count", "example", "message")})
            for name, by_rule in rows
            for rule, counted in sorted(by_rule.items())
        ]
    )


def _report(row: RowMapping, verification: Verdict | None) -> CandidateReport:
    resources = row["resources"] or {}
    error = _worst_error(verification.details) if verification else {}
    return CandidateReport.model_validate(
        {
            **row,
            "problem": row["name"],
            "group": row["group_id"],
            "verified": _verified(row, verification) if row["verdict"] == "ok" and verification else None,
            "ptx": _ptx_mark(row["ptx_verdict"]),
            "max_error": error.get("max_error"),
            "error_bound": error.get("error_bound"),
            "registers": resources.get("registers"),
            "shared_bytes": _sum_of(resources, "static_shared_bytes", "dynamic_shared_bytes"),
            "spill_bytes": _sum_of(resources, "spill_load_bytes", "spill_store_bytes"),
            "shared_memory": verification.details.get("shared_memory") if verification else None,
            "occupancy": (row["prediction"] or {}).get("occupancy"),
            "spread": (row["measurement"] or {}).get("spread"),
            "tflops": _tflops(row),
        }
    )


def _ptx_mark(verdict: dict[str, Any] | None) -> dict[str, Any] | None:
    """As a record has it: of what may be published."""
    if verdict is None or verdict["verdict"] not in PUBLISHED_AS:
        return None
    return {**verdict, "message": verdict["message"] or None, "promised": None}


def _verified(row: RowMapping, verification: Verdict) -> Verified:
    """Not verified on a GPU where the CPU found it right and a GPU found it wrong."""
    on_gpu = verification.venue == GPU and verification.verdict == "ok"
    if on_gpu or not is_predicted(row["device_class"]):
        return "gpu"
    return verified_label(row["operator"], target(row["target"]).tensor_sums)


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
    sizes = [int(resources[name]) for name in names if name in resources]
    return sum(sizes) if sizes else None


def candidate_facts(session: Session, candidate: str, job: str | None = None) -> CandidateFacts | None:
    """All that is stored of a candidate. Of several jobs or devices: a measured one before one with a verdict alone,
    and that before one with neither; the newest of each. None where no job has it."""
    rows = _candidate_rows(session, candidate, job)
    if not rows:
        return None
    row = max(rows, key=lambda row: (row["measured_us"] is not None, row["verdict"] is not None, row["problem_id"]))
    [verification] = verdicts_to_show(session, [row])
    front = [entry for record in get_winners(session, [row["key"]]).values() for entry in record.front]
    published = next(
        (entry for entry in front if entry.candidate == candidate and entry.code_digest == row["code_digest"]), None
    )
    details = None
    if verification is not None:
        details = {**verification.details, "venue": verification.venue, "plan_version": verification.plan_version}
    return CandidateFacts.model_validate(
        {
            **row,
            "job": row["job_id"],
            "toolchain": row["description"],
            "details": details,
            "cubin_sha256": published.cubin_sha256 if published else None,
            "source_sha256": published.source_sha256 if published else None,
        }
    )


def _candidate_rows(session: Session, candidate: str, job: str | None) -> Sequence[RowMapping]:
    problem, row, build, made_by = (core(table).c for table in (JobProblemRow, CandidateRow, BuildRow, ToolchainRow))
    columns = (problem[name] for name in ("job_id", "name", "operator", "problem", "target", "device_class", "key"))
    built = (build.slice, build.code_digest, build.imported, made_by.description)
    query = (
        select(problem.id.label("problem_id"), *columns, *row, *built)
        .join(core(JobProblemRow), problem.id == row.job_problem_id)
        .join(core(BuildRow), build.id == row.build, isouter=True)
        .join(core(ToolchainRow), made_by.digest == build.toolchain, isouter=True)
        .where(row.candidate == candidate)
    )
    if job is not None:
        query = query.where(problem.job_id == job)
    return session.execute(query).mappings().all()


ExportedCandidate = Row[Any]
"""Fields of its build are None while nothing has begun it. `verdict` and `message` are the candidate's own."""
Exported = tuple[Row[Any], list[ExportedCandidate]]
"""A `storage.database.tables.JobProblemRow` with its candidates."""


def exported_problems(session: Session, job_id: str) -> list[Exported]:
    """The job's problems in their order, each with its candidates by id."""
    problem, candidate, build = core(JobProblemRow).c, core(CandidateRow).c, core(BuildRow).c
    of_job = select(core(JobProblemRow)).where(problem.job_id == job_id).order_by(problem.position)
    problems: dict[int, Exported] = {row.id: (row, []) for row in session.execute(of_job)}
    built = ("slice", "toolchain", "state", "code_digest", "library", "resources")
    rows = session.execute(
        select(*candidate, *(build[name] for name in built))
        .join(BuildRow, build.id == candidate.build, isouter=True)
        .join(JobProblemRow, problem.id == candidate.job_problem_id)
        .where(problem.job_id == job_id)
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
