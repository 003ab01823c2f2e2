"""Rank a problem's candidates that were verified: as measured, or as predicted where there is no GPU."""

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.predict.roofline import Prediction, predict
from codegen.search.schedule import Schedule
from codegen.targets import target as find_target
from codegen.text.ptxas_report import Resources
from cukiln.types import Comparison, Measurement, VendorResult
from storage.database.session import Database
from storage.database.sql import chunks, is_predicted
from storage.entities.candidates import StoredCandidate, set_predictions
from storage.entities.jobs import JobProblem
from storage.entities.pareto_front import Point
from workers.gpu.rank_measured import Timed, point_of, timed, without

PREDICTIONS_AT_ONCE = 1000
"""Of one transaction."""


@dataclass(frozen=True)
class Ranked:
    """A candidate that was verified, with its estimate and what it is chosen by. `timed`: on a GPU."""

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

    def tie_adjusted_us(self) -> dict[str, float]:
        return {candidate: entry.tie_adjusted_us for candidate, entry in self.times.items()}


def verdict_of(candidate: StoredCandidate) -> str | None:
    """Code that a GPU found wrong is wrong, whatever the CPU said; nothing is right without a verification."""
    verdict: str | None = candidate.verdict
    if verdict == "ok":
        verdict = candidate.proof.verdict if candidate.proof is not None else "skipped"
    return verdict


def rank(problem: JobProblem, stored: Sequence[StoredCandidate]) -> tuple[list[Ranked], Measured | None]:
    """Those that are right, fastest first: as measured, which is returned too, or as predicted without a GPU."""
    right = [candidate for candidate in stored if verdict_of(candidate) == "ok"]
    measured = None if is_predicted(problem.device_class) else _measured(problem, right)
    kind = operator(problem.operator)
    parsed, target = kind.parse(problem.problem), find_target(problem.target)
    ranked = []
    for stored_candidate in right:
        time = measured.times.get(stored_candidate.candidate) if measured is not None else None
        if measured is not None and time is None:
            continue
        candidate = kind.candidate(parsed, Schedule.of(stored_candidate.schedule))
        prediction = predict(candidate, Resources.from_dict(stored_candidate.resources or {}), target)
        point = point_of(kind, candidate, time.tie_adjusted_us if time is not None else prediction.us)
        ranked.append(Ranked(stored_candidate, candidate, prediction, point, time))
    return sorted(ranked, key=lambda entry: (entry.point.us, entry.candidate.id)), measured


def write_predictions(database: Database, ranked: Sequence[Ranked]) -> None:
    """Predictions are shown of all of a problem that is right, also where measured times decide."""
    for some in chunks(ranked, PREDICTIONS_AT_ONCE):
        made = {entry.candidate.id: entry.prediction.as_dict() for entry in some}
        with database.write() as session:
            set_predictions(session, some[0].stored.problem_id, made)
        if len(some) < len(ranked):
            database.pause()


def _measured(problem: JobProblem, right: Sequence[StoredCandidate]) -> Measured:
    """The times of a problem on a GPU; of the comparison what still counts as right."""
    alone = {
        candidate.candidate: (
            candidate.measured_us,
            Measurement.model_validate(candidate.measurement) if candidate.measurement is not None else None,
        )
        for candidate in right
        if candidate.measured_us is not None
    }
    comparison = None
    if problem.comparison is not None:
        comparison = Comparison.model_validate(problem.comparison)
        comparison = without(comparison, {contender.candidate for contender in comparison.contenders} - alone.keys())
        comparison = comparison if comparison.contenders else None
    return Measured(timed(alone, comparison), comparison)
