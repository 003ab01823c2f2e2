"""Results of a stand-alone run as a person reads them: one line for each problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_HEADINGS = ("problem", "candidates", "right", "best µs", "vendor µs", "vendor/best", "margin")


def best_of(problem: Mapping[str, Any]) -> tuple[str, float] | None:
    """The fastest candidate with its microseconds: of the comparison where there was one, else by its own median."""
    comparison = problem["comparison"]
    if comparison and comparison["contenders"]:
        first = comparison["contenders"][0]
        return first["candidate"], float(first["median_us"])
    measured = medians_of(problem)
    best = min(measured, key=lambda name: (measured[name], name), default=None)
    return None if best is None else (best, measured[best])


def medians_of(problem: Mapping[str, Any]) -> dict[str, float]:
    """Of the right candidates, each measured alone."""
    return {
        candidate["candidate"]: float(candidate["measurement"]["median_us"])
        for candidate in problem["candidates"]
        if candidate["verdict"] == "ok" and candidate["measurement"]
    }


def vendor_us(problem: Mapping[str, Any]) -> float | None:
    """The vendor's library on the same problem, from the comparison."""
    vendor = (problem["comparison"] or {}).get("vendor")
    return float(vendor["median_us"]) if vendor else None


def vendor_off(problem: Mapping[str, Any]) -> str | None:
    """What is wrong with the vendor's result, if anything is: above the bound of ours, or no number (null)."""
    vendor = (problem["comparison"] or {}).get("vendor") or {}
    error, bound = vendor.get("max_error"), vendor.get("error_bound")
    if bound is None or (error is not None and error <= bound):
        return None
    return "is not a number" if error is None else f"is off by {error:.2g}, allowed {bound:.2g}"


def table(results: Mapping[str, Any]) -> str:
    """All problems, and below them what was found wrong or is left."""
    rows = [_HEADINGS, *(_row(problem) for problem in results["problems"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = [""]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines += ["", *_words(results["problems"])]
    return "\n".join(lines) + "\n"


def _row(problem: Mapping[str, Any]) -> tuple[str, ...]:
    best, vendor, off = best_of(problem), vendor_us(problem), vendor_off(problem)
    right = sum(candidate["verdict"] == "ok" for candidate in problem["candidates"])
    return (
        problem["name"],
        str(len(problem["candidates"])),
        str(right),
        f"{best[1]:.2f}" if best else "-",
        f"{vendor:.2f}" if vendor else "-",
        "off" if off else f"{vendor / best[1]:.3f}" if vendor and best else "-",
        _margin(problem),
    )


def _margin(problem: Mapping[str, Any]) -> str:
    """How much longer the second one takes; `tie` where that is nothing."""
    contenders = (problem["comparison"] or {}).get("contenders") or []
    if len(contenders) < 2:
        return "-"
    return "tie" if contenders[1]["tie"] else f"{100 * (contenders[1]['ratio'] - 1):.1f} %"


def _words(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """Everything that was not right, counted by problem, with the messages of one of each kind."""
    lines = []
    for problem in problems:
        counts = Counter(candidate["verdict"] for candidate in problem["candidates"] if candidate["verdict"] != "ok")
        example = {
            candidate["verdict"]: candidate["message"] for candidate in problem["candidates"] if candidate["message"]
        }
        for verdict, count in sorted(counts.items()):
            told = f": {example[verdict]}" if verdict in example else ""
            lines.append(f"{problem['name']}: {count} {verdict}{told}"[:300])
        if off := vendor_off(problem):
            lines.append(f"{problem['name']}: the vendor's result {off}: no ratio (its kernels may round in between)")
    return lines
