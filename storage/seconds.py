"""Stage seconds of problems.

A group's time is shared out: each kernel of the group takes an equal part, split evenly over the problems of the job
that use it. So the problems of a job sum to what its groups took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sqlalchemy import ColumnElement, bindparam, select, update

from cukiln.types import StageSeconds
from storage.database import Session
from storage.rows import chunks, core
from storage.tables import CandidateRow, JobProblemRow


def add_seconds(session: Session, stage: str, spent: Mapping[int, StageSeconds]) -> None:
    """Add to the seconds that the problems (by id) have spent in a stage."""
    problems = core(JobProblemRow)
    for ids in chunks(spent):
        rows = session.execute(select(problems.c.id, problems.c.seconds).where(problems.c.id.in_(ids))).all()
        changed = []
        for problem_id, seconds in rows:
            before = StageSeconds(**seconds.get(stage, {}))
            more = spent[problem_id]
            after = {"wall": before.wall + more.wall, "cpu": before.cpu + more.cpu}
            changed.append({"of_problem": problem_id, "spent": {**seconds, stage: after}})
        if changed:
            statement = update(problems).where(problems.c.id == bindparam("of_problem"))
            session.execute(statement.values(seconds=bindparam("spent", type_=problems.c.seconds.type)), changed)


def share_out(
    session: Session,
    job_id: str | None,
    builds: Sequence[str],
    stages: Mapping[str, StageSeconds],
    problems: ColumnElement[bool] | None = None,
) -> None:
    """Share a group's seconds per stage among the problems of `job_id` that use its builds (only `problems`, if given:
    a condition on their rows)."""
    if job_id is None or not builds:
        return
    users: dict[str, set[int]] = {}
    for ids in chunks(builds):
        used = (
            select(CandidateRow.build, CandidateRow.job_problem_id)
            .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
            .where(CandidateRow.build.in_(ids), JobProblemRow.job_id == job_id)
        )
        rows = session.execute(used if problems is None else used.where(problems))
        for build, problem_id in rows:
            users.setdefault(build, set()).add(problem_id)
    # A group handed over from another job may hold kernels that this job never asked for: those it does use pay.
    parts = _parts(users.values())
    for stage, seconds in stages.items():
        spent = {problem: StageSeconds(wall=seconds.wall * part, cpu=seconds.cpu * part) for problem, part in parts}
        add_seconds(session, stage, spent)


def _parts(users: Iterable[set[int]]) -> list[tuple[int, float]]:
    """Each problem's part of the whole; the parts sum to 1."""
    kernels = list(users)
    parts: dict[int, float] = {}
    for problems in kernels:
        for problem in problems:
            parts[problem] = parts.get(problem, 0.0) + 1.0 / len(kernels) / len(problems)
    return list(parts.items())
