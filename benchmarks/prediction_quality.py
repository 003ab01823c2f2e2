"""How well predictions rank what was measured: rank correlation, and how good the best of the best predicted is.

Pure: numbers in, numbers out. Shapes are split into two sets by their names alone, so that constants of the
model that were fitted on one set are tested on the other.
"""

import hashlib
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

TOPS = (8, 16, 32)
KEPT = 32  # candidates that a search with `keep` measures
ENOUGH = 0.97  # of the best speed: what the best of those that are kept should reach
TEST_SHARE = 1 / 3
SPLIT = "test: names whose SHA-256 begins, as a number of 8 bytes, in the lowest third of its range; fit: all others"


@dataclass(frozen=True)
class Pairs:
    """A problem's correct candidates: predicted and measured microseconds, in one order."""

    name: str
    predicted: tuple[float, ...]
    measured: tuple[float, ...]


def set_of(name: str) -> Literal["fit", "test"]:
    """Which set a shape belongs to: see SPLIT. Adding a shape moves no other."""
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return "test" if first < TEST_SHARE * 2**64 else "fit"


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    averaged = np.cumsum(counts) - (counts - 1) / 2
    return [float(rank) for rank in averaged[place]]


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation: Pearson's of the ranks. None where either has no two different values."""
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values beside {len(second)}")
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return statistics.correlation(ranks(first), ranks(second))


def kept_share(pairs: Pairs, count: int) -> float:
    """Of the best speed, what the best of the `count` best predicted reaches; of equal predictions the slower first."""
    by_prediction = sorted(zip(pairs.predicted, pairs.measured, strict=True), key=lambda pair: (pair[0], -pair[1]))
    return min(pairs.measured) / min(measured for _, measured in by_prediction[:count])


def pairs_of(problem: Mapping[str, Any]) -> Pairs | None:
    """Of a problem in a results.json; None where fewer than two candidates have both."""
    both = [
        (float(candidate["prediction"]["us"]), float(candidate["measurement"]["median_us"]))
        for candidate in problem["candidates"]
        if candidate["verdict"] == "ok" and candidate["prediction"] and candidate["measurement"]
    ]
    if len(both) < 2:
        return None
    return Pairs(problem["name"], tuple(us for us, _ in both), tuple(us for _, us in both))


def quality(problems: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of both sets, and each problem's own."""
    all_pairs = [pairs for problem in problems if (pairs := pairs_of(problem)) is not None]
    sets = {name: [pairs for pairs in all_pairs if set_of(pairs.name) == name] for name in ("fit", "test")}
    return {
        "split": SPLIT,
        **{name: figures(members) for name, members in sets.items()},
        "keeps_enough": _keeps_enough(sets["test"]),
        "problems": {
            pairs.name: {
                "set": set_of(pairs.name),
                "candidates": len(pairs.measured),
                "spearman": rounded(spearman(pairs.predicted, pairs.measured)),
                **{f"top_{count}": rounded(kept_share(pairs, count)) for count in TOPS},
            }
            for pairs in all_pairs
        },
    }


def figures(problems: Sequence[Pairs]) -> dict[str, Any]:
    """Mean and worst over problems: of the correlation, and of the share of the best speed for each of TOPS."""
    correlations = [spearman(pairs.predicted, pairs.measured) for pairs in problems]
    return {
        "problems": len(problems),
        "spearman": _mean_and_worst([value for value in correlations if value is not None]),
        **{f"top_{count}": _mean_and_worst([kept_share(pairs, count) for pairs in problems]) for count in TOPS},
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
    return {"mean": rounded(sum(values) / len(values)), "worst": rounded(min(values))}


def rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
