"""What a schedule of the tensor-core kernel does to the machine."""

from collections.abc import Mapping
from typing import Any

from codegen.dtypes import dtype
from codegen.operator import Cost, Work
from codegen.operators.matmul import split, traffic
from codegen.operators.matmul.grid import blocks, k_steps
from codegen.operators.matmul.kernel_family import mma_type
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.simt_work import node_seconds
from codegen.operators.matmul.tensor_rules import STEP_BYTES, Stored, accesses, shared_bytes, sums, threads, warp_tile
from codegen.targets import Target

# Lanes of a warp; bytes that one ldmatrix.x4 brings it.
WARP, MATRIX_BYTES = 32, 512


def work(
    problem: MatmulProblem, tunables: Mapping[str, Any], aligns: tuple[int, int, int], least: Cost, target: Target
) -> Work:
    """Counts for the roofline. `aligns`: elements per global access of A, B and out; `least`: the problem's cost."""
    t, size = tunables, dtype(problem.dtype).bytes
    (rows, columns), steps = warp_tile(t), k_steps(problem.k, t["tile_k"])
    tiles, grid = blocks(problem, t["tile_m"], t["tile_n"]), split.grid_blocks(problem, t)
    k_bytes = steps * t["tile_k"] * size
    filled = float(tiles * (t["tile_m"] + t["tile_n"]) * k_bytes)
    read = float(tiles * t["warps_m"] * t["warps_n"] * (rows + columns) * k_bytes)
    # A block of stream-K has a part of a tile at each end.
    pieces = max(tiles * t["split_k"], tiles + grid if t["split"] == "stream" else 0)
    outputs = float(pieces * t["tile_m"] * t["tile_n"])
    exchanged = 8.0 * outputs if t["epilogue_path"] == "shared" else 0.0
    to_l2, to_dram = traffic.handed_on(problem, t, least, target)
    if t["epilogue_path"] == "direct" and t["split"] == "none" and dtype(problem.out_dtype).bytes < 4:
        to_l2 *= 2.0  # straight from the accumulators a row of 8 columns is half a sector of 2-byte outputs
    return Work(
        blocks=grid, threads=threads(t), fma=0.0,
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
    per_copy = 5 if t["copy"] == "cp_async" else 7
    return float(WARP * (warps * mma + loads + 20 * warps * steps) + per_copy * copies)


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
