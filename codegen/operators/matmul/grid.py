"""The grid of tiles of a matmul: how many blocks and k-steps there are, and the rules that both kernels share."""

from collections.abc import Mapping
from typing import Any

from codegen.alignment import power_of_two
from codegen.operators.matmul.problem import MatmulProblem
from codegen.problem import LARGEST_EXTENT
from codegen.search.rules import Rejected
from codegen.search.space import Tunable

RASTER = Tunable("raster", (0, 1, 4, 8), True, "order of the tiles: 0 by rows, 1 by columns, g in bands of g rows", 0)


def tiles(problem: MatmulProblem, tile_m: int, tile_n: int) -> tuple[int, int]:
    """Tiles of one matrix along m and n."""
    return -(-problem.m // tile_m), -(-problem.n // tile_n)


def blocks(problem: MatmulProblem, tile_m: int, tile_n: int) -> int:
    """Thread blocks of a launch that does not split k."""
    tiles_m, tiles_n = tiles(problem, tile_m, tile_n)
    return problem.batch * tiles_m * tiles_n


def k_steps(k: int, tile_k: int) -> int:
    """Tiles along k, the last one perhaps not full."""
    return -(-k // tile_k)


def padding_rules(t: Mapping[str, Any], problem: MatmulProblem, least_k: int) -> Rejected | None:
    """A tile over twice the extent computes mostly padding; the smallest tiles (16 x 16 x `least_k`) are for all."""
    for name, extent, least in (("m", problem.m, 16), ("n", problem.n, 16), ("k", problem.k, least_k)):
        tile = t[f"tile_{name}"]
        if tile > max(least, power_of_two(extent)):
            return Rejected(f"tile_{name}", f"tile_{name} = {tile} is mostly padding for {name} = {extent}")
    return None


def order_rules(t: Mapping[str, Any], problem: MatmulProblem) -> Rejected | None:
    """Orders that repeat another one, and grids that no launch takes."""
    raster = t["raster"]
    tiles_m, tiles_n = tiles(problem, t["tile_m"], t["tile_n"])
    grid = blocks(problem, t["tile_m"], t["tile_n"])
    if raster != 0 and (tiles_m <= 1 or tiles_n <= 1):
        return Rejected("raster", f"raster = {raster} orders {tiles_m} x {tiles_n} tiles as 0 does")
    if raster >= 2 and tiles_m <= raster:
        return Rejected("raster", f"bands of {raster} rows order {tiles_m} rows of tiles as raster = 1 does")
    if grid > LARGEST_EXTENT:
        return Rejected("grid", f"{grid} blocks; a launch has at most {LARGEST_EXTENT}")
    return None
