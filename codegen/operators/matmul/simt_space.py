"""Tunables of the kernel on the CUDA cores and the value lists of its search levels."""

from collections.abc import Iterator
from itertools import product

from codegen.alignment import power_of_two
from codegen.operators.matmul.grid import RASTER, blocks
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.split import SLICES, SPLIT, SPLIT_K, linked, useful_slices, ways
from codegen.search.joined_space import Kind
from codegen.search.schedule import Schedule, Value
from codegen.search.space import Linked, Tunable
from codegen.targets import Target

TUNABLES = (
    Tunable("tile_m", (16, 32, 64, 128, 256), False, "rows of the output that a block computes", 64),
    Tunable("tile_n", (16, 32, 64, 128, 256), False, "columns of the output that a block computes", 64),
    Tunable("tile_k", (8, 16, 32), False, "depth of the tiles that are brought to shared memory at once", 32),
    Tunable("thread_m", (1, 2, 4, 8, 16), False, "rows of the output that a thread computes", 4),
    Tunable("thread_n", (1, 2, 4, 8, 16), False, "columns of the output that a thread computes", 4),
    Tunable("warp_m", (1, 2, 4, 8, 16, 32), False, "threads of a warp along m; the other factor of 32 is along n", 4),
    Tunable("stages", (1, 2), False, "tiles in shared memory: 2 lets the next be written while one is read", 2),
    Tunable("fragments", (1, 2), False, "register buffers for a row of the tiles: 2 reads ahead", 2),
    Tunable("padding", (0, 4), False, "floats between the rows of a shared tile, against bank conflicts", 0),
    Tunable("unroll_k", (1, 2, 4, 8, 16, 32), False, "steps along k that are unrolled", 8),
    Tunable("min_blocks", (1, 2), False, "resident blocks that registers must allow for", 1, constant=False),
    SPLIT,
    RASTER,
    SPLIT_K,
)

Lists = dict[str, tuple[Value, ...]]
EVERY_WAY = linked(ways(SLICES), with_stream=False)


def levels(
    problem: MatmulProblem, target: Target, slices: tuple[int, ...] | None = None
) -> dict[int, tuple[Lists, Linked]]:
    """Level 1 (about a hundred schedules of a large problem) and level 2 (thousands); 1 is inside 2.

    Slices of k are in them where level 1's smallest tiles leave multiprocessors idle and k is long, or those given.
    """
    cap = 128
    # Tiles that leave multiprocessors idle lose to smaller ones, whatever their arithmetic is worth.
    while not slices and cap > 32 and blocks(problem, cap // 2, cap // 2) < target.sm_count:
        cap //= 2
    tiles_m, tiles_n = _two_tiles(problem.m, cap), _two_tiles(problem.n, cap)
    if slices is None:
        smallest, largest = (tiles_m[0], tiles_n[0]), (tiles_m[-1], tiles_n[-1])
        slices = useful_slices(problem, smallest, largest, 16, target.sm_count)
    small: Lists = {
        "tile_m": tiles_m,
        "tile_n": tiles_n,
        "tile_k": (16,) if slices else (8, 16),
        "thread_m": (2, 4) if tiles_m[-1] <= 32 else (4, 8),
        "thread_n": (2, 4) if tiles_n[-1] <= 32 else (4, 8),
        "warp_m": (4, 8),
        "stages": (1, 2) if problem.k <= 16 else (2,),
        "fragments": (2,) if slices else (1, 2),
        "padding": (_padding(problem),),
        "unroll_k": (8,),
        "min_blocks": (1,),
        "raster": (0,),
    }
    full: Lists = {
        "tile_m": (16, 32, 64, 128),
        "tile_n": (16, 32, 64, 128),
        "tile_k": (8, 16, 32),
        "thread_m": (2, 4, 8),
        "thread_n": (2, 4, 8),
        "warp_m": (4, 8),
        "stages": (1, 2),
        "fragments": (1, 2),
        "padding": small["padding"] if slices else (0, 4),
        "unroll_k": (8,),
        "min_blocks": (1,) if slices else (1, 2),
        "raster": (0,) if slices else (0, 8),
    }
    every = EVERY_WAY if slices else linked(ways(()), with_stream=False)
    return {1: (small, linked(ways(slices, atomic=False), with_stream=False)), 2: (full, every)}


def kind(problem: MatmulProblem, target: Target, slices: tuple[int, ...] | None) -> Kind:
    made = levels(problem, target, slices)
    lists = {level: values for level, (values, _) in made.items()}
    return Kind(TUNABLES, lists, {level: division for level, (_, division) in made.items()}, EVERY_WAY)


def schedules(problem: MatmulProblem, target: Target, slices: tuple[int, ...] | None) -> Iterator[Schedule]:
    """Level 1 in order of preference."""
    lists, division = levels(problem, target, slices)[1]
    return map(Schedule.of, preferred(problem, target, lists, division, slices[-1] if slices else 1))


def preferred(
    problem: MatmulProblem, target: Target, lists: Lists, division: Linked, most: int
) -> Iterator[dict[str, Value]]:
    """Level 1, best guess first: tiles as large as still fill the device in `most` slices of k, then as many outputs
    per thread as fit. Where none fills it, the smallest tiles. Slices are as few as fill it.
    """
    pairs = [(int(tile_m), int(tile_n)) for tile_m, tile_n in product(lists["tile_m"], lists["tile_n"])]
    fills = [pair for pair in pairs if most * blocks(problem, *pair) >= 2 * target.sm_count]
    by_size = sorted(pairs, key=lambda pair: pair[0] * pair[1])
    tiles = [pair for pair in reversed(by_size) if pair in fills] + [pair for pair in by_size if pair not in fills]
    rest = ("thread_m", "thread_n", "tile_k", "warp_m", "fragments", "stages", "padding", "unroll_k", "min_blocks")
    choices = [tuple(reversed(lists[name])) if name != "warp_m" else lists[name] for name in rest]
    counts = [int(count) for count in division.lists["split_k"]]
    for pair, values in product(tiles, list(product(*choices))):
        enough = next((count for count in counts if count * blocks(problem, *pair) >= target.sm_count), counts[-1])
        for slices in (enough, 1) if enough > 1 else (1,):
            yield {
                "tile_m": pair[0], "tile_n": pair[1], "raster": 0, "split_k": slices,
                "split": "none" if slices == 1 else "workspace", **dict(zip(rest, values, strict=True)),
            }  # fmt: skip


def _two_tiles(extent: int, cap: int) -> tuple[int, ...]:
    largest = min(cap, max(16, power_of_two(extent)))
    return (largest,) if largest == 16 else (largest // 2, largest)


def _padding(problem: MatmulProblem) -> int:
    # An operand whose stored rows run along k is turned on its way to shared memory: 32 threads then write one column,
    # and without padding those are words of few banks.
    return 4 if not problem.a_transposed or problem.b_transposed else 0
