"""The tensor-core kernel over rings: when a schedule cannot work or is not worth compiling, and what it does to the
machine.

Every static_assert of gemm/limbs.cuh is a rule here, and what its instructions and its registers demand.
"""

from collections.abc import Mapping
from typing import Any

from codegen.dtypes import dtype
from codegen.fixed_point import bits_of, ring_name
from codegen.operator import Cost, LaunchBounds, Work
from codegen.operators.matmul import grid, limb_planes, split, tensor, traffic
from codegen.operators.matmul.kernel_family import AMPERE, Stored
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.tensor import threads as threads
from codegen.operators.matmul.tensor import warp_tile
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, check_workspace, residency_rules
from codegen.search.schedule import Schedule
from codegen.targets import Target

# What the code of the tensor cores reads and limbs have no choice of.
FIXED: Mapping[str, Any] = {
    "mma_k": 32, "fragments": 1, "epilogue_path": "direct", "static_k": 0, "maxnreg": 0, "min_blocks": 1,
}  # fmt: skip
# k of mma.sync on bytes.
STEP = 32
# Addresses, loop counters, predicates, and what turning bytes takes beside the fragments. Of 48 kernels that were
# compiled with ptxas 13.2 (sm_80, both rings, layouts nn and nt, 2 and 3 stages, none truncated by tiles) the estimate
# rejects the 20 that spill, and none that does not; of the others it is 10 too low to 16 too high.
OVERHEAD_REGISTERS = 64
WARP = 32
# Instructions of a lane that turn four words of bytes (`transpose_bytes` in convert.cuh).
TURNING = 8
# Of one output and diagonal: a shift and an addition with carry, in two words.
ADDING_UP = 4


def limbs_of(element: str) -> int:
    """Bytes of an element that count, which is how many diagonals there are."""
    return bits_of(element) // 8


def limb_products(element: str) -> int:
    """Of one product of elements: those of limbs p and q with p + q below their number."""
    count = limbs_of(element)
    return count * (count + 1) // 2


def unchained_k(element: str) -> int | None:
    """The largest k whose sums of products of limbs the diagonals hold without carries (`unchained_k` and the proof in
    gemm/limbs.cuh): 16,512 of Z/2^64; None where any is held."""
    filled = limbs_of(element) - 4
    return (2**32 - 1) // (filled * 255**2) if filled > 0 else None


def launch_bounds(tunables: Mapping[str, Any]) -> LaunchBounds:
    """What the kernel promises."""
    return LaunchBounds(threads(tunables))


def shared_bytes(tunables: Mapping[str, Any], size: int) -> int:
    """Dynamic shared memory of a block, as `shared_bytes` in gemm/tensor.cuh. `size`: bytes of an input element."""
    t = tunables
    ring: int = t["stages"] * (t["tile_m"] + t["tile_n"]) * t["tile_k"] * size
    return ring


def staged_bytes(tunables: Mapping[str, Any], stored: Stored) -> int:
    """Bytes of an input element in shared memory."""
    return (stored.limbs or stored.size) if limb_planes.planes(tunables) else stored.size


def registers(tunables: Mapping[str, Any], stored: Stored) -> int:
    """An estimate of a thread's: diagonals, sums of truncated tiles, the limbs of all its columns and of 16 rows, and
    what it carries to shared memory."""
    t, (rows, columns), size, limbs = tunables, warp_tile(tunables), stored.size, stored.limbs or stored.size
    outputs = rows * columns // 32
    sums = outputs * size // 4 if t["truncate"] == "tile" else 0
    fragments = columns // 8 * 2 * limbs + 4 * limbs
    held = 0
    if t["copy"] == "registers":
        held = -(-(t["tile_m"] + t["tile_n"]) * t["tile_k"] * size // (4 * threads(t)))
    return int(outputs * limbs + sums + fragments + held + OVERHEAD_REGISTERS)


def rules(
    problem: MatmulProblem, aligns: tuple[int, int], schedule: Schedule, target: Target, workspace_limit: int | None
) -> Accepted | Rejected:
    """`aligns` are elements per access of A and B."""
    t, stored = schedule.as_dict(), Stored.of(problem, aligns)
    return (
        check(
            target.capability >= AMPERE,
            "mma",
            f"mma.sync on uint8 with k = {STEP} needs sm_{AMPERE}; the target is {target.name}",
        )
        or _shape_rules(t, problem)
        or _copy_rules(t)
        or split.rules(t, problem, target)
        or residency_rules(1, threads(t), shared_bytes(t, staged_bytes(t, stored)), registers(t, stored), target)
        or _worth_rules(t, problem)
        or check_workspace(split.workspace_bytes(problem, t), workspace_limit)
        or ACCEPTED
    )


def _shape_rules(t: Mapping[str, Any], problem: MatmulProblem) -> Rejected | None:
    return (
        check(t["truncate"] != "product", "truncate", "the tensor cores add up products before any is truncated")
        or check(
            t["tile_k"] in (STEP, 2 * STEP),
            "tile_k",
            f"tile_k = {t['tile_k']}; limbs have tiles of {STEP} or {2 * STEP}",
        )
        or tensor.warp_rules(t)
        or _chain_rules(t, problem)
    )


def _chain_rules(t: Mapping[str, Any], problem: MatmulProblem) -> Rejected | None:
    if t["chain_k"] == 0:
        return check(
            holds(problem, t),
            "chain_k",
            f"k = {problem.k}; without carries the diagonals of {ring_name(problem.dtype)} hold a k of "
            f"{unchained_k(problem.dtype)}",
        )
    return (
        check(
            unchained_k(problem.dtype) is not None,
            "chain_k",
            f"of Z/2^32 all diagonals may wrap around: chain_k = {t['chain_k']}",
        )
        or check(t["truncate"] == "once", "chain_k", "tiles that are truncated leave nothing to carry")
        or check(
            t["chain_k"] < problem.k, "chain_k", f"chain_k = {t['chain_k']} carries nothing before k = {problem.k}"
        )
        or check(
            t["chain_k"] <= (unchained_k(problem.dtype) or 0),
            "chain_k",
            f"chain_k = {t['chain_k']}; the diagonals of {ring_name(problem.dtype)} hold {unchained_k(problem.dtype)}",
        )
    )


def holds(problem: MatmulProblem, t: Mapping[str, Any]) -> bool:
    """Whether the accumulators hold the problem's sums."""
    most = unchained_k(problem.dtype)
    return most is None or t["chain_k"] > 0 or t["truncate"] != "once" or problem.k <= most


def _copy_rules(t: Mapping[str, Any]) -> Rejected | None:
    if limb_planes.planes(t) and t["copy"] != "cp_async":
        return Rejected("limb_split", f"limbs that are split ahead are copied by cp_async, not by copy = {t['copy']}")
    if t["copy"] == "registers":
        return check(t["stages"] <= 2, "copy", f"copies through registers have 1 or 2 stages, not {t['stages']}")
    return check(t["stages"] >= 2, "copy", "cp.async needs a stage that is not being read: 2 stages at least")


def _worth_rules(t: Mapping[str, Any], problem: MatmulProblem) -> Rejected | None:
    """What works, but cannot win: it repeats another schedule's code or order, or computes mostly padding."""
    steps = split.all_steps(problem, t) // split.grid_blocks(problem, t)
    return (
        grid.padding_rules(t, problem, STEP)
        or check(
            t["stages"] <= max(2 if t["copy"] == "cp_async" else 1, steps),
            "stages",
            f"{t['stages']} stages for {steps} steps: k = {problem.k}, tile_k = {t['tile_k']}",
        )
        or grid.order_rules(t, problem)
    )


def work(
    problem: MatmulProblem, tunables: Mapping[str, Any], aligns: tuple[int, int, int], least: Cost, target: Target
) -> Work:
    """Counts for the roofline. `aligns`: elements per global access of A, B and out; `least`: the problem's cost."""
    t, size = tunables, limb_planes.element_bytes(problem, tunables)
    (rows, columns), steps = warp_tile(t), grid.k_steps(problem.k, t["tile_k"])
    tiles = grid.blocks(problem, t["tile_m"], t["tile_n"])
    k_bytes = float(steps * t["tile_k"] * size)
    filled = tiles * (t["tile_m"] + t["tile_n"]) * k_bytes
    read = tiles * t["warps_m"] * t["warps_n"] * (rows + columns) * k_bytes
    products = float(tiles) * t["tile_m"] * t["tile_n"] * steps * t["tile_k"] * limb_products(problem.dtype)
    to_l2, to_dram = traffic.handed_on(problem, t, least, target)
    from_dram, others = (
        traffic.input_traffic(problem, t, target),
        traffic.other_launches(problem, t, aligns[2], least, target),
    )
    if limb_planes.ahead(t):
        from_dram = traffic.beyond_l2(problem, t, from_dram, target)
        others = (_split_ahead(problem, t, aligns, target), *others)
    return Work(
        blocks=split.grid_blocks(problem, t), threads=threads(t), fma=0.0,
        other_instructions=_instructions(problem, t, aligns, read, products),
        shared_bytes=filled + read, l2_bytes=traffic.tile_bytes(problem, t) + to_l2,
        dram_bytes=from_dram + to_dram, dynamic_shared_bytes=shared_bytes(t, size),
        independent=rows // 16 * (columns // 8) * limbs_of(problem.dtype),
        steps=split.steps_of_block(problem, t), overlap=0.5,
        mma=products, mma_type="int8", mma_macs=16 * 8 * STEP,
        prefetched=max(1, t["stages"] - 1) if t["copy"] == "cp_async" else 1,
        others=others,
    )  # fmt: skip


def _split_ahead(problem: MatmulProblem, t: Mapping[str, Any], aligns: tuple[int, int, int], target: Target) -> Work:
    """The launch that writes the planes: a thread turns 16 elements, which it reads one by one where they do not lie
    along k."""
    read, written = int(traffic.input_bytes(problem)), limb_planes.plane_bytes(problem)
    count, words = limbs_of(problem.dtype), dtype(problem.dtype).bytes // 4
    elements = written / count
    along_k = (not problem.a_transposed, problem.b_transposed)
    loads = sum(elements / 2 / (align if along else 1) for align, along in zip(aligns, along_k, strict=False))
    items = elements / limb_planes.VECTOR
    return traffic.items(
        items,
        instructions=4 * loads + items * (limb_planes.VECTOR / 4 * words * TURNING + 2 * count),
        l2_bytes=float(read + written),
        dram_bytes=read + traffic.beyond_l2(problem, t, written, target),
        steps=1,
    )


def _instructions(
    problem: MatmulProblem, t: Mapping[str, Any], aligns: tuple[int, int, int], read: float, products: float
) -> float:
    """Per lane: mma, reads and the turning of their bytes, copies with their addresses and checks, adding up, the way
    out."""
    size, staged = dtype(problem.dtype).bytes, limb_planes.element_bytes(problem, t)
    tiles, steps = grid.blocks(problem, t["tile_m"], t["tile_n"]), grid.k_steps(problem.k, t["tile_k"])
    mma = products / (16 * 8 * STEP)
    # An operand that lies along k is read 16 bytes at a time, another one element by element.
    along_k = (not problem.a_transposed) + problem.b_transposed
    turning = TURNING * -(-limbs_of(problem.dtype) // 4) / (size / 4)  # of the words that have limbs
    per_16_bytes = 1.0 if limb_planes.planes(t) else (along_k + (2 - along_k) * 16 / size) / 2 + turning
    vectors = (limb_planes.VECTOR / staged,) * 2 if limb_planes.planes(t) else aligns
    copies = tiles * steps * t["tile_k"] * (t["tile_m"] / vectors[0] + t["tile_n"] / vectors[1])
    outputs = float(tiles) * t["tile_m"] * t["tile_n"] * t["split_k"]
    times = 1 + (steps if t["truncate"] == "tile" else problem.k // t["chain_k"] if t["chain_k"] else 0)
    nodes = len(problem.epilogue) if t["split"] == "none" else 0
    warps = tiles * t["warps_m"] * t["warps_n"]
    return float(
        WARP * (mma + 20 * warps * steps) + read / 16 * per_16_bytes + 5 * copies
        + outputs * (times * ADDING_UP * size + (2.0 + 2 * nodes) * size / 4)
    )  # fmt: skip


def compile_seconds(tunables: Mapping[str, Any], epilogue: tuple[str, ...], stored: Stored) -> float:
    """CPU seconds of nvcc for one more kernel of a group: mma.sync that are written out, and outputs. Fitted to nvcc
    13.2 on 6 groups of 9 kernels (sm_80): 0.11 to 0.20 seconds each."""
    (rows, columns), size = warp_tile(tunables), stored.limbs or stored.size
    outputs, words = rows * columns // WARP, stored.size // 4
    mma = rows // 16 * (columns // 8) * size * (size + 1) // 2 * tunables["tile_k"] // STEP
    return float(0.05 + 0.0007 * mma + outputs * words * (0.0025 + traffic.node_seconds(epilogue)))
