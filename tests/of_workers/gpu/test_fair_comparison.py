"""Comparisons favour none: on a simulated GPU with an L2, samples that cost time, and noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from tests.support.gpu.simulated_l2 import Kernel, L2Gpu
from workers.gpu.compare import limited_by, unsteady
from workers.gpu.samplers import SAMPLE_US, WARM_UP_US, Compared, compare_samplers, rough_us, samplers, with_doubt
from workers.gpu.sampling import Interval, Placed, Ranking, is_tie

SECONDS = 0.3  # of each that takes turns, as `CUKILN_MEASURE_SECONDS` has it
NOISES = (0.002, 0.005, 0.01)
SIZES = [(280_000, 3.0), (12_600_000, 70.0), (50_000_000, 120.0), (200_000_000, 900.0)]
# A sample of these is of a part of the sets, which the L2 holds: the next one is of others, whichever kernel has it.
PARTS = [(3_000_000, 200.0), (1_000_000, 500.0), (12_600_000, 400.0)]
VENDOR = Kernel("vendor", 0.0, "vendor's")


def compared(gpu: L2Gpu, *kernels: Kernel) -> Compared:
    calls = {kernel.name: gpu.calls(kernel) for kernel in kernels}
    rough = {name: rough_us(gpu, each) for name, each in calls.items()}  # type: ignore[arg-type]
    turns = samplers(gpu, calls, cold=gpu.cold, rough=rough)  # type: ignore[arg-type]
    beside = {"vendor"} & calls.keys()
    seconds = SECONDS * len(kernels)
    return compare_samplers(turns, gpu.now, seconds=seconds, beside=beside, state=gpu.forget_hits)


# --- the L2


@pytest.mark.parametrize(("set_bytes", "us"), [*SIZES, *PARTS, (3_000, 2.0), (40_000, 2.0)])
def test_the_share_of_runs_that_find_their_operands_in_the_l2_is_equal_for_all(set_bytes: int, us: float) -> None:
    gpu = L2Gpu(set_bytes, sample_us=4.0)
    shares: list[float] = []

    def state() -> dict[str, object]:  # before the turns, and after them
        shares.extend(gpu.hits[name] / gpu.launches[name] for name in gpu.launches)
        return gpu.forget_hits()

    kernels = [Kernel(name, us * factor) for name, factor in (("a", 1.0), ("b", 1.01), ("c", 1.2), ("d", 1.6))]
    kernels.append(Kernel("vendor", us * 1.1, "vendor's"))
    calls = {kernel.name: gpu.calls(kernel) for kernel in kernels}
    rough = {name: rough_us(gpu, each) for name, each in calls.items()}  # type: ignore[arg-type]
    turns = samplers(gpu, calls, cold=gpu.cold, rough=rough)  # type: ignore[arg-type]
    compare_samplers(turns, gpu.now, seconds=0.3, beside={"vendor"}, state=lambda: (state(), {})[1])
    of_turns = shares[-len(kernels) :]
    assert max(of_turns) - min(of_turns) <= 0.01
    if gpu.cold:
        assert max(of_turns) == 0.0


# --- ratios


@dataclass(frozen=True)
class Pair:
    """Two kernels whose true ratio is known; `gpu` as the pair finds it."""

    gpu: L2Gpu
    us: float
    ratio: float

    @property
    def slower(self) -> Placed:
        """The one that is not the best, or counts as such."""
        other = Kernel("other", self.us * self.ratio)
        ranking = compared(self.gpu, Kernel("best", self.us), other).ranking
        (placed,) = (entry for entry in ranking.placed if entry.name != ranking.best)
        if ranking.best == "best":
            return placed
        return Placed("other", placed.interval, inverted(placed.ratio), placed.tie, placed.samples)


def inverted(ratio: Interval) -> Interval:
    return Interval(1 / ratio.median, 1 / ratio.high, 1 / ratio.low)


def pairs(count: int, noise: float, ratio: float | None = None) -> Iterator[Pair]:
    """Of any size, with samples that cost up to 30 µs."""
    for seed in range(count):
        random = np.random.default_rng([seed, int(noise * 1e4)])
        set_bytes, us = SIZES[seed % len(SIZES)]
        us *= random.uniform(0.7, 1.4)
        gpu = L2Gpu(set_bytes, sample_us=random.uniform(0.0, 30.0), noise=noise, seed=seed)
        yield Pair(gpu, us, random.uniform(1.0, 1.1) if ratio is None else ratio)


def held(count: int, noise: float) -> int:
    """How many intervals hold the true ratio."""
    return sum((slower := pair.slower).ratio.low <= pair.ratio <= slower.ratio.high for pair in pairs(count, noise))


def told_apart(count: int, noise: float, ratio: float) -> int:
    """How many intervals do not hold 1, to the right side of it, and are no tie."""
    return sum((slower := pair.slower).ratio.low > 1.0 and not slower.tie for pair in pairs(count, noise, ratio))


@pytest.mark.parametrize("noise", NOISES)
def test_a_few_intervals_hold_the_true_ratio_and_tell_two_per_cent(noise: float) -> None:
    assert held(8, noise) >= 7
    assert told_apart(4, noise, 1.02) == 4
    assert told_apart(4, noise, 1.0) == 0


@pytest.mark.long
@pytest.mark.parametrize("noise", NOISES)
def test_the_interval_holds_the_true_ratio_in_93_of_100(noise: float) -> None:
    assert held(100, noise) >= 93


@pytest.mark.long
@pytest.mark.parametrize("noise", NOISES)
def test_two_per_cent_are_distinguished_from_nothing(noise: float) -> None:
    assert told_apart(100, noise, 1.02) >= 95
    assert told_apart(100, noise, 1.0) <= 1


def test_the_doubt_of_what_a_sample_costs_is_in_the_ratio_to_the_vendor_too() -> None:
    entry = Placed("a", Interval(10.0, 10.0, 10.0), Interval(1.0, 1.0, 1.0), False, (), {"v": Interval(2.0, 2.0, 2.0)})
    other = Placed("b", Interval(9.9, 9.8, 10.0), Interval(1.012, 1.011, 1.013), False, ())
    beside = Placed("v", Interval(20.0, 20.0, 20.0), Interval(2.0, 2.0, 2.0), False, ())
    best, near, _ = with_doubt(Ranking((entry, other, beside), 8, "a"), 2.0).placed
    assert best.beside["v"].median == 2.0 and not best.tie
    # A time of 10 may be 8 or 12, one of 20 then 18 or 22.
    assert best.beside["v"].low < 2.0 * (22 / 20) / (12 / 10) and best.beside["v"].high > 2.0 * 22 / 20
    assert near.tie == is_tie(near.ratio)


# --- samples


@pytest.mark.parametrize(("set_bytes", "us"), SIZES)
def test_samples_take_a_millisecond_and_as_many_launches_each_and_their_cost_is_taken_off(
    set_bytes: int, us: float
) -> None:
    gpu = L2Gpu(set_bytes, sample_us=25.0)
    kernels = Kernel("a", us), Kernel("b", 1.3 * us), Kernel("vendor", 0.8 * us, "vendor's")
    calls = {kernel.name: gpu.calls(kernel) for kernel in kernels}
    turns = samplers(gpu, calls, cold=gpu.cold, rough={"a": us, "b": 1.3 * us, "vendor": 0.8 * us})  # type: ignore[arg-type]
    assert len({sampler.launches for sampler in turns.values()}) == 1
    assert min(sampler.sample_us() for sampler in turns.values()) >= SAMPLE_US
    outcome = compare_samplers(turns, gpu.now, seconds=0.3, beside={"vendor"})
    assert outcome.cost.us == pytest.approx(25.0) and outcome.ranking.best == "a"
    times = {entry.name: entry.interval.median for entry in outcome.ranking.placed}
    assert times == pytest.approx({"a": us, "b": 1.3 * us, "vendor": 0.8 * us})


def test_the_gpu_works_for_25_ms_before_anything_counts() -> None:
    gpu = L2Gpu(12_600_000)
    calls = gpu.calls(Kernel("a", 70.0))
    turns = samplers(gpu, {"a": calls}, cold=True, rough={"a": rough_us(gpu, calls)})  # type: ignore[arg-type]
    began, seen = gpu.now(), list[float]()
    compare_samplers(turns, gpu.now, seconds=0.1, state=lambda: (seen.append(gpu.now()), {})[1])  # type: ignore[func-returns-value]
    assert seen[0] - began >= WARM_UP_US * 1e-6


# --- a GPU that changes


def placed(*samples: float) -> Placed:
    known = Interval(1.0, 1.0, 1.0)
    return Placed("", known, known, False, samples)


STEADY = placed(*[10.0, 10.1] * 8)


@pytest.mark.parametrize(
    ("before", "after", "turns", "reasons"),
    [
        ({}, {}, [STEADY], []),
        ({"nvml": "not installed"}, {"nvml": "not installed"}, [placed(1.0)], []),
        ({"throttle": ["gpu_idle"], "sm_mhz": 1980}, {"throttle": [], "sm_mhz": 1965}, [STEADY], []),
        ({"throttle": []}, {"throttle": ["sw_power_cap"]}, [STEADY], ["throttling began: sw_power_cap"]),
        ({"throttle": ["hw_slowdown"]}, {"throttle": ["gpu_idle"]}, [STEADY], ["throttling ended: hw_slowdown"]),
        ({"throttle": ["sw_power_cap"]}, {"throttle": ["sw_power_cap", "gpu_idle"]}, [STEADY], []),
        (
            {"throttle": ["sw_power_cap", "hw_slowdown"]},
            {"throttle": ["sw_power_cap", "sync_boost"]},
            [STEADY],
            ["throttling began: sync_boost", "throttling ended: hw_slowdown"],
        ),
        ({"sm_mhz": 1980}, {"sm_mhz": 1755}, [STEADY], ["the clock went from 1980 to 1755 MHz"]),
        (
            {},
            {},
            [placed(*[10.0] * 8, *[11.0] * 8), placed(*[20.0] * 8, *[22.0] * 8)],
            ["all times changed by +10.0% between the first half of the rounds and the second"],
        ),
        ({}, {}, [placed(*[10.0] * 8, *[11.0] * 8), STEADY, STEADY], []),  # that is not the GPU
    ],
)
def test_what_changes_during_a_comparison_is_said(
    before: dict[str, object], after: dict[str, object], turns: list[Placed], reasons: list[str]
) -> None:
    assert unsteady(before, after, turns) == reasons


def held_back(us: int, at_us: int, *throttle: str) -> dict[str, object]:
    return {"throttle": list(throttle), "held_back": {"sw_power_cap": {"us": us, "at_us": at_us}}}


@pytest.mark.parametrize(
    ("before", "after", "reasons", "limits"),
    [
        (held_back(500, 0), held_back(500, 1_000_000), [], []),
        (held_back(500, 0), held_back(30_500, 1_000_000), [], []),
        (held_back(500, 0), held_back(400_500, 1_000_000), ["throttling for 40% of the time: sw_power_cap"], []),
        (held_back(500, 0), held_back(990_500, 1_000_000), [], ["sw_power_cap"]),
        (held_back(500, 0, "sw_power_cap"), held_back(990_500, 1_000_000), [], ["sw_power_cap"]),
        (held_back(500, 0, "sw_power_cap"), held_back(400_500, 1_000_000, "sw_power_cap"), [], ["sw_power_cap"]),
        (held_back(500, 0), held_back(400_500, 0), [], []),  # the library has not looked anew
        (held_back(500, 0), {}, [], []),
    ],
)
def test_throttling_between_the_two_moments_is_said_too(
    before: dict[str, object], after: dict[str, object], reasons: list[str], limits: list[str]
) -> None:
    assert unsteady(before, after, [STEADY]) == reasons
    assert limited_by(before, after) == limits


def test_a_reason_that_holds_throughout_limits_and_changes_nothing() -> None:
    capped = {"throttle": ["gpu_idle", "sw_power_cap"]}
    assert limited_by(capped, capped) == ["sw_power_cap"]
    assert limited_by(capped, {"throttle": ["hw_slowdown"]}) == limited_by({}, {}) == []
