"""The kernel on the CUDA cores: when a schedule cannot work or is not worth compiling, and what it does to the machine.

Every static_assert of gemm/simt.cuh is a rule here.
"""

from collections.abc import Mapping
from typing import Any

from codegen.dtypes import dtype
from codegen.fixed_point import IMADS, over_ring
from codegen.operator import Cost, LaunchBounds, Work
from codegen.operators.matmul import grid, split, traffic
from codegen.operators.matmul.kernel_family import Stored
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.traffic import node_seconds
from codegen.operators.matmul.truncations import truncations
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check_workspace, residency_rules
from codegen.search.schedule import Schedule
from codegen.targets import Target

# Addresses, loop counters and predicates. Measured with ptxas 13.2 on 288 kernels of levels 1 and 2 (sm_80, sm_90a; nn,
# nt, tn): with these the estimate below is 13 too high at most and 12 too low in the median, and every kernel that
# ptxas spilled is over what it was allowed. 1,024 threads of 4 x 4 outputs are the usual case.
OVERHEAD_REGISTERS = 39
TYPICAL_SHORTFALL = 12
# Instructions of a truncation beside `IMADS`: a shift and an addition of each word.
TRUNCATION = 2


def threads(tunables: Mapping[str, Any]) -> int:
    """Threads of a block."""
    count: int = (tunables["tile_m"] // tunables["thread_m"]) * (tunables["tile_n"] // tunables["thread_n"])
    return count


def shared_bytes(tunables: Mapping[str, Any], size: int = 4) -> int:
    """Dynamic shared memory of a block, as `shared_bytes` in gemm/simt.cuh. `size`: bytes of an element."""
    t = tunables
    elements: int = t["stages"] * t["tile_k"] * (t["tile_m"] + t["tile_n"] + 2 * t["padding"])
    return size * elements


def registers(tunables: Mapping[str, Any], stored: Stored) -> int:
    """An estimate of a thread's registers: accumulators (two sets where tiles are truncated), fragments, and what the
    loaders hold on the way."""
    t = tunables
    fragments = t["fragments"] * (t["thread_m"] + t["thread_n"])
    sums = t["thread_m"] * t["thread_n"] * (2 if t.get("truncate") == "tile" else 1)
    estimate: int = (sums + fragments + held(t)) * stored.size // 4 + OVERHEAD_REGISTERS
    return estimate


def held(tunables: Mapping[str, Any]) -> int:
    """Elements that a thread carries from global to shared memory in one step."""
    t = tunables
    elements: int = -(-t["tile_k"] * (t["tile_m"] + t["tile_n"]) // max(1, threads(t)))
    return elements


def launch_bounds(tunables: Mapping[str, Any]) -> LaunchBounds:
    """What the kernel promises."""
    return LaunchBounds(threads(tunables), int(tunables["min_blocks"]))


def rules(
    problem: MatmulProblem, aligns: tuple[int, int], schedule: Schedule, target: Target, workspace_limit: int | None
) -> Accepted | Rejected:
    """`aligns` are elements per access of A and B."""
    t, stored = schedule.as_dict(), Stored.of(problem, aligns)
    return (
        _shape_rules(t)
        or _vector_rules(t, problem, aligns)
        or split.rules(t, problem, target)
        or residency_rules(int(t["min_blocks"]), threads(t), shared_bytes(t, stored.size), registers(t, stored), target)
        or _worth_rules(t, problem, stored, target)
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


def _worth_rules(t: Mapping[str, Any], problem: MatmulProblem, stored: Stored, target: Target) -> Rejected | None:
    """What works, but cannot win: it repeats another schedule's code or order, or computes mostly padding."""
    k, slices = problem.k, t["split_k"]
    steps = grid.k_steps(k, t["tile_k"]) // slices  # of the shortest slice
    wanted, unforced = registers(t, stored), target.registers_per_sm // (2 * threads(t))
    if broken := grid.padding_rules(t, problem, 8):
        return broken
    if t["stages"] != 1 and steps <= 1:
        return Rejected("stages", f"2 stages with one step: k = {k}, tile_k = {t['tile_k']}, split_k = {slices}")
    if t["min_blocks"] != 1 and wanted + TYPICAL_SHORTFALL <= unforced:
        return Rejected("min_blocks", f"2 blocks of about {wanted} registers fit unasked ({unforced} each)")
    return grid.order_rules(t, problem)


def work(
    problem: MatmulProblem, tunables: Mapping[str, Any], aligns: tuple[int, int, int], least: Cost, target: Target
) -> Work:
    """Counts for the roofline. `aligns`: elements per global access of A, B and out; `least`: the problem's cost."""
    t, size = tunables, dtype(problem.dtype).bytes
    count, steps = threads(t), grid.k_steps(problem.k, t["tile_k"])
    tiles, slices = grid.blocks(problem, t["tile_m"], t["tile_n"]), t["split_k"]
    k_padded = steps * t["tile_k"]
    products = float(tiles) * t["tile_m"] * t["tile_n"] * k_padded
    ring = over_ring(problem)
    # Instructions beside the FMAs, per thread and k-row: fragment loads (16 bytes each), a share of loop and addresses.
    per_row = (t["thread_m"] + t["thread_n"]) / min(16 // size, t["thread_m"], t["thread_n"]) + 4.0 / t["unroll_k"]
    moved = t["tile_k"] * (t["tile_m"] / aligns[0] + t["tile_n"] / aligns[1]) / count * 6
    written = 2 * t["thread_m"] * t["thread_n"] * (1 + (slices == 1) * len(problem.epilogue)) * slices
    other = float(tiles) * count * (k_padded * per_row + steps * (moved + 12) + written * size / 4)
    other += truncations(problem, t) * TRUNCATION * size / 4
    # A fragment load serves a warp once per distinct word: warp_m distinct rows and 32 / warp_m distinct columns.
    fragments = (t["warp_m"] * t["thread_m"] + 32 // t["warp_m"] * t["thread_n"]) / 32.0
    filled = t["tile_k"] * (t["tile_m"] + t["tile_n"]) * _conflicts(problem, t, aligns)
    shared = float(size) * tiles * (count * k_padded * fragments + steps * filled)
    to_l2, to_dram = traffic.handed_on(problem, t, least, target)
    return Work(
        blocks=tiles * slices, threads=count, fma=0.0 if ring else products, other_instructions=other,
        imad=products * IMADS[problem.dtype] if ring else 0.0, shared_bytes=shared,
        l2_bytes=traffic.tile_bytes(problem, t) + to_l2,
        dram_bytes=traffic.input_traffic(problem, t, target) + to_dram,
        dynamic_shared_bytes=shared_bytes(t, size), independent=t["thread_m"] * t["thread_n"],
        steps=-(-steps // slices),
        overlap=0.35 + 0.35 * (t["stages"] == 2) + 0.15 * (t["fragments"] == 2),
        others=traffic.other_launches(problem, t, aligns[2], least, target),
    )  # fmt: skip


def _conflicts(problem: MatmulProblem, t: Mapping[str, Any], aligns: tuple[int, int, int]) -> float:
    """How often the store of a tile to shared memory is replayed: turned tiles write words of few banks."""
    turned = (not problem.a_transposed) + problem.b_transposed
    replay = 2.0 if t["padding"] else 8.0
    return 1.0 + turned * (replay - 1.0) / 2.0 / (1.0 if aligns[0] == 4 else 2.0)


def compile_seconds(tunables: Mapping[str, Any], epilogue: tuple[str, ...], stored: Stored) -> float:
    """Grows with what unrolling and the epilogue write; fitted to nvcc 13.2: 0.07 to 0.35 CPU seconds."""
    t = tunables
    outputs = int(t["thread_m"]) * int(t["thread_n"]) * stored.size // 4
    return 0.055 + outputs * (0.0018 * int(t["unroll_k"]) / 8 + node_seconds(epilogue)) + 0.001 * held(t)
