"""Rank a problem's candidates that were proved right: as measured, or as predicted where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.predict import Prediction, predict
from codegen.ptxas_report import Resources
from codegen.schedule import Schedule
from codegen.targets import target as find_target
from cukiln.types import Comparison, Measurement, VendorResult
from storage.candidates import Predicted, StoredCandidate, set_predictions
from storage.database import Database
from storage.device_classes import is_predicted
from storage.front import Point
from storage.problems import JobProblem
from storage.rows import chunks
from workers.rank_measured import Timed, timed, without

PREDICTIONS_AT_ONCE = 1000
"""Of one transaction."""


@dataclass(frozen=True)
class Ranked:
    """A candidate that was proved right, with its estimate and what it is chosen by. `timed`: on a GPU."""

    stored: StoredCandidate
    candidate: Candidate
    prediction: Prediction
    point: Point
    timed: Timed | None = None


@dataclass(frozen=True)
class Measured:
    """What a problem on a GPU has beside its candidates: all that were timed, and the comparison of the best."""

    times: dict[str, Timed]
    comparison: Comparison | None

    @property
    def vendor(self) -> VendorResult | None:
        return self.comparison.vendor if self.comparison else None

    def counts_as(self) -> dict[str, float]:
        return {candidate: one.counts_as for candidate, one in self.times.items()}


def verdict_of(one: StoredCandidate) -> str | None:
    """Code that the CPU proved right and a GPU found wrong for somebody else is wrong: the twins missed something. And
    nobody is right without a proof."""
    if one.verdict != "ok":
        return one.verdict
    return one.proof.verdict if one.proof is not None else "skipped"


def rank(problem: JobProblem, stored: Sequence[StoredCandidate]) -> tuple[list[Ranked], Measured | None]:
    """Those that are right, fastest first: as measured, which is told too, or as predicted where there is no GPU."""
    right = [one for one in stored if verdict_of(one) == "ok"]
    measured = None if is_predicted(problem.device_class) else _measured(problem, right)
    kind = operator(problem.operator)
    parsed, target = kind.parse(problem.problem), find_target(problem.target)
    found = []
    for one in right:
        time = measured.times.get(one.candidate) if measured is not None else None
        if measured is not None and time is None:
            continue
        candidate = kind.candidate(parsed, Schedule.of(one.schedule))
        prediction = predict(candidate, Resources.from_dict(one.resources or {}), target)
        point = Point(
            candidate.id,
            time.counts_as if time is not None else prediction.us,
            kind.cost(parsed, candidate.schedule).workspace_bytes,
            kind.deterministic(candidate.kernel),
        )
        found.append(Ranked(one, candidate, prediction, point, time))
    return sorted(found, key=lambda one: (one.point.us, one.candidate.id)), measured


def write_predictions(database: Database, ranked: Sequence[Ranked]) -> None:
    """Predictions are shown of all that is right, also where measured times decide."""
    for some in chunks(ranked, PREDICTIONS_AT_ONCE):
        made = [
            Predicted(one.stored.problem_id, one.candidate.id, one.prediction.us, one.prediction.as_dict())
            for one in some
        ]
        with database.write() as session:
            set_predictions(session, made)
        if len(some) < len(ranked):
            database.pause()


def _measured(problem: JobProblem, right: Sequence[StoredCandidate]) -> Measured:
    """The times of a problem on a GPU; of the comparison what still counts as right."""
    alone = {
        one.candidate: (
            one.measured_us,
            Measurement.model_validate(one.measurement) if one.measurement is not None else None,
        )
        for one in right
        if one.measured_us is not None
    }
    comparison = None
    if problem.comparison is not None:
        comparison = Comparison.model_validate(problem.comparison)
        comparison = without(comparison, {one.candidate for one in comparison.contenders} - alone.keys())
        comparison = comparison if comparison.contenders else None
    return Measured(timed(alone, comparison), comparison)
