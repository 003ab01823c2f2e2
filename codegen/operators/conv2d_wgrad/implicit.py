"""The gradient of the filters as an implicit product: matmul's kernels with an operand gathered from the image."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from codegen.operator import Cost, Work
from codegen.operators.conv2d.direct import LARGEST_INDEX
from codegen.operators.conv2d.implicit import (
    SIMT_TUNABLES,
    TENSOR_TUNABLES,
    default_of_product,
    lists_of_product,
    product_registers,
    register_rule,
    threads,
    work_of_product,
)
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem
from codegen.operators.conv2d_wgrad.product import aligns, product
from codegen.operators.conv2d_wgrad.slices import ALWAYS, fill, level_slices
from codegen.operators.convolution import matmul_tunables
from codegen.operators.matmul import (
    grid,
    simt_rules,
    simt_space,
    split,
    tensor_rules,
    tensor_space,
)
from codegen.operators.matmul.kernel_family import is_tensor, on_tensor_cores
from codegen.search.joined_space import Kind
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import Tunable
from codegen.targets import Target

Lists = dict[str, tuple[Value, ...]]

# Registers of a thread's place in the image and of what moves it, and of dy's where its images are apart; estimates.
PLACE_REGISTERS, APART_REGISTERS = 14, 4
# Instructions for a gathered vector beside those of a copy: the place moves on, two checks, its address.
GATHER_INSTRUCTIONS = 14
# Steps that a slice has, or its pipeline never fills.
LEAST_STEPS = 3
# Blocks of the first guess for each multiprocessor, where slices of so many steps allow.
FILLED = 0.9
# Rows or columns of a padded image that are counted, as `longest_axis` in kernel.cuh.
LONGEST_AXIS = 2**28


def tunables(problem: Conv2dWgradProblem, target: Target) -> tuple[Tunable, ...]:
    """Those of the kernel that computes the product on the target."""
    return TENSOR_TUNABLES if on_tensor_cores(product(problem), target) else SIMT_TUNABLES


def kind(problem: Conv2dWgradProblem, target: Target, search: Search) -> Kind:
    """What searches try."""
    slices, own = _slices(problem, target), tunables(problem, target)
    lists = lists_of_product(_lists(problem, target, slices))
    has_stream = own is TENSOR_TUNABLES
    streams = (target.sm_count, 2 * target.sm_count) if has_stream else ()
    usual = split.linked(split.ways(level_slices(slices), atomic=False), with_stream=has_stream)
    every_way = split.linked(split.ways(level_slices((2, *slices)), streams), with_stream=has_stream)
    named = not set(every_way.names).isdisjoint(search.tunables or ())
    return Kind(own, lists, {1: every_way if named else usual, 2: every_way})


def default(problem: Conv2dWgradProblem, target: Target, admit: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
    """Level 1's first schedule that breaks no rule, in matmul's order of preference: of those that fill the device
    where there are any."""
    as_matmul, slices = product(problem), _slices(problem, target)

    def first(least_blocks: float) -> Schedule:
        def admit_filling(schedule: Schedule) -> Accepted | Rejected:
            blocks = split.grid_blocks(as_matmul, schedule.as_dict())
            return check(blocks >= least_blocks, "grid", "multiprocessors would idle") or admit(schedule)

        return default_of_product(as_matmul, aligns(problem)[:2], problem.input_bytes, target, admit_filling, slices)

    filling = first(FILLED * target.sm_count)
    idle = split.grid_blocks(as_matmul, filling.as_dict()) < FILLED * target.sm_count
    return first(0) if idle or isinstance(admit(filling), Rejected) else filling


def _lists(problem: Conv2dWgradProblem, target: Target, slices: tuple[int, ...]) -> dict[int, Lists]:
    """Matmul's value lists of levels 1 and 2."""
    as_matmul = product(problem)
    if on_tensor_cores(as_matmul, target):
        levels = tensor_space.levels(as_matmul, target, aligns(problem)[:2], slices)
    else:
        levels = simt_space.levels(as_matmul, target, slices)
    return {level: values for level, (values, _) in levels.items()}


def _slices(problem: Conv2dWgradProblem, target: Target) -> tuple[int, ...]:
    """Of level 1, in ascending order, those worth a guess: as long as slices have LEAST_STEPS steps, and more than the
    usual ones where level 1's smallest tiles need them to fill the device."""
    small = _lists(problem, target, ALWAYS)[1]
    tile_m, tile_n, tile_k = (int(small[name][0]) for name in ("tile_m", "tile_n", "tile_k"))
    most = grid.k_steps(problem.pixels, tile_k) // LEAST_STEPS
    every = level_slices(fill(grid.blocks(product(problem), tile_m, tile_n), target.sm_count, most))
    return tuple(count for count in every if count <= most)


def rules(
    problem: Conv2dWgradProblem, schedule: Schedule, target: Target, workspace_limit: int | None
) -> Accepted | Rejected:
    """Matmul's rules for the product, and those of the gather. Every static_assert of gather.cuh is a rule here."""
    t, as_matmul = matmul_tunables(schedule.as_dict()), product(problem)
    if problem.depthwise:
        return Rejected(
            "algorithm", f"{problem.groups} products with one row each are mostly padding: direct computes them"
        )
    if not problem.pointwise and (broken := _gather_rule(problem, t)):
        return broken
    admit = tensor_rules.rules if is_tensor(t) else simt_rules.rules
    outcome = admit(as_matmul, aligns(problem)[:2], Schedule.of(t), target, workspace_limit)
    if isinstance(outcome, Rejected) or problem.pointwise:
        return outcome
    return _register_rule(problem, t, target) or ACCEPTED


def _gather_rule(problem: Conv2dWgradProblem, t: Mapping[str, Any]) -> Rejected | None:
    count, (dy, x, _) = threads(t), aligns(problem)
    taps, pixels = max(1, t["tile_n"] // x), max(1, t["tile_k"] // dy)
    return check(
        count % taps == 0,
        "gather",
        f"{count} threads for {taps} vectors of taps: each thread needs one tap at all its pixels",
    ) or check(
        problem.channels_last or count % pixels == 0,
        "gather",
        f"{count} threads for {pixels} vectors of dy's pixels: each thread needs the same pixels of all its filters",
    )


def _register_rule(problem: Conv2dWgradProblem, t: Mapping[str, Any], target: Target) -> Rejected | None:
    alone = product_registers(t, tensor_rules.Stored.of(product(problem), aligns(problem)[:2]))
    return register_rule(registers(problem.channels_last, alone), t, target)


def index_rule(problem: Conv2dWgradProblem) -> Rejected | None:
    """What a kernel reaches and counts with 32 bits, as `is_reached` in kernel.cuh."""
    p = problem
    rows, columns = p.padded
    elements, longest = rows * columns * p.n * p.c, max(rows, columns)
    return check(
        elements <= LARGEST_INDEX,
        "index",
        f"the images have {elements} elements with their padding; 32 bits reach {LARGEST_INDEX}",
    ) or check(
        longest <= LONGEST_AXIS,
        "index",
        f"an axis of the image has {longest} elements with its padding; {LONGEST_AXIS} are counted",
    )


def registers(channels_last: bool, of_product_alone: int) -> int:
    """An estimate of a thread's registers where the image is gathered."""
    return of_product_alone + PLACE_REGISTERS + (0 if channels_last else APART_REGISTERS)


def work(problem: Conv2dWgradProblem, schedule: Schedule, least: Cost, target: Target) -> Work:
    """Matmul's counts for the product: every tap comes from L2, the image from DRAM once."""
    aligned, per_access = aligns(problem), 0 if problem.pointwise else GATHER_INSTRUCTIONS
    inputs, x = problem.input_bytes, aligned[1]
    return work_of_product(product(problem), schedule, aligned, least, target, inputs, per_access, x)
