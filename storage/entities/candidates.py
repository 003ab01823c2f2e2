"""Candidates with their builds: the input of prediction and of the choice of a winner."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from sqlalchemy import select

from storage.database.session import Session
from storage.database.sql import change_each, core
from storage.database.tables import BuildRow, CandidateRow
from storage.entities.libraries import PtxVerdict
from storage.entities.verdicts import verdicts_to_show


class StoredCandidate(SimpleNamespace):
    """The columns of a candidate, and of its build (None while it is not compiled): `library` holds its group,
    `imported` is a verdict from elsewhere. `verification`: the newest `storage.entities.verdicts.Verdict`,
    of a GPU, else of the CPU."""


def candidates_of_problem(
    session: Session, problem_id: int, only: Collection[str] | None = None
) -> list[StoredCandidate]:
    """The candidates of a job's problem, by candidate id: all, or `only` some few."""
    candidate, build = core(CandidateRow).c, core(BuildRow).c
    own = (column for column in candidate if column.name != "job_problem_id")
    built = ("slice", "toolchain", "group_id", "code_digest", "library", "resources", "imported", "ptx_verdict")
    query = select(candidate.job_problem_id.label("problem_id"), *own, *(build[name] for name in built))
    query = query.join(BuildRow, build.id == candidate.build, isouter=True)
    query = query.where(candidate.job_problem_id == problem_id).order_by(candidate.candidate)
    if only is not None:
        query = query.where(CandidateRow.candidate.in_(only))
    rows = session.execute(query).mappings().all()
    verifications = verdicts_to_show(session, rows)
    return [StoredCandidate(**row, verification=of) for row, of in zip(rows, verifications, strict=True)]


def set_predictions(session: Session, problem_id: int, predictions: Mapping[str, Mapping[str, Any]]) -> None:
    """Write estimates of a problem's candidates: microseconds (`us`) with what they are made of; nothing measured."""
    key = {"job_problem_id": problem_id}
    rows = [
        {**key, "candidate": candidate, "predicted_us": prediction["us"], "prediction": dict(prediction)}
        for candidate, prediction in predictions.items()
    ]
    change_each(session, CandidateRow, rows)


def ptx_verdict_of(candidate: StoredCandidate, plan_version: str) -> PtxVerdict | None:
    """What its kernel's PTX showed under that plan."""
    verdict = PtxVerdict(**candidate.ptx_verdict) if candidate.ptx_verdict is not None else None
    return verdict if verdict is not None and verdict.plan_version == plan_version else None


def write_ptx_verdicts(session: Session, verdicts: Mapping[str, PtxVerdict]) -> None:
    """By build."""
    change_each(session, BuildRow, [{"id": build, "ptx_verdict": asdict(of)} for build, of in verdicts.items()])


def forget_ptx_verdicts(session: Session, builds: Collection[str]) -> None:
    """Of another plan than today's: nothing counts or shows them any more."""
    change_each(session, BuildRow, [{"id": build, "ptx_verdict": None} for build in builds])
