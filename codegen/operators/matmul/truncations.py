"""How often a run truncates, as its lanes execute it: what tiles add to the matrices is truncated with them."""

from collections.abc import Mapping
from typing import Any

from codegen.fixed_point import over_ring, products
from codegen.operators.matmul.grid import blocks, k_steps
from codegen.operators.matmul.problem import MatmulProblem


def truncations(problem: MatmulProblem, t: Mapping[str, Any]) -> int:
    """Of sums, and of products of the epilogue."""
    if not over_ring(problem) or problem.fraction_bits == 0:
        return 0
    outputs = problem.batch * problem.m * problem.n
    return early_truncations(problem, t) + outputs * (int(t["truncate"] == "once") + products(problem.epilogue))


def early_truncations(problem: MatmulProblem, t: Mapping[str, Any]) -> int:
    """Those of whole tiles, where tiles or products are truncated."""
    if t["truncate"] == "once":
        return 0
    outputs: int = blocks(problem, t["tile_m"], t["tile_n"]) * t["tile_m"] * t["tile_n"]
    return outputs * k_steps(problem.k, t["tile_k"]) * (int(t["tile_k"]) if t["truncate"] == "product" else 1)
