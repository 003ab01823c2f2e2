"""Seconds of problems by stage and phase. Each kernel of a group takes an equal part of the group's, split evenly over
the problems that use it, of the jobs that it was compiled for: so all problems sum to what the groups took."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, get_args

from sqlalchemy import ColumnElement, RowMapping, func, select, true

from cukiln.types import PhaseName, Seconds, StageName, StageSeconds
from storage.database.session import Session
from storage.database.sql import change_each, chunks, core, rows_among
from storage.database.tables import CandidateRow, JobProblemRow

OTHER_PHASE = "nvcc"
"""What a step counts as that has no name of its own."""
PROBLEMS_AT_ONCE = 500
"""That get their seconds in one transaction."""

Spent = Mapping[int, Mapping[str, StageSeconds]]
"""By problem, then by stage or phase."""
Key = TypeVar("Key")


def sums(parts: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """The numbers of each key, added up."""
    whole: dict[Key, float] = {}
    for key, part in parts:
        whole[key] = whole.get(key, 0.0) + part
    return whole


def add_seconds(session: Session, spent: Spent) -> None:
    """Add to what the problems have spent."""
    problems = core(JobProblemRow)
    for ids in chunks(spent):
        rows = session.execute(select(problems.c.id, problems.c.seconds).where(problems.c.id.in_(ids))).all()
        changed = []
        for problem_id, seconds in rows:
            after = dict(seconds)
            for stage, more in spent[problem_id].items():
                after[stage] = (StageSeconds(**seconds.get(stage, {})) + more).model_dump()
            changed.append({"id": problem_id, "seconds": after})
        change_each(session, JobProblemRow, changed)


def stage_sums() -> list[ColumnElement[float]]:
    """What problems have spent by stage, together: columns for `seconds_of`."""
    return [summed(stage, part).label(f"{stage}_{part}") for stage in get_args(StageName) for part in ("wall", "cpu")]


def summed(stage: str, part: str) -> ColumnElement[float]:
    """Of a stage or phase the wall or cpu seconds of problems, together."""
    return func.sum(func.coalesce(JobProblemRow.seconds[stage][part].as_float(), 0.0))


def seconds_of(row: RowMapping) -> Seconds:
    """From the columns of `stage_sums`; zero where there were no problems."""
    return Seconds(
        **{
            stage: StageSeconds(wall=row[f"{stage}_wall"] or 0.0, cpu=row[f"{stage}_cpu"] or 0.0)
            for stage in get_args(StageName)
        }
    )


def by_phase(phases: Iterable[Mapping[str, Any]]) -> dict[str, StageSeconds]:
    """The wall seconds of a group's phases, by name; their CPU seconds are not measured."""
    names = get_args(PhaseName)
    seconds = sums((phase["name"] if phase["name"] in names else OTHER_PHASE, phase["seconds"]) for phase in phases)
    return {name: StageSeconds(wall=wall) for name, wall in seconds.items()}


def shares(
    session: Session,
    job_ids: Collection[str],
    builds: Sequence[str],
    stages: Mapping[str, StageSeconds],
    problems: ColumnElement[bool] | None = None,
    *,
    waited: Mapping[str, float] | None = None,
) -> Spent:
    """A group's seconds per stage or phase, shared among the problems of these jobs that use its builds (only
    `problems`, if given: a condition on their rows), and what each job `waited` for a worker among its own."""
    users: dict[str, set[int]] = {}
    of_job: dict[str, dict[str, set[int]]] = {}
    used = (
        select(CandidateRow.build, CandidateRow.job_problem_id, JobProblemRow.job_id)
        .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
        .where(JobProblemRow.job_id.in_(job_ids), true() if problems is None else problems)
    )
    for build, problem_id, job_id in rows_among(session, used, CandidateRow.build, builds):
        users.setdefault(build, set()).add(problem_id)
        of_job.setdefault(job_id, {}).setdefault(build, set()).add(problem_id)
    spent = {
        problem: {
            stage: StageSeconds(wall=seconds.wall * part, cpu=seconds.cpu * part) for stage, seconds in stages.items()
        }
        for problem, part in _parts(users.values())
    }
    for job_id, seconds in (waited or {}).items():
        for problem, part in _parts(of_job.get(job_id, {}).values()):
            spent[problem]["queue"] = StageSeconds(wall=seconds * part)
    return spent


def _parts(users: Iterable[set[int]]) -> list[tuple[int, float]]:
    """Each problem's part of the whole; the parts sum to 1."""
    kernels = list(users)
    parts = sums((problem, 1.0 / len(kernels) / len(problems)) for problems in kernels for problem in problems)
    return list(parts.items())
