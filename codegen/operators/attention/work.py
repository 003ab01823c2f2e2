"""What an attention schedule costs, does to the machine, and counts."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from codegen.counts import LaunchCounts, Primitive, load, merged, store
from codegen.operator import Cost, Work
from codegen.operators.attention import lookups, split, walk
from codegen.operators.attention.lookups import INDEX_BYTES, WARP, numbers_of_tile
from codegen.operators.attention.packing import heads, rows_of_query
from codegen.operators.attention.problem import AttentionProblem
from codegen.operators.attention.seen import Seen, most_tiles, of_batch, pairs, tiles
from codegen.operators.attention.space import (
    ELEMENT_BYTES,
    L2_SHARE,
    blocks,
    padded,
    pieces,
    shared_bytes,
    side_by_side,
    threads,
)
from codegen.targets import Target

# Of a score: an exponential, a comparison, a multiply-add, an addition; a cap's tanh counts as its polynomial.
FLOPS_PER_SCORE, FLOPS_PER_CAP = 5, 16
MMA_MACS = 16 * 8 * 16
MMA = {"float16": "mma_m16n8k16_f16", "bfloat16": "mma_m16n8k16_bf16"}
# Instructions of a lane: of a score (greatest, multiply-add, exponential, addition, half of a conversion), of a capped
# one besides; of a copy with its address and its check; of a step of the loop beside what it computes.
PER_SCORE, PER_CAP, PER_COPY, PER_STEP = 4.5, 24.0, 5.0, 60.0
# Of a copy from a page, whose place is multiplied out: of pages of one key, and of longer ones. Fitted to the SASS of
# seven main loops each (`benchmarks.count_sass.PAGED`; nvcc 13.2, sm_80 and sm_90a: 21 to 24, and 27 to 41).
PER_PAGED_COPY = {1: 22.0, 16: 33.0, 64: 33.0}
MATRIX_BYTES = 512
# Of a float that `merge` brings to the greatest score and adds; its loop is unrolled so often.
PER_PARTIAL, PARTIALS_IN_FLIGHT = 1.5, 4
# Of two sequences that are compared, beside their loads; that loop is unrolled so often.
PER_COMPARISON, COMPARED_AT_ONCE = 10.0, 4
# A warp stalls on each fragment that it reads, as a product without a second buffer of fragments does.
OVERLAP = 0.5


def products(p: AttentionProblem) -> int:
    """Of an element of q with one of k, and of a weight with an element of v, over the keys that are seen."""
    return p.heads_q * pairs(p) * (p.head_dim_qk + p.head_dim_vo)


def steps(p: AttentionProblem, t: Mapping[str, Any]) -> int:
    """Tiles of keys that all blocks take together."""
    return heads(p, t) * tiles(p, int(t["tile_q"]), int(t["tile_kv"]), rows_of_query(p, t))


def cost(p: AttentionProblem, t: Mapping[str, Any]) -> Cost:
    """Every operand moves once; products over the keys that are seen."""
    scores = p.heads_q * pairs(p)
    flops = 2 * products(p) + scores * (FLOPS_PER_SCORE + (FLOPS_PER_CAP if p.softcap else 0))
    queries, keys = p.heads_q * p.total_q, p.heads_kv * p.total_kv
    read = ELEMENT_BYTES * (queries * p.head_dim_qk + keys * (p.head_dim_qk + p.head_dim_vo))
    read += INDEX_BYTES * sum(p.tables.values())
    written = ELEMENT_BYTES * queries * p.head_dim_vo + (4 * queries if p.lse else 0)
    workspace = split.workspace_bytes(p, t) + walk.workspace_bytes(p, t)
    return Cost(flops, read, written, len(functions(t)), workspace)


def functions(t: Mapping[str, Any]) -> tuple[str, ...]:
    """The kernel's __global__ functions, in launch order."""
    return ("list_tiles", "run") if walk.walks(t) else split.functions(t)


def work(p: AttentionProblem, t: Mapping[str, Any], aligns: tuple[int, int], target: Target) -> Work:
    """`aligns`: elements of an access to q, k and v, and of one to out."""
    least, columns = cost(p, t), (padded(p.head_dim_qk), padded(p.head_dim_vo))
    parts, (align, align_out) = split.parts(t), aligns
    walked = walk.walks(t)
    count, tile_q, tile_kv, warps = (
        walk.items(p, t) if walked else blocks(p, t) * parts,
        int(t["tile_q"]),
        int(t["tile_kv"]),
        int(t["warps"]),
    )
    all_steps = float(steps(p, t))
    whole = sum(columns)
    scores, macs = all_steps * tile_q * tile_kv, all_steps * tile_q * tile_kv * whole
    tile_bytes = ELEMENT_BYTES * tile_kv * whole
    from_shared = all_steps * warps * tile_bytes
    if t["q_in"] == "shared":
        from_shared += all_steps * ELEMENT_BYTES * tile_q * columns[0]
    q_bytes = ELEMENT_BYTES * float(count) * tile_q * columns[0]
    divided = split.splits(t)
    staged = 0.0 if divided else 2.0 * ELEMENT_BYTES * count * tile_q * columns[1]
    written = float(split.workspace_bytes(p, t) if divided else least.bytes_written)
    to_dram = beyond_l2(written, target) if divided else written
    outputs, moved = split.rows(p) * p.head_dim_vo, (written, float(least.bytes_written))
    others = (merge_work(t, outputs, align_out, moved, target),) if divided else (_listing(p, t),) if walked else ()
    copies = all_steps * tile_kv * whole / align, float(count) * tile_q * columns[0] / align
    per_copy = PER_PAGED_COPY[p.page_size] if p.page_size else PER_COPY
    tables = lookups.of_run(p, t, steps(p, t), align)
    other = (
        scores * (PER_SCORE + (PER_CAP if p.softcap else 0.0))
        + all_steps * threads(t) * (pieces(t) * columns[1] / 2 + PER_STEP)  # sums are rescaled
        + WARP * (macs / MMA_MACS + from_shared / MATRIX_BYTES)
        + per_copy * copies[0]
        + PER_COPY * copies[1]
        + float(count) * tile_q * columns[1] * 3.0
        + sum(table.instructions for table in tables)
    )
    least_kv = float(ELEMENT_BYTES) * p.heads_kv * p.total_kv * (p.head_dim_qk + p.head_dim_vo)
    again = max(0.0, all_steps * tile_bytes - least_kv)
    started = min(walk.walkers(t), count) if walked else count
    longest = -(-most_tiles(p, tile_q, tile_kv, rows_of_query(p, t)) // parts)
    return Work(
        blocks=started, threads=threads(t), fma=0.0, other_instructions=other,
        shared_bytes=all_steps * tile_bytes + from_shared + 2.0 * q_bytes + staged,
        l2_bytes=q_bytes + all_steps * tile_bytes + written + sum(table.l2_bytes for table in tables),
        dram_bytes=least.bytes_read + to_dram + again * _missed(p, t, target),
        dynamic_shared_bytes=shared_bytes(t, *columns), independent=pieces(t) * tile_kv // 8,
        steps=max(1, -(-int(all_steps) // started)), overlap=OVERLAP, longest=longest,
        mma=macs, mma_type=p.dtype, mma_macs=MMA_MACS, prefetched=int(t["stages"]), special=scores, others=others,
        looked_up=lookups.in_a_row(p, t),
    )  # fmt: skip


def merge_work(t: Mapping[str, Any], outputs: int, align_out: int, moved: tuple[float, float], target: Target) -> Work:
    """One thread per vector of out. `moved`: bytes that are read, of the workspace, and written."""
    items, (read, written) = outputs / align_out, moved
    return Work(
        blocks=max(1, math.ceil(items / split.MERGE_THREADS)), threads=split.MERGE_THREADS, fma=0.0,
        other_instructions=split.parts(t) * (PER_PARTIAL * outputs + 8.0 * items) + 3.0 * outputs + 40.0 * items,
        shared_bytes=0.0, l2_bytes=read + written, dram_bytes=beyond_l2(read, target) + written,
        dynamic_shared_bytes=0, independent=PARTIALS_IN_FLIGHT, steps=2 * -(-split.parts(t) // PARTIALS_IN_FLIGHT),
        overlap=0.5, prefetched=1,
    )  # fmt: skip


def _listing(p: AttentionProblem, t: Mapping[str, Any]) -> Work:
    """Of the launch that writes the list of tiles: a thread of each sequence compares it with all."""
    looked_up = lookups.Lookups(float(walk.entries_of_list(p)))
    written = 2.0 * INDEX_BYTES * (1 + walk.tiles_of_head(p, t))
    return Work(
        blocks=-(-p.batch // walk.LIST_THREADS), threads=walk.LIST_THREADS, fma=0.0,
        other_instructions=looked_up.instructions + PER_COMPARISON * p.batch**2, shared_bytes=0.0,
        l2_bytes=looked_up.l2_bytes + written, dram_bytes=float(INDEX_BYTES * sum(p.tables.values())),
        dynamic_shared_bytes=0, independent=COMPARED_AT_ONCE, steps=-(-p.batch // COMPARED_AT_ONCE), overlap=0.5,
        prefetched=1,
    )  # fmt: skip


def beyond_l2(moved: float, target: Target) -> float:
    """Of the workspace's bytes those that go to DRAM: the second launch finds in L2 what fits there."""
    return 0.0 if moved <= L2_SHARE * target.l2_bytes else moved


def _missed(p: AttentionProblem, t: Mapping[str, Any], target: Target) -> float:
    """Of keys and values that are read again, what the L2 no longer has: those of the heads of a band alternate."""
    band = int(t["band"]) or side_by_side(p, t)
    of_kv = -(-band * rows_of_query(p, t) // p.group)
    held = float(ELEMENT_BYTES) * of_kv * p.seq_kv * (p.head_dim_qk + p.head_dim_vo)
    return max(0.0, 1.0 - L2_SHARE * target.l2_bytes / held)


def launches(p: AttentionProblem, t: Mapping[str, Any], aligns: tuple[int, int]) -> tuple[LaunchCounts, ...]:
    """Products of whole tiles; vectors that exist are read and written, those of keys once for each block."""
    tile_q, tile_kv, parts_of_keys = int(t["tile_q"]), int(t["tile_kv"]), split.parts(t)
    align, align_out = aligns
    scores = steps(p, t) * tile_q * tile_kv
    executed = scores * (padded(p.head_dim_qk) + padded(p.head_dim_vo))
    rows = split.rows(p)
    of_head = sum(count * keys_copied(seen, tile_q, tile_kv) for count, seen in of_batch(p, rows_of_query(p, t)))
    keys = heads(p, t) * of_head
    queries = rows * p.head_dim_qk * parts_of_keys
    read = ELEMENT_BYTES * (queries + keys * (p.head_dim_qk + p.head_dim_vo))
    bytes_ = ELEMENT_BYTES * align
    parts = [
        Primitive(MMA[p.dtype], executed // MMA_MACS, executed),
        Primitive("fma", scores, scores),
        load(read, bytes_, "cp_async" if bytes_ >= 4 else "load_global"),
        *([load(_table_bytes(p, t, align), INDEX_BYTES)] if p.ragged else []),
        *(walk.looked_up(p, t, threads(t)) if walk.walks(t) else []),
    ]
    results = [
        store(ELEMENT_BYTES * rows * p.head_dim_vo, ELEMENT_BYTES * align_out),
        *([store(4 * rows, 4)] if p.lse else []),
    ]
    if not split.splits(t):
        run = LaunchCounts("run", merged([*parts, *results]), products(p))
        return (LaunchCounts("list_tiles", merged(walk.listed(p, t))), run) if walk.walks(t) else (run,)
    # Pairs of sums, and two floats of each row.
    left = store(8 * parts_of_keys * split.rows(p) * (-(-p.head_dim_vo // 2) + 1), 8)
    merge = merge_counts(parts_of_keys, rows * (p.head_dim_vo // align_out), align_out, p.ragged, results)
    return LaunchCounts("run", merged([*parts, left]), products(p)), merge


def merge_counts(parts: int, items: int, align_out: int, ragged: bool, results: Sequence[Primitive]) -> LaunchCounts:
    """A thread of each vector of out reads of each part its greatest score twice, its total and its sums."""
    products_of_merge = items * parts * (align_out + 1)
    counted = [
        Primitive("fma", products_of_merge, products_of_merge),
        load(4 * items * (parts + ragged), 4),
        load(8 * items * parts, 8),
        load(4 * items * parts * align_out, 4 * min(align_out, 4)),
        *results,
    ]
    return LaunchCounts("merge", merged(counted))


def _table_bytes(p: AttentionProblem, t: Mapping[str, Any], align: int) -> int:
    """Of a ragged batch: each thread searches the sequence of its block's tile, and reads where its queries begin and
    end; where keys do, if there is a query, and how many there are of the last page, if there is one. Then the pages
    of the rows that it copies."""
    searched = (p.batch - 1).bit_length()
    each = heads(p, t) * sum(
        count * -(-queries * rows_of_query(p, t) // int(t["tile_q"])) * (2 + bool(p.page_size and keys))
        for (queries, keys), count in p.by_lengths.items()
    )
    read = 0 if walk.walks(t) else threads(t) * (blocks(p, t) * (searched + 2) + each) * split.parts(t)
    if p.page_size:
        for columns in (padded(p.head_dim_qk), padded(p.head_dim_vo)):
            read += heads(p, t) * _page_numbers(p, t, columns // align)
    return INDEX_BYTES * read


def _page_numbers(p: AttentionProblem, t: Mapping[str, Any], per_row: int) -> int:
    """That threads read for the tiles of all blocks of a head, each of its own rows; see Pages in pages.cuh."""
    tile_q, tile_kv, size = int(t["tile_q"]), int(t["tile_kv"]), p.page_size or 1
    beside = math.gcd(per_row, threads(t))

    def of_tile(keys: int) -> int:
        return numbers_of_tile(keys, tile_kv, size, beside, threads(t))

    total = 0
    for count, seen in of_batch(p, rows_of_query(p, t)):
        last, whole = _blocks_with_the_last_tile(seen, tile_q, tile_kv), seen.tiles(tile_q, tile_kv)
        tail = seen.keys % tile_kv or tile_kv
        total += count * (whole * of_tile(tile_kv) - last * (of_tile(tile_kv) - of_tile(tail)))
    return total


def keys_copied(seen: Seen, tile_q: int, tile_kv: int) -> int:
    """Keys in the tiles of all blocks of a head, without those behind the last key."""
    padding = -seen.keys % tile_kv
    return seen.tiles(tile_q, tile_kv) * tile_kv - _blocks_with_the_last_tile(seen, tile_q, tile_kv) * padding


def _blocks_with_the_last_tile(seen: Seen, tile_q: int, tile_kv: int) -> int:
    """Of keys, of a sequence."""
    if not seen.keys:
        return 0
    last = (-(-seen.keys // tile_kv) - 1) * tile_kv
    return _blocks_that_reach(seen, last, tile_q)


def _blocks_that_reach(seen: Seen, key: int, tile_q: int) -> int:
    """Of all blocks, whose last query sees further with each, those that see `key` or one behind it."""
    first = max(0, -(-(seen.rows * (key + 1 - seen.end) - tile_q + 1) // tile_q))
    return max(0, seen.blocks(tile_q) - first) if seen.keys > key else 0
