"""The profile of a job: what a run of each problem's winner does."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import RowMapping, select

from codegen.counts import Openings
from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.predict.profile import profile
from codegen.search.schedule import Schedule
from codegen.targets import Target
from codegen.targets import target as data_sheet
from codegen.text.ptxas_report import Resources
from cukiln.types import ProfileOperator, ProfilePage
from storage.database.pages import read_page
from storage.database.session import Session
from storage.database.sql import core
from storage.database.tables import JobProblemRow
from storage.entities.jobs import MAX_PAGE, job_state
from storage.reports.job import winner_entries


def profile_page(
    session: Session, job_id: str, openings: Openings, *, limit: int = 100, cursor: str | None = None
) -> ProfilePage | None:
    """Problems in the job's order; those without a winner, or of an operator that is not loaded here, are left out.
    None if there is no such job. Raises `BadCursor`."""
    job = job_state(session, job_id)
    if job is None:
        return None
    asked = core(JobProblemRow).c
    query = select(core(JobProblemRow)).where(asked.job_id == job_id, asked.winner.is_not(None))
    rows, next_cursor = read_page(
        session, query, (asked.position, asked.key), (int, str), max(1, min(limit, MAX_PAGE)), cursor
    )
    entries = winner_entries(session, rows, job)
    made = [_row(row, entries[row["id"]][1], openings) for row in rows if row["id"] in entries]
    return ProfilePage(
        filters=openings.filters,
        opened=openings.operands,
        operators=[row for row in made if row is not None],
        next_cursor=next_cursor,
    )


def profile_row(
    name: str, device_class: str, candidate: Candidate, target: Target, resources: Resources, openings: Openings,
    measured_us: float | None = None,
) -> ProfileOperator:  # fmt: skip
    """Of one run of a candidate for the problem `name`."""
    made = profile(candidate, target, resources, openings, measured_us)
    return ProfileOperator.model_validate(
        {
            **asdict(made),
            "problem": name,
            "operator": candidate.problem.operator,
            "target": target.name,
            "device_class": device_class,
            "candidate": candidate.id,
            "schedule": candidate.schedule.as_dict(),
        }
    )


def _row(row: RowMapping, entry: Mapping[str, Any], openings: Openings) -> ProfileOperator | None:
    """None where the operator is not loaded here, or another version of it made the schedule."""
    try:
        kind = operator(row["operator"])
        candidate = kind.candidate(kind.parse(row["problem"]), Schedule.of(entry["schedule"]))
        resources = Resources.from_dict(entry["resources"])
        target = data_sheet(row["target"])
        return profile_row(
            row["name"], row["device_class"], candidate, target, resources, openings, entry["measured_us"]
        )
    except (ValueError, KeyError):
        return None
