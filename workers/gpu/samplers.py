"""Samples that favour none of those that are compared: one place among the sets of operands for all, as many launches
in each sample, and the cost of a sample itself, which is measured, taken off.

A sample is one replay of recorded launches between two events. Its cost (events, the graph's own start) is what is left
of it at no launches: twice a sample of N less one of 2N. It would make all that are compared look alike, and times of
different numbers of launches differ.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from workers.gpu.interface import Gpu, Timer
from workers.gpu.sampling import Clock, Interval, Placed, Ranking, interval, is_tie, rank_interleaved

Launch = Callable[[], None]

# Of the fastest: events tick every half a microsecond (CUDA Runtime API, cudaEventElapsedTime), and what a sample costs
# beside its launches, some microseconds, is a small part of it.
SAMPLE_US = 1000.0
# Clocks rise within milliseconds of work; Triton's do_bench warms up for as long.
WARM_UP_US = 25_000.0
# For a first look at how long a launch takes.
FEWEST_LAUNCHES = 64
LONG_ENOUGH_TRIES = 8
# Pairs of a sample of N launches and one of 2N: known to a thousandth of a sample, the cost matters to no ratio.
FEWEST_PAIRS, MOST_PAIRS = 12, 120
COST_KNOWN = 0.001
COST_SHARE = 0.25  # of a comparison's time


@dataclass(frozen=True)
class Rotation:
    """A sample is `launches` of them, each on the next set; `groups` samples go round all sets once."""

    launches: int
    groups: int

    @staticmethod
    def of(sets: int, fastest_us: float, *, cold: bool) -> "Rotation":
        """Of so many sets, so that a sample of the fastest takes a millisecond. Sets that the L2 holds are all used in
        each sample: so it holds them equally for all."""
        launches = max(1, math.ceil(SAMPLE_US / fastest_us))
        if launches >= sets or not cold:
            return Rotation(math.ceil(launches / sets) * sets, 1)
        groups = sets // launches
        return Rotation(sets // groups, groups)

    def calls(self, calls: Sequence[Launch], group: int, samples: int = 1) -> list[Launch]:
        """Those of so many samples, from the beginning of a group on."""
        used = min(len(calls), self.launches * self.groups)
        first = group * self.launches
        return [calls[(first + number) % used] for number in range(self.launches * samples)]


@dataclass
class Cursor:
    """Where the next sample begins, whichever it is of: a set was left alone for as long as all others took."""

    group: int = 0

    def take(self, rotation: Rotation, samples: int = 1) -> int:
        group = self.group
        self.group = (group + samples) % rotation.groups
        return group


@dataclass(frozen=True)
class SampleCost:
    """Microseconds that a sample takes beside its launches; `half`: of its 95 % interval."""

    us: float = 0.0
    half: float = 0.0


class RotatingSampler:
    """Samples of one that is timed. `calls`: its launch on each set. `cost` is taken off each sample."""

    def __init__(self, gpu: Gpu, calls: Sequence[Launch], rotation: Rotation, cursor: Cursor, *, cold: bool) -> None:
        self._gpu, self._calls, self._rotation, self._cursor, self._cold = gpu, calls, rotation, cursor, cold
        self._timers = [gpu.timer(rotation.calls(calls, group)) for group in range(rotation.groups)]
        self._double: Timer | None = None
        self.launches = rotation.launches
        self.cost = SampleCost()

    def replay(self) -> None:
        """Every call of every sample, once."""
        for timer in self._timers:
            timer.sample()

    def sample_us(self) -> float:
        return self._sample(self._timers[self._cursor.take(self._rotation)])

    def cost_us(self) -> float:
        """Of a sample, from one of N launches and one of 2N."""
        single = self.sample_us()
        while self._cursor.group:  # where the doubled one begins
            single = self.sample_us()
        if self._double is None:
            self._double = self._gpu.timer(self._rotation.calls(self._calls, 0, 2))
        self._cursor.take(self._rotation, 2)
        return 2 * single - self._sample(self._double)

    def __call__(self) -> float:
        """Microseconds of one launch."""
        # No less than half of it: what is left must be a time, however wrong the cost.
        sample = self.sample_us()
        return max(sample - self.cost.us, sample / 2) / self.launches

    def _sample(self, timer: Timer) -> float:
        if not self._cold:
            timer.sample()  # so that the L2 holds of its sets what it can, and nothing of another's
        return timer.sample()


def rough_us(gpu: Gpu, calls: Sequence[Launch]) -> float:
    """About how long a launch takes; the first on each set is run here, outside of any recording."""
    for call in calls:
        call()
    gpu.synchronize()
    count = math.ceil(FEWEST_LAUNCHES / len(calls)) * len(calls)
    once = gpu.timer([calls[number % len(calls)] for number in range(count)])
    once.sample()
    return max(once.sample() / count, 1e-3)


def samplers(
    gpu: Gpu, calls: Mapping[str, Sequence[Launch]], *, cold: bool, rough: Mapping[str, float]
) -> dict[str, RotatingSampler]:
    """Of those that are compared, each with its `rough_us`: with one cursor and one number of launches, with which the
    shortest sample takes a millisecond."""
    fastest_us = min(rough.values())
    name = min(rough, key=lambda name: rough[name])
    sets = min(map(len, calls.values()))
    for _ in range(LONG_ENOUGH_TRIES):
        rotation, cursor = Rotation.of(sets, fastest_us, cold=cold), Cursor()
        fastest = RotatingSampler(gpu, calls[name], rotation, cursor, cold=cold)
        shortest = min(fastest.sample_us() for _ in range(3))
        if shortest >= SAMPLE_US:
            break
        fastest_us = 0.98 * shortest / rotation.launches
    return {
        each: fastest if each == name else RotatingSampler(gpu, calls[each], rotation, cursor, cold=cold)
        for each in calls
    }


def alone(gpu: Gpu, calls: Sequence[Launch], *, cold: bool) -> RotatingSampler:
    """The sampler of one that is timed by itself."""
    return samplers(gpu, {"": calls}, cold=cold, rough={"": rough_us(gpu, calls)})[""]


def warm_up(turns: Collection[Callable[[], float]]) -> None:
    """Until the GPU has worked for 25 ms; each gives the microseconds of a sample."""
    spent = 0.0
    while spent < WARM_UP_US:
        spent += sum(sample() for sample in turns)


def cost_of_samples(turns: Collection[Callable[[], float]], now: Clock, *, seconds: float) -> SampleCost:
    """By turns, until it is known to a thousandth of a sample, or for so long; each gives `cost_us`."""
    end = now() + seconds
    costs: list[float] = []
    while True:
        costs += [cost_us() for cost_us in turns]
        if len(costs) >= FEWEST_PAIRS:
            estimate = interval(costs)
            half = (estimate.high - estimate.low) / 2
            if half <= COST_KNOWN * SAMPLE_US or len(costs) >= MOST_PAIRS:
                return SampleCost(max(0.0, estimate.median), half)
        if now() >= end:
            estimate = interval(costs)
            return SampleCost(max(0.0, median(costs)), (estimate.high - estimate.low) / 2)


@dataclass(frozen=True)
class Compared:
    """`cost`: of each sample, taken off. `states`: of the GPU, with warm clocks, before and after the turns."""

    ranking: Ranking
    cost: SampleCost
    states: tuple[dict[str, Any], dict[str, Any]]


def compare_samplers(
    turns: Mapping[str, RotatingSampler],
    now: Clock,
    *,
    seconds: float,
    beside: Collection[str] = (),
    before: Callable[[str], None] = lambda name: None,
    state: Callable[[], dict[str, Any]] = dict,
) -> Compared:
    """Warm up, find what a sample costs, and rank (`rank_interleaved`). `before` gets a name before each of its
    samples. Intervals are wider by what is not known of the cost."""

    def turn(sample: Callable[[RotatingSampler], float], name: str) -> float:
        before(name)
        return sample(turns[name])

    def all_turns(sample: Callable[[RotatingSampler], float]) -> dict[str, Callable[[], float]]:
        return {name: partial(turn, sample, name) for name in turns}

    end = now() + seconds
    warm_up(all_turns(RotatingSampler.sample_us).values())
    cost = cost_of_samples(all_turns(RotatingSampler.cost_us).values(), now, seconds=COST_SHARE * seconds)
    for sampler in turns.values():
        sampler.cost = cost
    first = state()
    rest = max(end - now(), seconds / 2)
    ranking = rank_interleaved(all_turns(RotatingSampler.__call__), now, seconds=rest, beside=beside)
    doubt = cost.half / next(iter(turns.values())).launches
    return Compared(with_doubt(ranking, doubt), cost, (first, state()))


def with_doubt(ranking: Ranking, doubt: float) -> Ranking:
    """Intervals for times each of which may be too long or too short by the same `doubt`, in microseconds."""
    medians = {entry.name: entry.interval.median for entry in ranking.placed}

    def wider_ratio(ratio: Interval, us: float, other_us: float) -> Interval:
        shift = math.exp(doubt * abs(1 / us - 1 / other_us))
        return Interval(ratio.median, ratio.low / shift, ratio.high * shift)

    def wider(entry: Placed) -> Placed:
        time = entry.interval
        ratio = wider_ratio(entry.ratio, time.median, medians[ranking.best])
        return replace(
            entry,
            interval=Interval(time.median, max(time.low - doubt, time.low / 2), time.high + doubt),
            ratio=ratio,
            tie=entry.name != ranking.best and is_tie(ratio),
            beside={name: wider_ratio(other, medians[name], time.median) for name, other in entry.beside.items()},
        )

    return replace(ranking, placed=tuple(map(wider, ranking.placed)))
