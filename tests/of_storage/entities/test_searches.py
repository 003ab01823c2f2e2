"""Which searches a winner record has covered: what counts as done already, and what of it is written down."""

from __future__ import annotations

from typing import Any

import pytest

from storage.entities.searches import MeasuredUnder, is_covered, merge_searches, search_entry

LEVEL_1, LEVEL_2 = {"level": 1}, {"level": 2}
SAMPLE = {"level": 1, "limit": 8, "seed": 0}


def entry(
    search: dict[str, Any] = LEVEL_1,
    limit: int | None = None,
    generator: str = "today",
    deterministic: bool = False,
    whole: bool = True,
) -> dict[str, Any]:
    return search_entry(search, generator, limit, deterministic=deterministic, whole=whole)


@pytest.mark.parametrize(
    ("done", "asked", "covered"),
    [
        (entry(LEVEL_2), entry(LEVEL_1), True),
        (entry(LEVEL_1), entry(LEVEL_2), False),
        (entry(generator="yesterday"), entry(), False),
        (entry(limit=1024), entry(limit=1024), True),
        (entry(limit=1024), entry(limit=512), True),
        (entry(limit=1024), entry(limit=2048), False),
        (entry(limit=1024), entry(limit=None), False),
        (entry(limit=0), entry(limit=None), False),
        (entry(limit=None), entry(limit=1024), True),
        # A sample takes other schedules where a limit rejects some.
        (entry(SAMPLE, limit=None), entry(SAMPLE, limit=1024), False),
        (entry(SAMPLE, limit=1024), entry(SAMPLE, limit=512), False),
        (entry(SAMPLE, limit=1024), entry(SAMPLE, limit=1024), True),
        ({"search": LEVEL_1, "generator": "today"}, entry(), False),
        ({"search": LEVEL_1, "generator": "today", "workspace_limit_bytes": None}, entry(), True),
        (entry(), entry(deterministic=True), True),
        (entry(deterministic=True), entry(), False),
        (entry(deterministic=True), entry(deterministic=True), True),
        (entry(deterministic=True), entry(limit=64, deterministic=True), True),
        (entry(deterministic=True, limit=64), entry(limit=64), False),
        (entry(SAMPLE), entry(SAMPLE, deterministic=True), False),
        # A front that was thinned has the fastest point of its own policy, and perhaps none for a narrower one.
        (entry(whole=False), entry(), True),
        (entry(LEVEL_2, whole=False), entry(), True),
        (entry(whole=False), entry(limit=1024), False),
        (entry(whole=False), entry(deterministic=True), False),
        (entry(limit=64, whole=False), entry(limit=64), True),
    ],
)
def test_what_covers_what(done: dict[str, Any], asked: dict[str, Any], covered: bool) -> None:
    assert is_covered([done], asked) is covered
    assert is_covered([entry(generator="another"), done], asked) is covered


def test_nothing_is_covered_by_nothing() -> None:
    assert not is_covered([], entry())


@pytest.mark.parametrize(
    ("old", "new", "merged"),
    [
        ([], [], []),
        ([entry()], [entry()], [entry()]),
        ([entry()], [entry(LEVEL_2)], [entry(LEVEL_2)]),
        ([entry(LEVEL_2)], [entry()], [entry(LEVEL_2)]),
        ([entry(limit=64)], [entry()], [entry()]),
        ([entry()], [entry(limit=64)], [entry()]),
        ([entry(LEVEL_1)], [entry(LEVEL_2, limit=64)], [entry(LEVEL_1), entry(LEVEL_2, limit=64)]),
        ([entry(generator="old")], [entry()], [entry()]),
        ([entry(generator="old")], [entry(LEVEL_2)], [entry(LEVEL_2)]),
        ([entry(LEVEL_2, generator="old")], [entry()], [entry(LEVEL_2, generator="old"), entry()]),
        ([entry(limit=None, generator="old")], [entry(limit=64)], [entry(generator="old"), entry(limit=64)]),
        ([entry(LEVEL_2, generator="old"), entry(generator="old")], [], [entry(LEVEL_2, generator="old")]),
        ([entry(deterministic=True)], [entry()], [entry()]),
        ([entry()], [entry(deterministic=True)], [entry()]),
        ([entry(whole=False)], [entry()], [entry()]),
        ([entry()], [entry(whole=False)], [entry()]),
        ([entry(limit=64)], [entry(whole=False)], [entry(limit=64), entry(whole=False)]),
    ],
)
def test_what_another_entry_says_too_is_dropped(
    old: list[dict[str, Any]], new: list[dict[str, Any]], merged: list[dict[str, Any]]
) -> None:
    assert merge_searches(old, new) == merged
    assert merge_searches(merged, new) == merged  # doing it twice changes nothing


def test_the_order_is_that_of_the_work() -> None:
    lists = [entry({"tunables": {"a": [n]}}) for n in range(4)]
    assert merge_searches(lists[:2], lists[2:]) == lists
    assert merge_searches(lists, [lists[1]]) == lists


# ---- on a GPU

OLD, NEW = MeasuredUnder("570.1", "g1"), MeasuredUnder("580.2", "g1")


def on_gpu(under: MeasuredUnder | None, search: dict[str, Any] = LEVEL_1) -> dict[str, Any]:
    return search_entry(search, "today", None, measured=under)


@pytest.mark.parametrize(
    ("done", "live", "covered"),
    [
        (OLD, [OLD], True),
        (OLD, [NEW], False),
        (OLD, [NEW, OLD], True),
        (OLD, [MeasuredUnder("570.1", "g2")], False),
        (OLD, [MeasuredUnder("570.1", None)], True),  # a worker that does not say its test plan
        (None, [OLD], False),
        (OLD, [], True),  # imported: no GPU could measure it anew
        (None, [], True),
    ],
)
def test_what_was_measured_counts_under_the_driver_and_the_test_plan_of_a_live_gpu(
    done: MeasuredUnder | None, live: list[MeasuredUnder], covered: bool
) -> None:
    assert is_covered([on_gpu(done)], entry(), live) is covered


def test_a_search_under_a_new_driver_replaces_the_one_that_it_covers() -> None:
    old = [on_gpu(OLD), on_gpu(OLD, LEVEL_2)]
    assert merge_searches(old[:1], [on_gpu(NEW)]) == [on_gpu(NEW)]
    assert merge_searches(old, [on_gpu(NEW, LEVEL_2)]) == [on_gpu(NEW, LEVEL_2)]
    assert merge_searches(old[1:], [on_gpu(NEW)]) == [on_gpu(OLD, LEVEL_2), on_gpu(NEW)]
