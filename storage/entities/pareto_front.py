"""Which candidates stay on a problem's Pareto front, in what order, and which are near enough the best to be compared:
pure functions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from codegen.kernel import Candidate
from codegen.operator import Operator
from cukiln.types import FrontEntry, RankedBy

MOST_CONTENDERS = 8  # of a comparison: each takes its turn in every round, and a finish publishes no more points
NEAR = 0.05  # of the best time: two runs of one kernel have been seen to differ by less, so any of these may be best


@dataclass(frozen=True)
class Point:
    """What a candidate is chosen by: microseconds, bytes of workspace, whether its bits are always the same."""

    candidate: str
    us: float
    workspace_bytes: int
    deterministic: bool

    def as_good_as(self, other: "Point") -> bool:
        """Worse in no respect."""
        return self.us <= other.us and self.replaces(other)

    def replaces(self, other: "Point") -> bool:
        """Whether every request that allows the other allows this one, whatever time it takes."""
        return self.workspace_bytes <= other.workspace_bytes and self.deterministic >= other.deterministic


def pareto(points: Iterable[Point]) -> list[Point]:
    """The points that no other is as good as, fastest first; of equal points the one with the smaller candidate id."""
    front: list[Point] = []
    # In this order a point comes after all that are as good.
    for point in sorted(points, key=_order):
        if not any(other.as_good_as(point) for other in front):
            front.append(point)
    return front


def thinned(front: Sequence[Point], at_most: int) -> list[Point]:
    """At most that many points of a front, in its order: those whose loss costs requests most. The fastest stays, and
    of each kind of determinism the one with the least workspace."""
    points = list(front)
    while len(points) > max(1, at_most):
        points.remove(min(points[1:], key=lambda point: (_loss(point, points), point.us)))
    return points


def _loss(point: Point, front: Sequence[Point]) -> float:
    """How many times the time a request for `point` takes without it; infinite where nothing else is allowed."""
    others = [other.us for other in front if other is not point and other.replaces(point)]
    return min(others) / max(point.us, 1e-9) if others else float("inf")


def merge_front(
    known: Sequence[FrontEntry], new: Sequence[FrontEntry], times: Mapping[str, float] | None = None
) -> list[FrontEntry]:
    """The front with the `new` entries in it, fastest first. A measurement is never replaced by a prediction; where
    anything was measured, what was only predicted goes; an older entry of a candidate gives way. `times`: what new
    candidates count as, in microseconds, where that is not their own time (see `workers.steps.rank`)."""
    entries = {entry.candidate: entry for entry in known}
    counts: dict[str, float] = {}
    for entry in new:
        old = entries.get(entry.candidate)
        if old is None or old.measured_us is None or entry.measured_us is not None:
            entries[entry.candidate] = entry
            if times is not None and entry.candidate in times:
                counts[entry.candidate] = times[entry.candidate]
    if any(entry.measured_us is not None for entry in entries.values()):
        entries = {candidate: entry for candidate, entry in entries.items() if entry.measured_us is not None}
    points = [point_of(entry) for entry in entries.values()]
    points = [replace(point, us=counts.get(point.candidate, point.us)) for point in points]
    return [entries[point.candidate] for point in pareto(points)]


def ranked_by(front: Sequence[FrontEntry]) -> RankedBy:
    return "predicted" if front[0].measured_us is None else "measured"


def point_of(entry: FrontEntry) -> Point:
    """The measurement counts where there is one; measured and predicted never meet in one front (see `merge_front`)."""
    time = entry.measured_us if entry.measured_us is not None else entry.predicted_us
    us = float("inf") if time is None else time
    return Point(entry.candidate, us, entry.workspace_bytes, entry.deterministic)


def _order(point: Point) -> tuple[float, int, bool, str]:
    return point.us, point.workspace_bytes, not point.deterministic, point.candidate


def point_at(operator: Operator, candidate: Candidate, us: float) -> Point:
    """What a candidate is chosen by, with its time."""
    workspace = operator.cost(candidate.problem, candidate.schedule).workspace_bytes
    return Point(candidate.id, us, workspace, operator.deterministic(candidate.kernel))


def contenders(points: Iterable[Point]) -> list[Point]:
    """The front over time, workspace and determinism, and all near the best time, fastest first."""
    ordered = sorted(points, key=lambda point: (point.us, point.candidate))
    if not ordered:
        return []
    chosen = {point.candidate for point in pareto(ordered)}
    chosen.update(point.candidate for point in ordered if point.us <= (1 + NEAR) * ordered[0].us)
    return thinned([point for point in ordered if point.candidate in chosen], MOST_CONTENDERS)


def finalists(operator: Operator, right: Iterable[tuple[Candidate, float]]) -> list[str]:
    """The ids of those that are compared, of candidates of one problem with their times alone."""
    return [point.candidate for point in contenders(point_at(operator, candidate, us) for candidate, us in right)]
