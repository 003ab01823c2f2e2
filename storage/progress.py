"""How far a job is, and how long it will still take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from sqlalchemy import String, and_, case, cast, distinct, func, or_, select, true, union_all

from cukiln.types import JobState, Progress, Seconds, StageName, StageProgress, StageSeconds
from storage.database import Session, clock_of
from storage.device_classes import asks_predicted, is_predicted
from storage.jobs import JobStatus, job_state
from storage.judge import LIVE
from storage.judging_work import MEASURE_SECONDS
from storage.new_items import COMPARE, COMPILE, FINISH, MEASURE, PLAN, UNENDED, VERIFY
from storage.tables import BuildRow, CandidateRow, GroupRow, ItemRow, JobProblemRow, JobRow
from storage.waiting_for import waiting_for

RECENT_GROUPS = 50
"""Groups whose observed times correct the predictions: enough to be steady, few enough to follow a new machine."""
RECENT_ITEMS = 20
FINISH_SECONDS = 0.75
"""Of one winner, before any was finished here: nvcc, g++ and the linker on one kernel. Measured as 0.72 to 0.74 s for
three fp32 matmuls on two cores of an AMD EPYC."""
COMPARE_SECONDS = 3.0
"""Of one comparison, before any was made here: a guess at starting the process and letting a handful take turns."""
FINISHED = ("done", "failed")
FIRST_SECONDS = {COMPARE: COMPARE_SECONDS, FINISH: FINISH_SECONDS}
ON_GPU = frozenset({MEASURE, COMPARE})


@dataclass(frozen=True)
class JobProgress:
    """What an event of a running job says."""

    state: JobState
    progress: Progress
    seconds: Seconds


def job_progress(session: Session, job_id: str, live_seconds: float | None = None) -> JobProgress | None:
    """Counts and times of a job, without its problems: cheap enough to ask for at every step. None: no such job.

    With `live_seconds`, for which a worker that is silent still counts as alive, it also says what the job waits for in
    vain."""
    job = job_state(session, job_id)
    if job is None:
        return None
    stages = {}
    for stage in get_args(StageName):
        wall, cpu = (JobProblemRow.seconds[stage][part].as_float() for part in ("wall", "cpu"))
        stages[stage] = (func.sum(func.coalesce(wall, 0.0)), func.sum(func.coalesce(cpu, 0.0)))
    columns = [column for pair in stages.values() for column in pair]
    row = session.execute(select(*columns).where(JobProblemRow.job_id == job_id)).one()
    seconds = {
        stage: StageSeconds(wall=row[2 * place] or 0.0, cpu=row[2 * place + 1] or 0.0)
        for place, stage in enumerate(stages)
    }
    return JobProgress(job.state, progress_of(session, job, live_seconds), Seconds(**seconds))


def progress_of(session: Session, job: JobStatus, live_seconds: float | None = None) -> Progress:
    """Stage counts: problems lowered, kernels compiled, candidates judged, those right on a GPU or still open measured,
    problems finished.

    Done is what really happened: what a cancel, a spent budget or a failed item left out counts in the totals alone.
    """
    problems = session.execute(
        select(
            func.count(),
            # A spent budget marks problems planned that were never started.
            _count_if(and_(JobProblemRow.planned, JobProblemRow.started_at.is_not(None))),
            _count_if(JobProblemRow.state.in_(FINISHED)),
        ).where(JobProblemRow.job_id == job.id)
    ).one()
    judged = and_(CandidateRow.verdict.is_not(None), CandidateRow.verdict != "skipped")
    to_measure = and_(~asks_predicted(), or_(CandidateRow.verdict.is_(None), CandidateRow.verdict == "ok"))
    # A later job may compile what this one has left: that is not its work.
    in_time = true() if job.finished_at is None else GroupRow.finished_at <= job.finished_at
    built = case((or_(judged, and_(BuildRow.state != "pending", in_time)), CandidateRow.build))
    refined = and_(CandidateRow.screening_build.is_not(None), CandidateRow.screening_build != CandidateRow.build)
    candidates = session.execute(
        select(
            func.count(),
            _count_if(judged),
            _count_if(and_(judged, CandidateRow.verdict != "ok")),
            func.count(distinct(CandidateRow.build)),
            func.count(distinct(built)),
            _count_if(and_(to_measure, CandidateRow.measured_us.is_not(None))),
            _count_if(to_measure),
            _count_if(and_(to_measure, BuildRow.state == "pending")),
            _count_if(refined),
            _count_if(and_(refined, ~asks_predicted())),
        )
        .select_from(CandidateRow)
        .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
        .join(BuildRow, BuildRow.id == CandidateRow.build, isouter=True)
        .join(GroupRow, GroupRow.id == BuildRow.group_id, isouter=True)
        .where(JobProblemRow.job_id == job.id)
    ).one()
    # Those that are compiled in full after they were screened go the way for a second time.
    screened, measured_before = candidates[8], candidates[9]
    compiled = _screening_builds(session, job.id) if screened else 0
    waits = waiting_for(session, job.id, live_seconds) if job.state in LIVE and live_seconds is not None else None
    return Progress(
        lower=StageProgress(done=problems[1], total=problems[0]),
        compile=StageProgress(done=candidates[4] + compiled, total=candidates[3] + compiled),
        verify=StageProgress(done=candidates[1] + screened, total=candidates[0] + screened),
        measure=StageProgress(done=candidates[5] + measured_before, total=candidates[6] + measured_before),
        finish=StageProgress(done=problems[2], total=problems[0]),
        candidates_done=candidates[1] + screened,
        candidates_failed=candidates[2],
        eta_seconds=_eta(session, job, candidates[7]) if job.state in LIVE else None,
        waiting_for=waits,
    )


def _screening_builds(session: Session, job_id: str) -> int:
    """Builds that the job's candidates were screened by, and that are nobody's any more."""
    mine = select(JobProblemRow.id).where(JobProblemRow.job_id == job_id)
    of_others = select(CandidateRow.build).where(CandidateRow.job_problem_id.in_(mine))
    query = select(func.count(distinct(CandidateRow.screening_build))).where(CandidateRow.job_problem_id.in_(mine))
    return session.scalar(query.where(CandidateRow.screening_build.not_in(of_others))) or 0


def _eta(session: Session, job: JobStatus, to_compile: int) -> float | None:
    """Seconds to the end: the work that is waiting before the job's last item, over the workers seen at work; what
    compilers do and what GPUs do are taken one after the other, as the last group has it.

    Predicted seconds are scaled by what recent groups and measurements took, and verification on the CPU takes the
    proportion of a compile that it took there; on a new machine all are taken as predicted. Each problem that has not
    ended takes what comparing and finishing one took lately, and of one that is screened so many kernels are compiled
    once more as it asks for. `to_compile`: candidates on a GPU for which there will be
    a measure item only when they are compiled. None until the whole job is planned.
    """
    scale, with_verify = _observed(session)
    each, measuring = _observed_items(session)
    proving = _jobs_that_prove(session)
    now = clock_of(session).now()
    # Counted by problem: most of these items will be added only when the last candidate is judged.
    to_compare, to_finish = _unended_problems(session, job)
    in_full, to_measure_again = _after_screening(session, job)
    left = {
        False: each[FINISH] * to_finish + scale * in_full,
        True: each[COMPARE] * to_compare + measuring * MEASURE_SECONDS * (to_compile + to_measure_again),
    }
    workers: dict[bool, set[str | None]] = {False: set(), True: set()}
    for item in _items_before_the_end(session, job):
        if item.kind == PLAN and item.job_id == job.id:
            return None
        seconds = 0.0
        if item.kind in (COMPILE, VERIFY, MEASURE):
            seconds = item.predicted_seconds
            if item.kind == COMPILE:
                seconds *= scale * (with_verify if item.job_id in proving else 1.0)
            elif item.kind == MEASURE:
                seconds *= measuring
        on_gpu = item.kind in ON_GPU
        if item.state == "claimed":
            workers[on_gpu].add(item.worker)
            spent = now - item.started_at
            seconds = -min(spent, each[item.kind]) if item.kind in each else max(0.0, seconds - spent)
        left[on_gpu] += seconds
    return sum(seconds / max(1, len(workers[on_gpu])) for on_gpu, seconds in left.items())


def _observed(session: Session) -> tuple[float, float]:
    """Actual over predicted compile seconds, and compile with verification over compile alone, of recent groups."""
    ended = session.execute(
        select(GroupRow.predicted_seconds, GroupRow.compile_seconds, GroupRow.verify_seconds)
        .where(GroupRow.state == "compiled", GroupRow.predicted_seconds > 0)
        .order_by(GroupRow.created_at.desc())
        .limit(RECENT_GROUPS)
    ).all()
    pairs = [(row.compile_seconds.get("wall", 0.0), row.verify_seconds.get("wall")) for row in ended]
    predicted, compiled = sum(row.predicted_seconds for row in ended), sum(pair[0] for pair in pairs)
    judged = [(compile_wall, verify_wall) for compile_wall, verify_wall in pairs if verify_wall is not None]
    scale = compiled / predicted if compiled else 1.0
    compile_wall = sum(pair[0] for pair in judged)
    return scale, 1.0 + (sum(pair[1] for pair in judged) / compile_wall if compile_wall else 1.0)


def _observed_items(session: Session) -> tuple[dict[str, float], float]:
    """Seconds that comparing and finishing one problem took lately, and actual over predicted seconds of measuring; as
    predicted where none has ended."""
    recent = [
        select(ItemRow.kind, ItemRow.started_at, ItemRow.finished_at, ItemRow.predicted_seconds)
        .where(ItemRow.kind == kind, ItemRow.state == "done", ItemRow.started_at.is_not(None))
        .order_by(ItemRow.id.desc())
        .limit(RECENT_ITEMS)
        .subquery()
        for kind in (COMPARE, FINISH, MEASURE)
    ]
    spent: dict[str, list[float]] = {COMPARE: [], FINISH: [], MEASURE: []}
    predicted = 0.0
    for row in session.execute(union_all(*(select(one) for one in recent))):
        spent[row.kind].append(row.finished_at - row.started_at)
        predicted += row.predicted_seconds if row.kind == MEASURE else 0.0
    each = {
        kind: sum(spent[kind]) / len(spent[kind]) if spent[kind] else first for kind, first in FIRST_SECONDS.items()
    }
    return each, sum(spent[MEASURE]) / predicted if predicted else 1.0


def _jobs_that_prove(session: Session) -> set[str]:
    """Live jobs with a problem whose kernels are proved on the CPU."""
    live = JobProblemRow.state.in_(LIVE) & asks_predicted()
    return set(session.scalars(select(JobProblemRow.job_id).where(live).distinct()))


def _served_before(job: JobStatus) -> Any:
    """The job itself, and those whose items are claimed before its own."""
    earlier = and_(JobRow.priority == job.priority, JobRow.created_at <= job.created_at)
    return or_(JobRow.id == job.id, JobRow.priority > job.priority, earlier)


def _unended_problems(session: Session, job: JobStatus) -> tuple[int, int]:
    """Problems of the job, and of those that are served before it, still to be compared, and still to be finished."""
    compared = select(ItemRow.id).where(
        ItemRow.kind == COMPARE, ItemRow.ref == cast(JobProblemRow.id, String), ItemRow.state.not_in(UNENDED)
    )
    row = session.execute(
        select(_count_if(and_(~asks_predicted(), ~compared.exists())), func.count())
        .select_from(JobProblemRow)
        .join(JobRow, JobRow.id == JobProblemRow.job_id)
        .where(JobProblemRow.state.in_(LIVE), JobRow.state.in_(LIVE), _served_before(job))
    ).one()
    return row[0], row[1]


def _after_screening(session: Session, job: JobStatus) -> tuple[float, int]:
    """Of problems that are screened, of the job and of those that are served before it: the predicted seconds of
    compiling the best in full, each kernel taken like one of its job's groups, and how many are then measured again."""
    problems = session.execute(
        select(JobProblemRow.job_id, JobProblemRow.search, JobProblemRow.candidate_count, JobProblemRow.device_class)
        .join(JobRow, JobRow.id == JobProblemRow.job_id)
        .where(JobProblemRow.screening, JobProblemRow.state.in_(LIVE), JobRow.state.in_(LIVE), _served_before(job))
    ).all()
    if not problems:
        return 0.0, 0
    kernels = func.json_array_length(GroupRow.kernels)
    grouped = session.execute(
        select(GroupRow.job_id, func.sum(GroupRow.predicted_seconds), func.sum(kernels))
        .where(GroupRow.job_id.in_({row.job_id for row in problems}), GroupRow.predicted_seconds > 0)
        .group_by(GroupRow.job_id)
    )
    each = {job_id: seconds / count for job_id, seconds, count in grouped}
    chosen = [(row, min(row.search["screening"], row.candidate_count)) for row in problems]
    seconds = sum(each.get(row.job_id, 0.0) * count for row, count in chosen)
    return seconds, sum(count for row, count in chosen if not is_predicted(row.device_class))


def _items_before_the_end(session: Session, job: JobStatus) -> Any:
    """Unended items of the job and of those that are served before it, and the files that its groups have joined."""
    joined = select(GroupRow.joined_to).where(GroupRow.job_id == job.id, GroupRow.joined_to.is_not(None))
    with_others = ItemRow.kind.in_((COMPILE, VERIFY)) & ItemRow.ref.in_(joined)
    return session.execute(
        select(
            ItemRow.kind,
            ItemRow.job_id,
            ItemRow.state,
            ItemRow.worker,
            ItemRow.started_at,
            ItemRow.predicted_seconds,
        )
        .join(JobRow, JobRow.id == ItemRow.job_id)
        .where(ItemRow.state.in_(UNENDED), or_(_served_before(job), with_others))
    )


def _count_if(condition: Any) -> Any:
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)
