"""Numbers of things, in words: also of one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cukiln.counted import counted

ROOT = Path(__file__).parents[2]
SHOWN = [*(ROOT / "client/cukiln/cli").glob("*.py"), *(ROOT / "service/pages/templates").glob("*.html")]
NOUNS = "blob|build|byte|candidate|file|group|job|kernel|measurement|problem|record|task|verdict|worker"


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "kernel", "0 kernels"),
        (1, "kernel", "1 kernel"),
        (2, "kernel", "2 kernels"),
        (1204, "byte", "1,204 bytes"),
        (1, "library", "1 library"),
        (2, "library", "2 libraries"),
        (2, "survey day", "2 survey days"),
    ],
)
def test_a_noun_follows_its_number(count: int, noun: str, text: str) -> None:
    assert counted(count, noun) == text


@pytest.mark.checkout
def test_no_page_and_no_command_writes_a_plural_behind_a_number_by_hand() -> None:
    by_hand = re.compile(rf"\}}\}}? (?:{NOUNS}|librarie)s\b")
    assert SHOWN
    assert {path.name: by_hand.findall(path.read_text()) for path in SHOWN if by_hand.search(path.read_text())} == {}
