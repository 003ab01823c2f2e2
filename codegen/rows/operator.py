"""What operators share that compute each row of a matrix from all of it (`codegen/device/rows.cuh`): tunables, levels,
rules, calls, and what a schedule does to the machine."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from codegen.alignment import classes, power_of_two
from codegen.counts import LaunchCounts, Primitive, load, merged, multiply, store
from codegen.dtypes import dtype
from codegen.kernel import Kernel
from codegen.operator import (
    WIDEST_ACCESS,
    Array,
    Config,
    Cost,
    EdgeCall,
    Float64,
    InputKind,
    LaunchBounds,
    Operand,
    Operator,
    Work,
    constants,
)
from codegen.problem import LARGEST_EXTENT, Problem
from codegen.rows.problem import NormProblem, RowProblem
from codegen.rows.reference import make_inputs, reference
from codegen.run_once import FAR, LastBlocks, RunOnce
from codegen.search.joined_space import Kind, build_joined, together
from codegen.search.rules import ACCEPTED, Accepted, Rejected, first_accepted, residency_rules
from codegen.search.schedule import Schedule, Value
from codegen.search.search import Search
from codegen.search.space import Linked, SearchSpace, Tunable
from codegen.targets import Target

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


_MEANING = "where a row is kept between its two uses; online: nowhere"
# In the order of the numbers in rows.cuh.
KNOBS: dict[Value, tuple[Tunable, ...]] = {
    name: (Tunable("algorithm", (name,), False, _MEANING, name), *_SHARED_BY_ALL, *more)
    for name, more in (("registers", (_STEPS,)), ("shared", (_STEPS, _LOADS)), ("online", (_LOADS,)))
}

# Addresses, counters and predicates: an estimate.
OVERHEAD_REGISTERS = 32
# Up to so many values of a thread level 1 keeps in registers; level 2 goes to what the rule allows.
MODEST_VALUES, MOST_VALUES = 32, 128
# Threads of a block that level 1 makes of rows with few threads each.
BLOCK = 128
# Of the L2, what stays from the first read of a row to the second: the rest goes to what streams through.
L2_SHARE = 0.75
# Of the tail problem, beyond those in flight.
TAIL_STEPS = 3
# Of the test problems: all have inputs whose result is exact (`codegen/rows/reference.py`), one is usual.
EPSILONS = (12.0, 1e-5, 3.0, 48.0)
# Of special inputs rows of each kind, and how long they may be.
SPECIAL_ROWS, SPECIAL_COLUMNS = 9, 2**13
# Rows, two of them with an outlier for an origin, and as long as it takes until sums about it lose more than the dtype.
LONG_ROWS, LONG_ROW = 5, {"float32": 2**15, "float16": 2**17, "bfloat16": 2**17}
BELOW = -(2**32)  # whose last 32 bits are 0


class RowOperator(Operator):
    """An operator says what its problems, inputs and reference are, and `flops` of an element."""

    problem_type: ClassVar[type[RowProblem]]
    tunables = together(KNOBS.values(), "algorithm", _MEANING)
    shared = ("reduce.cuh", "rows.cuh")
    extent_names = limited = ("rows", "columns")
    flops: ClassVar[int]

    def signature(self, problem: Problem) -> dict[str, Any]:
        p = self.own(problem)
        norm = isinstance(p, NormProblem)
        return {
            "dtype": p.dtype, "out_dtype": p.out_dtype, "align": p.align,
            "scale": norm and p.scale, "shift": norm and p.shift,
        }  # fmt: skip

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        p = self.own(problem)
        kinds = _kinds(p, target)
        # The first kind's first that breaks no rule, with the fewest values in a thread first.
        tried: list[Schedule] = []
        for kind in kinds.values():
            assert kind.linked is not None
            lists, linked = {name: values[-1] for name, values in kind.levels[1].items()}, kind.linked[1]
            choices = [dict(zip(linked.names, choice, strict=True)) for choice in linked.choices[::-1]]
            tried += [Schedule.of({**lists, **choice}) for choice in choices]
        default = first_accepted(tried, lambda schedule: self.rules(p, schedule, target))
        return build_joined(search, "algorithm", KNOBS, kinds, default)

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        """Every static_assert of rows.cuh is a rule here."""
        p, t = self.own(problem), schedule.as_dict()
        size, width, count = dtype(p.dtype).bytes, int(t["vector"]), _threads(t)
        room, row_threads, rows = _capacity(t), int(t["row_threads"]), int(t["rows"])
        steps = int(t.get("steps", 1))
        least = -(-p.columns // (row_threads * width))
        if not 32 <= count <= target.max_threads_per_block:
            return Rejected(
                "threads",
                f"{rows} rows of {row_threads} threads are {count}; a block has 32 to {target.max_threads_per_block}",
            )
        if width * size > 16 or p.columns % width != 0:
            return Rejected(
                "vector", f"vector = {width} of {size} bytes; rows of {p.columns} elements allow up to {p.align}"
            )
        if row_threads != 1 and row_threads >= 2 * power_of_two(-(-p.columns // width)):
            return Rejected(
                "row_threads", f"{row_threads} threads for a row of {-(-p.columns // width)} vectors are mostly idle"
            )
        if rows != 1 and rows * row_threads > 32 and rows >= 2 * power_of_two(p.rows):
            return Rejected("rows", f"{rows} rows of a block are mostly padding for {p.rows}")
        if room and p.columns > room:
            return Rejected("steps", f"room for {room} elements; a row has {p.columns} ({least} steps)")
        if steps >= 2 * least:
            return Rejected("steps", f"{steps} steps are mostly unused by {least}")
        return residency_rules(1, count, _shared_bytes(t, size), _registers(t), target) or ACCEPTED

    def config(self, kernel: Kernel) -> Config:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        own = {"scale": s["scale"], "shift": s["shift"], "epsilon": issubclass(self.problem_type, NormProblem)}
        fields = {**constants(self.tunables, {"steps": 1, "loads": 1, **t}), **own}
        return Config(fields, (), (("Input", s["dtype"]), ("Output", s["out_dtype"])))

    def scalars(self, problem: Problem) -> list[float]:
        return [problem.epsilon] if isinstance(problem, NormProblem) else []

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """x, the vectors that all rows share, out."""
        p = self.own(problem)
        matrix, strides, wide = (p.rows, p.columns), (p.columns, 1), p.align
        wide_out = min(wide, 16 // dtype(p.out_dtype).bytes)
        return (
            Operand("x", p.dtype, "in", matrix, strides, align=wide),
            *(Operand(name, p.dtype, "in", (p.columns,), (1,), align=wide) for name in p.vectors),
            Operand("out", p.out_dtype, "out", matrix, strides, align=wide_out),
        )

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        """Full rows in two blocks; tails, the last block not full; one vector; several blocks of short rows. The
        norms' epsilons are such that results are exact, and one that is usual."""
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        per_step, room, rows = int(t["row_threads"]) * int(t["vector"]), _capacity(t), int(t["rows"])
        full = room or 2 * int(t["loads"]) * per_step
        tail = room - per_step // 2 if room else (2 * int(t["loads"]) + TAIL_STEPS) * per_step + per_step // 2
        sizes = ((2 * rows, full), (2 * rows + 1, tail), (1, 1), (3 * rows + 1, max(1, full // 3)))
        return [self._of_class(s, count, columns, bool(room), number) for number, (count, columns) in enumerate(sizes)]

    def run_once(self, kernel: Kernel) -> list[RunOnce]:
        """Rows with what is no number, between others; the last rows of many."""
        rows, problems = int(kernel.tunables.as_dict()["rows"]), list(map(self.own, self.test_problems(kernel)))
        part, long, short = problems[0], problems[:2][-1], problems[:4][-1]
        some = long if long.columns <= SPECIAL_COLUMNS else short
        once = [RunOnce("special", _with_rows(some, max(2 * rows + 1, SPECIAL_ROWS)))]
        before = rows * -(-FAR // (rows * part.columns))
        if before + rows < LARGEST_EXTENT:
            few, many = _with_rows(part, rows + 1), _with_rows(part, before + rows + 1)
            once.append(RunOnce("far", many, part=few, last=(LastBlocks(2),)))
        return once

    def edge_calls(self, kernel: Kernel) -> list[EdgeCall]:
        """No rows or elements, as many as may be, more, fewer than none; a part of a vector."""
        t, beyond = kernel.tunables.as_dict(), LARGEST_EXTENT + 1
        vector, room = int(t["vector"]), _capacity(t)
        most = {"rows": LARGEST_EXTENT, "columns": room or LARGEST_EXTENT // vector * vector}
        parts, longer = [most["columns"] - 1] if vector > 1 else [], [room + vector] if room else []
        refused = {"rows": [beyond, -1, BELOW], "columns": [beyond, -1, BELOW, *parts, *longer]}
        taken = [EdgeCall({name: number}, True) for name in most for number in (0, most[name])]
        return [*taken, *(EdgeCall({name: number}, False) for name, each in refused.items() for number in each)]

    def _of_class(self, s: Mapping[str, Any], rows: int, columns: int, downward: bool, number: int) -> RowProblem:
        """The problem whose rows are of about so many elements, at most where `downward`, and of the class."""
        wide = int(s["align"])
        widest = classes(s["dtype"], quads=False)[0]
        count = max(1, columns // wide)
        if wide < widest and count % 2 == 0:  # a wider access would fit
            count += -1 if downward else 1
        fields = {"shape": (rows, count * wide), "dtype": s["dtype"], "out_dtype": s["out_dtype"]}
        if issubclass(self.problem_type, NormProblem):
            fields |= {"scale": s["scale"], "shift": s["shift"], "epsilon": EPSILONS[number]}
        return self.problem_type(**fields)

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        """Any algorithm reads x once and writes out once."""
        p = self.own(problem)
        elements, size = p.rows * p.columns, dtype(p.dtype).bytes
        return Cost(
            flops=elements * self.flops,
            bytes_read=(elements + len(p.vectors) * p.columns) * size,
            bytes_written=elements * dtype(p.out_dtype).bytes,
            launches=1,
            workspace_bytes=0,
        )

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        """Of rows that are read twice, the second time is of the DRAM as far as the rows that are under way at once do
        not stay in the L2."""
        p, t, least = self.own(problem), schedule.as_dict(), self.cost(problem, schedule)
        size, count = dtype(p.dtype).bytes, _threads(t)
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
            dynamic_shared_bytes=_shared_bytes(t, size), independent=int(t["vector"]), steps=trips, overlap=0.5,
        )  # fmt: skip

    def launches(self, problem: Problem, schedule: Schedule, target: Target) -> tuple[LaunchCounts, ...]:
        """Every row reads the vectors that all share."""
        p, t = self.own(problem), schedule.as_dict()
        size, out, width = dtype(p.dtype).bytes, dtype(p.out_dtype).bytes, int(t["vector"])
        elements, products = p.rows * p.columns, self.multiplications(p)
        passes = 2 if t["algorithm"] == "online" else 1
        parts = (
            *self.beside(p, t),
            multiply(products),
            load(size * elements * (passes + len(p.vectors)), size * width),
            store(out * elements, min(WIDEST_ACCESS, out * width)),
        )
        return (LaunchCounts("run", merged(parts), products),)

    def beside(self, p: Any, t: Mapping[str, Any]) -> tuple[Primitive, ...]:
        """What an algorithm does beside what all of them do."""
        return ()

    @abstractmethod
    def multiplications(self, problem: Problem) -> int: ...

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        return LaunchBounds(_threads(kernel.tunables.as_dict()))

    def estimated_registers(self, kernel: Kernel) -> int:
        return _registers(kernel.tunables.as_dict())

    def shared_bytes(self, kernel: Kernel) -> int:
        return _shared_bytes(kernel.tunables.as_dict(), dtype(kernel.signature_dict["dtype"]).bytes)

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        return 0.035 + 0.0026 * (self.estimated_registers(kernel) - OVERHEAD_REGISTERS)


class NormOperator(RowOperator):
    """A norm, of elements less their mean where `centred`."""

    problem_type: ClassVar[type[NormProblem]]
    centred: ClassVar[bool]

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        problems = super().test_problems(kernel)
        if self.centred and kernel.tunables.get("algorithm") == "online":
            s = kernel.signature_dict
            problems.append(self._of_class(s, LONG_ROWS, LONG_ROW[s["dtype"]], downward=False, number=1))
        return problems

    def multiplications(self, problem: Problem) -> int:
        """Squares, products with the reciprocal of their root, and with gamma."""
        p = self.own(problem)
        return int((2 + p.scale) * p.rows * p.columns)

    def beside(self, p: Any, t: Mapping[str, Any]) -> tuple[Primitive, ...]:
        """Online every thread of a row reads three elements, of which one is near the mean, and each thread has the
        variance by a multiply-add. (Where none is near, all is done once more.)"""
        if not self.centred or t["algorithm"] != "online":
            return ()
        threads, size = -(-p.rows // int(t["rows"])) * _threads(t), dtype(p.dtype).bytes
        return Primitive("fma", threads, threads), load(3 * size * p.rows * int(t["row_threads"]), size)

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        return make_inputs(self.own(problem), kind, rng, centred=self.centred)

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        return reference(self.own(problem), inputs, centred=self.centred)


def _with_rows(problem: RowProblem, rows: int) -> RowProblem:
    return type(problem)(**{**problem.canonical(), "shape": (rows, problem.columns)})


def _threads(tunables: Mapping[str, Any]) -> int:
    return int(tunables["row_threads"]) * int(tunables["rows"])


def _capacity(tunables: Mapping[str, Any]) -> int:
    """Elements that a row may have; 0: any."""
    t = tunables
    return 0 if t["algorithm"] == "online" else int(t["row_threads"]) * int(t["steps"]) * int(t["vector"])


def _shared_bytes(tunables: Mapping[str, Any], size: int) -> int:
    """As `shared_bytes` in rows.cuh. `size`: bytes of an element."""
    t = tunables
    states = _threads(t) // 32 * 16 if int(t["row_threads"]) > 32 else 0
    return states + (int(t["rows"]) * _capacity(t) * size if t["algorithm"] == "shared" else 0)


def _registers(tunables: Mapping[str, Any]) -> int:
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


def _kinds(problem: RowProblem, target: Target) -> dict[Value, Kind]:
    """What levels try of each algorithm."""
    width, size = problem.align, dtype(problem.dtype).bytes
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
    return kinds


def _online(problem: RowProblem, counts: tuple[int, ...]) -> Linked:
    return Linked(("row_threads", "rows"), tuple((count, _rows(problem, count)) for count in counts))


def _fitting(divisions: Iterator[tuple[int, int, int]], width: int, fitting: int) -> Iterator[tuple[int, int, int]]:
    """Those whose rows shared memory has room for."""
    return (division for division in divisions if math.prod(division) * width <= fitting)
