"""Tunables of multi-head latent attention, the schedules that searches try, and when a schedule cannot work or is not
worth compiling.

Every static_assert of the kernel is a rule here.
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from codegen.alignment import power_of_two
from codegen.operators.attention import split
from codegen.operators.attention.space import AMPERE, ELEMENT_BYTES, PIECE, threads
from codegen.operators.mla.problem import HEAD_DIM, HEAD_DIM_CKV, VECTOR, MlaProblem
from codegen.operators.mla.seen import most_tiles
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check_workspace, first_accepted
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import Linked, SearchSpace, Tunable, build_space, completed
from codegen.targets import Target

TUNABLES = (
    Tunable("tile_q", (16, 32, 64), False, "rows of a block: pairs of a query and a head", 16),
    Tunable("tile_kv", (16, 32, 64), False, "keys of a stage", 32),
    Tunable("warps", (2, 4, 8), False, "warps of a block", 4),
    Tunable(
        "warps_vo", (2, 4, 8), False,
        "warps that have the same rows: each takes a part of the keys for scores, and of the columns of out", 4,
    ),
    Tunable("stages", (2, 3, 4), False, "tiles of keys in shared memory", 2),
    split.SPLIT,
    split.SPLIT_KV,
)  # fmt: skip
# Rows and warps of a block, and warps with the same rows, that level 0 chooses from; keys of a stage, and stages.
SIZES = ((64, 8, 4), (32, 8, 4), (32, 4, 2), (16, 4, 4), (16, 2, 2))
KEYS = ((64, 2), (32, 3), (32, 2), (16, 2))
KEYS_OF_MMA = 8  # that a warp has of a tile
# What a thread has beside sums and scores: fragments, greatest scores and totals of rows, addresses, counters; and more
# of each piece of 16 rows, and of each copy of a turn, in which 8 rows are copied. Fitted so that kernels do not spill:
# of 56 near the limit (ptxas 13.2, sm_80 and sm_90a, pages of 1 and 64) they reject the 4 that spilled and 12 others.
OVERHEAD_REGISTERS, PIECE_REGISTERS, COPY_REGISTERS = 104, 1, 2
# Of 128 threads that have two pieces each and leave partial sums: of 72 kernels near the limit (ptxas 13.2, sm_90a) two
# spilled, those of pages of 16 and 64, at 250.
PARTIAL_REGISTERS = 6
ROWS_OF_TURN = 8
EXCHANGED_BYTES, NUMBER_BYTES = 4, 4


def row_groups(t: Mapping[str, Any]) -> int:
    """Warps with other rows."""
    return int(t["warps"]) // int(t["warps_vo"])


def pieces(t: Mapping[str, Any]) -> int:
    """Of 16 rows, of a warp."""
    return int(t["tile_q"]) // (PIECE * row_groups(t))


def shared_bytes(t: Mapping[str, Any]) -> int:
    """Dynamic shared memory of a block, as `shared_bytes` in block.cuh."""
    tile_q, tile_kv, stages = int(t["tile_q"]), int(t["tile_kv"]), int(t["stages"])
    of_tiles = ELEMENT_BYTES * HEAD_DIM * (tile_q + stages * tile_kv)
    of_weights = ELEMENT_BYTES * tile_q * tile_kv
    return of_tiles + of_weights + EXCHANGED_BYTES * int(t["warps_vo"]) * tile_q + NUMBER_BYTES * stages * tile_kv


def registers(t: Mapping[str, Any]) -> int:
    """An estimate of a thread's."""
    of_piece = (HEAD_DIM_CKV + int(t["tile_kv"])) // int(t["warps_vo"]) // 2 + PIECE_REGISTERS
    copies = ROWS_OF_TURN * HEAD_DIM_CKV // (VECTOR * threads(t))
    partial = PARTIAL_REGISTERS if split.splits(t) and pieces(t) == 2 and threads(t) == 128 else 0
    return pieces(t) * of_piece + COPY_REGISTERS * copies + partial + OVERHEAD_REGISTERS


def blocks(p: MlaProblem, t: Mapping[str, Any]) -> int:
    """Of `run`, for each split. Where the queries of a sequence begin, the device alone can see: there are as many as
    its sequences can need, wherever they begin."""
    tile_q = int(t["tile_q"])
    return p.rows // tile_q + p.batch if p.ragged else p.batch * -(-p.heads_q // tile_q)


def workspace_bytes(p: MlaProblem, t: Mapping[str, Any]) -> int:
    """Exactly what `workspace_bytes` in kernel.cuh says: sums of each row and split, its greatest and its total."""
    return 4 * split.parts(t) * p.rows * (HEAD_DIM_CKV + 2) if split.splits(t) else 0


def rules(p: MlaProblem, schedule: Schedule, target: Target, workspace_limit: int | None = None) -> Accepted | Rejected:
    """Whether a schedule can work and is worth compiling."""
    t = schedule.as_dict()
    tile_q, tile_kv = int(t["tile_q"]), int(t["tile_kv"])
    if target.capability < AMPERE:
        return Rejected("mma", f"mma.sync m16n8k16 and cp.async need sm_{AMPERE}; the target is {target.name}")
    if broken := _division(t) or _resources(t, target):
        return broken
    if tile_q > PIECE and tile_q >= 2 * power_of_two(p.seq_q * p.heads_q):
        return Rejected("tile_q", f"{tile_q} rows of a block are mostly padding for {p.seq_q} x {p.heads_q}")
    if tile_kv > PIECE and tile_kv >= 2 * power_of_two(p.seq_kv):
        return Rejected("tile_kv", f"{tile_kv} keys of a tile are mostly padding for {p.seq_kv}")
    if broken := split.rules_of(t, blocks(p, t), most_tiles(p, tile_q, tile_kv), target):
        return broken
    own = -(-most_tiles(p, tile_q, tile_kv) // split.parts(t))
    if int(t["stages"]) > max(2, own):
        return Rejected("stages", f"{t['stages']} stages for {own} tiles of keys")
    return check_workspace(workspace_bytes(p, t), workspace_limit) or ACCEPTED


def _division(t: Mapping[str, Any]) -> Rejected | None:
    """Among the warps of a block."""
    warps, parts = int(t["warps"]), int(t["warps_vo"])
    if warps % parts:
        return Rejected("warps", f"{warps} warps are no multiple of warps_vo = {parts}")
    if int(t["tile_q"]) % (PIECE * row_groups(t)):
        groups = row_groups(t)
        return Rejected("warps", f"{t['tile_q']} rows for {groups} groups of warps are no multiple of {PIECE} each")
    if int(t["tile_kv"]) % (KEYS_OF_MMA * parts):
        return Rejected("warps_vo", f"{t['tile_kv']} keys for {parts} warps are no multiple of {KEYS_OF_MMA} each")
    return None


def _resources(t: Mapping[str, Any], target: Target) -> Rejected | None:
    needed, limit = registers(t), min(target.registers_per_thread, target.registers_per_sm // threads(t))
    if needed > limit:
        parts = int(t["warps_vo"])
        return Rejected(
            "registers",
            f"about {needed} registers per thread ({pieces(t)} x ({HEAD_DIM_CKV // parts // 2} of out, "
            f"{int(t['tile_kv']) // parts // 2} of scores) and what a warp keeps beside); {limit} are there",
        )
    shared = shared_bytes(t)
    if shared > target.shared_per_block:
        return Rejected(
            "shared_memory",
            f"{shared} bytes of shared memory ({t['tile_q']} rows and {t['stages']} x {t['tile_kv']} keys of "
            f"{HEAD_DIM} elements, and weights); {target.name} has {target.shared_per_block} per block",
        )
    return None


def space(p: MlaProblem, target: Target, search: Search) -> SearchSpace:
    """The schedules of a search; raises InvalidSearch."""
    default = first_accepted(_preferred(p, target), lambda schedule: rules(p, schedule, target))
    small, full = _splits(p, target, default)
    return build_space(search, TUNABLES, {1: _small(p, default), 2: _full()}, default, {1: small, 2: full}, full)


def _splits(p: MlaProblem, target: Target, default: Schedule) -> tuple[Linked, Linked]:
    """Of levels 1 and 2: also those of four times as many blocks, which even out what multiprocessors have to do."""
    t = default.as_dict()
    small = (1, split.parts(t), *_useful_splits(p, t, target), *_useful_splits(p, t, target, rounds=4))
    tiles = most_tiles(p, PIECE, PIECE)
    return split.linked(small), split.linked((*small, *(count for count in split.SPLITS if count <= tiles)))


def _useful_splits(p: MlaProblem, t: Mapping[str, Any], target: Target, rounds: int = 1) -> tuple[int, ...]:
    """The best guess first, for `rounds` times as many blocks as fill the device."""
    tiles = most_tiles(p, int(t["tile_q"]), int(t["tile_kv"]))
    return split.useful(tiles, max(1, blocks(p, t) // rounds), int(t["warps"]), target)


def _preferred(p: MlaProblem, target: Target) -> Iterator[Schedule]:
    """Best guess first: many rows of a block, which read keys once for all of them, as long as every multiprocessor has
    a block; then long tiles of keys."""
    rows = p.seq_q * p.heads_q
    sizes = [size for size in SIZES if size[0] < 2 * power_of_two(rows) or size[0] == PIECE]
    sizes.sort(key=lambda size: blocks(p, {"tile_q": size[0]}) < target.sm_count and size[0] > p.heads_q)
    keys = [size for size in KEYS if size[0] < 2 * power_of_two(p.seq_kv) or size[0] == PIECE]
    for (tile_q, warps, warps_vo), (tile_kv, stages) in product(sizes, keys):
        t: dict[str, Value] = {
            "tile_q": tile_q, "tile_kv": tile_kv, "warps": warps, "warps_vo": warps_vo, "stages": stages,
        }  # fmt: skip
        for count in (*_useful_splits(p, t, target)[:1], 1):
            where, parts = split.way(count)
            yield completed({**t, "split": where, "split_kv": parts}, TUNABLES)


def _small(p: MlaProblem, default: Schedule) -> dict[str, tuple[Value, ...]]:
    rows = p.seq_q * p.heads_q
    lists = {
        "tile_q": tuple(tile for tile in (16, 32, 64) if tile < 2 * power_of_two(rows)),
        "tile_kv": tuple(tile for tile in (32, 64) if tile < 2 * power_of_two(p.seq_kv)),
        "warps": (4, 8), "warps_vo": (2, 4), "stages": (2, 3),
    }  # fmt: skip
    return {name: tuple(sorted({*values, int(default.get(name))})) for name, values in lists.items()}


def _full() -> dict[str, tuple[Value, ...]]:
    own = (tunable for tunable in TUNABLES if tunable not in (split.SPLIT, split.SPLIT_KV))
    return {tunable.name: tuple(tunable.allowed) for tunable in own}
