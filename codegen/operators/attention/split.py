"""How the keys of a block of queries are divided among blocks, and the launch and the workspace that this takes.

`workspace`: of the tiles of keys that some query of a block sees, each of `split_kv` blocks takes an even share; it
leaves its sums in fp32, the greatest score and the total of each row in a part of the workspace of its own, and `merge`
brings the parts to one greatest score and adds them in their order: the same bits in every run. A share may be empty.
"""

from collections.abc import Mapping
from typing import Any

from codegen.operators.attention.packing import rows_of_query
from codegen.operators.attention.problem import AttentionProblem
from codegen.operators.attention.seen import most_tiles
from codegen.search.rules import Rejected, check
from codegen.search.space import Linked, Tunable
from codegen.targets import Target

MOST_SPLITS = 1024
SPLIT = Tunable(
    "split", ("none", "workspace"), False,  # in the order of the numbers in block.cuh
    "where results of a part of the keys go: nowhere, as a block takes all keys; a part of the workspace for each, to "
    "be merged by a second launch", "none", later=True,
)  # fmt: skip
SPLIT_KV = Tunable(
    "split_kv", range(1, MOST_SPLITS + 1), True, "blocks among which the keys of some queries are divided", 1,
    later=True,
)  # fmt: skip
# The numbers of splits of level 2.
SPLITS = (1, 2, 4, 8, 16, 32, 64, 128)
# Threads of a block of `merge`, as `merge_threads` in merge.cuh.
MERGE_THREADS = 256
# Tiles of keys that a split needs to be worth the second launch.
LEAST_TILES = 4
# Of a multiprocessor, so that each of its schedulers has one.
FILLING_WARPS = 4
# Blocks per multiprocessor beyond which more splits add traffic and nothing else. It bounds the workspace, too.
ENOUGH_BLOCKS = 8

# `split` with `split_kv`.
Way = tuple[str, int]
WHOLE: Way = ("none", 1)


def splits(tunables: Mapping[str, Any]) -> bool:
    """Whether keys are divided."""
    return bool(tunables.get("split", "none") == "workspace")


def parts(tunables: Mapping[str, Any]) -> int:
    """Blocks that share the keys of some queries."""
    return int(tunables.get("split_kv", 1))


def functions(tunables: Mapping[str, Any]) -> tuple[str, ...]:
    """The kernel's __global__ functions, in launch order."""
    return ("run", "merge") if splits(tunables) else ("run",)


def way(count: int) -> Way:
    """Of so many splits."""
    return WHOLE if count == 1 else ("workspace", count)


def linked(counts: tuple[int, ...]) -> Linked:
    """Both tunables as one axis of a search space."""
    return Linked(("split", "split_kv"), tuple(dict.fromkeys((WHOLE, *map(way, counts)))))


def useful(tiles: int, blocks: int, warps: int, target: Target) -> tuple[int, ...]:
    """Of `blocks` with `tiles` of keys each: the number of splits with which each multiprocessor has about four warps,
    then half and twice as many, as far as splits have enough keys; none where there are so many blocks already."""
    wanted = target.sm_count * max(1, FILLING_WARPS // warps)
    fit = [count for count in SPLITS[1:] if count * LEAST_TILES <= tiles]
    if 2 * blocks > wanted or not fit:
        return ()
    best = next((count for count in fit if 4 * blocks * count >= 3 * wanted), fit[-1])
    return tuple(count for count in (best, best // 2, 2 * best) if count in fit)


def rows_pitch(p: AttentionProblem) -> int:
    """Floats from one row of the workspace to the next, as `workspace_pitch` in block.cuh."""
    return -(-p.head_dim_vo // 4) * 4


def rows(p: AttentionProblem) -> int:
    """Of out."""
    return p.heads_q * p.total_q


def workspace_bytes(p: AttentionProblem, t: Mapping[str, Any]) -> int:
    """Exactly what `workspace_bytes` in kernel.cuh says: sums of each row and split, its greatest and its total."""
    return 4 * parts(t) * rows(p) * (rows_pitch(p) + 2) if splits(t) else 0


def launches_to_test(t: Mapping[str, Any], p: AttentionProblem) -> list[list[int]]:
    """`band` and `split_kv`. The first launch is race-checked: with more than a tile in a part there is a pipeline to
    check. As many parts as tiles leave some empty where a block does not see all keys."""
    if not splits(t):
        return [[0, 0], [1, 0], [2, 0]]
    tiles = -(-p.seq_kv // int(t["tile_kv"]))
    return [[0, min(2, tiles)], [1, 1], [2, min(3, tiles)], [0, min(8, tiles)], [0, tiles]]


def rules(p: AttentionProblem, t: Mapping[str, Any], blocks: int, target: Target) -> Rejected | None:
    """Both tunables agree, some block has keys for each part, and the division can be of use."""
    tiles = most_tiles(p, int(t["tile_q"]), int(t["tile_kv"]), rows_of_query(p, t))
    return rules_of(t, blocks, tiles, target)


def rules_of(t: Mapping[str, Any], blocks: int, tiles: int, target: Target) -> Rejected | None:
    """`blocks` before the division, of which none has more than `tiles` of keys."""
    count = parts(t)
    if not splits(t):
        return check(count == 1, "split", f"split_kv = {count} needs split = workspace")
    if count == 1:
        return Rejected("split", "split = workspace with 1 split repeats split = none and adds a launch")
    if count > tiles:
        return Rejected(
            "split_kv",
            f"{count} splits of {tiles} tiles of {t['tile_kv']} keys, the most that a block sees, leave some empty",
        )
    if blocks * count >= ENOUGH_BLOCKS * target.sm_count:
        enough = ENOUGH_BLOCKS * target.sm_count
        return Rejected("split_kv", f"{blocks} blocks in {count} splits; {target.name} has enough with {enough} blocks")
    return None
