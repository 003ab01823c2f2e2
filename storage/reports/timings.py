"""Where the time went: seconds per stage and phase, by operator, by job and operator, or by day and operator."""

from __future__ import annotations

import datetime
from typing import Any, Literal, get_args

from sqlalchemy import ColumnElement, Row, case, func, select

from cukiln.types import PhaseName, Seconds, StageName, StageSeconds, TimingRow, Timings
from storage.database.session import Session
from storage.database.sql import day_of
from storage.database.tables import HIDDEN, JobProblemRow, JobRow

By = Literal["operator", "job", "day"]
SECONDS_OF_A_DAY = 86_400
MAX_ROWS = 1000
"""Jobs and days, latest first: a dashboard shows no more."""


def timings(session: Session, by: By, job: str | None = None) -> Timings:
    """Sums over all problems ever asked for, or those of one job; days are those of the job's arrival, in UTC."""
    key: dict[By, list[ColumnElement[Any]]] = {
        "operator": [],
        "job": [JobProblemRow.job_id.label("job"), JobRow.created_at.label("at")],
        "day": [day_of(session, JobRow.created_at.expression).label("at")],
    }
    sums = [
        func.sum(func.coalesce(JobProblemRow.seconds[stage][part].as_float(), 0.0)).label(f"{stage}_{part}")
        for stage in get_args(StageName)
        for part in ("wall", "cpu")
    ]
    sums += [
        func.sum(func.coalesce(JobProblemRow.seconds[phase]["wall"].as_float(), 0.0)).label(f"phase_{phase}")
        for phase in get_args(PhaseName)
    ]
    order = [column.desc() for column in key[by][::-1]] + [JobProblemRow.operator]
    query = (
        select(
            JobProblemRow.operator,
            *key[by],
            func.count().label("problems"),
            func.sum(case((JobProblemRow.cached, 1), else_=0)).label("cached"),
            *sums,
        )
        .join(JobRow, JobRow.id == JobProblemRow.job_id)
        .where(JobRow.state.not_in(HIDDEN))
        .group_by(JobProblemRow.operator, *key[by])
        .order_by(*order)
        .limit(MAX_ROWS)
    )
    rows = session.execute(query if job is None else query.where(JobProblemRow.job_id == job))
    return Timings(by=by, timings=[_row(row, by) for row in rows])


def _row(row: Row[Any], by: By) -> TimingRow:
    values = row._mapping
    day = datetime.datetime.fromtimestamp(values["at"] * SECONDS_OF_A_DAY, datetime.UTC) if by == "day" else None
    stages = {
        stage: StageSeconds(wall=values[f"{stage}_wall"], cpu=values[f"{stage}_cpu"]) for stage in get_args(StageName)
    }
    return TimingRow(
        operator=values["operator"],
        job=values["job"] if by == "job" else None,
        day=day.date().isoformat() if day else None,
        problems=values["problems"],
        cached=values["cached"],
        seconds=Seconds(**stages),
        phases={phase: values[f"phase_{phase}"] for phase in get_args(PhaseName)},
    )
