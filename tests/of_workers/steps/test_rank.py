"""What measured times say: tie-adjusted times, the runner-up."""

from __future__ import annotations

from typing import Any

import pytest

from cukiln.types import Comparison, Contender, Measurement
from storage.entities.pareto_front import Point
from workers.steps.rank import is_whole, runner_up, timed, without


def measurement(us: float, low: float | None = None, high: float | None = None) -> Measurement:
    return Measurement(
        median_us=us, low_us=us if low is None else low, high_us=us if high is None else high, spread=0.01, samples=30,
        launches_per_sample=10, cold=True, stopped="tight", device="Simulated GPU", uuid="GPU-0", driver="1",
        before={}, after={}, measured_at=0.0,
    )  # fmt: skip


def comparison(*placed: tuple[str, float, bool], vendor: Any = None) -> Comparison:
    """Of (candidate, microseconds, tie), fastest first."""
    best = placed[0][1]
    found = [
        Contender(
            candidate=name, median_us=us, low_us=us - 0.1, high_us=us + 0.1, ratio=us / best, ratio_low=us / best,
            ratio_high=us / best, tie=tie,
        )
        for name, us, tie in placed
    ]  # fmt: skip
    return Comparison(
        contenders=found, vendor=vendor, rounds=9, cold=True, device="Simulated GPU", uuid="GPU-0", driver="1",
        before={}, after={}, measured_at=1.0,
    )  # fmt: skip


def alone(**us: float) -> dict[str, tuple[float, Measurement | None]]:
    return {name: (time, measurement(time)) for name, time in us.items()}


# ---- times


def test_without_a_comparison_each_has_the_time_that_was_measured_alone() -> None:
    times = timed(alone(a=5.0, b=6.0), None)
    assert [(time.us, time.tie_adjusted_us, time.compared) for time in times.values()] == [
        (5.0, 5.0, False),
        (6.0, 6.0, False),
    ]


def test_the_comparison_outweighs_what_was_measured_alone_and_a_tie_counts_as_the_best_time() -> None:
    times = timed(alone(a=5.0, b=6.0, c=7.0, d=8.0), comparison(("b", 5.5, True), ("a", 5.6, True), ("c", 7.5, False)))
    assert {name: (each.us, each.tie_adjusted_us) for name, each in times.items()} == {
        "a": (5.6, 5.5), "b": (5.5, 5.5), "c": (7.5, 7.5), "d": (8.0, 8.0)
    }  # fmt: skip
    assert [name for name, each in times.items() if each.compared] == ["a", "b", "c"]
    assert isinstance(times["a"].measurement, Contender)
    assert isinstance(times["d"].measurement, Measurement)


def test_a_finalist_that_does_not_count_as_right_any_more_has_no_time() -> None:
    assert set(timed(alone(a=5.0), comparison(("b", 4.0, True), ("a", 5.0, False)))) == {"a"}
    assert [
        contender.candidate for contender in without(comparison(("b", 4.0, True), ("a", 5.0, False)), ["b"]).contenders
    ] == ["a"]


def test_a_front_that_was_compared_in_part_is_not_whole() -> None:
    points = [Point("a", 5.0, 64, True), Point("b", 6.0, 0, True)]
    both = timed(alone(a=5.0, b=6.0), comparison(("a", 5.0, True), ("b", 6.0, False)))
    assert is_whole(points, both)
    assert not is_whole(points, timed(alone(a=5.0, b=6.0), comparison(("a", 5.0, True))))
    assert is_whole(points, timed(alone(a=5.0, b=6.0), None))


# ---- the runner-up


@pytest.mark.parametrize(
    ("winner", "second", "margin", "tie"),
    [("a", "b", 0.01, True), ("b", "a", 1 / 1.01 - 1, True), ("c", "a", 10 / 12 - 1, False)],
)
def test_the_runner_up_is_the_fastest_of_the_other_finalists(
    winner: str, second: str, margin: float, tie: bool
) -> None:
    compared = comparison(("a", 10.0, True), ("b", 10.1, True), ("c", 12.0, False))
    times = timed(alone(a=10.0, b=10.0, c=12.0, outside=1.0), compared)
    found = runner_up(winner, times[winner], times, compared)
    assert found is not None
    assert (found.candidate, found.tie) == (second, tie)
    assert found.margin == pytest.approx(margin)
    assert (found.low, found.high) == (pytest.approx(margin), pytest.approx(margin))


def interval(candidate: str, us: float, ratio: float, low: float, high: float) -> Contender:
    times = {"median_us": us, "low_us": us, "high_us": us}
    ratios = {"ratio": ratio, "ratio_low": low, "ratio_high": high}
    return Contender(candidate=candidate, **times, **ratios, tie=False)


@pytest.mark.parametrize(
    ("winner", "margin", "ends"),
    # `b` is slower by samples of the same rounds; the medians of all samples lie farther apart.
    [("a", 0.02, (0.015, 0.03)), ("b", 1 / 1.02 - 1, (1 / 1.03 - 1, 1 / 1.015 - 1)), ("c", None, (None, None))],
)
def test_the_margin_has_the_interval_of_samples_of_the_same_rounds(
    winner: str, margin: float | None, ends: tuple[float | None, float | None]
) -> None:
    three = [
        interval("a", 10.0, 1.0, 1.0, 1.0),
        interval("b", 10.4, 1.02, 1.015, 1.03),
        interval("c", 11, 1.1, 1.1, 1.1),
    ]
    compared = comparison(("a", 10.0, False)).model_copy(update={"contenders": three})
    if winner == "c":
        compared = without(compared, ["a"])  # what the ratios are to
    times = timed(alone(a=10.0, b=10.4, c=11.0), compared)
    second = runner_up(winner, times[winner], times, compared)
    assert second is not None
    assert second.margin == pytest.approx(10.4 / 11 - 1 if margin is None else margin)
    assert (second.low, second.high) == pytest.approx(ends)


@pytest.mark.parametrize(("low", "tie"), [(10.5, True), (10.6, False)])
def test_without_a_comparison_those_whose_intervals_overlap_tie(low: float, tie: bool) -> None:
    times = timed({"a": (10.0, measurement(10.0, 9.9, 10.5)), "b": (11.0, measurement(11.0, low, 11.2))}, None)
    second = runner_up("a", times["a"], times, None)
    assert second is not None
    assert (second.candidate, second.us, second.tie) == ("b", 11.0, tie)


def test_a_candidate_that_was_alone_right_has_no_runner_up() -> None:
    times = timed(alone(a=10.0), comparison(("a", 10.0, True)))
    assert runner_up("a", times["a"], times, comparison(("a", 10.0, True))) is None
