"""What measurements say of a problem's candidates: who is compared, what each counts as, who came second.

Candidates are measured alone, one after the other, in runs that may lie hours apart; the few best of them are then
compared in one process, taking turns. So the comparison outweighs what was measured alone, and of two that it calls
a tie neither counts as the faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cukiln.types import Comparison, Contender, MeasuredOn, Measurement, RunnerUp
from storage.front import Point, pareto, thinned

MOST_CONTENDERS = 8  # of a comparison: each takes its turn in every round, and a finish publishes no more points
NEAR = 0.05  # of the best time: two runs of one kernel have been seen to differ by less, so any of these may be best


@dataclass(frozen=True)
class Timed:
    """A measured candidate. `us`: its own time; `counts_as`: the time that it is chosen by, which is the best one's for
    all that tie with it. `compared`: whether it took part in the comparison. `measured_on`: where it comes from."""

    us: float
    counts_as: float
    compared: bool
    measurement: Measurement | Contender | None
    measured_on: MeasuredOn | None = None


def contenders(points: Iterable[Point]) -> list[Point]:
    """Who is to be compared: the front over time, workspace and determinism, and whoever is near the best time; at most
    MOST_CONTENDERS, those that requests would miss most. Fastest first."""
    known = sorted(points, key=lambda point: (point.us, point.candidate))
    if not known:
        return []
    wanted = {point.candidate for point in pareto(known)}
    wanted.update(point.candidate for point in known if point.us <= (1 + NEAR) * known[0].us)
    return thinned([point for point in known if point.candidate in wanted], MOST_CONTENDERS)


def timed(alone: Mapping[str, tuple[float, Measurement | None]], comparison: Comparison | None) -> dict[str, Timed]:
    """Each candidate's time: from the comparison where it took part, else as it was measured alone."""
    found = {
        candidate: Timed(us, us, compared=False, measurement=measurement, measured_on=measured_on(measurement))
        for candidate, (us, measurement) in alone.items()
    }
    if comparison is None:
        return found
    together, where = _together(comparison), measured_on(comparison)
    for one in comparison.contenders:
        if one.candidate in found:
            counts_as = comparison.contenders[0].median_us if one.candidate in together else one.median_us
            found[one.candidate] = Timed(one.median_us, counts_as, True, one, where)
    return found


def measured_on(run: Measurement | Comparison | None) -> MeasuredOn | None:
    """Where the times of a run come from."""
    if run is None:
        return None
    rounds = run.rounds if isinstance(run, Comparison) else None
    return MeasuredOn(
        device=run.device,
        uuid=run.uuid,
        driver=run.driver,
        cold=run.cold,
        rounds=rounds,
        before=run.before,
        after=run.after,
        measured_at=run.measured_at,
    )


def is_whole(points: Iterable[Point], times: Mapping[str, Timed]) -> bool:
    """Whether the comparison, if there was one, left out nobody who was on the front of what was measured alone."""
    compared = {candidate for candidate, one in times.items() if one.compared}
    return not compared or {point.candidate for point in pareto(points)} <= compared


def runner_up(winner: str, best: Timed, times: Mapping[str, Timed], comparison: Comparison | None) -> RunnerUp | None:
    """The fastest of the others beside the winner, whose time is `best`. Of the compared where it was compared with
    them; else of all, and whose intervals overlap tie."""
    others = {name: one for name, one in times.items() if name != winner}
    others = {name: one for name, one in others.items() if one.compared and best.compared} or others
    if not others:
        return None
    name = min(others, key=lambda name: (others[name].counts_as, others[name].us, name))
    second = others[name]
    if best.compared and second.compared and comparison is not None:
        tie = {winner, name} <= _together(comparison)
    else:
        tie = _overlap(best.measurement, second.measurement)
    return RunnerUp(candidate=name, us=second.us, margin=second.us / best.us - 1, tie=tie)


def without(comparison: Comparison, candidates: Iterable[str]) -> Comparison:
    """The comparison without these contenders."""
    gone = set(candidates)
    return comparison.model_copy(
        update={"contenders": [one for one in comparison.contenders if one.candidate not in gone]}
    )


def _together(comparison: Comparison) -> set[str]:
    """The best one and whoever ties with it."""
    return {one.candidate for number, one in enumerate(comparison.contenders) if one.tie or number == 0}


def _overlap(one: Measurement | Contender | None, other: Measurement | Contender | None) -> bool:
    return one is not None and other is not None and one.low_us <= other.high_us and other.low_us <= one.high_us
