"""Outputs of int64 are compared as integers: float64 does not hold them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from codegen.arrays import compared
from codegen.plan.verification_plan import OutputCheck, check_output
from tests.support.gpu.strict_arrays import on_device, strict_namespace

LARGE = 2**62
ENDS = np.array([2**63 - 1, -(2**63)])


def check(got: object, expected: object, bound: int = 0, *, exact: bool = False) -> OutputCheck:
    result = np.asarray(expected, np.int64)
    return check_output(np.asarray(got, np.int64), result, np.full_like(result, bound), exact=exact)


def test_a_difference_that_float64_does_not_see_is_seen() -> None:
    assert float(LARGE) == float(LARGE + 1)
    verdict = check([LARGE, LARGE + 1], [LARGE, LARGE])
    assert (verdict.wrong, verdict.index, verdict.got, verdict.expected) == (1, (1,), LARGE + 1, LARGE)
    assert f"out[1] = {LARGE + 1}, expected {LARGE}" in verdict.sentence()
    assert json.loads(json.dumps(verdict.got)) == LARGE + 1
    assert check([LARGE, -LARGE], [LARGE, -LARGE]).ok


@pytest.mark.parametrize(("error", "right"), [(3, True), (-3, True), (4, False), (-4, False)])
def test_within_a_tolerance_an_error_either_way_is_right(error: int, right: bool) -> None:
    verdict = check([LARGE + error, 0], [LARGE, 0], 3)
    assert (verdict.ok, verdict.max_error, verdict.error_bound) == (right, abs(error), 3)
    assert verdict.max_ratio == abs(error) / 3


def test_an_exact_run_allows_nothing() -> None:
    assert not check([1], [0], 3, exact=True).ok
    assert check([1], [1], 3, exact=True).ok


def test_the_ends_of_the_ring_meet() -> None:
    verdict = check(ENDS, ENDS[::-1], 1)
    assert verdict.ok and verdict.max_error == 1
    assert not check(ENDS, [0, 0], 2**62).ok


def test_int64_stays_what_it_is_and_everything_else_becomes_float64() -> None:
    alone = np.array([LARGE + 1])
    assert compared([(alone, "int64")]) is alone
    assert compared([(alone.astype(np.int32), "int32")]).dtype == np.float64
    both = compared([(np.ones((2, 2), np.float32), "float32"), (np.array([7]), "int64")])
    assert both.dtype == np.float64 and both.tolist() == [1, 1, 1, 1, 7]


def test_on_a_device_the_check_is_the_same() -> None:
    here = check([LARGE, 5], [LARGE, 7], 1)
    with strict_namespace():
        arrays = (on_device(np.array(values)) for values in ([LARGE, 5], [LARGE, 7], [1, 1]))
        assert check_output(*arrays, exact=False) == here
