"""The last filters of so many that dy and dw have elements beyond 32 bits, and the blocks that compute their gradients.

There is no such problem of depthwise kernels: dy has about as many elements as x with its padding, which is gathered by
32 bits."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from codegen.operators.matmul import far
from codegen.operators.matmul.problem import MatmulProblem
from codegen.problem import LARGEST_EXTENT, indexable
from codegen.run_once import FAR, RunOnce

# Filters ahead of the last ones are a multiple: alignment classes stay, and words of a packed mask begin with the last.
WHOLE = 64


def last_filters(
    problems: Iterable[Any], t: Mapping[str, Any], product: Callable[[Any], MatmulProblem], width: int
) -> list[RunOnce]:
    """Of the first problem of one group, of several images if there is one, that has several products and several
    outputs of a filter."""
    for problem in sorted(problems, key=lambda problem: problem.n == 1):
        least = min(problem.pixels, problem.taps)
        if problem.groups > 1 or least == 1:
            continue
        unit = WHOLE * int(t["tile_m"])
        filters = -(-FAR // (least * unit)) * unit + problem.k
        if filters > LARGEST_EXTENT:
            continue
        many = indexable(type(problem), {**problem.canonical(), "k": filters})
        if many is None:
            continue
        part, whole = product(problem), product(many)
        if not far.has_slots(t, whole):
            continue
        return [RunOnce("far", many, far.launch(t, whole), problem, far.of_rows(t, part, whole, width))]
    return []
