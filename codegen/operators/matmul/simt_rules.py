"""When a schedule of the kernel on the CUDA cores cannot work or is not worth compiling.

Every static_assert of gemm/simt.cuh is a rule here.
"""

from collections.abc import Mapping
from typing import Any

from codegen.dtypes import dtype
from codegen.operators.matmul import grid, split
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check_workspace
from codegen.search.schedule import Schedule
from codegen.targets import Target

# Addresses, loop counters and predicates. Measured with ptxas 13.2 on 288 kernels of levels 1 and 2 (sm_80, sm_90a; nn,
# nt, tn): with these the estimate below is 13 too high at most and 12 too low in the median, and every kernel that
# ptxas spilled is over what it was allowed. 1,024 threads of 4 x 4 outputs are the usual case.
OVERHEAD_REGISTERS = 39
TYPICAL_SHORTFALL = 12


def threads(tunables: Mapping[str, Any]) -> int:
    """Threads of a block."""
    count: int = (tunables["tile_m"] // tunables["thread_m"]) * (tunables["tile_n"] // tunables["thread_n"])
    return count


def shared_bytes(tunables: Mapping[str, Any], size: int = 4) -> int:
    """Dynamic shared memory of a block, as `shared_bytes` in gemm/simt.cuh. `size`: bytes of an element."""
    t = tunables
    elements: int = t["stages"] * t["tile_k"] * (t["tile_m"] + t["tile_n"] + 2 * t["padding"])
    return size * elements


def registers(tunables: Mapping[str, Any], size: int = 4) -> int:
    """An estimate of a thread's registers: accumulators (two sets where tiles are truncated), fragments, and what the
    loaders hold on the way. `size`: bytes of an element."""
    t = tunables
    fragments = t["fragments"] * (t["thread_m"] + t["thread_n"])
    sums = t["thread_m"] * t["thread_n"] * (2 if t.get("truncate") == "tile" else 1)
    estimate: int = (sums + fragments + held(t)) * size // 4 + OVERHEAD_REGISTERS
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
    t, size = schedule.as_dict(), dtype(problem.dtype).bytes
    return (
        _shape_rules(t)
        or _vector_rules(t, problem, aligns)
        or split.rules(t, problem, target)
        or grid.residency_rules(int(t["min_blocks"]), threads(t), shared_bytes(t, size), registers(t, size), target)
        or _worth_rules(t, problem, size, target)
        or check_workspace(split.workspace_bytes(problem, t), workspace_limit)
        or ACCEPTED
    )


def _shape_rules(t: Mapping[str, Any]) -> Rejected | None:
    m, n, tm, tn, warp = t["tile_m"], t["tile_n"], t["thread_m"], t["thread_n"], t["warp_m"]
    if m % tm != 0 or n % tn != 0:
        return Rejected("thread_tile", f"threads of {tm}x{tn} do not cover a tile of {m}x{n}")
    count, across_m, across_n = threads(t), m // tm, n // tn
    if not (32 <= count <= 1024 and count % 32 == 0):
        return Rejected("threads", f"{m}x{n} / {tm}x{tn} = {count} threads; 32 to 1024 in whole warps")
    if 32 % warp != 0 or across_m % warp != 0:
        return Rejected("warp", f"{across_m} threads along m are no multiple of warp_m = {warp}")
    if across_n % (32 // warp) != 0:
        return Rejected("warp", f"{across_n} threads along n are no multiple of 32 / warp_m = {32 // warp}")
    if t["tile_k"] % t["unroll_k"] != 0:
        return Rejected("unroll", f"unroll_k = {t['unroll_k']} does not divide tile_k = {t['tile_k']}")
    if t["fragments"] != 1 and t["unroll_k"] % 2 != 0:
        return Rejected("fragments", f"2 fragment buffers need an even unroll_k, not {t['unroll_k']}")
    if t["padding"] % 4 != 0:
        return Rejected("padding", f"padding = {t['padding']} breaks the alignment to 4 floats")
    return None


def _vector_rules(t: Mapping[str, Any], problem: MatmulProblem, aligns: tuple[int, int]) -> Rejected | None:
    row_a = t["tile_m"] if problem.a_transposed else t["tile_k"]
    row_b = t["tile_k"] if problem.b_transposed else t["tile_n"]
    if row_a % aligns[0] != 0:
        return Rejected("vector", f"a tile row of A has {row_a} elements, no multiple of {aligns[0]}")
    if row_b % aligns[1] != 0:
        return Rejected("vector", f"a tile row of B has {row_b} elements, no multiple of {aligns[1]}")
    return None


def _worth_rules(t: Mapping[str, Any], problem: MatmulProblem, size: int, target: Target) -> Rejected | None:
    """What works, but cannot win: it repeats another schedule's code or order, or computes mostly padding."""
    k, slices = problem.k, t["split_k"]
    steps = grid.k_steps(k, t["tile_k"]) // slices  # of the shortest slice
    unforced = target.registers_per_sm // (2 * threads(t))
    if broken := grid.padding_rules(t, problem, 8):
        return broken
    if t["stages"] != 1 and steps <= 1:
        return Rejected("stages", f"2 stages with one step: k = {k}, tile_k = {t['tile_k']}, split_k = {slices}")
    if t["min_blocks"] != 1 and registers(t, size) + TYPICAL_SHORTFALL <= unforced:
        return Rejected("min_blocks", f"2 blocks of about {registers(t, size)} registers fit unasked ({unforced} each)")
    return grid.order_rules(t, problem)
