"""Winograd as an algorithm of the gradient of a convolution's image: the convolution of the output's gradient by the
filters turned over, with channels for filters."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.conv2d_dgrad.problem import Conv2dDgradProblem
from codegen.search.rules import ACCEPTED
from codegen.search.schedule import Schedule
from tests.operators.conv2d import convolutions, winograd_cases
from tests.operators.conv2d.convolutions import DO_NOT_FIT, LAYOUTS, REGISTERS
from tests.operators.conv2d.kernels import SIZES, Kernels, convolution
from tests.operators.conv2d.winograd_cases import fused, simt, simt_schedule, tensor, tensor_schedule
from tests.operators.harness import declarations as declare
from tests.operators.harness import machine_code as claim
from tests.operators.harness.checks import add_checks
from tests.operators.harness.declarations import LEVEL_0, SM_90A, Fields, Rejection

NAME = "conv2d_dgrad"
OP, OF = operator(NAME), Kernels(NAME)
F4 = {"output_tile": 4}
FORMS = ("f2", "f4")
LAYER: Fields = {"n": 8, "h": 28, "w": 28, "c": 128, "k": 128, "padding": 1, "dtype": "float16"}
TENSOR = tensor_schedule("float16", tile_m=64, tile_n=64, warps_n=2, stages=3, raster=0)
dgrad = partial(convolution, NAME)

PROBLEMS = declare.Problems(
    refused=[({"winograd": "f8"}, "winograd", "'none', 'f2' or 'f4'")],
    defaults=[
        ({"winograd": "none"}, convolutions.CANONICAL),
        ({"winograd": "f4"}, {**convolutions.CANONICAL, "winograd": "f4"}),
    ],
    # A padding of 3 has dy read without its borders.
    alike=[({**change, "winograd": "f4"}, change) for change in ({"r": 5}, {"stride": 2}, {"padding": [1, [2, 3]]})],
)
SEARCHES = declare.Searches(
    accepted=[
        ({**LAYER, "winograd": "f2"}, TENSOR),
        ({**LAYER, "winograd": "f4", "layout": "nchw"}, {**TENSOR, **F4, "transform_width": 1}),
        ({**LAYER, "winograd": "f2", "dtype": "float32"}, simt_schedule(tile_m=64, raster=0)),
    ],
    rejected=[
        Rejection({**LAYER, "winograd": "f4", **fields}, {**TENSOR, **changes}, rule, said)
        for fields, changes, rule, said in (
            ({"winograd": "none"}, {}, "accuracy", "whose winograd is none: f2 would allow it"),
            ({"winograd": "f2"}, F4, "accuracy", "f4 would allow it"),
            ({"stride": 2}, {}, "winograd", "stride 2 x 2"),
            ({"padding": 3}, {}, "winograd", "a padding of at most 2 and one group"),
            ({"groups": 128}, {}, "winograd", "128 groups: direct computes them"),
            ({"c": 4, "k": 3}, {"transform_width": 8}, "transform_width", "transform_width = 8 repeats 4"),
        )
    ],
    tried=[
        ({**LAYER, "winograd": "none"}, {"implicit_gemm"}),
        *(({**LAYER, "winograd": form}, {"implicit_gemm", "winograd"}) for form in FORMS),
        ({**LAYER, "winograd": "f2", "padding": 3}, {"implicit_gemm"}),
    ],
    capped=[({**LAYER, "winograd": "f2"}, TENSOR, 16 * (2 * 1568 * 128 + 2 * 128 * 128 + 4 * 1568 * 128))],
)  # fmt: skip


def in_fp32(p: Conv2dDgradProblem, inputs: Any, lost: bool) -> Any:
    """As a kernel computes the largest form that is allowed."""
    layer, element = OP.layer(p), "tf32" if p.allow_tf32 else p.dtype  # type: ignore[attr-defined]
    w = convolutions.channels_first(p, inputs["w"]).transpose(1, 0, 2, 3)[:, :, ::-1, ::-1]
    turned = {"x": inputs["dy"], "w": w.transpose(0, 2, 3, 1) if p.channels_last else w}
    return winograd_cases.winograd(layer, turned, 4 if p.winograd == "f4" else 2, element, lost)


GEOMETRIES: dict[str, Fields] = {
    "plain": {"n": 1, "h": 6, "w": 7, "c": 3, "k": 4},
    "padding of one side": {"n": 2, "h": 5, "w": 4, "c": 2, "k": 3, "padding": [[0, 1], [2, 0]]},
    "a pixel": {"n": 1, "h": 1, "w": 1, "c": 5, "k": 2, "padding": 1},
    "epilogue": {"n": 1, "h": 4, "w": 5, "c": 2, "k": 3, "padding": 1, "epilogue": [{"op": "residual"}]},
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
        f"{dtype}, {form}, {layout}": {
            "c": 6, "k": 5, "padding": 1, "dtype": dtype, "out_dtype": "float32", "winograd": form, "layout": layout,
        }
        for dtype in ("float32", "float16", "bfloat16")
        for form in FORMS
        for layout in LAYOUTS
    },
    on_device=[(kind, {"winograd": form, "padding": 1, "layout": layout}) for kind in ("normal", "special")
               for form, layout in zip(FORMS, LAYOUTS, strict=True)],
    on_device_rtol=1e-12,
)  # fmt: skip


def verified() -> dict[str, Kernel]:
    by_name: dict[str, Kernel] = {}
    for layout, outputs in product(LAYOUTS, (2, 4)):
        tile = {"output_tile": outputs}
        for dtype in ("float16", "bfloat16", "float32"):
            words = {"layout": layout, "dtype": dtype, "epilogue": ("residual", "mask")}
            width = 1 + (layout == "nhwc")
            by_name[f"F({outputs}) {layout} {dtype}"] = tensor(OF, words, **tile, transform_width=width)
        narrow = {"layout": layout, "align": (1, 1, 1)}
        by_name[f"F({outputs}) {layout}, 1 element"] = tensor(OF, narrow, **tile, **REGISTERS, transform_width=1)
        plain = {"layout": layout, "epilogue": ("scale",)}
        by_name[f"F({outputs}) {layout}, CUDA cores"] = simt(OF, plain, **tile, transform_width=1)
    by_name["F(2) nchw, one launch"] = fused(OF, {"layout": "nchw", "epilogue": ("scale",)})
    by_name["F(4) nhwc, one launch"] = fused(OF, {"epilogue": ("residual",)}, **F4, thread_n=8)
    return by_name


def mutated(called: str) -> dict[str, Kernel]:
    of = Kernels(NAME, called)
    return {
        "F(2) nhwc": tensor(of, {"epilogue": ("residual",)}),
        "F(4) nchw": tensor(of, {"layout": "nchw", "align": (1, 1, 1)}, **F4, transform_width=1),
    }


FILE, OWN = "conv/winograd.cuh", "kernel.cuh"
WRONG: dict[str, tuple[str, str, str]] = {
    "the filters begin with their first tap": (FILE, "(every_tap - 1) * layer.weight_tap", "0 * layer.weight_tap"),
    "channels and filters not swapped": (FILE, "gradient ? column : row", "row"),
    "filters and channels not swapped": (FILE, "gradient ? row : column", "column"),
    "the image's padding above": (FILE, "taps - 1 - as_distance(extents[top])", "as_distance(extents[top])"),
    "the image's padding on the left": (FILE, "taps - 1 - as_distance(extents[left])", "as_distance(extents[left])"),
    "filters with the channels of the convolution": (FILE, "gradient ? shape.filters : channels", "channels"),
    "rows of x for those of dy": (OWN, "s.out_height", "s.height"),
    "a filter's taps are all the first": (FILE, "(r * taps + s) * layer.weight_tap", "0 * layer.weight_tap"),
}  # fmt: skip


def candidate(form: str = "f2", schedule: Fields = TENSOR, **fields: Any) -> Candidate:
    problem = dgrad(**{**LAYER, "winograd": form, **fields})
    made = Schedule.of(schedule)
    assert OP.rules(problem, made, SM_90A) == ACCEPTED
    return OP.candidate(problem, made)


def planned(layout: str, form: str, **fields: Any) -> list[Candidate]:
    width = {} if layout == "nhwc" else {"transform_width": 1}
    schedule = {**TENSOR, "output_tile": 2 if form == "f2" else 4, **width}
    return [candidate(form, schedule, layout=layout, **fields)]


CALLS = {
    "winner": declare.Library(
        candidate=lambda: candidate(
            **SIZES, epilogue=[{"op": "residual"}], schedule=tensor_schedule("float16", raster=0)
        ),
        record={"operands": ["dy", "w", "residual", "dx"], "attributes": [1, 1, 1, 1, 1, 1, 1, 1]},
        refused={
            "taps": ({"w": "H(24, 5, 5, 16)"}, "ValueError", "w has 5 x 5 taps and 1 groups; this kernel is for 3 x 3"),
            "a stride": ({0: 2}, "ValueError", DO_NOT_FIT),
        },
    )
}  # fmt: skip


def test_a_layer_is_the_convolution_of_dy() -> None:
    problem = dgrad(h=9, padding=[[0, 1], [2, 1]], winograd="f2", layout="nchw")
    layer = OP.layer(problem)  # type: ignore[attr-defined]
    assert (layer.h, layer.w, layer.c, layer.k) == (problem.p, problem.q, problem.k, problem.c)
    assert (layer.p, layer.q) == (problem.h, problem.w)
    assert layer.padding == ((2, 1), (0, 1))
    assert OP.of_layer(layer).digest == problem.digest  # type: ignore[attr-defined]


def test_what_is_stored_of_other_gradients_stays_known() -> None:
    problem = dgrad(**LAYER)
    assert "winograd" not in problem.canonical()
    (first,) = lower(dgrad(**LAYER, winograd="f4"), SM_90A, LEVEL_0).candidates
    (known,) = lower(problem, SM_90A, LEVEL_0).candidates
    assert first.kernel == known.kernel and first.schedule == known.schedule


@pytest.mark.parametrize("form", FORMS)
def test_integers_are_exact_at_full_extents(form: str) -> None:
    problem = dgrad(n=1, h=9, w=9, c=8, k=700, padding=1, dtype="bfloat16", winograd=form)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(5))
    result, bound = OP.reference(problem, inputs)
    assert (bound == 0.0).all() and len(np.unique(result)) > 50


DECLARED = (
    declare.Declarations(
        operator=NAME,
        problem={**SIZES, "padding": 1},
        problems=PROBLEMS,
        searches=SEARCHES,
        references=REFERENCES,
        verifications=declare.Verifications(
            kernels=verified, sanitized=lambda: [tensor(OF, {"layout": "nchw"}, **F4, transform_width=1)]
        ),
        mutations=declare.Mutations(kernels=mutated, files=(), wrong=WRONG),
        random_cases=declare.RandomCases(
            cases=partial(winograd_cases.random_cases, name=NAME),
            properties=winograd_cases.properties,
            spread=winograd_cases.SPREAD,
            each_run=winograd_cases.EACH_RUN,
        ),
        machine_code=declare.MachineCode(
            kernels=lambda: {"F(4) fp16": tensor(OF, {"epilogue": ("residual",)}, **F4)},
            claims={"F(4) fp16": claim.ALIGNED},
        ),
        launches=declare.Launches(
            planned={
                f"{layout} {form} {number}": partial(planned, layout, form, **fields)
                for layout, form in product(LAYOUTS, FORMS)
                for number, fields in enumerate(({}, {"n": 3, "h": 29, "w": 23, "c": 70, "k": 66, "padding": 0}))
            }
        ),
        calls=CALLS,
        without={"job": "test_every_operator.py has one of rings and of Winograd"},
    ),
)
add_checks(globals())
