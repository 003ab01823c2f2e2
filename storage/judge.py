"""Give candidates the verdicts that are known, and send problems whose candidates are all judged to be finished."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import bindparam, select, update

from storage.database import Session
from storage.new_items import FINISH, NewItem, add_items
from storage.rows import chunks, core
from storage.tables import BuildRow, CandidateRow, JobProblemRow, JobRow, VerdictRow

LIVE = ("queued", "running")
COMPILE_FAILURES = ("compile_error", "compile_timeout")
LOG_LINE = 300


def judge_builds(session: Session, build_ids: Iterable[str], venue: str, plan_version: str) -> list[int]:
    """Judge every unjudged candidate of these builds for which a verdict is known, whichever job it belongs to.

    Returns the ids of the problems that are now completely judged; their finish items are added. Doing it twice
    changes nothing.
    """
    touched: set[int] = set()
    for ids in chunks(set(build_ids)):
        verdicts = _known(session, ids, venue, plan_version)
        if not verdicts:
            continue
        unjudged = CandidateRow.verdict.is_(None) & CandidateRow.build.in_(list(verdicts))
        touched.update(session.scalars(select(CandidateRow.job_problem_id).where(unjudged).distinct()))
        candidates = core(CandidateRow)
        session.execute(
            update(candidates)
            .where(candidates.c.build == bindparam("of_build"), candidates.c.verdict.is_(None))
            .values(verdict=bindparam("known"), message=bindparam("words")),
            [{"of_build": build, "known": known, "words": words} for build, (known, words) in verdicts.items()],
        )
    return finish_judged(session, touched)


def finish_judged(session: Session, problem_ids: Iterable[int]) -> list[int]:
    """Add the finish item of each live, planned problem without an unjudged candidate; returns their ids."""
    judged: list[int] = []
    items: list[NewItem] = []
    open_candidate = select(CandidateRow.candidate).where(
        CandidateRow.job_problem_id == JobProblemRow.id, CandidateRow.verdict.is_(None)
    )
    for ids in chunks(set(problem_ids)):
        rows = session.execute(
            select(JobProblemRow.id, JobProblemRow.target, JobProblemRow.job_id, JobRow.priority)
            .join(JobRow, JobRow.id == JobProblemRow.job_id)
            .where(JobProblemRow.id.in_(ids), JobProblemRow.planned, JobProblemRow.state.in_(LIVE))
            .where(~open_candidate.exists())
            .order_by(JobProblemRow.id)
        )
        for problem, target, job, priority in rows:
            judged.append(problem)
            items.append(NewItem(FINISH, str(problem), target=target, job_id=job, priority=priority))
    add_items(session, items)
    return judged


def _known(session: Session, ids: list[str], venue: str, plan_version: str) -> dict[str, tuple[str, str | None]]:
    """Verdict and message by build, of those that failed to compile or have been verified."""
    subject = BuildRow.code_digest if venue == "gpu" else BuildRow.slice
    rows = session.execute(
        select(BuildRow.id, BuildRow.state, BuildRow.log, VerdictRow.verdict, VerdictRow.message)
        .join(
            VerdictRow,
            (VerdictRow.subject == subject) & (VerdictRow.venue == venue) & (VerdictRow.plan_version == plan_version),
            isouter=True,
        )
        .where(BuildRow.id.in_(ids), BuildRow.state != "pending")
    )
    known: dict[str, tuple[str, str | None]] = {}
    for build, state, log, verdict, message in rows:
        if state in COMPILE_FAILURES:
            known[build] = (state, first_line(log))
        elif verdict is not None:
            known[build] = (verdict, message)
    return known


def first_line(log: str | None) -> str | None:
    """The line of a compiler's log that says what is wrong, else its first."""
    lines = [line.strip() for line in (log or "").splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()] or lines
    return telling[0][:LOG_LINE] if telling else None
