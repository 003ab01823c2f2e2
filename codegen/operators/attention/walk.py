"""Persistent blocks: as many as the device holds walk a list of the tiles of a batch, the longest sequences first.

A first launch writes the list into the workspace: it alone sees the tables, on the device. Each of its threads compares
a sequence with all others, so that the list needs no sorting and is the same in every run. Block b of `run` takes the
entries b, b + walkers, b + 2 walkers, …, each for every head.
"""

from collections.abc import Mapping
from typing import Any

from codegen.counts import Primitive, load, store
from codegen.operators.attention.packing import heads, rows_of_query, tiles_of
from codegen.operators.attention.problem import AttentionProblem
from codegen.search.rules import Rejected, check
from codegen.search.space import Linked, Tunable
from codegen.targets import Target

INDEX_BYTES = 4  # of an entry of a table, or of the list
MOST_WALKERS = 65535
WALK = Tunable(
    "walk", ("none", "longest_first"), False,  # in the order of the numbers in block.cuh
    "which tiles a block takes: one; of a ragged batch those of a list, which a first launch writes, sequences with "
    "the most keys first", "none", later=True,
)  # fmt: skip
WALKERS = Tunable("walkers", range(1, MOST_WALKERS + 1), True, "blocks that walk the list", 1, later=True)
# Sequences of a batch, each of which is compared with all: `most_walked` in kernel.cuh.
MOST_SEQUENCES = 4096
# Threads of a block of `list_tiles`, as `list_threads` in walk.cuh.
LIST_THREADS = 128
# Few, so that blocks take several tiles of a small problem, and more than tiles.
WALKERS_TO_TEST = (1, 2, 3, 64)
# Blocks of a multiprocessor that level 2 tries.
RESIDENT = (1, 2, 4)

Way = tuple[str, int]
APART: Way = ("none", 1)


def walks(t: Mapping[str, Any]) -> bool:
    """Whether blocks take several tiles."""
    return bool(t.get("walk", "none") == "longest_first")


def walkers(t: Mapping[str, Any]) -> int:
    """Blocks of `run` at most."""
    return int(t.get("walkers", 1))


def linked(splits: Linked, p: AttentionProblem, target: Target) -> Linked:
    """Ways of splitting keys, and of walking a list without it, as one axis of a search space."""
    walked = ways(p, target)[1:]
    if not walked:
        return splits
    choices = (*((*choice, *APART) for choice in splits.choices), *((*splits.choices[0], *way) for way in walked))
    return Linked((*splits.names, "walk", "walkers"), choices)


def ways(p: AttentionProblem, target: Target) -> tuple[Way, ...]:
    """What level 2 tries."""
    if not p.ragged or p.batch > MOST_SEQUENCES:
        return (APART,)
    return (APART, *(("longest_first", count * target.sm_count) for count in RESIDENT))


def tiles_of_head(p: AttentionProblem, t: Mapping[str, Any]) -> int:
    """That have queries, of the whole batch."""
    return tiles_of(p, rows_of_query(p, t), int(t["tile_q"]))


def items(p: AttentionProblem, t: Mapping[str, Any]) -> int:
    """That blocks walk: tiles of all heads."""
    return heads(p, t) * tiles_of_head(p, t)


def workspace_bytes(p: AttentionProblem, t: Mapping[str, Any]) -> int:
    """Exactly what `workspace_bytes` in kernel.cuh says: two numbers for each tile that a batch of so many queries can
    have, and how many there are."""
    return 2 * INDEX_BYTES * (1 + p.total_q * rows_of_query(p, t) // int(t["tile_q"]) + p.batch) if walks(t) else 0


def rules(p: AttentionProblem, t: Mapping[str, Any]) -> Rejected | None:
    """Whether there is a list to walk, and more of it than blocks."""
    count = walkers(t)
    if not walks(t):
        return check(count == 1, "walk", f"walkers = {count} needs walk = longest_first")
    if not p.ragged:
        return Rejected(
            "walk", "walk = longest_first is for ragged batches and paged caches: tiles of others are alike"
        )
    if t.get("split", "none") != "none":
        return Rejected(
            "walk", "walk = longest_first and split = workspace: a block takes all keys of a tile, or a part"
        )
    if int(t["band"]):
        return Rejected("walk", f"band = {t['band']}: heads of a tile lie side by side in the list")
    if p.batch > MOST_SEQUENCES:
        return Rejected("walk", f"a list of {p.batch} sequences; at most {MOST_SEQUENCES} are compared with each other")
    return check(count <= items(p, t), "walkers", f"{count} blocks for {items(p, t)} tiles of all heads")


def listed(p: AttentionProblem, t: Mapping[str, Any]) -> list[Primitive]:
    """What the first launch does."""
    written = 2 * INDEX_BYTES * (1 + tiles_of_head(p, t))
    return [load(INDEX_BYTES * entries_of_list(p), INDEX_BYTES), store(written, 2 * INDEX_BYTES)]


def looked_up(p: AttentionProblem, t: Mapping[str, Any], threads: int) -> list[Primitive]:
    """By all threads of `run`: how long the list is; of each entry its pair, where its queries and keys begin and end,
    and how many keys of the last page there are, if there is one."""
    blocks, rows, tile_q = min(walkers(t), items(p, t)), rows_of_query(p, t), int(t["tile_q"])
    each = sum(
        count * -(-queries * rows // tile_q) * (4 + bool(p.page_size and keys))
        for (queries, keys), count in p.by_lengths.items()
    )
    pairs = threads * items(p, t)
    return [
        load(INDEX_BYTES * threads * (blocks + heads(p, t) * each), INDEX_BYTES),
        load(2 * INDEX_BYTES * pairs, 2 * INDEX_BYTES),
    ]


def entries_of_list(p: AttentionProblem) -> int:
    """Both ends of the queries and of the keys, of a thread's own sequence and of each."""
    return 4 * p.batch * (p.batch + 1)
