"""A check ends a lowering on the way: by a sentence, which the result keeps, or by what it raises."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import pytest

from codegen.canonical import LARGEST_INTEGER
from codegen.lower import CHECK_EVERY, Lowered, Progress, lower
from codegen.operators.matmul import Matmul
from codegen.search.search import Search
from codegen.search.space import SearchSpace
from codegen.targets import target
from tests.support.fixtures.codegen import matmul
from tests.support.run.each_run import some_each_run

PROBLEM = matmul(m=40, n=64, k=32)
SM_80 = target("sm_80")


@dataclass
class Recorder:
    """A check that lets `let` calls pass, and remembers what each saw."""

    let: int = 10**9
    seen: list[Progress] = field(default_factory=list)

    def __call__(self, progress: Progress) -> str | None:
        self.seen.append(replace(progress))
        return None if len(self.seen) <= self.let else f"stopped at {progress.looked_at}"


def lowered(check: Recorder, **search: Any) -> Lowered:
    return lower(PROBLEM, SM_80, Search(**search), check=check)


@pytest.mark.parametrize("search", some_each_run([{"level": 2}, {"level": 2, "limit": 100}, {"level": 2, "keep": 5}]))
def test_a_check_that_lets_all_pass_changes_nothing(search: dict[str, Any]) -> None:
    check = Recorder()
    assert lowered(check, **search) == lower(PROBLEM, SM_80, Search(**search))
    assert check.seen[0] == Progress(check.seen[0].space)
    looked_at = [progress.looked_at for progress in check.seen]
    assert looked_at == [CHECK_EVERY * number for number in range(len(looked_at))]
    assert len(looked_at) > 1
    assert all(progress.candidates <= search.get("keep", progress.looked_at) for progress in check.seen)
    assert check.seen[-1].candidates > 0


def test_the_sentence_of_a_check_ends_the_lowering_with_what_was_counted_until_then() -> None:
    result = lowered(Recorder(let=3), level=2)
    assert result.candidates == ()
    assert result.why_empty == f"stopped at {3 * CHECK_EVERY}"
    assert 0 < sum(rejection.count for rejection in result.rejections.values()) <= 3 * CHECK_EVERY
    assert result.space_size == lower(PROBLEM, SM_80, Search(level=2, limit=1)).space_size


def test_a_check_that_objects_at_once_has_nothing_looked_at() -> None:
    result = lowered(Recorder(let=0), level=2)
    assert (result.why_empty, result.rejections) == ("stopped at 0", {})


def test_what_a_check_raises_ends_the_lowering() -> None:
    def check(progress: Progress) -> str | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lower(PROBLEM, SM_80, Search(level=2), check=check)


def test_a_sample_asks_also_where_it_passes_over_kernels_that_have_no_more_launches() -> None:
    once = SearchSpace((("a", tuple(range(1000))),))
    often = SearchSpace((("count", (1, 2)),))
    joined = SearchSpace(limit=1, parts=(once, often), launch_time=frozenset({"count"}))
    parts = tuple(replace(part, launch_time=frozenset({"count"})) for part in joined.parts)
    steps: list[None] = []
    walk = replace(joined, parts=parts).walk(partial(steps.append, None))
    schedules = list(islice(walk, 1001))
    assert len(steps) == len(set(schedules)) == 1001  # each kernel once
    assert len(list(walk)) == 1
    assert len(steps) == 2 * 1001


def test_a_size_that_json_cannot_hold_is_shown_as_the_largest_that_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Matmul.space

    def copies(self: Matmul, *arguments: Any) -> SearchSpace:
        space = own(self, *arguments)
        inner = space
        for _ in range(30):
            inner = SearchSpace(parts=(inner,) * 10)
        return replace(inner, limit=space.limit, first=space.first)

    monkeypatch.setattr(Matmul, "space", copies)
    lowered = lower(PROBLEM, SM_80, Search(level=1, limit=1))
    assert len(lowered.candidates) == 1
    assert lowered.space_size == LARGEST_INTEGER
