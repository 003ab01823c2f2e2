"""Winograd as an algorithm of convolutions (`codegen/device/conv/winograd.cuh`)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.errors import InvalidSearch
from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.conv2d.problem import Conv2dProblem
from codegen.operators.convolution import winograd, winograd_reference
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.search.rules import ACCEPTED
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import target
from codegen.text.cubin import exported_symbols
from codegen.text.render_library import winner_exports
from cukiln.types import LaunchTransform
from tests.operators.conv2d import convolutions, winograd_cases
from tests.operators.conv2d.convolutions import DO_NOT_FIT, LAYOUTS, OUT, REGISTERS, WIDE
from tests.operators.conv2d.kernels import SIZES, Kernels, conv2d
from tests.operators.conv2d.winograd_cases import FUSED, fused, simt, simt_schedule, tensor, tensor_schedule
from tests.operators.harness import declarations as declare
from tests.operators.harness import machine_code as claim
from tests.operators.harness.checks import add_checks
from tests.operators.harness.declarations import LEVEL_0, LEVEL_1, SM_90A, Fields, Inputs, Rejection
from tests.support.fixtures.library import Built, Child, calls, launches
from tests.support.kernels import ring_runs
from tests.support.run.places import ROOT
from workers.processes.processes import Processes

NAME = "conv2d"
OP, OF = operator(NAME), Kernels(NAME)
F2, F4 = {"output_tile": 2}, {"output_tile": 4}
LAYER: Fields = {"n": 8, "h": 28, "w": 28, "c": 128, "k": 128, "padding": 1, "dtype": "float16"}
TENSOR = tensor_schedule("float16", tile_m=64, tile_n=64, warps_n=2, stages=3, raster=0)
FORMS = ("f2", "f4")

# ---- problems

PROBLEMS = declare.Problems(
    refused=[
        ({"winograd": "f8"}, "winograd", "'none', 'f2' or 'f4'"),
        ({"winograd": True}, "winograd", "'none', 'f2' or 'f4'"),
    ],
    defaults=[
        ({"winograd": "none"}, convolutions.CANONICAL),
        ({"winograd": "f2"}, {**convolutions.CANONICAL, "winograd": "f2"}),
    ],
    # What Winograd does not compute has one key, whatever is allowed.
    alike=[
        ({**change, "winograd": "f4"}, change)
        for change in ({"r": 5}, {"s": 1}, {"stride": 2}, {"dilation": [1, 2]}, {"groups": 8})
    ],
    in_schema=[{**convolutions.SMALL, "winograd": "f4"}],
    out_of_schema=[{**convolutions.SMALL, "winograd": 2}],
)


def test_what_is_allowed_makes_another_problem_and_no_other_kernel() -> None:
    problems = [conv2d(winograd=form) for form in ("none", *FORMS)]
    assert len({problem.digest for problem in problems}) == 3
    assert len({tuple(OP.signature(problem).items()) for problem in problems}) == 1


# Digests of a problem, of its level-0 candidate and of that one's kernel, from before the field `winograd`.
STORED: list[tuple[Fields, tuple[str, str, str]]] = [
    ({"dtype": "float16"}, ("436c4b2fc2474478", "50ed05b6b7906a46", "952adfaf416fc684")),
    ({"dtype": "float32", "layout": "nchw"}, ("a6bf9aea15002d31", "aee7b7add7526959", "40c54535ce1e4174")),
    ({"dtype": "bfloat16", "groups": 128}, ("34a500411efee452", "3544b2284b42952d", "316c566a40a0d09e")),
]


@pytest.mark.parametrize(("fields", "digests"), STORED)
def test_what_is_stored_of_other_problems_stays_known(fields: Fields, digests: tuple[str, str, str]) -> None:
    problem = conv2d(**{**LAYER, **fields})
    (candidate,) = lower(problem, SM_90A, LEVEL_0).candidates
    assert (problem.digest[:16], candidate.id[:16], candidate.kernel.id[:16]) == digests


# ---- rules, levels

SEARCHES = declare.Searches(
    accepted=[
        ({**LAYER, "winograd": "f2"}, TENSOR),
        ({**LAYER, "winograd": "f4"}, {**TENSOR, **F4}),
        ({**LAYER, "winograd": "f4", "layout": "nchw"}, {**TENSOR, **F4, "transform_width": 1}),
        ({**LAYER, "winograd": "f2", "dtype": "float32"}, simt_schedule(tile_m=64, raster=0)),
        ({**LAYER, "winograd": "f4", "dtype": "float32"}, {**FUSED, **F4}),
    ],
    rejected=[
        Rejection({**LAYER, "winograd": "f4", **fields}, {**TENSOR, **changes}, rule, said)
        for fields, changes, rule, said in (
            ({"winograd": "none"}, {}, "accuracy", "whose winograd is none: f2 would allow it"),
            ({"winograd": "f2"}, F4, "accuracy", "whose winograd is f2: f4 would allow it"),
            ({"r": 5, "s": 5, "padding": 2}, {}, "winograd", "here are 5 x 5, stride 1 x 1, dilation 1 x 1, padding "
             "(2, 2) and (2, 2) and 1 groups: implicit_gemm computes them"),
            ({"stride": 2}, F4, "winograd", "F(4 x 4, 3 x 3) is for 3 x 3 filters with stride 1"),
            ({"dilation": [1, 2]}, {}, "winograd", "dilation 1 x 2"),
            ({"groups": 128}, {}, "winograd", "128 groups: direct computes them"),
            ({"groups": 32}, {}, "winograd", "32 groups: implicit_gemm or direct computes them"),
            ({"n": 2**15}, {}, "index", "3774873600 elements with its padding"),
            ({"layout": "nchw"}, {}, "transform_width", "transform_width = 2 repeats 1"),
            ({"c": 3, "k": 4}, {"transform_width": 8}, "transform_width", "transform_width = 8 repeats 4"),
            ({}, {**F4, "transform_width": 8}, "transform_width", "8 x 36 values of a thread; registers hold 144"),
            ({"c": 64}, {"stages": 5}, "stages", "5 stages for 2 steps: k = 64"),
            ({"c": 3}, {}, "stages", "3 stages for 1 steps: k = 8"),
        )
    ] + [
        Rejection({**LAYER, "dtype": "float32", "winograd": "f4", **fields}, {**FUSED, **changes}, rule, said, arch)
        for fields, changes, rule, said, arch in (
            ({"dtype": "float16"}, {}, "dtype", "winograd_fused is for float32 without allow_tf32", "sm_90a"),
            ({"allow_tf32": True}, {}, "dtype", "winograd computes this problem", "sm_90a"),
            ({"winograd": "f2"}, F4, "accuracy", "whose winograd is f2: f4 would allow it", "sm_90a"),
            ({"stride": 2}, {}, "winograd", "stride 2 x 2", "sm_90a"),
            ({}, {**F4, "thread_m": 8, "thread_n": 8}, "threads", "36 places of 4 threads each are 144", "sm_90a"),
            ({}, {**F4, "thread_m": 2}, "threads", "are 1152: whole warps, and at most 1024", "sm_90a"),
            ({}, {**F4, "tile_m": 32, "tile_n": 32, "thread_m": 8, "thread_n": 8}, "shared_memory",
             "165888 bytes of shared memory; sm_86 has", "sm_86"),
            ({"n": 1, "h": 4, "w": 4}, {"tile_m": 32}, "tile_m", "mostly padding for 4 tiles", "sm_90a"),
            ({"k": 16}, {"tile_n": 32}, "tile_n", "mostly padding for k = 16", "sm_90a"),
        )
    ],
    nested=[{**LAYER, "winograd": form, "layout": layout} for form in FORMS for layout in LAYOUTS],
    tried=[
        ({**LAYER, "winograd": "none"}, {"implicit_gemm"}),
        *(({**LAYER, "winograd": form}, {"implicit_gemm", "winograd"}) for form in FORMS),
        ({**LAYER, "winograd": "f2", "layout": "nchw", "dtype": "float32"},
         {"implicit_gemm", "winograd", "winograd_fused"}),
        ({**LAYER, "winograd": "f2", "c": 3}, {"implicit_gemm", "direct", "winograd"}),
        ({**LAYER, "winograd": "f2", "stride": 2}, {"implicit_gemm"}),
    ],
    capped=[
        ({**LAYER, "winograd": "f2"}, TENSOR, 16 * (2 * 1568 * 128 + 2 * 128 * 128 + 4 * 1568 * 128)),
        # 49 tiles of an image, 5 channels and 9 filters up to whole eights.
        ({**LAYER, "n": 1, "c": 5, "k": 9, "winograd": "f4"},
         {**TENSOR, **F4, "transform_width": 1, "tile_n": 16, "warps_n": 1, "stages": 2},
         36 * (2 * 56 * 8 + 2 * 16 * 8 + 4 * 56 * 16)),
    ],
    meaningless=[
        ({**LAYER, **fields}, search, field, said)
        for fields, search, field, said in (
            ({"r": 5, "s": 5}, {"tunables": {"algorithm": ["winograd"]}}, "search.tunables.algorithm",
             "algorithm = winograd does not compute this problem: algorithm = implicit_gemm can"),
            ({"stride": 2}, {"tunables": {"algorithm": ["winograd"]}}, "search.tunables.algorithm",
             "algorithm = winograd does not compute this problem: algorithm = implicit_gemm can"),
            ({"r": 5, "s": 5, "padding": 2}, {"schedules": [TENSOR, {**TENSOR, **F4}]}, "search.schedules",
             "here are 5 x 5, stride 1 x 1, dilation 1 x 1, padding (2, 2) and (2, 2) and 1 groups: implicit_gemm"),
            ({"groups": 128}, {"schedules": [TENSOR]}, "search.schedules", "128 groups: direct computes them"),
            ({"winograd": "f2"}, {"tunables": {"output_tile": [3]}}, "search.tunables.output_tile", "allowed: 2, 4"),
            ({}, {"schedules": [{"algorithm": "winograd", "split_k": 2}]}, "search.schedules.0.split_k",
             "unknown tunable 'split_k'"),
        )
    ],
)  # fmt: skip


def test_a_search_for_winograd_alone_says_what_the_problem_would_have_to_allow() -> None:
    lowered = lower(conv2d(**LAYER), SM_90A, Search(tunables={"algorithm": ["winograd"]}))
    assert lowered.why_empty is not None
    assert "whose winograd is none: f2 would allow it" in lowered.why_empty
    with pytest.raises(InvalidSearch):
        lower(conv2d(**LAYER), SM_90A, Search(tunables={"output_tile": [2]}))


@pytest.mark.parametrize("ring", [{}, {"dtype": "int64"}])
def test_of_a_list_for_several_layers_winograds_schedules_are_rejected_where_another_is_left(ring: Fields) -> None:
    other = {"algorithm": "imad"} if ring else {"algorithm": "implicit_gemm"}
    first = {"algorithm": "winograd_imad" if ring else "winograd"}
    strided = conv2d(**{**LAYER, **ring, "stride": 2})
    lowered = lower(strided, SM_90A, Search(schedules=[first, other]))
    assert [candidate.schedule.get("algorithm") for candidate in lowered.candidates] == list(other.values())
    assert lowered.rejections["winograd"].count == 1
    assert "stride 2 x 2" in lowered.rejections["winograd"].message


def test_winograd_is_never_the_first_guess_and_every_level_has_the_forms_that_are_allowed() -> None:
    for form, outputs in (("f2", {2}), ("f4", {2, 4})):
        problem = conv2d(**LAYER, winograd=form)
        (first,) = lower(problem, SM_90A, LEVEL_0).candidates
        assert first.schedule.get("algorithm") == "implicit_gemm"
        candidates = lower(problem, SM_90A, Search(tunables={"algorithm": ["winograd"]})).candidates
        assert {candidate.schedule.get("output_tile") for candidate in candidates} == outputs


# ---- what is predicted

RESNET: Fields = {"h": 14, "w": 14, "c": 256, "k": 256, "padding": 1}


def predicted(arch: str, **fields: Any) -> dict[str, float]:
    """Microseconds of the fastest of level 1, by algorithm."""
    best: dict[str, float] = {}
    for candidate in lower(conv2d(**{**RESNET, **fields}), target(arch), LEVEL_1).candidates:
        algorithm, us = str(candidate.schedule.get("algorithm")), predict_uncompiled(candidate, target(arch)).us
        best[algorithm] = min(us, best.get(algorithm, us))
    return best


@pytest.mark.parametrize("images", [8, 32, 256])
def test_on_a_t4_ours_is_predicted_behind_at_every_batch(images: int) -> None:
    """Implicit GEMM has split k and several stages here; TVM's, beside which its Winograd won at 8 and 32 images, has
    not: `tests/repo/test_published_winograd.py` ranks theirs."""
    best = predicted("sm_75", n=images, dtype="float16", winograd="f2")
    assert min(best, key=lambda algorithm: best[algorithm]) == "implicit_gemm"


def test_winograd_is_predicted_to_win_where_multiplications_are_dear() -> None:
    """In fp32 on the CUDA cores; on tensor cores in fp16 what is moved costs more than what is saved."""
    for arch in ("sm_75", "sm_80", "sm_90a"):
        plain = predicted(arch, n=32, dtype="float32", winograd="f4")
        assert plain["winograd"] < 0.7 * plain["implicit_gemm"]
        halves = predicted(arch, n=8, dtype="float16", winograd="f2")
        assert halves["winograd"] > halves["implicit_gemm"]


@pytest.mark.parametrize(("form", "outputs", "fewer"), [("f2", 2, 2.25), ("f4", 4, 4.0)])
def test_work_has_the_multiplications_and_the_traffic_of_the_form(form: str, outputs: int, fewer: float) -> None:
    problem = conv2d(**{**LAYER, "n": 64, "winograd": form})
    schedule = Schedule.of({**TENSOR, "output_tile": outputs})
    work, cost = OP.work(problem, schedule, SM_90A), OP.cost(problem, schedule)
    assert work.mma == pytest.approx(64 * 28 * 28 * 128 * 128 * 9 / fewer)
    tiles, places = 64 * (28 // outputs) ** 2, (outputs + 2) ** 2
    image, filters, sums = (
        places * tiles * 128 * 2, places * 128 * 128 * 2, places * tiles * 128 * 4
    )  # fmt: skip
    assert cost.workspace_bytes == image + filters + sums
    of_filters, of_image, inverse = work.others
    x = out = 2 * 64 * 28 * 28 * 128
    # 50 MB of L2 keep the filters' matrices and F(4 x 4)'s 29 MB of the image; 51 MB and the sums they do not.
    moved = image if outputs == 2 else 0
    assert of_filters.dram_bytes == 2 * 128 * 9 * 128
    assert of_image.dram_bytes == x + moved
    assert inverse.dram_bytes == sums + out
    assert cost.launches == 4 == len(OP.functions(OP.candidate(problem, schedule).kernel))
    assert work.dram_bytes == pytest.approx(moved + sums, rel=0.02)


# ---- the reference


def in_fp32(p: Conv2dProblem, inputs: Inputs, lost: bool) -> Any:
    """As a kernel computes the largest form that is allowed."""
    outputs, element = (4 if p.winograd == "f4" else 2), "tf32" if p.allow_tf32 else p.dtype
    return winograd_cases.winograd(p, inputs, outputs, element, lost)


WITH_NODES: Fields = {"epilogue": [{"op": "bias"}, {"op": "relu"}, {"op": "residual"}]}
GEOMETRIES: dict[str, Fields] = {
    "plain": {"n": 1, "h": 6, "w": 7, "c": 3, "k": 4},
    "padding": {"n": 2, "h": 5, "w": 4, "c": 2, "k": 3, "padding": [[1, 1], [2, 2]]},
    "padding of one side": {"n": 2, "h": 5, "w": 4, "c": 2, "k": 3, "padding": [[0, 1], [2, 0]]},
    "a pixel": {"n": 1, "h": 1, "w": 1, "c": 5, "k": 2, "padding": 1},
    "epilogue": {"n": 1, "h": 4, "w": 5, "c": 2, "k": 3, "padding": 1, **WITH_NODES},
}
REFERENCES = declare.References(
    definition=convolutions.definition,
    defined={
        f"{name}, {layout}, {form}": {"layout": layout, "winograd": form, **fields}
        for name, fields in GEOMETRIES.items()
        for layout in LAYOUTS
        for form in FORMS
    },
    by_torch=convolutions.by_torch,
    in_fp32=in_fp32,
    bounded={
        f"{dtype}{' as tf32' * tf32}, {form}, {layout}": {
            "c": 6, "k": 4, "padding": 1, "dtype": dtype, "out_dtype": "float32", "allow_tf32": tf32, "winograd": form,
            "layout": layout,
        }
        for dtype, tf32 in (("float32", False), ("float32", True), ("float16", False), ("bfloat16", False))
        for form in FORMS
        for layout in LAYOUTS
    },
    on_device=[(kind, {"winograd": form, "padding": 1, "layout": layout}) for kind in ("normal", "special")
               for form, layout in zip(FORMS, LAYOUTS, strict=True)],
    on_device_rtol=1e-12,
)  # fmt: skip


@pytest.mark.parametrize("outputs", [2, 4])
def test_the_transforms_are_those_of_toom_and_cook(outputs: int) -> None:
    """Rows may change their sign in two of the three matrices."""
    image, filters, inverse = winograd_cases.matrices(outputs)
    scale = winograd_reference.FILTER_SCALE[outputs]
    ours = (
        np.array(winograd_reference.IMAGE[outputs]),
        np.array(winograd_reference.FILTERS[outputs]) / scale,
        np.array(winograd_reference.INVERSE[outputs]),
    )
    for place in range(outputs + 2):
        product_of_ours = np.einsum("i,r,o->ior", ours[0][place], ours[1][place], ours[2][:, place])
        derived = np.einsum("i,r,o->ior", image[place], filters[place], inverse[:, place])
        np.testing.assert_allclose(product_of_ours, derived, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize(
    ("form", "dtype", "measured"),
    [
        ("f2", "float16", 4.1e-4), ("f2", "bfloat16", 3.4e-3), ("f2", "tf32", 4.1e-4),
        ("f4", "float16", 2.6e-3), ("f4", "bfloat16", 2.1e-2), ("f4", "tf32", 2.6e-3),
    ],
)  # fmt: skip
def test_the_error_of_each_form_is_about_what_was_measured(form: str, dtype: str, measured: float) -> None:
    """Relative rms against float64, of what ReLU leaves of normals; decision 33 has these figures."""
    rng = np.random.default_rng(11)
    element = "float32" if dtype == "tf32" else dtype
    problem = conv2d(n=1, h=16, w=16, c=64, k=16, padding=1, dtype=element, allow_tf32=True, out_dtype="float32")
    x = winograd_cases.rounded(np.maximum(rng.standard_normal(problem.shape_of("x")), 0).astype(np.float32), dtype)
    w = winograd_cases.rounded((rng.standard_normal(problem.shape_of("w")) / 24).astype(np.float32), dtype)
    got = winograd_cases.winograd(problem, {"x": x, "w": w}, 4 if form == "f4" else 2, dtype)
    expected, _ = OP.reference(problem, {"x": x, "w": w})
    error = np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2))
    assert 0.8 * measured < error < 1.25 * measured


def test_the_bound_of_a_form_is_also_that_of_the_smaller_one_and_of_implicit_gemm() -> None:
    inputs = OP.make_inputs(conv2d(**SIZES), "normal", np.random.default_rng(3))
    none, f2, f4 = (OP.reference(conv2d(**SIZES, winograd=form), inputs)[1] for form in ("none", *FORMS))
    assert (none <= f2).all() and (f2 <= f4).all() and (f2 < f4).any()


# ---- kernels on the CPU


def verified() -> dict[str, Kernel]:
    by_name: dict[str, Kernel] = {}
    for layout, outputs in product(LAYOUTS, (2, 4)):
        tile = {"output_tile": outputs}
        for dtype in ("float16", "bfloat16", "float32"):
            words = {"layout": layout, "dtype": dtype, "epilogue": ("bias", "relu", "residual")}
            by_name[f"F({outputs}) {layout} {dtype}"] = tensor(
                OF, words, **tile, transform_width=1 + (layout == "nhwc")
            )
            words = {"layout": layout, "dtype": dtype, "align": (1, 1, 1)}
            by_name[f"F({outputs}) {layout} {dtype}, 1 element"] = tensor(
                OF, words, **tile, **REGISTERS, transform_width=1, epilogue_path="shared"
            )
        words = {"layout": layout, "epilogue": ("bias",)}
        by_name[f"F({outputs}) {layout}, CUDA cores"] = simt(OF, words, **tile, transform_width=1, stages=2)
        words = {"layout": layout, "out_dtype": "float32", "epilogue": ("bias", "masked_activation.bits.square.relu")}
        by_name[f"F({outputs}) {layout}, fp32 of fp16, masked"] = tensor(
            OF, {**words, "align": (1, 1, 4)}, **tile, **WIDE, transform_width=4 if layout == "nhwc" else 1
        )
        words = {"layout": layout, "epilogue": ("bias", "gelu", "residual")}
        by_name[f"F({outputs}) {layout}, one launch"] = fused(OF, words, **tile, thread_n=8 if outputs == 4 else 4)
    by_name["F(2) nhwc, one launch of large tiles"] = fused(
        OF, {"out_dtype": "float16"}, tile_m=32, tile_n=32, tile_k=16, thread_m=8, thread_n=8
    )
    by_name["F(2) nhwc, 8 channels"] = tensor(OF, {"epilogue": ("residual", "gelu")}, transform_width=8, stages=3)
    by_name["F(4) nhwc, 4 channels"] = tensor(OF, {"epilogue": ("mask",)}, **F4, transform_width=4, fragments=1)
    by_name["F(2) nhwc, 4 channels, CUDA cores"] = simt(OF, {}, transform_width=4, fragments=2, padding=4)
    return by_name


@pytest.mark.parametrize("name", list(verified()))
def test_every_kernel_has_its_estimates(name: str) -> None:
    kernel = verified()[name]
    assert 0.1 < OP.predicted_compile_seconds(kernel) < 2.0
    assert 32 <= OP.estimated_registers(kernel) <= 255
    assert OP.deterministic(kernel) and OP.shared_bytes(kernel) > 0


def sanitized() -> list[Kernel]:
    return [
        tensor(OF, {"epilogue": ("bias", "gelu")}),
        fused(OF, {"epilogue": ("bias",)}),
        simt(OF, {"layout": "nchw"}, **F4, transform_width=1),
    ]


@pytest.mark.parametrize("outputs", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_test_problems_have_every_tail(layout: str, outputs: int) -> None:
    kernel = tensor(OF, {"layout": layout, "align": (1, 1, 1)}, output_tile=outputs, transform_width=1)
    problems = [problem for problem in OP.test_problems(kernel) if isinstance(problem, Conv2dProblem)]
    assert any(problem.p % outputs == problem.q % outputs == 0 for problem in problems) or layout == "nchw"
    assert any(problem.p % outputs and problem.q % outputs for problem in problems)
    assert any(winograd.tiles(problem, outputs) % winograd.UNIT for problem in problems)
    assert any(problem.c % winograd.UNIT and problem.k % winograd.UNIT for problem in problems)
    assert {problem.n for problem in problems} == {1, 2, 3}
    assert {side for problem in problems for axis in problem.padding for side in axis} == {0, 1, 2}
    assert any(before != behind for problem in problems for before, behind in problem.padding)
    assert all(len(OP.test_launches(kernel, problem)) > 1 for problem in problems)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_integers_are_exact_at_full_extents(form: str, dtype: str) -> None:
    """The bound of what is compared on a GPU is 0 as well, of any number of channels."""
    problem = conv2d(n=1, h=9, w=9, c=700, k=8, padding=1, dtype=dtype, allow_tf32=True, winograd=form)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(5))
    result, bound = OP.reference(problem, inputs)
    assert (bound == 0.0).all() and len(np.unique(result)) > 50


def test_the_largest_values_of_float16_do_not_overflow() -> None:
    """The transform of F(4 x 4) would have 100 times 65504: its elements are divided by 128."""
    problem = conv2d(n=1, h=4, w=4, c=1, k=1, padding=1, dtype="float16", out_dtype="float32", winograd="f4")
    x = np.full(problem.shape_of("x"), 65504.0, np.float16)
    signs = np.sign(np.array([4, 0, -5, 0, 1, 0])[1:5]).astype(np.float16)  # within the padding
    x = x * np.outer(signs, signs).reshape(1, 4, 4, 1).astype(np.float16)
    w = np.ones(problem.shape_of("w"), np.float16)
    expected, bound = OP.reference(problem, {"x": x, "w": w})
    assert np.isfinite(bound).all() and np.isfinite(expected).all()


def test_kernels_do_not_overflow_on_the_largest_values_of_float16(tmp_path: Path) -> None:
    """Each tile has the signs of which B^T d B grows most: 100 times as large as x."""
    made: dict[str, Candidate] = {}
    for layout, outputs in product(LAYOUTS, (2, 4)):
        problem = conv2d(n=1, h=26, w=26, c=8, k=8, dtype="float16", out_dtype="float32", winograd="f4", layout=layout)
        schedule = tensor_schedule("float16", output_tile=outputs, transform_width=1, raster=0)
        made[f"{layout} F({outputs})"] = OP.candidate(problem, Schedule.of(schedule))
    built = ring_runs.built({name: each.kernel for name, each in made.items()}, tmp_path)
    signs = 65504.0 * np.resize(np.array([1, 0, -1, 0], np.float16), 26)
    image = np.outer(signs, np.sign(signs))
    for name, each in made.items():
        shape = each.problem.shape_of("x")  # type: ignore[attr-defined]
        last = name.startswith("nhwc")
        x = np.broadcast_to(image[None, :, :, None] if last else image[None, None], shape).astype(np.float16)
        w = np.random.default_rng(4).standard_normal(each.problem.shape_of("w")).astype(np.float16)  # type: ignore[attr-defined]
        expected, bound = OP.reference(each.problem, {"x": x, "w": w})
        out = built.call(each, {"x": x, "w": w})
        assert np.isfinite(out).all() and (np.abs(out - expected) <= bound).all(), name


def mutated(called: str) -> dict[str, Kernel]:
    of = Kernels(NAME, called)
    return {
        "F(2) nhwc": tensor(of, {"epilogue": ("bias",)}),
        "F(2) nhwc, narrow": tensor(of, {"align": (1, 1, 1)}, transform_width=1, **REGISTERS),
        "F(2) nchw": tensor(of, {"layout": "nchw", "epilogue": ("bias",)}, transform_width=1),
        "F(4) nhwc, bf16": tensor(of, {"dtype": "bfloat16"}, **F4),
        "F(4) nchw, tf32": tensor(of, {"layout": "nchw", "dtype": "float32"}, **F4, transform_width=1),
        "F(4) nchw, fp16": tensor(of, {"layout": "nchw", "align": (1, 1, 1)}, **F4, transform_width=1),
        "F(4) nhwc, CUDA cores": simt(of, {"epilogue": ("residual",)}, **F4),
        "F(2) nhwc, one launch": fused(of, {"epilogue": ("bias",)}),
        "F(4) nchw, one launch": fused(of, {"layout": "nchw"}, **F4, thread_n=8),
    }


FILE, ONE_LAUNCH = "conv/winograd.cuh", "conv/winograd_fused.cuh"
OF_TAP = "weights + (r * taps + s) * layer.weight_tap"
TURNED, PIXEL = "between[row][column] = after[row];", "(first_pixel + row) * layer.out_width + column"
PITCH, IMAGES, COLUMNS = "layer.image_pitch", "(shape.images * tiles_h * tiles_w)", "layer.tiles_w * outputs"
ROWS = "(int64_t(tile.image) * layer.filters + filter)"
WRONG: dict[str, tuple[str, str]] = {
    "F(2): a term of the image's transform": ("v[3] = d[1] - d[3];", "v[3] = d[1];"),
    "F(2): a coefficient of the filters' transform": ("u[3] = g[2] * 2.0f;", "u[3] = g[2];"),
    "F(4): a coefficient of the image's transform": ("d[2] * 5.0f", "d[2] * 4.0f"),
    "F(4): a sign of the image's transform": ("d[5]", "-d[5]"),
    "F(4): a coefficient of the filters' transform": ("g[0] + g[2] * 4.0f", "g[0] + g[2] * 2.0f"),
    "F(4): the last row of the filters' transform": ("u[5] = g[2] * 24.0f;", "u[5] = g[2] * 6.0f;"),
    "F(4): a coefficient of the inverse": ("outer_rest * 8.0f", "outer_rest * 4.0f"),
    "F(4): a row of the inverse": ("outer_sum * 4.0f", "outer_sum"),
    "a pass turns its columns over": (TURNED, TURNED.replace("column", "Pass::in - 1 - column")),
    "the scale of one axis of the filters": ("(1.0f / (scale * scale))", "(1.0f / scale)"),
    "tiles further apart": (f"within % {COLUMNS}", "within % layer.tiles_w * (outputs + 1)"),
    "tiles of the first image": ("image = tile / per_image;", "image = 0 * tile;"),
    "no padding": ("tile.column - layer.padding_w", "tile.column"),
    "rows above the image count": ("row >= 0", "true"),
    "columns left of the image count": ("column >= 0", "true"),
    "all images are the first": (f"tile.image * {PITCH}", f"0 * {PITCH}"),
    "every channel the first": ("channel * layer.channel_pitch", "0"),
    "the taps of a filter transposed": (OF_TAP, OF_TAP.replace("r * taps + s", "s * taps + r")),
    "the image is not made smaller": ("(1.0f / growth<C>())", "1.0f"),
    "the sums stay small": ("return value * growth<C>();", "return value;"),
    "every place the first": ("sums + place * arguments.stride_c", "sums + 0 * arguments.stride_c"),
    "the epilogue of the first filter": ("Position{filter, filter, offset}", "Position{0, 0, offset}"),
    "outputs of the first image": (ROWS, "(int64_t(0) * layer.filters + filter)"),
    "the filters where the image is": ("image + tiled.image_bytes()", "image"),
    "too few tiles": (f"rounded_up{IMAGES}", f"rounded_up({IMAGES} - 8)"),
}  # fmt: skip
WRONG_IN_ONE_LAUNCH: dict[str, tuple[str, str]] = {
    "sums of another place": ("i * C::tile_m + tile", "(i ^ 1) * C::tile_m + tile"),
    "the first channels alone": ("first_channel < layer.channels", "first_channel < C::tile_k"),
    "every block has the first tiles": ("static_cast<int>(blockIdx.x) * C::tile_m", "0 * C::tile_m"),
    "every block has the first filters": ("static_cast<int>(blockIdx.y) * C::tile_n", "0 * C::tile_n"),
    "sums of one channel": (
        "sums[i][j] = add_product<C>(a[i], b[j], sums[i][j]);",
        "sums[i][j] = add_product<C>(a[i], b[j], 0.0f);",
    ),
}
MUTATIONS = declare.Mutations(
    kernels=mutated,
    files=(FILE, ONE_LAUNCH),
    wrong={
        **{name: (FILE, *texts) for name, texts in WRONG.items()},
        **{name: (ONE_LAUNCH, *texts) for name, texts in WRONG_IN_ONE_LAUNCH.items()},
    },
    counts={"bounds": 24},
)

# ---- winners


def compiled() -> dict[str, Kernel]:
    return {
        "F(2) fp16": tensor(OF, {"epilogue": ("bias", "relu")}, tile_m=64, tile_n=64, stages=3),
        "F(4) bf16": tensor(OF, {"dtype": "bfloat16"}, **F4),
        "F(4) tf32 nchw": tensor(OF, {"dtype": "float32", "layout": "nchw"}, **F4, transform_width=1),
        "F(2) fp32": simt(OF, {}, tile_m=64, thread_m=8),
        "F(2) in one launch": fused(OF, {"epilogue": ("bias", "relu")}, tile_m=32, thread_n=8),
        "F(4) in one launch": fused(OF, {"layout": "nchw"}, **F4),
        # 8 sums are two accesses.
        "F(2) fp16, 8 channels": tensor(OF, {"epilogue": ("bias", "residual")}, transform_width=8),
        # Rows of 9 channels are aligned in the workspace.
        "F(2) fp16, 1 element": tensor(OF, {"align": (1, 1, 1)}, transform_width=1),
    }


def candidate(form: str = "f2", schedule: Fields = TENSOR, **fields: Any) -> Candidate:
    problem = conv2d(**{**LAYER, "winograd": form, **fields})
    made = Schedule.of(schedule)
    assert OP.rules(problem, made, SM_90A) == ACCEPTED
    return OP.candidate(problem, made)


def planned(layout: str, form: str, **fields: Any) -> list[Candidate]:
    width = {} if layout == "nhwc" else {"transform_width": 1}
    outputs = {"output_tile": 2 if form == "f2" else 4}
    made = [candidate(form, {**TENSOR, **outputs, **width}, layout=layout, **fields)]
    if fields.get("c", 4) % 4:
        width = {"transform_width": 1}
    plain = simt_schedule(tile_m=64, tile_n=64, thread_m=8, stages=2, raster=0, **outputs, **width)
    one_launch = {**FUSED, **outputs}
    return [*made, *(candidate(form, t, layout=layout, dtype="float32", **fields) for t in (plain, one_launch))]


FILTERS_AT = "8"  # of `b`, in which the filters' matrices are, in cukiln::conv2d::Arguments
CALLS = {
    "winner": declare.Library(
        always=True,
        candidate=lambda: candidate(
            **SIZES, epilogue=[{"op": "bias"}], schedule=tensor_schedule("float16", tile_n=32, raster=0)
        ),
        record={
            "operands": ["x", "w", "bias", "out"],
            "extents": {**SIZES, "p": 12, "q": 10, "groups": 1},
            "attributes": [1, 1, 1, 1, 1, 1, 1, 1],
        },
        refused={
            "taps": ({"w": "H(24, 5, 5, 16)"}, "ValueError",
                     "w has 5 x 5 taps and 1 groups; this kernel is for 3 x 3 and one group: look up the kernel"),
            "groups": ({"w": "H(24, 3, 3, 8)"}, "ValueError", "w has 3 x 3 taps and 2 groups"),
            "a stride": ({0: 2}, "ValueError", DO_NOT_FIT),
            "a dilation": ({6: 2}, "ValueError", DO_NOT_FIT),
            "odd channels": ({"x": "H(2, 12, 10, 15)", "w": "H(24, 3, 3, 15)"}, "ValueError",
                             "c / groups is 15; this kernel moves 2 elements at once"),
            "odd filters": ({"w": "H(23, 3, 3, 16)", "bias": "H(23)", "out": f"H(2, 12, 10, 23, {OUT})"}, "ValueError",
                            "k / groups is 23; this kernel moves 2 elements at once"),
        },
        taken={
            "another image": ({"x": "H(1, 4, 6, 16)", "out": f"H(1, 4, 6, 24, {OUT})"}, 4),
            "without padding": ({2: 0, 3: 0, 4: 0, 5: 0, "out": f"H(2, 10, 8, 24, {OUT})"}, 4),
        },
    )
}  # fmt: skip


def test_filters_are_transformed_once_for_many_calls(
    built: Mapping[tuple[str, str], Built], folder: Path, processes: Processes, fake_driver: Path
) -> None:
    """The first launch alone, into memory of the caller's; then calls without it, which read that memory."""
    winner = built[NAME, "winner"]
    bytes_ = 16 * 24 * 16 * 2
    assert winner.launch.transform == LaunchTransform(operand="w", bytes=bytes_)
    assert exported_symbols(winner.build.library) == winner_exports(winner.candidate.kernel)
    body = f"""
    from pathlib import Path
    sys.path.insert(0, {str(ROOT / "client")!r})
    from cukiln.kernels.load_kernel import Kernel
    operands = [T(shape, "float16") for shape in ((2, 12, 10, 16), (24, 3, 3, 16), (24,), (2, 12, 10, 24))]
    ones = (1,) * 8
    kernel = Kernel(library, Path("winner.so"), None)
    kernel.transform(*operands, transformed=0x74000000, attributes=ones)
    kernel(*operands, workspace=0x60000000, transformed=0x74000000, attributes=ones)
    import ctypes
    plain = ctypes.CDLL({str(winner.path)!r})
    pointers = (ctypes.c_void_p * 4)()
    extents = (ctypes.c_int64 * 18)(2, 12, 10, 16, 24, 3, 3, 12, 10, 1, *ones)
    transformed, workspace = ctypes.c_void_p(0x75000000), ctypes.c_void_p(0x60000000)
    answer = [
        kernel.transformed_bytes(*operands),
        plain.cukiln_transform(pointers, extents, transformed, None),
        plain.cukiln_launch_transformed(pointers, extents, None, None, workspace, transformed, None),
        attempt("run", *operands, 0x60000000, *ones),
        attempt("run_transformed", *operands, 0x60000000, *ones),
        attempt("transform", *operands, T(({bytes_ - 1},), "uint8"), *ones),
        attempt("transform", *operands, 0, *ones),
        attempt("run_transformed", *operands, 0, 0x74000000, *ones),
        attempt("transform", *operands, 0x74000000, 2, *ones[1:]),
    ]
    """
    environment = {"FAKE_CUDA_PEEK": FILTERS_AT, "FAKE_CUDA_CURRENT": "0", "FAKE_CUDA_CAPTURED_ELSEWHERE": "1"}
    answer, log = Child(folder, processes)(calls(winner.path, body), driver=fake_driver, **environment)
    assert "a capture is broken 0 0" not in log  # by the transform, which loads the kernel
    assert answer[:4] == [bytes_, 0, 0, None]
    assert answer[-1][0] == "ValueError" and DO_NOT_FIT in answer[-1][1]
    assert [words for _, words in answer[4:-1]] == [
        "13 arguments were given; this call takes 4 tensors, the workspace, the transformed w, then 8 numbers",
        f"the transformed w must be a tensor of {bytes_} bytes on cuda:0, or its address",
        "the transformed w begins at (nil); a multiple of 16 bytes is allowed, and no null",
        "the workspace begins at (nil); a multiple of 16 bytes is allowed, and no null",
    ]
    seen = launches(log)
    first, *others = winner.launch.functions
    grids = [tuple(function.grid) for function in (first, *others)]
    assert [launch["grid"] for launch in seen] == grids * 3
    assert [launch["function"] - seen[0]["function"] for launch in seen] == [0, 1, 2, 3] * 3
    in_workspace = 0x60000000 + 16 * 64 * 16 * 2
    assert [launch["peek"] for launch in seen] == [0x74000000] * 4 + [0x75000000] * 4 + [in_workspace] * 4


DECLARED = (
    declare.Declarations(
        operator=NAME,
        problem={**SIZES, "padding": 1},
        problems=PROBLEMS,
        searches=SEARCHES,
        references=REFERENCES,
        verifications=declare.Verifications(kernels=verified, sanitized=sanitized),
        mutations=MUTATIONS,
        random_cases=declare.RandomCases(
            cases=winograd_cases.random_cases,
            properties=winograd_cases.properties,
            spread=winograd_cases.SPREAD,
            each_run=winograd_cases.EACH_RUN,
        ),
        machine_code=declare.MachineCode(
            kernels=compiled,
            claims={
                **dict.fromkeys(
                    ("F(2) fp16", "F(4) bf16", "F(2) fp16, 1 element", "F(2) fp16, 8 channels"), claim.ALIGNED
                ),
                "F(4) tf32 nchw": (claim.by_tensor_cores, claim.copies_16_bytes),
                "F(2) fp32": (claim.on_cuda_cores, claim.loads_16_bytes),
                **dict.fromkeys(("F(2) in one launch", "F(4) in one launch"), (claim.on_cuda_cores,)),
            },
        ),
        launches=declare.Launches(
            planned={
                f"{layout} {form} {number}": lambda layout=layout, form=form, fields=fields: planned(
                    layout, form, **fields
                )
                for layout, form in product(LAYOUTS, FORMS)
                for number, fields in enumerate(({}, {"n": 3, "h": 29, "w": 23, "c": 70, "k": 66, "padding": 0}))
            }
        ),
        calls=CALLS,
        without={"job": "test_every_operator.py has one of rings and of Winograd"},
    ),
)
add_checks(globals())
