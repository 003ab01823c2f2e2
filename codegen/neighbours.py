"""Problems of one signature, whose kernels are the same: how they are found, and how far one is from another."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from pydantic import ValidationError

from codegen.errors import CodegenError
from codegen.identity import signature_id
from codegen.operator import Operator
from codegen.operators import operator
from codegen.problem import Problem

NEAR_BYTES = 2**31
"""Of an operand: offsets into it, of elements or bytes, have 31 bits."""


@dataclass(frozen=True)
class Place:
    """`signature`: its digest. `size`: log2 of the elements of all operands. Each is a product of extents, so problems
    whose extents are near each other have sizes that are: an index by size finds them."""

    signature: str
    size: float


@dataclass(frozen=True)
class Extents:
    """What is compared of two problems of one signature: of each operand its axes, the last first, and its bytes."""

    axes: tuple[tuple[int, ...], ...]
    bytes: tuple[int, ...]

    @classmethod
    def of(cls, kind: Operator, problem: Problem) -> "Extents":
        operands = kind.operands(problem)
        axes = tuple(tuple(max(1, length) for length in reversed(operand.shape)) for operand in operands)
        return cls(axes, tuple(operand.bytes for operand in operands))


def place_of(kind: Operator, problem: Problem) -> Place:
    elements = sum(math.prod(operand.shape) for operand in kind.operands(problem))
    return Place(signature_id(kind.name, kind.signature(problem)), math.log2(max(1, elements)))


def stored_place(operator_name: str, problem: Mapping[str, Any]) -> Place | None:
    """Of a canonical problem; None where this release has no such operator, or refuses the problem."""
    try:
        kind = operator(operator_name)
        return place_of(kind, kind.parse(problem))
    except (CodegenError, ValidationError):
        return None


def distance(first: Extents, second: Extents) -> float:
    """Over the axes of all operands of two problems of one signature: the sum of |log2| of the ratio of their lengths.

    A schedule suits a problem by how many tiles fit into its extents and how many blocks into the GPU: halving an
    extent changes these as much as doubling it, whatever it is. An extent counts for each operand that has it.
    """
    total = 0.0
    for one, other in zip(first.axes, second.axes, strict=True):
        if one != other:
            # A problem of one matrix has no axis of the batch.
            total += sum(abs(math.log2(a / b)) for a, b in zip_longest(one, other, fillvalue=1))
    return total


def reaches_no_further(asked: Extents, beside: Extents) -> bool:
    """Whether no operand of `asked` has offsets beyond 31 bits that the same operand of `beside` does not have: the
    problems of a verification plan are small, so only the problem that a kernel was tuned for shows that it has them
    right."""
    return all(own < NEAR_BYTES or own <= other for own, other in zip(asked.bytes, beside.bytes, strict=True))
