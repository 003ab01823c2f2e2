"""What a schedule of the kernel on the CUDA cores does to the machine."""

from collections.abc import Mapping
from typing import Any

from codegen.dtypes import dtype
from codegen.epilogue import node_of
from codegen.operator import Cost, Work
from codegen.operators.matmul import traffic
from codegen.operators.matmul.fixed_point import over_ring, truncations
from codegen.operators.matmul.grid import blocks, k_steps
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.simt_rules import held, shared_bytes, threads
from codegen.targets import Target

# Seconds of nvcc per output of a thread and node of the epilogue.
LIGHT_NODE_SECONDS, ACTIVATION_SECONDS = 0.0003, 0.0019
# Integer multiply-adds of 32 bits for one of a ring's: of Z/2^64 ptxas writes one of 32 x 32 bits to 64, which counts
# twice, and two for the upper half.
IMADS = {"int32": 1, "int64": 4}
# Instructions of a truncation beside that: a shift and an addition of each word.
TRUNCATION = 2


def work(
    problem: MatmulProblem, tunables: Mapping[str, Any], aligns: tuple[int, int, int], least: Cost, target: Target
) -> Work:
    """Counts for the roofline. `aligns`: elements per global access of A, B and out; `least`: the problem's cost."""
    t, size = tunables, dtype(problem.dtype).bytes
    count, steps = threads(t), k_steps(problem.k, t["tile_k"])
    grid, slices = blocks(problem, t["tile_m"], t["tile_n"]), t["split_k"]
    k_padded = steps * t["tile_k"]
    products = float(grid) * t["tile_m"] * t["tile_n"] * k_padded
    ring = over_ring(problem)
    # Instructions beside the FMAs, per thread and k-row: fragment loads (16 bytes each), a share of loop and addresses.
    per_row = (t["thread_m"] + t["thread_n"]) / min(16 // size, t["thread_m"], t["thread_n"]) + 4.0 / t["unroll_k"]
    moved = t["tile_k"] * (t["tile_m"] / aligns[0] + t["tile_n"] / aligns[1]) / count * 6
    written = 2 * t["thread_m"] * t["thread_n"] * (1 + (slices == 1) * len(problem.epilogue)) * slices
    other = float(grid) * count * (k_padded * per_row + steps * (moved + 12) + written * size / 4)
    other += truncations(problem, t) * TRUNCATION * size / 4
    # A fragment load serves a warp once per distinct word: warp_m distinct rows and 32 / warp_m distinct columns.
    fragments = (t["warp_m"] * t["thread_m"] + 32 // t["warp_m"] * t["thread_n"]) / 32.0
    filled = t["tile_k"] * (t["tile_m"] + t["tile_n"]) * _conflicts(problem, t, aligns)
    shared = float(size) * grid * (count * k_padded * fragments + steps * filled)
    to_l2, to_dram = traffic.handed_on(problem, t, least, target)
    return Work(
        blocks=grid * slices, threads=count, fma=0.0 if ring else products, other_instructions=other,
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


def node_seconds(epilogue: tuple[str, ...]) -> float:
    """CPU seconds of nvcc for the epilogue of one output of a thread."""
    return sum(LIGHT_NODE_SECONDS if node_of(part).exact else ACTIVATION_SECONDS for part in epilogue)


def compile_seconds(tunables: Mapping[str, Any], epilogue: tuple[str, ...], size: int = 4) -> float:
    """Grows with what unrolling and the epilogue write; fitted to nvcc 13.2: 0.07 to 0.35 CPU seconds. `size`: bytes of
    an element."""
    t = tunables
    outputs = int(t["thread_m"]) * int(t["thread_n"])
    outputs *= size // 4
    return 0.055 + outputs * (0.0018 * int(t["unroll_k"]) / 8 + node_seconds(epilogue)) + 0.001 * held(t)
