"""Which keys queries see, in numbers: pairs of query and key, and tiles of keys that blocks of queries take."""

from dataclasses import dataclass
from functools import lru_cache

from codegen.operators.attention.problem import AttentionProblem

LOOKED_AT = 64


@dataclass(frozen=True)
class Seen:
    """Query i sees the keys from i + `first` to before i + `end`, of those from 0 to before `keys`. A block's tile has
    `rows` for each query, one after the other: those of the heads that are packed into it."""

    queries: int
    keys: int
    first: int
    end: int
    rows: int = 1

    @classmethod
    def of(cls, problem: AttentionProblem) -> "Seen":
        """Of a sequence with seq_q queries and seq_kv keys."""
        return cls.between(problem, problem.seq_q, problem.seq_kv)

    @classmethod
    def between(cls, p: AttentionProblem, queries: int, keys: int, rows: int = 1) -> "Seen":
        """Of a sequence with so many queries and keys; maybe none."""
        diagonal = keys - queries
        first = -queries if p.window_left is None else max(-queries, diagonal - p.window_left)
        end = keys if p.window_right is None else min(keys, diagonal + p.window_right + 1)
        return cls(queries, keys, first, end, rows)

    def by(self, query: int) -> tuple[int, int]:
        """The first key that it sees, and the one behind the last."""
        return min(max(query + self.first, 0), self.keys), min(max(query + self.end, 0), self.keys)

    @property
    def pairs(self) -> int:
        """Of a query and a key that it sees."""
        return self._clamped(self.end, 1, 1, 0) - self._clamped(self.first, 1, 1, 0)

    def tiles(self, tile_q: int, tile_kv: int) -> int:
        """Of keys, that all blocks of queries take together."""
        # Of row r's query i = floor(r / rows): floor((i + n) / tile_kv) = floor((r + rows n) / (rows tile_kv)).
        own = Seen(*(self.rows * number for number in (self.queries, self.keys, self.first, self.end)))
        ends = own._clamped(own.end + tile_q - 1, tile_q, self.rows * tile_kv, self.rows * (tile_kv - 1))
        return ends - own._clamped(own.first, tile_q, self.rows * tile_kv, 0)

    def most_tiles(self, tile_q: int, tile_kv: int) -> int:
        """Of keys, that one block takes: of at most LOOKED_AT blocks for each row of a query, and of the last one."""
        count = self.blocks(tile_q)
        if not count:
            return 0
        some = {*range(0, count, -(-count // (LOOKED_AT * self.rows))), count - 1}
        return max(self._of_block(block * tile_q, tile_q, tile_kv) for block in some)

    def blocks(self, tile_q: int) -> int:
        """Whose rows are queries."""
        return -(-self.queries * self.rows // tile_q)

    def _of_block(self, first_row: int, tile_q: int, tile_kv: int) -> int:
        (first, _), (_, end) = (self.by(row // self.rows) for row in (first_row, first_row + tile_q - 1))
        return -(-end // tile_kv) - first // tile_kv

    def _clamped(self, offset: int, step: int, tile: int, rounding: int) -> int:
        """The sum over blocks b of floor((clamp(b step + offset, 0, keys) + rounding) / tile)."""
        blocks = -(-self.queries // step)
        # The blocks whose value is 0, then those that lie between, then those at the end.
        low = min(blocks, max(0, -(-(1 - offset) // step))) if offset < 1 else 0
        high = min(blocks, max(low, -(-(self.keys - offset) // step)))
        between = floor_sum(high - low, tile, step, low * step + offset + rounding)
        return low * (rounding // tile) + between + (blocks - high) * ((self.keys + rounding) // tile)


@lru_cache(maxsize=64)
def of_batch(p: AttentionProblem, rows: int = 1) -> tuple[tuple[int, Seen], ...]:
    """How many sequences of the batch have which lengths; with so many rows of a query."""
    if not p.ragged:
        return ((p.batch, Seen.between(p, p.seq_q, p.seq_kv, rows)),)
    return tuple((count, Seen.between(p, *lengths, rows)) for lengths, count in p.by_lengths.items())


def pairs(p: AttentionProblem) -> int:
    """Of a query and a key that it sees, of one head in the whole batch."""
    return sum(count * seen.pairs for count, seen in of_batch(p))


@lru_cache(maxsize=1024)
def tiles(p: AttentionProblem, tile_q: int, tile_kv: int, rows: int = 1) -> int:
    """Of keys, that all blocks of a head take together, in the whole batch."""
    return sum(count * seen.tiles(tile_q, tile_kv) for count, seen in of_batch(p, rows))


@lru_cache(maxsize=1024)
def most_tiles(p: AttentionProblem, tile_q: int, tile_kv: int, rows: int = 1) -> int:
    """Of keys, that one block takes."""
    return max(seen.most_tiles(tile_q, tile_kv) for _, seen in of_batch(p, rows))


def floor_sum(count: int, divisor: int, factor: int, start: int) -> int:
    """The sum of floor((factor i + start) / divisor) for i from 0 to before `count`, none of them negative, in as many
    steps as Euclid's algorithm takes (Graham, Knuth and Patashnik, "Concrete Mathematics", section 3.5)."""
    total = 0
    while count > 0:
        total += factor // divisor * (count * (count - 1) // 2) + start // divisor * count
        factor, start = factor % divisor, start % divisor
        most = factor * count + start
        if most < divisor:
            break
        # Counted by rows of lattice points instead of by columns.
        count, start, divisor, factor = most // divisor, most % divisor, factor, divisor
    return total
