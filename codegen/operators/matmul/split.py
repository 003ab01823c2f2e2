"""How k is divided among blocks, for both kernels, and the launches and the workspace that this takes.

`workspace`: k in slices that run as blocks of their own; each writes its partial sums to its own part of the workspace,
and `reduce` adds them in the order of the slices: the same bits in every run. `atomic`: `clear` zeroes one set of sums,
all slices add to it, `reduce` applies the epilogue; float sums then depend on the order of arrival. `stream`: stream-K,
on tensor cores only. A fixed number of blocks share the k-steps of all tiles evenly; only tiles that lie in several
blocks go through the workspace. Limbs that are split ahead (limb_planes.py) lie behind partial sums.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from codegen.dtypes import dtype
from codegen.operators.matmul import limb_planes
from codegen.operators.matmul.grid import RASTER, blocks, k_steps, tiles
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search.rules import Rejected, check
from codegen.search.space import Linked, Tunable
from codegen.targets import Target

MOST_SLICES, MOST_STREAM_BLOCKS = 1024, 4096
MOST_OF_A_CALL = 65535  # slices; as many blocks as a launch has along y
_WAYS = ("none", "workspace", "atomic")  # in the order of the numbers in gemm/tile.cuh
_MEANING = "where partial sums of k go: nowhere, a part of the workspace for each slice, one part by atomic adds"
SPLIT = Tunable("split", _WAYS, False, _MEANING, "none")
# Over rings: no atomic addition in 64 bits, and nothing that it would save.
SPLIT_OF_RING = Tunable("split", _WAYS[:2], False, _MEANING, "none")
SPLIT_OR_STREAM = Tunable("split", (*_WAYS, "stream"), False, f"{_MEANING}; stream-K", "none")
SPLIT_K = Tunable("split_k", range(1, MOST_SLICES + 1), True, "slices of k that are summed in parallel", 1)
STREAM_BLOCKS = Tunable(
    "stream_blocks", range(MOST_STREAM_BLOCKS + 1), True,
    "blocks that share the k-steps of all tiles where split is stream; else 0", 0,
)  # fmt: skip
# The slice counts of level 2 (Apache TVM pull request 10185 settled on these for weight gradients).
SLICES = (1, 2, 4, 8, 16, 32, 64)

# `split` with `split_k` and `stream_blocks`.
Way = tuple[str, int, int]

_FUNCTIONS = {
    "none": ("run",),
    "workspace": ("run", "reduce"),
    "atomic": ("clear", "run", "reduce"),
    "stream": ("run", "reduce"),
}
# Threads of a block of `reduce` and `clear`, as `reduce_threads` in gemm/split.cuh.
REDUCE_THREADS = 256
# Steps that a slice needs to be worth the second launch.
LEAST_STEPS = 8
# Blocks per multiprocessor beyond which more slices add traffic and nothing else: the last round of blocks is then an
# eighth of the time at most.
ENOUGH_BLOCKS = 8
# Rounds of tiles that leave less than this share of their places empty need no stream-K.
IDLE_SHARE = 0.1


def functions(tunables: Mapping[str, Any]) -> tuple[str, ...]:
    """The kernel's __global__ functions, in launch order."""
    first = (limb_planes.SPLIT_LIMBS,) if limb_planes.ahead(tunables) else ()
    return (*first, *_FUNCTIONS[tunables.get("split", "none")])


def deterministic(tunables: Mapping[str, Any], acc_dtype: str) -> bool:
    """Integer sums are the same in any order."""
    return tunables.get("split") != "atomic" or acc_dtype == "int32"


def sum_bytes(problem: MatmulProblem) -> int:
    """Of an accumulator."""
    return dtype(problem.acc_dtype).bytes


def workspace_pitch(n: int) -> int:
    """Sums from one row of the workspace to the next, as in gemm/tile.cuh: whole 16-byte vectors."""
    return -(-n // 4) * 4


def workspace_bytes(problem: MatmulProblem, tunables: Mapping[str, Any]) -> int:
    """Exactly what `workspace_bytes` in kernel.cuh says."""
    planes = limb_planes.plane_bytes(problem) if limb_planes.ahead(tunables) else 0
    return partial_bytes(problem, tunables) + planes


def partial_bytes(problem: MatmulProblem, tunables: Mapping[str, Any]) -> int:
    """Of the workspace, those of partial sums."""
    t = tunables
    if t["split"] == "stream":
        size: int = sum_bytes(problem) * 2 * t["stream_blocks"] * t["tile_m"] * t["tile_n"]
        return size
    slices: int = {"none": 0, "workspace": t["split_k"], "atomic": 1}[t["split"]]
    return sum_bytes(problem) * slices * problem.batch * problem.m * workspace_pitch(problem.n)


def all_steps(problem: MatmulProblem, tunables: Mapping[str, Any]) -> int:
    """k-steps of all tiles."""
    return blocks(problem, tunables["tile_m"], tunables["tile_n"]) * k_steps(problem.k, tunables["tile_k"])


def grid_blocks(problem: MatmulProblem, tunables: Mapping[str, Any]) -> int:
    """Thread blocks of `run`."""
    t = tunables
    if t["split"] == "stream":
        return int(t["stream_blocks"])
    return blocks(problem, t["tile_m"], t["tile_n"]) * int(t["split_k"])


def steps_of_block(problem: MatmulProblem, tunables: Mapping[str, Any]) -> int:
    """k-steps of the block that has the most."""
    return -(-all_steps(problem, tunables) // grid_blocks(problem, tunables))


def useful_slices(
    problem: MatmulProblem, smallest: tuple[int, int], largest: tuple[int, int], tile_k: int, wanted: int,
    least_steps: int = LEAST_STEPS,
) -> tuple[int, ...]:  # fmt: skip
    """Slice counts with which tiles between these two sizes bring a grid to `wanted` blocks, at most three; none where
    the smallest tiles do so alone or slices would have fewer than `least_steps` steps."""
    most, least = blocks(problem, *smallest), blocks(problem, *largest)
    if most >= wanted:
        return ()
    longest = k_steps(problem.k, tile_k) // least_steps
    fit = [count for count in SLICES[1:] if count <= longest]
    useful = [count for count in fit if 4 * count * most > wanted and count * least < 2 * wanted]
    return tuple(useful[:3] or fit[-1:])


def ways(slices: Sequence[int], stream_blocks: Sequence[int] = (), *, atomic: bool = True) -> tuple[Way, ...]:
    """Values of `split` with what goes with each: slices of `workspace` and `atomic`, blocks of `stream`."""
    divisions: list[Way] = [("none", 1, 0)]
    for split in ("workspace", "atomic") if atomic else ("workspace",):
        divisions += [(split, count, 0) for count in slices if count > 1]
    return (*divisions, *(("stream", 1, count) for count in stream_blocks))


def linked(chosen: tuple[Way, ...], *, with_stream: bool) -> Linked:
    """The three tunables that say how k is divided (two where there is no stream-K) as one axis of a search space."""
    names = ("split", "split_k", "stream_blocks")
    return Linked(names, chosen) if with_stream else Linked(names[:2], tuple(way[:2] for way in chosen))


def launches_to_test(tunables: Mapping[str, Any], problem: MatmulProblem) -> list[list[int]]:
    """Each number of parts of k, then every raster with the most parts that the problem has. Few parts come first,
    because the first launch is race-checked: with one step in a part there is no pipeline to check. A single row or
    column of tiles has one order, whatever the raster: there the widest band stands for all of them."""
    *fewer, most = _parts_to_test(tunables, problem)
    in_a_line = min(tiles(problem, int(tunables["tile_m"]), int(tunables["tile_n"]))) == 1
    rasters = (RASTER.allowed[0], RASTER.allowed[-1]) if in_a_line else RASTER.allowed
    return [*([0, *parts] for parts in fewer), *([int(raster), *most] for raster in rasters)]


def _parts_to_test(tunables: Mapping[str, Any], problem: MatmulProblem) -> list[tuple[int, int]]:
    """`split_k` and `stream_blocks` for a test problem, the largest last: a few, and as many as there are steps to
    divide; none leaves a block without a step."""
    if tunables["split"] == "none":
        return [(1, 0)]
    if tunables["split"] == "stream":
        most = min(all_steps(problem, tunables), MOST_STREAM_BLOCKS)
        return [(1, count) for count in sorted({min(count, most) for count in (2, 3, 5, most)})]
    most = min(k_steps(problem.k, tunables["tile_k"]), MOST_SLICES)
    return [(count, 0) for count in sorted({min(count, most) for count in (1, 2, 3, most)})]


def most_parts(tunables: Mapping[str, Any], problem: MatmulProblem) -> list[int]:
    """The launch-time values of a long problem: as many slices as level 2 has, at most; for stream-K a few blocks."""
    if tunables["split"] == "none":
        return [0, 1, 0]
    steps = k_steps(problem.k, tunables["tile_k"])
    return [0, 1, min(3, steps)] if tunables["split"] == "stream" else [0, min(steps, SLICES[-1]), 0]


def rules(t: Mapping[str, Any], problem: MatmulProblem, target: Target) -> Rejected | None:
    """The three tunables agree, no block is without a step, and the division can be of use."""
    if t["split"] == "stream":
        return _stream_rules(t, problem, target)
    split, slices = t["split"], t["split_k"]
    if t.get("stream_blocks", 0) != 0:
        return Rejected("split", f"stream_blocks = {t.get('stream_blocks')} needs split = stream")
    if slices == 1:
        return check(split == "none", "split", f"split = {split} with 1 slice repeats split = none and adds a launch")
    steps, tile_blocks = k_steps(problem.k, t["tile_k"]), blocks(problem, t["tile_m"], t["tile_n"])
    enough = ENOUGH_BLOCKS * target.sm_count
    if split == "none":
        return Rejected("split", f"split_k = {slices} needs split = workspace or atomic")
    if slices > steps:
        return Rejected(
            "split_k", f"{slices} slices of {steps} steps (k = {problem.k}, tile_k = {t['tile_k']}) leave some empty"
        )
    if tile_blocks * slices >= enough:
        return Rejected(
            "split_k", f"{tile_blocks} tiles in {slices} slices; {target.name} has enough with {enough} blocks"
        )
    return None


def _stream_rules(t: Mapping[str, Any], problem: MatmulProblem, target: Target) -> Rejected | None:
    count, steps = t["stream_blocks"], all_steps(problem, t)
    tile_blocks, device = blocks(problem, t["tile_m"], t["tile_n"]), target.sm_count
    rounds = -(-tile_blocks // device)
    if t["split_k"] != 1:
        return Rejected("split", f"split = stream divides k by blocks: split_k is 1, not {t['split_k']}")
    if count <= 0:
        return Rejected("stream_blocks", "split = stream needs at least 1 block")
    if count > steps:
        return Rejected("stream_blocks", f"{count} blocks for {steps} steps leave some empty")
    if tile_blocks % count == 0:
        return Rejected(
            "stream_blocks", f"{count} blocks take {tile_blocks} whole tiles: nothing is shared, as with split = none"
        )
    if tile_blocks >= (1 - IDLE_SHARE) * rounds * device:
        return Rejected(
            "stream_blocks", f"{tile_blocks} tiles fill {rounds} x {device} multiprocessors without stream-K"
        )
    return None
