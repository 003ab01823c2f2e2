"""Give candidates the verdicts and times that are stored; add the next task of problems that have all of theirs, and
tasks to verify on the CPU (`predicted:` problems) or measure (others) the builds of those that have none."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import ColumnElement, Row, String, and_, cast, exists, false, or_, select, true

from codegen.identity import PlanVersions
from codegen.text.ptxas_report import first_error_line
from storage.database.session import Session, clock_of
from storage.database.sql import asks_predicted, change, change_each, chunks, core, is_predicted, rows_among
from storage.database.tables import (
    COMPILE_FAILURES,
    LIVE,
    BuildRow,
    CandidateRow,
    JobProblemRow,
    JobRow,
    MeasurementRow,
    TaskRow,
    VerdictRow,
)
from storage.entities.task_kinds import COMPARE, FINISH, MEASURE, VERIFY, measure_ref
from storage.entities.verdicts import CPU, GPU
from storage.queue.losses import LOST
from storage.queue.new_tasks import UNENDED, NewTask, add_again, add_tasks

VERDICTS_AT_ONCE = 1000
"""Candidates that get their verdict in one transaction: about 50 ms of a shared core."""
FINISH_SECONDS = 2.4
"""Of one winner, before any was finished: 0.72 to 0.74 s for three fp32 matmuls on two cores of an AMD EPYC to build
them, and 1.67 s, the mean of 19 kernels, to run them from their PTX (docs/ptx.md)."""
COMPARE_SECONDS = 3.0
"""Of one comparison, before any was made here: a guess at starting the process and a few interleaved runs."""
MEASURE_SECONDS = 0.5
"""Predicted for verifying and timing the candidate of a build: 0.3 s of samples at most, and its verification. It only
orders the queue and starts the ETA, which then follows what was observed."""
VERIFY_SECONDS, VERIFY_KERNEL_SECONDS = 1.0, 0.25
"""Predicted for verifying a group on the CPU: g++'s headers and the child, and each kernel."""


def has_time_left(now: float) -> ColumnElement[bool]:
    """Of a job's row: it has not ended, and its deadline has not passed."""
    return and_(JobRow.state.in_(LIVE), or_(JobRow.deadline.is_(None), JobRow.deadline > now))


@dataclass(frozen=True, order=True)
class NextStep:
    """A problem with a new task, for which a wake-up goes to (kind, target): more to `measure` than was leased; all
    have a verdict, and the best are to `compare`; or all is done but the choice (`finish`)."""

    problem: int
    kind: Literal["measure", "compare", "finish"]
    target: str | None


@dataclass(frozen=True)
class CandidateVerdict:
    """What becomes of one candidate of a job's problem. `measurement` as JSON; None where it is not right. `details`:
    for the verdict on its code."""

    problem_id: int
    candidate: str
    verdict: str
    message: str | None
    measurement: dict[str, Any] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


def add_next_steps(session: Session, problem_ids: Iterable[int]) -> list[NextStep]:
    """Add the next task of each live, planned problem whose candidates all have a verdict; returns what was added.

    While there is time left, candidates that are right on a GPU are compared once; then the problem is finished.
    """
    next_steps: list[NextStep] = []
    tasks: list[NewTask] = []
    candidate = select(CandidateRow.candidate).where(CandidateRow.job_problem_id == JobProblemRow.id)
    compare = select(TaskRow.state).where(TaskRow.kind == COMPARE, TaskRow.ref == cast(JobProblemRow.id, String))
    now = clock_of(session).now()
    query = (
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
        .where(JobProblemRow.planned, JobProblemRow.state.in_(LIVE))
        .where(~candidate.where(CandidateRow.verdict.is_(None)).exists())
        .order_by(JobProblemRow.id)
    )
    for row in rows_among(session, query, JobProblemRow.id, problem_ids):
        if row.compare in UNENDED:
            continue  # its end leads here again
        in_time = row.deadline is None or row.deadline > now
        if row.right and row.compare is None and in_time and not is_predicted(row.device_class):
            step, seconds = NextStep(row.id, COMPARE, row.device_class), COMPARE_SECONDS
        else:
            step, seconds = NextStep(row.id, FINISH, row.target), FINISH_SECONDS
        next_steps.append(step)
        tasks.append(NewTask(step.kind, str(row.id), step.target, (row.job_id,), seconds))
    add_tasks(session, tasks)
    return next_steps


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
        change(session, JobProblemRow, here, error=why)


def give_verdicts(
    session: Session,
    verdicts: Mapping[str, tuple[str, str | None]],
    which: ColumnElement[bool],
    most: int | None,
) -> list[int]:
    """Write verdict and message, by build, to at most so many candidates without one; the problem of each."""
    if not verdicts:
        return []
    candidate = core(CandidateRow).c
    unverified = candidate.verdict.is_(None) & candidate.build.in_(list(verdicts)) & which
    columns = (candidate.job_problem_id, candidate.candidate, candidate.build)
    rows = session.execute(select(*columns).where(unverified).limit(most))
    return write_candidate_verdicts(
        session, [CandidateVerdict(problem, name, *verdicts[build]) for problem, name, build in rows]
    )


def of_problems(condition: ColumnElement[bool]) -> ColumnElement[bool]:
    """Of a candidate's row: whether its problem is such."""
    its = JobProblemRow.id == core(CandidateRow).c.job_problem_id
    return select(JobProblemRow.id).where(its, condition).correlate(core(CandidateRow)).exists()


def compile_failures(session: Session, ids: list[str]) -> dict[str, tuple[str, str | None]]:
    """Verdict and message of the builds that do not compile."""
    rows = session.execute(
        select(BuildRow.id, BuildRow.state, BuildRow.log).where(
            BuildRow.id.in_(ids), BuildRow.state.in_(COMPILE_FAILURES)
        )
    )
    return {build: (state, first_error_line(log or "") or None) for build, state, log in rows}


def cpu_verdicts(session: Session, ids: list[str], versions: "Versions") -> dict[str, tuple[str, str | None]]:
    """Verdict and message of the builds whose slice was verified on the CPU, as their target's tensor cores add."""
    others = versions.other_cpu_plans
    valid = [
        BuildRow.target.not_in(list(others)) & VerdictRow.plan_version.in_(set(versions.cpu_plans.values())),
        *(
            (BuildRow.target == name) & VerdictRow.plan_version.in_(set(plans.values()))
            for name, plans in others.items()
        ),
    ]
    rows = session.execute(
        select(BuildRow.id, VerdictRow.verdict, VerdictRow.message)
        .join(VerdictRow, VerdictRow.subject == BuildRow.slice)
        .where(VerdictRow.venue == CPU, or_(*valid))
        .where(BuildRow.id.in_(ids), BuildRow.state == "ok")
    )
    return {build: (verdict, message) for build, verdict, message in rows}


def invalidate(session: Session, code_digests: Collection[str], plans: PlanVersions | None, most: int) -> list[int]:
    """Give at most so many candidates of live problems on a GPU the verdict of their code where it is wrong (by these
    versions of the verification plan; None: by any), also those that had been right; the problem of each."""
    wrong = [VerdictRow.subject.in_(list(code_digests)), VerdictRow.venue == GPU, VerdictRow.verdict != "ok"]
    if plans is not None:
        wrong.append(VerdictRow.plan_version.in_(set(plans.values())))
    rows = session.execute(
        select(CandidateRow.job_problem_id, CandidateRow.candidate, VerdictRow.verdict, VerdictRow.message)
        .join(BuildRow, BuildRow.code_digest == VerdictRow.subject)
        .join(CandidateRow, CandidateRow.build == BuildRow.id)
        .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
        .where(*wrong, or_(CandidateRow.verdict.is_(None), CandidateRow.verdict == "ok"))
        .where(JobProblemRow.state.in_(LIVE), ~asks_predicted())
        .limit(most)
    )
    return write_candidate_verdicts(session, [CandidateVerdict(*row) for row in rows])


def write_candidate_verdicts(session: Session, verdicts: Sequence[CandidateVerdict]) -> list[int]:
    """Write verdicts and times to candidates; the problem of each."""
    rows = [
        {
            "job_problem_id": verdict.problem_id,
            "candidate": verdict.candidate,
            "verdict": verdict.verdict,
            "message": verdict.message,
            "measured_us": verdict.measurement["median_us"] if verdict.measurement else None,
            "measurement": verdict.measurement,
        }
        for verdict in verdicts
    ]
    change_each(session, CandidateRow, rows)
    return [verdict.problem_id for verdict in verdicts]


def give_gpu_verdicts(
    session: Session,
    ids: list[str],
    plans: PlanVersions,
    drivers: Mapping[str, str],
    which: ColumnElement[bool],
    most: int | None,
) -> list[int]:
    """Give at most so many candidates of these builds on a GPU without a verdict (`which`: a condition on their rows)
    what is stored of equal code: times under today's driver and plan, or that it was wrong. Returns the problem of
    each."""
    wrong, timed = _stored_of_code(set(plans.values()), drivers)
    # Builds first: thousands of candidates may wait for a build of which nothing is stored.
    stored = exists().where(wrong) | exists().where(timed)
    builds = session.scalars(select(BuildRow.id).where(BuildRow.id.in_(ids), BuildRow.state == "ok", stored)).all()
    if not builds:
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
        .where(CandidateRow.build.in_(builds), CandidateRow.verdict.is_(None))
        .where(JobProblemRow.state.in_(LIVE), ~asks_predicted())
        .where(or_(VerdictRow.verdict.is_not(None), MeasurementRow.code_digest.is_not(None)), which)
        .limit(most)
    )
    verdicts = [
        CandidateVerdict(row.job_problem_id, row.candidate, row.verdict, row.message)
        if row.verdict is not None
        else CandidateVerdict(row.job_problem_id, row.candidate, "ok", None, row.measurement)
        for row in rows
    ]
    return write_candidate_verdicts(session, verdicts)


def _stored_of_code(
    plans: Collection[str], drivers: Mapping[str, str]
) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Of rows beside a build's: a verdict that its code is wrong, times of its code under today's driver."""
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
        VerdictRow.plan_version.in_(plans),
        VerdictRow.verdict != "ok",
    )
    timed = and_(MeasurementRow.code_digest == BuildRow.code_digest, MeasurementRow.plan_version.in_(plans), present)
    return wrong, timed


@dataclass(frozen=True)
class Versions:
    """Which stored results of a build are valid: verdicts of these verification plans, times under `drivers`, today's
    by device class, and what no limit ended that is larger now: `limits` by stage or device kind, then by name.
    `other_cpu_plans`: of the targets whose tensor cores add otherwise than Turing's, by target."""

    cpu_plans: PlanVersions
    gpu_plans: PlanVersions
    drivers: Mapping[str, str]
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    other_cpu_plans: Mapping[str, PlanVersions] = field(default_factory=dict)


@dataclass(frozen=True)
class Followed:
    """What follows from compiled builds: problems with a new task, and (kind, target) of tasks that newly wait."""

    next_steps: list[NextStep]
    waiting: list[tuple[str, str | None]]


Unverified = Row[Any]
"""A job (`job_id`) has candidates without a verdict on a `device_class` of a `build`, with its `group_id`, `target`."""


def apply_known_verdicts(
    session: Session,
    build_ids: Iterable[str],
    versions: Versions,
    which: ColumnElement[bool] | None = None,
    *,
    most: int | None,
) -> tuple[list[NextStep], bool]:
    """Give candidates of these builds without a verdict, in whichever job, what is stored of it: at most so many, and
    only `which`, a condition on their rows. Returns the problems whose candidates all have a verdict now (their next
    tasks are added), and whether there may be more candidates: call it again. Doing it twice changes nothing."""
    condition = true() if which is None else which
    touched: list[int] = []

    def left() -> int | None:
        return None if most is None else most - len(touched)

    for ids in chunks(set(build_ids)):
        touched += give_verdicts(session, compile_failures(session, ids), condition, left())
        verified = cpu_verdicts(session, ids, versions)
        touched += give_verdicts(session, verified, condition & of_problems(asks_predicted()), left())
        touched += give_gpu_verdicts(session, ids, versions.gpu_plans, versions.drivers, condition, left())
    return add_next_steps(session, touched), most is not None and len(touched) >= most


def unverified(
    session: Session, build_ids: Iterable[str], which: ColumnElement[bool] | None = None
) -> list[Unverified]:
    """Those of these builds that compiled and have no verdict yet. `which`: a condition on candidates' rows."""
    candidate = core(CandidateRow).c
    columns = (
        BuildRow.id.label("build"),
        BuildRow.group_id,
        BuildRow.target,
        JobProblemRow.device_class,
        JobProblemRow.job_id,
    )
    query = (
        select(*columns)
        .distinct()
        .select_from(core(CandidateRow))
        .join(BuildRow, BuildRow.id == candidate.build)
        .join(JobProblemRow, JobProblemRow.id == candidate.job_problem_id)
        .join(JobRow, JobRow.id == JobProblemRow.job_id)
        .where(candidate.verdict.is_(None), BuildRow.state == "ok", BuildRow.group_id.is_not(None))
        .where(JobProblemRow.state.in_(LIVE), has_time_left(clock_of(session).now()))
        .where(true() if which is None else which)
    )
    return rows_among(session, query, candidate.build, build_ids)


def add_verification(
    session: Session, waiting: Iterable[Unverified], device_class: str | None = None
) -> list[tuple[str, str | None]]:
    """Tasks for these (on one device class), one of a group and kind. Returns (kind, target) of those that wait now."""
    by_place: dict[tuple[str, str, str], list[Unverified]] = {}
    for row in waiting:
        if device_class not in (None, row.device_class):
            continue
        if is_predicted(row.device_class):
            place = (VERIFY, row.group_id, row.target)
        else:
            place = (MEASURE, measure_ref(row.group_id, row.device_class), row.device_class)
        by_place.setdefault(place, []).append(row)
    # A job may have ended since its rows were read.
    still_live = select(JobRow.id).where(JobRow.state.in_(LIVE))
    job_ids = {row.job_id for rows in by_place.values() for row in rows}
    live = {id for (id,) in rows_among(session, still_live, JobRow.id, job_ids)}
    tasks = [
        NewTask(kind, ref, target, jobs, _seconds(kind, len({row.build for row in rows})))
        for (kind, ref, target), rows in sorted(by_place.items())
        if (jobs := tuple(sorted({row.job_id for row in rows} & live)))
    ]
    return [(task.kind, task.target) for task in add_again(session, tasks)]


def _seconds(kind: str, builds: int) -> float:
    return VERIFY_SECONDS + VERIFY_KERNEL_SECONDS * builds if kind == VERIFY else MEASURE_SECONDS * builds
