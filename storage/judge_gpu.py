"""Give candidates on a GPU what is known of their code: its times there, or that it was found wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, and_, bindparam, exists, false, or_, select, update

from storage.database import Session
from storage.device_classes import asks_predicted
from storage.judge import LIVE
from storage.rows import core
from storage.tables import BuildRow, CandidateRow, JobProblemRow, MeasurementRow, VerdictRow
from storage.verdicts import GPU


@dataclass(frozen=True)
class Finding:
    """What becomes of one candidate of a job's problem. `measurement` as JSON; None where it is not right."""

    problem_id: int
    candidate: str
    verdict: str
    message: str | None
    measurement: dict[str, Any] | None = None


def condemn(session: Session, code_digests: Collection[str], plan_version: str | None, most: int) -> list[int]:
    """Let at most so many candidates of live problems on a GPU share the fate of their code where it was found wrong
    (by this version of the test plan; None: by any), also those that were called right before; the problem of each."""
    wrong = [VerdictRow.subject.in_(list(code_digests)), VerdictRow.venue == GPU, VerdictRow.verdict != "ok"]
    if plan_version is not None:
        wrong.append(VerdictRow.plan_version == plan_version)
    rows = session.execute(
        select(CandidateRow.job_problem_id, CandidateRow.candidate, VerdictRow.verdict, VerdictRow.message)
        .join(BuildRow, BuildRow.code_digest == VerdictRow.subject)
        .join(CandidateRow, CandidateRow.build == BuildRow.id)
        .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
        .where(*wrong, or_(CandidateRow.verdict.is_(None), CandidateRow.verdict == "ok"))
        .where(JobProblemRow.state.in_(LIVE), ~asks_predicted())
        .limit(most)
    )
    return write_findings(session, [Finding(*row) for row in rows])


def write_findings(session: Session, findings: Sequence[Finding]) -> list[int]:
    """Write verdicts and times to candidates; the problem of each."""
    if not findings:
        return []
    table = core(CandidateRow)
    session.execute(
        update(table)
        .where(table.c.job_problem_id == bindparam("of_problem"), table.c.candidate == bindparam("of_candidate"))
        .values(
            verdict=bindparam("found"),
            message=bindparam("words"),
            measured_us=bindparam("us"),
            measurement=bindparam("times", type_=table.c.measurement.type),
        ),
        [
            {
                "of_problem": finding.problem_id,
                "of_candidate": finding.candidate,
                "found": finding.verdict,
                "words": finding.message,
                "us": finding.measurement["median_us"] if finding.measurement else None,
                "times": finding.measurement,
            }
            for finding in findings
        ],
    )
    return [finding.problem_id for finding in findings]


def give_findings(
    session: Session,
    ids: list[str],
    plan_version: str,
    drivers: Mapping[str, str],
    which: ColumnElement[bool],
    most: int | None,
) -> list[int]:
    """Judge at most so many unjudged candidates of these builds on a GPU (`which`: a condition on their rows) for which
    a finding is known: times of equal code on its device class under that class's driver, proved by this test plan; or
    that equal code was wrong on some GPU. Returns the problem of each."""
    present = or_(
        false(),
        *(
            and_(MeasurementRow.device_class == device_class, MeasurementRow.driver == driver)
            for device_class, driver in drivers.items()
        ),
    )
    wrong = and_(
        VerdictRow.subject == BuildRow.code_digest,
        VerdictRow.venue == GPU,
        VerdictRow.plan_version == plan_version,
        VerdictRow.verdict != "ok",
    )
    timed = and_(
        MeasurementRow.code_digest == BuildRow.code_digest, MeasurementRow.plan_version == plan_version, present
    )
    # Builds first: thousands of candidates may wait for one of which nothing is known.
    found = exists().where(wrong) | exists().where(timed)
    known = session.scalars(select(BuildRow.id).where(BuildRow.id.in_(ids), BuildRow.state == "ok", found)).all()
    if not known:
        return []
    rows = session.execute(
        select(
            CandidateRow.job_problem_id,
            CandidateRow.candidate,
            VerdictRow.verdict,
            VerdictRow.message,
            MeasurementRow.measurement,
        )
        .select_from(CandidateRow)
        .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
        .join(BuildRow, BuildRow.id == CandidateRow.build)
        .join(VerdictRow, wrong, isouter=True)
        .join(
            MeasurementRow,
            timed
            & (MeasurementRow.candidate == CandidateRow.candidate)
            & (MeasurementRow.device_class == JobProblemRow.device_class),
            isouter=True,
        )
        .where(CandidateRow.build.in_(known), CandidateRow.verdict.is_(None))
        .where(JobProblemRow.state.in_(LIVE), ~asks_predicted())
        .where(or_(VerdictRow.verdict.is_not(None), MeasurementRow.code_digest.is_not(None)), which)
        .limit(most)
    )
    findings = [
        Finding(row.job_problem_id, row.candidate, row.verdict, row.message)
        if row.verdict is not None
        else Finding(row.job_problem_id, row.candidate, "ok", None, row.measurement)
        for row in rows
    ]
    return write_findings(session, findings)
