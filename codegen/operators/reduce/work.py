"""What a schedule costs, and what it does to the machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from codegen.dtypes import dtype
from codegen.operator import Cost, Operand, Work
from codegen.operators.reduce.axes import Merged
from codegen.operators.reduce.problem import APPROXIMATE, ReduceProblem, size_of
from codegen.operators.reduce.rules import (
    COMBINE_THREADS,
    combine_shared_bytes,
    shared_bytes,
    state_words,
    workspace_bytes,
)
from codegen.operators.reduce.space import SECTOR, form, geometry
from codegen.search.schedule import Schedule

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


def cost(problem: ReduceProblem, schedule: Schedule, operands: Sequence[Operand]) -> Cost:
    """Every operand moves once; an operation per value, and those of its map."""
    values, moved = problem.outputs * problem.count, {"in": 0, "out": 0}
    for operand in operands:
        moved[operand.role] += dtype(operand.dtype).bytes * math.prod(operand.shape)
    flops = values * (1 if problem.map == "identity" else 2)
    launches = 1 if schedule.get("split") == "none" else 2
    return Cost(flops, moved["in"], moved["out"], launches, workspace_bytes(problem, schedule.as_dict()))


def work(problem: ReduceProblem, schedule: Schedule, signature: Mapping[str, Any], least: Cost) -> Work:
    """Counts for the roofline: a stream of loads, `unroll` of them in flight."""
    t: dict[str, Any] = schedule.as_dict()
    g, own = geometry(problem, t), form(problem)
    values = float(problem.outputs) * problem.count
    vectors = values / t["vector"]
    divisions = len(own.reduced.extents) - 1
    per_value = _PER_VALUE[problem.fn] + _OF_MAP.get(problem.map, _OF_DERIVATIVE) + (size_of(problem) < 4)
    other = values * per_value + vectors * (_PER_VECTOR + _PER_DIVISION * divisions)
    partial = float(least.workspace_bytes)
    # Neighbours of a warp's access that are of no use to it are fetched too, and whole sectors written for an output.
    waste = _sectors(problem, t) * SECTOR
    scattered = float(problem.outputs) * (SECTOR - dtype(problem.out_dtype).bytes) if own.scattered else 0.0
    blocks = g.groups * g.slices
    shared = shared_bytes(signature, t)
    return Work(
        blocks=blocks, threads=t["threads"], fma=_added(problem, values), other_instructions=other,
        shared_bytes=2.0 * blocks * shared,
        l2_bytes=least.bytes_read * waste + least.bytes_written + scattered + partial,
        dram_bytes=least.bytes_read * _gaps(problem) + least.bytes_written, dynamic_shared_bytes=shared,
        independent=t["unroll"], steps=max(1, g.trips * t["unroll"]), overlap=0.9, prefetched=t["unroll"],
        others=(_combine(problem, g.slices, signature),) if t["split"] != "none" else (),
    )  # fmt: skip


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


def _combine(problem: ReduceProblem, slices: int, signature: Mapping[str, Any]) -> Work:
    columns = 1  # as combine_columns in kernel.cuh
    while columns < min(COMBINE_THREADS, problem.outputs) and (columns < 8 or COMBINE_THREADS // columns > 2 * slices):
        columns *= 2
    states = float(problem.outputs) * slices
    words = state_words(problem.fn, problem.dtype)
    moved = 4.0 * words * states
    return Work(
        blocks=-(-problem.outputs // columns), threads=COMBINE_THREADS, fma=_added(problem, states),
        other_instructions=10.0 * states, shared_bytes=2.0 * combine_shared_bytes(signature),
        l2_bytes=moved, dram_bytes=0.0, dynamic_shared_bytes=combine_shared_bytes(signature), independent=1,
        steps=-(-slices * columns // COMBINE_THREADS), overlap=0.5, prefetched=COMBINE_UNROLL,
    )  # fmt: skip


def compile_seconds(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> float:
    """CPU seconds of nvcc for one more kernel of a group: grows with the values that a thread has at once."""
    t = tunables
    values = int(t["unroll"]) * int(t["vector"])
    costly = signature["map"] in APPROXIMATE or signature["fn"] in ("variance", "logsumexp")
    per_value = 0.003 if costly else 0.0008
    return 0.03 + values * per_value + (0.02 if t["split"] != "none" else 0.0)
