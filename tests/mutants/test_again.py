"""Survivors that were read are written down: no line of `OPEN` is gone, and an argument is of lines that are there."""

from __future__ import annotations

from functools import cache

import pytest

from tests.mutants.arguments import ARGUMENTS, OPEN, Argument, Open
from tests.mutants.changes import sections
from tests.mutants.subjects import SUBJECTS


@cache
def texts() -> dict[str, set[str]]:
    """Of every file that kernels are made of, its lines."""
    lines: dict[str, set[str]] = {}
    for subject in SUBJECTS:
        for file, text in sections(next(iter(subject.kernels().values()))).items():
            lines.setdefault(file, set()).update(text.splitlines())
    return lines


@pytest.mark.parametrize("written", [*ARGUMENTS, *OPEN], ids=lambda written: f"{written.file} {written.text[:40]}")
def test_what_is_written_of_a_line_is_of_a_line_that_is_there(written: Argument | Open) -> None:
    assert any(written.text in line for line in texts()[written.file])
