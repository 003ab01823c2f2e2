"""Attention's tunables, the schedules that searches try, and when a schedule cannot work or is not worth compiling.

Every static_assert of the kernel is a rule here.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any

from codegen.alignment import power_of_two, round_up
from codegen.operators.attention import packing, split, walk
from codegen.operators.attention.problem import AttentionProblem
from codegen.operators.attention.seen import most_tiles
from codegen.problem import LARGEST_EXTENT
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check_workspace, first_accepted
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import Linked, SearchSpace, Tunable, build_space, completed
from codegen.targets import Target

# The first architecture with cp.async, mma.sync m16n8k16 and conversions of two floats at once.
AMPERE = 80
ELEMENT_BYTES = 2
PIECE = 16  # queries and keys of an mma
VECTOR = 8  # elements of the widest copy
BANDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
# Queries and warps of a block that level 0 chooses from.
SIZES = ((128, 4), (128, 8), (64, 4), (32, 2), (16, 1))
# With one piece of each warp, the fewest rows first: of more threads each copies less, and has more registers left.
NARROW = ((16, 1), (32, 2), (64, 4), (128, 8))
# Of the L2: keys and values of the heads that blocks read at a time.
L2_SHARE = 0.75
# Of a piece of 16 queries: the greatest score and the total of two rows, and their limits.
ROW_REGISTERS = 8
# Fragments of K or V, weights that become fragments, addresses and counters. These constants are fitted so that kernels
# of levels 0 and 1 do not spill: of 80 kernels near the limit that were compiled with ptxas 13.2 (sm_80 and sm_90a,
# both types, heads of 64 to 256, with and without cap and lse) they reject the 14 that did and 20 that did not.
OVERHEAD_REGISTERS = 73
# A copy of a thread beyond so many in a tile: its address and its check are kept, or what is kept instead spills.
FEW_COPIES, COPY_REGISTERS = 4, 2
# Where rows of K and of V have another number of vectors, both have addresses of their own.
UNLIKE_REGISTERS = 2
# Numbers of pages and addresses of rows in them. Of 180 kernels near the limit (ptxas 13.2, sm_80 and sm_90a, pages of
# every size) it rejects the 30 that spilled and 72 that did not.
PAGE_REGISTERS = 19
# Queries and heads of a lane's rows where heads are packed: of 80 kernels with 240 to 255 registers without these
# (ptxas 13.2, sm_80 and sm_90a) two spilled, at 249 and 253.
PACKED_REGISTERS = 7
# What a walk keeps from one tile to the next. Of ten kernels (ptxas 13.2, sm_80 and sm_90a) it rejects the three that
# spilled, 8 to 72 bytes, and three that did not, at 252 and 255 registers.
WALK_REGISTERS = 45

TUNABLES = (
    Tunable("tile_q", (16, 32, 64, 128, 256), False, "queries of a block", 64),
    Tunable("tile_kv", (16, 32, 64, 128, 256), False, "keys and values of a stage", 64),
    Tunable("warps", (1, 2, 4, 8), False, "warps of a block, each with tile_q / warps queries", 4),
    Tunable("stages", (1, 2, 3, 4), False, "tiles of keys, and of values, in shared memory", 1),
    Tunable("q_in", ("registers", "shared"), False, "where a warp keeps its queries", "registers"),
    Tunable("band", BANDS, True, "heads whose blocks start side by side, the last queries first; 0: all", 0),
    split.SPLIT,
    split.SPLIT_KV,
    packing.PACKING,
    walk.WALK,
    walk.WALKERS,
)


def padded(head_dim: int) -> int:
    """Columns of a tile: whole k-steps."""
    return round_up(head_dim, PIECE)


def threads(t: Mapping[str, Any]) -> int:
    """Of a block."""
    return 32 * int(t["warps"])


def pieces(t: Mapping[str, Any]) -> int:
    """Of 16 queries, of a warp."""
    return int(t["tile_q"]) // (PIECE * int(t["warps"]))


def shared_bytes(t: Mapping[str, Any], columns_qk: int, columns_vo: int) -> int:
    """Dynamic shared memory of a block, as `shared_bytes` in block.cuh."""
    q = ELEMENT_BYTES * int(t["tile_q"]) * columns_qk
    out = 0 if split.splits(t) else ELEMENT_BYTES * int(t["tile_q"]) * columns_vo
    ring = ELEMENT_BYTES * int(t["stages"]) * int(t["tile_kv"]) * (columns_qk + columns_vo)
    return q + max(ring, out) if t["q_in"] == "shared" else max(ring, q, out)


def registers(t: Mapping[str, Any], columns_qk: int, columns_vo: int, *, page_size: int | None = None) -> int:
    """An estimate of a thread's."""
    q = columns_qk // 4 if t["q_in"] == "registers" else 4
    of_piece = columns_vo // 2 + int(t["tile_kv"]) // 2 + q + ROW_REGISTERS
    copies = -(-int(t["tile_kv"]) * max(columns_qk, columns_vo) // (VECTOR * threads(t)))
    kept = 0 if _of_one_page(t, page_size) else max(0, copies - FEW_COPIES)
    more = COPY_REGISTERS * kept + UNLIKE_REGISTERS * (columns_qk != columns_vo)
    beside = OVERHEAD_REGISTERS + PAGE_REGISTERS * bool(page_size) + PACKED_REGISTERS * packing.packs(t)
    beside += WALK_REGISTERS * walk.walks(t)
    return pieces(t) * of_piece + more + beside


def _of_one_page(t: Mapping[str, Any], page_size: int | None) -> bool:
    """Whether a warp of 16 queries has short tiles of keys, each in one page: one number says where all rows of a tile
    are, and nothing is kept for each copy. None of 72 kernels near the limit without them (ptxas 13.2, sm_80 and
    sm_90a, heads of 256 and more) spilled; of pages of one key, for which it does not hold, one of eight did."""
    whole = page_size is not None and page_size % int(t["tile_kv"]) == 0
    return whole and int(t["tile_kv"]) == PIECE and pieces(t) == 1 and t["q_in"] == "shared"


def tiles(p: AttentionProblem, t: Mapping[str, Any]) -> int:
    """Of a head. Where a sequence of a ragged batch begins, the device alone can see: there are as many numbers as its
    sequences can need, wherever they begin."""
    rows, tile_q = packing.rows_of_query(p, t), int(t["tile_q"])
    return p.total_q * rows // tile_q + p.batch if p.ragged else -(-p.seq_q * rows // tile_q)


def blocks(p: AttentionProblem, t: Mapping[str, Any]) -> int:
    """Of `run`, for each split."""
    return tiles(p, t) * side_by_side(p, t)


def side_by_side(p: AttentionProblem, t: Mapping[str, Any]) -> int:
    """Heads, or groups that are packed, that a band can have: tiles of a ragged batch's sequences are one list for
    each."""
    return packing.heads(p, t) * (1 if p.ragged else p.batch)


def rules(
    p: AttentionProblem, schedule: Schedule, target: Target, workspace_limit: int | None = None
) -> Accepted | Rejected:
    """Whether a schedule can work and is worth compiling."""
    checked = _checked(p, schedule.as_dict(), target, workspace_limit)
    if isinstance(checked, Rejected) and checked.rule == "registers":
        return Rejected("registers", f"{checked.message}. {_fitting(p, target)}")
    return checked


def _checked(
    p: AttentionProblem, t: Mapping[str, Any], target: Target, workspace_limit: int | None
) -> Accepted | Rejected:
    tile_q, tile_kv, warps, band = (int(t[name]) for name in ("tile_q", "tile_kv", "warps", "band"))
    heads = side_by_side(p, t)
    if target.capability < AMPERE:
        return Rejected("mma", f"mma.sync m16n8k16 and cp.async need sm_{AMPERE}; the target is {target.name}")
    if tile_q % (PIECE * warps):
        return Rejected("warps", f"{tile_q} queries for {warps} warps are no multiple of {PIECE} each")
    if broken := packing.rules(p, t) or _resources(p, t, target):
        return broken
    if blocks(p, t) > LARGEST_EXTENT:
        return Rejected("grid", f"{blocks(p, t)} blocks; a launch has at most {LARGEST_EXTENT}")
    if tiles(p, t) * tile_q > LARGEST_EXTENT:
        return Rejected(
            "grid", f"{tiles(p, t)} tiles of {tile_q} rows; of both multiplied {LARGEST_EXTENT} are allowed"
        )
    if broken := _padding(p, t, target):
        return broken
    if band >= heads:
        return Rejected("band", f"{band} heads side by side of {heads}: 0 says the same")
    if broken := split.rules(p, t, blocks(p, t), target) or walk.rules(p, t):
        return broken
    whole = -(-p.seq_kv // tile_kv)
    own = -(-whole // split.parts(t))
    if int(t["stages"]) > max(1, own):
        return Rejected("stages", f"{t['stages']} stages for {own} tiles of keys")
    return check_workspace(split.workspace_bytes(p, t) + walk.workspace_bytes(p, t), workspace_limit) or ACCEPTED


def _padding(p: AttentionProblem, t: Mapping[str, Any], target: Target) -> Rejected | None:
    """Whether a block has mostly rows, or keys, that there are not, and a smaller one would do."""
    tile_q, tile_kv = int(t["tile_q"]), int(t["tile_kv"])
    rows = p.seq_q * packing.rows_of_query(p, t)
    if tile_q > PIECE and tile_q >= 2 * power_of_two(rows) and not _narrowest(p, t, target):
        return Rejected("tile_q", f"{tile_q} queries of a block are mostly padding for {rows}")
    if tile_kv > PIECE and tile_kv >= 2 * power_of_two(p.seq_kv):
        return Rejected("tile_kv", f"{tile_kv} keys of a tile are mostly padding for {p.seq_kv}")
    return None


def _narrowest(p: AttentionProblem, t: Mapping[str, Any], target: Target) -> bool:
    """Whether a block of half as many warps has no schedule, as too few threads copy what a tile has; or has one where
    pages hold whole tiles alone, which may be the slower one for as many copies of each thread."""
    warps, page_size = int(t["warps"]) // 2, p.page_size and 1
    half = {**t, "tile_q": PIECE * warps, "tile_kv": PIECE, "warps": warps, "q_in": "shared"}
    needed = registers(half, padded(p.head_dim_qk), padded(p.head_dim_vo), page_size=page_size) if warps else 0
    return pieces(t) == 1 and needed > target.registers_per_thread


def _registers(p: AttentionProblem, t: Mapping[str, Any]) -> int:
    return registers(t, padded(p.head_dim_qk), padded(p.head_dim_vo), page_size=p.page_size)


def _resources(p: AttentionProblem, t: Mapping[str, Any], target: Target) -> Rejected | None:
    columns = padded(p.head_dim_qk), padded(p.head_dim_vo)
    needed = _registers(p, t)
    limit = min(target.registers_per_thread, target.registers_per_sm // threads(t))
    if needed > limit:
        return Rejected(
            "registers",
            f"about {needed} registers per thread ({pieces(t)} x ({columns[1] // 2} of out, {int(t['tile_kv']) // 2} "
            f"of scores, {columns[0] // 4 if t['q_in'] == 'registers' else 4} of q) and what a warp keeps beside); "
            f"{limit} are there",
        )
    shared = shared_bytes(t, *columns)
    if shared > target.shared_per_block:
        return Rejected(
            "shared_memory", f"{shared} bytes of shared memory; {target.name} has {target.shared_per_block} per block"
        )
    return None


@lru_cache(maxsize=256)
def _fitting(p: AttentionProblem, target: Target) -> str:
    """A schedule of few registers that is accepted, in a sentence; or what the smallest needs."""
    tried = []
    for way, (tile_q, warps) in product(packing.offered(p), NARROW):
        packed: dict[str, Value] = {"packing": way} if way != "none" else {}
        own: dict[str, Value] = {"tile_q": tile_q, "warps": warps, "tile_kv": PIECE, "q_in": "shared", **packed}
        t = completed(own, TUNABLES).as_dict()
        checked = _checked(p, t, target, None)
        if not isinstance(checked, Rejected):
            named = ", ".join(f"{name} = {value}" for name, value in own.items())
            return f"{named} is accepted, with about {_registers(p, t)}"
        tried.append((_registers(p, t), checked))
    needed, checked = min(tried, key=lambda one: one[0])
    if needed <= target.registers_per_thread:
        return f"No schedule of tile_kv = {PIECE} and q_in = shared is accepted: {checked.message}"
    return f"No schedule fits: 16 queries of a warp and tile_kv = {PIECE} need {needed}"


def space(p: AttentionProblem, target: Target, search: Search) -> SearchSpace:
    """The schedules of a search; raises InvalidSearch."""
    default = first_accepted(_preferred(p, target), lambda schedule: rules(p, schedule, target))
    small, full = _splits(p, target, default)
    return build_space(
        search, TUNABLES, {1: _small(p, target, default), 2: _full(p, target, default)}, default,
        {1: small, 2: full}, full,
    )  # fmt: skip


def _splits(p: AttentionProblem, target: Target, default: Schedule) -> tuple[Linked, Linked]:
    """Of levels 1 and 2."""
    t, most = default.as_dict(), most_tiles(p, PIECE, PIECE)
    apart = _useful_splits(p, {**t, "packing": "none"}, target)
    small = (split.parts(t), *_useful_splits(p, t, target), *apart[:1])
    every = split.linked((*small, *(count for count in split.SPLITS if count <= most)))
    return split.linked(small), walk.linked(every, p, target)


def _useful_splits(p: AttentionProblem, t: Mapping[str, Any], target: Target) -> tuple[int, ...]:
    """The best guess first."""
    most = most_tiles(p, int(t["tile_q"]), int(t["tile_kv"]), packing.rows_of_query(p, t))
    return split.useful(most, blocks(p, t), int(t["warps"]), target)


def band_of(p: AttentionProblem, target: Target, t: Mapping[str, Any] = MappingProxyType({})) -> int:
    """As many heads side by side as have their keys and values in the L2: with more the last queries of all heads come
    first, with fewer no key is read from DRAM twice. 0 where all have."""
    of_kv_head = ELEMENT_BYTES * p.seq_kv * (p.head_dim_qk + p.head_dim_vo)
    fitting = int(L2_SHARE * target.l2_bytes) // of_kv_head * p.group // packing.rows_of_query(p, t)
    band = max((band for band in BANDS if 0 < band <= max(1, fitting)), default=1)
    return 0 if max(band, fitting) >= side_by_side(p, t) else band


def _preferred(p: AttentionProblem, target: Target) -> Iterator[Schedule]:
    """Best guess first: long tiles of keys, then many queries of a block, as long as every multiprocessor has a block,
    and of those 32 of a warp rather than 16: both read keys and values for more queries at once."""
    for way in packing.offered(p):
        yield from _preferred_rows(p, target, {"packing": way})


def _preferred_rows(p: AttentionProblem, target: Target, own: dict[str, Value]) -> Iterator[Schedule]:
    rows, heads = p.seq_q * packing.rows_of_query(p, own), p.batch * packing.heads(p, own)
    sizes = [(tile, warps) for tile, warps in SIZES if tile < 2 * power_of_two(rows) or tile == PIECE]
    sizes.sort(key=lambda size: -(-rows // size[0]) * heads < target.sm_count)
    sizes += [size for size in NARROW if size not in sizes]  # mostly padding, where no smaller one fits
    keys = [tile for tile in (64, 32, 16) if tile < 2 * power_of_two(p.seq_kv) or tile == PIECE]
    band = band_of(p, target, own)
    for tile_kv, (tile_q, warps), q_in, stages in product(keys, sizes, ("registers", "shared"), (2, 1)):
        t: dict[str, Value] = {
            **own, "tile_q": tile_q, "tile_kv": tile_kv, "warps": warps, "stages": stages, "q_in": q_in, "band": band,
        }  # fmt: skip
        for count in (*_useful_splits(p, t, target)[:1], 1):
            where, parts = split.way(count)
            yield completed({**t, "split": where, "split_kv": parts}, TUNABLES)


def _small(p: AttentionProblem, target: Target, default: Schedule) -> dict[str, tuple[Value, ...]]:
    rows = p.seq_q * packing.rows_of_query(p, default.as_dict())
    queries = tuple(tile for tile in (64, 128) if tile < 2 * power_of_two(rows)) or (int(default.get("tile_q")),)
    keys = tuple(tile for tile in (32, 64, 128) if tile < 2 * power_of_two(p.seq_kv)) or (int(default.get("tile_kv")),)
    warps = (4, 8) if queries[-1] == 128 else (int(default.get("warps")),)
    twice = {**default.as_dict(), "tile_q": 2 * PIECE, "warps": 2}
    if default.get("tile_q") == PIECE and _narrowest(p, twice, target):
        queries, warps = (PIECE, 2 * PIECE), (1, 2)
    return {
        "tile_q": _with(queries, default, "tile_q"),
        "tile_kv": _with(keys, default, "tile_kv"),
        "warps": _with(warps, default, "warps"),
        "stages": (1, 2),
        "q_in": ("registers", "shared"),
        "band": (default.get("band"),),
        "packing": packing.offered(p),
    }


def _full(p: AttentionProblem, target: Target, default: Schedule) -> dict[str, tuple[Value, ...]]:
    heads = side_by_side(p, {})
    bands = {0, 1, p.group, band_of(p, target), int(default.get("band"))}
    return {
        "tile_q": (16, 32, 64, 128, 256),
        "tile_kv": (16, 32, 64, 128, 256),
        "warps": (1, 2, 4, 8),
        "stages": (1, 2, 3),
        "q_in": ("registers", "shared"),
        "band": tuple(sorted(band for band in bands if band in BANDS and (band < heads or not band))),
        "packing": packing.offered(p),
    }


def _with(values: tuple[Value, ...], default: Schedule, name: str) -> tuple[Value, ...]:
    """The list, with what the default schedule has."""
    own = default.get(name)
    return values if own in values else tuple(sorted((*values, own)))
