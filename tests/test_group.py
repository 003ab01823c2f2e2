"""Grouping: each kernel once, longest group first, caps kept, the same whatever the order."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.compile_cost import FIXED_BYTES, FIXED_SECONDS, kernel_bytes, kernel_seconds
from codegen.group import BUDGET_SHARE, MAX_SECONDS, group, longest_group
from codegen.kernel import Kernel
from codegen.operators import operator
from tests.fixtures_codegen import kernels
from tests.fixtures_compile import probe


def predicted_seconds(kernels: Iterable[Kernel]) -> float:
    return FIXED_SECONDS + sum(map(kernel_seconds, kernels))


@lru_cache
def some() -> tuple[Kernel, ...]:
    return tuple(kernels(60))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 59), max_size=60), st.integers(0, 9), st.integers(1, 20), st.floats(0.41, 10.0)
)  # fmt: skip
def test_any_kernels_are_grouped_once_within_the_caps(
    chosen: list[int], workers: int, max_kernels: int, max_seconds: float
) -> None:
    wanted = [some()[index] for index in chosen]
    groups = group(wanted, workers=workers, max_seconds=max_seconds, max_kernels=max_kernels)
    members = [kernel.id for one in groups for kernel in one]
    distinct = {kernel.id for kernel in wanted}
    assert len(members) == len(set(members))
    assert set(members) == distinct
    assert all(0 < len(one) <= max_kernels for one in groups)
    assert all(len(one) == 1 or predicted_seconds(one) <= max_seconds + 1e-9 for one in groups)
    assert _another_group_does_not_pay(groups, workers)
    seconds = [predicted_seconds(one) for one in groups]
    assert seconds == pytest.approx(sorted(seconds, reverse=True))
    shuffled = wanted[::-1]
    assert group(shuffled, workers=workers, max_seconds=max_seconds, max_kernels=max_kernels) == groups


def _another_group_does_not_pay(groups: list[tuple[Kernel, ...]], workers: int) -> bool:
    """With fewer groups than idle workers, one more saves less than its file costs."""
    count, kernels = len(groups), sum(map(len, groups))
    if count >= min(workers, kernels):
        return True
    whole = sum(kernel_seconds(kernel) for one in groups for kernel in one)
    return whole / count - whole / (count + 1) <= FIXED_SECONDS + 1e-9


def test_no_kernels_make_no_groups() -> None:
    assert group([], workers=4) == []


def test_idle_workers_get_about_equal_work() -> None:
    groups = group(some(), workers=4)
    seconds = [predicted_seconds(one) for one in groups]
    assert len(groups) == 4
    assert seconds[0] < 1.2 * seconds[-1]


def test_predicted_seconds_have_a_fixed_part_and_grow_with_the_unrolled_work() -> None:
    op = operator("matmul")
    small = min(some(), key=op.predicted_compile_seconds)
    large = max(some(), key=op.predicted_compile_seconds)
    assert predicted_seconds([]) == FIXED_SECONDS
    assert predicted_seconds([small, large]) > predicted_seconds([large]) > predicted_seconds([small]) > FIXED_SECONDS
    assert int(large.tunables.get("thread_m")) * int(large.tunables.get("thread_n")) == 64
    assert 0.05 < op.predicted_compile_seconds(large) < 0.3
    plain, fused = kernels(1)[0], kernels(1, epilogue=[{"op": "gelu"}])[0]
    assert op.predicted_compile_seconds(fused) > op.predicted_compile_seconds(plain)


def test_a_group_that_would_be_too_long_is_divided_further() -> None:
    alike = sorted(some(), key=operator("matmul").predicted_compile_seconds)[:3]
    one = predicted_seconds(alike[:1]) - FIXED_SECONDS
    groups = group(alike, workers=1, max_seconds=FIXED_SECONDS + 1.6 * one)
    assert [len(members) for members in groups] == [1, 1, 1]


def test_a_few_small_kernels_stay_together_and_many_go_to_every_idle_worker() -> None:
    small = sorted(some(), key=kernel_seconds)
    assert sum(map(kernel_seconds, small[:3])) < 2 * FIXED_SECONDS
    assert len(group(small[:3], workers=4)) == 1
    assert len(group(small, workers=4)) == 4


def test_where_the_caps_ask_for_more_groups_than_workers_the_last_round_is_full() -> None:
    # Three groups of three seconds on two workers would end after six seconds, four after less than five.
    whole = predicted_seconds(some()) - FIXED_SECONDS
    groups = group(some(), workers=2, max_seconds=FIXED_SECONDS + 0.36 * whole)
    assert len(groups) == 4


def test_a_group_keeps_to_the_memory_of_one_compiler() -> None:
    budget = FIXED_BYTES + 20 * 2**20
    groups = group(some(), workers=1, max_bytes=budget)
    assert all(FIXED_BYTES + sum(map(kernel_bytes, one)) <= budget for one in groups)
    assert len(groups) > 1
    assert sum(map(len, groups)) == len({kernel.id for kernel in some()})


def test_a_kernel_over_every_cap_is_compiled_alone() -> None:
    groups = group(some()[:3], workers=1, max_bytes=1)
    assert [len(one) for one in groups] == [1, 1, 1]


def test_kernels_of_several_operators_share_a_group() -> None:
    mixed = [*some()[:2], probe()]
    (one,) = group(mixed, workers=1)
    assert {kernel.operator for kernel in one} == {"matmul", "probe"}


def test_a_job_with_a_budget_gets_groups_that_are_a_small_part_of_it() -> None:
    assert longest_group(None) == MAX_SECONDS
    assert longest_group(10.0) == 10.0 / BUDGET_SHARE < MAX_SECONDS
    groups = group(some(), workers=1, max_seconds=longest_group(10.0))
    assert len(groups) > len(group(some(), workers=1))
    assert all(len(one) == 1 or predicted_seconds(one) <= longest_group(10.0) + 1e-9 for one in groups)


@given(st.floats(0.0, 1e6))
def test_no_budget_makes_groups_longer_or_so_short_that_most_of_one_is_its_file(budget: float) -> None:
    assert 2 * FIXED_SECONDS <= longest_group(budget) <= longest_group(budget + 1.0) <= MAX_SECONDS
