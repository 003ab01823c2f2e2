"""What a schedule of the tensor-core kernel over rings does to the machine."""

from collections.abc import Mapping
from typing import Any

from codegen.operator import Cost, Work
from codegen.operators.matmul import split, traffic
from codegen.operators.matmul.grid import blocks, k_steps
from codegen.operators.matmul.limbs_rules import STEP, limb_products, limbs_of, shared_bytes
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.tensor import threads, warp_tile
from codegen.operators.matmul.traffic import node_seconds
from codegen.targets import Target

WARP = 32
# Instructions of a lane that turn four words of bytes (`transpose_bytes` in convert.cuh).
TURNING = 8
# Of one output and diagonal: a shift and an addition with carry, in two words.
ADDING_UP = 4


def work(
    problem: MatmulProblem, tunables: Mapping[str, Any], aligns: tuple[int, int, int], least: Cost, target: Target
) -> Work:
    """Counts for the roofline. `aligns`: elements per global access of A, B and out; `least`: the problem's cost."""
    t, size = tunables, limbs_of(problem.dtype)
    (rows, columns), steps = warp_tile(t), k_steps(problem.k, t["tile_k"])
    tiles, grid = blocks(problem, t["tile_m"], t["tile_n"]), split.grid_blocks(problem, t)
    k_bytes = float(steps * t["tile_k"] * size)
    filled = tiles * (t["tile_m"] + t["tile_n"]) * k_bytes
    read = tiles * t["warps_m"] * t["warps_n"] * (rows + columns) * k_bytes
    products = float(tiles) * t["tile_m"] * t["tile_n"] * steps * t["tile_k"] * limb_products(problem.dtype)
    to_l2, to_dram = traffic.handed_on(problem, t, least, target)
    return Work(
        blocks=grid, threads=threads(t), fma=0.0,
        other_instructions=_instructions(problem, t, aligns, read, products),
        shared_bytes=filled + read, l2_bytes=traffic.tile_bytes(problem, t) + to_l2,
        dram_bytes=traffic.input_traffic(problem, t, target) + to_dram, dynamic_shared_bytes=shared_bytes(t, size),
        independent=rows // 16 * (columns // 8) * size, steps=split.steps_of_block(problem, t), overlap=0.5,
        mma=products, mma_type="int8", mma_macs=16 * 8 * STEP,
        prefetched=max(1, t["stages"] - 1) if t["copy"] == "cp_async" else 1,
        others=traffic.other_launches(problem, t, aligns[2], least, target),
    )  # fmt: skip


def _instructions(
    problem: MatmulProblem, t: Mapping[str, Any], aligns: tuple[int, int, int], read: float, products: float
) -> float:
    """Per lane: mma, reads and the turning of their bytes, copies with their addresses and checks, adding up, the way
    out."""
    size = limbs_of(problem.dtype)
    tiles, steps = blocks(problem, t["tile_m"], t["tile_n"]), k_steps(problem.k, t["tile_k"])
    mma = products / (16 * 8 * STEP)
    # An operand that lies along k is read 16 bytes at a time, another one element by element.
    along_k = (not problem.a_transposed) + problem.b_transposed
    per_16_bytes = (along_k + (2 - along_k) * 16 / size) / 2 + TURNING
    copies = tiles * steps * t["tile_k"] * (t["tile_m"] / aligns[0] + t["tile_n"] / aligns[1])
    outputs = float(tiles) * t["tile_m"] * t["tile_n"] * t["split_k"]
    times = 1 + (steps if t["truncate"] == "tile" else problem.k // t["chain_k"] if t["chain_k"] else 0)
    nodes = len(problem.epilogue) if t["split"] == "none" else 0
    warps = tiles * t["warps_m"] * t["warps_n"]
    return float(
        WARP * (mma + 20 * warps * steps) + read / 16 * per_16_bytes + 5 * copies
        + outputs * (times * ADDING_UP * size + (2.0 + 2 * nodes) * size / 4)
    )  # fmt: skip


def compile_seconds(tunables: Mapping[str, Any], epilogue: tuple[str, ...], size: int) -> float:
    """CPU seconds of nvcc for one more kernel of a group: mma.sync that are written out, and outputs. Fitted to nvcc
    13.2 on 6 groups of 9 kernels (sm_80): 0.11 to 0.20 seconds each."""
    rows, columns = warp_tile(tunables)
    outputs, words = rows * columns // WARP, size // 4
    mma = rows // 16 * (columns // 8) * size * (size + 1) // 2 * tunables["tile_k"] // STEP
    return float(0.05 + 0.0007 * mma + outputs * words * (0.0025 + node_seconds(epilogue)))
