"""Predictions beside measurements: rank correlation with ties, the best of the best predicted, the split of shapes."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.prediction_quality import (
    ENOUGH,
    Pairs,
    figures,
    kept_share,
    pairs_of,
    quality,
    ranks,
    set_of,
    spearman,
)
from benchmarks.shapes import shape_sets


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        # 1 - 6 Σd² / (n (n² - 1)) with d² = 1, 1, 1, 1, 0 and n = 5: 1 - 24/120.
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 0.8),
        # Hours of television against IQ: the worked example of the article "Spearman's rank correlation coefficient" in
        # the English Wikipedia, -29/165.
        ([106, 100, 86, 101, 99, 103, 97, 113, 112, 110], [7, 27, 2, 50, 28, 29, 20, 12, 6, 17], -29 / 165),
        # Ranks 1, 2.5, 2.5, 4 beside 1, 2, 3, 4: 4.5 / sqrt(4.5 · 5).
        ([1, 2, 2, 3], [1, 2, 3, 4], 4.5 / (4.5 * 5) ** 0.5),
    ],
)
def test_the_rank_correlation_has_known_values(first: list[float], second: list[float], expected: float) -> None:
    result = spearman(first, second)
    assert result == pytest.approx(expected, abs=1e-12)
    assert spearman(second, first) == pytest.approx(expected, abs=1e-12)


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    assert ranks([5, 1, 5, 5, 0]) == [4, 2, 4, 4, 1]


@pytest.mark.parametrize("constant", [[3.0, 3.0, 3.0], [1.0]])
def test_values_that_are_all_equal_correlate_with_nothing(constant: list[float]) -> None:
    assert spearman(constant, list(range(len(constant)))) is None


def test_lists_of_two_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 values beside 3"):
        spearman([1, 2], [1, 2, 3])


def test_what_is_kept_is_the_best_of_the_best_predicted() -> None:
    pairs = Pairs("one", predicted=(1, 2, 3, 4), measured=(40, 20, 10, 30))
    assert [kept_share(pairs, count) for count in (1, 2, 3, 9)] == [0.25, 0.5, 1.0, 1.0]


def test_of_equal_predictions_the_slower_counts_first() -> None:
    assert kept_share(Pairs("one", predicted=(1, 1), measured=(10, 20)), 1) == 0.5


def test_the_sets_are_disjoint_stable_and_both_there() -> None:
    names = [shape["name"] for shapes in shape_sets().values() for shape in shapes]
    test = {name for name in names if set_of(name) == "test"}
    assert 0.2 < len(test) / len(names) < 0.5
    # A change of the rule changes which figures may be compared.
    assert [set_of(name) for name in ("a", "b", "c", "llama3_8b/qkv_m16")] == ["fit", "test", "test", "test"]


def measured(name: str, *pairs: tuple[float, float], wrong: int = 0) -> dict[str, Any]:
    """A problem of a results.json."""
    right = [
        {"verdict": "ok", "prediction": {"us": predicted}, "measurement": {"median_us": us}} for predicted, us in pairs
    ]
    other = {"verdict": "incorrect", "prediction": {"us": 0.1}, "measurement": None}
    return {"name": name, "candidates": [*right, *[other] * wrong]}


def test_only_candidates_that_are_right_count() -> None:
    pairs = pairs_of(measured("one", (1, 2), (3, 4), wrong=2))
    assert pairs == Pairs("one", (1, 3), (2, 4))
    assert pairs_of(measured("two", (1, 2))) is None


def test_both_sets_have_means_and_worst_and_say_whether_keeping_is_enough() -> None:
    names = [f"shape{number}" for number in range(40)]
    fit, test = ([name for name in names if set_of(name) == half] for half in ("fit", "test"))
    many = [(float(number), 100.0 + number) for number in range(40)]
    # On one test shape the best of all is predicted last.
    late = [*many, (999.0, 50.0)]
    result = quality([measured(name, *(late if name == test[0] else many)) for name in (*fit, *test)])
    assert (result["fit"]["problems"], result["test"]["problems"]) == (len(fit), len(test))
    assert result["fit"]["spearman"] == {"mean": 1.0, "worst": 1.0}
    assert result["test"]["top_32"]["worst"] == 0.5
    assert result["keeps_enough"]["shapes_below"] == [test[0]]
    assert result["keeps_enough"]["on_every_shape"] is False
    assert result["keeps_enough"]["on_average"] is ((len(test) - 0.5) / len(test) >= ENOUGH)
    assert result["problems"][test[0]]["set"] == "test"


def test_no_shapes_have_no_figures() -> None:
    assert figures([])["spearman"] == {"mean": None, "worst": None}
    assert quality([])["keeps_enough"]["on_every_shape"] is None
