"""Reductions over any axes of an array, after a map of one element or of two: threads go along rows of neighbours, or
along columns of vectors."""

import math
from collections.abc import Mapping
from importlib.resources import files as packaged_files
from typing import Any

import numpy as np

from codegen.alignment import power_of_two
from codegen.counts import LaunchCounts, Openings
from codegen.dtypes import dtype
from codegen.epilogue import structures, tensor_nodes
from codegen.fixed_point import RINGS
from codegen.kernel import Kernel
from codegen.operand import packed_strides
from codegen.operator import (
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
from codegen.operators.reduce import counts, inputs, space
from codegen.operators.reduce.axes import MAX_AXES, WIDEST_BYTES, Merged
from codegen.operators.reduce.problem import APPROXIMATE, FUNCTIONS, MAPS, OF_TWO, ReduceProblem, size_of
from codegen.operators.reduce.reduced import MANY_SLICES, far_problem, long_problem, reduced_problems, special_problem
from codegen.operators.reduce.reference import reference
from codegen.operators.reduce.space import SECTOR, form, geometry, most_in_flight
from codegen.problem import Problem
from codegen.run_once import RunOnce
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, check_workspace, residency_rules
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.search.space import SearchSpace
from codegen.targets import Target

COMBINE_THREADS = 256  # as combine_threads in kernel.cuh
# Addresses, counters and predicates; of a vector in flight its offset and predicate. Estimates.
OVERHEAD_REGISTERS, FLIGHT_REGISTERS = 32, 3
# Of an activation's derivative.
DERIVATIVE_REGISTERS = 12
# Instructions of a value beside its load, by function: conversions, comparisons, exponentials. Estimates.
_PER_VALUE = {
    "sum": 1.0, "mean": 1.0, "sum_of_squares": 1.5, "max": 3.0, "min": 3.0, "argmax": 8.0, "variance": 6.0,
    "logsumexp": 14.0,
}  # fmt: skip
_OF_MAP = {"identity": 0.0, "square": 1.0, "multiply": 2.0, "relu_grad": 3.0}
_OF_DERIVATIVE = 40.0
# Slices that a thread of `combine` has in flight, as combine_unroll in kernel.cuh.
COMBINE_UNROLL = 8
WARP = 32
# Of a vector: its address, by axes that an index is divided into, and its predicate.
_PER_VECTOR, _PER_DIVISION = 6.0, 20.0


class Reduce(Operator):
    """out = epilogue(fn of map(x) along the axes); see ReduceProblem."""

    name = "reduce"
    problem_type = ReduceProblem
    tunables = space.TUNABLES
    folder = packaged_files("codegen.operators.reduce")
    shared = ("reduce.cuh",)
    extent_names = (
        *(f"extent_{i}" for i in range(MAX_AXES)), *(f"stride_{i}" for i in range(MAX_AXES)), "outputs",
    )  # fmt: skip
    attribute_names = ("reduced",)
    limited = (*extent_names[:MAX_AXES], extent_names[-1], *attribute_names)

    def signature(self, problem: Problem) -> dict[str, Any]:
        p = self.own(problem)
        own = space.form(p)
        return {
            "dtype": p.dtype, "out_dtype": p.out_dtype, "fn": p.fn, "map": p.map, "two_inputs": p.two_inputs,
            "write_map": p.write_map, "epilogue": structures(p.epilogue), "inner": own.inner, "align": own.align,
            "scattered": own.scattered,
            "kept_axes": len(own.kept.extents), "reduced_axes": len(own.reduced.extents),
        }  # fmt: skip

    def space(self, problem: Problem, target: Target, search: Search) -> SearchSpace:
        p = self.own(problem)
        return space.space(p, target, search, lambda schedule: self.rules(p, schedule, target))

    def rules(
        self, problem: Problem, schedule: Schedule, target: Target, workspace_limit: int | None = None
    ) -> Accepted | Rejected:
        p: ReduceProblem = self.own(problem)
        t: dict[str, Any] = dict(schedule.as_dict())
        threads, lanes, unroll = (int(t[name]) for name in ("threads", "lanes", "unroll"))
        slices, by_rows = int(t["slices"]), t["algorithm"] == "row"
        if broken := _form_rules(p, t):
            return broken
        g = geometry(p, t)
        s = self.signature(p)
        shared, estimate = _shared_bytes(s, t), _registers(s, t)
        across, down = (g.chunk, g.units) if by_rows else (g.units, g.chunk)
        if slices != 1 and g.slices != slices:
            return Rejected("slices", f"{slices} slices of {g.steps} steps; {g.slices} have some")
        if lanes != 1 and lanes >= 2 * power_of_two(across):
            return Rejected("lanes", f"{lanes} threads side by side are mostly idle for {across}")
        if threads != lanes and threads // lanes >= 2 * power_of_two(down) and threads != 64:
            return Rejected("threads", f"{threads // lanes} rows of threads are mostly idle for {down}")
        if unroll > most_in_flight(g):
            return Rejected("unroll", f"{unroll} vectors in flight, {g.apart} apart, are mostly none of {g.chunk}")
        if g.slices > 65535:
            return Rejected("grid", f"{g.slices} slices; a launch has at most 65535")
        return (
            residency_rules(1, threads, shared, estimate, target)
            or check_workspace(_workspace_bytes(p, t), workspace_limit)
            or ACCEPTED
        )

    def functions(self, kernel: Kernel) -> tuple[str, ...]:
        return ("run",) if kernel.tunables.get("split") == "none" else ("run", "combine")

    def config(self, kernel: Kernel) -> Config:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        flags = {
            "along_rows": t["algorithm"] == "row",
            "two_pass": t["split"] != "none",
            "two_inputs": s["map"] in OF_TWO,
            "write_map": s["write_map"],
            "scattered": s["scattered"],
        }
        numbers = {
            "fn": FUNCTIONS.index(s["fn"]), "map": MAPS.index(s["map"]),
            "kept_axes": s["kept_axes"], "reduced_axes": s["reduced_axes"],
        }  # fmt: skip
        types = (("Input", s["dtype"]), ("Output", s["out_dtype"]))
        return Config({**flags, **numbers, **constants(space.REST, t)}, tuple(s["epilogue"]), types, s["out_dtype"])

    def extents(self, problem: Problem) -> list[int]:
        """Missing axes come first."""
        p = self.own(problem)
        missing = MAX_AXES - len(p.shape)
        strides = (stride if extent != 1 else 0 for extent, stride in zip(p.shape, p.strides, strict=True))
        return [*[1] * missing, *p.shape, *[0] * missing, *strides, p.outputs]

    def attributes(self, problem: Problem) -> list[int]:
        """The reduced axes: the sum of 2 to the number of axes behind each."""
        p = self.own(problem)
        return [sum(1 << (len(p.shape) - 1 - axis) for axis in p.axes)]

    def operands(self, problem: Problem) -> tuple[Operand, ...]:
        """`dx` and both inputs have the same strides; what has the output's shape is packed."""
        p = self.own(problem)
        own = space.form(p)

        def array(name: str, role: Any) -> Operand:
            return Operand(name, p.dtype, role, p.shape, p.strides, own.align)

        def packed(name: str, element: str, role: Any) -> Operand:
            in_vectors = own.inner == "kept" and not own.scattered
            align = min(own.align, WIDEST_BYTES // dtype(element).bytes) if in_vectors else 1
            return Operand(name, element, role, p.out_shape, packed_strides(p.out_shape), align)

        return (
            *(array(name, "in") for name in (("dy", "x") if p.two_inputs else ("x",))),
            *(packed(name, element, "in") for _, name, element in tensor_nodes(p.epilogue, p.out_dtype)),
            packed("out", p.out_dtype, "out"),
            *((array("dx", "out"),) if p.write_map else ()),
        )

    def test_problems(self, kernel: Kernel) -> list[Problem]:
        return list(reduced_problems(kernel.signature_dict, kernel.tunables.as_dict()))

    def test_launches(self, kernel: Kernel, problem: Problem) -> list[list[int]]:
        """A few slices, one, many."""
        return [[1]] if kernel.tunables.get("split") == "none" else [[3], [1], [MANY_SLICES]]

    def run_once(self, kernel: Kernel) -> list[RunOnce]:
        """With as many slices as a device has room for blocks, of floats with what is no number, and far."""
        s, t, once = kernel.signature_dict, kernel.tunables.as_dict(), list[RunOnce]()
        if t["split"] != "none":
            problem, slices = long_problem(s, t)
            once.append(RunOnce("long", problem, tuple(slices)))
        if s["dtype"] not in ("int32", "int64") and s["map"] not in APPROXIMATE:
            special = special_problem(s, t)
            once.append(RunOnce("special", special, tuple(self.test_launches(kernel, special)[0])))
        if far := far_problem(s, t):
            once.append(RunOnce("far", far, tuple(self.test_launches(kernel, far)[0]), far))
        return once

    def edge_calls(self, kernel: Kernel) -> list[EdgeCall]:
        """Without outputs."""
        return [EdgeCall({"outputs": 0}, False)]

    def make_inputs(self, problem: Problem, kind: InputKind, rng: np.random.Generator) -> dict[str, Array]:
        p = self.own(problem)
        return inputs.make_inputs(p, self.operands(p), kind, rng)

    def reference(self, problem: Problem, inputs: Mapping[str, Array], exact: bool = False) -> tuple[Float64, Float64]:
        return reference(self.own(problem), inputs, exact)

    def exact(self, kernel: Kernel) -> bool:
        s = kernel.signature_dict
        return (
            s["map"] not in APPROXIMATE and s["fn"] not in ("mean", "variance", "logsumexp") and super().exact(kernel)
        )

    def cost(self, problem: Problem, schedule: Schedule) -> Cost:
        """Every operand moves once; an operation per value, and those of its map."""
        p, t = self.own(problem), schedule.as_dict()
        moved = {"in": 0, "out": 0}
        for operand in self.operands(p):
            moved[operand.role] += dtype(operand.dtype).bytes * math.prod(operand.shape)
        flops = p.outputs * p.count * (1 if p.map == "identity" else 2)
        return Cost(flops, moved["in"], moved["out"], 1 if t["split"] == "none" else 2, _workspace_bytes(p, t))

    def multiplications(self, problem: Problem) -> int:
        """By the map, and of squares."""
        p = self.own(problem)
        by_map, squared = p.map not in ("identity", "relu_grad"), p.fn in ("sum_of_squares", "variance")
        return int(p.outputs * p.count * (by_map + squared))

    def launches(self, problem: Problem, schedule: Schedule, target: Target) -> tuple[LaunchCounts, ...]:
        return counts.launches(self.own(problem), schedule.as_dict(), self.multiplications(problem))

    def ring_bytes(self, problem: Problem, schedule: Schedule, openings: Openings) -> int | None:
        """Shares are added up locally. `max` and `min` are comparisons throughout, of which nothing is counted."""
        p = self.own(problem)
        return 0 if p.dtype in RINGS and p.out_dtype == p.dtype and p.fn == "sum" and p.map == "identity" else None

    def work(self, problem: Problem, schedule: Schedule, target: Target) -> Work:
        """A stream of loads, `unroll` of them in flight."""
        p: ReduceProblem = self.own(problem)
        s, t, least = self.signature(p), dict[str, Any](schedule.as_dict()), self.cost(p, schedule)
        g, own = geometry(p, t), form(p)
        values = float(p.outputs) * p.count
        vectors = values / t["vector"]
        divisions = len(own.reduced.extents) - 1
        per_value = _PER_VALUE[p.fn] + _OF_MAP.get(p.map, _OF_DERIVATIVE) + (size_of(p) < 4)
        other = values * per_value + vectors * (_PER_VECTOR + _PER_DIVISION * divisions)
        partial = float(least.workspace_bytes)
        # What of a sector a warp's access does not use is fetched too, and whole sectors are written for an output.
        waste = _sectors(p, t) * SECTOR
        scattered = float(p.outputs) * (SECTOR - dtype(p.out_dtype).bytes) if own.scattered else 0.0
        blocks = g.groups * g.slices
        shared = _shared_bytes(s, t)
        return Work(
            blocks=blocks, threads=t["threads"], fma=_added(p, values), other_instructions=other,
            shared_bytes=2.0 * blocks * shared,
            l2_bytes=least.bytes_read * waste + least.bytes_written + scattered + partial,
            dram_bytes=least.bytes_read * _gaps(p) + least.bytes_written, dynamic_shared_bytes=shared,
            independent=t["unroll"], steps=max(1, g.trips * t["unroll"]), overlap=0.9, prefetched=t["unroll"],
            others=(_combine(p, g.slices, s),) if t["split"] != "none" else (),
        )  # fmt: skip

    def launch_bounds(self, kernel: Kernel, function: str) -> LaunchBounds:
        return LaunchBounds(int(kernel.tunables.get("threads")) if function == "run" else COMBINE_THREADS)

    def estimated_registers(self, kernel: Kernel) -> int:
        return _registers(kernel.signature_dict, kernel.tunables.as_dict())

    def shared_bytes(self, kernel: Kernel) -> int:
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        own = _shared_bytes(s, t)
        return own if t["split"] == "none" else max(own, _combine_shared_bytes(s))

    def predicted_compile_seconds(self, kernel: Kernel) -> float:
        """Grows with the values that a thread has at once."""
        s, t = kernel.signature_dict, kernel.tunables.as_dict()
        costly = s["map"] in APPROXIMATE or s["fn"] in ("variance", "logsumexp")
        values = int(t["unroll"]) * int(t["vector"])
        return 0.03 + values * (0.003 if costly else 0.0008) + (0.02 if t["split"] != "none" else 0.0)


def _form_rules(p: ReduceProblem, t: Mapping[str, Any]) -> Rejected | None:
    """How threads, vectors and slices go together, and with the axes."""
    own = form(p)
    threads, lanes, vector = (int(t[name]) for name in ("threads", "lanes", "vector"))
    slices = int(t["slices"])
    inner = "reduced" if t["algorithm"] == "row" else "kept"
    return (
        check(lanes <= threads, "lanes", f"{lanes} threads side by side of a block of {threads}")
        or check(
            vector == 1 or own.inner == inner,
            "vector",
            f"vectors of {vector} along the {inner} axes, whose elements are no neighbours",
        )
        or check(
            own.align % vector == 0,
            "vector",
            f"vectors of {vector} elements; rows begin at multiples of {own.align} ({size_of(p)} bytes each)",
        )
        or check(
            (t["split"] == "none") == (slices == 1),
            "slices",
            f"{slices} slices where split is {t['split']}",
        )
    )


def _shared_bytes(s: Mapping[str, Any], t: Mapping[str, Any]) -> int:
    """Of a block of `run`."""
    words = counts.state_words(s["fn"], s["dtype"])
    if t["algorithm"] == "row":
        return 4 * words * (t["threads"] // 32) if t["lanes"] > 32 else 0
    return 4 * words * t["threads"] * t["vector"] if t["threads"] > t["lanes"] else 0


def _combine_shared_bytes(s: Mapping[str, Any]) -> int:
    return 4 * counts.state_words(s["fn"], s["dtype"]) * COMBINE_THREADS


def _registers(s: Mapping[str, Any], t: Mapping[str, Any]) -> int:
    """An estimate of a thread's registers."""
    inputs = 2 if s["two_inputs"] else 1
    flight = int(t["unroll"]) * (FLIGHT_REGISTERS + -(-inputs * int(t["vector"]) * dtype(s["dtype"]).bytes // 4))
    states = counts.state_words(s["fn"], s["dtype"]) * (1 if t["algorithm"] == "row" else int(t["vector"]))
    values = int(t["vector"]) * (1 if t["algorithm"] == "row" else int(t["unroll"]))
    return flight + states + values + OVERHEAD_REGISTERS + (DERIVATIVE_REGISTERS if s["two_inputs"] else 0)


def _workspace_bytes(problem: ReduceProblem, tunables: Mapping[str, Any]) -> int:
    """Exactly what `workspace_bytes` in kernel.cuh says."""
    if tunables["split"] == "none":
        return 0
    return 4 * counts.state_words(problem.fn, problem.dtype) * geometry(problem, tunables).slices * problem.outputs


def _sectors(problem: ReduceProblem, t: Mapping[str, Any]) -> float:
    """Of 32 bytes, that a warp's loads touch, for each byte that it uses."""
    g, own, size = geometry(problem, t), form(problem), size_of(problem)
    by_rows = t["algorithm"] == "row"
    along, other = (own.reduced, own.kept) if by_rows else (own.kept, own.reduced)
    across, down = (g.chunk, g.units) if by_rows else (g.units, g.chunk)
    beside = min(t["lanes"], WARP, across)
    below = min(max(1, WARP // t["lanes"]), down)
    touched = _touched(beside * t["vector"], along, size) * _touched(below, other, size)
    return float(touched / (beside * t["vector"] * below * size))


def _touched(elements: int, axes: Merged, size: int) -> float:
    """Sectors of so many elements that follow each other in a list of axes, from a sector's beginning on."""
    together = max(1, min(elements, axes.extents[-1]))
    return elements / together * min(together, -(-together * axes.strides[-1] * size // SECTOR) or 1)


def _gaps(problem: ReduceProblem) -> float:
    """Bytes of the sectors that hold an array, for each byte of its elements."""
    apart = min((s for extent, s in zip(problem.shape, problem.strides, strict=True) if extent > 1), default=1)
    return float(min(apart, SECTOR // size_of(problem)))


def _added(problem: ReduceProblem, values: float) -> float:
    """Additions of so many values; extremes are compared, which is counted beside them."""
    return 0.0 if problem.fn in ("max", "min", "argmax") else values


def _combine(problem: ReduceProblem, slices: int, s: Mapping[str, Any]) -> Work:
    columns = 1  # as combine_columns in kernel.cuh
    while columns < min(COMBINE_THREADS, problem.outputs) and (columns < 8 or COMBINE_THREADS // columns > 2 * slices):
        columns *= 2
    states = float(problem.outputs) * slices
    words = counts.state_words(problem.fn, problem.dtype)
    moved = 4.0 * words * states
    return Work(
        blocks=-(-problem.outputs // columns), threads=COMBINE_THREADS, fma=_added(problem, states),
        other_instructions=10.0 * states, shared_bytes=2.0 * _combine_shared_bytes(s),
        l2_bytes=moved, dram_bytes=0.0, dynamic_shared_bytes=_combine_shared_bytes(s), independent=1,
        steps=-(-slices * columns // COMBINE_THREADS), overlap=0.5, prefetched=COMBINE_UNROLL,
    )  # fmt: skip


OPERATOR = Reduce()
