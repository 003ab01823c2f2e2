"""Attention forward of ragged batches: sequences of uneven lengths one behind the other, of which tables say where."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators.attention.inputs import begins
from codegen.operators.attention.problem import LONGEST, MOST_LENGTHS
from codegen.operators.attention.seen import Seen, most_tiles, pairs, tiles
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from tests.operators.attention.claims import CLAIMS as CLAIMS_OF_DENSE
from tests.operators.attention.kernels import (
    EXPLICIT,
    LLAMA,
    NAME,
    ONE_QUERY,
    OP,
    SMALL,
    USUAL,
    attention,
    definition,
    kernel,
)
from tests.operators.attention.kernels import STRIDES as DENSE_STRIDES
from tests.operators.attention.random_cases import SPREAD_OF_SEQUENCES, of_sequences, random_cases
from tests.operators.attention.sequences import (
    BOUNDED,
    PREFILL,
    RAGGED,
    REFERENCED,
    UNEVEN,
    planned,
    ragged_of,
    references,
    table,
)
from tests.operators.harness import declarations as declare
from tests.operators.harness.checks import add_checks
from tests.operators.harness.declarations import LEVEL_0, SM_90A, Rejection

# ---- problems

STRIDES = {"q_strides": [79 * 256, 256, 64], "k_strides": [135 * 128, 128, 64], "v_strides": [135 * 128, 128, 64],
           "out_strides": [79 * 256, 256, 64]}  # fmt: skip
PROBLEMS = declare.Problems(
    refused=[
        ({"lengths": "padded"}, "lengths", "'dense', 'ragged' or 'paged'"),
        ({"layout": "bhsd"}, "layout", "is bhsd, but tensors of ragged batches are (positions, heads, head_dim)"),
        ({"q_lengths": [1, 2]}, "q_lengths", "has 2 lengths for a batch of 3"),
        ({"kv_lengths": [1, 2, 91]}, "kv_lengths", "has 91, but seq_kv, the longest, is 90"),
        ({"q_lengths": [1, -1, 2]}, "q_lengths.1", "greater than or equal to 0"),
        ({"q_lengths": [0, 0, 0]}, "q_lengths", "adds up to 0 positions; 1 to"),
        ({"batch": 2**24, "seq_kv": 1}, "q_lengths", f"makes {70 * 2**24} positions; 1 to {LONGEST}"),
        ({"batch": 2**25, "seq_q": 1, "seq_kv": 17}, "kv_lengths", "of seq_kv = 17 makes"),
        ({"batch": 5000, "q_lengths": [1] * 5000}, "q_lengths", f"at most {MOST_LENGTHS} items"),
        ({"lengths": "dense", "q_lengths": [1, 2, 3]}, "q_lengths", "is given, but lengths is dense"),
        ({"qo_indptr": [0, 1]}, "qo_indptr", "is a tensor of a call and no field: lengths ragged asks for calls with"),
        ({"kv_indptr": [0, 1]}, "kv_indptr", "is a tensor of a call and no field"),
        ({"kv_indices": [0, 1]}, "kv_indices", "lengths paged asks for calls with it"),
        ({"out_strides": [0, 64, 64]}, "out_strides", "has 64 where the faster axes span 256 elements"),
    ],
    defaults=[
        (
            UNEVEN,
            {**EXPLICIT, **STRIDES, "batch": 3, "lengths": "ragged", "q_lengths": [70, 0, 9],
             "kv_lengths": [90, 5, 40]},
        ),
        (
            {"batch": 1, "q_lengths": [70]},
            {**EXPLICIT, **DENSE_STRIDES, "lengths": "ragged", "q_lengths": None, "kv_lengths": None},
        ),
    ],
    alike=[
        ({}, {"q_lengths": [70, 70, 70], "kv_lengths": None}),
        (UNEVEN, {**UNEVEN, "q_strides": [5, 256, 64]}),  # there is no axis of the batch
    ],
    aligned=[
        (UNEVEN, {"align": 8, "align_out": 8, "columns_qk": 64, "lengths": "ragged"}),
        ({**UNEVEN, "k_strides": [0, 130, 64]}, {"align": 2, "align_out": 8}),
        ({"head_dim_qk": 9}, {"align": 1, "align_out": 1}),
    ],
    operands=[
        (
            {**UNEVEN, "lse": True, "head_dim_vo": 32},
            [("q", "float16", "in", (79, 4, 64)), ("k", "float16", "in", (135, 2, 64)),
             ("v", "float16", "in", (135, 2, 32)), ("qo_indptr", "int32", "in", (4,)),
             ("kv_indptr", "int32", "in", (4,)), ("out", "float16", "out", (79, 4, 32)),
             ("lse", "float32", "out", (79, 4))],
        ),
        (
            {**UNEVEN, "q_strides": [0, 768, 64]},
            [("q", "float16", "in", (79, 4, 64), (768, 64, 1)), ("k", "float16", "in", (135, 2, 64)),
             ("v", "float16", "in", (135, 2, 64)), ("qo_indptr", "int32", "in", (4,)),
             ("kv_indptr", "int32", "in", (4,)), ("out", "float16", "out", (79, 4, 64))],
        ),
    ],
    unspecialised=[
        (UNEVEN, {"batch": 40, "seq_q": 5, "seq_kv": 500, "heads_q": 6, "heads_kv": 1, "window_left": 12,
                  "causal": True}, [12, 0, 0.125]),
    ],
    in_schema=[
        {"lengths": "ragged", "batch": 2, "seq_q": 8, "heads_q": 2, "head_dim_qk": 64, "q_lengths": [8, 0],
         "kv_lengths": None}
    ],
    out_of_schema=[{"lengths": "ragged", "seq_q": 8, "heads_q": 2, "head_dim_qk": 64, "q_lengths": [8.5]}],
)  # fmt: skip


def test_a_dense_problem_has_no_fields_of_ragged_ones() -> None:
    own = attention()
    assert not own.canonical().keys() & {"lengths", "q_lengths", "kv_lengths"}
    assert "lengths" not in OP.signature(own)
    assert attention(lengths="dense").digest == own.digest != attention(lengths="ragged").digest


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window_left": 7, "window_right": 3}])
def test_pairs_and_tiles_are_those_of_the_sequences(mask: dict[str, Any]) -> None:
    lengths = [(70, 90), (0, 5), (9, 0), (33, 33), (33, 33), (1, 64), (20, 7)]
    of_q, of_kv = zip(*lengths, strict=True)
    problem = attention(**{**RAGGED, **mask, "batch": 7, "q_lengths": of_q, "kv_lengths": of_kv})
    each = [Seen.of(attention(seq_q=q, seq_kv=kv, **mask)) for q, kv in lengths if q and kv]
    assert pairs(problem) == sum(seen.pairs for seen in each)
    assert tiles(problem, 16, 32) == sum(seen.tiles(16, 32) for seen in each)
    assert most_tiles(problem, 16, 32) == max(seen.most_tiles(16, 32) for seen in each)


# ---- rules, levels and costs

LISTED: dict[str, Any] = {"walk": "longest_first", "walkers": 132}
LIST = {**USUAL, "q_in": "shared", **LISTED}
SEARCHES = declare.Searches(
    accepted=[(PREFILL, USUAL), (PREFILL, {**USUAL, "band": 16}), (PREFILL, LIST),
              (PREFILL, {**LIST, "walkers": 2592})],
    rejected=[
        Rejection(PREFILL, {**USUAL, "walkers": 2}, "walk", "walkers = 2 needs walk = longest_first"),
        Rejection(PREFILL, {**LIST, "q_in": "registers"}, "registers", "about 262 registers per thread"),
        Rejection({"lengths": "dense"}, LIST, "walk", "is for ragged batches and paged caches"),
        Rejection({**PREFILL, "seq_q": 1, "q_lengths": None, "head_dim_qk": 64},
                  {**ONE_QUERY, **LISTED, "split_kv": 2}, "walk", "walk = longest_first and split = workspace"),
        Rejection(PREFILL, {**LIST, "band": 16}, "walk", "band = 16: heads of a tile lie side by side in the list"),
        Rejection({**RAGGED, "batch": 4097, "q_lengths": None, "kv_lengths": None}, LIST, "walk",
                  "a list of 4097 sequences; at most 4096 are compared with each other"),
        Rejection(PREFILL, {**LIST, "walkers": 2593}, "walkers", "2593 blocks for 2592 tiles of all heads"),
        Rejection({}, {**USUAL, "band": 4}, "band", "4 heads side by side of 4: 0 says the same"),
        Rejection({"seq_q": 20}, USUAL, "tile_q", "64 queries of a block are mostly padding for 20"),
        Rejection({"batch": 2**24, "seq_q": 16, "heads_q": 100, "heads_kv": 1, "seq_kv": 1, "head_dim_qk": 4},
                  {**USUAL, "tile_q": 16, "warps": 1, "tile_kv": 16, "stages": 1}, "grid", "blocks; a launch has at"),
        Rejection({"batch": 2**25, "seq_q": 1, "seq_kv": 1, "head_dim_qk": 4}, USUAL, "grid",
                  f"{2**25 + 2**19} tiles of 64 rows; of both multiplied 2147482623 are allowed"),
    ],
    nested=[PREFILL, UNEVEN],
    begun=[
        *((arch, {**UNEVEN, "head_dim_qk": columns}, "") for arch in ("sm_80", "sm_90a") for columns in (4, 64, 256)),
        ("sm_90a", {"batch": 64, "seq_q": 1, "seq_kv": 4096}, ""),
    ],
)  # fmt: skip


def test_costs_are_those_of_the_sequences() -> None:
    problem = attention(**PREFILL)
    (candidate,) = lower(problem, SM_90A, LEVEL_0, workspace_limit=0).candidates
    cost, total = OP.cost(problem, candidate.schedule), sum(PREFILL["q_lengths"])
    assert (cost.workspace_bytes, cost.launches) == (0, 1)
    assert cost.bytes_read == 2 * total * 128 * (32 + 2 * 8) + 2 * 4 * 9
    assert cost.bytes_written == 2 * total * 128 * 32
    assert cost.flops == 32 * sum(n * (n + 1) // 2 for n in PREFILL["q_lengths"]) * (4 * 128 + 5)


def test_a_list_costs_a_launch_and_a_workspace_for_two_numbers_of_each_tile() -> None:
    problem = attention(**PREFILL)
    cost = OP.cost(problem, Schedule.of(LIST))
    assert (cost.launches, cost.workspace_bytes) == (2, 8 * (1 + sum(PREFILL["q_lengths"]) // 64 + 8))
    listing, run = OP.launches(problem, Schedule.of(LIST), SM_90A)
    assert (listing.function, run.function) == ("list_tiles", "run")
    work = OP.work(problem, Schedule.of(LIST), SM_90A)
    assert (work.blocks, len(work.others), work.others[0].blocks) == (132, 1, 1)
    # 2,592 tiles of 132 blocks: none waits for a tile alone.
    assert (work.steps - 1) * 132 < 32 * tiles(problem, 64, 64) <= work.steps * 132


def test_lists_are_tried_at_level_2_of_batches_with_tables_alone() -> None:
    def walked(level: int, **fields: Any) -> set[object]:
        candidates = lower(attention(**fields), SM_90A, Search(level=level)).candidates
        return {c.schedule.as_dict().get("walkers") for c in candidates}

    small = {**PREFILL, "heads_q": 4, "heads_kv": 4, "head_dim_qk": 64}
    assert walked(2, **small) == {None, 132, 264, 528} and walked(1, **small) == {None}
    assert walked(2, seq_q=256, seq_kv=256) == {None}


def test_short_sequences_take_less_time_than_long_ones() -> None:
    even = attention(**{**PREFILL, "q_lengths": None, "kv_lengths": None})
    times = [predict_uncompiled(OP.candidate(p, Schedule.of(USUAL)), SM_90A).us for p in (attention(**PREFILL), even)]
    assert times[0] < 0.5 * times[1]


# ---- the reference


def test_exact_rows_are_the_definition_and_their_bound_is_0() -> None:
    problem = attention(**{**RAGGED, "q_lengths": [9, 0, 30], "kv_lengths": [4, 3, 50], "causal": True, "lse": True})
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(4))
    result, bound = OP.reference(problem, inputs, exact=True)
    plain = ragged_of(definition, problem, inputs).astype(float)
    outs = 39 * 4 * 64
    np.testing.assert_array_equal(result[:outs], plain[:outs].astype(np.float16).astype(float))
    assert (bound[:outs] == 0.0).all() and np.isneginf(result[outs : outs + 5 * 4]).all()


def test_tables_say_where_sequences_begin() -> None:
    problem = attention(**{**RAGGED, **UNEVEN})
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(1))
    assert inputs["qo_indptr"].tolist() == begins([70, 0, 9]).tolist() == [0, 70, 70, 79]
    assert inputs["kv_indptr"].tolist() == [0, 90, 95, 135]
    assert inputs["qo_indptr"].dtype == np.int32


def test_inputs_of_large_batches_repeat_sequences() -> None:
    problem = attention(**{**RAGGED, "batch": 64, "seq_q": 512, "seq_kv": 512, "heads_q": 8, "heads_kv": 8})
    inputs = OP.make_inputs(problem, "normal", np.random.default_rng(3))
    assert inputs["k"].shape == (64 * 512, 8, 64)
    assert not np.array_equal(inputs["k"][:512], inputs["k"][512:1024])
    assert np.array_equal(inputs["k"][-512:], inputs["k"][-1024:-512])


# ---- kernels on the CPU


def verified() -> dict[str, Kernel]:
    by_name: dict[str, Kernel] = {}
    types = ("float16", "bfloat16")
    for number, (q_in, stages) in enumerate(product(("registers", "shared"), (1, 2, 3))):
        by_name[f"{types[number % 2]}, Q in {q_in}, {stages} stages"] = kernel(
            types[number % 2], q_in=q_in, stages=stages, lse=number % 3 == 0, softcap=number % 4 == 1, ragged=True,
            qk=(64, 32, 96)[number % 3], vo=(64, 48, 16)[number // 2 % 3],
        )  # fmt: skip
    for dtype, align, align_out in product(types, (4, 2, 1), (8, 1)):
        by_name[f"{dtype} by {align}, out by {align_out}"] = kernel(
            dtype, qk=32, align=align, align_out=align_out, ragged=True
        )
    by_name["two pieces of a warp"] = kernel(tile_q=64, tile_kv=64, stages=2, lse=True, ragged=True)
    by_name["one warp"] = kernel(tile_q=16, warps=1, tile_kv=16, qk=128, lse=True, ragged=True)
    by_name["eight warps"] = kernel(tile_q=128, warps=8, tile_kv=16, qk=16, stages=4, softcap=True, ragged=True)
    by_name["wide heads"] = kernel(qk=256, tile_q=16, warps=1, q_in="shared", ragged=True)
    by_name["192 and 128"] = kernel("bfloat16", qk=192, vo=128, lse=True, ragged=True)
    by_name["split"] = kernel(qk=32, lse=True, split="workspace", ragged=True)
    by_name["packed"] = kernel(qk=32, vo=48, lse=True, ragged=True, stages=2, packing="group")
    by_name["packed, one warp, split"] = kernel(
        "bfloat16", tile_q=16, warps=1, tile_kv=16, qk=64, q_in="shared", ragged=True, split="workspace",
        packing="group", lse=True,
    )  # fmt: skip
    by_name["a list"] = kernel(qk=32, lse=True, stages=2, ragged=True, walk="longest_first")
    by_name["a list, Q shared, by 1"] = kernel(
        "bfloat16", qk=48, vo=16, q_in="shared", align=1, ragged=True, walk="longest_first"
    )
    by_name["a list, packed"] = kernel(
        qk=32, vo=48, lse=True, q_in="shared", ragged=True, packing="group", walk="longest_first"
    )
    by_name["split, out by 1"] = kernel("bfloat16", qk=48, stages=2, align_out=1, split="workspace", ragged=True)
    return by_name


def compiled() -> dict[str, Kernel]:
    prefill = attention(**PREFILL)
    candidates = lower(prefill, SM_90A, Search(level=1)).candidates
    decode = attention(**{**LLAMA, "lengths": "ragged", "batch": 64, "seq_q": 1, "seq_kv": 4096, "lse": True})
    return {
        "prefill, level 0": lower(prefill, SM_90A, LEVEL_0).candidates[0].kernel,
        "prefill, level 1": max((c.kernel for c in candidates), key=OP.estimated_registers),
        "decode": lower(decode, SM_90A, LEVEL_0).candidates[0].kernel,
        "a list": OP.candidate(prefill, Schedule.of(LIST)).kernel,
        "decode, heads apart": OP.candidate(decode, Schedule.of({**ONE_QUERY, "split_kv": 2})).kernel,
    }


def reads_tables_by_4_bytes(kernel: Kernel, code: Any) -> None:
    """Where queries and keys begin and end, and one of the search; or how long a list is, and a pair of it."""
    listed = kernel.tunables.as_dict().get("walk") is not None
    assert code.count("ld.global.nc") in (5, 6) and code.count("ld.global.nc.v") == listed


CLAIMS = (*CLAIMS_OF_DENSE, reads_tables_by_4_bytes)


# ---- winners


def winner() -> Candidate:
    (candidate,) = lower(attention(**{**RAGGED, **UNEVEN, "causal": True, "lse": True}), SM_90A, LEVEL_0).candidates
    return candidate


def listed_winner() -> Candidate:
    problem = attention(**{**RAGGED, **UNEVEN, "causal": True, "lse": True})
    return OP.candidate(problem, Schedule.of({**SMALL, "band": 0, "walk": "longest_first", "walkers": 9}))


CALLS = {
    # Two, three and a whole tile of 79 rows, with each of 4 heads; the grid is as many as walk them.
    "a list": declare.Library(
        candidate=listed_winner,
        record={"operands": ["q", "k", "v", "qo_indptr", "kv_indptr", "out", "lse"], "scalars": [0.125]},
        taken={
            "a larger batch": ({"qo_indptr": table(301), "kv_indptr": table(301)}, [(3, 1, 1), (9, 1, 1)]),
            "few tiles": (
                {"q": "H(20, 1, 64)", "k": "H(20, 1, 64)", "v": "H(20, 1, 64)", "qo_indptr": table(2),
                 "kv_indptr": table(2), "out": "H(20, 1, 64, address=0x50000000)",
                 "lse": "F(20, 1, address=0x60010000)"}, [(1, 1, 1), (1, 1, 1)]),
        },
        refused={
            "more sequences than are compared": (
                {"qo_indptr": table(4098), "kv_indptr": table(4098)}, "ValueError",
                "4097 sequences; this kernel lists the tiles of at most 4096: look up another"),
        },
    ),
    "winner": declare.Library(
        candidate=winner,
        record={
            "operands": ["q", "k", "v", "qo_indptr", "kv_indptr", "out", "lse"],
            "roles": ["in", "in", "in", "in", "in", "out", "out"],
            "some extents": {"batch": 3, "seq_q": 79, "seq_kv": 135, "q_batch_stride": 0, "k_position_stride": 128},
            "attributes": [-1, 0], "scalars": [0.125],
        },
        taken={
            "a larger batch": ({"qo_indptr": table(9), "kv_indptr": table(9)}, 1),
            "other extents": (
                {"q": "H(300, 6, 56)", "k": "H(8, 3, 56)", "v": "H(8, 3, 64)",
                 "out": "H(300, 6, 64, address=0x50000000)", "lse": "F(300, 6, address=0x60000000)"}, 1),
            "no keys": ({"k": "H(0, 2, 64)", "v": "H(0, 2, 64)"}, 1),
        },
        refused={
            "no table": ({"kv_indptr": None}, "TypeError",
                         "6 tensors were given; this kernel takes 7: q, k, v, qo_indptr, kv_indptr, out, lse"),
            "dense tensors": ({"q": "H(1, 79, 4, 64)"}, "ValueError",
                              "q has rank 4; rank 3 (positions, heads, head_dim) is allowed"),
            "table of int64": ({"qo_indptr": table(4, "int64")}, "TypeError", "qo_indptr is int64; int32 is allowed"),
            "table of floats": ({"kv_indptr": table(4, "float32")}, "TypeError", "kv_indptr is float32"),
            "tables of two batches": ({"kv_indptr": table(5)}, "ValueError",
                                      "kv_indptr must be a contiguous vector of 4 elements"),
            "a table with gaps": ({"qo_indptr": "T((4,), 'int32', strides=(2,))"}, "ValueError",
                                  "qo_indptr must be a contiguous vector of 4 elements"),
            "a table without a sequence": ({"qo_indptr": table(1), "kv_indptr": table(1)}, "ValueError",
                                           "qo_indptr must be a vector of at least 2 elements"),
            "a table of two axes": ({"qo_indptr": "T((2, 2), 'int32')"}, "ValueError",
                                    "qo_indptr must be a vector of at least 2 elements"),
            "a table elsewhere": ({"kv_indptr": table(4, device=1)}, "ValueError", "kv_indptr is on cuda:1, but q is"),
            "a table over out": ({"kv_indptr": table(4, address=0x50000000)}, "ValueError", "out overlaps kv_indptr"),
            "a table over lse": ({"qo_indptr": table(4, address=0x60000000)}, "ValueError", "lse overlaps qo_indptr"),
            "lse of heads first": ({"lse": "F(4, 79, address=0x60000000)"}, "ValueError",
                                   "lse must have the shape (positions of q, heads_q): 79, 4"),
            "queries": ({"out": "H(80, 4, 64, address=0x50000000)"}, "ValueError", "seq_q differs between q and out"),
            "elements at once": (
                {"q": "H(79, 4, 60)", "k": "H(135, 2, 60)"}, "ValueError",
                "q has head_dim 60 and strides 0, 240, 60; this kernel moves 8 elements at once"),
            "more sequences than rows are numbered": (
                {"qo_indptr": table(2**25 + 1), "kv_indptr": table(2**25 + 1)}, "ValueError",
                f"79 queries in {2**25} sequences make {2**25 + 1} tiles of 128 rows; 16777207 tiles are allowed"),
            "no queries": ({"q": "H(0, 4, 64)", "out": "H(0, 4, 64, address=0x50000000)"}, "ValueError", "q is empty"),
        },
    ),
}  # fmt: skip


DECLARED = (
    declare.Declarations(
        operator=NAME,
        problem=RAGGED,
        problems=PROBLEMS,
        searches=SEARCHES,
        references=references(ragged_of, REFERENCED, BOUNDED),
        verifications=declare.Verifications(
            kernels=verified,
            sanitized=list,  # those of test_attention.py
            nearest=0.3,
        ),
        random_cases=declare.RandomCases(
            cases=partial(random_cases, lengths="ragged"),
            properties=of_sequences,
            spread=SPREAD_OF_SEQUENCES,
            each_run=6,
        ),
        machine_code=declare.MachineCode(kernels=compiled, claims=dict.fromkeys(compiled(), CLAIMS)),
        launches=declare.Launches(
            planned={"level 1 and some of level 2": planned, "a list": lambda: [listed_winner()]}
        ),
        calls=CALLS,
        without=dict.fromkeys(("mutations", "job"), "those of the operator are in test_attention.py"),
    ),
)
add_checks(globals())
