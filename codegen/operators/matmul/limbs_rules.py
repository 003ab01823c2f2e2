"""When a schedule of the tensor-core kernel over rings cannot work or is not worth compiling.

Every static_assert of gemm/limbs.cuh is a rule here, and what its instructions and its registers demand.
"""

from collections.abc import Mapping
from typing import Any

from codegen.dtypes import dtype
from codegen.operators.matmul import grid, split
from codegen.operators.matmul.kernel_family import AMPERE
from codegen.operators.matmul.problem import MatmulProblem
from codegen.operators.matmul.tensor import threads, warp_tile
from codegen.search.rules import ACCEPTED, Accepted, Rejected, check, check_workspace
from codegen.search.schedule import Schedule
from codegen.targets import Target

# What the code of the tensor cores reads and limbs have no choice of.
FIXED: Mapping[str, Any] = {
    "mma_k": 32, "fragments": 1, "epilogue_path": "direct", "static_k": 0, "maxnreg": 0, "min_blocks": 1,
}  # fmt: skip
# k of mma.sync on bytes.
STEP = 32
# The largest k whose sums of products of limbs the diagonals of Z/2^64 hold without carries (`unchained_k` and the
# proof in gemm/limbs.cuh): floor((2^32 - 1) / (4 * 255^2)).
UNCHAINED_K = 16_512
# Addresses, loop counters, predicates, and what turning bytes takes beside the fragments. Of 48 kernels that were
# compiled with ptxas 13.2 (sm_80, both rings, layouts nn and nt, 2 and 3 stages, none truncated by tiles) the estimate
# rejects the 20 that spill, and none that does not; of the others it is 10 too low to 16 too high.
OVERHEAD_REGISTERS = 64


def limbs_of(element: str) -> int:
    """Bytes of an element, which is how many diagonals there are."""
    return dtype(element).bytes


def limb_products(element: str) -> int:
    """Of one product of elements: those of limbs p and q with p + q below their number."""
    count = limbs_of(element)
    return count * (count + 1) // 2


def shared_bytes(tunables: Mapping[str, Any], size: int) -> int:
    """Dynamic shared memory of a block, as `shared_bytes` in gemm/tensor.cuh. `size`: bytes of an input element."""
    t = tunables
    ring: int = t["stages"] * (t["tile_m"] + t["tile_n"]) * t["tile_k"] * size
    return ring


def registers(tunables: Mapping[str, Any], size: int) -> int:
    """An estimate of a thread's: diagonals, sums of truncated tiles, the limbs of all its columns and of 16 rows, and
    what it carries to shared memory."""
    t, (rows, columns) = tunables, warp_tile(tunables)
    outputs = rows * columns // 32
    sums = outputs * size // 4 if t["truncate"] == "tile" else 0
    fragments = columns // 8 * 2 * size + 4 * size
    held = 0
    if t["copy"] == "registers":
        held = -(-(t["tile_m"] + t["tile_n"]) * t["tile_k"] * size // (4 * threads(t)))
    return int(outputs * size + sums + fragments + held + OVERHEAD_REGISTERS)


def rules(
    problem: MatmulProblem, schedule: Schedule, target: Target, workspace_limit: int | None
) -> Accepted | Rejected:
    t, size = schedule.as_dict(), limbs_of(problem.dtype)
    return (
        check(
            target.capability >= AMPERE,
            "mma",
            f"mma.sync on uint8 with k = {STEP} needs sm_{AMPERE}; the target is {target.name}",
        )
        or _shape_rules(t, problem)
        or _copy_rules(t)
        or split.rules(t, problem, target)
        or grid.residency_rules(1, threads(t), shared_bytes(t, size), registers(t, size), target)
        or _worth_rules(t, problem)
        or check_workspace(split.workspace_bytes(problem, t), workspace_limit)
        or ACCEPTED
    )


def _shape_rules(t: Mapping[str, Any], problem: MatmulProblem) -> Rejected | None:
    rows, columns = warp_tile(t)
    return (
        check(t["truncate"] != "product", "truncate", "the tensor cores add up products before any is truncated")
        or check(
            t["tile_k"] in (STEP, 2 * STEP),
            "tile_k",
            f"tile_k = {t['tile_k']}; limbs have tiles of {STEP} or {2 * STEP}",
        )
        or check(
            rows * t["warps_m"] == t["tile_m"] and rows % 16 == 0 and rows > 0,
            "warp_tile",
            f"{t['tile_m']} rows for {t['warps_m']} warps are no multiple of 16 each",
        )
        or check(
            columns * t["warps_n"] == t["tile_n"] and columns % 16 == 0 and columns > 0,
            "warp_tile",
            f"{t['tile_n']} columns for {t['warps_n']} warps are no multiple of 16 each",
        )
        or check(
            threads(t) <= 1024,
            "threads",
            f"{t['warps_m']} x {t['warps_n']} warps are {threads(t)} threads; at most 1024",
        )
        or _chain_rules(t, problem)
    )


def _chain_rules(t: Mapping[str, Any], problem: MatmulProblem) -> Rejected | None:
    if t["chain_k"] == 0:
        return check(
            holds(problem, t),
            "chain_k",
            f"k = {problem.k}; without carries the diagonals of Z/2^64 hold a k of {UNCHAINED_K}",
        )
    return (
        check(problem.dtype == "int64", "chain_k", f"of Z/2^32 all diagonals may wrap around: chain_k = {t['chain_k']}")
        or check(t["truncate"] == "once", "chain_k", "tiles that are truncated leave nothing to carry")
        or check(
            t["chain_k"] < problem.k, "chain_k", f"chain_k = {t['chain_k']} carries nothing before k = {problem.k}"
        )
    )


def holds(problem: MatmulProblem, t: Mapping[str, Any]) -> bool:
    """Whether the accumulators hold the problem's sums."""
    return problem.dtype != "int64" or t["chain_k"] > 0 or t["truncate"] != "once" or problem.k <= UNCHAINED_K


def _copy_rules(t: Mapping[str, Any]) -> Rejected | None:
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
