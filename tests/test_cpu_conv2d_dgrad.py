"""Conv2d_dgrad's kernels pass the whole test plan: every algorithm, layout, alignment class, dtype, with phases and
without."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import gcd
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.operators.conv2d_dgrad.phases import phases
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from tests.conv2d_dgrad_kernels import direct_kernel, signature, simt_kernel, tensor_kernel
from tests.cpu_helpers import verify
from workers.verify_cpu import CpuVerdict

OP = operator("conv2d_dgrad")
LAYOUTS = ("nhwc", "nchw")
REGISTERS: dict[str, Any] = {"copy": "registers"}
WIDE: dict[str, Any] = {"tile_m": 32, "tile_n": 64, "warps_m": 1, "warps_n": 2, "epilogue_path": "shared"}


def kernels() -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for layout, dtype in product(LAYOUTS, ("float16", "bfloat16", "float32")):
        words = {"layout": layout, "dtype": dtype}
        # 2-byte elements that are gathered one by one are too narrow for cp.async.
        copy = REGISTERS if layout == "nchw" and dtype != "float32" else {}
        found[f"tensor {layout} {dtype}"] = tensor_kernel({**words, "epilogue": ("scale", "residual")}, **copy)
        found[f"tensor {layout} {dtype}, strided"] = tensor_kernel(
            {**words, "strided": True, "epilogue": ("residual", "mask")}, **copy, stages=2
        )
        found[f"tensor {layout} {dtype}, 1 x 1"] = tensor_kernel({**words, "pointwise": True}, **WIDE)
        found[f"tensor {layout} {dtype}, 1 element, strided"] = tensor_kernel(
            {**words, "align": (1, 1, 1), "strided": True}, **REGISTERS, epilogue_path="shared"
        )
        aligns = (1, 4, 4) if layout == "nhwc" else (1, 1, 4)
        found[f"direct {layout} {dtype}"] = direct_kernel({**words, "align": aligns}, filters=2)
        for strided in (False, True):
            align = (4, 1, 4) if layout == "nhwc" else (1, 1, 1 if strided else 4)
            found[f"direct {layout} {dtype}, depthwise{', strided' * strided}"] = direct_kernel(
                {**words, "align": align, "depthwise": True, "strided": strided, "epilogue": ("clip",)}
            )
    for split, copy in (("workspace", {}), ("atomic", REGISTERS), ("stream", {"stages": 3})):
        found[f"tensor nhwc, {split}"] = tensor_kernel({"epilogue": ("residual",)}, split=split, **copy)
        found[f"tensor nchw, {split}"] = tensor_kernel({"layout": "nchw", "dtype": "float32"}, split=split, **copy)
    for align in ((2, 2, 2), (4, 1, 1), (2, 4, 4), (4, 8, 8)):
        copy = REGISTERS if 1 in align else {}
        found[f"tensor nhwc {align}"] = tensor_kernel({"align": align}, **(copy or {"stages": 3}))
        found[f"tensor nhwc {align}, strided"] = tensor_kernel({"align": align, "strided": True}, **WIDE, **copy)
    for layout, align in product(LAYOUTS, (1, 4)):
        gathered = align if layout == "nhwc" else 1
        words = {"layout": layout, "align": (gathered, gathered, align), "epilogue": ("residual",)}
        found[f"simt {layout} {align}"] = simt_kernel(words, stages=2, fragments=2, padding=4)
        found[f"simt {layout} {align}, split"] = simt_kernel(words, split="workspace")
        found[f"simt {layout} {align}, 1 x 1"] = simt_kernel({**words, "align": (align,) * 3, "pointwise": True})
        if layout == "nhwc" or align == 1:
            found[f"simt {layout} {align}, strided"] = simt_kernel({**words, "strided": True}, stages=2)
    found["direct, fp32 out of fp16"] = direct_kernel(
        {"align": (8, 1, 4), "depthwise": True, "out_dtype": "float32", "strided": True}, filters=8
    )
    found["direct, 8 pixels, few taps"] = direct_kernel(
        {"align": (1, 1, 1), "strided": True}, filters=1, pixels=8, threads=128, threads_k=1
    )
    for window, pixels, strided in ((3, 4, False), (5, 2, True), (7, 8, True)):
        found[f"direct, window {window}, {pixels} pixels{', strided' * strided}"] = direct_kernel(
            {"align": (4, 1, 4), "depthwise": True, "strided": strided}, window=window, pixels=pixels
        )
    found["direct, strided"] = direct_kernel({"align": (1, 8, 8), "strided": True}, filters=8, taps=32)
    found["direct nchw, strided"] = direct_kernel({"layout": "nchw", "strided": True}, filters=4, threads_k=2)
    found["direct, 1 x 1"] = direct_kernel({"align": (4, 8, 8), "pointwise": True}, filters=8)
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
    worst = max(case["max_ratio"] for verdict in verdicts.values() for case in verdict.details["cases"])
    assert worst > 0.02


@pytest.mark.parametrize("name", kernels())
def test_test_problems_have_the_kernels_signature(name: str) -> None:
    kernel = kernels()[name]
    for problem in OP.test_problems(kernel):
        assert OP.signature(problem) == kernel.signature_dict


def problems_of(kernel: Kernel) -> list[Conv2dDgradProblem]:
    return [one for one in OP.test_problems(kernel) if isinstance(one, Conv2dDgradProblem)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_test_problems_have_every_geometry(layout: str) -> None:
    problems = problems_of(tensor_kernel({"layout": layout}, copy="registers"))
    strided = problems_of(tensor_kernel({"layout": layout, "strided": True}, copy="registers"))
    for some in (problems, strided):
        assert any(max(one.dilation) > 1 for one in some) and any(max(one.corner) > 1 for one in some)
        assert any(one.n > 1 for one in some) and any(one.groups > 1 and max(one.dilation) > 1 for one in some)
    assert any(gcd(one.stride[a], one.dilation[a]) > 1 for one in strided for a in (0, 1))
    assert any(_left(one, 0) or _left(one, 1) for one in strided), "a stride that does not divide"
    assert any(one.stride[0] != one.stride[1] and min(one.stride) > 1 for one in strided)
    for one in strided[1:]:
        kinds = {(phase.rows, phase.columns, phase.taps) for _, phase in phases(one)}
        assert len(kinds) > 1, "phases that differ"
    without = [one for one in strided if any(phase.taps == 0 for _, phase in phases(one))]
    assert without and len(without) < len(strided), "phases without taps, and not in all problems"


def _left(problem: Conv2dDgradProblem, axis: int) -> int:
    window = problem.dilation[axis] * ((problem.r, problem.s)[axis] - 1) + 1
    return (problem.padded[axis] - window) % problem.stride[axis]


def test_kernels_are_clean_under_the_sanitizers() -> None:
    asked = [
        tensor_kernel({"strided": True, "epilogue": ("residual",)}),
        simt_kernel({"layout": "nchw", "align": (1, 1, 1), "strided": True, "epilogue": ("mask",)}),
        direct_kernel({"align": (4, 1, 4), "depthwise": True, "strided": True}),
    ]
    assert [(found.verdict, found.message) for found in verify(asked, sanitize=True)] == [("ok", "")] * 3


def test_signatures_of_these_tests_are_complete() -> None:
    problem = OP.parse({"operator": "conv2d_dgrad", "n": 1, "h": 4, "w": 4, "c": 8, "k": 8, "r": 3, "s": 3})
    assert set(OP.signature(problem)) == set(signature())
