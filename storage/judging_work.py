"""The work that gets builds judged: proofs on the CPU where `predicted:` problems wait, measuring where others do."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import func, select

from storage.database import Session
from storage.device_classes import is_predicted
from storage.judge import LIVE
from storage.new_items import MEASURE, NewItem, add_again
from storage.rows import chunks
from storage.tables import BuildRow, CandidateRow, JobProblemRow, JobRow

MEASURE_SECONDS = 0.5
"""Predicted for proving and timing one candidate: 0.3 s of samples at most, and its proof. Only orders the queue and
starts the ETA, which from then on follows what was observed."""


@dataclass(frozen=True)
class Demand:
    """So many unjudged candidates of a job's live problems on a device class name this build, which has compiled."""

    build: str
    group_id: str | None
    device_class: str
    job_id: str
    priority: int
    candidates: int


def measure_ref(group_id: str, device_class: str) -> str:
    """The `ref` of a measure item. A hash stands for the class: a product's name may be longer than a `ref`."""
    return f"{group_id}:{hashlib.sha256(device_class.encode()).hexdigest()[:16]}"


def group_of_ref(ref: str) -> str:
    """The group of a measure item's `ref`."""
    return ref.partition(":")[0]


def demand(session: Session, build_ids: Iterable[str]) -> list[Demand]:
    """What waits for these builds to be judged, of those that compiled."""
    found: list[Demand] = []
    for ids in chunks(set(build_ids)):
        rows = session.execute(
            select(BuildRow.id, BuildRow.group_id, JobProblemRow.device_class, JobRow.id, JobRow.priority, func.count())
            .select_from(CandidateRow)
            .join(BuildRow, BuildRow.id == CandidateRow.build)
            .join(JobProblemRow, JobProblemRow.id == CandidateRow.job_problem_id)
            .join(JobRow, JobRow.id == JobProblemRow.job_id)
            .where(CandidateRow.build.in_(ids), CandidateRow.verdict.is_(None), BuildRow.state == "ok")
            .where(JobProblemRow.state.in_(LIVE))
            .group_by(BuildRow.id, BuildRow.group_id, JobProblemRow.device_class, JobRow.id, JobRow.priority)
            .order_by(BuildRow.id)
        )
        found += [Demand(*row) for row in rows]
    return found


def builds_to_prove(demands: Iterable[Demand]) -> set[str]:
    """The builds that a candidate of a `predicted:` problem waits for."""
    return {one.build for one in demands if is_predicted(one.device_class)}


def add_measuring(session: Session, demands: Iterable[Demand], seconds_each: float) -> list[tuple[str, str | None]]:
    """See to it that what waits on a GPU is measured: one item per group and device class, for the most urgent job.

    A group that was measured before is measured again, for those that came since. Returns (kind, target) of each item
    that waits now and did not before.
    """
    wanted: dict[str, list[Demand]] = {}
    for one in demands:
        if one.group_id is not None and not is_predicted(one.device_class):
            wanted.setdefault(measure_ref(one.group_id, one.device_class), []).append(one)
    items = []
    for ref, users in wanted.items():
        first = max(users, key=lambda one: one.priority)
        seconds = seconds_each * sum(one.candidates for one in users)
        items.append(NewItem(MEASURE, ref, first.device_class, first.job_id, first.priority, seconds))
    return [(item.kind, item.target) for item in add_again(session, items)]
