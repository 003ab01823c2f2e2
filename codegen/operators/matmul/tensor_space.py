"""Tunables of the tensor-core kernel and the value lists of its search levels."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from codegen.alignment import power_of_two
from codegen.dtypes import dtype
from codegen.operators.matmul.grid import RASTER, blocks, k_steps
from codegen.operators.matmul.kernel_family import AMPERE, Stored, mma_type
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.split import (
    ENOUGH_BLOCKS,
    LEAST_STEPS,
    MOST_SLICES,
    SLICES,
    SPLIT_K,
    SPLIT_OR_STREAM,
    STREAM_BLOCKS,
    Way,
    linked,
    sum_bytes,
    useful_slices,
    ways,
)
from codegen.operators.matmul.tensor import (
    LARGEST_STATIC_K,
    LEAST_COPY_BYTES,
    MMA_K,
    STEP_BYTES,
    registers,
    shared_bytes,
    threads,
    warp_tile,
)
from codegen.operators.matmul.traffic import L2_SHARE, input_bytes
from codegen.search.joined_space import Kind
from codegen.search.schedule import Schedule, Value
from codegen.search.space import Linked, Tunable, union
from codegen.targets import Target

TUNABLES = (
    Tunable("tile_m", (16, 32, 64, 128, 256), False, "rows of the output that a block computes", 64),
    Tunable("tile_n", (16, 32, 64, 128, 256), False, "columns of the output that a block computes", 64),
    Tunable("tile_k", (8, 16, 32, 64, 128), False, "depth of the tiles in shared memory: 32, 64 or 128 bytes", 32),
    Tunable("warps_m", (1, 2, 4, 8), False, "warps that share a block's rows", 2),
    Tunable("warps_n", (1, 2, 4, 8), False, "warps that share a block's columns", 2),
    Tunable("stages", tuple(range(1, 9)), False, "tiles in shared memory: all but one are on their way", 2),
    Tunable("fragments", (1, 2), False, "register buffers for a k-step of the tiles: 2 read ahead", 2),
    Tunable(
        "mma_k", (8, 16, 32), False,
        "k of the mma.sync instruction: float16 8 or 16 (16 from sm_80), bfloat16 16, tf32 8, int8 32", 16,
    ),
    Tunable("copy", ("cp_async", "registers"), False, "how tiles get from global to shared memory", "cp_async"),
    Tunable(
        "epilogue_path", ("direct", "shared"), False,
        "outputs straight from the accumulators, or by way of shared memory in whole rows", "shared",
    ),
    Tunable(
        "static_k", range(LARGEST_STATIC_K + 1), False,
        "k as a constant of the code: 0 (any k at run time) or the problem's own", 0,
    ),
    Tunable("min_blocks", (1, 2, 3, 4), False, "resident blocks that registers must allow for", 1, constant=False),
    Tunable(
        "maxnreg", (0, 64, 96, 128, 168, 192, 224, 255), False, "registers of a thread at most; 0: not said",
        0, constant=False,
    ),
    SPLIT_OR_STREAM,
    RASTER,
    SPLIT_K,
    STREAM_BLOCKS,
)  # fmt: skip

Lists = dict[str, tuple[Value, ...]]

# Tiles up to this are for problems that stream one operand past a few rows or columns of the other.
NARROW = 32
# From this length on, slices of k are cheaper than tiles that are too small.
LONG_K = 2048
# Of tiles that are loaded element by element: k, and the largest size. A thread carries every element in a register of
# its own, and its address perhaps in another.
SCATTERED_K, LARGEST_SCATTERED = 32, 128
# Steps of a slice, at least, where a step's loads cannot begin before the last one's have come.
LEAST_CARRIED_STEPS = 1
# Up to this length a loop of constant length pays: its few steps are unrolled and its checks vanish.
SHORT_K = 256
# Of `_clocks`: what a multiprocessor gets from L2 (5,120 bytes per clock for the 108 of an A100, by its white paper),
# and assumptions of a block's start and end and of a second launch.
L2_BYTES_PER_CLOCK = 47.0
BLOCK_CLOCKS = 300.0
LAUNCH_US = 2.0


@dataclass(frozen=True)
class Tiles:
    """Sizes of tiles worth trying along m and n, and how many blocks a launch should have."""

    m: tuple[int, ...]
    n: tuple[int, ...]
    wanted_blocks: int

    @property
    def narrow_m(self) -> bool:
        return self.m[-1] <= NARROW

    @property
    def narrow_n(self) -> bool:
        return self.n[-1] <= NARROW


def kind(problem: MatmulProblem, target: Target, aligns: tuple[int, int], slices: tuple[int, ...] | None) -> Kind:
    """Level 1 (some dozens of schedules, the usual ones) and level 2 (thousands); 1 is inside 2.

    `aligns` are elements per access of A and B, `slices` those of k that level 1 tries; None: the few that seem useful.
    """
    small, division = _small(problem, target, aligns, slices)
    full = _full(problem, target, small, aligns)
    both = {name: union(full.get(name, ()), values) for name, values in small.items()}
    usual = linked(division, with_stream=True)
    every = every_way(target, _most_slices(problem, target, both))
    return Kind(TUNABLES, {1: small, 2: both}, {1: usual, 2: every}, every_way(target))


def every_way(target: Target, most_slices: int = MOST_SLICES) -> Linked:
    """Level 2's divisions of k. Stream-K has one or two blocks on each multiprocessor."""
    slices = [count for count in SLICES if count <= most_slices]
    return linked(ways(slices, (target.sm_count, 2 * target.sm_count)), with_stream=True)


def _most_slices(problem: MatmulProblem, target: Target, lists: Lists) -> int:
    """More than this are of no use even to the largest tiles: the rules would reject them one by one."""
    return ENOUGH_BLOCKS * target.sm_count // blocks(problem, int(lists["tile_m"][-1]), int(lists["tile_n"][-1]))


def tiles(problem: MatmulProblem, target: Target) -> Tiles:
    """Large tiles move fewer bytes per product; but they must be enough to keep every multiprocessor busy."""
    device = target.sm_count
    most_m, most_n = max(16, power_of_two(problem.m)), max(16, power_of_two(problem.n))
    if min(most_m, most_n) <= NARROW:
        # Bound by DRAM: several blocks per multiprocessor have more loads in flight.
        wanted = 2 * device
        few = blocks(problem, min(64, most_m), min(64, most_n)) < wanted and problem.k >= LONG_K
        sizes = (64, 128) if few else (32, 64, 128)
        if most_m <= most_n:
            return Tiles((most_m,), _up_to(most_n, sizes), wanted)
        return Tiles(_up_to(most_m, sizes), (most_n,), wanted)
    if blocks(problem, min(128, most_m), min(256, most_n)) >= 0.75 * device:
        return Tiles(_up_to(most_m, (64, 128)), _up_to(most_n, (64, 128, 256)), device)
    medium = Tiles(_up_to(most_m, (64, 128)), _up_to(most_n, (64, 128)), 2 * device)
    if problem.k >= LONG_K and blocks(problem, medium.m[0], medium.n[0]) < medium.wanted_blocks:
        return medium
    if blocks(problem, medium.m[0], medium.n[0]) >= device:
        return Tiles(_up_to(most_m, (32, 64, 128)), medium.n, device)
    return Tiles(_up_to(most_m, (32, 64)), _up_to(most_n, (32, 64)), device)


def _small(
    problem: MatmulProblem, target: Target, aligns: tuple[int, int], slices: tuple[int, ...] | None
) -> tuple[Lists, tuple[Way, ...]]:
    """Level 1: its lists, and how it divides k."""
    size, k = dtype(problem.dtype).bytes, problem.k
    sizes = tiles(problem, target)
    narrow = sizes.narrow_m or sizes.narrow_n
    asynchronous = _asynchronous(problem, target, size, aligns)
    # Whether elements of an operand are loaded one by one although a register holds several.
    scattered = _scattered(size, aligns)
    if slices is None:
        smallest, largest = (sizes.m[0], sizes.n[0]), (sizes.m[-1], sizes.n[-1])
        least_steps = LEAST_CARRIED_STEPS if scattered else LEAST_STEPS
        slices = useful_slices(problem, smallest, largest, 128 // size, sizes.wanted_blocks, least_steps)
    deep = [SCATTERED_K] if scattered else [count // size for count in ((128,) if slices else (64, 128))]
    depths = tuple(depth for depth in deep if depth <= max(power_of_two(k), 64 // size)) or (64 // size,)
    steps = k_steps(k, depths[0])
    wanted_stages = _stages(k, narrow, asynchronous)
    large_inputs = input_bytes(problem) > L2_SHARE * target.l2_bytes
    along = (2, 4) if slices else (1, 2, 4)
    band = 8 if problem.m > 8 * sizes.m[-1] else 1
    lists: Lists = {
        "tile_m": sizes.m,
        "tile_n": sizes.n,
        "tile_k": depths,
        "warps_m": (1,) if sizes.narrow_m else along if sizes.narrow_n else (2,),
        "warps_n": (1,) if sizes.narrow_n else along if sizes.narrow_m else (2, 4),
        "stages": tuple(count for count in wanted_stages if count <= steps) or ((2,) if asynchronous else (1,)),
        "fragments": (2,),
        "mma_k": (_mma_k(problem, target),),
        "copy": ("cp_async",) if asynchronous else ("registers",),
        "epilogue_path": ("shared",),
        "static_k": (0, k) if k <= SHORT_K else (0,),
        "min_blocks": (1,),
        "maxnreg": (0,),
        "raster": (0, band) if large_inputs and not narrow else (0,),
    }
    few_outputs = sizes.narrow_m and sizes.narrow_n
    if few_outputs:
        lists |= {"warps_m": _many_warps(sizes.m), "warps_n": _many_warps(sizes.n)}
    if scattered:
        lists |= _carried(sizes, size)
        return lists, ways(slices, (target.sm_count,), atomic=few_outputs)
    return lists, ways(slices, atomic=False)


def _stages(k: int, narrow: bool, asynchronous: bool) -> tuple[int, ...]:
    """Worth trying where k has as many steps."""
    if asynchronous:
        return (3, 4, 6) if narrow else (2, 3, 4) if k <= SHORT_K else (3, 4)
    return 1, 2


def _scattered(size: int, aligns: tuple[int, int]) -> bool:
    """Whether elements of an operand are loaded one by one although a register holds several."""
    return min(aligns) * size < LEAST_COPY_BYTES


def _carried(sizes: Tiles, size: int) -> Lists:
    """Where level 1 differs if tiles of elements of so many bytes are loaded one by one: few of them for each thread,
    and rows of outputs begin anywhere, so that shared memory makes no accesses wide."""
    tiles_m, tiles_n = (_up_to(LARGEST_SCATTERED, along) for along in (sizes.m, sizes.n))
    return {
        "tile_m": tiles_m,
        "tile_n": tiles_n,
        "warps_m": _many_warps(tiles_m),
        "warps_n": _many_warps(tiles_n),
        "fragments": (2 if SCATTERED_K * size > STEP_BYTES else 1,),
        "epilogue_path": ("direct",),
    }


def _many_warps(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The two largest numbers of warps that can share the largest of these tiles, of up to four."""
    return tuple(count for count in (1, 2, 4) if 16 * count <= sizes[-1])[-2:]


def _full(problem: MatmulProblem, target: Target, small: Lists, aligns: tuple[int, int]) -> Lists:
    """What level 2 has beside level 1."""
    size = dtype(problem.dtype).bytes
    scattered = _scattered(size, aligns)
    most_m, most_n = max(16, power_of_two(problem.m)), max(16, power_of_two(problem.n))
    every = (16, 32, 64, 128, 256)
    return {
        "tile_m": _up_to(most_m, every)[-4:],
        "tile_n": _up_to(most_n, every)[-4:],
        "tile_k": tuple(row_bytes // size for row_bytes in ((32, 64, 128) if scattered else (64, 128))),
        "warps_m": (1, 2, 4),
        "warps_n": (1, 2, 4),
        "stages": (2, 3, 4) if small["copy"] == ("cp_async",) else (1, 2),
        "fragments": (1, 2),
        "epilogue_path": ("direct", "shared"),
        "maxnreg": (0, 128),
    }


def _asynchronous(problem: MatmulProblem, target: Target, size: int, aligns: tuple[int, int]) -> bool:
    """Whether cp.async can bring both operands' tiles."""
    turned = size == 1 and problem.layout != "nt"
    return target.capability >= AMPERE and min(aligns) * size >= LEAST_COPY_BYTES and not turned


def _mma_k(problem: MatmulProblem, target: Target) -> int:
    """The longest k that the target has; where it has none, the longest of all, which the rules then refuse."""
    by_k = MMA_K[problem.dtype]
    return max((mma_k for mma_k, least in by_k.items() if target.capability >= least), default=max(by_k))


def preferred(
    problem: MatmulProblem,
    target: Target,
    aligns: tuple[int, int],
    stored_bytes: float | None,
    slices: tuple[int, ...] | None,
) -> Iterator[Schedule]:
    """Level 1, best guess first: the tiles and slices by `_clocks`, then by `_rank` within them."""
    lists, division = _small(problem, target, aligns, slices)
    stored = input_bytes(problem) if stored_bytes is None else stored_bytes
    grids = sorted(
        product(lists["tile_m"], lists["tile_n"], division),
        key=lambda grid: _clocks(problem, target, int(grid[0]), int(grid[1]), grid[2][1], stored),
    )
    rest = [name for name in lists if name not in ("tile_m", "tile_n")]
    choices = [dict(zip(rest, values, strict=True)) for values in product(*(lists[name] for name in rest))]
    for tile_m, tile_n, (split, count, stream) in grids:
        chosen: dict[str, Value] = {
            "tile_m": tile_m, "tile_n": tile_n, "split": split, "split_k": count, "stream_blocks": stream,
        }  # fmt: skip
        ranked = sorted(({**chosen, **choice} for choice in choices), key=lambda t: _rank(problem, target, aligns, t))
        yield from map(Schedule.of, ranked)


def _clocks(problem: MatmulProblem, target: Target, tile_m: int, tile_n: int, slices: int, stored: float) -> float:
    """A rough time: what the fullest multiprocessor computes and loads, what DRAM delivers, what a split adds."""
    size, device = dtype(problem.dtype).bytes, target.sm_count
    grid = blocks(problem, tile_m, tile_n) * slices
    rate = max(1.0, target.mma_macs(mma_type(problem.dtype)))
    products, loads = tile_m * tile_n / rate, (tile_m + tile_n) * size / L2_BYTES_PER_CLOCK
    per_k = max(products, loads) + 0.25 * min(products, loads)  # the two overlap, but never quite
    busy = -(-grid // device) * (-(-problem.k // slices) * per_k + BLOCK_CLOCKS)
    # One block per multiprocessor keeps DRAM busy most of the time, two all of it.
    active = min(1.0, grid / device) * min(1.0, 0.75 + 0.125 * grid / device)
    dram = stored / (target.dram_gb_s * 1e3 / target.clock_mhz * active)
    if slices == 1:
        return max(busy, dram)
    partials = 2 * slices * sum_bytes(problem) * problem.batch * problem.m * problem.n
    return max(busy, dram) + LAUNCH_US * target.clock_mhz + partials / (L2_BYTES_PER_CLOCK * device)


def _rank(
    problem: MatmulProblem, target: Target, aligns: tuple[int, int], t: Mapping[str, Any]
) -> tuple[bool, int, int, bool, int, int, int, int]:
    """Lower is better: warps of up to 64 x 64 outputs and four of them if possible, a second block beside the first
    where the grid has one, then deep tiles and many stages, a constant k, and the order with the most hits in L2."""
    (rows, columns), size = warp_tile(t), dtype(problem.dtype).bytes
    count, shared = threads(t), shared_bytes(t, size)
    by_registers = target.registers_per_sm // (count * registers(t, Stored.of(problem, aligns)))
    by_shared = target.shared_per_sm // (shared + target.reserved_shared_bytes)
    grid = blocks(problem, t["tile_m"], t["tile_n"]) * t["split_k"]
    alone = by_shared < min(2, by_registers, -(-grid // target.sm_count))
    return (
        rows * columns > 64 * 64, max(0, 128 - count), -rows * columns, alone,
        -t["tile_k"], -t["stages"], -t["static_k"], -t["raster"],
    )  # fmt: skip


def _up_to(most: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes that are no larger than `most`, which is a power of two."""
    return tuple(size for size in sizes if size <= most) or (most,)
