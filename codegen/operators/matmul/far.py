"""The last rows of so many that a product's partial sums lie beyond 32 bits, and the blocks that compute them."""

from collections.abc import Iterable, Mapping
from typing import Any

from codegen.operators.matmul import limb_planes, split
from codegen.operators.matmul.grid import k_steps, tiles
from codegen.operators.matmul.problem import MatmulProblem
from codegen.problem import LARGEST_EXTENT, indexable
from codegen.run_once import FAR, LastBlocks, RunOnce

Fields = Mapping[str, Any]
SLICES = 3
PITCHES = ("lda", "ldb", "ldc", "stride_a", "stride_b", "stride_c")
# Rows ahead of the last ones are a multiple: alignment classes stay, and words of a packed mask begin with the last.
WHOLE = 64


def last_rows(problems: Iterable[MatmulProblem], t: Fields, width: int) -> list[RunOnce]:
    """Of kernels with partial sums, but for limbs that are split ahead: theirs are not of the last blocks. `width`:
    elements of a store."""
    if t["split"] == "none" or limb_planes.ahead(t):
        return []
    for problem in problems:
        unit, pitch = WHOLE * int(t["tile_m"]), split.workspace_pitch(problem.n)
        rows = -(-FAR // (pitch * unit)) * unit + problem.m
        if problem.batch > 1 or rows > LARGEST_EXTENT:
            continue
        packed = {name: value for name, value in problem.canonical().items() if name not in PITCHES}
        few, many = (indexable(MatmulProblem, {**packed, "m": m}) for m in (problem.m, rows))
        if few is None or many is None or not has_slots(t, many):
            continue
        return [RunOnce("far", many, launch(t, many), few, of_rows(t, few, many, width))]
    return []


def of_rows(t: Fields, part: MatmulProblem, whole: MatmulProblem, width: int) -> tuple[LastBlocks, ...]:
    """Of the last rows of each matrix."""
    (down, across), (all_down, _) = (tiles(of, int(t["tile_m"]), int(t["tile_n"])) for of in (part, whole))
    run = LastBlocks((down + 1) * across, all_down * across)
    return of_launches(t, part, run, (part.m, (down + 1) * across), width)


def of_launches(
    t: Fields, part: MatmulProblem, run: LastBlocks, rows_and_tiles: tuple[int, int], width: int
) -> tuple[LastBlocks, ...]:
    rows, tile_count = rows_and_tiles
    items = rows * part.n
    if t["split"] == "stream":
        run = LastBlocks(run.count * k_steps(part.k, int(t["tile_k"])))
        items = tile_count * int(t["tile_m"]) * int(t["tile_n"])
    of_each = {
        "clear": of_items(rows * split.workspace_pitch(part.n) // 4),
        "run": run,
        "reduce": of_items(items // width),
    }
    return tuple(of_each[name] for name in split.functions(t))


def launch(t: Fields, product: MatmulProblem) -> tuple[int, ...]:
    """Of an implicit product: a few slices, or a step for each block of stream-K."""
    if t["split"] == "stream":
        return 0, 1, split.all_steps(product, t)
    return 0, 1 if t["split"] == "none" else min(SLICES, k_steps(product.k, int(t["tile_k"]))), 0


def has_slots(t: Fields, product: MatmulProblem) -> bool:
    """Whether the two slots of each block of stream-K can be counted where each has a step."""
    return t["split"] != "stream" or 2 * split.all_steps(product, t) < FAR


def of_items(count: int) -> LastBlocks:
    return LastBlocks(-(-count // split.REDUCE_THREADS) + 1)
