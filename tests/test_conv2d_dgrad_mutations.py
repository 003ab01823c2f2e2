"""Every bounds check of conv2d_dgrad's own text is needed, and other wrong phases are caught: the CPU execution
notices. What convolutions share (`codegen/device/conv/`) is mutated in tests/test_conv2d_mutations.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from tests.conv2d_dgrad_kernels import direct_kernel, simt_kernel, tensor_kernel
from tests.mutant_runs import AS_IT_IS, MutantVerdict, judge_mutants
from tests.mutants import Site, changed, find_sites, mutants, switched_operator

OWN = operator("conv2d_dgrad").files
SIMT: Mapping[str, dict[str, Any]] = {
    "simt nhwc, strided": {"words": {"strided": True}, "stages": 2},
}
TENSOR: Mapping[str, dict[str, Any]] = {
    "fp16 nhwc": {"words": {"epilogue": ("residual",)}, "stages": 3, "tile_m": 64, "warps_m": 4},
    "fp16 nhwc, strided": {"words": {"strided": True}, "stages": 3},
    "fp16 nhwc, 1 element": {"words": {"align": (1, 1, 1), "strided": True}, "copy": "registers"},
    "tf32 nchw, strided": {"words": {"layout": "nchw", "dtype": "float32", "strided": True}, "stages": 3},
    "bf16 nchw, stream-K": {"words": {"layout": "nchw", "dtype": "bfloat16"}, "copy": "registers", "split": "stream"},
}
DIRECT: Mapping[str, dict[str, Any]] = {
    "direct nhwc, strided": {"words": {"align": (1, 4, 4), "strided": True, "epilogue": ("residual",)}},
    "direct nhwc, depthwise": {"words": {"align": (4, 1, 4), "depthwise": True, "strided": True}},
    "direct nhwc, neighbours": {"words": {"align": (4, 1, 4), "depthwise": True, "strided": True}, "window": 3},
    "direct nchw": {"words": {"layout": "nchw", "align": (1, 1, 1)}, "filters": 2},
    "direct nchw, strided": {"words": {"layout": "nchw", "strided": True}, "filters": 2},
}
PHASES, FILTERS, KERNEL = "phases.cuh", "filters.cuh", "kernel.cuh"
FITS = "(phase + along.padding - first * along.dilation) % along.stride != 0"
OF_PHASE = "(along.extent - 1 - phase) / along.stride + 1"
OF_PLACE = "static_cast<int>(blockIdx.x) - number * per_phase"
CORNER = "last * along.dilation - along.padding - phase"
PLAIN_CORNER = "(along.taps - 1) * along.dilation - along.padding"
BEFORE = "conv::as_distance(before)"
TAPS = "(along.taps - 1 - first) / along.tap_step + 1"
# What stands in the text, and what is wrong in its place.
WRONG: dict[str, tuple[str, str, str]] = {
    "every phase begins with the first tap": (PHASES, FITS, "false"),
    "taps tried beyond those that differ": (PHASES, "gemm::smaller(along.taps, along.tap_step)", "along.taps + 1"),
    "a phase without taps has one": (PHASES, f"first < end ? {TAPS} : 0", "1"),
    "the last tap lost": (PHASES, TAPS, "(along.taps - 1 - first) / along.tap_step"),
    "rows of a phase rounded down": (PHASES, OF_PHASE, "along.extent / along.stride"),
    "the phase forgotten in the corner": (PHASES, CORNER, CORNER.removesuffix(" - phase")),
    "padding of a whole window": (PHASES, PLAIN_CORNER, PLAIN_CORNER.replace(" - 1", "")),
    "the distances in dy swapped": (PHASES, "dilation_h = given.h.pixel_step", "dilation_h = given.w.pixel_step"),
    "the padding behind for that before": (KERNEL, BEFORE, BEFORE.replace("before", "behind")),
    "the paddings swapped": (PHASES, "padding_w = of_w.padding", "padding_w = of_h.padding"),
    "taps of the other axis": (PHASES, "k = of_h.taps * of_w.taps * channels", "k = of_h.taps * of_h.taps * channels"),
    "the first tap for the last": (PHASES, "of_h.last * weight_row + of_w.last * weight_column", "0"),
    "the filter is not turned over": (PHASES, "r * h.tap_step * weight_row", "-r * h.tap_step * weight_row"),
    "taps one after the other": (PHASES, "s * w.tap_step * weight_column", "s * weight_column"),
    "pixels of dx one after the other": (PHASES, "first_w + column * w.stride", "first_w + column"),
    "all phases at the first row": (PHASES, "first_h + row * h.stride", "row * h.stride"),
    "all images are the first": (PHASES, "int64_t(image) * h.extent", "0 * h.extent"),
    "phases of the other axis": (PHASES, "number / given.w.phases", "number / given.h.phases"),
    "phases of the taps alone": (PHASES, "number / along.tap_step", "0"),
    "a first pixel before the axis": (PHASES, "rest < 0 ? rest + along.stride : rest", "rest"),
    "filters of the first group": (FILTERS, "given.group_of(tile.matrix) * given.stride_a", "0 * given.stride_a"),
    "filters of the first group, by rows": (FILTERS, "tile.matrix * given.stride_b", "0 * given.stride_b"),
    "channels of the tile's first thread": (FILTERS, "i * V::rows_at_once * phase.weight_channel", "0"),
    "direct filters of the first group": (PHASES, "group * stride_b", "0 * stride_b"),
    "a phase without taps is left out": (KERNEL, "write_zeros<C>(phase, tile);", ";"),
    "matrices of all phases": (KERNEL, "tile.matrix -= number * matrices;", ";"),
    "direct blocks of all phases": (KERNEL, OF_PLACE, "static_cast<int>(blockIdx.x)"),
}  # fmt: skip


def kernels_of(name: str) -> dict[str, Kernel]:
    made = ((simt_kernel, SIMT), (tensor_kernel, TENSOR), (direct_kernel, DIRECT))
    return {config: make(operator=name, **words) for make, configs in made for config, words in configs.items()}


def own_sites() -> list[Site]:
    texts = operator("conv2d_dgrad").kernel_texts
    wrong = [changed(texts, name, file, old, new) for name, (file, old, new) in WRONG.items()]
    return [*find_sites({file: texts[file] for file in OWN}), *wrong]


def names() -> list[str]:
    return [one.name for one in mutants(own_sites())]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[MutantVerdict]:
    """Of every kernel as it is, and of every mutant in the kernels that reach it."""
    folder, name = tmp_path_factory.mktemp("mutants"), "conv2d_dgrad_mutants"
    with switched_operator("conv2d_dgrad", "Conv2dDgrad", folder / "operator", name, own_sites()):
        return judge_mutants(list(kernels_of(name).values()), folder / "build")


def test_the_kernels_pass_as_they_are(verdicts: list[MutantVerdict]) -> None:
    configs = list(kernels_of("conv2d_dgrad"))
    found = {configs[one.kernel]: (one.verdict, one.message) for one in verdicts if one.number == AS_IT_IS}
    assert found == dict.fromkeys(configs, ("ok", ""))


@pytest.mark.parametrize("name", names())
def test_a_mutant_is_caught(name: str, verdicts: list[MutantVerdict]) -> None:
    number = names().index(name)
    found = [one for one in verdicts if one.number == number]
    assert found, f"no config reaches {name!r}: add one"
    assert any(one.verdict != "ok" for one in found), found


def test_every_check_has_its_mutants() -> None:
    texts = operator("conv2d_dgrad").kernel_texts
    code = [line.partition("//")[0] for file in OWN for line in texts[file].splitlines()]
    found = [one.kind for one in mutants(own_sites())]
    assert found.count("bounds") == 2 * sum(line.count("in_bounds(") for line in code) > 0
