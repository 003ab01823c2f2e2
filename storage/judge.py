"""Give candidates the verdicts that are known, and send problems whose candidates are all judged on their way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import ColumnElement, String, and_, bindparam, cast, or_, select, update

from codegen.compiler_log import telling_line
from storage.database import Session, clock_of
from storage.device_classes import is_predicted
from storage.losses import LOST
from storage.new_items import COMPARE, FINISH, UNENDED, NewItem, add_items
from storage.rows import chunks, core
from storage.tables import BuildRow, CandidateRow, ItemRow, JobProblemRow, JobRow, VerdictRow

LIVE = ("queued", "running")
COMPILE_FAILURES = ("compile_error", "compile_timeout")
JUDGED_AT_ONCE = 1000
"""Candidates that get their verdict in one transaction: about 50 ms of a shared core."""
FINISH_SECONDS = 0.75
"""Of one winner, before any was finished here: nvcc, g++ and the linker on one kernel. Measured as 0.72 to 0.74 s for
three fp32 matmuls on two cores of an AMD EPYC."""
COMPARE_SECONDS = 3.0
"""Of one comparison, before any was made here: a guess at starting the process and letting a handful take turns."""


def has_time_left(now: float) -> ColumnElement[bool]:
    """Of a job's row: it has not ended, and its deadline has not passed."""
    return and_(JobRow.state.in_(LIVE), or_(JobRow.deadline.is_(None), JobRow.deadline > now))


@dataclass(frozen=True, order=True)
class Judged:
    """A problem that goes on, and the item that was added for it: write a ticket to (kind, target).

    `compare`: all its candidates are judged, and the best are to be run against each other on a GPU. `finish`: all is
    done but the choice. `measure`: there is more to measure than there was when the item was claimed.
    """

    problem: int
    kind: Literal["measure", "compare", "finish"]
    target: str | None


def finish_judged(session: Session, problem_ids: Iterable[int]) -> list[Judged]:
    """Add the next item of each live, planned problem without an unjudged candidate; returns what was added.

    While there is time left, candidates that are right on a GPU are compared once; then the problem is finished.
    """
    judged: list[Judged] = []
    items: list[NewItem] = []
    candidate = select(CandidateRow.candidate).where(CandidateRow.job_problem_id == JobProblemRow.id)
    compare = select(ItemRow.state).where(ItemRow.kind == COMPARE, ItemRow.ref == cast(JobProblemRow.id, String))
    now = clock_of(session).now()
    for ids in chunks(set(problem_ids)):
        rows = session.execute(
            select(
                JobProblemRow.id,
                JobProblemRow.target,
                JobProblemRow.device_class,
                JobProblemRow.job_id,
                JobRow.deadline,
                candidate.where(CandidateRow.verdict == "ok").exists().label("right"),
                compare.scalar_subquery().label("compare"),
            )
            .join(JobRow, JobRow.id == JobProblemRow.job_id)
            .where(JobProblemRow.id.in_(ids), JobProblemRow.planned, JobProblemRow.state.in_(LIVE))
            .where(~candidate.where(CandidateRow.verdict.is_(None)).exists())
            .order_by(JobProblemRow.id)
        )
        for row in rows:
            if row.compare in UNENDED:
                continue  # its end leads here again
            in_time = row.deadline is None or row.deadline > now
            if row.right and row.compare is None and in_time and not is_predicted(row.device_class):
                one, seconds = Judged(row.id, COMPARE, row.device_class), COMPARE_SECONDS
            else:
                one, seconds = Judged(row.id, FINISH, row.target), FINISH_SECONDS
            judged.append(one)
            items.append(NewItem(one.kind, str(row.id), one.target, (row.job_id,), seconds))
    add_items(session, items)
    return judged


def skip_lost(session: Session, builds: Mapping[str, str], which: ColumnElement[bool], most: int) -> list[int]:
    """`give_verdicts` skipped, with these messages. Problems that lose candidates say why: their jobs end partial."""
    touched = give_verdicts(session, {id: ("skipped", why) for id, why in builds.items()}, which, most)
    for why in set(builds.values()):
        note_lost(session, touched, why)
    return touched


def note_lost(session: Session, problem_ids: Iterable[int], why: str | None) -> None:
    """Nothing where a candidate was skipped for another reason."""
    problem = core(JobProblemRow).c
    for ids in chunks(set(problem_ids) if (why or "").startswith(LOST) else ()):
        here = problem.id.in_(ids) & problem.error.is_(None)
        session.execute(update(core(JobProblemRow)).where(here).values(error=why))


def give_verdicts(
    session: Session,
    verdicts: Mapping[str, tuple[str, str | None]],
    which: ColumnElement[bool],
    most: int | None,
) -> list[int]:
    """Write verdict and message, by build, to at most so many unjudged candidates (`which`: a condition on their rows);
    the problem of each."""
    if not verdicts:
        return []
    candidate = core(CandidateRow).c
    mine = candidate.verdict.is_(None) & candidate.build.in_(list(verdicts)) & which
    columns = (candidate.job_problem_id, candidate.candidate, candidate.build)
    rows = session.execute(select(*columns).where(mine).limit(most)).all()
    if rows:
        session.execute(
            update(core(CandidateRow))
            .where(candidate.job_problem_id == bindparam("of_problem"), candidate.candidate == bindparam("named"))
            .values(verdict=bindparam("known"), message=bindparam("words")),
            [
                {"of_problem": problem, "named": name, "known": verdicts[build][0], "words": verdicts[build][1]}
                for problem, name, build in rows
            ],
        )
    return [problem for problem, _, _ in rows]


def of_problems(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """Of a candidate's row: whether its problem is such."""
    mine = JobProblemRow.id == core(CandidateRow).c.job_problem_id
    return select(JobProblemRow.id).where(mine, condition).correlate(core(CandidateRow)).exists()


def compile_failures(session: Session, ids: list[str]) -> dict[str, tuple[str, str | None]]:
    """Verdict and message of the builds that do not compile."""
    rows = session.execute(
        select(BuildRow.id, BuildRow.state, BuildRow.log).where(
            BuildRow.id.in_(ids), BuildRow.state.in_(COMPILE_FAILURES)
        )
    )
    return {build: (state, telling_line(log or "") or None) for build, state, log in rows}


def cpu_verdicts(session: Session, ids: list[str], plan_version: str) -> dict[str, tuple[str, str | None]]:
    """Verdict and message of the builds whose slice was judged on the CPU."""
    rows = session.execute(
        select(BuildRow.id, VerdictRow.verdict, VerdictRow.message)
        .join(VerdictRow, VerdictRow.subject == BuildRow.slice)
        .where(VerdictRow.venue == "cpu", VerdictRow.plan_version == plan_version)
        .where(BuildRow.id.in_(ids), BuildRow.state == "ok")
    )
    return {build: (verdict, message) for build, verdict, message in rows}
