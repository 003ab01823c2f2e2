"""Heads of q that share one of k and v, packed into tiles: a row is a query of one of them.

Row r of a sequence is its query r / group of the group's head r % group, so keys and values are loaded for all heads
of a group at once, and a tile that few queries leave empty is full.
"""

from collections.abc import Mapping
from typing import Any

from codegen.operators.attention.problem import LONGEST, AttentionProblem
from codegen.search.rules import Rejected
from codegen.search.space import Tunable

PACKING = Tunable(
    "packing", ("none", "group"), False,  # in the order of the numbers in block.cuh
    "what the rows of a tile are: queries of one head; of all heads that share one of k and v, the heads of a query "
    "side by side", "none", later=True,
)  # fmt: skip
# Heads of a group, as `largest_group` in kernel.cuh.
LARGEST_GROUP = 2**15
# Queries of a sequence, on average, with which tiles of one head are full.
MANY_QUERIES = 64


def packs(t: Mapping[str, Any]) -> bool:
    """Whether tiles have rows of several heads."""
    return bool(t.get("packing", "none") == "group")


def rows_of_query(p: AttentionProblem, t: Mapping[str, Any]) -> int:
    """In the tiles of a head, or of a group."""
    return p.group if packs(t) else 1


def heads(p: AttentionProblem, t: Mapping[str, Any]) -> int:
    """That have tiles of their own, of one sequence."""
    return p.heads_q // rows_of_query(p, t)


def offered(p: AttentionProblem) -> tuple[str, ...]:
    """What searches try, the best guess first."""
    return ("group", "none") if p.group > 1 and p.total_q < MANY_QUERIES * p.batch else ("none",)


def rules(p: AttentionProblem, t: Mapping[str, Any]) -> Rejected | None:
    """Whether there is something to pack, and tiles become fewer by it."""
    if not packs(t):
        return None
    if p.group == 1:
        return Rejected("packing", "packing = group needs heads of q that share one of k and v; each has its own")
    if p.group > LARGEST_GROUP or p.group * p.total_q > LONGEST:
        return Rejected(
            "packing",
            f"{p.total_q} queries of {p.group} packed heads; at most {LARGEST_GROUP} heads and {LONGEST} of both "
            "multiplied are allowed",
        )
    tile_q = int(t["tile_q"])
    of_group, of_each = tiles_of(p, p.group, tile_q), p.group * tiles_of(p, 1, tile_q)
    if of_group == of_each:
        return Rejected("packing", f"{of_each} tiles of a group, packed or not: rows of one head fill them")
    return None


def tiles_of(p: AttentionProblem, rows: int, tile_q: int) -> int:
    """That have queries, of the whole batch, where a query has so many rows."""
    return sum(count * -(-queries * rows // tile_q) for (queries, _), count in p.by_lengths.items())
