"""Give candidates the verdicts that are known, and send problems whose candidates are all judged on their way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Row, String, and_, bindparam, cast, select, update

from codegen.compiler_log import telling_line
from storage.database import Session, clock_of
from storage.device_classes import asks_predicted, is_predicted
from storage.new_items import COMPARE, FINISH, REFINE, UNENDED, NewItem, add_items
from storage.rows import chunks, core
from storage.tables import BuildRow, CandidateRow, ItemRow, JobProblemRow, JobRow, VerdictRow

LIVE = ("queued", "running")
COMPILE_FAILURES = ("compile_error", "compile_timeout")


@dataclass(frozen=True, order=True)
class Judged:
    """A problem that goes on, and the item that was added for it: write a ticket to (kind, target).

    `refine`: all its candidates are screened, and the best are to be compiled in full. `compare`: all are judged, and
    the best are to be run against each other on a GPU. `finish`: all is done but the choice. `measure`: there is more
    to measure than there was when the item was claimed.
    """

    problem: int
    kind: Literal["measure", "refine", "compare", "finish"]
    target: str | None


def judge_builds(session: Session, build_ids: Iterable[str], plan_version: str) -> list[Judged]:
    """Judge every unjudged candidate of these builds for which a verdict is known, whichever job it belongs to: all by
    a compile failure, those of `predicted:` problems by a proof on the CPU. `storage.judge_gpu` has the others.

    Returns the problems that are now completely judged; their next items are added. Doing it twice changes nothing.
    """
    touched: set[int] = set()
    for ids in chunks(set(build_ids)):
        touched |= _judge(session, _compile_failures(session, ids), None)
        touched |= _judge(session, _cpu_verdicts(session, ids, plan_version), asks_predicted())
    return finish_judged(session, touched)


def finish_judged(session: Session, problem_ids: Iterable[int]) -> list[Judged]:
    """Add the next item of each live, planned problem without an unjudged candidate; returns what was added.

    While there is time left, those that were screened are refined, and candidates that are right on a GPU are compared
    once; then the problem is finished.
    """
    judged: list[Judged] = []
    items: list[NewItem] = []
    candidate = select(CandidateRow.candidate).where(CandidateRow.job_problem_id == JobProblemRow.id)
    of_problem = select(ItemRow.state).where(ItemRow.ref == cast(JobProblemRow.id, String))
    refine, compare = (of_problem.where(ItemRow.kind == kind).scalar_subquery() for kind in (REFINE, COMPARE))
    now = clock_of(session).now()
    for ids in chunks(set(problem_ids)):
        rows = session.execute(
            select(
                JobProblemRow.id,
                JobProblemRow.target,
                JobProblemRow.device_class,
                JobProblemRow.job_id,
                JobRow.priority,
                JobRow.deadline,
                JobProblemRow.screening,
                candidate.where(CandidateRow.verdict == "ok", ~only_screened()).exists().label("right"),
                refine.label("refine"),
                compare.label("compare"),
            )
            .join(JobRow, JobRow.id == JobProblemRow.job_id)
            .where(JobProblemRow.id.in_(ids), JobProblemRow.planned, JobProblemRow.state.in_(LIVE))
            .where(~candidate.where(CandidateRow.verdict.is_(None)).exists())
            .order_by(JobProblemRow.id)
        )
        for row in rows:
            if row.refine in UNENDED or row.compare in UNENDED:
                continue  # its end leads here again
            one = _next(row, now)
            judged.append(one)
            items.append(NewItem(one.kind, str(row.id), target=one.target, job_id=row.job_id, priority=row.priority))
    add_items(session, items)
    return judged


def only_screened() -> ColumnElement[bool]:
    """Of a candidate's row: whether nothing but its screening build was made, which is never published."""
    return and_(CandidateRow.screening_build.is_not(None), CandidateRow.screening_build == CandidateRow.build)


def _next(row: Row[Any], now: float) -> Judged:
    in_time = row.deadline is None or row.deadline > now
    if row.screening and row.refine is None and in_time:
        return Judged(row.id, REFINE, None)
    if row.right and row.compare is None and in_time and not is_predicted(row.device_class):
        return Judged(row.id, COMPARE, row.device_class)
    return Judged(row.id, FINISH, row.target)


def _judge(
    session: Session, verdicts: dict[str, tuple[str, str | None]], problems: ColumnElement[bool] | None
) -> set[int]:
    """Write verdict and message to the unjudged candidates of these builds, of such problems; returns the problems."""
    if not verdicts:
        return set()
    candidates = core(CandidateRow)
    mine: ColumnElement[bool] = candidates.c.verdict.is_(None)
    if problems is not None:
        mine &= select(JobProblemRow.id).where(JobProblemRow.id == candidates.c.job_problem_id, problems).exists()
    touched = session.scalars(
        select(candidates.c.job_problem_id).where(mine, candidates.c.build.in_(list(verdicts))).distinct()
    ).all()
    if touched:
        session.execute(
            update(candidates)
            .where(candidates.c.build == bindparam("of_build"), mine)
            .values(verdict=bindparam("known"), message=bindparam("words")),
            [{"of_build": build, "known": known, "words": words} for build, (known, words) in verdicts.items()],
        )
    return set(touched)


def _compile_failures(session: Session, ids: list[str]) -> dict[str, tuple[str, str | None]]:
    """Verdict and message of the builds that do not compile."""
    rows = session.execute(
        select(BuildRow.id, BuildRow.state, BuildRow.log).where(
            BuildRow.id.in_(ids), BuildRow.state.in_(COMPILE_FAILURES)
        )
    )
    return {build: (state, telling_line(log or "") or None) for build, state, log in rows}


def _cpu_verdicts(session: Session, ids: list[str], plan_version: str) -> dict[str, tuple[str, str | None]]:
    """Verdict and message of the builds whose slice was judged on the CPU."""
    rows = session.execute(
        select(BuildRow.id, VerdictRow.verdict, VerdictRow.message)
        .join(VerdictRow, VerdictRow.subject == BuildRow.slice)
        .where(VerdictRow.venue == "cpu", VerdictRow.plan_version == plan_version)
        .where(BuildRow.id.in_(ids), BuildRow.state == "ok")
    )
    return {build: (verdict, message) for build, verdict, message in rows}
