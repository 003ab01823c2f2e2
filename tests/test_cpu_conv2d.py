"""Conv2d's kernels pass the whole test plan: every algorithm, layout, alignment class, dtype and epilogue."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.operators.conv2d.problem import Conv2dProblem
from tests.conv2d_kernels import direct_kernel, signature, simt_kernel, tensor_kernel
from tests.cpu_helpers import verify
from workers.verify_cpu import CpuVerdict

OP = operator("conv2d")
LAYOUTS = ("nhwc", "nchw")
REGISTERS: dict[str, Any] = {"copy": "registers"}
# (window, pixels)
NEIGHBOURS = ((3, 1), (3, 4), (5, 2), (5, 8), (7, 4), (7, 8))
WIDE: dict[str, Any] = {"tile_m": 32, "tile_n": 64, "warps_m": 1, "warps_n": 2, "epilogue_path": "shared"}


def kernels() -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for layout, dtype in product(LAYOUTS, ("float16", "bfloat16", "float32")):
        words = {"layout": layout, "dtype": dtype}
        # 2-byte elements that are gathered one by one are too narrow for cp.async.
        copy = REGISTERS if layout == "nchw" and dtype != "float32" else {}
        found[f"tensor {layout} {dtype}"] = tensor_kernel({**words, "epilogue": ("bias", "relu", "residual")}, **copy)
        found[f"tensor {layout} {dtype}, 1 x 1"] = tensor_kernel({**words, "pointwise": True}, **WIDE)
        found[f"tensor {layout} {dtype}, 1 element"] = tensor_kernel(
            {**words, "align": (1, 1, 1)}, **REGISTERS, epilogue_path="shared"
        )
        found[f"direct {layout} {dtype}"] = direct_kernel({**words, "align": (1, 1, 4)}, filters=2)
        found[f"direct {layout} {dtype}, depthwise"] = direct_kernel(
            {**words, "align": (4 if layout == "nhwc" else 1, 1, 4), "depthwise": True, "epilogue": ("bias", "clip")}
        )
    for split, copy in (("workspace", {}), ("atomic", REGISTERS), ("stream", {"stages": 3})):
        found[f"tensor nhwc, {split}"] = tensor_kernel({"epilogue": ("bias",)}, split=split, **copy)
        found[f"tensor nchw, {split}"] = tensor_kernel(
            {"layout": "nchw", "dtype": "float32", "epilogue": ("bias",)}, split=split, **copy
        )
    for align in ((2, 2, 2), (4, 4, 1), (2, 4, 8), (4, 8, 4)):
        found[f"tensor nhwc {align}"] = tensor_kernel({"align": align}, stages=3)
    for layout, align in product(LAYOUTS, (1, 4)):
        words = {"layout": layout, "align": (align if layout == "nhwc" else 1, align, align), "epilogue": ("residual",)}
        found[f"simt {layout} {align}"] = simt_kernel(words, stages=2, fragments=2, padding=4)
        found[f"simt {layout} {align}, split"] = simt_kernel(words, split="workspace")
        found[f"simt {layout} {align}, 1 x 1"] = simt_kernel({**words, "align": (align,) * 3, "pointwise": True})
    found["direct, fp32 out of fp16"] = direct_kernel(
        {"align": (8, 1, 4), "depthwise": True, "out_dtype": "float32"}, filters=8
    )
    found["direct, 8 pixels, few taps"] = direct_kernel(
        {"align": (1, 1, 1)}, filters=1, pixels=8, threads=128, threads_k=1
    )
    found["direct, 1 x 1"] = direct_kernel({"align": (4, 4, 8), "pointwise": True}, filters=8)
    for (window, pixels), dtype in zip(NEIGHBOURS, 2 * ("float16", "float32", "bfloat16"), strict=True):
        found[f"direct, window {window}, {pixels} pixels, {dtype}"] = direct_kernel(
            {"dtype": dtype, "align": (4, 1, 4), "depthwise": True, "epilogue": ("bias", "relu")},
            window=window, pixels=pixels, taps=32 if window == 7 else 16,
        )  # fmt: skip
    for align in ((1, 1, 1), (2, 8, 2), (8, 2, 8)):
        found[f"direct, window 3 {align}"] = direct_kernel(
            {"align": align, "depthwise": True}, filters=max(align), window=3, pixels=4
        )
    apart: dict[str, Any] = {"epilogue": "separate"}
    found["separate, direct, window 5"] = direct_kernel(
        {"align": (4, 1, 4), "depthwise": True, "epilogue": ("bias", "residual")}, window=5, pixels=4, **apart
    )
    for layout in LAYOUTS:
        nodes = ("bias", "residual", "gelu")
        copy = {"nhwc": {}, "nchw": REGISTERS}[layout]
        found[f"separate, tensor {layout}"] = tensor_kernel({"layout": layout, "epilogue": nodes}, **copy, **apart)
        found[f"separate, simt {layout}"] = simt_kernel({"layout": layout, "epilogue": ("scale", "bias")}, **apart)
        found[f"separate, direct {layout}"] = direct_kernel(
            {"layout": layout, "align": (1, 1, 8), "epilogue": ("bias", "relu")}, **apart
        )
    found["separate, 1 x 1, fp32 out of bf16"] = tensor_kernel(
        {"dtype": "bfloat16", "out_dtype": "float32", "align": (8, 8, 4), "pointwise": True, "epilogue": ("bias",)},
        **WIDE, **apart,
    )  # fmt: skip
    nodes = ("bias", "residual", "mask", "scale", "leaky_relu", "clip", "cast.float16", "silu")
    found["separate, every node"] = tensor_kernel({"align": (8, 8, 2), "epilogue": nodes}, **apart)
    for layout in LAYOUTS:
        words = {"layout": layout, "align": (1, 1, 4), "epilogue": ("bias", "masked_activation.bits.square.relu")}
        found[f"direct {layout}, masked"] = direct_kernel(words)
        found[f"tensor {layout}, masked"] = tensor_kernel(words, copy="registers")
        found[f"separate, direct {layout}, masked"] = direct_kernel(words, **apart)
    found["direct, gelu"] = direct_kernel({"align": (1, 1, 8), "epilogue": ("bias", "gelu")}, filters=8, taps=32)
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_test_problems_have_every_geometry(layout: str) -> None:
    align = (8, 8, 8) if layout == "nhwc" else (1, 8, 8)
    kernel = tensor_kernel({"layout": layout, "align": align}, copy="registers")
    problems = [one for one in OP.test_problems(kernel) if isinstance(one, Conv2dProblem)]
    assert any(max(one.stride) > 1 for one in problems) and any(max(one.dilation) > 1 for one in problems)
    assert any(max(one.corner) > 1 for one in problems) and any(one.n > 1 for one in problems)
    assert any(one.groups > 1 and max(one.dilation) > 1 for one in problems)
    assert any(_left(one, 0) or _left(one, 1) for one in problems), "a stride that does not divide"
    assert all(one.r != one.s or one.stride[0] != one.stride[1] or one is problems[0] for one in problems)


@pytest.mark.parametrize(("window", "pixels"), NEIGHBOURS)
def test_test_problems_of_neighbouring_pixels_have_ragged_rows(window: int, pixels: int) -> None:
    kernel = direct_kernel({"align": (4, 1, 4), "depthwise": True}, window=window, pixels=pixels)
    problems = [one for one in OP.test_problems(kernel) if isinstance(one, Conv2dProblem)]
    assert {one.q for one in problems} >= {1, max(1, pixels - 1), pixels, pixels + 1} - ({2} if pixels == 1 else set())
    assert all((one.s, one.stride[1], one.dilation[1]) == (window, 1, 1) for one in problems)
    assert any(one.taps > 16 for one in problems), "more rows of the filter than come at once"
    assert {one.stride[0] for one in problems} == {1, 2, 3} and any(one.dilation[0] > 1 for one in problems)
    assert any(min(one.corner) > 0 for one in problems) and any(one.n > 1 for one in problems)


def _left(problem: Conv2dProblem, axis: int) -> int:
    window = problem.dilation[axis] * ((problem.r, problem.s)[axis] - 1) + 1
    return (problem.padded[axis] - window) % problem.stride[axis]


def test_kernels_are_clean_under_the_sanitizers() -> None:
    asked = [
        tensor_kernel({"epilogue": ("bias", "gelu")}),
        simt_kernel({"layout": "nchw", "align": (1, 1, 1), "epilogue": ("bias", "mask")}),
        direct_kernel({"align": (4, 1, 4), "depthwise": True}),
        direct_kernel({"align": (4, 1, 4), "depthwise": True}, window=3, pixels=4),
    ]
    assert [(found.verdict, found.message) for found in verify(asked, sanitize=True)] == [("ok", "")] * 4


def test_signatures_of_these_tests_are_complete() -> None:
    problem = OP.parse({"operator": "conv2d", "n": 1, "h": 4, "w": 4, "c": 8, "k": 8, "r": 3, "s": 3})
    assert set(OP.signature(problem)) == set(signature())
