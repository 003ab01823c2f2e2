"""Softmax and the norms pass the whole test plan: every algorithm, division of rows, alignment class and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest

from codegen.alignment import classes
from codegen.kernel import Kernel
from codegen.operators import operator
from tests.cpu_helpers import verify
from tests.row_kernels import OPERATORS, SCHEDULES, kernel
from workers.verify_cpu import CpuVerdict

TYPES = (
    ("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "float32"),
    ("float32", "bfloat16"), ("bfloat16", "float16"),
)  # fmt: skip
VECTORS = ((True, True), (True, False), (False, True), (False, False))  # gamma, beta


def kernels(name: str) -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for number, schedule in enumerate(SCHEDULES):
        dtype, out_dtype = TYPES[number % len(TYPES)]
        scale, shift = VECTORS[number % 4]
        found[f"{schedule}, {dtype} to {out_dtype}"] = kernel(
            name, schedule, dtype, out_dtype, scale=scale, shift=shift
        )
    for number, ((dtype, out_dtype), align) in enumerate(product(TYPES, (8, 4, 2, 1))):
        if align in classes(dtype, quads=False):
            schedule = list(SCHEDULES)[number % len(SCHEDULES)]
            found[f"{schedule}, {dtype} to {out_dtype} by {align}"] = kernel(name, schedule, dtype, out_dtype, align)
    found["narrower than it could be"] = kernel(name, "registers, a warp", "float16", vector=2)
    return found


@pytest.fixture(scope="module")
def verdicts() -> Mapping[tuple[str, str], CpuVerdict]:
    asked = {(name, words): one for name in OPERATORS for words, one in kernels(name).items()}
    return dict(zip(asked, verify(list(asked.values()), seed=20_26), strict=True))


EVERY = [(name, words) for name in OPERATORS for words in kernels(name)]


@pytest.mark.parametrize(("name", "words"), EVERY)
def test_a_kernel_passes_the_whole_plan(name: str, words: str, verdicts: Mapping[tuple[str, str], CpuVerdict]) -> None:
    found = verdicts[name, words]
    assert (found.verdict, found.message) == ("ok", "")


@pytest.mark.parametrize("name", OPERATORS)
def test_exact_cases_are_exact_and_approximate_ones_inside_their_bound(
    name: str, verdicts: Mapping[tuple[str, str], CpuVerdict]
) -> None:
    cases = [case for (one, _), verdict in verdicts.items() if one == name for case in verdict.details["cases"]]
    assert {case["kind"] for case in cases} == {"integer", "normal"}
    assert all(case["max_error"] == 0.0 for case in cases if case["exact"])
    assert all(case["max_ratio"] <= 1.0 for case in cases)
    # The bound is one that real rounding comes near to, not one that forgives everything.
    assert max(case["max_ratio"] for case in cases) > 0.3


@pytest.mark.parametrize(("name", "words"), EVERY)
def test_test_problems_have_the_kernels_signature(name: str, words: str) -> None:
    one, own = kernels(name)[words], operator(name)
    for problem in own.test_problems(one):
        assert own.signature(problem) == one.signature_dict


def test_kernels_are_clean_under_the_sanitizers() -> None:
    asked = [
        kernel("softmax", "registers, a warp", "float16", align=1),
        kernel("layer_norm", "online, a block"),
        kernel("rms_norm", "shared, two warps of four", "bfloat16"),
    ]
    assert [(found.verdict, found.message) for found in verify(asked, sanitize=True)] == [("ok", "")] * 3
