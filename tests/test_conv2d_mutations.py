"""Every barrier and bounds check of conv2d's own text and of what convolutions share (`codegen/device/conv/`) is
needed, and other wrong gathers are caught: the CPU execution notices. `codegen/device/gemm/` is mutated in
tests/test_mutations.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.operator import CONV
from codegen.operators import operator
from tests.conv2d_kernels import direct_kernel, simt_kernel, tensor_kernel
from tests.mutant_runs import AS_IT_IS, MutantVerdict, judge_mutants
from tests.mutants import Site, changed, find_sites, mutants, switched_operator

OWN = (*CONV, *operator("conv2d").files)
SIMT: Mapping[str, dict[str, Any]] = {
    "simt nhwc": {"words": {"epilogue": ("bias",)}, "stages": 2},
    "simt nchw, split": {"words": {"layout": "nchw"}, "split": "workspace"},
}
TENSOR: Mapping[str, dict[str, Any]] = {
    "fp16 nhwc": {"words": {"epilogue": ("bias",)}, "stages": 3, "tile_m": 64, "warps_m": 4},
    "fp16 nhwc, 1 element": {"words": {"align": (1, 1, 1)}, "copy": "registers", "split": "workspace"},
    # More threads than vectors of the image.
    "fp16 nhwc, wide": {"words": {}, "tile_m": 16, "tile_n": 128, "warps_m": 1, "warps_n": 4},
    "tf32 nchw": {"words": {"layout": "nchw", "dtype": "float32", "epilogue": ("bias",)}, "stages": 3},
    "bf16 nchw, stream-K": {"words": {"layout": "nchw", "dtype": "bfloat16"}, "copy": "registers", "split": "stream"},
}
SEPARATE: Mapping[str, dict[str, Any]] = {
    "separate nhwc": {"words": {"epilogue": ("bias", "residual", "relu")}, "epilogue": "separate"},
    "separate nchw": {
        "words": {"layout": "nchw", "dtype": "float32", "epilogue": ("scale", "bias", "residual")},
        "epilogue": "separate",
    },
}
DIRECT: Mapping[str, dict[str, Any]] = {
    "direct nhwc": {"words": {"align": (1, 1, 4), "epilogue": ("bias", "residual")}},
    "direct nhwc, depthwise": {"words": {"align": (4, 1, 4), "depthwise": True, "epilogue": ("bias",)}},
    "direct nhwc, neighbours": {
        "words": {"align": (4, 1, 4), "depthwise": True, "epilogue": ("bias",)},
        "window": 3,
        "pixels": 4,
    },
    # Several vectors of a pixel, and more rows of the filter than come at once.
    "direct nhwc, neighbours by 2 channels": {
        "words": {"align": (2, 1, 2), "depthwise": True},
        "window": 5,
        "threads_k": 3,
        "threads": 96,
    },
    "direct nchw": {"words": {"layout": "nchw", "align": (1, 1, 1), "epilogue": ("bias",)}, "filters": 2},
    "direct nchw, depthwise": {"words": {"layout": "nchw", "align": (1, 1, 1), "depthwise": True}, "threads_k": 2},
}
GATHER, OF_DIRECT, OF_WINDOW = "conv/gather.cuh", "conv/direct.cuh", "conv/window.cuh"
OWN_GATHER, OF_NODES, LAUNCH = "gather.cuh", "separate.cuh", "conv/launch.cuh"
ABOVE, LEFT = (f"(corner.{axis} + tap.{axis} < 0 ? 0 : corner.{axis} + tap.{axis})" for axis in "hw")
SMALLER = "gemm::smaller(Pixels::taps, arguments.k - first)"
WEIGHT = "arguments.template weight<C::channels_last>(of_all, first, tap)"
OVER_THE_END = "arguments.out_width / C::pixels + (arguments.out_width < C::pixels)"
ROW = "row += arguments.dilation_h * arguments.row_pitch;"
STORED = "store_global<width>(sums, value);"
APPLIED = "C::Epilogue::template apply_node<index>(value, Position{filter, filter, first}, arguments.epilogue);"
# What stands in the text, and what is wrong in its place.
WRONG: dict[str, tuple[str, str, str]] = {
    "rows above the image count": (GATHER, "corner.h + tap.h", ABOVE),
    "columns left of the image count": (GATHER, "corner.w + tap.w", LEFT),
    "the strides swapped": (GATHER, "p * arguments.stride_h", "p * arguments.stride_w"),
    "the padding behind for that before": (LAUNCH, "as_distance(scalars[top])", "as_distance(scalars[bottom])"),
    "the padding of the other axis": (GATHER, "arguments.padding_w", "arguments.padding_h"),
    "the dilations swapped": (GATHER, "arguments.dilation_h", "arguments.dilation_w"),
    "all images are the first": (GATHER, "image * arguments.image_pitch", "0 * arguments.image_pitch"),
    "pixels counted by rows": (GATHER, "within / arguments.out_width", "within / arguments.out_height"),
    "the inner digit never turns over": (GATHER, "at.inner >= arguments.radix_inner", "false"),
    "the middle digit never turns over": (GATHER, "at.middle >= arguments.radix_middle", "false"),
    "no carry to the middle digit": (GATHER, "step.middle + over_inner", "step.middle"),
    "no carry to the outer digit": (GATHER, "step.outer + over_middle", "step.outer"),
    "filters of the first group": (OWN_GATHER, "arguments.group_of(tile.matrix) * stride", "0 * stride"),
    "the bias of the first group": (OWN_GATHER, "group_of(matrix) * (filters / groups)", "0"),
    "channels of the first group": (OF_DIRECT, "known / (arguments.filters / arguments.groups)", "0"),
    "a depthwise filter sees its neighbour's channel": (OF_DIRECT, "j * arguments.channel_pitch", "0"),
    "the last tap lost": (OF_DIRECT, SMALLER, f"{SMALLER} - 1"),
    "taps of the first chunk again": (OF_DIRECT, WEIGHT, WEIGHT.replace("first", "0")),
    "strips go over the ends of rows": (OF_WINDOW, "(arguments.out_width - 1) / C::pixels + 1", OVER_THE_END),
    "strips of the first image": (OF_WINDOW, "arguments.images * arguments.out_height", "arguments.out_height"),
    "rows of a strip without their stride": (OF_WINDOW, "h += arguments.dilation_h;", "h += 1;"),
    "the dilation counted and not moved": (OF_WINDOW, ROW, "row += arguments.row_pitch;"),
    "every column the first": (OF_WINDOW, "x * arguments.pixel_pitch", "0 * arguments.pixel_pitch"),
    "the columns of the filter turned over": (
        OF_WINDOW,
        "shared + s * B::pitch",
        "shared + (C::window - 1 - s) * B::pitch",
    ),
    "the first pixel of a strip everywhere": (OF_WINDOW, "first + i", "first"),
    "a node takes the filter of another layout": (
        OF_NODES,
        "C::channels_last ? first : first / per_image",
        "C::channels_last ? first / per_image : first",
    ),
    "a node forgets what it did": (OF_NODES, STORED, ";"),
    "the sums are rounded between nodes": (
        OF_NODES,
        STORED,
        f"for (float& one : value.data) one = round_to_bfloat16(one); {STORED}",
    ),
    "every node applies the first": (OF_NODES, APPLIED, APPLIED.replace("<index>", "<0>")),
    "channels first written as last": (OWN_GATHER, "(pixel - image * per_image)", "pixel"),
}


def kernels_of(name: str) -> dict[str, Kernel]:
    made = ((simt_kernel, SIMT), (tensor_kernel, TENSOR), (tensor_kernel, SEPARATE), (direct_kernel, DIRECT))
    return {config: make(operator=name, **words) for make, configs in made for config, words in configs.items()}


def own_sites() -> list[Site]:
    texts = operator("conv2d").kernel_texts
    wrong = [changed(texts, name, file, old, new) for name, (file, old, new) in WRONG.items()]
    return [*find_sites({file: texts[file] for file in OWN}), *wrong]


def names() -> list[str]:
    return [one.name for one in mutants(own_sites())]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[MutantVerdict]:
    """Of every kernel as it is, and of every mutant in the kernels that reach it."""
    folder, name = tmp_path_factory.mktemp("mutants"), "conv2d_mutants"
    with switched_operator("conv2d", "Conv2d", folder / "operator", name, own_sites()):
        return judge_mutants(list(kernels_of(name).values()), folder / "build")


def test_the_kernels_pass_as_they_are(verdicts: list[MutantVerdict]) -> None:
    configs = list(kernels_of("conv2d"))
    found = {configs[one.kernel]: (one.verdict, one.message) for one in verdicts if one.number == AS_IT_IS}
    assert found == dict.fromkeys(configs, ("ok", ""))


@pytest.mark.parametrize("name", names())
def test_a_mutant_is_caught(name: str, verdicts: list[MutantVerdict]) -> None:
    number = names().index(name)
    found = [one for one in verdicts if one.number == number]
    assert found, f"no config reaches {name!r}: add one"
    assert any(one.verdict != "ok" for one in found), found


def test_a_missing_barrier_is_caught_in_every_config_that_reaches_it(verdicts: list[MutantVerdict]) -> None:
    barriers = [number for number, one in enumerate(mutants(own_sites())) if one.kind == "barrier"]
    assert len(barriers) == 2
    assert all(one.verdict != "ok" for one in verdicts if one.number in barriers)


def test_every_place_has_its_mutants() -> None:
    texts = operator("conv2d").kernel_texts
    lines = [line for file in OWN for line in texts[file].splitlines() if "bool in_bounds(" not in line]
    code = [line.partition("//")[0] for line in lines]
    found = [one.kind for one in mutants(own_sites())]
    assert found.count("bounds") == 2 * sum(line.count("in_bounds(") for line in code)
    assert found.count("barrier") == sum(line.count("__syncthreads()") for line in code)
