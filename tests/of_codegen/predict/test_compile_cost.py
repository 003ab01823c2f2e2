"""What compiling is predicted to cost, and the files of a stand-alone run: each kernel once, the caps kept."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.predict import compile_cost
from codegen.predict.compile_cost import (
    FIXED_SECONDS,
    MAX_SECONDS,
    files_that_pay,
    in_files,
    kernel_bytes,
    kernel_seconds,
)
from tests.support.fixtures.codegen import kernels
from tests.support.fixtures.compile import probe


def predicted_seconds(kernels: Iterable[Kernel]) -> float:
    return FIXED_SECONDS + sum(map(kernel_seconds, kernels))


@lru_cache
def some() -> tuple[Kernel, ...]:
    return tuple(kernels(60))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 59), max_size=60), st.integers(0, 9), st.integers(1, 20), st.floats(0.41, 10.0)
)  # fmt: skip
def test_any_kernels_are_in_one_file_each_within_the_caps(
    chosen: list[int], workers: int, max_kernels: int, max_seconds: float
) -> None:
    wanted = [some()[index] for index in chosen]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_cost, "MAX_KERNELS", max_kernels)
        patch.setattr(compile_cost, "MAX_SECONDS", max_seconds)
        files = in_files(wanted, workers)
        assert in_files(wanted[::-1], workers) == files
    members = [kernel for file in files for kernel in file]
    assert len(members) == len(set(members))
    assert set(members) == set(wanted)
    assert all(0 < len(file) <= max_kernels for file in files)
    assert all(len(file) == 1 or predicted_seconds(file) <= max_seconds for file in files)
    seconds = [predicted_seconds(file) for file in files]
    assert seconds == pytest.approx(sorted(seconds, reverse=True))


@given(st.floats(0.0, 1e4), st.integers(0, 64))
def test_one_more_file_than_pay_costs_more_than_it_saves(seconds: float, workers: int) -> None:
    files = files_that_pay(seconds, workers)
    assert 1 <= files <= max(1, workers)
    assert files >= workers or seconds / files - seconds / (files + 1) <= FIXED_SECONDS


def test_no_kernels_make_no_files() -> None:
    assert in_files([], workers=4) == []


def test_idle_workers_get_about_equal_work() -> None:
    files = in_files(some(), workers=4)
    seconds = list(map(predicted_seconds, files))
    assert len(files) == 4
    assert seconds[0] < 1.2 * seconds[-1]


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


def test_a_few_small_kernels_stay_together_and_many_go_to_every_idle_worker() -> None:
    small = sorted(some(), key=kernel_seconds)
    assert sum(map(kernel_seconds, small[:3])) < 2 * FIXED_SECONDS
    assert len(in_files(small[:3], workers=4)) == 1
    assert len(in_files(small, workers=4)) == 4


def test_where_the_caps_ask_for_more_files_than_workers_the_last_round_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three files of three seconds on two workers would end after six seconds, four after less than five.
    whole = sum(map(kernel_seconds, some()))
    monkeypatch.setattr(compile_cost, "MAX_SECONDS", FIXED_SECONDS + 0.36 * whole)
    assert len(in_files(some(), workers=2)) == 4


def test_a_kernel_over_the_cap_is_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cost, "MAX_SECONDS", 0.0)
    assert [len(file) for file in in_files(some()[:3], workers=1)] == [1, 1, 1]


def test_kernels_of_several_operators_share_a_file() -> None:
    (file,) = in_files([*some()[:2], probe()], workers=1)
    assert {kernel.operator for kernel in file} == {"matmul", "probe"}


def test_a_full_file_is_far_from_the_memory_that_a_compiler_may_take() -> None:
    whole = compile_cost.FIXED_BYTES + compile_cost.BYTES_PER_SECOND * MAX_SECONDS
    assert whole < compile_cost.MAX_BYTES / 2
