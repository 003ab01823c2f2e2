"""Matmul's kernels pass the whole test plan: every layout, alignment class, schedule knob and epilogue node."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from codegen.kernel import Kernel
from tests.cpu_helpers import matmul_kernel, verify
from workers.verify_cpu import CpuVerdict

NODES = (
    "bias.m", "bias.n", "residual", "mask", "scale", "relu", "leaky_relu", "clip", "gelu", "silu", "tanh", "sigmoid",
    "cast.float16", "cast.bfloat16", "masked_activation.bits.relu.identity", "masked_activation.bits.polynomial2.gelu",
    "masked_activation.bytes.square.polynomial3",
)  # fmt: skip
ALIGNS = ((4, 4, 4), (1, 1, 1), (4, 1, 1), (1, 4, 4), (4, 4, 1))
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"stages": 2, "fragments": 2, "padding": 4},
    {"tile_m": 128, "tile_n": 64, "tile_k": 16, "thread_m": 8, "thread_n": 8, "unroll_k": 8, "stages": 2},
    {"tile_m": 16, "tile_n": 16, "thread_m": 2, "thread_n": 2, "tile_k": 32, "warp_m": 8},
    {"tile_m": 32, "tile_n": 32, "thread_m": 1, "thread_n": 1, "warp_m": 32, "unroll_k": 1},  # 1,024 threads
    {"tile_m": 64, "tile_n": 128, "thread_m": 16, "thread_n": 4, "warp_m": 1, "fragments": 2, "unroll_k": 2},
)


def kernels() -> dict[str, Kernel]:
    found = {}
    for (row, layout), (column, align) in product(enumerate(("nn", "nt", "tn", "tt")), enumerate(ALIGNS)):
        found[f"{layout} {align}"] = matmul_kernel(layout, align, **SCHEDULES[(row + column) % len(SCHEDULES)])
    for node in NODES:
        found[node] = matmul_kernel("nt", 4, ("bias.n", node), stages=2)
    found["long chain"] = matmul_kernel(
        "nn", 1, ("scale", "bias.m", "residual", "gelu", "mask", "clip", "cast.float16")
    )
    return found


@pytest.fixture(scope="module")
def verdicts() -> Mapping[str, CpuVerdict]:
    asked = kernels()
    return dict(zip(asked, verify(list(asked.values()), seed=20_26), strict=True))


@pytest.mark.parametrize("name", kernels())
def test_a_kernel_passes_the_whole_plan(name: str, verdicts: Mapping[str, CpuVerdict]) -> None:
    assert (verdicts[name].verdict, verdicts[name].message) == ("ok", "")


def test_exact_cases_are_exact_and_approximate_ones_inside_their_bound(verdicts: Mapping[str, CpuVerdict]) -> None:
    for name, verdict in verdicts.items():
        cases = verdict.details["cases"]
        assert {case["kind"] for case in cases} == {"integer", "normal"}, name
        assert all(case["max_error"] == 0.0 for case in cases if case["exact"]), name
        assert all(case["max_ratio"] <= 1.0 for case in cases), name
    # The bound is one that real rounding comes near to, not one that forgives everything.
    worst = max(case["max_ratio"] for verdict in verdicts.values() for case in verdict.details["cases"])
    assert worst > 0.02


def test_the_plan_reaches_batches_and_padded_rows(verdicts: Mapping[str, CpuVerdict]) -> None:
    extents = [case["extents"] for case in verdicts["nn (4, 4, 4)"].details["cases"]]
    assert any(batch > 1 for batch, *_ in extents)
    assert any(lda > k for _, _, _, k, lda, *_ in extents)


def test_matmul_is_clean_under_the_sanitizers() -> None:
    asked = [
        matmul_kernel("nn", 4, ("bias.n", "gelu"), **SCHEDULES[0]),
        matmul_kernel("tt", 1, ("bias.m", "residual", "mask", "cast.float16"), tile_m=16, tile_n=64, thread_m=2),
    ]
    assert [(found.verdict, found.message) for found in verify(asked, sanitize=True)] == [("ok", "")] * 2
