"""Every barrier and bounds check of conv2d_wgrad's own text is needed, and other wrong gathers are caught: the CPU
execution notices. What it shares with matmul (`codegen/device/gemm/`) is mutated in tests/test_mutations.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from codegen.kernel import Kernel
from codegen.operators import operator
from tests.conv2d_wgrad_kernels import direct_kernel, simt_kernel, tensor_kernel
from tests.mutant_runs import AS_IT_IS, MutantVerdict, judge_mutants
from tests.mutants import Site, changed, find_sites, mutants, switched_operator

OWN = operator("conv2d_wgrad").files
SIMT: Mapping[str, dict[str, Any]] = {
    "simt nhwc": {"words": {"epilogue": ("bias",)}, "stages": 2},
    "simt nchw, split": {"words": {"layout": "nchw"}, "split": "workspace"},
}
TENSOR: Mapping[str, dict[str, Any]] = {
    "fp16 nhwc": {"words": {"epilogue": ("bias",)}, "stages": 3, "tile_m": 64, "warps_m": 4},
    "fp16 nhwc, 1 element": {"words": {"align": (1, 1, 1)}, "copy": "registers", "split": "workspace"},
    # More threads than vectors of the image.
    "fp16 nhwc, narrow": {"words": {}, "tile_m": 128, "tile_n": 16, "warps_m": 8, "warps_n": 1},
    "tf32 nchw": {"words": {"layout": "nchw", "dtype": "float32", "epilogue": ("bias",)}, "stages": 3},
    "bf16 nchw, stream-K": {"words": {"layout": "nchw", "dtype": "bfloat16"}, "copy": "registers", "split": "stream"},
}
DIRECT: Mapping[str, dict[str, Any]] = {
    "direct nhwc": {"words": {"align": (4, 1, 1), "epilogue": ("bias", "residual")}},
    "direct nhwc, depthwise": {"words": {"align": (4, 4, 1), "depthwise": True}, "split": "workspace"},
    "direct nchw": {"words": {"layout": "nchw", "align": (1, 1, 1), "epilogue": ("bias",)}, "filters": 2},
    "direct nchw, depthwise": {
        "words": {"layout": "nchw", "align": (1, 1, 1), "depthwise": True},
        "threads_k": 1, "threads": 128, "filters": 2, "split": "workspace",
    },
}  # fmt: skip
GATHER, OF_DIRECT, LAUNCH, GEOMETRY = "gather.cuh", "direct.cuh", "kernel.cuh", "conv/launch.cuh"
CORNER_W, TAP_H = "q * arguments.stride_w - arguments.padding", "(channels_last ? third : second) * arguments.dilation"
END_W = "arguments.padding_w + arguments.walk.row_w"
BETWEEN = "arguments.between_images"
SHUFFLED = "sum += shuffle_xor(sum, apart * (C::channels_last ? C::threads_k : 1));"
ADDED = "total.data[0] += load_shared<1>(shared + r * C::tile_m + filter).data[0];"
# What stands in the text, and what is wrong in its place.
WRONG: dict[str, tuple[str, str, str]] = {
    "rows above the image count": (GATHER, "h >= 0", "true"),
    "columns left of the image count": (GATHER, "w >= 0", "true"),
    "the strides swapped": (GATHER, "p * arguments.stride_h", "p * arguments.stride_w"),
    "the padding behind for that before": (GEOMETRY, "as_distance(scalars[top])", "as_distance(scalars[bottom])"),
    "the padding of the other axis": (GATHER, f"{CORNER_W}_w", f"{CORNER_W}_h"),
    "the dilations swapped": (GATHER, f"{TAP_H}_h", f"{TAP_H}_w"),
    "all images are the first": (GATHER, "unsigned(image) * arguments.image_pitch", "0u * arguments.image_pitch"),
    "pixels counted by rows": (GATHER, "within / arguments.out_width", "within / arguments.out_height"),
    "a row of pixels never ends": (GATHER, "w >= end_w", "false"),
    "an image of pixels never ends": (GATHER, "h >= end_h", "false"),
    "a row ends where the corner's does": (GATHER, f"tap.w - {END_W}", f"0 - {END_W}"),
    "no next row": (GATHER, "over_row ? walk.row_h : 0", "0"),
    "no next row in the image": (GATHER, "over_row ? walk.row_offset : 0", "0u"),
    "no next image": (GATHER, "over_image ? walk.image_offset : 0", "0u"),
    "whole rows of a step lost": (LAUNCH, "unsigned(rows % a.out_height) * a.stride_h", "0u * a.stride_h"),
    "whole images of a step lost": (LAUNCH, "unsigned(images) * a.image_pitch", "0u * a.image_pitch"),
    "dy's images follow each other": (GATHER, f"(arguments.step_images + over) * {BETWEEN}", f"0 * {BETWEEN}"),
    "dy's image never ends": (GATHER, "within >= per_image", "false"),
    "dy of the first group": (GATHER, "tile.matrix * given.stride_a", "0 * given.stride_a"),
    "channels of the first group": (GATHER, "tile.matrix * given.stride_b", "0 * given.stride_b"),
    "the bias of the first group": (GATHER, "matrix * m + row", "row"),
    "direct: channels of the first group": (OF_DIRECT, "known / (arguments.filters / arguments.groups)", "0"),
    "a depthwise filter sees its neighbour's channel": (OF_DIRECT, "j * arguments.channel_pitch", "0"),
    "a row of the filter never ends": (OF_DIRECT, "s + 1 == arguments.filter_width", "false"),
    "one lane's sums for all of its warp's": (OF_DIRECT, SHUFFLED, "sum += 0.0f;"),
    "the sums of the first warps alone": (OF_DIRECT, ADDED, "total.data[0] += 0.0f;"),
    "a slice goes on to the last pixel": (OF_DIRECT, "pixel < share.end", "pixel < arguments.k"),
}  # fmt: skip


def kernels_of(name: str) -> dict[str, Kernel]:
    made = ((simt_kernel, SIMT), (tensor_kernel, TENSOR), (direct_kernel, DIRECT))
    return {config: make(operator=name, **words) for make, configs in made for config, words in configs.items()}


def own_sites() -> list[Site]:
    texts = operator("conv2d_wgrad").kernel_texts
    wrong = [changed(texts, name, file, old, new) for name, (file, old, new) in WRONG.items()]
    return [*find_sites({file: texts[file] for file in OWN}), *wrong]


def names() -> list[str]:
    return [one.name for one in mutants(own_sites())]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[MutantVerdict]:
    """Of every kernel as it is, and of every mutant in the kernels that reach it."""
    folder, name = tmp_path_factory.mktemp("mutants"), "conv2d_wgrad_mutants"
    with switched_operator("conv2d_wgrad", "Conv2dWgrad", folder / "operator", name, own_sites()):
        return judge_mutants(list(kernels_of(name).values()), folder / "build")


def test_the_kernels_pass_as_they_are(verdicts: list[MutantVerdict]) -> None:
    configs = list(kernels_of("conv2d_wgrad"))
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
    texts = operator("conv2d_wgrad").kernel_texts
    code = [line.partition("//")[0] for file in OWN for line in texts[file].splitlines()]
    found = [one.kind for one in mutants(own_sites())]
    assert found.count("bounds") == 2 * sum(line.count("in_bounds(") for line in code)
    assert found.count("barrier") == sum(line.count("__syncthreads()") for line in code)
