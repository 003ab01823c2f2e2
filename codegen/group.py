"""Grouping: many kernels per .cu, because the fixed cost of a translation unit is most of a small kernel's cost."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from codegen.kernel import Kernel
from codegen.operators import operator

# nvcc -cubin of an empty group of these headers: measured 0.28 to 0.36 s a call.
FIXED_SECONDS = 0.3
MAX_KERNELS = 48
MAX_SECONDS = 12.0


def predicted_seconds(kernels: Iterable[Kernel]) -> float:
    """CPU seconds of nvcc for one group of these kernels."""
    return FIXED_SECONDS + sum(operator(kernel.operator).predicted_compile_seconds(kernel) for kernel in kernels)


def group(
    kernels: Iterable[Kernel], *, workers: int, max_seconds: float = MAX_SECONDS, max_kernels: int = MAX_KERNELS
) -> list[tuple[Kernel, ...]]:
    """Groups of about equal predicted seconds, longest first; the same kernels give the same groups in any order.

    At least one group per idle worker as far as there are kernels; none over `max_kernels`, none over `max_seconds`
    unless it is a single kernel. Each kernel is in exactly one group; repeated kernels count once.
    """
    distinct = {kernel.id: kernel for kernel in kernels}
    if not distinct:
        return []
    costs = {key: operator(kernel.operator).predicted_compile_seconds(kernel) for key, kernel in distinct.items()}
    longest_first = sorted(distinct, key=lambda key: (-costs[key], key))
    room = max(max_seconds - FIXED_SECONDS, 0.001)
    count = max(
        min(workers, len(distinct)), math.ceil(len(distinct) / max_kernels), math.ceil(sum(costs.values()) / room), 1
    )
    count = min(count, len(distinct))
    while True:
        groups = _spread(longest_first, costs, count, max_kernels)
        if count >= len(distinct) or all(len(one) == 1 or _sum(one, costs) <= room for one in groups):
            break
        count += 1
    groups.sort(key=lambda one: (-_sum(one, costs), one))
    return [tuple(distinct[key] for key in one) for one in groups]


def _spread(keys: list[str], costs: dict[str, float], count: int, max_kernels: int) -> list[list[str]]:
    """Longest processing time first: each next kernel goes to the group with the least so far (Graham, 1969)."""
    groups: list[list[str]] = [[] for _ in range(count)]
    least = [(0.0, index) for index in range(count)]
    for key in keys:
        seconds, index = heapq.heappop(least)
        groups[index].append(key)
        if len(groups[index]) < max_kernels:
            heapq.heappush(least, (seconds + costs[key], index))
    return groups


def _sum(keys: list[str], costs: dict[str, float]) -> float:
    return sum(costs[key] for key in keys)
