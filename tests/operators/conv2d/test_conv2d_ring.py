"""The three convolutions over Z/2^32 and Z/2^64: as products on the CUDA cores, and by limbs on tensor cores."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.fixed_point import truncated_numbers
from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.convolution.problem import Convolution
from codegen.operators.matmul import ring_space
from codegen.operators.matmul.grid import k_steps
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.search.rules import ACCEPTED, Accepted
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import target
from cukiln.types import LaunchTransform
from tests.operators.conv2d import convolutions
from tests.operators.conv2d.convolutions import DEFINED, DO_NOT_FIT, LAYOUTS, OUT, REGISTERS
from tests.operators.conv2d.kernels import ALIGNS, EXACT_FUSED, SIZES, Kernels, convolution
from tests.operators.conv2d.ring_cases import (
    NODES,
    SPREAD,
    SPREAD_OF_WINOGRAD,
    SQUARED,
    WINOGRAD,
    properties,
    random_cases,
)
from tests.operators.conv2d.ring_schedules import AHEAD, RINGS, SPLIT_AHEAD
from tests.operators.harness import declarations as declare
from tests.operators.harness.checks import add_checks
from tests.operators.harness.declarations import LEVEL_1, LEVEL_2, SM_90A, Fields, Rejection
from tests.support.fixtures.library import Built
from tests.support.kernels.ring_runs import UNCHAINED_K
from tests.support.kernels.spills import require_no_spills
from workers.compile.toolchain import Toolchain
from workers.processes.processes import Processes

NAMES = tuple(ALIGNS)
ONCE = {"truncation": {"policy": "exact_once"}, "rounding": "floor"}
TOLERANT = {"fraction_bits": 4, "truncation": {"policy": "tolerance", "ulp": 63}}
LAYER: Fields = {"n": 1, "h": 32, "w": 32, "c": 64, "k": 64, "padding": 1, "dtype": "int64", "fraction_bits": 18}

# ---- problems


def problems(name: str) -> declare.Problems:
    packed = {**convolutions.CANONICAL, "fraction_bits": 0, **ONCE}
    own = {"conv2d": {"winograd": "f4"}, "conv2d_dgrad": {"winograd": "f2"}, "conv2d_wgrad": {}}[name]
    int32 = {"dtype": "int32", "acc_dtype": "int32", "out_dtype": "int32"}
    int64 = {"dtype": "int64", "acc_dtype": "int64", "out_dtype": "int64"}
    refused: list[tuple[Fields, str, str]] = [
        ({"dtype": "int32", "fraction_bits": 32}, "fraction_bits", "Z/2^32 leaves a bit: 0 to 31 are allowed"),
        ({"fraction_bits": 64}, "fraction_bits", "less than or equal to 63"),
        ({"acc_dtype": "int32"}, "acc_dtype", "does not go with dtype int64; allowed: int64"),
        ({"out_dtype": "float32"}, "out_dtype", "does not go with dtype int64; allowed: int64"),
        ({"truncation": {"policy": "tolerance"}}, "truncation.tolerance.ulp", "required"),
    ]
    if name == "conv2d":
        gelu = {"op": "masked_activation", "where_set": {"op": "relu"}, "where_clear": {"op": "gelu"}}
        refused += [
            ({"epilogue": [{"op": "relu"}, {"op": "gelu"}]}, "epilogue", "node 1 is gelu; Z/2^64 computes bias, mask"),
            ({"epilogue": [gelu]}, "epilogue", "where_clear of node 0 is gelu"),
            ({**TOLERANT, "epilogue": [SQUARED]}, "epilogue", "has a square or a polynomial, which multiplies"),
        ]
    else:
        refused += [({"epilogue": [{"op": "scale", "value": 2.0}]}, "epilogue", "node 0 is scale; Z/2^64 computes")]
    return declare.Problems(
        refused=refused,
        defaults=[
            ({"padding": 1}, {**packed, **int64}),
            (
                {"padding": 1, "dtype": "int32", "fraction_bits": 9, "rounding": "nearest"},
                {**packed, **int32, "fraction_bits": 9, "rounding": "nearest"},
            ),
        ],
        alike=[
            ({}, {"rounding": "nearest", "truncation": {"policy": "tolerance", "ulp": 9}}),
            ({"padding": 1}, {"padding": 1, "allow_tf32": True, **own}),  # what is exact needs no leave
        ],
        aligned=[
            ({"fraction_bits": 9}, {**dict.fromkeys(ALIGNS[name], 2), "fraction_bits": 9, "rounding": "floor"}),
            ({"dtype": "int32"}, dict.fromkeys(ALIGNS[name], 4)),
            ({"groups": 8, "k": 24}, {"depthwise": False}),
            ({"c": 16, "k": 16, "groups": 16}, {"depthwise": False, **dict.fromkeys(ALIGNS[name], 1)}),
        ],
        in_schema=[{"operator": name, **convolutions.SMALL, **TOLERANT, "dtype": "int32"}],
        out_of_schema=[{"operator": name, **convolutions.SMALL, "dtype": "int32", "rounding": "up"}],
    )


@pytest.mark.parametrize("name", NAMES)
def test_problems_on_floats_are_keyed_without_the_fields_of_rings(name: str) -> None:
    problem = convolution(name)
    assert problem.canonical().keys().isdisjoint({"fraction_bits", "rounding", "truncation"})
    assert "fraction_bits" not in operator(name).signature(problem)


# ---- schedules

IMAD = {t.name: t.default for t in ring_space.IMAD} | {"tile_k": 16, "padding": 4}
LIMBS = {t.name: t.default for t in ring_space.LIMBS} | {
    "algorithm": "limbs", "tile_m": 32, "tile_n": 32, "warps_m": 2, "warps_n": 2,
}  # fmt: skip
BY_LIMBS = {
    **{key: value for key, value in LIMBS.items() if key not in ("split", "split_k")},
    "algorithm": "winograd_limbs", "output_tile": 4, "transform_width": 1,
}  # fmt: skip
# Sums of 20,000 products: of channels, of filters, of pixels.
LONG: dict[str, Fields] = {
    "conv2d": {"c": 2240},
    "conv2d_dgrad": {"k": 2240},
    "conv2d_wgrad": {"n": 20},
}


def searches(name: str) -> declare.Searches:
    p = problem(name)
    k = operator(name).product(p).k  # type: ignore[attr-defined]
    long = problem(name, **LONG[name])
    length = operator(name).product(long).k  # type: ignore[attr-defined]
    assert length > UNCHAINED_K
    strided = [
        Rejection(
            {**LAYER, "stride": 2}, {**LIMBS, "split": "workspace", "split_k": 2}, "split", "sums differ in length"
        )
    ]
    of_planes = {**LIMBS, **AHEAD}
    ahead = [
        Rejection(LAYER, {**of_planes, "copy": "registers"}, "limb_split", "copied by cp_async, not by copy"),
        Rejection({**LAYER, **TOLERANT}, {**of_planes, "truncate": "tile"}, "limb_split", "have zeros of their own"),
        Rejection({**LAYER, "n": 26_000, "c": 65, "k": 65}, of_planes, "index", "a plane has"),
        Rejection({**LAYER, "c": 1841, "k": 1841}, of_planes, "chain_k", "k = 16704; without carries the diagonals"),
    ]
    of_winograd = [
        Rejection({**LAYER, **TOLERANT}, {**BY_LIMBS, "truncate": "tile"}, "truncate", "truncates its outputs, once"),
        Rejection(
            LAYER, {**BY_LIMBS, "transform_width": 2}, "transform_width", "2 x 36 values of a thread, 4 words each"
        ),
        Rejection(LAYER, {**BY_LIMBS, **AHEAD, "copy": "registers"}, "limb_split", "copied by cp_async, not by copy"),
        Rejection(
            {**LAYER, "c": 3, "k": 3}, {**BY_LIMBS, **AHEAD, "transform_width": 2}, "transform_width", "2 repeats 1"
        ),
        Rejection({**LAYER, "stride": 2}, BY_LIMBS, "winograd", "and 1 groups: imad or limbs computes them"),
        Rejection(
            {**LAYER, "c": 13_216, "k": 13_216, "h": 4, "w": 4},
            BY_LIMBS,
            "chain_k",
            "diagonals of Z/2^72 hold a k of 13210",
        ),
        *(
            Rejection({**LAYER, **fields}, {**EXACT_FUSED, **changes}, rule, said, arch)
            for fields, changes, rule, said, arch in (
                (TOLERANT, {"truncate": "tile"}, "truncate", "truncates its outputs, once", "sm_90a"),
                ({"stride": 2}, {}, "winograd", "and 1 groups: imad or limbs computes them", "sm_90a"),
                ({}, {"output_tile": 4, "thread_m": 2}, "registers", "384 threads of about 190 registers", "sm_90a"),
                ({"dtype": "int32"}, {"output_tile": 4, "tile_m": 16, "tile_n": 16}, "registers", "640 thr", "sm_80"),
                ({}, {"tile_m": 16, "tile_n": 16, "thread_m": 2, "thread_n": 2}, "registers", "of about 112", "sm_90a"),
                ({}, {"tile_m": 32, "tile_n": 32, "thread_m": 2}, "threads", "each are 2048: whole warps", "sm_90a"),
                ({}, {"tile_m": 16, "tile_n": 16}, "shared_memory", "69632 bytes of shared memory; sm_75 has", "sm_75"),
                ({"h": 4, "w": 4}, {"tile_m": 16}, "tile_m", "mostly padding for 4 tiles", "sm_90a"),
                ({"c": 8, "k": 8}, {"tile_n": 16}, "tile_n", "mostly padding for k = 8", "sm_90a"),
            )
        ),
    ]
    return declare.Searches(
        rejected=[
            Rejection(LAYER, {**LIMBS, "truncate": "tile"}, "truncate", "the problem allows none"),
            Rejection(LAYER, {**IMAD, "truncate": "product"}, "truncate", f"{k} truncated parts are off by up to"),
            Rejection({**LAYER, "fraction_bits": 0}, {**IMAD, "truncate": "tile"}, "truncate", "truncates nothing"),
            Rejection({**LAYER, **LONG[name]}, LIMBS, "chain_k", f"k = {length}; without carries the diagonals"),
            Rejection(LAYER, LIMBS, "mma", "mma.sync on uint8 with k = 32 needs sm_80", "sm_75"),
            Rejection({**LAYER, "n": 2**16}, LIMBS, "index", "32 bits reach"),
            *(ahead if name in SPLIT_AHEAD else ()),
            Rejection(LAYER, {**LIMBS, "warps_m": 1, "warps_n": 1}, "registers", "registers per thread"),
            *(strided if name == "conv2d_dgrad" else ()),
            *(of_winograd if name != "conv2d_wgrad" else ()),
            *(
                Rejection(
                    {**LAYER, "layout": "nchw", "n": 2**20, "c": 8192, "k": 64, "h": 1, "w": 1, "padding": 22},
                    BY_LIMBS, "grid", "a transform has",
                ) for _ in range(name == "conv2d")
            ),
        ],
        accepted=[
            (LAYER, IMAD), (LAYER, LIMBS), ({**LAYER, **LONG[name]}, {**LIMBS, "chain_k": 512}),
            ({**LAYER, **TOLERANT}, {**LIMBS, "truncate": "tile"}),
            ({**LAYER, "dtype": "int32"}, LIMBS), ({**LAYER, "groups": 2}, LIMBS),
            *(
                ({**LAYER, **fields}, {**EXACT_FUSED, **changes})
                for fields in ({}, {"dtype": "int32", "layout": "nchw"}, TOLERANT)
                for changes in ({}, {"output_tile": 4}, {"tile_m": 16, "tile_n": 16})
                if name != "conv2d_wgrad"
            ),
        ],
        nested=[LAYER, {**LAYER, "dtype": "int32", "groups": 4}],
        tried=[
            (fields, {"imad", "limbs", *(WINOGRAD if exact and name != "conv2d_wgrad" else ())})
            for fields, exact in (
                (LAYER, True), ({**LAYER, "groups": 64}, False), ({**LAYER, "layout": "nchw", "stride": 2}, False),
                ({**LAYER, "dtype": "int32", "layout": "nchw"}, True), ({**LAYER, "dilation": 2}, False),
            )
        ],
        begun=[
            (arch, {**LAYER, "dtype": dtype, "layout": layout, **change}, "")
            for arch in ("sm_75", "sm_90a") for dtype in RINGS for layout in LAYOUTS
            for change in ({}, {"c": 3, "k": 5, "r": 5, "s": 1}, {"groups": 64, "stride": 2}, LONG[name])
        ],
        capped=[] if name != "conv2d" else [
            (LAYER, {**LIMBS, "split": "workspace", "split_k": 3}, 3 * 8 * 1024 * 64),
            ({**LAYER, "dtype": "int32"}, {**IMAD, "split": "workspace", "split_k": 2}, 2 * 4 * 1024 * 64),
        ],
        meaningless=[
            ({**LAYER, "truncation": {"policy": "tolerance", "ulp": 0}}, {"tunables": {"truncate": ["product"]}},
             "search.tunables.truncate", f"is off by up to {k - 1} units of the last bit at k = {k}"),
            (LAYER, {"schedules": [IMAD, {**IMAD, "truncate": "tile"}]}, "search.schedules.1.truncate",
             "truncates parts of a sum, and the problem's policy the whole sum alone"),
            ({**LAYER, **LONG[name]}, {"schedules": [{"algorithm": "limbs"}]}, "search.schedules.0.chain_k",
             f"hold a k of 16512, not {length}"),
            (LAYER, {"tunables": {"algorithm": ["direct"]}}, "search.tunables.algorithm", "allowed: imad, limbs"),
            *(
                ({**LAYER, **change}, {"tunables": {"algorithm": [way]}}, "search.tunables.algorithm",
                 f"{way!r} is not allowed; allowed: imad, limbs" if name == "conv2d_wgrad" else
                 f"{way} does not compute this problem: algorithm = imad and algorithm = limbs can")
                for change, way in (
                    ({"r": 5, "s": 5, "padding": 2}, "winograd_limbs"), ({"stride": 2}, "winograd_fused"),
                    ({"dilation": [1, 2]}, "winograd"), ({"groups": 2}, "winograd_imad"),
                )
            ),
            *(
                ({**LAYER, **change}, {"schedules": [{"algorithm": way}]}, "search.schedules",
                 "and 1 groups: imad or limbs computes them")
                for change in ({"r": 5, "s": 5, "padding": 2}, {"stride": 2}) for way in WINOGRAD
                if name != "conv2d_wgrad"
            ),
            ({**LAYER, "dtype": "float16", "fraction_bits": 0}, {"tunables": {"truncate": ["once"]}},
             "search.tunables.truncate", "unknown tunable"),
        ],
    )  # fmt: skip


@pytest.mark.parametrize("place", ["once", "tile", "product"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_each_problem_of_a_plan_allows_what_its_kernel_truncates_and_no_more(
    name: str, stride: int, place: str
) -> None:
    op, schedule = operator(name), {**IMAD, "truncate": place}
    own = problem(name, **{**TOLERANT, "stride": stride, "truncation": {"policy": "tolerance", "ulp": 4000}})
    (candidate,) = lower(own, SM_90A, Search(schedules=[schedule])).candidates
    problems = [*op.test_problems(candidate.kernel), *(once.problem for once in op.run_once(candidate.kernel))]
    policy = "exact_once" if place == "once" else "tolerance"
    assert {each.canonical()["truncation"]["policy"] for each in problems} == {policy}


def problem(name: str, **fields: Any) -> Convolution:
    return convolution(name, **{**LAYER, **fields})


@pytest.mark.parametrize("name", NAMES)
def test_no_level_tries_a_separate_epilogue_or_one_that_the_policy_does_not_allow(name: str) -> None:
    """By the lists of each part of the space, whose schedules are all their combinations."""
    loose = problem(name, **TOLERANT, epilogue=NODES[name][:2])
    for asked, places in ((problem(name, epilogue=NODES[name][:2]), {"once"}), (loose, {"once", "tile"})):
        lists = [part.tunables for part in operator(name).space(asked, SM_90A, LEVEL_2).parts]
        assert {place for tried in lists for place in tried.get("truncate", ())} == places
        assert all("epilogue" not in tried for tried in lists)
        candidates = lower(asked, SM_90A, Search(level=2, limit=200)).candidates
        assert {candidate.schedule.get("truncate") for candidate in candidates} == places


@pytest.mark.parametrize("name", ["conv2d", "conv2d_dgrad"])
def test_limbs_are_predicted_faster_where_there_is_much_to_multiply(name: str) -> None:
    best: dict[object, float] = {}
    for candidate in lower(problem(name, n=16), SM_90A, LEVEL_1).candidates:
        us, algorithm = predict_uncompiled(candidate, SM_90A).us, candidate.schedule.get("algorithm")
        best[algorithm] = min(us, best.get(algorithm, us))
    assert 1.2 < best["imad"] / best["limbs"] < 5.0


@pytest.mark.parametrize("name", ["conv2d", "conv2d_dgrad"])
def test_with_little_to_compute_one_launch_of_winograd_is_predicted_ahead_of_four(name: str) -> None:
    """On the CUDA cores."""
    best: dict[object, float] = {}
    for candidate in lower(problem(name), SM_90A, LEVEL_1).candidates:
        us, t = predict_uncompiled(candidate, SM_90A).us, candidate.schedule.as_dict()
        way = t["algorithm"], t.get("output_tile")
        best[way] = min(us, best.get(way, us))
    assert all(best["winograd_fused", outputs] < 0.8 * best["winograd_imad", outputs] for outputs in (2, 4))


OUTPUTS = {"conv2d": 65536, "conv2d_dgrad": 1024 * 3, "conv2d_wgrad": 64 * 27}


def numbers(name: str, p: Any, place: str) -> int:
    """Of the problem that a schedule truncates."""
    op, t = operator(name), {**IMAD, "truncate": place}
    return sum(number * truncated_numbers(of, t) for number, of in op.products(p))  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_each_output_of_resnet_18s_first_layer_is_truncated_once(name: str) -> None:
    """65,536 of them in the convolution itself: the profile's row of `facts.md`."""
    first = problem(name, c=3)
    assert operator(name).cost(first, Schedule.of(IMAD)).truncations == OUTPUTS[name]
    parts = {"conv2d": 27, "conv2d_dgrad": 576, "conv2d_wgrad": 1024}[name]
    for place, times in (("tile", -(-parts // 16)), ("product", parts)):
        assert numbers(name, problem(name, c=3, **TOLERANT), place) == times * OUTPUTS[name]


def test_squares_are_truncations_too() -> None:
    squared = problem("conv2d", c=3, epilogue=[{"op": "bias"}, SQUARED])
    assert operator("conv2d").cost(squared, Schedule.of(LIMBS)).truncations == 2 * 65536


def test_phases_of_a_stride_are_truncated_part_by_part() -> None:
    """With stride 2 and 3 x 3 filters of k = 64: 4 phases of 16 x 16 pixels have 1, 2, 2 and 4 taps."""
    strided = problem("conv2d_dgrad", c=3, stride=2, **TOLERANT)
    for place, parts in (("once", 4), ("tile", (1 + 2 + 2 + 4) * 4), ("product", (1 + 2 + 2 + 4) * 64)):
        assert numbers("conv2d_dgrad", strided, place) == parts * 256 * 3


# ---- references

OF_RINGS = {
    "int64": {"dtype": "int64", "fraction_bits": 18, "rounding": "nearest"},
    "int32": {"dtype": "int32", "fraction_bits": 9},
}


def references(name: str) -> declare.References:
    every: dict[str, Fields] = {
        f"{case}, {layout}": {"layout": layout, **fields, **OF_RINGS[list(RINGS)[(number + turned) % 2]]}
        for number, (case, fields) in enumerate(DEFINED.items())
        for turned, layout in enumerate(LAYOUTS)
    }  # fmt: skip
    chains = [NODES[name][:3], NODES[name][1:4]]
    if name == "conv2d":
        chains.append([{"op": "bias"}, SQUARED, {"op": "residual"}])
    for (number, chain), layout in product(enumerate(chains), LAYOUTS):
        small = {"n": 1, "h": 4, "w": 5, "c": 2, "k": 3, "layout": layout, "epilogue": chain}
        every[f"epilogue {number}, {layout}"] = {**small, "dtype": "int64", "fraction_bits": 31}
    named = [{"groups": 2, "stride": 2, "padding": 1, **OF_RINGS["int64"], "layout": layout} for layout in LAYOUTS]
    return declare.References(
        definition=convolutions.definition,
        defined=every,
        on_device=[("integer", {**fields, "epilogue": NODES[name][:2]}) for fields in named],
    )


@pytest.mark.parametrize("kind", ["integer", "normal"])
@pytest.mark.parametrize("dtype", RINGS)
@pytest.mark.parametrize("name", NAMES)
def test_under_a_tolerance_no_partial_sum_of_the_inputs_wraps_around(name: str, dtype: str, kind: Any) -> None:
    """Also where the ring has no room for all products of a sum."""
    op = operator(name)
    for bits, stride in ((4, 1), (29, 2)):
        small = {"n": 2, "h": 9, "w": 8, "c": 6, "k": 4, "groups": 2, "padding": 1, "stride": stride}
        tolerant = convolution(name, **{**small, **TOLERANT, "dtype": dtype, "fraction_bits": bits})
        inputs = op.make_inputs(tolerant, kind, np.random.default_rng(2))
        plain = convolution(name, **{**small, "dtype": "int64"})
        sizes = {key: np.abs(values.astype(np.int64)).astype(object) for key, values in inputs.items()}
        sums = convolutions.sums(plain, sizes)
        assert 0 < sums.max() < 2 ** (RINGS[dtype] - 1)


# ---- kernels on the CPU

EPILOGUES: dict[str, tuple[tuple[str, ...], ...]] = {
    "conv2d": (
        (), ("bias", "relu"), ("bias", "masked_activation.bits.square.relu"), ("residual", "mask"),
        ("bias", "masked_activation.bytes.polynomial3.relu"),
    ),
    "conv2d_dgrad": ((), ("residual",), ("mask",), (), ("residual", "mask")),
    "conv2d_wgrad": ((), ("bias", "relu"), ("residual",), ("mask",), ("bias",)),
}  # fmt: skip
LIMB_SCHEDULES: tuple[Fields, ...] = (
    {}, {"tile_m": 64, "tile_n": 32, "warps_m": 4, "warps_n": 2, "stages": 3}, {**REGISTERS, "tile_k": 64, "stages": 1},
    {"split": "workspace"},
)  # fmt: skip
AHEAD_SCHEDULES: tuple[Fields, ...] = (
    {},
    {"tile_k": 64, "stages": 3},
    {"tile_n": 32, "warps_n": 2},
    {"tile_m": 64, "warps_m": 4, "warps_n": 1},
)
CHANNEL_SCHEDULES: tuple[Fields, ...] = (
    {"tile_k": 64, "stages": 3}, {"split": "workspace"}, {}, {"tile_m": 64, "warps_m": 4, "tile_n": 32, "warps_n": 2},
)  # fmt: skip
IMAD_SCHEDULES: tuple[Fields, ...] = (
    {"stages": 2, "fragments": 2, "padding": 4}, {"tile_m": 64, "thread_m": 8, "tile_k": 16}, {"split": "workspace"},
    {"tile_m": 16, "tile_n": 16, "thread_m": 2, "thread_n": 2, "warp_m": 8},
)  # fmt: skip
ONE_LAUNCH_SCHEDULES: tuple[Fields, ...] = ({}, {"tile_m": 16, "tile_k": 8})


def verified(name: str) -> dict[str, Kernel]:
    """Of dtype, layout, width and algorithm any three in every combination; of a gradient's strides and of Winograd's
    forms any two."""
    of, by_name = Kernels(name), dict[str, Kernel]()
    for number, (dtype, layout, narrow) in enumerate(product(RINGS, LAYOUTS, (False, True))):
        odd = number.bit_count() % 2
        words: dict[str, Any] = {
            "layout": layout, "dtype": dtype, "bits": (0, 7, 18, RINGS[dtype] - 1)[number % 4],
            "epilogue": EPILOGUES[name][number % 5],
        }  # fmt: skip
        if words["bits"] and number % 3:
            words["rounding"] = "nearest"
        if narrow:
            words["align"] = (1, 1, 1)
        label = f"{dtype} {layout}{', 1 element' if narrow else ''}"
        if odd:
            by_name[f"imad {label}"] = of.imad(words, **IMAD_SCHEDULES[(number + 1) % 4])
        else:
            by_name[f"limbs {label}"] = of.limbs(words, **LIMB_SCHEDULES[number % 4])
        if name == "conv2d_dgrad":
            words = {**words, "strided": True}
            words.pop("align", None)
            undivided = {"split": "none"}
            if odd:
                by_name[f"limbs {label}, strided"] = of.limbs(words, **{**LIMB_SCHEDULES[number % 4], **undivided})
            else:
                by_name[f"imad {label}, strided"] = of.imad(words, **{**IMAD_SCHEDULES[number % 4], **undivided})
    for layout, rounding in zip(LAYOUTS, ("floor", "nearest"), strict=True):
        words = {"layout": layout, "bits": 7, "rounding": rounding}
        by_name[f"limbs {layout}, tiles"] = of.limbs(words, truncate="tile")
        by_name[f"imad {layout}, tiles"] = of.imad({**words, "dtype": "int32"}, truncate="tile", split="workspace")
        by_name[f"imad {layout}, products"] = of.imad(words, truncate="product")
    by_name["limbs, 1 x 1"] = of.limbs({"pointwise": True, "bits": 9, "epilogue": EPILOGUES[name][1]})
    by_name["imad, 1 x 1"] = of.imad({"pointwise": True, "dtype": "int32"})
    by_name["limbs with carries"] = of.limbs({"bits": 18}, chain_k=512)
    if name in SPLIT_AHEAD:
        for number, (dtype, layout, narrow) in enumerate(product(RINGS, LAYOUTS, (False, True))):
            words = {
                "layout": layout, "dtype": dtype, "bits": (18, 9, 0, 7)[number % 4],
                "epilogue": EPILOGUES[name][number % 5], "align": (1, 1, 1) if narrow else None,
            }  # fmt: skip
            label = f"limbs of {dtype} in planes, {layout}{', 1 element' if narrow else ''}"
            by_name[label] = of.limbs(words, **AHEAD, **CHANNEL_SCHEDULES[number % 4])
            if name == "conv2d_dgrad" and not narrow:
                undivided = {**CHANNEL_SCHEDULES[(number + 1) % 4], "split": "none"}
                by_name[f"{label}, strided"] = of.limbs({**words, "strided": True, "align": None}, **AHEAD, **undivided)
        by_name["limbs in planes, 1 x 1"] = of.limbs({"pointwise": True, "bits": 9}, **AHEAD)
        by_name["limbs in planes with carries"] = of.limbs({"bits": 18, "layout": "nchw"}, **AHEAD, chain_k=512)
    if name == "conv2d_wgrad":
        return by_name
    for number, (way, dtype, tile) in enumerate(product(("imad", "limbs"), RINGS, (2, 4))):
        if number.bit_count() % 2 != (name == "conv2d_dgrad"):
            continue
        layout = LAYOUTS[number // 2 % 2 ^ (name == "conv2d_dgrad")]
        wide = 2 if layout == "nhwc" and (tile, dtype) != (4, "int64") else 1
        words = {
            "layout": layout, "dtype": dtype, "bits": (0, 9, 18, 31)[(number + tile) % 4],
            "epilogue": EPILOGUES[name][number % 5], "align": (2, 2, 2) if wide == 2 else None,
        }  # fmt: skip
        by_name[f"{way}, {dtype}, F({tile}) {layout}"] = of.exact_winograd(
            way, words, output_tile=tile, transform_width=wide
        )
    for number, (layout, dtype, tile) in enumerate(product(LAYOUTS, RINGS, (2, 4))):
        words = {
            "layout": layout, "dtype": dtype, "bits": (0, 9, 18, 31)[(number + tile) % 4],
            "epilogue": EPILOGUES[name][number % 5], "rounding": "floor",
        }  # fmt: skip
        if words["bits"] and number % 3:
            words["rounding"] = "nearest"
        if number.bit_count() % 2 == (name == "conv2d_dgrad"):
            by_name[f"one launch, {dtype}, F({tile}) {layout}"] = of.exact_fused(
                words, output_tile=tile, **ONE_LAUNCH_SCHEDULES[number // 2 % 2]
            )
    for number, (dtype, tile, layout) in enumerate(product(RINGS, (2, 4), LAYOUTS)):
        if number.bit_count() % 2 != (name == "conv2d_dgrad"):
            continue
        wide = 2 if layout == "nhwc" and (tile, dtype) != (4, "int64") else 1
        words = {
            "layout": layout, "dtype": dtype, "bits": (9, 0, 31, 18)[number // 2],
            "epilogue": EPILOGUES[name][number % 5], "align": (2, 2, 2) if wide == 2 else None,
        }  # fmt: skip
        by_name[f"limbs of {dtype} in planes, F({tile}) {layout}"] = of.exact_winograd(
            "limbs", words, **AHEAD, output_tile=tile, transform_width=wide, **AHEAD_SCHEDULES[number // 2]
        )
    return by_name


def sanitized(name: str) -> list[Kernel]:
    return [Kernels(name).limbs({"bits": 18, "epilogue": EPILOGUES[name][1]})]


# ---- mutants


def mutated(name: str) -> dict[str, Kernel]:
    of = Kernels("conv2d", name)
    return {
        "F(2), nine limbs": of.exact_winograd("limbs", {"bits": 18}),
        "F(4), five limbs": of.exact_winograd("limbs", {"dtype": "int32", "layout": "nchw", "bits": 9}, output_tile=4),
        "F(2), nine limbs in planes": of.exact_winograd("limbs", {"bits": 18}, **AHEAD),
        "F(4), five limbs in planes": of.exact_winograd(
            "limbs", {"dtype": "int32", "layout": "nchw", "bits": 9}, **AHEAD, output_tile=4, tile_n=32, warps_n=2
        ),
        "limbs in planes": of.limbs({"bits": 18}, **AHEAD, split="workspace", tile_k=64, tile_n=32),
        "limbs of int32 in planes, channels first": of.limbs(
            {"dtype": "int32", "layout": "nchw", "bits": 9}, **AHEAD, tile_m=128, warps_m=8
        ),
        "F(4), 128 bits": of.exact_winograd("imad", {"bits": 18, "epilogue": ("bias.n",)}, output_tile=4),
        "F(4), three words": of.exact_fused({"bits": 18}, output_tile=4),
        "F(2), two words": of.exact_fused({"dtype": "int32", "bits": 9, "layout": "nchw"}),
    }


OF_WINOGRAD, ONE_LAUNCH = "conv/winograd.cuh", "conv/winograd_fused.cuh"
PLANES, CHANNELS = "conv/winograd_planes.cuh", "conv/channel_planes.cuh"
WRONG: dict[str, tuple[str, str, str]] = {
    "a bit less of the scale": (OF_WINOGRAD, "sum.value >> zeros", "sum.value >> (zeros - 1)"),
    "the inverse of another number": (OF_WINOGRAD, "0x8e38e38e38e38e39ull", "0x8e38e38e38e38e3bull"),
    "9 is not divided by": (OF_WINOGRAD, "gemm::product(multiple, inverse_of_9)", "multiple"),
    "two words": (ONE_LAUNCH, "~(~Wide(0) << 96)", "~(~Wide(0) << 64)"),
    "those that only transform multiply": (ONE_LAUNCH, "F::all_multiply || place < F::places", "true"),
    "filters of another place": (
        ONE_LAUNCH,
        "filters + (i * C::tile_k + channel) * F::filter_pitch + filter",
        "filters + ((i ^ 1) * C::tile_k + channel) * F::filter_pitch + filter",
    ),
    "places of four in another order": (PLANES, "(begin + i) % edge", "(begin + (i ^ 1)) % edge"),
    "limbs of a word in another order": (
        PLANES,
        "(begin + lane) * limbs + low + i",
        "(begin + lane) * limbs + (low + i ^ 1)",
    ),
    "the last limb is not stored": (PLANES, "low + i < limbs", "low + i + 1 < limbs"),
    "the words of one lane of two": (PLANES, "high ? words[i] : words[i | distance]", "words[i | distance]"),
    "bytes that are not turned": (PLANES, "transpose_bytes(words)", "static_cast<void>(0)"),
    "the second vector of a group's channels is the first": (
        CHANNELS,
        "(place * groups + group) * vectors + vector",
        "(place * groups + group) * vectors",
    ),
    "a plane of the filters for one of the image": (
        CHANNELS,
        "Channels<C>::limbs * filters.plane()",
        "(Channels<C>::limbs - 1) * filters.plane()",
    ),
}


def mutated_dgrad(name: str) -> dict[str, Kernel]:
    of = Kernels("conv2d_dgrad", name)
    int32 = {"dtype": "int32", "bits": 9}
    return {
        "limbs in planes": of.limbs({"bits": 18}, **AHEAD, split="workspace", tile_k=64, tile_n=32),
        "limbs in planes, strided": of.limbs({"bits": 18, "strided": True}, **AHEAD),
        "limbs of int32 in planes, channels first, strided": of.limbs(
            {**int32, "layout": "nchw", "strided": True}, **AHEAD, tile_n=32, warps_n=2
        ),
        "limbs of int32 in planes, few columns": of.limbs(int32, **AHEAD, tile_m=128, warps_m=8),
    }


OF_DGRAD = "planes.cuh"
MUTATIONS = {
    "conv2d": declare.Mutations(kernels=mutated, files=(PLANES, CHANNELS), wrong=WRONG),
    "conv2d_dgrad": declare.Mutations(
        kernels=mutated_dgrad,
        files=(OF_DGRAD,),
        wrong={
            "taps of the filters in another order": (
                OF_DGRAD,
                "(group * rows + row) * taps + tap",
                "(group * rows + row) * taps + taps - 1 - tap",
            ),
            "filters of the first group": (OF_DGRAD, "group * channels + begin", "begin"),
            "taps from the first": (OF_DGRAD, "given.last_weight", "0"),
        },
    ),
}

# ---- what nvcc makes of it


def compiled(name: str) -> dict[str, Kernel]:
    of = Kernels(name)
    kernels = {}
    if name != "conv2d_wgrad":
        kernels["limbs int64"] = of.limbs({"bits": 18}, tile_n=32, warps_n=2)
    if name != "conv2d_dgrad":
        kernels["limbs int32"] = of.limbs({"dtype": "int32", "bits": 9, "layout": "nchw"}, tile_n=32)
    if name in SPLIT_AHEAD:
        kernels["limbs in planes"] = of.limbs({"bits": 18}, **AHEAD, tile_n=32, warps_n=2)
        words = {"dtype": "int32", "bits": 9, "layout": "nchw"}
        kernels["limbs of int32 in planes"] = of.limbs(words, **AHEAD, tile_n=32)
    if name == "conv2d":
        kernels |= {
            "nine limbs": of.exact_winograd("limbs", {"bits": 18}, transform_width=2, tile_n=32, warps_n=2),
            "five limbs": of.exact_winograd("limbs", {"dtype": "int32", "layout": "nchw"}, output_tile=4),
            "nine limbs in planes": of.exact_winograd(
                "limbs", {"bits": 18}, **AHEAD, transform_width=2, tile_n=32, warps_n=2
            ),
            "five limbs in planes": of.exact_winograd(
                "limbs", {"dtype": "int32", "layout": "nchw"}, **AHEAD, output_tile=4
            ),
            "128 bits": of.exact_winograd("imad", {"bits": 18}, output_tile=4, thread_m=2, thread_n=2, warp_m=8),
            "one launch, F(2)": of.exact_fused({"bits": 18, "epilogue": EPILOGUES[name][1]}, tile_m=16, tile_n=16),
            "one launch, F(4)": of.exact_fused({"bits": 18, "layout": "nchw"}, output_tile=4),
            "one launch, int32": of.exact_fused({"dtype": "int32"}, output_tile=4, tile_n=16, tile_k=8),
        }
    return kernels


def has_the_products_of_limbs(kernel: Kernel, code: Any) -> None:
    t = kernel.tunables.as_dict()
    outputs = t["tile_m"] // t["warps_m"] // 16 * (t["tile_n"] // t["warps_n"] // 8)
    each = {"int64": 36, "int32": 10}[kernel.signature_dict["dtype"]]
    if "output_tile" in t:
        each = {"int64": 45, "int32": 15}[kernel.signature_dict["dtype"]]
    assert code.count("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32") == code.count("mma") == each * outputs
    assert code.resources.spill_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", RINGS)
def test_no_kernel_of_one_launch_spills(
    dtype: str, arch: str, tmp_path: Path, toolchain: Toolchain, processes: Processes
) -> None:
    """Of level 2."""
    asked, op, where = problem("conv2d", dtype=dtype), operator("conv2d"), target(arch)
    parts = op.space(asked, where, LEVEL_2).parts
    (part,) = (part for part in parts if part.tunables.get("algorithm") == ("winograd_fused",))
    accepted = [t for t in part.walk(lambda: None) if isinstance(op.rules(asked, t, where), Accepted)]
    assert len(accepted) > 40
    require_no_spills([op.candidate(asked, t).kernel for t in accepted], arch, tmp_path, toolchain, processes)


def has_copies_of_16_bytes(kernel: Kernel, code: Any) -> None:
    """`run` copies limbs and reads them as they are: nothing is turned in front of the tensor cores."""
    assert code.count("cp.async.cg.shared.global") > 0 == code.count("cp.async.ca.shared.global")
    assert code.count("ldmatrix.sync.aligned.m8n8.x4.shared.b16") > 0


# ---- launches and calls


def planned_winograd(name: str, fields: Fields) -> list[Candidate]:
    p, op = problem(name, **fields), operator(name)
    candidates = lower(p, SM_90A, LEVEL_1).candidates
    by_form = {
        tuple(c.schedule.as_dict().get(name) for name in ("algorithm", "output_tile", "limb_split")): c
        for c in candidates
        if c.schedule.get("algorithm") in WINOGRAD
    }
    assert len(by_form) == 8
    return [op.candidate(p, candidate.schedule) for candidate in by_form.values()]


def planned(name: str, fields: Fields) -> list[Candidate]:
    p, op = problem(name, **fields), operator(name)
    ways: list[dict[str, Any]] = [{}, {"split": "workspace", "split_k": 3}]
    if name == "conv2d_dgrad" and "stride" in fields:
        ways = ways[:1]
    bases = (IMAD, LIMBS, {**LIMBS, **AHEAD}) if name in SPLIT_AHEAD else (IMAD, LIMBS)
    return [op.candidate(p, Schedule.of({**base, **way})) for base in bases for way in ways]


def bound(candidate: Candidate) -> Schedule:
    """With as many slices as a call with so few steps gets."""
    t, op = candidate.schedule.as_dict(), operator(candidate.problem.operator)
    if "split_k" not in t:
        return candidate.schedule
    as_product = op.product(candidate.problem)  # type: ignore[attr-defined]
    if "limb_split" in t:
        as_product = op.planes(candidate.problem).padded(as_product)  # type: ignore[attr-defined]
    k = as_product.k
    return Schedule.of({**t, "split_k": min(int(t["split_k"]), k_steps(k, int(t["tile_k"])))})


def called() -> Candidate:
    p, op = convolution("conv2d", padding=1, dtype="int64", epilogue=[{"op": "bias"}]), operator("conv2d")
    schedule = Schedule.of({**LIMBS, "tile_n": 32})
    assert op.rules(p, schedule, SM_90A) == ACCEPTED
    return op.candidate(p, schedule)


LONGEST = UNCHAINED_K // 9 // 2 * 2
CALLS = {
    "limbs": declare.Library(
        candidate=called,
        refused={
            "sums beyond the accumulators": (
                {"x": f"T((2, 12, 10, {LONGEST + 2}), 'int64')", "w": f"T((24, 3, 3, {LONGEST + 2}), 'int64')"},
                "ValueError",
                f"a sum has {9 * (LONGEST + 2)} products; the accumulators of this kernel hold 16512",
            ),
            "another ring": ({"w": "T((24, 3, 3, 16), 'int32')"}, "TypeError", "w is int32; int64 is allowed"),
            "another geometry": ({0: 2}, "ValueError", DO_NOT_FIT),
        },
        taken={
            "the longest sum": (
                {"x": f"T((2, 12, 10, {LONGEST}), 'int64')", "w": f"T((24, 3, 3, {LONGEST}), 'int64')"}, 1,
            ),
        },
    ),
    "limbs in planes": declare.Library(
        candidate=lambda: in_planes(),
        always=True,
        refused={"taps": ({"w": "T((24, 5, 5, 20), 'int64')"}, "ValueError", "w has 5 x 5 taps and 1 groups")},
        taken={"another image": ({"x": "T((1, 4, 6, 20), 'int64')", "out": f"T((1, 4, 6, 24), 'int64', {OUT})"}, 4)},
    ),
}  # fmt: skip


def in_planes() -> Candidate:
    """Of 20 channels, in rows of 32 bytes of each limb."""
    p, op = convolution("conv2d", c=20, padding=1, dtype="int64", epilogue=[{"op": "bias"}]), operator("conv2d")
    schedule = Schedule.of({**BY_LIMBS, **AHEAD, "output_tile": 2, "tile_n": 32, "stages": 2})
    assert op.rules(p, schedule, SM_90A) == ACCEPTED
    return op.candidate(p, schedule)


def test_filters_that_are_transformed_once_are_limbs(built: Mapping[tuple[str, str], Built]) -> None:
    """Of 16 places 24 filters in rows of 32 bytes for each of nine limbs."""
    winner = built["conv2d", "limbs in planes"]
    assert winner.launch.transform == LaunchTransform(operand="w", bytes=16 * 24 * 9 * 32)
    loaded = ctypes.CDLL(str(winner.path))
    extents = (ctypes.c_int64 * 18)(2, 12, 10, 20, 24, 3, 3, 12, 10, 1, *(1,) * 8)
    loaded.cukiln_transformed_bytes.restype = ctypes.c_int64
    assert loaded.cukiln_transformed_bytes(extents) == winner.launch.transform.bytes
    first = winner.launch.functions[0]
    assert "transform_filters" in first.symbol and first.grid == (24 * 32 // 256, 1, 1)


def declared(name: str) -> declare.Declarations:
    without = {"job": "test_every_operator.py has one of rings and of Winograd"}
    if name != "conv2d":
        without |= {"calls": "as those of conv2d"}
    if name not in MUTATIONS:
        without |= {"mutations": "the text is that of conv2d and of matmul"}
    return declare.Declarations(
        operator=name,
        problem={**SIZES, "dtype": "int64"},
        problems=problems(name),
        searches=searches(name),
        references=references(name),
        verifications=declare.Verifications(kernels=partial(verified, name), sanitized=partial(sanitized, name)),
        mutations=MUTATIONS.get(name),
        random_cases=declare.RandomCases(
            cases=partial(random_cases, name=name),
            properties=properties,
            spread={
                **SPREAD,
                **({} if name == "conv2d_wgrad" else SPREAD_OF_WINOGRAD),
                **({"split fused": 3, "split ahead": 3} if name in SPLIT_AHEAD else {}),
            },
            each_run=12 if name == "conv2d_wgrad" else 6,
        ),
        machine_code=declare.MachineCode(
            kernels=partial(compiled, name),
            claims={
                words: (has_the_products_of_limbs, *((has_copies_of_16_bytes,) if "planes" in words else ()))
                for words in compiled(name)
                if "limbs" in words
            },
        ),
        launches=declare.Launches(
            planned={
                str(fields): partial(planned, name, fields)
                for fields in ({"h": 9, "w": 11, "c": 6, "k": 40}, {"layout": "nchw", "groups": 4, "stride": 2})
            }
            | {
                f"winograd {fields}": partial(planned_winograd, name, fields)
                for fields in ({"c": 20, "k": 33}, {"layout": "nchw", "dtype": "int32", "h": 13, "w": 15})
                if name != "conv2d_wgrad"
            },
            bound=bound,
        ),
        calls=CALLS if name == "conv2d" else None,
        without=without,
    )


DECLARED = tuple(declared(name) for name in NAMES)
add_checks(globals())
