"""Give candidates the verdicts that are known, and send problems whose candidates are all judged on their way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import ColumnElement, Row, String, and_, bindparam, cast, or_, select, update

from codegen.compiler_log import telling_line
from storage.database import Session, clock_of
from storage.device_classes import asks_predicted, is_predicted
from storage.new_items import COMPARE, FINISH, REFINE, UNENDED, NewItem, add_items
from storage.rows import chunks, core
from storage.tables import BuildRow, CandidateRow, ItemRow, JobProblemRow, JobRow, VerdictRow

LIVE = ("queued", "running")
COMPILE_FAILURES = ("compile_error", "compile_timeout")
JUDGED_AT_ONCE = 2000
"""Candidates that get their verdict in one transaction."""
FINISH_SECONDS = 0.75
"""Of one winner, before any was finished here: nvcc, g++ and the linker on one kernel. Measured as 0.72 to 0.74 s for
three fp32 matmuls on two cores of an AMD EPYC."""
COMPARE_SECONDS = 3.0
"""Of one comparison, before any was made here: a guess at starting the process and letting a handful take turns."""
SECONDS: Mapping[str, float] = {REFINE: 0.0, COMPARE: COMPARE_SECONDS, FINISH: FINISH_SECONDS}
"""Predicted of the items that follow when all candidates are judged."""


def has_time_left(now: float) -> ColumnElement[bool]:
    """Of a job's row: it has not ended, and its deadline has not passed."""
    return and_(JobRow.state.in_(LIVE), or_(JobRow.deadline.is_(None), JobRow.deadline > now))


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
    return judge_some(session, build_ids, plan_version, None)[0]


def judge_failures(session: Session, build_ids: Iterable[str]) -> list[Judged]:
    """`judge_builds` of those that do not compile."""
    touched: set[int] = set()
    for ids in chunks(set(build_ids)):
        touched.update(_judge(session, _compile_failures(session, ids), None, None))
    return finish_judged(session, touched)


def judge_some(
    session: Session, build_ids: Iterable[str], plan_version: str, most: int | None
) -> tuple[list[Judged], bool]:
    """The same for at most so many candidates, and whether there may be more."""
    touched: set[int] = set()
    left = most
    for ids in chunks(set(build_ids)):
        for verdicts, problems in (
            (_compile_failures(session, ids), None),
            (_cpu_verdicts(session, ids, plan_version), asks_predicted()),
        ):
            judged = _judge(session, verdicts, problems, left)
            touched.update(judged)
            left = None if left is None else left - len(judged)
    return finish_judged(session, touched), left is not None and left <= 0


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
            items.append(NewItem(one.kind, str(row.id), one.target, (row.job_id,), SECONDS[one.kind]))
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
    session: Session,
    verdicts: dict[str, tuple[str, str | None]],
    problems: ColumnElement[bool] | None,
    most: int | None,
) -> list[int]:
    """Write verdict and message to the unjudged candidates of these builds, of such problems; the problem of each."""
    if not verdicts or (most is not None and most <= 0):
        return []
    candidate = core(CandidateRow).c
    mine: ColumnElement[bool] = candidate.verdict.is_(None) & candidate.build.in_(list(verdicts))
    if problems is not None:
        mine &= select(JobProblemRow.id).where(JobProblemRow.id == candidate.job_problem_id, problems).exists()
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


def skip_builds(
    session: Session, build_ids: Sequence[str], message: str, problems: ColumnElement[bool] | None = None
) -> list[Judged]:
    """Skip the unjudged candidates of these builds in all jobs (only of such `problems`, if given: a condition on their
    rows), and let the problems that have none left go on."""
    touched: set[int] = set()
    for ids in chunks(build_ids):
        unjudged = CandidateRow.build.in_(ids) & CandidateRow.verdict.is_(None)
        if problems is not None:
            of_such = select(JobProblemRow.id).where(JobProblemRow.id == CandidateRow.job_problem_id, problems)
            unjudged &= of_such.exists()
        touched.update(session.scalars(select(CandidateRow.job_problem_id).where(unjudged).distinct()))
        session.execute(
            update(CandidateRow)
            .where(unjudged)
            .values(verdict="skipped", message=message)
            .execution_options(synchronize_session=False)
        )
    return finish_judged(session, touched)
