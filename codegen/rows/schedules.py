"""Schedules of operators that compute each row of a matrix from all of it (`codegen/device/rows.cuh`): tunables,
levels, rules, and what they do to the machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from codegen.alignment import power_of_two, widest
from codegen.dtypes import dtype
from codegen.operator import Cost, Work
from codegen.rows.problem import RowProblem
from codegen.search.joined_space import Kind, build_joined
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, first_accepted
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import Linked, SearchSpace, Tunable
from codegen.targets import Target

ALGORITHMS = ("registers", "shared", "online")  # in the order of the numbers in rows.cuh
THREADS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_SHARED_BY_ALL = (
    Tunable("row_threads", THREADS, False, "threads that share a row: part of a warp, a warp, several, a block", 128),
    Tunable("rows", THREADS, False, "rows of a block", 1),
    Tunable("vector", (1, 2, 4, 8), False, "elements of one access, up to 16 bytes", 1),
)
MAX_STEPS = 512
_STEPS = Tunable(
    "steps", range(1, MAX_STEPS + 1), False, "vectors of a row that a thread has room for (registers, shared)", 8
)
_LOADS = Tunable("loads", (1, 2, 4, 8), False, "vectors of a thread that are in flight at once (shared, online)", 4)


def _algorithm(*names: str) -> Tunable:
    return Tunable("algorithm", names, False, "where a row is kept between its two uses; online: nowhere", names[0])


KNOBS: dict[Value, tuple[Tunable, ...]] = {
    "registers": (_algorithm("registers"), *_SHARED_BY_ALL, _STEPS),
    "shared": (_algorithm("shared"), *_SHARED_BY_ALL, _STEPS, _LOADS),
    "online": (_algorithm("online"), *_SHARED_BY_ALL, _LOADS),
}
TUNABLES = (_algorithm(*ALGORITHMS), *_SHARED_BY_ALL, _STEPS, _LOADS)

# Addresses, counters and predicates: an estimate.
OVERHEAD_REGISTERS = 32
# Up to so many values of a thread level 1 keeps in registers; level 2 goes to what the rule allows.
MODEST_VALUES, MOST_VALUES = 32, 128
# Threads of a block that level 1 makes of rows with few threads each.
BLOCK = 128
# Of the L2, what stays from the first read of a row to the second: the rest goes to what streams through.
L2_SHARE = 0.75


def align(problem: RowProblem) -> int:
    """The alignment class: elements of the widest access of which a row is a whole number."""
    return widest(problem.dtype, problem.columns, quads=False)


def threads(tunables: Mapping[str, Any]) -> int:
    return int(tunables["row_threads"]) * int(tunables["rows"])


def capacity(tunables: Mapping[str, Any]) -> int:
    """Elements that a row may have; 0: any."""
    t = tunables
    return 0 if t["algorithm"] == "online" else int(t["row_threads"]) * int(t["steps"]) * int(t["vector"])


def shared_bytes(tunables: Mapping[str, Any], size: int) -> int:
    """As `shared_bytes` in rows.cuh. `size`: bytes of an element."""
    t = tunables
    states = threads(t) // 32 * 16 if int(t["row_threads"]) > 32 else 0
    return states + (int(t["rows"]) * capacity(t) * size if t["algorithm"] == "shared" else 0)


def registers(tunables: Mapping[str, Any]) -> int:
    """An estimate of a thread's."""
    t = tunables
    held = t["steps"] if t["algorithm"] == "registers" else t["loads"]
    return OVERHEAD_REGISTERS + int(held) * int(t["vector"])


def _rows(problem: RowProblem, row_threads: int) -> int:
    """Rows of a block with so many threads for each: a warp at least, else no more than there are."""
    return max(1, 32 // row_threads, min(BLOCK // row_threads, power_of_two(problem.rows)))


def _divisions(
    problem: RowProblem, most_values: int, width: int, counts: tuple[int, ...]
) -> Iterator[tuple[int, int, int]]:
    """(row_threads, rows, steps) with at most that many values in a thread."""
    vectors = -(-problem.columns // width)
    for count in counts:
        steps = -(-vectors // count)
        if steps * width <= max(most_values, width) and steps <= MAX_STEPS:
            yield count, _rows(problem, count), steps


def _linked(divisions: Iterator[tuple[int, int, int]]) -> Linked | None:
    choices = tuple(divisions)
    return Linked(("row_threads", "rows", "steps"), choices) if choices else None


def space(
    problem: RowProblem, target: Target, search: Search, admit: Callable[[Schedule], Accepted | Rejected]
) -> SearchSpace:
    """The schedules of a search. Raises InvalidSearch."""
    width, size = align(problem), dtype(problem.dtype).bytes
    vectors = -(-problem.columns // width)
    # Threads of a row that all have something to do; level 1 leaves out few threads where more are worth it.
    counts = tuple(count for count in THREADS if count <= power_of_two(vectors))
    several = tuple(count for count in counts if count >= min(4, counts[-1]))
    fitting = target.shared_per_block // size
    divided: dict[str, tuple[Linked | None, Linked | None]] = {
        "registers": (
            _linked(_divisions(problem, MODEST_VALUES, width, several)),
            _linked(_divisions(problem, MOST_VALUES, width, counts)),
        ),
        "shared": (
            _linked(_fitting(_divisions(problem, fitting, width, several[-3:]), width, fitting)),
            _linked(_fitting(_divisions(problem, fitting, width, counts), width, fitting)),
        ),
        "online": (_online(problem, several[-2:]), _online(problem, counts)),
    }
    kinds: dict[Value, Kind] = {}
    for name, (small, full) in divided.items():
        if small is not None and full is not None:
            lists: dict[str, tuple[Value, ...]] = {"algorithm": (name,), "vector": (width,)}
            loads: list[dict[str, tuple[Value, ...]]] = [{"loads": (2, 4)}, {"loads": (1, 2, 4, 8)}]
            if name == "registers":
                loads = [{}, {}]
            kinds[name] = Kind(KNOBS[name], {1: lists | loads[0], 2: lists | loads[1]}, {1: small, 2: full})
    return build_joined(search, "algorithm", KNOBS, kinds, _default(kinds, admit))


def _online(problem: RowProblem, counts: tuple[int, ...]) -> Linked:
    return Linked(("row_threads", "rows"), tuple((count, _rows(problem, count)) for count in counts))


def _fitting(divisions: Iterator[tuple[int, int, int]], width: int, fitting: int) -> Iterator[tuple[int, int, int]]:
    """Those whose rows shared memory has room for."""
    return (division for division in divisions if math.prod(division) * width <= fitting)


def _default(kinds: Mapping[Value, Kind], admit: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
    """The level-0 schedule: the first kind's first that breaks no rule, with the fewest values in a thread first."""
    tried: list[Schedule] = []
    for kind in kinds.values():
        assert kind.linked is not None
        lists, linked = {name: values[-1] for name, values in kind.levels[1].items()}, kind.linked[1]
        choices = [dict(zip(linked.names, choice, strict=True)) for choice in linked.choices[::-1]]
        tried += [Schedule.of({**lists, **choice}) for choice in choices]
    return first_accepted(tried, admit)


def rules(problem: RowProblem, schedule: Schedule, target: Target) -> Accepted | Rejected:
    """When a schedule cannot work or is not worth compiling. Every static_assert of rows.cuh is a rule here."""
    p, t = problem, schedule.as_dict()
    size, width, count = dtype(p.dtype).bytes, int(t["vector"]), threads(t)
    room, row_threads, rows = capacity(t), int(t["row_threads"]), int(t["rows"])
    steps = int(t.get("steps", 1))
    at_once = row_threads * width
    least = -(-p.columns // at_once)
    limit = min(target.registers_per_thread, target.registers_per_sm // max(count, 32))
    return (
        check(
            32 <= count <= target.max_threads_per_block,
            "threads",
            f"{rows} rows of {row_threads} threads are {count}; a block has 32 to {target.max_threads_per_block}",
        )
        or check(
            width * size <= 16 and p.columns % width == 0,
            "vector",
            f"vector = {width} of {size} bytes; rows of {p.columns} elements allow up to {align(p)}",
        )
        or check(
            row_threads == 1 or row_threads < 2 * power_of_two(-(-p.columns // width)),
            "row_threads",
            f"{row_threads} threads for a row of {-(-p.columns // width)} vectors are mostly idle",
        )
        or check(
            rows == 1 or rows * row_threads <= 32 or rows < 2 * power_of_two(p.rows),
            "rows",
            f"{rows} rows of a block are mostly padding for {p.rows}",
        )
        or check(
            not room or p.columns <= room, "steps", f"room for {room} elements; a row has {p.columns} ({least} steps)"
        )
        or check(steps < 2 * least, "steps", f"{steps} steps are mostly unused by {least}")
        or check(
            registers(t) <= limit, "registers", f"a thread needs about {registers(t)} registers; {limit} are there"
        )
        or check(
            shared_bytes(t, size) <= target.shared_per_block,
            "shared_memory",
            f"{shared_bytes(t, size)} bytes of shared memory; {target.shared_per_block} are there",
        )
        or ACCEPTED
    )


def cost(problem: RowProblem, of_element: int, vectors: int) -> Cost:
    """Any algorithm reads x once and writes out once. `of_element`: FLOPs of each; `vectors`: of a row's length, which
    all rows share."""
    p = problem
    elements, size = p.rows * p.columns, dtype(p.dtype).bytes
    return Cost(
        flops=elements * of_element,
        bytes_read=(elements + vectors * p.columns) * size,
        bytes_written=elements * dtype(p.out_dtype).bytes,
        launches=1,
        workspace_bytes=0,
    )


def work(problem: RowProblem, tunables: Mapping[str, Any], least: Cost, target: Target) -> Work:
    """Counts for the roofline. Of rows that are read twice, the second time is of the DRAM as far as the rows that are
    under way at once do not stay in the L2."""
    p, t = problem, tunables
    size, count = dtype(p.dtype).bytes, threads(t)
    blocks = -(-p.rows // int(t["rows"]))
    online, elements = t["algorithm"] == "online", float(p.rows) * p.columns
    again = elements * size if online else 0.0
    resident = max(1, target.max_threads_per_sm // count) * target.sm_count * int(t["rows"])
    under_way = float(min(p.rows, resident)) * p.columns * size
    missed = max(0.0, 1.0 - L2_SHARE * target.l2_bytes / under_way)
    steps = -(-p.columns // (int(t["row_threads"]) * int(t["vector"])))
    trips = 1 if t["algorithm"] == "registers" else -(-steps // int(t["loads"])) * (2 if online else 1)
    padded = float(blocks) * count * steps * int(t["vector"])
    reductions = float(blocks) * count * 40.0
    return Work(
        blocks=blocks, threads=count, fma=0.0,
        other_instructions=padded * (least.flops / elements + 12.0 / int(t["vector"])) + reductions,
        shared_bytes=3.0 * elements * size if t["algorithm"] == "shared" else 0.0,
        l2_bytes=least.bytes_read + least.bytes_written + again,
        dram_bytes=least.bytes_read + least.bytes_written + again * missed,
        dynamic_shared_bytes=shared_bytes(t, size), independent=int(t["vector"]), steps=trips, overlap=0.5,
    )  # fmt: skip
