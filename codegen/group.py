"""Grouping: many kernels per .cu, because the fixed cost of a translation unit is most of a small kernel's cost."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from codegen.compile_cost import FIXED_BYTES, FIXED_SECONDS, kernel_bytes, kernel_seconds
from codegen.kernel import Kernel

MAX_KERNELS = 48
MAX_SECONDS = 12.0
MAX_BYTES = 2**30
BUDGET_SHARE = 12  # a group is compiled, then verified in about twice that time, beside others: some end in a budget


def longest_group(budget_seconds: float | None) -> float:
    """Predicted seconds that a group of a job may take. A job with a budget gets groups so small that the first are
    judged long before its end, though each costs the fixed seconds of a file again."""
    if budget_seconds is None:
        return MAX_SECONDS
    return min(MAX_SECONDS, max(2 * FIXED_SECONDS, budget_seconds / BUDGET_SHARE))


@dataclass(frozen=True)
class _Caps:
    """Of one group, without what its file costs anyway."""

    kernels: int
    seconds: float
    bytes: float


def group(
    kernels: Iterable[Kernel],
    *,
    workers: int,
    max_seconds: float = MAX_SECONDS,
    max_kernels: int = MAX_KERNELS,
    max_bytes: float = MAX_BYTES,
) -> list[tuple[Kernel, ...]]:
    """Groups of about equal predicted seconds, longest first; the same kernels give the same groups in any order.

    `workers` are idle. Each of them gets a group as long as one more group saves more wall seconds than the file costs
    (see `_group_count`). None has over `max_kernels`; none is predicted over `max_seconds` or `max_bytes`, unless it is
    a single kernel. Each kernel is in exactly one group; repeated kernels count once.
    """
    distinct = {kernel.id: kernel for kernel in kernels}
    if not distinct:
        return []
    costs = {key: kernel_seconds(kernel) for key, kernel in distinct.items()}
    memory = {key: kernel_bytes(kernel) for key, kernel in distinct.items()}
    longest_first = sorted(distinct, key=lambda key: (-costs[key], key))
    caps = _Caps(max_kernels, max(max_seconds - FIXED_SECONDS, 0.001), max(max_bytes - FIXED_BYTES, 1.0))
    count = _group_count(costs, memory, workers, caps)
    while True:
        groups = _spread(longest_first, costs, count, max_kernels)
        if count >= len(distinct) or all(
            len(one) == 1 or (_sum(one, costs) <= caps.seconds and _sum(one, memory) <= caps.bytes) for one in groups
        ):
            break
        count += 1
    groups.sort(key=lambda one: (-_sum(one, costs), one))
    return [tuple(distinct[key] for key in one) for one in groups]


def _group_count(costs: Mapping[str, float], memory: Mapping[str, float], workers: int, caps: _Caps) -> int:
    """The fewest groups that the caps allow, and more as long as that pays.

    With `count` equal groups on `workers` workers the last ends after ceil(count / workers) rounds of one group each.
    More groups pay where that wall time shrinks by more than the seconds that their files cost: so a few small kernels
    stay together, and the last round leaves no worker idle (Graham, 1969, on longest processing time first).
    """
    whole, longest, most = sum(costs.values()), max(costs.values()), len(costs)
    count = max(
        math.ceil(most / caps.kernels),
        math.ceil(whole / caps.seconds),
        math.ceil(sum(memory.values()) / caps.bytes),
        1,
    )
    count = min(count, most)

    def wall(groups: int) -> float:
        return max(math.ceil(groups / max(workers, 1)) * (whole / groups + FIXED_SECONDS), longest + FIXED_SECONDS)

    for more in range(count + 1, min(count + workers, most) + 1):
        if wall(count) - wall(more) > FIXED_SECONDS * (more - count):
            count = more
    return count


def _spread(keys: list[str], costs: Mapping[str, float], count: int, max_kernels: int) -> list[list[str]]:
    """Longest processing time first: each next kernel goes to the group with the least so far (Graham, 1969)."""
    groups: list[list[str]] = [[] for _ in range(count)]
    least = [(0.0, index) for index in range(count)]
    for key in keys:
        seconds, index = heapq.heappop(least)
        groups[index].append(key)
        if len(groups[index]) < max_kernels:
            heapq.heappush(least, (seconds + costs[key], index))
    return groups


def _sum(keys: list[str], amounts: Mapping[str, float]) -> float:
    return sum(amounts[key] for key in keys)
