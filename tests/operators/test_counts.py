"""What operators say that a schedule does, beside what a CPU build that counts has seen it do."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.counts import Filters, Openings
from codegen.kernel import Candidate, Kernel
from codegen.operators import operator
from codegen.search.rules import Accepted
from codegen.search.search import Search
from codegen.targets import target
from tests.support.kernels.counted_runs import Counted, count_runs
from tests.support.kernels.random_cases import seed_of_this_run
from tests.support.run.each_run import SOME_ROWS, some_each_run

TARGET = target("sm_80")
MATMUL: dict[str, Any] = {"operator": "matmul", "m": 70, "n": 52, "k": 44, "layout": "nt"}
RING: dict[str, Any] = {**MATMUL, "dtype": "int64", "fraction_bits": 18}
TOLERANT = {"policy": "tolerance", "ulp": 1000}
EARLY: dict[str, Any] = {**RING, "truncation": TOLERANT}
CONV: dict[str, Any] = {
    "operator": "conv2d", "n": 2, "h": 9, "w": 11, "c": 8, "k": 24, "r": 3, "s": 3, "padding": 1, "dtype": "float16",
}  # fmt: skip
DGRAD = {**CONV, "operator": "conv2d_dgrad"}
WGRAD = {**CONV, "operator": "conv2d_wgrad"}
RING_CONV = {**CONV, "dtype": "int64", "fraction_bits": 18}
BIAS = [{"op": "bias"}]
BIAS_N = [{"op": "bias", "axis": "n"}]
SQUARES = {"where_set": {"op": "square"}, "where_clear": {"op": "square"}}
TWO_SQUARES = {"op": "masked_activation", **SQUARES}
CUBE = {"op": "polynomial", "coefficients": [0.0, 0.5, 0.25, 1.0]}
SQUARED = {"op": "masked_activation", "where_set": {"op": "square"}}
FEW = {**CONV, "c": 3, "k": 22, "dtype": "float32"}
DEPTHWISE = {**CONV, "c": 24, "groups": 24}
REDUCE: dict[str, Any] = {"operator": "reduce", "shape": [90, 48], "axes": [0]}
MASKED: dict[str, Any] = {"operator": "masked_activation", "shape": [5003], "where_set": {"op": "relu"}}
ATTENTION: dict[str, Any] = {
    "operator": "attention", "batch": 2, "seq_q": 70, "seq_kv": 150, "heads_q": 2, "head_dim_qk": 64, "head_dim_vo": 40,
}  # fmt: skip
MLA: dict[str, Any] = {"operator": "mla", "batch": 4, "seq_kv": 150, "heads_q": 20, "kv_lengths": [150, 20, 0, 33]}
MLA_PREFILL = {**MLA, "queries": "ragged", "seq_q": 21, "q_lengths": [21, 1, 7, 0], "causal": True, "lse": True}

FILTERS: tuple[Filters, Filters] = ("secret", "public")

# Name -> problem, and what of the schedule is asked for: the first of level 2 that has it; nothing: level 0.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({**MATMUL, "epilogue": BIAS_N}, {}),
    "fp32, bias along m": ({**MATMUL, "epilogue": [{"op": "bias", "axis": "m"}, {"op": "residual"}]}, {}),
    "slices": ({**MATMUL, "dtype": "float16", "k": 700, "n": 54}, {"split": "workspace"}),
    "atomic slices": ({**MATMUL, "dtype": "float16", "k": 700}, {"split": "atomic"}),
    "stream-K": ({**MATMUL, "dtype": "float16", "m": 128, "n": 64, "k": 704}, {"split": "stream"}),
    "int8": ({**MATMUL, "dtype": "int8"}, {}),
    "imad": (EARLY, {"algorithm": "imad", "truncate": "once"}),
    "imad, tiles truncated": (EARLY, {"algorithm": "imad", "truncate": "tile"}),
    "imad, products truncated": (EARLY, {"algorithm": "imad", "truncate": "product"}),
    "limbs": (EARLY, {"algorithm": "limbs", "truncate": "once"}),
    "limbs, split ahead": ({**RING, "layout": "nn", "m": 71}, {"limb_split": "ahead"}),
    "limbs of int32, tiles truncated": ({**EARLY, "dtype": "int32"}, {"algorithm": "limbs", "truncate": "tile"}),
    "limbs, slices, squares": (
        {**RING, "k": 2100, "epilogue": [{"op": "masked_activation", "where_set": {"op": "square"}}]},
        {"algorithm": "limbs", "split": "workspace"},
    ),
    "imad, squares on both sides": ({**RING, "epilogue": [TWO_SQUARES]}, {"algorithm": "imad"}),
    "limbs, squares on both sides": ({**RING, "epilogue": [*BIAS_N, TWO_SQUARES]}, {"algorithm": "limbs"}),
    "convolution, fp32": ({**CONV, "dtype": "float32", "epilogue": BIAS}, {}),
    "convolution": (CONV, {}),
    "convolution, channels first": ({**CONV, "layout": "nchw"}, {}),
    "convolution, stride": ({**CONV, "h": 12, "stride": 2}, {}),
    "convolution, groups": ({**CONV, "k": 32, "groups": 2}, {}),
    "F(2)": ({**CONV, "winograd": "f2", "epilogue": BIAS}, {"algorithm": "winograd"}),
    "F(4)": ({**CONV, "winograd": "f4", "epilogue": BIAS}, {"algorithm": "winograd", "output_tile": 4}),
    "F(2), channels first": ({**CONV, "layout": "nchw", "winograd": "f2"}, {"algorithm": "winograd"}),
    "F(2), fp32, 3 channels": ({**CONV, "c": 3, "dtype": "float32", "winograd": "f2"}, {"algorithm": "winograd"}),
    "F(2), one launch": (
        {**CONV, "dtype": "float32", "winograd": "f2", "epilogue": BIAS}, {"algorithm": "winograd_fused"}
    ),
    "F(4), one launch, channels first": (
        {**CONV, "dtype": "float32", "c": 19, "layout": "nchw", "winograd": "f4"},
        {"algorithm": "winograd_fused", "output_tile": 4},
    ),
    "separate epilogue": ({**CONV, "epilogue": [*BIAS, {"op": "relu"}]}, {"epilogue": "separate"}),
    "separate epilogue, fp32, channels first, squares": (
        {**CONV, "dtype": "float32", "w": 12, "layout": "nchw", "epilogue": [*BIAS, SQUARED, {"op": "residual"}]},
        {"epilogue": "separate"},
    ),
    "squares in fp16": ({**MATMUL, "dtype": "float16", "epilogue": [SQUARED]}, {}),
    "F(2), squares, channels first": (
        {**CONV, "layout": "nchw", "winograd": "f2", "epilogue": [*BIAS, SQUARED]}, {"algorithm": "winograd"}
    ),
    "direct, few channels": ({**FEW, "epilogue": BIAS}, {"algorithm": "direct", "filters": 4, "pixels": 2}),
    "direct, channels first, groups": (
        {**FEW, "layout": "nchw", "groups": 2, "c": 6, "k": 24, "stride": 2, "dtype": "float16"},
        {"algorithm": "direct", "filters": 4, "pixels": 2, "taps": 16},
    ),
    "direct, depthwise": ({**DEPTHWISE, "stride": 2, "epilogue": BIAS}, {"algorithm": "direct", "pixels": 4}),
    "direct, depthwise, a window": (
        {**DEPTHWISE, "r": 3, "s": 5, "padding": [1, 2]}, {"algorithm": "direct", "window": 5, "pixels": 4}
    ),
    "direct, depthwise, channels first": (
        {**DEPTHWISE, "layout": "nchw", "epilogue": BIAS}, {"algorithm": "direct", "pixels": 2}
    ),
    "direct, separate epilogue": (
        {**DEPTHWISE, "layout": "nchw", "w": 12, "epilogue": BIAS}, {"algorithm": "direct", "epilogue": "separate"}
    ),
    "image's gradient": (DGRAD, {}),
    "image's gradient, direct, stride": (
        {**FEW, "operator": "conv2d_dgrad", "k": 7, "stride": 2}, {"algorithm": "direct", "pixels": 2, "taps": 16}
    ),
    "image's gradient, direct, depthwise, stride": (
        {**DEPTHWISE, "operator": "conv2d_dgrad", "stride": 2, "dtype": "float32"}, {"algorithm": "direct"}
    ),
    "image's gradient, direct, depthwise, a window": (
        {**DEPTHWISE, "operator": "conv2d_dgrad", "stride": [2, 1], "padding": [[1, 1], [0, 1]]},
        {"algorithm": "direct", "window": 3, "pixels": 4},
    ),
    "filters' gradient, direct": (
        {**DEPTHWISE, "operator": "conv2d_wgrad", "s": 5},
        {"algorithm": "direct", "filters": 4, "elements": 8, "split": "none"},
    ),
    "filters' gradient, direct, slices": (
        {**DEPTHWISE, "operator": "conv2d_wgrad", "k": 48, "stride": 2},
        {"algorithm": "direct", "filters": 2, "split": "workspace"},
    ),
    "filters' gradient, direct, channels first, atomic slices": (
        {**DEPTHWISE, "operator": "conv2d_wgrad", "layout": "nchw"}, {"algorithm": "direct", "split": "atomic"}
    ),
    "image's gradient, stride": ({**DGRAD, "stride": 2}, {}),
    "image's gradient, no taps": ({**DGRAD, "stride": 2, "r": 1, "s": 1, "padding": 0}, {}),
    "image's gradient, F(2)": ({**DGRAD, "winograd": "f2"}, {"algorithm": "winograd"}),
    "filters' gradient": (WGRAD, {}),
    "filters' gradient, channels first": ({**WGRAD, "layout": "nchw"}, {}),
    "filters' gradient, slices": ({**WGRAD, "h": 40, "w": 40}, {"split": "workspace"}),
    "ring convolution, imad": ({**RING_CONV, "epilogue": BIAS}, {"algorithm": "imad"}),
    "ring convolution, limbs": (RING_CONV, {"algorithm": "limbs"}),
    "ring convolution, limbs split ahead": (
        {**RING_CONV, "epilogue": BIAS}, {"algorithm": "limbs", "limb_split": "ahead"}
    ),
    "ring convolution of int32, limbs split ahead, groups, stride": (
        {**RING_CONV, "dtype": "int32", "layout": "nchw", "c": 10, "groups": 2, "stride": 2},
        {"algorithm": "limbs", "limb_split": "ahead"},
    ),
    "ring convolution, limbs split ahead, slices": (
        {**RING_CONV, "n": 1, "h": 4, "w": 5, "c": 250, "k": 16},
        {"algorithm": "limbs", "limb_split": "ahead", "split": "workspace"},
    ),
    "ring convolution, F(2) by limbs": ({**RING_CONV, "epilogue": BIAS}, {"algorithm": "winograd_limbs"}),
    "ring convolution, F(4) by imad": (RING_CONV, {"algorithm": "winograd_imad", "output_tile": 4}),
    "ring convolution, F(2) by limbs in planes": (
        {**RING_CONV, "epilogue": BIAS}, {"algorithm": "winograd_limbs", "limb_split": "ahead"}
    ),
    "ring convolution of int32, F(4) by limbs in planes, channels first": (
        {**RING_CONV, "dtype": "int32", "c": 19, "layout": "nchw"},
        {"algorithm": "winograd_limbs", "limb_split": "ahead", "output_tile": 4},
    ),
    "image's gradient over a ring, F(4) by limbs in planes": (
        {**DGRAD, "dtype": "int64", "fraction_bits": 18},
        {"algorithm": "winograd_limbs", "limb_split": "ahead", "output_tile": 4},
    ),
    "ring convolution of int32, F(2)": ({**RING_CONV, "dtype": "int32"}, {"algorithm": "winograd_limbs"}),
    "ring convolution, F(2) in one launch": (
        {**RING_CONV, "epilogue": [*BIAS, {"op": "masked_activation", "where_set": {"op": "square"}}]},
        {"algorithm": "winograd_fused"},
    ),
    "ring convolution of int32, F(4) in one launch, channels first": (
        {**RING_CONV, "dtype": "int32", "c": 19, "layout": "nchw"}, {"algorithm": "winograd_fused", "output_tile": 4},
    ),
    "ring convolution, image's gradient, F(4) in one launch": (
        {**DGRAD, "dtype": "int64", "fraction_bits": 18}, {"algorithm": "winograd_fused", "output_tile": 4},
    ),
    "ring convolution, image's gradient": ({**DGRAD, "dtype": "int64", "fraction_bits": 18, "stride": 2}, {}),
    "ring convolution, image's gradient, stride, tiles truncated": (
        {**DGRAD, "dtype": "int64", "fraction_bits": 18, "stride": 2, "truncation": TOLERANT},
        {"algorithm": "imad", "truncate": "tile"},
    ),
    "ring convolution, image's gradient, no taps, products truncated": (
        {
            **DGRAD, "dtype": "int32", "fraction_bits": 9, "stride": 2, "r": 1, "s": 1, "padding": 0,
            "truncation": TOLERANT,
        },
        {"algorithm": "imad", "truncate": "product"},
    ),
    "ring convolution, image's gradient, limbs split ahead": (
        {**DGRAD, "dtype": "int64", "fraction_bits": 18}, {"algorithm": "limbs", "limb_split": "ahead"}
    ),
    "ring convolution, image's gradient, limbs split ahead, stride": (
        {**DGRAD, "dtype": "int32", "fraction_bits": 9, "layout": "nchw", "k": 20, "c": 10, "groups": 2, "stride": 2},
        {"algorithm": "limbs", "limb_split": "ahead"},
    ),
    "ring convolution, filters' gradient": ({**WGRAD, "dtype": "int64", "fraction_bits": 18}, {}),
    "masked, over a ring": (
        {**MASKED, "where_set": {"op": "square"}, "dtype": "int64", "fraction_bits": 18}, {"algorithm": "vectorised"}
    ),
    "masked, over a ring, squares on both sides": (
        {**MASKED, **SQUARES, "dtype": "int64", "fraction_bits": 18},
        {"algorithm": "vectorised"},
    ),
    "masked": ({**MASKED, "dtype": "float16"}, {}),
    "masked, bytes": ({**MASKED, "mask": "bytes"}, {}),
    "masked, squares in fp32": ({**MASKED, **SQUARES}, {}),
    "masked, lists": ({**MASKED, **SQUARES, "dtype": "float16"}, {"algorithm": "gather_scatter"}),
    "masked, lists of bytes over a ring": (
        {**MASKED, **SQUARES, "mask": "bytes", "dtype": "int64", "fraction_bits": 18}, {"algorithm": "gather_scatter"}
    ),
    **{
        f"{name} {kept}": ({"operator": name, "shape": [7, 300], **fields}, {"algorithm": kept, "row_threads": threads})
        for name, fields in (
            ("softmax", {"dtype": "float16"}), ("layer_norm", {"dtype": "bfloat16"}),
            ("rms_norm", {"out_dtype": "float16"}),
        )
        for kept, threads in (("registers", 64), ("shared", 16), ("online", 8))
    },
    "layer_norm without gamma and beta": (
        {"operator": "layer_norm", "shape": [9, 40], "scale": False, "shift": False}, {}
    ),
    "sum of rows": ({**REDUCE, "axes": [1]}, {}),
    "sum of columns": ({**REDUCE, "dtype": "float16", "out_dtype": "float32"}, {}),
    "sum of rows, slices": ({**REDUCE, "shape": [5, 5000], "axes": [1]}, {"split": "workspace"}),
    "variance of columns, slices": (
        {**REDUCE, "shape": [700, 72], "fn": "variance", "map": "square"}, {"split": "workspace"}
    ),
    "sum of squares of integers": ({**REDUCE, "dtype": "int32", "fn": "sum_of_squares"}, {}),
    "sums over a ring": ({**REDUCE, "dtype": "int64"}, {}),
    "logsumexp": ({**REDUCE, "axes": [1], "fn": "logsumexp"}, {}),
    "argmax": ({**REDUCE, "axes": [1], "fn": "argmax"}, {}),
    "bias gradient that writes the map": (
        {**REDUCE, "dtype": "float16", "map": "gelu_grad", "write_map": True, "epilogue": [{"op": "residual"}]}, {}
    ),
    "relu's gradient of axes in another order": (
        {**REDUCE, "shape": [6, 5, 8], "strides": [1, 48, 6], "axes": [1], "map": "relu_grad"}, {}
    ),
    "sum of squares of products": ({**REDUCE, "axes": [0, 1], "map": "multiply", "fn": "sum_of_squares"}, {}),
    "attention": (ATTENTION, {}),
    "attention, a group": ({**ATTENTION, "heads_kv": 1, "causal": True, "lse": True}, {"tile_kv": 32, "stages": 2}),
    "attention, ragged": (
        {
            **ATTENTION, "batch": 5, "lengths": "ragged", "q_lengths": [70, 1, 0, 33, 64],
            "kv_lengths": [150, 20, 30, 0, 64], "causal": True, "lse": True,
        },
        {"tile_kv": 32, "stages": 2},
    ),
    **{
        f"attention, pages of {size}": (
            {
                **ATTENTION, "batch": 5, "lengths": "paged", "page_size": size, "q_lengths": [70, 1, 0, 33, 64],
                "kv_lengths": [150, 20, 30, 0, 64], "causal": size > 1, "head_dim_vo": 64 if size == 64 else 40,
            },
            {"tile_kv": tile_kv, "stages": 2},
        )
        for size, tile_kv in ((1, 32), (16, 64), (64, 32))
    },
    "attention, a window by single elements": (
        {**ATTENTION, "head_dim_qk": 47, "head_dim_vo": 33, "window_left": 30, "window_right": 9, "dtype": "bfloat16"},
        {"tile_q": 32, "tile_kv": 16, "q_in": "shared"},
    ),
    "attention, splits": ({**ATTENTION, "seq_kv": 700, "lse": True}, {"split_kv": 4}),
    "attention, splits of a window by single elements": (
        {**ATTENTION, "heads_kv": 1, "head_dim_vo": 33, "window_left": 80, "causal": True, "dtype": "bfloat16"},
        {"tile_kv": 16, "split_kv": 2},
    ),
    "attention, splits of one query": (
        {**ATTENTION, "seq_q": 1, "seq_kv": 1100, "heads_q": 8, "heads_kv": 1, "head_dim_vo": 36},
        {"tile_kv": 32, "split_kv": 16},
    ),
    "attention, packed": (
        {**ATTENTION, "seq_q": 9, "heads_q": 6, "heads_kv": 2, "causal": True, "lse": True},
        {"packing": "group", "tile_q": 32, "tile_kv": 32, "stages": 2},
    ),
    "attention, packed, a group of several tiles, splits of a window": (
        {**ATTENTION, "seq_q": 3, "heads_q": 40, "heads_kv": 1, "window_left": 70, "causal": True},
        {"packing": "group", "tile_q": 16, "tile_kv": 16, "split_kv": 2},
    ),
    "attention, packed, ragged": (
        {
            **ATTENTION, "batch": 5, "lengths": "ragged", "heads_q": 6, "heads_kv": 2, "q_lengths": [30, 1, 0, 20, 8],
            "kv_lengths": [150, 20, 30, 0, 64], "causal": True, "lse": True,
        },
        {"packing": "group", "tile_q": 32, "tile_kv": 32},
    ),
    "attention, a list of tiles": (
        {
            **ATTENTION, "batch": 40, "heads_q": 4, "heads_kv": 2, "lengths": "ragged",
            "q_lengths": [*[1, 0, 40, 17] * 10], "kv_lengths": [*[40, 7, 0, 20, 33] * 8], "causal": True, "lse": True,
        },
        {"tile_q": 16, "tile_kv": 32, "walkers": 108},
    ),
    "attention, a list of tiles, packed, pages": (
        {
            **ATTENTION, "batch": 40, "heads_q": 12, "heads_kv": 4, "lengths": "paged", "page_size": 16,
            "q_lengths": [*[1, 0, 9, 3] * 10], "kv_lengths": [*[40, 7, 0, 20, 33] * 8],
        },
        {"packing": "group", "tile_q": 16, "tile_kv": 32, "walkers": 108},
    ),
    "attention, packed, pages, splits": (
        {
            **ATTENTION, "batch": 5, "lengths": "paged", "page_size": 16, "heads_q": 10, "heads_kv": 2,
            "q_lengths": [3, 1, 0, 2, 1],
            "kv_lengths": [150, 20, 30, 0, 64], "head_dim_vo": 64,
        },
        {"packing": "group", "tile_q": 16, "tile_kv": 32, "split_kv": 2},
    ),
    "mla, pages of 1": ({**MLA, "page_size": 1}, {"tile_q": 16, "tile_kv": 32, "stages": 2}),
    "mla, pages of 16, any queries": ({**MLA_PREFILL, "page_size": 16}, {"tile_q": 32, "tile_kv": 32}),
    "mla, pages of 64, any queries, splits": ({**MLA_PREFILL, "page_size": 64}, {"tile_kv": 16, "split_kv": 4}),
    "mla, splits": ({**MLA, "page_size": 16, "lse": True}, {"tile_q": 16, "tile_kv": 32, "split_kv": 2}),
}  # fmt: skip

# Always `long`: they have no operator, algorithm, kind of split, of truncation or of packing, and no value of a
# signature that the others leave out.
REPEATS = (
    "imad, squares on both sides", "convolution, fp32", "convolution", "convolution, channels first",
    "convolution, stride", "convolution, groups", "squares in fp16", "F(4)", "F(2), channels first",
    "F(4), one launch, channels first", "F(2), squares, channels first", "direct, few channels",
    "direct, channels first, groups", "direct, depthwise, a window", "direct, depthwise, channels first",
    "direct, separate epilogue", "image's gradient, direct, stride", "image's gradient, direct, depthwise, a window",
    "image's gradient, stride", "image's gradient, no taps", "filters' gradient, channels first",
    "ring convolution, limbs split ahead", "ring convolution of int32, F(2)",
    "ring convolution of int32, F(4) by limbs in planes, channels first",
    "ring convolution of int32, F(4) in one launch, channels first",
    "ring convolution, image's gradient, limbs split ahead", "masked, over a ring, squares on both sides",
    "masked, squares in fp32", "sum of rows", "sum of columns", "attention", "attention, a group",
    "attention, ragged", "attention, pages of 16", "attention, a window by single elements",
    "attention, splits", "attention, splits of one query", "attention, packed",
    "attention, packed, a group of several tiles, splits of a window", "mla, splits",
)  # fmt: skip

# These have no product of one length for each output.
WITHOUT_SUMS = (
    "masked", "attention", "mla", "softmax", "layer_norm", "rms_norm", "sum", "variance", "logsumexp", "argmax",
    "bias gradient", "relu's gradient",
)  # fmt: skip
# Sums of these differ in length.
UNEVEN = (
    "ring convolution, image's gradient", "ring convolution, image's gradient, limbs split ahead, stride",
    "ring convolution, image's gradient, stride, tiles truncated",
    "ring convolution, image's gradient, no taps, products truncated",
    "image's gradient, stride", "image's gradient, no taps", "image's gradient, direct, stride",
    "image's gradient, direct, depthwise, stride", "image's gradient, direct, depthwise, a window",
)  # fmt: skip


MORE = 4


def some_cases() -> set[str]:
    """Of the cases that repeat no other, in a run of `make test`: one of each operator, and some more."""
    by_seed, by_operator = random.Random(seed_of_this_run()), dict[str, list[str]]()
    for name, (fields, _) in CASES.items():
        if name not in REPEATS:
            by_operator.setdefault(fields["operator"], []).append(name)
    every = [name for names in by_operator.values() for name in names]
    return {*map(by_seed.choice, by_operator.values()), *by_seed.sample(every, MORE)} if SOME_ROWS else set()


def _marked(names: Iterable[str]) -> list[Any]:
    of_this_run = some_cases()
    return [pytest.param(name, marks=() if name in of_this_run else pytest.mark.long) for name in names]


def candidate(fields: dict[str, Any], asked: dict[str, Any]) -> Candidate:
    op = operator(fields["operator"])
    problem = op.parse(fields)
    space = op.space(problem, TARGET, Search(level=2 if asked else 0))
    for schedule in space.walk(lambda: None):
        tunables = schedule.as_dict()
        has = all(tunables.get(name) == value for name, value in asked.items())
        if has and isinstance(op.rules(problem, schedule, TARGET), Accepted):
            return op.candidate(problem, schedule)
    raise AssertionError(f"no schedule of {fields} has {asked}")


@pytest.fixture(scope="module")
def candidates(request: pytest.FixtureRequest) -> dict[str, Candidate]:
    """Of the cases that this run's selection of tests asks for, and "fp32"."""
    items = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module
    ]
    asked = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    return {name: candidate(*case) for name, case in CASES.items() if name in {*asked, "fp32"}}


@pytest.fixture(scope="module")
def counted(candidates: dict[str, Candidate], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counted]:
    """All bits of masks are set: a function of some elements alone is counted as one of all. Of lists every second one
    is."""
    masks: dict[str, np.ndarray[Any, Any]] = {
        "masked, lists": np.full(-(-5003 // 32), -0x55555556, np.int32),
        "masked, lists of bytes over a ring": (np.arange(5003) % 2).astype(np.uint8),
    }
    return count_runs(candidates, tmp_path_factory.mktemp("counted"), masks)


def written_outputs(one: Candidate, run: Counted) -> int:
    """Elements of out that the last function has stored."""
    op = operator(one.problem.operator)
    last = op.launches(one.problem, one.schedule, TARGET)[-1].function
    (out,) = (operand for operand in op.operands(one.problem) if operand.role == "out")
    return run.moved(last)[1] // {"float32": 4, "float16": 2, "int32": 4, "int64": 8}[out.dtype]


@pytest.mark.parametrize("name", _marked(CASES))
def test_launches_are_those_of_the_run(
    name: str, candidates: dict[str, Candidate], counted: dict[str, Counted]
) -> None:
    one, run = candidates[name], counted[name]
    op = operator(one.problem.operator)
    launches = op.launches(one.problem, one.schedule, TARGET)
    assert [(launch.function, launch.times) for launch in launches] == [
        (run.functions[count.function], count.times) for count in run.counts if count.primitive == "launch"
    ]
    assert sum(launch.times for launch in launches) == op.cost(one.problem, one.schedule).launches


@pytest.mark.parametrize("name", _marked(CASES))
def test_multiplications_and_truncations_are_those_of_the_run(
    name: str, candidates: dict[str, Candidate], counted: dict[str, Counted]
) -> None:
    """By launch and primitive. Of limbs the run counts products of bytes."""
    one, run = candidates[name], counted[name]
    op = operator(one.problem.operator)
    for launch in op.launches(one.problem, one.schedule, TARGET):
        computed = {
            part.name: (part.times, part.limb_products or part.multiplications)
            for part in launch.primitives
            if not part.bytes_read + part.bytes_written
        }
        seen = run.of(launch.function).items()
        assert computed == {
            primitive: (count.times, count.multiplications)
            for primitive, count in seen
            if count.multiplications or primitive == "truncate"
        }
    truncations = run.of().get("truncate")
    assert op.cost(one.problem, one.schedule).truncations == (truncations.times if truncations else 0)


@pytest.mark.long
def test_the_cases_of_make_test_have_every_class_of_all() -> None:
    every = {name: candidate(*case).kernel for name, case in CASES.items()}
    kept = [_classes(kernel) for name, kernel in every.items() if name not in REPEATS]
    assert set[object]().union(*kept) == set[object]().union(*map(_classes, every.values()))


def _classes(kernel: Kernel) -> set[object]:
    tunables, signature = kernel.tunables.as_dict(), dict(kernel.signature_dict)
    nodes = [str(node).partition(".")[0] for node in signature.pop("epilogue", [])]
    way = (
        *sorted(tunables),
        *(tunables.get(name) for name in ("algorithm", "limb_split", "split", "truncate", "packing")),
    )
    values = [(name, str(value)) for name, value in signature.items() if not name.startswith(("align", "columns"))]
    return {(kernel.operator, part) for part in (way, *values, *nodes)}


@pytest.mark.parametrize("operator_name", ["matmul", "masked_activation"])
def test_of_two_functions_the_dearer_one_is_counted(operator_name: str, tmp_path: Path) -> None:
    """The mask decides by element: a run has the products of its bits, at most what is said."""
    sides: dict[str, Any] = {"where_set": {"op": "square"}, "where_clear": CUBE, "mask": "bytes"}
    fields: dict[str, Any] = {
        "matmul": {**RING, "epilogue": [{"op": "masked_activation", **sides}]},
        "masked_activation": {**MASKED, **sides, "dtype": "int64", "fraction_bits": 18},
    }[operator_name]
    own = candidate(fields, {"matmul": {"algorithm": "limbs"}}.get(operator_name, {"algorithm": "vectorised"}))
    op = operator(operator_name)
    outputs = 70 * 52 if operator_name == "matmul" else 5003
    shape = (70, 52) if operator_name == "matmul" else (5003,)
    half = (np.arange(outputs) < outputs // 2).reshape(shape).astype(np.uint8)
    masks = {"set": np.ones_like(half), "clear": np.zeros_like(half), "half": half}
    runs = count_runs(dict.fromkeys(masks, own), tmp_path, masks)
    multiplied = {name: run.of()["imad"].multiplications for name, run in runs.items()}
    assert multiplied == {"set": outputs, "clear": 3 * outputs, "half": 3 * outputs - 2 * (outputs // 2)}
    assert op.multiplications(own.problem) == 3 * outputs + (outputs * 44 if operator_name == "matmul" else 0)
    (said,) = (part for part in op.launches(own.problem, own.schedule, TARGET)[-1].primitives if part.name == "imad")
    assert said.multiplications == multiplied["clear"]
    assert op.cost(own.problem, own.schedule).truncations == runs["clear"].of()["truncate"].times


@pytest.mark.parametrize("name", _marked(CASES))
def test_bytes_are_within_5_per_cent_of_the_run(
    name: str, candidates: dict[str, Candidate], counted: dict[str, Counted]
) -> None:
    """And as many accesses move them."""
    one, run = candidates[name], counted[name]
    for launch in operator(one.problem.operator).launches(one.problem, one.schedule, TARGET):
        said = (launch.total.bytes_read, launch.total.bytes_written)
        assert said == pytest.approx(run.moved(launch.function), rel=0.05), launch.function
        accesses = {part.name: part.times for part in launch.primitives if part.bytes_read + part.bytes_written}
        assert accesses == {
            name: count.times
            for name, count in run.of(launch.function).items()
            if name != "sectors" and count.bytes_read + count.bytes_written
        }


@pytest.mark.parametrize(
    "name", _marked([name for name in CASES if not name.startswith(WITHOUT_SUMS) and name not in UNEVEN])
)
def test_multiplications_of_the_problem_are_outputs_of_the_run_times_the_length_of_their_sums(
    name: str, candidates: dict[str, Candidate], counted: dict[str, Counted]
) -> None:
    one, fields = candidates[name], CASES[name][0]
    length = fields["k"] if fields["operator"] == "matmul" else one.problem.gathered_products  # type: ignore[attr-defined]
    op, outputs = operator(one.problem.operator), written_outputs(one, counted[name])
    launches = op.launches(one.problem, one.schedule, TARGET)
    of_epilogue = sum(launch.total.of_epilogue for launch in launches)
    squares = sum(node["op"] == "masked_activation" for node in fields.get("epilogue", ()))
    assert of_epilogue == squares * outputs
    assert op.multiplications(one.problem) == outputs * length + of_epilogue
    multiplied = sum(launch.multiplications for launch in launches) + of_epilogue
    by_winograd = str(one.schedule.as_dict().get("algorithm")).startswith("winograd")
    assert (multiplied < op.multiplications(one.problem)) == by_winograd


@pytest.mark.parametrize("name", some_each_run(["imad", "limbs", "limbs of int32, tiles truncated"]))
def test_ring_bytes_are_operands_and_truncated_numbers_of_the_run(
    name: str, candidates: dict[str, Candidate], counted: dict[str, Counted]
) -> None:
    """Every sector of the operands is read in the run; what tiles add is no number that a party sends."""
    one, run = candidates[name], counted[name]
    op, size = operator("matmul"), 4 if CASES[name][0]["dtype"] == "int32" else 8
    parts = -(-MATMUL["k"] // one.schedule.get("tile_k")) if one.schedule.get("truncate") == "tile" else 1
    truncated = size * written_outputs(one, run) * parts
    opened = run.sectors("run")[0]
    sent = op.ring_bytes(one.problem, one.schedule, Openings())
    assert sent is not None and 0 <= opened + truncated - sent < 32 * 2  # of each operand a part of a sector
    assert op.ring_bytes(one.problem, one.schedule, Openings(filters="public")) == truncated


# Of Winograd's forms, how many tiles there are, and how many the matrix of a place has with what fills it up.
@pytest.mark.parametrize(
    ("name", "tiles"),
    [
        *some_each_run([("ring convolution, imad", None), ("ring convolution, limbs", None)]),
        *some_each_run(
            [
                ("ring convolution, F(2) by limbs", (60, 64)), ("ring convolution of int32, F(2)", (60, 64)),
                ("ring convolution, F(4) by imad", (18, 24)),
            ]
        ),
    ],
)  # fmt: skip
def test_ring_bytes_of_a_convolution_are_what_the_run_multiplies_and_truncates(
    name: str, tiles: tuple[int, int] | None, candidates: dict[str, Candidate], counted: dict[str, Counted]
) -> None:
    """The im2col matrix, a row for each pixel that was written, or the tiles that a launch transformed; the filters."""
    one, run = candidates[name], counted[name]
    op, size = operator("conv2d"), 4 if one.problem.dtype == "int32" else 8
    taps, filters, truncated = 9 * 8, 24, run.of()["truncate"].times
    opened = written_outputs(one, run) // filters * taps + filters * taps
    if tiles is not None:  # an access writes an element
        of_filters, of_image = (run.of(f)["store_global"].times for f in ("transform_filters", "transform_image"))
        opened = of_filters + of_image * tiles[0] // tiles[1]
    assert op.ring_bytes(one.problem, one.schedule, Openings()) == size * (opened + truncated)
    assert op.ring_bytes(one.problem, one.schedule, Openings(filters="public")) == size * truncated


def test_floats_send_no_ring_bytes(candidates: dict[str, Candidate]) -> None:
    one = candidates["fp32"]
    assert operator("matmul").ring_bytes(one.problem, one.schedule, Openings()) is None


@pytest.mark.parametrize(
    "fields", [RING, *({**RING_CONV, "operator": name} for name in ("conv2d", "conv2d_dgrad", "conv2d_wgrad"))]
)
def test_public_filters_make_a_product_local_where_it_has_filters(fields: dict[str, Any]) -> None:
    """dy and x of a filters' gradient are both secret, whatever filters are."""
    own, op = candidate(fields, {}), operator(fields["operator"])
    secret, public = (op.ring_bytes(own.problem, own.schedule, Openings(filters=f)) for f in FILTERS)
    assert secret is not None and public is not None
    truncated = 8 * op.cost(own.problem, own.schedule).truncations  # once for each output
    assert public == (secret if fields["operator"] == "conv2d_wgrad" else truncated) and secret > truncated


@pytest.mark.parametrize(("where_set", "products"), [({"op": "square"}, 1), (CUBE, 3), ({"op": "relu"}, 0)])
@pytest.mark.parametrize("bits", [0, 18])
def test_a_masked_activation_alone_sends_what_it_sends_in_an_epilogue(
    where_set: dict[str, Any], products: int, bits: int
) -> None:
    """Each product opens its number, and truncates it where there are fraction bits."""
    if where_set is CUBE and not bits:
        where_set = {"op": "polynomial", "coefficients": [0.0, 1.0, 2.0, 1.0]}
    fields: dict[str, Any] = {"dtype": "int64", "fraction_bits": bits}
    node: dict[str, Any] = {"op": "masked_activation", "where_set": where_set, "mask": "bytes"}
    alone = candidate({**MASKED, **fields, "where_set": where_set, "mask": "bytes", "shape": [70, 52]}, {})
    sent = operator("masked_activation").ring_bytes(alone.problem, alone.schedule, Openings())
    plain, fused = (candidate({**MATMUL, **fields, "epilogue": chain}, {}) for chain in ([], [node]))
    of_matmul = [operator("matmul").ring_bytes(each.problem, each.schedule, Openings()) or 0 for each in (plain, fused)]
    assert sent == of_matmul[1] - of_matmul[0] == 8 * 70 * 52 * products * (1 + (bits > 0))


def test_lists_of_a_masked_activation_send_what_they_compute() -> None:
    fields = {**MASKED, **SQUARES, "dtype": "int64", "fraction_bits": 18}
    own = candidate(fields, {"algorithm": "gather_scatter"})
    assert operator("masked_activation").ring_bytes(own.problem, own.schedule, Openings()) == 16 * (5003 + 5003 // 2)
    floats = candidate(MASKED, {})
    assert operator("masked_activation").ring_bytes(floats.problem, floats.schedule, Openings()) is None


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"dtype": "int64"}, 0), ({"dtype": "int32", "out_dtype": "int32"}, 0), ({"dtype": "int64", "fn": "max"}, None),
        ({"dtype": "int64", "fn": "min"}, None), ({"dtype": "int32"}, None), ({"dtype": "float32"}, None),
    ],
)  # fmt: skip
def test_sums_over_a_ring_send_nothing(fields: dict[str, Any], sent: int | None) -> None:
    """Comparisons are not counted: what `max` and `min` send is none. int32 summed in int64 is no ring."""
    own = candidate({"operator": "reduce", "shape": [40, 30], "axes": [1], "fn": "sum", **fields}, {})
    assert operator("reduce").ring_bytes(own.problem, own.schedule, Openings()) == sent
