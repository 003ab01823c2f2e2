"""Grouping: each kernel once, longest group first, caps kept, the same whatever the order."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.group import FIXED_SECONDS, group, predicted_seconds
from codegen.kernel import Kernel
from codegen.operators import operator
from tests.fixtures_codegen import kernels


@lru_cache
def some() -> tuple[Kernel, ...]:
    return tuple(kernels(60))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 59), max_size=60), st.integers(0, 9), st.integers(1, 20), st.floats(0.31, 10.0)
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
    assert len(groups) >= min(workers, len(distinct))
    seconds = [predicted_seconds(one) for one in groups]
    assert seconds == pytest.approx(sorted(seconds, reverse=True))
    shuffled = wanted[::-1]
    assert group(shuffled, workers=workers, max_seconds=max_seconds, max_kernels=max_kernels) == groups


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
