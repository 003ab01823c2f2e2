"""Sampling and ranking by turns, on simulated kernels whose true times are known: the noise has the shapes that a GPU's
has, and the clock is simulated too."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from workers.gpu.sampling import (
    FEWEST_ROUNDS,
    FEWEST_SAMPLES,
    LOSER_MARGIN,
    WARM_UPS,
    Interval,
    Ranking,
    interval,
    is_tie,
    rank_interleaved,
    sample_until_tight,
    spread,
)

TRIALS = 100
SECONDS = 0.3  # of a simulated comparison of two


@dataclass(frozen=True)
class Noise:
    """What stands between a true time and a sample. All shares are of the true time; the clock is common to all."""

    gaussian: float = 0.01
    outliers: float = 0.0  # of the samples: up to twice the time
    drift: float = 0.0  # over the whole second, then back
    step: float = 0.0  # the clock changes by so much, several times
    tick_us: float = 0.0  # of the timer
    cold: float = 0.0  # the first sample ever takes so much longer


NOISES = {
    "quiet": Noise(0.01),
    "loud": Noise(0.02),
    "outliers": Noise(0.01, outliers=0.02),
    "heavy tails": Noise(0.02, outliers=0.05),
    "drift": Noise(0.01, drift=0.05),
    "clock steps": Noise(0.01, step=0.07),
    "coarse timer": Noise(0.02, tick_us=0.5),
    "all at once": Noise(0.015, outliers=0.03, drift=0.04, step=0.05, cold=3.0),
}


class SimulatedGpu:
    """Kernels with true times on one simulated clock, which every sample moves on."""

    def __init__(self, noise: Noise, seed: int) -> None:
        self.seconds = 0.0
        self.calls: Counter[str] = Counter()
        self.order: list[str] = []
        self._noise = noise
        random = np.random.default_rng(seed)
        self._gaussian = random.normal(0.0, noise.gaussian, 20_000)
        self._tails = np.where(random.random(20_000) < noise.outliers, random.random(20_000), 0.0)
        self._steps = np.sort(random.uniform(0.0, SECONDS, 4))
        self._number = 0

    def now(self) -> float:
        return self.seconds

    def kernel(self, name: str, true_us: float) -> Callable[[], float]:
        def sample() -> float:
            took = true_us * self._factor(self.calls[name] == 0)
            self.calls[name] += 1
            self.order.append(name)
            self.seconds += took * 1e-6 + 20e-6
            tick = self._noise.tick_us
            return float(max(tick, round(took / tick) * tick)) if tick else float(took)

        return sample

    def _factor(self, first: bool) -> float:
        noise, at = self._noise, self._number % len(self._gaussian)
        self._number += 1
        drifted = 1.0 + noise.drift * math.sin(math.pi * self.seconds / SECONDS)
        stepped = 1.0 + noise.step * (int(np.searchsorted(self._steps, self.seconds)) % 2)
        cold = 1.0 + noise.cold * first
        noisy = max(0.1, 1.0 + self._gaussian[at] + self._tails[at])
        return float(noisy * drifted * stepped * cold)


def ranked(
    gpu: SimulatedGpu, times: dict[str, float], beside: tuple[str, ...] = (), seconds: float = SECONDS
) -> Ranking:
    samplers = {name: gpu.kernel(name, us) for name, us in times.items()}
    return rank_interleaved(samplers, gpu.now, seconds=seconds, beside=beside)


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_candidate_against_itself_is_a_tie(noise: Noise) -> None:
    ties = sum(ranked(SimulatedGpu(noise, seed), {"a": 20.0, "b": 20.0}).placed[1].tie for seed in range(TRIALS))

    assert ties >= 0.95 * TRIALS


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_three_per_cent_are_a_difference_in_the_right_direction(noise: Noise) -> None:
    separated = 0
    for seed in range(TRIALS):
        names = ("fast", "slow") if seed % 2 else ("slow", "fast")
        times = {name: {"fast": 20.0, "slow": 20.6}[name] for name in names}
        first, second = ranked(SimulatedGpu(noise, seed), times).placed
        separated += first.name == "fast" and not second.tie

    assert separated >= 0.95 * TRIALS


@pytest.mark.parametrize("noise", [NOISES["loud"], NOISES["heavy tails"], NOISES["drift"]])
def test_the_ratio_s_interval_holds_the_true_ratio_as_often_as_it_says(noise: Noise) -> None:
    held = 0
    for seed in range(2 * TRIALS):
        ratio = ranked(SimulatedGpu(noise, seed), {"fast": 20.0, "slow": 20.5}).placed[1].ratio
        held += ratio.low <= 20.5 / 20.0 <= ratio.high

    assert held >= 0.9 * 2 * TRIALS  # it ends when the interval pleases, which costs some of the 95 %


@pytest.mark.parametrize("noise", [NOISES["loud"], NOISES["heavy tails"], NOISES["all at once"]])
def test_six_finalists_are_in_order_and_the_vendor_stands_where_its_time_puts_it(noise: Noise) -> None:
    times = {"c": 21.3, "a": 20.0, "f": 30.0, "vendor": 19.0, "b": 20.6, "e": 24.0, "d": 22.4}
    right = 0
    for seed in range(20):
        ranking = ranked(SimulatedGpu(noise, seed), times, ("vendor",), seconds=1.0)
        names = [each.name for each in ranking.placed]
        ratios = [each.ratio.median for each in ranking.placed]
        assert ranking.best == "a", "the vendor is never best"
        assert ratios == sorted(ratios)
        assert names[-2:] == ["e", "f"]
        right += names == ["vendor", "a", "b", "c", "d", "e", "f"]
    assert right >= 19


def test_all_turns_of_six_equals_end_in_ties() -> None:
    differences = 0
    for seed in range(40):
        ranking = ranked(SimulatedGpu(NOISES["loud"], seed), dict.fromkeys("abcdef", 20.0), seconds=1.0)
        differences += sum(not each.tie for each in ranking.placed[1:])

    assert differences <= 0.05 * 40 * 5


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_clear_losers_leave_early_and_the_best_never_does(noise: Noise) -> None:
    for seed in range(20):
        gpu = SimulatedGpu(noise, seed)
        ranking = ranked(gpu, {"best": 20.0, "near": 20.2, "loser": 40.0}, seconds=1.0)

        assert ranking.placed[-1].name == "loser" and not ranking.placed[-1].tie
        assert {ranking.placed[0].name, ranking.placed[1].name} == {"best", "near"}
        assert gpu.calls["loser"] <= 1 + 2 * (FEWEST_ROUNDS + 2)
        assert gpu.calls["best"] == gpu.calls["near"] > gpu.calls["loser"]


def test_those_beside_never_leave_however_slow() -> None:
    gpu = SimulatedGpu(NOISES["loud"], 1)
    ranking = ranked(gpu, {"a": 20.0, "b": 20.1, "vendor": 80.0}, ("vendor",))

    assert gpu.calls["vendor"] == gpu.calls["a"] > 2 * FEWEST_ROUNDS
    assert ranking.placed[-1].name == "vendor"
    assert ranking.placed[-1].ratio.median == pytest.approx(4.0, rel=0.02)


def test_each_has_its_own_ratio_to_those_beside_of_rounds_that_both_were_in() -> None:
    held = 0
    for seed in range(40):
        gpu = SimulatedGpu(NOISES["loud"], seed)
        ranking = ranked(gpu, {"a": 20.0, "b": 20.6, "loser": 40.0, "vendor": 21.0}, ("vendor",))
        beside = {entry.name: entry.beside for entry in ranking.placed}
        assert beside.pop("vendor") == {}
        for name, us in {"a": 20.0, "b": 20.6, "loser": 40.0}.items():
            held += beside[name]["vendor"].low <= 21.0 / us <= beside[name]["vendor"].high
    assert held >= 0.93 * 3 * 40


def test_a_ratio_whose_interval_holds_one_is_a_tie_and_so_is_one_below_a_per_cent() -> None:
    assert is_tie(Interval(1.03, 0.99, 1.05)) and is_tie(Interval(1.005, 1.003, 1.009))
    assert is_tie(Interval(1.03, 1.009, 1.05)) and is_tie(Interval(0.97, 0.95, 0.992))
    assert not is_tie(Interval(1.03, 1.011, 1.05)) and not is_tie(Interval(0.97, 0.95, 0.989))


def test_the_best_one_s_ratio_to_itself_is_one_and_no_tie() -> None:
    best = ranked(SimulatedGpu(NOISES["quiet"], 1), {"a": 20.0, "b": 20.0}).placed[0]

    assert (best.ratio, best.tie) == (Interval(1.0, 1.0, 1.0), False)


def test_each_comes_after_each_other_equally_often() -> None:
    for names in ("ab", "abc", "abcd", "abcdefg"):
        gpu = SimulatedGpu(Noise(gaussian=0.3), 1)  # so much noise that nothing is settled
        ranked(gpu, dict.fromkeys(names, 20.0))
        taken = gpu.order
        turns = [taken[at : at + len(names)] for at in range(len(names), len(taken), len(names))][: 2 * len(names)]
        assert len(turns) == 2 * len(names)
        assert all(sorted(turn) == sorted(names) for turn in turns)
        follows = Counter(pair for turn in turns for pair in pairwise(turn))
        assert len(follows) == len(names) * (len(names) - 1)
        assert len(set(follows.values())) == 1


def test_a_drift_within_the_rounds_does_not_reach_the_ratio() -> None:
    gpu = SimulatedGpu(Noise(gaussian=0.0), 0)

    def rising() -> float:  # half a per cent more with every sample, of each sampler
        gpu.seconds += 1e-4
        return 20.0 * math.exp(50.0 * gpu.seconds)

    ranking = rank_interleaved({"a": rising, "b": rising, "c": rising}, gpu.now, seconds=0.02)

    assert [each.ratio.median for each in ranking.placed] == pytest.approx([1.0, 1.0, 1.0], abs=1e-9)
    assert all(each.tie for each in ranking.placed[1:])


def test_turns_end_when_everything_is_settled_and_do_not_use_up_the_time() -> None:
    gpu = SimulatedGpu(NOISES["loud"], 3)
    ranking = ranked(gpu, {"a": 20.0, "b": 20.8}, seconds=60.0)  # no clear loser, which would leave

    assert ranking.rounds <= FEWEST_ROUNDS + 12


def test_turns_end_in_time() -> None:
    gpu = SimulatedGpu(Noise(gaussian=0.2), 3)  # nothing is ever settled with so much noise
    ranking = ranked(gpu, dict.fromkeys("abc", 1000.0), seconds=0.1)

    assert 0.09 < gpu.seconds <= 0.1 + 0.003
    assert len(ranking.placed[0].samples) in (2 * ranking.rounds, 2 * ranking.rounds - 1)


def test_samplers_slower_than_the_time_still_get_a_place_each_from_one_call() -> None:
    gpu = SimulatedGpu(Noise(gaussian=0.0), 0)
    ranking = ranked(gpu, {"slow": 2e6, "fast": 1e6}, seconds=0.5)

    assert gpu.calls == {"slow": 1, "fast": 1}
    assert [each.name for each in ranking.placed] == ["fast", "slow"]
    ratio = ranking.placed[1].ratio
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((2.0, 2.0, 2.0))


def test_one_finalist_is_sampled_until_its_own_interval_is_tight() -> None:
    gpu = SimulatedGpu(NOISES["quiet"], 1)
    ranking = ranked(gpu, {"alone": 20.0}, seconds=60.0)

    (alone,) = ranking.placed
    assert ranking.best == "alone" and alone.interval.is_within(0.01)
    assert gpu.seconds < 0.1


def test_constant_samples_are_a_tie_or_a_difference_at_once() -> None:
    gpu = SimulatedGpu(Noise(gaussian=0.0), 0)
    ranking = ranked(gpu, {"a": 20.0, "same": 20.0, "other": 20.6}, seconds=60.0)

    assert [(each.name, each.tie) for each in ranking.placed] == [("a", False), ("same", True), ("other", False)]
    assert ranking.rounds == FEWEST_ROUNDS


def test_a_difference_below_the_band_is_a_tie_however_certain() -> None:
    placed = ranked(SimulatedGpu(Noise(gaussian=0.0), 0), {"a": 20.0, "b": 20.1}).placed

    assert placed[1].ratio.low == pytest.approx(1.005) and placed[1].tie


def test_what_a_sampler_raises_goes_through() -> None:
    def broken() -> float:
        raise RuntimeError("the device is gone")

    gpu = SimulatedGpu(NOISES["quiet"], 1)
    with pytest.raises(RuntimeError, match="the device is gone"):
        rank_interleaved({"a": gpu.kernel("a", 20.0), "b": broken}, gpu.now, seconds=1.0)
    with pytest.raises(RuntimeError, match="the device is gone"):
        sample_until_tight(broken, gpu.now, seconds=1.0)


@pytest.mark.parametrize("names", [(), ("vendor",)])
def test_where_none_can_be_best_that_is_said(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="nothing to rank"):
        rank_interleaved({name: lambda: 1.0 for name in names}, lambda: 0.0, seconds=1.0, beside=names)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_refused_with_the_remedy(wrong: float) -> None:
    with pytest.raises(ValueError, match="put more launches into each sample"):
        sample_until_tight(lambda: wrong, lambda: 0.0, seconds=1.0)


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_sampling_stops_when_tight_and_the_interval_holds_the_true_median(noise: Noise) -> None:
    held = 0
    for seed in range(TRIALS):
        gpu = SimulatedGpu(Noise(noise.gaussian, noise.outliers, tick_us=noise.tick_us, cold=noise.cold), seed)
        sampling = sample_until_tight(gpu.kernel("a", 20.0), gpu.now, seconds=60.0)
        assert sampling.stopped == "tight"
        assert len(sampling.samples) >= 20
        assert len(sampling.samples) == gpu.calls["a"] - WARM_UPS
        assert sampling.interval.is_within(0.01)
        # Outliers are all slower: they move the true median up by a little.
        true = 20.0 * (1.0 + noise.gaussian * 1.2533 * noise.outliers)
        held += sampling.interval.low <= true + noise.tick_us / 2 and sampling.interval.high >= true - noise.tick_us / 2
    assert held >= 0.9 * TRIALS


def test_sampling_stops_in_time() -> None:
    gpu = SimulatedGpu(Noise(gaussian=0.3), 2)
    sampling = sample_until_tight(gpu.kernel("a", 1000.0), gpu.now, seconds=0.02)

    assert sampling.stopped == "time"
    assert 0.02 <= gpu.seconds < 0.02 + 0.003


@pytest.mark.parametrize("true_us", [0.4e6, 2e6])
def test_a_call_longer_than_the_time_gives_one_sample(true_us: float) -> None:
    gpu = SimulatedGpu(Noise(gaussian=0.0), 0)
    sampling = sample_until_tight(gpu.kernel("a", true_us), gpu.now, seconds=0.3)

    assert gpu.calls["a"] == 1
    assert (sampling.stopped, sampling.samples, sampling.spread) == ("time", (true_us,), 0.0)
    assert sampling.interval == Interval(true_us, true_us, true_us)


def test_a_clear_loser_costs_a_handful_of_samples() -> None:
    gpu = SimulatedGpu(NOISES["heavy tails"], 2)
    sampling = sample_until_tight(gpu.kernel("a", 30.0), gpu.now, seconds=60.0, best=20.0)

    assert (sampling.stopped, gpu.calls["a"]) == ("loser", WARM_UPS + FEWEST_SAMPLES)


def test_one_whose_interval_reaches_into_the_margin_is_no_loser_yet_though_its_median_is_beyond_it() -> None:
    sample = itertools.chain([24.0] * WARM_UPS, itertools.cycle([22.0, 24.0, 24.0]))
    sampling = sample_until_tight(lambda: next(sample), lambda: 0.0, seconds=1.0, best=20.0)

    first = sampling.samples[:FEWEST_SAMPLES]
    assert min(first) < LOSER_MARGIN * 20.0 < interval(first).median
    assert sampling.stopped == "loser" and len(sampling.samples) > FEWEST_SAMPLES


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_one_as_fast_as_the_best_is_never_a_loser(noise: Noise) -> None:
    for seed in range(TRIALS):
        gpu = SimulatedGpu(noise, seed)
        assert sample_until_tight(gpu.kernel("a", 20.0), gpu.now, seconds=0.1, best=20.0).stopped != "loser"


def test_one_a_little_slower_than_the_best_is_measured_to_the_end() -> None:
    gpu = SimulatedGpu(NOISES["quiet"], 2)
    slower = 20.0 * (LOSER_MARGIN - 0.02)

    assert sample_until_tight(gpu.kernel("a", slower), gpu.now, seconds=60.0, best=20.0).stopped == "tight"


# Conover, Practical Nonparametric Statistics: ranks of the 95 % interval of a median, from binomial tables.
@pytest.mark.parametrize(("count", "low", "high"), [(6, 1, 6), (9, 2, 8), (20, 6, 15), (100, 40, 61), (1000, 469, 532)])
def test_the_interval_s_ranks_are_those_of_the_binomial_distribution(count: int, low: int, high: int) -> None:
    estimate = interval([float(number) for number in range(count, 0, -1)])

    assert (estimate.median, estimate.low, estimate.high) == ((count + 1) / 2, low, high)


def test_with_fewer_than_six_samples_all_of_them_are_the_interval() -> None:
    assert interval([3.0, 1.0, 2.0, 9.0]) == Interval(2.5, 1.0, 9.0)
    assert interval([3.0]) == Interval(3.0, 3.0, 3.0)
    with pytest.raises(ValueError, match="no samples"):
        interval([])


def test_the_interval_holds_the_median_of_skewed_samples_in_95_per_cent() -> None:
    random = np.random.default_rng(7)
    held = 0
    for _ in range(1000):
        estimate = interval(list(random.lognormal(0.0, 0.5, 25)))
        held += estimate.low <= 1.0 <= estimate.high

    assert 940 <= held <= 990


def test_the_spread_is_the_distance_of_the_quartiles_over_the_median() -> None:
    assert spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.2)
    assert spread([5.0, 5.0, 5.0]) == 0.0
