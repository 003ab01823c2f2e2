"""What a matmul costs, and what a schedule of it does to the machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from codegen.operator import Cost, Operand, Work
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.rules import shared_bytes, threads
from codegen.operators.matmul.space import blocks
from codegen.targets import Target

# Per fp32 output; activations count their polynomial as the roofline sees it.
_NODE_FLOPS = {"gelu": 24, "silu": 12, "tanh": 16, "sigmoid": 10}


def cost(problem: MatmulProblem, operands: tuple[Operand, ...]) -> Cost:
    """FLOPs and the bytes that any algorithm must move: every operand once, a repeated one once in all."""
    outputs = problem.batch * problem.m * problem.n
    flops = 2 * outputs * problem.k + outputs * sum(_NODE_FLOPS.get(node.op, 1) for node in problem.epilogue)
    size = {"float32": 4, "uint8": 1}
    read = sum(_distinct(operand) * size[operand.dtype] for operand in operands if operand.role == "in")
    return Cost(flops, read, 4 * outputs, 1, 0)


def _distinct(operand: Operand) -> int:
    return math.prod(extent for extent, stride in zip(operand.shape, operand.strides, strict=True) if stride)


def work(
    problem: MatmulProblem, tunables: Mapping[str, Any], aligns: tuple[int, int, int], least: Cost, target: Target
) -> Work:
    """Counts for the roofline. `aligns`: elements per global access of A, B and out; `least`: the problem's cost."""
    t = tunables
    count, steps = threads(t), -(-problem.k // t["tile_k"])
    grid = blocks(problem, t["tile_m"], t["tile_n"])
    k_padded = steps * t["tile_k"]
    fma = float(grid) * t["tile_m"] * t["tile_n"] * k_padded
    # Instructions beside the FMAs, per thread and k-row: fragment loads (a quad each), a share of loop and addresses.
    per_row = (t["thread_m"] + t["thread_n"]) / min(4, t["thread_m"], t["thread_n"]) + 4.0 / t["unroll_k"]
    moved = t["tile_k"] * (t["tile_m"] / aligns[0] + t["tile_n"] / aligns[1]) / count * 6
    written = 2 * t["thread_m"] * t["thread_n"] * (1 + len(problem.epilogue))
    other = float(grid) * count * (k_padded * per_row + steps * (moved + 12) + written)
    # A fragment load serves a warp once per distinct word: warp_m distinct rows and 32 / warp_m distinct columns.
    fragments = (t["warp_m"] * t["thread_m"] + 32 // t["warp_m"] * t["thread_n"]) / 32.0
    filled = t["tile_k"] * (t["tile_m"] + t["tile_n"]) * _conflicts(problem, t, aligns)
    shared = 4.0 * grid * (count * k_padded * fragments + steps * filled)
    tiles = _tile_bytes(problem, t)
    outputs = float(least.bytes_written + least.bytes_read - _inputs(problem))
    return Work(
        blocks=grid, threads=count, fma=fma, other_instructions=other, shared_bytes=shared,
        l2_bytes=tiles + outputs, dram_bytes=_dram(problem, t, grid, tiles, least, target),
        dynamic_shared_bytes=shared_bytes(t), independent=t["thread_m"] * t["thread_n"], steps=steps,
        overlap=0.35 + 0.35 * (t["stages"] == 2) + 0.15 * (t["fragments"] == 2),
    )  # fmt: skip


def _tile_bytes(problem: MatmulProblem, t: Mapping[str, Any]) -> float:
    """Bytes of A and B that all blocks ask for: A once per column of tiles, B once per row."""
    tiles_m, tiles_n = -(-problem.m // t["tile_m"]), -(-problem.n // t["tile_n"])
    asked: int = tiles_n * problem.m + tiles_m * problem.n
    return 4.0 * problem.batch * problem.k * asked


def _inputs(problem: MatmulProblem) -> int:
    """Bytes of A and B, a repeated one once."""
    copies_a = problem.batch if problem.stride_a else 1
    copies_b = problem.batch if problem.stride_b else 1
    return 4 * problem.k * (copies_a * problem.m + copies_b * problem.n)


def _conflicts(problem: MatmulProblem, t: Mapping[str, Any], aligns: tuple[int, int, int]) -> float:
    """How often the store of a tile to shared memory is replayed: turned tiles write words of few banks."""
    turned = (not problem.a_transposed) + problem.b_transposed
    replay = 2.0 if t["padding"] else 8.0
    return 1.0 + turned * (replay - 1.0) / 2.0 / (1.0 if aligns[0] == 4 else 2.0)


def _dram(problem: MatmulProblem, t: Mapping[str, Any], grid: int, tiles: float, least: Cost, target: Target) -> float:
    """Bytes from DRAM: once what fits in L2; beyond it, what a wave of blocks does not share."""
    inputs = float(_inputs(problem))
    rest = least.bytes_read - inputs + least.bytes_written
    if inputs <= 0.75 * target.l2_bytes:
        return inputs + rest
    tiles_m, tiles_n = -(-problem.m // t["tile_m"]), -(-problem.n // t["tile_n"])
    wave = min(grid, target.sm_count)
    raster = t["raster"]
    band = {0: 1, 1: tiles_m}.get(raster, raster)
    rows = min(tiles_m, max(band, wave // tiles_n if tiles_n < wave else 1)) if raster != 1 else min(tiles_m, wave)
    columns = min(tiles_n, max(1, wave // rows))
    shared_by_wave: int = min(problem.m, rows * t["tile_m"]) + min(problem.n, columns * t["tile_n"])
    per_wave = 4.0 * problem.k * shared_by_wave
    return min(tiles, max(inputs, per_wave * math.ceil(grid / wave))) + rest
