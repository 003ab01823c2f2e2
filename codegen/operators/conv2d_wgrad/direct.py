"""The kernel without a product, for filters of one channel: tunables, levels, rules, and what a schedule does to the
machine."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product as combinations
from typing import Any

from codegen.alignment import power_of_two
from codegen.counts import LaunchCounts, Primitive
from codegen.dtypes import dtype
from codegen.operator import Constants, Cost, Work
from codegen.operators.conv2d_wgrad.problem import Conv2dWgradProblem
from codegen.operators.conv2d_wgrad.space import fill, level_slices
from codegen.operators.convolution.direct import filter_rules
from codegen.operators.matmul import counts, grid, split, traffic
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.traffic import node_seconds
from codegen.search.joined_space import Kind
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check_workspace, first_accepted, residency_rules
from codegen.search.schedule import Schedule, Value
from codegen.search.space import Tunable
from codegen.targets import Target

ALGORITHM = Tunable("algorithm", ("direct",), False, "how the gradient is computed", "direct", constant=False)
MOST_ELEMENTS = 25  # of a filter in a thread
THREADS = (64, 128, 256)
TUNABLES: tuple[Tunable, ...] = (
    ALGORITHM,
    Tunable("threads", THREADS, False, "threads of a block", 128),
    Tunable("threads_k", (1, 2, 4, 8, 16, 32, 64), False, "threads of a block along the filters", 1),
    Tunable("filters", (1, 2, 4, 8), False, "neighbouring filters of a thread", 1),
    Tunable("elements", range(1, MOST_ELEMENTS + 1), False, "elements of each of its filters of a thread", 1),
    split.SPLIT,
    split.SPLIT_K,
)
Lists = dict[str, tuple[Value, ...]]

# Elements of a filter that level 1 has in a thread at most.
USUAL_ELEMENTS = 9
# Addresses, loop counters and predicates, places in the image. An estimate.
OVERHEAD_REGISTERS = 52
# Blocks on a multiprocessor: up to so many are worth trying, because only a pixel's loads stall a thread;
# the first guess has fewer, because each slice more is added up again.
MOST_BLOCKS, FIRST_BLOCKS = 4, 1.5
# Of a slice: a few for each thread, or adding up what the threads have is most of the work.
LEAST_PIXELS = 32


def of_product(tunables: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule as matmul's rules of tiles and splits read it: a step has a pixel for each thread."""
    t = tunables
    sizes = {"tile_m": t["threads_k"] * t["filters"], "tile_n": t["elements"], "tile_k": t["threads"] // t["threads_k"]}
    return {**t, **sizes, "raster": 0, "stream_blocks": 0}


def fields(s: Mapping[str, Any], t: Mapping[str, Any], out_align: int) -> Constants:
    """Vectors are of filters, and of their channels where each has its own: with channels first single elements."""
    sizes = of_product(t)
    return {
        "tensor_cores": False,
        "align_a": s["align_dy"] if s["layout"] == "nhwc" else 1,
        "align_b": s["align_x"] if s["depthwise"] else 1,
        "align_c": out_align,
        **{name: sizes[name] for name in ("tile_m", "tile_n", "tile_k", "threads", "threads_k", "filters")},
        "split": split.SPLIT.number(t),
    }


def lanes(tunables: Mapping[str, Any], channels_last: bool) -> int:
    """Threads of a warp with pixels of their own, as `lanes_p` in direct.cuh."""
    threads, threads_k = int(tunables["threads"]), int(tunables["threads_k"])
    return max(1, 32 // threads_k) if channels_last else min(32, threads // threads_k)


def shared_bytes(s: Mapping[str, Any], t: Mapping[str, Any]) -> int:
    """As `shared_bytes` in direct.cuh."""
    t = of_product(t)
    size: int = 4 * (t["tile_k"] // lanes(t, s["layout"] == "nhwc")) * t["tile_m"]
    return size


def registers(s: Mapping[str, Any], t: Mapping[str, Any]) -> int:
    """An estimate of a thread's registers."""
    return int(t["elements"]) * int(t["filters"]) + 2 * int(t["filters"]) + OVERHEAD_REGISTERS


def kind(problem: Conv2dWgradProblem, as_product: MatmulProblem, target: Target) -> Kind:
    """Levels 1 and 2; 1 is inside 2."""
    p = problem
    per_group = p.k if p.depthwise else p.group_filters
    widest = next(count for count in (8, 4, 2, 1) if per_group % count == 0)
    if dtype(p.dtype).bytes == 4 or not p.channels_last:
        widest = min(widest, 4)
    across = power_of_two(-(-p.k // widest))
    most = min(across, 32 if p.channels_last else 2)
    threads_k = tuple(count for count in (1, 2, 4, 8, 16, 32) if count <= most)[-2:]
    elements = -(-p.taps // -(-p.taps // USUAL_ELEMENTS))  # a whole filter, or parts of one size
    wide = THREADS[-1] // threads_k[-1] < 2 * power_of_two(p.pixels)
    small: Lists = {
        "algorithm": ("direct",), "threads": THREADS[1:] if wide else THREADS[:2], "threads_k": threads_k,
        "filters": (widest // 2, widest) if widest > 1 else (1,), "elements": (elements,),
    }  # fmt: skip
    full: Lists = {
        **small, "threads": THREADS, "threads_k": (1, 2, 4, 8, 16, 32, 64), "filters": (1, 2, 4, 8),
        "elements": tuple(sorted({1, 3, elements, min(p.taps, MOST_ELEMENTS)})),
    }  # fmt: skip
    blocks = grid.blocks(as_product, threads_k[-1] * widest, elements)
    slices = level_slices(fill(blocks, MOST_BLOCKS * target.sm_count, p.pixels // LEAST_PIXELS))
    ways = split.linked(split.ways(slices, atomic=False), with_stream=False)
    every = split.linked(split.ways(level_slices((2, *slices))), with_stream=False)
    return Kind(TUNABLES, {1: small, 2: full}, {1: ways, 2: every})


def default(
    problem: Conv2dWgradProblem,
    as_product: MatmulProblem,
    target: Target,
    admit: Callable[[Schedule], Accepted | Rejected],
) -> Schedule:
    """The first that breaks no rule, of level 1 and then of level 2: wide threads first, and about as many slices as
    fill the device. Where all break one, the first of all."""
    tried = kind(problem, as_product, target)
    schedules = (schedule for level in (1, 2) for schedule in _in_order(as_product, tried, target, level))
    return first_accepted(schedules, admit)


def _in_order(as_product: MatmulProblem, tried: Kind, target: Target, level: int) -> Iterator[Schedule]:
    lists, ways = tried.levels[level], (tried.linked or {})[level]
    wide = {**lists, "threads": lists["threads"][::-1], "filters": lists["filters"][::-1]}
    for values in combinations(*wide.values()):
        chosen = dict(zip(lists, values, strict=True))
        t = of_product(chosen)
        alone = grid.blocks(as_product, t["tile_m"], t["tile_n"])

        def lacks(way: tuple[Value, ...], alone: int = alone) -> float:
            return abs(FIRST_BLOCKS * target.sm_count - alone * int(way[1]))

        for way in sorted(ways.choices, key=lacks):
            yield Schedule.of({**chosen, **dict(zip(ways.names, way, strict=True))})


def rules(
    problem: Conv2dWgradProblem,
    as_product: MatmulProblem,
    tunables: Mapping[str, Any],
    target: Target,
    workspace_limit: int | None,
) -> Accepted | Rejected:
    """When a schedule cannot work or is not worth compiling. Every static_assert of direct.cuh is a rule here."""
    p, t, s = problem, of_product(tunables), {"layout": problem.layout}
    if not p.one_channel:
        return Rejected(
            "algorithm", f"direct is for filters of one channel; those of this problem have {p.group_channels}"
        )
    threads, threads_k, filters = int(t["threads"]), int(t["threads_k"]), int(t["filters"])
    elements = int(t["elements"])
    if broken := filter_rules(p, filters, t["tile_m"], one_group=False):
        return broken
    if elements > p.taps:
        return Rejected("elements", f"elements = {elements} of filters that have {p.taps}")
    if threads not in (threads_k, THREADS[0]) and t["tile_k"] >= 2 * power_of_two(p.pixels):
        return Rejected("threads", f"{t['tile_k']} threads along {p.pixels} pixels")
    return (
        split.rules(t, as_product, target)
        or residency_rules(1, threads, shared_bytes(s, t), registers(s, t), target)
        or grid.order_rules(t, as_product)
        or check_workspace(split.workspace_bytes(as_product, t), workspace_limit)
        or ACCEPTED
    )


def launches_to_test(as_product: MatmulProblem, tunables: Mapping[str, Any]) -> list[list[int]]:
    """Each number of slices; there is one order of the tiles."""
    launches = split.launches_to_test(of_product(tunables), as_product)
    return [list(launch) for launch in dict.fromkeys((0, *launch[1:]) for launch in launches)]


def work(
    problem: Conv2dWgradProblem,
    as_product: MatmulProblem,
    aligns: tuple[int, int, int],
    tunables: Mapping[str, Any],
    least: Cost,
    target: Target,
) -> Work:
    """Counts for the roofline: neighbouring windows overlap in L1, which reads dy and the image from L2 once for each
    part of the filters' elements."""
    p, t = problem, of_product(tunables)
    dy, x, dw = aligns
    tiles_n = grid.tiles(as_product, t["tile_m"], t["tile_n"])[1]
    blocks, size = split.grid_blocks(as_product, t), dtype(p.dtype).bytes
    thread_pixels = float(grid.blocks(as_product, t["tile_m"], t["tile_n"])) * p.pixels * t["threads_k"]
    fma = thread_pixels * t["filters"] * t["elements"]
    wide_x = min(t["filters"], x) if p.depthwise and p.channels_last else 1
    wide_dy = min(t["filters"], dy) if p.channels_last else 1
    loads = thread_pixels * (t["filters"] / wide_dy + t["elements"] * (t["filters"] / wide_x if p.depthwise else 1))
    converted = (fma if p.depthwise else fma / t["filters"]) * (size < 4)
    sums = float(blocks) * t["threads"] * t["filters"] * t["elements"]
    inputs = float(p.input_bytes)
    # Matmul's counts take its own operands off what is read, to have what its epilogue reads.
    as_stored = replace(least, bytes_read=least.bytes_read - p.input_bytes + int(traffic.input_bytes(as_product)))
    to_l2, to_dram = traffic.handed_on(as_product, t, as_stored, target)
    return Work(
        blocks=blocks, threads=t["threads"], fma=fma,
        other_instructions=8.0 * loads + converted + 16.0 * thread_pixels + 10.0 * sums,
        shared_bytes=8.0 * sums / lanes(t, p.channels_last), l2_bytes=1.5 * tiles_n * inputs + to_l2,
        dram_bytes=inputs + to_dram, dynamic_shared_bytes=shared_bytes({"layout": p.layout}, t),
        independent=t["filters"] * t["elements"], steps=split.steps_of_block(as_product, t), overlap=0.5,
        others=traffic.other_launches(as_product, t, dw, as_stored, target),
    )  # fmt: skip


def launches(
    problem: Conv2dWgradProblem, as_product: MatmulProblem, aligns: tuple[int, int, int], tunables: Mapping[str, Any]
) -> tuple[LaunchCounts, ...]:
    """What each launch does: of the image what lies in it is loaded and multiplied, the padding is not. A filter of a
    channel that others share is multiplied whether it exists or not."""
    p, t = problem, {**of_product(tunables), "thread_n": 1}
    dy, x, dw = aligns
    size, filters = dtype(p.dtype).bytes, int(t["filters"])
    tiles_m, tiles_n = grid.tiles(as_product, t["tile_m"], t["tile_n"])
    threads_k = tiles_m * int(t["threads_k"])
    loaded, executed = (p.k, p.k) if p.depthwise else (threads_k, threads_k * filters)
    products = Primitive("fma", p.taps_inside * executed, p.taps_inside * executed)
    widths = (min(filters, dy) if p.channels_last else 1, min(filters, x) if p.depthwise else 1, dw)
    reads = (size * tiles_n * p.pixels * p.k, size * p.taps_inside * loaded)
    return counts.launches(as_product, t, widths, reads, products)


def compile_seconds(tunables: Mapping[str, Any], epilogue: tuple[str, ...]) -> float:
    """CPU seconds of nvcc for one more kernel of a group: grows with the sums of a thread."""
    nodes = node_seconds(epilogue)
    sums = int(tunables["filters"]) * int(tunables["elements"])
    return 0.06 + sums * 0.003 + int(tunables["elements"]) * nodes
