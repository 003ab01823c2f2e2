"""Whether the GPU was the same throughout a comparison: its throttle reasons, its clock, and the times themselves."""

import itertools
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from workers.gpu.sampling import Placed

# Reasons of `workers.cuda.state` that are no throttling: an idle GPU, and clocks that a person has set.
SETTINGS = frozenset({"gpu_idle", "applications_clocks_setting", "display_clock_setting"})
# Clocks move in steps of 15 MHz, of 1,500 and more, all the time: that is one per cent.
STEADY = 0.03
LITTLE = 0.05  # of the time
FEWEST_SAMPLES = 8


def limited_by(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The throttle reasons before and after, or all the time between: a cap that holds all the time is the same for all
    that are compared, and another try would find it, too."""
    throughout = {reason for reason, share in _held_back(before, after).items() if share > 1 - LITTLE}
    return sorted((_reasons(before) & _reasons(after)) | throughout)


def unsteady(before: Mapping[str, Any], after: Mapping[str, Any], placed: Sequence[Placed]) -> list[str]:
    """What changed while these took turns, for a person; nothing of a steady GPU."""
    limits = limited_by(before, after)
    came, went = (
        sorted(first - second - set(limits)) for first, second in itertools.permutations(map(_reasons, (after, before)))
    )
    words = [f"throttling began: {', '.join(came)}"] if came else []
    words += [f"throttling ended: {', '.join(went)}"] if went else []
    # Whatever holds at the two moments: what came and went between them is in no list of reasons.
    between = {reason: share for reason, share in _held_back(before, after).items() if share > LITTLE}
    words += [
        f"throttling for {between[reason]:.0%} of the time: {reason}" for reason in sorted(between.keys() - limits)
    ]
    first, last = before.get("sm_mhz"), after.get("sm_mhz")
    if first and last and abs(last / first - 1) > STEADY:
        words.append(f"the clock went from {first} to {last} MHz")
    if (change := drift(placed)) is not None and abs(change) > STEADY:
        words.append(f"all times changed by {change:+.1%} between the first half of the rounds and the second")
    return words


def _held_back(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    """The share of the time between for which the clocks were held back, by reason; of those that both states have."""
    first, last = before.get("held_back", {}), after.get("held_back", {})
    passed = {reason: last[reason]["at_us"] - first[reason]["at_us"] for reason in first.keys() & last.keys()}
    return {reason: (last[reason]["us"] - first[reason]["us"]) / us for reason, us in passed.items() if us > 0}


def _reasons(state: Mapping[str, Any]) -> set[str]:
    return set(state.get("throttle", ())) - SETTINGS


def drift(placed: Sequence[Placed]) -> float | None:
    """How much longer a run took in the second half of the samples than in the first: the median of all that took
    turns, for a change that they share. None of too few samples."""
    changes = []
    for entry in placed:
        half = len(entry.samples) // 2
        if half >= FEWEST_SAMPLES // 2:
            changes.append(median(entry.samples[half:]) / median(entry.samples[:half]) - 1)
    return median(changes) if changes else None
