"""The phases of a step, as the database keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from codegen.kernel import Kernel
from workers.compile_file import Phase


def placed(phases: Sequence[Phase], since_claim: float, kernels: Sequence[Kernel] = ()) -> list[dict[str, Any]]:
    """Starts count from the claim; kernels are named by their place among `kernels`, and not at all where a phase was
    of every one of them."""
    place_of = {kernel.id: place for place, kernel in enumerate(kernels)}
    found: list[dict[str, Any]] = []
    for phase in phases:
        found.append({"name": phase.name, "seconds": phase.seconds, "start": since_claim + phase.start})
        places = [place_of[id] for id in phase.kernels if id in place_of]
        if 0 < len(places) < len(place_of):
            found[-1]["kernels"] = places
    return found
