"""How often to measure, and what the samples say: intervals of the median, early ends, and finalists that take turns.

Pure: what is measured is a function that returns microseconds. All intervals come from order statistics, so they assume
no shape of the noise. What none detects: a timer whose step is coarser than the noise, and a state of the machine that
lasts throughout.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median, quantiles
from typing import Literal

Sample = Callable[[], float]
"""Microseconds of one sample."""
Clock = Callable[[], float]
"""Seconds since some moment."""

CONFIDENCE = 0.95  # of every interval that is reported
# Of what ends a finalist's part, or all of it, before its time: it is looked at again and again, and with 95 % one
# look in twenty errs.
STOP_CONFIDENCE = 0.99

# The first sample uploads the recorded launches and finds caches, TLB and page tables cold, the second the clocks still
# rising; the third is one to spare.
WARM_UPS = 3
# 95 % of a median needs 6 samples at least (2 × 0.5^6 = 0.03); a candidate that lies above the line with all of 6 is a
# loser.
FEWEST_SAMPLES = 6
# An interval may be narrow by luck where samples are few. With 1 % of noise 20 samples are within ±0.6 %.
FEWEST_TIGHT = 20
TIGHT = 0.01  # of the median, to either side
# How much slower than the best makes a loser. Clocks differ by several per cent between a cool and a warm GPU and by
# ten between power states; beyond 15 % no change of state turns the order round. No candidate this far behind is among
# the last few that are compared in turns.
LOSER_MARGIN = 1.15

# What differs by less is called equal. Two runs of the same code differ by some tenths of a per cent from where its
# data lie in memory alone, and a framework never feels 1 %.
BAND = math.log(1.01)
FEWEST_ROUNDS = 8  # the fewest with which a 99 % interval exists (2 × 0.5^8 = 0.008)
# A ratio known to ±0.5 % is known well enough, wherever it lies: half of the band.
NARROW = math.log(1.005)
CLEAR_LOSER = math.log(1.05)  # one that is slower by more, for certain, leaves: the others need the time


@dataclass(frozen=True)
class Interval:
    """A median, and the ends of the interval that holds the true one with 95 %."""

    median: float
    low: float
    high: float

    def is_within(self, share: float) -> bool:
        """Whether both ends are at most this share of the median away from it."""
        return max(self.high - self.median, self.median - self.low) <= share * self.median


@dataclass(frozen=True)
class Sampling:
    """`samples` without the warm-up. `stopped`: narrow enough; the time was up; clearly slower than the best."""

    samples: tuple[float, ...]
    interval: Interval
    spread: float
    stopped: Literal["tight", "time", "loser"]


@dataclass(frozen=True)
class Placed:
    """One of those that took turns. `ratio`: its time over the best one's, from samples of the same rounds. `tie`: the
    difference from the best one is less than 1 %, or not certain to be more; of the best one itself: false. `beside`:
    of each of those beside its time over this one's, from samples of the same rounds."""

    name: str
    interval: Interval
    ratio: Interval
    tie: bool
    samples: tuple[float, ...]
    beside: Mapping[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True)
class Ranking:
    """`placed`: fastest first; those beside stand where their time puts them. `best` is the fastest of the others."""

    placed: tuple[Placed, ...]
    rounds: int
    best: str


def interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The median and its distribution-free interval: the k-th smallest and the k-th largest sample, with the largest k
    that keeps the confidence (Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2: the number of samples
    below the median is binomial). Fewer than 6 samples cannot give 95 %: then all of them are the interval."""
    ordered = sorted(samples)
    if not ordered:
        raise ValueError("no samples: a median needs one")
    rank = _rank(len(ordered), confidence)
    return Interval(median(ordered), ordered[rank], ordered[-1 - rank])


def spread(samples: Sequence[float]) -> float:
    """The distance of the quartiles, as a share of the median; 0 of a single sample."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = quantiles(samples, n=4, method="inclusive")
    return (high - low) / middle


def sample_until_tight(sample: Sample, now: Clock, *, seconds: float, best: float | None = None) -> Sampling:
    """Three calls to warm up, then samples until the interval is within ±1 % of the median ("tight"), all say that it
    is slower than 1.15 × `best` (microseconds; "loser"), or `seconds` of `now` have passed ("time").

    Time is looked at between calls, so the last one may end late. Where the warm-up alone takes all the time, its last
    sample is the only one: a call that long does not notice what warming up is for. What `sample` raises goes through.
    """
    end = now() + seconds
    samples: list[float] = []
    for _ in range(WARM_UPS):
        samples = [_checked(sample())]
        if now() >= end:
            return _sampling(samples, "time")
    samples = []
    look = FEWEST_SAMPLES
    while True:
        samples.append(_checked(sample()))
        if len(samples) >= look:
            estimate = interval(samples)
            if best is not None and estimate.low > LOSER_MARGIN * best:
                return _sampling(samples, "loser")
            if len(samples) >= FEWEST_TIGHT and estimate.is_within(TIGHT):
                return _sampling(samples, "tight")
            look = _next_look(look)
        if now() >= end:
            return _sampling(samples, "time")


def rank_interleaved(
    samplers: Mapping[str, Sample], now: Clock, *, seconds: float, beside: Collection[str] = ()
) -> Ranking:
    """Rank finalists by samples taken in turns. In a round each gives two samples, in an order and then in its reverse,
    and its time of the round is their geometric mean: a drift within the round cancels, one between rounds does not
    reach the ratios. The orders are those of a Williams design (E. J. Williams, Australian J. Sci. Res. A2, 1949, p.
    149).

    The best beats, or nearly beats, each other one in half of their common rounds. A ratio to it is settled once it is
    known to ±0.5 %, or lies outside of ±1 % with 99 %, or within with 95 %. All settled, or no time for another turn of
    `seconds`: done. One that is slower by more than 5 % with 99 % leaves early and keeps its figures. Those `beside`
    never leave and are never best. A first turn to warm up does not count, unless it leaves no time for another. What a
    sampler raises goes through. Raises ValueError where none can be best.
    """
    runs = _Interleaved(samplers, now, seconds, frozenset(beside))
    runs.warm_up()
    look = FEWEST_ROUNDS
    while not runs.rounds or runs.has_time():
        runs.play_round()
        if runs.rounds >= look:
            if runs.are_settled():
                break
            look = _next_look(look)
    return runs.ranking()


class _Interleaved:
    """The state of one `rank_interleaved`. Times of rounds are kept as logarithms, by the number of the round."""

    def __init__(self, samplers: Mapping[str, Sample], now: Clock, seconds: float, beside: frozenset[str]) -> None:
        if beside >= samplers.keys():
            raise ValueError(f"nothing to rank: {len(samplers)} take turns, and all of them stand beside")
        self._samplers, self._now, self._end = samplers, now, now() + seconds
        self._beside = beside
        self._active = list(samplers)
        self._samples: dict[str, list[float]] = {name: [] for name in samplers}
        self._logs: dict[str, dict[int, float]] = {name: {} for name in samplers}
        self._turn_seconds = 0.0
        self.rounds = 0

    def has_time(self) -> bool:
        """For another turn as long as the last one."""
        return self._now() + self._turn_seconds < self._end

    def warm_up(self) -> None:
        first = self._turn(self._active)
        if not self.has_time():
            self._keep([first])

    def play_round(self) -> None:
        order = _order(self._active, self.rounds)
        turns = [self._turn(order)]
        if self.has_time():
            turns.append(self._turn(order[::-1]))
        self._keep(turns)

    def _turn(self, order: Sequence[str]) -> dict[str, float]:
        began = self._now()
        times = {name: _checked(self._samplers[name]()) for name in order}
        self._turn_seconds = self._now() - began
        return times

    def _keep(self, turns: Sequence[Mapping[str, float]]) -> None:
        for name in self._active:
            times = [turn[name] for turn in turns]
            self._samples[name] += times
            self._logs[name][self.rounds] = sum(map(math.log, times)) / len(times)
        self.rounds += 1

    def are_settled(self) -> bool:
        """Whether nothing is left to find out; sends clear losers away."""
        best = self._best()
        if len(self._active) == 1:
            return interval(self._samples[best]).is_within(TIGHT)
        others = [name for name in self._active if name != best]
        settled = all(self._is_settled(name, best) for name in others)
        for name in others:
            if name not in self._beside and self._ratio(name, best, STOP_CONFIDENCE).low > CLEAR_LOSER:
                self._active.remove(name)
        return settled

    def _is_settled(self, name: str, best: str) -> bool:
        ratio, certain = self._ratio(name, best), self._ratio(name, best, STOP_CONFIDENCE)
        narrow = max(ratio.high - ratio.median, ratio.median - ratio.low) <= NARROW
        equal = ratio.low >= -BAND and ratio.high <= BAND
        return narrow or equal or _is_outside_band(certain)

    def _best(self) -> str:
        """The one whose worst duel is the best one: it beats all others, if any does."""
        runners = [name for name in self._active if name not in self._beside]
        return max(
            runners, key=lambda runner: min((self._ratio(other, runner).median for other in runners), default=0.0)
        )

    def _ratio(self, name: str, other: str, confidence: float = CONFIDENCE) -> Interval:
        """Of the logarithm of one's time over the other's, from their common rounds."""
        own, others = self._logs[name], self._logs[other]
        return interval([time - others[number] for number, time in own.items() if number in others], confidence)

    def ranking(self) -> Ranking:
        best = self._best()
        ratios = {name: self._ratio(name, best) for name in self._samplers}

        def place(name: str) -> tuple[float, bool]:
            # Where three beat each other in a circle, the best one's ratio to another is a little above 1.
            ratio = ratios[name].median
            return (ratio if name in self._beside else max(ratio, 0.0)), name != best

        placed = tuple(self._placed(name, ratios[name], best) for name in sorted(self._samplers, key=place))
        return Ranking(placed, self.rounds, best)

    def _placed(self, name: str, ratio: Interval, best: str) -> Placed:
        samples = tuple(self._samples[name])
        beside = {} if name in self._beside else {other: _shown(self._ratio(other, name)) for other in self._beside}
        shown = _shown(ratio)
        return Placed(name, interval(samples), shown, name != best and is_tie(shown), samples, beside)


def is_tie(ratio: Interval) -> bool:
    """Whether two whose times have this ratio differ by less than 1 %, or not certainly by more."""
    return not _is_outside_band(Interval(math.log(ratio.median), math.log(ratio.low), math.log(ratio.high)))


def _shown(log_ratio: Interval) -> Interval:
    return Interval(math.exp(log_ratio.median), math.exp(log_ratio.low), math.exp(log_ratio.high))


def _is_outside_band(log_ratio: Interval) -> bool:
    return log_ratio.low > BAND or log_ratio.high < -BAND


def _order(names: Sequence[str], number: int) -> list[str]:
    """Row `number` of the Williams design: 0, 1, n-1, 2, n-2, …, moved on by one in every round."""
    count = len(names)
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    return [names[(step + number) % count] for step in zigzag]


def _next_look(number: int) -> int:
    """Looks become rarer as there is more to look at, so that they neither cost much nor err by their number."""
    return number + max(2, number // 8)


def _sampling(samples: list[float], stopped: Literal["tight", "time", "loser"]) -> Sampling:
    return Sampling(tuple(samples), interval(samples), spread(samples), stopped)


def _checked(microseconds: float) -> float:
    if not 0.0 < microseconds < math.inf:
        raise ValueError(f"a sample of {microseconds!r} µs is no time: put more launches into each sample")
    return microseconds


@cache
def _rank(count: int, confidence: float) -> int:
    """How many of the smallest, and of the largest, samples lie outside the interval of the median."""
    if count > 400:  # the normal approximation, which is within one rank there
        quantile = {CONFIDENCE: 1.960, STOP_CONFIDENCE: 2.576}[confidence]
        return max(0, math.floor((count - quantile * math.sqrt(count)) / 2) - 1)
    allowed, below, rank = (1.0 - confidence) / 2 * 2**count, 0, 0
    while (below := below + math.comb(count, rank)) <= allowed:
        rank += 1
    return max(0, rank - 1)
