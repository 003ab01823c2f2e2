"""What compiling is predicted to cost, and how long a file should be."""

from __future__ import annotations

from functools import lru_cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.predict import compile_cost
from codegen.predict.compile_cost import (
    FIXED_SECONDS,
    MAX_SECONDS,
    WORTHWHILE_SECONDS,
    file_seconds,
    files_that_pay,
    kernel_bytes,
    kernel_seconds,
)
from tests.support.fixtures.codegen import kernels


@lru_cache
def some() -> tuple[Kernel, ...]:
    return tuple(kernels(60))


@given(st.floats(0.0, 1e4), st.integers(0, 64))
def test_one_more_file_than_pay_costs_more_than_it_saves(seconds: float, workers: int) -> None:
    files = files_that_pay(seconds, workers)
    assert 1 <= files <= max(1, workers)
    assert files >= workers or seconds / files - seconds / (files + 1) <= FIXED_SECONDS


@given(st.floats(1e-3, 1e4), st.integers(1, 64), st.data())
def test_a_file_is_worth_its_fixed_cost_and_ends_when_the_others_do(
    pending: float, workers: int, data: st.DataObject
) -> None:
    busy = data.draw(st.lists(st.floats(0.0, 100.0), max_size=workers - 1))
    seconds = file_seconds(pending, workers, busy) - FIXED_SECONDS
    rest = pending - seconds
    taken_by_others = sum(max(0.0, seconds - other) for other in busy) + seconds * (workers - 1 - len(busy))
    assert rest <= taken_by_others + 1e-6 * pending, "a worker that is free at its end would find more work"
    assert seconds >= min(WORTHWHILE_SECONDS, pending / files_that_pay(pending, workers - len(busy))) - 1e-9
    is_even = rest == pytest.approx(taken_by_others, abs=1e-6 * pending)
    assert is_even or seconds <= WORTHWHILE_SECONDS + 1e-9 or rest == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("pending", "workers", "busy", "seconds"),
    [(16.0, 2, [], 8.0), (8.0, 2, [8.0], 8.0), (10.0, 2, [2.0], 6.0), (10.0, 2, [20.0], 10.0), (0.5, 2, [], 0.5),
     (12.0, 4, [1.0, 3.0, 50.0], 16 / 3), (40.0, 4, [], 10.0), (3.0, 1, [5.0, 5.0], 3.0)],
)  # fmt: skip
def test_a_file_takes_what_the_other_workers_leave(
    pending: float, workers: int, busy: list[float], seconds: float
) -> None:
    assert file_seconds(pending, workers, busy) == pytest.approx(FIXED_SECONDS + seconds)


def test_predicted_seconds_grow_with_the_unrolled_work_and_memory_with_them() -> None:
    small, large = min(some(), key=kernel_seconds), max(some(), key=kernel_seconds)
    assert int(large.tunables.get("thread_m")) * int(large.tunables.get("thread_n")) == 64
    assert 0.05 < kernel_seconds(large) < 0.3
    plain, fused = kernels(1)[0], kernels(1, epilogue=[{"op": "gelu"}])[0]
    assert kernel_seconds(fused) > kernel_seconds(plain)
    assert kernel_bytes(large) / kernel_bytes(small) == pytest.approx(kernel_seconds(large) / kernel_seconds(small))


def test_a_kernel_costs_something_whatever_its_operator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator("matmul"), "predicted_compile_seconds", lambda kernel: 0.0)
    assert kernel_seconds(some()[0]) > 0 < kernel_bytes(some()[0])


def test_a_full_file_is_far_from_the_memory_that_a_compiler_may_take() -> None:
    whole = compile_cost.FIXED_BYTES + compile_cost.BYTES_PER_SECOND * MAX_SECONDS
    assert whole < compile_cost.MAX_BYTES / 2
