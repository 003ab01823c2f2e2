"""Matmul's tunables and the value lists of its search levels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from codegen.operators.matmul.problem import MatmulProblem
from codegen.rules import Accepted, Rejected
from codegen.schedule import Schedule, Value
from codegen.search import Tunable
from codegen.targets import Target

TUNABLES = (
    Tunable("tile_m", (16, 32, 64, 128, 256), False, "rows of the output that a block computes"),
    Tunable("tile_n", (16, 32, 64, 128, 256), False, "columns of the output that a block computes"),
    Tunable("tile_k", (8, 16, 32), False, "depth of the tiles that are brought to shared memory at once"),
    Tunable("thread_m", (1, 2, 4, 8, 16), False, "rows of the output that a thread computes"),
    Tunable("thread_n", (1, 2, 4, 8, 16), False, "columns of the output that a thread computes"),
    Tunable("warp_m", (1, 2, 4, 8, 16, 32), False, "threads of a warp along m; the other factor of 32 is along n"),
    Tunable("stages", (1, 2), False, "tiles in shared memory: 2 lets the next be written while one is read"),
    Tunable("fragments", (1, 2), False, "register buffers for a row of the tiles: 2 reads ahead"),
    Tunable("padding", (0, 4), False, "floats between the rows of a shared tile, against bank conflicts"),
    Tunable("unroll_k", (1, 2, 4, 8, 16, 32), False, "steps along k that are unrolled"),
    Tunable("min_blocks", (1, 2), False, "resident blocks that registers must allow for"),
    Tunable("raster", (0, 1, 4, 8), True, "order of the tiles: 0 by rows, 1 by columns, g in bands of g rows"),
)

Lists = dict[str, tuple[Value, ...]]


def power_of_two(extent: int) -> int:
    """The smallest power of two that is not below `extent`."""
    return 1 << max(0, extent - 1).bit_length()


def blocks(problem: MatmulProblem, tile_m: int, tile_n: int) -> int:
    """Thread blocks of a launch."""
    return problem.batch * -(-problem.m // tile_m) * -(-problem.n // tile_n)


def levels(problem: MatmulProblem, target: Target) -> dict[int, Lists]:
    """Value lists of level 1 (about a hundred schedules of a large problem) and level 2 (thousands); 1 is inside 2."""
    cap = 128
    # Tiles that leave multiprocessors idle lose to smaller ones, whatever their arithmetic is worth.
    while cap > 32 and blocks(problem, cap // 2, cap // 2) < target.sm_count:
        cap //= 2
    tiles_m, tiles_n = _two_tiles(problem.m, cap), _two_tiles(problem.n, cap)
    small: Lists = {
        "tile_m": tiles_m,
        "tile_n": tiles_n,
        "tile_k": (8, 16),
        "thread_m": (2, 4) if int(tiles_m[-1]) <= 32 else (4, 8),
        "thread_n": (2, 4) if int(tiles_n[-1]) <= 32 else (4, 8),
        "warp_m": (4, 8),
        "stages": (1, 2) if problem.k <= 16 else (2,),
        "fragments": (1, 2),
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
        "padding": (0, 4),
        "unroll_k": (8,),
        "min_blocks": (1, 2),
        "raster": (0, 8),
    }
    return {1: small, 2: full}


def default(problem: MatmulProblem, target: Target, judge: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
    """The level-0 schedule: the first of level 1 in order of preference that breaks no rule."""
    lists = levels(problem, target)[1]
    attempts = [Schedule.of(values) for values in _preferred(problem, target, lists)]
    return next((schedule for schedule in attempts if isinstance(judge(schedule), Accepted)), attempts[0])


def _preferred(problem: MatmulProblem, target: Target, lists: Lists) -> Iterator[dict[str, Value]]:
    """Level 1, best guess first: tiles as large as still fill the device, then as many outputs per thread as fit."""
    fills = [
        pair
        for pair in product(lists["tile_m"], lists["tile_n"])
        if blocks(problem, int(pair[0]), int(pair[1])) >= 2 * target.sm_count
    ]
    tiles = sorted(product(lists["tile_m"], lists["tile_n"]), key=lambda pair: int(pair[0]) * int(pair[1]))
    tiles = [pair for pair in reversed(tiles) if pair in fills] + [pair for pair in tiles if pair not in fills]
    rest = ("thread_m", "thread_n", "tile_k", "warp_m", "fragments", "stages", "padding", "unroll_k", "min_blocks")
    choices = [tuple(reversed(lists[name])) if name != "warp_m" else lists[name] for name in rest]
    for (tile_m, tile_n), values in product(tiles, list(product(*choices))):
        yield {"tile_m": tile_m, "tile_n": tile_n, "raster": 0, **dict(zip(rest, values, strict=True))}


def _two_tiles(extent: int, cap: int) -> tuple[Value, ...]:
    largest = min(cap, max(16, power_of_two(extent)))
    return (largest,) if largest == 16 else (largest // 2, largest)


def _padding(problem: MatmulProblem) -> int:
    # An operand whose stored rows run along k is turned on its way to shared memory: 32 threads then write one column,
    # and without padding those are words of few banks.
    return 4 if not problem.a_transposed or problem.b_transposed else 0
