"""What a matmul costs, and the bytes that a schedule moves from L2 and DRAM. Both kernels count so."""

import math
from collections.abc import Mapping
from typing import Any

from codegen.dtypes import dtype
from codegen.epilogue import node_of
from codegen.operator import Cost, Operand, Work
from codegen.operators.matmul import limb_planes, split
from codegen.operators.matmul.grid import blocks, tiles
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.truncations import truncations
from codegen.targets import Target

# Per output; activations count their polynomial as the roofline sees it.
_NODE_FLOPS = {"gelu": 24, "silu": 12, "tanh": 16, "sigmoid": 10}
# Seconds of nvcc per output of a thread and node of the epilogue.
LIGHT_NODE_SECONDS, ACTIVATION_SECONDS = 0.0003, 0.0019
# What stays in L2 from one use to the next, of its size: the rest goes to what streams through.
L2_SHARE = 0.75
# Vectors of partial sums that a thread of `reduce` has in flight (its loop is unrolled so often).
PARTIALS_IN_FLIGHT = 4


def cost(problem: MatmulProblem, tunables: Mapping[str, Any], operands: tuple[Operand, ...]) -> Cost:
    """FLOPs and the bytes that any algorithm must move: every operand once, a repeated one once in all.

    Launches and workspace are the schedule's.
    """
    outputs = problem.batch * problem.m * problem.n
    flops = 2 * outputs * problem.k + outputs * sum(_NODE_FLOPS.get(node.op, 1) for node in problem.epilogue)
    read = sum(_distinct(operand) * dtype(operand.dtype).bytes for operand in operands if operand.role == "in")
    written = outputs * dtype(problem.out_dtype).bytes
    return Cost(
        flops,
        read,
        written,
        len(split.functions(tunables)),
        split.workspace_bytes(problem, tunables),
        truncations(problem, tunables),
    )


def _distinct(operand: Operand) -> int:
    return math.prod(extent for extent, stride in zip(operand.shape, operand.strides, strict=True) if stride)


def input_bytes(problem: MatmulProblem) -> float:
    """Bytes of A and B, a repeated one once."""
    return float(dtype(problem.dtype).bytes * problem.k * sum(limb_planes.rows(problem)))


def output_bytes(problem: MatmulProblem, least: Cost) -> float:
    """Bytes of out and of what the epilogue reads. `least`: the problem's cost."""
    return least.bytes_written + least.bytes_read - input_bytes(problem)


def tile_bytes(problem: MatmulProblem, t: Mapping[str, Any]) -> float:
    """Bytes of A and B that all blocks read: A once per column of tiles, B once per row."""
    tiles_m, tiles_n = tiles(problem, t["tile_m"], t["tile_n"])
    elements: int = tiles_n * problem.m + tiles_m * problem.n
    return float(limb_planes.element_bytes(problem, t) * problem.batch * problem.k * elements)


def input_traffic(problem: MatmulProblem, t: Mapping[str, Any], target: Target) -> float:
    """Bytes of A and B from DRAM: once what fits in L2; beyond it, what a wave of blocks does not share."""
    size = limb_planes.element_bytes(problem, t)
    inputs = input_bytes(problem) * size / dtype(problem.dtype).bytes
    if inputs <= L2_SHARE * target.l2_bytes:
        return inputs
    tiles_m, tiles_n = tiles(problem, t["tile_m"], t["tile_n"])
    grid = blocks(problem, t["tile_m"], t["tile_n"])
    # Blocks that run at a time on different tiles; the other slices of a tile read other parts of k.
    wave = min(grid, max(1, target.sm_count // t["split_k"]))
    raster = t["raster"]
    band = {0: 1, 1: tiles_m}.get(raster, raster)
    rows = min(tiles_m, max(band, wave // tiles_n if tiles_n < wave else 1)) if raster != 1 else min(tiles_m, wave)
    columns = min(tiles_n, max(1, wave // rows))
    shared_by_wave: int = min(problem.m, rows * t["tile_m"]) + min(problem.n, columns * t["tile_n"])
    per_wave = float(size * problem.k * shared_by_wave)
    waves: int = -(-grid // wave)
    return min(tile_bytes(problem, t), max(inputs, per_wave * waves))


def partial_bytes(problem: MatmulProblem, t: Mapping[str, Any]) -> float:
    """Bytes of partial sums that all blocks hand on; an atomic add moves its operand and its result."""
    if t["split"] == "stream":
        return float(split.workspace_bytes(problem, t))
    outputs = split.sum_bytes(problem) * problem.batch * problem.m * split.workspace_pitch(problem.n)
    return float({"none": 0, "workspace": 1, "atomic": 2}[t["split"]] * t["split_k"] * outputs)


def shared_tiles(problem: MatmulProblem, t: Mapping[str, Any]) -> float:
    """The share of tiles that go through the workspace: with stream-K those in which a block begins."""
    if t["split"] == "stream":
        return min(1.0, float(t["stream_blocks"]) / blocks(problem, t["tile_m"], t["tile_n"]))
    return 0.0 if t["split"] == "none" else 1.0


def handed_on(problem: MatmulProblem, t: Mapping[str, Any], least: Cost, target: Target) -> tuple[float, float]:
    """Bytes that `run` writes and its epilogue reads: to L2, and of them to DRAM."""
    whole = (1.0 - shared_tiles(problem, t)) * output_bytes(problem, least)
    partials = partial_bytes(problem, t)
    return whole + partials, whole + beyond_l2(problem, t, partials, target)


def beyond_l2(problem: MatmulProblem, t: Mapping[str, Any], moved: float, target: Target) -> float:
    """Of `moved` bytes of the workspace, those that go to DRAM: the next launch finds in L2 what fits there."""
    return 0.0 if split.workspace_bytes(problem, t) <= L2_SHARE * target.l2_bytes else moved


def other_launches(
    problem: MatmulProblem, t: Mapping[str, Any], align_c: int, least: Cost, target: Target
) -> tuple[Work, ...]:
    """The launches around the kernel itself: none, `reduce`, or `clear` and `reduce`."""
    if t["split"] == "none":
        return ()
    if t["split"] == "stream":
        return (_reduce_stream(problem, t, align_c, least, target),)
    outputs = float(problem.batch * problem.m * problem.n)
    per_slice = float(split.sum_bytes(problem) * problem.batch * problem.m * split.workspace_pitch(problem.n))
    read = per_slice * (t["split_k"] if t["split"] == "workspace" else 1)
    written = output_bytes(problem, least)
    reduce = items(
        outputs / align_c,
        instructions=outputs * (1 + 2 * len(problem.epilogue)) + 1.5 * read / split.sum_bytes(problem),
        l2_bytes=read + written,
        dram_bytes=written + beyond_l2(problem, t, read, target),
        steps=-(-t["split_k"] // PARTIALS_IN_FLIGHT) if t["split"] == "workspace" else 1,
    )
    if t["split"] == "workspace":
        return (reduce,)
    cleared = beyond_l2(problem, t, per_slice, target)
    vectors = per_slice / 16
    clear = items(vectors, instructions=4 * vectors, l2_bytes=per_slice, dram_bytes=cleared, steps=1)
    return (clear, reduce)


def _reduce_stream(problem: MatmulProblem, t: Mapping[str, Any], align_c: int, least: Cost, target: Target) -> Work:
    """One thread per vector of every tile; those of tiles that one block has alone return at once."""
    tile_blocks = blocks(problem, t["tile_m"], t["tile_n"])
    read = float(split.workspace_bytes(problem, t))
    written = output_bytes(problem, least) * shared_tiles(problem, t)
    outputs = float(tile_blocks * t["tile_m"] * t["tile_n"])
    return items(
        outputs / align_c,
        instructions=1.5 * read / split.sum_bytes(problem),
        l2_bytes=read + written,
        dram_bytes=written + beyond_l2(problem, t, read, target),
        steps=max(1, t["stream_blocks"] // tile_blocks),
    )


def items(items: float, *, instructions: float, l2_bytes: float, dram_bytes: float, steps: int) -> Work:
    """A launch of one thread per item."""
    return Work(
        blocks=max(1, math.ceil(items / split.REDUCE_THREADS)), threads=split.REDUCE_THREADS, fma=0.0,
        other_instructions=instructions + 12 * items, shared_bytes=0.0, l2_bytes=l2_bytes, dram_bytes=dram_bytes,
        dynamic_shared_bytes=0, independent=PARTIALS_IN_FLIGHT, steps=steps, overlap=0.5, prefetched=1,
    )  # fmt: skip


def node_seconds(epilogue: tuple[str, ...]) -> float:
    """CPU seconds of nvcc for the epilogue of one output of a thread."""
    return sum(LIGHT_NODE_SECONDS if node_of(part).exact else ACTIVATION_SECONDS for part in epilogue)
