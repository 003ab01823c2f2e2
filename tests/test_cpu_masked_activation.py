"""Masked activations pass the whole test plan: both algorithms, every mask, dtype and function, every width."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from tests.cpu_helpers import verify
from tests.masked_kernels import WIDEST, gather_scatter, vectorised
from workers.verify_cpu import CpuVerdict

OP = operator("masked_activation")
FUNCTIONS = ("relu", "gelu", "silu", "identity", "square", "polynomial2", "polynomial3")
MASKS = ("bits", "bytes")


def kernels() -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for number, (mask, function) in enumerate(product(MASKS, FUNCTIONS)):
        dtype, other = list(WIDEST)[number % 3], FUNCTIONS[(3 * number + 1) % 7]
        node = f"{mask}.{function}.{other}"
        found[f"{node}, {dtype}"] = vectorised(node, dtype, loads=(1, 2, 4, 8)[number % 4])
        found[f"{node}, {dtype}, by lists"] = gather_scatter(node, dtype, threads=(64, 128)[number % 2])
    for dtype, width in product(WIDEST, (1, 2, 4)):
        found[f"{dtype} by {width}"] = vectorised("bits.square.relu", dtype, vector=width)
        found[f"{dtype} by {width}, bytes"] = vectorised("bytes.square.relu", dtype, vector=width)
    return found


@pytest.fixture(scope="module")
def verdicts() -> Mapping[str, CpuVerdict]:
    asked = kernels()
    return dict(zip(asked, verify(list(asked.values()), seed=20_26), strict=True))


@pytest.mark.parametrize("name", kernels())
def test_a_kernel_passes_the_whole_plan(name: str, verdicts: Mapping[str, CpuVerdict]) -> None:
    assert (verdicts[name].verdict, verdicts[name].message) == ("ok", "")


def test_exact_cases_are_exact_and_approximate_ones_inside_their_bound(verdicts: Mapping[str, CpuVerdict]) -> None:
    cases = [case for verdict in verdicts.values() for case in verdict.details["cases"]]
    assert {case["kind"] for case in cases} == {"integer", "normal"}
    assert all(case["max_error"] == 0.0 for case in cases if case["exact"])
    assert all(case["max_ratio"] <= 1.0 for case in cases)
    assert max(case["max_ratio"] for case in cases) > 0.5


@pytest.mark.parametrize("name", kernels())
def test_test_problems_have_the_kernels_signature(name: str) -> None:
    kernel = kernels()[name]
    for problem in OP.test_problems(kernel):
        assert OP.signature(problem) == kernel.signature_dict


def test_kernels_are_clean_under_the_sanitizers() -> None:
    asked = [vectorised("bits.gelu.square", "float16"), gather_scatter("bytes.relu.identity")]
    assert [(found.verdict, found.message) for found in verify(asked, sanitize=True)] == [("ok", "")] * 2
