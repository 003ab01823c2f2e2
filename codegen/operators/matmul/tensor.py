"""The tensor-core kernel: when a schedule cannot work or is not worth compiling, and what it does to the machine.

Every static_assert of gemm/tensor.cuh is a rule here, and what its instructions and its registers demand.
"""

import math
from collections.abc import Mapping
from typing import Any

from codegen.dtypes import dtype
from codegen.operator import Cost, LaunchBounds, Work
from codegen.operators.matmul import grid, split, traffic
from codegen.operators.matmul.kernel_family import AMPERE, Stored, mma_type
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.traffic import node_seconds
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, check_workspace, residency_rules
from codegen.search.schedule import Schedule
from codegen.targets import Target

# k of a k-step in bytes, of all element types: what one mma.sync takes (`step_bytes` in gemm/tensor.cuh).
STEP_BYTES = 32
# Of k per row of a tile: less is half a sector, more is beyond the swizzle's 128 bytes of banks.
ROW_BYTES = (32, 64, 128)
# k of the mma.sync instructions by input type (PTX ISA, "mma"), and the architecture that has them.
MMA_K = {
    "float16": {8: 75, 16: AMPERE},
    "bfloat16": {16: AMPERE},
    "float32": {8: AMPERE},
    "int8": {32: AMPERE},
}
# What cp.async copies at once (PTX ISA, "cp.async").
LEAST_COPY_BYTES = 4
LARGEST_STATIC_K = 1024
# Instructions of a copy through registers, with its addresses and checks: 12 to 24 in SASS of nvcc 13.2 (fp16 on sm_75
# and sm_80 with accesses of 2, 4, 8 and 16 bytes, int8 of 1 and 2).
REGISTER_COPY = 20
# Floats between the rows of a warp's exchange buffer beyond its columns (`exchange_padding` in gemm/tensor.cuh).
EXCHANGE_PADDING = 8
# Registers beside accumulators and fragments. These constants are fitted so that kernels of levels 0 and 1 do not
# spill: of 1298 that were compiled with ptxas 13.2 (sm_75, sm_80, sm_90a; all four types, layouts nn, nt, tn and tt,
# aligned and not, with and without bias, gelu and residual) they reject the 6 that did and 42 that did not. Of 920 more
# that copy through registers, sampled where registers are scarce, they reject 339 that spilled and 134 that did not and
# accept one that spilled, 4 bytes. Of what is accepted the estimate is right in the median and 84 too low at most:
# ptxas takes what it finds, but manages with less.
OVERHEAD_REGISTERS = 52
# Of a kernel whose registers are limited (maxnreg, min_blocks): little or nothing spills then.
LEAST_OVERHEAD = 32
# A cp.async of a thread beyond this many in a step: its address and its check are kept, or what is kept instead spills.
FEW_COPIES, CP_ASYNC_REGISTERS = 16, 6
# Of a copy through registers, beside its data: where an access is a word or more, where it is less, and where besides a
# row has more accesses than the block threads, so that every access has an address of its own.
WIDE_COPY_REGISTERS, NARROW_COPY_REGISTERS, LONG_ROW_REGISTERS = 0.25, 1.8, 4.0
# Of four rows of bytes that are turned together, beside the words that hold them.
TURNED_REGISTERS = 11
# Of an operand whose fragments are read word by word (tf32 that does not lie along k): an address for each row.
BY_WORDS_REGISTERS = 8
# Lanes of a warp; bytes that one ldmatrix.x4 brings it.
WARP, MATRIX_BYTES = 32, 512


def threads(tunables: Mapping[str, Any]) -> int:
    """Threads of a block."""
    count: int = 32 * tunables["warps_m"] * tunables["warps_n"]
    return count


def warp_tile(tunables: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of the output that a warp computes."""
    return tunables["tile_m"] // tunables["warps_m"], tunables["tile_n"] // tunables["warps_n"]


def shared_bytes(tunables: Mapping[str, Any], size: int) -> int:
    """Dynamic shared memory of a block, as `shared_bytes` in gemm/tensor.cuh. `size`: bytes of an input element."""
    t = tunables
    ring: int = t["stages"] * (t["tile_m"] + t["tile_n"]) * t["tile_k"] * size
    exchange = t["warps_m"] * t["warps_n"] * 16 * (warp_tile(t)[1] + EXCHANGE_PADDING) * 4
    return max(ring, exchange if t["epilogue_path"] == "shared" else 0)


def sums(tunables: Mapping[str, Any]) -> int:
    """Accumulators of a thread."""
    rows, columns = warp_tile(tunables)
    return rows * columns // 32


def accesses(tunables: Mapping[str, Any], stored: Stored) -> tuple[int, int]:
    """How many vectors of A's and of B's tile a thread copies in a step."""
    t, count = tunables, threads(tunables)
    align_a, align_b = stored.aligns
    return -(-t["tile_m"] * t["tile_k"] // (count * align_a)), -(-t["tile_n"] * t["tile_k"] // (count * align_b))


def copy_registers(tunables: Mapping[str, Any], stored: Stored) -> int:
    """Registers in which a thread carries a step's tiles from global to shared memory, with what it keeps for that."""
    t, numbers, count = tunables, accesses(tunables, stored), threads(tunables)
    if t["copy"] == "cp_async":
        return CP_ASYNC_REGISTERS * max(0, sum(numbers) - FEW_COPIES)
    needed = 0.0
    rows = [t["tile_k"] if along else t[tile] for along, tile in zip(stored.along_k, ("tile_m", "tile_n"), strict=True)]
    for number, row, align, turned in zip(numbers, rows, stored.aligns, stored.turned, strict=True):
        if turned:
            needed += -(-number // 4) * (4 * max(1, align // 4) + TURNED_REGISTERS)
        elif align * stored.size < LEAST_COPY_BYTES:
            whole = count % (row // align) == 0
            needed += number * (1 + (NARROW_COPY_REGISTERS if whole else LONG_ROW_REGISTERS))
        else:
            needed += number * (align * stored.size // 4 + WIDE_COPY_REGISTERS)
    return math.ceil(needed)


def registers(tunables: Mapping[str, Any], stored: Stored) -> int:
    """An estimate of a thread's registers, on the safe side: accumulators, fragments of a k-step, copies."""
    return least_registers(tunables, stored) - LEAST_OVERHEAD + OVERHEAD_REGISTERS


def least_registers(tunables: Mapping[str, Any], stored: Stored) -> int:
    """Under a register limit: addresses are computed again instead of kept."""
    rows, columns = warp_tile(tunables)
    fragments: int = tunables["fragments"] * (rows + columns) // 4
    reading = fragments + BY_WORDS_REGISTERS * stored.by_words
    return sums(tunables) + reading + copy_registers(tunables, stored) + LEAST_OVERHEAD


def launch_bounds(tunables: Mapping[str, Any]) -> LaunchBounds:
    """What the kernel promises, and its limit of registers."""
    return LaunchBounds(threads(tunables), int(tunables["min_blocks"]), int(tunables["maxnreg"]))


def rules(
    problem: MatmulProblem, aligns: tuple[int, int], schedule: Schedule, target: Target, workspace_limit: int | None
) -> Accepted | Rejected:
    """`aligns` are elements per access of A and B."""
    t, stored = schedule.as_dict(), Stored.of(problem, aligns)
    return (
        _instruction_rules(t, problem, target)
        or _shape_rules(t, stored.size)
        or _copy_rules(t, stored, target)
        or split.rules(t, problem, target)
        or _resource_rules(t, stored, target)
        or _worth_rules(t, problem, stored, target)
        or check_workspace(split.workspace_bytes(problem, t), workspace_limit)
        or ACCEPTED
    )


def _instruction_rules(t: Mapping[str, Any], problem: MatmulProblem, target: Target) -> Rejected | None:
    by_k, mma_k = MMA_K[problem.dtype], t["mma_k"]
    name = "tf32" if problem.dtype == "float32" else problem.dtype
    if mma_k not in by_k:
        return Rejected("mma", f"mma.sync on {name} has k = {' or '.join(map(str, by_k))}, not mma_k = {mma_k}")
    if target.capability < by_k.get(mma_k, 0):
        return Rejected(
            "mma", f"mma.sync on {name} with k = {mma_k} needs sm_{by_k.get(mma_k)}; the target is {target.name}"
        )
    return None


def _shape_rules(t: Mapping[str, Any], size: int) -> Rejected | None:
    row_bytes = t["tile_k"] * size
    if row_bytes not in ROW_BYTES:
        return Rejected(
            "tile_k", f"tile_k = {t['tile_k']} is {row_bytes} bytes; {', '.join(map(str, ROW_BYTES))} are allowed"
        )
    if broken := warp_rules(t):
        return broken
    if t["fragments"] != 1 and row_bytes % (2 * STEP_BYTES) != 0:
        return Rejected(
            "fragments",
            f"2 fragment buffers need an even number of {STEP_BYTES}-byte k-steps; tile_k = {t['tile_k']} has 1",
        )
    return None


def warp_rules(t: Mapping[str, Any]) -> Rejected | None:
    """Warps share a tile in whole instructions, and are not too many for a block."""
    for extents, share, axis in zip(("rows", "columns"), warp_tile(t), "mn", strict=True):
        tile, warps = t[f"tile_{axis}"], t[f"warps_{axis}"]
        if share * warps != tile or share % 16 != 0 or share <= 0:
            return Rejected("warp_tile", f"{tile} {extents} for {warps} warps are no multiple of 16 each")
    if threads(t) > 1024:
        return Rejected("threads", f"{t['warps_m']} x {t['warps_n']} warps are {threads(t)} threads; at most 1024")
    return None


def _copy_rules(t: Mapping[str, Any], stored: Stored, target: Target) -> Rejected | None:
    stages, narrowest = t["stages"], min(stored.aligns) * stored.size
    if t["copy"] == "registers":
        return check(stages <= 2, "copy", f"copies through registers have 1 or 2 stages, not {stages}")
    if target.capability < AMPERE:
        return Rejected("copy", f"cp.async needs sm_{AMPERE}; the target is {target.name}")
    if narrowest < LEAST_COPY_BYTES:
        return Rejected(
            "copy", f"cp.async copies at least {LEAST_COPY_BYTES} bytes; an operand is aligned to {narrowest}"
        )
    if any(stored.turned):
        return Rejected(
            "copy",
            f"bytes that do not lie along k are turned in registers: layout {stored.layout} needs copy = registers",
        )
    if stages < 2:
        return Rejected("copy", "cp.async needs a stage that is not being read: 2 stages at least")
    return None


def _resource_rules(t: Mapping[str, Any], stored: Stored, target: Target) -> Rejected | None:
    maxnreg, count = t["maxnreg"], threads(t)
    limited = maxnreg or t["min_blocks"] > 1
    wanted = least_registers(t, stored) if limited else registers(t, stored)
    if maxnreg and t["min_blocks"] != 1:
        return Rejected("maxnreg", f"CUDA takes maxnreg = {maxnreg} or min_blocks = {t['min_blocks']}, not both")
    if maxnreg * count > target.registers_per_sm:
        return Rejected(
            "maxnreg", f"{count} threads of {maxnreg} registers; {target.name} has {target.registers_per_sm}"
        )
    if maxnreg and wanted > maxnreg:
        return Rejected("registers", f"at least {wanted} registers per thread; maxnreg = {maxnreg} would spill")
    return residency_rules(t["min_blocks"], count, shared_bytes(t, stored.size), wanted, target)


def _stream_rule(t: Mapping[str, Any], stored: Stored, target: Target) -> Rejected | None:
    """Blocks of stream-K beyond those that are resident leave multiprocessors as idle as tiles do."""
    taken = min(registers(t, stored), launch_bounds(t).registers(target))
    by_registers = target.registers_per_sm // (threads(t) * taken)
    by_shared = target.shared_per_sm // (shared_bytes(t, stored.size) + target.reserved_shared_bytes)
    resident = min(by_registers, by_shared, target.max_threads_per_sm // threads(t), target.max_blocks_per_sm)
    return check(
        t["stream_blocks"] <= resident * target.sm_count,
        "stream_blocks",
        f"{t['stream_blocks']} blocks of stream-K; {target.name} has {resident} x {target.sm_count} at a time",
    )


def _worth_rules(t: Mapping[str, Any], problem: MatmulProblem, stored: Stored, target: Target) -> Rejected | None:
    """What works, but cannot win: it repeats another schedule's code or order, or computes mostly padding."""
    k, static_k, stages = problem.k, t["static_k"], t["stages"]
    blocks = split.grid_blocks(problem, t)
    steps = split.all_steps(problem, t) // blocks  # of the shortest block
    wanted, limit = registers(t, stored), launch_bounds(t).registers(target)
    if static_k not in (0, k) or static_k > LARGEST_STATIC_K:
        return Rejected("static_k", f"static_k = {static_k} is neither 0 nor k = {k}, or over {LARGEST_STATIC_K}")
    if broken := grid.padding_rules(t, problem, 2 * STEP_BYTES // stored.size):
        return broken
    if stages > max(2 if t["copy"] == "cp_async" else 1, steps):
        return Rejected(
            "stages", f"{stages} stages for {steps} steps: k = {k}, tile_k = {t['tile_k']}, {blocks} blocks"
        )
    if (t["maxnreg"] or t["min_blocks"] != 1) and wanted <= limit:
        return Rejected(
            "maxnreg" if t["maxnreg"] else "min_blocks", f"about {wanted} registers fit into {limit} unasked"
        )
    if t["split"] == "stream" and (broken := _stream_rule(t, stored, target)):
        return broken
    return grid.order_rules(t, problem)


def work(
    problem: MatmulProblem, tunables: Mapping[str, Any], aligns: tuple[int, int, int], least: Cost, target: Target
) -> Work:
    """Counts for the roofline. `aligns`: elements per global access of A, B and out; `least`: the problem's cost."""
    t, size = tunables, dtype(problem.dtype).bytes
    (rows, columns), steps = warp_tile(t), grid.k_steps(problem.k, t["tile_k"])
    tiles, blocks = grid.blocks(problem, t["tile_m"], t["tile_n"]), split.grid_blocks(problem, t)
    k_bytes = steps * t["tile_k"] * size
    filled = float(tiles * (t["tile_m"] + t["tile_n"]) * k_bytes)
    read = fragment_bytes(problem, t)
    # A block of stream-K has a part of a tile at each end.
    pieces = max(tiles * t["split_k"], tiles + blocks if t["split"] == "stream" else 0)
    outputs = float(pieces * t["tile_m"] * t["tile_n"])
    exchanged = 8.0 * outputs if t["epilogue_path"] == "shared" else 0.0
    to_l2, to_dram = traffic.handed_on(problem, t, least, target)
    if t["epilogue_path"] == "direct" and t["split"] == "none" and dtype(problem.out_dtype).bytes < 4:
        to_l2 *= 2.0  # straight from the accumulators a row of 8 columns is half a sector of 2-byte outputs
    return Work(
        blocks=blocks, threads=threads(t), fma=0.0,
        other_instructions=_instructions(problem, t, aligns, tiles, steps, read) + _epilogue(problem, t, outputs),
        shared_bytes=filled + read + exchanged, l2_bytes=traffic.tile_bytes(problem, t) + to_l2,
        dram_bytes=traffic.input_traffic(problem, t, target) + to_dram, dynamic_shared_bytes=shared_bytes(t, size),
        independent=rows // 16 * (columns // 8), steps=split.steps_of_block(problem, t),
        # A warp that reads the next fragments while it multiplies stalls on shared memory at barriers only.
        overlap=0.9 if t["fragments"] == 2 else 0.5,
        mma=float(tiles) * t["tile_m"] * t["tile_n"] * steps * t["tile_k"], mma_type=mma_type(problem.dtype),
        mma_macs=16 * 8 * t["mma_k"], prefetched=max(1, t["stages"] - 1) if t["copy"] == "cp_async" else 1,
        others=traffic.other_launches(problem, t, aligns[2], least, target),
    )  # fmt: skip


def _instructions(
    problem: MatmulProblem, t: Mapping[str, Any], aligns: tuple[int, int, int], tiles: int, steps: int, read: float
) -> float:
    """Per-lane instructions of the main loop: mma, fragment loads, copies with their addresses and checks, the loop."""
    size = dtype(problem.dtype).bytes
    warps = tiles * t["warps_m"] * t["warps_n"]
    rows, columns = warp_tile(t)
    k_steps_of_tile = t["tile_k"] * size // STEP_BYTES
    mma = steps * k_steps_of_tile * (rows // 16) * (columns // 8) * (STEP_BYTES // size // t["mma_k"])
    # tf32 that is stored along m or n is read word by word: 128 bytes a warp and instruction.
    along_k = (not problem.a_transposed) + problem.b_transposed
    words = (2 - along_k) / 2 if size == 4 else 0.0
    loads = read / MATRIX_BYTES * (1 + 3 * words)
    copies = tiles * steps * t["tile_k"] * (t["tile_m"] / aligns[0] + t["tile_n"] / aligns[1])
    per_copy = 5 if t["copy"] == "cp_async" else REGISTER_COPY
    return float(WARP * (warps * mma + loads + 20 * warps * steps) + per_copy * copies) + rounding(problem, read)


def rounding(problem: MatmulProblem, read: float) -> float:
    """Per-lane instructions that round what fragments read to tf32, each register."""
    return read / 4 if problem.dtype == "float32" else 0.0


def fragment_bytes(problem: MatmulProblem, t: Mapping[str, Any]) -> float:
    """That warps read of shared memory."""
    (rows, columns), tiles = warp_tile(t), grid.blocks(problem, t["tile_m"], t["tile_n"])
    k_bytes = grid.k_steps(problem.k, t["tile_k"]) * t["tile_k"] * dtype(problem.dtype).bytes
    return float(tiles * t["warps_m"] * t["warps_n"] * (rows + columns) * k_bytes)


def _epilogue(problem: MatmulProblem, t: Mapping[str, Any], outputs: float) -> float:
    nodes = len(problem.epilogue) if t["split"] == "none" else 0
    return outputs * (2.0 + 2 * nodes + (1.5 if t["epilogue_path"] == "shared" else 0.0))


def compile_seconds(tunables: Mapping[str, Any], epilogue: tuple[str, ...], stored: Stored) -> float:
    """CPU seconds of nvcc for one more kernel of a group: what is unrolled, copies for each stage and outputs.

    Fitted to nvcc 13.2 on 70 groups of 10 to 24 kernels of level 1 (sm_75, sm_80, sm_90a): 0.1 to 0.5 seconds each.
    """
    t, nodes = tunables, node_seconds(epilogue)
    copies = sum(accesses(t, stored)) * (t["stages"] if t["copy"] == "cp_async" else 2)
    launches = len(split.functions(t))
    return float(
        0.02 + sums(t) * (0.0025 + nodes) + 0.0024 * copies + 0.05 * sum(stored.turned) + 0.04 * (launches > 1)
    )
