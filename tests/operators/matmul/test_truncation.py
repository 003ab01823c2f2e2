"""Sums are truncated exactly where the schedule says: every bit, beside Python's integers."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from codegen.fixed_point import largest_error
from codegen.kernel import Kernel
from tests.operators.matmul.ring_kernels import RINGS, ring_kernel
from tests.support.kernels import ring_runs
from tests.support.kernels.ring_runs import Built, in_parts
from tests.support.run.each_run import rows_using, some_each_run

BITS, K = 6, 100
PLACES = (("imad", "once"), ("imad", "tile"), ("imad", "product"), ("limbs", "once"), ("limbs", "tile"))
CASES = [
    (algorithm, place, dtype, rounding, split)
    for (algorithm, place), dtype, rounding, split in product(
        PLACES, RINGS, ("floor", "nearest"), ("none", "workspace")
    )
]
# Numbers whose products are of either sign and seldom multiples of 2^BITS; of the whole range they wrap around.
LARGEST = {"small": 1000, "whole range": None}


def kernel_of(algorithm: str, place: str, dtype: str, rounding: str, split: str) -> Kernel:
    return ring_kernel("nt", dtype, bits=BITS, rounding=rounding, algorithm=algorithm, truncate=place, split=split)


def parts_of(kernel: Kernel) -> list[int]:
    """Where they begin."""
    step = {"once": K, "tile": kernel.tunables.as_dict()["tile_k"], "product": 1}[str(kernel.tunables.get("truncate"))]
    return list(range(0, K, int(step)))


def inputs(dtype: str, largest: int | None) -> tuple[Any, Any]:
    rng, ends = np.random.default_rng(3), np.iinfo(dtype)
    least, most = (-largest, largest) if largest else (ends.min, ends.max)
    a, b = (rng.integers(least, most, shape, dtype, endpoint=True) for shape in ((8, K), (K, 12)))
    return a, b


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    cases = dict.fromkeys(row["case"] for row in rows_using("built", request))
    return ring_runs.built({" ".join(case): kernel_of(*case) for case in cases}, tmp_path_factory.mktemp("truncation"))


@pytest.mark.parametrize("size", LARGEST)
@pytest.mark.parametrize("case", some_each_run([(case,) for case in CASES], 12), ids=" ".join)
def test_parts_are_truncated_where_the_schedule_says(built: Built, case: tuple[str, ...], size: str) -> None:
    """Whatever wraps around: a part as the ring has it, shifted, and their sum."""
    kernel = kernel_of(*case)
    a, b = inputs(case[2], LARGEST[size])
    out = built.run(" ".join(case), a, b, slices=3 if case[4] == "workspace" else 1)
    np.testing.assert_array_equal(out, in_parts(a, b, parts_of(kernel), BITS, case[3]))


@pytest.mark.parametrize("case", [case for case in CASES if case[1] != "once"], ids=" ".join)
def test_early_truncation_is_off_within_the_bound_where_nothing_wraps_around(case: tuple[str, ...]) -> None:
    first = parts_of(kernel_of(*case))
    a, b = inputs(case[2], LARGEST["small"])
    error = in_parts(a, b, first, BITS, case[3]) - in_parts(a, b, [0], BITS, case[3])
    bound = largest_error(len(first), case[3])
    assert -bound <= error.min() and error.max() <= (0 if case[3] == "floor" else bound)
    assert error.any()
    far = in_parts(*inputs(case[2], None), first, BITS, case[3]) - in_parts(*inputs(case[2], None), [0], BITS, case[3])
    assert np.abs(far.astype(object)).max() > bound, "beyond the range there is no bound"
