"""The kernel without a product: tunables, levels, rules, and what a schedule does to the machine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, Protocol

from codegen.alignment import needs_cuda_cores, power_of_two, widest
from codegen.counts import LaunchCounts, Primitive, load, merged, store
from codegen.dtypes import dtype
from codegen.operator import Constants, Cost, Work, constants
from codegen.operators.convolution.problem import Convolution, windows_inside
from codegen.operators.matmul import counts
from codegen.operators.matmul.traffic import node_seconds
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, first_accepted, residency_rules
from codegen.search.schedule import Schedule, Value
from codegen.search.space import Tunable
from codegen.targets import Target

Fields = Mapping[str, Any]


class Direct(Protocol):
    """A module with a kernel of the algorithm `direct`, by signature `s` and tunables `t`: what its code reads, an
    estimate of a thread's registers, shared memory of a block, CPU seconds of nvcc."""

    TUNABLES: tuple[Tunable, ...]

    def fields(self, s: Fields, t: Fields, out_align: int, /) -> Constants: ...
    def registers(self, s: Fields, t: Fields, /) -> int: ...
    def shared_bytes(self, s: Fields, t: Fields, /) -> int: ...
    def compile_seconds(self, t: Fields, epilogue: tuple[str, ...], /) -> float: ...


ALGORITHM = Tunable("algorithm", ("direct",), False, "how the convolution is computed", "direct", constant=False)
THREADS, THREADS_K = (64, 96, 128, 192, 256), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
# Columns of filters that a kernel may have as a constant.
WINDOWS = (3, 5, 7)
TUNABLES: tuple[Tunable, ...] = (
    ALGORITHM,
    Tunable("threads", THREADS, False, "threads of a block", 128),
    Tunable("threads_k", THREADS_K, False, "threads of a block along the filters", 1),
    Tunable("filters", (1, 2, 4, 8), False, "neighbouring filters of a thread", 1),
    Tunable("pixels", (1, 2, 4, 8), False, "output pixels of a thread", 1),
    Tunable(
        "window", (0, *WINDOWS), False,
        "depthwise, columns of the filters: a thread's pixels are neighbours and share what they load; 0: any filters",
        0,
    ),
    Tunable("taps", (16, 32, 64), False, "products of a sum whose filters are in shared memory at a time", 32),
)  # fmt: skip
Lists = dict[str, tuple[Value, ...]]

LARGEST_INDEX = 2**31 - 1
# Floats between the rows of taps beyond a block's filters (`tap_padding` in direct.cuh).
TAP_PADDING = 4
# Above so many channels of a group a product of matrices is no longer mostly padding.
MOST_CHANNELS = 8
# Addresses, loop counters and predicates; of a pixel its corner. Estimates. With a window ptxas keeps about three
# columns of the filters beside the sums and what is loaded, and 18 to 38 registers more (sm_90a, the widest vectors of
# fp16 and fp32, 2 to 8 pixels, all windows).
OVERHEAD_REGISTERS, CORNER_REGISTERS = 40, 3
WINDOW_COLUMNS, WINDOW_OVERHEAD_REGISTERS = 3, 30
# Instructions for an access to the image (two checks, its address, a zero), and for a tap of a thread. Of the 132 for a
# tap of 8 filters and 4 pixels (sm_90a, fp16, depthwise) 64 are products and conversions.
LOAD_INSTRUCTIONS, TAP_INSTRUCTIONS = 12.0, 20.0
# With a window of 3 those are 205 for a row of 3 taps, not 3 x 132: 96 products, 48 conversions, 6 loads of filters,
# and 55 for 6 vectors of the image. Of fp32, other windows and other pixels also 8 to 10 for each of these.
WINDOW_LOAD_INSTRUCTIONS = 9.5


def fields(s: Mapping[str, Any], t: Mapping[str, Any], out_align: int) -> Constants:
    """Vectors are of filters, and of their channels where each has its own: with channels first single elements."""
    last = s["layout"] == "nhwc"
    align_a, align_c = s["align_x"] if last and s["depthwise"] else 1, out_align if last else 1
    own = {"tensor_cores": False, "align_a": align_a, "align_b": 1, "align_c": align_c}
    return {**own, **constants(TUNABLES, t)}


def block(tunables: Mapping[str, Any]) -> tuple[int, int]:
    """Output pixels and filters of a block."""
    t = tunables
    return t["threads"] // t["threads_k"] * t["pixels"], t["threads_k"] * t["filters"]


def blocks(problem: Convolution, tunables: Mapping[str, Any]) -> tuple[int, int]:
    """Blocks along the pixels and along the filters. Neighbouring pixels of a thread are of one row."""
    pixels, filters = block(tunables)
    strip = tunables["pixels"] if tunables["window"] else 1
    strips = problem.n * problem.p * -(-problem.q // strip)
    return -(-strips // (pixels // strip)), -(-problem.k // filters)


def shared_bytes(s: Mapping[str, Any], t: Mapping[str, Any]) -> int:
    """As `shared_bytes` in direct.cuh."""
    size: int = 4 * t["taps"] * (block(t)[1] + TAP_PADDING)
    return size


def registers(s: Mapping[str, Any], t: Mapping[str, Any]) -> int:
    """An estimate of a thread's registers."""
    sums: int = t["pixels"] * t["filters"]
    if t["window"]:
        size = dtype(s["dtype"]).bytes
        held: int = (t["pixels"] + t["window"] - 1) * -(-t["filters"] * size // 4)
        return sums + held + WINDOW_COLUMNS * int(t["filters"]) + WINDOW_OVERHEAD_REGISTERS
    return sums + 2 * int(t["filters"]) + CORNER_REGISTERS * int(t["pixels"]) + OVERHEAD_REGISTERS


def window_of(problem: Convolution) -> int:
    """The window that a problem can have; 0: none."""
    p = problem
    neighbours = p.depthwise and p.channels_last and p.stride[1] == p.dilation[1] == 1
    return p.s if neighbours and p.s in WINDOWS else 0


def window_rule(problem: Convolution, tunables: Mapping[str, Any]) -> Rejected | None:
    """Of the problem itself: a gradient's phases do not show its geometry."""
    p, window = problem, tunables["window"]
    return check(
        window in (0, window_of(p)),
        "window",
        f"window = {window} is for depthwise problems in nhwc with filters of {window} columns, stride_w = 1 and "
        f"dilation_w = 1; this one is {'' if p.depthwise else 'not '}depthwise, in {p.layout}, with {p.s} columns, "
        f"stride_w = {p.stride[1]} and dilation_w = {p.dilation[1]}",
    )


def worth(problem: Convolution) -> bool:
    """Whether a search by level tries it."""
    return problem.group_channels <= MOST_CHANNELS


def levels(problem: Convolution, window: int) -> dict[int, Lists]:
    """Level 1 (a dozen) and level 2; 1 is inside 2. `window`: which the problem can have; it is tried beside none, and
    blocks of one size are."""
    most = min(_most_filters(problem), power_of_two(problem.k))
    threads_k = _threads_k(-(-problem.k // most), 32 if problem.channels_last else 2)
    threads: tuple[int, ...] = (96, 192) if any(count % 3 == 0 for count in threads_k) else (128, 256)
    outputs, rows = problem.n * problem.p * problem.q, int(threads[0]) // threads_k[-1]
    small: Lists = {
        "algorithm": ("direct",), "threads": threads[:1] if window else threads, "threads_k": threads_k,
        "filters": (most // 2, most) if most > 1 else (1,), "window": (0, window) if window else (0,),
        "pixels": tuple(count for count in (2, 4) if _pixels_fit(rows * count, outputs)) or (1,),
        "taps": (16,) if problem.taps <= 16 else (32,),
    }  # fmt: skip
    full: Lists = {
        **small, "threads": THREADS, "threads_k": THREADS_K, "filters": (1, 2, 4, 8),
        "pixels": (1, 2, 4, 8), "taps": (16, 32, 64),
    }  # fmt: skip
    return {1: small, 2: full}


def _most_filters(problem: Convolution) -> int:
    """Filters of a thread: with a channel each not more than one access has, and none of several groups."""
    if problem.depthwise and problem.channels_last:
        return widest(problem.dtype, problem.c, quads=needs_cuda_cores(problem.dtype, problem.allow_tf32))
    most = 4 if dtype(problem.dtype).bytes == 4 or not problem.channels_last else 8
    if problem.depthwise or problem.groups == 1:
        return most
    return next(count for count in (8, 4, 2, 1) if count <= most and problem.group_filters % count == 0)


def _threads_k(across: int, most: int) -> tuple[int, ...]:
    """The two numbers of threads along the filters that leave the fewest idle; of those the largest, whose accesses are
    longest. `across`: how many threads all filters need."""
    counts = [count for count in THREADS_K if count <= min(most, power_of_two(across))]
    return tuple(sorted(sorted(counts, key=lambda count: (-(-across // count) * count, -count))[:2]))


def _pixels_fit(of_block: int, pixels: int) -> bool:
    """Whether a block is not mostly padding."""
    return of_block < 2 * power_of_two(pixels)


def default(problem: Convolution, window: int, admit: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
    """The first that breaks no rule, of level 1 and then of level 2: many filters and many pixels in a thread first,
    with the window. Where all break one, the first of all."""
    return first_accepted(chain.from_iterable(map(_in_order, levels(problem, window).values())), admit)


def _in_order(lists: Lists) -> Iterator[Schedule]:
    for values in product(*(reversed(list) for list in lists.values())):
        yield Schedule.of(dict(zip(lists, values, strict=True)))


def filter_rules(problem: Convolution, filters: int, of_block: int, *, one_group: bool) -> Rejected | None:
    """How many of a thread and of a block fit the problem."""
    p = problem
    if not one_group and not p.depthwise and p.group_filters % filters != 0:
        return Rejected("filters", f"filters = {filters} of a thread would be of several groups of {p.group_filters}")
    if filters > max(1, power_of_two(p.k)):
        return Rejected("filters", f"filters = {filters} is mostly padding for k = {p.k}")
    if of_block >= 2 * max(filters, power_of_two(p.k)):
        return Rejected("threads_k", f"blocks of {of_block} filters are mostly padding for k = {p.k}")
    return None


def rules(problem: Convolution, t: Mapping[str, Any], target: Target) -> Accepted | Rejected:
    """When a schedule cannot work or is not worth compiling. Every static_assert of direct.cuh is a rule here."""
    p = problem
    threads, threads_k, filters = int(t["threads"]), int(t["threads_k"]), int(t["filters"])
    s = {"dtype": p.dtype}
    across, down = blocks(p, t)
    if threads % threads_k != 0:
        return Rejected("threads", f"{threads} threads are no multiple of threads_k = {threads_k}")
    if broken := filter_rules(p, filters, block(t)[1], one_group=p.groups == 1):
        return broken
    if t["pixels"] != 1 and not _pixels_fit(block(t)[0], p.pixels):
        return Rejected("pixels", f"blocks of {block(t)[0]} pixels are mostly padding for {p.pixels}")
    if t["window"] != 0 and int(t["pixels"]) >= 2 * p.q:
        return Rejected("pixels", f"{t['pixels']} neighbouring pixels are mostly padding for rows of {p.q}")
    if t["taps"] != 16 and int(t["taps"]) >= 2 * p.taps:
        return Rejected("taps", f"taps = {t['taps']} is mostly padding for {p.taps}")
    if down > 65535:
        return Rejected("grid", f"{down} blocks along the filters; a launch has at most 65535")
    if across * block(t)[0] > LARGEST_INDEX:
        return Rejected("grid", f"{across} blocks of {block(t)[0]} pixels; at most {LARGEST_INDEX} pixels are counted")
    return residency_rules(1, threads, shared_bytes(s, t), registers(s, t), target) or ACCEPTED


def work(problem: Convolution, t: Mapping[str, Any], least: Cost) -> Work:
    """Counts for the roofline. Neighbouring windows overlap: what of the image L1 misses comes from L2."""
    p = problem
    across, down = blocks(p, t)
    pixels, filters = block(t)
    grid_blocks = across * down
    fma = float(grid_blocks) * pixels * filters * p.taps
    size = dtype(p.dtype).bytes
    per_load = min(t["filters"], 16 // size) if p.depthwise and p.channels_last else 1
    loads = fma / (per_load if p.depthwise else t["filters"])
    turned = fma * (size < 4) * (1.0 if p.depthwise else 1.0 / t["filters"])
    steps = float(grid_blocks) * t["threads"] * p.taps
    if window := int(t["window"]):
        # Of the pixels' windows each element once.
        shared = (t["pixels"] + window - 1) / (t["pixels"] * window)
        instructions = WINDOW_LOAD_INSTRUCTIONS * loads * shared + turned * shared + steps * max(1.0, t["filters"] / 4)
    else:
        instructions = LOAD_INSTRUCTIONS * loads + turned + TAP_INSTRUCTIONS * steps
    other = instructions + 2.0 * len(p.epilogue) * grid_blocks * pixels * filters
    image = float(p.elements_seen) * size * (1 if p.depthwise else min(down, 4))
    return Work(
        blocks=grid_blocks, threads=t["threads"], fma=fma, other_instructions=other,
        shared_bytes=4.0 * steps * t["filters"] / (32 if not p.channels_last else max(1, 32 // t["threads_k"])),
        l2_bytes=1.5 * image + least.bytes_written + float(across) * p.k * p.taps * size,
        dram_bytes=float(least.bytes_read + least.bytes_written), dynamic_shared_bytes=shared_bytes({}, t),
        independent=t["pixels"] * t["filters"], steps=p.taps // (window or 1), overlap=0.5,
    )  # fmt: skip


@dataclass(frozen=True)
class Part:
    """`number` convolutions of a launch with the same extents and taps, each in `across` blocks along its pixels."""

    number: int
    across: int
    convolution: Convolution


@dataclass(frozen=True)
class Row:
    """Where a window lies along a row: output pixels, zeros before the first element that is read, and elements."""

    pixels: int
    padding: int
    extent: int


def launch(problem: Convolution, parts: Sequence[Part], row: Row, t: Fields, read: Fields) -> LaunchCounts:
    """What a launch does. `problem` is that of the operator, `read` what the code reads (`fields`). Every block loads
    all taps of its filters; of the image lanes ask for what is not padding."""
    p, any_part = problem, parts[0].convolution
    size, out, filters = dtype(p.dtype).bytes, dtype(p.out_dtype).bytes, any_part.k
    down, (pixels, of_block) = blocks(any_part, t)[1], block(t)
    wide_in = min(t["filters"], read["align_a"]) if p.depthwise else 1
    wide_out = min(t["filters"], read["align_c"])
    taps = sum(part.number * part.across * part.convolution.taps for part in parts)
    outputs = sum(part.number * part.convolution.pixels for part in parts) * filters
    if t["window"]:
        rows = windows_inside(p.p, p.stride[0], p.corner[0], p.r, p.dilation[0], p.h)
        image = p.n * rows * _columns_loaded(row, t) * filters
    elif p.depthwise:
        image = p.taps_inside * filters
    else:
        image = p.taps_inside * any_part.group_channels * t["threads_k"] * down
    executed = taps * down * pixels * of_block
    primitives = (
        Primitive("fma", executed, executed),
        load(size * taps * filters, size),
        load(size * image, size * wide_in),
        *counts.epilogue_reads(p.epilogue, p.out_dtype, outputs, wide_out),
        *counts.epilogue_products(p, outputs, truncated=0),
        store(out * outputs, out * wide_out),
    )
    products = sum(part.number * part.convolution.pixels * part.convolution.taps for part in parts) * filters
    return LaunchCounts("run", merged(primitives), products)


def _columns_loaded(row: Row, t: Fields) -> int:
    """Elements of a row that strips of neighbouring pixels load for one row of their filters."""
    strip, beside = int(t["pixels"]), int(t["pixels"]) + int(t["window"]) - 1
    firsts = range(-row.padding, row.pixels - row.padding, strip)
    return sum(max(0, min(first + beside, row.extent) - max(first, 0)) for first in firsts)


def compile_seconds(tunables: Mapping[str, Any], epilogue: tuple[str, ...]) -> float:
    """CPU seconds of nvcc for one more kernel of a group: grows with the outputs of a thread."""
    nodes = node_seconds(epilogue)
    outputs = int(tunables["pixels"]) * int(tunables["filters"])
    return 0.05 + outputs * (0.002 + nodes)
