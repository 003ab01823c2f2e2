"""What a schedule of multi-head latent attention costs, does to the machine, and counts."""

from collections.abc import Mapping
from typing import Any

from codegen.counts import LaunchCounts, Primitive, load, merged, store
from codegen.operator import Cost, Work
from codegen.operators.attention import split
from codegen.operators.attention.lookups import INDEX_BYTES, WARP, Lookups, Tables
from codegen.operators.attention.space import ELEMENT_BYTES, L2_SHARE, threads
from codegen.operators.attention.work import (
    FLOPS_PER_SCORE,
    MATRIX_BYTES,
    MMA,
    MMA_MACS,
    OVERLAP,
    PER_COPY,
    PER_SCORE,
    PER_STEP,
    beyond_l2,
    merge_counts,
    merge_work,
)
from codegen.operators.mla.problem import HEAD_DIM, HEAD_DIM_CKV, VECTOR, MlaProblem
from codegen.operators.mla.seen import copied, most_tiles, scores, tiles
from codegen.operators.mla.space import blocks, pieces, row_groups, shared_bytes, workspace_bytes
from codegen.targets import Target

# Instructions of a copy from a page, by its size: a lane reads the page's number from shared memory and multiplies the
# place out. Fitted to the SASS of four main loops each (`benchmarks.count_sass.MLA`; nvcc 13.2, sm_80 and sm_90a: 31 to
# 41 and 43 to 50); none was read of pages of 16.
PER_PAGED_COPY = {1: 37.0, 16: 47.0, 64: 47.0}

KEY_BYTES = ELEMENT_BYTES * HEAD_DIM


def products(p: MlaProblem) -> int:
    """Of an element of a query with one of a key, and of a weight with an element of a value."""
    return scores(p) * (HEAD_DIM + HEAD_DIM_CKV)


def cost(p: MlaProblem, t: Mapping[str, Any]) -> Cost:
    """Every operand moves once; products over the keys that are seen."""
    flops = 2 * products(p) + scores(p) * FLOPS_PER_SCORE
    read = KEY_BYTES * (p.rows + p.total_kv) + INDEX_BYTES * sum(p.tables.values())
    written = ELEMENT_BYTES * p.rows * HEAD_DIM_CKV + (4 * p.rows if p.lse else 0)
    return Cost(flops, read, written, len(split.functions(t)), workspace_bytes(p, t))


def work(p: MlaProblem, t: Mapping[str, Any], target: Target) -> Work:
    """A step is a tile of keys of a block."""
    least, parts, divided = cost(p, t), split.parts(t), split.splits(t)
    count, tile_q, tile_kv, warps_vo = blocks(p, t) * parts, int(t["tile_q"]), int(t["tile_kv"]), int(t["warps_vo"])
    steps = float(tiles(p, tile_q, tile_kv))
    of_tile, of_weights = float(KEY_BYTES * tile_kv), float(ELEMENT_BYTES * tile_q * tile_kv)
    # A step's fragments: Q by each of the warps with the same rows, keys and values by each group of them, weights.
    of_values = of_tile * HEAD_DIM_CKV / HEAD_DIM
    fragments = warps_vo * (KEY_BYTES * tile_q + of_weights) + row_groups(t) * (of_tile + of_values)
    every_score, macs = steps * tile_q * tile_kv, steps * tile_q * tile_kv * (HEAD_DIM + HEAD_DIM_CKV)
    q_bytes, out_bytes = (float(count) * tile_q * ELEMENT_BYTES * columns for columns in (HEAD_DIM, HEAD_DIM_CKV))
    staged = 0.0 if divided else 2.0 * out_bytes
    written = float(workspace_bytes(p, t) if divided else least.bytes_written)
    moved = written, float(least.bytes_written)
    copies = steps * tile_kv * HEAD_DIM / VECTOR, float(count) * tile_q * HEAD_DIM / VECTOR
    own = Tables(p.batch, searched=p.ragged, listed=True, ends_within=p.page_size > 1)
    # A thread of each key of a tile reads its page, into shared memory.
    tables = own.of_blocks(count, threads(t)), Lookups(steps * tile_kv, WARP / p.page_size)
    other = (
        every_score * PER_SCORE
        + steps * threads(t) * (pieces(t) * HEAD_DIM_CKV / warps_vo / 2 + PER_STEP)  # sums are rescaled
        + WARP * (macs / MMA_MACS + steps * fragments / MATRIX_BYTES)
        + PER_PAGED_COPY[p.page_size] * copies[0]
        + PER_COPY * copies[1]
        + float(count) * tile_q * HEAD_DIM_CKV * 3.0
        + sum(table.instructions for table in tables)
    )
    again = max(0.0, steps * of_tile - float(KEY_BYTES) * p.total_kv)
    # Of scores, which are two chains at least, and of sums.
    chains = max(2.0, pieces(t) * tile_kv / warps_vo / 8), pieces(t) * HEAD_DIM_CKV / warps_vo / 8
    independent = (HEAD_DIM + HEAD_DIM_CKV) / (HEAD_DIM / chains[0] + HEAD_DIM_CKV / chains[1])
    return Work(
        blocks=count, threads=threads(t), fma=0.0, other_instructions=other,
        shared_bytes=steps * (of_tile + fragments + of_weights) + q_bytes + staged,
        l2_bytes=q_bytes + steps * of_tile + written + sum(table.l2_bytes for table in tables),
        dram_bytes=least.bytes_read + (beyond_l2(written, target) if divided else written) + again * _missed(p, target),
        dynamic_shared_bytes=shared_bytes(t), independent=max(1, int(independent)),
        steps=max(1, -(-int(steps) // count)), overlap=OVERLAP, longest=-(-most_tiles(p, tile_q, tile_kv) // parts),
        mma=macs, mma_type=p.dtype, mma_macs=MMA_MACS, prefetched=int(t["stages"]) - 1, special=every_score,
        others=(merge_work(t, p.rows * HEAD_DIM_CKV, VECTOR, moved, target),) if divided else (),
        looked_up=own.in_a_row,
    )  # fmt: skip


def _missed(p: MlaProblem, target: Target) -> float:
    """Of keys that are read again, what the L2 no longer has: blocks of a sequence run side by side, and those of few
    sequences at a time."""
    return max(0.0, 1.0 - L2_SHARE * target.l2_bytes / (float(KEY_BYTES) * p.seq_kv))


def launches(p: MlaProblem, t: Mapping[str, Any]) -> tuple[LaunchCounts, ...]:
    """Products of whole tiles; vectors that exist are read and written, those of keys once for each block."""
    tile_q, tile_kv, parts = int(t["tile_q"]), int(t["tile_kv"]), split.parts(t)
    every_score, keys = tiles(p, tile_q, tile_kv) * tile_q * tile_kv, copied(p, tile_q, tile_kv)
    executed = every_score * (HEAD_DIM + HEAD_DIM_CKV)
    run = [
        Primitive(MMA[p.dtype], executed // MMA_MACS, executed),
        Primitive("fma", every_score, every_score),
        load(KEY_BYTES * (parts * p.rows + keys), ELEMENT_BYTES * VECTOR, "cp_async"),
        load(INDEX_BYTES * (keys + parts * _table_entries(p, t)), INDEX_BYTES),
    ]
    results = [
        store(ELEMENT_BYTES * p.rows * HEAD_DIM_CKV, ELEMENT_BYTES * VECTOR),
        *([store(4 * p.rows, 4)] if p.lse else []),
    ]
    if not split.splits(t):
        return (LaunchCounts("run", merged([*run, *results]), products(p)),)
    # Pairs of sums, and two floats of each row.
    left = store(8 * parts * p.rows * (HEAD_DIM_CKV // 2 + 1), 8)
    merge = merge_counts(parts, p.rows * (HEAD_DIM_CKV // VECTOR), VECTOR, p.ragged, results)
    return LaunchCounts("run", merged([*run, left]), products(p)), merge


def _table_entries(p: MlaProblem, t: Mapping[str, Any]) -> int:
    """That threads read: each searches the sequence of its block, where queries are in a table, and reads where its
    pages begin and end and, if there are any, how many keys the last one has."""
    tile_q = int(t["tile_q"])
    of_blocks = blocks(p, t) * ((p.batch - 1).bit_length() + 2) if p.ragged else 0
    of_rows = sum(
        count * -(-queries * p.heads_q // tile_q) * (2 + (p.page_size > 1 and keys > 0))
        for (queries, keys), count in p.by_lengths.items()
    )
    return threads(t) * (of_blocks + of_rows)
