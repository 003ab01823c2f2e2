"""The page on rings has the predicted times of today."""

from __future__ import annotations

import pytest

from tests.repo.ring_page import PAGE, float64_limbs, with_tables


def test_the_page_has_the_predicted_times() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "python -m tests.repo.ring_page writes the tables"


@pytest.mark.parametrize(
    ("bits", "k", "count"),
    [(64, 170, 3), (64, 171, 4), (64, 524_304, 4), (64, 524_305, 5), (32, 1_048_608, 2), (32, 1_048_609, 3)],
)
def test_limbs_of_float64_are_the_fewest_whose_sums_it_holds(bits: int, k: int, count: int) -> None:
    """The page's bounds; with every limb at its largest the sum of a diagonal, term by term, is exact in float64."""
    assert float64_limbs(bits, k) == count
    largest = 2 ** -(-bits // count) - 1
    total = count * k * largest**2
    assert int(float(total)) == total < 2**53
    assert (count - 1) * k * (2 ** -(-bits // (count - 1)) - 1) ** 2 >= 2**53
