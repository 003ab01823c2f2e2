"""How well predictions rank what was measured: rank correlation, and how good the best of the best predicted is.

Pure: numbers in, numbers out. Shapes are split into two sets by a rule that knows nothing of them but their names, so
that constants of the model that were chosen by one set can be judged by the other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

TOPS = (8, 16, 32)
KEPT = 32  # candidates that a search with `keep` measures
ENOUGH = 0.97  # of the best speed: what the best of those that are kept should reach
TEST_SHARE = 1 / 3
SPLIT = "test: names whose SHA-256 begins, as a number of 8 bytes, in the lowest third of its range; fit: all others"


@dataclass(frozen=True)
class Pairs:
    """A problem's right candidates: predicted and measured microseconds, in one order."""

    name: str
    predicted: tuple[float, ...]
    measured: tuple[float, ...]


def set_of(name: str) -> Literal["fit", "test"]:
    """Which set a shape belongs to: see SPLIT. Adding a shape moves no other."""
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return "test" if first < TEST_SHARE * 2**64 else "fit"


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for index in order[start:end]:
            found[index] = (start + 1 + end) / 2
        start = end
    return found


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation: Pearson's of the ranks. None where either has no two different values."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values beside {len(second)}")
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    ours, theirs = ranks(first), ranks(second)
    middle = (len(first) + 1) / 2
    shared = sum((a - middle) * (b - middle) for a, b in zip(ours, theirs, strict=True))
    spreads = (sum((rank - middle) ** 2 for rank in found) for found in (ours, theirs))
    return shared / math.sqrt(math.prod(spreads))


def kept_share(pairs: Pairs, count: int) -> float:
    """The share of the best speed that the best of the `count` best predicted reaches: 1 where it is among them. Of
    equal predictions those count first that are slower: what is promised must not depend on luck."""
    by_prediction = sorted(zip(pairs.predicted, pairs.measured, strict=True), key=lambda pair: (pair[0], -pair[1]))
    return min(pairs.measured) / min(measured for _, measured in by_prediction[:count])


def pairs_of(problem: Mapping[str, Any]) -> Pairs | None:
    """Of a problem in a results.json; None where fewer than two candidates have both."""
    found = [
        (float(one["prediction"]["us"]), float(one["measurement"]["median_us"]))
        for one in problem["candidates"]
        if one["verdict"] == "ok" and one["prediction"] and one["measurement"]
    ]
    if len(found) < 2:
        return None
    return Pairs(problem["name"], tuple(us for us, _ in found), tuple(us for _, us in found))


def quality(problems: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of both sets, and each problem's own."""
    found = [pairs for problem in problems if (pairs := pairs_of(problem)) is not None]
    sets = {name: [pairs for pairs in found if set_of(pairs.name) == name] for name in ("fit", "test")}
    return {
        "split": SPLIT,
        **{name: figures(members) for name, members in sets.items()},
        "keeps_enough": _keeps_enough(sets["test"]),
        "problems": {
            pairs.name: {
                "set": set_of(pairs.name),
                "candidates": len(pairs.measured),
                "spearman": _rounded(spearman(pairs.predicted, pairs.measured)),
                **{f"top_{count}": _rounded(kept_share(pairs, count)) for count in TOPS},
            }
            for pairs in found
        },
    }


def figures(found: Sequence[Pairs]) -> dict[str, Any]:
    """Mean and worst over problems: of the correlation, and of the share of the best speed for each of TOPS."""
    correlations = [one for pairs in found if (one := spearman(pairs.predicted, pairs.measured)) is not None]
    return {
        "problems": len(found),
        "spearman": _mean_and_worst(correlations),
        **{f"top_{count}": _mean_and_worst([kept_share(pairs, count) for pairs in found]) for count in TOPS},
    }


def _keeps_enough(test: Sequence[Pairs]) -> dict[str, Any]:
    """Whether measuring the KEPT best predicted alone would keep ENOUGH of the best speed on the test shapes."""
    shares = [kept_share(pairs, KEPT) for pairs in test]
    return {
        "keep": KEPT,
        "at_least": ENOUGH,
        "on_average": sum(shares) / len(shares) >= ENOUGH if shares else None,
        "on_every_shape": min(shares) >= ENOUGH if shares else None,
        "shapes_below": sorted(pairs.name for pairs, share in zip(test, shares, strict=True) if share < ENOUGH),
    }


def _mean_and_worst(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"mean": None, "worst": None}
    return {"mean": _rounded(sum(values) / len(values)), "worst": _rounded(min(values))}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
