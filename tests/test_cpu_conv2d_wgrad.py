"""Conv2d_wgrad's kernels pass the whole test plan: every algorithm, layout, alignment class, dtype, split and epilogue;
and they write all of the workspace that they ask for."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem
from codegen.operators.conv2d_wgrad.product import product as product_of
from codegen.operators.matmul.grid import k_steps
from codegen.operators.matmul.split import workspace_pitch
from codegen.schedule import Schedule
from tests.conv2d_wgrad_kernels import direct_kernel, signature, simt_kernel, tensor_kernel, wgrad
from tests.cpu_helpers import LIMITS, processes, toolchain, verify
from workers.build_cpu import build_cpu
from workers.cpu_library import POISON, CpuLibrary
from workers.verify_cpu import CpuVerdict

OP = operator("conv2d_wgrad")
LAYOUTS = ("nhwc", "nchw")
REGISTERS: dict[str, Any] = {"copy": "registers"}
WIDE: dict[str, Any] = {"tile_m": 32, "tile_n": 64, "warps_m": 1, "warps_n": 2, "epilogue_path": "shared"}
FIRST: dict[str, Any] = {"layout": "nchw", "align": (1, 1, 1)}


def kernels() -> dict[str, Kernel]:
    found: dict[str, Kernel] = {}
    for layout, dtype in product(LAYOUTS, ("float16", "bfloat16", "float32")):
        words = {"layout": layout, "dtype": dtype}
        # 2-byte elements that are gathered one by one are too narrow for cp.async.
        copy = REGISTERS if layout == "nchw" and dtype != "float32" else {}
        found[f"tensor {layout} {dtype}"] = tensor_kernel({**words, "epilogue": ("bias", "relu", "residual")}, **copy)
        found[f"tensor {layout} {dtype}, 1 element"] = tensor_kernel(
            {**words, "align": (1, 1, 1)}, **REGISTERS, epilogue_path="shared"
        )
        found[f"tensor {layout} {dtype}, fp32 out"] = tensor_kernel(
            {**words, "out_dtype": "float32"}, **copy, split="workspace", epilogue_path="shared"
        )
        found[f"direct {layout} {dtype}"] = direct_kernel({**words, "align": (4, 1, 1)}, filters=2)
        found[f"direct {layout} {dtype}, depthwise"] = direct_kernel(
            {**words, "align": (4, 4 if layout == "nhwc" else 1, 1), "depthwise": True, "epilogue": ("bias", "clip")},
            split="workspace",
        )
    for dtype in ("float16", "bfloat16", "float32"):
        found[f"tensor {dtype}, 1 x 1"] = tensor_kernel({"dtype": dtype, "pointwise": True}, **WIDE, split="workspace")
    for split, copy in (("workspace", {}), ("atomic", REGISTERS), ("stream", {"stages": 3})):
        found[f"tensor nhwc, {split}"] = tensor_kernel({"epilogue": ("bias",)}, split=split, **copy)
        found[f"tensor nchw, {split}"] = tensor_kernel(
            {"layout": "nchw", "dtype": "float32", "epilogue": ("bias",)}, split=split, **copy
        )
    for align in ((2, 2, 2), (8, 2, 4), (2, 4, 8), (8, 4, 4)):
        found[f"tensor nhwc {align}"] = tensor_kernel({"align": align}, stages=3)
    for layout, align in product(LAYOUTS, (1, 4)):
        words = {"layout": layout, "align": (align, align if layout == "nhwc" else 1, align), "epilogue": ("residual",)}
        found[f"simt {layout} {align}"] = simt_kernel(words, stages=2, fragments=2, padding=4)
        found[f"simt {layout} {align}, split"] = simt_kernel(words, split="workspace")
    found["simt, 1 x 1"] = simt_kernel({"pointwise": True})
    found["direct, fp32 out of fp16"] = direct_kernel(
        {"align": (8, 8, 1), "depthwise": True, "out_dtype": "float32"}, filters=8, elements=9, split="workspace"
    )
    found["direct, atomic"] = direct_kernel({"align": (1, 1, 1)}, filters=1, split="atomic")
    found["direct, all threads along the filters"] = direct_kernel(
        {"align": (4, 4, 1), "depthwise": True}, threads_k=64
    )
    found["direct nchw, all threads along the pixels"] = direct_kernel(FIRST, filters=1, threads_k=1, threads=256)
    found["direct nchw, few pixels of a warp"] = direct_kernel(FIRST, filters=2, threads_k=16, threads=128)
    found["direct, 1 x 1"] = direct_kernel({"align": (4, 4, 1), "pointwise": False, "depthwise": True}, elements=1)
    found["direct, gelu"] = direct_kernel({"align": (8, 1, 1), "epilogue": ("bias", "gelu")}, filters=8, elements=25)
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
    kernel = tensor_kernel({"layout": layout}, copy="registers")
    problems = [one for one in OP.test_problems(kernel) if isinstance(one, Conv2dWgradProblem)]
    assert any(max(one.stride) > 1 for one in problems) and any(max(one.dilation) > 1 for one in problems)
    assert any(max(one.corner) > 1 for one in problems) and any(one.n > 2 for one in problems)
    assert any(one.groups > 1 and max(one.dilation) > 1 for one in problems)
    step = int(kernel.tunables.get("tile_k"))
    assert any(one.p * one.q < step for one in problems), "a step of several images"
    assert any(one.q < step < one.p * one.q for one in problems), "a step of several rows"


def test_kernels_are_clean_under_the_sanitizers() -> None:
    asked = [
        tensor_kernel({"epilogue": ("bias", "gelu")}),
        simt_kernel({**FIRST, "epilogue": ("bias", "mask")}, split="workspace"),
        direct_kernel({"align": (4, 4, 1), "depthwise": True}, split="workspace"),
    ]
    assert [(found.verdict, found.message) for found in verify(asked, sanitize=True)] == [("ok", "")] * 3


def test_signatures_of_these_tests_are_complete() -> None:
    assert set(OP.signature(wgrad())) == set(signature())


# ---- the workspace

SPLIT: dict[str, Kernel] = {
    "tensor": tensor_kernel({"dtype": "float16"}, split="workspace", epilogue_path="shared"),
    "simt": simt_kernel({"layout": "nchw"}, split="workspace"),
    "direct": direct_kernel({"align": (4, 4, 1), "depthwise": True}, split="workspace"),
    "direct, several filters of a channel": direct_kernel({**FIRST, "align": (1, 1, 1)}, filters=2, split="workspace"),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CpuLibrary:
    build = build_cpu(list(SPLIT.values()), toolchain(), processes(), LIMITS, folder=tmp_path_factory.mktemp("split"))
    ((path, _),) = build.libraries
    return CpuLibrary(Path(path))


@pytest.mark.parametrize("slices", [1, 3, 1000])
@pytest.mark.parametrize("name", SPLIT)
def test_the_workspace_is_what_the_slices_write(name: str, slices: int, library: CpuLibrary) -> None:
    kernel = SPLIT[name]
    problem = OP.test_problems(kernel)[1]
    assert isinstance(problem, Conv2dWgradProblem)
    is_direct = kernel.tunables.get("algorithm") == "direct"
    as_product = product_of(problem, direct=is_direct)
    tile_k = 64 // int(kernel.tunables.get("threads_k")) if is_direct else int(kernel.tunables.get("tile_k"))
    used = min(slices, k_steps(problem.pixels, tile_k))  # none is empty
    launch = OP.launch_values(Schedule.of({**kernel.tunables.as_dict(), "split_k": slices}))
    try:
        tensors = library.allocate(OP.operands(problem))
        inputs = OP.make_inputs(problem, "integer", np.random.default_rng(1))
        for tensor in tensors:
            if tensor.operand.role == "in":
                tensor.fill(inputs[tensor.operand.name])
        workspace = library.workspace(kernel.namespace, OP.extents(problem), launch)
        assert workspace is not None
        rows, pitch = as_product.batch * as_product.m, workspace_pitch(as_product.n)
        assert workspace.nbytes == 4 * used * rows * pitch
        workspace[...] = POISON
        outcome = library.run(
            kernel.namespace, tensors, workspace, extents=OP.extents(problem), launch=launch,
            scalars=OP.scalars(problem), order="seeded", seed=1, exact=True, cpu_seconds=10.0,
        )  # fmt: skip
        assert (outcome.status, outcome.message) == ("ok", "")
        sums = workspace.view(np.uint32).reshape(used, rows, pitch)[:, :, : as_product.n]
        assert (sums != 0xFFFFFFFF).all(), "a sum that no slice wrote"
    finally:
        library.free()
