"""What measurements say of a problem's candidates: finalists, tie-adjusted times, the runner-up. Candidates are
measured alone, in runs that may lie hours apart; so the comparison of the few best in one process outweighs that, and
of two that it calls a tie neither counts as the faster."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from codegen.kernel import Candidate
from codegen.operator import Operator
from cukiln.types import Comparison, Contender, MeasuredOn, Measurement, RunnerUp
from storage.entities.pareto_front import Point, pareto, thinned
from workers.gpu.sampling import Interval

MOST_CONTENDERS = 8  # of a comparison: each takes its turn in every round, and a finish publishes no more points
NEAR = 0.05  # of the best time: two runs of one kernel have been seen to differ by less, so any of these may be best


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


def point_of(operator: Operator, candidate: Candidate, us: float) -> Point:
    """What a candidate is chosen by, with its time."""
    workspace = operator.cost(candidate.problem, candidate.schedule).workspace_bytes
    return Point(candidate.id, us, workspace, operator.deterministic(candidate.kernel))


def contenders(points: Iterable[Point]) -> list[Point]:
    """The front over time, workspace and determinism, and all near the best time, fastest first."""
    ordered = sorted(points, key=lambda point: (point.us, point.candidate))
    if not ordered:
        return []
    wanted = {point.candidate for point in pareto(ordered)}
    wanted.update(point.candidate for point in ordered if point.us <= (1 + NEAR) * ordered[0].us)
    return thinned([point for point in ordered if point.candidate in wanted], MOST_CONTENDERS)


def finalists(operator: Operator, right: Iterable[tuple[Candidate, float]]) -> list[str]:
    """The ids of those that are compared, of candidates of one problem with their times alone."""
    return [point.candidate for point in contenders(point_of(operator, candidate, us) for candidate, us in right)]


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
