"""Rank a problem's candidates that were verified: as measured, or as predicted where there is no GPU.

Candidates are measured alone, in runs that may lie hours apart; so the comparison of the few best in one process
outweighs that, and of two that it calls a tie neither counts as the faster."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.predict.roofline import Prediction, predict
from codegen.search.schedule import Schedule
from codegen.targets import target as find_target
from codegen.text.ptxas_report import Resources
from cukiln.types import Comparison, Contender, MeasuredOn, Measurement, RunnerUp, VendorResult
from storage.database.session import Database
from storage.database.sql import chunks, is_predicted
from storage.entities.candidates import StoredCandidate, set_predictions
from storage.entities.jobs import JobProblem
from storage.entities.pareto_front import Point, pareto, point_at
from workers.gpu.sampling import Interval

PREDICTIONS_AT_ONCE = 1000
"""Of one transaction."""


@dataclass(frozen=True)
class Timed:
    """A measured candidate. `us`: its own time; `tie_adjusted_us`: the time that it is chosen by, which is the best
    one's for all that tie with it. `compared`: whether it took part in the comparison. `measured_on`: where it comes
    from."""

    us: float
    tie_adjusted_us: float
    compared: bool
    measurement: Measurement | Contender | None
    measured_on: MeasuredOn | None = None


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
        verdict = candidate.verification.verdict if candidate.verification is not None else "skipped"
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
        point = point_at(kind, candidate, time.tie_adjusted_us if time is not None else prediction.us)
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


def timed(alone: Mapping[str, tuple[float, Measurement | None]], comparison: Comparison | None) -> dict[str, Timed]:
    """Each candidate's time: from the comparison where it took part, else as it was measured alone."""
    times = {
        candidate: Timed(us, us, compared=False, measurement=measurement, measured_on=measured_on(measurement))
        for candidate, (us, measurement) in alone.items()
    }
    if comparison is None:
        return times
    together, where = _together(comparison), measured_on(comparison)
    for contender in comparison.contenders:
        if contender.candidate in times:
            adjusted = comparison.contenders[0].median_us if contender.candidate in together else contender.median_us
            times[contender.candidate] = Timed(contender.median_us, adjusted, True, contender, where)
    return times


def measured_on(run: Measurement | Comparison | None) -> MeasuredOn | None:
    """Where the times of a run come from."""
    return None if run is None else MeasuredOn.model_validate(run, from_attributes=True)


def is_whole(points: Iterable[Point], times: Mapping[str, Timed]) -> bool:
    """Whether the comparison, if there was one, has the whole front of what was measured alone."""
    compared = {candidate for candidate, entry in times.items() if entry.compared}
    return not compared or {point.candidate for point in pareto(points)} <= compared


def runner_up(winner: str, best: Timed, times: Mapping[str, Timed], comparison: Comparison | None) -> RunnerUp | None:
    """The fastest beside the winner: of the compared where it was compared with them, else of all."""
    others = {name: entry for name, entry in times.items() if name != winner}
    others = {name: entry for name, entry in others.items() if entry.compared and best.compared} or others
    if not others:
        return None
    name = min(others, key=lambda name: (others[name].tie_adjusted_us, others[name].us, name))
    second = others[name]
    if best.compared and second.compared and comparison is not None:
        tie = {winner, name} <= _together(comparison)
    else:
        first, other = best.measurement, second.measurement
        tie = bool(first and other and first.low_us <= other.high_us and other.low_us <= first.high_us)
    ratio = _ratio(best.measurement, second.measurement, comparison) if best.compared and second.compared else None
    margin = second.us / best.us - 1 if ratio is None else ratio.median - 1
    ends = {} if ratio is None else {"low": ratio.low - 1, "high": ratio.high - 1}
    return RunnerUp(candidate=name, us=second.us, margin=margin, tie=tie, **ends)


def _ratio(
    best: Measurement | Contender | None, second: Measurement | Contender | None, comparison: Comparison | None
) -> Interval | None:
    """Of the second one's time over the best one's, where one of them is what the comparison's ratios are to."""
    if comparison is None or not isinstance(best, Contender) or not isinstance(second, Contender):
        return None
    first = comparison.contenders[0]
    if first.ratio_low != 1.0 or first.ratio_high != 1.0:  # the one that the ratios are to was taken out
        return None
    base = first.candidate
    if best.candidate == base:
        return Interval(second.ratio, second.ratio_low, second.ratio_high)
    if second.candidate == base:
        return Interval(1 / best.ratio, 1 / best.ratio_high, 1 / best.ratio_low)
    return None


def without(comparison: Comparison, candidates: Iterable[str]) -> Comparison:
    """The comparison without these finalists."""
    left = set(candidates)
    return comparison.model_copy(
        update={"contenders": [contender for contender in comparison.contenders if contender.candidate not in left]}
    )


def _together(comparison: Comparison) -> set[str]:
    """The best candidate and all that tie with it."""
    return {
        contender.candidate for number, contender in enumerate(comparison.contenders) if contender.tie or number == 0
    }
