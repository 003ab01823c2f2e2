"""When a matmul schedule cannot work or is not worth compiling. Every static_assert of kernel.cuh is a rule here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.space import blocks, power_of_two
from codegen.problem import LARGEST_EXTENT
from codegen.rules import ACCEPTED, Accepted, Rejected, check, check_workspace
from codegen.schedule import Schedule
from codegen.targets import Target

# Addresses, loop counters and predicates. Measured with ptxas 13.2 on 288 kernels of levels 1 and 2 (sm_80, sm_90a; nn,
# nt, tn): with these the estimate below is 13 too high at most and 12 too low in the median, and every kernel that
# ptxas spilled is over what it was allowed. 1,024 threads of 4 x 4 outputs are the usual case.
OVERHEAD_REGISTERS = 39
TYPICAL_SHORTFALL = 12


def threads(tunables: Mapping[str, Any]) -> int:
    """Threads of a block."""
    found: int = (tunables["tile_m"] // tunables["thread_m"]) * (tunables["tile_n"] // tunables["thread_n"])
    return found


def shared_bytes(tunables: Mapping[str, Any]) -> int:
    """Dynamic shared memory of a block, as `shared_bytes` in kernel.cuh."""
    t = tunables
    floats: int = t["stages"] * t["tile_k"] * (t["tile_m"] + t["tile_n"] + 2 * t["padding"])
    return 4 * floats


def registers(tunables: Mapping[str, Any]) -> int:
    """An estimate of a thread's registers: accumulators, fragments, and what the loaders hold on the way."""
    t = tunables
    fragments = t["fragments"] * (t["thread_m"] + t["thread_n"])
    estimate: int = t["thread_m"] * t["thread_n"] + fragments + held(t) + OVERHEAD_REGISTERS
    return estimate


def held(tunables: Mapping[str, Any]) -> int:
    """Elements that a thread carries from global to shared memory in one step."""
    t = tunables
    elements: int = -(-t["tile_k"] * (t["tile_m"] + t["tile_n"]) // max(1, threads(t)))
    return elements


def rules(
    problem: MatmulProblem, aligns: tuple[int, int], schedule: Schedule, target: Target, workspace_limit: int | None
) -> Accepted | Rejected:
    """`aligns` are elements per access of A and B."""
    t = schedule.as_dict()
    return (
        _shape_rules(t)
        or _vector_rules(t, problem, aligns)
        or _resource_rules(t, target)
        or _worth_rules(t, problem, target)
        or check_workspace(0, workspace_limit)
        or ACCEPTED
    )


def _shape_rules(t: Mapping[str, Any]) -> Rejected | None:
    m, n, tm, tn, warp = t["tile_m"], t["tile_n"], t["thread_m"], t["thread_n"], t["warp_m"]
    if broken := check(
        m % tm == 0 and n % tn == 0, "thread_tile", f"threads of {tm}x{tn} do not cover a tile of {m}x{n}"
    ):
        return broken
    count, across_m, across_n = threads(t), m // tm, n // tn
    return (
        check(
            32 <= count <= 1024 and count % 32 == 0,
            "threads",
            f"{m}x{n} / {tm}x{tn} = {count} threads; 32 to 1024 in whole warps",
        )
        or check(
            32 % warp == 0 and across_m % warp == 0,
            "warp",
            f"{across_m} threads along m are no multiple of warp_m = {warp}",
        )
        or check(
            across_n % (32 // warp) == 0,
            "warp",
            f"{across_n} threads along n are no multiple of 32 / warp_m = {32 // warp}",
        )
        or check(
            t["tile_k"] % t["unroll_k"] == 0,
            "unroll",
            f"unroll_k = {t['unroll_k']} does not divide tile_k = {t['tile_k']}",
        )
        or check(
            t["fragments"] == 1 or t["unroll_k"] % 2 == 0,
            "fragments",
            f"2 fragment buffers need an even unroll_k, not {t['unroll_k']}",
        )
        or check(t["padding"] % 4 == 0, "padding", f"padding = {t['padding']} breaks the alignment to 4 floats")
    )


def _vector_rules(t: Mapping[str, Any], problem: MatmulProblem, aligns: tuple[int, int]) -> Rejected | None:
    row_a = t["tile_m"] if problem.a_transposed else t["tile_k"]
    row_b = t["tile_k"] if problem.b_transposed else t["tile_n"]
    return check(
        row_a % aligns[0] == 0, "vector", f"a tile row of A has {row_a} elements, no multiple of {aligns[0]}"
    ) or check(row_b % aligns[1] == 0, "vector", f"a tile row of B has {row_b} elements, no multiple of {aligns[1]}")


def _resource_rules(t: Mapping[str, Any], target: Target) -> Rejected | None:
    count, shared, wanted, resident = threads(t), shared_bytes(t), registers(t), t["min_blocks"]
    per_block = shared + target.reserved_shared_bytes
    in_file = target.registers_per_sm
    return (
        check(
            shared <= target.shared_per_block,
            "shared_memory",
            f"{shared} bytes of shared memory; {target.name} has {target.shared_per_block} per block",
        )
        or check(
            resident * count <= target.max_threads_per_sm,
            "min_blocks",
            f"{resident} x {count} threads; {target.name} holds {target.max_threads_per_sm}",
        )
        or check(
            resident * per_block <= target.shared_per_sm,
            "min_blocks",
            f"{resident} x {per_block} bytes of shared memory; {target.name} has {target.shared_per_sm}",
        )
        or check(
            wanted <= target.registers_per_thread,
            "registers",
            f"about {wanted} registers per thread; at most {target.registers_per_thread}",
        )
        or check(
            resident * count * wanted <= in_file,
            "registers",
            f"{resident} x {count} threads of about {wanted} registers; {target.name} has {in_file}",
        )
    )


def _worth_rules(t: Mapping[str, Any], problem: MatmulProblem, target: Target) -> Rejected | None:
    """What works, but cannot win: it repeats another schedule's code or order, or computes mostly padding."""
    m, n, k, raster = problem.m, problem.n, problem.k, t["raster"]
    tiles_m, tiles_n = -(-m // t["tile_m"]), -(-n // t["tile_n"])
    grid = blocks(problem, t["tile_m"], t["tile_n"])
    unforced = target.registers_per_sm // (2 * threads(t))
    return (
        check(
            t["tile_m"] <= max(16, power_of_two(m)), "tile_m", f"tile_m = {t['tile_m']} is mostly padding for m = {m}"
        )
        or check(
            t["tile_n"] <= max(16, power_of_two(n)), "tile_n", f"tile_n = {t['tile_n']} is mostly padding for n = {n}"
        )
        or check(
            t["tile_k"] <= max(8, power_of_two(k)), "tile_k", f"tile_k = {t['tile_k']} is mostly padding for k = {k}"
        )
        or check(
            t["stages"] == 1 or k > t["tile_k"], "stages", f"2 stages with one step: k = {k}, tile_k = {t['tile_k']}"
        )
        or check(
            t["min_blocks"] == 1 or registers(t) + TYPICAL_SHORTFALL > unforced,
            "min_blocks",
            f"2 blocks of about {registers(t)} registers fit unasked ({unforced} each)",
        )
        or check(
            raster == 0 or (tiles_m > 1 and tiles_n > 1),
            "raster",
            f"raster = {raster} orders {tiles_m} x {tiles_n} tiles as 0 does",
        )
        or check(
            raster < 2 or tiles_m > raster,
            "raster",
            f"bands of {raster} rows order {tiles_m} rows of tiles as raster = 1 does",
        )
        or check(grid <= LARGEST_EXTENT, "grid", f"{grid} blocks; a launch has at most {LARGEST_EXTENT}")
    )
