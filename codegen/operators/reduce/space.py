"""Tunables and search spaces, and what a schedule makes of a problem: blocks, steps and slices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from codegen.alignment import power_of_two
from codegen.operators.reduce.axes import Form, form_of
from codegen.operators.reduce.problem import ReduceProblem, size_of
from codegen.search.joined_space import Kind, build_joined, together
from codegen.search.rules import Accepted, Rejected, first_accepted
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import Linked, SearchSpace, Tunable
from codegen.targets import Target

ALGORITHM = "algorithm"
MEANING = "row: threads take neighbours along the reduced axes; column: along the kept axes"
POWERS = tuple(2**i for i in range(11))
UNROLLS = (1, 2, 4, 8, 16)
MOST_SLICES = 65535
REST = (
    Tunable("threads", (64, 128, 256, 512, 1024), False, "threads of a block", 256),
    Tunable("lanes", POWERS, False, "threads that share a row, or columns of vectors side by side", 32),
    Tunable("vector", (1, 2, 4, 8), False, "elements that a thread loads at once", 1),
    Tunable("unroll", UNROLLS, False, "vectors that a thread has in flight", 4),
    Tunable(
        "split", ("none", "workspace"), False, "whether slices of what is reduced go through the workspace", "none",
        constant=False,
    ),
    Tunable("slices", range(1, MOST_SLICES + 1), True, "slices of what is reduced; 1 where split is none", 1),
)  # fmt: skip
OF_KIND: dict[Value, tuple[Tunable, ...]] = {
    name: (Tunable(ALGORITHM, (name,), False, MEANING, name), *REST) for name in ("row", "column")
}
TUNABLES = together(OF_KIND.values(), ALGORITHM, MEANING)
Lists = dict[str, tuple[Value, ...]]

# Resident threads of a multiprocessor that keep its memory busy, and rounds of blocks beyond which a last round that is
# not full costs little.
BUSY_THREADS, ROUNDS = 1024, 4
# Vectors of a problem that a few small blocks have soon.
SMALL = 4096
# Bytes of a warp's access that touch no sector of which others need the rest.
SECTOR = 32


def form(problem: ReduceProblem) -> Form:
    return form_of(problem.shape, problem.strides, problem.axes, problem.fn, size_of(problem))


@dataclass(frozen=True)
class Geometry:
    """What a schedule makes of a problem, as the launch code has it. A unit is a row, or a vector of columns; `steps`
    of it are divided into `slices` of `chunk`; `groups` are blocks for a slice, `apart` the steps from one of a
    thread's loads to its next, `trips` how often it loads `unroll` of them."""

    units: int
    steps: int
    slices: int
    chunk: int
    groups: int
    apart: int
    trips: int


def geometry(problem: ReduceProblem, tunables: Mapping[str, Any]) -> Geometry:
    t, p = tunables, problem
    by_rows = t["algorithm"] == "row"
    units = p.outputs if by_rows else p.outputs // t["vector"]
    steps = p.count // t["vector"] if by_rows else p.count
    slices, chunk = divided(steps, t["slices"])
    depth = t["threads"] // t["lanes"]
    apart = t["lanes"] if by_rows else depth
    groups = -(-units // (depth if by_rows else t["lanes"]))
    return Geometry(units, steps, slices, chunk, groups, apart, -(-chunk // (apart * t["unroll"])))


def divided(steps: int, wanted: int) -> tuple[int, int]:
    """Slices, none of them empty, and their steps, as `divide` in kernel.cuh."""
    if steps < 1:
        return 1, 1
    chunk = -(-steps // max(1, min(wanted, steps)))
    return -(-steps // chunk), chunk


def most_in_flight(g: Geometry) -> int:
    """The largest `unroll` of which the second half has something to load."""
    return max(unroll for unroll in UNROLLS if unroll == 1 or (unroll // 2) * g.apart < g.chunk)


def algorithms(problem: ReduceProblem) -> tuple[str, ...]:
    """What a level tries: what reads vectors; where nothing does, both."""
    return {"kept": ("column",), "reduced": ("row",), "none": ("row", "column")}[form(problem).inner]


def _lanes(problem: ReduceProblem, algorithm: str, vector: int, threads: int) -> tuple[int, int]:
    """How many threads go side by side, best and second best."""
    by_rows = algorithm == "row"
    units = power_of_two(problem.outputs // (1 if by_rows else vector))
    steps = power_of_two(problem.count // (vector if by_rows else 1))
    across, down = (steps, units) if by_rows else (units, steps)
    # So many that the rows of threads have something to do.
    least = min(max(1, threads // down), across)
    if by_rows:
        many = min(threads, across)
        return many, max(least, many // 4 if many > 32 else many // 2)
    first = max(least, min(32, across))
    # Rows of threads with less to load than they could have in flight: none but one, or fewer vectors side by side.
    few = steps < 4 * (threads // first)
    return first, min(threads, across) if few else max(least, min(8, across))


def _slices(problem: ReduceProblem, algorithm: str, vector: int, lanes: int, threads: int, target: Target) -> list[int]:
    """1, and what makes one and `ROUNDS` rounds of blocks, where what is reduced is long enough."""
    counts = [1]
    for rounds in (1, ROUNDS):
        wanted = rounds * target.sm_count * max(1, BUSY_THREADS // threads)
        t = {"algorithm": algorithm, "vector": vector, "lanes": lanes, "threads": threads, "unroll": 4, "slices": 1}
        plain = geometry(problem, t)
        # A slice that is shorter than what its threads have in flight is mostly overhead.
        most = plain.steps // (plain.apart * 4)
        slices, _ = divided(plain.steps, min(-(-wanted // plain.groups), most, MOST_SLICES))
        if slices > 1 and slices not in counts:
            counts.append(slices)
    return counts


def _levels(problem: ReduceProblem, algorithm: str, target: Target) -> tuple[dict[int, Lists], dict[int, Linked]]:
    """Value lists of levels 1 and 2 (1 is inside 2), and the ways in which lanes, threads and slices go together."""
    own = form(problem)
    widest = own.align if own.inner == {"row": "reduced", "column": "kept"}[algorithm] else 1
    shapes: dict[int, list[tuple[Value, ...]]] = {1: [], 2: []}
    small = problem.outputs * problem.count // widest < SMALL
    for level, sizes in ((1, (64, 128, 256) if small else (128, 256, 512)), (2, (64, 128, 256, 512, 1024))):
        for threads in sizes:
            first, second = _lanes(problem, algorithm, widest, threads)
            every = [first, second] if level == 1 else [lanes for lanes in POWERS if lanes <= threads]
            for lanes in dict.fromkeys(every):
                for slices in _slices(problem, algorithm, widest, lanes, threads, target):
                    shapes[level].append((threads, lanes, "none" if slices == 1 else "workspace", slices))
    shapes[2] = list(dict.fromkeys([*shapes[1], *shapes[2]]))
    vectors = tuple(v for v in (8, 4, 2, 1) if v <= widest)
    names = ("threads", "lanes", "split", "slices")
    wanted = (1, 2, 4) if small else (2, 4, 8)
    clipped = set()
    for choice in shapes[1]:
        t = {"algorithm": algorithm, "vector": widest, "unroll": 1, **dict(zip(names, choice, strict=True))}
        deepest = most_in_flight(geometry(problem, t))
        clipped |= {min(unroll, deepest) for unroll in wanted}
    lists: dict[int, Lists] = {
        1: {"algorithm": (algorithm,), "vector": vectors[:1], "unroll": tuple(sorted(clipped))},
        2: {"algorithm": (algorithm,), "vector": vectors[:3], "unroll": UNROLLS},
    }
    return lists, {level: Linked(names, tuple(choices)) for level, choices in shapes.items()}


def space(
    problem: ReduceProblem, target: Target, search: Search, admit: Callable[[Schedule], Accepted | Rejected]
) -> SearchSpace:
    """The schedules of a search. Raises InvalidSearch."""
    kinds: dict[Value, Kind] = {}
    for algorithm in algorithms(problem):
        lists, linked = _levels(problem, algorithm, target)
        kinds[algorithm] = Kind(OF_KIND[algorithm], lists, linked)
    return build_joined(search, ALGORITHM, OF_KIND, kinds, default(problem, target, admit))


def default(problem: ReduceProblem, target: Target, admit: Callable[[Schedule], Accepted | Rejected]) -> Schedule:
    """The level-0 schedule: of level 1 the first that breaks no rule, blocks of 256 threads and as many as fill a GPU
    first."""
    algorithm = algorithms(problem)[0]
    lists, linked = _levels(problem, algorithm, target)
    lists[1]["unroll"] = tuple(unroll for unroll in (4, 2, 8, 1) if unroll in lists[1]["unroll"])
    choices = sorted(linked[1].choices, key=lambda way: (way[0] != 256, -_busy(problem, algorithm, way, target)))
    tried = [
        Schedule.of({**dict(zip(lists[1], rest, strict=True)), **dict(zip(linked[1].names, choice, strict=True))})
        for choice, rest in product(choices, product(*lists[1].values()))
    ]
    return first_accepted(tried, admit)


def _busy(problem: ReduceProblem, algorithm: str, choice: tuple[Value, ...], target: Target) -> float:
    """Threads that a schedule has, up to what one round of blocks holds."""
    threads, lanes, _, slices = (value if isinstance(value, int) else 0 for value in choice)
    t = {"algorithm": algorithm, "vector": 1, "lanes": lanes, "threads": threads, "unroll": 1, "slices": slices}
    blocks = geometry(problem, t).groups * slices
    return min(float(blocks * threads), float(target.sm_count * BUSY_THREADS))
