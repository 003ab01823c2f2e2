"""The operators' pages show the tunables that there are."""

from __future__ import annotations

import pytest

from tests.repo.operator_pages import OPERATORS, page, with_table


@pytest.mark.parametrize("name", OPERATORS)
def test_the_table_is_that_of_the_operator(name: str) -> None:
    text = page(name).read_text(encoding="utf-8")
    assert with_table(name, text) == text, "write it again: python -m tests.repo.operator_pages"
