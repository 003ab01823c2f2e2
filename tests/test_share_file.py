"""Which waiting groups share a file: the small ones, as many as leave every worker something to do."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.compile_model import FIXED_BYTES, FIXED_SECONDS, PRIOR
from codegen.group import MAX_BYTES, MAX_KERNELS, MAX_SECONDS, group, longest_group
from codegen.kernel import Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.search import Search
from codegen.share_file import Small, sharing
from codegen.targets import target

SHAPE = {"operator": "matmul", "m": 256, "n": 256, "k": 256, "dtype": "float32"}


@cache
def kernels() -> tuple[Kernel, ...]:
    lowered = lower(operator("matmul").parse(SHAPE), target("sm_90a"), Search(level=2, limit=400, seed=1))
    return tuple(dict.fromkeys(candidate.kernel for candidate in lowered.candidates))


def pairs(count: int) -> list[Small]:
    """Groups of two kernels each, no kernel in two of them."""
    return [Small(kernels()[2 * place : 2 * place + 2]) for place in range(count)]


def taken(groups: list[Small], workers: int = 1, max_bytes: float = MAX_BYTES) -> list[int]:
    return sharing(groups[0], groups[1:], workers=workers, model=PRIOR, max_kernels=MAX_KERNELS, max_bytes=max_bytes)


def added(small: Small) -> float:
    return PRIOR.seconds(small.kernels) - FIXED_SECONDS


def test_a_few_small_groups_share_one_file_though_several_workers_could_have_one_each() -> None:
    assert taken(pairs(3), workers=1) == [0, 1]
    assert sum(map(added, pairs(2))) / 2 < FIXED_SECONDS, "a second file would cost more than it saves"
    assert taken(pairs(2), workers=8) == [0]


def test_many_small_groups_are_left_to_the_workers_that_could_do_them() -> None:
    groups = pairs(16)
    files = len(group([kernel for one in groups for kernel in one.kernels], workers=2))
    assert files == 2
    mine = [groups[0], *(groups[1 + place] for place in taken(groups, workers=2))]
    share = sum(map(added, groups)) / files
    assert sum(map(added, mine)) == pytest.approx(share, abs=max(map(added, groups)))
    assert len(taken(groups, workers=1)) == 15


def test_nothing_is_taken_from_a_worker_for_which_a_file_pays() -> None:
    big = [Small(kernels()[:8]), Small(kernels()[8:16])]
    assert len(group([*big[0].kernels, *big[1].kernels], workers=2)) == 2
    assert taken(big, workers=2) == []
    assert taken(big, workers=1) == [0]


def test_a_file_keeps_to_the_shortest_budget_of_its_jobs() -> None:
    seconds = longest_group(10.0)
    assert seconds < MAX_SECONDS
    groups = [*pairs(16)[:15], Small(pairs(16)[15].kernels, max_seconds=seconds)]
    for places in (taken(groups), taken([groups[15], *groups[:15]])):
        assert 0 < len(places) < 15
    hurried = taken([groups[15], *groups[:15]])
    file = [*groups[15].kernels, *(kernel for place in hurried for kernel in groups[place].kernels)]
    assert PRIOR.seconds(file) <= seconds


def test_a_file_keeps_to_the_memory_of_one_compiler() -> None:
    groups = pairs(6)
    most = FIXED_BYTES + 1.5 * (PRIOR.bytes([k for one in groups[:2] for k in one.kernels]) - FIXED_BYTES)
    places = taken(groups, max_bytes=most)
    assert 0 < len(places) < 5
    assert PRIOR.bytes([*groups[0].kernels, *(k for place in places for k in groups[1 + place].kernels)]) <= most


def test_a_kernel_is_in_a_file_once() -> None:
    first, second = pairs(2)
    assert taken([first, Small((first.kernels[0], *second.kernels)), second]) == [1]


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=30), workers=st.integers(1, 8))
def test_any_groups_share_within_the_caps_and_leave_as_many_as_pay(sizes: list[int], workers: int) -> None:
    groups, first = [], 0
    for size in sizes:
        groups.append(Small(kernels()[first : first + size]))
        first += size
    places = taken(groups, workers)
    assert places == sorted(set(places))
    file = [*groups[0].kernels, *(kernel for place in places for kernel in groups[1 + place].kernels)]
    assert len(file) <= MAX_KERNELS
    assert PRIOR.seconds(file) <= MAX_SECONDS or not places
    files = len(group([kernel for one in groups for kernel in one.kernels], workers=workers))
    assert 1 + len(groups[1:]) - len(places) >= min(files, len(groups))
