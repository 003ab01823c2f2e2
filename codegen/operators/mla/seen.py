"""What blocks of rows take of the keys: rows are pairs of a query and a head, and query i sees the keys before i + end.

Row r sees those before r // heads + end. With each key counted once for each head those are the ones before
r + heads (end - 1) + 1, rounded up to whole keys. So tiles of keys are those of attention
(`codegen/operators/attention/seen.py`) whose queries are rows, whose keys are `heads` times as many, and whose tiles
are `heads` times as long.
"""

from functools import lru_cache

from codegen.operators.attention.seen import Seen
from codegen.operators.attention.work import keys_copied
from codegen.operators.mla.problem import MlaProblem


@lru_cache(maxsize=64)
def of_batch(p: MlaProblem) -> tuple[tuple[int, Seen], ...]:
    """How many sequences of the batch have which rows and keys."""
    return tuple((count, _rows(p, *lengths)) for lengths, count in p.by_lengths.items())


def _rows(p: MlaProblem, queries: int, keys: int) -> Seen:
    heads = p.heads_q
    end = keys - queries + 1 if p.causal else keys
    return Seen(queries * heads, keys * heads, -queries * heads, heads * (end - 1) + 1)


@lru_cache(maxsize=64)
def scores(p: MlaProblem) -> int:
    """Pairs of a row and a key that it sees."""
    total = 0
    for (queries, keys), count in p.by_lengths.items():
        seen = Seen(queries, keys, -queries, keys - queries + 1 if p.causal else keys)
        total += count * seen.pairs
    return total * p.heads_q


@lru_cache(maxsize=1024)
def tiles(p: MlaProblem, tile_q: int, tile_kv: int) -> int:
    """Of keys, that all blocks take together."""
    return sum(count * seen.tiles(tile_q, tile_kv * p.heads_q) for count, seen in of_batch(p))


@lru_cache(maxsize=1024)
def most_tiles(p: MlaProblem, tile_q: int, tile_kv: int) -> int:
    """Of keys, that one block takes."""
    return max(seen.most_tiles(tile_q, tile_kv * p.heads_q) for _, seen in of_batch(p))


@lru_cache(maxsize=1024)
def copied(p: MlaProblem, tile_q: int, tile_kv: int) -> int:
    """Keys in the tiles of all blocks, without those behind the last key."""
    return sum(count * keys_copied(seen, tile_q, tile_kv * p.heads_q) // p.heads_q for count, seen in of_batch(p))
