"""The report of a job, a handful of queries."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import RowMapping, func, select

from cukiln.types import (
    Job,
    ProblemReport,
    PtxCost,
    WinnerSummary,
)
from storage.database.session import Session
from storage.database.sql import core, rows_among
from storage.database.tables import BuildRow, CandidateRow, JobProblemRow, WinnerRow
from storage.entities.jobs import JobStatus, job_state, priority_name
from storage.entities.winners import usable
from storage.reports.progress import job_progress

WITHDRAWN = (
    "its winner was withdrawn after this job had ended: a GPU found its code wrong, its files were damaged, the "
    "import that brought it was taken back, or it was forgotten on request. Submit the problem again"
)


def job_report(session: Session, job_id: str, live_seconds: float | None = None) -> Job | None:
    """The job with all its problems; None if there is no such job. `live_seconds`: see `job_progress`."""
    job = job_state(session, job_id)
    progress = job_progress(session, job_id, live_seconds)
    if job is None or progress is None:
        return None
    rows = session.execute(
        select(core(JobProblemRow)).where(JobProblemRow.job_id == job_id).order_by(JobProblemRow.position)
    ).mappings()
    problems = rows.all()
    verdicts = _verdict_counts(session, job_id)
    costs = _ptx_costs(session, problems) if job.ptx == "all" else {}
    winners = {row: _summary(*entry) for row, entry in winner_entries(session, problems, job).items()}
    return Job.model_validate(
        {
            **job._mapping,
            "job": job.id,
            "priority": priority_name(job.priority),
            "progress": progress.progress,
            "seconds": progress.seconds,
            "problems": [
                _report(row, verdicts.get(row["id"], {}), winners.get(row["id"]), costs.get(row["id"]))
                for row in problems
            ],
        }
    )


def _report(
    row: RowMapping, verdicts: dict[str, int], winner: WinnerSummary | None, ptx: PtxCost | None
) -> ProblemReport:
    withdrawn = row["winner"] is not None and winner is None
    return ProblemReport.model_validate(
        {
            **row,
            "candidates": row["candidate_count"],
            "winner": winner,
            "verdicts": verdicts,
            "ptx": ptx,
            "rejected": {rule: rejection["count"] for rule, rejection in row["rejections"].items()},
            "error": WITHDRAWN if withdrawn else row["error"],
        }
    )


def _ptx_costs(session: Session, problems: Sequence[RowMapping]) -> dict[int, PtxCost]:
    """Kernels of each problem's candidates by what their PTX showed, and what this job spent on that. Verdicts of an
    older plan are forgotten when a job begins to verify: before that no kernel is counted."""
    candidate, build = core(CandidateRow).c, core(BuildRow).c
    builds: dict[int, set[str]] = {row["id"]: set() for row in problems}
    verified = [row["id"] for row in problems if "ptx" in row["seconds"]]
    pairs = select(candidate.job_problem_id, candidate.build)
    for problem_id, build_id in rows_among(session, pairs, candidate.job_problem_id, verified):
        builds[problem_id].add(build_id)
    # By build: PostgreSQL compares no JSON, so rows with a verdict would not be distinct.
    query = select(build.id, build.ptx_verdict).where(build.ptx_verdict.is_not(None))
    verdicts = {
        id: verdict["verdict"] for id, verdict in rows_among(session, query, build.id, set().union(*builds.values()))
    }
    costs = {}
    for row in problems:
        counts = Counter(verdicts[id] for id in builds[row["id"]] if id in verdicts)
        spent = row["seconds"].get("ptx", {}).get("cpu", 0.0)
        costs[row["id"]] = PtxCost(kernels=dict(sorted(counts.items())), cpu_seconds=spent)
    return costs


def _verdict_counts(session: Session, job_id: str) -> dict[int, dict[str, int]]:
    """Candidates by verdict, of each problem that has any."""
    counts: dict[int, dict[str, int]] = {}
    candidate = core(CandidateRow).c
    rows = session.execute(
        select(candidate.job_problem_id, candidate.verdict, func.count())
        .join(JobProblemRow, JobProblemRow.id == candidate.job_problem_id)
        .where(JobProblemRow.job_id == job_id, candidate.verdict.is_not(None))
        .group_by(candidate.job_problem_id, candidate.verdict)
        .order_by(candidate.verdict)
    )
    for problem_id, verdict, count in rows:
        counts.setdefault(problem_id, {})[verdict] = count
    return counts


def winner_entries(
    session: Session, problems: Sequence[RowMapping], job: JobStatus
) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """The record of each problem that has a winner, and that entry of its front which is the winner, as JSON: parsing a
    record reads launch metadata and verdicts, which are shown nowhere.

    The record may have moved on since: a candidate that left the front is answered by the best that the job allows.
    """
    won = [(row["id"], row["key"], row["winner"]) for row in problems if row["winner"] is not None]
    query = select(WinnerRow.key, WinnerRow.record)
    records = dict(rows_among(session, query, WinnerRow.key, [key for _, key, _ in won]))
    return {
        problem_id: (records[key], _entry(records[key]["front"], candidate, job))
        for problem_id, key, candidate in won
        if records.get(key)
    }


def _entry(front: list[dict[str, Any]], candidate: str, job: JobStatus) -> dict[str, Any]:
    allowed = usable(front, job.workspace_limit_bytes, job.deterministic)
    return [*(entry for entry in front if entry["candidate"] == candidate), *allowed, *front][0]


def _summary(record: dict[str, Any], entry: dict[str, Any]) -> WinnerSummary:
    vendor, measured_on = record.get("vendor") or {}, entry.get("measured_on") or {}
    return WinnerSummary.model_validate(
        {
            **entry,
            "ptx": {**entry["ptx"], "promised": None} if entry.get("ptx") else None,
            "ranked_by": record["ranked_by"],
            "vendor_us": vendor.get("median_us"),
            "vendor_library": vendor.get("library"),
            "vendor_max_error": vendor.get("max_error"),
            "vendor_error_bound": vendor.get("error_bound"),
            "vendor_missing": measured_on.get("vendor_missing"),
            "unsteady": measured_on.get("unsteady", []),
            "limited_by": measured_on.get("limited_by", []),
            "vendor_ratio": (entry.get("measurement") or {}).get("vendor_ratio"),
            # Its margin is one over the fastest of the front.
            "runner_up": record.get("runner_up") if entry["candidate"] == record["front"][0]["candidate"] else None,
        }
    )
