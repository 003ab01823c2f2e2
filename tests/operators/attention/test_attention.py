"""Attention forward of dense tensors."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest

from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators.attention.problem import LARGEST_HEAD_DIM, LONGEST, NOT_COMPUTED
from codegen.operators.attention.seen import Seen, floor_sum
from codegen.operators.attention.space import band_of
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.problem import LARGEST_ELEMENTS, LARGEST_EXTENT
from codegen.search.rules import ACCEPTED
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import completed
from codegen.targets import target
from tests.operators.attention.claims import (
    CLAIMS,
)
from tests.operators.attention.kernels import (
    CLASSES,
    DECODE,
    DEFAULT,
    EXPLICIT,
    LLAMA,
    NAME,
    ONE_QUERY,
    OP,
    SMALL,
    STRIDES,
    USUAL,
    attention,
    by_torch,
    definition,
    in_fp32,
    kernel,
    visible,
)
from tests.operators.attention.random_cases import SPREAD, properties, random_cases
from tests.operators.harness import declarations as declare
from tests.operators.harness.checks import add_checks
from tests.operators.harness.declarations import LEVEL_0, LEVEL_1, SM_90A, Rejection
from tests.support.run.each_run import some_each_run

# ---- problems

ONE: dict[str, Any] = {"batch": 1, "seq_q": 70, "seq_kv": 70, "heads_q": 4, "heads_kv": 4}
PACKED_QKV = [70 * 3 * 256, 3 * 256, 64]
PROBLEMS = declare.Problems(
    refused=[
        ({"seq_q": 0}, "seq_q", "greater than or equal to 1"),
        ({"seq_q": LONGEST + 1}, "seq_q", f"less than or equal to {LONGEST}"),
        ({"seq_kv": 1.5}, "seq_kv", "valid integer"),
        ({"heads_q": "4"}, "heads_q", "valid integer"),
        ({"heads_kv": 3}, "heads_kv", "is 3, which does not divide heads_q = 4; allowed: 1, 2, 4"),
        ({"heads_q": 4, "heads_kv": 8}, "heads_kv", "is 8, which does not divide heads_q = 4"),
        ({"batch": 2**16, "heads_q": 2**16}, "heads_q", f"at most {LARGEST_EXTENT // 2**16} is allowed"),
        ({"head_dim_qk": 3}, "head_dim_qk", "greater than or equal to 4"),
        ({"head_dim_vo": LARGEST_HEAD_DIM + 8}, "head_dim_vo", f"less than or equal to {LARGEST_HEAD_DIM}"),
        ({"dtype": "float32"}, "dtype", "'float16' or 'bfloat16'"),
        ({"dtype": "float8_e4m3fn"}, "dtype", "attention in fp8 is not computed; allowed: float16, bfloat16"),
        ({"layout": "sbhd"}, "layout", "'bshd' or 'bhsd'"),
        ({"causal": 1}, "causal", "valid boolean"),
        ({"causal": True, "window_right": 5}, "window_right", "is 5, but causal attention sees no key behind"),
        ({"window_left": -1}, "window_left", "greater than or equal to 0"),
        ({"softcap": 0.0}, "softcap", "is 0.0;"),
        ({"scale": -0.125}, "scale", "is -0.125;"),
        ({"scale": 1e10}, "scale", "is 10000000000.0;"),
        ({"scale": "1"}, "scale", "valid number"),
        ({"lse": "yes"}, "lse", "valid boolean"),
        ({"q_strides": [1, 2]}, "q_strides.2", "Field required"),
        ({"batch": 2, "k_strides": [-1, 128, 64]}, "k_strides.0", "greater than or equal to 0"),
        ({"out_strides": [0, 256, 32]}, "out_strides", "has 32 where the faster axes span 64 elements; at least 64"),
        ({"out_strides": [0, 64, 64]}, "out_strides", "has 64 where the faster axes span 256 elements"),
        ({"q_strides": [0, 2**35, 64]}, "q_strides", f"at most {LARGEST_ELEMENTS} are allowed"),
        ({"seq_q": 2**24, "heads_q": 2**8, "heads_kv": 1, "seq_kv": 1, "head_dim_qk": 512, "head_dim_vo": 8},
         "q_strides", f"operand q would span {2**41} elements"),
        ({"epilogue": []}, "epilogue", "not permitted"),
        *(({name: 1}, name, "which attention does not compute: it computes dense attention") for name in NOT_COMPUTED),
    ],
    defaults=[
        ({}, {**EXPLICIT, **STRIDES}),
        (
            {"causal": True, "seq_kv": None, "heads_kv": None, "head_dim_qk": 32, "head_dim_vo": 16, "lse": True,
             "layout": "bhsd", "scale": 1},
            {**EXPLICIT, **ONE, "head_dim_qk": 32, "head_dim_vo": 16, "layout": "bhsd", "causal": True,
             "window_right": 0, "scale": 1.0, "lse": True, "q_strides": [8960, 2240, 32],
             "k_strides": [8960, 2240, 32], "v_strides": [4480, 1120, 16], "out_strides": [4480, 1120, 16]},
        ),
    ],
    alike=[
        ({"causal": True}, {"window_right": 0}),
        ({"causal": True}, {"causal": True, "window_right": 0}),
        ({}, {"scale": 0.125, "q_strides": [5, 256.0, 64]}),  # of one matrix the stride means nothing
    ],
    aligned=[
        ({"head_dim_qk": 72, "head_dim_vo": 40}, {"align": 8, "align_out": 8, "columns_qk": 80, "columns_vo": 48}),
        ({"head_dim_qk": 20}, {"align": 4, "align_out": 4, "columns_qk": 32, "columns_vo": 32}),
        ({"head_dim_qk": 20, "head_dim_vo": 32}, {"align": 4, "align_out": 8}),
        ({"head_dim_qk": 30}, {"align": 2, "align_out": 2}),
        ({"head_dim_qk": 9, "head_dim_vo": 7}, {"align": 1, "align_out": 1, "columns_qk": 16, "columns_vo": 16}),
        ({"k_strides": [0, 130, 64]}, {"align": 2, "align_out": 8}),
        ({"out_strides": [0, 260, 65]}, {"align": 8, "align_out": 1}),
        ({"softcap": 30.0, "lse": True, "dtype": "bfloat16"}, {"softcap": True, "lse": True, "dtype": "bfloat16"}),
    ],
    operands=[
        (
            {"lse": True, "batch": 2, "head_dim_vo": 32},
            [("q", "float16", "in", (2, 70, 4, 64)), ("k", "float16", "in", (2, 90, 2, 64)),
             ("v", "float16", "in", (2, 90, 2, 32)), ("out", "float16", "out", (2, 70, 4, 32)),
             ("lse", "float32", "out", (2, 4, 70))],
        ),
        (
            {**ONE, "layout": "bhsd", "dtype": "bfloat16", "q_strides": [0, 64, 768], "k_strides": [0, 64, 768],
             "v_strides": [0, 64, 768]},
            [*((name, "bfloat16", "in", (1, 4, 70, 64), (17920, 64, 768, 1)) for name in ("q", "k", "v")),
             ("out", "bfloat16", "out", (1, 4, 70, 64))],
        ),
    ],
    unspecialised=[
        ({}, {"batch": 3, "seq_q": 5, "seq_kv": 500, "heads_q": 6, "heads_kv": 1, "window_left": 12, "causal": True,
              "scale": 0.5}, [12, 0, 0.5]),
        ({"softcap": 1.0}, {"softcap": 50.0}, [-1, -1, 0.125, 50.0]),
    ],
    in_schema=[
        {"seq_q": 8, "heads_q": 2, "head_dim_qk": 64, "window_left": 4, "seq_kv": None, "q_strides": [1, 128, 64]}
    ],
    out_of_schema=[{"seq_q": 8, "heads_q": 2}, {"seq_q": 8, "heads_q": 2, "head_dim_qk": 64, "dtype": "int8"}],
)  # fmt: skip


def test_windows_without_an_end_and_long_ones_see_the_same() -> None:
    windows: list[dict[str, Any]] = [{}, {"window_left": 89, "window_right": 69}, {"window_left": LONGEST}]
    pairs = {Seen.of(attention(**fields)).pairs for fields in windows}
    assert pairs == {70 * 90}


MASKED: list[dict[str, Any]] = [
    {"seq_q": seq_q, "seq_kv": seq_kv, "window_left": left, "window_right": right}
    for seq_q, seq_kv, left, right in product((1, 7, 40), (1, 9, 33), (None, 0, 5, 50), (None, 0, 3, 60))
]


@pytest.mark.parametrize("tiles", [(16, 16), (16, 32), (32, 16), (64, 16)])
def test_pairs_and_tiles_are_those_of_the_definition(tiles: tuple[int, int]) -> None:
    tile_q, tile_kv = tiles
    for fields in MASKED:
        problem, seen = attention(**fields), visible(attention(**fields))
        of = Seen.of(problem)
        assert of.pairs == seen.sum(), fields
        assert [stop - begin for begin, stop in map(of.by, range(problem.seq_q))] == seen.sum(1).tolist(), fields
        counts = []
        for first in range(0, problem.seq_q, tile_q):
            # A block of queries behind the last one sees what they would.
            wide = attention(**{**fields, "seq_q": problem.seq_q + tile_q, "seq_kv": problem.seq_kv + tile_q})
            block = visible(wide)[first : first + tile_q, : problem.seq_kv].any(0).nonzero()[0]
            counts.append(block[-1] // tile_kv - block[0] // tile_kv + 1 if block.size else 0)
        assert of.tiles(tile_q, tile_kv) == sum(counts), fields
        assert max(counts) == of.most_tiles(tile_q, tile_kv), fields


@pytest.mark.parametrize(("group", "tiles"), [(3, (16, 16)), (8, (32, 16)), (40, (16, 32))])
def test_tiles_of_packed_heads_are_those_of_the_definition(group: int, tiles: tuple[int, int]) -> None:
    tile_q, tile_kv = tiles
    for fields in MASKED:
        own = attention(**fields, heads_q=group, heads_kv=1)
        of = Seen.between(own, own.seq_q, own.seq_kv, group)
        counts = []
        for first in range(0, own.seq_q * group, tile_q):
            # Queries behind the last one see what they would.
            wide = attention(**{**fields, "seq_q": own.seq_q + tile_q, "seq_kv": own.seq_kv + tile_q})
            queries = [row // group for row in range(first, first + tile_q)]
            keys = visible(wide)[queries, : own.seq_kv].any(0).nonzero()[0]
            counts.append(keys[-1] // tile_kv - keys[0] // tile_kv + 1 if keys.size else 0)
        assert of.tiles(tile_q, tile_kv) == sum(counts), fields
        assert max(counts) == of.most_tiles(tile_q, tile_kv), fields


@pytest.mark.parametrize("seed", range(20))
def test_sums_of_floors(seed: int) -> None:
    count, divisor, factor, start = (int(n) for n in np.random.default_rng(seed).integers(1, 300, 4))
    assert floor_sum(count, divisor, factor, start) == sum((factor * i + start) // divisor for i in range(count))
    assert floor_sum(0, divisor, factor, start) == 0


# ---- rules, levels and costs

PACKED_QUERY = {**ONE_QUERY, "packing": "group"}
HEADS_OF_256 = {"lengths": "paged", "head_dim_qk": 256}
SEARCHES = declare.Searches(
    accepted=[(LLAMA, USUAL), (LLAMA, {**USUAL, "band": 16}),
              ({"head_dim_qk": 192, "head_dim_vo": 128}, {**USUAL, "tile_kv": 32, "q_in": "shared"}),
              (DECODE, ONE_QUERY), (DECODE, {**ONE_QUERY, "split_kv": 23, "band": 4}),
              (DECODE, {**PACKED_QUERY, "split_kv": 23, "band": 4}),
              ({**DECODE, "seq_q": 5, "heads_kv": 1}, PACKED_QUERY),
              ({"seq_kv": 512}, {**USUAL, "split": "workspace", "split_kv": 3})],
    rejected=[
        Rejection({}, {**USUAL, "tile_q": 32}, "warps", "32 queries for 4 warps are no multiple of 16 each"),
        Rejection({}, USUAL, "mma", "mma.sync m16n8k16 and cp.async need sm_80; the target is sm_75", arch="sm_75"),
        Rejection(LLAMA, {**USUAL, "tile_q": 128}, "registers",
                  "about 353 registers per thread (2 x (64 of out, 32 of scores, 32 of q) and what a warp keeps"
                  " beside); 255 are there. "
                  "tile_q = 16, warps = 1, tile_kv = 16, q_in = shared is accepted, with about 165"),
        Rejection({"head_dim_qk": 512}, {**USUAL, "q_in": "shared", "tile_kv": 16}, "registers",
                  "No schedule fits: 16 queries of a warp and tile_kv = 16 need 349"),
        Rejection({"head_dim_qk": 256, "seq_q": 1, "heads_kv": 4}, {**USUAL, "tile_q": 32, "warps": 2}, "registers",
                  "tile_q = 16, warps = 1, tile_kv = 16, q_in = shared is accepted, with about 245"),
        Rejection({**DECODE, **HEADS_OF_256, "page_size": 1}, PACKED_QUERY, "registers",
                  "tile_q = 32, warps = 2, tile_kv = 16, q_in = shared, packing = group is accepted, with about 255"),
        Rejection({**DECODE, **HEADS_OF_256, "page_size": 64}, {**ONE_QUERY, "tile_q": 64, "warps": 4, "tile_kv": 16},
                  "tile_q", "64 queries of a block are mostly padding for 1"),
        Rejection(LLAMA, {**USUAL, "stages": 4}, "shared_memory",
                  "131072 bytes of shared memory; sm_86 has 101376 per block", arch="sm_86"),
        Rejection({"seq_q": 20}, USUAL, "tile_q", "64 queries of a block are mostly padding for 20"),
        Rejection({"seq_kv": 20}, USUAL, "tile_kv", "64 keys of a tile are mostly padding for 20"),
        Rejection({"seq_kv": 64}, USUAL, "stages", "2 stages for 1 tiles of keys"),
        Rejection({}, {**USUAL, "band": 4}, "band", "4 heads side by side of 4: 0 says the same"),
        Rejection({"seq_q": LONGEST, "heads_q": 256, "heads_kv": 1, "head_dim_qk": 4}, USUAL, "grid",
                  "2147483648 blocks; a launch has at most 2147482623"),
        Rejection({"seq_q": 2**28 - 64, "heads_q": 512, "heads_kv": 1, "head_dim_qk": 4}, USUAL, "grid",
                  "2147483136 blocks; a launch has at most 2147482623"),
        Rejection(DECODE, {**ONE_QUERY, "split": "none"}, "split", "split_kv = 8 needs split = workspace"),
        Rejection(DECODE, {**ONE_QUERY, "split_kv": 1}, "split",
                  "split = workspace with 1 split repeats split = none and adds a launch"),
        Rejection(DECODE, {**ONE_QUERY, "split_kv": 129}, "split_kv",
                  "129 splits of 128 tiles of 64 keys, the most that a block sees, leave some empty"),
        Rejection({**DECODE, "window_left": 100}, {**ONE_QUERY, "split_kv": 4}, "split_kv", "4 splits of 2 tiles"),
        Rejection({**DECODE, "batch": 8}, {**ONE_QUERY, "split_kv": 5}, "split_kv",
                  "256 blocks in 5 splits; sm_90a has enough with 1056 blocks"),
        Rejection({**DECODE, "seq_kv": 512}, ONE_QUERY, "stages", "2 stages for 1 tiles of keys"),
        Rejection({**DECODE, "heads_kv": 32}, PACKED_QUERY, "packing", "needs heads of q that share one of k and v"),
        Rejection(LLAMA, {**USUAL, "packing": "group"}, "packing",
                  "128 tiles of a group, packed or not: rows of one head fill them"),
        Rejection({**DECODE, "heads_q": 2**16, "heads_kv": 1}, PACKED_QUERY, "packing",
                  "1 queries of 65536 packed heads; at most 32768 heads and 536870912 of both multiplied are allowed"),
        Rejection(DECODE, {**PACKED_QUERY, "tile_q": 32, "warps": 2}, "tile_q",
                  "32 queries of a block are mostly padding for 4"),
        Rejection({**DECODE, "batch": 32}, {**PACKED_QUERY, "split_kv": 5}, "split_kv",
                  "256 blocks in 5 splits; sm_90a has enough with 1056 blocks"),
    ],
    nested=[{}, LLAMA, {"seq_q": 1, "seq_kv": 4000}, DECODE],
    capped=[
        (DECODE, ONE_QUERY, 4 * 8 * 32 * 130),
        (DECODE, PACKED_QUERY, 4 * 8 * 32 * 130),
        ({"seq_q": 3, "seq_kv": 4000, "head_dim_vo": 9, "batch": 2}, {**ONE_QUERY, "split_kv": 5}, 4 * 5 * 24 * 14),
    ],
    begun=[
        *((arch, {"head_dim_qk": columns, "seq_q": queries}, "" if columns < 512 else "No schedule fits")
          for arch in ("sm_80", "sm_86", "sm_90a", "sm_120") for columns in (4, 64, 72, 96, 128, 192, 256, 512)
          for queries in (1, 20, 2000)),
        ("sm_90a", {"head_dim_qk": 320, "seq_q": 33}, ""),
        ("sm_90a", {"head_dim_qk": 320, "seq_q": 1}, ""),
        ("sm_90a", {"seq_q": 1, "seq_kv": 2**24, "heads_q": 1, "heads_kv": 1}, ""),
        ("sm_90a", {"head_dim_qk": 192, "head_dim_vo": 128}, ""),
        ("sm_75", {}, "need sm_80"),
    ],
    meaningless=[
        ({}, {"tunables": {"split_k": [2]}}, "search.tunables.split_k",
         "allowed: band, packing, q_in, split, split_kv, stages"),
        ({}, {"schedules": [{"walk": "shortest_first"}]}, "search.schedules.0.walk", "allowed: none, longest_first"),
        ({}, {"tunables": {"split_kv": [0]}}, "search.tunables.split_kv", "allowed: 1 to 1024"),
        ({}, {"schedules": [{"packing": "query"}]}, "search.schedules.0.packing", "allowed: none, group"),
        ({}, {"schedules": [{"split": "atomic"}]}, "search.schedules.0.split", "allowed: none, workspace"),
        ({}, {"tunables": {"tile_q": [24]}}, "search.tunables.tile_q", "allowed: 16, 32, 64, 128, 256"),
        ({}, {"schedules": [{"q_in": "global"}]}, "search.schedules.0.q_in", "allowed: registers, shared"),
    ],
)  # fmt: skip


def test_nothing_grows_with_the_square_of_the_length() -> None:
    """128k tokens: no workspace, and what is moved grows with the length."""
    problem = attention(**{**LLAMA, "seq_q": 2**17, "seq_kv": 2**17})
    (candidate,) = lower(problem, SM_90A, LEVEL_0, workspace_limit=0).candidates
    cost = OP.cost(problem, candidate.schedule)
    assert (cost.workspace_bytes, cost.launches) == (0, 1)
    assert cost.bytes_read == 2 * 2**17 * 128 * (32 + 2 * 8)
    assert cost.bytes_written == 2 * 2**17 * 128 * 32
    assert cost.flops == 32 * (2**17 * (2**17 + 1) // 2) * (4 * 128 + 5)


def test_a_workspace_grows_with_queries_and_splits_but_not_with_keys() -> None:
    """128k tokens of keys and a query: 1 MiB. However many queries there are, what splits of few enough blocks leave
    stays below what all of their blocks could hold."""
    sizes = {}
    for keys in (2**14, 2**17, 2**20):
        problem = attention(**{**DECODE, "seq_kv": keys})
        (candidate,) = lower(problem, SM_90A, LEVEL_0).candidates
        assert candidate.schedule.get("split_kv") == 64
        sizes[keys] = OP.cost(problem, candidate.schedule).workspace_bytes
    assert set(sizes.values()) == {4 * 64 * 32 * (128 + 2)}
    assert sizes[2**17] == 1040 * 2**10
    problem = attention(**{**LLAMA, "heads_q": 1, "heads_kv": 1, "seq_q": 2**17, "seq_kv": 2**17})
    for candidate in lower(problem, SM_90A, Search(level=2, limit=500)).candidates:
        bytes_ = OP.cost(problem, candidate.schedule).workspace_bytes
        assert bytes_ <= 8 * SM_90A.sm_count * int(candidate.schedule.get("tile_q")) * 4 * 130


def test_few_blocks_are_split_until_they_fill_the_device() -> None:
    times = {}
    for count in (1, 2, 4, 8, 16):
        where = "workspace" if count > 1 else "none"
        schedule = {**ONE_QUERY, "split": where, "split_kv": count}
        (candidate,) = lower(attention(**DECODE), SM_90A, Search(schedules=[schedule])).candidates
        times[count] = predict_uncompiled(candidate, SM_90A).us
        assert OP.work(attention(**DECODE), candidate.schedule, SM_90A).blocks == 32 * count
    assert times[1] > 1.5 * times[2] > 2 * times[4] > 2.5 * times[8]
    assert times[8] < times[1] / 5


def test_packed_heads_read_keys_once_in_fewer_blocks_of_fuller_tiles() -> None:
    problem = attention(**{**DECODE, "batch": 64})
    apart, packed = ({**ONE_QUERY, "split": "none", "split_kv": 1, **own} for own in ({}, {"packing": "group"}))
    works = [OP.work(problem, completed(t, OP.tunables), SM_90A) for t in (apart, packed)]
    assert [work.blocks for work in works] == [64 * 32, 64 * 8]
    assert works[0].mma == 4 * works[1].mma and works[0].special == 4 * works[1].special
    of_kv = 2 * 64 * 8 * 8192 * 256
    assert of_kv < works[1].l2_bytes < 1.01 * of_kv and 4 * of_kv < works[0].l2_bytes
    times = [predict_uncompiled(OP.candidate(problem, completed(t, OP.tunables)), SM_90A).us for t in (apart, packed)]
    assert times[1] < 0.9 * times[0]


@pytest.mark.parametrize("arch", some_each_run(["sm_80", "sm_86", "sm_90a"]))
def test_searches_pack_the_heads_of_few_queries(arch: str) -> None:
    def tried(level: int, **fields: Any) -> set[str]:
        candidates = lower(attention(**{**DECODE, **fields}), target(arch), Search(level=level)).candidates
        return {str(c.schedule.as_dict().get("packing", "none")) for c in candidates}

    for fields in (
        {},
        {"seq_q": 8},
        {"lengths": "paged", "page_size": 16, "batch": 64},
        {"heads_q": 40, "heads_kv": 1},
    ):
        assert tried(0, **fields) == {"group"} and "group" in tried(1, **fields)
        assert tried(2, **fields) == {"group", "none"}
    for fields in ({"heads_kv": 32}, {"seq_q": 2048}):
        assert tried(0, **fields) == tried(1, **fields) == {"none"}


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
def test_searches_of_decode_have_splits_and_those_of_long_prompts_none(arch: str) -> None:
    def tried(fields: dict[str, Any], level: int) -> set[int]:
        candidates = lower(attention(**fields), target(arch), Search(level=level)).candidates
        return {int(dict(c.schedule.values).get("split_kv", 1)) for c in candidates}

    assert len(tried(DECODE, 1)) >= 3 and min(tried(DECODE, 1)) == 1
    assert tried(DECODE, 0) < tried(DECODE, 1) < tried(DECODE, 2)
    assert tried(LLAMA, 1) == {1} and tried({**LLAMA, "seq_q": 1}, 1) > {1}
    assert tried({**DECODE, "seq_kv": 200}, 1) == {1} and tried({**DECODE, "batch": 256}, 1) == {1}


def test_splits_with_a_few_keys_in_them_are_merged_in_a_launch_of_their_bytes() -> None:
    problem = attention(**DECODE, lse=True)
    run, merge = OP.launches(problem, Schedule.of(ONE_QUERY), SM_90A)
    assert (run.function, merge.function) == ("run", "merge")
    assert run.total.bytes_written == OP.cost(problem, Schedule.of(ONE_QUERY)).workspace_bytes
    assert merge.total.bytes_written == 32 * (2 * 128 + 4)
    # A thread of 8 elements reads of each split 8 sums, the greatest score twice and the total.
    assert merge.total.bytes_read == 32 * 16 * 8 * 4 * (8 + 3)


def test_causal_attention_takes_half_of_the_tiles_and_of_the_time() -> None:
    times = {}
    for causal in (False, True):
        problem = attention(**{**LLAMA, "seq_q": 8192, "seq_kv": 8192, "causal": causal})
        times[causal] = predict_uncompiled(OP.candidate(problem, Schedule.of(USUAL)), SM_90A).us
    assert 0.45 < times[True] / times[False] < 0.6


def test_exponentials_are_a_roof_of_their_own() -> None:
    """Of narrow heads they take as long as the products: 16 of them in a clock and multiprocessor."""
    problem = attention(seq_q=4096, seq_kv=4096, heads_q=32, heads_kv=32)
    roofs = predict_uncompiled(OP.candidate(problem, Schedule.of(USUAL)), SM_90A).roofs_us
    blocks = 64 * 32
    share = -(-blocks // SM_90A.sm_count) / blocks
    assert roofs["special"] == pytest.approx(32 * 4096**2 * share / 16 / SM_90A.clock_mhz)
    assert 0.5 < roofs["special"] / roofs["mma"] < 2.0


def test_a_band_has_keys_and_values_that_the_l2_holds() -> None:
    few = attention(**LLAMA)
    assert band_of(few, SM_90A) == 0
    many = attention(**{**LLAMA, "batch": 16, "seq_q": 16384, "seq_kv": 16384})
    band = band_of(many, SM_90A)
    assert 0 < band < many.batch * many.heads_q
    assert 2 * 16384 * 256 * band // many.group <= 0.75 * SM_90A.l2_bytes
    near = OP.work(many, Schedule.of({**USUAL, "band": band}), SM_90A).dram_bytes
    assert near < OP.work(many, Schedule.of(USUAL), SM_90A).dram_bytes


def test_the_last_queries_of_causal_attention_are_the_longest() -> None:
    work = OP.work(attention(**LLAMA), Schedule.of(USUAL), SM_90A)
    assert (work.longest, work.blocks) == (32, 32 * 32)
    assert work.steps == 17  # of 1 to 32


@pytest.mark.parametrize("shape", ["BERT", "Llama", "window", "cap"])
def test_what_is_kept_of_a_level_is_predicted_fastest(shape: str) -> None:
    fields: dict[str, dict[str, Any]] = {
        "BERT": {"batch": 8, "seq_q": 512, "seq_kv": 512, "heads_q": 12, "heads_kv": 12},
        "Llama": LLAMA,
        "window": {**LLAMA, "window_left": 256},
        "cap": {**LLAMA, "softcap": 50.0, "head_dim_qk": 256},
    }
    problem = attention(**fields[shape])
    every = sorted(predict_uncompiled(candidate, SM_90A).us for candidate in lower(problem, SM_90A, LEVEL_1).candidates)
    kept = [predict_uncompiled(c, SM_90A).us for c in lower(problem, SM_90A, Search(level=1, keep=3)).candidates]
    assert sorted(kept) == every[:3]
    assert len(set(every)) >= 3


# ---- the reference

REFERENCED: dict[str, dict[str, Any]] = {
    "dense": {"seq_q": 5, "seq_kv": 9, "head_dim_qk": 16},
    "causal": {"seq_q": 6, "seq_kv": 11, "head_dim_qk": 16, "causal": True, "batch": 2},
    "a window": {"seq_q": 12, "seq_kv": 7, "head_dim_qk": 8, "head_dim_vo": 12, "window_left": 6, "window_right": 1},
    "heads first": {"seq_q": 3, "seq_kv": 5, "head_dim_qk": 4, "layout": "bhsd", "heads_q": 6, "dtype": "bfloat16"},
}
BESIDE_TORCH: dict[str, dict[str, Any]] = {
    "cap and lse": {"seq_q": 4, "seq_kv": 8, "head_dim_qk": 16, "softcap": 2.0, "lse": True},
    "fewer keys than queries": {"seq_q": 9, "seq_kv": 4, "head_dim_qk": 16, "causal": True, "lse": True},
}
BOUNDED: dict[str, dict[str, Any]] = {
    "dense": {}, "causal": {"causal": True, "lse": True}, "bfloat16": {"dtype": "bfloat16", "scale": 0.5},
    "window and cap": {"window_left": 20, "window_right": 30, "softcap": 3.0, "lse": True},
}  # fmt: skip


@pytest.mark.parametrize("case", [*REFERENCED, *BESIDE_TORCH])
def test_exact_rows_are_the_definition_and_their_bound_is_0(case: str) -> None:
    fields = {**REFERENCED, **BESIDE_TORCH}[case]
    problem = attention(**fields)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(4))
    result, bound = OP.reference(problem, inputs, exact=True)
    plain = definition(attention(**{**fields, "softcap": None}), inputs).reshape(-1).astype(float)
    out = problem.batch * problem.seq_q * problem.heads_q * problem.head_dim_vo
    rounded = plain[:out].astype(inputs["v"].dtype).astype(float)
    np.testing.assert_array_equal(result.reshape(-1)[:out], rounded)
    assert (bound.reshape(-1)[:out] == 0.0).all()
    np.testing.assert_allclose(result.reshape(-1)[out:], plain[out:], rtol=1e-15)
    finite = result.reshape(-1)[out:][np.isfinite(plain[out:])]
    assert (finite == np.rint(finite)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [2.0**-8, 0.044, 1.0, 30.0])
def test_integer_inputs_have_a_greatest_score_of_0_that_cancels_and_all_others_vanish(scale: float, dtype: str) -> None:
    problem = attention(scale=scale, dtype=dtype, causal=True, seq_q=60, seq_kv=100)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(6))
    q, k = (inputs[name].astype(float) for name in ("q", "k"))
    counts = set()
    for head in range(4):
        scores = q[0, :, head] @ k[0, :, head // 2].T * scale * math.log2(math.e)
        seen = visible(problem)
        assert (np.where(seen, scores, -np.inf).max(1) == 0.0).all()
        assert (scores[(scores != 0.0) & seen] <= -256.0).all()
        counts |= set(((scores == 0.0) & seen).sum(1).tolist())
    assert (np.abs(q).sum(-1) > 0.0).all() and (np.abs(k).sum(-1) > 0.0).all()
    assert counts >= {1, 2, 4, 8} and all(count & (count - 1) == 0 for count in counts)


def test_inputs_of_large_problems_repeat_heads() -> None:
    problem = attention(batch=4, seq_q=512, seq_kv=512, heads_q=64, heads_kv=32)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(3))
    assert inputs["q"].shape == (4, 512, 64, 64)
    assert not np.array_equal(inputs["k"][:, :, 0], inputs["k"][:, :, 1])


# ---- kernels on the CPU


def verified() -> dict[str, Kernel]:
    by_name: dict[str, Kernel] = {}
    types = ("float16", "bfloat16")
    for number, (q_in, stages, layout) in enumerate(product(("registers", "shared"), (1, 2, 3), ("bshd", "bhsd"))):
        dtype = types[number // 2 % 2]
        by_name[f"{dtype} {layout}, Q in {q_in}, {stages} stages"] = kernel(
            dtype, layout=layout, q_in=q_in, stages=stages, lse=number % 3 == 0, softcap=number % 4 == 1,
            qk=(64, 32, 96)[number % 3], vo=(64, 48, 16)[number // 2 % 3],
        )  # fmt: skip
    for dtype, align, align_out in product(types, (8, 4, 2, 1), (8, 1)):
        by_name[f"{dtype} by {align}, out by {align_out}"] = kernel(dtype, qk=32, align=align, align_out=align_out)
    by_name["out by 2"] = kernel(qk=16, align_out=2, lse=True)
    by_name["out by 4"] = kernel("bfloat16", qk=48, align=2, align_out=4)
    by_name["two pieces of a warp"] = kernel(tile_q=64, tile_kv=64, stages=2, lse=True)
    by_name["two pieces of a warp, Q shared"] = kernel("bfloat16", tile_q=64, q_in="shared", qk=80, vo=128)
    by_name["one warp"] = kernel(tile_q=16, warps=1, tile_kv=16, qk=128, lse=True)
    by_name["four warps, long tiles"] = kernel("bfloat16", tile_q=64, warps=4, tile_kv=128, qk=64)
    by_name["eight warps"] = kernel(tile_q=128, warps=8, tile_kv=16, qk=16, stages=4, softcap=True)
    split: dict[str, Any] = {"split": "workspace"}
    for number, (q_in, stages) in enumerate(product(("registers", "shared"), (1, 2))):
        by_name[f"split, Q in {q_in}, {stages} stages"] = kernel(
            types[number % 2], layout=("bshd", "bhsd")[number // 2], q_in=q_in, stages=stages, lse=number != 1,
            softcap=number == 2, qk=(64, 32)[number % 2], vo=(48, 80)[number // 2], **split,
        )  # fmt: skip
    for align, align_out in product((8, 2, 1), (8, 4, 2, 1)):
        if align >= align_out or align > 1:
            by_name[f"split, by {align}, out by {align_out}"] = kernel(
                types[align % 2], qk=32, align=align, align_out=min(align, align_out) if align < 8 else align_out,
                lse=align_out == 2, **split,
            )  # fmt: skip
    by_name["split, one warp"] = kernel(tile_q=16, warps=1, tile_kv=64, qk=128, stages=2, lse=True, **split)
    by_name["split, two pieces of a warp"] = kernel("bfloat16", tile_q=64, tile_kv=16, stages=3, **split)
    by_name["split, wide heads"] = kernel(qk=192, vo=256, tile_q=16, warps=1, tile_kv=16, q_in="shared", **split)
    by_name["wide heads"] = kernel(qk=256, tile_q=16, warps=1, q_in="shared")
    packed: dict[str, Any] = {"packing": "group"}
    for number, (layout, parts) in enumerate(product(("bshd", "bhsd"), ({}, split))):
        by_name[f"packed, {layout}{', split' if parts else ''}"] = kernel(
            types[number % 2], layout=layout, q_in=("registers", "shared")[number % 2], stages=1 + number // 2,
            lse=number != 1, softcap=number == 2, qk=(32, 64)[number % 2], vo=48, **packed, **parts,
        )  # fmt: skip
    by_name["packed, one warp"] = kernel(tile_q=16, warps=1, tile_kv=16, qk=128, lse=True, **packed)
    by_name["packed, one warp, split"] = kernel(
        "bfloat16", tile_q=16, warps=1, tile_kv=32, qk=128, q_in="shared", stages=2, **packed, **split
    )
    by_name["packed, two pieces of a warp"] = kernel(tile_q=64, qk=32, vo=80, lse=True, **packed)
    by_name["packed, four warps, by 2"] = kernel(tile_q=64, warps=4, qk=32, align=2, align_out=2, **packed)
    by_name["packed, single elements"] = kernel("bfloat16", qk=16, align=1, lse=True, **packed)
    by_name["192 and 128"] = kernel("bfloat16", qk=192, vo=128, lse=True)
    return by_name


BLOCK, SEQUENCE, PAGES = "block.cuh", "sequence.cuh", "pages.cuh"
MERGE, MERGED_ROWS, OWN, LIST = "merge.cuh", "attention/merge_rows.cuh", "kernel.cuh", "walk.cuh"
HIDDEN = "if (!seen) scores[i][j][half * 2 + e] = -infinity();"
RESCALED = "sums[i][j][half * 2 + e] *= factor;"
GREATEST = "maximum(greatest[i][half], most * arguments.to_bits)"
WEIGHT = "cukiln::fma(scores[i][j][half * 2 + e], arguments.to_bits, -subtracted)"
OF_HEAD = "place.batch * arguments.heads_q + place.head"
MERGED, MERGED_TOTAL = "cukiln::fma(factor, loaded.data[j], sums[i + j])", "cukiln::fma(factor, own.data[1], total)"
LAST_QUERY = "first_seen(sequence, last_query)"
OF_ROW = "first_query + further(row)"
ROWS_OF, OTHERS_ROWS = (f"length_of(arguments.qo_indptr, {of}) * group" for of in ("own", "other"))
OF_LIST = "packs_heads<C> ? arguments.heads_kv : arguments.heads_q"
# At least one kernel reaches each of them, and one is wrong by it.
WRONG: dict[str, tuple[str, str, str]] = {
    "sums are not rescaled": (BLOCK, RESCALED, RESCALED.replace("factor", "1.0f")),
    "the total is not rescaled": (BLOCK, "total[i][half] * factor + weights", "total[i][half] + weights"),
    "the total of the last tile": (BLOCK, "total[i][half] * factor + weights", "weights"),
    "the greatest of a lane": (BLOCK, "most = maximum(most, shuffle_xor(most, 1));", "most = maximum(most, most);"),
    "the greatest of two lanes": (BLOCK, "most = maximum(most, shuffle_xor(most, 2));", "most = maximum(most, most);"),
    "the greatest of the last tile": (BLOCK, GREATEST, "most * arguments.to_bits"),
    "the greatest is not scaled": (BLOCK, GREATEST, "maximum(greatest[i][half], most)"),
    "nothing is subtracted": (BLOCK, WEIGHT, WEIGHT.replace("-subtracted", "0.0f")),
    "minus infinity is subtracted": (BLOCK, "now == -infinity() ? 0.0f : now", "now"),
    "rescaled the other way": (BLOCK, "greatest[i][half] - subtracted", "subtracted - greatest[i][half]"),
    "weights to the base e": (BLOCK, "cukiln::exp2(bits)", "cukiln::exp(bits)"),
    "a NaN weighs nothing": (BLOCK, "cukiln::exp2(bits)", "(bits == bits ? cukiln::exp2(bits) : 0.0f)"),
    "a NaN of a hidden key is seen": (BLOCK, HIDDEN, HIDDEN.replace("= -", "-= ")),
    "weights of other keys": (BLOCK, "2 * k + r / 2", "2 * k + 1 - r / 2"),
    "values of the first 16 keys": (BLOCK, "value_reader.at(values, j, k)", "value_reader.at(values, j, 0)"),
    "values of other columns": (BLOCK, "value_reader.at(values, j, k)", "value_reader.at(values, 0, k)"),
    "keys of other elements": (BLOCK, "key_reader.at(keys, k, j)", "key_reader.at(keys, 0, j)"),
    "the first 16 keys": (BLOCK, "key_reader.at(keys, k, j)", "key_reader.at(keys, k, 0)"),
    "queries of the first piece": (BLOCK, "q_reader.at(tile, k, i)", "q_reader.at(tile, k, 0)"),
    "queries of the first piece, shared": (BLOCK, "q_reader.at(q_tile, k, i)", "q_reader.at(q_tile, k, 0)"),
    "every warp has the first queries": (BLOCK, "static_cast<int>(threadIdx.x) / 32 * rows", "0 * rows"),
    "a window ends a key late": (BLOCK, "key >= from", "key + 1 >= from"),
    "keys of the neighbour": (BLOCK, "begin + j * 8 + lane() % 4 * 2 + e", "begin + j * 8 + lane() % 4 * 2"),
    "padding is seen": (BLOCK, "key < rows.seq_kv ? key : rows.seq_kv", "key"),
    "keys before the first": (BLOCK, "key > 0 ? key : 0", "key"),
    "no mask on the left": (BLOCK, f"begin < {LAST_QUERY}", "false"),
    "no cap": (BLOCK, "exact_epilogue() ? argument : cukiln::tanh(argument)", "argument"),
    "the kv head by turns": (BLOCK, "head / (arguments.heads_q / arguments.heads_kv)", "head % arguments.heads_kv"),
    "every kv head is the first": (BLOCK, "head / (arguments.heads_q / arguments.heads_kv)", "0 * head"),
    "a short band is a whole one": (BLOCK, "first_head + inside % heads", "first_head + inside % arguments.band"),
    "the tiles of a band": (BLOCK, "block / (arguments.band * tiles) * arguments.band", "0 * arguments.band"),
    "the batch of the head": (BLOCK, "number / heads_of(arguments)", "number % arguments.batch"),
    "every matrix of keys is the first": (BLOCK, "before_keys(rows, place, given.of_k)", "0 * given.of_k.batch"),
    "every matrix of values is the first": (BLOCK, "before_keys(rows, place, given.of_v)", "0 * given.of_v.batch"),
    "the same tile again": (BLOCK, "source + before * pitch", "source + 0 * pitch"),
    "rows of the first tile exist": (BLOCK, "seq_kv - first_key - before", "seq_kv - first_key"),
    "keys from another tile on": (OWN, "first_tile * C::tile_kv", "0 * C::tile_kv"),
    "the last tile is left out": (BLOCK, "(end - 1) / C::tile_kv + 1 - first", "(end - 1) / C::tile_kv - first"),
    "tiles of the first query": (BLOCK, "place.query(C::tile_q - 1)", "place.query(0)"),
    "a split begins a tile late": (BLOCK, "first + before", "first + before + (split > 0)"),
    "a split begins where the one before ends early": (BLOCK, "(split < more ? split : more)", "0"),
    "no split has a tile more": (BLOCK, "each + (split < more ? 1 : 0)", "each"),
    "every split has a tile more": (BLOCK, "each + (split < more ? 1 : 0)", "each + 1"),
    "every split is the first": (BLOCK, "static_cast<int>(blockIdx.y)", "0 * static_cast<int>(blockIdx.y)"),
    "a partial total of two lanes": (MERGE, "total += shuffle_xor(total, 2);", "total += 0.0f;"),
    "a partial total of half of the lanes": (MERGE, "total += shuffle_xor(total, 1);", "total += 0.0f;"),
    "the workspace of the first split": (MERGE, "int64_t(blockIdx.y) * heads", "0 * heads"),
    "the workspace of the first matrix": (MERGE, OF_HEAD, "place.head"),
    "the workspace of the kv head": (MERGE, OF_HEAD, OF_HEAD.replace("place.head", "place.kv_head")),
    "the workspace of the first queries": (
        MERGE, "head * arguments.seq_q + first_query(of) + place.first", "head * arguments.seq_q + first_query(of)"
    ),
    "totals where sums are": (MERGE, "arguments.splits * rows * pitch + 2 * first", "2 * first"),
    "totals of the first split": (
        MERGED_ROWS, "load_global<2>(weights + 2 * split * rows)", "load_global<2>(weights + 0 * split * rows)"
    ),
    "the greatest of the first split": (
        MERGED_ROWS, "load_global<1>(weights + 2 * split * rows)", "load_global<1>(weights + 0 * split * rows)"
    ),
    "the greatest of the last split": (MERGED_ROWS, "maximum(greatest, own)", "own"),
    "sums of the first split": (MERGED_ROWS, "split * rows * pitch + i", "i"),
    "sums of the first row": (MERGED_ROWS, "row * pitch + column", "column"),
    "sums of the first columns": (MERGED_ROWS, "row * pitch + column", "row * pitch"),
    "totals of the first row": (
        MERGED_ROWS, "arguments.splits * rows * pitch + 2 * row", "arguments.splits * rows * pitch + 0 * row"
    ),
    "splits are not rescaled": (MERGED_ROWS, "cukiln::exp2(bits)", "1.0f"),
    "splits are rescaled to the base e": (MERGED_ROWS, "cukiln::exp2(bits)", "cukiln::exp(bits)"),
    "splits are rescaled the other way": (MERGED_ROWS, "own.data[0] - subtracted", "subtracted - own.data[0]"),
    "merged sums are not rescaled": (MERGED_ROWS, MERGED, MERGED.replace("factor", "1.0f")),
    "the merged total is not rescaled": (MERGED_ROWS, MERGED_TOTAL, MERGED_TOTAL.replace("factor", "1.0f")),
    "the merged total of the last split": (MERGED_ROWS, MERGED_TOTAL, "factor * own.data[1]"),
    "minus infinity is subtracted of splits": (MERGED_ROWS, "greatest == -infinity() ? 0.0f : greatest", "greatest"),
    "merged, divided by nothing": (MERGED_ROWS, "total == 0.0f ? 0.0f : 1.0f / total", "1.0f / total"),
    "merged, not divided": (MERGED_ROWS, "1.0f / total", "1.0f"),
    "merged lse without the greatest": (MERGED_ROWS, "greatest + cukiln::log2(total)", "cukiln::log2(total)"),
    "merged lse to the base e": (MERGED_ROWS, "cukiln::log2(total)", "cukiln::log(total)"),
    "merged lse of the first row": (MERGED_ROWS, "arguments.lse + at", "arguments.lse + 0 * at"),
    "a list of whole tiles": (LIST, f"{ROWS_OF} + C::tile_q - 1", ROWS_OF),
    "a list counted by whole tiles": (LIST, f"{OTHERS_ROWS} + C::tile_q - 1", OTHERS_ROWS),
    "a list of queries, heads apart": (LIST, ROWS_OF, ROWS_OF.removesuffix(" * group")),
    "a list with sequences of as many keys in one place": (LIST, "others == keys && other < own", "false"),
    "a list with longer sequences in one place": (LIST, "others > keys", "false"),
    "a list of each sequence's last tile": (LIST, "tiles - 1 - i", "tiles - 1"),
    "a list without its last entry": (LIST, "all += further;", "all += further - (other == 0);"),
    "a list of one entry more": (LIST, "all += further;", "all += further + (other == 0);"),
    "a list over its length": (LIST, "2 * (1 + before + i)", "2 * (before + i)"),
    "entries from the length on": (OWN, "2 * (1 + tile)", "2 * tile"),
    "entries of one block": (OWN, "item += gridDim.x", "item += 2 * gridDim.x"),
    "entries of the first head": (OWN, "static_cast<int>(item % heads)", "0"),
    "entries of q's heads, packed": (OWN, OF_LIST, "arguments.heads_q"),
    "the first tile of each entry": (OWN, "listed.data[1] * C::tile_q", "0"),
    "a listed head of q as one of keys": (BLOCK, "kv_head /= group;", ""),
    "a listed group as a head": (BLOCK, "head *= group;", ""),
    "the workspace of the first sequence": (MERGE, "first_query(of)", "0"),
    "merged lse by the heads of keys": (
        MERGED_ROWS, "query * arguments.heads_q + head", "query * arguments.heads_kv + head"
    ),
    "merged rows of a batch of whole tensors": (
        MERGED_ROWS, "int64_t(C::ragged ? 1 : arguments.batch)", "int64_t(arguments.batch)"
    ),
    "merged out of the first matrix": (MERGED_ROWS, "batch * arguments.of_out.batch", "0 * batch"),
    "merged out by the heads of q": (MERGED_ROWS, "arguments.of_out.head", "arguments.of_q.head"),
    "merged out by the positions of q": (MERGED_ROWS, "arguments.of_out.position", "arguments.of_q.position"),
    "a workspace without its totals": (
        OWN, "workspace_pitch(static_cast<int>(integers[6])) + 2", "workspace_pitch(static_cast<int>(integers[6]))"
    ),
    "a workspace of one split": (OWN, "4 * splits(kernel, integers[2], launch[1])", "4 * 1"),
    "values a tile late": (OWN, "tile + C::stages - 1", "tile + C::stages"),
    "masked as another tile": (OWN, "(first_tile + tile) * C::tile_kv", "tile * C::tile_kv"),
    "the total of two lanes": (OWN, "total += shuffle_xor(total, 2);", "total += 0.0f;"),
    "the total of half of the lanes": (OWN, "total += shuffle_xor(total, 1);", "total += 0.0f;"),
    "divided by nothing": (OWN, "total == 0.0f ? 0.0f : 1.0f / total", "1.0f / total"),
    "not divided": (OWN, "1.0f / total", "1.0f"),
    "lse without the greatest": (OWN, "warp.greatest[i][half] + cukiln::log2(total)", "cukiln::log2(total)"),
    "lse to the base e": (OWN, "cukiln::log2(total)", "cukiln::log(total)"),
    "lse by the heads of keys": (
        SEQUENCE, "int64_t(place.batch) * arguments.heads_q + place.head",
        "int64_t(place.batch) * arguments.heads_kv + place.head"
    ),
    "lse of the block's first queries": (
        SEQUENCE, "head * arguments.seq_q + place.first + row",
        "head * arguments.seq_q + row",
    ),
    "queries of the first matrix": (OWN, "before_queries(rows, place, arguments.of_q)", "0 * arguments.of_q.batch"),
    "out by the heads of q": (OWN, "place.head * arguments.of_out.head", "place.head * arguments.of_q.head"),
    "out by the positions of q": (
        OWN, "(place.first + row) * arguments.of_out.position",
        "(place.first + row) * arguments.of_q.position",
    ),
    "aligned to the beginning": (OWN, "seq_kv - seq_q", "0 * seq_kv"),
    "one key less to the right": (OWN, "clipped(right, 0, longest) + 1", "clipped(right, 0, longest)"),
    "one key less to the left": (
        OWN, "diagonal - clipped(left, 0, longest)",
        "diagonal - clipped(left, 0, longest) + 1",
    ),
    "scores as exponents of e": (OWN, "factor * log2_of_e", "factor"),
    "keys before the first query's": (
        BLOCK, "before_keys(rows, place, given.of_k)", "before_queries(rows, place, given.of_k)"
    ),
    "heads of all sequences in a band": (BLOCK, "(C::ragged ? 1 : arguments.batch)", "arguments.batch"),
    "the sequence behind": (SEQUENCE, "first_number <= numbered", "first_number <= numbered + 1"),
    "a sequence has no number of its own": (
        SEQUENCE, "entry(arguments.qo_indptr, middle) * group / tile_q + middle",
        "entry(arguments.qo_indptr, middle) * group / tile_q"
    ),
    "a half of the sequences too few": (SEQUENCE, "left -= half;", "left = half;"),
    "a tile of the sequence before": (
        SEQUENCE, "numbered - first_q * group / tile_q - number", "numbered - first_q * group / tile_q"
    ),
    "a tile of the batch": (SEQUENCE, "numbered - first_q * group / tile_q - number", "numbered"),
    "queries to the end of the batch": (
        SEQUENCE, "entry(arguments.qo_indptr, number + 1) - first_q",
        "entry(arguments.qo_indptr, arguments.batch) - first_q"
    ),
    "queries from the beginning of the batch": (
        SEQUENCE, "entry(arguments.qo_indptr, number + 1) - first_q", "entry(arguments.qo_indptr, number + 1)"
    ),
    "queries of the next sequence": (
        SEQUENCE, "first_q = entry(arguments.qo_indptr, number);",
        "first_q = entry(arguments.qo_indptr, number + 1);"
    ),
    "keys of the next sequence": (
        SEQUENCE, "first_kv = entry(arguments.kv_indptr, number);",
        "first_kv = entry(arguments.kv_indptr, number + 1);"
    ),
    "keys of the table of queries": (
        SEQUENCE, "first_kv = entry(arguments.kv_indptr, number);",
        "first_kv = entry(arguments.qo_indptr, number);"
    ),
    "keys to the end of the batch": (
        SEQUENCE, "entry(arguments.kv_indptr, number + 1) - first_kv",
        "entry(arguments.kv_indptr, arguments.batch) - first_kv"
    ),
    "keys from the beginning of the batch": (
        SEQUENCE, "entry(arguments.kv_indptr, number + 1) - first_kv", "entry(arguments.kv_indptr, number + 1)"
    ),
    "a sequence is aligned to its beginning": (SEQUENCE, "seq_kv - seq_q", "0"),
    "a sequence sees a key less to the right": (
        SEQUENCE, "diagonal + arguments.window_right + 1", "diagonal + arguments.window_right"
    ),
    "queries of the first sequence": (SEQUENCE, "sequence.first_q * strides.position", "0 * strides.position"),
    "keys of the first sequence": (SEQUENCE, "sequence.first_kv * strides.position", "0 * strides.position"),
    "lse of the first sequence": (SEQUENCE, "sequence.first_q + place.first + row", "place.first + row"),
    "lse of a sequence by the heads of keys": (
        SEQUENCE, "query * arguments.heads_q + place.head", "query * arguments.heads_kv + place.head"
    ),
    "the last page is full": (SEQUENCE, "entry(arguments.kv_last_page_len, number)", "C::page_size"),
    "the last page of the sequence before": (
        SEQUENCE, "entry(arguments.kv_last_page_len, number)",
        "entry(arguments.kv_last_page_len, number ? number - 1 : 0)"
    ),
    "the last page is one of the others": (SEQUENCE, "seq_kv - 1", "seq_kv"),
    "pages from the beginning of the table": (PAGES, "given.kv_indices + rows.first_kv", "given.kv_indices"),
    "pages where the queries begin": (PAGES, "given.kv_indices + rows.first_kv", "given.kv_indices + rows.first_q"),
    "pages in their order": (PAGES, "entry(table, key / C::page_size)", "key / C::page_size"),
    "the next page": (
        PAGES, "key / C::page_size", "(key + C::page_size < keys ? key + C::page_size : key) / C::page_size"
    ),
    "the page of the tile": (PAGES, "key / C::page_size", "begin / C::page_size"),
    "rows of the page before the thread's": (PAGES, "(first + from_first) % C::page_size", "from_first % C::page_size"),
    "the first row of a page": (PAGES, "(first + from_first) % C::page_size", "0"),
    "the first page of the cache": (PAGES, "page * strides.batch", "0 * strides.batch"),
    "keys of the first head in pages": (PAGES, "place.kv_head * given.of_k.head", "0 * given.of_k.head"),
    "values of the first head in pages": (PAGES, "place.kv_head * given.of_v.head", "0 * given.of_v.head"),
    "pages of the tile before": (PAGES, "read(pages, rows, tile + 1);", "read(pages, rows, tile);"),
    "pages of the first tile": (PAGES, "first_key + tile * C::tile_kv", "first_key"),
    "pages before the first that is seen": (PAGES, "first_key + tile * C::tile_kv", "tile * C::tile_kv"),
    "rows of pages behind the last key": (PAGES, "rows.seq_kv - begin", "C::tile_kv"),
    "numbers of tiles for whole ones alone": (OWN, "rows / kernel.tile_q + batch", "rows / kernel.tile_q"),
    "packed: every row is of the first head": (BLOCK, "head * per_head", "0 * per_head"),
    "packed: tiles begin with the first head": (BLOCK, "row - first_query * group", "0"),
    "packed: masks are those of the tile's first query": (BLOCK, OF_ROW, "first_query"),
    "packed: masks a row behind": (BLOCK, OF_ROW, "first_query + further(row + 1)"),
    "packed: masks of rows as queries": (BLOCK, OF_ROW, "first + row"),
    "packed: a group a row behind": (BLOCK, "2u * (first_head + row)", "2u * (first_head + row + 1)"),
    "packed: quotients are rounded down before": (BLOCK, "(0x7fffffffu + heads) / heads", "0x80000000u / heads"),
    "packed: as many rows of a query as kv heads": (
        BLOCK, "this->share(arguments.heads_q / arguments.heads_kv);", "this->share(arguments.heads_kv);"
    ),
    "packed: every group has the first keys": (BLOCK, "kv_head = head;", "kv_head = 0;"),
    "packed: as many tiles as without": (
        BLOCK, "arguments.seq_q * (arguments.heads_q / arguments.heads_kv)", "arguments.seq_q"
    ),
    "packed: blocks of each head": (
        BLOCK, "packs_heads<C> ? arguments.heads_kv : arguments.heads_q", "arguments.heads_q"
    ),
    "packed: queries of one head": (
        OWN, "tile.before(first + further, strides.position, strides.head)",
        "tile.before(first + further, strides.position, 0)"
    ),
    "packed: queries by the row": (OWN, "first + further", "first"),
    "packed: rows of one head exist": (OWN, "rows.seq_q * place.group - place.first", "rows.seq_q - place.first"),
    "packed: out of one head": (
        OWN, "place.before(row, arguments.of_out.position, arguments.of_out.head)",
        "place.before(row, arguments.of_out.position, 0)"
    ),
    "packed: tables count rows": (
        SEQUENCE, "entry(arguments.qo_indptr, middle) * group", "entry(arguments.qo_indptr, middle)"
    ),
    "packed: lse of one head": (SEQUENCE, "place.before(row, 1, arguments.seq_q)", "place.before(row, 1, 0)"),
    "packed: lse of the first sequence": (
        SEQUENCE, "int64_t(sequence.first_q) * arguments.heads_q + place.head", "place.head"
    ),
    "packed: the workspace of one head": (MERGE, "place.before(row, 1, arguments.seq_q)", "place.before(row, 1, 0)"),
    "packed: a grid without a group's rows": (
        OWN, "kernel.packs_heads && heads_kv > 0 && heads_q >= heads_kv ? heads_q / heads_kv : 1", "1"
    ),
    "the cap is the scale": (OWN, "kernel.softcap ? scalars[1] : scalars[0]", "scalars[0]"),
}  # fmt: skip


def mutated(name: str) -> dict[str, Kernel]:
    small: dict[str, Any] = {"name": name, "qk": 32, "vo": 16, "tile_q": 32, "tile_kv": 16}
    return {
        "Q in registers": kernel(**small, lse=True),
        "Q shared, two stages": kernel("bfloat16", **small, q_in="shared", stages=2, layout="bhsd", softcap=True),
        "two pieces": kernel(**{**small, "tile_q": 64, "qk": 16, "vo": 48}, stages=1),
        "two pieces, Q shared, by 4": kernel(
            **{**small, "tile_q": 64, "tile_kv": 32}, q_in="shared", stages=3, align=4, align_out=4, lse=True
        ),
        "four warps, single elements": kernel(
            **{**small, "tile_q": 64, "warps": 4, "qk": 16}, stages=2, align=1, align_out=1
        ),
        "ragged": kernel(**small, lse=True, ragged=True),
        "ragged, Q shared": kernel("bfloat16", **small, q_in="shared", stages=2, ragged=True),
        "pages of 1": kernel(**small, stages=2, page_size=1),
        "pages of 16": kernel(**{**small, "tile_kv": 32, "vo": 32}, lse=True, page_size=16),
        "pages of 64": kernel("bfloat16", **{**small, "tile_kv": 32}, q_in="shared", stages=3, page_size=64),
        "pages of 16, three rows of a thread": kernel(**{**small, "tile_kv": 64, "qk": 48}, page_size=16, align=4),
        "split": kernel(**small, split="workspace", lse=True),
        "split, Q shared, by 2": kernel(
            "bfloat16",
            **{**small, "qk": 16},
            q_in="shared",
            stages=2,
            layout="bhsd",
            align=2,
            align_out=2,
            split="workspace",
        ),
        "split, ragged": kernel(**small, split="workspace", lse=True, ragged=True),
        "split, pages of 16": kernel("bfloat16", **small, split="workspace", page_size=16, stages=2),
        "a list": kernel(**small, lse=True, ragged=True, walk="longest_first"),
        "a list, Q shared": kernel("bfloat16", **small, q_in="shared", ragged=True, walk="longest_first"),
        "a list, packed": kernel(**small, lse=True, ragged=True, packing="group", walk="longest_first"),
        "packed": kernel(**small, lse=True, packing="group"),
        "packed, pages of 16": kernel("bfloat16", **small, lse=True, packing="group", page_size=16, q_in="shared"),
        "packed, split": kernel(**small, lse=True, packing="group", split="workspace", stages=2, layout="bhsd"),
    }


MUTATIONS = declare.Mutations(
    kernels=mutated,
    files=tuple(OP.kernel_texts),
    wrong=WRONG,
    counts={"barrier": 6, "warp barrier": 1, "commit": 3, "wait": 8},
    definitions={"bounds": 2, "swizzle": 1, "stage": 1},
    # What goes through a register has landed when it is stored.
    excused=dict.fromkeys(("cp_async_commit();", "cp_async_wait<"), ("four warps, single elements",)),
)

# ---- winners


def level_0(**fields: Any) -> Candidate:
    (candidate,) = lower(attention(**fields), SM_90A, LEVEL_0).candidates
    return candidate


def compiled() -> dict[str, Kernel]:
    """Level 0 of each class, and of level 1 the kernel that takes the most registers."""
    kernels = {}
    for name, fields in CLASSES.items():
        kernels[f"{name}, level 0"] = level_0(**fields).kernel
        candidates = lower(attention(**fields), SM_90A, LEVEL_1).candidates
        kernels[f"{name}, level 1"] = max((c.kernel for c in candidates), key=OP.estimated_registers)
    return kernels


def planned() -> list[Candidate]:
    """Of level 1 of a problem, and some of level 2."""
    problem = attention(batch=2, causal=True, lse=True)
    one, two = (
        lower(problem, SM_90A, Search(level=level, limit=limit)).candidates for level, limit in ((1, 3), (2, 3))
    )
    return [*one, *two]


def planned_splits() -> list[Candidate]:
    problems = [attention(**DECODE), attention(seq_q=5, seq_kv=3000, head_dim_vo=20, batch=3, lse=True)]
    return [c for problem in problems for c in lower(problem, SM_90A, Search(level=2, limit=40)).candidates
            if c.schedule.as_dict().get("split")][:8]  # fmt: skip


def moved(**fields: Any) -> dict[str, str]:
    """A call's tensors with the changes."""
    shapes = {"q": (2, 70, 4, 64), "k": (2, 90, 2, 64), "v": (2, 90, 2, 64), "out": (2, 70, 4, 64), **fields}
    return {name: f"H{shape}" if name != "out" else f"H({', '.join(map(str, shape))}, address=0x50000000)"
            for name, shape in shapes.items()}  # fmt: skip


def decoded(keys: int, queries: int = 1, heads_kv: int = 8) -> dict[str, str]:
    """A call's tensors of 32 heads, and an lse."""
    q, k = (1, queries, 32, 128), (1, keys, heads_kv, 128)
    return {**moved(q=q, k=k, v=k, out=q), "lse": f"F(1, 32, {queries}, address=0x68000000)"}


CALLS = {
    "winner": declare.Library(
        candidate=lambda: level_0(batch=2, causal=True, lse=True),
        record={
            "operands": ["q", "k", "v", "out", "lse"], "roles": ["in", "in", "in", "out", "out"],
            "some extents": {"seq_kv": 90, "heads_kv": 2, "k_position_stride": 128}, "attributes": [-1, 0],
            "scalars": [0.125],
        },
        taken={
            "other extents": (
                {**moved(q=(1, 300, 6, 56), k=(1, 8, 3, 56), v=(1, 8, 3, 64), out=(1, 300, 6, 64)),
                 "lse": "F(1, 6, 300, address=0x60000000)"}, 1),
            "no keys": (moved(k=(2, 0, 2, 64), v=(2, 0, 2, 64)), 1),
            "a window": ({0: 5, 1: 3}, 1),
            "one tensor for all": (
                {"q": "H(2, 70, 4, 64, strides=(53760, 768, 64, 1))",
                 "k": "H(2, 90, 2, 64, address=0x71000000, strides=(53760, 768, 64, 1))",
                 "v": "H(2, 90, 2, 64, address=0x72000000, strides=(53760, 768, 64, 1))"}, 1),
        },
        refused={
            "a tensor less": ({"lse": None}, "TypeError",
                              "4 tensors were given; this kernel takes 5: q, k, v, out, lse"),
            "no window": ({"numbers": (0.125,)}, "TypeError", "this call takes 5 tensors, then 3 numbers"),
            "dtype": ({"k": "F(2, 90, 2, 64)"}, "TypeError", "k is float32; float16 is allowed"),
            "rank": ({"q": "H(140, 4, 64)"}, "ValueError", "q has rank 3; rank 4 (batch, positions, heads, head_dim)"),
            "batch": ({"k": "H(1, 90, 2, 64)"}, "ValueError", "batch differs between q and k: 2 and 1"),
            "keys": ({"v": "H(2, 91, 2, 64)"}, "ValueError", "seq_kv differs between k and v: 90 and 91"),
            "queries": ({"out": "H(2, 71, 4, 64, address=0x50000000)"}, "ValueError",
                        "seq_q differs between q and out"),
            "heads": ({"v": "H(2, 90, 1, 64)"}, "ValueError", "heads_kv differs between k and v: 2 and 1"),
            "heads that do not divide": (
                {"k": "H(2, 90, 3, 64)", "v": "H(2, 90, 3, 64)"}, "ValueError",
                "4 heads of q are no multiple of 3 heads of k and v"),
            "head_dim": ({"k": "H(2, 90, 2, 32)"}, "ValueError", "head_dim_qk differs between q and k: 64 and 32"),
            "wide heads": (
                moved(q=(2, 70, 4, 72), k=(2, 90, 2, 72)), "ValueError",
                "head_dim is 72 of q and k and 64 of v; this kernel holds 64 and 64: look up the kernel"),
            "elements at once": (
                moved(q=(2, 70, 4, 60), k=(2, 90, 2, 60)), "ValueError", "this kernel moves 8 elements at once"),
            "address": ({"v": "H(2, 90, 2, 64, address=0x70000008)"}, "ValueError", "a multiple of 16 bytes"),
            "strides": ({"q": "H(2, 70, 4, 64, strides=(17920, 1, 70, 280))"}, "ValueError",
                        "the last axis of q has stride 280; it must be contiguous"),
            "out over itself": (
                {"out": "H(2, 70, 4, 64, address=0x50000000, strides=(17920, 64, 64, 1))"}, "ValueError",
                "elements of out overlap each other"),
            "out over q": ({"out": "q"}, "ValueError", "out overlaps q"),
            "lse of positions first": ({"lse": "F(2, 70, 4, address=0x60000000)"}, "ValueError",
                                       "lse must have the shape (batch, heads_q, seq_q): 2, 4, 70"),
            "lse in half": ({"lse": "H(2, 4, 70, address=0x60000000)"}, "TypeError",
                            "lse is float16; float32 is allowed"),
            "lse over out": ({"lse": "F(2, 4, 70, address=0x50000000)"}, "ValueError", "lse overlaps out"),
            "device": ({"v": "H(2, 90, 2, 64, device=1)"}, "ValueError", "v is on cuda:1, but q is on cuda:0"),
            "a scale of 0": ({2: 0.0}, "ValueError", "scale is 0; 9.5367431640625e-07 to 1048576 is allowed"),
            "a scale below 0": ({2: -0.125}, "ValueError", "scale is -0.125; 9.5367431640625e-07 to"),
            "a scale that is no number": ({2: math.nan}, "ValueError", "scale is nan; 9.5367431640625e-07 to"),
            "an endless scale": ({2: math.inf}, "ValueError", "scale is inf; 9.5367431640625e-07 to"),
            "no queries": (
                {**moved(q=(2, 0, 4, 64), out=(2, 0, 4, 64)), "lse": "F(2, 4, 0, address=0x60000000)"}, "ValueError",
                "q is empty; every extent must be at least 1"),
        },
    ),
    # 32 splits of 8,192 keys, in tiles of 64, of 4 heads that are packed.
    "decode": declare.Library(
        candidate=lambda: level_0(**DECODE, lse=True, softcap=30.0),
        record={"operands": ["q", "k", "v", "out", "lse"], "attributes": [-1, 0],
                "scalars": [1 / math.sqrt(128), 30.0]},
        taken={
            "fewer keys": (decoded(keys=700), [(8, 11, 1), (2, 1, 1)]),
            "a tile of keys": (decoded(keys=60), [(8, 1, 1), (2, 1, 1)]),
            "no keys": (decoded(keys=0), [(8, 1, 1), (2, 1, 1)]),
            "more keys and queries": (decoded(queries=20, keys=2**17), [(40, 32, 1), (40, 1, 1)]),
            "heads of their own": (decoded(keys=700, heads_kv=32), [(32, 11, 1), (2, 1, 1)]),
            "one head of keys": (decoded(keys=700, heads_kv=1), [(2, 11, 1), (2, 1, 1)]),
        },
        refused={
            "a cap of 0": ({3: 0.0}, "ValueError", "softcap is 0; 9.5367431640625e-07 to 1048576 is allowed"),
            "a scale beyond": ({2: 2.0**21}, "ValueError", "scale is 2097152; 9.5367431640625e-07 to 1048576 is"),
            "out over q": ({"out": "q"}, "ValueError", "out overlaps q"),
            "too many heads of a group": (
                {name: f"H(1, 1, {heads}, 128, address={address})"
                 for name, heads, address in (("q", 2**16, 2**30), ("k", 1, 2**31), ("v", 1, 3 * 2**30),
                                              ("out", 2**16, 2**32))},
                "ValueError", "1 queries of 65536 packed heads; at most 32768 heads and 536870912 of both multiplied"),
        },
    ),
}  # fmt: skip

OF_JOB: dict[str, Any] = {"seq_q": 96, "heads_q": 2, "head_dim_qk": 64}
DECLARED = (
    declare.Declarations(
        operator=NAME,
        problem=DEFAULT,
        problems=PROBLEMS,
        searches=SEARCHES,
        references=declare.References(
            definition=definition,
            defined={**REFERENCED},
            exact=False,
            rtol=1e-10,
            atol=1e-13,
            in_fp32=in_fp32,
            bounded=BOUNDED,
            wrong=8,
            by_torch=by_torch,
            on_device=[
                (kind, {**fields, "lse": True})
                for kind in ("integer", "normal", "special")
                for fields in [*REFERENCED.values(), *BESIDE_TORCH.values()]
            ],
            on_device_rtol=1e-12,
        ),
        verifications=declare.Verifications(
            kernels=verified,
            sanitized=lambda: [
                kernel(qk=32, stages=2, lse=True),
                kernel("bfloat16", qk=48, vo=16, q_in="shared", align=1, layout="bhsd"),
                kernel(qk=32, vo=48, split="workspace", lse=True),
                kernel("bfloat16", qk=16, q_in="shared", stages=2, align=1, split="workspace"),
                kernel(qk=32, stages=2, lse=True, ragged=True),
                kernel("bfloat16", qk=48, vo=16, q_in="shared", align=1, page_size=16),
                kernel(qk=32, stages=2, lse=True, page_size=1, split="workspace"),
                kernel(qk=32, lse=True, packing="group"),
                kernel(qk=32, q_in="shared", lse=True, ragged=True, walk="longest_first"),
                kernel("bfloat16", qk=16, vo=48, q_in="shared", align=1, packing="group", page_size=16,
                       split="workspace"),
            ],
            nearest=0.3,
        ),
        mutations=MUTATIONS,
        random_cases=declare.RandomCases(cases=random_cases, properties=properties, spread=SPREAD, each_run=13),
        machine_code=declare.MachineCode(kernels=compiled, claims=dict.fromkeys(compiled(), CLAIMS)),
        launches=declare.Launches(planned={"level 1 and some of level 2": planned, "splits": planned_splits}),
        calls=CALLS,
        job=declare.Job(
            each_run="paged decode",
            problems={
                "BERT": {"batch": 2, **OF_JOB, "lse": True},
                "ragged": {
                    **OF_JOB, "lengths": "ragged", "batch": 3, "q_lengths": [96, 0, 7], "kv_lengths": [96, 0, 7],
                    "causal": True,
                },
                "paged decode": {
                    **OF_JOB, "lengths": "paged", "page_size": 1, "batch": 3, "seq_q": 1, "seq_kv": 200,
                    "kv_lengths": [200, 1, 33], "dtype": "bfloat16",
                },
                "long decode": {**OF_JOB, "seq_q": 1, "seq_kv": 1500, "heads_q": 4, "heads_kv": 1, "lse": True},
            },
            failing=[
                ({**OF_JOB, "head_dim_qk": 512}, {"level": 0}, {"registers": 1}, "No schedule fits: 16 queries of a"),
            ],
        ),
    ),
)  # fmt: skip
add_checks(globals())


def test_schedules_of_tests_are_accepted() -> None:
    """What is verified on the CPU is what a search may try."""
    assert OP.rules(attention(), Schedule.of({**SMALL, "band": 0}), SM_90A) == ACCEPTED
    split = {**SMALL, "band": 0, "split": "workspace", "split_kv": 2}
    assert OP.rules(attention(), Schedule.of(split), SM_90A) == ACCEPTED
