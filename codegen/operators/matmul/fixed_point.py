"""Fixed point over the rings Z/2^32 and Z/2^64: what a problem says of it, what it means, and how far a schedule may be
off that truncates more often.

Numbers are two's complement; sums and products wrap around. A number x with f fraction bits stands for x / 2^f, so a
sum of products has 2 f of them. With S the value of the wrapped sum, in [-2^(b-1), 2^(b-1)), the result is

- floor: ⌊S / 2^f⌋, an arithmetic shift;
- nearest: ⌊S / 2^f + 1/2⌋.

That is `exact_once`. Where a schedule truncates P parts of a sum instead, each of them once, S is the sum of the parts
S_1 to S_P **provided that neither they nor their partial sums wrap around**, for which Σ|a||b| < 2^(b-1) is enough.
The policy `tolerance` presupposes that, also of sums in the epilogue; inputs that do not keep to it have no bound.

- floor: S_i / 2^f - ⌊S_i / 2^f⌋ is in [0, 1), so the sum of the truncated parts is below S / 2^f by a number in [0, P),
  and ⌊S / 2^f⌋ by one in [0, 1). The two whole numbers differ by more than -1 and less than P: the parts give
  **0 to P - 1 less**;
- nearest: ⌊S_i / 2^f + 1/2⌋ - S_i / 2^f is in (-1/2, 1/2]. The sum of the truncated parts differs from S / 2^f by more
  than -P / 2 and at most P / 2, the exact result by more than -1/2 and at most 1/2. The whole numbers differ by less
  than (P + 1) / 2: **at most ⌊P / 2⌋ either way**.

One part is exact in both. P is ⌈k / tile_k⌉ where tiles are truncated, also where k is divided among blocks, and k
where products are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from codegen.canonical import as_integer
from codegen.dtypes import dtype
from codegen.epilogue import MaskedActivation, Node

if TYPE_CHECKING:
    from codegen.operators.matmul.problem import MatmulProblem

RINGS = ("int32", "int64")
Rounding = Literal["floor", "nearest"]
Place = Literal["once", "tile", "product"]
PLACES: tuple[Place, ...] = ("once", "tile", "product")
LARGEST_ULP = 2**31 - 1
# What an epilogue computes exactly in a ring, on truncated sums: sums, a choice by sign or mask, and a square, which is
# truncated as sums are. The others have factors that are no numbers of the ring, or approximate.
NODES = ("bias", "mask", "masked_activation", "relu", "residual")
FUNCTIONS = ("identity", "relu", "square")


class ExactOnce(BaseModel):
    """The wrapped sum, truncated once: every bit is decided."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    policy: Literal["exact_once"]


class Tolerance(BaseModel):
    """Within `ulp` of what `exact_once` gives, in units of the last bit of out, where no partial sum wraps around."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    policy: Literal["tolerance"]
    ulp: Annotated[int, Field(strict=True, ge=0, le=LARGEST_ULP), BeforeValidator(as_integer)]


Truncation = Annotated[ExactOnce | Tolerance, Field(discriminator="policy")]


def over_ring(problem: MatmulProblem) -> bool:
    return problem.dtype in RINGS


def bits_of(element: str) -> int:
    """b of Z/2^b."""
    return 8 * dtype(element).bytes


def ring_name(element: str) -> str:
    return f"Z/2^{bits_of(element)}"


def parts(k: int, tunables: Mapping[str, Any]) -> int:
    """How many parts of a sum a schedule truncates."""
    return {"once": 1, "tile": -(-k // int(tunables["tile_k"])), "product": k}[tunables["truncate"]]


def largest_error(count: int, rounding: str) -> int:
    """Units of the last bit by which `count` truncated parts may differ from their truncated sum; see above."""
    return count - 1 if rounding == "floor" else count // 2


def allowed_ulp(problem: MatmulProblem) -> int:
    """What the problem's policy allows."""
    return problem.truncation.ulp if isinstance(problem.truncation, Tolerance) else 0


def truncations(problem: MatmulProblem, tunables: Mapping[str, Any]) -> int:
    """How many numbers a run of the schedule truncates: parts of sums, and squares, those that a mask rejects too."""
    if not over_ring(problem) or problem.fraction_bits == 0:
        return 0
    return problem.batch * problem.m * problem.n * (parts(problem.k, tunables) + squares(problem.epilogue))


def squares(chain: Sequence[Node]) -> int:
    """How many functions of a chain square."""
    return sum(function.op == "square" for node in chain for function in _functions(node))


def _functions(node: Node) -> tuple[Node, ...]:
    return (node.where_set, node.where_clear) if isinstance(node, MaskedActivation) else ()


def foreign_node(chain: Sequence[Node]) -> str | None:
    """The name of a node that no ring computes exactly; None where there is none."""
    for index, node in enumerate(chain):
        if node.op not in NODES:
            return f"node {index} is {node.op}"
        for place, function in zip(("where_set", "where_clear"), _functions(node), strict=False):
            if function.op not in FUNCTIONS:
                return f"{place} of node {index} is {function.op}"
    return None
