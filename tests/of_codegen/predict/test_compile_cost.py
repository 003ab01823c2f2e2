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
def test_a_file_is_worth_its_fixed_cost_and_leaves_no_worker_without_work(
    pending: float, workers: int, data: st.DataObject
) -> None:
    seconds = file_seconds(pending, workers, data.draw(st.integers(1, workers))) - FIXED_SECONDS
    assert pending / workers <= seconds + 1e-9
    assert seconds >= min(WORTHWHILE_SECONDS, pending / files_that_pay(pending, workers)) - 1e-9
    assert seconds <= max(pending / workers, WORTHWHILE_SECONDS) + WORTHWHILE_SECONDS / 2


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
