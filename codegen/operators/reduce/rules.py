"""When a schedule cannot work or is not worth compiling, with the numbers; what it takes of a multiprocessor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codegen.alignment import power_of_two
from codegen.dtypes import dtype
from codegen.operators.reduce.problem import ReduceProblem, size_of
from codegen.operators.reduce.space import form, geometry, most_in_flight
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, check_workspace
from codegen.search.schedule import Schedule
from codegen.targets import Target

COMBINE_THREADS = 256  # as combine_threads in kernel.cuh
# Addresses, counters and predicates; of a vector in flight its offset and predicate. Estimates.
OVERHEAD_REGISTERS, FLIGHT_REGISTERS = 32, 3
# Of an activation's derivative.
DERIVATIVE_REGISTERS = 12


def state_words(fn: str, element: str) -> int:
    """4-byte words of a state, as `state_words` in kernel.cuh."""
    if fn == "variance":
        return 3
    if fn in ("argmax", "logsumexp"):
        return 2
    return 2 if element == "int32" and fn in ("sum", "mean", "sum_of_squares") else 1


def shared_bytes(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> int:
    """Of a block of `run`."""
    t, words = tunables, state_words(signature["fn"], signature["dtype"])
    if t["algorithm"] == "row":
        return 4 * words * (t["threads"] // 32) if t["lanes"] > 32 else 0
    return 4 * words * t["threads"] * t["vector"] if t["threads"] > t["lanes"] else 0


def combine_shared_bytes(signature: Mapping[str, Any]) -> int:
    return 4 * state_words(signature["fn"], signature["dtype"]) * COMBINE_THREADS


def registers(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> int:
    """An estimate of a thread's registers."""
    s, t = signature, tunables
    inputs = 2 if s["two_inputs"] else 1
    flight = int(t["unroll"]) * (FLIGHT_REGISTERS + -(-inputs * int(t["vector"]) * dtype(s["dtype"]).bytes // 4))
    states = state_words(s["fn"], s["dtype"]) * (1 if t["algorithm"] == "row" else int(t["vector"]))
    values = int(t["vector"]) * (1 if t["algorithm"] == "row" else int(t["unroll"]))
    return flight + states + values + OVERHEAD_REGISTERS + (DERIVATIVE_REGISTERS if s["two_inputs"] else 0)


def workspace_bytes(problem: ReduceProblem, tunables: Mapping[str, Any]) -> int:
    """Exactly what `workspace_bytes` in kernel.cuh says."""
    if tunables["split"] == "none":
        return 0
    return 4 * state_words(problem.fn, problem.dtype) * geometry(problem, tunables).slices * problem.outputs


def rules(
    problem: ReduceProblem,
    signature: Mapping[str, Any],
    schedule: Schedule,
    target: Target,
    workspace_limit: int | None = None,
) -> Accepted | Rejected:
    t, p, own = schedule.as_dict(), problem, form(problem)
    values: dict[str, Any] = dict(t)
    threads, lanes, vector, unroll = (int(values[name]) for name in ("threads", "lanes", "vector", "unroll"))
    slices, by_rows = int(values["slices"]), values["algorithm"] == "row"
    inner = "reduced" if by_rows else "kept"
    broken = (
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
            (values["split"] == "none") == (slices == 1), "slices", f"{slices} slices where split is {values['split']}"
        )
    )
    if broken:
        return broken
    g = geometry(p, values)
    shared, estimate = shared_bytes(signature, values), registers(signature, values)
    across = g.chunk if by_rows else g.units
    return (
        check(slices == 1 or g.slices == slices, "slices", f"{slices} slices of {g.steps} steps; {g.slices} have some")
        or check(
            lanes == 1 or lanes < 2 * power_of_two(across),
            "lanes",
            f"{lanes} threads side by side are mostly idle for {across}",
        )
        or check(
            threads == lanes or threads // lanes < 2 * power_of_two(g.units if by_rows else g.chunk) or threads == 64,
            "threads",
            f"{threads // lanes} rows of threads are mostly idle for {g.units if by_rows else g.chunk}",
        )
        or check(
            unroll <= most_in_flight(g),
            "unroll",
            f"{unroll} vectors in flight, {g.apart} apart, are mostly none of {g.chunk}",
        )
        or check(g.slices <= 65535, "grid", f"{g.slices} slices; a launch has at most 65535")
        or check(
            shared <= target.shared_per_block,
            "shared_memory",
            f"{shared} bytes of shared memory; {target.name} has {target.shared_per_block} per block",
        )
        or check(
            estimate <= target.registers_per_thread,
            "registers",
            f"about {estimate} registers per thread; at most {target.registers_per_thread}",
        )
        or check(
            threads * estimate <= target.registers_per_sm,
            "registers",
            f"{threads} threads of about {estimate} registers; {target.name} has {target.registers_per_sm}",
        )
        or check_workspace(workspace_bytes(p, values), workspace_limit)
        or ACCEPTED
    )
