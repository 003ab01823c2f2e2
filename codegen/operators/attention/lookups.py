"""What blocks of attention look up in tables, for the roofline: where sequences begin, and in which pages keys lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from codegen.operators.attention import split, walk
from codegen.operators.attention.problem import AttentionProblem
from codegen.operators.attention.space import blocks, padded, threads

WARP = 32
INDEX_BYTES, SECTOR_BYTES = walk.INDEX_BYTES, 32  # of an entry; the least that a warp gets from the L2
PER_ENTRY = 4.0  # instructions of a lane: address, check, load, use
ENDS = 2  # entries that say where something begins and ends


@dataclass(frozen=True)
class Lookups:
    """`entries` that lanes load, of which a warp has `distinct` at a time, side by side in the table."""

    entries: float
    distinct: float = 1.0

    @property
    def instructions(self) -> float:
        return PER_ENTRY * self.entries

    @property
    def l2_bytes(self) -> float:
        return self.entries / WARP * max(float(SECTOR_BYTES), INDEX_BYTES * self.distinct)


@dataclass(frozen=True)
class Tables:
    """That a block reads before its first copy: of `batch` sequences its own is searched, or known by its number; where
    keys lie in pages, `listed`, and `ends_within` one, how long the last one is."""

    batch: int
    searched: bool
    listed: bool = False
    ends_within: bool = False

    @property
    def in_a_row(self) -> int:
        """Loads of which each needs the one before; both ends of something are read at once."""
        return (self._bisections + 1 if self.searched else 0) + 1 + self.ends_within + self.listed

    def of_blocks(self, count: int, threads_of_block: int) -> Lookups:
        """All threads of a block read the same."""
        of_queries = self._bisections + ENDS if self.searched else 0
        return Lookups(float(count) * threads_of_block * (of_queries + ENDS + self.ends_within))

    @property
    def _bisections(self) -> int:
        return (self.batch - 1).bit_length()


def tables_of(p: AttentionProblem) -> Tables:
    """Of a batch whose sequences have lengths of their own."""
    return Tables(p.batch, searched=True, listed=bool(p.page_size), ends_within=bool(p.page_size))


def in_a_row(p: AttentionProblem, t: Mapping[str, Any]) -> int:
    """Loads ahead of a first copy, of which each needs the one before; none of a dense batch."""
    if not p.ragged:
        return 0
    # Of a list: how long it is, the tile's pair, where its queries begin.
    return 3 + replace(tables_of(p), searched=False).in_a_row if walk.walks(t) else tables_of(p).in_a_row


def of_run(p: AttentionProblem, t: Mapping[str, Any], steps: int, align: int) -> list[Lookups]:
    """In so many tiles of keys of all blocks, copied by `align` elements at once; none of a dense batch."""
    if not p.ragged:
        return []
    if walk.walks(t):
        looked_up = [Lookups(sum(part.bytes_read for part in walk.looked_up(p, t, threads(t))) / INDEX_BYTES)]
    else:
        looked_up = [tables_of(p).of_blocks(blocks(p, t) * split.parts(t), threads(t))]
    if size := p.page_size:
        # Each thread those of the rows that it copies, see Pages in pages.cuh; neighbours copy the same row.
        for columns in (padded(p.head_dim_qk), padded(p.head_dim_vo)):
            beside = math.gcd(columns // align, threads(t))
            numbers = numbers_of_tile(int(t["tile_kv"]), int(t["tile_kv"]), size, beside, threads(t))
            looked_up.append(Lookups(float(steps) * numbers, WARP / (beside * size)))
    return looked_up


def numbers_of_tile(keys: int, tile_kv: int, size: int, beside: int, threads_of_block: int) -> int:
    """Of pages of `size` keys, that all threads of a block read for a tile with so many keys, `beside` of them for the
    same row."""
    at_once = threads_of_block // beside
    apart = size if size % at_once == 0 else at_once
    return beside * sum(min(at_once, max(0, keys - begin)) for begin in range(0, tile_kv, apart))
