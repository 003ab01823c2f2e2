"""Limbs that are split once, ahead of the product: a matrix of bytes for each limb of both operands, in the workspace
(`codegen/device/gemm/limb_planes.cuh`). Winograd's transforms write them as they are."""

from collections.abc import Mapping
from typing import Any

from codegen.alignment import round_up
from codegen.dtypes import dtype
from codegen.fixed_point import bits_of
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search.space import Tunable

LIMB_SPLIT = Tunable(
    "limb_split", ("fused", "ahead"), False,
    "over rings only, by limbs: elements are split into limbs where they are read, or once by a launch of its own (of "
    "Winograd by its transforms)", "fused", later=True,
)  # fmt: skip
SPLIT_LIMBS = "split_limbs"
# In place of `ahead`, where only the product is looked at: its planes come from elsewhere.
GIVEN = "given"
# Bytes that rows of planes are made of, as `plane_vector` in limb_planes.cuh.
VECTOR = 16


def ahead(tunables: Mapping[str, Any]) -> bool:
    return bool(tunables.get(LIMB_SPLIT.name) == "ahead")


def planes(tunables: Mapping[str, Any]) -> bool:
    """Whether `run` reads planes."""
    return tunables.get(LIMB_SPLIT.name) in ("ahead", GIVEN)


def element_bytes(problem: MatmulProblem, tunables: Mapping[str, Any]) -> int:
    """Of an operand as `run` copies it."""
    return bits_of(problem.dtype) // 8 if planes(tunables) else dtype(problem.dtype).bytes


def rows(problem: MatmulProblem) -> tuple[int, int]:
    """Of A and columns of B, those of a repeated one once."""
    p = problem
    copies_a, copies_b = (p.batch if stride else 1 for stride in (p.stride_a, p.stride_b))
    return copies_a * p.m, copies_b * p.n


def row_bytes(problem: MatmulProblem) -> int:
    """Of a row of A, or a column of B, in all planes."""
    return bits_of(problem.dtype) // 8 * round_up(problem.k, VECTOR)


def plane_bytes(problem: MatmulProblem) -> int:
    """Of both operands, as in limb_planes.cuh."""
    return row_bytes(problem) * sum(rows(problem))
