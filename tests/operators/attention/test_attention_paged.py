"""Attention forward whose keys and values lie in pages of a cache: decoding and prefill."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators.attention.problem import LONGEST, PAGE_SIZES, AttentionProblem
from codegen.search.search import Search
from tests.operators.attention import sequences as ragged
from tests.operators.attention.claims import CLAIMS as CLAIMS_OF_DENSE
from tests.operators.attention.kernels import EXPLICIT, LLAMA, NAME, OP, USUAL, attention, kernel
from tests.operators.attention.random_cases import SPREAD_OF_PAGES, of_sequences, random_cases
from tests.operators.harness import declarations as declare
from tests.operators.harness.checks import add_checks
from tests.operators.harness.declarations import LEVEL_0, SM_90A, Array, Inputs, Rejection
from tests.operators.harness.machine_code import reads_tables_ahead_of_copies

PAGED: dict[str, Any] = {**ragged.RAGGED, "lengths": "paged", "page_size": 16}
UNEVEN = ragged.UNEVEN
# 90, 5 and 40 keys in 6, 1 and 3 pages; 2 more are of no sequence.
CACHE = (12, 16, 2, 64)

# ---- problems

STRIDES = {"q_strides": [79 * 256, 256, 64], "k_strides": [2048, 128, 64], "v_strides": [2048, 128, 64],
           "out_strides": [79 * 256, 256, 64]}  # fmt: skip
TABLES = [("qo_indptr", "int32", "in", (4,)), ("kv_indptr", "int32", "in", (4,)), ("kv_indices", "int32", "in", (10,)),
          ("kv_last_page_len", "int32", "in", (3,))]  # fmt: skip
PROBLEMS = declare.Problems(
    refused=[
        ({"page_size": None}, "page_size", "is missing, but lengths is paged; allowed: 1, 16, 64"),
        ({"page_size": 32}, "page_size", "Input should be 1, 16 or 64"),
        ({"page_size": 2}, "page_size", "Input should be 1, 16 or 64"),
        ({"lengths": "dense"}, "page_size", "is 16, but lengths is dense; null is allowed, or paged"),
        ({"lengths": "ragged"}, "page_size", "is 16, but lengths is ragged"),
        ({"layout": "bhsd"}, "layout", "is bhsd, but tensors of ragged batches are"),
        ({"kv_lengths": [0, 0, 0]}, "kv_lengths", "adds up to 0 positions"),
        ({"batch": 10**7, "seq_q": 1, "seq_kv": 1, "page_size": 64}, "kv_lengths",
         "is null, so batch = 10000000 of seq_kv = 1 makes 640000000 positions in pages of 64; 1 to 536870912 are"),
        ({"batch": 3, "seq_kv": LONGEST, "kv_lengths": [LONGEST - 40, 1, 39]}, "kv_lengths",
         f"adds up to {LONGEST + 32} positions in pages of 16; 1 to {LONGEST} are allowed"),
        ({"kv_indices": [0]}, "kv_indices", "is a tensor of a call and no field: lengths paged asks for calls with it"),
        ({"kv_last_page_len": [0]}, "kv_last_page_len", "is a tensor of a call and no field"),
    ],
    defaults=[
        (
            UNEVEN,
            {**EXPLICIT, **STRIDES, "batch": 3, "lengths": "paged", "page_size": 16, "q_lengths": [70, 0, 9],
             "kv_lengths": [90, 5, 40]},
        ),
    ],
    alike=[({}, {"page_size": 16.0, "q_lengths": [70, 70, 70]})],
    aligned=[
        (UNEVEN, {"align": 8, "lengths": "paged", "page_size": 16}),
        ({**UNEVEN, "k_strides": [2052, 128, 64]}, {"align": 4}),
        ({**UNEVEN, "page_size": 1, "v_strides": [130, 7, 64]}, {"align": 2, "page_size": 1}),
    ],
    operands=[
        (
            {**UNEVEN, "lse": True},
            [("q", "float16", "in", (79, 4, 64)), ("k", "float16", "in", CACHE), ("v", "float16", "in", CACHE), *TABLES,
             ("out", "float16", "out", (79, 4, 64)), ("lse", "float32", "out", (79, 4))],
        ),
        (
            {**UNEVEN, "k_strides": [2048, 64, 1024]},  # heads first in a page
            [("q", "float16", "in", (79, 4, 64)), ("k", "float16", "in", CACHE, (2048, 64, 1024, 1)),
             ("v", "float16", "in", CACHE), *TABLES, ("out", "float16", "out", (79, 4, 64))],
        ),
    ],
    unspecialised=[
        (UNEVEN, {"batch": 40, "seq_q": 1, "seq_kv": 500, "heads_q": 6, "heads_kv": 1, "causal": True}, [-1, 0, 0.125]),
    ],
    in_schema=[{"lengths": "paged", "page_size": 64, "seq_q": 1, "seq_kv": 9, "heads_q": 2, "head_dim_qk": 64}],
    out_of_schema=[{"lengths": "paged", "page_size": 8, "seq_q": 8, "heads_q": 2, "head_dim_qk": 64}],
)  # fmt: skip


def test_a_ragged_problem_has_no_page_size() -> None:
    own = attention(**{**ragged.RAGGED, **UNEVEN})
    assert "page_size" not in own.canonical() and "page_size" not in OP.signature(own)


# ---- rules, levels and costs

PREFILL: dict[str, Any] = {**ragged.PREFILL, "lengths": "paged", "page_size": 16}
DECODE: dict[str, Any] = {**LLAMA, "lengths": "paged", "page_size": 16, "batch": 64, "seq_q": 1, "seq_kv": 4096}
SEARCHES = declare.Searches(
    accepted=[(PREFILL, USUAL), (PREFILL, {**USUAL, "band": 16})],
    rejected=[Rejection({"seq_q": 20}, USUAL, "tile_q", "64 queries of a block are mostly padding for 20")],
    nested=[PREFILL, UNEVEN],
    begun=[
        *(("sm_90a", {**UNEVEN, "head_dim_qk": columns, "page_size": size}, "")
          for columns in (4, 64, 256) for size in PAGE_SIZES),
        *(("sm_80", {**DECODE, "page_size": size}, "") for size in PAGE_SIZES),
    ],
)  # fmt: skip


def test_costs_are_those_of_the_sequences_and_their_tables() -> None:
    problem = attention(**PREFILL)
    (candidate,) = lower(problem, SM_90A, LEVEL_0, workspace_limit=0).candidates
    cost, total = OP.cost(problem, candidate.schedule), sum(PREFILL["q_lengths"])
    pages = sum(-(-keys // 16) for keys in PREFILL["kv_lengths"])
    assert cost.bytes_read == 2 * total * 128 * (32 + 2 * 8) + 4 * (2 * 9 + pages + 8)
    assert OP.extents(problem)[:3] == [8, total, 16 * pages]


# ---- the reference


def gathered(p: AttentionProblem, inputs: Inputs) -> tuple[AttentionProblem, Inputs]:
    """The ragged batch that it is, key by key."""
    size = p.page_size or 1
    keys: dict[str, list[Array]] = {"k": [], "v": []}
    lengths = []
    for number in range(p.batch):
        pages = inputs["kv_indices"][inputs["kv_indptr"][number] : inputs["kv_indptr"][number + 1]]
        length = size * (len(pages) - 1) + int(inputs["kv_last_page_len"][number]) if len(pages) else 0
        lengths.append(length)
        for name, rows in keys.items():
            rows += [inputs[name][pages[key // size], key % size] for key in range(length)]
    own = attention(**{
        **{name: value for name, value in p.canonical().items() if name not in ("page_size", "k_strides", "v_strides")},
        "lengths": "ragged", "kv_lengths": lengths, "operator": NAME,
    })  # fmt: skip
    of_kv = np.cumsum([0, *lengths]).astype(np.int32)
    tensors = {name: np.stack(rows) for name, rows in keys.items()}
    return own, {"q": inputs["q"], **tensors, "qo_indptr": inputs["qo_indptr"], "kv_indptr": of_kv}


def paged_of(compute: Any, p: AttentionProblem, inputs: Inputs, *more: Any) -> Array:
    return ragged.ragged_of(compute, *gathered(p, inputs), *more)


REFERENCED: dict[str, dict[str, Any]] = {
    f"{name}, pages of {size}": {**fields, "page_size": size}
    for (name, fields), size in zip(ragged.REFERENCED.items(), PAGE_SIZES, strict=True)
}
BOUNDED = {name: {**fields, "page_size": 16} for name, fields in ragged.BOUNDED.items()}


@pytest.mark.parametrize("size", PAGE_SIZES)
def test_inputs_have_a_number_where_there_is_a_key_and_nan_elsewhere(size: int) -> None:
    problem = attention(**{**PAGED, **UNEVEN, "page_size": size, "batch": 4, "q_lengths": [70, 0, 9, 1],
                           "kv_lengths": [90, 5, 40, 0]})  # fmt: skip
    inputs = OP.make_inputs(problem, "integer", np.random.default_rng(1))
    pages = [-(-length // size) for length in (90, 5, 40, 0)]
    assert inputs["kv_indptr"].tolist() == np.cumsum([0, *pages]).tolist()
    assert len(set(inputs["kv_indices"].tolist())) == sum(pages) < inputs["k"].shape[0]
    assert inputs["kv_indices"].tolist() != sorted(inputs["kv_indices"].tolist())
    for name in ("k", "v"):
        there = ~np.isnan(inputs[name].astype(float)).any((2, 3))
        assert there.sum() == 135 and not np.isnan(inputs[name][there].astype(float)).any()


# ---- kernels on the CPU


def verified() -> dict[str, Kernel]:
    by_name: dict[str, Kernel] = {}
    types = ("float16", "bfloat16")
    for number, (size, q_in, stages) in enumerate(product(PAGE_SIZES, ("registers", "shared"), (1, 2, 3))):
        by_name[f"pages of {size}, {types[number % 2]}, Q in {q_in}, {stages} stages"] = kernel(
            types[number % 2], q_in=q_in, stages=stages, lse=number % 3 == 0, softcap=number % 4 == 1, page_size=size,
            qk=(64, 32, 96)[number % 3], vo=(64, 48, 16)[number // 2 % 3],
        )  # fmt: skip
    for size, align in product(PAGE_SIZES, (4, 2, 1)):
        by_name[f"pages of {size} by {align}"] = kernel(qk=32, align=align, page_size=size)
    for size in PAGE_SIZES:
        by_name[f"pages of {size}, long tiles"] = kernel(tile_q=64, warps=4, tile_kv=128, page_size=size, lse=True)
        by_name[f"pages of {size}, one warp"] = kernel(tile_q=16, warps=1, tile_kv=16, qk=128, page_size=size)
        by_name[f"pages of {size}, packed"] = kernel(
            types[size % 2], qk=32, q_in="shared", lse=size > 1, page_size=size, packing="group"
        )
        by_name[f"pages of {size}, split"] = kernel(stages=2, tile_kv=16, lse=True, split="workspace", page_size=size)
    by_name["eight warps"] = kernel(tile_q=128, warps=8, tile_kv=64, qk=16, stages=4, softcap=True, page_size=16)
    by_name["packed, one warp, split"] = kernel(
        tile_q=16, warps=1, qk=64, lse=True, stages=2, page_size=16, packing="group", split="workspace"
    )
    by_name["a list"] = kernel("bfloat16", qk=32, stages=2, lse=True, page_size=16, walk="longest_first")
    by_name["a list, Q shared, packed"] = kernel(
        qk=64, q_in="shared", page_size=1, packing="group", walk="longest_first"
    )
    by_name["wide heads"] = kernel(qk=256, tile_q=16, warps=1, q_in="shared", page_size=16)
    by_name["192 and 128"] = kernel("bfloat16", qk=192, vo=128, lse=True, page_size=64)
    return by_name


def compiled() -> dict[str, Kernel]:
    """Level 0, and of level 1 the kernel that takes the most registers."""
    kernels = {}
    for size in PAGE_SIZES:
        for name, fields in {"prefill": PREFILL, "decode": DECODE}.items():
            problem = attention(**{**fields, "page_size": size})
            candidates = lower(problem, SM_90A, Search(level=1)).candidates
            kernels[f"{name}, pages of {size}, level 0"] = lower(problem, SM_90A, LEVEL_0).candidates[0].kernel
            kernels[f"{name}, pages of {size}, level 1"] = max(
                (c.kernel for c in candidates), key=OP.estimated_registers
            )
    return kernels


def reads_page_numbers_by_4_bytes(kernel: Kernel, code: Any) -> None:
    assert code.count("ld.global.nc") > 6 and code.count("ld.global.nc.v") == 0


CLAIMS = (*CLAIMS_OF_DENSE, reads_page_numbers_by_4_bytes, reads_tables_ahead_of_copies)


# ---- winners


def winner() -> Candidate:
    (candidate,) = lower(attention(**{**PAGED, **UNEVEN, "causal": True, "lse": True}), SM_90A, LEVEL_0).candidates
    return candidate


def decoder() -> Candidate:
    """One query of each sequence: the keys are split."""
    problem = attention(**{**PAGED, "seq_q": 1, "seq_kv": 4096, "kv_lengths": [4096, 0, 700], "lse": True})
    (candidate,) = lower(problem, SM_90A, LEVEL_0).candidates
    assert candidate.schedule.get("split") == "workspace"
    return candidate


table = ragged.table
CALLS = {
    "decode": declare.Library(
        candidate=decoder,
        record={
            "operands": ["q", "k", "v", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", "out", "lse"],
            "some extents": {"batch": 3, "seq_q": 3, "seq_kv": 16 * 300}, "attributes": [-1, -1],
        },
        taken={"fewer pages": ({"kv_indices": table(9)}, 2)},
    ),
    "winner": declare.Library(
        candidate=winner,
        record={
            "operands": ["q", "k", "v", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", "out", "lse"],
            "roles": [*["in"] * 7, "out", "out"],
            "some extents": {"batch": 3, "seq_q": 79, "seq_kv": 160, "k_batch_stride": 2048, "k_position_stride": 128},
            "attributes": [-1, 0], "scalars": [0.125],
        },
        taken={
            "a larger batch": ({name: table(9 - (name == "kv_last_page_len")) for name, *_ in TABLES}, 1),
            "a larger cache": ({"k": "H(5000, 16, 2, 64)", "v": "H(5000, 16, 2, 64)", "kv_indices": table(900)}, 1),
            "decoding": ({"q": "H(3, 4, 64)", "out": "H(3, 4, 64, address=0x50000000)",
                          "lse": "F(3, 4, address=0x60000000)"}, 1),
            "no page is listed": ({"kv_indices": table(0)}, 1),
        },
        refused={
            "no table": ({"kv_last_page_len": None}, "TypeError", "8 tensors were given; this kernel takes 9: q, k, v, "
                         "qo_indptr, kv_indptr, kv_indices, kv_last_page_len, out, lse"),
            "keys without pages": ({"k": "H(135, 2, 64)"}, "ValueError",
                                   "k has rank 3; rank 4 (pages, positions of a page, heads, head_dim) is allowed"),
            "pages of another size": ({"k": "H(12, 64, 2, 64)", "v": "H(12, 64, 2, 64)"}, "ValueError",
                                      "k has pages of 64 positions; this kernel takes pages of 16: look up the kernel"),
            "another number of pages": ({"v": "H(13, 16, 2, 64)"}, "ValueError",
                                        "the number of pages differs between k and v: 12 and 13"),
            "pages of int64": ({"kv_indices": table(10, "int64")}, "TypeError", "kv_indices is int64; int32 is"),
            "last pages of int64": ({"kv_last_page_len": table(3, "int64")}, "TypeError", "kv_last_page_len is int64"),
            "last pages of another batch": ({"kv_last_page_len": table(4)}, "ValueError",
                                            "kv_last_page_len must be a contiguous vector of 3 elements"),
            "a table of pages": ({"kv_indices": "T((3, 4), 'int32')"}, "ValueError",
                                 "kv_indices has rank 2; a vector of pages is allowed"),
            "pages with gaps": ({"kv_indices": "T((10,), 'int32', strides=(2,))"}, "ValueError",
                                "kv_indices must be a contiguous vector of 10 elements"),
            "too many pages": ({"kv_indices": table(2**25 + 1)}, "ValueError", "536870912 positions are allowed"),
            "pages over out": ({"kv_indices": table(10, address=0x50000000)}, "ValueError", "out overlaps kv_indices"),
            "heads": ({"v": "H(12, 16, 1, 64)"}, "ValueError", "heads_kv differs between k and v: 2 and 1"),
            "strides": ({"k": "H(12, 16, 2, 64, strides=(2052, 128, 64, 1))"}, "ValueError",
                        "k has head_dim 64 and strides 2052, 128, 64; this kernel moves 8 elements at once"),
        },
    ),
}  # fmt: skip

DECLARED = (
    declare.Declarations(
        operator=NAME,
        problem=PAGED,
        problems=PROBLEMS,
        searches=SEARCHES,
        references=ragged.references(paged_of, REFERENCED, BOUNDED),
        verifications=declare.Verifications(
            kernels=verified,
            sanitized=list,  # those of test_attention.py
            nearest=0.3,
        ),
        random_cases=declare.RandomCases(
            cases=partial(random_cases, lengths="paged"), properties=of_sequences, spread=SPREAD_OF_PAGES, each_run=6
        ),
        machine_code=declare.MachineCode(kernels=compiled, claims=dict.fromkeys(compiled(), CLAIMS)),
        launches=declare.Launches(planned={"level 1 and some of level 2": partial(ragged.planned, PAGED)}),
        calls=CALLS,
        without=dict.fromkeys(("mutations", "job"), "those of the operator are in test_attention.py"),
    ),
)
add_checks(globals())
