"""What each run of `make test` has some of, by its seed (CUKILN_TEST_SEED): rows of a test, and half of the tests that
take half a CPU second or more. The others are long; of an even seed and the next one each run has the other's half.

With CUKILN_TEST_ROWS=none all are long, as `make test-long` has it: that of its own seed, too.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

Test = TypeVar("Test", bound=Callable[..., None])
BY_TURNS = frozenset(Path(__file__).with_name("by_turns.txt").read_text(encoding="utf-8").split())
"""By CPU seconds, children included; without those that are the only one of their subject."""
SOME_ROWS = os.environ.get("CUKILN_TEST_ROWS") != "none"


def some_each_run(rows: Sequence[Any], count: int = 1) -> list[Any]:
    """All rows, as parameters of a test: a tuple is one of several arguments. Others for other lists, by how their rows
    print: alike in every process."""
    assert count > 0 and " at 0x" not in f"{list(rows)}", "rows that print otherwise in another process"
    by_seed = random.Random(f"{os.environ['CUKILN_TEST_SEED']} {list(rows)}")
    some = by_seed.sample(range(len(rows)), count) if SOME_ROWS else []
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=() if place in some else pytest.mark.long)
        for place, row in enumerate(rows)
    ]


def one_each_run(subject: str, number: int) -> Callable[[Test], Test]:
    """Of whole tests with one subject each run has those of one number, 0 or 1."""
    return lambda test: test if turn(subject) == number else pytest.mark.long(test)


def mark_out_of_turn(items: Sequence[pytest.Item]) -> None:
    """Each row by itself."""
    for item in items:
        if item.nodeid.removeprefix("tests/").partition("[")[0] in BY_TURNS and turn(item.nodeid) != 0:
            item.add_marker(pytest.mark.long)


def turn(subject: str, of: int = 2) -> int | None:
    """Which of so many this run has of a subject; None where all are long. So many runs have all, if the first one's
    seed is a multiple of the number and the others' follow it."""
    seed = int(os.environ["CUKILN_TEST_SEED"])
    return (random.Random(f"{seed // of} {subject}").randrange(of) + seed) % of if SOME_ROWS else None


def rows_using(fixture: str, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Arguments of the module's tests that this run has selected and that take the fixture."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    return [
        item.callspec.params
        for item in items
        if item.module is request.module and fixture in item.fixturenames and hasattr(item, "callspec")
    ]
