"""Which waiting groups share a file with the one that is about to be compiled, because each is too small for one alone.

A file costs its fixed seconds whatever is in it. Of a small group they are a good part, so where many wait, as when a
framework sends a job for each shape that it meets, one file holds several of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.compile_model import FIXED_SECONDS, CompileModel
from codegen.group import MAX_SECONDS, group
from codegen.kernel import Kernel

SMALL_SECONDS = 5 * FIXED_SECONDS
"""Predicted for a group that shares: at least a fifth of it is the file. More would be held up for longer by what comes
along than it saves."""


@dataclass(frozen=True)
class Small:
    """The kernels of a group; `max_seconds` that its file may be predicted to take."""

    kernels: tuple[Kernel, ...]
    max_seconds: float = MAX_SECONDS


def sharing(
    mine: Small, waiting: Sequence[Small], *, workers: int, model: CompileModel, max_kernels: int, max_bytes: float
) -> list[int]:
    """Places in `waiting` of those to be compiled with `mine`, the first that fit.

    `workers` compile, and may have nothing else to do: `mine` takes no more than its share, to the nearest group, of as
    many files as a planner would make of all these kernels for so many workers. So each of them finds one, as long as
    the seconds that it saves are more than the file costs.
    """
    if not waiting:
        return []
    everything = [*mine.kernels, *(kernel for one in waiting for kernel in one.kernels)]
    files = len(group(everything, workers=workers, model=model, max_kernels=max_kernels, max_bytes=max_bytes))
    share = _added(model, everything) / files
    kernels, seconds, longest = list(mine.kernels), _added(model, mine.kernels), mine.max_seconds
    taken: list[int] = []
    for place, one in enumerate(waiting):
        if len(waiting) - len(taken) < files:
            break
        more, limit = _added(model, one.kernels), min(longest, one.max_seconds)
        together = [*kernels, *one.kernels]
        if (
            seconds + more / 2 <= share
            and FIXED_SECONDS + seconds + more <= limit
            and len(together) <= max_kernels
            and model.bytes(together) <= max_bytes
            # The same kernel from another text, of another release: two namespaces of one name.
            and len({kernel.id for kernel in together}) == len(together)
        ):
            kernels, seconds, longest = together, seconds + more, limit
            taken.append(place)
    return taken


def _added(model: CompileModel, kernels: Sequence[Kernel]) -> float:
    return sum(map(model.kernel_seconds, kernels))
