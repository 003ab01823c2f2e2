"""Kernels pass the whole verification plan on the CPU, all of a module built together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from codegen.kernel import Kernel
from tests.operators.harness.declarations import Declarations
from tests.support.kernels.cpu_helpers import verify
from workers.cpu.verify import CpuVerdict

TABLES = {"kernel": lambda declared: declared.proofs.kernels()}


@pytest.fixture(scope="module")
def proofs(request: pytest.FixtureRequest) -> Mapping[Kernel, CpuVerdict]:
    having = [declared for declared in request.module.DECLARED if declared.proofs is not None]
    asked = [kernel for declared in having for kernel in declared.proofs.kernels().values()]
    asked = list(dict.fromkeys(asked))
    return dict(zip(asked, verify(asked, seed=20_26), strict=True))


def test_a_kernel_passes_the_whole_plan(
    declared: Declarations, kernel: Kernel, proofs: Mapping[Kernel, CpuVerdict]
) -> None:
    assert (proofs[kernel].verdict, proofs[kernel].message) == ("ok", "")


def cases_of(declared: Declarations, proofs: Mapping[Kernel, CpuVerdict]) -> dict[str, list[dict[str, Any]]]:
    assert declared.proofs is not None
    return {name: proofs[kernel].details["cases"] for name, kernel in declared.proofs.kernels().items()}


def test_exact_cases_are_exact_and_approximate_ones_inside_their_bound(
    declared: Declarations, proofs: Mapping[Kernel, CpuVerdict]
) -> None:
    by_kernel = cases_of(declared, proofs)
    for name, cases in by_kernel.items():
        assert {case["kind"] for case in cases} == {"integer", "normal"}, name
        assert all(case["max_error"] == 0.0 for case in cases if case["exact"]), name
        assert all(case["max_ratio"] <= 1.0 for case in cases), name
    # The bound is one that real rounding comes near to, not one that forgives everything.
    assert declared.proofs is not None
    assert max(case["max_ratio"] for cases in by_kernel.values() for case in cases) > declared.proofs.nearest


def test_test_problems_have_the_kernels_signature(declared: Declarations, kernel: Kernel) -> None:
    for problem in declared.op.test_problems(kernel):
        assert declared.op.signature(problem) == kernel.signature_dict


def test_kernels_of_these_tests_have_the_signature_of_a_problem(declared: Declarations, kernel: Kernel) -> None:
    dtype = kernel.signature_dict.get("dtype")
    problem = declared.parse({"dtype": dtype} if dtype in ("int32", "int64") else {})  # a ring's has further names
    assert set(declared.op.signature(problem)) == set(kernel.signature_dict)
