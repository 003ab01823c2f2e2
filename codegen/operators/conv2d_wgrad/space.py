"""How many slices of the output pixels searches try. Sums are long and dw is small, so its tiles alone leave most of a
device idle: of 256 images of 112 x 112 pixels sums have 3.2 million products, where dw may be a single tile."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem
from codegen.operators.convolution import implicit
from codegen.operators.matmul import grid, split
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search.joined_space import Kind
from codegen.search.rules import Accepted, Rejected, check
from codegen.search.schedule import Schedule
from codegen.targets import Target

# Of every level, beside 1 (Apache TVM pull request 10185 settled on these).
ALWAYS = (4, 8, 16, 32, 64)
# Steps that a slice has, or its pipeline never fills.
LEAST_STEPS = 3
# Blocks of the first guess for each multiprocessor, where slices of so many steps allow.
FILLED = 0.9


def fill(blocks: int, wanted: int, most: int) -> tuple[int, ...]:
    """Powers of two beyond ALWAYS with which so many `blocks` become `wanted`, up to the first that does or `most`."""
    counts, count = [], ALWAYS[-1]
    while count * blocks < wanted and 2 * count <= min(split.MOST_SLICES, most):
        count *= 2
        counts.append(count)
    return tuple(counts)


def level_slices(more: Iterable[int]) -> tuple[int, ...]:
    """Those of every level and `more`, in ascending order."""
    return tuple(sorted({*ALWAYS, *more}))


def product_kind(as_matmul: MatmulProblem, aligned: tuple[int, int], target: Target) -> Kind:
    """What searches try of `implicit_gemm`."""
    slices = _slices(as_matmul, aligned, target)
    made = implicit.kind(as_matmul, aligned, target, slices)
    has_stream = made.tunables is implicit.TENSOR_TUNABLES
    streams = (target.sm_count, 2 * target.sm_count) if has_stream else ()
    usual = split.linked(split.ways(level_slices(slices), atomic=False), with_stream=has_stream)
    every_way = split.linked(split.ways(level_slices((2, *slices)), streams), with_stream=has_stream)
    return replace(made, linked={1: usual, 2: every_way}, every_way=every_way)


def product_default(
    problem: Conv2dWgradProblem,
    as_matmul: MatmulProblem,
    aligned: tuple[int, int],
    target: Target,
    admit: Callable[[Schedule], Accepted | Rejected],
) -> Schedule:
    """Of `implicit_gemm` the first that breaks no rule: of those that fill the device where there are any."""
    slices, least_blocks = _slices(as_matmul, aligned, target), FILLED * target.sm_count

    def fills(schedule: Schedule) -> bool:
        return split.grid_blocks(as_matmul, schedule.as_dict()) >= least_blocks

    def first(admit: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
        return implicit.default(as_matmul, aligned, problem.input_bytes, target, admit, slices)

    filling = first(lambda schedule: check(fills(schedule), "grid", "multiprocessors would idle") or admit(schedule))
    return first(admit) if not fills(filling) or isinstance(admit(filling), Rejected) else filling


def _slices(as_matmul: MatmulProblem, aligned: tuple[int, int], target: Target) -> tuple[int, ...]:
    """Of level 1, in ascending order, those worth a guess: as long as slices have LEAST_STEPS steps, and more than the
    usual ones where level 1's smallest tiles need them to fill the device."""
    small = implicit.kind(as_matmul, aligned, target, ALWAYS).levels[1]
    tile_m, tile_n, tile_k = (int(small[name][0]) for name in ("tile_m", "tile_n", "tile_k"))
    most = grid.k_steps(as_matmul.k, tile_k) // LEAST_STEPS
    every = level_slices(fill(grid.blocks(as_matmul, tile_m, tile_n), target.sm_count, most))
    return tuple(count for count in every if count <= most)
