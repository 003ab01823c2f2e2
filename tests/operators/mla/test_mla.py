"""Multi-head latent attention, absorbed: decoding and prefill from paged caches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest

from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators.attention.problem import LONGEST, PAGE_SIZES
from codegen.operators.mla.problem import MOST_HEADS
from codegen.operators.mla.seen import copied, most_tiles, scores, tiles
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.problem import LARGEST_ELEMENTS
from codegen.search.rules import ACCEPTED
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import target
from tests.operators.harness import declarations as declare
from tests.operators.harness.checks import add_checks
from tests.operators.harness.declarations import LEVEL_0, LEVEL_1, SM_90A, Rejection
from tests.operators.mla.claims import (
    CLAIMS,
    CLASSES,
)
from tests.operators.mla.kernels import (
    DECODE,
    DEFAULT,
    NAME,
    OP,
    PREFILL,
    RAGGED,
    SMALL,
    UNEVEN,
    WIDE_DECODE,
    by_torch,
    definition,
    in_fp32,
    kernel,
    mla,
)
from tests.operators.mla.random_cases import SPREAD, properties, random_cases
from workers.cpu.verify import CpuVerdict

# ---- problems

STRIDES = {"q_nope_strides": [8192, 512], "q_pe_strides": [1024, 64], "ckv_cache_strides": [8192, 512],
           "kpe_cache_strides": [1024, 64]}  # fmt: skip
EXPLICIT: dict[str, Any] = {
    **DEFAULT, **STRIDES, "queries": "one", "seq_q": 1, "head_dim_ckv": 512, "head_dim_kpe": 64, "dtype": "bfloat16",
    "causal": False, "scale": 1.0 / math.sqrt(192), "lse": False, "q_lengths": None, "kv_lengths": None,
}  # fmt: skip
# 90, 5 and 40 keys in 6, 1 and 3 pages; 2 more are of no sequence.
CACHES = [("ckv_cache", "bfloat16", "in", (12, 16, 512)), ("kpe_cache", "bfloat16", "in", (12, 16, 64))]
PROBLEMS = declare.Problems(
    refused=[
        ({"heads_q": 0}, "heads_q", "greater than or equal to 1"),
        ({"heads_q": MOST_HEADS + 1}, "heads_q", f"less than or equal to {MOST_HEADS}"),
        ({"heads_q": "16"}, "heads_q", "valid integer"),
        ({"head_dim_ckv": 256}, "head_dim_ckv", "Input should be 512"),
        ({"head_dim_kpe": 0}, "head_dim_kpe", "Input should be 64"),
        ({"page_size": 32}, "page_size", "Input should be 1, 16 or 64"),
        ({"page_size": None}, "page_size", "Input should be 1, 16 or 64"),
        ({"seq_kv": 0}, "seq_kv", "greater than or equal to 1"),
        ({"seq_kv": LONGEST + 1}, "seq_kv", f"less than or equal to {LONGEST}"),
        ({"seq_q": 2}, "seq_q", "is 2, but queries is one; 1 is allowed, or queries ragged"),
        ({"q_lengths": [1, 1, 1]}, "q_lengths", "is given, but queries is one; null is allowed, or queries ragged"),
        ({"queries": "many"}, "queries", "'one' or 'ragged'"),
        ({"kv_lengths": [90, 1]}, "kv_lengths", "has 2 lengths for a batch of 3"),
        ({"kv_lengths": [91, 1, 0]}, "kv_lengths", "has 91, but seq_kv, the longest, is 90"),
        ({"kv_lengths": [0, 0, 0]}, "kv_lengths", "adds up to 0 positions"),
        ({"batch": 10**7, "seq_kv": 1, "page_size": 64, "heads_q": 4}, "kv_lengths",
         "is null, so batch = 10000000 of seq_kv = 1 makes 640000000 positions in pages of 64; 1 to 536870912 are"),
        ({**RAGGED, "q_lengths": [21, 0, 0]}, "q_lengths", "has 21, but seq_q, the longest, is 20"),
        ({**RAGGED, "batch": 1, "seq_q": 2**20, "heads_q": 1024}, "q_lengths",
         f"is null, so batch = 1 of seq_q = {2**20} makes {2**30 + 1} rows of queries, heads and sequences; {LONGEST}"),
        ({"dtype": "float32"}, "dtype", "'float16' or 'bfloat16'"),
        ({"dtype": "float8_e4m3fn"}, "dtype", "attention in fp8 is not computed"),
        ({"causal": 1}, "causal", "valid boolean"),
        ({"scale": 0.0}, "scale", "is 0.0;"),
        ({"q_nope_strides": [8192, 516]}, "q_nope_strides", "has (8192, 516); multiples of 8 are allowed"),
        ({"kpe_cache_strides": [-8, 64]}, "kpe_cache_strides.0", "greater than or equal to 0"),
        ({"ckv_cache_strides": [2**40, 512]}, "ckv_cache_strides", f"at most {LARGEST_ELEMENTS} are allowed"),
        ({"softcap": 30.0}, "softcap", "not permitted"),
        ({"heads_kv": 1}, "heads_kv", "not permitted"),
        ({"qo_indptr": [0]}, "qo_indptr", "is a tensor of a call and no field: queries ragged asks for calls with it"),
        ({"kv_indices": [0]}, "kv_indices", "is a tensor of a call and no field: the operator asks"),
        ({"kv_last_page_len": [0]}, "kv_last_page_len", "a page_size of more than 1 asks for calls with it"),
    ],
    defaults=[({}, EXPLICIT)],
    alike=[
        ({}, {"causal": True}),  # the only query is the last one
        ({}, {"kv_lengths": [90, 90, 90], "page_size": 16.0, "q_nope_strides": [8192, 512.0]}),
        ({"heads_q": 1}, {"heads_q": 1, "q_nope_strides": [512, 8]}),  # of one head the stride means nothing
    ],
    aligned=[
        ({}, {"dtype": "bfloat16", "lse": False, "queries": "one", "page_size": 16}),
        ({**RAGGED, "dtype": "float16", "lse": True, "page_size": 1},
         {"dtype": "float16", "lse": True, "queries": "ragged", "page_size": 1}),
    ],
    operands=[
        (
            {**RAGGED, **UNEVEN, "lse": True},
            [("q_nope", "bfloat16", "in", (29, 16, 512)), ("q_pe", "bfloat16", "in", (29, 16, 64)), *CACHES,
             ("qo_indptr", "int32", "in", (4,)), ("kv_indptr", "int32", "in", (4,)),
             ("kv_indices", "int32", "in", (10,)), ("kv_last_page_len", "int32", "in", (3,)),
             ("out", "bfloat16", "out", (29, 16, 512)), ("lse", "float32", "out", (29, 16))],
        ),
        (  # one tensor of keys, and queries with the heads first
            {"kv_lengths": [6, 1, 1], "page_size": 1, "ckv_cache_strides": [576, 576], "kpe_cache_strides": [576, 576],
             "q_nope_strides": [512, 1536]},
            [("q_nope", "bfloat16", "in", (3, 16, 512), (512, 1536, 1)), ("q_pe", "bfloat16", "in", (3, 16, 64)),
             ("ckv_cache", "bfloat16", "in", (10, 1, 512), (576, 512, 1)),
             ("kpe_cache", "bfloat16", "in", (10, 1, 64), (576, 64, 1)), ("kv_indptr", "int32", "in", (4,)),
             ("kv_indices", "int32", "in", (8,)), ("out", "bfloat16", "out", (3, 16, 512))],
        ),
    ],
    unspecialised=[
        ({}, {"batch": 40, "seq_kv": 500, "heads_q": 128, "scale": 0.5}, [0, 0.5]),
        (RAGGED, {**RAGGED, "batch": 4, "seq_q": 9, "heads_q": 3, "causal": True, "scale": 0.25}, [1, 0.25]),
    ],
    in_schema=[
        {"seq_kv": 8, "heads_q": 16, "page_size": 64, "scale": None, "q_nope_strides": [8192, 512]},
        {"seq_kv": 8, "heads_q": 16, "page_size": 1, "queries": "ragged", "seq_q": 4, "batch": 2, "q_lengths": [4, 0]},
    ],
    out_of_schema=[{"seq_kv": 8, "heads_q": 16}, {"seq_kv": 8, "heads_q": 16, "page_size": 8}],
)  # fmt: skip

LENGTHS: list[dict[str, Any]] = [
    {"batch": 4, "seq_q": 30, "seq_kv": 70, "heads_q": heads, "q_lengths": [30, 0, 9, 20], "kv_lengths": [70, 9, 0, 7],
     "causal": causal, "queries": "ragged"}
    for heads, causal in product((1, 3, 16, 40), (False, True))
]  # fmt: skip


@pytest.mark.parametrize("fields", LENGTHS)
@pytest.mark.parametrize("tile", [(16, 16), (64, 32), (32, 64)])
def test_scores_tiles_and_copies_are_those_of_the_definition(fields: dict[str, Any], tile: tuple[int, int]) -> None:
    """Block by block and row by row."""
    (tile_q, tile_kv), problem, heads = tile, mla(**fields), fields["heads_q"]
    counts, rows_copied, seen = [], 0, 0
    for queries, keys in problem.sequences:
        ends = [min(keys, max(0, query + keys - queries + 1)) if problem.causal else keys for query in range(queries)]
        of_rows = np.repeat(np.array(ends, int), heads)
        seen += int(of_rows.sum())
        for first in range(0, queries * heads, tile_q):
            count = -(-int(of_rows[first : first + tile_q].max()) // tile_kv)
            counts.append(count)
            rows_copied += min(count * tile_kv, keys)
    assert scores(problem) == seen
    assert tiles(problem, tile_q, tile_kv) == sum(counts)
    assert most_tiles(problem, tile_q, tile_kv) == max(counts)
    assert copied(problem, tile_q, tile_kv) == rows_copied


# ---- rules, levels and costs

USUAL = {"tile_q": 16, "tile_kv": 64, "warps": 4, "warps_vo": 4, "stages": 2}
WIDE = {"tile_q": 64, "tile_kv": 64, "warps": 8, "warps_vo": 4, "stages": 2}
SPLIT = {**USUAL, "split": "workspace", "split_kv": 8}
SEARCHES = declare.Searches(
    accepted=[(DECODE, USUAL), (DECODE, SPLIT), (WIDE_DECODE, WIDE),
              (WIDE_DECODE, {**USUAL, "tile_q": 32, "tile_kv": 32}),
              (PREFILL, WIDE), ({}, SMALL)],
    rejected=[
        Rejection({}, SMALL, "mma", "mma.sync m16n8k16 and cp.async need sm_80; the target is sm_75", arch="sm_75"),
        Rejection(DECODE, {**USUAL, "warps": 2}, "warps", "2 warps are no multiple of warps_vo = 4"),
        Rejection(DECODE, {**USUAL, "warps": 8}, "warps", "16 rows for 2 groups of warps are no multiple of 16 each"),
        Rejection(DECODE, {**USUAL, "tile_kv": 16}, "warps_vo", "16 keys for 4 warps are no multiple of 8 each"),
        Rejection(WIDE_DECODE, {**WIDE, "warps": 2, "warps_vo": 2, "tile_kv": 16}, "registers",
                  "(4 x (128 of out, 4 of scores) and what a warp keeps beside); 255 are there"),
        Rejection(WIDE_DECODE, {**SPLIT, "tile_q": 32, "tile_kv": 32, "split_kv": 2}, "registers",
                  "about 256 registers per thread (2 x (64 of out, 4 of scores)"),
        Rejection(DECODE, USUAL, "shared_memory",
                  "168704 bytes of shared memory (16 rows and 2 x 64 keys of 576 elements, and weights); "
                  "sm_86 has 101376 per block", arch="sm_86"),
        Rejection(DECODE, USUAL, "shared_memory", "sm_80 has 166912 per block", arch="sm_80"),
        Rejection(WIDE_DECODE, {**WIDE, "stages": 3}, "shared_memory", "sm_90a has 232448 per block"),
        Rejection(DECODE, {**WIDE, "tile_kv": 32}, "tile_q", "64 rows of a block are mostly padding for 1 x 16"),
        Rejection({"seq_kv": 20}, USUAL, "tile_kv", "64 keys of a tile are mostly padding for 20"),
        Rejection({"seq_kv": 64}, {**USUAL, "stages": 4, "tile_kv": 32}, "stages", "4 stages for 2 tiles of keys"),
        Rejection(DECODE, {**USUAL, "split_kv": 8}, "split", "split_kv = 8 needs split = workspace"),
        Rejection(DECODE, {**SPLIT, "split_kv": 1}, "split", "split = workspace with 1 split repeats split = none"),
        Rejection(DECODE, {**SPLIT, "split_kv": 65}, "split_kv", "65 splits of 64 tiles of 64 keys, the most that a"),
        Rejection(DECODE, {**SPLIT, "split_kv": 17}, "split_kv", "64 blocks in 17 splits; sm_90a has enough with 1056"),
    ],
    nested=[{}, DECODE, PREFILL, {"seq_kv": 4000, "batch": 1}],
    capped=[
        (DECODE, SPLIT, 4 * 8 * 64 * 16 * 514),
        ({**RAGGED, **UNEVEN, "seq_kv": 4000}, {**SMALL, "split": "workspace", "split_kv": 5}, 4 * 5 * 29 * 16 * 514),
    ],
    begun=[
        *((arch, {**fields, "page_size": size}, "") for arch in ("sm_80", "sm_86", "sm_90a", "sm_120")
          for fields in (DECODE, WIDE_DECODE, PREFILL, {}) for size in PAGE_SIZES),
        *(("sm_90a", {"heads_q": heads, "seq_kv": keys}, "") for heads in (1, 20, 1024) for keys in (1, 33, 2**20)),
        ("sm_75", {}, "need sm_80"),
    ],
    meaningless=[
        ({}, {"tunables": {"q_in": ["shared"]}}, "search.tunables.q_in", "allowed: split, split_kv, stages, tile_kv,"),
        ({}, {"tunables": {"stages": [1]}}, "search.tunables.stages", "allowed: 2, 3, 4"),
        ({}, {"schedules": [{"warps_vo": 1}]}, "search.schedules.0.warps_vo", "allowed: 2, 4, 8"),
    ],
)  # fmt: skip


def test_costs_are_those_of_the_sequences_and_their_tables() -> None:
    problem = mla(**{**RAGGED, **UNEVEN, "causal": True, "lse": True})
    (candidate,) = lower(problem, SM_90A, LEVEL_0, workspace_limit=0).candidates
    cost, seen = OP.cost(problem, candidate.schedule), 16 * (sum(range(71, 91)) + sum(range(32, 41)))
    assert cost.bytes_read == 1152 * (29 * 16 + 135) + 4 * (4 + 4 + 10 + 3)
    assert cost.bytes_written == 29 * 16 * (1024 + 4)
    assert cost.flops == seen * (2 * 1088 + 5)
    assert OP.extents(problem) == [3, 29, 16, 160, 8192, 512, 1024, 64, 8192, 512, 1024, 64]


def test_a_workspace_grows_with_rows_and_splits_but_not_with_keys() -> None:
    sizes = set()
    for keys in (2**14, 2**17):
        problem = mla(**{**DECODE, "batch": 1, "seq_kv": keys})
        sizes.add(OP.cost(problem, Schedule.of(SPLIT)).workspace_bytes)
    assert sizes == {4 * 8 * 16 * 514}


def test_few_blocks_are_split_until_they_fill_the_device() -> None:
    problem = mla(**{**DECODE, "batch": 4, "seq_kv": 8192})
    times = {}
    for count in (1, 4, 16):
        schedule = {**SPLIT, "split_kv": count} if count > 1 else USUAL
        (candidate,) = lower(problem, SM_90A, Search(schedules=[schedule])).candidates
        times[count] = predict_uncompiled(candidate, SM_90A).us
        assert OP.work(problem, candidate.schedule, SM_90A).blocks == 4 * count
    assert times[1] > 3 * times[4] > 6 * times[16]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_searches_of_decode_have_splits_and_those_of_many_queries_none(arch: str) -> None:
    def tried(fields: dict[str, Any], level: int) -> set[int]:
        candidates = lower(mla(**fields), target(arch), Search(level=level)).candidates
        return {int(dict(c.schedule.values).get("split_kv", 1)) for c in candidates}

    few = {**DECODE, "batch": 4}
    assert min(tried(few, 1)) == 1 and len(tried(few, 1)) >= 3
    assert tried(few, 0) < tried(few, 1) < tried(few, 2)
    assert tried(PREFILL, 1) == {1}


def test_many_heads_make_products_the_roof_and_few_the_keys() -> None:
    roofs = {
        heads: predict_uncompiled(
            OP.candidate(mla(**{**DECODE, "heads_q": heads}), Schedule.of(schedule)), SM_90A
        ).roofs_us
        for heads, schedule in ((16, SPLIT), (128, WIDE))
    }
    assert roofs[16]["dram"] > roofs[16]["mma"]
    assert roofs[128]["mma"] > roofs[128]["dram"]


def test_what_is_kept_of_a_level_is_predicted_fastest() -> None:
    every = sorted(predict_uncompiled(c, SM_90A).us for c in lower(mla(**DECODE), SM_90A, LEVEL_1).candidates)
    kept = lower(mla(**DECODE), SM_90A, Search(level=1, keep=3)).candidates
    assert sorted(predict_uncompiled(c, SM_90A).us for c in kept) == every[:3]
    assert len(set(every)) >= 3


# ---- the reference

REFERENCED: dict[str, dict[str, Any]] = {
    "one query": {"seq_kv": 9, "kv_lengths": [9, 4, 1], "heads_q": 2, "page_size": 1},
    "uneven": {**RAGGED, "seq_q": 5, "seq_kv": 20, "q_lengths": [5, 0, 3], "kv_lengths": [20, 4, 17], "heads_q": 2},
    "causal": {**RAGGED, "seq_q": 6, "seq_kv": 11, "q_lengths": [6, 1, 4], "kv_lengths": [11, 7, 4], "heads_q": 3,
               "causal": True, "page_size": 64, "dtype": "float16"},
}  # fmt: skip
NOTHING_SEEN: dict[str, Any] = {
    **RAGGED, "seq_q": 9, "q_lengths": [9, 0, 5], "kv_lengths": [4, 3, 50], "causal": True, "lse": True, "heads_q": 3
}  # fmt: skip
BOUNDED: dict[str, dict[str, Any]] = {
    "one query": {"lse": True, "seq_kv": 40, "dtype": "float16"},
    "causal": {**RAGGED, "seq_q": 7, "seq_kv": 40, "causal": True, "lse": True},
}  # fmt: skip


@pytest.mark.parametrize("fields", [NOTHING_SEEN, {**NOTHING_SEEN, "page_size": 1, "dtype": "float16"}])
def test_exact_rows_are_the_definition_and_their_bound_is_0(fields: dict[str, Any]) -> None:
    problem = mla(**fields)
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(4))
    result, bound = OP.reference(problem, inputs, exact=True)
    plain = definition(problem, inputs).astype(float)
    outs = problem.rows * 512
    rounded = plain[:outs].astype(inputs["q_nope"].dtype).astype(float)
    np.testing.assert_array_equal(result[:outs], rounded)
    assert (bound[:outs] == 0.0).all() and np.isneginf(result[outs : outs + 5 * 3]).all()
    assert (result[: 5 * 3 * 512] == 0.0).all() and (result[5 * 3 * 512 : outs] != 0.0).any()


def test_integer_inputs_have_a_greatest_score_of_0_that_cancels_and_all_others_vanish() -> None:
    problem = mla(**{**RAGGED, "batch": 1, "seq_q": 30, "seq_kv": 60, "causal": True, "page_size": 1})
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(6))
    keys = np.concatenate(
        [inputs[name][inputs["kv_indices"], 0].astype(float) for name in ("ckv_cache", "kpe_cache")], 1
    )
    queries = np.concatenate([inputs[name].astype(float) for name in ("q_nope", "q_pe")], 2)
    counts = set()
    for token in range(30):
        visible = keys[: 31 + token]
        bits = queries[token] @ visible.T * problem.scale * math.log2(math.e)
        assert (bits.max(1) == 0.0).all() and (bits[bits != 0.0] <= -256.0).all()
        counts |= set((bits == 0.0).sum(1).tolist())
    assert counts >= {1, 2, 4} and all(count & (count - 1) == 0 for count in counts)


@pytest.mark.parametrize("size", PAGE_SIZES)
def test_inputs_have_a_number_where_there_is_a_key_and_nan_elsewhere(size: int) -> None:
    problem = mla(**{**RAGGED, **UNEVEN, "page_size": size})
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(1))
    pages = [-(-length // size) for length in UNEVEN["kv_lengths"]]
    assert inputs["kv_indptr"].tolist() == np.cumsum([0, *pages]).tolist()
    assert inputs["kv_indices"].tolist() != sorted(inputs["kv_indices"].tolist())
    assert ("kv_last_page_len" in inputs) == (size > 1)
    for name in ("ckv_cache", "kpe_cache"):
        there = ~np.isnan(inputs[name].astype(float)).any(2)
        assert there.sum() == 135 and not np.isnan(inputs[name][there].astype(float)).any()
        assert inputs[name].shape[0] > sum(pages)


def test_inputs_of_large_batches_repeat_sequences() -> None:
    problem = mla(batch=64, seq_kv=2048, page_size=64, heads_q=1)
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(3))
    first, second, *_, last = (inputs["ckv_cache"][inputs["kv_indices"][32 * n]] for n in range(64))
    assert not np.array_equal(first, second) and np.array_equal(inputs["q_nope"][-1], inputs["q_nope"][-2])
    assert not np.isnan(last.astype(float)).any()


# ---- kernels on the CPU


def verified() -> dict[str, Kernel]:
    by_name: dict[str, Kernel] = {}
    types = ("float16", "bfloat16")
    for number, (size, ragged, where) in enumerate(product(PAGE_SIZES, (False, True), ("none", "workspace"))):
        shape = ({"tile_kv": 16}, {"tile_kv": 32, "stages": 3}, {"tile_kv": 32, "warps": 4, "warps_vo": 4})[number % 3]
        name = f"pages of {size}, {'ragged' if ragged else 'one query'}, split {where}"
        by_name[name] = kernel(
            types[number % 2], lse=number % 4 < 2, ragged=ragged, page_size=size, split=where, **shape
        )  # fmt: skip
    by_name["groups of warps"] = kernel("bfloat16", lse=True, ragged=True, tile_q=32, warps=4, tile_kv=32)
    by_name["two pieces of a warp"] = kernel(tile_q=64, tile_kv=32, warps=8, warps_vo=4, lse=True, ragged=True)
    by_name["eight warps of the same rows"] = kernel("bfloat16", tile_kv=64, warps=8, warps_vo=8, page_size=64)
    by_name["level 0 of wide decode"] = kernel("bfloat16", **WIDE, page_size=64, lse=True)
    by_name["four stages"] = kernel(stages=4, ragged=True, page_size=1)
    return by_name


BLOCK, OWN = "block.cuh", "kernel.cuh"
RESCALED = "sums[i][j][half * 2 + e] *= factor;"
WEIGHT = "cukiln::fma(scores[i][j][half * 2 + e], arguments.to_bits, -subtracted)"
TOTAL = "total[i][half] * factor + own"
FIRST_NUMBER = "entry(arguments.qo_indptr, middle) * arguments.heads / C::tile_q + middle"
# At least one kernel reaches each of them, and one is wrong by it.
WRONG: dict[str, tuple[str, str, str]] = {
    "sums are not rescaled": (BLOCK, RESCALED, RESCALED.replace("factor", "1.0f")),
    "the total is not rescaled": (BLOCK, TOTAL, "total[i][half] + own"),
    "the total of the last tile": (BLOCK, TOTAL, "own"),
    "the greatest of half of the lanes": (BLOCK, "shuffle_xor(most, 1)", "most"),
    "the greatest of two lanes": (BLOCK, "shuffle_xor(most, 2)", "most"),
    "the greatest of the first warp": (BLOCK, "maximum(most, read(exchange, other, i, half))", "most"),
    "the greatest of the last warp": (
        BLOCK, "maximum(most, read(exchange, other, i, half))", "read(exchange, other, i, half)"
    ),
    "the greatest of the last tile": (
        BLOCK, "maximum(greatest[i][half], most * arguments.to_bits)", "most * arguments.to_bits"
    ),
    "the greatest is not scaled": (BLOCK, "most * arguments.to_bits", "most"),
    "nothing is subtracted": (BLOCK, WEIGHT, WEIGHT.replace("-subtracted", "0.0f")),
    "minus infinity is subtracted": (BLOCK, "now == -attention::infinity() ? 0.0f : now", "now"),
    "rescaled the other way": (BLOCK, "greatest[i][half] - subtracted", "subtracted - greatest[i][half]"),
    "weights to the base e": (BLOCK, "cukiln::exp2(bits)", "cukiln::exp(bits)"),
    "weights of the first warp": (BLOCK, "(part * key_columns + j)", "(0 * key_columns + j)"),
    "weights of the first keys": (BLOCK, "weight_reader.at(weights, k, i)", "weight_reader.at(weights, 0, i)"),
    "weights of the first piece": (BLOCK, "weight_reader.at(weights, k, i)", "weight_reader.at(weights, k, 0)"),
    "values of the first 16 keys": (BLOCK, "value_reader.at(values, j, k)", "value_reader.at(values, j, 0)"),
    "values of other columns": (BLOCK, "value_reader.at(values, j, k)", "value_reader.at(values, 0, k)"),
    "values of the first warp": (BLOCK, "stage + part * own_columns * 2", "stage + 0 * own_columns * 2"),
    "queries of the first piece": (BLOCK, "q_reader.at(q, k, i)", "q_reader.at(q, k, 0)"),
    "queries of one k-step": (BLOCK, "q_reader.at(q, k + 1, i)", "q_reader.at(q, k, i)"),
    "the first keys of a warp": (BLOCK, "j * 8 * Tile::row_bytes", "0 * Tile::row_bytes"),
    "the first 64 columns of keys": (BLOCK, "stage + first", "stage"),
    "the first 64 columns of queries": (BLOCK, "q + first", "q"),
    "queries without a place": (BLOCK, "q + C::tile_q * Ckv<C>::row_bytes", "q"),
    "keys without a place": (BLOCK, "stage + Keys<C>::at_kpe", "stage"),
    "keys of the first warp": (BLOCK, "part * keys + lane() % 8", "lane() % 8"),
    "every group of warps has the first rows": (
        BLOCK, "static_cast<int>(threadIdx.x) / 32 / C::warps_vo * rows", "0 * rows"
    ),
    "keys of the neighbour": (BLOCK, "lane() % 4 * 2 + e", "lane() % 4 * 2"),
    "masked as the first warp's keys": (BLOCK, "begin + part * keys", "begin + 0 * keys"),
    "a mask for the last row": (BLOCK, "sequence.first + warp_row", "sequence.first + warp_row + rows - 1"),
    "padding is seen": (BLOCK, "key < keys ? key : keys", "key"),
    "a row sees what its number says": (BLOCK, "row / arguments.heads + end", "row + end"),
    "causal, aligned to the beginning": (
        BLOCK, "keys - rows / arguments.heads + 1", "1"
    ),
    "causal, a key less": (BLOCK, "keys - rows / arguments.heads + 1", "keys - rows / arguments.heads"),
    "tiles of the first row": (BLOCK, "sequence.first + C::tile_q - 1", "sequence.first"),
    "the last tile is left out": (BLOCK, "(end - 1) / C::tile_kv + 1", "(end - 1) / C::tile_kv"),
    "a split begins a tile late": (BLOCK, "split * each + (split < more ? split : more)", "split * each + split"),
    "no split has a tile more": (BLOCK, "each + (split < more ? 1 : 0)", "each"),
    "every split is the first": (BLOCK, "static_cast<int>(blockIdx.y)", "0 * static_cast<int>(blockIdx.y)"),
    "a sequence has no number of its own": (BLOCK, FIRST_NUMBER, FIRST_NUMBER.removesuffix(" + middle")),
    "a half of the sequences too few": (BLOCK, "left -= half;", "left = half;"),
    "tiles of the first queries": (BLOCK, "numbered - first_q * arguments.heads / C::tile_q - number", "0 * numbered"),
    "queries of the next sequence": (
        BLOCK, "first_q = entry(arguments.qo_indptr, number);", "first_q = entry(arguments.qo_indptr, number + 1);"
    ),
    "one head more than rows of a tile": (BLOCK, "(arguments.heads - 1) / C::tile_q + 1", "1"),
    "the first heads of a sequence": (BLOCK, "block % of_sequence * C::tile_q", "0 * block"),
    "pages from the beginning of the table": (
        BLOCK, "arguments.kv_indices + sequence.first_page", "arguments.kv_indices"
    ),
    "pages to the end of the batch": (
        BLOCK, "entry(arguments.kv_indptr, number + 1)", "entry(arguments.kv_indptr, arguments.batch)"
    ),
    "the last page is full": (BLOCK, "entry(arguments.kv_last_page_len, number)", "C::page_size"),
    "pages in their order": (BLOCK, "entry(table, key / C::page_size)", "key / C::page_size"),
    "the page of the tile": (BLOCK, "entry(table, key / C::page_size)", "entry(table, (key - own) / C::page_size)"),
    "the first row of a page": (BLOCK, "(first + from_first) % C::page_size", "0"),
    "the page of the first key": (BLOCK, "numbers + (first + from_first) % C::tile_kv", "numbers"),
    "keys of the first page of the cache": (BLOCK, "page * strides.outer", "0 * strides.outer"),
    "queries of the first token": (BLOCK, "query * strides.outer", "0 * strides.outer"),
    "queries of the first head": (BLOCK, "(number - query * heads)", "0"),
    "the first tile again": (BLOCK, "first_key + tile * C::tile_kv", "first_key"),
    "rows behind the last key": (BLOCK, "keys - begin", "C::tile_kv"),
    "numbers of the first stage": (BLOCK, "stage * C::tile_kv + own", "own"),
    "a total of two lanes": (BLOCK, "own += shuffle_xor(own, 2);", "own += 0.0f;"),
    "a total of half of the lanes": (BLOCK, "own += shuffle_xor(own, 1);", "own += 0.0f;"),
    "the total of the first warp": (BLOCK, "whole += read(exchange, other, piece, half)", "whole += 0.0f"),
    "numbers a tile late": (OWN, "feed.read(tile + C::stages)", "feed.read(tile + C::stages + 1)"),
    "masked as another tile": (OWN, "(own.first + tile) * C::tile_kv", "tile * C::tile_kv"),
    "divided by nothing": (BLOCK, "total == 0.0f ? 0.0f : 1.0f / total", "1.0f / total"),
    "not divided": (BLOCK, "total == 0.0f ? 0.0f : 1.0f / total", "total == 0.0f ? 0.0f : 1.0f"),
    "lse without the greatest": (OWN, "warp.greatest[i][half] + cukiln::log2(total)", "cukiln::log2(total)"),
    "lse of the first rows": (OWN, "sequence.of_all(arguments, sequence.first + row)", "row"),
    "out of the first rows": (OWN, "sequence.of_all(arguments, sequence.first) * columns_ckv", "0"),
    "out of the first warp": (OWN, "(warp.part * Warp<C>::out_columns + j)", "(0 * Warp<C>::out_columns + j)"),
    "the workspace of the first split": (OWN, "blockIdx.y * rows", "0 * rows"),
    "the workspace of the first warp": (OWN, "warp.part * Warp<C>::own_columns", "0 * Warp<C>::own_columns"),
    "partial totals where sums are": (OWN, "arguments.splits * rows * columns_ckv + 2 * first", "2 * first"),
    "merged as a query of each head": (OWN, "arguments.heads * columns_ckv", "columns_ckv"),
    "queries of the first sequence": (OWN, "token * arguments.of_q_nope.outer", "0 * arguments.of_q_nope.outer"),
    "scores as exponents of e": (OWN, "scalars[0] * log2_of_e", "scalars[0]"),
    "a workspace of one split": (OWN, "4 * splits(kernel, integers[3], launch[0])", "4 * 1"),
    "numbers of tiles for whole ones alone": (OWN, "rows / kernel.tile_q + batch", "rows / kernel.tile_q"),
}  # fmt: skip


def mutated(name: str) -> dict[str, Kernel]:
    return {
        "one query": kernel(name=name, lse=True, tile_kv=32),
        "pages of 1, groups of warps": kernel("bfloat16", name=name, page_size=1, tile_q=32, warps=4, tile_kv=32),
        "ragged, three stages": kernel(name=name, lse=True, ragged=True, stages=3),
        "ragged, two pieces of a warp": kernel(
            "bfloat16", name=name, ragged=True, page_size=64, tile_q=64, warps=8, warps_vo=4, tile_kv=32
        ),
        "split": kernel("bfloat16", name=name, lse=True, split="workspace"),
        "ragged, split": kernel(name=name, lse=True, ragged=True, page_size=1, split="workspace"),
    }


MUTATIONS = declare.Mutations(
    kernels=mutated,
    files=(BLOCK, OWN),
    wrong=WRONG,
    counts={"barrier": 5, "warp barrier": 1, "commit": 1, "wait": 4},
    definitions={"stage": 1},
)

# ---- winners


def level_0(**fields: Any) -> Candidate:
    (candidate,) = lower(mla(**fields), SM_90A, LEVEL_0).candidates
    return candidate


def compiled() -> dict[str, Kernel]:
    """Level 0 of each class, and of level 1 the kernels that take the most registers, split and not."""
    kernels = {}
    for name, fields in CLASSES.items():
        kernels[f"{name}, level 0"] = level_0(**fields).kernel
        candidates = lower(mla(**fields), SM_90A, LEVEL_1).candidates
        for where in sorted({str(c.schedule.as_dict().get("split", "none")) for c in candidates}):
            own = [c.kernel for c in candidates if c.schedule.as_dict().get("split", "none") == where]
            kernels[f"{name}, level 1, split {where}"] = max(own, key=OP.estimated_registers)
    return kernels


def planned() -> list[Candidate]:
    """Of level 1 of problems, and some of level 2, split and not."""
    problems = [mla(**{**RAGGED, **UNEVEN, "causal": True, "lse": True}), mla(**{**DECODE, "batch": 2, "heads_q": 20})]
    candidates = [
        c for problem in problems for level, limit in ((1, 3), (2, 12))
        for c in lower(problem, SM_90A, Search(level=level, limit=limit)).candidates
    ]  # fmt: skip
    assert {bool(c.schedule.as_dict().get("split")) for c in candidates} == {True, False}
    return candidates


def table(length: int, dtype: str = "int32", **where: Any) -> str:
    return f"T(({length},), {dtype!r}, **{where!r})"


OUT = "H({}, 16, 512, address=0x50000000)"
CALLS = {
    "prefill": declare.Library(
        candidate=lambda: level_0(**{**RAGGED, **UNEVEN, "causal": True, "lse": True, "dtype": "float16"}),
        record={
            "operands": ["q_nope", "q_pe", "ckv_cache", "kpe_cache", "qo_indptr", "kv_indptr", "kv_indices",
                         "kv_last_page_len", "out", "lse"],
            "roles": [*["in"] * 8, "out", "out"],
            "some extents": {"batch": 3, "tokens": 29, "heads_q": 16, "listed_positions": 160, "q_pe_inner_stride": 64},
            "attributes": [1], "scalars": [1.0 / math.sqrt(192)],
        },
        taken={
            "a larger batch": ({name: table(9 - (name == "kv_last_page_len")) for name in
                                ("qo_indptr", "kv_indptr", "kv_last_page_len")}, 1),
            "other heads": ({"q_nope": "H(29, 5, 512)", "q_pe": "H(29, 5, 64)",
                             "out": "H(29, 5, 512, address=0x50000000)", "lse": "F(29, 5, address=0x60000000)"}, 1),
            "one tensor of keys": ({"ckv_cache": "H(12, 16, 512, strides=(9216, 576, 1))",
                                    "kpe_cache": "H(12, 16, 64, strides=(9216, 576, 1))"}, 1),
            "heads first": ({"q_nope": "H(29, 16, 512, strides=(512, 14848, 1))"}, 1),
            "no page is listed": ({"kv_indices": table(0)}, 1),
            "not causal": ({0: 0}, 1),
        },
        refused={
            "no table": ({"qo_indptr": None}, "TypeError",
                         "9 tensors were given; this kernel takes 10: q_nope, q_pe, ckv_cache, kpe_cache, qo_indptr, "
                         "kv_indptr, kv_indices, kv_last_page_len, out, lse"),
            "another type": ({"q_pe": "F(29, 16, 64)"}, "TypeError", "q_pe is float32; float16 is allowed"),
            "rank": ({"ckv_cache": "H(192, 512)"}, "ValueError",
                     "ckv_cache has rank 2; rank 3 (pages, positions of a page, elements) is allowed"),
            "elements": ({"q_nope": "H(29, 16, 256)"}, "ValueError", "q_nope has 256 elements of a key; 512 are"),
            "places": ({"kpe_cache": "H(12, 16, 32)"}, "ValueError", "kpe_cache has 32 elements of a key; 64 are"),
            "pages of another size": ({"ckv_cache": "H(12, 64, 512)"}, "ValueError",
                                      "ckv_cache has pages of 64 positions; this kernel takes pages of 16: look up"),
            "another number of pages": ({"kpe_cache": "H(13, 16, 64)"}, "ValueError",
                                        "the number of pages differs between ckv_cache and kpe_cache: 12 and 13"),
            "tokens": ({"q_pe": "H(28, 16, 64)"}, "ValueError", "the number of tokens differs between q_nope and q_pe"),
            "heads": ({"q_pe": "H(29, 8, 64)"}, "ValueError", "heads differ between q_nope and q_pe: 16 and 8"),
            "strides": ({"q_nope": "H(29, 16, 512, strides=(8196, 512, 1))"}, "ValueError",
                        "q_nope has strides 8196, 512; a kernel moves 8 elements at once, so each must be a multiple"),
            "an axis that is not contiguous": ({"kpe_cache": "H(12, 16, 64, strides=(2048, 128, 2))"}, "ValueError",
                                               "the last axis of kpe_cache has stride 2; it must be contiguous"),
            "address": ({"ckv_cache": "H(12, 16, 512, address=0x70000008)"}, "ValueError", "a multiple of 16 bytes"),
            "device": ({"kpe_cache": "H(12, 16, 64, device=1)"}, "ValueError",
                       "kpe_cache is on cuda:1, but q_nope is on cuda:0"),
            "pages of int64": ({"kv_indices": table(10, "int64")}, "TypeError", "kv_indices is int64; int32 is"),
            "queries of int64": ({"qo_indptr": table(4, "int64")}, "TypeError", "qo_indptr is int64; int32 is allowed"),
            "tables of two batches": ({"qo_indptr": table(5)}, "ValueError",
                                      "qo_indptr must be a contiguous vector of 4 elements"),
            "a table without a sequence": ({"kv_indptr": table(1)}, "ValueError",
                                           "kv_indptr must be a vector of at least 2 elements"),
            "last pages of another batch": ({"kv_last_page_len": table(4)}, "ValueError",
                                            "kv_last_page_len must be a contiguous vector of 3 elements"),
            "a table of pages": ({"kv_indices": "T((2, 5), 'int32')"}, "ValueError",
                                 "kv_indices has rank 2; a vector of pages is allowed"),
            "too many pages": ({"kv_indices": table(2**25 + 1)}, "ValueError", "536870912 positions are allowed"),
            "out of another shape": ({"out": OUT.format(28)}, "ValueError", "out must have the shape of q_nope"),
            "out with gaps": ({"out": "H(29, 16, 512, address=0x50000000, strides=(9216, 576, 1))"}, "ValueError",
                              "out has stride 576 along axis 1; it must be packed (stride 512)"),
            "out over q_nope": ({"out": "q_nope"}, "ValueError", "out overlaps q_nope"),
            "out over a table": ({"kv_indices": table(10, address=0x50000000)}, "ValueError", "out overlaps kv_ind"),
            "lse of heads first": ({"lse": "F(16, 29, address=0x60000000)"}, "ValueError",
                                   "lse must have the shape (tokens, heads): 29, 16"),
            "lse over out": ({"lse": "F(29, 16, address=0x50000000)"}, "ValueError", "lse overlaps out"),
            "no tokens": ({"q_nope": "H(0, 16, 512)"}, "ValueError", "q_nope is empty; every extent must be at"),
        },
    ),
    # 64 tiles of keys; its blocks are split.
    "decode": declare.Library(
        candidate=lambda: level_0(**{**DECODE, "batch": 4, "dtype": "float16", "page_size": 1}),
        record={"operands": ["q_nope", "q_pe", "ckv_cache", "kpe_cache", "kv_indptr", "kv_indices", "out", "lse"],
                "attributes": [0]},
        taken={"no keys": ({"kv_indices": table(0)}, [(4, 1, 1), (16, 1, 1)])},
        refused={
            "a scale that is no number": ({1: math.nan}, "ValueError", "scale is nan; 9.5367431640625e-07 to 1048576"),
            "a token more": ({"q_nope": "H(5, 16, 512)", "q_pe": "H(5, 16, 64)", "out": OUT.format(5),
                              "lse": "F(5, 16, address=0x68000000)"}, "ValueError",
                             "each sequence has one query; tokens of q_nope and sequences of kv_indptr: 5 and 4"),
        },
    ),
}  # fmt: skip

OF_JOB: dict[str, Any] = {"batch": 2, "seq_kv": 100, "heads_q": 16, "kv_lengths": [100, 33]}
DECLARED = (
    declare.Declarations(
        operator=NAME,
        problem=DEFAULT,
        problems=PROBLEMS,
        searches=SEARCHES,
        references=declare.References(
            definition=definition,
            defined=REFERENCED,
            exact=False,
            rtol=1e-9,
            atol=1e-12,
            in_fp32=in_fp32,
            bounded=BOUNDED,
            wrong=8,
            by_torch=by_torch,
            on_device=[
                *((kind, NOTHING_SEEN) for kind in ("integer", "normal")),
                *((kind, REFERENCED["one query"]) for kind in ("normal", "special")),
            ],
            on_device_rtol=1e-12,
        ),
        verifications=declare.Verifications(
            kernels=verified,
            sanitized=lambda: [
                kernel(lse=True, ragged=True, page_size=1),
                kernel("bfloat16", lse=True, split="workspace", tile_kv=32),
            ],
            nearest=0.3,
        ),
        mutations=MUTATIONS,
        random_cases=declare.RandomCases(cases=random_cases, properties=properties, spread=SPREAD),
        machine_code=declare.MachineCode(kernels=compiled, claims=dict.fromkeys(compiled(), CLAIMS)),
        launches=declare.Launches(planned={"level 1 and some of level 2": planned}),
        calls=CALLS,
        job=declare.Job(
            problems={
                "decode": {**OF_JOB, "page_size": 16, "lse": True},
                "long decode": {**OF_JOB, "page_size": 64, "batch": 1, "seq_kv": 900, "kv_lengths": None},
                "prefill": {
                    **OF_JOB, "queries": "ragged", "seq_q": 20, "q_lengths": [20, 3], "page_size": 1, "causal": True,
                    "dtype": "float16",
                },
            },
            failing=[
                (
                    {**OF_JOB, "page_size": 1},
                    {"schedules": [{"tile_q": 16, "tile_kv": 64, "warps": 4, "warps_vo": 4, "stages": 4}]},
                    {"shared_memory": 1}, "bytes of shared memory (16 rows and 4 x 64 keys of 576 elements",
                ),
            ],
        ),
    ),
)  # fmt: skip
add_checks(globals())


def test_schedules_of_tests_are_accepted() -> None:
    """What is verified on the CPU is what a search may try."""
    assert OP.rules(mla(), Schedule.of(SMALL), SM_90A) == ACCEPTED
    assert OP.rules(mla(), Schedule.of({**SMALL, "split": "workspace", "split_kv": 2}), SM_90A) == ACCEPTED


def test_no_access_to_shared_memory_has_a_bank_conflict(cpu_verdicts: Mapping[Kernel, CpuVerdict]) -> None:
    for verdict in cpu_verdicts.values():
        accesses = verdict.details["shared_memory"]
        assert {access["kind"] for access in accesses} == {"ldmatrix", "cp_async", "read", "write"}
        assert [access for access in accesses if access["wavefronts"] != access["ideal"]] == []
