"""The page on rings has the predicted times of today."""

from __future__ import annotations

from tests.repo.ring_page import PAGE, with_tables


def test_the_page_has_the_predicted_times() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text, "python -m tests.repo.ring_page writes the tables"
